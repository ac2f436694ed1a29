-- What is called now and then: commands, rescue, settings, events, upkeep.

-- What a decision about a task rests on. While it runs, others write down what its run says of itself: that makes it no
-- other task. In all other states whatever is written does.
CREATE FUNCTION taskyard.version_1(p_token bigint, p_cancel_asked_at timestamptz, p_written xid) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_token IS NULL THEN p_written::text
        ELSE 'runs ' || p_token || CASE WHEN p_cancel_asked_at IS NULL THEN '' ELSE ' asked' END END
$$;

-- Carry out what was decided about these tasks, if each of them is still the version that was looked at; otherwise
-- nothing happens and `done` is false. `how`: 'change' leaves the task in its state, 'end' ends it, 'again' sends an
-- ended one again. A note that is null stays what it is. `places` says where each stands afterwards.
CREATE PROCEDURE taskyard.change_1(
    p_queues text[], p_changes json, e_kinds text[], e_uuids text[], e_queues text[], e_sources text[], p_now timestamptz,
    INOUT done boolean, INOUT places json, INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_keys text[]; v_key_queues text[];
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
            note text, state text, error text, to_head boolean, ord integer)
    ), changed AS (
        UPDATE taskyard.task AS t SET priority = j.priority, cancel_asked_at = j.cancel_asked_at,
            cancel_reason = j.cancel_reason, note = coalesce(j.note, t.note), updated_at = p_now,
            parked = t.state = 'queued' AND t.key IS NOT NULL
        FROM j WHERE t.id = j.id AND j.how = 'change'
        RETURNING t.queue, t.key
    ), gone AS (
        DELETE FROM taskyard.task AS t USING j WHERE t.id = j.id AND j.how = 'end'
        RETURNING j.state AS new_state, j.error AS new_error, j.note AS new_note, t.*
    ), ended AS (
        INSERT INTO taskyard.ended (
            id, position, due_at, created_at, started_at, finished_at, timeout_s, attempt, retries, crashes,
            recoveries, priority, was, state, uuid, source, queue, args, key, retry, progress, error, note, checkpoint)
        SELECT id, position, due_at, created_at, started_at, p_now, timeout_s, attempt, retries, crashes,
            recoveries, priority, state, new_state, uuid, source, queue, args, key, retry, progress, new_error, new_note,
            checkpoint
        FROM gone
    ), back AS (
        DELETE FROM taskyard.ended AS e USING j WHERE e.id = j.id AND j.how = 'again'
        RETURNING j.ord, j.to_head, j.state AS new_state, j.note AS new_note, e.*
    ), again AS (
        INSERT INTO taskyard.task (
            id, position, due_at, created_at, updated_at, started_at, timeout_s, attempt, priority, parked, state, uuid,
            source, queue, args, key, retry, progress, error, note, checkpoint)
        SELECT id, CASE WHEN to_head THEN -1 ELSE 1 END * nextval('taskyard.seq') * {{gap}}, due_at, created_at, p_now,
            started_at, timeout_s, attempt, priority, key IS NOT NULL, new_state, uuid, source, queue, args, key, retry,
            progress, error, new_note, checkpoint
        FROM (SELECT * FROM back ORDER BY ord) AS o
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, state, -count(*) FROM gone GROUP BY queue, state
        UNION ALL SELECT queue, new_state, count(*) FROM gone GROUP BY queue, new_state
        UNION ALL SELECT queue, state, -count(*) FROM back GROUP BY queue, state
        UNION ALL SELECT queue, new_state, count(*) FROM back GROUP BY queue, new_state
    )
    SELECT array_agg(queue), array_agg(key) INTO v_key_queues, v_keys
    FROM (SELECT queue, key FROM changed UNION SELECT queue, key FROM gone UNION SELECT queue, key FROM back) AS k
    WHERE key IS NOT NULL;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.repark_1(v_key_queues, v_keys);
    END IF;
    PERFORM taskyard.lower_1(ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint)));
    told := taskyard.tell_1(0, e_kinds, e_uuids, e_queues, e_sources, ARRAY[p_now]);
    SELECT json_agg(json_build_array(t.id, t.position, t.parked)) INTO places
    FROM json_to_recordset(p_changes) AS j(id bigint) JOIN taskyard.task AS t ON t.id = j.id;
    COMMIT;
END $$;

