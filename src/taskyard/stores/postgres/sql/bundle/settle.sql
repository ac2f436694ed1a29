-- Settling runs, and their reports.

-- Settle the completed runs: most of what a turn brings. The tokens of those that were still held.
CREATE OR REPLACE FUNCTION taskyard.complete(
    c taskyard.completions_1,
    OUT settled bigint[], OUT told integer, OUT key_queues text[], OUT keys text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_uuids text[]; v_ats timestamptz[]; v_queues text[]; v_sources text[];
    v_is_one_lane boolean;
BEGIN
    WITH gone AS (
        DELETE FROM taskyard.task AS t
        USING unnest(c.id, c.token, c.attempt, c.at, c.result, c.note, c.worker_pid, c.device)
            AS r(id, token, attempt, at, result, note, worker_pid, device)
        WHERE t.id BETWEEN r.id AND r.id AND t.token = r.token AND t.attempt = coalesce(r.attempt, c.attempt[1])
        RETURNING {{completed_columns_of_t}}, t.token, t.state, t.node, r.at, r.result, coalesce(r.note, t.note) AS note,
            coalesce(r.worker_pid, t.worker_pid) AS worker_pid, coalesce(r.device, t.device) AS device
    ), kept AS (
        INSERT INTO taskyard.finished (
            {{completed_columns}}, run_token, previous_state, run_node, finished_at, result, note, run_worker_pid,
            run_device, state)
        SELECT {{completed_columns}}, token, state, node, at, result, note, worker_pid, device, 'completed' FROM gone
        RETURNING run_token, finished_at, uuid, queue, consumer, key
    )
    SELECT array_agg(run_token), count(*)::integer, array_agg(queue) FILTER (WHERE key IS NOT NULL),
        array_agg(key) FILTER (WHERE key IS NOT NULL), array_agg(uuid), array_agg(finished_at), array_agg(queue),
        array_agg(consumer), min(queue) = max(queue) AND min(consumer) = max(consumer)
    INTO settled, told, key_queues, keys, v_uuids, v_ats, v_queues, v_sources, v_is_one_lane FROM kept;
    IF v_is_one_lane THEN
        -- As it mostly is: then there is nothing to be put together.
        WITH event AS (
            INSERT INTO taskyard.event (xid, first, n, kind, queue, consumer, ats, uuids)
            VALUES (pg_current_xact_id()::text::bigint, 0, told, 'completed', v_queues[1], v_sources[1], v_ats, v_uuids)
        )
        INSERT INTO taskyard.state_count VALUES (v_queues[1], 'running', -told), (v_queues[1], 'completed', told);
    ELSIF told > 0 THEN
        PERFORM taskyard.write_events(0, array_fill('completed'::text, ARRAY[told]), v_uuids, v_queues, v_sources, v_ats);
        INSERT INTO taskyard.state_count
        SELECT queue, s.state, sum(s.sign) FROM unnest(v_queues) AS q(queue),
            (VALUES ('running', -1), ('completed', 1)) AS s(state, sign)
        GROUP BY queue, s.state;
    END IF;
END $$;

-- The same beside whoever claims from these queues, if all of them are plain: nobody waits for an end, their queues have no
-- limit and are not to be paused after the last run, and no task waits for its key. Else, or if something is due, nothing
-- is done: that takes more locks.
CREATE OR REPLACE FUNCTION taskyard.complete_apart(
    p_now timestamptz, p_queues text[], c taskyard.completions_1,
    OUT is_done boolean, OUT settled bigint[], OUT told integer, OUT next_due timestamptz
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM pg_advisory_xact_lock_shared({{lock_completions}}, h)
    FROM (SELECT DISTINCT hashtext(q) AS h FROM unnest(p_queues) AS q ORDER BY 1) AS hashes;
    -- In a statement of its own: what was committed by who had the lock before is seen.
    SELECT (SELECT due_at FROM taskyard.task WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1),
        c.keyless AND NOT taskyard.has_open('waiting') AND NOT EXISTS (
            SELECT FROM taskyard.queue WHERE name = ANY (p_queues) AND (concurrency IS NOT NULL OR state = 'stopping'))
    INTO next_due, is_done;
    is_done := is_done AND (next_due > p_now) IS NOT FALSE;
    IF is_done THEN
        SELECT d.settled, d.told INTO settled, told FROM taskyard.complete(c) AS d;
    END IF;
END $$;

-- Settle runs that ended otherwise. Each brings what it should become, and what it becomes if a cancel was requested of it
-- meanwhile.
CREATE OR REPLACE FUNCTION taskyard.settle(
    p_first integer, p_moves json,
    OUT settled bigint[], OUT told integer, OUT key_queues text[], OUT keys text[], OUT queued bigint[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_uuids text[]; v_queues text[]; v_sources text[]; v_kinds text[]; v_ats timestamptz[];
    v_details text[];
    v_trimmed bigint[]; v_trimmed_tasks bigint[];
BEGIN
    WITH m AS MATERIALIZED (
        SELECT j.ord, j.id, t.token, j.at, coalesce(j.worker_pid, t.worker_pid) AS worker_pid,
            coalesce(j.device, t.device) AS device,
            CASE WHEN a.asked THEN j.asked_state ELSE j.state END AS state,
            coalesce(CASE WHEN a.asked THEN j.asked_note ELSE j.note END, t.note) AS note,
            CASE WHEN a.asked THEN j.asked_error ELSE j.error END AS error,
            CASE WHEN a.asked THEN j.asked_detail ELSE j.detail END AS detail,
            -- A move that a cancel has turned into another counts as nothing else.
            CASE WHEN NOT a.turned THEN j.due_at END AS due_at, CASE WHEN NOT a.turned THEN j.result END AS result,
            CASE WHEN NOT a.turned THEN j.run END AS run, j.to_head AND NOT a.turned AS to_head,
            (j.retried AND NOT a.turned)::integer AS retried, (j.crashed AND NOT a.turned)::integer AS crashed,
            (j.recovered AND NOT a.turned)::integer AS recovered, (j.unspent AND NOT a.turned)::integer AS unspent
        FROM json_to_recordset(p_moves) AS j(
            ord integer, id bigint, token bigint, attempt integer, at timestamptz, state text, result text, error text,
            note text, due_at timestamptz, run text, retried boolean, crashed boolean, recovered boolean,
            unspent boolean, to_head boolean, detail text, asked_state text, asked_note text, asked_error text,
            asked_detail text, worker_pid integer, device text)
        JOIN taskyard.task AS t ON t.id = ANY (ARRAY[j.id]) AND t.token = j.token AND t.attempt = j.attempt
        CROSS JOIN LATERAL (
            SELECT t.cancel IS NOT NULL AND j.asked_state IS NOT NULL AS asked,
                t.cancel IS NOT NULL AND coalesce(j.asked_state, '') = 'canceled' AS turned) AS a
    ), ran AS (
        INSERT INTO taskyard.attempt (
            task, token, started_at, finished_at, attempt, worker_pid, node, state, error, device, account)
        SELECT t.id, t.token, t.started_at, m.at, t.attempt, m.worker_pid, t.node,
            coalesce(m.run, m.state), m.error, m.device, CASE WHEN m.device IS NOT NULL THEN t.key END
        FROM m JOIN taskyard.task AS t ON t.id = ANY (ARRAY[m.id])
    ), trimmed AS (
        -- With the one above, {{attempts_kept}} are kept: a task that postpones itself for ever must not grow for ever.
        DELETE FROM taskyard.attempt WHERE ctid = ANY (ARRAY(
            SELECT r.ctid FROM m CROSS JOIN LATERAL (
                SELECT ctid FROM taskyard.attempt WHERE task = m.id ORDER BY token DESC OFFSET {{attempts_kept}} - 1) AS r))
        RETURNING task, token
    ), stays AS (
        UPDATE taskyard.task AS t SET
            state = m.state, updated_at = m.at, retries = t.retries + m.retried, crashes = t.crashes + m.crashed,
            recoveries = t.recoveries + m.recovered, attempt = t.attempt - m.unspent,
            due_at = coalesce(m.due_at, t.due_at), error = coalesce(m.error, t.error), note = m.note,
            token = NULL, node = NULL, worker_pid = NULL, device = NULL, cancel = NULL,
            is_parked = m.state = 'queued' AND t.key IS NOT NULL,
            position = CASE WHEN m.to_head AND m.state = 'queued' THEN -nextval('taskyard.seq') * {{gap}}
                ELSE t.position END
        FROM m WHERE t.id = ANY (ARRAY[m.id]) AND m.state NOT IN ('completed', 'failed', 'canceled', 'skipped')
        RETURNING m.ord, m.state, m.at, m.token, m.detail, t.id, t.uuid, t.queue, t.consumer, t.key
    ), gone AS (
        DELETE FROM taskyard.task AS t USING m
        WHERE t.id = ANY (ARRAY[m.id]) AND m.state IN ('completed', 'failed', 'canceled', 'skipped')
        RETURNING m.ord, m.state AS new_state, m.at, m.result, m.note AS new_note, m.error AS new_error,
            m.crashed AS crashed, m.token AS run_token, m.detail, t.*
    ), kept AS (
        INSERT INTO taskyard.finished (
            {{carried_columns}}, crashes, cancel, finished_at, previous_state, state, result, error, note)
        SELECT {{carried_columns}}, crashes + crashed, cancel, at, state, new_state, result, coalesce(new_error, error),
            new_note
        FROM gone
    ), both_ AS (
        SELECT ord, state, at, token, detail, id, uuid, queue, consumer, key FROM stays
        UNION ALL SELECT ord, new_state, at, run_token, detail, id, uuid, queue, consumer, key FROM gone
    ), counted AS (
        INSERT INTO taskyard.state_count
        SELECT queue, 'running', -count(*) FROM both_ GROUP BY queue
        UNION ALL SELECT queue, state, count(*) FROM both_ GROUP BY queue, state
    )
    SELECT array_agg(token), array_agg(queue) FILTER (WHERE key IS NOT NULL), array_agg(key) FILTER (WHERE key IS NOT NULL),
        array_agg(id) FILTER (WHERE state = 'queued'), array_agg(state), array_agg(uuid), array_agg(queue),
        array_agg(consumer), array_agg(at), array_agg(detail), (SELECT array_agg(token) FROM trimmed),
        (SELECT array_agg(task) FROM trimmed)
    INTO settled, key_queues, keys, queued, v_kinds, v_uuids, v_queues, v_sources, v_ats, v_details, v_trimmed,
        v_trimmed_tasks
    FROM (SELECT * FROM both_ ORDER BY ord) AS o;
    IF v_trimmed IS NOT NULL THEN
        DELETE FROM taskyard.attempt_line WHERE task = ANY (v_trimmed_tasks) AND token = ANY (v_trimmed);
        DELETE FROM taskyard.artifact WHERE task = ANY (v_trimmed_tasks) AND token = ANY (v_trimmed);
    END IF;
    told := taskyard.write_events(p_first, v_kinds, v_uuids, v_queues, v_sources, v_ats, v_details);
END $$;

-- Add the log lines and artifacts of reports whose claims are still held. Called with the rows of these tasks locked.
CREATE OR REPLACE FUNCTION taskyard.add_outputs(p_reports json) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_report record;
    v_cut timestamptz;
BEGIN
    -- One report at a time: there are few, and each statement finds its rows by one key.
    FOR v_report IN
        SELECT j.* FROM json_to_recordset(p_reports) AS j(
            ord integer, id bigint, token bigint, attempt integer, has_outputs boolean, lines json, artifacts json)
        JOIN taskyard.task AS t ON t.id = ANY (ARRAY[j.id]) AND t.token = j.token AND t.attempt = j.attempt
        WHERE j.has_outputs ORDER BY j.ord
    LOOP
        IF v_report.lines IS NOT NULL THEN
            -- The same lines come again after an exchange that went unanswered.
            INSERT INTO taskyard.attempt_line (task, token, at, dropped, level, origin, text)
            SELECT v_report.id, v_report.token, at, dropped, level, origin, text
            FROM json_to_recordset(v_report.lines) AS l(
                at timestamptz, dropped integer, level text, origin text, text text)
            ON CONFLICT DO NOTHING;
            SELECT at INTO v_cut FROM taskyard.attempt_line WHERE task = v_report.id AND token = v_report.token
            ORDER BY at DESC LIMIT 1 OFFSET {{lines_kept}};
            IF FOUND THEN
                DELETE FROM taskyard.attempt_line
                WHERE task = v_report.id AND token = v_report.token AND at <= v_cut;
            END IF;
        END IF;
        IF v_report.artifacts IS NOT NULL THEN
            INSERT INTO taskyard.artifact (
                task, token, size, created_at, name, sha256, media_type, host, path, data)
            SELECT v_report.id, v_report.token, size, created_at, name, sha256, media_type, host, path,
                decode(data, 'base64')
            FROM json_to_recordset(v_report.artifacts) AS a(
                size bigint, created_at timestamptz, name text, sha256 text, media_type text, host text, path text,
                data text)
            ON CONFLICT (task, token, name) DO UPDATE SET size = excluded.size, created_at = excluded.created_at,
                sha256 = excluded.sha256, media_type = excluded.media_type, host = excluded.host, path = excluded.path,
                data = excluded.data;
        END IF;
    END LOOP;
END $$;

-- What runs say of themselves while they run.
CREATE OR REPLACE FUNCTION taskyard.report(p_first integer, p_now timestamptz, p_reports json) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_uuids text[]; v_queues text[]; v_sources text[]; v_kinds text[]; v_details text[]; v_has_outputs boolean;
BEGIN
    WITH r AS MATERIALIZED (
        SELECT j.*, t.uuid, t.queue, t.consumer
        FROM json_to_recordset(p_reports) AS j(
            ord integer, id bigint, token bigint, attempt integer, progress text, note text, checkpoint text,
            worker_pid integer, has_outputs boolean)
        JOIN taskyard.task AS t ON t.id = ANY (ARRAY[j.id]) AND t.token = j.token AND t.attempt = j.attempt
    ), last_word AS (
        SELECT id, token, (array_agg(progress ORDER BY ord DESC) FILTER (WHERE progress IS NOT NULL))[1] AS progress,
            (array_agg(note ORDER BY ord DESC) FILTER (WHERE note IS NOT NULL))[1] AS note,
            (array_agg(checkpoint ORDER BY ord DESC) FILTER (WHERE checkpoint IS NOT NULL))[1] AS checkpoint,
            (array_agg(worker_pid ORDER BY ord DESC) FILTER (WHERE worker_pid IS NOT NULL))[1] AS worker_pid
        FROM r GROUP BY id, token
    ), said AS (
        UPDATE taskyard.task AS t SET updated_at = p_now, progress = coalesce(l.progress, t.progress),
            note = coalesce(l.note, t.note), checkpoint = coalesce(l.checkpoint, t.checkpoint),
            worker_pid = coalesce(l.worker_pid, t.worker_pid)
        FROM last_word AS l WHERE t.id = ANY (ARRAY[l.id]) AND t.token = l.token
    )
    SELECT array_agg('progress'::text) FILTER (WHERE progress IS NOT NULL),
        array_agg(uuid) FILTER (WHERE progress IS NOT NULL), array_agg(queue) FILTER (WHERE progress IS NOT NULL),
        array_agg(consumer) FILTER (WHERE progress IS NOT NULL),
        array_agg('{"progress":' || progress || '}') FILTER (WHERE progress IS NOT NULL), bool_or(has_outputs)
    INTO v_kinds, v_uuids, v_queues, v_sources, v_details, v_has_outputs
    FROM r;
    IF v_has_outputs THEN
        PERFORM taskyard.add_outputs(p_reports);
    END IF;
    RETURN taskyard.write_events(p_first, v_kinds, v_uuids, v_queues, v_sources, ARRAY[p_now], v_details);
END $$;
