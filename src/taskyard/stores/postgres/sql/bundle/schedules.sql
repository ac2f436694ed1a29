-- Recurring schedules: each fire time becomes one task.

-- Carry out what was decided about a schedule, if it is still the version that was looked at. `outcome` is 'done';
-- 'stale' if it is another version; 'changed' if one of the tasks to cancel is not what it was; or what `submit_1` says
-- is wrong with the tasks. Only after 'done' has anything happened.
-- `p_fires` are the fire times, each with its task and whether it counts. The changes are as `apply_commands_1` takes them, which
-- comes last, since it commits; null if there are none.
CREATE OR REPLACE PROCEDURE taskyard.fire_1(
    p_name text, p_version text, p_new_version text, p_state text, p_watermark_at timestamptz, p_keep integer, p_fires json,
    p_add text, c_queues text[], c_changes json, e_kinds text[], e_uuids text[], e_queues text[], e_sources text[], e_details text[],
    p_now timestamptz, p_audit json, INOUT outcome text, INOUT made text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_state jsonb := p_state::jsonb;
    v_again integer;
    v_gone timestamptz;
    v_stale text[]; v_places json; v_told integer;
BEGIN
    -- Before the transaction has a number, as who reads events expects of all that write some.
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    IF c_changes IS NOT NULL THEN
        PERFORM taskyard.lock_queues(c_queues || taskyard.queues_of_dependents(ARRAY(
            SELECT id FROM json_to_recordset(c_changes) AS j(id bigint))));
    END IF;
    -- In a statement of its own: what comes after it sees all that the one before us has done.
    PERFORM FROM taskyard.schedule WHERE name = p_name FOR UPDATE;
    IF NOT EXISTS (SELECT FROM taskyard.schedule WHERE name = p_name AND version = p_version) THEN
        outcome := 'stale';
        ROLLBACK;
        RETURN;
    END IF;
    UPDATE taskyard.fire AS f SET is_finished = true WHERE schedule = p_name AND NOT is_finished
        AND (SELECT t.id FROM taskyard.task AS t WHERE t.uuid = f.task) IS NULL;
    WITH noted AS (
        INSERT INTO taskyard.fire (id, schedule, fire_at, task, kind)
        SELECT nextval('taskyard.seq'), p_name, fire_at, task, kind
        FROM json_to_recordset(p_fires) AS j(fire_at timestamptz, task text, kind text)
        ON CONFLICT (schedule, fire_at) DO NOTHING
        RETURNING id, task
    )
    SELECT coalesce(array_agg(task ORDER BY id), '{}') INTO made FROM noted;
    IF cardinality(made) > 0 THEN
        outcome := taskyard.submit_1(jsonb_set(p_add::jsonb, '{tasks}', (
            SELECT jsonb_agg(t ORDER BY n) FROM jsonb_array_elements(p_add::jsonb -> 'tasks') WITH ORDINALITY AS u(t, n)
            WHERE t ->> 'uuid' = ANY (made)))::text);
        IF outcome::json -> 'why' IS NOT NULL THEN
            ROLLBACK;
            RETURN;
        END IF;
    END IF;
    SELECT count(*) INTO v_again FROM json_to_recordset(p_fires) AS j(task text, counts boolean)
    WHERE counts AND task <> ALL (made);
    WITH gone AS (
        DELETE FROM taskyard.fire WHERE schedule = p_name AND is_finished AND fire_at <= p_watermark_at AND id <= (
            SELECT id FROM taskyard.fire WHERE schedule = p_name ORDER BY id DESC OFFSET p_keep LIMIT 1)
        RETURNING fire_at
    )
    SELECT max(fire_at) INTO v_gone FROM gone;
    v_state := jsonb_set(v_state, '{fired}', to_jsonb((v_state ->> 'fired')::bigint - v_again));
    IF v_gone > coalesce((v_state ->> 'forgotten_at')::timestamptz, '-infinity') THEN
        v_state := jsonb_set(v_state, '{forgotten_at}', to_jsonb(v_gone));
    END IF;
    UPDATE taskyard.schedule SET state = v_state::text, version = p_new_version WHERE name = p_name;
    PERFORM taskyard.note_audit_1(p_audit, greatest(json_array_length(p_fires), 1),
        CASE WHEN json_array_length(p_fires) = 0 THEN 1 ELSE cardinality(made) END);
    IF c_changes IS NOT NULL THEN
        CALL taskyard.apply_commands_1(
            c_queues, c_changes, e_kinds, e_uuids, e_queues, e_sources, e_details, p_now, true, NULL, 0, v_stale, v_places, v_told);
        IF cardinality(v_stale) > 0 THEN
            outcome := 'changed';
            ROLLBACK;
            RETURN;
        END IF;
    END IF;
    outcome := 'done';
    COMMIT;
END $$;

-- The schedule's row first: whoever fires it holds that, and must not leave fire times behind.
CREATE OR REPLACE FUNCTION taskyard.drop_schedule_1(p_name text, p_audit json) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM taskyard.schedule WHERE name = p_name;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM taskyard.fire WHERE schedule = p_name;
    PERFORM taskyard.note_audit_1(p_audit, 1, 1);
    RETURN true;
END $$;