-- Take back what a dead node runs, and forget the node, unless it has beaten since `p_beats` was seen.
CREATE PROCEDURE taskyard.rescue_1(
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
            recoveries = t.recoveries + 1, position = heads.place, parked = t.key IS NOT NULL
        FROM heads WHERE t.id = heads.id
        RETURNING t.id, t.uuid, t.queue, t.source, t.key
    ), gone AS (
        DELETE FROM taskyard.task AS t USING m WHERE t.id = m.id AND m.state <> 'queued'
        RETURNING m.state AS new_state, m.reason, t.*
    ), kept AS (
        INSERT INTO taskyard.ended (
            id, position, due_at, created_at, started_at, finished_at, timeout_s, attempt, retries, crashes,
            recoveries, priority, was, state, uuid, source, queue, args, key, retry, progress, error, note, checkpoint)
        SELECT id, position, due_at, created_at, started_at, p_now, timeout_s, attempt, retries, crashes, recoveries,
            priority, 'interrupted', new_state, uuid, source, queue, args, key, retry, progress,
            CASE WHEN new_state = 'failed' THEN p_failed
                ELSE replace(p_canceled, '{{reason}}', substr(reason, 2, length(reason) - 2)) END,
            p_why, checkpoint
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
    COMMIT;
END $$;

-- Create a queue or change its rules.
CREATE PROCEDURE taskyard.queue_1(
    p_name text, p_concurrency integer, p_per_key integer, p_auto_recover integer, p_settings text, INOUT changed boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_keys text[];
BEGIN
    PERFORM taskyard.lock_queues_1(ARRAY[p_name]);
    INSERT INTO taskyard.queue AS q VALUES (p_name, p_concurrency, p_per_key, p_auto_recover, p_settings)
    ON CONFLICT (name) DO UPDATE SET concurrency = excluded.concurrency, per_key = excluded.per_key,
        auto_recover = excluded.auto_recover, settings = excluded.settings
    WHERE q.settings <> excluded.settings;
    changed := FOUND;
    IF changed THEN
        v_keys := ARRAY(SELECT DISTINCT key FROM taskyard.task
            WHERE queue = p_name AND key IS NOT NULL AND state = 'queued');
        IF cardinality(v_keys) > 0 THEN
            PERFORM taskyard.repark_1(array_fill(p_name, ARRAY[cardinality(v_keys)]), v_keys);
        END IF;
    END IF;
    COMMIT;
END $$;

-- Forget at most so many tasks that ended before then, oldest first, and so long ago by the clock of the server: that of
-- one node may be set days ahead, which must not cost the others their results.
CREATE FUNCTION taskyard.prune_1(p_before timestamptz, p_age interval, p_limit integer) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_pruned integer;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(1953721203, 0);  -- it counts
    WITH old AS MATERIALIZED (
        SELECT id FROM taskyard.ended WHERE finished_at < least(p_before, now() - p_age)
        ORDER BY finished_at, id LIMIT p_limit FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM taskyard.ended AS e USING old WHERE e.id = old.id RETURNING e.id, e.queue, e.state
    ), runs AS (
        DELETE FROM taskyard.run AS r USING old WHERE r.task = old.id
    ), counted AS (
        INSERT INTO taskyard.tally SELECT queue, state, -count(*) FROM gone GROUP BY queue, state
    )
    SELECT count(*) INTO v_pruned FROM gone;
    RETURN v_pruned;
END $$;

-- All our transactions before this number have ended. As long as nobody else keeps one open that is the oldest running
-- transaction; otherwise it is looked which of the running ones are ours. Those hold a lock that they take before they
-- get a number, and let go of when what they wrote can be seen: who began after the snapshot of the statement below has
-- a number from xmax on; who began before and is not found among the locks has ended.
-- Whose number is not among the locks has none yet, and will get a later one. Or it has just got one and is about to
-- lock it: then that is one of those that ran and that nobody has locked.
CREATE FUNCTION taskyard.horizon_1() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_min bigint := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    v_max bigint;
    v_running bigint[];
    v_ours bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM taskyard.event WHERE xid >= v_min) THEN
        RETURN v_min;
    END IF;
    SELECT pg_snapshot_xmax(s)::text::bigint, ARRAY(SELECT x::text::bigint FROM pg_snapshot_xip(s) AS x)
    INTO v_max, v_running FROM pg_current_snapshot() AS s;
    WITH held AS MATERIALIZED (
        -- Of a number the lock has the lower 32 bits; it lies within 2^31 of xmax, on either side.
        SELECT pid, locktype, database, classid, objid, objsubid,
            v_max + ((transactionid::text::bigint - v_max + 2147483648) & 4294967295) - 2147483648 AS number
        FROM pg_locks WHERE locktype = 'advisory' OR locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted
    ), numbered AS (
        SELECT pid, number FROM held WHERE locktype = 'transactionid'
    )
    SELECT least(min(n.number), CASE WHEN bool_or(n.number IS NULL)
        THEN (SELECT min(r) FROM unnest(v_running) AS r WHERE NOT EXISTS (SELECT FROM numbered WHERE number = r)) END)
    INTO v_ours
    FROM held AS a LEFT JOIN numbered AS n ON n.pid = a.pid
    WHERE a.locktype = 'advisory' AND a.classid = 1953721203 AND a.objid = 0 AND a.objsubid = 2
        AND a.database = (SELECT oid FROM pg_database WHERE datname = current_database());
    RETURN least(v_max, v_ours);
END $$;

-- What events_1 answers with: not the row itself, which may get more columns some day.
CREATE TYPE taskyard.told_1 AS (
    xid bigint, first integer, n integer, kind text, queue text, source text, ats timestamptz[], uuids text[]
);

-- Events after a number, about `p_limit` of them; the number of the newest there is, and of the last that was trimmed.
-- An event's number is its transaction's, times {{events_at_most}}, plus its place in it.
CREATE FUNCTION taskyard.events_1(
    p_after bigint, p_limit integer, OUT newest bigint, OUT gone bigint, OUT page taskyard.told_1[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_horizon bigint := taskyard.horizon_1();
BEGIN
    SELECT trimmed INTO gone FROM taskyard.tidied ORDER BY n DESC LIMIT 1;
    SELECT xid * {{events_at_most}} + first + n - 1 INTO newest
    FROM taskyard.event WHERE xid < v_horizon ORDER BY xid DESC, first DESC LIMIT 1;
    newest := coalesce(newest, gone);
    IF p_after >= 0 AND p_after < newest THEN
        page := ARRAY(
            SELECT counted.e FROM (
                SELECT found.e, sum((found.e).n) OVER (ORDER BY (found.e).xid, (found.e).first) - (found.e).n AS before
                FROM (
                    SELECT ROW(e.xid, e.first, e.n, e.kind, e.queue, e.source, e.ats, e.uuids)::taskyard.told_1 AS e
                    FROM taskyard.event AS e
                    WHERE e.xid < v_horizon AND e.xid >= p_after / {{events_at_most}}
                        AND e.xid * {{events_at_most}} + e.first + e.n - 1 > p_after
                    ORDER BY e.xid, e.first LIMIT p_limit) AS found) AS counted
            WHERE counted.before <= p_limit ORDER BY (counted.e).xid, (counted.e).first);
    END IF;
END $$;

-- Put together what was counted, and trim the events to about `p_ring`. One at a time; who comes second has nothing to
-- do. Whatever the past has left behind, nothing is read from before where the last time ended.
CREATE FUNCTION taskyard.tidy_1(p_ring integer) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_was taskyard.tidied;
    v_is taskyard.tidied;
    v_last record;
    v_horizon bigint;
    v_min bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock(1953721206, 0) THEN
        RETURN false;
    END IF;
    v_horizon := taskyard.horizon_1();
    v_min := least(v_horizon, pg_snapshot_xmin(pg_current_snapshot())::text::bigint);
    SELECT * INTO v_was FROM taskyard.tidied ORDER BY n DESC LIMIT 1;
    v_is := v_was;
    v_is.n := nextval('taskyard.seq');
    IF v_horizon - 1 > v_was.tally_from THEN
        -- The sums stand before whatever is not counted in them: a transaction that has not ended may have any number
        -- from the horizon on.
        v_is.tally_from := v_horizon - 1;
        v_is.submitted_from := greatest(v_min, v_was.submitted_from);
        WITH ours AS (
            DELETE FROM taskyard.tally WHERE xid >= v_was.tally_from AND xid < v_horizon RETURNING queue, state, n
        ), theirs AS (
            DELETE FROM taskyard.submitted WHERE xid >= v_was.submitted_from AND xid < v_min RETURNING queue, n
        )
        INSERT INTO taskyard.tally (queue, state, n, xid)
        SELECT queue, state, sum(n), v_is.tally_from
        FROM (SELECT queue, state, n FROM ours UNION ALL SELECT queue, 'scheduled', n FROM theirs) AS old
        GROUP BY queue, state HAVING sum(n) <> 0;
    END IF;
    SELECT xid, first, n INTO v_last FROM (
        SELECT xid, first, n, sum(n) OVER (ORDER BY xid DESC, first DESC) AS kept FROM taskyard.event
        WHERE xid < v_horizon AND xid >= v_was.trimmed / {{events_at_most}}) AS e
    WHERE kept - n >= p_ring ORDER BY xid DESC, first DESC LIMIT 1;
    IF FOUND THEN
        DELETE FROM taskyard.event
        WHERE (xid, first) <= (v_last.xid, v_last.first) AND xid >= v_was.trimmed / {{events_at_most}};
        v_is.trimmed := v_last.xid * {{events_at_most}} + v_last.first + v_last.n - 1;
    END IF;
    DELETE FROM taskyard.tidied WHERE n = v_was.n;
    INSERT INTO taskyard.tidied SELECT v_is.*;
    RETURN true;
END $$;
