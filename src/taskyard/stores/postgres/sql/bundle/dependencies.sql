-- Dependencies and dedupe slots.

-- Whether there are any: edges that are open ('waiting'), or ends that are still to be told ('telling').
CREATE OR REPLACE FUNCTION taskyard.has_open(VARIADIC p_what text[]) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN coalesce((
        SELECT sum(n) FROM taskyard.state_count WHERE queue = '' AND state = ANY (p_what)
            AND xid >= (SELECT state_count_from FROM taskyard.compaction ORDER BY n DESC LIMIT 1)), 0) <> 0;
END $$;

-- Who stands for this work, and where it is; no state if it has ended and its window is not over. What was called off
-- was not done.
CREATE OR REPLACE FUNCTION taskyard.dedupe_holder_1(
    p_slot text, p_now timestamptz, OUT uuid text, OUT id bigint, OUT state text, OUT queue text, OUT until timestamptz
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    SELECT t.uuid, t.id, t.state, t.queue INTO uuid, id, state, queue FROM taskyard.task AS t WHERE t.dedupe_slot = p_slot;
    IF NOT FOUND THEN
        SELECT w.uuid, t.id, t.state, t.queue, w.until INTO uuid, id, state, queue, until
        FROM taskyard.dedupe_window AS w LEFT JOIN taskyard.task AS t ON t.uuid = ANY (ARRAY[w.uuid])
        WHERE w.slot = p_slot AND w.until > p_now
            AND coalesce((SELECT e.state FROM taskyard.finished AS e WHERE e.uuid = w.uuid), '') NOT IN ('canceled', 'skipped');
    END IF;
END $$;

-- The oldest running task of a queue with this key. A task with a token runs. The state is not asked for alone: the
-- planner would take the index of all that runs. OFFSET 0 keeps it from walking over the primary key for the order.
CREATE OR REPLACE FUNCTION taskyard.find_running(p_queue text, p_key text, OUT uuid text, OUT id bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    SELECT r.uuid, r.id INTO uuid, id
    FROM (
        SELECT t.uuid, t.id FROM taskyard.task AS t
        WHERE t.queue = p_queue AND t.key = p_key AND t.key IS NOT NULL AND t.state IN ('running', 'retrying')
            AND t.token IS NOT NULL OFFSET 0
    ) AS r ORDER BY r.id LIMIT 1;
END $$;

-- Finish tasks without running them. A null error, note or cancel request leaves the stored one. `p_codes` are the codes
-- of their events.
CREATE OR REPLACE FUNCTION taskyard.finish_unrun(
    p_first integer, p_now timestamptz, p_ids bigint[], p_states text[], p_errors text[], p_notes text[],
    p_cancels text[], p_codes text[],
    OUT told integer, OUT key_queues text[], OUT keys text[], OUT uuids text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_kinds text[]; v_queues text[]; v_sources text[];
    b_kinds text[]; b_uuids text[]; b_queues text[]; b_sources text[]; b_details text[]; v_details text[];
BEGIN
    WITH m AS MATERIALIZED (
        SELECT * FROM unnest(p_ids, p_states, p_errors, p_notes, p_cancels, p_codes) WITH ORDINALITY
            AS u(id, new_state, new_error, new_note, new_cancel, code, ord)
    ), gone AS (
        DELETE FROM taskyard.task AS t USING m WHERE t.id = ANY (ARRAY[m.id])
        RETURNING m.ord, m.new_state, m.new_error, m.new_note, m.new_cancel, m.code, t.*
    ), kept AS (
        -- What is held gives up by way of blocked; what is replaced does not wait for anybody any more.
        INSERT INTO taskyard.finished (
            {{carried_columns}}, crashes, finished_at, previous_state, state, error, note, cancel)
        SELECT {{carried_columns}}, crashes, p_now,
            CASE WHEN state = 'paused' AND new_state <> 'canceled' THEN 'blocked' ELSE state END, new_state,
            coalesce(new_error, error), CASE WHEN new_cancel IS NULL THEN coalesce(new_note, note) END,
            coalesce(new_cancel, cancel)
        FROM gone
    ), tied AS (
        UPDATE taskyard.task_relation SET open_dependencies = 0 FROM m WHERE task_relation.id = ANY (ARRAY[m.id]) AND task_relation.open_dependencies <> 0
    ), counted AS (
        INSERT INTO taskyard.state_count
        SELECT queue, state, -count(*) FROM gone GROUP BY queue, state
        UNION ALL SELECT queue, new_state, count(*) FROM gone GROUP BY queue, new_state
    )
    SELECT array_agg(new_state), array_agg(uuid), array_agg(queue), array_agg(consumer),
        array_agg(queue) FILTER (WHERE key IS NOT NULL), array_agg(key) FILTER (WHERE key IS NOT NULL),
        array_agg('blocked'::text) FILTER (WHERE state = 'paused' AND new_state <> 'canceled'),
        array_agg(uuid) FILTER (WHERE state = 'paused' AND new_state <> 'canceled'),
        array_agg(queue) FILTER (WHERE state = 'paused' AND new_state <> 'canceled'),
        array_agg(consumer) FILTER (WHERE state = 'paused' AND new_state <> 'canceled'),
        array_agg(taskyard.event_detail('paused')) FILTER (WHERE state = 'paused' AND new_state <> 'canceled'),
        array_agg(taskyard.event_detail(
            CASE WHEN state = 'paused' AND new_state <> 'canceled' THEN 'blocked' ELSE state END, code))
    INTO v_kinds, uuids, v_queues, v_sources, key_queues, keys, b_kinds, b_uuids, b_queues, b_sources, b_details, v_details
    FROM (SELECT * FROM gone ORDER BY ord) AS o;
    told := taskyard.write_events(p_first, b_kinds, b_uuids, b_queues, b_sources, ARRAY[p_now], b_details);
    told := told + taskyard.write_events(p_first + told, v_kinds, uuids, v_queues, v_sources, ARRAY[p_now], v_details);
END $$;

-- Where those stand that may have to hear of the ends of these, or of earlier ones, and those behind them, who hear of it
-- if they end by it as well: their queues are locked too.
CREATE OR REPLACE FUNCTION taskyard.queues_of_dependents(p_ids bigint[]) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    IF NOT taskyard.has_open('waiting') THEN
        RETURN NULL;
    END IF;
    IF taskyard.has_open('telling') THEN
        p_ids := p_ids || ARRAY(SELECT task FROM taskyard.pending_release ORDER BY place LIMIT {{release_at_most}});
    END IF;
    RETURN ARRAY(
        WITH RECURSIVE below (id) AS (
            SELECT DISTINCT id FROM unnest(p_ids) AS x(id)
            UNION SELECT d.child FROM below AS b
            CROSS JOIN LATERAL (SELECT child FROM taskyard.dependency WHERE parent = b.id AND NOT done OFFSET 0) AS d
        )
        SELECT DISTINCT c.queue FROM (SELECT id FROM below LIMIT 4 * {{release_at_most}}) AS b
        JOIN taskyard.task AS c ON c.id = ANY (ARRAY[b.id]));
END $$;

-- Tell those that wait of the ends of these tasks, as far as they have ended, and of earlier ones, at most
-- {{release_at_most}}; some end by it in their turn. Who stands in a queue that is not locked hears of it later.
CREATE OR REPLACE FUNCTION taskyard.release_dependents(
    p_first integer, p_now timestamptz, p_locked text[], p_ids bigint[],
    OUT told integer, OUT key_queues text[], OUT keys text[], OUT finished text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_left integer := {{release_at_most}};
    v_ids bigint[] := p_ids;
    -- From which place on there are ends to tell: of those before, there is none, or a turn had too much to tell.
    v_from bigint := CASE WHEN taskyard.has_open('telling') THEN 0 END;
    v_put bigint; v_telling bigint := 0;
    v_places bigint[]; v_parents bigint[]; v_children bigint[];
    l_ids bigint[]; l_states text[]; l_errors text[]; l_notes text[];
    f_ids bigint[]; f_queued bigint[]; f_kinds text[]; f_uuids text[]; f_queues text[]; f_sources text[];
    f_key_queues text[]; f_keys text[];
    v_done record;
BEGIN
    told := 0;
    LOOP
        WITH put AS (
            INSERT INTO taskyard.pending_release (task, uuid, state)
            SELECT e.id, e.uuid, e.state FROM unnest(v_ids) WITH ORDINALITY AS x(id, ord)
            JOIN taskyard.finished AS e ON e.id = ANY (ARRAY[x.id])
            WHERE (SELECT d.child FROM taskyard.dependency AS d WHERE d.parent = x.id AND NOT d.done LIMIT 1) IS NOT NULL
            ORDER BY x.ord
            RETURNING place
        )
        SELECT least(v_from, min(place)), count(*) INTO v_from, v_put FROM put;
        v_telling := v_telling + v_put;
        EXIT WHEN v_left <= 0;
        SELECT array_agg(h.place), array_agg(h.parent), array_agg(h.child) INTO v_places, v_parents, v_children
        FROM (
            SELECT r.place, r.task AS parent, d.child
            FROM (
                -- Once each: two adds of one turn may have come upon the same end.
                SELECT min(place) AS place, task FROM taskyard.pending_release WHERE place >= v_from
                GROUP BY task ORDER BY 1 LIMIT {{release_at_most}}
            ) AS r
            CROSS JOIN LATERAL (
                SELECT d.child FROM taskyard.dependency AS d LEFT JOIN taskyard.task AS c ON c.id = ANY (ARRAY[d.child])
                WHERE d.parent = r.task AND NOT d.done AND (c.id IS NULL OR c.queue = ANY (p_locked))
                ORDER BY d.child LIMIT v_left
            ) AS d
            ORDER BY r.place, d.child LIMIT v_left
        ) AS h;
        EXIT WHEN v_places IS NULL;
        v_left := v_left - cardinality(v_places);
        UPDATE taskyard.dependency AS d SET done = true
        FROM unnest(v_parents, v_children) AS h(parent, child)
        WHERE d.child = ANY (ARRAY[h.child]) AND d.parent = ANY (ARRAY[h.parent]);
        WITH heard AS MATERIALIZED (
            SELECT h.child, h.ord, r.uuid, r.state AS how, c.state, c.due_at, t.open_dependencies, t.on_failure,
                r.state <> 'completed' AND t.on_failure IS DISTINCT FROM 'ignore' AS is_lost
            FROM unnest(v_places, v_children) WITH ORDINALITY AS h(place, child, ord)
            JOIN taskyard.pending_release AS r ON r.place = ANY (ARRAY[h.place])
            JOIN taskyard.task AS c ON c.id = ANY (ARRAY[h.child]) AND c.state IN ('blocked', 'paused')
            JOIN taskyard.task_relation AS t ON t.id = ANY (ARRAY[h.child])
        ), fates AS (
            SELECT child, state, due_at, on_failure, coalesce(min(ord) FILTER (WHERE is_lost), max(ord)) AS ord,
                open_dependencies - count(*) FILTER (WHERE NOT is_lost) AS open_dependencies,
                (array_agg(uuid ORDER BY ord) FILTER (WHERE is_lost))[1] AS lost,
                (array_agg(how ORDER BY ord) FILTER (WHERE is_lost))[1] AS how
            FROM heard GROUP BY child, state, due_at, on_failure, open_dependencies
        ), words AS (
            -- As `lost_to` and `give_up` of taskyard.model.dependency write it.
            SELECT f.*, json_build_object('task', lost, 'state', how) AS facts FROM fates AS f
        ), counted AS (
            UPDATE taskyard.task_relation AS t SET open_dependencies = f.open_dependencies FROM fates AS f
            WHERE t.id = ANY (ARRAY[f.child]) AND f.lost IS NULL
        )
        SELECT array_agg(child) FILTER (WHERE lost IS NOT NULL),
            array_agg(CASE WHEN on_failure = 'skip' THEN 'skipped' ELSE 'failed' END) FILTER (WHERE lost IS NOT NULL),
            array_agg(CASE WHEN on_failure IS DISTINCT FROM 'skip' THEN json_build_object('kind', 'rejected',
                'code', 'dependency', 'types', json_build_array('{{dependency_failed}}'), 'details', facts)::text END)
                FILTER (WHERE lost IS NOT NULL),
            array_agg(CASE WHEN on_failure = 'skip' THEN json_build_object('code', 'dependency', 'facts', facts)::text END)
                FILTER (WHERE lost IS NOT NULL),
            array_agg(child) FILTER (WHERE lost IS NULL AND open_dependencies = 0 AND state = 'blocked')
        INTO l_ids, l_states, l_errors, l_notes, f_ids FROM (SELECT * FROM words ORDER BY ord) AS o;
        IF f_ids IS NOT NULL THEN
            WITH freed AS (
                UPDATE taskyard.task AS t
                SET state = CASE WHEN t.due_at > p_now THEN 'scheduled' ELSE 'queued' END, updated_at = p_now,
                    is_parked = t.key IS NOT NULL AND t.due_at <= p_now, blocked_by = NULL, blocked_at = NULL
                FROM unnest(f_ids) AS f(id) WHERE t.id = ANY (ARRAY[f.id])
                RETURNING t.id, t.uuid, t.queue, t.consumer, t.key, t.state
            ), counted AS (
                INSERT INTO taskyard.state_count
                SELECT queue, 'blocked', -count(*) FROM freed GROUP BY queue
                UNION ALL SELECT queue, state, count(*) FROM freed GROUP BY queue, state
            )
            SELECT array_agg(id) FILTER (WHERE state = 'queued'), array_agg(state), array_agg(uuid), array_agg(queue),
                array_agg(consumer), array_agg(queue) FILTER (WHERE key IS NOT NULL), array_agg(key) FILTER (WHERE key IS NOT NULL)
            INTO f_queued, f_kinds, f_uuids, f_queues, f_sources, f_key_queues, f_keys
            FROM (SELECT * FROM freed ORDER BY id) AS o;
            told := told + taskyard.write_events(p_first + told, f_kinds, f_uuids, f_queues, f_sources, ARRAY[p_now],
                array_fill(taskyard.event_detail('blocked'), ARRAY[coalesce(cardinality(f_kinds), 0)]));
            PERFORM taskyard.lower_watermarks(f_queued);
            key_queues := key_queues || f_key_queues; keys := keys || f_keys;
        END IF;
        v_ids := l_ids;
        IF l_ids IS NOT NULL THEN
            SELECT * INTO v_done FROM taskyard.finish_unrun(p_first + told, p_now, l_ids, l_states, l_errors, l_notes, NULL,
                array_fill('dependency'::text, ARRAY[cardinality(l_ids)]));
            told := told + v_done.told; finished := finished || v_done.uuids;
            key_queues := key_queues || v_done.key_queues; keys := keys || v_done.keys;
        END IF;
    END LOOP;
    DELETE FROM taskyard.pending_release AS r WHERE r.place >= v_from
        AND (SELECT d.child FROM taskyard.dependency AS d WHERE d.parent = r.task AND NOT d.done LIMIT 1) IS NULL;
    GET DIAGNOSTICS v_put = ROW_COUNT;
    IF v_telling <> v_put THEN
        INSERT INTO taskyard.state_count (queue, state, n) VALUES ('', 'telling', v_telling - v_put);
    END IF;
END $$;

-- The queues of those that the tasks of these adds wait for or replace.
CREATE OR REPLACE FUNCTION taskyard.queues_of_parents(p_adds json, a_slot text[], p_now timestamptz) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT t.queue FROM json_to_recordset(p_adds) AS a(ties json)
        CROSS JOIN LATERAL json_to_recordset(a.ties) AS x("after" json)
        CROSS JOIN LATERAL json_array_elements_text(x."after") AS p(uuid)
        JOIN taskyard.task AS t ON t.uuid = ANY (ARRAY[p.uuid])
        UNION
        SELECT h.queue FROM unnest(a_slot) AS s CROSS JOIN LATERAL taskyard.dedupe_holder_1(s, p_now) AS h
        WHERE s IS NOT NULL AND h.queue IS NOT NULL
            AND EXISTS (SELECT FROM json_to_recordset(p_adds) AS a(dedupe text) WHERE a.dedupe = 'replace')
        UNION
        SELECT unnest(taskyard.queues_of_dependents(ARRAY(
            SELECT h.id FROM unnest(a_slot) AS s CROSS JOIN LATERAL taskyard.dedupe_holder_1(s, p_now) AS h
            WHERE s IS NOT NULL AND h.id IS NOT NULL))));
END $$;

-- New tasks wait for others from here on, unless those are done: those who do are blocked. Who of the others has ended so
-- that somebody waits in vain.
CREATE OR REPLACE FUNCTION taskyard.insert_dependencies(e_child text[], e_parent text[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_lost bigint[];
BEGIN
    WITH edge AS MATERIALIZED (
        SELECT c.id AS child, coalesce(p.id, d.id) AS parent, p.id IS NULL AND d.state <> 'completed' AS has_failed,
            p.id IS NULL AND (d.state = 'completed' OR t.on_failure = 'ignore') AS done, e.ord
        FROM unnest(e_child, e_parent) WITH ORDINALITY AS e(child, parent, ord)
        JOIN taskyard.task AS c ON c.uuid = ANY (ARRAY[e.child]) JOIN taskyard.task_relation AS t ON t.id = ANY (ARRAY[c.id])
        LEFT JOIN taskyard.task AS p ON p.uuid = ANY (ARRAY[e.parent])
        LEFT JOIN taskyard.finished AS d ON d.uuid = ANY (ARRAY[e.parent])
    ), stored AS (
        INSERT INTO taskyard.dependency (child, parent, done) SELECT child, parent, done FROM edge
    ), counts AS (
        SELECT child, count(*)::integer AS n FROM edge WHERE NOT done GROUP BY child
    ), waiting AS (
        UPDATE taskyard.task_relation AS t SET open_dependencies = c.n FROM counts AS c WHERE t.id = ANY (ARRAY[c.child])
    ), was AS MATERIALIZED (
        SELECT t.id, t.queue, t.state FROM counts AS c JOIN taskyard.task AS t ON t.id = ANY (ARRAY[c.child])
    ), blocked AS (
        UPDATE taskyard.task AS t SET state = 'blocked', is_parked = false FROM was WHERE t.id = ANY (ARRAY[was.id])
    ), counted AS (
        INSERT INTO taskyard.state_count
        SELECT queue, state, -count(*) FROM was GROUP BY queue, state
        UNION ALL SELECT queue, 'blocked', count(*) FROM was GROUP BY queue
    )
    SELECT array_agg(parent ORDER BY ord) INTO v_lost FROM edge WHERE has_failed AND NOT done;
    RETURN v_lost;
END $$;

-- These slots are taken until then.
CREATE OR REPLACE FUNCTION taskyard.open_windows(p_slots text[], p_uuids text[], p_until timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO taskyard.dedupe_window AS w SELECT u.slot, u.uuid, p_until FROM unnest(p_slots, p_uuids) AS u(slot, uuid)
    ON CONFLICT (slot) DO UPDATE SET uuid = excluded.uuid, until = excluded.until;
END $$;

-- What the ties of an add say, of each of its tasks, and who waits for whom of those that are not merged away; `strangers`
-- are the parents that are not among them. Who was merged away is waited for as the one that it became. `is_reused` if one
-- of them has the uuid of a task that was `found` to stand for the work of another.
-- Here and below are lists alone, which may be long, and no tables: such are best joined by hashing.
CREATE OR REPLACE FUNCTION taskyard.read_relations(
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

CREATE OR REPLACE FUNCTION taskyard.has_cycle(p_children text[], p_parents text[]) RETURNS boolean
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
