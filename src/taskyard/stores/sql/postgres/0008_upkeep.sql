-- History: how it is pruned, told, and put together.

-- Whether one that has not ended waits, or has waited, for this task. Looked for task by task, whatever the planner once
-- thought of empty tables.
CREATE FUNCTION taskyard.is_needed_1(p_id bigint) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM taskyard.dependency AS d WHERE d.parent = p_id
        AND (SELECT c.id FROM taskyard.task AS c WHERE c.id = d.child) IS NOT NULL);
END $$;

-- Forget at most so many tasks that ended before then, oldest first, and so long ago by the clock of the server: that of
-- one node may be set days ahead, which must not cost the others their results. Those that are needed are kept.
-- `p_failed` means those that failed, or the others alone.
CREATE FUNCTION taskyard.prune_1(p_before timestamptz, p_age interval, p_limit integer, p_failed boolean)
RETURNS integer LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_ids bigint[];
    v_pruned integer;
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);  -- it counts
    IF p_failed THEN
        v_ids := ARRAY(
            SELECT id FROM taskyard.ended AS e WHERE finished_at < least(p_before, now() - p_age) AND state = 'failed'
                AND NOT taskyard.is_needed_1(e.id)
            ORDER BY finished_at, id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    ELSE
        v_ids := ARRAY(
            SELECT id FROM taskyard.ended AS e WHERE finished_at < least(p_before, now() - p_age)
                AND (p_failed IS NULL OR state <> 'failed') AND NOT taskyard.is_needed_1(e.id)
            ORDER BY finished_at, id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    END IF;
    WITH gone AS (
        DELETE FROM taskyard.ended WHERE id = ANY (v_ids) RETURNING queue, state
    ), runs AS (
        DELETE FROM taskyard.run WHERE task = ANY (v_ids)
    ), ties AS (
        DELETE FROM taskyard.tie WHERE id = ANY (v_ids)
    ), edges AS (
        DELETE FROM taskyard.dependency WHERE child = ANY (v_ids)
    ), windows AS (
        DELETE FROM taskyard.slot_window WHERE slot IN (
            SELECT slot FROM taskyard.slot_window WHERE until <= least(p_before + p_age, now())
            ORDER BY until, slot LIMIT p_limit)
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
    WHERE a.locktype = 'advisory' AND a.classid = {{lock_events}} AND a.objid = 0 AND a.objsubid = 2
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
        -- Race: what was to be read may have been trimmed since it was looked how far that had come.
        SELECT trimmed INTO gone FROM taskyard.tidied ORDER BY n DESC LIMIT 1;
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
    IF NOT pg_try_advisory_xact_lock({{lock_tidying}}, 0) THEN
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
            DELETE FROM taskyard.tally WHERE queue <> '' AND xid >= v_was.tally_from AND xid < v_horizon
            RETURNING queue, state, n
        ), open AS (
            DELETE FROM taskyard.tally
            WHERE queue = '' AND state IN ('waiting', 'telling') AND xid >= v_was.tally_from AND xid < v_horizon
            RETURNING queue, state, n
        ), theirs AS (
            DELETE FROM taskyard.submitted WHERE xid >= v_was.submitted_from AND xid < v_min RETURNING queue, n
        )
        INSERT INTO taskyard.tally (queue, state, n, xid)
        SELECT queue, state, sum(n), v_is.tally_from
        FROM (SELECT * FROM ours UNION ALL SELECT * FROM open UNION ALL SELECT queue, 'scheduled', n FROM theirs) AS old
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

-- Forget the lanes of queues of which nothing is left, and whose turn it is there: every turn looks at all lanes. Some at a
-- time, from a name on; the last that was looked at, or null if there is no other. A queue that somebody is busy with is
-- left alone. Not where there are few: those come again, and what they leave behind each time would be walked over as long as
-- somebody's snapshot keeps it alive.
CREATE FUNCTION taskyard.forget_1(p_after text) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queue text; v_last text;
    v_looked integer := 0;
BEGIN
    IF p_after = '' AND (SELECT count(*) FROM taskyard.lane) <= {{lanes_kept}} THEN
        RETURN NULL;
    END IF;
    FOR v_queue IN
        SELECT queue FROM taskyard.lane WHERE queue > p_after
        EXCEPT
        SELECT queue FROM taskyard.tally
        WHERE xid >= (SELECT tally_from FROM taskyard.tidied ORDER BY n DESC LIMIT 1) AND queue <> ''
            AND state NOT IN ('completed', 'failed', 'canceled', 'skipped')
        GROUP BY queue HAVING sum(n) <> 0
        ORDER BY 1 LIMIT {{locked_at_most}}
    LOOP
        v_looked := v_looked + 1; v_last := v_queue;
        CONTINUE WHEN NOT pg_try_advisory_xact_lock({{lock_queue}}, hashtext(v_queue));
        -- Under its lock, and whatever was counted.
        CONTINUE WHEN (SELECT id FROM taskyard.task WHERE queue = v_queue AND state = 'queued' AND NOT parked
                       ORDER BY source, priority, position LIMIT 1) IS NOT NULL;
        DELETE FROM taskyard.lane WHERE queue = v_queue;
        DELETE FROM taskyard.mark WHERE queue = v_queue;
        DELETE FROM taskyard.turns WHERE queue = v_queue;
    END LOOP;
    RETURN CASE WHEN v_looked = {{locked_at_most}} THEN v_last END;
END $$;
