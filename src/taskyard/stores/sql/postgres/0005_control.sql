-- What people say about queues, orders of queues, and what is asked of tasks that wait. Where a function of before is made
-- anew, it keeps the columns that have come; where it takes or answers more, it has the next number.

ALTER TABLE taskyard.task ADD COLUMN bucket text COLLATE "C", ADD COLUMN origin text COLLATE "C",
    ADD COLUMN cancel_forced boolean NOT NULL DEFAULT false,
    -- The line it stands in, where its queue goes by places alone; null in all others, which then need no index for it.
    ADD COLUMN line text COLLATE "C";
ALTER TABLE taskyard.ended ADD COLUMN bucket text COLLATE "C", ADD COLUMN origin text COLLATE "C";

CREATE INDEX task_line ON taskyard.task (queue, line, position)
    WHERE line IS NOT NULL AND state IN ('queued', 'paused', 'blocked');
-- Places are handed out in multiples; what lies between was put there by hand.
CREATE INDEX task_placed ON taskyard.task (queue, position) WHERE position % {{gap}} <> 0;

-- `concurrency` is what holds: what a person has said, or else the rule in `settings`. `control` is all that was said.
ALTER TABLE taskyard.queue ADD COLUMN ordering text COLLATE "C" NOT NULL DEFAULT 'priority',
    ADD COLUMN starve_after integer DEFAULT 8, ADD COLUMN starve_wait interval DEFAULT interval '600 seconds',
    ADD COLUMN state text COLLATE "C" NOT NULL DEFAULT 'running', ADD COLUMN control text;

