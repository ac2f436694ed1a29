-- Tasks that wait for others or replace them, groups, and what is remembered of the work that a task stands for.
--
-- A fourth kind of lock comes after those of the queues: (4) slots, alone, by turns and commands that take any. A task's
-- edges and its row in `tie` are written under the lock of its queue.

-- Of the few tasks that have to do with others. It stays where it is when a task ends, and when it is sent again.
-- `waits` is how many of those it waits for are not done yet; `dedupe_key` the slot that it took, kept when it gives the
-- slot up.
CREATE TABLE taskyard.tie (
    id           bigint PRIMARY KEY,
    waits        integer NOT NULL DEFAULT 0,
    group_id     text COLLATE "C",
    on_failure   text COLLATE "C",
    dedupe_key   text COLLATE "C",
    dedupe_scope text COLLATE "C"
);
CREATE INDEX tie_group ON taskyard.tie (group_id, id) WHERE group_id IS NOT NULL;

-- Kept until the child is pruned: who sends it again has to know what it waits for. `done` is set when the parent's end
-- has been counted.
CREATE TABLE taskyard.dependency (
    child  bigint NOT NULL,
    parent bigint NOT NULL,
    done   boolean NOT NULL,
    PRIMARY KEY (child, parent)
);
CREATE INDEX dependency_open ON taskyard.dependency (parent, child) WHERE NOT done;

-- Tasks that have ended, and whose end some that wait for them have not heard of yet: a turn tells a thousand.
CREATE TABLE taskyard.releasing (
    place bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task  bigint NOT NULL,
    uuid  text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL
);

-- Slots that are taken until a time, whatever becomes of the task.
CREATE TABLE taskyard.slot_window (
    slot  text COLLATE "C" PRIMARY KEY,
    uuid  text COLLATE "C" NOT NULL,
    until timestamptz NOT NULL
);
CREATE INDEX slot_window_until ON taskyard.slot_window (until);

