-- What nodes call, and what these files share. A name ends with its version: when it is to take or answer something else,
-- the next migration adds the next version, and a node of the version before goes on calling its own meanwhile.
-- All is plpgsql, because that keeps its plans; a function in SQL is planned anew in every transaction before version 18.
--
-- Every procedure that writes takes its locks first, in this order and each kind in order of its numbers, so that no two
-- wait for each other: (1) that it writes events, shared; (2) the node, shared by its turns and alone by its rescue;
-- (3) the queues; (4) the ends of their tasks; (5) slots, by those who take any. Locks are advisory, of the transaction: a
-- row lock would write to the row each time. What belongs to a task, its edges and its row in `tie`, is written under the
-- locks of its queue.
--
-- Most take (3) and (4) together. Two need only one of them, and so go on beside each other: a turn that brings no ends and
-- no adds that have to do with others takes (3), and who completes plain runs shares (4). What makes a run plain is that
-- nothing the first does depends on its end (`complete_apart_1`). Where they meet all the same: counts are added, and read
-- only where there is a limit; an insert waits for the end of a task with its uuid, and looks afterwards; what a run says
-- goes at least a turn ahead of its end.
--
-- Plans are made when the tables are empty, and kept. To a planner that knows no better, all that is queued or runs is as
-- good a place to look for a few tasks as the index of their ids. Where the ids, tokens or keys are known, a condition
-- that a partial index stands for is therefore left out, hidden behind OFFSET 0 or put as a comparison. Whoever has a token
-- runs: the table sees to that. Nor does it know better when the server has counted few tasks where many dead ones lie, kept
-- by somebody's snapshot: rather than look for each id of a list, it would walk over a whole index, which two columns that
-- are equal let it consider, since they could be merged. Joined by = ANY (ARRAY[id]) they cannot, nor by BETWEEN id AND
-- id, which takes a little less where a thousand are looked for in every turn. Of a task that need only be there nothing but
-- an index is read, which may be walked over all the same: that is asked as (SELECT id …) IS NOT NULL.

CREATE FUNCTION taskyard.lock_queues_1(p_queues text[], p_with_ends boolean DEFAULT true) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({{lock_queue}}, h)
    FROM (SELECT DISTINCT hashtext(q) AS h FROM unnest(p_queues) AS q ORDER BY 1) AS hashes;
    IF p_with_ends THEN
        PERFORM pg_advisory_xact_lock({{lock_ends}}, h)
        FROM (SELECT DISTINCT hashtext(q) AS h FROM unnest(p_queues) AS q ORDER BY 1) AS hashes;
    END IF;
END $$;

