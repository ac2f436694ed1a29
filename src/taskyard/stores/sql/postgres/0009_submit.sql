-- Submitting inside of a transaction of somebody else's. It may stay open for as long as he likes, so it takes none of
-- the locks that turns wait for, and writes no event: readers of events would have to wait for it. The tasks are put
-- down as scheduled, at place 0, and the first turn after the commit gives them a place and tells of them; of those that are
-- not due yet, the turn that queues them, or the first command that concerns them.
-- It notifies nobody: commits that do wait for each other, through the flush to disk, all over the server.

CREATE TYPE taskyard.submitted_1 AS (
    uuid text, source text, queue text, args text, priority smallint, key text, slot text, timeout_s double precision,
    retry text, due_at timestamptz, created_at timestamptz, bucket text, origin text
);

-- Which database on which server this is: a copy of it is another.
CREATE FUNCTION taskyard.whereabouts_1() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT (SELECT system_identifier FROM pg_control_system()) || '/' ||
        (SELECT oid FROM pg_database WHERE datname = current_database())
$$;

-- Store these tasks of an add, of which `p_free` are the slots that nobody holds for good; an answer as `submit_1` gives it.
CREATE FUNCTION taskyard.put_1(p_dedupe text, p_tasks taskyard.submitted_1[], p_free text[]) RETURNS text
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_holders text[] := array_fill(NULL::text, ARRAY[cardinality(p_tasks)]);
    v_ends timestamptz[];
    v_found record;
    v_ids bigint[];
BEGIN
    IF p_dedupe <> 'allow' THEN
        IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
            -- A window that was opened since the snapshot cannot be seen; to put one beside it fails, as it should. Nobody
            -- waits for the row meanwhile: whoever wants the slot finds it locked, or waits no longer than for a task.
            INSERT INTO taskyard.slot_window (slot, uuid, until)
            SELECT slot, '', '-infinity'::timestamptz FROM unnest(p_free) AS f(slot) ON CONFLICT DO NOTHING;
            DELETE FROM taskyard.slot_window WHERE until = '-infinity' AND slot = ANY (p_free);
        END IF;
        WITH r AS (
            SELECT u.uuid, u.slot, u.ord, first_value(u.uuid) OVER (PARTITION BY u.slot ORDER BY u.ord) AS first_uuid,
                row_number() OVER (PARTITION BY u.slot ORDER BY u.ord) AS nth
            FROM unnest(p_tasks) WITH ORDINALITY
                AS u(uuid, source, queue, args, priority, key, slot, timeout_s, retry, due_at, created_at, bucket,
                    origin, ord)
        ), held AS (
            SELECT r.slot, r.ord, t.uuid, t.until, CASE WHEN t.uuid IS NOT NULL THEN t.uuid
                WHEN r.slot IS NOT NULL AND r.nth > 1 THEN r.first_uuid END AS holder
            FROM r LEFT JOIN LATERAL taskyard.holder_1(r.slot, now()) AS t ON r.slot IS NOT NULL
        )
        SELECT array_agg(holder ORDER BY ord) AS holders, array_agg(until ORDER BY ord) AS ends,
            (array_agg(json_build_object('why', 'duplicate', 'uuid', coalesce(uuid, ''), 'slot', slot, 'until', until)
                ORDER BY ord) FILTER (WHERE holder IS NOT NULL))[1] AS first
        INTO v_found FROM held;
        IF p_dedupe = 'refuse' AND v_found.first IS NOT NULL THEN
            RETURN v_found.first;
        END IF;
        v_holders := v_found.holders; v_ends := v_found.ends;
    END IF;
    WITH stored AS (
        INSERT INTO taskyard.task (
            id, position, due_at, created_at, updated_at, timeout_s, priority, parked, state, uuid, source, queue, args,
            key, dedupe_slot, retry, bucket, origin)
        SELECT nextval('taskyard.seq'), 0, due_at, created_at, created_at, timeout_s, priority, false, 'scheduled', uuid,
            source, queue, args, key, CASE WHEN p_dedupe <> 'allow' THEN slot END, retry, bucket,
            origin
        FROM unnest(p_tasks) WITH ORDINALITY
            AS u(uuid, source, queue, args, priority, key, slot, timeout_s, retry, due_at, created_at, bucket,
                    origin, ord)
        WHERE v_holders[u.ord] IS NULL
        ON CONFLICT DO NOTHING
        RETURNING id
    )
    SELECT array_agg(id) INTO v_ids FROM stored;
    IF coalesce(cardinality(v_ids), 0) < (SELECT count(*) FROM unnest(v_holders) AS h WHERE h IS NULL) THEN
        -- A uuid was there already. Not by an exception: it would need a transaction in the transaction each time.
        DELETE FROM taskyard.task WHERE id = ANY (v_ids);
        SELECT u.uuid INTO v_found FROM unnest(p_tasks) AS u
        GROUP BY u.uuid HAVING count(*) > 1 OR (SELECT t.id FROM taskyard.task AS t WHERE t.uuid = u.uuid) IS NOT NULL LIMIT 1;
        IF NOT FOUND THEN
            RETURN '{"why":"busy"}';  -- a slot was taken meanwhile, where there were too many to lock them
        END IF;
        RETURN json_build_object('why', 'taken', 'uuid', v_found.uuid);
    END IF;
    -- Race: a task with one of these uuids may be ending just now. The insert has waited for that, and only now it is seen,
    -- unless the transaction sees only what was there when it began.
    SELECT u.uuid INTO v_found FROM unnest(p_tasks) AS u
    WHERE (SELECT e.id FROM taskyard.ended AS e WHERE e.uuid = u.uuid) IS NOT NULL;
    IF FOUND THEN
        DELETE FROM taskyard.task WHERE id = ANY (v_ids);
        RETURN json_build_object('why', 'taken', 'uuid', v_found.uuid);
    END IF;
    INSERT INTO taskyard.submitted (queue, n) SELECT queue, count(*) FROM taskyard.task WHERE id = ANY (v_ids) GROUP BY queue;
    INSERT INTO taskyard.tie (id, dedupe_key, dedupe_scope)
    SELECT id, dedupe_slot, 'pending' FROM taskyard.task WHERE id = ANY (v_ids) AND dedupe_slot IS NOT NULL;
    RETURN json_build_object('holders', v_holders, 'until', v_ends);