CREATE FUNCTION taskyard.lock_slots_1(p_slots text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(1953721205, h)
    FROM (SELECT DISTINCT hashtext(s) AS h FROM unnest(p_slots) AS s WHERE s IS NOT NULL ORDER BY 1) AS hashes;
END $$;

-- Who stands for this work, and where it is; no state if it has ended and its window is not over.
CREATE FUNCTION taskyard.holder_1(p_slot text, p_now timestamptz, OUT uuid text, OUT id bigint, OUT state text, OUT queue text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    SELECT t.uuid, t.id, t.state, t.queue INTO uuid, id, state, queue FROM taskyard.task AS t WHERE t.dedupe_slot = p_slot;
    IF NOT FOUND THEN
        SELECT w.uuid, t.id, t.state, t.queue INTO uuid, id, state, queue
        FROM taskyard.slot_window AS w LEFT JOIN taskyard.task AS t ON t.uuid = w.uuid
        WHERE w.slot = p_slot AND w.until > p_now;
    END IF;
END $$;

-- Where those stand that may have to hear of the ends of these, or of earlier ones, and those behind them, who hear of it
-- if they end by it as well: their queues are locked too.
CREATE FUNCTION taskyard.listeners_1(p_ids bigint[]) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM taskyard.dependency WHERE NOT done) THEN
        RETURN NULL;
    END IF;
    RETURN ARRAY(
        WITH RECURSIVE below (id) AS (
            SELECT id FROM (
                SELECT unnest(p_ids) AS id UNION
                SELECT task FROM (SELECT task FROM taskyard.releasing ORDER BY place LIMIT {{release_at_most}}) AS r
            ) AS x
            UNION SELECT d.child FROM below AS b JOIN taskyard.dependency AS d ON d.parent = b.id AND NOT d.done
        )
        SELECT DISTINCT c.queue FROM (SELECT id FROM below LIMIT 4 * {{release_at_most}}) AS b
        JOIN taskyard.task AS c ON c.id = b.id);
END $$;

-- End tasks that do not run, each as it says; null as an error or a note leaves what there is.
CREATE FUNCTION taskyard.end_unrun_1(
    p_first integer, p_now timestamptz, p_ids bigint[], p_states text[], p_errors text[], p_notes text[],
    OUT told integer, OUT key_queues text[], OUT keys text[], OUT uuids text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_kinds text[]; v_queues text[]; v_sources text[];
    b_kinds text[]; b_uuids text[]; b_queues text[]; b_sources text[];
BEGIN
    WITH m AS MATERIALIZED (
        SELECT * FROM unnest(p_ids, p_states, p_errors, p_notes) WITH ORDINALITY
            AS u(id, new_state, new_error, new_note, ord)
    ), gone AS (
        DELETE FROM taskyard.task AS t USING m WHERE t.id = m.id
        RETURNING m.ord, m.new_state, m.new_error, m.new_note, t.*
    ), kept AS (
        -- What is held gives up by way of blocked; what is replaced does not wait for anybody any more.
        INSERT INTO taskyard.ended (
            id, position, due_at, created_at, started_at, finished_at, timeout_s, attempt, retries, crashes,
            recoveries, priority, was, state, uuid, source, queue, args, key, retry, progress, error, note, checkpoint,
            bucket, origin)
        SELECT id, position, due_at, created_at, started_at, p_now, timeout_s, attempt, retries, crashes,
            recoveries, priority, CASE WHEN state = 'paused' AND new_state <> 'canceled' THEN 'blocked' ELSE state END,
            new_state, uuid, source, queue, args, key, retry, progress, coalesce(new_error, error),
            coalesce(new_note, note), checkpoint, bucket, origin
        FROM gone
    ), tied AS (
        UPDATE taskyard.tie SET waits = 0 FROM m WHERE tie.id = m.id AND tie.waits <> 0
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, state, -count(*) FROM gone GROUP BY queue, state
        UNION ALL SELECT queue, new_state, count(*) FROM gone GROUP BY queue, new_state
    )
    SELECT array_agg(new_state), array_agg(uuid), array_agg(queue), array_agg(source),
        array_agg(queue) FILTER (WHERE key IS NOT NULL), array_agg(key) FILTER (WHERE key IS NOT NULL),
        array_agg('blocked'::text) FILTER (WHERE state = 'paused' AND new_state <> 'canceled'),
        array_agg(uuid) FILTER (WHERE state = 'paused' AND new_state <> 'canceled'),
        array_agg(queue) FILTER (WHERE state = 'paused' AND new_state <> 'canceled'),
        array_agg(source) FILTER (WHERE state = 'paused' AND new_state <> 'canceled')
    INTO v_kinds, uuids, v_queues, v_sources, key_queues, keys, b_kinds, b_uuids, b_queues, b_sources
    FROM (SELECT * FROM gone ORDER BY ord) AS o;
    told := taskyard.tell_1(p_first, b_kinds, b_uuids, b_queues, b_sources, ARRAY[p_now]);
    told := told + taskyard.tell_1(p_first + told, v_kinds, uuids, v_queues, v_sources, ARRAY[p_now]);
END $$;

-- Tell those that wait of the ends of these tasks, as far as they have ended, and of earlier ones, at most
-- {{release_at_most}}; some end by it in their turn. Who stands in a queue that is not locked hears of it later.
CREATE FUNCTION taskyard.release_1(
    p_first integer, p_now timestamptz, p_locked text[], p_ids bigint[],
    OUT told integer, OUT key_queues text[], OUT keys text[], OUT ended text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_left integer := {{release_at_most}};
    v_ids bigint[] := p_ids;
    v_places bigint[]; v_parents bigint[]; v_children bigint[];
    l_ids bigint[]; l_states text[]; l_errors text[]; l_notes text[];
    f_ids bigint[]; f_queued bigint[]; f_kinds text[]; f_uuids text[]; f_queues text[]; f_sources text[];
    f_key_queues text[]; f_keys text[];
    v_done record;
BEGIN
    told := 0;
    LOOP
        INSERT INTO taskyard.releasing (task, uuid, state)
        SELECT e.id, e.uuid, e.state FROM unnest(v_ids) WITH ORDINALITY AS x(id, ord)
        JOIN taskyard.ended AS e ON e.id = x.id
        WHERE EXISTS (SELECT FROM taskyard.dependency AS d WHERE d.parent = x.id AND NOT d.done)
        ORDER BY x.ord;
        EXIT WHEN v_left <= 0;
        SELECT array_agg(h.place), array_agg(h.parent), array_agg(h.child) INTO v_places, v_parents, v_children
        FROM (
            SELECT r.place, r.task AS parent, d.child
            FROM (
                -- Once each: two adds of one turn may have come upon the same end.
                SELECT min(place) AS place, task FROM taskyard.releasing GROUP BY task ORDER BY 1 LIMIT {{release_at_most}}
            ) AS r
            CROSS JOIN LATERAL (
                SELECT d.child FROM taskyard.dependency AS d LEFT JOIN taskyard.task AS c ON c.id = d.child
                WHERE d.parent = r.task AND NOT d.done AND (c.id IS NULL OR c.queue = ANY (p_locked))
                ORDER BY d.child LIMIT v_left
            ) AS d
            ORDER BY r.place, d.child LIMIT v_left
        ) AS h;
        EXIT WHEN v_places IS NULL;
        v_left := v_left - cardinality(v_places);
        UPDATE taskyard.dependency AS d SET done = true
        FROM unnest(v_parents, v_children) AS h(parent, child) WHERE d.child = h.child AND d.parent = h.parent;
        WITH heard AS MATERIALIZED (
            SELECT h.child, h.ord, r.uuid, r.state AS how, c.state, c.due_at, t.waits, t.on_failure,
                r.state <> 'completed' AND t.on_failure IS DISTINCT FROM 'ignore' AS is_lost
            FROM unnest(v_places, v_children) WITH ORDINALITY AS h(place, child, ord)
            JOIN taskyard.releasing AS r ON r.place = h.place
            JOIN taskyard.task AS c ON c.id = h.child AND c.state IN ('blocked', 'paused')
            JOIN taskyard.tie AS t ON t.id = h.child
        ), fates AS (
            SELECT child, state, due_at, on_failure, min(ord) AS ord, waits - count(*) FILTER (WHERE NOT is_lost) AS waits,
                (array_agg(uuid ORDER BY ord) FILTER (WHERE is_lost))[1] AS lost,
                (array_agg(how ORDER BY ord) FILTER (WHERE is_lost))[1] AS how
            FROM heard GROUP BY child, state, due_at, on_failure, waits
        ), words AS (
            SELECT f.*, replace(CASE how WHEN 'failed' THEN '{{lost_failed}}' WHEN 'canceled' THEN '{{lost_canceled}}'
                ELSE '{{lost_skipped}}' END, '{{parent}}', substr(to_json(lost)::text, 2, length(to_json(lost)::text) - 2)) AS error
            FROM fates AS f
        ), counted AS (
            UPDATE taskyard.tie AS t SET waits = f.waits FROM fates AS f WHERE t.id = f.child AND f.lost IS NULL
        )
        SELECT array_agg(child) FILTER (WHERE lost IS NOT NULL),
            array_agg(CASE WHEN on_failure = 'skip' THEN 'skipped' ELSE 'failed' END) FILTER (WHERE lost IS NOT NULL),
            array_agg(CASE WHEN on_failure = 'skip' THEN NULL ELSE error END) FILTER (WHERE lost IS NOT NULL),
            array_agg(CASE WHEN on_failure = 'skip' THEN error::json ->> 'message' END) FILTER (WHERE lost IS NOT NULL),
            array_agg(child) FILTER (WHERE lost IS NULL AND waits = 0 AND state = 'blocked')
        INTO l_ids, l_states, l_errors, l_notes, f_ids FROM (SELECT * FROM words ORDER BY ord) AS o;
        IF f_ids IS NOT NULL THEN
            WITH freed AS (
                UPDATE taskyard.task AS t
                SET state = CASE WHEN t.due_at > p_now THEN 'scheduled' ELSE 'queued' END, updated_at = p_now,
                    parked = t.key IS NOT NULL AND t.due_at <= p_now
                FROM unnest(f_ids) AS f(id) WHERE t.id = f.id
                RETURNING t.id, t.uuid, t.queue, t.source, t.key, t.state
            ), counted AS (
                INSERT INTO taskyard.tally
                SELECT queue, 'blocked', -count(*) FROM freed GROUP BY queue
                UNION ALL SELECT queue, state, count(*) FROM freed GROUP BY queue, state
            )
            SELECT array_agg(id) FILTER (WHERE state = 'queued'), array_agg(state), array_agg(uuid), array_agg(queue),
                array_agg(source), array_agg(queue) FILTER (WHERE key IS NOT NULL), array_agg(key) FILTER (WHERE key IS NOT NULL)
            INTO f_queued, f_kinds, f_uuids, f_queues, f_sources, f_key_queues, f_keys
            FROM (SELECT * FROM freed ORDER BY id) AS o;
            told := told + taskyard.tell_1(p_first + told, f_kinds, f_uuids, f_queues, f_sources, ARRAY[p_now]);
            PERFORM taskyard.lower_1(f_queued);
            key_queues := key_queues || f_key_queues; keys := keys || f_keys;
        END IF;
        v_ids := l_ids;
        IF l_ids IS NOT NULL THEN
            SELECT * INTO v_done FROM taskyard.end_unrun_1(p_first + told, p_now, l_ids, l_states, l_errors, l_notes);
            told := told + v_done.told; ended := ended || v_done.uuids;
            key_queues := key_queues || v_done.key_queues; keys := keys || v_done.keys;
        END IF;
    END LOOP;
    DELETE FROM taskyard.releasing AS r
    WHERE NOT EXISTS (SELECT FROM taskyard.dependency AS d WHERE d.parent = r.task AND NOT d.done);
END $$;

-- The queues of those that the tasks of these adds wait for or replace.
CREATE FUNCTION taskyard.others_1(p_adds json, a_slot text[], p_now timestamptz) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT t.queue FROM json_to_recordset(p_adds) AS a(ties json)
        CROSS JOIN LATERAL json_to_recordset(a.ties) AS x("after" json)
        CROSS JOIN LATERAL json_array_elements_text(x."after") AS p(uuid)
        JOIN taskyard.task AS t ON t.uuid = p.uuid
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
        JOIN taskyard.task AS c ON c.uuid = e.child JOIN taskyard.tie AS t ON t.id = c.id
        LEFT JOIN taskyard.task AS p ON p.uuid = e.parent LEFT JOIN taskyard.ended AS d ON d.uuid = e.parent
    ), stored AS (
        INSERT INTO taskyard.dependency (child, parent, done) SELECT child, parent, done FROM edge
    ), counts AS (
        SELECT child, count(*)::integer AS n FROM edge WHERE NOT done GROUP BY child
    ), waiting AS (
        UPDATE taskyard.tie AS t SET waits = c.n FROM counts AS c WHERE t.id = c.child
    ), was AS MATERIALIZED (
        SELECT t.id, t.queue, t.state FROM counts AS c JOIN taskyard.task AS t ON t.id = c.child
    ), blocked AS (
        UPDATE taskyard.task AS t SET state = 'blocked', parked = false FROM was WHERE t.id = was.id
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, state, -count(*) FROM was GROUP BY queue, state
        UNION ALL SELECT queue, 'blocked', count(*) FROM was GROUP BY queue
    )
    SELECT array_agg(parent ORDER BY ord) INTO v_lost FROM edge WHERE has_failed AND NOT done;
    RETURN v_lost;
END $$;

-- As admit_1, with all that tasks may have to do with each other. `ties` of an add says of some of its tasks, by their
-- number `i` in it, their group, scope and on_failure, and which uuids they come after.
CREATE FUNCTION taskyard.admit_2(
    p_first integer, p_now timestamptz, p_locked text[], p_adds json, a_uuid text[], a_source text[], a_queue text[],
    a_args text[], a_priority smallint[], a_key text[], a_slot text[], a_timeout_s double precision[], a_retry text[],
    a_due_at timestamptz[], a_created_at timestamptz[], a_bucket text[], a_origin text[],
    OUT answers json[], OUT told integer, OUT key_queues text[], OUT keys text[], OUT ended text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_add record;
    v_from integer := 1;
    v_to integer;
    v_found record;
    v_done record;
    v_uuids text[]; v_states text[]; v_ids bigint[];
    v_holders text[];
    v_scopes text[];
    v_new text[];
    e_child text[]; e_parent text[];
    r_ids bigint[]; r_by text[];
    v_patience text := current_setting('lock_timeout');
    v_has_lines boolean := EXISTS (SELECT FROM taskyard.queue WHERE ordering <> 'priority' AND name = ANY (p_locked));
BEGIN
    told := 0;
    PERFORM taskyard.lock_slots_1(a_slot);
    FOR v_add IN
        SELECT * FROM json_to_recordset(p_adds) AS j(
            n integer, dedupe text, id bigint, token bigint, attempt integer, window_s double precision, ties json,
            may_circle boolean)
    LOOP
        v_to := v_from + v_add.n - 1;
        v_holders := array_fill(NULL::text, ARRAY[v_add.n]);
        v_scopes := v_holders;
        r_ids := NULL; r_by := NULL; e_child := NULL; e_parent := NULL;
        IF v_add.id IS NOT NULL AND NOT EXISTS (
            SELECT FROM taskyard.task
            WHERE id = v_add.id AND token = v_add.token AND attempt = v_add.attempt
        ) THEN
            answers := answers || '{"why":"lost"}'::json;
            v_from := v_to + 1;
            CONTINUE;
        END IF;
        IF v_add.dedupe <> 'allow' THEN
            -- A transaction of somebody else's, not committed yet, may hold a slot. It takes this lock alone; turns
            -- share it, and never wait for it: a transaction may stay open for as long as somebody likes.
            IF NOT coalesce((SELECT bool_and(pg_try_advisory_xact_lock_shared(1953721204, hashtext(s)))
                             FROM unnest(a_slot[v_from:v_to]) AS s WHERE s IS NOT NULL), true) THEN
                answers := answers || '{"why":"busy"}'::json;
                v_from := v_to + 1;
                CONTINUE;
            END IF;
            SELECT array_agg(h.uuid ORDER BY r.ord), array_agg(h.state ORDER BY r.ord), array_agg(h.id ORDER BY r.ord)
            INTO v_uuids, v_states, v_ids
            FROM unnest(a_slot[v_from:v_to]) WITH ORDINALITY AS r(slot, ord)
            LEFT JOIN LATERAL taskyard.holder_1(r.slot, p_now) AS h ON r.slot IS NOT NULL;
            SELECT r.slot, r.holder INTO v_found
            FROM (
                SELECT *, row_number() OVER (PARTITION BY slot ORDER BY ord) AS nth
                FROM unnest(a_slot[v_from:v_to], v_uuids, v_states) WITH ORDINALITY AS u(slot, holder, state, ord)
            ) AS r
            WHERE v_add.dedupe <> 'merge' AND r.slot IS NOT NULL AND (
                r.nth > 1 OR r.holder IS NOT NULL AND (v_add.dedupe = 'refuse' OR r.state IS NULL OR r.state = 'running'))
            ORDER BY r.ord LIMIT 1;
            IF FOUND THEN
                answers := answers || json_build_object('why', 'duplicate', 'uuid', coalesce(v_found.holder, ''),
                    'slot', v_found.slot);
                v_from := v_to + 1;
                CONTINUE;
            END IF;
            IF v_add.dedupe = 'merge' THEN
                SELECT array_agg(CASE WHEN r.holder IS NOT NULL THEN r.holder
                    WHEN r.slot IS NOT NULL AND r.nth > 1 THEN r.first_uuid END ORDER BY r.ord)
                INTO v_holders
                FROM (
                    SELECT *, row_number() OVER (PARTITION BY slot ORDER BY ord) AS nth,
                        first_value(uuid) OVER (PARTITION BY slot ORDER BY ord) AS first_uuid
                    FROM unnest(a_uuid[v_from:v_to], a_slot[v_from:v_to], v_uuids) WITH ORDINALITY
                        AS u(uuid, slot, holder, ord)
                ) AS r;
            ELSE
                SELECT array_agg(r.id ORDER BY r.ord), array_agg(r.uuid ORDER BY r.ord) INTO r_ids, r_by
                FROM unnest(a_uuid[v_from:v_to], v_ids) WITH ORDINALITY AS r(uuid, id, ord) WHERE r.id IS NOT NULL;
            END IF;
            SELECT array_agg(x.scope ORDER BY u.ord) INTO v_scopes
            FROM generate_series(1, v_add.n) AS u(ord)
            LEFT JOIN json_to_recordset(v_add.ties) AS x(i integer, scope text) ON x.i = u.ord;
        END IF;
        SELECT array_agg(u.uuid ORDER BY u.ord) INTO v_new
        FROM unnest(a_uuid[v_from:v_to], v_holders) WITH ORDINALITY AS u(uuid, holder, ord) WHERE u.holder IS NULL;
        IF v_add.ties IS NOT NULL THEN
            -- Who was merged away is waited for as the one that it became.
            SELECT array_agg(e.child ORDER BY e.i, e.n), array_agg(e.parent ORDER BY e.i, e.n) INTO e_child, e_parent
            FROM (
                SELECT u.uuid AS child, coalesce(m.holder, p.uuid) AS parent, x.i, min(p.n) AS n
                FROM json_to_recordset(v_add.ties) AS x(i integer, "after" json)
                JOIN unnest(a_uuid[v_from:v_to], v_holders) WITH ORDINALITY AS u(uuid, holder, ord) ON u.ord = x.i
                CROSS JOIN LATERAL json_array_elements_text(x."after") WITH ORDINALITY AS p(uuid, n)
                LEFT JOIN unnest(a_uuid[v_from:v_to], v_holders) AS m(uuid, holder) ON m.uuid = p.uuid
                WHERE u.holder IS NULL
                GROUP BY 1, 2, 3
            ) AS e;
            IF v_add.may_circle AND EXISTS (
                WITH RECURSIVE edge AS MATERIALIZED (
                    SELECT e.child, e.parent FROM unnest(e_child, e_parent) AS e(child, parent)
                    JOIN unnest(v_new) AS n(uuid) ON n.uuid = e.parent
                ), way (child, parent) AS (
                    SELECT child, parent FROM edge
                    UNION SELECT w.child, e.parent FROM way AS w JOIN edge AS e ON e.child = w.parent
                )
                SELECT FROM way WHERE child = parent
            ) THEN
                answers := answers || json_build_object('why', 'cycle', 'holders', v_holders);
                v_from := v_to + 1;
                CONTINUE;
            END IF;
            SELECT e.parent INTO v_found FROM unnest(e_parent) WITH ORDINALITY AS e(parent, ord)
            LEFT JOIN unnest(v_new) AS n(uuid) ON n.uuid = e.parent
            WHERE n.uuid IS NULL AND NOT EXISTS (SELECT FROM taskyard.task AS t WHERE t.uuid = e.parent)
                AND NOT EXISTS (SELECT FROM taskyard.ended AS d WHERE d.uuid = e.parent)
            ORDER BY e.ord LIMIT 1;
            IF FOUND THEN
                answers := answers || json_build_object('why', 'unknown', 'uuid', v_found.parent);
                v_from := v_to + 1;
                CONTINUE;
            END IF;
        END IF;
        SELECT n.uuid INTO v_found
        FROM (SELECT uuid, ord, row_number() OVER (PARTITION BY uuid ORDER BY ord) AS nth
              FROM unnest(v_new) WITH ORDINALITY AS u(uuid, ord)) AS n
        WHERE n.nth > 1 OR EXISTS (SELECT FROM taskyard.task AS t WHERE t.uuid = n.uuid)
            OR EXISTS (SELECT FROM taskyard.ended AS e WHERE e.uuid = n.uuid)
        ORDER BY n.ord LIMIT 1;
        IF FOUND THEN
            answers := answers || json_build_object('why', 'taken', 'uuid', v_found.uuid);
            v_from := v_to + 1;
            CONTINUE;
        END IF;
        answers := answers || to_json(v_holders);
        IF EXISTS (SELECT FROM taskyard.task AS t WHERE (t.uuid = ANY (e_parent) OR t.id = ANY (r_ids))
                   AND t.queue <> ALL (p_locked)) THEN
            RAISE unique_violation;  -- it came when the queues were being locked: all is asked again
        END IF;
        IF r_ids IS NOT NULL THEN
            DELETE FROM taskyard.slot_window AS w USING taskyard.tie AS t WHERE t.id = ANY (r_ids) AND w.slot = t.dedupe_key;
            SELECT * INTO v_done FROM taskyard.end_unrun_1(p_first + told, p_now, r_ids,
                array_fill('canceled'::text, ARRAY[cardinality(r_ids)]),
                ARRAY(SELECT replace('{{replaced}}', '{{parent}}', substr(to_json(uuid)::text, 2, length(to_json(uuid)::text) - 2))
                      FROM unnest(r_by) WITH ORDINALITY AS b(uuid, ord) ORDER BY ord),
                array_fill(NULL::text, ARRAY[cardinality(r_ids)]));
            told := told + v_done.told; ended := ended || v_done.uuids;
            key_queues := key_queues || v_done.key_queues; keys := keys || v_done.keys;
        END IF;
        IF v_new IS NULL THEN
            v_from := v_to + 1;
            CONTINUE;
        END IF;
        -- Column by column, without those that were merged. A uuid may stand in a transaction that somebody keeps open:
        -- the turn then fails, instead of waiting for it.
        PERFORM set_config('lock_timeout', '50ms', true);
        told := told + taskyard.add_1(p_first + told, p_now, v_new, c.source, c.queue, c.args, c.priority, c.key, c.slot,
            c.timeout_s, c.retry, c.due_at, c.created_at)
        FROM (
            SELECT array_agg(source ORDER BY ord) AS source, array_agg(queue ORDER BY ord) AS queue,
                array_agg(args ORDER BY ord) AS args, array_agg(priority ORDER BY ord) AS priority,
                array_agg(key ORDER BY ord) AS key, array_agg(CASE WHEN v_add.dedupe <> 'allow'
                    AND scope IS DISTINCT FROM 'window' THEN slot END ORDER BY ord) AS slot,
                array_agg(timeout_s ORDER BY ord) AS timeout_s, array_agg(retry ORDER BY ord) AS retry,
                array_agg(due_at ORDER BY ord) AS due_at, array_agg(created_at ORDER BY ord) AS created_at
            FROM unnest(a_source[v_from:v_to], a_queue[v_from:v_to], a_args[v_from:v_to], a_priority[v_from:v_to],
                a_key[v_from:v_to], a_slot[v_from:v_to], a_timeout_s[v_from:v_to], a_retry[v_from:v_to],
                a_due_at[v_from:v_to], a_created_at[v_from:v_to], v_holders, v_scopes) WITH ORDINALITY
                AS u(source, queue, args, priority, key, slot, timeout_s, retry, due_at, created_at, holder, scope, ord)
            WHERE u.holder IS NULL
        ) AS c;
        PERFORM set_config('lock_timeout', v_patience, true);
        -- Before anything else becomes of them: some may end at once.
        PERFORM taskyard.dress_1(array_agg(u.uuid), array_agg(u.bucket), array_agg(u.origin))
        FROM unnest(a_uuid[v_from:v_to], a_bucket[v_from:v_to], a_origin[v_from:v_to], v_holders)
            AS u(uuid, bucket, origin, holder)
        WHERE u.holder IS NULL AND (a_bucket IS NOT NULL OR a_origin IS NOT NULL OR v_has_lines)
        HAVING count(*) > 0;
        IF v_add.dedupe <> 'allow' OR v_add.ties IS NOT NULL THEN
            INSERT INTO taskyard.tie (id, group_id, on_failure, dedupe_key, dedupe_scope)
            SELECT t.id, x."group", x.on_failure, k.slot, CASE WHEN k.slot IS NOT NULL THEN x.scope END
            FROM unnest(a_uuid[v_from:v_to], a_slot[v_from:v_to], v_holders) WITH ORDINALITY AS u(uuid, slot, holder, ord)
            JOIN taskyard.task AS t ON t.uuid = u.uuid
            LEFT JOIN json_to_recordset(v_add.ties) AS x(i integer, "group" text, on_failure text, scope text) ON x.i = u.ord
            CROSS JOIN LATERAL (SELECT CASE WHEN v_add.dedupe <> 'allow' THEN u.slot END AS slot) AS k
            WHERE u.holder IS NULL AND (x."group" IS NOT NULL OR x.on_failure IS NOT NULL OR k.slot IS NOT NULL);
        END IF;
        IF v_add.window_s IS NOT NULL AND v_add.dedupe <> 'allow' THEN
            INSERT INTO taskyard.slot_window AS w
            SELECT u.slot, u.uuid, p_now + make_interval(secs => v_add.window_s)
            FROM unnest(a_uuid[v_from:v_to], a_slot[v_from:v_to], v_holders, v_scopes) AS u(uuid, slot, holder, scope)
            WHERE u.holder IS NULL AND u.slot IS NOT NULL AND u.scope = 'window'
            ON CONFLICT (slot) DO UPDATE SET uuid = excluded.uuid, until = excluded.until;
        END IF;
        v_ids := r_ids;
        IF e_child IS NOT NULL THEN
            v_ids := v_ids || taskyard.tie_1(e_child, e_parent);
        END IF;
        IF v_ids IS NOT NULL THEN
            SELECT * INTO v_done FROM taskyard.release_1(p_first + told, p_now, p_locked, v_ids);
            told := told + v_done.told; ended := ended || v_done.ended;
            key_queues := key_queues || v_done.key_queues; keys := keys || v_done.keys;
        END IF;
        v_from := v_to + 1;
    END LOOP;
END $$;

-- One turn: settle, report, add, promote what is due, claim. It commits by itself before it answers: the answer may be
-- large, and a client that does not read it must not keep the queues locked. `ties` says what the claimed tasks have to do
-- with others, and who ended without having run.
CREATE PROCEDURE taskyard.turn_2(
    p_node text, p_now timestamptz, p_queues text[],
    c_id bigint[], c_token bigint[], c_attempt integer[], c_at timestamptz[], c_result text[], c_note text[],
    p_moves json, p_reports json, p_adds json,
    a_uuid text[], a_source text[], a_queue text[], a_args text[], a_priority smallint[], a_key text[], a_slot text[],
    a_timeout_s double precision[], a_retry text[], a_due_at timestamptz[], a_created_at timestamptz[],
    a_bucket text[], a_origin text[], p_total integer, p_sources text[], p_rooms integer[], p_others integer,
    INOUT settled bigint[], INOUT answers json[], INOUT claims taskyard.claims_2, INOUT next_due timestamptz,
    INOUT told integer, INOUT ties json
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queues text[];
    v_ids bigint[];
    v_done record;
    v_key_queues text[];
    v_keys text[];
    v_ended text[];
    v_has_freed boolean := false;
    v_patience text := current_setting('lock_timeout');
    v_moved bigint[] := c_id || ARRAY(SELECT id FROM json_to_recordset(p_moves) AS m(id bigint));
BEGIN
    told := 0;
    -- Before anything is written: who reads events can then tell which of our transactions still go on.
    PERFORM pg_advisory_xact_lock_shared(1953721203, 0);
    IF p_total > 0 THEN
        PERFORM pg_advisory_xact_lock_shared(1953721202, hashtext(p_node));
        IF NOT EXISTS (SELECT FROM taskyard.node WHERE incarnation = p_node) THEN
            p_total := 0;  -- given up for dead: what it claims, nobody would ever take back
        END IF;
    END IF;
    SELECT due_at INTO next_due FROM taskyard.task WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1;
    v_queues := p_queues;
    IF next_due <= p_now THEN
        v_queues := v_queues || ARRAY(
            SELECT DISTINCT queue FROM (
                SELECT queue FROM taskyard.task WHERE state IN ('scheduled', 'retrying') AND due_at <= p_now
                ORDER BY due_at, id LIMIT {{promote_at_most}}) AS due);
    END IF;
    IF p_total > 0 THEN
        v_queues := v_queues || ARRAY(
            SELECT DISTINCT queue FROM taskyard.lane WHERE p_others > 0 OR source = ANY (p_sources));
    END IF;
    v_queues := v_queues || taskyard.listeners_1(v_moved);
    IF p_adds IS NOT NULL THEN
        v_queues := v_queues || taskyard.others_1(p_adds, a_slot, p_now);
    END IF;
    PERFORM taskyard.lock_queues_1(v_queues);

    IF c_id IS NOT NULL THEN
        SELECT * INTO v_done FROM taskyard.complete_1(c_id, c_token, c_attempt, c_at, c_result, c_note);
        settled := v_done.settled; told := v_done.told;
        v_key_queues := v_done.key_queues; v_keys := v_done.keys;
    END IF;
    IF p_moves IS NOT NULL THEN
        SELECT * INTO v_done FROM taskyard.settle_1(told, p_moves);
        settled := settled || v_done.settled; told := told + v_done.told;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
        PERFORM taskyard.lower_1(v_done.queued);
        SELECT due_at INTO next_due FROM taskyard.task
        WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1;
    END IF;
    -- Race: somebody may have come to wait for one of these since the queues were chosen. He is told in the next turn.
    IF EXISTS (SELECT FROM taskyard.dependency WHERE NOT done) THEN
        SELECT * INTO v_done FROM taskyard.release_1(told, p_now, v_queues, v_moved);
        told := told + v_done.told; v_ended := v_done.ended; v_has_freed := v_done.told > 0;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
    END IF;
    IF c_id IS NOT NULL OR p_moves IS NOT NULL THEN
        told := told + taskyard.drained_1(told, p_now, v_queues);
    END IF;
    IF p_reports IS NOT NULL THEN
        told := told + taskyard.report_1(told, p_now, p_reports);
    END IF;
    IF p_adds IS NOT NULL THEN
        SELECT * INTO v_done FROM taskyard.admit_2(told, p_now, v_queues, p_adds, a_uuid, a_source, a_queue, a_args,
            a_priority, a_key, a_slot, a_timeout_s, a_retry, a_due_at, a_created_at, a_bucket, a_origin);
        answers := v_done.answers; told := told + v_done.told; v_ended := v_ended || v_done.ended;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
    ELSIF a_uuid IS NOT NULL THEN
        -- Ids are made in the order of time: most batches lie beyond all that has ended, which one look can tell.
        IF (SELECT min(u.uuid COLLATE "C") FROM unnest(a_uuid) AS u(uuid)) <= (SELECT max(uuid) FROM taskyard.ended) THEN
            IF EXISTS (SELECT FROM unnest(a_uuid) AS u(uuid) JOIN taskyard.ended AS e ON e.uuid = u.uuid) THEN
                RAISE unique_violation;  -- it is asked again, add by add
            END IF;
        END IF;
        -- A uuid may stand in a transaction that somebody keeps open: the turn then fails, instead of waiting for it.
        PERFORM set_config('lock_timeout', '50ms', true);
        told := told + taskyard.add_1(told, p_now, a_uuid, a_source, a_queue, a_args, a_priority, a_key, a_slot,
            a_timeout_s, a_retry, a_due_at, a_created_at);
        PERFORM set_config('lock_timeout', v_patience, true);
        IF a_bucket IS NOT NULL OR a_origin IS NOT NULL OR EXISTS (
            SELECT FROM taskyard.queue WHERE ordering <> 'priority' AND name = ANY (p_queues))
        THEN
            PERFORM taskyard.dress_1(a_uuid, a_bucket, a_origin);
        END IF;
    END IF;
    IF a_key IS NOT NULL THEN
        v_key_queues := v_key_queues || (
            SELECT array_agg(coalesce(q, a_queue[1])) FROM unnest(a_queue, a_key) AS u(q, k) WHERE k IS NOT NULL);
        v_keys := v_keys || (SELECT array_agg(k) FROM unnest(a_key) AS k WHERE k IS NOT NULL);
    END IF;
    IF next_due <= p_now THEN
        SELECT * INTO v_done FROM taskyard.promote_1(told, p_now, v_queues);
        told := told + v_done.told;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
    END IF;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.repark_1(v_key_queues, v_keys);
    END IF;
    IF p_total > 0 THEN
        v_ids := taskyard.pick_2(p_now, v_queues, p_total, p_sources, p_rooms, p_others);
        IF cardinality(v_ids) > 0 THEN
            claims := taskyard.start_2(told, p_node, p_now, v_ids);
            told := told + cardinality(claims.id);
            SELECT json_agg(json_build_array(t.id, t.group_id, t.on_failure, t.dedupe_key, t.dedupe_scope)) INTO ties
            FROM taskyard.tie AS t WHERE t.id = ANY (claims.id);
            IF claims.dedupe_slot IS NOT NULL THEN
                UPDATE taskyard.task AS t SET dedupe_slot = NULL FROM taskyard.tie AS x
                WHERE t.id = ANY (claims.id) AND x.id = t.id AND x.dedupe_scope = 'queued';
            END IF;
        END IF;
    END IF;
    IF a_uuid IS NOT NULL OR v_has_freed OR next_due <= p_now THEN
        SELECT due_at INTO next_due FROM taskyard.task
        WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1;
    END IF;
    IF EXISTS (SELECT FROM taskyard.releasing) THEN
        next_due := p_now;
    END IF;
    IF ties IS NOT NULL OR v_ended IS NOT NULL THEN
        ties := json_build_object('claims', ties, 'ended', v_ended);
    END IF;
    COMMIT;
END $$;

-- For nodes of the version before.
CREATE OR REPLACE PROCEDURE taskyard.turn_1(
    p_node text, p_now timestamptz, p_queues text[],
    c_id bigint[], c_token bigint[], c_attempt integer[], c_at timestamptz[], c_result text[], c_note text[],
    p_moves json, p_reports json, p_adds json,
    a_uuid text[], a_source text[], a_queue text[], a_args text[], a_priority smallint[], a_key text[], a_slot text[],
    a_timeout_s double precision[], a_retry text[], a_due_at timestamptz[], a_created_at timestamptz[],
    p_total integer, p_sources text[], p_rooms integer[], p_others integer,
    INOUT settled bigint[], INOUT answers json[], INOUT claims taskyard.claims_1, INOUT next_due timestamptz,
    INOUT told integer
) LANGUAGE plpgsql AS $$
DECLARE
    v_claims taskyard.claims_2;
    v_ties json;
BEGIN
    CALL taskyard.turn_2(p_node, p_now, p_queues, c_id, c_token, c_attempt, c_at, c_result, c_note, p_moves, p_reports,
        p_adds, a_uuid, a_source, a_queue, a_args, a_priority, a_key, a_slot, a_timeout_s, a_retry, a_due_at, a_created_at,
        NULL, NULL, p_total, p_sources, p_rooms, p_others, settled, answers, v_claims, next_due, told, v_ties);
    IF v_claims.id IS NOT NULL THEN
        claims := ROW(v_claims.id, v_claims.token, v_claims.position, v_claims.due_at, v_claims.created_at,
            v_claims.attempt, v_claims.priority, v_claims.uuid, v_claims.source, v_claims.queue, v_claims.args,
            v_claims.timeout_s, v_claims.retries, v_claims.crashes, v_claims.recoveries, v_claims.key,
            v_claims.dedupe_slot, v_claims.retry, v_claims.progress, v_claims.error, v_claims.checkpoint);
    END IF;
END $$;

-- Whether what was decided about tasks that are sent again still holds: nobody else stands for their work, and they wait
-- for as many as was thought, of which none has ended so that they would wait in vain.
CREATE FUNCTION taskyard.may_go_again_1(p_changes json, v_again bigint[], p_now timestamptz) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(v_again) = 0 THEN
        RETURN true;
    END IF;
    RETURN NOT EXISTS (
        SELECT FROM json_to_recordset(p_changes) AS j(id bigint, how text, waits integer)
        JOIN taskyard.ended AS e ON e.id = j.id
        LEFT JOIN taskyard.tie AS t ON t.id = j.id
        CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE p.id IS NOT NULL OR a.id = ANY (v_again)) AS waits,
                bool_or(a.state <> 'completed' AND a.id <> ALL (v_again)) AS is_lost
            FROM taskyard.dependency AS d LEFT JOIN taskyard.task AS p ON p.id = d.parent
            LEFT JOIN taskyard.ended AS a ON a.id = d.parent
            WHERE d.child = j.id
        ) AS w
        LEFT JOIN LATERAL taskyard.holder_1(t.dedupe_key, p_now) AS h ON t.dedupe_key IS NOT NULL
        WHERE j.how = 'again' AND (
            h.uuid IS DISTINCT FROM e.uuid AND h.uuid IS NOT NULL
            OR w.waits <> coalesce(j.waits, 0)
            OR w.is_lost AND t.on_failure IS DISTINCT FROM 'ignore'));
END $$;

-- As before, and those that wait for one that ends hear of it; who is sent again takes its slot, and waits, again.
CREATE OR REPLACE PROCEDURE taskyard.change_1(
    p_queues text[], p_changes json, e_kinds text[], e_uuids text[], e_queues text[], e_sources text[], p_now timestamptz,
    INOUT done boolean, INOUT places json, INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_keys text[]; v_key_queues text[];
    v_ids bigint[] := ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint));
    v_again bigint[] := ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint, how text) WHERE how = 'again');
    v_row record;
    v_done record;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(1953721203, 0);
    p_queues := p_queues || taskyard.listeners_1(v_ids) || ARRAY(
        SELECT p.queue FROM taskyard.dependency AS d JOIN taskyard.task AS p ON p.id = d.parent
        WHERE d.child = ANY (v_again));
    PERFORM taskyard.lock_queues_1(p_queues);
    PERFORM taskyard.lock_slots_1(ARRAY(SELECT dedupe_key FROM taskyard.tie WHERE id = ANY (v_again)));
    -- What has ended is pruned without a queue's lock.
    PERFORM FROM taskyard.ended WHERE id = ANY (v_again) ORDER BY id FOR UPDATE;
    SELECT bool_and(CASE WHEN j.how = 'again'
        THEN EXISTS (SELECT FROM taskyard.ended AS e WHERE e.id = j.id AND e.xmin::text = j.version)
        ELSE EXISTS (SELECT FROM taskyard.task AS t WHERE t.id = j.id
            AND taskyard.version_1(t.token, t.cancel_asked_at, t.xmin) = j.version) END
        -- Who is held hears of the ends of others, and stays the version that it is.
        AND (j.how <> 'change' OR j.waits IS NULL
            OR j.waits = coalesce((SELECT x.waits FROM taskyard.tie AS x WHERE x.id = j.id), 0)))
    INTO done FROM json_to_recordset(p_changes) AS j(id bigint, version text, how text, waits integer);
    done := done AND taskyard.may_go_again_1(p_changes, v_again, p_now);
    IF NOT done THEN
        RETURN;
    END IF;
    WITH j AS MATERIALIZED (
        SELECT * FROM json_to_recordset(p_changes) AS j(
            id bigint, version text, how text, priority smallint, cancel_asked_at timestamptz, cancel_reason text,
            cancel_forced boolean, note text, was text, state text, error text, due_at timestamptz, to_head boolean,
            ord integer, slot text)
    ), heads AS MATERIALIZED (
        -- The last to be put at the head stands first.
        SELECT o.id, -nextval('taskyard.seq') * {{gap}} AS place
        FROM (SELECT id FROM j WHERE how = 'change' AND to_head ORDER BY ord) AS o
    ), changed AS (
        UPDATE taskyard.task AS t SET priority = j.priority, cancel_asked_at = j.cancel_asked_at,
            cancel_reason = j.cancel_reason, cancel_forced = coalesce(j.cancel_forced, t.cancel_forced),
            note = coalesce(j.note, t.note), updated_at = p_now, state = j.state,
            due_at = coalesce(j.due_at, t.due_at), parked = j.state = 'queued' AND t.key IS NOT NULL,
            -- What was submitted in somebody else's transaction has no place yet.
            position = coalesce((SELECT h.place FROM heads AS h WHERE h.id = j.id), CASE
                WHEN t.position = 0 AND j.state = 'queued' THEN nextval('taskyard.seq') * {{gap}} ELSE t.position END),
            line = CASE WHEN t.position = 0 AND j.state = 'queued' THEN taskyard.line_1((SELECT q.ordering
                FROM taskyard.queue AS q WHERE q.name = t.queue), t.bucket) ELSE t.line END
        FROM j WHERE t.id = j.id AND j.how = 'change'
        RETURNING t.queue, t.key, t.state, coalesce(j.was, t.state) AS was
    ), gone AS (
        DELETE FROM taskyard.task AS t USING j WHERE t.id = j.id AND j.how = 'end'
        RETURNING j.state AS new_state, j.error AS new_error, j.note AS new_note, t.*
    ), ended AS (
        INSERT INTO taskyard.ended (
            id, position, due_at, created_at, started_at, finished_at, timeout_s, attempt, retries, crashes,
            recoveries, priority, was, state, uuid, source, queue, args, key, retry, progress, error, note, checkpoint,
            bucket, origin)
        SELECT id, position, due_at, created_at, started_at, p_now, timeout_s, attempt, retries, crashes,
            recoveries, priority, state, new_state, uuid, source, queue, args, key, retry, progress, new_error,
            coalesce(new_note, note), checkpoint, bucket, origin
        FROM gone
    ), back AS (
        DELETE FROM taskyard.ended AS e USING j WHERE e.id = j.id AND j.how = 'again'
        RETURNING j.ord, j.to_head, j.state AS new_state, j.note AS new_note, j.slot AS new_slot, e.*
    ), again AS (
        INSERT INTO taskyard.task (
            id, position, due_at, created_at, updated_at, started_at, timeout_s, attempt, priority, parked, state, uuid,
            source, queue, args, key, retry, progress, error, note, checkpoint, bucket, origin, dedupe_slot,
            line)
        SELECT id, CASE WHEN to_head THEN -1 ELSE 1 END * nextval('taskyard.seq') * {{gap}}, due_at, created_at, p_now,
            started_at, timeout_s, attempt, priority, key IS NOT NULL AND new_state = 'queued', new_state, uuid, source,
            queue, args, key, retry, progress, error, new_note, checkpoint, bucket, origin, new_slot,
            taskyard.line_1((SELECT q.ordering FROM taskyard.queue AS q WHERE q.name = o.queue), bucket)
        FROM (SELECT * FROM back ORDER BY ord) AS o
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, state, -count(*) FROM gone GROUP BY queue, state
        UNION ALL SELECT queue, new_state, count(*) FROM gone GROUP BY queue, new_state
        UNION ALL SELECT queue, state, -count(*) FROM back GROUP BY queue, state
        UNION ALL SELECT queue, new_state, count(*) FROM back GROUP BY queue, new_state
        UNION ALL SELECT queue, was, -count(*) FROM changed WHERE was <> state GROUP BY queue, was
        UNION ALL SELECT queue, state, count(*) FROM changed WHERE was <> state GROUP BY queue, state
    )
    SELECT array_agg(queue), array_agg(key) INTO v_key_queues, v_keys
    FROM (SELECT queue, key FROM changed UNION SELECT queue, key FROM gone UNION SELECT queue, key FROM back) AS k
    WHERE key IS NOT NULL;
    FOR v_row IN
        SELECT j.id, j.before, t.queue, j.beside FROM json_to_recordset(p_changes)
            AS j(id bigint, beside bigint, before boolean, ord integer)
        JOIN taskyard.task AS t ON t.id = j.id WHERE j.beside IS NOT NULL ORDER BY j.ord
    LOOP
        PERFORM taskyard.place_1(v_row.id, v_row.queue, t.position, v_row.before)
        FROM taskyard.task AS t WHERE t.id = v_row.beside;
    END LOOP;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.repark_1(v_key_queues, v_keys);
    END IF;
    PERFORM taskyard.lower_1(v_ids);
    told := taskyard.tell_1(0, e_kinds, e_uuids, e_queues, e_sources, ARRAY[p_now]);
    IF cardinality(v_again) > 0 THEN
        UPDATE taskyard.dependency AS d SET done = NOT EXISTS (SELECT FROM taskyard.task AS p WHERE p.id = d.parent)
        WHERE d.child = ANY (v_again);
        UPDATE taskyard.tie AS t SET waits = (SELECT count(*) FROM taskyard.dependency AS d WHERE d.child = t.id AND NOT d.done)
        WHERE t.id = ANY (v_again);
    END IF;
    IF EXISTS (SELECT FROM taskyard.dependency WHERE NOT done) THEN
        UPDATE taskyard.tie SET waits = 0
        WHERE id = ANY (v_ids) AND waits > 0 AND EXISTS (SELECT FROM taskyard.ended AS e WHERE e.id = tie.id);
        SELECT * INTO v_done FROM taskyard.release_1(told, p_now, p_queues, v_ids);
        told := told + v_done.told;
        IF v_done.keys IS NOT NULL THEN
            PERFORM taskyard.repark_1(v_done.key_queues, v_done.keys);
        END IF;
    END IF;
    SELECT json_agg(json_build_array(t.id, t.position, t.parked)) INTO places
    FROM json_to_recordset(p_changes) AS j(id bigint) JOIN taskyard.task AS t ON t.id = j.id;
    COMMIT;
