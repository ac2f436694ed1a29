-- Triggers: legal moves, and the count of open dependencies.

-- The table of legal moves (`LEGAL` in model/state.py). The frequent moves do not call the function: the WHEN clauses
-- leave them out. A WHEN clause is read again by every statement, so it is short. The trigger on updates is an AFTER
-- trigger, because a BEFORE trigger would lock and log each row first. A new task may start as running (`insert_running`).
CREATE OR REPLACE FUNCTION taskyard.check_move() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_old text := '{{created}}';
BEGIN
    IF TG_TABLE_NAME = 'finished' THEN
        v_old := NEW.previous_state;
    ELSIF TG_OP = 'UPDATE' THEN
        v_old := OLD.state;
    END IF;
    IF {{illegal_move}} THEN
        RAISE EXCEPTION 'illegal move' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER task_starts BEFORE INSERT ON taskyard.task
    FOR EACH ROW WHEN (NEW.state NOT IN ('queued', 'running')) EXECUTE FUNCTION taskyard.check_move();

CREATE OR REPLACE TRIGGER task_moves AFTER UPDATE OF state ON taskyard.task
    FOR EACH ROW WHEN (NEW.state <> 'running' OR OLD.state <> 'queued') EXECUTE FUNCTION taskyard.check_move();

CREATE OR REPLACE TRIGGER finished_moves BEFORE INSERT ON taskyard.finished
    FOR EACH ROW WHEN (NEW.state <> 'completed' OR NEW.previous_state <> 'running') EXECUTE FUNCTION taskyard.check_move();

-- Keeps the count of open dependencies in `state_count`.
CREATE OR REPLACE FUNCTION taskyard.count_open_dependencies() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_n bigint := 0;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        v_n := v_n - (SELECT count(*) FROM former WHERE NOT done);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        v_n := v_n + (SELECT count(*) FROM latter WHERE NOT done);
    END IF;
    IF v_n <> 0 THEN
        INSERT INTO taskyard.state_count (queue, state, n) VALUES ('', 'waiting', v_n);
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER dependency_inserted AFTER INSERT ON taskyard.dependency REFERENCING NEW TABLE AS latter
    FOR EACH STATEMENT EXECUTE FUNCTION taskyard.count_open_dependencies();

CREATE OR REPLACE TRIGGER dependency_updated AFTER UPDATE ON taskyard.dependency
    REFERENCING OLD TABLE AS former NEW TABLE AS latter
    FOR EACH STATEMENT EXECUTE FUNCTION taskyard.count_open_dependencies();

CREATE OR REPLACE TRIGGER dependency_deleted AFTER DELETE ON taskyard.dependency REFERENCING OLD TABLE AS former
    FOR EACH STATEMENT EXECUTE FUNCTION taskyard.count_open_dependencies();
