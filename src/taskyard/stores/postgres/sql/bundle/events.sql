-- Events: written by every change, read in the order of their transactions.

-- Write an event for each of these tasks, and return how many there are. The arrays are of one length, but for `p_ats`,
-- which may hold one time for all, and `p_details`, which may be null. Events of one kind, queue and consumer share a row.
CREATE OR REPLACE FUNCTION taskyard.write_events(
    p_first integer, p_kinds text[], p_uuids text[], p_queues text[], p_sources text[], p_ats timestamptz[],
    p_details text[] DEFAULT NULL
) RETURNS integer LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_told integer;
BEGIN
    IF p_kinds IS NULL THEN
        RETURN 0;
    END IF;
    WITH grouped AS (
        SELECT kind, queue, consumer, array_agg(uuid ORDER BY ord) AS uuids, array_agg(at ORDER BY ord) AS ats,
            CASE WHEN count(detail) > 0 THEN array_agg(detail ORDER BY ord) END AS details,
            count(*)::integer AS n, min(ord) AS ord
        FROM unnest(p_kinds, p_uuids, p_queues, p_sources, p_ats, p_details) WITH ORDINALITY
            AS u(kind, uuid, queue, consumer, at, detail, ord)
        GROUP BY kind, queue, consumer
    ), told AS (
        INSERT INTO taskyard.event (xid, first, n, kind, queue, consumer, ats, uuids, details)
        SELECT pg_current_xact_id()::text::bigint, p_first + (sum(n) OVER (ORDER BY ord))::integer - n, n, kind, queue,
            consumer, CASE WHEN cardinality(p_ats) = 1 THEN p_ats ELSE ats END, uuids, details
        FROM grouped
    )
    SELECT coalesce(sum(n), 0) INTO v_told FROM grouped;
    RETURN v_told;
END $$;

-- The detail of an event, as `EventDetail` of Python has it.
CREATE OR REPLACE FUNCTION taskyard.event_detail(p_before text, p_code text DEFAULT NULL) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT json_strip_nulls(json_build_object('before', p_before, 'code', p_code))::text
$$;

-- The same for a new task: the state that it begins in, unless it is queued, and who submitted it, if `extra` says so.
CREATE OR REPLACE FUNCTION taskyard.submit_detail(p_state text, p_extra text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT nullif(json_strip_nulls(json_build_object(
        'actor', p_extra::json ->> 'submitted_by', 'after', nullif(p_state, 'queued')))::text, '{}')
$$;

-- All our transactions before this number have ended. As long as nobody else keeps one open that is the oldest running
-- transaction; otherwise it is looked which of the running ones are ours. Those hold a lock that they take before they
-- get a number, and let go of when what they wrote can be seen: who began after the snapshot of the statement below has
-- a number from xmax on; who began before and is not found among the locks has ended.
-- Whose number is not among the locks has none yet, and will get a later one. Or it has just got one and is about to
-- lock it: then that is one of those that ran and that nobody has locked.
CREATE OR REPLACE FUNCTION taskyard.horizon() RETURNS bigint LANGUAGE plpgsql AS $$
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
    WHERE a.locktype = 'advisory' AND a.classid = {{lock_events}} AND a.objid = 0 AND a.objsubid = 2
        AND a.database = (SELECT oid FROM pg_database WHERE datname = current_database());
    RETURN least(v_max, v_ours);
END $$;

-- Events after a number, about `p_limit` of them; the number of the newest there is, and of the last that was trimmed.
-- An event's number is its transaction's, times {{events_at_most}}, plus its place in it.
CREATE OR REPLACE FUNCTION taskyard.read_events_1(
    p_after bigint, p_limit integer, OUT newest bigint, OUT gone bigint, OUT page taskyard.event_page_1[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_horizon bigint := taskyard.horizon();
BEGIN
    SELECT trimmed INTO gone FROM taskyard.compaction ORDER BY n DESC LIMIT 1;
    SELECT xid * {{events_at_most}} + first + n - 1 INTO newest
    FROM taskyard.event WHERE xid < v_horizon ORDER BY xid DESC, first DESC LIMIT 1;
    newest := coalesce(newest, gone);
    IF p_after >= 0 AND p_after < newest THEN
        page := ARRAY(
            SELECT counted.e FROM (
                SELECT found.e, sum((found.e).n) OVER (ORDER BY (found.e).xid, (found.e).first) - (found.e).n AS before
                FROM (
                    SELECT ROW(e.xid, e.first, e.n, e.kind, e.queue, e.consumer, e.ats, e.uuids, e.details)::taskyard.event_page_1 AS e
                    FROM taskyard.event AS e
                    WHERE e.xid < v_horizon AND e.xid >= p_after / {{events_at_most}}
                        AND e.xid * {{events_at_most}} + e.first + e.n - 1 > p_after
                    ORDER BY e.xid, e.first LIMIT p_limit) AS found) AS counted
            WHERE counted.before <= p_limit ORDER BY (counted.e).xid, (counted.e).first);
        -- Race: what was to be read may have been trimmed since it was looked how far that had come.
        SELECT trimmed INTO gone FROM taskyard.compaction ORDER BY n DESC LIMIT 1;
    END IF;
END $$;
