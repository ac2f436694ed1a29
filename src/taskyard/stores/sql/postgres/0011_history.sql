-- A server that takes over from another may never have heard of the last numbers which that one handed out, and so may one
-- that was recovered to a point in time. It would hand them out again, as ids and as tokens; and a run that was begun
-- before would settle a task that another has claimed since.

-- Where this database has lived: on which server, and on which of its lines of history, of which PostgreSQL begins another
-- whenever a standby takes over or a recovery ends.
CREATE TABLE taskyard.lived (
    place text COLLATE "C" PRIMARY KEY
);

-- Let the numbers leap ahead where the database has not lived before; true if they did. Asked over every connection before
-- its first turn, since no token is handed out but by turns. Not at a server that does not say where its log stands, or may
-- not write one. With the rights of its owner: a node whose rights were granted before there was this table goes on.
CREATE FUNCTION taskyard.leap_1() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_place text;
    v_is_first boolean;
BEGIN
    IF pg_is_in_recovery() THEN
        RETURN false;
    END IF;
    BEGIN
        v_place := taskyard.whereabouts_1() || '/' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8);
    EXCEPTION WHEN feature_not_supported OR undefined_function OR insufficient_privilege THEN
        RETURN false;
    END;
    IF (SELECT place FROM taskyard.lived WHERE place = v_place) IS NOT NULL THEN
        RETURN false;
    END IF;
    PERFORM pg_advisory_xact_lock({{lock_leaping}}, 0);
    IF (SELECT place FROM taskyard.lived WHERE place = v_place) IS NOT NULL THEN
        RETURN false;  -- whoever had the lock before has seen to it
    END IF;
    v_is_first := NOT EXISTS (SELECT FROM taskyard.lived);
    IF NOT v_is_first THEN
        PERFORM setval('taskyard.seq', nextval('taskyard.seq') + {{leap}});
    END IF;
    INSERT INTO taskyard.lived VALUES (v_place);
    RETURN NOT v_is_first;
END $$;
