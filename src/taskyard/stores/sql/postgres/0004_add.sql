-- New tasks.

-- New tasks, column by column, and nothing where a column is empty. Of what is the same for all of them, there may be
-- one: to send each of them would take the client twice as long.
CREATE TYPE taskyard.new_1 AS (
    uuid text[], source text[], queue text[], args text[], priority smallint[], key text[], slot text[],
    timeout_s double precision[], retry text[], due_at timestamptz[], created_at timestamptz[], bucket text[],
    origin text[]
);

-- After these were stored: fail if one of them has ended before, so that the turn is asked again, add by add.
-- Race: a task with one of these uuids may be ending just now. The insert has waited for that, and only now it is seen.
CREATE FUNCTION taskyard.check_uuids_1(p_uuids text[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_last text COLLATE "C";
BEGIN
    -- Ids are made in the order of time: most are beyond all that has ended, which one look can tell.
    SELECT max(uuid) INTO v_last FROM taskyard.ended;
    IF v_last >= ANY (p_uuids) THEN
        IF EXISTS (SELECT FROM taskyard.ended WHERE uuid = ANY (p_uuids)) THEN
            RAISE unique_violation;
        END IF;
    END IF;
END $$;

-- Store new tasks, of which nothing is to be decided any more. How many events that were.
CREATE FUNCTION taskyard.add_1(p_first integer, p_now timestamptz, a taskyard.new_1) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_n integer := cardinality(a.uuid);
    -- Of what there may be one for all.
    v_source text := a.source[1]; v_queue text := a.queue[1]; v_priority smallint := a.priority[1];
    v_due_at timestamptz := a.due_at[1]; v_created_at timestamptz := a.created_at[1];
    v_queues text[]; v_sources text[]; v_kinds text[];
    v_has_lanes boolean;
BEGIN
    INSERT INTO taskyard.task (
        id, position, due_at, created_at, updated_at, timeout_s, priority, parked, state, uuid, source, queue, args, key,
        dedupe_slot, retry, bucket, origin, line)
    SELECT id, id * {{gap}}, due_at, created_at, p_now, timeout_s, priority, key IS NOT NULL AND due_at <= p_now,
        CASE WHEN due_at > p_now THEN 'scheduled' ELSE 'queued' END, uuid, source, queue, args, key, slot, retry, bucket,
        origin, CASE WHEN EXISTS (SELECT FROM taskyard.queue WHERE lines IS NOT NULL AND name = ANY (a.queue))
            THEN taskyard.line_1((SELECT q.lines FROM taskyard.queue AS q WHERE q.name = r.queue), bucket) END
    FROM (
        SELECT nextval('taskyard.seq') AS id, u.uuid, coalesce(u.source, v_source) AS source,
            coalesce(u.queue, v_queue) AS queue, u.args, coalesce(u.priority, v_priority) AS priority, u.key, u.slot,
            u.timeout_s, u.retry, coalesce(u.due_at, v_due_at) AS due_at,
            coalesce(u.created_at, v_created_at) AS created_at, u.bucket, u.origin
        FROM unnest(a.uuid, a.source, a.queue, a.args, a.priority, a.key, a.slot, a.timeout_s, a.retry, a.due_at,
            a.created_at, a.bucket, a.origin)
            AS u(uuid, source, queue, args, priority, key, slot, timeout_s, retry, due_at, created_at, bucket, origin)
        OFFSET 0
    ) AS r;
    PERFORM taskyard.check_uuids_1(a.uuid);
    -- Those of one lane, as they mostly are, are asked for without a look at each.
    IF cardinality(a.due_at) = 1 AND v_due_at > p_now THEN
        v_has_lanes := true;  -- they will, when they are due
    ELSIF cardinality(a.source) = 1 AND cardinality(a.queue) = 1 AND cardinality(a.priority) = 1 THEN
        v_has_lanes := (SELECT CASE v_priority WHEN 0 THEN low_0 WHEN 1 THEN low_1 ELSE low_2 END
            FROM taskyard.lane WHERE queue = v_queue AND source = v_source) IS NOT NULL;
    ELSE
        v_has_lanes := NOT EXISTS (
            SELECT FROM (
                SELECT DISTINCT coalesce(u.queue, v_queue) AS queue, coalesce(u.source, v_source) AS source,
                    coalesce(u.priority, v_priority) AS priority
                FROM unnest(a.uuid, a.queue, a.source, a.priority) AS u(uuid, queue, source, priority)
            ) AS n
            WHERE (SELECT CASE n.priority WHEN 0 THEN low_0 WHEN 1 THEN low_1 ELSE low_2 END
                FROM taskyard.lane AS l WHERE l.queue = n.queue AND l.source = n.source) IS NULL);
    END IF;
    IF NOT v_has_lanes THEN
        PERFORM taskyard.lower_1(ARRAY(SELECT id FROM taskyard.task WHERE uuid = ANY (a.uuid)));
    END IF;
    IF cardinality(a.source) = 1 AND cardinality(a.queue) = 1 AND cardinality(a.due_at) = 1 THEN
        -- As it mostly is: then there is nothing to be put together.
        WITH told AS (
            INSERT INTO taskyard.event (xid, first, n, kind, queue, source, ats, uuids)
            VALUES (pg_current_xact_id()::text::bigint, p_first, v_n, 'submitted', v_queue, v_source, ARRAY[p_now], a.uuid)
        )
        INSERT INTO taskyard.tally (queue, state, n)
        VALUES (v_queue, CASE WHEN v_due_at > p_now THEN 'scheduled' ELSE 'queued' END, v_n);
        RETURN v_n;
    END IF;
    WITH r AS MATERIALIZED (
        SELECT coalesce(u.source, v_source) AS source, coalesce(u.queue, v_queue) AS queue,
            coalesce(u.due_at, v_due_at) > p_now AS later, u.ord
        FROM unnest(a.uuid, a.source, a.queue, a.due_at) WITH ORDINALITY AS u(uuid, source, queue, due_at, ord)
    ), counted AS (
        INSERT INTO taskyard.tally (queue, state, n)
        SELECT queue, CASE WHEN later THEN 'scheduled' ELSE 'queued' END, count(*) FROM r GROUP BY queue, later
    )
    SELECT array_agg('submitted'::text), array_agg(queue ORDER BY ord), array_agg(source ORDER BY ord)
    INTO v_kinds, v_queues, v_sources FROM r;
    RETURN taskyard.tell_1(p_first, v_kinds, a.uuid, v_queues, v_sources, ARRAY[p_now]);
END $$;

-- The queues of those that the tasks of these adds wait for or replace.
CREATE FUNCTION taskyard.others_1(p_adds json, a_slot text[], p_now timestamptz) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT t.queue FROM json_to_recordset(p_adds) AS a(ties json)
        CROSS JOIN LATERAL json_to_recordset(a.ties) AS x("after" json)
        CROSS JOIN LATERAL json_array_elements_text(x."after") AS p(uuid)
        JOIN taskyard.task AS t ON t.uuid = ANY (ARRAY[p.uuid])
        UNION
        SELECT h.queue FROM unnest(a_slot) AS s CROSS JOIN LATERAL taskyard.holder_1(s, p_now) AS h
        WHERE s IS NOT NULL AND h.queue IS NOT NULL
            AND EXISTS (SELECT FROM json_to_recordset(p_adds) AS a(dedupe text) WHERE a.dedupe = 'replace')
        UNION
        SELECT unnest(taskyard.listeners_1(ARRAY(
            SELECT h.id FROM unnest(a_slot) AS s CROSS JOIN LATERAL taskyard.holder_1(s, p_now) AS h
            WHERE s IS NOT NULL AND h.id IS NOT NULL))));
END $$;

-- New tasks wait for others from here on, unless those are done: those who do are blocked. Who of the others has ended so
-- that somebody waits in vain.
CREATE FUNCTION taskyard.tie_1(e_child text[], e_parent text[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_lost bigint[];
BEGIN
    WITH edge AS MATERIALIZED (
        SELECT c.id AS child, coalesce(p.id, d.id) AS parent, p.id IS NULL AND d.state <> 'completed' AS has_failed,
            p.id IS NULL AND (d.state = 'completed' OR t.on_failure = 'ignore') AS done, e.ord
        FROM unnest(e_child, e_parent) WITH ORDINALITY AS e(child, parent, ord)
        JOIN taskyard.task AS c ON c.uuid = ANY (ARRAY[e.child]) JOIN taskyard.tie AS t ON t.id = ANY (ARRAY[c.id])
        LEFT JOIN taskyard.task AS p ON p.uuid = ANY (ARRAY[e.parent])
        LEFT JOIN taskyard.ended AS d ON d.uuid = ANY (ARRAY[e.parent])
    ), stored AS (
        INSERT INTO taskyard.dependency (child, parent, done) SELECT child, parent, done FROM edge
    ), counts AS (
        SELECT child, count(*)::integer AS n FROM edge WHERE NOT done GROUP BY child
    ), waiting AS (
        UPDATE taskyard.tie AS t SET waits = c.n FROM counts AS c WHERE t.id = ANY (ARRAY[c.child])
    ), was AS MATERIALIZED (
        SELECT t.id, t.queue, t.state FROM counts AS c JOIN taskyard.task AS t ON t.id = ANY (ARRAY[c.child])
    ), blocked AS (
        UPDATE taskyard.task AS t SET state = 'blocked', parked = false FROM was WHERE t.id = ANY (ARRAY[was.id])
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, state, -count(*) FROM was GROUP BY queue, state
        UNION ALL SELECT queue, 'blocked', count(*) FROM was GROUP BY queue
    )
    SELECT array_agg(parent ORDER BY ord) INTO v_lost FROM edge WHERE has_failed AND NOT done;
    RETURN v_lost;
END $$;

-- These slots are taken until then.
CREATE FUNCTION taskyard.open_windows_1(p_slots text[], p_uuids text[], p_until timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO taskyard.slot_window AS w SELECT u.slot, u.uuid, p_until FROM unnest(p_slots, p_uuids) AS u(slot, uuid)
    ON CONFLICT (slot) DO UPDATE SET uuid = excluded.uuid, until = excluded.until;
END $$;

-- What the ties of an add say, of each of its tasks, and who waits for whom of those that are not merged away; `strangers`
-- are the parents that are not among them. Who was merged away is waited for as the one that it became. `is_reused` if one
-- of them has the uuid of a task that was `found` to stand for the work of another.
-- Here and below are lists alone, which may be long, and no tables: such are best joined by hashing.
CREATE FUNCTION taskyard.read_ties_1(
    p_uuids text[], p_holders text[], p_found text[], p_ties json, OUT is_reused boolean,
    OUT groups text[], OUT on_failures text[], OUT scopes text[],
    OUT children text[], OUT parents text[], OUT strangers text[]
) LANGUAGE plpgsql SET enable_hashjoin = on AS $$
#variable_conflict use_column
BEGIN
    IF p_ties IS NULL THEN
        RETURN;
    END IF;
    SELECT array_agg(x."group" ORDER BY u.ord), array_agg(x.on_failure ORDER BY u.ord), array_agg(x.scope ORDER BY u.ord)
    INTO groups, on_failures, scopes
    FROM generate_series(1, cardinality(p_uuids)) AS u(ord)
    LEFT JOIN json_to_recordset(p_ties) AS x(i integer, "group" text, on_failure text, scope text) ON x.i = u.ord;
    is_reused := EXISTS (SELECT unnest(p_uuids) INTERSECT SELECT unnest(p_found));  -- a join would compare each with each
    WITH one AS MATERIALIZED (
        SELECT * FROM unnest(p_uuids, p_holders) WITH ORDINALITY AS u(uuid, holder, ord)
    )
    SELECT array_agg(e.child ORDER BY e.i, e.n), array_agg(e.parent ORDER BY e.i, e.n),
        array_agg(e.parent ORDER BY e.i, e.n) FILTER (WHERE e.is_strange)
    INTO children, parents, strangers
    FROM (
        SELECT u.uuid AS child, coalesce(m.holder, p.uuid) AS parent, x.i, min(p.n) AS n,
            bool_and(b.uuid IS NULL) AS is_strange
        FROM json_to_recordset(p_ties) AS x(i integer, "after" json)
        JOIN one AS u ON u.ord = x.i
        CROSS JOIN LATERAL json_array_elements_text(x."after") WITH ORDINALITY AS p(uuid, n)
        LEFT JOIN one AS m ON m.uuid = p.uuid
        LEFT JOIN one AS b ON b.uuid = coalesce(m.holder, p.uuid) AND b.holder IS NULL
        WHERE u.holder IS NULL
        GROUP BY 1, 2, 3
    ) AS e;
END $$;

CREATE FUNCTION taskyard.has_circle_1(p_children text[], p_parents text[]) RETURNS boolean
LANGUAGE plpgsql SET enable_hashjoin = on AS $$
BEGIN
    RETURN EXISTS (
        WITH RECURSIVE edge AS MATERIALIZED (
            SELECT * FROM unnest(p_children, p_parents) AS e(child, parent)
        ), way (child, parent) AS (
            SELECT child, parent FROM edge
            UNION SELECT w.child, e.parent FROM way AS w JOIN edge AS e ON e.child = w.parent
        )
        SELECT FROM way WHERE child = parent);
END $$;

-- Store new tasks of which some may be there already, wait for others, or come from a run that has lost its claim: add by
-- add, each whole or not at all; `n` of an add is how many of the tasks are its. `ties` says of some of its tasks, by their
-- number `i` in it, their group, scope, on_failure and note, and which uuids they come after. An answer says who
-- holds the place of each task, null for a new one, and until when, if for a window that was open; or what kept the tasks out.
CREATE FUNCTION taskyard.admit_1(
    p_first integer, p_now timestamptz, p_locked text[], p_adds json, a taskyard.new_1,
    OUT answers json[], OUT told integer, OUT key_queues text[], OUT keys text[], OUT ended text[]
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
    v_new text[];
    v_tied record;
    r_ids bigint[]; r_by text[];
    v_patience text := current_setting('lock_timeout');
BEGIN
    told := 0;
    PERFORM taskyard.lock_slots_1(a.slot);
    FOR v_add IN
        SELECT * FROM json_to_recordset(p_adds) AS j(
            n integer, dedupe text, id bigint, token bigint, attempt integer, window_s double precision, ties json,
            may_circle boolean)
    LOOP
        v_from := v_to + 1;
        v_to := v_to + v_add.n;
        v_holders := array_fill(NULL::text, ARRAY[v_add.n]);
        v_uuids := NULL; v_ends := NULL; r_ids := NULL; r_by := NULL;
        IF v_add.id IS NOT NULL AND NOT EXISTS (
            SELECT FROM taskyard.task
            WHERE id = v_add.id AND token = v_add.token AND attempt = v_add.attempt
        ) THEN
            answers := answers || '{"why":"lost"}'::json;
            CONTINUE;
        END IF;
        IF v_add.dedupe <> 'allow' THEN
            IF NOT taskyard.lock_open_slots_1(a.slot[v_from:v_to], false) THEN
                answers := answers || '{"why":"busy"}'::json;
                CONTINUE;
            END IF;
            SELECT array_agg(h.uuid ORDER BY r.ord), array_agg(h.state ORDER BY r.ord), array_agg(h.id ORDER BY r.ord),
                array_agg(h.until ORDER BY r.ord)
            INTO v_uuids, v_states, v_ids, v_ends
            FROM unnest(a.slot[v_from:v_to]) WITH ORDINALITY AS r(slot, ord)
            LEFT JOIN LATERAL taskyard.holder_1(r.slot, p_now) AS h ON r.slot IS NOT NULL;
            SELECT r.slot, r.holder, r.until INTO v_found
            FROM (
                SELECT *, row_number() OVER (PARTITION BY slot ORDER BY ord) AS nth
                FROM unnest(a.slot[v_from:v_to], v_uuids, v_states, v_ends) WITH ORDINALITY
                    AS u(slot, holder, state, until, ord)
            ) AS r
            WHERE v_add.dedupe <> 'merge' AND r.slot IS NOT NULL AND (
                r.nth > 1 OR r.holder IS NOT NULL AND (v_add.dedupe = 'refuse' OR r.state IS NULL OR r.state = 'running'))
            ORDER BY r.ord LIMIT 1;
            IF FOUND THEN
                answers := answers || json_build_object('why', 'duplicate', 'uuid', coalesce(v_found.holder, ''),
                    'slot', v_found.slot, 'until', v_found.until);
                CONTINUE;
            END IF;
            IF v_add.dedupe = 'merge' THEN
                SELECT array_agg(CASE WHEN r.holder IS NOT NULL THEN r.holder
                    WHEN r.slot IS NOT NULL AND r.nth > 1 THEN r.first_uuid END ORDER BY r.ord)
                INTO v_holders
                FROM (
                    SELECT *, row_number() OVER (PARTITION BY slot ORDER BY ord) AS nth,
                        first_value(uuid) OVER (PARTITION BY slot ORDER BY ord) AS first_uuid
                    FROM unnest(a.uuid[v_from:v_to], a.slot[v_from:v_to], v_uuids) WITH ORDINALITY
                        AS u(uuid, slot, holder, ord)
                ) AS r;
            ELSE
                SELECT array_agg(r.id ORDER BY r.ord), array_agg(r.uuid ORDER BY r.ord) INTO r_ids, r_by
                FROM unnest(a.uuid[v_from:v_to], v_ids) WITH ORDINALITY AS r(uuid, id, ord) WHERE r.id IS NOT NULL;
            END IF;
        END IF;
        SELECT array_agg(u.uuid ORDER BY u.ord) INTO v_new
        FROM unnest(a.uuid[v_from:v_to], v_holders) WITH ORDINALITY AS u(uuid, holder, ord) WHERE u.holder IS NULL;
        SELECT * INTO v_tied FROM taskyard.read_ties_1(a.uuid[v_from:v_to], v_holders, v_uuids, v_add.ties);
        IF (v_add.may_circle OR v_tied.is_reused) AND taskyard.has_circle_1(v_tied.children, v_tied.parents) THEN
            answers := answers || json_build_object('why', 'cycle', 'holders', v_holders);
            CONTINUE;
        END IF;
        -- What has ended is pruned without a queue's lock: not until those who come to wait for it are told.
        PERFORM FROM taskyard.ended WHERE uuid = ANY (v_tied.strangers) ORDER BY id FOR KEY SHARE;
        SELECT e.uuid INTO v_found FROM unnest(v_tied.strangers) WITH ORDINALITY AS e(uuid, ord)
        WHERE (SELECT t.id FROM taskyard.task AS t WHERE t.uuid = e.uuid) IS NULL
            AND (SELECT d.id FROM taskyard.ended AS d WHERE d.uuid = e.uuid) IS NULL
        ORDER BY e.ord LIMIT 1;
        IF FOUND THEN
            answers := answers || json_build_object('why', 'unknown', 'uuid', v_found.uuid);
            CONTINUE;
        END IF;
        SELECT n.uuid INTO v_found
        FROM (SELECT uuid, ord, row_number() OVER (PARTITION BY uuid ORDER BY ord) AS nth
              FROM unnest(v_new) WITH ORDINALITY AS u(uuid, ord)) AS n
        WHERE n.nth > 1 OR (SELECT t.id FROM taskyard.task AS t WHERE t.uuid = n.uuid) IS NOT NULL
            OR (SELECT e.id FROM taskyard.ended AS e WHERE e.uuid = n.uuid) IS NOT NULL
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
            DELETE FROM taskyard.slot_window AS w USING taskyard.tie AS t WHERE t.id = ANY (r_ids) AND w.slot = ANY (ARRAY[t.dedupe_key]);
            SELECT * INTO v_done FROM taskyard.end_unrun_1(p_first + told, p_now, r_ids,
                array_fill('canceled'::text, ARRAY[cardinality(r_ids)]),
                ARRAY(SELECT replace('{{replaced}}', '{{parent}}', substr(to_json(uuid)::text, 2, length(to_json(uuid)::text) - 2))
                      FROM unnest(r_by) WITH ORDINALITY AS b(uuid, ord) ORDER BY ord),
                array_fill(NULL::text, ARRAY[cardinality(r_ids)]));
            told := told + v_done.told; ended := ended || v_done.uuids;
            key_queues := key_queues || v_done.key_queues; keys := keys || v_done.keys;
        END IF;
        IF v_new IS NULL THEN
            CONTINUE;
        END IF;
        -- Column by column, without those that were merged. A uuid, or a slot, may stand in a transaction that somebody keeps
        -- open: the turn then fails, instead of waiting for it.
        PERFORM set_config('lock_timeout', '50ms', true);
        told := told + taskyard.add_1(p_first + told, p_now, c)
        FROM (
            SELECT v_new, array_agg(source ORDER BY ord) AS source, array_agg(queue ORDER BY ord) AS queue,
                array_agg(args ORDER BY ord) AS args, array_agg(priority ORDER BY ord) AS priority,
                array_agg(key ORDER BY ord) AS key, array_agg(CASE WHEN v_add.dedupe <> 'allow'
                    AND scope IS DISTINCT FROM 'window' THEN slot END ORDER BY ord) AS slot,
                array_agg(timeout_s ORDER BY ord) AS timeout_s, array_agg(retry ORDER BY ord) AS retry,
                array_agg(due_at ORDER BY ord) AS due_at, array_agg(created_at ORDER BY ord) AS created_at,
                array_agg(bucket ORDER BY ord) AS bucket, array_agg(origin ORDER BY ord) AS origin
            FROM unnest(a.source[v_from:v_to], a.queue[v_from:v_to], a.args[v_from:v_to], a.priority[v_from:v_to],
                a.key[v_from:v_to], a.slot[v_from:v_to], a.timeout_s[v_from:v_to], a.retry[v_from:v_to],
                a.due_at[v_from:v_to], a.created_at[v_from:v_to], a.bucket[v_from:v_to], a.origin[v_from:v_to], v_holders,
                v_tied.scopes) WITH ORDINALITY
                AS u(source, queue, args, priority, key, slot, timeout_s, retry, due_at, created_at, bucket, origin, holder,
                    scope, ord)
            WHERE u.holder IS NULL
        ) AS c;
        UPDATE taskyard.task AS t SET note = x.note FROM json_to_recordset(v_add.ties) AS x(i integer, note text)
        WHERE x.note IS NOT NULL AND t.uuid = ANY (ARRAY[a.uuid[v_from + x.i - 1]]) AND v_holders[x.i] IS NULL;
        IF v_add.dedupe <> 'allow' OR v_add.ties IS NOT NULL THEN
            INSERT INTO taskyard.tie (id, group_id, on_failure, dedupe_key, dedupe_scope)
            SELECT t.id, u.group_id, u.on_failure, k.slot, CASE WHEN k.slot IS NOT NULL THEN u.scope END
            FROM unnest(a.uuid[v_from:v_to], a.slot[v_from:v_to], v_holders, v_tied.groups, v_tied.on_failures,
                v_tied.scopes) AS u(uuid, slot, holder, group_id, on_failure, scope)
            CROSS JOIN LATERAL (SELECT t.id FROM taskyard.task AS t WHERE t.uuid = u.uuid OFFSET 0) AS t
            CROSS JOIN LATERAL (SELECT CASE WHEN v_add.dedupe <> 'allow' THEN u.slot END AS slot) AS k
            WHERE u.holder IS NULL AND (u.group_id IS NOT NULL OR u.on_failure IS NOT NULL OR k.slot IS NOT NULL);
        END IF;
        IF v_add.window_s IS NOT NULL AND v_add.dedupe <> 'allow' THEN
            PERFORM taskyard.open_windows_1(array_agg(u.slot), array_agg(u.uuid), p_now + make_interval(secs => v_add.window_s))
            FROM unnest(a.uuid[v_from:v_to], a.slot[v_from:v_to], v_holders, v_tied.scopes) AS u(uuid, slot, holder, scope)
            WHERE u.holder IS NULL AND u.slot IS NOT NULL AND u.scope = 'window';
        END IF;
        PERFORM set_config('lock_timeout', v_patience, true);
        v_ids := r_ids;
        IF v_tied.children IS NOT NULL THEN
            v_ids := v_ids || taskyard.tie_1(v_tied.children, v_tied.parents);
        END IF;
        IF v_ids IS NOT NULL THEN
            SELECT * INTO v_done FROM taskyard.release_1(p_first + told, p_now, p_locked, v_ids);
            told := told + v_done.told; ended := ended || v_done.ended;
            key_queues := key_queues || v_done.key_queues; keys := keys || v_done.keys;
        END IF;
    END LOOP;
END $$;
