-- What is due joins its queue, and what goes next starts.

-- Queue what is due, of these queues: by due time, then by age, at most {{promote_at_most}}. Of a task at place 0 nobody
-- has heard yet: it was submitted in a transaction of somebody else's.
CREATE FUNCTION taskyard.promote_1(
    p_first integer, p_now timestamptz, p_queues text[], OUT told integer, OUT key_queues text[], OUT keys text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_ids bigint[]; v_uuids text[]; v_queues text[]; v_sources text[]; v_kinds text[];
    n_kinds text[]; n_uuids text[]; n_queues text[]; n_sources text[];
BEGIN
    WITH d AS MATERIALIZED (
        SELECT x.id, x.state, x.ord, x.position = 0 AS is_new,
            CASE WHEN x.state = 'scheduled' THEN nextval('taskyard.seq') * {{gap}} ELSE x.position END AS place
        FROM (SELECT id, state, position, row_number() OVER (ORDER BY due_at, id) AS ord FROM (
            SELECT id, state, position, due_at FROM taskyard.task
            WHERE state IN ('scheduled', 'retrying') AND due_at <= p_now AND queue = ANY (p_queues)
            ORDER BY due_at, id LIMIT {{promote_at_most}}) AS y) AS x
    ), queued AS (
        UPDATE taskyard.task AS t
        SET state = 'queued', position = d.place, parked = t.key IS NOT NULL, updated_at = p_now,
            line = CASE WHEN d.is_new THEN taskyard.line_1((SELECT q.lines FROM taskyard.queue AS q
                WHERE q.name = t.queue), t.bucket) ELSE t.line END
        FROM d WHERE t.id = ANY (ARRAY[d.id])
        RETURNING d.ord, d.state AS was, d.is_new, t.id, t.uuid, t.queue, t.source, t.key
    ), counted AS (
        INSERT INTO taskyard.tally
        SELECT queue, was, -count(*) FROM queued GROUP BY queue, was
        UNION ALL SELECT queue, 'queued', count(*) FROM queued GROUP BY queue
    )
    SELECT array_agg(id), array_agg('queued'::text), array_agg(uuid), array_agg(queue), array_agg(source),
        array_agg(queue) FILTER (WHERE key IS NOT NULL), array_agg(key) FILTER (WHERE key IS NOT NULL),
        array_agg('submitted'::text) FILTER (WHERE is_new), array_agg(uuid) FILTER (WHERE is_new),
        array_agg(queue) FILTER (WHERE is_new), array_agg(source) FILTER (WHERE is_new)
    INTO v_ids, v_kinds, v_uuids, v_queues, v_sources, key_queues, keys, n_kinds, n_uuids, n_queues, n_sources
    FROM (SELECT * FROM queued ORDER BY ord) AS o;
    told := taskyard.tell_1(p_first, n_kinds, n_uuids, n_queues, n_sources, ARRAY[p_now]);
    told := told + taskyard.tell_1(p_first + told, v_kinds, v_uuids, v_queues, v_sources, ARRAY[p_now]);
    PERFORM taskyard.lower_1(v_ids);
END $$;

-- The queues where something may start: only those are locked for it. Whoever adds to another one meanwhile tells of it.
-- Of very many it is some, drawn by lot: the server has room for some thousands of locks.
CREATE FUNCTION taskyard.startable_1(p_sources text[], p_all boolean) RETURNS text[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    RETURN ARRAY(
        SELECT l.queue FROM taskyard.lane AS l
        LEFT JOIN LATERAL (
            SELECT * FROM taskyard.mark AS m WHERE m.queue = l.queue AND m.source = l.source ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        CROSS JOIN LATERAL (
            VALUES (0::smallint, l.low_0, m.low_0), (1::smallint, l.low_1, m.low_1), (2::smallint, l.low_2, m.low_2)
        ) AS p(level, was, low)
        WHERE (p_all OR l.source = ANY (p_sources)) AND p.was IS NOT NULL AND (
            SELECT t.id FROM taskyard.task AS t
            WHERE t.queue = l.queue AND t.source = l.source AND t.state = 'queued' AND NOT t.parked
                AND t.priority = p.level AND t.position >= coalesce(p.low, 0)
            ORDER BY t.position LIMIT 1) IS NOT NULL
        GROUP BY l.queue ORDER BY random() LIMIT {{locked_at_most}});
END $$;

-- How many more of a queue with a limit may start. What runs is not counted in the table itself: what ran and cannot be
-- vacuumed would be walked over.
CREATE FUNCTION taskyard.room_1(p_queue text, p_concurrency integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_room bigint;
BEGIN
    SELECT p_concurrency - coalesce(sum(t.n), 0) INTO v_room FROM taskyard.tally AS t
    WHERE t.queue = p_queue AND t.state = 'running'
        AND t.xid >= (SELECT tally_from FROM taskyard.tidied ORDER BY n DESC LIMIT 1);
    IF v_room <= 0 AND (SELECT token FROM taskyard.task WHERE queue = p_queue AND state = 'running'
                        ORDER BY token DESC LIMIT 1) IS NULL THEN
        -- Whatever went wrong once, a queue must not stand still for ever.
        INSERT INTO taskyard.tally VALUES (p_queue, 'running', v_room - p_concurrency);
        v_room := p_concurrency;
    END IF;
    RETURN v_room;
END $$;

-- The first task of a lane from a place on, or of a line.
CREATE FUNCTION taskyard.head_1(
    p_queue text, p_source text, p_level integer, p_line text, p_from bigint,
    OUT id bigint, OUT place bigint, OUT due_at timestamptz, OUT source text, OUT can_start boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    IF p_line IS NULL THEN
        SELECT t.id, t.position, t.due_at, t.source, true INTO id, place, due_at, source, can_start
        FROM taskyard.task AS t WHERE t.queue = p_queue AND t.source = p_source AND t.state = 'queued' AND NOT t.parked
            AND t.priority = p_level::smallint AND t.position >= p_from
        ORDER BY t.position LIMIT 1;
    ELSE
        SELECT t.id, t.position, t.due_at, t.source, t.state = 'queued' AND NOT t.parked
        INTO id, place, due_at, source, can_start
        FROM taskyard.task AS t WHERE t.queue = p_queue AND t.line = p_line AND t.line IS NOT NULL
            AND t.state IN ('queued', 'paused') AND t.position >= p_from
        ORDER BY t.position LIMIT 1;
    END IF;
END $$;

-- What goes next over those of these queues that are running: each offers by its own order, the best offer is taken, one at
-- a time. As `taskyard.model.picking` says it. Of one queue that goes by priority, as it mostly is, some of each lane are read
-- at once; then what goes next needs no query.
CREATE FUNCTION taskyard.pick_ordered_1(
    p_now timestamptz, p_queues text[], p_total integer, p_sources text[], p_rooms integer[], p_others integer
) RETURNS bigint[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    s_room integer[] := p_rooms || p_others;
    -- One entry a queue.
    q_name text[] := '{}'; q_order text[] := '{}'; q_room bigint[] := '{}'; q_after integer[] := '{}';
    q_wait interval[] := '{}'; q_passed_1 integer[] := '{}'; q_passed_2 integer[] := '{}';
    q_let_1 timestamptz[] := '{}'; q_let_2 timestamptz[] := '{}'; q_bucket text[] := '{}'; q_is_changed boolean[] := '{}';
    -- One entry a feed, which is a lane or a line, and its first task; of one queue, an entry a task that was read, by
    -- priority and place, and whether it is the last that was read of its lane.
    e_q integer[]; e_level integer[]; e_source text[]; e_line text[]; e_s integer[]; e_id bigint[]; e_position bigint[];
    e_due timestamptz[]; e_can boolean[]; e_is_last boolean[];
    -- Of one queue, one entry a priority: the entries that are left of it, and from which place on it is read.
    n_at integer[]; n_to integer[]; n_from bigint[] := ARRAY[NULL, NULL, NULL];
    v_is_one boolean;
    v_left integer;
    v_long text[] := '{}';  -- the lanes, by priority and source, of which more is taken than is read at first
    v_picked bigint[] := '{}';
    v_row record; v_head record;
    v_q integer; v_e integer; v_level integer; v_top integer;
    h_e integer[]; h_due timestamptz[]; h_1 timestamptz; h_2 timestamptz;
    p_1 integer; p_2 integer;
BEGIN
    FOR v_row IN
        SELECT u.name, coalesce(q.ordering, 'priority') AS ordering,
            CASE WHEN q.concurrency IS NOT NULL THEN taskyard.room_1(u.name, q.concurrency) END AS room,
            CASE WHEN q.name IS NULL THEN 8 ELSE q.starve_after END AS starve_after,
            CASE WHEN q.name IS NULL THEN interval '600 seconds' ELSE q.starve_wait END AS starve_wait, s.*
        FROM (SELECT DISTINCT name FROM unnest(p_queues) AS n(name)) AS u
        LEFT JOIN taskyard.queue AS q ON q.name = u.name LEFT JOIN taskyard.turns AS s ON s.queue = u.name
        WHERE coalesce(q.state, 'running') = 'running'
        ORDER BY u.name
    LOOP
        CONTINUE WHEN v_row.room <= 0;
        q_name := q_name || v_row.name; q_order := q_order || v_row.ordering; q_room := q_room || v_row.room;
        q_after := q_after || v_row.starve_after; q_wait := q_wait || v_row.starve_wait;
        q_passed_1 := q_passed_1 || coalesce(v_row.passed_1, 0); q_passed_2 := q_passed_2 || coalesce(v_row.passed_2, 0);
        q_let_1 := q_let_1 || v_row.let_in_1; q_let_2 := q_let_2 || v_row.let_in_2; q_bucket := q_bucket || v_row.bucket;
        q_is_changed := q_is_changed || false;
    END LOOP;
    v_is_one := cardinality(q_name) = 1 AND q_order[1] = 'priority';
    <<reading>>
    LOOP
        v_left := p_total - cardinality(v_picked);
        SELECT array_agg(f.i), array_agg(f.lane), array_agg(f.line), array_agg(f.level), array_agg(f.id),
            array_agg(f.position), array_agg(f.due_at), array_agg(f.can_start), array_agg(f.nth = f.room),
            array_agg(coalesce(array_position(p_sources, f.source), cardinality(s_room))),
            ARRAY[count(*) FILTER (WHERE f.level < 1), count(*) FILTER (WHERE f.level < 2), count(*)]
        INTO e_q, e_source, e_line, e_level, e_id, e_position, e_due, e_can, e_is_last, e_s, n_to
        FROM (
            SELECT q.i, l.source AS lane, NULL::text AS line, p.level, t.id, t.position, t.due_at, l.source,
                true AS can_start, t.nth, r.room
            FROM unnest(q_name, q_order) WITH ORDINALITY AS q(name, ordering, i)
            JOIN taskyard.lane AS l ON l.queue = q.name
            LEFT JOIN LATERAL (
                SELECT * FROM taskyard.mark AS m WHERE m.queue = l.queue AND m.source = l.source ORDER BY m.n DESC LIMIT 1
            ) AS m ON true
            CROSS JOIN LATERAL (VALUES (0, l.low_0, m.low_0), (1, l.low_1, m.low_1), (2, l.low_2, m.low_2))
                AS p(level, was, low)
            CROSS JOIN LATERAL (SELECT CASE WHEN NOT v_is_one THEN 1 WHEN p.level || l.source = ANY (v_long) THEN v_left
                ELSE least({{read_ahead}}, v_left) END AS room) AS r
            CROSS JOIN LATERAL (
                SELECT id, position, due_at, row_number() OVER (ORDER BY t.position) AS nth FROM taskyard.task AS t
                WHERE t.queue = l.queue AND t.source = l.source AND t.state = 'queued' AND NOT t.parked
                    AND t.priority = p.level::smallint AND t.position >= greatest(coalesce(p.low, 0), n_from[p.level + 1])
                ORDER BY t.position LIMIT r.room
            ) AS t
            WHERE q.ordering = 'priority' AND p.was IS NOT NULL
                AND s_room[coalesce(array_position(p_sources, l.source), cardinality(s_room))] > 0
            UNION ALL
            SELECT q.i, NULL, b.line, 1, h.id, h.place, h.due_at, h.source, h.can_start, 1, 1
            FROM unnest(q_name, q_order) WITH ORDINALITY AS q(name, ordering, i)
            CROSS JOIN LATERAL (
                WITH RECURSIVE named (line) AS (
                    (SELECT t.line FROM taskyard.task AS t WHERE t.queue = q.name AND t.line IS NOT NULL
                        AND t.state IN ('queued', 'paused') ORDER BY t.line LIMIT 1)
                    UNION ALL
                    SELECT (SELECT t.line FROM taskyard.task AS t WHERE t.queue = q.name AND t.line IS NOT NULL
                        AND t.state IN ('queued', 'paused') AND t.line > named.line ORDER BY t.line LIMIT 1)
                    FROM named WHERE named.line IS NOT NULL
                )
                SELECT named.line FROM named WHERE named.line IS NOT NULL
            ) AS b
            CROSS JOIN LATERAL taskyard.head_1(q.name, NULL, 1, b.line, {{lowest}}) AS h
            WHERE q.ordering <> 'priority'
            ORDER BY level, position
        ) AS f;
        n_at := ARRAY[1, n_to[1] + 1, n_to[2] + 1];
        WHILE cardinality(v_picked) < p_total LOOP
            IF v_is_one THEN
                EXIT WHEN q_room[1] <= 0;
                v_q := 1;
            ELSE
                -- Each queue's offer, and the best of them.
                SELECT o.q, o.e INTO v_q, v_e FROM (
                    SELECT DISTINCT ON (c.q) c.q, c.e, c.bid, c.position, c.id FROM (
                        SELECT e.q, e.e, e.position, e.id, e.line,
                            CASE WHEN q_order[e.q] = 'priority' THEN e.level ELSE 1 END AS bid
                        FROM unnest(e_q, e_level, e_s, e_id, e_position, e_can, e_line) WITH ORDINALITY
                            AS e(q, level, s, id, position, can_start, line, e)
                        WHERE e.id IS NOT NULL AND e.can_start AND s_room[e.s] > 0 AND coalesce(q_room[e.q], 1) > 0
                    ) AS c
                    ORDER BY c.q, q_order[c.q] = 'buckets' AND coalesce(c.line COLLATE "C" <= q_bucket[c.q], false),
                        CASE WHEN q_order[c.q] = 'buckets' THEN c.line END COLLATE "C", c.bid, c.position, c.id
                ) AS o ORDER BY o.bid, o.position, o.id LIMIT 1;
                EXIT WHEN NOT FOUND;
            END IF;
            IF q_order[v_q] = 'priority' THEN
                -- The first task of each priority: who goes, and what is remembered.
                h_e := ARRAY[NULL, NULL, NULL]::integer[]; h_due := ARRAY[NULL, NULL, NULL]::timestamptz[];
                IF v_is_one THEN
                    FOR n IN 1 .. 3 LOOP
                        WHILE n_at[n] <= n_to[n] AND s_room[e_s[n_at[n]]] <= 0 LOOP
                            n_at[n] := n_at[n] + 1;
                        END LOOP;
                        IF n_at[n] <= n_to[n] THEN
                            h_e[n] := n_at[n]; h_due[n] := e_due[n_at[n]];
                        END IF;
                    END LOOP;
                ELSE
                    FOR v_row IN
                        SELECT DISTINCT ON (e.level) e.level, e.e, e.due
                        FROM unnest(e_q, e_level, e_s, e_id, e_position, e_due) WITH ORDINALITY
                            AS e(q, level, s, id, position, due, e)
                        WHERE e.q = v_q AND e.id IS NOT NULL AND s_room[e.s] > 0
                        ORDER BY e.level, e.position, e.id
                    LOOP
                        h_e[v_row.level + 1] := v_row.e; h_due[v_row.level + 1] := v_row.due;
                    END LOOP;
                END IF;
                EXIT WHEN h_e[1] IS NULL AND h_e[2] IS NULL AND h_e[3] IS NULL;
                v_top := CASE WHEN h_e[1] IS NOT NULL THEN 0 WHEN h_e[2] IS NOT NULL THEN 1 ELSE 2 END;
                v_level := NULL;
                IF q_wait[v_q] IS NOT NULL THEN
                    -- A time to come is that of a clock that has been set back since.
                    h_1 := greatest(h_due[2], CASE WHEN q_let_1[v_q] <= p_now THEN q_let_1[v_q] END);
                    h_2 := greatest(h_due[3], CASE WHEN q_let_2[v_q] <= p_now THEN q_let_2[v_q] END);
                    IF v_top < 1 AND h_e[2] IS NOT NULL AND p_now - h_1 >= q_wait[v_q] THEN
                        v_level := 1;
                    END IF;
                    IF v_top < 2 AND h_e[3] IS NOT NULL AND p_now - h_2 >= q_wait[v_q] AND (v_level IS NULL OR h_2 < h_1) THEN
                        v_level := 2;
                    END IF;
                END IF;
                IF v_level IS NULL AND q_after[v_q] IS NOT NULL THEN
                    p_1 := CASE WHEN v_top < 1 AND h_e[2] IS NOT NULL AND q_passed_1[v_q] >= q_after[v_q]
                        THEN q_passed_1[v_q] ELSE -1 END;
                    p_2 := CASE WHEN v_top < 2 AND h_e[3] IS NOT NULL AND q_passed_2[v_q] >= q_after[v_q]
                        THEN q_passed_2[v_q] ELSE -1 END;
                    v_level := CASE WHEN p_1 < 0 AND p_2 < 0 THEN NULL WHEN p_1 >= p_2 THEN 1 ELSE 2 END;
                END IF;
                v_level := coalesce(v_level, v_top);
                v_e := h_e[v_level + 1];
                IF q_after[v_q] IS NOT NULL THEN
                    p_1 := CASE WHEN v_level = 1 THEN 0
                        ELSE q_passed_1[v_q] + (h_e[2] IS NOT NULL AND v_level < 1)::integer END;
                    p_2 := CASE WHEN v_level = 2 THEN 0
                        ELSE q_passed_2[v_q] + (h_e[3] IS NOT NULL AND v_level < 2)::integer END;
                    q_is_changed[v_q] := q_is_changed[v_q] OR p_1 <> q_passed_1[v_q] OR p_2 <> q_passed_2[v_q];
                    q_passed_1[v_q] := p_1; q_passed_2[v_q] := p_2;
                END IF;
                IF q_wait[v_q] IS NOT NULL AND v_level > v_top THEN
                    q_is_changed[v_q] := true;
                    IF v_level = 1 THEN
                        q_let_1[v_q] := p_now;
                    ELSE
                        q_let_2[v_q] := p_now;
                    END IF;
                END IF;
            ELSIF q_order[v_q] = 'buckets' THEN
                q_is_changed[v_q] := true; q_bucket[v_q] := e_line[v_e];
            END IF;
            v_picked := v_picked || e_id[v_e];
            s_room[e_s[v_e]] := s_room[e_s[v_e]] - 1;
            q_room[v_q] := q_room[v_q] - 1;
            IF v_is_one THEN
                n_at[v_level + 1] := v_e + 1; n_from[v_level + 1] := e_position[v_e] + 1;
                IF e_is_last[v_e] AND s_room[e_s[v_e]] > 0 AND cardinality(v_picked) < p_total THEN
                    -- The next of this lane was not read, and may stand before those of others.
                    v_long := v_long || (v_level || e_source[v_e]);
                    CONTINUE reading;
                END IF;
            ELSE
                SELECT * INTO v_head
                FROM taskyard.head_1(q_name[v_q], e_source[v_e], e_level[v_e], e_line[v_e], e_position[v_e] + 1);
                e_id[v_e] := v_head.id; e_position[v_e] := v_head.place; e_due[v_e] := v_head.due_at;
                e_can[v_e] := v_head.can_start;
                e_s[v_e] := coalesce(array_position(p_sources, v_head.source), cardinality(s_room));
            END IF;
        END LOOP;
        EXIT;
    END LOOP;
    INSERT INTO taskyard.turns AS s
    SELECT u.name, u.passed_1, u.passed_2, u.let_1, u.let_2, u.bucket
    FROM unnest(q_name, q_passed_1, q_passed_2, q_let_1, q_let_2, q_bucket, q_is_changed)
        AS u(name, passed_1, passed_2, let_1, let_2, bucket, is_changed)
    WHERE u.is_changed
    ON CONFLICT (queue) DO UPDATE SET passed_1 = excluded.passed_1, passed_2 = excluded.passed_2,
        let_in_1 = excluded.let_in_1, let_in_2 = excluded.let_in_2, bucket = excluded.bucket;
    RETURN v_picked;
END $$;

-- What goes next over those of these queues that are running, as far as there is room for it. By priority and place, as long
-- as nothing else counts: neither the order of a queue, nor whether a priority has been passed over for too long.
CREATE FUNCTION taskyard.pick_1(
    p_now timestamptz, p_queues text[], p_total integer, p_sources text[], p_rooms integer[], p_others integer
) RETURNS bigint[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_lane record;
    v_picked bigint[] := '{}';
    v_left integer := p_total;
    -- One entry a lane: its queue, source and marks, and which of the rooms below its tasks take from.
    l_queue text[] := '{}'; l_source text[] := '{}'; l_0 bigint[] := '{}'; l_1 bigint[] := '{}'; l_2 bigint[] := '{}';
    l_q integer[] := '{}'; l_s integer[] := '{}';
    l_room integer[]; l_seen integer[];
    q_room integer[] := '{}';
    s_room integer[] := p_rooms || p_others;
    v_lanes integer; v_share integer; v_is_cut boolean;
    v_queue text; v_room bigint;
    v_levels integer;  -- the priorities that this queue has had, a bit each; also of sources without room: what is remembered
                       -- of who was passed over changes with every start
    v_priority integer := 0; v_position bigint := -9223372036854775807;
    i integer;
BEGIN
    FOR v_lane IN
        SELECT l.queue, l.source, q.concurrency, coalesce(q.ordering, 'priority') AS ordering,
            q.name IS NOT NULL AND q.starve_after IS NULL AND q.starve_wait IS NULL AS may_starve,
            coalesce(array_position(p_sources, l.source), cardinality(s_room)) AS s,
            CASE WHEN l.low_0 = 0 THEN coalesce(m.low_0, 0) END AS low_0,
            CASE WHEN l.low_1 = 0 THEN coalesce(m.low_1, 0) END AS low_1,
            CASE WHEN l.low_2 = 0 THEN coalesce(m.low_2, 0) END AS low_2
        FROM taskyard.lane AS l LEFT JOIN taskyard.queue AS q ON q.name = l.queue
        LEFT JOIN LATERAL (
            SELECT * FROM taskyard.mark AS m WHERE m.queue = l.queue AND m.source = l.source
                AND s_room[coalesce(array_position(p_sources, l.source), cardinality(s_room))] > 0
            ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        WHERE l.queue = ANY (p_queues) AND coalesce(q.state, 'running') = 'running'
        ORDER BY l.queue, l.source
    LOOP
        IF v_queue IS DISTINCT FROM v_lane.queue THEN
            v_queue := v_lane.queue; v_levels := 0;
            v_room := CASE WHEN v_lane.concurrency IS NOT NULL THEN taskyard.room_1(v_queue, v_lane.concurrency) END;
            IF v_room > 0 THEN
                q_room := q_room || v_room::integer;
            END IF;
        END IF;
        v_levels := v_levels | (v_lane.low_0 IS NOT NULL)::integer
            | 2 * (v_lane.low_1 IS NOT NULL)::integer | 4 * (v_lane.low_2 IS NOT NULL)::integer;
        IF v_lane.ordering <> 'priority' OR NOT v_lane.may_starve AND v_levels NOT IN (0, 1, 2, 4) THEN
            RETURN taskyard.pick_ordered_1(p_now, p_queues, p_total, p_sources, p_rooms, p_others);
        END IF;
        CONTINUE WHEN v_room <= 0 OR s_room[v_lane.s] <= 0;
        l_queue := l_queue || v_lane.queue; l_source := l_source || v_lane.source;
        l_0 := l_0 || v_lane.low_0; l_1 := l_1 || v_lane.low_1; l_2 := l_2 || v_lane.low_2;
        l_s := l_s || v_lane.s;
        l_q := l_q || CASE WHEN v_lane.concurrency IS NULL THEN 0 ELSE cardinality(q_room) END;
    END LOOP;
    v_lanes := cardinality(l_queue);
    IF v_lanes = 1 THEN
        -- All in one go: to look at each would take as long as to start it.
        v_share := least(p_total, s_room[l_s[1]], q_room[nullif(l_q[1], 0)]);
        RETURN ARRAY(
            SELECT id FROM (
                (SELECT id, priority, position FROM taskyard.task
                 WHERE queue = l_queue[1] AND source = l_source[1] AND state = 'queued' AND NOT parked AND priority = 0
                    AND position >= l_0[1] ORDER BY position LIMIT v_share)
                UNION ALL
                (SELECT id, priority, position FROM taskyard.task
                 WHERE queue = l_queue[1] AND source = l_source[1] AND state = 'queued' AND NOT parked AND priority = 1
                    AND position >= l_1[1] ORDER BY position LIMIT v_share)
                UNION ALL
                (SELECT id, priority, position FROM taskyard.task
                 WHERE queue = l_queue[1] AND source = l_source[1] AND state = 'queued' AND NOT parked AND priority = 2
                    AND position >= l_2[1] ORDER BY position LIMIT v_share)
            ) AS three ORDER BY priority, position LIMIT v_share);
    END IF;
    WHILE v_lanes > 0 AND v_left > 0 LOOP
        -- Of many lanes most will not be taken: a little of each is read at a time.
        v_share := CASE WHEN v_lanes = 1 THEN v_left ELSE greatest(4, 2 * v_left / v_lanes) END;
        l_room := '{}'; l_seen := array_fill(0, ARRAY[v_lanes]);
        FOR i IN 1 .. v_lanes LOOP
            l_room := l_room || least(v_share, v_left, s_room[l_s[i]], q_room[nullif(l_q[i], 0)]);
        END LOOP;
        v_is_cut := false;
        FOR v_lane IN
            SELECT l.i, t.id, t.priority, t.position
            FROM unnest(l_queue, l_source, l_0, l_1, l_2, l_room) WITH ORDINALITY
                AS l(queue, source, low_0, low_1, low_2, room, i)
            CROSS JOIN LATERAL (
                SELECT * FROM (
                    (SELECT id, priority, position FROM taskyard.task
                     WHERE queue = l.queue AND source = l.source AND state = 'queued' AND NOT parked AND priority = 0
                        AND v_priority = 0 AND position >= l.low_0 AND position > v_position
                     ORDER BY position LIMIT l.room)
                    UNION ALL
                    (SELECT id, priority, position FROM taskyard.task
                     WHERE queue = l.queue AND source = l.source AND state = 'queued' AND NOT parked AND priority = 1
                        AND v_priority <= 1 AND position >= l.low_1
                        AND position > CASE WHEN v_priority = 1 THEN v_position ELSE -9223372036854775807 END
                     ORDER BY position LIMIT l.room)
                    UNION ALL
                    (SELECT id, priority, position FROM taskyard.task
                     WHERE queue = l.queue AND source = l.source AND state = 'queued' AND NOT parked AND priority = 2
                        AND position >= l.low_2
                        AND position > CASE WHEN v_priority = 2 THEN v_position ELSE -9223372036854775807 END
                     ORDER BY position LIMIT l.room)
                ) AS three ORDER BY priority, position LIMIT l.room
            ) AS t
            WHERE l.room > 0
            ORDER BY t.priority, t.position
        LOOP
            i := v_lane.i;
            v_priority := v_lane.priority; v_position := v_lane.position;
            l_seen[i] := l_seen[i] + 1;
            IF s_room[l_s[i]] > 0 AND coalesce(q_room[nullif(l_q[i], 0)], 1) > 0 THEN
                v_picked := v_picked || v_lane.id;
                v_left := v_left - 1;
                s_room[l_s[i]] := s_room[l_s[i]] - 1;
                IF l_q[i] > 0 THEN
                    q_room[l_q[i]] := q_room[l_q[i]] - 1;
                END IF;
                EXIT WHEN v_left = 0;
                IF l_seen[i] = l_room[i] AND s_room[l_s[i]] > 0 AND coalesce(q_room[nullif(l_q[i], 0)], 1) > 0 THEN
                    -- All that was read of this lane is taken, and the next of it may stand before those of others.
                    v_is_cut := true;
                    EXIT;
                END IF;
            END IF;
        END LOOP;
        EXIT WHEN NOT v_is_cut;
    END LOOP;
    RETURN v_picked;
END $$;

-- What claims say of their tasks: what starting them does not set anew, and their tokens; column by column, and nothing
-- where a column is empty. An array of rows would be sent with a kilobyte of memory for every field of every row.
CREATE TYPE taskyard.claims_1 AS (
    id bigint[], token bigint[], position bigint[], due_at timestamptz[], created_at timestamptz[], attempt integer[],
    priority smallint[], uuid text[], source text[], queue text[], args text[], timeout_s double precision[],
    retries integer[], crashes integer[], recoveries integer[], key text[], dedupe_slot text[], retry text[],
    progress text[], error text[], checkpoint text[], bucket text[], origin text[]
);

-- Claims begin to read behind what was taken, when some hundreds of tasks have been taken since the last time. Whether it
-- is so, a claim of a few looks now and then, which costs next to nothing. The arrays have an entry a lane. Not where buckets
-- take turns, or tasks are just being put into lines: what is left of one may stand before all that was taken of another.
CREATE FUNCTION taskyard.raise_1(p_queues text[], p_sources text[], h_0 bigint[], h_1 bigint[], h_2 bigint[])
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    WITH old AS MATERIALIZED (
        SELECT l.queue, l.source, m.n, greatest(l.high_0, m.low_0) AS low_0, greatest(l.high_1, m.low_1) AS low_1,
            greatest(l.high_2, m.low_2) AS low_2
        FROM unnest(p_queues, p_sources, h_0, h_1, h_2) AS l(queue, source, high_0, high_1, high_2)
        LEFT JOIN LATERAL (
            SELECT * FROM taskyard.mark AS m WHERE m.queue = l.queue AND m.source = l.source ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        WHERE greatest(l.high_0 - coalesce(m.low_0, 0), l.high_1 - coalesce(m.low_1, 0), l.high_2 - coalesce(m.low_2, 0))
            > {{raise_after}}
            AND NOT EXISTS (SELECT FROM taskyard.queue AS q
                WHERE q.name = l.queue AND (q.ordering = 'buckets' OR q.lined_to IS NOT NULL OR q.lines <> q.ordering))
    ), former AS (
        DELETE FROM taskyard.mark AS m USING old WHERE m.queue = ANY (ARRAY[old.queue])
            AND m.source = ANY (ARRAY[old.source]) AND m.n = ANY (ARRAY[old.n])
    )
    INSERT INTO taskyard.mark SELECT queue, source, nextval('taskyard.seq'), low_0, low_1, low_2 FROM old;
END $$;

-- Start these tasks, in this order: their tokens grow with it, and say it.
CREATE FUNCTION taskyard.start_1(p_first integer, p_node text, p_now timestamptz, p_ids bigint[])
RETURNS taskyard.claims_1 LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_claims taskyard.claims_1;
    v_n integer; v_is_one_lane boolean; v_has_more boolean;
    v_0 bigint; v_1 bigint; v_2 bigint;
    l_queues text[]; l_sources text[]; l_0 bigint[]; l_1 bigint[]; l_2 bigint[];
BEGIN
    IF cardinality(p_ids) = 1 THEN
        -- As it is on a node with little to do, where somebody waits for it: with nothing to put together, sooner done.
        UPDATE taskyard.task AS t
        SET state = 'running', attempt = t.attempt + 1, token = nextval('taskyard.seq'), node = p_node, started_at = p_now,
            updated_at = p_now, note = NULL
        WHERE t.id = p_ids[1]
        RETURNING ARRAY[id], ARRAY[token], ARRAY[position], ARRAY[due_at], ARRAY[created_at], ARRAY[attempt],
            ARRAY[priority], ARRAY[uuid], ARRAY[source], ARRAY[queue], ARRAY[args],
            num_nonnulls(timeout_s, key, dedupe_slot, retry, progress, error, checkpoint, bucket, origin) > 0
                OR retries + crashes + recoveries > 0,
            1, true, CASE WHEN priority = 0 THEN position END, CASE WHEN priority = 1 THEN position END,
            CASE WHEN priority = 2 THEN position END
        INTO v_claims.id, v_claims.token, v_claims.position, v_claims.due_at, v_claims.created_at, v_claims.attempt,
            v_claims.priority, v_claims.uuid, v_claims.source, v_claims.queue, v_claims.args, v_has_more,
            v_n, v_is_one_lane, v_0, v_1, v_2;
    ELSE
        WITH p AS MATERIALIZED (
            SELECT x.id, nextval('taskyard.seq') AS token FROM unnest(p_ids) AS x(id)
        ), started AS (
            UPDATE taskyard.task AS t
            SET state = 'running', attempt = t.attempt + 1, token = p.token, node = p_node, started_at = p_now,
                updated_at = p_now, note = NULL
            FROM p WHERE t.id BETWEEN p.id AND p.id
            RETURNING t.id, t.token, t.position, t.due_at, t.created_at, t.attempt, t.priority, t.uuid, t.source, t.queue,
                t.args, num_nonnulls(t.timeout_s, t.key, t.dedupe_slot, t.retry, t.progress, t.error, t.checkpoint, t.bucket,
                    t.origin) > 0 OR t.retries + t.crashes + t.recoveries > 0 AS has_more
        )
        SELECT array_agg(id), array_agg(token), array_agg(position), array_agg(due_at), array_agg(created_at),
            array_agg(attempt), array_agg(priority), array_agg(uuid), array_agg(source), array_agg(queue), array_agg(args),
            bool_or(has_more), count(*)::integer, min(queue) = max(queue) AND min(source) = max(source),
            max(position) FILTER (WHERE priority = 0), max(position) FILTER (WHERE priority = 1),
            max(position) FILTER (WHERE priority = 2)
        INTO v_claims.id, v_claims.token, v_claims.position, v_claims.due_at, v_claims.created_at, v_claims.attempt,
            v_claims.priority, v_claims.uuid, v_claims.source, v_claims.queue, v_claims.args, v_has_more,
            v_n, v_is_one_lane,
            v_0, v_1, v_2
        FROM started;
    END IF;
    IF v_has_more THEN
        -- What most have nothing of. To look for it in each column would take as long as to start a task.
        SELECT CASE WHEN count(timeout_s) > 0 THEN array_agg(timeout_s ORDER BY ord) END,
            CASE WHEN max(retries) > 0 THEN array_agg(retries ORDER BY ord) END,
            CASE WHEN max(crashes) > 0 THEN array_agg(crashes ORDER BY ord) END,
            CASE WHEN max(recoveries) > 0 THEN array_agg(recoveries ORDER BY ord) END,
            CASE WHEN count(key) > 0 THEN array_agg(key ORDER BY ord) END,
            CASE WHEN count(dedupe_slot) > 0 THEN array_agg(dedupe_slot ORDER BY ord) END,
            CASE WHEN count(retry) > 0 THEN array_agg(retry ORDER BY ord) END,
            CASE WHEN count(progress) > 0 THEN array_agg(progress ORDER BY ord) END,
            CASE WHEN count(error) > 0 THEN array_agg(error ORDER BY ord) END,
            CASE WHEN count(checkpoint) > 0 THEN array_agg(checkpoint ORDER BY ord) END,
            CASE WHEN count(bucket) > 0 THEN array_agg(bucket ORDER BY ord) END,
            CASE WHEN count(origin) > 0 THEN array_agg(origin ORDER BY ord) END
        INTO v_claims.timeout_s, v_claims.retries, v_claims.crashes, v_claims.recoveries, v_claims.key,
            v_claims.dedupe_slot, v_claims.retry, v_claims.progress, v_claims.error, v_claims.checkpoint, v_claims.bucket,
            v_claims.origin
        FROM unnest(v_claims.id) WITH ORDINALITY AS c(id, ord) JOIN taskyard.task AS t ON t.id = ANY (ARRAY[c.id]);
    END IF;
    IF v_is_one_lane THEN
        -- As it mostly is: then there is nothing to be put together.
        WITH told AS (
            INSERT INTO taskyard.event (xid, first, n, kind, queue, source, ats, uuids)
            VALUES (pg_current_xact_id()::text::bigint, p_first, v_n, 'running', v_claims.queue[1], v_claims.source[1],
                ARRAY[p_now], v_claims.uuid)
        )
        INSERT INTO taskyard.tally (queue, state, n)
        VALUES (v_claims.queue[1], 'queued', -v_n), (v_claims.queue[1], 'running', v_n);
        IF random() * {{raise_one_in}} < v_n THEN
            PERFORM taskyard.raise_1(v_claims.queue[1:1], v_claims.source[1:1], ARRAY[v_0], ARRAY[v_1], ARRAY[v_2]);
        END IF;
        RETURN v_claims;
    END IF;
    PERFORM taskyard.tell_1(
        p_first, array_fill('running'::text, ARRAY[v_n]), v_claims.uuid, v_claims.queue, v_claims.source, ARRAY[p_now]);
    WITH lanes AS MATERIALIZED (
        SELECT queue, source, count(*) AS n, max(position) FILTER (WHERE priority = 0) AS high_0,
            max(position) FILTER (WHERE priority = 1) AS high_1, max(position) FILTER (WHERE priority = 2) AS high_2
        FROM unnest(v_claims.queue, v_claims.source, v_claims.priority, v_claims.position)
            AS c(queue, source, priority, position)
        GROUP BY queue, source
    ), counted AS (
        INSERT INTO taskyard.tally (queue, state, n)
        SELECT queue, s.state, sum(n * s.sign) FROM lanes, (VALUES ('queued', -1), ('running', 1)) AS s(state, sign)
        GROUP BY queue, s.state
    )
    SELECT array_agg(queue), array_agg(source), array_agg(high_0), array_agg(high_1), array_agg(high_2)
    INTO l_queues, l_sources, l_0, l_1, l_2 FROM lanes;
    PERFORM taskyard.raise_1(l_queues, l_sources, l_0, l_1, l_2);
    RETURN v_claims;
END $$;

-- Store one new task that starts at once, as `add_1` and `start_1` would in turn: four rows are written, not seven, and none
-- is left to be vacuumed. Only if nothing else could come of it: its queue goes by one priority alone, without
-- a limit, and nothing in it waits to start. Else nothing is done, and the claim is null.
CREATE FUNCTION taskyard.begin_1(p_first integer, p_node text, p_now timestamptz, a taskyard.new_1)
RETURNS taskyard.claims_1 LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_claim taskyard.claims_1;
    v_queue text := a.queue[1]; v_source text := a.source[1]; v_priority smallint := a.priority[1];
    v_id bigint; v_token bigint;
    v_nothing text;
BEGIN
    WITH begun AS (
        INSERT INTO taskyard.task (
            id, token, position, due_at, created_at, updated_at, started_at, timeout_s, attempt, priority, parked, state,
            uuid, source, queue, args, retry, node, bucket, origin)
        SELECT n.id, nextval('taskyard.seq'), n.id * {{gap}}, a.due_at[1], a.created_at[1], p_now, p_now, a.timeout_s[1], 1,
            v_priority, false, 'running', a.uuid[1], v_source, v_queue, a.args[1], a.retry[1], p_node, a.bucket[1],
            a.origin[1]
        FROM (SELECT nextval('taskyard.seq') AS id OFFSET 0) AS n
        WHERE NOT EXISTS (
            SELECT FROM taskyard.queue
            WHERE name = v_queue AND (state <> 'running' OR ordering <> 'priority' OR concurrency IS NOT NULL)
        ) AND NOT EXISTS (
            SELECT FROM taskyard.lane AS l
            LEFT JOIN LATERAL (
                SELECT * FROM taskyard.mark AS m WHERE m.queue = l.queue AND m.source = l.source ORDER BY m.n DESC LIMIT 1
            ) AS m ON true
            WHERE l.queue = v_queue AND (
                v_priority <> 0 AND l.low_0 IS NOT NULL OR v_priority <> 1 AND l.low_1 IS NOT NULL
                OR v_priority <> 2 AND l.low_2 IS NOT NULL OR (
                    SELECT t.id FROM taskyard.task AS t
                    WHERE t.queue = l.queue AND t.source = l.source AND t.state = 'queued' AND NOT t.parked
                        AND t.priority = v_priority
                        AND t.position >= coalesce(CASE v_priority WHEN 0 THEN m.low_0 WHEN 1 THEN m.low_1 ELSE m.low_2 END, 0)
                    ORDER BY t.position LIMIT 1) IS NOT NULL))
        RETURNING id, token
    ), told AS (
        INSERT INTO taskyard.event (xid, first, n, kind, queue, source, ats, uuids)
        SELECT pg_current_xact_id()::text::bigint, e.first, 1, e.kind, v_queue, v_source, ARRAY[p_now], a.uuid
        FROM begun, (VALUES (p_first, 'submitted'), (p_first + 1, 'running')) AS e(first, kind)
    ), counted AS (
        INSERT INTO taskyard.tally (queue, state, n) SELECT v_queue, 'running', 1 FROM begun
    )
    SELECT id, token INTO v_id, v_token FROM begun;
    IF v_id IS NULL THEN
        RETURN v_claim;
    END IF;
    v_nothing := taskyard.check_uuids_1(a.uuid);
    v_claim := ROW(ARRAY[v_id], ARRAY[v_token], ARRAY[v_id * {{gap}}], a.due_at, a.created_at, ARRAY[1], a.priority, a.uuid,
        a.source, a.queue, a.args, a.timeout_s, NULL, NULL, NULL, NULL, NULL, a.retry, NULL, NULL, NULL, a.bucket, a.origin);
    RETURN v_claim;
END $$;
