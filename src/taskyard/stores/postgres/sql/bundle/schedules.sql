-- Recurring schedules: each fire time makes its tasks once.

-- Carry out what was decided about a schedule, if it is still the version that was looked at. `outcome` is 'done';
-- 'stale' if it is another version; 'changed' if one of the tasks to cancel is not what it was; 'fired' if one of the fire
-- times has fired already, where there are `p_adds`: `made` are then the others, to be asked for again; or what `submit_1` or
-- `submit_checked` says is wrong with the tasks. Only after 'done' has anything happened.
-- `p_fires` are the fire times, each with the ids of its tasks and whether it counts. `p_add` are all tasks, as `submit_1`
-- takes them. Where some of them may be there already, it is null, and `p_adds` has an add for each fire time, as
-- `submit_checked` takes them, with what comes after it. `fired` says what each new fire time made. The changes are as
-- `apply_commands_1` takes them, which comes last, since it commits; null if there are none.
CREATE OR REPLACE PROCEDURE taskyard.fire_1(
    p_name text, p_version text, p_new_version text, p_state text, p_watermark_at timestamptz, p_keep integer, p_fires json,
    p_add text, p_queues text[], p_adds json, p_uuids text, p_args text, a taskyard.new_tasks_1,
    c_queues text[], c_changes json, e_kinds text[], e_uuids text[], e_queues text[], e_sources text[], e_details text[],
    p_now timestamptz, p_audit json, INOUT outcome text, INOUT made text[], INOUT fired json
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_state jsonb := p_state::jsonb;
    v_new timestamptz[];
    v_again integer;
    v_gone timestamptz;
    v_queues text[];
    v_done record;
    v_uuids text[]; v_ats timestamptz[]; v_holders text[]; v_made text[];
    v_stale text[]; v_places json; v_told integer;
BEGIN
    -- Before the transaction has a number, as who reads events expects of all that write some.
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    IF p_adds IS NOT NULL THEN
        a.uuid := string_to_array(p_uuids, {{separator}}); a.args := string_to_array(p_args, {{separator}});
        v_queues := p_queues || taskyard.queues_of_parents(p_adds, a.dedupe_slot, p_now);
    END IF;
    IF c_changes IS NOT NULL THEN
        v_queues := v_queues || c_queues || taskyard.queues_of_dependents(ARRAY(
            SELECT id FROM json_to_recordset(c_changes) AS j(id bigint)));
    END IF;
    IF v_queues IS NOT NULL THEN
        PERFORM taskyard.lock_queues(v_queues);
    END IF;
    -- In a statement of its own: what comes after it sees all that the one before us has done.
    PERFORM FROM taskyard.schedule WHERE name = p_name FOR UPDATE;
    IF NOT EXISTS (SELECT FROM taskyard.schedule WHERE name = p_name AND version = p_version) THEN
        outcome := 'stale';
        ROLLBACK;
        RETURN;
    END IF;
    DELETE FROM taskyard.fire_task AS f WHERE schedule = p_name
        AND (SELECT t.id FROM taskyard.task AS t WHERE t.uuid = f.task) IS NULL;
    WITH noted AS (
        INSERT INTO taskyard.fire (id, schedule, fire_at, task, kind, made, skipped)
        SELECT nextval('taskyard.seq'), p_name, fire_at, coalesce(tasks ->> 0, ''), kind, json_array_length(tasks), skipped
        FROM json_to_recordset(p_fires) AS j(fire_at timestamptz, tasks json, kind text, skipped integer)
        ON CONFLICT (schedule, fire_at) DO NOTHING
        RETURNING id, fire_at
    )
    SELECT coalesce(array_agg(fire_at ORDER BY id), '{}') INTO v_new FROM noted;
    SELECT array_agg(u.uuid ORDER BY f.ord, u.ord), array_agg(f.fire_at ORDER BY f.ord, u.ord) INTO v_uuids, v_ats
    FROM (
        SELECT (x.fire ->> 'fire_at')::timestamptz AS fire_at, x.fire -> 'tasks' AS tasks, x.ord
        FROM json_array_elements(p_fires) WITH ORDINALITY AS x(fire, ord)
        OFFSET 0  -- otherwise the text of a fire time is read again for each of its tasks
    ) AS f CROSS JOIN LATERAL json_array_elements_text(f.tasks) WITH ORDINALITY AS u(uuid, ord);
    IF p_adds IS NOT NULL THEN
        IF cardinality(v_new) < json_array_length(p_fires) THEN
            outcome := 'fired';
            made := ARRAY(
                SELECT x.ord::text FROM json_array_elements(p_fires) WITH ORDINALITY AS x(fire, ord)
                WHERE (x.fire ->> 'fire_at')::timestamptz = ANY (v_new));
            ROLLBACK;
            RETURN;
        END IF;
        SELECT * INTO v_done FROM taskyard.submit_checked(0, p_now, v_queues, p_adds, a);
        outcome := (SELECT x.answer::text FROM unnest(v_done.answers) AS x(answer) WHERE x.answer -> 'why' IS NOT NULL LIMIT 1);
        IF outcome IS NOT NULL THEN
            ROLLBACK;
            RETURN;
        END IF;
        v_holders := ARRAY(
            SELECT h.holder FROM unnest(v_done.answers) WITH ORDINALITY AS x(answer, n)
            CROSS JOIN LATERAL json_array_elements_text(x.answer -> 'holders') WITH ORDINALITY AS h(holder, i)
            ORDER BY x.n, h.i);
        IF a.key IS NOT NULL THEN
            PERFORM taskyard.update_parked(array_agg(coalesce(u.queue, a.queue[1])), array_agg(u.key))
            FROM unnest(a.queue, a.key) AS u(queue, key) WHERE u.key IS NOT NULL;
        END IF;
    END IF;
    SELECT coalesce(array_agg(u.uuid ORDER BY u.ord), '{}'), array_agg(u.fire_at ORDER BY u.ord) INTO v_made, v_ats
    FROM unnest(v_uuids, v_ats, v_holders) WITH ORDINALITY AS u(uuid, fire_at, holder, ord)
    WHERE u.holder IS NULL AND u.fire_at = ANY (v_new);
    IF p_adds IS NOT NULL THEN
        UPDATE taskyard.fire AS f SET task = coalesce(x.first, ''), made = x.n, skipped = f.skipped + f.made - x.n
        FROM (
            SELECT n.fire_at, count(u.uuid)::integer AS n, (array_agg(u.uuid ORDER BY u.ord))[1] AS first
            FROM unnest(v_new) AS n(fire_at)
            LEFT JOIN unnest(v_made, v_ats) WITH ORDINALITY AS u(uuid, fire_at, ord) ON u.fire_at = n.fire_at
            GROUP BY n.fire_at
        ) AS x WHERE f.schedule = p_name AND f.fire_at = x.fire_at;
    ELSIF cardinality(v_made) > 0 THEN
        IF cardinality(v_made) < cardinality(v_uuids) THEN
            p_add := jsonb_set(p_add::jsonb, '{tasks}', (
                SELECT jsonb_agg(u.task ORDER BY u.ord)
                FROM jsonb_array_elements(p_add::jsonb -> 'tasks') WITH ORDINALITY AS u(task, ord)
                JOIN unnest(v_made) AS m(uuid) ON m.uuid = u.task ->> 'uuid'))::text;
        END IF;
        outcome := taskyard.submit_1(p_add);
        IF outcome::json -> 'why' IS NOT NULL THEN
            ROLLBACK;
            RETURN;
        END IF;
    END IF;
    INSERT INTO taskyard.fire_task (schedule, fire, task)
    SELECT p_name, f.id, u.uuid FROM unnest(v_made, v_ats) AS u(uuid, fire_at)
    CROSS JOIN LATERAL (SELECT id FROM taskyard.fire WHERE schedule = p_name AND fire_at = u.fire_at OFFSET 0) AS f;
    made := v_made;
    fired := (SELECT json_agg(json_build_array(fire_at, task, kind, f.made, skipped) ORDER BY id)
        FROM taskyard.fire AS f WHERE schedule = p_name AND fire_at = ANY (v_new));
    SELECT count(*) INTO v_again FROM json_to_recordset(p_fires) AS j(fire_at timestamptz, counts boolean)
    WHERE counts AND fire_at <> ALL (v_new);
    WITH gone AS (
        DELETE FROM taskyard.fire WHERE schedule = p_name AND fire_at <= p_watermark_at
            AND id NOT IN (SELECT fire FROM taskyard.fire_task WHERE schedule = p_name) AND id <= (
            SELECT id FROM taskyard.fire WHERE schedule = p_name ORDER BY id DESC OFFSET p_keep LIMIT 1)
        RETURNING fire_at
    )
    SELECT max(fire_at) INTO v_gone FROM gone;
    v_state := jsonb_set(v_state, '{fired}', to_jsonb((v_state ->> 'fired')::bigint - v_again));
    IF v_gone > coalesce((v_state ->> 'forgotten_at')::timestamptz, '-infinity') THEN
        v_state := jsonb_set(v_state, '{forgotten_at}', to_jsonb(v_gone));
    END IF;
    UPDATE taskyard.schedule SET state = v_state::text, version = p_new_version WHERE name = p_name;
    PERFORM taskyard.note_audit_1(
        p_audit,
        coalesce((SELECT sum(json_array_length(tasks) + skipped) FROM json_to_recordset(p_fires) AS j(tasks json, skipped integer)), 1),
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
    DELETE FROM taskyard.fire_task WHERE schedule = p_name;
    DELETE FROM taskyard.fire WHERE schedule = p_name;
    PERFORM taskyard.note_audit_1(p_audit, 1, 1);
    RETURN true;
END $$;
