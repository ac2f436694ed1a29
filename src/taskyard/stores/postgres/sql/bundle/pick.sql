-- Which tasks start next.

-- The first task of a lane from a place on, or of a line.
CREATE OR REPLACE FUNCTION taskyard.head(
    p_queue text, p_lane text, p_level integer, p_line text, p_from bigint,
    OUT id bigint, OUT place bigint, OUT due_at timestamptz, OUT lane text, OUT can_start boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    IF p_line IS NULL THEN
        SELECT t.id, t.position, t.due_at, t.lane, true INTO id, place, due_at, lane, can_start
        FROM taskyard.task AS t WHERE t.queue = p_queue AND t.lane = p_lane AND t.state = 'queued' AND NOT t.is_parked
            AND t.priority = p_level::smallint AND t.position >= p_from
        ORDER BY t.position LIMIT 1;
    ELSE
        SELECT t.id, t.position, t.due_at, t.lane, t.state = 'queued' AND NOT t.is_parked
        INTO id, place, due_at, lane, can_start
        FROM taskyard.task AS t WHERE t.queue = p_queue AND t.fifo_bucket = p_line AND t.fifo_bucket IS NOT NULL
            AND (t.state IN ('queued', 'paused') OR t.blocked_by IS NOT NULL) AND t.position >= p_from
        ORDER BY t.position LIMIT 1;
    END IF;
END $$;

-- What goes next over those of these queues that are running: each offers by its own order, the best offer is taken, one at
-- a time. As `taskyard.model.picking` says it. Of one queue that goes by priority, as it mostly is, some of each lane are read
-- at once; then what goes next needs no query. A preview does not save whose turn it is then, and so changes nothing.
CREATE OR REPLACE FUNCTION taskyard.pick_ordered(
    p_now timestamptz, p_queues text[], p_total integer, p_lanes text[], p_rooms integer[], p_others integer,
    p_is_preview boolean
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
    e_q integer[]; e_level integer[]; e_lane text[]; e_line text[]; e_s integer[]; e_id bigint[]; e_position bigint[];
    e_due timestamptz[]; e_can boolean[]; e_is_last boolean[];
    -- Of one queue, one entry a priority: the entries that are left of it, and from which place on it is read.
    n_at integer[]; n_to integer[]; n_from bigint[] := ARRAY[NULL, NULL, NULL];
    v_is_one boolean;
    v_left integer;
    v_long text[] := '{}';  -- the lanes, by priority and name, of which more is taken than is read at first
    v_picked bigint[] := '{}';
    v_row record; v_head record;
    v_q integer; v_e integer; v_level integer; v_top integer;
    h_e integer[]; h_due timestamptz[]; h_1 timestamptz; h_2 timestamptz;
    p_1 integer; p_2 integer;
BEGIN
    FOR v_row IN
        SELECT u.name, coalesce(q.ordering, 'priority') AS ordering,
            CASE WHEN q.concurrency IS NOT NULL THEN taskyard.free_room(u.name, q.concurrency, p_is_preview) END AS room,
            CASE WHEN q.name IS NULL THEN 8 ELSE q.starve_after END AS starve_after,
            CASE WHEN q.name IS NULL THEN interval '600 seconds' ELSE q.starve_wait END AS starve_wait, s.*
        FROM (SELECT DISTINCT name FROM unnest(p_queues) AS n(name)) AS u
        LEFT JOIN taskyard.queue AS q ON q.name = u.name LEFT JOIN taskyard.fairness AS s ON s.queue = u.name
        WHERE coalesce(q.state, 'running') = 'running'
        ORDER BY u.name
    LOOP
        CONTINUE WHEN v_row.room <= 0;
        q_name := q_name || v_row.name; q_order := q_order || v_row.ordering; q_room := q_room || v_row.room;
        q_after := q_after || v_row.starve_after; q_wait := q_wait || v_row.starve_wait;
        q_passed_1 := q_passed_1 || coalesce(v_row.passed_over_1, 0); q_passed_2 := q_passed_2 || coalesce(v_row.passed_over_2, 0);
        q_let_1 := q_let_1 || v_row.last_favored_1; q_let_2 := q_let_2 || v_row.last_favored_2; q_bucket := q_bucket || v_row.bucket;
        q_is_changed := q_is_changed || false;
    END LOOP;
    v_is_one := cardinality(q_name) = 1 AND q_order[1] = 'priority';
    <<reading>>
    LOOP
        v_left := p_total - cardinality(v_picked);
        SELECT array_agg(f.i), array_agg(f.lane), array_agg(f.fifo_bucket), array_agg(f.level), array_agg(f.id),
            array_agg(f.position), array_agg(f.due_at), array_agg(f.can_start), array_agg(f.nth = f.room),
            array_agg(coalesce(array_position(p_lanes, f.lane), cardinality(s_room))),
            ARRAY[count(*) FILTER (WHERE f.level < 1), count(*) FILTER (WHERE f.level < 2), count(*)]
        INTO e_q, e_lane, e_line, e_level, e_id, e_position, e_due, e_can, e_is_last, e_s, n_to
        FROM (
            SELECT q.i, l.lane, NULL::text AS fifo_bucket, p.level, t.id, t.position, t.due_at, true AS can_start, t.nth,
                r.room
            FROM unnest(q_name, q_order) WITH ORDINALITY AS q(name, ordering, i)
            JOIN taskyard.lane AS l ON l.queue = q.name
            LEFT JOIN LATERAL (
                SELECT * FROM taskyard.watermark AS m WHERE m.queue = l.queue AND m.lane = l.lane ORDER BY m.n DESC LIMIT 1
            ) AS m ON true
            CROSS JOIN LATERAL (VALUES (0, l.low_0, m.low_0), (1, l.low_1, m.low_1), (2, l.low_2, m.low_2))
                AS p(level, was, low)
            CROSS JOIN LATERAL (SELECT CASE WHEN NOT v_is_one THEN 1 WHEN p.level || l.lane = ANY (v_long) THEN v_left
                ELSE least({{read_ahead}}, v_left) END AS room) AS r
            CROSS JOIN LATERAL (
                SELECT id, position, due_at, row_number() OVER (ORDER BY t.position) AS nth FROM taskyard.task AS t
                WHERE t.queue = l.queue AND t.lane = l.lane AND t.state = 'queued' AND NOT t.is_parked
                    AND t.priority = p.level::smallint AND t.position >= greatest(coalesce(p.low, 0), n_from[p.level + 1])
                ORDER BY t.position LIMIT r.room
            ) AS t
            WHERE q.ordering = 'priority' AND p.was IS NOT NULL
                AND s_room[coalesce(array_position(p_lanes, l.lane), cardinality(s_room))] > 0
            UNION ALL
            SELECT q.i, h.lane, b.fifo_bucket, 1, h.id, h.place, h.due_at, h.can_start, 1, 1
            FROM unnest(q_name, q_order) WITH ORDINALITY AS q(name, ordering, i)
            CROSS JOIN LATERAL (
                WITH RECURSIVE named (fifo_bucket) AS (
                    (SELECT t.fifo_bucket FROM taskyard.task AS t WHERE t.queue = q.name AND t.fifo_bucket IS NOT NULL
                        AND (t.state IN ('queued', 'paused') OR t.blocked_by IS NOT NULL) ORDER BY t.fifo_bucket LIMIT 1)
                    UNION ALL
                    SELECT (SELECT t.fifo_bucket FROM taskyard.task AS t WHERE t.queue = q.name AND t.fifo_bucket IS NOT NULL
                        AND (t.state IN ('queued', 'paused') OR t.blocked_by IS NOT NULL)
                        AND t.fifo_bucket > named.fifo_bucket ORDER BY t.fifo_bucket LIMIT 1)
                    FROM named WHERE named.fifo_bucket IS NOT NULL
                )
                SELECT named.fifo_bucket FROM named WHERE named.fifo_bucket IS NOT NULL
            ) AS b
            CROSS JOIN LATERAL taskyard.head(q.name, NULL, 1, b.fifo_bucket, {{lowest}}) AS h
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
                        SELECT e.q, e.e, e.position, e.id, e.fifo_bucket,
                            CASE WHEN q_order[e.q] = 'priority' THEN e.level ELSE 1 END AS bid
                        FROM unnest(e_q, e_level, e_s, e_id, e_position, e_can, e_line) WITH ORDINALITY
                            AS e(q, level, s, id, position, can_start, fifo_bucket, e)
                        WHERE e.id IS NOT NULL AND e.can_start AND s_room[e.s] > 0 AND coalesce(q_room[e.q], 1) > 0
                    ) AS c
                    ORDER BY c.q, q_order[c.q] = 'buckets' AND coalesce(c.fifo_bucket COLLATE "C" <= q_bucket[c.q], false),
                        CASE WHEN q_order[c.q] = 'buckets' THEN c.fifo_bucket END COLLATE "C", c.bid, c.position, c.id
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
                    v_long := v_long || (v_level || e_lane[v_e]);
                    CONTINUE reading;
                END IF;
            ELSE
                SELECT * INTO v_head
                FROM taskyard.head(q_name[v_q], e_lane[v_e], e_level[v_e], e_line[v_e], e_position[v_e] + 1);
                e_id[v_e] := v_head.id; e_position[v_e] := v_head.place; e_due[v_e] := v_head.due_at;
                e_can[v_e] := v_head.can_start;
                e_s[v_e] := coalesce(array_position(p_lanes, v_head.lane), cardinality(s_room));
            END IF;
        END LOOP;
        EXIT;
    END LOOP;
    IF p_is_preview THEN
        RETURN v_picked;
    END IF;
    INSERT INTO taskyard.fairness AS s
    SELECT u.name, u.passed_over_1, u.passed_over_2, u.let_1, u.let_2, u.bucket
    FROM unnest(q_name, q_passed_1, q_passed_2, q_let_1, q_let_2, q_bucket, q_is_changed)
        AS u(name, passed_over_1, passed_over_2, let_1, let_2, bucket, is_changed)
    WHERE u.is_changed
    ON CONFLICT (queue) DO UPDATE SET passed_over_1 = excluded.passed_over_1, passed_over_2 = excluded.passed_over_2,
        last_favored_1 = excluded.last_favored_1, last_favored_2 = excluded.last_favored_2, bucket = excluded.bucket;
    RETURN v_picked;
END $$;

-- What goes next over those of these queues that are running, as far as there is room for it. By priority and place, as long
-- as nothing else counts: neither the order of a queue, nor whether a priority has been passed over for too long. A preview
-- changes nothing.
CREATE OR REPLACE FUNCTION taskyard.pick(
    p_now timestamptz, p_queues text[], p_total integer, p_lanes text[], p_rooms integer[], p_others integer,
    p_is_preview boolean
) RETURNS bigint[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_lane record;
    v_picked bigint[] := '{}';
    v_left integer := p_total;
    -- One entry a lane: its queue, name and marks, and which of the rooms below its tasks take from.
    l_queue text[] := '{}'; l_lane text[] := '{}'; l_0 bigint[] := '{}'; l_1 bigint[] := '{}'; l_2 bigint[] := '{}';
    l_q integer[] := '{}'; l_s integer[] := '{}';
    l_room integer[]; l_seen integer[];
    q_room integer[] := '{}';
    s_room integer[] := p_rooms || p_others;
    v_lanes integer; v_share integer; v_is_cut boolean;
    v_queue text; v_room bigint;
    v_levels integer;  -- the priorities that this queue has had, a bit each; also of lanes without room: what is remembered
                       -- of who was passed over changes with every start
    v_priority integer := 0; v_position bigint := -9223372036854775807;
    i integer;
BEGIN
    FOR v_lane IN
        SELECT l.queue, l.lane, q.concurrency, coalesce(q.ordering, 'priority') AS ordering,
            q.name IS NOT NULL AND q.starve_after IS NULL AND q.starve_wait IS NULL AS may_starve,
            coalesce(array_position(p_lanes, l.lane), cardinality(s_room)) AS s,
            CASE WHEN l.low_0 = 0 THEN coalesce(m.low_0, 0) END AS low_0,
            CASE WHEN l.low_1 = 0 THEN coalesce(m.low_1, 0) END AS low_1,
            CASE WHEN l.low_2 = 0 THEN coalesce(m.low_2, 0) END AS low_2
        FROM taskyard.lane AS l LEFT JOIN taskyard.queue AS q ON q.name = l.queue
        LEFT JOIN LATERAL (
            SELECT * FROM taskyard.watermark AS m WHERE m.queue = l.queue AND m.lane = l.lane
                AND s_room[coalesce(array_position(p_lanes, l.lane), cardinality(s_room))] > 0
            ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        WHERE l.queue = ANY (p_queues) AND coalesce(q.state, 'running') = 'running'
        ORDER BY l.queue, l.lane
    LOOP
        IF v_queue IS DISTINCT FROM v_lane.queue THEN
            v_queue := v_lane.queue; v_levels := 0;
            v_room := CASE WHEN v_lane.concurrency IS NOT NULL THEN taskyard.free_room(v_queue, v_lane.concurrency, p_is_preview) END;
            IF v_room > 0 THEN
                q_room := q_room || v_room::integer;
            END IF;
        END IF;
        v_levels := v_levels | (v_lane.low_0 IS NOT NULL)::integer
            | 2 * (v_lane.low_1 IS NOT NULL)::integer | 4 * (v_lane.low_2 IS NOT NULL)::integer;
        IF v_lane.ordering <> 'priority' OR NOT v_lane.may_starve AND v_levels NOT IN (0, 1, 2, 4) THEN
            RETURN taskyard.pick_ordered(p_now, p_queues, p_total, p_lanes, p_rooms, p_others, p_is_preview);
        END IF;
        CONTINUE WHEN v_room <= 0 OR s_room[v_lane.s] <= 0;
        l_queue := l_queue || v_lane.queue; l_lane := l_lane || v_lane.lane;
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
                 WHERE queue = l_queue[1] AND lane = l_lane[1] AND state = 'queued' AND NOT is_parked AND priority = 0
                    AND position >= l_0[1] ORDER BY position LIMIT v_share)
                UNION ALL
                (SELECT id, priority, position FROM taskyard.task
                 WHERE queue = l_queue[1] AND lane = l_lane[1] AND state = 'queued' AND NOT is_parked AND priority = 1
                    AND position >= l_1[1] ORDER BY position LIMIT v_share)
                UNION ALL
                (SELECT id, priority, position FROM taskyard.task
                 WHERE queue = l_queue[1] AND lane = l_lane[1] AND state = 'queued' AND NOT is_parked AND priority = 2
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
            FROM unnest(l_queue, l_lane, l_0, l_1, l_2, l_room) WITH ORDINALITY
                AS l(queue, lane, low_0, low_1, low_2, room, i)
            CROSS JOIN LATERAL (
                SELECT * FROM (
                    (SELECT id, priority, position FROM taskyard.task
                     WHERE queue = l.queue AND lane = l.lane AND state = 'queued' AND NOT is_parked AND priority = 0
                        AND v_priority = 0 AND position >= l.low_0 AND position > v_position
                     ORDER BY position LIMIT l.room)
                    UNION ALL
                    (SELECT id, priority, position FROM taskyard.task
                     WHERE queue = l.queue AND lane = l.lane AND state = 'queued' AND NOT is_parked AND priority = 1
                        AND v_priority <= 1 AND position >= l.low_1
                        AND position > CASE WHEN v_priority = 1 THEN v_position ELSE -9223372036854775807 END
                     ORDER BY position LIMIT l.room)
                    UNION ALL
                    (SELECT id, priority, position FROM taskyard.task
                     WHERE queue = l.queue AND lane = l.lane AND state = 'queued' AND NOT is_parked AND priority = 2
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
