-- Submitting inside a transaction of the user. It may stay open for any time. So it takes no lock that exchanges wait for,
-- and writes no event: readers of events would have to wait for it. The tasks are stored as scheduled, at position 0. The
-- first exchange after the commit gives them a position and writes their events; for tasks that are not due yet, the
-- exchange that queues them does, or the first command about them. There is no NOTIFY: commits with one wait for each other
-- on the whole server, through the flush to disk.

-- Store these tasks of an add, of which `p_free` are the slots that nobody holds for good; an answer as `submit_1` gives it.
CREATE OR REPLACE FUNCTION taskyard.insert_in_user_transaction(p_dedupe text, p_tasks taskyard.external_task_1[], p_free text[]) RETURNS text
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_holders text[] := array_fill(NULL::text, ARRAY[cardinality(p_tasks)]);
    v_ends timestamptz[];
    v_found record;
    v_ids bigint[];
BEGIN
    IF p_dedupe <> 'allow' THEN
        SELECT u.queue, u.key, u.consumer INTO v_found FROM unnest(p_tasks) AS u
        JOIN taskyard.quarantined_account AS q ON q.pool = u.queue AND q.account = u.key AND q.consumer = u.consumer
        WHERE u.dedupe_scope = 'key_idle' LIMIT 1;
        IF FOUND THEN
            RETURN json_build_object('why', 'quarantined', 'queue', v_found.queue, 'key', v_found.key, 'consumer', v_found.consumer);
        END IF;
        IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
            -- A window that was opened since the snapshot cannot be seen; to put one beside it fails, as it should. Nobody
            -- waits for the row meanwhile: whoever wants the slot finds it locked, or waits no longer than for a task.
            INSERT INTO taskyard.dedupe_window (slot, uuid, until)
            SELECT slot, '', '-infinity'::timestamptz FROM unnest(p_free) AS f(slot) ON CONFLICT DO NOTHING;
            DELETE FROM taskyard.dedupe_window WHERE until = '-infinity' AND slot = ANY (p_free);
        END IF;
        -- As in `submit_checked`.
        WITH r AS (
            SELECT u.uuid, u.slot, u.ord, t.uuid AS holder, t.until, k.uuid AS running,
                CASE WHEN k.uuid IS NOT NULL THEN u.key END AS busy
            FROM unnest(p_tasks) WITH ORDINALITY
                AS u(uuid, consumer, due_at, created_at, queue, args, priority, key, slot, timeout_s, retry, bucket,
                    requires, origin, extra, scope, ord)
            LEFT JOIN LATERAL taskyard.dedupe_holder_1(u.slot, now()) AS t ON u.slot IS NOT NULL
            LEFT JOIN LATERAL taskyard.find_running(u.queue, u.key) AS k
                ON u.scope = 'key_idle' AND u.slot IS NOT NULL AND u.key IS NOT NULL AND t.uuid IS NULL
        ), n AS (
            SELECT *, min(ord) FILTER (WHERE busy IS NULL) OVER (PARTITION BY slot) AS first_ord,
                first_value(uuid) OVER (PARTITION BY slot ORDER BY busy IS NOT NULL, ord) AS first_uuid
            FROM r
        ), held AS (
            SELECT *, CASE WHEN holder IS NOT NULL THEN holder WHEN slot IS NOT NULL AND ord > first_ord THEN first_uuid
                ELSE running END AS becomes
            FROM n
        )
        SELECT array_agg(becomes ORDER BY ord) AS holders, array_agg(until ORDER BY ord) AS ends,
            (array_agg(json_build_object('why', 'duplicate', 'uuid', coalesce(holder, running, ''), 'slot', slot,
                'until', until, 'key', busy) ORDER BY ord) FILTER (WHERE becomes IS NOT NULL))[1] AS first
        INTO v_found FROM held;
        IF p_dedupe = 'refuse' AND v_found.first IS NOT NULL THEN
            RETURN v_found.first;
        END IF;
        v_holders := v_found.holders; v_ends := v_found.ends;
    END IF;
    WITH stored AS (
        INSERT INTO taskyard.task (
            id, position, due_at, created_at, updated_at, timeout_s, priority, is_parked, state, uuid, consumer, queue, args,
            key, dedupe_slot, retry, bucket, requires, lane, origin, extra)
        SELECT nextval('taskyard.seq'), 0, due_at, created_at, created_at, timeout_s, priority, false, 'scheduled', uuid,
            consumer, queue, args, key, CASE WHEN p_dedupe <> 'allow' THEN slot END, retry, bucket,
            requires, taskyard.lane_of(consumer, requires), origin, extra
        FROM unnest(p_tasks) WITH ORDINALITY
            AS u(uuid, consumer, due_at, created_at, queue, args, priority, key, slot, timeout_s, retry, bucket,
                    requires, origin, extra, scope, ord)
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
    WHERE (SELECT e.id FROM taskyard.finished AS e WHERE e.uuid = u.uuid) IS NOT NULL;
    IF FOUND THEN
        DELETE FROM taskyard.task WHERE id = ANY (v_ids);
        RETURN json_build_object('why', 'taken', 'uuid', v_found.uuid);
    END IF;
    INSERT INTO taskyard.external_count (queue, n) SELECT queue, count(*) FROM taskyard.task WHERE id = ANY (v_ids) GROUP BY queue;
    IF p_dedupe <> 'allow' THEN
        INSERT INTO taskyard.task_relation (id, dedupe_key, dedupe_scope)
        SELECT t.id, t.dedupe_slot, coalesce(u.dedupe_scope, 'pending')
        FROM unnest(p_tasks, v_holders) AS u(uuid, consumer, due_at, created_at, queue, args, priority, key, dedupe_slot,
            timeout_s, retry, bucket, requires, origin, extra, dedupe_scope, holder)
        JOIN taskyard.task AS t ON t.uuid = ANY (ARRAY[u.uuid])
        WHERE u.holder IS NULL AND t.dedupe_slot IS NOT NULL;
    END IF;
    IF EXISTS (SELECT FROM unnest(p_tasks) AS t WHERE t.extra IS NOT NULL) THEN
        PERFORM taskyard.insert_labels(ARRAY(SELECT uuid FROM taskyard.task WHERE id = ANY (v_ids)));
    END IF;
    RETURN json_build_object('holders', v_holders, 'until', v_ends);
END $$;

-- One add, as JSON text in and out: a connection of somebody else's may have its own ideas about every other type.
-- The answer is as `submit_checked` gives it; what kept the tasks out is no error, which would cost the caller his transaction.
-- Whoever may use the schema may submit; what is in it, he need not be allowed to see.
CREATE OR REPLACE FUNCTION taskyard.submit_1(p_add text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_add json := p_add::json;
    v_dedupe text := v_add ->> 'dedupe';
    v_tasks taskyard.external_task_1[];
    v_free text[];
    v_patience text := current_setting('lock_timeout');
    v_answer text;
BEGIN
    IF v_add ->> 'where' <> taskyard.database_identity_1() THEN
        RETURN '{"why":"elsewhere"}';
    END IF;
    IF v_add -> 'parent' IS NOT NULL AND NOT EXISTS (
        SELECT FROM json_to_record(v_add -> 'parent') AS p(id bigint, token bigint, attempt integer)
        JOIN taskyard.task AS t ON t.id = ANY (ARRAY[p.id]) AND t.token = p.token AND t.attempt = p.attempt
    ) THEN
        RETURN '{"why":"lost"}';
    END IF;
    v_tasks := ARRAY(SELECT t FROM json_populate_recordset(NULL::taskyard.external_task_1, v_add -> 'tasks') AS t);
    IF EXISTS (
        SELECT FROM unnest(v_tasks) AS t
        WHERE (t.due_at >= '{{first}}' AND t.due_at < '{{last}}' AND t.created_at >= '{{first}}' AND t.created_at < '{{last}}'
            AND coalesce(t.timeout_s, 1) > 0 AND json_typeof(coalesce(t.retry, '{}')::json) = 'object'
            AND json_typeof(coalesce(t.extra, '{}')::json) = 'object'
            AND NOT EXISTS (SELECT FROM json_each(t.requires::json) AS r WHERE json_typeof(r.value) <> 'string')
            AND strpos(t.consumer, {{lane_separator}}) = 0
            AND coalesce(t.dedupe_scope, 'pending') IN ('pending', 'key_idle')
            AND least(length(t.uuid), length(t.consumer), length(t.queue)) > 0
            AND greatest(octet_length(t.uuid), octet_length(taskyard.lane_of(t.consumer, t.requires)),
                octet_length(t.queue), octet_length(t.key), octet_length(t.dedupe_slot), octet_length(t.bucket),
                octet_length(t.origin)) <= {{longest_name}}) IS NOT TRUE
    ) THEN
        -- Whoever calls this by himself: no node could read it again, or queue it, nor anything else that is due.
        RAISE EXCEPTION 'this is no task that can be stored' USING ERRCODE = 'check_violation';
    END IF;
    IF v_dedupe <> 'allow' THEN
        -- Whoever holds a slot for good is seen without a lock. For the others: who waits for a transaction that waits
        -- for him waits for ever, since no server knows of both.
        v_free := ARRAY(
            SELECT DISTINCT r.dedupe_slot AS slot FROM unnest(v_tasks) AS r
            WHERE r.dedupe_slot IS NOT NULL AND (SELECT t.id FROM taskyard.task AS t WHERE t.dedupe_slot = r.dedupe_slot) IS NULL);
        IF NOT taskyard.lock_open_slots(v_free, true) THEN
            RETURN '{"why":"busy"}';
        END IF;
        IF cardinality(v_free) > {{locked_at_most}} OR cardinality(v_free) > 0 AND taskyard.has_bulk_slots() THEN
            -- What is in the way is met when they are stored. It is waited for no longer than turns do, in a transaction in
            -- the transaction, which is then the only one that fails.
            BEGIN
                PERFORM set_config('lock_timeout', '50ms', true);
                v_answer := taskyard.insert_in_user_transaction(v_dedupe, v_tasks, v_free);
                PERFORM set_config('lock_timeout', v_patience, true);
                RETURN v_answer;
            EXCEPTION WHEN lock_not_available THEN
                RETURN '{"why":"busy"}';
            END;
        END IF;
    END IF;
    RETURN taskyard.insert_in_user_transaction(v_dedupe, v_tasks, v_free);
END $$;
