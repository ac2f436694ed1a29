-- What becomes of runs, and of those who wait for them.

-- Runs that were completed, column by column; of what is the same for all, there may be one. `keyless` if none of them has
-- a key.
CREATE TYPE taskyard.completed_1 AS (
    id bigint[], token bigint[], attempt integer[], at timestamptz[], result text[], note text[], keyless boolean
);

-- Settle the completed runs: most of what a turn brings. The tokens of those that were still held.
CREATE FUNCTION taskyard.complete_1(
    c taskyard.completed_1,
    OUT settled bigint[], OUT told integer, OUT key_queues text[], OUT keys text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_uuids text[]; v_ats timestamptz[]; v_queues text[]; v_sources text[];
    v_is_one_lane boolean;
BEGIN
    WITH gone AS (
        DELETE FROM taskyard.task AS t
        USING unnest(c.id, c.token, c.attempt, c.at, c.result, c.note) AS r(id, token, attempt, at, result, note)
        WHERE t.id BETWEEN r.id AND r.id AND t.token = r.token AND t.attempt = coalesce(r.attempt, c.attempt[1])
        RETURNING t.id, t.token, t.position, t.due_at, t.created_at, t.started_at, r.at, t.timeout_s, t.attempt, t.retries,
            t.crashes, t.recoveries, t.priority, t.state, t.uuid, t.source, t.queue, t.args, t.key, t.retry, t.node,
            t.progress, r.result, t.bucket, t.origin,
            CASE WHEN t.cancel_asked_at IS NULL THEN coalesce(r.note, t.note) ELSE '{{too_late}}' END AS new_note
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
        WITH event AS (
            INSERT INTO taskyard.event (xid, first, n, kind, queue, source, ats, uuids)
            VALUES (pg_current_xact_id()::text::bigint, 0, told, 'completed', v_queues[1], v_sources[1], v_ats, v_uuids)
        )
        INSERT INTO taskyard.tally VALUES (v_queues[1], 'running', -told), (v_queues[1], 'completed', told);
    ELSIF told > 0 THEN
        PERFORM taskyard.tell_1(0, array_fill('completed'::text, ARRAY[told]), v_uuids, v_queues, v_sources, v_ats);
        INSERT INTO taskyard.tally
        SELECT queue, s.state, sum(s.sign) FROM unnest(v_queues) AS q(queue),
            (VALUES ('running', -1), ('completed', 1)) AS s(state, sign)
        GROUP BY queue, s.state;
    END IF;
END $$;

-- The same beside whoever claims from these queues, if all of them are plain: nobody waits for an end, their queues have no
-- limit and are not to be paused after the last run, and no task waits for its key. Else, or if something is due, nothing
-- is done: that takes more locks.
CREATE FUNCTION taskyard.complete_apart_1(
    p_now timestamptz, p_queues text[], c taskyard.completed_1,
    OUT is_done boolean, OUT settled bigint[], OUT told integer, OUT next_due timestamptz
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM pg_advisory_xact_lock_shared({{lock_ends}}, h)
    FROM (SELECT DISTINCT hashtext(q) AS h FROM unnest(p_queues) AS q ORDER BY 1) AS hashes;
    -- In a statement of its own: what was committed by who had the lock before is seen.
    SELECT (SELECT due_at FROM taskyard.task WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1),
        c.keyless AND NOT taskyard.are_open_1('waiting') AND NOT EXISTS (
            SELECT FROM taskyard.queue WHERE name = ANY (p_queues) AND (concurrency IS NOT NULL OR state = 'stopping'))
    INTO next_due, is_done;
    is_done := is_done AND (next_due > p_now) IS NOT FALSE;
    IF is_done THEN
        SELECT d.settled, d.told INTO settled, told FROM taskyard.complete_1(c) AS d;
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
            -- Who asked, and perhaps by force, stays.
            coalesce(CASE WHEN a.turned AND t.note ~ '^({{asked_to_cancel}}|{{canceled_by_force}})'
                THEN concat_ws('; ', t.note, j.asked_note)
                WHEN a.asked THEN j.asked_note ELSE j.note END, t.note) AS note,
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
        JOIN taskyard.task AS t ON t.id = ANY (ARRAY[j.id]) AND t.token = j.token AND t.attempt = j.attempt
        CROSS JOIN LATERAL (
            SELECT t.cancel_asked_at IS NOT NULL AND j.asked_state IS NOT NULL AS asked,
                t.cancel_asked_at IS NOT NULL AND coalesce(j.asked_state, '') = 'canceled' AS turned) AS a
    ), ran AS (
        INSERT INTO taskyard.run (task, token, started_at, ended_at, attempt, node, state, error)
        SELECT t.id, t.token, t.started_at, m.at, t.attempt, t.node,
            coalesce(m.run, m.state), m.error
        FROM m JOIN taskyard.task AS t ON t.id = ANY (ARRAY[m.id])
    ), trimmed AS (
        -- With the one above, {{runs_kept}} are kept: a task that postpones itself for ever must not grow for ever.
        DELETE FROM taskyard.run WHERE ctid = ANY (ARRAY(
            SELECT (SELECT r.ctid FROM taskyard.run AS r WHERE r.task = m.id
                ORDER BY r.token DESC LIMIT 1 OFFSET {{runs_kept}} - 1) FROM m))
    ), stays AS (
        UPDATE taskyard.task AS t SET
            state = m.state, updated_at = m.at, retries = t.retries + m.retried, crashes = t.crashes + m.crashed,
            recoveries = t.recoveries + m.recovered, attempt = t.attempt - m.unspent,
            due_at = coalesce(m.due_at, t.due_at), error = coalesce(m.error, t.error), note = m.note,
            token = NULL, node = NULL, cancel_asked_at = NULL, cancel_reason = NULL, cancel_forced = false,
            parked = m.state = 'queued' AND t.key IS NOT NULL,
            position = CASE WHEN m.to_head AND m.state = 'queued' THEN -nextval('taskyard.seq') * {{gap}}
                ELSE t.position END
        FROM m WHERE t.id = ANY (ARRAY[m.id]) AND m.state NOT IN ('completed', 'failed', 'canceled', 'skipped')
        RETURNING m.ord, m.state, m.at, m.token, t.id, t.uuid, t.queue, t.source, t.key
    ), gone AS (
        DELETE FROM taskyard.task AS t USING m
        WHERE t.id = ANY (ARRAY[m.id]) AND m.state IN ('completed', 'failed', 'canceled', 'skipped')
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
        JOIN taskyard.task AS t ON t.id = ANY (ARRAY[j.id]) AND t.token = j.token AND t.attempt = j.attempt
    ), last_word AS (
        SELECT id, token, (array_agg(progress ORDER BY ord DESC) FILTER (WHERE progress IS NOT NULL))[1] AS progress,
            (array_agg(note ORDER BY ord DESC) FILTER (WHERE note IS NOT NULL))[1] AS note,
            (array_agg(checkpoint ORDER BY ord DESC) FILTER (WHERE checkpoint IS NOT NULL))[1] AS checkpoint
        FROM r GROUP BY id, token
    ), said AS (
        UPDATE taskyard.task AS t SET updated_at = p_now, progress = coalesce(l.progress, t.progress),
            note = coalesce(l.note, t.note), checkpoint = coalesce(l.checkpoint, t.checkpoint)
        FROM last_word AS l WHERE t.id = ANY (ARRAY[l.id]) AND t.token = l.token
    )
    SELECT array_agg('progress'::text), array_agg(uuid), array_agg(queue), array_agg(source)
    INTO v_kinds, v_uuids, v_queues, v_sources
    FROM r WHERE progress IS NOT NULL;
    RETURN taskyard.tell_1(p_first, v_kinds, v_uuids, v_queues, v_sources, ARRAY[p_now]);
END $$;

-- End tasks that do not run, each as it says; null as an error or a note leaves what there is.
CREATE FUNCTION taskyard.end_unrun_1(
    p_first integer, p_now timestamptz, p_ids bigint[], p_states text[], p_errors text[], p_notes text[],
    OUT told integer, OUT key_queues text[], OUT keys text[], OUT uuids text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_kinds text[]; v_queues text[]; v_sources text[];
    b_kinds text[]; b_uuids text[]; b_queues text[]; b_sources text[];
BEGIN
    WITH m AS MATERIALIZED (
        SELECT * FROM unnest(p_ids, p_states, p_errors, p_notes) WITH ORDINALITY
            AS u(id, new_state, new_error, new_note, ord)
    ), gone AS (
        DELETE FROM taskyard.task AS t USING m WHERE t.id = ANY (ARRAY[m.id])
        RETURNING m.ord, m.new_state, m.new_error, m.new_note, t.*
    ), kept AS (
        -- What is held gives up by way of blocked; what is replaced does not wait for anybody any more.
        INSERT INTO taskyard.ended (
            id, position, due_at, created_at, started_at, finished_at, timeout_s, attempt, retries, crashes,
            recoveries, priority, was, state, uuid, source, queue, args, key, retry, progress, error, note, checkpoint,
            bucket, origin)
        SELECT id, position, due_at, created_at, started_at, p_now, timeout_s, attempt, retries, crashes,
            recoveries, priority, CASE WHEN state = 'paused' AND new_state <> 'canceled' THEN 'blocked' ELSE state END,
            new_state, uuid, source, queue, args, key, retry, progress, coalesce(new_error, error),
            coalesce(new_note, note), checkpoint, bucket, origin
        FROM gone
    ), tied AS (
        UPDATE taskyard.tie SET waits = 0 FROM m WHERE tie.id = ANY (ARRAY[m.id]) AND tie.waits <> 0
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, state, -count(*) FROM gone GROUP BY queue, state
        UNION ALL SELECT queue, new_state, count(*) FROM gone GROUP BY queue, new_state
    )
    SELECT array_agg(new_state), array_agg(uuid), array_agg(queue), array_agg(source),
        array_agg(queue) FILTER (WHERE key IS NOT NULL), array_agg(key) FILTER (WHERE key IS NOT NULL),
        array_agg('blocked'::text) FILTER (WHERE state = 'paused' AND new_state <> 'canceled'),
        array_agg(uuid) FILTER (WHERE state = 'paused' AND new_state <> 'canceled'),
        array_agg(queue) FILTER (WHERE state = 'paused' AND new_state <> 'canceled'),
        array_agg(source) FILTER (WHERE state = 'paused' AND new_state <> 'canceled')
    INTO v_kinds, uuids, v_queues, v_sources, key_queues, keys, b_kinds, b_uuids, b_queues, b_sources
    FROM (SELECT * FROM gone ORDER BY ord) AS o;
    told := taskyard.tell_1(p_first, b_kinds, b_uuids, b_queues, b_sources, ARRAY[p_now]);
    told := told + taskyard.tell_1(p_first + told, v_kinds, uuids, v_queues, v_sources, ARRAY[p_now]);
END $$;

-- Where those stand that may have to hear of the ends of these, or of earlier ones, and those behind them, who hear of it
-- if they end by it as well: their queues are locked too.
CREATE FUNCTION taskyard.listeners_1(p_ids bigint[]) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    IF NOT taskyard.are_open_1('waiting') THEN
        RETURN NULL;
    END IF;
    IF taskyard.are_open_1('telling') THEN
        p_ids := p_ids || ARRAY(SELECT task FROM taskyard.releasing ORDER BY place LIMIT {{release_at_most}});
    END IF;
    RETURN ARRAY(
        WITH RECURSIVE below (id) AS (
            SELECT DISTINCT id FROM unnest(p_ids) AS x(id)
            UNION SELECT d.child FROM below AS b
            CROSS JOIN LATERAL (SELECT child FROM taskyard.dependency WHERE parent = b.id AND NOT done OFFSET 0) AS d
        )
        SELECT DISTINCT c.queue FROM (SELECT id FROM below LIMIT 4 * {{release_at_most}}) AS b
        JOIN taskyard.task AS c ON c.id = ANY (ARRAY[b.id]));
END $$;

-- Tell those that wait of the ends of these tasks, as far as they have ended, and of earlier ones, at most
-- {{release_at_most}}; some end by it in their turn. Who stands in a queue that is not locked hears of it later.
CREATE FUNCTION taskyard.release_1(
    p_first integer, p_now timestamptz, p_locked text[], p_ids bigint[],
    OUT told integer, OUT key_queues text[], OUT keys text[], OUT ended text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_left integer := {{release_at_most}};
    v_ids bigint[] := p_ids;
    -- From which place on there are ends to tell: of those before, there is none, or a turn had too much to tell.
    v_from bigint := CASE WHEN taskyard.are_open_1('telling') THEN 0 END;
    v_put bigint; v_telling bigint := 0;
    v_places bigint[]; v_parents bigint[]; v_children bigint[];
    l_ids bigint[]; l_states text[]; l_errors text[]; l_notes text[];
    f_ids bigint[]; f_queued bigint[]; f_kinds text[]; f_uuids text[]; f_queues text[]; f_sources text[];
    f_key_queues text[]; f_keys text[];
    v_done record;
BEGIN
    told := 0;
    LOOP
        WITH put AS (
            INSERT INTO taskyard.releasing (task, uuid, state)
            SELECT e.id, e.uuid, e.state FROM unnest(v_ids) WITH ORDINALITY AS x(id, ord)
            JOIN taskyard.ended AS e ON e.id = ANY (ARRAY[x.id])
            WHERE (SELECT d.child FROM taskyard.dependency AS d WHERE d.parent = x.id AND NOT d.done LIMIT 1) IS NOT NULL
            ORDER BY x.ord
            RETURNING place
        )
        SELECT least(v_from, min(place)), count(*) INTO v_from, v_put FROM put;
        v_telling := v_telling + v_put;
        EXIT WHEN v_left <= 0;
        SELECT array_agg(h.place), array_agg(h.parent), array_agg(h.child) INTO v_places, v_parents, v_children
        FROM (
            SELECT r.place, r.task AS parent, d.child
            FROM (
                -- Once each: two adds of one turn may have come upon the same end.
                SELECT min(place) AS place, task FROM taskyard.releasing WHERE place >= v_from
                GROUP BY task ORDER BY 1 LIMIT {{release_at_most}}
            ) AS r
            CROSS JOIN LATERAL (
                SELECT d.child FROM taskyard.dependency AS d LEFT JOIN taskyard.task AS c ON c.id = ANY (ARRAY[d.child])
                WHERE d.parent = r.task AND NOT d.done AND (c.id IS NULL OR c.queue = ANY (p_locked))
                ORDER BY d.child LIMIT v_left
            ) AS d
            ORDER BY r.place, d.child LIMIT v_left
        ) AS h;
        EXIT WHEN v_places IS NULL;
        v_left := v_left - cardinality(v_places);
        UPDATE taskyard.dependency AS d SET done = true
        FROM unnest(v_parents, v_children) AS h(parent, child)
        WHERE d.child = ANY (ARRAY[h.child]) AND d.parent = ANY (ARRAY[h.parent]);
        WITH heard AS MATERIALIZED (
            SELECT h.child, h.ord, r.uuid, r.state AS how, c.state, c.due_at, t.waits, t.on_failure,
                r.state <> 'completed' AND t.on_failure IS DISTINCT FROM 'ignore' AS is_lost
            FROM unnest(v_places, v_children) WITH ORDINALITY AS h(place, child, ord)
            JOIN taskyard.releasing AS r ON r.place = ANY (ARRAY[h.place])
            JOIN taskyard.task AS c ON c.id = ANY (ARRAY[h.child]) AND c.state IN ('blocked', 'paused')
            JOIN taskyard.tie AS t ON t.id = ANY (ARRAY[h.child])
        ), fates AS (
            SELECT child, state, due_at, on_failure, min(ord) AS ord, waits - count(*) FILTER (WHERE NOT is_lost) AS waits,
                (array_agg(uuid ORDER BY ord) FILTER (WHERE is_lost))[1] AS lost,
                (array_agg(how ORDER BY ord) FILTER (WHERE is_lost))[1] AS how
            FROM heard GROUP BY child, state, due_at, on_failure, waits
        ), words AS (
            SELECT f.*, replace(CASE how WHEN 'failed' THEN '{{lost_failed}}' WHEN 'canceled' THEN '{{lost_canceled}}'
                ELSE '{{lost_skipped}}' END, '{{parent}}', substr(to_json(lost)::text, 2, length(to_json(lost)::text) - 2)) AS error
            FROM fates AS f
        ), counted AS (
            UPDATE taskyard.tie AS t SET waits = f.waits FROM fates AS f
            WHERE t.id = ANY (ARRAY[f.child]) AND f.lost IS NULL
        )
        SELECT array_agg(child) FILTER (WHERE lost IS NOT NULL),
            array_agg(CASE WHEN on_failure = 'skip' THEN 'skipped' ELSE 'failed' END) FILTER (WHERE lost IS NOT NULL),
            array_agg(CASE WHEN on_failure = 'skip' THEN NULL ELSE error END) FILTER (WHERE lost IS NOT NULL),
            array_agg(CASE WHEN on_failure = 'skip' THEN error::json ->> 'message' END) FILTER (WHERE lost IS NOT NULL),
            array_agg(child) FILTER (WHERE lost IS NULL AND waits = 0 AND state = 'blocked')
        INTO l_ids, l_states, l_errors, l_notes, f_ids FROM (SELECT * FROM words ORDER BY ord) AS o;
        IF f_ids IS NOT NULL THEN
            WITH freed AS (
                UPDATE taskyard.task AS t
                SET state = CASE WHEN t.due_at > p_now THEN 'scheduled' ELSE 'queued' END, updated_at = p_now,
                    parked = t.key IS NOT NULL AND t.due_at <= p_now
                FROM unnest(f_ids) AS f(id) WHERE t.id = ANY (ARRAY[f.id])
                RETURNING t.id, t.uuid, t.queue, t.source, t.key, t.state
            ), counted AS (
                INSERT INTO taskyard.tally
                SELECT queue, 'blocked', -count(*) FROM freed GROUP BY queue
                UNION ALL SELECT queue, state, count(*) FROM freed GROUP BY queue, state
            )
            SELECT array_agg(id) FILTER (WHERE state = 'queued'), array_agg(state), array_agg(uuid), array_agg(queue),
                array_agg(source), array_agg(queue) FILTER (WHERE key IS NOT NULL), array_agg(key) FILTER (WHERE key IS NOT NULL)
            INTO f_queued, f_kinds, f_uuids, f_queues, f_sources, f_key_queues, f_keys
            FROM (SELECT * FROM freed ORDER BY id) AS o;
            told := told + taskyard.tell_1(p_first + told, f_kinds, f_uuids, f_queues, f_sources, ARRAY[p_now]);
            PERFORM taskyard.lower_1(f_queued);
            key_queues := key_queues || f_key_queues; keys := keys || f_keys;
        END IF;
        v_ids := l_ids;
        IF l_ids IS NOT NULL THEN
            SELECT * INTO v_done FROM taskyard.end_unrun_1(p_first + told, p_now, l_ids, l_states, l_errors, l_notes);
            told := told + v_done.told; ended := ended || v_done.uuids;
            key_queues := key_queues || v_done.key_queues; keys := keys || v_done.keys;
        END IF;
    END LOOP;
    DELETE FROM taskyard.releasing AS r WHERE r.place >= v_from
        AND (SELECT d.child FROM taskyard.dependency AS d WHERE d.parent = r.task AND NOT d.done LIMIT 1) IS NULL;
    GET DIAGNOSTICS v_put = ROW_COUNT;
    IF v_telling <> v_put THEN
        INSERT INTO taskyard.tally (queue, state, n) VALUES ('', 'telling', v_telling - v_put);
    END IF;
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
            AND (SELECT t.token FROM taskyard.task AS t WHERE t.queue = q.name AND t.state = 'running'
                ORDER BY t.token DESC LIMIT 1) IS NULL
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