END $$;

-- One add, as JSON text in and out: a connection of somebody else's may have its own ideas about every other type.
-- The answer is as `admit_1` gives it; what kept the tasks out is no error, which would cost the caller his transaction.
-- Whoever may use the schema may submit; what is in it, he need not be allowed to see.
CREATE FUNCTION taskyard.submit_1(p_add text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_add json := p_add::json;
    v_dedupe text := v_add ->> 'dedupe';
    v_tasks taskyard.submitted_1[];
    v_free text[];
    v_patience text := current_setting('lock_timeout');
    v_answer text;
BEGIN
    IF v_add ->> 'where' <> taskyard.whereabouts_1() THEN
        RETURN '{"why":"elsewhere"}';
    END IF;
    IF v_add -> 'parent' IS NOT NULL AND NOT EXISTS (
        SELECT FROM json_to_record(v_add -> 'parent') AS p(id bigint, token bigint, attempt integer)
        JOIN taskyard.task AS t ON t.id = ANY (ARRAY[p.id]) AND t.token = p.token AND t.attempt = p.attempt
    ) THEN
        RETURN '{"why":"lost"}';
    END IF;
    v_tasks := ARRAY(SELECT t FROM json_populate_recordset(NULL::taskyard.submitted_1, v_add -> 'tasks') AS t);
    IF EXISTS (
        SELECT FROM unnest(v_tasks) AS t
        WHERE (t.due_at >= '{{first}}' AND t.due_at < '{{last}}' AND t.created_at >= '{{first}}' AND t.created_at < '{{last}}'
            AND coalesce(t.timeout_s, 1) > 0 AND json_typeof(coalesce(t.retry, '{}')::json) = 'object'
            AND least(length(t.uuid), length(t.source), length(t.queue)) > 0
            AND greatest(octet_length(t.uuid), octet_length(t.source), octet_length(t.queue), octet_length(t.key),
                octet_length(t.slot), octet_length(t.bucket), octet_length(t.origin)) <= {{longest_name}}) IS NOT TRUE
    ) THEN
        -- Whoever calls this by himself: no node could read it again, or queue it, nor anything else that is due.
        RAISE EXCEPTION 'this is no task that can be stored' USING ERRCODE = 'check_violation';
    END IF;
    IF v_dedupe <> 'allow' THEN
        -- Whoever holds a slot for good is seen without a lock. For the others: who waits for a transaction that waits
        -- for him waits for ever, since no server knows of both.
        v_free := ARRAY(
            SELECT DISTINCT r.slot FROM unnest(v_tasks) AS r
            WHERE r.slot IS NOT NULL AND (SELECT t.id FROM taskyard.task AS t WHERE t.dedupe_slot = r.slot) IS NULL);
        IF NOT taskyard.lock_open_slots_1(v_free, true) THEN
            RETURN '{"why":"busy"}';
        END IF;
        IF cardinality(v_free) > {{locked_at_most}} OR cardinality(v_free) > 0 AND taskyard.are_many_open_1() THEN
            -- What is in the way is met when they are stored. It is waited for no longer than turns do, in a transaction in
            -- the transaction, which is then the only one that fails.
            BEGIN
                PERFORM set_config('lock_timeout', '50ms', true);
                v_answer := taskyard.put_1(v_dedupe, v_tasks, v_free);
                PERFORM set_config('lock_timeout', v_patience, true);
                RETURN v_answer;
            EXCEPTION WHEN lock_not_available THEN
                RETURN '{"why":"busy"}';
            END;
        END IF;
    END IF;
    RETURN taskyard.put_1(v_dedupe, v_tasks, v_free);
END $$;
