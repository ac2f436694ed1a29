-- Locks, and the rules for all routines of this bundle.
--
-- Names. Only the routines that Python calls have a number. It is their wire version: if the arguments or the answer
-- change, the bundle brings the next number and keeps the old routine while nodes of the version before may call it. All
-- other routines are replaced together with their callers. A routine whose meaning changes for its callers gets another
-- name: a call in flight may still run the old caller, and must then fail (and be retried) instead of calling the new one.
--
-- Language. Everything is plpgsql because it keeps its plans; before PostgreSQL 18 an SQL function is planned again in
-- every transaction.
--
-- Lock order. Every routine that writes takes its locks first, in this order, and locks of one kind in numeric order, so
-- that no two routines wait for each other. All are advisory locks of the transaction: a row lock would write to the row.
--
--   1 events        shared by every writer of events or counts
--   2 node          shared by the exchanges of a node, exclusive for its rescue
--   3 queue         exclusive
--   4 completions   of a queue: exclusive, or shared by `complete_apart`
--   5 slot          exclusive, by routines that take dedupe slots
--   6 catalogue     exclusive, by routines of nodes that write specifications
--   7 devices       exclusive, by routines that write devices
--
-- The locks of a queue protect its tasks with their dependencies and their rows in `task_relation`. Most routines take 3
-- and 4 together. Two need only one of them and so run beside each other: an exchange that settles nothing and submits
-- only tasks without relations takes 3; `complete_apart` shares 4. It only completes runs whose end changes nothing for
-- the other. Where both write the same data: counts are added, and read only where there is a limit; an insert waits for
-- the end of a task with the same uuid, then checks again; reports of a run are sent at least one exchange before its end.
--
-- Plans. Plans are made while the tables are empty, and kept. The planner then takes the partial index of all queued or
-- running tasks to be as good as the primary key. Where ids, tokens or keys are known, a condition that a partial index
-- has is therefore left out, hidden behind OFFSET 0, or written as a comparison. (A task with a token runs: a CHECK says
-- so.) The planner is also wrong when a foreign snapshot keeps many dead rows alive: for a list of ids it would merge-join
-- over a whole index. It cannot if the join is = ANY (ARRAY[id]), or BETWEEN id AND id, which is a little faster for a
-- thousand ids. To ask whether a task exists, write (SELECT id …) IS NOT NULL: EXISTS would allow an index-only walk.

CREATE OR REPLACE FUNCTION taskyard.lock_queues(p_queues text[], p_with_ends boolean DEFAULT true) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({{lock_queue}}, h)
    FROM (SELECT DISTINCT hashtext(q) AS h FROM unnest(p_queues) AS q ORDER BY 1) AS hashes;
    IF p_with_ends THEN
        PERFORM pg_advisory_xact_lock({{lock_completions}}, h)
        FROM (SELECT DISTINCT hashtext(q) AS h FROM unnest(p_queues) AS q ORDER BY 1) AS hashes;
    END IF;
END $$;

-- Not one for each: the server has room for some thousands of locks.
CREATE OR REPLACE FUNCTION taskyard.lock_slots(p_slots text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({{lock_slot}}, h)
    FROM (SELECT DISTINCT hashtext(s) & 255 AS h FROM unnest(p_slots) AS s WHERE s IS NOT NULL ORDER BY 1) AS hashes;
END $$;

-- A transaction of somebody else's may hold a slot, and stay open for as long as he likes. It takes these locks alone,
-- turns share them, and neither ever waits: false if somebody is in the way. Of many slots none is locked.
-- Race: A takes many, B a few of them. A says that he takes many, then looks for the locks of others; B locks his own, then
-- looks whether anybody takes many (`has_bulk_slots`). Whoever comes second notices, and is careful with the index.
CREATE OR REPLACE FUNCTION taskyard.lock_open_slots(p_slots text[], p_alone boolean) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_hashes integer[] := ARRAY(SELECT DISTINCT hashtext(s) FROM unnest(p_slots) AS s WHERE s IS NOT NULL ORDER BY 1);
    v_hash integer;
BEGIN
    IF cardinality(v_hashes) > {{locked_at_most}} THEN
        IF p_alone THEN
            PERFORM pg_advisory_xact_lock_shared({{lock_bulk_slots}}, 0);
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
CREATE OR REPLACE FUNCTION taskyard.has_bulk_slots() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    -- In one expression, which nothing interrupts: the lock is the session's. If two ask at once, one of them is told so in vain.
    RETURN NOT (pg_try_advisory_lock({{lock_bulk_slots}}, 0) AND pg_advisory_unlock({{lock_bulk_slots}}, 0));
END $$;