-- What a queue remembers of whose turn it is: of normal and low, how many higher ones have started meanwhile, and when
-- they were last let in before one; and the bucket served last.
CREATE TABLE taskyard.turns (
    queue    text COLLATE "C" PRIMARY KEY,
    passed_1 integer NOT NULL,
    passed_2 integer NOT NULL,
    let_in_1 timestamptz,
    let_in_2 timestamptz,
    bucket   text COLLATE "C"
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

CREATE FUNCTION taskyard.line_1(p_ordering text, p_bucket text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE p_ordering WHEN 'fifo' THEN '' WHEN 'buckets' THEN coalesce(p_bucket, '') END
$$;

-- Of the tasks waiting with a key, exactly the first ones that fit under its limit may start. Where
-- places alone count in a queue, they do so among those of a key.
CREATE OR REPLACE FUNCTION taskyard.repark_1(p_queues text[], p_keys text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_freed bigint[];
BEGIN
    WITH k AS (
        SELECT d.queue, d.key, coalesce(q.per_key, 1) AS per_key,
            coalesce(q.ordering, 'priority') <> 'priority' AS by_place,
            (SELECT count(*) FROM taskyard.task AS t
             WHERE t.queue = d.queue AND t.key = d.key AND t.key IS NOT NULL AND t.state IN ('running', 'retrying')
            ) AS busy
        FROM (SELECT DISTINCT u.queue, u.key FROM unnest(p_queues, p_keys) AS u(queue, key)) AS d
        LEFT JOIN taskyard.queue AS q ON q.name = d.queue
    ), placed AS (
        SELECT w.id, w.parked, row_number() OVER (PARTITION BY k.queue, k.key
                ORDER BY CASE WHEN k.by_place THEN 0 ELSE w.priority END, w.position)
            > k.per_key - k.busy AS should
        FROM k CROSS JOIN LATERAL (
            (SELECT t.id, t.parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.parked < true)
            UNION ALL
            (SELECT t.id, t.parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.parked
                AND NOT k.by_place
             ORDER BY t.priority, t.position LIMIT k.per_key)
            UNION ALL
            (SELECT t.id, t.parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.parked
                AND k.by_place AND t.priority = 0 ORDER BY t.position LIMIT k.per_key)
            UNION ALL
            (SELECT t.id, t.parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.parked
                AND k.by_place AND t.priority = 1 ORDER BY t.position LIMIT k.per_key)
            UNION ALL
            (SELECT t.id, t.parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.parked
                AND k.by_place AND t.priority = 2 ORDER BY t.position LIMIT k.per_key)
        ) AS w
    ), changed AS (
        UPDATE taskyard.task AS t SET parked = placed.should FROM placed
        WHERE t.id = placed.id AND placed.parked <> placed.should
        RETURNING t.id, t.parked
    )
    SELECT array_agg(id) INTO v_freed FROM changed WHERE NOT parked;
    IF v_freed IS NOT NULL THEN
        PERFORM taskyard.lower_1(v_freed);
    END IF;
END $$;

-- Settle the completed runs: most of what a turn brings. The tokens of those that were still held.
CREATE OR REPLACE FUNCTION taskyard.complete_1(
    c_id bigint[], c_token bigint[], c_attempt integer[], c_at timestamptz[], c_result text[], c_note text[],
    OUT settled bigint[], OUT told integer, OUT key_queues text[], OUT keys text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_uuids text[]; v_ats timestamptz[]; v_queues text[]; v_sources text[];
    v_is_one_lane boolean;
BEGIN
    WITH gone AS (
        DELETE FROM taskyard.task AS t
        USING unnest(c_id, c_token, c_attempt, c_at, c_result, c_note) AS c(id, token, attempt, at, result, note)
        WHERE t.id = c.id AND t.token = c.token AND t.attempt = c.attempt
        RETURNING t.id, t.token, t.position, t.due_at, t.created_at, t.started_at, c.at, t.timeout_s, t.attempt, t.retries,
            t.crashes, t.recoveries, t.priority, t.state, t.uuid, t.source, t.queue, t.args, t.key, t.retry, t.node,
            t.progress, c.result, t.bucket, t.origin,
            CASE WHEN t.cancel_asked_at IS NULL THEN coalesce(c.note, t.note) ELSE '{{too_late}}' END AS new_note
    ), kept AS (
        INSERT INTO taskyard.ended (
            id, run_token, position, due_at, created_at, started_at, finished_at, timeout_s, attempt, retries, crashes,
            recoveries, priority, was, state, uuid, source, queue, args, key, retry, run_node, progress, result, note,
            bucket, origin)
        SELECT id, token, position, due_at, created_at, started_at, at, timeout_s, attempt, retries, crashes,
            recoveries, priority, state, 'completed', uuid, source, queue, args, key, retry, node, progress, result,
            new_note, bucket, origin
        FROM gone
        RETURNING run_token, finished_at, uuid, queue, source, key
    )
    SELECT array_agg(run_token), count(*)::integer, array_agg(queue) FILTER (WHERE key IS NOT NULL),
        array_agg(key) FILTER (WHERE key IS NOT NULL), array_agg(uuid), array_agg(finished_at), array_agg(queue),
        array_agg(source), min(queue) = max(queue) AND min(source) = max(source)
    INTO settled, told, key_queues, keys, v_uuids, v_ats, v_queues, v_sources, v_is_one_lane FROM kept;
    IF v_is_one_lane THEN
        -- As it mostly is: then there is nothing to be put together.
        INSERT INTO taskyard.event (xid, first, n, kind, queue, source, ats, uuids)
        VALUES (pg_current_xact_id()::text::bigint, 0, told, 'completed', v_queues[1], v_sources[1], v_ats, v_uuids);
        INSERT INTO taskyard.tally VALUES (v_queues[1], 'running', -told), (v_queues[1], 'completed', told);
    ELSIF told > 0 THEN
        PERFORM taskyard.tell_1(0, array_fill('completed'::text, ARRAY[told]), v_uuids, v_queues, v_sources, v_ats);
        INSERT INTO taskyard.tally
        SELECT queue, s.state, sum(s.sign) FROM unnest(v_queues) AS q(queue),
            (VALUES ('running', -1), ('completed', 1)) AS s(state, sign)
        GROUP BY queue, s.state;
    END IF;
END $$;

-- Settle runs that ended otherwise. Each brings what it should become, and what it becomes if a cancel was asked of it
-- meanwhile; the reason, which only the row knows, is put where the error says {{reason}}.
CREATE OR REPLACE FUNCTION taskyard.settle_1(
    p_first integer, p_moves json,
    OUT settled bigint[], OUT told integer, OUT key_queues text[], OUT keys text[], OUT queued bigint[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_uuids text[]; v_queues text[]; v_sources text[]; v_kinds text[]; v_ats timestamptz[];
BEGIN
    WITH m AS MATERIALIZED (
        SELECT j.ord, j.id, t.token, j.at,
            CASE WHEN a.asked THEN j.asked_state ELSE j.state END AS state,
            coalesce(CASE WHEN a.asked THEN j.asked_note ELSE j.note END, t.note) AS note,
            CASE WHEN NOT a.asked THEN j.error WHEN coalesce(t.cancel_reason, '') = '' THEN j.asked_error
                ELSE replace(j.asked_why, '{{reason}}', substr(to_json(t.cancel_reason)::text, 2,
                    length(to_json(t.cancel_reason)::text) - 2)) END AS error,
            -- A move that a cancel has turned into another counts as nothing else.
            CASE WHEN NOT a.turned THEN j.due_at END AS due_at, CASE WHEN NOT a.turned THEN j.result END AS result,
            CASE WHEN NOT a.turned THEN j.run END AS run, j.to_head AND NOT a.turned AS to_head,
            (j.retried AND NOT a.turned)::integer AS retried, (j.crashed AND NOT a.turned)::integer AS crashed,
            (j.recovered AND NOT a.turned)::integer AS recovered, (j.unspent AND NOT a.turned)::integer AS unspent
        FROM json_to_recordset(p_moves) AS j(
            ord integer, id bigint, token bigint, attempt integer, at timestamptz, state text, result text, error text,
            note text, due_at timestamptz, run text, retried boolean, crashed boolean, recovered boolean,
            unspent boolean, to_head boolean, asked_state text, asked_note text, asked_error text, asked_why text)
        JOIN taskyard.task AS t ON t.id = j.id AND t.token = j.token AND t.attempt = j.attempt
        CROSS JOIN LATERAL (
            SELECT t.cancel_asked_at IS NOT NULL AND j.asked_state IS NOT NULL AS asked,
                t.cancel_asked_at IS NOT NULL AND coalesce(j.asked_state, '') = 'canceled' AS turned) AS a
    ), ran AS (
        INSERT INTO taskyard.run (task, token, started_at, ended_at, attempt, node, state, error)
        SELECT t.id, t.token, t.started_at, m.at, t.attempt, t.node,
            coalesce(m.run, m.state), m.error
        FROM m JOIN taskyard.task AS t ON t.id = m.id
    ), stays AS (
        UPDATE taskyard.task AS t SET
            state = m.state, updated_at = m.at, retries = t.retries + m.retried, crashes = t.crashes + m.crashed,
            recoveries = t.recoveries + m.recovered, attempt = t.attempt - m.unspent,
            due_at = coalesce(m.due_at, t.due_at), error = coalesce(m.error, t.error), note = m.note,
            token = NULL, node = NULL, cancel_asked_at = NULL, cancel_reason = NULL, cancel_forced = false,
            parked = m.state = 'queued' AND t.key IS NOT NULL,
            position = CASE WHEN m.to_head AND m.state = 'queued' THEN -nextval('taskyard.seq') * {{gap}}
                ELSE t.position END
        FROM m WHERE t.id = m.id AND m.state NOT IN ('completed', 'failed', 'canceled', 'skipped')
        RETURNING m.ord, m.state, m.at, m.token, t.id, t.uuid, t.queue, t.source, t.key
    ), gone AS (
        DELETE FROM taskyard.task AS t USING m
        WHERE t.id = m.id AND m.state IN ('completed', 'failed', 'canceled', 'skipped')
        RETURNING m.ord, m.state AS new_state, m.at, m.result, m.note AS new_note, m.error AS new_error,
            m.crashed AS crashed, m.token AS run_token, t.*
    ), kept AS (
        INSERT INTO taskyard.ended (
            id, position, due_at, created_at, started_at, finished_at, timeout_s, attempt, retries, crashes,
            recoveries, priority, was, state, uuid, source, queue, args, key, retry, progress, result, error, note,
            checkpoint, bucket, origin)
        SELECT id, position, due_at, created_at, started_at, at, timeout_s, attempt, retries, crashes + crashed,
            recoveries, priority, state, new_state, uuid, source, queue, args, key, retry, progress, result,
            coalesce(new_error, error), new_note, checkpoint, bucket, origin
        FROM gone
    ), both_ AS (
        SELECT ord, state, at, token, id, uuid, queue, source, key FROM stays
        UNION ALL SELECT ord, new_state, at, run_token, id, uuid, queue, source, key FROM gone
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, 'running', -count(*) FROM both_ GROUP BY queue
        UNION ALL SELECT queue, state, count(*) FROM both_ GROUP BY queue, state
    )
    SELECT array_agg(token), array_agg(queue) FILTER (WHERE key IS NOT NULL), array_agg(key) FILTER (WHERE key IS NOT NULL),
        array_agg(id) FILTER (WHERE state = 'queued'), array_agg(state), array_agg(uuid), array_agg(queue),
        array_agg(source), array_agg(at)
    INTO settled, key_queues, keys, queued, v_kinds, v_uuids, v_queues, v_sources, v_ats
    FROM (SELECT * FROM both_ ORDER BY ord) AS o;
    told := taskyard.tell_1(p_first, v_kinds, v_uuids, v_queues, v_sources, v_ats);
END $$;

-- Queue what is due, of these queues: by due time, then by age, at most {{promote_at_most}}. Of a task at place 0 nobody
-- has heard yet: it was submitted in a transaction of somebody else's.
CREATE OR REPLACE FUNCTION taskyard.promote_1(
    p_first integer, p_now timestamptz, p_queues text[], OUT told integer, OUT key_queues text[], OUT keys text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_ids bigint[]; v_uuids text[]; v_queues text[]; v_sources text[]; v_kinds text[];
    n_kinds text[]; n_uuids text[]; n_queues text[]; n_sources text[];
BEGIN
    WITH d AS MATERIALIZED (
        SELECT x.id, x.state, x.ord, x.position = 0 AS is_new,
            CASE WHEN x.state = 'scheduled' THEN nextval('taskyard.seq') * {{gap}} ELSE x.position END AS place
        FROM (SELECT id, state, position, row_number() OVER (ORDER BY due_at, id) AS ord FROM (
            SELECT id, state, position, due_at FROM taskyard.task
            WHERE state IN ('scheduled', 'retrying') AND due_at <= p_now AND queue = ANY (p_queues)
            ORDER BY due_at, id LIMIT {{promote_at_most}}) AS y) AS x
    ), queued AS (
        UPDATE taskyard.task AS t
        SET state = 'queued', position = d.place, parked = t.key IS NOT NULL, updated_at = p_now,
            line = CASE WHEN d.is_new THEN taskyard.line_1((SELECT q.ordering FROM taskyard.queue AS q
                WHERE q.name = t.queue), t.bucket) ELSE t.line END
        FROM d WHERE t.id = d.id
        RETURNING d.ord, d.state AS was, d.is_new, t.id, t.uuid, t.queue, t.source, t.key
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, was, -count(*) FROM queued GROUP BY queue, was
        UNION ALL SELECT queue, 'queued', count(*) FROM queued GROUP BY queue
    )
    SELECT array_agg(id), array_agg('queued'::text), array_agg(uuid), array_agg(queue), array_agg(source),
        array_agg(queue) FILTER (WHERE key IS NOT NULL), array_agg(key) FILTER (WHERE key IS NOT NULL),
        array_agg('submitted'::text) FILTER (WHERE is_new), array_agg(uuid) FILTER (WHERE is_new),
        array_agg(queue) FILTER (WHERE is_new), array_agg(source) FILTER (WHERE is_new)
    INTO v_ids, v_kinds, v_uuids, v_queues, v_sources, key_queues, keys, n_kinds, n_uuids, n_queues, n_sources
    FROM (SELECT * FROM queued ORDER BY ord) AS o;
    told := taskyard.tell_1(p_first, n_kinds, n_uuids, n_queues, n_sources, ARRAY[p_now]);
    told := told + taskyard.tell_1(p_first + told, v_kinds, v_uuids, v_queues, v_sources, ARRAY[p_now]);
    PERFORM taskyard.lower_1(v_ids);
END $$;

-- Carry out what was decided about these tasks, if each of them is still the version that was looked at; otherwise
-- nothing happens and `done` is false. `how`: 'change' keeps the task here, in its state or another; 'end' ends it, 'again'
-- sends an ended one again, 'look' only looks. A note that is null stays what it is. One with `beside` is put right before
-- or after that task. `places` says where each stands afterwards.
CREATE OR REPLACE PROCEDURE taskyard.change_1(
    p_queues text[], p_changes json, e_kinds text[], e_uuids text[], e_queues text[], e_sources text[], p_now timestamptz,
    INOUT done boolean, INOUT places json, INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_keys text[]; v_key_queues text[];
    v_row record;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(1953721203, 0);
    PERFORM taskyard.lock_queues_1(p_queues);
    -- What has ended is pruned without a queue's lock.
    PERFORM FROM taskyard.ended WHERE id IN (
        SELECT j.id FROM json_to_recordset(p_changes) AS j(id bigint, how text) WHERE j.how = 'again')
    ORDER BY id FOR UPDATE;
    SELECT bool_and(CASE WHEN j.how = 'again'
        THEN EXISTS (SELECT FROM taskyard.ended AS e WHERE e.id = j.id AND e.xmin::text = j.version)
        ELSE EXISTS (SELECT FROM taskyard.task AS t WHERE t.id = j.id
            AND taskyard.version_1(t.token, t.cancel_asked_at, t.xmin) = j.version) END)
    INTO done FROM json_to_recordset(p_changes) AS j(id bigint, version text, how text);
    IF NOT done THEN
        RETURN;
    END IF;
    WITH j AS MATERIALIZED (
        SELECT * FROM json_to_recordset(p_changes) AS j(
            id bigint, version text, how text, priority smallint, cancel_asked_at timestamptz, cancel_reason text,
            cancel_forced boolean, note text, was text, state text, error text, due_at timestamptz, to_head boolean,
            ord integer)
    ), heads AS MATERIALIZED (
        -- The last to be put at the head stands first.
        SELECT o.id, -nextval('taskyard.seq') * {{gap}} AS place
        FROM (SELECT id FROM j WHERE how = 'change' AND to_head ORDER BY ord) AS o
    ), changed AS (
        UPDATE taskyard.task AS t SET priority = j.priority, cancel_asked_at = j.cancel_asked_at,
            cancel_reason = j.cancel_reason, cancel_forced = coalesce(j.cancel_forced, t.cancel_forced),
            note = coalesce(j.note, t.note), updated_at = p_now, state = j.state,
            due_at = coalesce(j.due_at, t.due_at), parked = j.state = 'queued' AND t.key IS NOT NULL,
            -- What was submitted in somebody else's transaction has no place yet.
            position = coalesce((SELECT h.place FROM heads AS h WHERE h.id = j.id), CASE
                WHEN t.position = 0 AND j.state = 'queued' THEN nextval('taskyard.seq') * {{gap}} ELSE t.position END)
        FROM j WHERE t.id = j.id AND j.how = 'change'
        RETURNING t.queue, t.key, t.state, coalesce(j.was, t.state) AS was
    ), gone AS (
        DELETE FROM taskyard.task AS t USING j WHERE t.id = j.id AND j.how = 'end'
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
        DELETE FROM taskyard.ended AS e USING j WHERE e.id = j.id AND j.how = 'again'
        RETURNING j.ord, j.to_head, j.state AS new_state, j.note AS new_note, e.*
    ), again AS (
        INSERT INTO taskyard.task (
            id, position, due_at, created_at, updated_at, started_at, timeout_s, attempt, priority, parked, state, uuid,
            source, queue, args, key, retry, progress, error, note, checkpoint, bucket, origin, line)
        SELECT id, CASE WHEN to_head THEN -1 ELSE 1 END * nextval('taskyard.seq') * {{gap}}, due_at, created_at, p_now,
            started_at, timeout_s, attempt, priority, key IS NOT NULL, new_state, uuid, source, queue, args, key, retry,
            progress, error, new_note, checkpoint, bucket, origin,
            taskyard.line_1((SELECT q.ordering FROM taskyard.queue AS q WHERE q.name = o.queue), bucket)
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
        JOIN taskyard.task AS t ON t.id = j.id WHERE j.beside IS NOT NULL ORDER BY j.ord
    LOOP
        PERFORM taskyard.place_1(v_row.id, v_row.queue, t.position, v_row.before)
        FROM taskyard.task AS t WHERE t.id = v_row.beside;
    END LOOP;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.repark_1(v_key_queues, v_keys);
    END IF;
    PERFORM taskyard.lower_1(ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint)));
    told := taskyard.tell_1(0, e_kinds, e_uuids, e_queues, e_sources, ARRAY[p_now]);
    SELECT json_agg(json_build_array(t.id, t.position, t.parked)) INTO places
    FROM json_to_recordset(p_changes) AS j(id bigint) JOIN taskyard.task AS t ON t.id = j.id;
    COMMIT;
END $$;

-- Runs have ended: of these queues, those that were stopping and have none left are paused. How many events that were.
CREATE FUNCTION taskyard.drained_1(p_first integer, p_now timestamptz, p_queues text[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_names text[];
BEGIN
    IF NOT EXISTS (SELECT FROM taskyard.queue AS q WHERE q.state = 'stopping') THEN
        RETURN 0;
    END IF;
    WITH over_ AS (
        UPDATE taskyard.queue AS q SET state = 'paused',
            control = jsonb_set(q.control::jsonb, '{state}', '"paused"')::text
        WHERE q.state = 'stopping' AND q.name = ANY (p_queues)
            AND NOT EXISTS (SELECT FROM taskyard.task AS t WHERE t.queue = q.name AND t.state = 'running')
        RETURNING q.name
    )
    SELECT array_agg(name ORDER BY name) INTO v_names FROM over_;
    IF v_names IS NULL THEN
        RETURN 0;
    END IF;
    RETURN taskyard.tell_1(p_first, array_fill('queue_paused'::text, ARRAY[cardinality(v_names)]),
        array_fill(''::text, ARRAY[cardinality(v_names)]), v_names, array_fill(''::text, ARRAY[cardinality(v_names)]),
        ARRAY[p_now]);
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
    PERFORM pg_advisory_xact_lock_shared(1953721203, 0);
    PERFORM taskyard.lock_queues_1(ARRAY[p_name]);
    INSERT INTO taskyard.queue (name, per_key, auto_recover, settings) VALUES (p_name, 1, 1, p_settings)
    ON CONFLICT DO NOTHING;
    said := p_new; told := 0;
    IF v_state = 'stopping' AND NOT EXISTS (SELECT FROM taskyard.task WHERE queue = p_name AND state = 'running') THEN
        v_state := 'paused'; p_kind := CASE p_kind WHEN 'queue_stopping' THEN 'queue_paused' ELSE p_kind END;
        said := jsonb_set(p_new::jsonb, '{state}', '"paused"')::text;
    END IF;
    UPDATE taskyard.queue SET control = said, state = v_state,
        concurrency = coalesce((said::json ->> 'concurrency')::integer, (settings::json ->> 'concurrency')::integer)
    WHERE name = p_name AND control IS NOT DISTINCT FROM p_old;
    done := FOUND;
    IF done THEN
        told := taskyard.tell_1(0, ARRAY[p_kind], ARRAY[''], ARRAY[p_name], ARRAY[''], ARRAY[p_now]);
    END IF;
    COMMIT;
END $$;

-- Create a queue or change its rules. What people have said of it stays.
CREATE PROCEDURE taskyard.queue_2(
    p_name text, p_concurrency integer, p_per_key integer, p_auto_recover integer, p_settings text, p_ordering text,
    p_starve_after integer, p_starve_wait interval, INOUT changed boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_keys text[];
    v_ordering text;
BEGIN
    PERFORM taskyard.lock_queues_1(ARRAY[p_name]);
    SELECT ordering INTO v_ordering FROM taskyard.queue WHERE name = p_name;
    INSERT INTO taskyard.queue AS q (
        name, concurrency, per_key, auto_recover, settings, ordering, starve_after, starve_wait)
    VALUES (p_name, p_concurrency, p_per_key, p_auto_recover, p_settings, p_ordering, p_starve_after, p_starve_wait)
    ON CONFLICT (name) DO UPDATE SET per_key = excluded.per_key, auto_recover = excluded.auto_recover,
        settings = excluded.settings, ordering = excluded.ordering, starve_after = excluded.starve_after,
        starve_wait = excluded.starve_wait,
        concurrency = coalesce((q.control::json ->> 'concurrency')::integer, excluded.concurrency)
    WHERE q.settings <> excluded.settings;
    changed := FOUND;
    IF changed AND p_ordering <> coalesce(v_ordering, 'priority') THEN
        UPDATE taskyard.task SET line = taskyard.line_1(p_ordering, bucket) WHERE queue = p_name;
        -- Those that stand in a line leave their lanes in another order.
        DELETE FROM taskyard.mark WHERE queue = p_name;
        INSERT INTO taskyard.mark SELECT queue, source, nextval('taskyard.seq'), {{lowest}}, {{lowest}}, {{lowest}}
        FROM taskyard.lane WHERE queue = p_name;
    END IF;
    IF changed THEN
        v_keys := ARRAY(SELECT DISTINCT key FROM taskyard.task
            WHERE queue = p_name AND key IS NOT NULL AND state = 'queued');
        IF cardinality(v_keys) > 0 THEN
            PERFORM taskyard.repark_1(array_fill(p_name, ARRAY[cardinality(v_keys)]), v_keys);
        END IF;
    END IF;
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
    FROM unnest(v_crowd) WITH ORDINALITY AS c(id, ord) WHERE t.id = c.id;
    -- Last, since it may have stood among them.
    UPDATE taskyard.task SET position = v_first + (2 * v_at + 1) * (v_last - v_first + 1) / (2 * cardinality(v_crowd))
    WHERE id = p_id;
END $$;

-- These tasks were just stored: give them what few have, a bucket, an origin, the line they stand in. One that was there
-- before under the same uuid is left alone.
CREATE FUNCTION taskyard.dress_1(a_uuid text[], a_bucket text[], a_origin text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE taskyard.task AS t SET bucket = u.bucket, origin = u.origin,
        line = taskyard.line_1((SELECT q.ordering FROM taskyard.queue AS q WHERE q.name = t.queue), u.bucket)
    FROM unnest(a_uuid, a_bucket, a_origin) AS u(uuid, bucket, origin)
    WHERE t.uuid = u.uuid AND t.attempt = 0 AND t.xmin = pg_current_xact_id()::xid;
END $$;

-- What goes next over all queues that are running: each offers by its own order, the best offer is taken, one at a time.
-- As `taskyard.model.picking` says it. Where priority and place alone count, all is left to `pick_1`.
CREATE FUNCTION taskyard.pick_2(
    p_now timestamptz, p_queues text[], p_total integer, p_sources text[], p_rooms integer[], p_others integer
) RETURNS bigint[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queues text[];
    s_room integer[] := p_rooms || p_others;
    -- One entry a queue.
    q_name text[] := '{}'; q_order text[] := '{}'; q_room bigint[] := '{}'; q_after integer[] := '{}';
    q_wait interval[] := '{}'; q_passed_1 integer[] := '{}'; q_passed_2 integer[] := '{}';
    q_let_1 timestamptz[] := '{}'; q_let_2 timestamptz[] := '{}'; q_bucket text[] := '{}'; q_is_changed boolean[] := '{}';
    -- One entry a feed, which is a lane or a line, and its first task.
    e_q integer[] := '{}'; e_level integer[] := '{}'; e_source text[] := '{}'; e_line text[] := '{}';
    e_s integer[] := '{}'; e_id bigint[] := '{}'; e_position bigint[] := '{}'; e_due timestamptz[] := '{}';
    e_can boolean[] := '{}';
    v_picked bigint[] := '{}';
    v_row record; v_head record;
    v_q integer; v_e integer; v_level integer; v_top integer;
    h_e integer[]; h_due timestamptz[]; h_since timestamptz;
    p_1 integer; p_2 integer;
BEGIN
    v_queues := ARRAY(SELECT u.name FROM unnest(p_queues) AS u(name) LEFT JOIN taskyard.queue AS q ON q.name = u.name
        WHERE coalesce(q.state, 'running') = 'running');
    IF NOT EXISTS (SELECT FROM taskyard.queue WHERE name = ANY (v_queues) AND ordering <> 'priority')
        AND NOT EXISTS (
            SELECT FROM taskyard.lane AS l LEFT JOIN taskyard.queue AS q ON q.name = l.queue
            WHERE l.queue = ANY (v_queues)
                AND (q.name IS NULL OR q.starve_after IS NOT NULL OR q.starve_wait IS NOT NULL)
            GROUP BY l.queue
            HAVING (count(l.low_0) > 0)::integer + (count(l.low_1) > 0)::integer + (count(l.low_2) > 0)::integer > 1)
    THEN
        RETURN taskyard.pick_1(v_queues, p_total, p_sources, p_rooms, p_others);
    END IF;
    FOR v_row IN
        SELECT u.name, coalesce(q.ordering, 'priority') AS ordering,
            CASE WHEN q.concurrency IS NOT NULL THEN q.concurrency - (
                SELECT coalesce(sum(t.n), 0) FROM taskyard.tally AS t WHERE t.queue = u.name AND t.state = 'running'
                    AND t.xid >= (SELECT tally_from FROM taskyard.tidied ORDER BY n DESC LIMIT 1)) END AS room,
            CASE WHEN q.name IS NULL THEN 8 ELSE q.starve_after END AS starve_after,
            CASE WHEN q.name IS NULL THEN interval '600 seconds' ELSE q.starve_wait END AS starve_wait, s.*
        FROM (SELECT DISTINCT name FROM unnest(v_queues) AS n(name)) AS u
        LEFT JOIN taskyard.queue AS q ON q.name = u.name LEFT JOIN taskyard.turns AS s ON s.queue = u.name
        ORDER BY u.name
    LOOP
        CONTINUE WHEN v_row.room <= 0;
        q_name := q_name || v_row.name; q_order := q_order || v_row.ordering; q_room := q_room || v_row.room;
        q_after := q_after || v_row.starve_after; q_wait := q_wait || v_row.starve_wait;
        q_passed_1 := q_passed_1 || coalesce(v_row.passed_1, 0); q_passed_2 := q_passed_2 || coalesce(v_row.passed_2, 0);
        q_let_1 := q_let_1 || v_row.let_in_1; q_let_2 := q_let_2 || v_row.let_in_2; q_bucket := q_bucket || v_row.bucket;
        q_is_changed := q_is_changed || false;
    END LOOP;
    FOR v_row IN
        SELECT q.i, l.source AS lane, NULL::text AS line, p.level, t.id, t.position, t.due_at, l.source,
            true AS can_start
        FROM unnest(q_name, q_order) WITH ORDINALITY AS q(name, ordering, i)
        JOIN taskyard.lane AS l ON l.queue = q.name
        LEFT JOIN LATERAL (
            SELECT * FROM taskyard.mark AS m WHERE m.queue = l.queue AND m.source = l.source ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        CROSS JOIN LATERAL (VALUES (0, l.low_0, m.low_0), (1, l.low_1, m.low_1), (2, l.low_2, m.low_2))
            AS p(level, was, low)
        CROSS JOIN LATERAL (
            SELECT id, position, due_at FROM taskyard.task AS t
            WHERE t.queue = l.queue AND t.source = l.source AND t.state = 'queued' AND NOT t.parked
                AND t.priority = p.level::smallint AND t.position >= coalesce(p.low, 0)
            ORDER BY t.position LIMIT 1
        ) AS t
        WHERE q.ordering = 'priority' AND p.was IS NOT NULL
            AND s_room[coalesce(array_position(p_sources, l.source), cardinality(s_room))] > 0
        UNION ALL
        SELECT q.i, NULL, b.line, 1, h.id, h.place, h.due_at, h.source, h.can_start
        FROM unnest(q_name, q_order) WITH ORDINALITY AS q(name, ordering, i)
        CROSS JOIN LATERAL (
            WITH RECURSIVE named (line) AS (
                (SELECT t.line FROM taskyard.task AS t WHERE t.queue = q.name AND t.line IS NOT NULL
                    AND t.state IN ('queued', 'paused', 'blocked') ORDER BY t.line LIMIT 1)
                UNION ALL
                SELECT (SELECT t.line FROM taskyard.task AS t WHERE t.queue = q.name AND t.line IS NOT NULL
                    AND t.state IN ('queued', 'paused', 'blocked') AND t.line > named.line ORDER BY t.line LIMIT 1)
                FROM named WHERE named.line IS NOT NULL
            )
            SELECT named.line FROM named WHERE named.line IS NOT NULL
        ) AS b
        CROSS JOIN LATERAL taskyard.head_1(q.name, NULL, 1, b.line, {{lowest}}) AS h
        WHERE q.ordering <> 'priority'
    LOOP
        e_q := e_q || v_row.i::integer; e_level := e_level || v_row.level; e_source := e_source || v_row.lane;
        e_line := e_line || v_row.line; e_id := e_id || v_row.id; e_position := e_position || v_row.position;
        e_due := e_due || v_row.due_at; e_can := e_can || v_row.can_start;
        e_s := e_s || coalesce(array_position(p_sources, v_row.source), cardinality(s_room));
    END LOOP;
    WHILE cardinality(v_picked) < p_total LOOP
        IF cardinality(q_name) = 1 AND q_order[1] = 'priority' THEN
            EXIT WHEN q_room[1] <= 0;
            v_q := 1;
        ELSE
            -- Each queue's offer, and the best of them.
            SELECT o.q, o.e INTO v_q, v_e FROM (
                SELECT DISTINCT ON (c.q) c.q, c.e, c.bid, c.position, c.id FROM (
                    SELECT e.q, e.e, e.position, e.id, e.line,
                        CASE WHEN q_order[e.q] = 'priority' THEN e.level ELSE 1 END AS bid
                    FROM unnest(e_q, e_level, e_s, e_id, e_position, e_can, e_line) WITH ORDINALITY
                        AS e(q, level, s, id, position, can_start, line, e)
                    WHERE e.id IS NOT NULL AND e.can_start AND s_room[e.s] > 0 AND coalesce(q_room[e.q], 1) > 0
                ) AS c
                ORDER BY c.q, q_order[c.q] = 'buckets' AND coalesce(c.line <= q_bucket[c.q], false),
                    CASE WHEN q_order[c.q] = 'buckets' THEN c.line END COLLATE "C", c.bid, c.position, c.id
            ) AS o ORDER BY o.bid, o.position, o.id LIMIT 1;
            EXIT WHEN NOT FOUND;
        END IF;
        IF q_order[v_q] = 'priority' THEN
            -- The first task of each priority: who goes, and what is remembered.
            h_e := ARRAY[NULL, NULL, NULL]::integer[]; h_due := ARRAY[NULL, NULL, NULL]::timestamptz[];
            FOR v_row IN
                SELECT DISTINCT ON (e.level) e.level, e.e, e.due
                FROM unnest(e_q, e_level, e_s, e_id, e_position, e_due) WITH ORDINALITY
                    AS e(q, level, s, id, position, due, e)
                WHERE e.q = v_q AND e.id IS NOT NULL AND s_room[e.s] > 0
                ORDER BY e.level, e.position, e.id
            LOOP
                h_e[v_row.level + 1] := v_row.e; h_due[v_row.level + 1] := v_row.due;
            END LOOP;
            EXIT WHEN h_e[1] IS NULL AND h_e[2] IS NULL AND h_e[3] IS NULL;
            v_top := CASE WHEN h_e[1] IS NOT NULL THEN 0 WHEN h_e[2] IS NOT NULL THEN 1 ELSE 2 END;
            v_level := NULL;
            IF q_wait[v_q] IS NOT NULL THEN
                h_since := NULL;
                IF v_top < 1 AND h_e[2] IS NOT NULL AND p_now - greatest(h_due[2], q_let_1[v_q]) >= q_wait[v_q] THEN
                    v_level := 1; h_since := greatest(h_due[2], q_let_1[v_q]);
                END IF;
                IF v_top < 2 AND h_e[3] IS NOT NULL AND p_now - greatest(h_due[3], q_let_2[v_q]) >= q_wait[v_q]
                    AND (h_since IS NULL OR greatest(h_due[3], q_let_2[v_q]) < h_since) THEN
                    v_level := 2;
                END IF;
            END IF;
            IF v_level IS NULL AND q_after[v_q] IS NOT NULL THEN
                p_1 := CASE WHEN v_top < 1 AND h_e[2] IS NOT NULL AND q_passed_1[v_q] >= q_after[v_q]
                    THEN q_passed_1[v_q] ELSE -1 END;
                p_2 := CASE WHEN v_top < 2 AND h_e[3] IS NOT NULL AND q_passed_2[v_q] >= q_after[v_q]
                    THEN q_passed_2[v_q] ELSE -1 END;
                v_level := CASE WHEN p_1 < 0 AND p_2 < 0 THEN NULL WHEN p_1 >= p_2 THEN 1 ELSE 2 END;
            END IF;
            v_level := coalesce(v_level, v_top);
            v_e := h_e[v_level + 1];
            IF q_after[v_q] IS NOT NULL THEN
                p_1 := CASE WHEN v_level = 1 THEN 0
                    ELSE q_passed_1[v_q] + (h_e[2] IS NOT NULL AND v_level < 1)::integer END;
                p_2 := CASE WHEN v_level = 2 THEN 0
                    ELSE q_passed_2[v_q] + (h_e[3] IS NOT NULL AND v_level < 2)::integer END;
                q_is_changed[v_q] := q_is_changed[v_q] OR p_1 <> q_passed_1[v_q] OR p_2 <> q_passed_2[v_q];
                q_passed_1[v_q] := p_1; q_passed_2[v_q] := p_2;
            END IF;
            IF q_wait[v_q] IS NOT NULL AND v_level > v_top THEN
                q_is_changed[v_q] := true;
                IF v_level = 1 THEN
                    q_let_1[v_q] := p_now;
                ELSE
                    q_let_2[v_q] := p_now;
                END IF;
            END IF;
        ELSIF q_order[v_q] = 'buckets' THEN
            q_is_changed[v_q] := true; q_bucket[v_q] := e_line[v_e];
        END IF;
        v_picked := v_picked || e_id[v_e];
        s_room[e_s[v_e]] := s_room[e_s[v_e]] - 1;
        q_room[v_q] := q_room[v_q] - 1;
        SELECT * INTO v_head
        FROM taskyard.head_1(q_name[v_q], e_source[v_e], e_level[v_e], e_line[v_e], e_position[v_e] + 1);
        e_id[v_e] := v_head.id; e_position[v_e] := v_head.place; e_due[v_e] := v_head.due_at;
        e_can[v_e] := v_head.can_start;
        e_s[v_e] := coalesce(array_position(p_sources, v_head.source), cardinality(s_room));
    END LOOP;
    INSERT INTO taskyard.turns AS s
    SELECT u.name, u.passed_1, u.passed_2, u.let_1, u.let_2, u.bucket
    FROM unnest(q_name, q_passed_1, q_passed_2, q_let_1, q_let_2, q_bucket, q_is_changed)
        AS u(name, passed_1, passed_2, let_1, let_2, bucket, is_changed)
    WHERE u.is_changed
    ON CONFLICT (queue) DO UPDATE SET passed_1 = excluded.passed_1, passed_2 = excluded.passed_2,
        let_in_1 = excluded.let_in_1, let_in_2 = excluded.let_in_2, bucket = excluded.bucket;
    RETURN v_picked;
END $$;

-- The first task of a lane from a place on, or of a line.
CREATE FUNCTION taskyard.head_1(
    p_queue text, p_source text, p_level integer, p_line text, p_from bigint,
    OUT id bigint, OUT place bigint, OUT due_at timestamptz, OUT source text, OUT can_start boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    IF p_line IS NULL THEN
        SELECT t.id, t.position, t.due_at, t.source, true INTO id, place, due_at, source, can_start
        FROM taskyard.task AS t WHERE t.queue = p_queue AND t.source = p_source AND t.state = 'queued' AND NOT t.parked
            AND t.priority = p_level::smallint AND t.position >= p_from
        ORDER BY t.position LIMIT 1;
    ELSE
        SELECT t.id, t.position, t.due_at, t.source, t.state = 'queued' AND NOT t.parked
        INTO id, place, due_at, source, can_start
        FROM taskyard.task AS t WHERE t.queue = p_queue AND t.line = p_line AND t.line IS NOT NULL
            AND t.state IN ('queued', 'paused', 'blocked') AND t.position >= p_from
        ORDER BY t.position LIMIT 1;
    END IF;
END $$;

-- Take back what a dead node runs, and forget the node, unless it has beaten since `p_beats` was seen.
CREATE OR REPLACE PROCEDURE taskyard.rescue_1(
    p_node text, p_beats bigint, p_now timestamptz, p_why text, p_failed text, p_canceled text, p_no_reason text,
    INOUT uuids text[], INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queues text[]; v_sources text[]; v_states text[]; v_ids bigint[]; v_key_queues text[]; v_keys text[];
BEGIN
    told := 0;
    PERFORM pg_advisory_xact_lock_shared(1953721203, 0);
    PERFORM pg_advisory_xact_lock(1953721202, hashtext(p_node));
    DELETE FROM taskyard.node WHERE incarnation = p_node AND (p_beats IS NULL OR beats = p_beats);
    IF NOT FOUND AND p_beats IS NOT NULL THEN
        RETURN;
    END IF;
    PERFORM taskyard.lock_queues_1(ARRAY(SELECT queue FROM taskyard.task WHERE state = 'running' AND node = p_node));
    WITH m AS MATERIALIZED (
        SELECT t.id, t.queue, r.reason, CASE WHEN t.cancel_asked_at IS NOT NULL THEN 'canceled'
            WHEN t.recoveries < coalesce(q.auto_recover, 1) THEN 'queued' ELSE 'failed' END AS state,
            row_number() OVER (ORDER BY t.position DESC) AS ord
        FROM taskyard.task AS t LEFT JOIN taskyard.queue AS q ON q.name = t.queue
        CROSS JOIN LATERAL (SELECT to_json(coalesce(nullif(t.cancel_reason, ''), p_no_reason))::text AS reason) AS r
        WHERE t.state = 'running' AND t.node = p_node
    ), heads AS MATERIALIZED (
        -- The last to be put at the head stands first.
        SELECT o.id, -nextval('taskyard.seq') * {{gap}} AS place
        FROM (SELECT id FROM m WHERE state = 'queued' ORDER BY ord) AS o
    ), ran AS (
        INSERT INTO taskyard.run (task, token, started_at, ended_at, attempt, node, state)
        SELECT t.id, t.token, t.started_at, p_now, t.attempt, t.node, 'interrupted'
        FROM m JOIN taskyard.task AS t ON t.id = m.id
    ), stays AS (
        UPDATE taskyard.task AS t SET state = 'queued', updated_at = p_now, note = p_why, token = NULL, node = NULL,
            cancel_forced = false,
            recoveries = t.recoveries + 1, position = heads.place, parked = t.key IS NOT NULL
        FROM heads WHERE t.id = heads.id
        RETURNING t.id, t.uuid, t.queue, t.source, t.key
    ), gone AS (
        DELETE FROM taskyard.task AS t USING m WHERE t.id = m.id AND m.state <> 'queued'
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
    told := told + taskyard.drained_1(told, p_now, v_queues);
    COMMIT;
END $$;

-- What claims say of their tasks: what starting them does not set anew, and their tokens; column by column, and nothing
-- where a column is empty. An array of rows would be sent with a kilobyte of memory for every field of every row.
CREATE TYPE taskyard.claims_2 AS (
    id bigint[], token bigint[], position bigint[], due_at timestamptz[], created_at timestamptz[], attempt integer[],
    priority smallint[], uuid text[], source text[], queue text[], args text[], timeout_s double precision[],
    retries integer[], crashes integer[], recoveries integer[], key text[], dedupe_slot text[], retry text[],
    progress text[], error text[], checkpoint text[], bucket text[], origin text[]
);

-- Start these tasks, in this order.
CREATE FUNCTION taskyard.start_2(p_first integer, p_node text, p_now timestamptz, p_ids bigint[])
RETURNS taskyard.claims_2 LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_claims taskyard.claims_2;
BEGIN
    WITH p AS MATERIALIZED (
        SELECT x.id, nextval('taskyard.seq') AS token FROM unnest(p_ids) AS x(id)
    ), started AS (
        UPDATE taskyard.task AS t
        SET state = 'running', attempt = t.attempt + 1, token = p.token, node = p_node, started_at = p_now,
            updated_at = p_now, note = NULL
        FROM p WHERE t.id = p.id
        RETURNING t.id, t.token, t.position, t.due_at, t.created_at, t.attempt, t.priority, t.uuid, t.source, t.queue,
            t.args, t.timeout_s, t.retries, t.crashes, t.recoveries, t.key, t.dedupe_slot, t.retry, t.progress, t.error,
            t.checkpoint, t.bucket, t.origin
    ), lanes AS (
        SELECT queue, source, count(*)::integer AS n, array_agg(uuid ORDER BY token) AS uuids,
            max(position) FILTER (WHERE priority = 0) AS high_0, max(position) FILTER (WHERE priority = 1) AS high_1,
            max(position) FILTER (WHERE priority = 2) AS high_2
        FROM started GROUP BY queue, source
    ), event AS (
        INSERT INTO taskyard.event (xid, first, n, kind, queue, source, ats, uuids)
        SELECT pg_current_xact_id()::text::bigint, p_first + (sum(n) OVER (ORDER BY queue, source))::integer - n, n,
            'running', queue, source, ARRAY[p_now], uuids
        FROM lanes
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, s.state, sum(n * s.sign) FROM lanes, (VALUES ('queued', -1), ('running', 1)) AS s(state, sign)
        GROUP BY queue, s.state
    ), old AS MATERIALIZED (
        -- Now and then, so that it costs next to nothing: when some hundreds of tasks have been taken since the last time.
        SELECT l.queue, l.source, m.n, greatest(l.high_0, m.low_0) AS low_0, greatest(l.high_1, m.low_1) AS low_1,
            greatest(l.high_2, m.low_2) AS low_2
        FROM lanes AS l LEFT JOIN LATERAL (
            SELECT * FROM taskyard.mark AS m WHERE m.queue = l.queue AND m.source = l.source ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        WHERE greatest(l.high_0 - coalesce(m.low_0, 0), l.high_1 - coalesce(m.low_1, 0), l.high_2 - coalesce(m.low_2, 0))
            > {{raise_after}}
    ), former AS (
        DELETE FROM taskyard.mark AS m USING old WHERE m.queue = old.queue AND m.source = old.source AND m.n = old.n
    ), raised AS (
        INSERT INTO taskyard.mark SELECT queue, source, nextval('taskyard.seq'), low_0, low_1, low_2 FROM old
    )
    SELECT array_agg(id), array_agg(token), array_agg(position), array_agg(due_at), array_agg(created_at),
        array_agg(attempt), array_agg(priority), array_agg(uuid), array_agg(source), array_agg(queue), array_agg(args),
        CASE WHEN count(timeout_s) > 0 THEN array_agg(timeout_s) END,
        CASE WHEN max(retries) > 0 THEN array_agg(retries) END, CASE WHEN max(crashes) > 0 THEN array_agg(crashes) END,
        CASE WHEN max(recoveries) > 0 THEN array_agg(recoveries) END, CASE WHEN count(key) > 0 THEN array_agg(key) END,
        CASE WHEN count(dedupe_slot) > 0 THEN array_agg(dedupe_slot) END,
        CASE WHEN count(retry) > 0 THEN array_agg(retry) END, CASE WHEN count(progress) > 0 THEN array_agg(progress) END,
        CASE WHEN count(error) > 0 THEN array_agg(error) END,
        CASE WHEN count(checkpoint) > 0 THEN array_agg(checkpoint) END,
        CASE WHEN count(bucket) > 0 THEN array_agg(bucket) END, CASE WHEN count(origin) > 0 THEN array_agg(origin) END
    INTO v_claims FROM (SELECT * FROM started ORDER BY token) AS o;
    RETURN v_claims;
END $$;

CREATE TYPE taskyard.submitted_2 AS (
    uuid text, source text, queue text, args text, priority smallint, key text, slot text, timeout_s double precision,
    retry text, due_at timestamptz, created_at timestamptz, bucket text, origin text
);

-- One add, as JSON text in and out: a connection of somebody else's may have its own ideas about every other type.
-- The answer is a list with null for each new task and the holder's uuid for each that was merged, or an object that
-- says what kept all of them out; neither is an error, which would cost the caller his transaction.
-- Whoever may use the schema may submit; what is in it, he need not be allowed to see.
CREATE OR REPLACE FUNCTION taskyard.submit_1(p_add text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_add json := p_add::json;
    v_dedupe text := v_add ->> 'dedupe';
    v_tasks taskyard.submitted_2[];
    v_holders text[];
    v_hash integer;
    v_found record;
    v_ids bigint[];
BEGIN
    IF v_add ->> 'where' <> taskyard.whereabouts_1() THEN
        RETURN '{"why":"elsewhere"}';
    END IF;
    IF v_add -> 'parent' IS NOT NULL AND NOT EXISTS (
        SELECT FROM json_to_record(v_add -> 'parent') AS p(id bigint, token bigint, attempt integer)
        JOIN taskyard.task AS t ON t.id = p.id AND t.token = p.token AND t.attempt = p.attempt
    ) THEN
        RETURN '{"why":"lost"}';
    END IF;
    v_tasks := ARRAY(SELECT t FROM json_populate_recordset(NULL::taskyard.submitted_2, v_add -> 'tasks') AS t);
    v_holders := array_fill(NULL::text, ARRAY[cardinality(v_tasks)]);
    IF v_dedupe <> 'allow' THEN
        -- Whoever holds a slot for good is seen without a lock. For the others: turns share this lock while they look
        -- and store, and never wait for it. Nor do we here: who waits for a transaction that waits for him waits for
        -- ever, since no server knows of both.
        FOR v_hash IN
            SELECT DISTINCT hashtext(r.slot) FROM unnest(v_tasks) AS r WHERE r.slot IS NOT NULL
                AND NOT EXISTS (SELECT FROM taskyard.task AS t WHERE t.dedupe_slot = r.slot)
            ORDER BY 1
        LOOP
            IF NOT pg_try_advisory_xact_lock(1953721204, v_hash) THEN
                RETURN '{"why":"busy"}';
            END IF;
        END LOOP;
        WITH r AS (
            SELECT u.uuid, u.slot, u.ord, first_value(u.uuid) OVER (PARTITION BY u.slot ORDER BY u.ord) AS first_uuid,
                row_number() OVER (PARTITION BY u.slot ORDER BY u.ord) AS nth
            FROM unnest(v_tasks) WITH ORDINALITY
                AS u(uuid, source, queue, args, priority, key, slot, timeout_s, retry, due_at, created_at, bucket,
                    origin, ord)
        ), held AS (
            SELECT r.slot, r.ord, t.uuid, CASE WHEN t.uuid IS NOT NULL THEN t.uuid
                WHEN r.slot IS NOT NULL AND r.nth > 1 THEN r.first_uuid END AS holder
            FROM r LEFT JOIN taskyard.task AS t ON t.dedupe_slot = r.slot
        )
        SELECT array_agg(holder ORDER BY ord) AS holders,
            (array_agg(json_build_object('why', 'duplicate', 'uuid', coalesce(uuid, ''), 'slot', slot) ORDER BY ord)
                FILTER (WHERE holder IS NOT NULL))[1] AS first
        INTO v_found FROM held;
        IF v_dedupe = 'refuse' AND v_found.first IS NOT NULL THEN
            RETURN v_found.first;
        END IF;
        v_holders := v_found.holders;
    END IF;
    SELECT u.uuid INTO v_found FROM unnest(v_tasks) AS u WHERE EXISTS (SELECT FROM taskyard.ended AS e WHERE e.uuid = u.uuid);
    IF FOUND THEN
        RETURN json_build_object('why', 'taken', 'uuid', v_found.uuid);
    END IF;
    WITH stored AS (
        INSERT INTO taskyard.task (
            id, position, due_at, created_at, updated_at, timeout_s, priority, parked, state, uuid, source, queue, args,
            key, dedupe_slot, retry, bucket, origin)
        SELECT nextval('taskyard.seq'), 0, due_at, created_at, created_at, timeout_s, priority, false, 'scheduled', uuid,
            source, queue, args, key, CASE WHEN v_dedupe <> 'allow' THEN slot END, retry, bucket,
            origin
        FROM unnest(v_tasks) WITH ORDINALITY
            AS u(uuid, source, queue, args, priority, key, slot, timeout_s, retry, due_at, created_at, bucket,
                    origin, ord)
        WHERE v_holders[u.ord] IS NULL
        ON CONFLICT DO NOTHING
        RETURNING id
    )
    SELECT array_agg(id) INTO v_ids FROM stored;
    IF coalesce(cardinality(v_ids), 0) < (SELECT count(*) FROM unnest(v_holders) AS h WHERE h IS NULL) THEN
        -- A uuid was there already. Not by an exception: it would need a transaction in the transaction each time.
        DELETE FROM taskyard.task WHERE id = ANY (v_ids);
        SELECT u.uuid INTO v_found FROM unnest(v_tasks) AS u
        GROUP BY u.uuid HAVING count(*) > 1 OR EXISTS (SELECT FROM taskyard.task AS t WHERE t.uuid = u.uuid) LIMIT 1;
        RETURN json_build_object('why', 'taken', 'uuid', v_found.uuid);
    END IF;
    INSERT INTO taskyard.submitted (queue, n) SELECT queue, count(*) FROM taskyard.task WHERE id = ANY (v_ids) GROUP BY queue;
    RETURN to_json(v_holders);
END $$;