-- Not one for each: the server has room for some thousands of locks.
CREATE FUNCTION taskyard.lock_slots_1(p_slots text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({{lock_slot}}, h)
    FROM (SELECT DISTINCT hashtext(s) & 255 AS h FROM unnest(p_slots) AS s WHERE s IS NOT NULL ORDER BY 1) AS hashes;
END $$;

-- A transaction of somebody else's may hold a slot, and stay open for as long as he likes. It takes these locks alone,
-- turns share them, and neither ever waits: false if somebody is in the way. Of many slots none is locked.
-- Race: A takes many, B a few of them. A says that he takes many, then looks for the locks of others; B locks his own, then
-- looks whether anybody takes many (`are_many_open_1`). Whoever comes second notices, and is careful with the index.
CREATE FUNCTION taskyard.lock_open_slots_1(p_slots text[], p_alone boolean) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_hashes integer[] := ARRAY(SELECT DISTINCT hashtext(s) FROM unnest(p_slots) AS s WHERE s IS NOT NULL ORDER BY 1);
    v_hash integer;
BEGIN
    IF cardinality(v_hashes) > {{locked_at_most}} THEN
        IF p_alone THEN
            PERFORM pg_advisory_xact_lock_shared({{lock_many_slots}}, 0);
        END IF;
        RETURN NOT EXISTS (
            SELECT FROM pg_locks AS l JOIN unnest(v_hashes) AS h ON h = l.objid::bigint::bit(32)::integer
            WHERE l.locktype = 'advisory' AND l.classid = {{lock_open_slot}} AND l.mode = 'ExclusiveLock'
                AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                AND l.pid IS DISTINCT FROM pg_backend_pid());  -- one that is prepared has none
    END IF;
    FOREACH v_hash IN ARRAY v_hashes LOOP
        IF p_alone AND NOT pg_try_advisory_xact_lock({{lock_open_slot}}, v_hash)
            OR NOT p_alone AND NOT pg_try_advisory_xact_lock_shared({{lock_open_slot}}, v_hash) THEN
            RETURN false;
        END IF;
    END LOOP;
    RETURN true;
END $$;

-- Whether a transaction of somebody else's is open that has taken so many slots that none is locked.
CREATE FUNCTION taskyard.are_many_open_1() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    -- In one expression, which nothing interrupts: the lock is the session's. If two ask at once, one of them is told so in vain.
    RETURN NOT (pg_try_advisory_lock({{lock_many_slots}}, 0) AND pg_advisory_unlock({{lock_many_slots}}, 0));
END $$;

-- Whether there are any: edges that are open ('waiting'), or ends that are still to be told ('telling').
CREATE FUNCTION taskyard.are_open_1(VARIADIC p_what text[]) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN coalesce((
        SELECT sum(n) FROM taskyard.tally WHERE queue = '' AND state = ANY (p_what)
            AND xid >= (SELECT tally_from FROM taskyard.tidied ORDER BY n DESC LIMIT 1)), 0) <> 0;
END $$;

-- Tell that these tasks did `kind`; how many events that were. The arrays
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

-- These tasks may have become startable: their lanes must not be read from above them. Of a lane that is not there, or has had
-- none of a priority, nothing else of it may start.
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
        SELECT queue, source, low_0 * 0, low_1 * 0, low_2 * 0 FROM t ORDER BY queue, source  -- 0 where there is one
        ON CONFLICT (queue, source) DO UPDATE SET low_0 = coalesce(l.low_0, excluded.low_0),
            low_1 = coalesce(l.low_1, excluded.low_1), low_2 = coalesce(l.low_2, excluded.low_2)
        WHERE coalesce(l.low_0, excluded.low_0) IS DISTINCT FROM l.low_0
            OR coalesce(l.low_1, excluded.low_1) IS DISTINCT FROM l.low_1
            OR coalesce(l.low_2, excluded.low_2) IS DISTINCT FROM l.low_2
    ), old AS MATERIALIZED (
        SELECT t.queue, t.source, m.n,
            CASE WHEN l.low_0 IS NULL THEN t.low_0 ELSE least(t.low_0, coalesce(m.low_0, 0)) END AS low_0,
            CASE WHEN l.low_1 IS NULL THEN t.low_1 ELSE least(t.low_1, coalesce(m.low_1, 0)) END AS low_1,
            CASE WHEN l.low_2 IS NULL THEN t.low_2 ELSE least(t.low_2, coalesce(m.low_2, 0)) END AS low_2
        FROM t LEFT JOIN taskyard.lane AS l ON l.queue = ANY (ARRAY[t.queue]) AND l.source = ANY (ARRAY[t.source])
        LEFT JOIN LATERAL (
            SELECT * FROM taskyard.mark AS m WHERE m.queue = t.queue AND m.source = t.source ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        WHERE t.low_0 < coalesce(m.low_0, 0) OR t.low_1 < coalesce(m.low_1, 0) OR t.low_2 < coalesce(m.low_2, 0)
            OR l.low_0 IS NULL AND t.low_0 IS NOT NULL OR l.low_1 IS NULL AND t.low_1 IS NOT NULL
            OR l.low_2 IS NULL AND t.low_2 IS NOT NULL
    ), gone AS (
        DELETE FROM taskyard.mark AS m USING old WHERE m.queue = ANY (ARRAY[old.queue])
            AND m.source = ANY (ARRAY[old.source]) AND m.n = ANY (ARRAY[old.n])
    )
    INSERT INTO taskyard.mark SELECT queue, source, nextval('taskyard.seq'), low_0, low_1, low_2 FROM old;
END $$;

-- Of the tasks waiting with a key, exactly the first ones that fit under its limit may start. Where
-- places alone count in a queue, or will as soon as all wait by them, they do so among those of a key.
CREATE FUNCTION taskyard.repark_1(p_queues text[], p_keys text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_freed bigint[];
BEGIN
    WITH k AS (
        SELECT d.queue, d.key, coalesce(q.per_key, 1) AS per_key,
            coalesce(q.ordering <> 'priority' OR q.lines IS NOT NULL AND q.lined_to IS NULL, false) AS by_place,
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
        WHERE t.id = ANY (ARRAY[placed.id]) AND placed.parked <> placed.should
        RETURNING t.id, t.parked
    )
    SELECT array_agg(id) INTO v_freed FROM changed WHERE NOT parked;
    IF v_freed IS NOT NULL THEN
        PERFORM taskyard.lower_1(v_freed);
    END IF;
END $$;

CREATE FUNCTION taskyard.line_1(p_lines text, p_bucket text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE p_lines WHEN 'fifo' THEN '' WHEN 'buckets' THEN coalesce(p_bucket, '') END
$$;

-- Who stands for this work, and where it is; no state if it has ended and its window is not over. What was called off
-- was not done.
CREATE FUNCTION taskyard.holder_1(
    p_slot text, p_now timestamptz, OUT uuid text, OUT id bigint, OUT state text, OUT queue text, OUT until timestamptz
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    SELECT t.uuid, t.id, t.state, t.queue INTO uuid, id, state, queue FROM taskyard.task AS t WHERE t.dedupe_slot = p_slot;
    IF NOT FOUND THEN
        SELECT w.uuid, t.id, t.state, t.queue, w.until INTO uuid, id, state, queue, until
        FROM taskyard.slot_window AS w LEFT JOIN taskyard.task AS t ON t.uuid = ANY (ARRAY[w.uuid])
        WHERE w.slot = p_slot AND w.until > p_now
            AND coalesce((SELECT e.state FROM taskyard.ended AS e WHERE e.uuid = w.uuid), '') NOT IN ('canceled', 'skipped');
    END IF;
END $$;