END $$;

-- As before, and those that wait for one that ends by it hear of it.
CREATE OR REPLACE PROCEDURE taskyard.rescue_1(
    p_node text, p_beats bigint, p_now timestamptz, p_why text, p_failed text, p_canceled text, p_no_reason text,
    INOUT uuids text[], INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queues text[]; v_sources text[]; v_states text[]; v_ids bigint[]; v_key_queues text[]; v_keys text[];
    v_locked text[];
    v_done record;
BEGIN
    told := 0;
    PERFORM pg_advisory_xact_lock_shared(1953721203, 0);
    PERFORM pg_advisory_xact_lock(1953721202, hashtext(p_node));
    DELETE FROM taskyard.node WHERE incarnation = p_node AND (p_beats IS NULL OR beats = p_beats);
    IF NOT FOUND AND p_beats IS NOT NULL THEN
        RETURN;
    END IF;
    v_locked := ARRAY(SELECT queue FROM taskyard.task WHERE state = 'running' AND node = p_node)
        || taskyard.listeners_1(ARRAY(SELECT id FROM taskyard.task WHERE state = 'running' AND node = p_node));
    PERFORM taskyard.lock_queues_1(v_locked);
    WITH m AS MATERIALIZED (
        SELECT t.id, t.queue, r.reason, CASE WHEN t.cancel_asked_at IS NOT NULL THEN 'canceled'
            WHEN t.recoveries < coalesce(q.auto_recover, 1) THEN 'queued' ELSE 'failed' END AS state,
            row_number() OVER (ORDER BY t.position DESC) AS ord
        FROM taskyard.task AS t LEFT JOIN taskyard.queue AS q ON q.name = t.queue
        CROSS JOIN LATERAL (SELECT to_json(coalesce(nullif(t.cancel_reason, ''), p_no_reason))::text AS reason) AS r
        WHERE t.state = 'running' AND t.node = p_node
    ), heads AS MATERIALIZED (
        -- The last to be put at the head stands first.
        SELECT o.id, -nextval('taskyard.seq') * {{gap}} AS place
        FROM (SELECT id FROM m WHERE state = 'queued' ORDER BY ord) AS o
    ), ran AS (
        INSERT INTO taskyard.run (task, token, started_at, ended_at, attempt, node, state)
        SELECT t.id, t.token, t.started_at, p_now, t.attempt, t.node, 'interrupted'
        FROM m JOIN taskyard.task AS t ON t.id = m.id
    ), stays AS (
        UPDATE taskyard.task AS t SET state = 'queued', updated_at = p_now, note = p_why, token = NULL, node = NULL,
            cancel_forced = false,
            recoveries = t.recoveries + 1, position = heads.place, parked = t.key IS NOT NULL
        FROM heads WHERE t.id = heads.id
        RETURNING t.id, t.uuid, t.queue, t.source, t.key
    ), gone AS (
        DELETE FROM taskyard.task AS t USING m WHERE t.id = m.id AND m.state <> 'queued'
        RETURNING m.state AS new_state, m.reason, t.*
    ), kept AS (
        INSERT INTO taskyard.ended (
            id, position, due_at, created_at, started_at, finished_at, timeout_s, attempt, retries, crashes,
            recoveries, priority, was, state, uuid, source, queue, args, key, retry, progress, error, note, checkpoint,
            bucket, origin)
        SELECT id, position, due_at, created_at, started_at, p_now, timeout_s, attempt, retries, crashes, recoveries,
            priority, 'interrupted', new_state, uuid, source, queue, args, key, retry, progress,
            CASE WHEN new_state = 'failed' THEN p_failed
                ELSE replace(p_canceled, '{{reason}}', substr(reason, 2, length(reason) - 2)) END,
            p_why, checkpoint, bucket, origin
        FROM gone
    ), all_ AS (
        SELECT id, uuid, queue, source, key, 'queued' AS state FROM stays
        UNION ALL SELECT id, uuid, queue, source, key, new_state FROM gone
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, 'running', -count(*) FROM all_ GROUP BY queue
        UNION ALL SELECT queue, state, count(*) FROM all_ GROUP BY queue, state
    )
    SELECT array_agg(a.id), array_agg(a.uuid), array_agg(a.queue), array_agg(a.source), array_agg(a.state),
        array_agg(a.queue) FILTER (WHERE key IS NOT NULL), array_agg(a.key) FILTER (WHERE key IS NOT NULL)
    INTO v_ids, uuids, v_queues, v_sources, v_states, v_key_queues, v_keys
    FROM (SELECT all_.* FROM all_ JOIN m ON m.id = all_.id ORDER BY m.ord) AS a;
    IF uuids IS NULL THEN
        COMMIT;
        RETURN;
    END IF;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.repark_1(v_key_queues, v_keys);
    END IF;
    PERFORM taskyard.lower_1(v_ids);
    told := taskyard.tell_1(0, array_fill('interrupted'::text, ARRAY[cardinality(uuids)]), uuids, v_queues, v_sources,
        ARRAY[p_now]);
    told := told + taskyard.tell_1(told, v_states, uuids, v_queues, v_sources, ARRAY[p_now]);
    IF EXISTS (SELECT FROM taskyard.dependency WHERE NOT done) THEN
        SELECT * INTO v_done FROM taskyard.release_1(told, p_now, v_locked, v_ids);
        told := told + v_done.told;
        IF v_done.keys IS NOT NULL THEN
            PERFORM taskyard.repark_1(v_done.key_queues, v_done.keys);
        END IF;
    END IF;
    told := told + taskyard.drained_1(told, p_now, v_queues);
    COMMIT;
END $$;

CREATE OR REPLACE FUNCTION taskyard.prune_1(p_before timestamptz, p_age interval, p_limit integer) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_pruned integer;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(1953721203, 0);  -- it counts
    WITH old AS MATERIALIZED (
        SELECT id FROM taskyard.ended WHERE finished_at < least(p_before, now() - p_age)
        ORDER BY finished_at, id LIMIT p_limit FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM taskyard.ended AS e USING old WHERE e.id = old.id RETURNING e.id, e.queue, e.state
    ), runs AS (
        DELETE FROM taskyard.run AS r USING old WHERE r.task = old.id
    ), ties AS (
        DELETE FROM taskyard.tie AS t USING old WHERE t.id = old.id
    ), edges AS (
        DELETE FROM taskyard.dependency AS d USING old WHERE d.child = old.id
    ), windows AS (
        DELETE FROM taskyard.slot_window WHERE slot IN (
            SELECT slot FROM taskyard.slot_window WHERE until <= least(p_before + p_age, now()) LIMIT p_limit)
    ), counted AS (
        INSERT INTO taskyard.tally SELECT queue, state, -count(*) FROM gone GROUP BY queue, state
    )
    SELECT count(*) INTO v_pruned FROM gone;
    RETURN v_pruned;
END $$;

-- As before; a window counts, and the slot is remembered.
CREATE OR REPLACE FUNCTION taskyard.submit_1(p_add text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_add json := p_add::json;
    v_dedupe text := v_add ->> 'dedupe';
    v_tasks taskyard.submitted_2[];
    v_holders text[];
    v_hash integer;
    v_found record;
    v_ids bigint[];
BEGIN
    IF v_add ->> 'where' <> taskyard.whereabouts_1() THEN
        RETURN '{"why":"elsewhere"}';
    END IF;
    IF v_add -> 'parent' IS NOT NULL AND NOT EXISTS (
        SELECT FROM json_to_record(v_add -> 'parent') AS p(id bigint, token bigint, attempt integer)
        JOIN taskyard.task AS t ON t.id = p.id AND t.token = p.token AND t.attempt = p.attempt
    ) THEN
        RETURN '{"why":"lost"}';
    END IF;
    v_tasks := ARRAY(SELECT t FROM json_populate_recordset(NULL::taskyard.submitted_2, v_add -> 'tasks') AS t);
    v_holders := array_fill(NULL::text, ARRAY[cardinality(v_tasks)]);
    IF v_dedupe <> 'allow' THEN
        -- Whoever holds a slot for good is seen without a lock. For the others: turns share this lock while they look
        -- and store, and never wait for it. Nor do we here: who waits for a transaction that waits for him waits for
        -- ever, since no server knows of both.
        FOR v_hash IN
            SELECT DISTINCT hashtext(r.slot) FROM unnest(v_tasks) AS r WHERE r.slot IS NOT NULL
                AND NOT EXISTS (SELECT FROM taskyard.task AS t WHERE t.dedupe_slot = r.slot)
            ORDER BY 1
        LOOP
            IF NOT pg_try_advisory_xact_lock(1953721204, v_hash) THEN
                RETURN '{"why":"busy"}';
            END IF;
        END LOOP;
        WITH r AS (
            SELECT u.uuid, u.slot, u.ord, first_value(u.uuid) OVER (PARTITION BY u.slot ORDER BY u.ord) AS first_uuid,
                row_number() OVER (PARTITION BY u.slot ORDER BY u.ord) AS nth
            FROM unnest(v_tasks) WITH ORDINALITY
                AS u(uuid, source, queue, args, priority, key, slot, timeout_s, retry, due_at, created_at, bucket,
                    origin, ord)
        ), held AS (
            SELECT r.slot, r.ord, t.uuid, CASE WHEN t.uuid IS NOT NULL THEN t.uuid
                WHEN r.slot IS NOT NULL AND r.nth > 1 THEN r.first_uuid END AS holder
            FROM r LEFT JOIN LATERAL taskyard.holder_1(r.slot, now()) AS t ON r.slot IS NOT NULL
        )
        SELECT array_agg(holder ORDER BY ord) AS holders,
            (array_agg(json_build_object('why', 'duplicate', 'uuid', coalesce(uuid, ''), 'slot', slot) ORDER BY ord)
                FILTER (WHERE holder IS NOT NULL))[1] AS first
        INTO v_found FROM held;
        IF v_dedupe = 'refuse' AND v_found.first IS NOT NULL THEN
            RETURN v_found.first;
        END IF;
        v_holders := v_found.holders;
    END IF;
    SELECT u.uuid INTO v_found FROM unnest(v_tasks) AS u WHERE EXISTS (SELECT FROM taskyard.ended AS e WHERE e.uuid = u.uuid);
    IF FOUND THEN
        RETURN json_build_object('why', 'taken', 'uuid', v_found.uuid);
    END IF;
    WITH stored AS (
        INSERT INTO taskyard.task (
            id, position, due_at, created_at, updated_at, timeout_s, priority, parked, state, uuid, source, queue, args,
            key, dedupe_slot, retry, bucket, origin)
        SELECT nextval('taskyard.seq'), 0, due_at, created_at, created_at, timeout_s, priority, false, 'scheduled', uuid,
            source, queue, args, key, CASE WHEN v_dedupe <> 'allow' THEN slot END, retry, bucket,
            origin
        FROM unnest(v_tasks) WITH ORDINALITY
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
        SELECT u.uuid INTO v_found FROM unnest(v_tasks) AS u
        GROUP BY u.uuid HAVING count(*) > 1 OR EXISTS (SELECT FROM taskyard.task AS t WHERE t.uuid = u.uuid) LIMIT 1;
        RETURN json_build_object('why', 'taken', 'uuid', v_found.uuid);
    END IF;
    INSERT INTO taskyard.submitted (queue, n) SELECT queue, count(*) FROM taskyard.task WHERE id = ANY (v_ids) GROUP BY queue;
    INSERT INTO taskyard.tie (id, dedupe_key, dedupe_scope)
    SELECT id, dedupe_slot, 'pending' FROM taskyard.task WHERE id = ANY (v_ids) AND dedupe_slot IS NOT NULL;
    RETURN to_json(v_holders);
END $$;
