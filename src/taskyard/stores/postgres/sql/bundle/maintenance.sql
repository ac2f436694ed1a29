-- Pruning, and compaction of counts and events.

-- Whether one that has not ended waits, or has waited, for this task. Looked for task by task, whatever the planner once
-- thought of empty tables.
CREATE OR REPLACE FUNCTION taskyard.is_needed(p_id bigint) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM taskyard.dependency AS d WHERE d.parent = p_id
        AND (SELECT c.id FROM taskyard.task AS c WHERE c.id = d.child) IS NOT NULL);
END $$;

-- Forget at most so many tasks that ended before then, oldest first, and so long ago by the clock of the server: that of
-- one node may be set days ahead, which must not cost the others their results. Those that are needed are kept.
-- `p_failed` means those that failed, or the others alone.
CREATE OR REPLACE FUNCTION taskyard.prune_1(
    p_before timestamptz, p_age interval, p_limit integer, p_failed boolean, p_audit json
) RETURNS integer LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_ids bigint[];
    v_pruned integer;
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);  -- it counts
    IF p_failed THEN
        v_ids := ARRAY(
            SELECT id FROM taskyard.finished AS e WHERE finished_at < least(p_before, now() - p_age) AND state = 'failed'
                AND NOT taskyard.is_needed(e.id)
            ORDER BY finished_at, id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    ELSE
        v_ids := ARRAY(
            SELECT id FROM taskyard.finished AS e WHERE finished_at < least(p_before, now() - p_age)
                AND (p_failed IS NULL OR state <> 'failed') AND NOT taskyard.is_needed(e.id)
            ORDER BY finished_at, id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    END IF;
    WITH gone AS (
        DELETE FROM taskyard.finished WHERE id = ANY (v_ids) RETURNING queue, state
    ), runs AS (
        DELETE FROM taskyard.attempt WHERE task = ANY (v_ids)
    ), lines AS (
        DELETE FROM taskyard.attempt_line WHERE task = ANY (v_ids)
    ), artifacts AS (
        DELETE FROM taskyard.artifact WHERE task = ANY (v_ids)
    ), labels AS (
        DELETE FROM taskyard.task_label WHERE task = ANY (v_ids)
    ), ties AS (
        DELETE FROM taskyard.task_relation WHERE id = ANY (v_ids)
    ), edges AS (
        DELETE FROM taskyard.dependency WHERE child = ANY (v_ids)
    ), windows AS (
        DELETE FROM taskyard.dedupe_window WHERE slot IN (
            SELECT slot FROM taskyard.dedupe_window WHERE until <= least(p_before + p_age, now())
            ORDER BY until, slot LIMIT p_limit)
    ), counted AS (
        INSERT INTO taskyard.state_count SELECT queue, state, -count(*) FROM gone GROUP BY queue, state
    )
    SELECT count(*) INTO v_pruned FROM gone;
    PERFORM taskyard.note_audit_1(p_audit, v_pruned, v_pruned);
    RETURN v_pruned;
END $$;

-- Put together what was counted, and trim the events to about `p_ring`. One at a time; who comes second has nothing to
-- do. Whatever the past has left behind, nothing is read from before where the last time ended.
CREATE OR REPLACE FUNCTION taskyard.compact_1(p_ring integer) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_was taskyard.compaction;
    v_is taskyard.compaction;
    v_last record;
    v_horizon bigint;
    v_min bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock({{lock_compaction}}, 0) THEN
        RETURN false;
    END IF;
    v_horizon := taskyard.horizon();
    v_min := least(v_horizon, pg_snapshot_xmin(pg_current_snapshot())::text::bigint);
    SELECT * INTO v_was FROM taskyard.compaction ORDER BY n DESC LIMIT 1;
    v_is := v_was;
    v_is.n := nextval('taskyard.seq');
    IF v_horizon - 1 > v_was.state_count_from THEN
        -- The sums stand before whatever is not counted in them: a transaction that has not ended may have any number
        -- from the horizon on.
        v_is.state_count_from := v_horizon - 1;
        v_is.external_count_from := greatest(v_min, v_was.external_count_from);
        WITH ours AS (
            DELETE FROM taskyard.state_count WHERE queue <> '' AND xid >= v_was.state_count_from AND xid < v_horizon
            RETURNING queue, state, n
        ), open AS (
            DELETE FROM taskyard.state_count
            WHERE queue = '' AND state IN ('waiting', 'telling') AND xid >= v_was.state_count_from AND xid < v_horizon
            RETURNING queue, state, n
        ), theirs AS (
            DELETE FROM taskyard.external_count WHERE xid >= v_was.external_count_from AND xid < v_min RETURNING queue, n
        )
        INSERT INTO taskyard.state_count (queue, state, n, xid)
        SELECT queue, state, sum(n), v_is.state_count_from
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
    DELETE FROM taskyard.compaction WHERE n = v_was.n;
    INSERT INTO taskyard.compaction SELECT v_is.*;
    RETURN true;
END $$;

-- Drop lanes of tasks with requirements in which no task may start, from a queue name on, for some queues at a time; the last
-- queue that was looked at, or null if there is no other. There may be as many such lanes as there are sets of requirements. A
-- queue that another session is busy with is left alone, and so are all if there are few lanes.
CREATE OR REPLACE FUNCTION taskyard.drop_spent_lanes_1(p_after text) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queue text; v_last text;
    v_looked integer := 0;
BEGIN
    IF p_after = '' AND (SELECT count(*) FROM taskyard.lane) <= {{lanes_kept}} THEN
        RETURN NULL;
    END IF;
    FOR v_queue IN
        SELECT DISTINCT queue FROM taskyard.lane WHERE queue > p_after AND strpos(lane, {{lane_separator}}) > 0
        ORDER BY 1 LIMIT {{locked_at_most}}
    LOOP
        v_looked := v_looked + 1; v_last := v_queue;
        CONTINUE WHEN NOT pg_try_advisory_xact_lock({{lock_queue}}, hashtext(v_queue));
        WITH spent AS (
            DELETE FROM taskyard.lane AS l
            WHERE l.queue = v_queue AND strpos(l.lane, {{lane_separator}}) > 0 AND (
                SELECT t.id FROM taskyard.task AS t
                WHERE t.queue = l.queue AND t.lane = l.lane AND t.state = 'queued' AND NOT t.is_parked
                ORDER BY t.priority, t.position LIMIT 1) IS NULL
            RETURNING l.lane
        )
        DELETE FROM taskyard.watermark AS m USING spent WHERE m.queue = v_queue AND m.lane = ANY (ARRAY[spent.lane]);
    END LOOP;
    RETURN CASE WHEN v_looked = {{locked_at_most}} THEN v_last END;
END $$;

-- Forget the lanes of queues of which nothing is left, and whose turn it is there: every turn looks at all lanes. Some at a
-- time, from a name on; the last that was looked at, or null if there is no other. A queue that somebody is busy with is
-- left alone. Not where there are few: those come again, and what they leave behind each time would be walked over as long as
-- somebody's snapshot keeps it alive.
CREATE OR REPLACE FUNCTION taskyard.drop_empty_lanes_1(p_after text) RETURNS text LANGUAGE plpgsql AS $$
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
        SELECT queue FROM taskyard.state_count
        WHERE xid >= (SELECT state_count_from FROM taskyard.compaction ORDER BY n DESC LIMIT 1) AND queue <> ''
            AND state NOT IN ('completed', 'failed', 'canceled', 'skipped')
        GROUP BY queue HAVING sum(n) <> 0
        ORDER BY 1 LIMIT {{locked_at_most}}
    LOOP
        v_looked := v_looked + 1; v_last := v_queue;
        CONTINUE WHEN NOT pg_try_advisory_xact_lock({{lock_queue}}, hashtext(v_queue));
        -- Under its lock, and whatever was counted.
        CONTINUE WHEN (SELECT id FROM taskyard.task WHERE queue = v_queue AND state = 'queued' AND NOT is_parked
                       ORDER BY lane, priority, position LIMIT 1) IS NOT NULL;
        DELETE FROM taskyard.lane WHERE queue = v_queue;
        DELETE FROM taskyard.watermark WHERE queue = v_queue;
        DELETE FROM taskyard.fairness WHERE queue = v_queue;
    END LOOP;
    RETURN CASE WHEN v_looked = {{locked_at_most}} THEN v_last END;
END $$;
