-- Lanes and their watermarks, parked tasks, and the room that a queue has.

-- The lane of a task: its consumer, and what it requires.
CREATE OR REPLACE FUNCTION taskyard.lane_of(p_consumer text, p_requires text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_requires IS NULL THEN p_consumer ELSE p_consumer || {{lane_separator}} || p_requires END
$$;

-- These tasks may have become startable: their lanes must not be read from above them. Of a lane that is not there, or has had
-- none of a priority, nothing else of it may start.
CREATE OR REPLACE FUNCTION taskyard.lower_watermarks(p_ids bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(cardinality(p_ids), 0) = 0 THEN
        RETURN;
    END IF;
    WITH t AS MATERIALIZED (
        SELECT queue, lane, min(position) FILTER (WHERE priority = 0) AS low_0,
            min(position) FILTER (WHERE priority = 1) AS low_1, min(position) FILTER (WHERE priority = 2) AS low_2
        FROM (SELECT * FROM taskyard.task WHERE id = ANY (p_ids) OFFSET 0) AS x WHERE state = 'queued' AND NOT is_parked
        GROUP BY queue, lane
    ), lanes AS (
        INSERT INTO taskyard.lane AS l
        SELECT queue, lane, low_0 * 0, low_1 * 0, low_2 * 0 FROM t ORDER BY queue, lane  -- 0 where there is one
        ON CONFLICT (queue, lane) DO UPDATE SET low_0 = coalesce(l.low_0, excluded.low_0),
            low_1 = coalesce(l.low_1, excluded.low_1), low_2 = coalesce(l.low_2, excluded.low_2)
        WHERE coalesce(l.low_0, excluded.low_0) IS DISTINCT FROM l.low_0
            OR coalesce(l.low_1, excluded.low_1) IS DISTINCT FROM l.low_1
            OR coalesce(l.low_2, excluded.low_2) IS DISTINCT FROM l.low_2
    ), old AS MATERIALIZED (
        SELECT t.queue, t.lane, m.n,
            CASE WHEN l.low_0 IS NULL THEN t.low_0 ELSE least(t.low_0, coalesce(m.low_0, 0)) END AS low_0,
            CASE WHEN l.low_1 IS NULL THEN t.low_1 ELSE least(t.low_1, coalesce(m.low_1, 0)) END AS low_1,
            CASE WHEN l.low_2 IS NULL THEN t.low_2 ELSE least(t.low_2, coalesce(m.low_2, 0)) END AS low_2
        FROM t LEFT JOIN taskyard.lane AS l ON l.queue = ANY (ARRAY[t.queue]) AND l.lane = ANY (ARRAY[t.lane])
        LEFT JOIN LATERAL (
            SELECT * FROM taskyard.watermark AS m WHERE m.queue = t.queue AND m.lane = t.lane ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        WHERE t.low_0 < coalesce(m.low_0, 0) OR t.low_1 < coalesce(m.low_1, 0) OR t.low_2 < coalesce(m.low_2, 0)
            OR l.low_0 IS NULL AND t.low_0 IS NOT NULL OR l.low_1 IS NULL AND t.low_1 IS NOT NULL
            OR l.low_2 IS NULL AND t.low_2 IS NOT NULL
    ), gone AS (
        DELETE FROM taskyard.watermark AS m USING old WHERE m.queue = ANY (ARRAY[old.queue])
            AND m.lane = ANY (ARRAY[old.lane]) AND m.n = ANY (ARRAY[old.n])
    )
    INSERT INTO taskyard.watermark SELECT queue, lane, nextval('taskyard.seq'), low_0, low_1, low_2 FROM old;
END $$;

-- Of the tasks waiting with a key, exactly the first ones that fit under its limit may start. Where
-- places alone count in a queue, or will as soon as all wait by them, they do so among those of a key.
CREATE OR REPLACE FUNCTION taskyard.update_parked(p_queues text[], p_keys text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_freed bigint[];
BEGIN
    WITH k AS (
        SELECT d.queue, d.key, coalesce(q.per_key, 1) AS per_key,
            coalesce(q.ordering <> 'priority' OR q.target_ordering IS NOT NULL AND q.rollout_task_id IS NULL, false) AS by_place,
            (SELECT count(*) FROM taskyard.task AS t
             WHERE t.queue = d.queue AND t.key = d.key AND t.key IS NOT NULL AND t.state IN ('running', 'retrying')
            ) AS busy
        FROM (SELECT DISTINCT u.queue, u.key FROM unnest(p_queues, p_keys) AS u(queue, key)) AS d
        LEFT JOIN taskyard.queue AS q ON q.name = d.queue
    ), placed AS (
        SELECT w.id, w.is_parked, row_number() OVER (PARTITION BY k.queue, k.key
                ORDER BY CASE WHEN k.by_place THEN 0 ELSE w.priority END, w.position)
            > k.per_key - k.busy AS should
        FROM k CROSS JOIN LATERAL (
            (SELECT t.id, t.is_parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.is_parked < true)
            UNION ALL
            (SELECT t.id, t.is_parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.is_parked
                AND NOT k.by_place
             ORDER BY t.priority, t.position LIMIT k.per_key)
            UNION ALL
            (SELECT t.id, t.is_parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.is_parked
                AND k.by_place AND t.priority = 0 ORDER BY t.position LIMIT k.per_key)
            UNION ALL
            (SELECT t.id, t.is_parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.is_parked
                AND k.by_place AND t.priority = 1 ORDER BY t.position LIMIT k.per_key)
            UNION ALL
            (SELECT t.id, t.is_parked, t.priority, t.position FROM taskyard.task AS t
             WHERE t.queue = k.queue AND t.key = k.key AND t.key IS NOT NULL AND t.state = 'queued' AND t.is_parked
                AND k.by_place AND t.priority = 2 ORDER BY t.position LIMIT k.per_key)
        ) AS w
    ), changed AS (
        UPDATE taskyard.task AS t SET is_parked = placed.should FROM placed
        WHERE t.id = ANY (ARRAY[placed.id]) AND placed.is_parked <> placed.should
        RETURNING t.id, t.is_parked
    )
    SELECT array_agg(id) INTO v_freed FROM changed WHERE NOT is_parked;
    IF v_freed IS NOT NULL THEN
        PERFORM taskyard.lower_watermarks(v_freed);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION taskyard.fifo_bucket_of(p_ordering text, p_bucket text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE p_ordering WHEN 'fifo' THEN '' WHEN 'buckets' THEN coalesce(p_bucket, '') END
$$;

-- The queues where a task of these lanes, or of any lane, may start: only those are locked for a claim. A process that adds
-- to another queue meanwhile tells of it. Of very many queues the answer is `p_limit`, drawn by lot: the server has room for
-- some thousands of locks.
CREATE OR REPLACE FUNCTION taskyard.claimable_queues(p_lanes text[], p_all boolean, p_limit integer DEFAULT {{locked_at_most}})
RETURNS text[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    RETURN ARRAY(
        SELECT l.queue FROM taskyard.lane AS l
        LEFT JOIN LATERAL (
            SELECT * FROM taskyard.watermark AS m WHERE m.queue = l.queue AND m.lane = l.lane ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        CROSS JOIN LATERAL (
            VALUES (0::smallint, l.low_0, m.low_0), (1::smallint, l.low_1, m.low_1), (2::smallint, l.low_2, m.low_2)
        ) AS p(level, was, low)
        WHERE (p_all OR l.lane = ANY (p_lanes)) AND p.was IS NOT NULL AND (
            SELECT t.id FROM taskyard.task AS t
            WHERE t.queue = l.queue AND t.lane = l.lane AND t.state = 'queued' AND NOT t.is_parked
                AND t.priority = p.level AND t.position >= coalesce(p.low, 0)
            ORDER BY t.position LIMIT 1) IS NOT NULL
        GROUP BY l.queue ORDER BY random() LIMIT p_limit);
END $$;

-- How many more of a queue with a limit may start. What runs is not counted in the table itself: what ran and cannot be
-- vacuumed would be walked over. A count that is wrong is set right, unless this is a preview.
CREATE OR REPLACE FUNCTION taskyard.free_room(p_queue text, p_concurrency integer, p_is_preview boolean) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_room bigint;
BEGIN
    SELECT p_concurrency - coalesce(sum(t.n), 0) INTO v_room FROM taskyard.state_count AS t
    WHERE t.queue = p_queue AND t.state = 'running'
        AND t.xid >= (SELECT state_count_from FROM taskyard.compaction ORDER BY n DESC LIMIT 1);
    IF v_room <= 0 AND (SELECT token FROM taskyard.task WHERE queue = p_queue AND state = 'running'
                        ORDER BY token DESC LIMIT 1) IS NULL THEN
        -- Whatever went wrong once, a queue must not stand still for ever.
        IF NOT p_is_preview THEN
            INSERT INTO taskyard.state_count VALUES (p_queue, 'running', v_room - p_concurrency);
        END IF;
        v_room := p_concurrency;
    END IF;
    RETURN v_room;
END $$;

-- Claims begin to read behind what was taken, when some hundreds of tasks have been taken since the last time. Whether it
-- is so, a claim of a few looks now and then, which costs next to nothing. The arrays have an entry a lane. Not where buckets
-- take turns, or tasks are just being put into lines: what is left of one may stand before all that was taken of another.
CREATE OR REPLACE FUNCTION taskyard.raise_watermarks(p_queues text[], p_lanes text[], h_0 bigint[], h_1 bigint[], h_2 bigint[])
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    WITH old AS MATERIALIZED (
        SELECT l.queue, l.lane, m.n, greatest(l.high_0, m.low_0) AS low_0, greatest(l.high_1, m.low_1) AS low_1,
            greatest(l.high_2, m.low_2) AS low_2
        FROM unnest(p_queues, p_lanes, h_0, h_1, h_2) AS l(queue, lane, high_0, high_1, high_2)
        LEFT JOIN LATERAL (
            SELECT * FROM taskyard.watermark AS m WHERE m.queue = l.queue AND m.lane = l.lane ORDER BY m.n DESC LIMIT 1
        ) AS m ON true
        WHERE greatest(l.high_0 - coalesce(m.low_0, 0), l.high_1 - coalesce(m.low_1, 0), l.high_2 - coalesce(m.low_2, 0))
            > {{raise_after}}
            AND NOT EXISTS (SELECT FROM taskyard.queue AS q
                WHERE q.name = l.queue AND (q.ordering = 'buckets' OR q.rollout_task_id IS NOT NULL OR q.target_ordering <> q.ordering))
    ), former AS (
        DELETE FROM taskyard.watermark AS m USING old WHERE m.queue = ANY (ARRAY[old.queue])
            AND m.lane = ANY (ARRAY[old.lane]) AND m.n = ANY (ARRAY[old.n])
    )
    INSERT INTO taskyard.watermark SELECT queue, lane, nextval('taskyard.seq'), low_0, low_1, low_2 FROM old;
END $$;
