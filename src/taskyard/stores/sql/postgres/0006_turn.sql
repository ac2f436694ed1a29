-- What a node may start: at most so many in all, of each source that it knows so many, and of all others together.
CREATE TYPE taskyard.demand_1 AS (total integer, sources text[], rooms integer[], others integer);

-- One turn: settle, report, add, promote what is due, claim. It commits by itself before it answers: the answer may be
-- large, and a client that does not read it must not keep the queues locked. `ties` says what the claimed tasks have to do
-- with others, and who ended without having run; `hinted` whether others were told by `p_hint`.
CREATE PROCEDURE taskyard.turn_1(
    p_node text, p_now timestamptz, p_queues text[], c taskyard.completed_1, p_moves json, p_reports json, p_adds json,
    p_uuids text, p_args text, a taskyard.new_1, d taskyard.demand_1, p_hint text,
    OUT settled bigint[], OUT answers json[], OUT claims taskyard.claims_1, OUT next_due timestamptz, OUT told integer,
    OUT ties json, OUT hinted boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_total integer := coalesce(d.total, 0);
    v_queues text[] := p_queues;
    v_least text; v_most text;  -- of the queues that had such tasks once, beyond those that are locked anyway
    v_ids bigint[];
    v_done record;
    v_key_queues text[];
    v_keys text[];
    v_ended text[];
    v_has_waiters boolean;
    v_is_apart boolean;
    v_is_known boolean;
    v_may_release boolean := p_adds IS NOT NULL;
    v_patience text;
    v_moved bigint[] := c.id;
    -- What a lock answers is put here: that takes half of what PERFORM does, and a turn for one task has little else to do.
    v_nothing text;
BEGIN
    told := 0;
    IF p_uuids IS NOT NULL THEN
        -- To send an array of so many texts would take the client five times as long.
        a.uuid := string_to_array(p_uuids, {{separator}}); a.args := string_to_array(p_args, {{separator}});
    END IF;
    IF c.keyless AND v_total = 0 AND p_moves IS NULL AND p_reports IS NULL AND a.uuid IS NULL THEN
        SELECT * INTO v_is_apart, settled, told, next_due FROM taskyard.complete_apart_1(p_now, p_queues, c);
        COMMIT;  -- or, with nothing written, give the locks back
        IF v_is_apart THEN
            hinted := false;
            RETURN;
        END IF;
        told := 0;
    END IF;
    -- Before anything is written: who reads events can then tell which of our transactions still go on.
    v_nothing := pg_advisory_xact_lock_shared({{lock_events}}, 0);
    IF v_total > 0 THEN
        v_nothing := pg_advisory_xact_lock_shared({{lock_node}}, hashtext(p_node));
    END IF;
    SELECT (SELECT due_at FROM taskyard.task WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1),
        taskyard.are_open_1('waiting', 'telling'),
        EXISTS (SELECT FROM taskyard.node WHERE incarnation = p_node), min(queue), max(queue)
    INTO next_due, v_has_waiters, v_is_known, v_least, v_most
    FROM taskyard.lane WHERE v_total > 0 AND (d.others > 0 OR source = ANY (d.sources)) AND queue <> ALL (p_queues);
    IF next_due <= p_now THEN
        v_queues := v_queues || ARRAY(
            SELECT DISTINCT queue FROM (
                SELECT queue FROM taskyard.task WHERE state IN ('scheduled', 'retrying') AND due_at <= p_now
                ORDER BY due_at, id LIMIT {{promote_at_most}}) AS due);
    END IF;
    IF NOT v_is_known THEN
        v_total := 0;  -- given up for dead: what it claims, nobody would ever take back
    ELSIF v_least = v_most AND v_queues = '{}' THEN
        v_queues := ARRAY[v_least];  -- without a look: if there is nothing to start, the turn is over at once
    ELSIF v_least IS NOT NULL THEN
        v_queues := v_queues || taskyard.startable_1(d.sources, d.others > 0);
    END IF;
    IF p_moves IS NOT NULL THEN
        v_moved := v_moved || ARRAY(SELECT id FROM json_to_recordset(p_moves) AS m(id bigint));
    END IF;
    IF v_has_waiters THEN
        v_queues := v_queues || taskyard.listeners_1(v_moved);
    END IF;
    IF p_adds IS NOT NULL THEN
        v_queues := v_queues || taskyard.others_1(p_adds, a.slot, p_now);
    END IF;
    v_is_apart := v_moved IS NULL AND NOT v_has_waiters AND p_adds IS NULL;
    IF cardinality(v_queues) = 1 THEN
        v_nothing := pg_advisory_xact_lock({{lock_queue}}, hashtext(v_queues[1]));
        IF NOT v_is_apart THEN
            v_nothing := pg_advisory_xact_lock({{lock_ends}}, hashtext(v_queues[1]));
        END IF;
    ELSE
        PERFORM taskyard.lock_queues_1(v_queues, NOT v_is_apart);
    END IF;

    IF c.id IS NOT NULL THEN
        SELECT * INTO v_done FROM taskyard.complete_1(c);
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
    -- Or those who were to hear of an end have been pruned: then nobody else would take it off the list.
    IF v_has_waiters OR v_moved IS NOT NULL AND taskyard.are_open_1('waiting') THEN
        SELECT * INTO v_done FROM taskyard.release_1(told, p_now, v_queues, v_moved);
        told := told + v_done.told; v_ended := v_done.ended; v_may_release := true;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
    END IF;
    IF c.id IS NOT NULL OR p_moves IS NOT NULL THEN
        told := told + taskyard.drained_1(told, p_now, v_queues);
    END IF;
    IF p_reports IS NOT NULL THEN
        told := told + taskyard.report_1(told, p_now, p_reports);
    END IF;
    IF p_adds IS NOT NULL THEN
        SELECT * INTO v_done FROM taskyard.admit_1(told, p_now, v_queues, p_adds, a);
        answers := v_done.answers; told := told + v_done.told; v_ended := v_ended || v_done.ended;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
    ELSIF a.uuid IS NOT NULL THEN
        -- A uuid may stand in a transaction that somebody keeps open: the turn then fails, instead of waiting for it.
        v_patience := current_setting('lock_timeout');
        v_nothing := set_config('lock_timeout', '50ms', true);
        -- Where anything else might start in this turn, also by what it has just settled, the new task stands in line.
        IF v_total > 0 AND cardinality(a.uuid) = 1 AND a.key IS NULL AND a.due_at[1] <= p_now AND v_keys IS NULL
            AND cardinality(v_queues) = 1 AND (next_due > p_now) IS NOT FALSE
            AND coalesce(d.rooms[array_position(d.sources, a.source[1])], d.others) > 0 THEN
            claims := taskyard.begin_1(told, p_node, p_now, a);
        END IF;
        IF claims.id IS NOT NULL THEN
            told := told + 2; v_total := 0;  -- there is nothing else to claim, and nothing may take the place of this one
        ELSE
            told := told + taskyard.add_1(told, p_now, a);
        END IF;
        v_nothing := set_config('lock_timeout', v_patience, true);
    END IF;
    IF a.key IS NOT NULL THEN
        v_key_queues := v_key_queues || (
            SELECT array_agg(coalesce(q, a.queue[1])) FROM unnest(a.queue, a.key) AS u(q, k) WHERE k IS NOT NULL);
        v_keys := v_keys || (SELECT array_agg(k) FROM unnest(a.key) AS k WHERE k IS NOT NULL);
    END IF;
    IF next_due <= p_now THEN
        SELECT * INTO v_done FROM taskyard.promote_1(told, p_now, v_queues);
        told := told + v_done.told;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
    END IF;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.repark_1(v_key_queues, v_keys);
    END IF;
    IF v_total > 0 THEN
        v_ids := taskyard.pick_1(p_now, v_queues, v_total, d.sources, d.rooms, d.others);
        IF cardinality(v_ids) > 0 THEN
            claims := taskyard.start_1(told, p_node, p_now, v_ids);
            told := told + cardinality(claims.id);
            SELECT json_agg(json_build_array(t.id, t.group_id, t.on_failure, t.dedupe_key, t.dedupe_scope)) INTO ties
            FROM taskyard.tie AS t WHERE t.id = ANY (claims.id);
            IF claims.dedupe_slot IS NOT NULL THEN
                UPDATE taskyard.task AS t SET dedupe_slot = NULL FROM taskyard.tie AS x
                WHERE t.id = ANY (claims.id) AND x.id = ANY (ARRAY[t.id]) AND x.dedupe_scope = 'queued';
            END IF;
        END IF;
    END IF;
    IF v_may_release OR next_due <= p_now OR p_now < ANY (a.due_at) THEN
        SELECT due_at INTO next_due FROM taskyard.task
        WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1;
    END IF;
    IF v_may_release AND taskyard.are_open_1('telling') THEN
        next_due := p_now;
    END IF;
    IF ties IS NOT NULL OR v_ended IS NOT NULL THEN
        ties := json_build_object('claims', ties, 'ended', v_ended);
    END IF;
    hinted := false;
    IF p_hint IS NOT NULL AND told > 0 THEN
        -- With the commit itself, unless somebody else does so just now: such commits wait for each other. Nor if far too
        -- many hints lie there unread, because of somebody's forgotten session: with no room for one more, the turn fails.
        hinted := pg_notification_queue_usage() < 0.5 AND pg_try_advisory_xact_lock({{lock_hint}}, 0);
        IF hinted THEN
            v_nothing := pg_notify('{{channel}}', p_hint);
        END IF;
    END IF;
    COMMIT;
END $$;
