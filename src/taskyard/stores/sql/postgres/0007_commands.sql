-- What is asked now and then: commands about tasks and queues, and the rescue of what dead nodes ran.

-- What a decision about a task rests on. While it runs, others write down what its run says of itself: that makes it no
-- other task. In all other states whatever is written does.
CREATE FUNCTION taskyard.version_1(p_token bigint, p_cancel_asked_at timestamptz, p_written xid) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_token IS NULL THEN p_written::text
        ELSE 'runs ' || p_token || CASE WHEN p_cancel_asked_at IS NULL THEN '' ELSE ' asked' END END
$$;

-- Of the tasks that are to be sent again, those for which it no longer holds what was decided: nobody else stands for
-- their work, and they wait for as many as was thought, of which none has ended so that they would wait in vain.
CREATE FUNCTION taskyard.not_again_1(p_changes json, v_again bigint[], p_now timestamptz) RETURNS bigint[]
LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(v_again) = 0 THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY(
        SELECT j.id FROM json_to_recordset(p_changes) AS j(id bigint, how text, waits integer)
        JOIN taskyard.ended AS e ON e.id = ANY (ARRAY[j.id])
        LEFT JOIN taskyard.tie AS t ON t.id = ANY (ARRAY[j.id])
        CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE a.id = ANY (v_again)
                    OR (SELECT p.id FROM taskyard.task AS p WHERE p.id = d.parent) IS NOT NULL) AS waits,
                bool_or(a.state <> 'completed' AND a.id <> ALL (v_again)) AS is_lost
            FROM taskyard.dependency AS d LEFT JOIN taskyard.ended AS a ON a.id = ANY (ARRAY[d.parent])
            WHERE d.child = ANY (ARRAY[j.id])
        ) AS w
        LEFT JOIN LATERAL taskyard.holder_1(t.dedupe_key, p_now) AS h ON t.dedupe_key IS NOT NULL
        WHERE j.id = ANY (v_again) AND (
            h.uuid IS DISTINCT FROM e.uuid AND h.uuid IS NOT NULL
            OR w.waits <> coalesce(j.waits, 0)
            OR w.is_lost AND t.on_failure IS DISTINCT FROM 'ignore'));
END $$;

-- The tasks among the changes that are no longer the version that was looked at, and those whose change rests on one of
-- them: that are put beside it, or sent again with it.
CREATE FUNCTION taskyard.stale_1(p_changes json, p_now timestamptz) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_stale bigint[]; v_more bigint[];
BEGIN
    v_more := ARRAY(
        SELECT j.id FROM json_to_recordset(p_changes) AS j(id bigint, version text, how text, waits integer)
        WHERE j.version IS DISTINCT FROM CASE WHEN j.how = 'again'
            THEN (SELECT e.xmin::text FROM taskyard.ended AS e WHERE e.id = j.id)
            ELSE (SELECT taskyard.version_1(t.token, t.cancel_asked_at, t.xmin) FROM taskyard.task AS t WHERE t.id = j.id) END
        -- Who is held hears of the ends of others, and stays the version that it is.
        OR j.how = 'change' AND j.waits <> coalesce((SELECT x.waits FROM taskyard.tie AS x WHERE x.id = j.id), 0));
    v_stale := v_more;
    LOOP
        v_more := ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint, beside bigint)
            WHERE beside = ANY (v_stale) AND id <> ALL (v_stale))
            || taskyard.not_again_1(p_changes, ARRAY(
                SELECT id FROM json_to_recordset(p_changes) AS j(id bigint, how text)
                WHERE how = 'again' AND id <> ALL (v_stale)), p_now);
        EXIT WHEN cardinality(v_more) = 0;
        v_stale := v_stale || v_more;
    END LOOP;
    RETURN v_stale;
END $$;

