-- What nodes call. A name ends with its version: a node of the version before goes on calling its own meanwhile.
-- All is plpgsql, because that keeps its plans; a function in SQL is planned anew in every transaction before version 18.
--
-- Every procedure that writes takes its locks first, in this order and each kind in order of its numbers, so that no two
-- wait for each other: (1) that it writes events, shared; (2) the node, shared by its turns and alone by its rescue;
-- (3) the queues. Locks are advisory, of the transaction: a row lock would write to the row each time.
--
-- Plans are made when the tables are empty, and kept. To a planner that knows no better, all that is queued or runs is as
-- good a place to look for a few tasks as the index of their ids. Where the ids, tokens or keys are known, a condition
-- that a partial index stands for is therefore left out, hidden behind OFFSET 0 or put as a comparison. Whoever has a token
-- runs: the table sees to that.

CREATE FUNCTION taskyard.lock_queues_1(p_queues text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(1953721201, h)
    FROM (SELECT DISTINCT hashtext(q) AS h FROM unnest(p_queues) AS q ORDER BY 1) AS hashes;
END $$;

-- These tasks may have become startable: their lanes must not be read from above them.
CREATE FUNCTION taskyard.lower_1(p_ids bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(cardinality(p_ids), 0) = 0 THEN
        RETURN;
    END IF;
    WITH t AS MATERIALIZED (
        SELECT queue, source, min(position) FILTER (WHERE priority = 0) AS low_0,
            min(position) FILTER (WHERE priority = 1) AS low_1, min(position) FILTER (WHERE priority = 2) AS low_2
        FROM (SELECT * FROM taskyard.task WHERE id = ANY (p_ids) OFFSET 0) AS x WHERE state = 'queued' AND NOT parked
        GROUP BY queue, source
    ), lanes AS (
        INSERT INTO taskyard.lane AS l
        SELECT queue, source, low_0 * 0, low_1 * 0, low_2 * 0 FROM t ORDER BY queue, source
        ON CONFLICT (queue, source) DO UPDATE SET low_0 = coalesce(l.low_0, excluded.low_0),
            low_1 = coalesce(l.low_1, excluded.low_1), low_2 = coalesce(l.low_2, excluded.low_2)
        WHERE coalesce(l.low_0, excluded.low_0) IS DISTINCT FROM l.low_0
            OR coalesce(l.low_1, excluded.low_1) IS DISTINCT FROM l.low_1
            OR coalesce(l.low_2, excluded.low_2) IS DISTINCT FROM l.low_2
    ), old AS MATERIALIZED (
        SELECT t.queue, t.source, m.n, least(t.low_0, coalesce(m.low_0, 0)) AS low_0,
            least(t.low_1, coalesce(m.low_1, 0)) AS low_1, least(t.low_2, coalesce(m.low_2, 0)) AS low_2
        FROM t LEFT JOIN LATERAL (
            SELECT * FROM taskyard.mark AS m WHERE m.queue = t.queue AND m.source = t.source ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        WHERE t.low_0 < coalesce(m.low_0, 0) OR t.low_1 < coalesce(m.low_1, 0) OR t.low_2 < coalesce(m.low_2, 0)
    ), gone AS (
        DELETE FROM taskyard.mark AS m USING old WHERE m.queue = old.queue AND m.source = old.source AND m.n = old.n
    )
    INSERT INTO taskyard.mark SELECT queue, source, nextval('taskyard.seq'), low_0, low_1, low_2 FROM old;
END $$;

-- Of the tasks waiting with a key, exactly the first ones that fit under its limit may start.
CREATE FUNCTION taskyard.repark_1(p_queues text[], p_keys text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_freed bigint[];
BEGIN
    WITH k AS (
        SELECT d.queue, d.key, coalesce(q.per_key, 1) AS per_key,
            (SELECT count(*) FROM taskyard.task AS t
             WHERE t.queue = d.queue AND t.key = d.key AND t.key IS NOT NULL AND t.state IN ('running', 'retrying')
            ) AS busy
        FROM (SELECT DISTINCT u.queue, u.key FROM unnest(p_queues, p_keys) AS u(queue, key)) AS d
        LEFT JOIN taskyard.queue AS q ON q.name = d.queue
    ), placed AS (
        SELECT w.id, w.parked, row_number() OVER (PARTITION BY k.queue, k.key ORDER BY w.priority, w.position)
            > k.per_key - k.busy AS should
        FROM k CROSS JOIN LATERAL (
            (SELECT t.id, t.parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.parked < true)
            UNION ALL
            (SELECT t.id, t.parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.parked
             ORDER BY t.priority, t.position LIMIT k.per_key)
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

-- Tell that these tasks did `kind`, and that so many left one state for another; how many events that were. The arrays
-- are of one length, but for `p_ats`, which may hold one time for all.
CREATE FUNCTION taskyard.tell_1(
    p_first integer, p_kinds text[], p_uuids text[], p_queues text[], p_sources text[], p_ats timestamptz[]
) RETURNS integer LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_told integer;
BEGIN
    IF p_kinds IS NULL THEN
        RETURN 0;
    END IF;
    WITH grouped AS (
        SELECT kind, queue, source, array_agg(uuid ORDER BY ord) AS uuids, array_agg(at ORDER BY ord) AS ats,
            count(*)::integer AS n, min(ord) AS ord
        FROM unnest(p_kinds, p_uuids, p_queues, p_sources, p_ats) WITH ORDINALITY AS u(kind, uuid, queue, source, at, ord)
        GROUP BY kind, queue, source
    ), told AS (
        INSERT INTO taskyard.event (xid, first, n, kind, queue, source, ats, uuids)
        SELECT pg_current_xact_id()::text::bigint, p_first + (sum(n) OVER (ORDER BY ord))::integer - n, n, kind, queue,
            source, CASE WHEN cardinality(p_ats) = 1 THEN p_ats ELSE ats END, uuids
        FROM grouped
    )
    SELECT coalesce(sum(n), 0) INTO v_told FROM grouped;
    RETURN v_told;
END $$;

-- Settle the completed runs: most of what a turn brings. The tokens of those that were still held.
CREATE FUNCTION taskyard.complete_1(
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
            t.progress, c.result,
            CASE WHEN t.cancel_asked_at IS NULL THEN coalesce(c.note, t.note) ELSE '{{too_late}}' END AS new_note
    ), kept AS (
        INSERT INTO taskyard.ended (
            id, run_token, position, due_at, created_at, started_at, finished_at, timeout_s, attempt, retries, crashes,
            recoveries, priority, was, state, uuid, source, queue, args, key, retry, run_node, progress, result, note)
        SELECT id, token, position, due_at, created_at, started_at, at, timeout_s, attempt, retries, crashes,
            recoveries, priority, state, 'completed', uuid, source, queue, args, key, retry, node, progress, result,
            new_note
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
CREATE FUNCTION taskyard.settle_1(
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
            token = NULL, node = NULL, cancel_asked_at = NULL, cancel_reason = NULL,
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
            checkpoint)
        SELECT id, position, due_at, created_at, started_at, at, timeout_s, attempt, retries, crashes + crashed,
            recoveries, priority, state, new_state, uuid, source, queue, args, key, retry, progress, result,
            coalesce(new_error, error), new_note, checkpoint
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

-- What runs say of themselves while they run.
CREATE FUNCTION taskyard.report_1(p_first integer, p_now timestamptz, p_reports json) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_uuids text[]; v_queues text[]; v_sources text[]; v_kinds text[];
BEGIN
    WITH r AS MATERIALIZED (
        SELECT j.*, t.uuid, t.queue, t.source
        FROM json_to_recordset(p_reports) AS j(
            ord integer, id bigint, token bigint, attempt integer, progress text, note text, checkpoint text)
        JOIN taskyard.task AS t ON t.id = j.id AND t.token = j.token AND t.attempt = j.attempt
    ), last_word AS (
        SELECT id, (array_agg(progress ORDER BY ord DESC) FILTER (WHERE progress IS NOT NULL))[1] AS progress,
            (array_agg(note ORDER BY ord DESC) FILTER (WHERE note IS NOT NULL))[1] AS note,
            (array_agg(checkpoint ORDER BY ord DESC) FILTER (WHERE checkpoint IS NOT NULL))[1] AS checkpoint
        FROM r GROUP BY id
    ), said AS (
        UPDATE taskyard.task AS t SET updated_at = p_now, progress = coalesce(l.progress, t.progress),
            note = coalesce(l.note, t.note), checkpoint = coalesce(l.checkpoint, t.checkpoint)
        FROM last_word AS l WHERE t.id = l.id
    )
    SELECT array_agg('progress'::text), array_agg(uuid), array_agg(queue), array_agg(source)
    INTO v_kinds, v_uuids, v_queues, v_sources
    FROM r WHERE progress IS NOT NULL;
    RETURN taskyard.tell_1(p_first, v_kinds, v_uuids, v_queues, v_sources, ARRAY[p_now]);
END $$;

-- Store new tasks, of which nothing is to be decided any more. How many events that were. Of what is the same for all of
-- them, there may be one: to send each of them would take the client twice as long.
CREATE FUNCTION taskyard.add_1(
    p_first integer, p_now timestamptz, a_uuid text[], a_source text[], a_queue text[], a_args text[],
    a_priority smallint[], a_key text[], a_slot text[], a_timeout_s double precision[], a_retry text[],
    a_due_at timestamptz[], a_created_at timestamptz[]
) RETURNS integer LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_told integer;
BEGIN
    WITH r AS MATERIALIZED (
        SELECT u.uuid, coalesce(u.source, a_source[1]) AS source, coalesce(u.queue, a_queue[1]) AS queue, u.args,
            coalesce(u.priority, a_priority[1]) AS priority, u.key, u.slot, u.timeout_s, u.retry,
            coalesce(u.due_at, a_due_at[1]) AS due_at, coalesce(u.created_at, a_created_at[1]) AS created_at,
            nextval('taskyard.seq') AS id, coalesce(u.due_at, a_due_at[1]) > p_now AS later
        FROM unnest(a_uuid, a_source, a_queue, a_args, a_priority, a_key, a_slot, a_timeout_s, a_retry, a_due_at,
            a_created_at) AS u(uuid, source, queue, args, priority, key, slot, timeout_s, retry, due_at, created_at)
    ), stored AS (
        INSERT INTO taskyard.task (
            id, position, due_at, created_at, updated_at, timeout_s, priority, parked, state, uuid, source, queue, args,
            key, dedupe_slot, retry)
        SELECT id, id * {{gap}}, due_at, created_at, p_now, timeout_s, priority, key IS NOT NULL AND NOT later,
            CASE WHEN later THEN 'scheduled' ELSE 'queued' END, uuid, source, queue, args, key, slot, retry
        FROM r
    ), lanes AS (
        SELECT queue, source, count(*)::integer AS n, array_agg(uuid ORDER BY id) AS uuids FROM r GROUP BY queue, source
    ), told AS (
        INSERT INTO taskyard.event (xid, first, n, kind, queue, source, ats, uuids)
        SELECT pg_current_xact_id()::text::bigint, p_first + (sum(n) OVER (ORDER BY queue, source))::integer - n, n,
            'submitted', queue, source, ARRAY[p_now], uuids
        FROM lanes
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, CASE WHEN later THEN 'scheduled' ELSE 'queued' END, count(*) FROM r GROUP BY queue, later
    )
    SELECT count(*) INTO v_told FROM r;
    RETURN v_told;
END $$;

-- Store new tasks of which some may be there already, or come from a run that has lost its claim: add by add, each whole
-- or not at all; `n` of an add is how many of the tasks are its. An answer is a list with null for each new task and
-- the holder's uuid for each that was merged, or an object that says what kept the tasks out.
CREATE FUNCTION taskyard.admit_1(
    p_first integer, p_now timestamptz, p_adds json, a_uuid text[], a_source text[], a_queue text[], a_args text[],
    a_priority smallint[], a_key text[], a_slot text[], a_timeout_s double precision[], a_retry text[],
    a_due_at timestamptz[], a_created_at timestamptz[], OUT answers json[], OUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_add record;
    v_from integer := 1;
    v_to integer;
    v_found record;
    v_holders text[];
    v_new integer[];
BEGIN
    told := 0;
    FOR v_add IN
        SELECT * FROM json_to_recordset(p_adds) AS j(n integer, dedupe text, id bigint, token bigint, attempt integer)
    LOOP
        v_to := v_from + v_add.n - 1;
        v_holders := array_fill(NULL::text, ARRAY[v_add.n]);
        IF v_add.id IS NOT NULL AND NOT EXISTS (
            SELECT FROM taskyard.task
            WHERE id = v_add.id AND token = v_add.token AND attempt = v_add.attempt
        ) THEN
            answers := answers || '{"why":"lost"}'::json;
            v_from := v_to + 1;
            CONTINUE;
        END IF;
        IF v_add.dedupe <> 'allow' THEN
            -- A transaction of somebody else's, not committed yet, may hold a slot. It takes this lock alone; turns
            -- share it, and never wait for it: a transaction may stay open for as long as somebody likes.
            IF NOT coalesce((SELECT bool_and(pg_try_advisory_xact_lock_shared(1953721204, hashtext(s)))
                             FROM unnest(a_slot[v_from:v_to]) AS s WHERE s IS NOT NULL), true) THEN
                answers := answers || '{"why":"busy"}'::json;
                v_from := v_to + 1;
                CONTINUE;
            END IF;
            SELECT r.slot, t.uuid INTO v_found
            FROM unnest(a_slot[v_from:v_to]) WITH ORDINALITY AS r(slot, ord)
            LEFT JOIN taskyard.task AS t ON t.dedupe_slot = r.slot AND t.dedupe_slot IS NOT NULL
            WHERE v_add.dedupe = 'refuse' AND r.slot IS NOT NULL
                AND (t.id IS NOT NULL OR r.slot = ANY (a_slot[v_from:v_from + r.ord::integer - 2]))
            ORDER BY r.ord LIMIT 1;
            IF FOUND THEN
                answers := answers || json_build_object('why', 'duplicate', 'uuid', coalesce(v_found.uuid, ''),
                    'slot', v_found.slot);
                v_from := v_to + 1;
                CONTINUE;
            END IF;
            SELECT array_agg(CASE
                    WHEN t.id IS NOT NULL THEN t.uuid
                    WHEN r.slot = ANY (a_slot[v_from:v_from + r.ord::integer - 2])
                    THEN a_uuid[v_from - 1 + array_position(a_slot[v_from:v_to], r.slot)]
                END ORDER BY r.ord)
            INTO v_holders
            FROM unnest(a_slot[v_from:v_to]) WITH ORDINALITY AS r(slot, ord)
            LEFT JOIN taskyard.task AS t ON t.dedupe_slot = r.slot AND t.dedupe_slot IS NOT NULL;
        END IF;
        SELECT array_agg(v_from - 1 + h.ord::integer ORDER BY h.ord) INTO v_new
        FROM unnest(v_holders) WITH ORDINALITY AS h(uuid, ord) WHERE h.uuid IS NULL;
        SELECT a_uuid[n.i] AS uuid INTO v_found
        FROM unnest(v_new) WITH ORDINALITY AS n(i, ord)
        WHERE EXISTS (SELECT FROM taskyard.task AS t WHERE t.uuid = a_uuid[n.i])
            OR EXISTS (SELECT FROM taskyard.ended AS e WHERE e.uuid = a_uuid[n.i])
            OR EXISTS (SELECT FROM unnest(v_new) AS o(i) WHERE o.i < n.i AND a_uuid[o.i] = a_uuid[n.i])
        ORDER BY n.ord LIMIT 1;
        IF FOUND THEN
            answers := answers || json_build_object('why', 'taken', 'uuid', v_found.uuid);
        ELSE
            answers := answers || to_json(v_holders);
            told := told + taskyard.add_1(p_first + told, p_now,
                (SELECT array_agg(a_uuid[i]) FROM unnest(v_new) AS i), (SELECT array_agg(a_source[i]) FROM unnest(v_new) AS i),
                (SELECT array_agg(a_queue[i]) FROM unnest(v_new) AS i), (SELECT array_agg(a_args[i]) FROM unnest(v_new) AS i),
                (SELECT array_agg(a_priority[i]) FROM unnest(v_new) AS i), (SELECT array_agg(a_key[i]) FROM unnest(v_new) AS i),
                (SELECT array_agg(CASE WHEN v_add.dedupe <> 'allow' THEN a_slot[i] END) FROM unnest(v_new) AS i),
                (SELECT array_agg(a_timeout_s[i]) FROM unnest(v_new) AS i), (SELECT array_agg(a_retry[i]) FROM unnest(v_new) AS i),
                (SELECT array_agg(a_due_at[i]) FROM unnest(v_new) AS i), (SELECT array_agg(a_created_at[i]) FROM unnest(v_new) AS i));
        END IF;
        v_from := v_to + 1;
    END LOOP;
END $$;

-- Queue what is due, of these queues: by due time, then by age, at most {{promote_at_most}}. Of a task at place 0 nobody
-- has heard yet: it was submitted in a transaction of somebody else's.
CREATE FUNCTION taskyard.promote_1(
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
        SET state = 'queued', position = d.place, parked = t.key IS NOT NULL, updated_at = p_now
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

-- What goes next over all lanes of these queues that there is room for: by priority and place.
CREATE FUNCTION taskyard.pick_1(
    p_queues text[], p_total integer, p_sources text[], p_rooms integer[], p_others integer
) RETURNS bigint[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_lane record;
    v_picked bigint[] := '{}';
    v_left integer := p_total;
    -- One entry a lane: its queue, source and marks, and which of the rooms below its tasks take from.
    l_queue text[] := '{}'; l_source text[] := '{}'; l_0 bigint[] := '{}'; l_1 bigint[] := '{}'; l_2 bigint[] := '{}';
    l_q integer[] := '{}'; l_s integer[] := '{}';
    l_room integer[]; l_seen integer[];
    q_name text[] := '{}'; q_room integer[] := '{}';
    s_room integer[] := p_rooms || p_others;
    v_lanes integer; v_share integer; v_is_cut boolean;
    v_queue text; v_room bigint;
    v_priority integer := 0; v_position bigint := -9223372036854775807;
    i integer;
BEGIN
    FOR v_lane IN
        SELECT l.queue, l.source, q.concurrency,
            coalesce(array_position(p_sources, l.source), cardinality(s_room)) AS s,
            CASE WHEN l.low_0 = 0 THEN coalesce(m.low_0, 0) END AS low_0,
            CASE WHEN l.low_1 = 0 THEN coalesce(m.low_1, 0) END AS low_1,
            CASE WHEN l.low_2 = 0 THEN coalesce(m.low_2, 0) END AS low_2
        FROM taskyard.lane AS l LEFT JOIN taskyard.queue AS q ON q.name = l.queue
        LEFT JOIN LATERAL (
            SELECT * FROM taskyard.mark AS m WHERE m.queue = l.queue AND m.source = l.source ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        WHERE l.queue = ANY (p_queues)
            AND s_room[coalesce(array_position(p_sources, l.source), cardinality(s_room))] > 0
        ORDER BY l.queue, l.source
    LOOP
        IF v_lane.concurrency IS NOT NULL AND v_queue IS DISTINCT FROM v_lane.queue THEN
            -- What runs is not counted in the table itself: what ran and cannot be vacuumed would be walked over.
            v_queue := v_lane.queue;
            SELECT v_lane.concurrency - coalesce(sum(t.n), 0) INTO v_room FROM taskyard.tally AS t
            WHERE t.queue = v_queue AND t.state = 'running'
                AND t.xid >= (SELECT tally_from FROM taskyard.tidied ORDER BY n DESC LIMIT 1);
            IF v_room <= 0 AND (SELECT token FROM taskyard.task WHERE queue = v_queue AND state = 'running'
                                ORDER BY token DESC LIMIT 1) IS NULL THEN
                -- Whatever went wrong once, a queue must not stand still for ever.
                INSERT INTO taskyard.tally VALUES (v_queue, 'running', v_room - v_lane.concurrency);
                v_room := v_lane.concurrency;
            END IF;
            IF v_room > 0 THEN
                q_name := q_name || v_queue; q_room := q_room || v_room::integer;
            END IF;
        END IF;
        IF v_lane.concurrency IS NOT NULL AND v_room <= 0 THEN
            CONTINUE;
        END IF;
        l_queue := l_queue || v_lane.queue; l_source := l_source || v_lane.source;
        l_0 := l_0 || v_lane.low_0; l_1 := l_1 || v_lane.low_1; l_2 := l_2 || v_lane.low_2;
        l_s := l_s || v_lane.s;
        l_q := l_q || CASE WHEN v_lane.concurrency IS NULL THEN 0 ELSE cardinality(q_name) END;
    END LOOP;
    v_lanes := cardinality(l_queue);
    IF v_lanes = 1 THEN
        -- All in one go: to look at each would take as long as to start it.
        RETURN ARRAY(
            SELECT id FROM (
                (SELECT id, priority, position FROM taskyard.task
                 WHERE queue = l_queue[1] AND source = l_source[1] AND state = 'queued' AND NOT parked AND priority = 0
                    AND position >= l_0[1] ORDER BY position LIMIT least(p_total, s_room[l_s[1]], q_room[1]))
                UNION ALL
                (SELECT id, priority, position FROM taskyard.task
                 WHERE queue = l_queue[1] AND source = l_source[1] AND state = 'queued' AND NOT parked AND priority = 1
                    AND position >= l_1[1] ORDER BY position LIMIT least(p_total, s_room[l_s[1]], q_room[1]))
                UNION ALL
                (SELECT id, priority, position FROM taskyard.task
                 WHERE queue = l_queue[1] AND source = l_source[1] AND state = 'queued' AND NOT parked AND priority = 2
                    AND position >= l_2[1] ORDER BY position LIMIT least(p_total, s_room[l_s[1]], q_room[1]))
            ) AS three ORDER BY priority, position LIMIT least(p_total, s_room[l_s[1]], q_room[1]));
    END IF;
    WHILE v_lanes > 0 AND v_left > 0 LOOP
        -- Of many lanes most will not be taken: a little of each is read at a time.
        v_share := CASE WHEN v_lanes = 1 THEN v_left ELSE greatest(4, 2 * v_left / v_lanes) END;
        l_room := '{}'; l_seen := array_fill(0, ARRAY[v_lanes]);
        FOR i IN 1 .. v_lanes LOOP
            l_room := l_room || least(v_share, v_left, s_room[l_s[i]], q_room[nullif(l_q[i], 0)]);
        END LOOP;
        v_is_cut := false;
        FOR v_lane IN
            SELECT l.i, t.id, t.priority, t.position
            FROM unnest(l_queue, l_source, l_0, l_1, l_2, l_room) WITH ORDINALITY
                AS l(queue, source, low_0, low_1, low_2, room, i)
            CROSS JOIN LATERAL (
                SELECT * FROM (
                    (SELECT id, priority, position FROM taskyard.task
                     WHERE queue = l.queue AND source = l.source AND state = 'queued' AND NOT parked AND priority = 0
                        AND v_priority = 0 AND position >= l.low_0 AND position > v_position
                     ORDER BY position LIMIT l.room)
                    UNION ALL
                    (SELECT id, priority, position FROM taskyard.task
                     WHERE queue = l.queue AND source = l.source AND state = 'queued' AND NOT parked AND priority = 1
                        AND v_priority <= 1 AND position >= l.low_1
                        AND position > CASE WHEN v_priority = 1 THEN v_position ELSE -9223372036854775807 END
                     ORDER BY position LIMIT l.room)
                    UNION ALL
                    (SELECT id, priority, position FROM taskyard.task
                     WHERE queue = l.queue AND source = l.source AND state = 'queued' AND NOT parked AND priority = 2
                        AND position >= l.low_2
                        AND position > CASE WHEN v_priority = 2 THEN v_position ELSE -9223372036854775807 END
                     ORDER BY position LIMIT l.room)
                ) AS three ORDER BY priority, position LIMIT l.room
            ) AS t
            WHERE l.room > 0
            ORDER BY t.priority, t.position
        LOOP
            i := v_lane.i;
            v_priority := v_lane.priority; v_position := v_lane.position;
            l_seen[i] := l_seen[i] + 1;
            IF s_room[l_s[i]] > 0 AND coalesce(q_room[nullif(l_q[i], 0)], 1) > 0 THEN
                v_picked := v_picked || v_lane.id;
                v_left := v_left - 1;
                s_room[l_s[i]] := s_room[l_s[i]] - 1;
                IF l_q[i] > 0 THEN
                    q_room[l_q[i]] := q_room[l_q[i]] - 1;
                END IF;
                EXIT WHEN v_left = 0;
                IF l_seen[i] = l_room[i] AND s_room[l_s[i]] > 0 AND coalesce(q_room[nullif(l_q[i], 0)], 1) > 0 THEN
                    -- All that was read of this lane is taken, and the next of it may stand before those of others.
                    v_is_cut := true;
                    EXIT;
                END IF;
            END IF;
        END LOOP;
        EXIT WHEN NOT v_is_cut;
    END LOOP;
    RETURN v_picked;
END $$;

-- What claims say of their tasks: what starting them does not set anew, and their tokens; column by column, and nothing
-- where a column is empty. An array of rows would be sent with a kilobyte of memory for every field of every row.
CREATE TYPE taskyard.claims_1 AS (
    id bigint[], token bigint[], position bigint[], due_at timestamptz[], created_at timestamptz[], attempt integer[],
    priority smallint[], uuid text[], source text[], queue text[], args text[], timeout_s double precision[],
    retries integer[], crashes integer[], recoveries integer[], key text[], dedupe_slot text[], retry text[],
    progress text[], error text[], checkpoint text[]
);

-- Start these tasks, in this order.
CREATE FUNCTION taskyard.start_1(p_first integer, p_node text, p_now timestamptz, p_ids bigint[])
RETURNS taskyard.claims_1 LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_claims taskyard.claims_1;
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
            t.checkpoint
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
        CASE WHEN count(checkpoint) > 0 THEN array_agg(checkpoint) END
    INTO v_claims FROM (SELECT * FROM started ORDER BY token) AS o;
    RETURN v_claims;
END $$;

-- One turn: settle, report, add, promote what is due, claim. It commits by itself before it answers: the answer may be
-- large, and a client that does not read it must not keep the queues locked.
CREATE PROCEDURE taskyard.turn_1(
    p_node text, p_now timestamptz, p_queues text[],
    c_id bigint[], c_token bigint[], c_attempt integer[], c_at timestamptz[], c_result text[], c_note text[],
    p_moves json, p_reports json, p_adds json,
    a_uuid text[], a_source text[], a_queue text[], a_args text[], a_priority smallint[], a_key text[], a_slot text[],
    a_timeout_s double precision[], a_retry text[], a_due_at timestamptz[], a_created_at timestamptz[],
    p_total integer, p_sources text[], p_rooms integer[], p_others integer,
    INOUT settled bigint[], INOUT answers json[], INOUT claims taskyard.claims_1, INOUT next_due timestamptz,
    INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queues text[];
    v_ids bigint[];
    v_done record;
    v_key_queues text[];
    v_keys text[];
    v_patience text := current_setting('lock_timeout');
BEGIN
    told := 0;
    -- Before anything is written: who reads events can then tell which of our transactions still go on.
    PERFORM pg_advisory_xact_lock_shared(1953721203, 0);
    IF p_total > 0 THEN
        PERFORM pg_advisory_xact_lock_shared(1953721202, hashtext(p_node));
        IF NOT EXISTS (SELECT FROM taskyard.node WHERE incarnation = p_node) THEN
            p_total := 0;  -- given up for dead: what it claims, nobody would ever take back
        END IF;
    END IF;
    SELECT due_at INTO next_due FROM taskyard.task WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1;
    v_queues := p_queues;
    IF next_due <= p_now THEN
        v_queues := v_queues || ARRAY(
            SELECT DISTINCT queue FROM (
                SELECT queue FROM taskyard.task WHERE state IN ('scheduled', 'retrying') AND due_at <= p_now
                ORDER BY due_at, id LIMIT {{promote_at_most}}) AS due);
    END IF;
    IF p_total > 0 THEN
        v_queues := v_queues || ARRAY(
            SELECT DISTINCT queue FROM taskyard.lane WHERE p_others > 0 OR source = ANY (p_sources));
    END IF;
    PERFORM taskyard.lock_queues_1(v_queues);

    IF c_id IS NOT NULL THEN
        SELECT * INTO v_done FROM taskyard.complete_1(c_id, c_token, c_attempt, c_at, c_result, c_note);
        settled := v_done.settled; told := v_done.told;
        v_key_queues := v_done.key_queues; v_keys := v_done.keys;
    END IF;
    IF p_moves IS NOT NULL THEN
        SELECT * INTO v_done FROM taskyard.settle_1(told, p_moves);
        settled := settled || v_done.settled; told := told + v_done.told;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
        PERFORM taskyard.lower_1(v_done.queued);
        SELECT due_at INTO next_due FROM taskyard.task
        WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1;
    END IF;
    IF p_reports IS NOT NULL THEN
        told := told + taskyard.report_1(told, p_now, p_reports);
    END IF;
    IF a_uuid IS NOT NULL THEN
        -- A uuid may stand in a transaction that somebody keeps open: the turn then fails, instead of waiting for it.
        PERFORM set_config('lock_timeout', '50ms', true);
    END IF;
    IF p_adds IS NOT NULL THEN
        SELECT * INTO v_done FROM taskyard.admit_1(told, p_now, p_adds, a_uuid, a_source, a_queue, a_args,
            a_priority, a_key, a_slot, a_timeout_s, a_retry, a_due_at, a_created_at);
        answers := v_done.answers; told := told + v_done.told;
    ELSIF a_uuid IS NOT NULL THEN
        -- Ids are made in the order of time: most batches lie beyond all that has ended, which one look can tell.
        IF (SELECT min(u.uuid COLLATE "C") FROM unnest(a_uuid) AS u(uuid)) <= (SELECT max(uuid) FROM taskyard.ended) THEN
            IF EXISTS (SELECT FROM unnest(a_uuid) AS u(uuid) JOIN taskyard.ended AS e ON e.uuid = u.uuid) THEN
                RAISE unique_violation;  -- it is asked again, add by add
            END IF;
        END IF;
        told := told + taskyard.add_1(told, p_now, a_uuid, a_source, a_queue, a_args, a_priority, a_key, a_slot,
            a_timeout_s, a_retry, a_due_at, a_created_at);
    END IF;
    IF a_uuid IS NOT NULL THEN
        PERFORM set_config('lock_timeout', v_patience, true);
    END IF;
    IF a_key IS NOT NULL THEN
        v_key_queues := v_key_queues || (
            SELECT array_agg(coalesce(q, a_queue[1])) FROM unnest(a_queue, a_key) AS u(q, k) WHERE k IS NOT NULL);
        v_keys := v_keys || (SELECT array_agg(k) FROM unnest(a_key) AS k WHERE k IS NOT NULL);
    END IF;
    IF next_due <= p_now THEN
        SELECT * INTO v_done FROM taskyard.promote_1(told, p_now, v_queues);
        told := told + v_done.told;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
    END IF;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.repark_1(v_key_queues, v_keys);
    END IF;
    IF p_total > 0 THEN
        v_ids := taskyard.pick_1(v_queues, p_total, p_sources, p_rooms, p_others);
        IF cardinality(v_ids) > 0 THEN
            claims := taskyard.start_1(told, p_node, p_now, v_ids);
            told := told + cardinality(claims.id);
        END IF;
    END IF;
    IF a_uuid IS NOT NULL OR next_due <= p_now THEN
        SELECT due_at INTO next_due FROM taskyard.task
        WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1;
    END IF;
    COMMIT;
END $$;
