-- Queue control, queue settings, and their rollout to the tasks that wait.

-- Runs have ended: of these queues, those that were stopping and have none left are paused. How many events that were.
CREATE OR REPLACE FUNCTION taskyard.pause_drained_queues(p_first integer, p_now timestamptz, p_queues text[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_names text[]; v_details text[];
BEGIN
    IF NOT EXISTS (SELECT FROM taskyard.queue AS q WHERE q.state = 'stopping') THEN
        RETURN 0;
    END IF;
    WITH over_ AS (
        UPDATE taskyard.queue AS q SET state = 'paused',
            control = jsonb_set(q.control::jsonb, '{state}', '"paused"')::text
        WHERE q.state = 'stopping' AND q.name = ANY (p_queues)
            AND (SELECT t.token FROM taskyard.task AS t WHERE t.queue = q.name AND t.state = 'running'
                ORDER BY t.token DESC LIMIT 1) IS NULL
        RETURNING q.name, json_strip_nulls(json_build_object('actor', nullif(q.control::json #>> '{state_set,actor}', '')))::text AS detail
    )
    SELECT array_agg(name ORDER BY name), array_agg(nullif(detail, '{}') ORDER BY name) INTO v_names, v_details FROM over_;
    IF v_names IS NULL THEN
        RETURN 0;
    END IF;
    RETURN taskyard.write_events(p_first, array_fill('queue_paused'::text, ARRAY[cardinality(v_names)]),
        array_fill(''::text, ARRAY[cardinality(v_names)]), v_names, array_fill(''::text, ARRAY[cardinality(v_names)]),
        ARRAY[p_now], v_details);
END $$;

-- Keep what somebody says of a queue, if nobody else has said anything since `p_old` was read. A stop of a queue of which
-- nothing runs is a pause.
CREATE OR REPLACE PROCEDURE taskyard.control_queue_1(
    p_name text, p_settings text, p_old text, p_new text, p_kind text, p_detail text,
    p_now timestamptz, p_audit json, INOUT done boolean, INOUT said text, INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_state text := p_new::json ->> 'state';
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM taskyard.lock_queues(ARRAY[p_name]);
    INSERT INTO taskyard.queue (name, per_key, auto_recover, settings) VALUES (p_name, 1, 1, p_settings)
    ON CONFLICT DO NOTHING;
    said := p_new; told := 0;
    IF v_state = 'stopping' AND NOT EXISTS (SELECT FROM taskyard.task WHERE queue = p_name AND state = 'running') THEN
        v_state := 'paused'; p_kind := CASE p_kind WHEN 'queue_stopping' THEN 'queue_paused' ELSE p_kind END;
        said := jsonb_set(p_new::jsonb, '{state}', '"paused"')::text;
        IF p_old::json ->> 'state' = 'paused' AND p_old::json #>> '{state_set,reason}' IS NOT DISTINCT FROM said::json #>> '{state_set,reason}' THEN
            said := p_old; p_kind := NULL; -- who said it first is remembered
        END IF;
    END IF;
    UPDATE taskyard.queue SET control = said, state = v_state,
        concurrency = coalesce((said::json ->> 'concurrency')::integer, (settings::json ->> 'concurrency')::integer)
    WHERE name = p_name AND control IS NOT DISTINCT FROM p_old;
    done := FOUND;
    IF done AND p_kind IS NOT NULL THEN
        PERFORM taskyard.note_audit_1(p_audit, 1, 1);
        told := taskyard.write_events(
            0, ARRAY[p_kind], ARRAY[''], ARRAY[p_name], ARRAY[''], ARRAY[p_now], ARRAY[p_detail]);
    END IF;
    COMMIT;
END $$;

-- Create a queue or change its rules. What people have said of it stays. As much of it as concerns what waits there already
-- comes step by step, if there is `more`: see `rollout_step_1`.
CREATE OR REPLACE PROCEDURE taskyard.configure_queue_1(
    p_name text, p_concurrency integer, p_per_key integer, p_auto_recover integer, p_settings text, p_ordering text,
    p_starve_after integer, p_starve_wait interval, INOUT changed boolean, INOUT more boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_old taskyard.queue;
BEGIN
    PERFORM taskyard.lock_queues(ARRAY[p_name]);
    SELECT * INTO v_old FROM taskyard.queue WHERE name = p_name;
    INSERT INTO taskyard.queue AS q (name, concurrency, per_key, auto_recover, settings, starve_after, starve_wait)
    VALUES (p_name, p_concurrency, p_per_key, p_auto_recover, p_settings, p_starve_after, p_starve_wait)
    ON CONFLICT (name) DO UPDATE SET per_key = excluded.per_key, auto_recover = excluded.auto_recover,
        settings = excluded.settings, starve_after = excluded.starve_after, starve_wait = excluded.starve_wait,
        concurrency = coalesce((q.control::json ->> 'concurrency')::integer, excluded.concurrency)
    WHERE q.settings <> excluded.settings;
    changed := FOUND;
    UPDATE taskyard.queue SET rollout_key = '' WHERE name = p_name AND p_per_key <> coalesce(v_old.per_key, 1);
    IF p_ordering = 'priority' THEN
        -- What has a line keeps it, and nobody asks for it.
        UPDATE taskyard.queue SET target_ordering = NULL, rollout_task_id = NULL, rollout_key = '' WHERE name = p_name AND target_ordering IS NOT NULL;
        PERFORM taskyard.reorder(p_name, p_ordering);
    ELSIF v_old.target_ordering IS DISTINCT FROM p_ordering THEN
        UPDATE taskyard.queue SET target_ordering = p_ordering, rollout_task_id = 0 WHERE name = p_name;
    END IF;
    SELECT rollout_task_id IS NOT NULL OR rollout_key IS NOT NULL INTO more FROM taskyard.queue WHERE name = p_name;
    COMMIT;
END $$;

-- From here on a queue goes by this order.
CREATE OR REPLACE FUNCTION taskyard.reorder(p_name text, p_ordering text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE taskyard.queue SET ordering = p_ordering WHERE name = p_name AND ordering <> p_ordering;
    IF FOUND THEN
        -- Those that stand in a line leave their lanes in another order.
        DELETE FROM taskyard.watermark WHERE queue = p_name;
        INSERT INTO taskyard.watermark SELECT queue, lane, nextval('taskyard.seq'), {{lowest}}, {{lowest}}, {{lowest}}
        FROM taskyard.lane WHERE queue = p_name;
    END IF;
END $$;

-- A step on the way of a queue's rules to the tasks that wait there: of a million it would take a minute, in which nothing of
-- the queue could start. First all tasks are put into their lines, for an order that goes by them; then it is looked anew, key
-- by key, who may start; then that order holds, and no line has a first that waits behind another of its key. Whoever dies
-- in between leaves behind how far it had come. Of several who go on one is at the queue's lock, so that others get it in turn.
CREATE OR REPLACE PROCEDURE taskyard.rollout_step_1(p_name text, INOUT more boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queue taskyard.queue;
    v_last bigint;
    v_keys text[]; v_next text;
BEGIN
    PERFORM pg_advisory_xact_lock({{lock_rollout}}, hashtext(p_name));
    PERFORM taskyard.lock_queues(ARRAY[p_name]);
    SELECT * INTO v_queue FROM taskyard.queue WHERE name = p_name;
    IF v_queue.rollout_task_id IS NOT NULL THEN
        -- What comes to the queue meanwhile gets its line by itself, be its id old or new.
        SELECT id INTO v_last FROM (
            SELECT id, row_number() OVER (ORDER BY id) AS nth,
                count(*) FILTER (WHERE queue = p_name) OVER (ORDER BY id) AS ours
            FROM (SELECT id, queue FROM taskyard.task WHERE id > v_queue.rollout_task_id ORDER BY id LIMIT {{looked_at_most}}) AS t
        ) AS n WHERE ours = {{ruled_at_most}} OR nth = {{looked_at_most}} ORDER BY id LIMIT 1;
        UPDATE taskyard.task SET fifo_bucket = taskyard.fifo_bucket_of(v_queue.target_ordering, bucket)
        WHERE id > v_queue.rollout_task_id AND id <= coalesce(v_last, {{highest}}) AND queue = p_name
            AND fifo_bucket IS DISTINCT FROM taskyard.fifo_bucket_of(v_queue.target_ordering, bucket) AND NOT (state = 'paused' AND is_parked);
        UPDATE taskyard.queue SET rollout_task_id = v_last, rollout_key = '' WHERE name = p_name;
    ELSIF v_queue.rollout_key IS NOT NULL THEN
        -- From key to key, until those who wait with them are enough; of one key there may be very many.
        WITH RECURSIVE named (key, tasks) AS (
            SELECT v_queue.rollout_key, 0::bigint
            UNION ALL
            SELECT k.key, n.tasks + (SELECT count(*) FROM (
                SELECT FROM taskyard.task AS t WHERE t.queue = p_name AND t.key = k.key AND t.key IS NOT NULL
                    AND t.state = 'queued' LIMIT {{ruled_at_most}}) AS t)
            FROM named AS n CROSS JOIN LATERAL (
                SELECT t.key FROM taskyard.task AS t WHERE t.queue = p_name AND t.key IS NOT NULL AND t.state = 'queued'
                    AND t.key >= CASE WHEN n.tasks = 0 THEN n.key ELSE n.key || chr(1) END ORDER BY t.key LIMIT 1
            ) AS k
            WHERE n.tasks < {{ruled_at_most}}
        )
        SELECT array_agg(key ORDER BY tasks) FILTER (WHERE tasks > 0),
            CASE WHEN max(tasks) >= {{ruled_at_most}} THEN max(key) || chr(1) END  -- there is no text between the two
        INTO v_keys, v_next FROM named;
        IF v_keys IS NOT NULL THEN
            PERFORM taskyard.update_parked(array_fill(p_name, ARRAY[cardinality(v_keys)]), v_keys);
        END IF;
        UPDATE taskyard.queue SET rollout_key = v_next WHERE name = p_name;
        IF v_next IS NULL AND v_queue.target_ordering IS NOT NULL THEN
            PERFORM taskyard.reorder(p_name, v_queue.target_ordering);
        END IF;
    END IF;
    SELECT rollout_task_id IS NOT NULL OR rollout_key IS NOT NULL INTO more FROM taskyard.queue WHERE name = p_name;
    COMMIT;
END $$;