-- Carry out what was decided about these tasks, as far as each is still the version that was looked at; `stale` are the
-- others, of which nothing happens. With `p_whole` nothing happens at all if there are any. `how`: 'change' keeps the task
-- here, in its state or another; 'end' ends it, 'again' sends an ended one again, 'look' only looks. A note that is null
-- stays what it is. One with `beside` is put right before or after that task. `places` says where each stands afterwards.
-- Those that wait for one that ends hear of it; who is sent again takes its slot, and waits, again.
CREATE PROCEDURE taskyard.change_1(
    p_queues text[], p_changes json, e_kinds text[], e_uuids text[], e_queues text[], e_sources text[], p_now timestamptz,
    p_whole boolean, INOUT stale text[], INOUT places json, INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_keys text[]; v_key_queues text[];
    v_ids bigint[] := ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint));
    v_again bigint[] := ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint, how text) WHERE how = 'again');
    v_stale bigint[];
    n_kinds text[]; n_uuids text[]; n_queues text[]; n_sources text[];  -- those of whom nobody has heard yet
    v_row record;
    v_done record;
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    p_queues := p_queues || taskyard.listeners_1(v_ids) || ARRAY(
        SELECT p.queue FROM taskyard.dependency AS d JOIN taskyard.task AS p ON p.id = ANY (ARRAY[d.parent])
        WHERE d.child = ANY (v_again));
    PERFORM taskyard.lock_queues_1(p_queues);
    PERFORM taskyard.lock_slots_1(ARRAY(SELECT dedupe_key FROM taskyard.tie WHERE id = ANY (v_again)));
    -- What has ended is pruned without a queue's lock.
    PERFORM FROM taskyard.ended WHERE id = ANY (v_again) ORDER BY id FOR UPDATE;
    v_stale := taskyard.stale_1(p_changes, p_now);
    stale := ARRAY(SELECT uuid FROM json_to_recordset(p_changes) AS j(id bigint, uuid text) WHERE id = ANY (v_stale));
    IF cardinality(v_stale) > 0 THEN
        IF p_whole OR cardinality(v_stale) = cardinality(v_ids) THEN
            RETURN;
        END IF;
        p_changes := (SELECT json_agg(c) FROM json_array_elements(p_changes) AS c WHERE (c ->> 'id')::bigint <> ALL (v_stale));
        v_ids := ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint));
        v_again := ARRAY(SELECT id FROM unnest(v_again) AS a(id) WHERE id <> ALL (v_stale));
        SELECT array_agg(kind ORDER BY ord), array_agg(uuid ORDER BY ord), array_agg(queue ORDER BY ord),
            array_agg(source ORDER BY ord) INTO e_kinds, e_uuids, e_queues, e_sources
        FROM unnest(e_kinds, e_uuids, e_queues, e_sources) WITH ORDINALITY AS e(kind, uuid, queue, source, ord)
        WHERE uuid <> ALL (stale);
    END IF;
    SELECT array_agg('submitted'::text), array_agg(t.uuid), array_agg(t.queue), array_agg(t.source)
    INTO n_kinds, n_uuids, n_queues, n_sources
    FROM json_to_recordset(p_changes) AS j(id bigint, how text) JOIN taskyard.task AS t ON t.id = ANY (ARRAY[j.id])
    WHERE j.how IN ('change', 'end') AND t.position = 0;
    WITH j AS MATERIALIZED (
        SELECT * FROM json_to_recordset(p_changes) AS j(
            id bigint, version text, how text, priority smallint, cancel_asked_at timestamptz, cancel_reason text,
            cancel_forced boolean, note text, was text, state text, error text, due_at timestamptz, to_head boolean,
            to_tail boolean, ord integer, slot text, aside boolean)
    ), placed AS MATERIALIZED (
        -- The last to be put at the head stands first.
        SELECT o.id, CASE WHEN to_head THEN -1 ELSE 1 END * nextval('taskyard.seq') * {{gap}} AS place
        FROM (SELECT id, to_head FROM j WHERE how = 'change' AND (to_head OR to_tail) ORDER BY ord) AS o
    ), changed AS (
        UPDATE taskyard.task AS t SET priority = j.priority, cancel_asked_at = j.cancel_asked_at,
            cancel_reason = j.cancel_reason, cancel_forced = coalesce(j.cancel_forced, t.cancel_forced),
            note = coalesce(j.note, t.note), updated_at = p_now, state = j.state,
            due_at = coalesce(j.due_at, t.due_at),
            parked = j.state = 'queued' AND t.key IS NOT NULL OR j.aside,
            -- What was submitted in somebody else's transaction has no place yet.
            position = coalesce((SELECT h.place FROM placed AS h WHERE h.id = j.id), CASE
                WHEN t.position = 0 THEN nextval('taskyard.seq') * {{gap}} ELSE t.position END),
            -- Who is held and was to wait for its time stands in no line meanwhile.
            line = CASE WHEN j.aside THEN NULL WHEN t.line IS NULL THEN taskyard.line_1((SELECT q.lines
                FROM taskyard.queue AS q WHERE q.name = t.queue), t.bucket) ELSE t.line END
        FROM j WHERE t.id = ANY (ARRAY[j.id]) AND j.how = 'change'
        RETURNING t.queue, t.key, t.state, coalesce(j.was, t.state) AS was
    ), gone AS (
        DELETE FROM taskyard.task AS t USING j WHERE t.id = ANY (ARRAY[j.id]) AND j.how = 'end'
        RETURNING j.state AS new_state, j.error AS new_error, j.note AS new_note, t.*
    ), ended AS (
        INSERT INTO taskyard.ended (
            id, position, due_at, created_at, started_at, finished_at, timeout_s, attempt, retries, crashes,
            recoveries, priority, was, state, uuid, source, queue, args, key, retry, progress, error, note, checkpoint,
            bucket, origin)
        SELECT id, position, due_at, created_at, started_at, p_now, timeout_s, attempt, retries, crashes,
            recoveries, priority, state, new_state, uuid, source, queue, args, key, retry, progress, new_error,
            coalesce(new_note, note), checkpoint, bucket, origin
        FROM gone
    ), back AS (
        DELETE FROM taskyard.ended AS e USING j WHERE e.id = ANY (ARRAY[j.id]) AND j.how = 'again'
        RETURNING j.ord, j.to_head, j.state AS new_state, j.note AS new_note, j.slot AS new_slot, e.*
    ), again AS (
        INSERT INTO taskyard.task (
            id, position, due_at, created_at, updated_at, started_at, timeout_s, attempt, priority, parked, state, uuid,
            source, queue, args, key, retry, progress, error, note, checkpoint, bucket, origin, dedupe_slot,
            line)
        SELECT id, CASE WHEN to_head THEN -1 ELSE 1 END * nextval('taskyard.seq') * {{gap}}, due_at, created_at, p_now,
            started_at, timeout_s, attempt, priority, key IS NOT NULL AND new_state = 'queued', new_state, uuid, source,
            queue, args, key, retry, progress, error, new_note, checkpoint, bucket, origin, new_slot,
            taskyard.line_1((SELECT q.lines FROM taskyard.queue AS q WHERE q.name = o.queue), bucket)
        FROM (SELECT * FROM back ORDER BY ord) AS o
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, state, -count(*) FROM gone GROUP BY queue, state
        UNION ALL SELECT queue, new_state, count(*) FROM gone GROUP BY queue, new_state
        UNION ALL SELECT queue, state, -count(*) FROM back GROUP BY queue, state
        UNION ALL SELECT queue, new_state, count(*) FROM back GROUP BY queue, new_state
        UNION ALL SELECT queue, was, -count(*) FROM changed WHERE was <> state GROUP BY queue, was
        UNION ALL SELECT queue, state, count(*) FROM changed WHERE was <> state GROUP BY queue, state
    )
    SELECT array_agg(queue), array_agg(key) INTO v_key_queues, v_keys
    FROM (SELECT queue, key FROM changed UNION SELECT queue, key FROM gone UNION SELECT queue, key FROM back) AS k
    WHERE key IS NOT NULL;
    FOR v_row IN
        SELECT j.id, j.before, t.queue, j.beside FROM json_to_recordset(p_changes)
            AS j(id bigint, beside bigint, before boolean, ord integer)
        JOIN taskyard.task AS t ON t.id = ANY (ARRAY[j.id]) WHERE j.beside IS NOT NULL ORDER BY j.ord
    LOOP
        PERFORM taskyard.place_1(v_row.id, v_row.queue, t.position, v_row.before)
        FROM taskyard.task AS t WHERE t.id = v_row.beside;
    END LOOP;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.repark_1(v_key_queues, v_keys);
    END IF;
    PERFORM taskyard.lower_1(v_ids);
    told := taskyard.tell_1(0, n_kinds, n_uuids, n_queues, n_sources, ARRAY[p_now]);
    told := told + taskyard.tell_1(told, e_kinds, e_uuids, e_queues, e_sources, ARRAY[p_now]);
    IF cardinality(v_again) > 0 THEN
        UPDATE taskyard.dependency AS d SET done = (SELECT p.id FROM taskyard.task AS p WHERE p.id = d.parent) IS NULL
        WHERE d.child = ANY (v_again);
        UPDATE taskyard.tie AS t SET waits = (SELECT count(*) FROM taskyard.dependency AS d WHERE d.child = t.id AND NOT d.done)
        WHERE t.id = ANY (v_again);
    END IF;
    IF taskyard.are_open_1('waiting') THEN
        UPDATE taskyard.tie SET waits = 0
        WHERE id = ANY (v_ids) AND waits > 0
            AND (SELECT e.id FROM taskyard.ended AS e WHERE e.id = tie.id) IS NOT NULL;
        SELECT * INTO v_done FROM taskyard.release_1(told, p_now, p_queues, v_ids);
        told := told + v_done.told;
        IF v_done.keys IS NOT NULL THEN
            PERFORM taskyard.repark_1(v_done.key_queues, v_done.keys);
        END IF;
    END IF;
    SELECT json_agg(json_build_array(t.id, t.position, t.parked)) INTO places
    FROM json_to_recordset(p_changes) AS j(id bigint) JOIN taskyard.task AS t ON t.id = ANY (ARRAY[j.id]);
    COMMIT;
