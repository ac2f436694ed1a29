-- Rescue of the tasks of a dead node, and numbers after a failover.

-- Take back what a dead node runs, let go of its devices, and forget the node, unless it has beaten since `p_beats` was
-- seen. Tasks that wait for one that ends by it are told.
CREATE OR REPLACE PROCEDURE taskyard.rescue_1(
    p_node text, p_beats bigint, p_now timestamptz, p_note text, p_error text,
    INOUT uuids text[], INOUT told integer
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queues text[]; v_sources text[]; v_states text[]; v_ids bigint[]; v_key_queues text[]; v_keys text[];
    v_locked text[];
    v_done record;
BEGIN
    told := 0;
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM pg_advisory_xact_lock({{lock_node}}, hashtext(p_node));
    IF p_beats IS NOT NULL AND NOT EXISTS (SELECT FROM taskyard.node WHERE incarnation = p_node AND beats = p_beats) THEN
        RETURN;
    END IF;
    -- Looked for once: it is all that runs, on whatever node, and all that ran and cannot be vacuumed. The node gets no more.
    SELECT array_agg(id), array_agg(queue) INTO v_ids, v_locked FROM taskyard.task WHERE state = 'running' AND node = p_node;
    v_locked := v_locked || taskyard.queues_of_dependents(v_ids);
    PERFORM taskyard.lock_queues(v_locked);
    -- Not sooner: events are told by the number of their transaction, which it gets when it first writes.
    PERFORM taskyard.see_specs(p_node, p_now);
    DELETE FROM taskyard.node WHERE incarnation = p_node AND (p_beats IS NULL OR beats = p_beats);
    IF NOT FOUND AND p_beats IS NOT NULL THEN
        RETURN;  -- it has beaten while we waited
    END IF;
    PERFORM taskyard.publish_specs('[]', p_now);
    WITH m AS MATERIALIZED (
        SELECT t.id, t.queue, CASE WHEN t.cancel IS NOT NULL THEN 'canceled'
            WHEN t.recoveries < coalesce(q.auto_recover, 1) THEN 'queued' ELSE 'failed' END AS state,
            row_number() OVER (ORDER BY t.position DESC) AS ord
        FROM taskyard.task AS t LEFT JOIN taskyard.queue AS q ON q.name = t.queue
        WHERE t.id = ANY (v_ids) AND t.node = p_node
    ), heads AS MATERIALIZED (
        -- The last to be put at the head stands first.
        SELECT o.id, -nextval('taskyard.seq') * {{gap}} AS place
        FROM (SELECT id FROM m WHERE state = 'queued' ORDER BY ord) AS o
    ), ran AS (
        INSERT INTO taskyard.attempt (
            task, token, started_at, finished_at, attempt, worker_pid, node, state, error, device, account)
        SELECT t.id, t.token, t.started_at, p_now, t.attempt, t.worker_pid, t.node, 'interrupted', p_error, t.device,
            CASE WHEN t.device IS NOT NULL THEN t.key END
        FROM m JOIN taskyard.task AS t ON t.id = ANY (ARRAY[m.id])
    ), stays AS (
        UPDATE taskyard.task AS t SET state = 'queued', updated_at = p_now, note = p_note, token = NULL, node = NULL,
            worker_pid = NULL, device = NULL, recoveries = t.recoveries + 1, position = heads.place, is_parked = t.key IS NOT NULL
        FROM heads WHERE t.id = ANY (ARRAY[heads.id])
        RETURNING t.id, t.uuid, t.queue, t.consumer, t.key
    ), gone AS (
        DELETE FROM taskyard.task AS t USING m WHERE t.id = ANY (ARRAY[m.id]) AND m.state <> 'queued'
        RETURNING m.state AS new_state, t.*
    ), kept AS (
        INSERT INTO taskyard.finished (
            {{carried_columns}}, crashes, cancel, finished_at, previous_state, state, error, note)
        SELECT {{carried_columns}}, crashes, cancel, p_now, 'interrupted', new_state,
            CASE WHEN new_state = 'failed' THEN p_error ELSE error END, p_note
        FROM gone
    ), all_ AS (
        SELECT id, uuid, queue, consumer, key, 'queued' AS state FROM stays
        UNION ALL SELECT id, uuid, queue, consumer, key, new_state FROM gone
    ), counted AS (
        INSERT INTO taskyard.state_count
        SELECT queue, 'running', -count(*) FROM all_ GROUP BY queue
        UNION ALL SELECT queue, state, count(*) FROM all_ GROUP BY queue, state
    )
    SELECT array_agg(a.id), array_agg(a.uuid), array_agg(a.queue), array_agg(a.consumer), array_agg(a.state),
        array_agg(a.queue) FILTER (WHERE key IS NOT NULL), array_agg(a.key) FILTER (WHERE key IS NOT NULL)
    INTO v_ids, uuids, v_queues, v_sources, v_states, v_key_queues, v_keys
    FROM (SELECT all_.* FROM all_ JOIN m ON m.id = all_.id ORDER BY m.ord) AS a;
    IF uuids IS NULL THEN
        told := taskyard.let_devices_go(0, p_node, NULL, p_now);
        COMMIT;
        RETURN;
    END IF;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.update_parked(v_key_queues, v_keys);
    END IF;
    PERFORM taskyard.lower_watermarks(v_ids);
    told := taskyard.write_events(0, array_fill('interrupted'::text, ARRAY[cardinality(uuids)]), uuids, v_queues, v_sources,
        ARRAY[p_now], array_fill('{"code":"node_died"}'::text, ARRAY[cardinality(uuids)]));
    told := told + taskyard.write_events(told, v_states, uuids, v_queues, v_sources, ARRAY[p_now],
        ARRAY(SELECT taskyard.event_detail('interrupted', CASE WHEN s = 'failed' THEN 'node_died' END)
            FROM unnest(v_states) WITH ORDINALITY AS u(s, ord) ORDER BY ord));
    IF taskyard.has_open('waiting') THEN
        SELECT * INTO v_done FROM taskyard.release_dependents(told, p_now, v_locked, v_ids);
        told := told + v_done.told;
        IF v_done.keys IS NOT NULL THEN
            PERFORM taskyard.update_parked(v_done.key_queues, v_done.keys);
        END IF;
    END IF;
    told := told + taskyard.pause_drained_queues(told, p_now, v_queues);
    told := told + taskyard.let_devices_go(told, p_node, NULL, p_now);
    COMMIT;
END $$;

-- Which database on which server this is: a copy of it is another.
CREATE OR REPLACE FUNCTION taskyard.database_identity_1() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT (SELECT system_identifier FROM pg_control_system()) || '/' ||
        (SELECT oid FROM pg_database WHERE datname = current_database())
$$;

-- Skip numbers of the sequence if this database never lived on this server and timeline; true if it did. A server that takes
-- over from another one, or was recovered to a point in time, may not know the last numbers that were handed out. It would
-- hand them out again, as ids and tokens, and a run that started before could settle a task that another node claimed since.
-- Called on every connection before its first exchange, because only exchanges hand out tokens. Does nothing on a server that
-- does not tell its log position, or is in recovery. SECURITY DEFINER: a node needs no rights on `server_history`.
CREATE OR REPLACE FUNCTION taskyard.skip_numbers_1() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_place text;
    v_is_first boolean;
BEGIN
    IF pg_is_in_recovery() THEN
        RETURN false;
    END IF;
    BEGIN
        v_place := taskyard.database_identity_1() || '/' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8);
    EXCEPTION WHEN feature_not_supported OR undefined_function OR insufficient_privilege THEN
        RETURN false;
    END;
    IF (SELECT place FROM taskyard.server_history WHERE place = v_place) IS NOT NULL THEN
        RETURN false;
    END IF;
    PERFORM pg_advisory_xact_lock({{lock_number_skip}}, 0);
    IF (SELECT place FROM taskyard.server_history WHERE place = v_place) IS NOT NULL THEN
        RETURN false;  -- whoever had the lock before has seen to it
    END IF;
    v_is_first := NOT EXISTS (SELECT FROM taskyard.server_history);
    IF NOT v_is_first THEN
        PERFORM setval('taskyard.seq', nextval('taskyard.seq') + {{numbers_skipped}});
    END IF;
    INSERT INTO taskyard.server_history VALUES (v_place);
    RETURN NOT v_is_first;
END $$;
