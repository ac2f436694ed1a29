-- Commands of people about tasks.

-- What a decision about a task rests on. While it runs, others write down what its run says of itself: that makes it no
-- other task. In all other states whatever is written does.
CREATE OR REPLACE FUNCTION taskyard.row_version_1(p_token bigint, p_cancel text, p_written xid) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_token IS NULL THEN p_written::text
        ELSE 'runs ' || p_token || CASE WHEN p_cancel IS NULL THEN '' ELSE ' canceling' END END
$$;

-- Of the tasks that are to be sent again, those for which it no longer holds what was decided: nobody else stands for
-- their work, and they wait for as many as was thought, of which none has ended so that they would wait in vain.
CREATE OR REPLACE FUNCTION taskyard.find_not_revivable(p_changes json, v_again bigint[], p_now timestamptz) RETURNS bigint[]
LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(v_again) = 0 THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY(
        SELECT j.id FROM json_to_recordset(p_changes) AS j(id bigint, how text, open_dependencies integer)
        JOIN taskyard.finished AS e ON e.id = ANY (ARRAY[j.id])
        LEFT JOIN taskyard.task_relation AS t ON t.id = ANY (ARRAY[j.id])
        CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE a.id = ANY (v_again)
                    OR (SELECT p.id FROM taskyard.task AS p WHERE p.id = d.parent) IS NOT NULL) AS open_dependencies,
                bool_or(a.state <> 'completed' AND a.id <> ALL (v_again)) AS is_lost
            FROM taskyard.dependency AS d LEFT JOIN taskyard.finished AS a ON a.id = ANY (ARRAY[d.parent])
            WHERE d.child = ANY (ARRAY[j.id])
        ) AS w
        LEFT JOIN LATERAL taskyard.dedupe_holder_1(t.dedupe_key, p_now) AS h ON t.dedupe_key IS NOT NULL
        WHERE j.id = ANY (v_again) AND (
            h.uuid IS DISTINCT FROM e.uuid AND h.uuid IS NOT NULL
            OR w.open_dependencies <> coalesce(j.open_dependencies, 0)
            OR w.is_lost AND t.on_failure IS DISTINCT FROM 'ignore'));
END $$;

-- The tasks among the changes that are no longer the version that was looked at, and those whose change rests on one of
-- them: that are put beside it, or sent again with it.
CREATE OR REPLACE FUNCTION taskyard.find_stale(p_changes json, p_now timestamptz) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_stale bigint[]; v_more bigint[];
BEGIN
    v_more := ARRAY(
        SELECT j.id FROM json_to_recordset(p_changes) AS j(id bigint, version text, how text, open_dependencies integer)
        WHERE j.version IS DISTINCT FROM CASE WHEN j.how = 'again'
            THEN (SELECT e.xmin::text FROM taskyard.finished AS e WHERE e.id = j.id)
            ELSE (SELECT taskyard.row_version_1(t.token, t.cancel, t.xmin) FROM taskyard.task AS t WHERE t.id = j.id) END
        -- Who is held hears of the ends of others, and stays the version that it is.
        OR j.how = 'change' AND j.open_dependencies <> coalesce((SELECT x.open_dependencies FROM taskyard.task_relation AS x WHERE x.id = j.id), 0));
    v_stale := v_more;
    LOOP
        v_more := ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint, beside bigint)
            WHERE beside = ANY (v_stale) AND id <> ALL (v_stale))
            || taskyard.find_not_revivable(p_changes, ARRAY(
                SELECT id FROM json_to_recordset(p_changes) AS j(id bigint, how text)
                WHERE how = 'again' AND id <> ALL (v_stale)), p_now);
        EXIT WHEN cardinality(v_more) = 0;
        v_stale := v_stale || v_more;
    END LOOP;
    RETURN v_stale;
END $$;