END $$;

-- Put a task right before or right after the one at `p_anchor`; whoever is in the way moves a little. As
-- `taskyard.model.places` says it.
CREATE FUNCTION taskyard.place_1(p_id bigint, p_queue text, p_anchor bigint, p_before boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_base bigint; v_low bigint; v_high bigint; v_near bigint; v_room bigint; v_place bigint;
    v_size bigint := {{smallest}}; v_allowed double precision := {{crowded}};
    v_first bigint; v_last bigint; v_crowd bigint[]; v_at integer;
BEGIN
    -- Rounded down, below zero as well.
    v_base := floor((p_anchor - CASE WHEN p_before THEN 1 ELSE 0 END)::numeric / {{gap}})::bigint * {{gap}};
    IF p_before THEN
        SELECT position INTO v_near FROM taskyard.task
        WHERE queue = p_queue AND position % {{gap}} <> 0 AND position < p_anchor ORDER BY position DESC LIMIT 1;
        v_low := greatest(v_base, v_near); v_high := p_anchor;
    ELSE
        SELECT position INTO v_near FROM taskyard.task
        WHERE queue = p_queue AND position % {{gap}} <> 0 AND position > p_anchor ORDER BY position LIMIT 1;
        v_low := p_anchor; v_high := least(v_base + {{gap}}, v_near);
    END IF;
    v_room := v_high - v_low;
    IF v_room >= 2 THEN
        v_place := CASE WHEN p_before THEN v_low + greatest(1, v_room / {{share}})
            ELSE v_high - greatest(1, v_room / {{share}}) END;
        UPDATE taskyard.task SET position = v_place WHERE id = p_id;
        RETURN;
    END IF;
    LOOP
        v_first := v_base + least((v_low - v_base) / v_size * v_size, {{gap}} - v_size);
        v_last := least(v_first + v_size, v_base + {{gap}}) - 1;
        v_first := greatest(v_first, v_base + 1);
        v_crowd := ARRAY(SELECT id FROM taskyard.task WHERE queue = p_queue AND position % {{gap}} <> 0
            AND position BETWEEN v_first AND v_last ORDER BY position);
        EXIT WHEN cardinality(v_crowd) + 1 <= (v_last - v_first + 1) * v_allowed
            OR v_size = {{gap}} AND cardinality(v_crowd) < {{gap}} - 1;
        IF v_size = {{gap}} THEN
            RAISE EXCEPTION 'a million tasks were put between the same two already'
                USING ERRCODE = 'program_limit_exceeded';
        END IF;
        v_size := v_size * 2; v_allowed := v_allowed / {{thinning}};
    END LOOP;
    SELECT count(*) INTO v_at FROM taskyard.task
    WHERE queue = p_queue AND position % {{gap}} <> 0 AND position BETWEEN v_first AND v_low;
    v_crowd := v_crowd[:v_at] || 0::bigint || v_crowd[v_at + 1:];
    UPDATE taskyard.task AS t SET position = v_first + (2 * (c.ord - 1) + 1) * (v_last - v_first + 1)
        / (2 * cardinality(v_crowd))
    FROM unnest(v_crowd) WITH ORDINALITY AS c(id, ord) WHERE t.id = ANY (ARRAY[c.id]);
    -- Last, since it may have stood among them.
    UPDATE taskyard.task SET position = v_first + (2 * v_at + 1) * (v_last - v_first + 1) / (2 * cardinality(v_crowd))
    WHERE id = p_id;
    PERFORM taskyard.lower_1(v_crowd);  -- who stood above a mark may stand below it now
END $$;

-- Keep what somebody says of a queue, if nobody else has said anything since `p_old` was read. A stop of a queue of which
-- nothing runs is a pause.
CREATE PROCEDURE taskyard.control_1(
    p_name text, p_settings text, p_old text, p_new text, p_kind text, p_now timestamptz,
    INOUT done boolean, INOUT said text, INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_state text := p_new::json ->> 'state';
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM taskyard.lock_queues_1(ARRAY[p_name]);
    INSERT INTO taskyard.queue (name, per_key, auto_recover, settings) VALUES (p_name, 1, 1, p_settings)
    ON CONFLICT DO NOTHING;
    said := p_new; told := 0;
    IF v_state = 'stopping' AND NOT EXISTS (SELECT FROM taskyard.task WHERE queue = p_name AND state = 'running') THEN
        v_state := 'paused'; p_kind := CASE p_kind WHEN 'queue_stopping' THEN 'queue_paused' ELSE p_kind END;
        said := jsonb_set(p_new::jsonb, '{state}', '"paused"')::text;
        IF p_old::json ->> 'state' = 'paused' AND p_old::json #>> '{said,why}' = said::json #>> '{said,why}' THEN
            said := p_old; p_kind := NULL; -- who said it first is remembered
        END IF;
    END IF;
    UPDATE taskyard.queue SET control = said, state = v_state,
        concurrency = coalesce((said::json ->> 'concurrency')::integer, (settings::json ->> 'concurrency')::integer)
    WHERE name = p_name AND control IS NOT DISTINCT FROM p_old;
    done := FOUND;
    IF done AND p_kind IS NOT NULL THEN
        told := taskyard.tell_1(0, ARRAY[p_kind], ARRAY[''], ARRAY[p_name], ARRAY[''], ARRAY[p_now]);
    END IF;
    COMMIT;
END $$;

-- Create a queue or change its rules. What people have said of it stays. As much of it as concerns what waits there already
-- comes step by step, if there is `more`: see `rule_1`.
CREATE PROCEDURE taskyard.queue_1(
    p_name text, p_concurrency integer, p_per_key integer, p_auto_recover integer, p_settings text, p_ordering text,
    p_starve_after integer, p_starve_wait interval, INOUT changed boolean, INOUT more boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_old taskyard.queue;
BEGIN
    PERFORM taskyard.lock_queues_1(ARRAY[p_name]);
    SELECT * INTO v_old FROM taskyard.queue WHERE name = p_name;
    INSERT INTO taskyard.queue AS q (name, concurrency, per_key, auto_recover, settings, starve_after, starve_wait)
    VALUES (p_name, p_concurrency, p_per_key, p_auto_recover, p_settings, p_starve_after, p_starve_wait)
    ON CONFLICT (name) DO UPDATE SET per_key = excluded.per_key, auto_recover = excluded.auto_recover,
        settings = excluded.settings, starve_after = excluded.starve_after, starve_wait = excluded.starve_wait,
        concurrency = coalesce((q.control::json ->> 'concurrency')::integer, excluded.concurrency)
    WHERE q.settings <> excluded.settings;
    changed := FOUND;
    UPDATE taskyard.queue SET reparked_to = '' WHERE name = p_name AND p_per_key <> coalesce(v_old.per_key, 1);
    IF p_ordering = 'priority' THEN
        -- What has a line keeps it, and nobody asks for it.
        UPDATE taskyard.queue SET lines = NULL, lined_to = NULL, reparked_to = '' WHERE name = p_name AND lines IS NOT NULL;
        PERFORM taskyard.reorder_1(p_name, p_ordering);
    ELSIF v_old.lines IS DISTINCT FROM p_ordering THEN
        UPDATE taskyard.queue SET lines = p_ordering, lined_to = 0 WHERE name = p_name;
    END IF;
    SELECT lined_to IS NOT NULL OR reparked_to IS NOT NULL INTO more FROM taskyard.queue WHERE name = p_name;
    COMMIT;
END $$;

-- From here on a queue goes by this order.
CREATE FUNCTION taskyard.reorder_1(p_name text, p_ordering text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE taskyard.queue SET ordering = p_ordering WHERE name = p_name AND ordering <> p_ordering;
    IF FOUND THEN
        -- Those that stand in a line leave their lanes in another order.
        DELETE FROM taskyard.mark WHERE queue = p_name;
        INSERT INTO taskyard.mark SELECT queue, source, nextval('taskyard.seq'), {{lowest}}, {{lowest}}, {{lowest}}
        FROM taskyard.lane WHERE queue = p_name;
    END IF;
END $$;

-- A step on the way of a queue's rules to the tasks that wait there: of a million it would take a minute, in which nothing of
-- the queue could start. First all tasks are put into their lines, for an order that goes by them; then it is looked anew, key
-- by key, who may start; then that order holds, and no line has a first that waits behind another of its key. Whoever dies
-- in between leaves behind how far it had come. Of several who go on one is at the queue's lock, so that others get it in turn.
CREATE PROCEDURE taskyard.rule_1(p_name text, INOUT more boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queue taskyard.queue;
    v_last bigint;
    v_keys text[]; v_next text;
BEGIN
    PERFORM pg_advisory_xact_lock({{lock_ruling}}, hashtext(p_name));
    PERFORM taskyard.lock_queues_1(ARRAY[p_name]);
    SELECT * INTO v_queue FROM taskyard.queue WHERE name = p_name;
    IF v_queue.lined_to IS NOT NULL THEN
        -- What comes to the queue meanwhile gets its line by itself, be its id old or new.
        SELECT id INTO v_last FROM (
            SELECT id, row_number() OVER (ORDER BY id) AS nth,
                count(*) FILTER (WHERE queue = p_name) OVER (ORDER BY id) AS ours
            FROM (SELECT id, queue FROM taskyard.task WHERE id > v_queue.lined_to ORDER BY id LIMIT {{looked_at_most}}) AS t
        ) AS n WHERE ours = {{ruled_at_most}} OR nth = {{looked_at_most}} ORDER BY id LIMIT 1;
        UPDATE taskyard.task SET line = taskyard.line_1(v_queue.lines, bucket)
        WHERE id > v_queue.lined_to AND id <= coalesce(v_last, {{highest}}) AND queue = p_name
            AND line IS DISTINCT FROM taskyard.line_1(v_queue.lines, bucket) AND NOT (state = 'paused' AND parked);
        UPDATE taskyard.queue SET lined_to = v_last, reparked_to = '' WHERE name = p_name;
    ELSIF v_queue.reparked_to IS NOT NULL THEN
        -- From key to key, until those who wait with them are enough; of one key there may be very many.
        WITH RECURSIVE named (key, tasks) AS (
            SELECT v_queue.reparked_to, 0::bigint
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
            PERFORM taskyard.repark_1(array_fill(p_name, ARRAY[cardinality(v_keys)]), v_keys);
        END IF;
        UPDATE taskyard.queue SET reparked_to = v_next WHERE name = p_name;
        IF v_next IS NULL AND v_queue.lines IS NOT NULL THEN
            PERFORM taskyard.reorder_1(p_name, v_queue.lines);
        END IF;
    END IF;
    SELECT lined_to IS NOT NULL OR reparked_to IS NOT NULL INTO more FROM taskyard.queue WHERE name = p_name;
    COMMIT;
END $$;

-- Take back what a dead node runs, and forget the node, unless it has beaten since `p_beats` was seen. Those that wait for
-- one that ends by it hear of it.
CREATE PROCEDURE taskyard.rescue_1(
    p_node text, p_beats bigint, p_now timestamptz, p_why text, p_failed text, p_canceled text, p_no_reason text,
    INOUT uuids text[], INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queues text[]; v_sources text[]; v_states text[]; v_ids bigint[]; v_key_queues text[]; v_keys text[];
    v_locked text[];
    v_done record;
BEGIN
    told := 0;
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM pg_advisory_xact_lock({{lock_node}}, hashtext(p_node));
    IF p_beats IS NOT NULL AND NOT EXISTS (SELECT FROM taskyard.node WHERE incarnation = p_node AND beats = p_beats) THEN
        RETURN;
    END IF;
    -- Looked for once: it is all that runs, on whatever node, and all that ran and cannot be vacuumed. The node gets no more.
    SELECT array_agg(id), array_agg(queue) INTO v_ids, v_locked FROM taskyard.task WHERE state = 'running' AND node = p_node;
    v_locked := v_locked || taskyard.listeners_1(v_ids);
    PERFORM taskyard.lock_queues_1(v_locked);
    -- Not sooner: events are told by the number of their transaction, which it gets when it first writes.
    DELETE FROM taskyard.node WHERE incarnation = p_node AND (p_beats IS NULL OR beats = p_beats);
    IF NOT FOUND AND p_beats IS NOT NULL THEN
        RETURN;  -- it has beaten while we waited
    END IF;
    WITH m AS MATERIALIZED (
        SELECT t.id, t.queue, r.reason, CASE WHEN t.cancel_asked_at IS NOT NULL THEN 'canceled'
            WHEN t.recoveries < coalesce(q.auto_recover, 1) THEN 'queued' ELSE 'failed' END AS state,
            row_number() OVER (ORDER BY t.position DESC) AS ord
        FROM taskyard.task AS t LEFT JOIN taskyard.queue AS q ON q.name = t.queue
        CROSS JOIN LATERAL (SELECT to_json(coalesce(nullif(t.cancel_reason, ''), p_no_reason))::text AS reason) AS r
        WHERE t.id = ANY (v_ids) AND t.node = p_node
    ), heads AS MATERIALIZED (
        -- The last to be put at the head stands first.
        SELECT o.id, -nextval('taskyard.seq') * {{gap}} AS place
        FROM (SELECT id FROM m WHERE state = 'queued' ORDER BY ord) AS o
    ), ran AS (
        INSERT INTO taskyard.run (task, token, started_at, ended_at, attempt, node, state)
        SELECT t.id, t.token, t.started_at, p_now, t.attempt, t.node, 'interrupted'
        FROM m JOIN taskyard.task AS t ON t.id = ANY (ARRAY[m.id])
    ), stays AS (
        UPDATE taskyard.task AS t SET state = 'queued', updated_at = p_now, note = p_why, token = NULL, node = NULL,
            cancel_forced = false,
            recoveries = t.recoveries + 1, position = heads.place, parked = t.key IS NOT NULL
        FROM heads WHERE t.id = ANY (ARRAY[heads.id])
        RETURNING t.id, t.uuid, t.queue, t.source, t.key
    ), gone AS (
        DELETE FROM taskyard.task AS t USING m WHERE t.id = ANY (ARRAY[m.id]) AND m.state <> 'queued'
        RETURNING m.state AS new_state, m.reason, t.*
    ), kept AS (
        INSERT INTO taskyard.ended (
            id, position, due_at, created_at, started_at, finished_at, timeout_s, attempt, retries, crashes,
            recoveries, priority, was, state, uuid, source, queue, args, key, retry, progress, error, note, checkpoint,
            bucket, origin)
        SELECT id, position, due_at, created_at, started_at, p_now, timeout_s, attempt, retries, crashes, recoveries,
            priority, 'interrupted', new_state, uuid, source, queue, args, key, retry, progress,
            CASE WHEN new_state = 'failed' THEN p_failed
                ELSE replace(p_canceled, '{{reason}}', substr(reason, 2, length(reason) - 2)) END,
            p_why, checkpoint, bucket, origin
        FROM gone
    ), all_ AS (
        SELECT id, uuid, queue, source, key, 'queued' AS state FROM stays
        UNION ALL SELECT id, uuid, queue, source, key, new_state FROM gone
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, 'running', -count(*) FROM all_ GROUP BY queue
        UNION ALL SELECT queue, state, count(*) FROM all_ GROUP BY queue, state
    )
    SELECT array_agg(a.id), array_agg(a.uuid), array_agg(a.queue), array_agg(a.source), array_agg(a.state),
        array_agg(a.queue) FILTER (WHERE key IS NOT NULL), array_agg(a.key) FILTER (WHERE key IS NOT NULL)
    INTO v_ids, uuids, v_queues, v_sources, v_states, v_key_queues, v_keys
    FROM (SELECT all_.* FROM all_ JOIN m ON m.id = all_.id ORDER BY m.ord) AS a;
    IF uuids IS NULL THEN
        COMMIT;
        RETURN;
    END IF;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.repark_1(v_key_queues, v_keys);
    END IF;
    PERFORM taskyard.lower_1(v_ids);
    told := taskyard.tell_1(0, array_fill('interrupted'::text, ARRAY[cardinality(uuids)]), uuids, v_queues, v_sources,
        ARRAY[p_now]);
    told := told + taskyard.tell_1(told, v_states, uuids, v_queues, v_sources, ARRAY[p_now]);
    IF taskyard.are_open_1('waiting') THEN
        SELECT * INTO v_done FROM taskyard.release_1(told, p_now, v_locked, v_ids);
        told := told + v_done.told;
        IF v_done.keys IS NOT NULL THEN
            PERFORM taskyard.repark_1(v_done.key_queues, v_done.keys);
        END IF;
    END IF;
    told := told + taskyard.drained_1(told, p_now, v_queues);
    COMMIT;
END $$;
