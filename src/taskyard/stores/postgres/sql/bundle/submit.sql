-- Storing new tasks.

-- After these were stored: fail if one of them has ended before, so that the turn is asked again, add by add.
-- Race: a task with one of these uuids may be ending just now. The insert has waited for that, and only now it is seen.
CREATE OR REPLACE FUNCTION taskyard.check_uuids(p_uuids text[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_last text COLLATE "C";
BEGIN
    -- Ids are made in the order of time: most are beyond all that has ended, which one look can tell.
    SELECT max(uuid) INTO v_last FROM taskyard.finished;
    IF v_last >= ANY (p_uuids) THEN
        IF EXISTS (SELECT FROM taskyard.finished WHERE uuid = ANY (p_uuids)) THEN
            RAISE unique_violation;
        END IF;
    END IF;
END $$;

-- Store the labels of these new tasks, for filters.
CREATE OR REPLACE FUNCTION taskyard.insert_labels(p_uuids text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO taskyard.task_label (name, value, task)
    SELECT l.key, l.value, t.id FROM taskyard.task AS t CROSS JOIN LATERAL json_each_text(t.extra::json -> 'labels') AS l
    WHERE t.uuid = ANY (p_uuids) AND t.extra IS NOT NULL;
END $$;

-- Store new tasks, of which nothing is to be decided any more. How many events that were.
CREATE OR REPLACE FUNCTION taskyard.insert_tasks(p_first integer, p_now timestamptz, a taskyard.new_tasks_1) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_n integer := cardinality(a.uuid);
    -- Of what there may be one for all.
    v_source text := a.consumer[1]; v_queue text := a.queue[1]; v_priority smallint := a.priority[1];
    v_lane text := taskyard.lane_of(a.consumer[1], a.requires[1]);
    v_due_at timestamptz := a.due_at[1]; v_created_at timestamptz := a.created_at[1];
    v_queues text[]; v_sources text[]; v_kinds text[]; v_details text[];
    v_has_lanes boolean;
BEGIN
    INSERT INTO taskyard.task (
        id, position, due_at, created_at, updated_at, timeout_s, priority, is_parked, state, uuid, consumer, queue, args, key,
        dedupe_slot, retry, bucket, requires, lane, origin, extra, fifo_bucket)
    SELECT id, id * {{gap}}, due_at, created_at, p_now, timeout_s, priority, key IS NOT NULL AND due_at <= p_now,
        CASE WHEN due_at > p_now THEN 'scheduled' ELSE 'queued' END, uuid, consumer, queue, args, key, slot, retry, bucket,
        requires, taskyard.lane_of(consumer, requires), origin, extra, CASE WHEN EXISTS (SELECT FROM taskyard.queue WHERE target_ordering IS NOT NULL AND name = ANY (a.queue))
            THEN taskyard.fifo_bucket_of((SELECT q.target_ordering FROM taskyard.queue AS q WHERE q.name = r.queue), bucket) END
    FROM (
        SELECT nextval('taskyard.seq') AS id, u.uuid, coalesce(u.consumer, v_source) AS consumer,
            coalesce(u.queue, v_queue) AS queue, u.args, coalesce(u.priority, v_priority) AS priority, u.key, u.slot,
            u.timeout_s, u.retry, coalesce(u.due_at, v_due_at) AS due_at,
            coalesce(u.created_at, v_created_at) AS created_at, u.bucket, u.requires, u.origin, u.extra
        FROM unnest(a.uuid, a.consumer, a.queue, a.args, a.priority, a.key, a.dedupe_slot, a.timeout_s, a.retry,
            a.due_at, a.created_at, a.bucket, a.requires, a.origin, a.extra)
            AS u(uuid, consumer, queue, args, priority, key, slot, timeout_s, retry, due_at, created_at, bucket, requires,
                origin, extra)
        OFFSET 0
    ) AS r;
    PERFORM taskyard.check_uuids(a.uuid);
    IF a.extra IS NOT NULL THEN
        PERFORM taskyard.insert_labels(a.uuid);
    END IF;
    -- Those of one lane, as they mostly are, are asked for without a look at each.
    IF cardinality(a.due_at) = 1 AND v_due_at > p_now THEN
        v_has_lanes := true;  -- they will, when they are due
    ELSIF cardinality(a.consumer) = 1 AND cardinality(a.queue) = 1 AND cardinality(a.priority) = 1
        AND (a.requires IS NULL OR v_n = 1) THEN
        v_has_lanes := (SELECT CASE v_priority WHEN 0 THEN low_0 WHEN 1 THEN low_1 ELSE low_2 END
            FROM taskyard.lane WHERE queue = v_queue AND lane = v_lane) IS NOT NULL;
    ELSE
        v_has_lanes := NOT EXISTS (
            SELECT FROM (
                SELECT DISTINCT coalesce(u.queue, v_queue) AS queue,
                    taskyard.lane_of(coalesce(u.consumer, v_source), u.requires) AS lane,
                    coalesce(u.priority, v_priority) AS priority
                FROM unnest(a.uuid, a.queue, a.consumer, a.requires, a.priority)
                    AS u(uuid, queue, consumer, requires, priority)
            ) AS n
            WHERE (SELECT CASE n.priority WHEN 0 THEN low_0 WHEN 1 THEN low_1 ELSE low_2 END
                FROM taskyard.lane AS l WHERE l.queue = n.queue AND l.lane = n.lane) IS NULL);
    END IF;
    IF NOT v_has_lanes THEN
        PERFORM taskyard.lower_watermarks(ARRAY(SELECT id FROM taskyard.task WHERE uuid = ANY (a.uuid)));
    END IF;
    IF cardinality(a.consumer) = 1 AND cardinality(a.queue) = 1 AND cardinality(a.due_at) = 1 THEN
        -- As it mostly is: then there is nothing to be put together.
        WITH told AS (
            INSERT INTO taskyard.event (xid, first, n, kind, queue, consumer, ats, uuids, details)
            VALUES (pg_current_xact_id()::text::bigint, p_first, v_n, 'submitted', v_queue, v_source, ARRAY[p_now], a.uuid,
                CASE WHEN a.extra IS NOT NULL THEN ARRAY(
                    SELECT taskyard.submit_detail(CASE WHEN v_due_at > p_now THEN 'scheduled' ELSE 'queued' END, x.extra)
                    FROM unnest(a.extra) WITH ORDINALITY AS x(extra, ord) ORDER BY x.ord)
                WHEN v_due_at > p_now THEN array_fill('{"after":"scheduled"}'::text, ARRAY[v_n]) END)
        )
        INSERT INTO taskyard.state_count (queue, state, n)
        VALUES (v_queue, CASE WHEN v_due_at > p_now THEN 'scheduled' ELSE 'queued' END, v_n);
        RETURN v_n;
    END IF;
    WITH r AS MATERIALIZED (
        SELECT coalesce(u.consumer, v_source) AS consumer, coalesce(u.queue, v_queue) AS queue,
            coalesce(u.due_at, v_due_at) > p_now AS later, u.extra, u.ord
        FROM unnest(a.uuid, a.consumer, a.queue, a.due_at, a.extra) WITH ORDINALITY
            AS u(uuid, consumer, queue, due_at, extra, ord)
    ), counted AS (
        INSERT INTO taskyard.state_count (queue, state, n)
        SELECT queue, CASE WHEN later THEN 'scheduled' ELSE 'queued' END, count(*) FROM r GROUP BY queue, later
    )
    SELECT array_agg('submitted'::text), array_agg(queue ORDER BY ord), array_agg(consumer ORDER BY ord),
        array_agg(taskyard.submit_detail(CASE WHEN later THEN 'scheduled' ELSE 'queued' END, extra) ORDER BY ord)
    INTO v_kinds, v_queues, v_sources, v_details FROM r;
    RETURN taskyard.write_events(p_first, v_kinds, a.uuid, v_queues, v_sources, ARRAY[p_now], v_details);
END $$;

-- Store new tasks of which some may be there already, wait for others, or come from a run that has lost its claim: add by
-- add, each whole or not at all; `n` of an add is how many of the tasks are its. `ties` says of some of its tasks, by their
-- number `i` in it, their group, scope, on_failure and note, and which uuids they come after. An answer says who
-- holds the place of each task, null for a new one, and until when, if for a window that was open; or what kept the tasks out.
-- `key_idle` says of each task of an add whether it has that scope: then a running task with its key is a duplicate. The
-- add and every claim of the queue hold the lock of the queue, so a task of the key either runs, or starts after the add.
-- If an insert would wait for a transaction that somebody keeps open, it fails with a code of its own.
CREATE OR REPLACE FUNCTION taskyard.submit_checked(
    p_first integer, p_now timestamptz, p_locked text[], p_adds json, a taskyard.new_tasks_1,
    OUT answers json[], OUT told integer, OUT key_queues text[], OUT keys text[], OUT finished text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_add record;
    v_from integer;
    v_to integer := 0;
    v_found record;
    v_done record;
    v_uuids text[]; v_states text[]; v_ids bigint[]; v_ends timestamptz[];
    v_holders text[];
    v_busy text[];  -- keys that keep tasks out, because a task runs with them
    v_out integer;
    v_new text[];
    v_tied record;
    r_ids bigint[]; r_by text[];
    v_patience text := current_setting('lock_timeout');
    v_is_inserting boolean := false;
    v_first integer;
BEGIN
    told := 0;
    PERFORM taskyard.lock_slots(a.dedupe_slot);
    FOR v_add IN
        SELECT * FROM json_to_recordset(p_adds) AS j(
            n integer, dedupe text, id bigint, token bigint, attempt integer, window_s double precision, ties json,
            may_circle boolean, key_idle json, leaves_out boolean)
    LOOP
        v_from := v_to + 1;
        v_to := v_to + v_add.n;
        v_holders := array_fill(NULL::text, ARRAY[v_add.n]);
        v_uuids := NULL; v_ends := NULL; r_ids := NULL; r_by := NULL; v_busy := NULL;
        IF v_add.id IS NOT NULL AND NOT EXISTS (
            SELECT FROM taskyard.task
            WHERE id = v_add.id AND token = v_add.token AND attempt = v_add.attempt
        ) THEN
            answers := answers || '{"why":"lost"}'::json;
            CONTINUE;
        END IF;
        IF v_add.dedupe <> 'allow' THEN
            IF NOT taskyard.lock_open_slots(a.dedupe_slot[v_from:v_to], false) THEN
                answers := answers || '{"why":"busy"}'::json;
                CONTINUE;
            END IF;
            SELECT array_agg(h.uuid ORDER BY r.ord), array_agg(h.state ORDER BY r.ord), array_agg(h.id ORDER BY r.ord),
                array_agg(h.until ORDER BY r.ord)
            INTO v_uuids, v_states, v_ids, v_ends
            FROM unnest(a.dedupe_slot[v_from:v_to]) WITH ORDINALITY AS r(slot, ord)
            LEFT JOIN LATERAL taskyard.dedupe_holder_1(r.slot, p_now) AS h ON r.slot IS NOT NULL;
            IF v_add.key_idle IS NOT NULL THEN
                -- The same work comes before the same key, except for a replacement: that is refused while the key runs.
                -- A task of a quarantined account has the holder '', and is kept out as by a running key.
                SELECT array_agg(CASE WHEN q.account IS NULL THEN coalesce(k.uuid, r.uuid) ELSE '' END ORDER BY r.ord),
                    array_agg(CASE WHEN k.uuid IS NULL THEN r.state ELSE 'running' END ORDER BY r.ord),
                    array_agg(coalesce(k.id, r.id) ORDER BY r.ord),
                    array_agg(CASE WHEN k.uuid IS NULL AND q.account IS NULL THEN r.until END ORDER BY r.ord),
                    array_agg(CASE WHEN k.uuid IS NOT NULL OR q.account IS NOT NULL THEN r.key END ORDER BY r.ord)
                INTO v_uuids, v_states, v_ids, v_ends, v_busy
                FROM unnest(v_uuids, v_states, v_ids, v_ends, a.dedupe_slot[v_from:v_to], a.queue[v_from:v_to],
                    a.key[v_from:v_to], a.consumer[v_from:v_to],
                    ARRAY(SELECT json_array_elements_text(v_add.key_idle)::boolean)) WITH ORDINALITY
                    AS r(uuid, state, id, until, slot, queue, key, consumer, is_asked, ord)
                LEFT JOIN taskyard.quarantined_account AS q
                    ON r.is_asked AND q.pool = r.queue AND q.account = r.key AND q.consumer = r.consumer
                LEFT JOIN LATERAL taskyard.find_running(r.queue, r.key) AS k
                    ON r.is_asked AND r.slot IS NOT NULL AND r.key IS NOT NULL
                    AND (r.uuid IS NULL OR v_add.dedupe = 'replace');
                IF v_add.leaves_out IS NOT TRUE AND '' = ANY (v_uuids) THEN
                    v_out := v_from - 1 + array_position(v_uuids, '');
                    answers := answers || json_build_object('why', 'quarantined', 'queue', a.queue[v_out],
                        'key', a.key[v_out], 'consumer', a.consumer[v_out]);
                    CONTINUE;
                END IF;
            END IF;
            SELECT r.slot, r.holder, r.until, r.busy INTO v_found
            FROM (
                SELECT *, row_number() OVER (PARTITION BY slot ORDER BY ord) AS nth
                FROM unnest(a.dedupe_slot[v_from:v_to], v_uuids, v_states, v_ends, v_busy) WITH ORDINALITY
                    AS u(slot, holder, state, until, busy, ord)
            ) AS r
            WHERE v_add.dedupe <> 'merge' AND r.slot IS NOT NULL AND (
                r.nth > 1 OR r.holder IS NOT NULL AND (v_add.dedupe = 'refuse' OR r.state IS NULL OR r.state = 'running'))
            ORDER BY r.ord LIMIT 1;
            IF FOUND THEN
                answers := answers || json_build_object('why', 'duplicate', 'uuid', coalesce(v_found.holder, ''),
                    'slot', v_found.slot, 'until', v_found.until, 'key', v_found.busy);
                CONTINUE;
            END IF;
            IF v_add.dedupe = 'merge' THEN
                -- Of tasks for one work, the first that no running key keeps out is stored; those after it become that one.
                SELECT array_agg(CASE WHEN r.slot IS NOT NULL AND r.ord > r.first_ord AND (r.holder IS NULL OR r.busy IS NOT NULL)
                    THEN r.first_uuid ELSE r.holder END ORDER BY r.ord)
                INTO v_holders
                FROM (
                    SELECT *, min(ord) FILTER (WHERE busy IS NULL) OVER (PARTITION BY slot) AS first_ord,
                        first_value(uuid) OVER (PARTITION BY slot ORDER BY busy IS NOT NULL, ord) AS first_uuid
                    FROM unnest(a.uuid[v_from:v_to], a.dedupe_slot[v_from:v_to], v_uuids, v_busy) WITH ORDINALITY
                        AS u(uuid, slot, holder, busy, ord)
                ) AS r;
            ELSE
                SELECT array_agg(r.id ORDER BY r.ord), array_agg(r.uuid ORDER BY r.ord) INTO r_ids, r_by
                FROM unnest(a.uuid[v_from:v_to], v_ids) WITH ORDINALITY AS r(uuid, id, ord) WHERE r.id IS NOT NULL;
            END IF;
        END IF;
        SELECT array_agg(u.uuid ORDER BY u.ord) INTO v_new
        FROM unnest(a.uuid[v_from:v_to], v_holders) WITH ORDINALITY AS u(uuid, holder, ord) WHERE u.holder IS NULL;
        SELECT * INTO v_tied FROM taskyard.read_relations(a.uuid[v_from:v_to], v_holders, v_uuids, v_add.ties);
        IF (v_add.may_circle OR v_tied.is_reused) AND taskyard.has_cycle(v_tied.children, v_tied.parents) THEN
            answers := answers || json_build_object('why', 'cycle', 'holders', v_holders);
            CONTINUE;
        END IF;
        -- What has ended is pruned without a queue's lock: not until those who come to wait for it are told.
        PERFORM FROM taskyard.finished WHERE uuid = ANY (v_tied.strangers) ORDER BY id FOR KEY SHARE;
        SELECT e.uuid INTO v_found FROM unnest(v_tied.strangers) WITH ORDINALITY AS e(uuid, ord)
        WHERE (SELECT t.id FROM taskyard.task AS t WHERE t.uuid = e.uuid) IS NULL
            AND (SELECT d.id FROM taskyard.finished AS d WHERE d.uuid = e.uuid) IS NULL
        ORDER BY e.ord LIMIT 1;
        IF FOUND THEN
            answers := answers || json_build_object('why', 'unknown', 'uuid', v_found.uuid);
            CONTINUE;
        END IF;
        SELECT n.uuid INTO v_found
        FROM (SELECT uuid, ord, row_number() OVER (PARTITION BY uuid ORDER BY ord) AS nth
              FROM unnest(v_new) WITH ORDINALITY AS u(uuid, ord)) AS n
        WHERE n.nth > 1 OR (SELECT t.id FROM taskyard.task AS t WHERE t.uuid = n.uuid) IS NOT NULL
            OR (SELECT e.id FROM taskyard.finished AS e WHERE e.uuid = n.uuid) IS NOT NULL
        ORDER BY n.ord LIMIT 1;
        IF FOUND THEN
            answers := answers || json_build_object('why', 'taken', 'uuid', v_found.uuid);
            CONTINUE;
        END IF;
        answers := answers || json_build_object('holders', v_holders, 'until', v_ends);
        IF EXISTS (SELECT FROM taskyard.task AS t WHERE t.uuid = ANY (v_tied.strangers) AND t.queue <> ALL (p_locked))
            OR EXISTS (SELECT FROM taskyard.task AS t WHERE t.id = ANY (r_ids) AND t.queue <> ALL (p_locked)) THEN
            RAISE unique_violation;  -- it came when the queues were being locked: all is asked again
        END IF;
        IF r_ids IS NOT NULL THEN
            DELETE FROM taskyard.dedupe_window AS w USING taskyard.task_relation AS t WHERE t.id = ANY (r_ids) AND w.slot = ANY (ARRAY[t.dedupe_key]);
            SELECT * INTO v_done FROM taskyard.finish_unrun(p_first + told, p_now, r_ids,
                array_fill('canceled'::text, ARRAY[cardinality(r_ids)]), NULL, NULL,
                -- As `replaced` of taskyard.model.dedupe writes it.
                ARRAY(SELECT json_build_object('at', p_now, 'code', 'replaced', 'subject', uuid)::text
                      FROM unnest(r_by) WITH ORDINALITY AS b(uuid, ord) ORDER BY ord),
                array_fill('replaced'::text, ARRAY[cardinality(r_ids)]));
            told := told + v_done.told; finished := finished || v_done.uuids;
            key_queues := key_queues || v_done.key_queues; keys := keys || v_done.keys;
        END IF;
        IF v_new IS NULL THEN
            CONTINUE;
        END IF;
        -- Column by column, without those that were merged. A uuid, or a slot, may stand in a transaction that somebody keeps
        -- open: the turn then fails, instead of waiting for it.
        PERFORM set_config('lock_timeout', '50ms', true);
        v_is_inserting := true;
        v_first := p_first + told;
        told := told + taskyard.insert_tasks(p_first + told, p_now, c)
        FROM (
            SELECT v_new, array_agg(consumer ORDER BY ord) AS consumer, array_agg(due_at ORDER BY ord) AS due_at,
                array_agg(created_at ORDER BY ord) AS created_at, array_agg(queue ORDER BY ord) AS queue,
                array_agg(args ORDER BY ord) AS args, array_agg(priority ORDER BY ord) AS priority,
                array_agg(key ORDER BY ord) AS key, array_agg(CASE WHEN v_add.dedupe <> 'allow'
                    AND scope IS DISTINCT FROM 'window' THEN slot END ORDER BY ord) AS dedupe_slot,
                array_agg(timeout_s ORDER BY ord) AS timeout_s, array_agg(retry ORDER BY ord) AS retry,
                array_agg(bucket ORDER BY ord) AS bucket,
                CASE WHEN count(requires) > 0 THEN array_agg(requires ORDER BY ord) END AS requires,
                array_agg(origin ORDER BY ord) AS origin,
                CASE WHEN count(extra) > 0 THEN array_agg(extra ORDER BY ord) END AS extra
            FROM unnest(a.consumer[v_from:v_to], a.queue[v_from:v_to], a.args[v_from:v_to], a.priority[v_from:v_to],
                a.key[v_from:v_to], a.dedupe_slot[v_from:v_to], a.timeout_s[v_from:v_to], a.retry[v_from:v_to],
                a.due_at[v_from:v_to], a.created_at[v_from:v_to], a.bucket[v_from:v_to], a.requires[v_from:v_to],
                a.origin[v_from:v_to], a.extra[v_from:v_to], v_holders, v_tied.scopes) WITH ORDINALITY
                AS u(consumer, queue, args, priority, key, slot, timeout_s, retry, due_at, created_at, bucket, requires,
                    origin, extra, holder, scope, ord)
            WHERE u.holder IS NULL
        ) AS c;
        UPDATE taskyard.task AS t SET note = x.note FROM json_to_recordset(v_add.ties) AS x(i integer, note text)
        WHERE x.note IS NOT NULL AND t.uuid = ANY (ARRAY[a.uuid[v_from + x.i - 1]]) AND v_holders[x.i] IS NULL;
        IF v_add.dedupe <> 'allow' OR v_add.ties IS NOT NULL THEN
            INSERT INTO taskyard.task_relation (id, group_id, on_failure, dedupe_key, dedupe_scope)
            SELECT t.id, u.group_id, u.on_failure, k.slot, CASE WHEN k.slot IS NOT NULL THEN u.scope END
            FROM unnest(a.uuid[v_from:v_to], a.dedupe_slot[v_from:v_to], v_holders, v_tied.groups, v_tied.on_failures,
                v_tied.scopes) AS u(uuid, slot, holder, group_id, on_failure, scope)
            CROSS JOIN LATERAL (SELECT t.id FROM taskyard.task AS t WHERE t.uuid = u.uuid OFFSET 0) AS t
            CROSS JOIN LATERAL (SELECT CASE WHEN v_add.dedupe <> 'allow' THEN u.slot END AS slot) AS k
            WHERE u.holder IS NULL AND (u.group_id IS NOT NULL OR u.on_failure IS NOT NULL OR k.slot IS NOT NULL);
        END IF;
        IF v_add.window_s IS NOT NULL AND v_add.dedupe <> 'allow' THEN
            PERFORM taskyard.open_windows(array_agg(u.slot), array_agg(u.uuid), p_now + make_interval(secs => v_add.window_s))
            FROM unnest(a.uuid[v_from:v_to], a.dedupe_slot[v_from:v_to], v_holders, v_tied.scopes) AS u(uuid, slot, holder, scope)
            WHERE u.holder IS NULL AND u.slot IS NOT NULL AND u.scope = 'window';
        END IF;
        PERFORM set_config('lock_timeout', v_patience, true);
        v_is_inserting := false;
        v_ids := r_ids;
        IF v_tied.children IS NOT NULL THEN
            v_ids := v_ids || taskyard.insert_dependencies(v_tied.children, v_tied.parents);
            -- Their events were written before it was known who waits.
            UPDATE taskyard.event AS e SET details = ARRAY(
                SELECT taskyard.submit_detail(t.state, t.extra) FROM unnest(e.uuids) WITH ORDINALITY AS u(uuid, ord)
                JOIN taskyard.task AS t ON t.uuid = ANY (ARRAY[u.uuid]) ORDER BY u.ord)
            WHERE e.xid = pg_current_xact_id()::text::bigint AND e.first >= v_first AND e.kind = 'submitted';
        END IF;
        IF v_ids IS NOT NULL THEN
            SELECT * INTO v_done FROM taskyard.release_dependents(p_first + told, p_now, p_locked, v_ids);
            told := told + v_done.told; finished := finished || v_done.finished;
            key_queues := key_queues || v_done.key_queues; keys := keys || v_done.keys;
        END IF;
    END LOOP;
EXCEPTION WHEN lock_not_available THEN
    IF v_is_inserting THEN
        RAISE EXCEPTION 'an insert waits for an open transaction' USING ERRCODE = {{insert_blocked}};
    END IF;
    RAISE;
END $$;

-- Store one new task that starts at once, as `insert_tasks` and `start` would in turn: four rows are written, not seven, and none
-- is left to be vacuumed. Only if nothing else could come of it: its queue goes by one priority alone, without
-- a limit, and nothing in it waits to start. Else nothing is done, and the claim is null.
CREATE OR REPLACE FUNCTION taskyard.insert_running(p_first integer, p_node text, p_now timestamptz, a taskyard.new_tasks_1)
RETURNS taskyard.claims_1 LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_claim taskyard.claims_1;
    v_queue text := a.queue[1]; v_source text := a.consumer[1]; v_priority smallint := a.priority[1];
    v_id bigint; v_token bigint;
    v_nothing text;
BEGIN
    WITH begun AS (
        INSERT INTO taskyard.task (
            id, token, position, due_at, created_at, updated_at, started_at, timeout_s, attempt, priority, is_parked, state,
            uuid, consumer, queue, args, retry, node, bucket, requires, lane, origin, extra)
        SELECT n.id, nextval('taskyard.seq'), n.id * {{gap}}, a.due_at[1], a.created_at[1], p_now, p_now, a.timeout_s[1], 1,
            v_priority, false, 'running', a.uuid[1], v_source, v_queue, a.args[1], a.retry[1], p_node, a.bucket[1],
            a.requires[1], taskyard.lane_of(v_source, a.requires[1]), a.origin[1], a.extra[1]
        FROM (SELECT nextval('taskyard.seq') AS id OFFSET 0) AS n
        WHERE NOT EXISTS (
            SELECT FROM taskyard.queue
            WHERE name = v_queue AND (state <> 'running' OR ordering <> 'priority' OR concurrency IS NOT NULL)
        ) AND NOT EXISTS (
            SELECT FROM taskyard.lane AS l
            LEFT JOIN LATERAL (
                SELECT * FROM taskyard.watermark AS m WHERE m.queue = l.queue AND m.lane = l.lane ORDER BY m.n DESC LIMIT 1
            ) AS m ON true
            WHERE l.queue = v_queue AND (
                v_priority <> 0 AND l.low_0 IS NOT NULL OR v_priority <> 1 AND l.low_1 IS NOT NULL
                OR v_priority <> 2 AND l.low_2 IS NOT NULL OR (
                    SELECT t.id FROM taskyard.task AS t
                    WHERE t.queue = l.queue AND t.lane = l.lane AND t.state = 'queued' AND NOT t.is_parked
                        AND t.priority = v_priority
                        AND t.position >= coalesce(CASE v_priority WHEN 0 THEN m.low_0 WHEN 1 THEN m.low_1 ELSE m.low_2 END, 0)
                    ORDER BY t.position LIMIT 1) IS NOT NULL))
        RETURNING id, token
    ), told AS (
        INSERT INTO taskyard.event (xid, first, n, kind, queue, consumer, ats, uuids, details)
        SELECT pg_current_xact_id()::text::bigint, e.first, 1, e.kind, v_queue, v_source, ARRAY[p_now], a.uuid,
            CASE WHEN e.kind = 'submitted' AND a.extra IS NOT NULL THEN ARRAY[taskyard.submit_detail('queued', a.extra[1])] END
        FROM begun, (VALUES (p_first, 'submitted'), (p_first + 1, 'running')) AS e(first, kind)
    ), counted AS (
        INSERT INTO taskyard.state_count (queue, state, n) SELECT v_queue, 'running', 1 FROM begun
    )
    SELECT id, token INTO v_id, v_token FROM begun;
    IF v_id IS NULL THEN
        RETURN v_claim;
    END IF;
    v_nothing := taskyard.check_uuids(a.uuid);
    IF a.extra IS NOT NULL THEN
        v_nothing := taskyard.insert_labels(a.uuid);
    END IF;
    v_claim := ROW(ARRAY[v_token], a.uuid, a.consumer, a.due_at, a.created_at, ARRAY[v_id], a.queue, a.args, a.priority,
        ARRAY[v_id * {{gap}}], NULL, NULL, a.timeout_s, a.retry, ARRAY[1], NULL, NULL, NULL, NULL, NULL, NULL, a.bucket,
        a.requires, a.origin, a.extra);
    RETURN v_claim;
END $$;