-- Carry out what was decided about these tasks, as far as each is still the version that was looked at; `stale` are the
-- others, of which nothing happens. With `p_whole` nothing happens at all if there are any. `how`: 'change' keeps the task
-- here, in its state or another; 'end' ends it, 'again' sends an ended one again, 'look' only looks. A note that is null
-- stays what it is. One with `beside` is put right before or after that task. `places` says where each stands afterwards.
-- Those that wait for one that ends hear of it; who is sent again takes its slot, and waits, again. `p_audit` is the audit
-- entry of the command, or null; `p_matched` of its tasks were looked at.
CREATE OR REPLACE PROCEDURE taskyard.apply_commands_1(
    p_queues text[], p_changes json, e_kinds text[], e_uuids text[], e_queues text[], e_sources text[], e_details text[],
    p_now timestamptz, p_whole boolean, p_audit json, p_matched bigint, INOUT stale text[], INOUT places json, INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_keys text[]; v_key_queues text[];
    v_ids bigint[] := ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint));
    v_again bigint[] := ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint, how text) WHERE how = 'again');
    v_stale bigint[];
    n_kinds text[]; n_uuids text[]; n_queues text[]; n_sources text[]; n_details text[];  -- those of whom nobody has heard yet
    v_row record;
    v_done record;
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    p_queues := p_queues || taskyard.queues_of_dependents(v_ids) || ARRAY(
        SELECT p.queue FROM taskyard.dependency AS d JOIN taskyard.task AS p ON p.id = ANY (ARRAY[d.parent])
        WHERE d.child = ANY (v_again));
    PERFORM taskyard.lock_queues(p_queues);
    PERFORM taskyard.lock_slots(ARRAY(SELECT dedupe_key FROM taskyard.task_relation WHERE id = ANY (v_again)));
    -- What has ended is pruned without a queue's lock.
    PERFORM FROM taskyard.finished WHERE id = ANY (v_again) ORDER BY id FOR UPDATE;
    v_stale := taskyard.find_stale(p_changes, p_now);
    stale := ARRAY(SELECT uuid FROM json_to_recordset(p_changes) AS j(id bigint, uuid text) WHERE id = ANY (v_stale));
    IF cardinality(v_stale) > 0 THEN
        IF p_whole OR cardinality(v_stale) = cardinality(v_ids) THEN
            RETURN;
        END IF;
        p_changes := (SELECT json_agg(c) FROM json_array_elements(p_changes) AS c WHERE (c ->> 'id')::bigint <> ALL (v_stale));
        v_ids := ARRAY(SELECT id FROM json_to_recordset(p_changes) AS j(id bigint));
        v_again := ARRAY(SELECT id FROM unnest(v_again) AS a(id) WHERE id <> ALL (v_stale));
        SELECT array_agg(kind ORDER BY ord), array_agg(uuid ORDER BY ord), array_agg(queue ORDER BY ord),
            array_agg(consumer ORDER BY ord), array_agg(detail ORDER BY ord)
        INTO e_kinds, e_uuids, e_queues, e_sources, e_details
        FROM unnest(e_kinds, e_uuids, e_queues, e_sources, e_details) WITH ORDINALITY
            AS e(kind, uuid, queue, consumer, detail, ord)
        WHERE uuid <> ALL (stale);
    END IF;
    SELECT array_agg('submitted'::text), array_agg(t.uuid), array_agg(t.queue), array_agg(t.consumer),
        array_agg(taskyard.submit_detail('scheduled', t.extra))
    INTO n_kinds, n_uuids, n_queues, n_sources, n_details
    FROM json_to_recordset(p_changes) AS j(id bigint, how text) JOIN taskyard.task AS t ON t.id = ANY (ARRAY[j.id])
    WHERE j.how IN ('change', 'end') AND t.position = 0;
    WITH j AS MATERIALIZED (
        SELECT * FROM json_to_recordset(p_changes) AS j(
            id bigint, version text, how text, priority smallint, hold text, cancel text, blocked_by text,
            blocked_at timestamptz, note text, was text, state text, error text, due_at timestamptz, to_head boolean,
            to_tail boolean, ord integer, slot text, aside boolean)
    ), placed AS MATERIALIZED (
        -- The last to be put at the head stands first.
        SELECT o.id, CASE WHEN to_head THEN -1 ELSE 1 END * nextval('taskyard.seq') * {{gap}} AS place
        FROM (SELECT id, to_head FROM j WHERE how = 'change' AND (to_head OR to_tail) ORDER BY ord) AS o
    ), changed AS (
        UPDATE taskyard.task AS t SET priority = j.priority, hold = j.hold, cancel = j.cancel,
            blocked_by = j.blocked_by, blocked_at = j.blocked_at,
            note = coalesce(j.note, t.note), updated_at = p_now, state = j.state,
            due_at = coalesce(j.due_at, t.due_at),
            is_parked = j.state = 'queued' AND t.key IS NOT NULL OR j.aside,
            -- What was submitted in somebody else's transaction has no place yet.
            position = coalesce((SELECT h.place FROM placed AS h WHERE h.id = j.id), CASE
                WHEN t.position = 0 THEN nextval('taskyard.seq') * {{gap}} ELSE t.position END),
            -- Who is held and was to wait for its time stands in no line meanwhile.
            fifo_bucket = CASE WHEN j.aside THEN NULL WHEN t.fifo_bucket IS NULL THEN taskyard.fifo_bucket_of((SELECT q.target_ordering
                FROM taskyard.queue AS q WHERE q.name = t.queue), t.bucket) ELSE t.fifo_bucket END
        FROM j WHERE t.id = ANY (ARRAY[j.id]) AND j.how = 'change'
        RETURNING t.queue, t.key, t.state, coalesce(j.was, t.state) AS was
    ), gone AS (
        DELETE FROM taskyard.task AS t USING j WHERE t.id = ANY (ARRAY[j.id]) AND j.how = 'end'
        RETURNING j.state AS new_state, j.error AS new_error, j.note AS new_note, j.cancel AS new_cancel, t.*
    ), finished AS (
        INSERT INTO taskyard.finished (
            {{carried_columns}}, crashes, finished_at, previous_state, state, error, note, cancel)
        SELECT {{carried_columns}}, crashes, p_now, state, new_state, new_error, new_note, new_cancel
        FROM gone
    ), back AS (
        DELETE FROM taskyard.finished AS e USING j WHERE e.id = ANY (ARRAY[j.id]) AND j.how = 'again'
        RETURNING j.ord, j.to_head, j.state AS new_state, j.note AS new_note, j.slot AS new_slot,
            j.blocked_at AS new_blocked_at, e.*
    ), again AS (
        INSERT INTO taskyard.task (
            id, position, due_at, created_at, updated_at, started_at, timeout_s, attempt, priority, is_parked, state, uuid,
            consumer, queue, args, key, retry, progress, error, note, checkpoint, bucket, requires, lane, origin, extra,
            dedupe_slot, blocked_at, fifo_bucket)
        SELECT id, CASE WHEN to_head THEN -1 ELSE 1 END * nextval('taskyard.seq') * {{gap}}, due_at, created_at, p_now,
            started_at, timeout_s, attempt, priority, key IS NOT NULL AND new_state = 'queued', new_state, uuid, consumer,
            queue, args, key, retry, progress, error, new_note, checkpoint, bucket, requires,
            taskyard.lane_of(consumer, requires), origin, extra, new_slot, new_blocked_at,
            taskyard.fifo_bucket_of((SELECT q.target_ordering FROM taskyard.queue AS q WHERE q.name = o.queue), bucket)
        FROM (SELECT * FROM back ORDER BY ord) AS o
    ), counted AS (
        INSERT INTO taskyard.state_count
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
        JOIN taskyard.task AS t ON t.id = ANY (ARRAY[j.id]) WHERE j.beside IS NOT NULL ORDER BY j.ord
    LOOP
        PERFORM taskyard.place(v_row.id, v_row.queue, t.position, v_row.before)
        FROM taskyard.task AS t WHERE t.id = v_row.beside;
    END LOOP;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.update_parked(v_key_queues, v_keys);
    END IF;
    PERFORM taskyard.lower_watermarks(v_ids);
    told := taskyard.write_events(0, n_kinds, n_uuids, n_queues, n_sources, ARRAY[p_now], n_details);
    -- A task may be named twice. The events of one kind are written together, so its second one goes in a later call.
    FOR v_row IN
        SELECT array_agg(kind ORDER BY ord) AS kinds, array_agg(uuid ORDER BY ord) AS uuids,
            array_agg(queue ORDER BY ord) AS queues, array_agg(consumer ORDER BY ord) AS consumers,
            array_agg(detail ORDER BY ord) AS details
        FROM (
            SELECT *, row_number() OVER (PARTITION BY uuid COLLATE "C" ORDER BY ord) AS nth
            FROM unnest(e_kinds, e_uuids, e_queues, e_sources, e_details) WITH ORDINALITY
                AS u(kind, uuid, queue, consumer, detail, ord)
        ) AS e
        GROUP BY nth ORDER BY nth
    LOOP
        told := told + taskyard.write_events(
            told, v_row.kinds, v_row.uuids, v_row.queues, v_row.consumers, ARRAY[p_now], v_row.details);
    END LOOP;
    IF cardinality(v_again) > 0 THEN
        UPDATE taskyard.dependency AS d SET done = (SELECT p.id FROM taskyard.task AS p WHERE p.id = d.parent) IS NULL
        WHERE d.child = ANY (v_again);
        UPDATE taskyard.task_relation AS t SET open_dependencies = (SELECT count(*) FROM taskyard.dependency AS d WHERE d.child = t.id AND NOT d.done)
        WHERE t.id = ANY (v_again);
    END IF;
    IF taskyard.has_open('waiting') THEN
        UPDATE taskyard.task_relation SET open_dependencies = 0
        WHERE id = ANY (v_ids) AND open_dependencies > 0
            AND (SELECT e.id FROM taskyard.finished AS e WHERE e.id = task_relation.id) IS NOT NULL;
        SELECT * INTO v_done FROM taskyard.release_dependents(told, p_now, p_queues, v_ids);
        told := told + v_done.told;
        IF v_done.keys IS NOT NULL THEN
            PERFORM taskyard.update_parked(v_done.key_queues, v_done.keys);
        END IF;
    END IF;
    IF p_audit IS NOT NULL THEN
        PERFORM taskyard.note_audit_1(p_audit, p_matched, (
            SELECT count(*) FROM json_to_recordset(p_changes) AS j(how text) WHERE how <> 'look'));
    END IF;
    SELECT json_agg(json_build_array(t.id, t.position, t.is_parked)) INTO places
    FROM json_to_recordset(p_changes) AS j(id bigint) JOIN taskyard.task AS t ON t.id = ANY (ARRAY[j.id]);
    COMMIT;
END $$;

-- Put a task right before or right after the one at `p_anchor`; whoever is in the way moves a little. As
-- `taskyard.model.places` says it.
CREATE OR REPLACE FUNCTION taskyard.place(p_id bigint, p_queue text, p_anchor bigint, p_before boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_base bigint; v_low bigint; v_high bigint; v_near bigint; v_room bigint; v_place bigint;
    v_size bigint := {{smallest}}; v_allowed double precision := {{crowded}};
    v_first bigint; v_last bigint; v_crowd bigint[]; v_at integer;
BEGIN
    -- Rounded down, below zero as well.
    v_base := floor((p_anchor - CASE WHEN p_before THEN 1 ELSE 0 END)::numeric / {{gap}})::bigint * {{gap}};
    IF p_before THEN
        SELECT position INTO v_near FROM taskyard.task
        WHERE queue = p_queue AND position % {{gap}} <> 0 AND position < p_anchor ORDER BY position DESC LIMIT 1;
        v_low := greatest(v_base, v_near); v_high := p_anchor;
    ELSE
        SELECT position INTO v_near FROM taskyard.task
        WHERE queue = p_queue AND position % {{gap}} <> 0 AND position > p_anchor ORDER BY position LIMIT 1;
        v_low := p_anchor; v_high := least(v_base + {{gap}}, v_near);
    END IF;
    v_room := v_high - v_low;
    IF v_room >= 2 THEN
        v_place := CASE WHEN p_before THEN v_low + greatest(1, v_room / {{share}})
            ELSE v_high - greatest(1, v_room / {{share}}) END;
        UPDATE taskyard.task SET position = v_place WHERE id = p_id;
        RETURN;
    END IF;
    LOOP
        v_first := v_base + least((v_low - v_base) / v_size * v_size, {{gap}} - v_size);
        v_last := least(v_first + v_size, v_base + {{gap}}) - 1;
        v_first := greatest(v_first, v_base + 1);
        v_crowd := ARRAY(SELECT id FROM taskyard.task WHERE queue = p_queue AND position % {{gap}} <> 0
            AND position BETWEEN v_first AND v_last ORDER BY position);
        EXIT WHEN cardinality(v_crowd) + 1 <= (v_last - v_first + 1) * v_allowed
            OR v_size = {{gap}} AND cardinality(v_crowd) < {{gap}} - 1;
        IF v_size = {{gap}} THEN
            RAISE EXCEPTION 'no position is left between two tasks' USING ERRCODE = {{no_place}};
        END IF;
        v_size := v_size * 2; v_allowed := v_allowed / {{thinning}};
    END LOOP;
    SELECT count(*) INTO v_at FROM taskyard.task
    WHERE queue = p_queue AND position % {{gap}} <> 0 AND position BETWEEN v_first AND v_low;
    v_crowd := v_crowd[:v_at] || 0::bigint || v_crowd[v_at + 1:];
    UPDATE taskyard.task AS t SET position = v_first + (2 * (c.ord - 1) + 1) * (v_last - v_first + 1)
        / (2 * cardinality(v_crowd))
    FROM unnest(v_crowd) WITH ORDINALITY AS c(id, ord) WHERE t.id = ANY (ARRAY[c.id]);
    -- Last, since it may have stood among them.
    UPDATE taskyard.task SET position = v_first + (2 * v_at + 1) * (v_last - v_first + 1) / (2 * cardinality(v_crowd))
    WHERE id = p_id;
    PERFORM taskyard.lower_watermarks(v_crowd);  -- who stood above a mark may stand below it now
END $$;
