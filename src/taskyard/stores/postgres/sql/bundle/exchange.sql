-- One exchange between a node and the store.

-- Queue what is due, of these queues: by due time, then by age, at most {{promote_at_most}}. Of a task at place 0 nobody
-- has heard yet: it was submitted in a transaction of somebody else's.
CREATE OR REPLACE FUNCTION taskyard.promote(
    p_first integer, p_now timestamptz, p_queues text[], OUT told integer, OUT key_queues text[], OUT keys text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_ids bigint[]; v_uuids text[]; v_queues text[]; v_sources text[]; v_kinds text[];
    n_kinds text[]; n_uuids text[]; n_queues text[]; n_sources text[]; n_details text[]; v_details text[];
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
        SET state = 'queued', position = d.place, is_parked = t.key IS NOT NULL, updated_at = p_now,
            fifo_bucket = CASE WHEN d.is_new THEN taskyard.fifo_bucket_of((SELECT q.target_ordering FROM taskyard.queue AS q
                WHERE q.name = t.queue), t.bucket) ELSE t.fifo_bucket END
        FROM d WHERE t.id = ANY (ARRAY[d.id])
        RETURNING d.ord, d.state AS was, d.is_new, t.id, t.uuid, t.queue, t.consumer, t.key, t.extra
    ), counted AS (
        INSERT INTO taskyard.state_count
        SELECT queue, was, -count(*) FROM queued GROUP BY queue, was
        UNION ALL SELECT queue, 'queued', count(*) FROM queued GROUP BY queue
    )
    SELECT array_agg(id), array_agg('queued'::text), array_agg(uuid), array_agg(queue), array_agg(consumer),
        array_agg(queue) FILTER (WHERE key IS NOT NULL), array_agg(key) FILTER (WHERE key IS NOT NULL),
        array_agg('submitted'::text) FILTER (WHERE is_new), array_agg(uuid) FILTER (WHERE is_new),
        array_agg(queue) FILTER (WHERE is_new), array_agg(consumer) FILTER (WHERE is_new),
        array_agg(taskyard.submit_detail('scheduled', extra)) FILTER (WHERE is_new), array_agg(taskyard.event_detail(was))
    INTO v_ids, v_kinds, v_uuids, v_queues, v_sources, key_queues, keys, n_kinds, n_uuids, n_queues, n_sources, n_details,
        v_details
    FROM (SELECT * FROM queued ORDER BY ord) AS o;
    told := taskyard.write_events(p_first, n_kinds, n_uuids, n_queues, n_sources, ARRAY[p_now], n_details);
    told := told + taskyard.write_events(p_first + told, v_kinds, v_uuids, v_queues, v_sources, ARRAY[p_now], v_details);
    PERFORM taskyard.lower_watermarks(v_ids);
END $$;

-- Start these tasks, in this order: their tokens grow with it, and say it. `p_devices` are the places where they run, null
-- if none has one.
CREATE OR REPLACE FUNCTION taskyard.start(p_first integer, p_node text, p_now timestamptz, p_ids bigint[], p_devices text[])
RETURNS taskyard.claims_1 LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_claims taskyard.claims_1;
    v_n integer; v_is_one_lane boolean; v_has_more boolean;
    v_lane text; v_0 bigint; v_1 bigint; v_2 bigint;
    l_queues text[]; l_lanes text[]; l_0 bigint[]; l_1 bigint[]; l_2 bigint[];
BEGIN
    IF cardinality(p_ids) = 1 THEN
        -- As it is on a node with little to do, where somebody waits for it: with nothing to put together, sooner done.
        UPDATE taskyard.task AS t
        SET state = 'running', attempt = t.attempt + 1, token = nextval('taskyard.seq'), node = p_node,
            device = p_devices[1], started_at = p_now, updated_at = p_now, note = NULL
        WHERE t.id = p_ids[1]
        RETURNING ARRAY[id], ARRAY[token], ARRAY[position], ARRAY[due_at], ARRAY[created_at], ARRAY[attempt],
            ARRAY[priority], ARRAY[uuid], ARRAY[consumer], ARRAY[queue], ARRAY[args],
            num_nonnulls(timeout_s, key, dedupe_slot, retry, progress, error, checkpoint, bucket, requires, origin, extra) > 0
                OR retries + crashes + recoveries > 0,
            1, true, lane, CASE WHEN priority = 0 THEN position END, CASE WHEN priority = 1 THEN position END,
            CASE WHEN priority = 2 THEN position END
        INTO v_claims.id, v_claims.token, v_claims.position, v_claims.due_at, v_claims.created_at, v_claims.attempt,
            v_claims.priority, v_claims.uuid, v_claims.consumer, v_claims.queue, v_claims.args, v_has_more,
            v_n, v_is_one_lane, v_lane, v_0, v_1, v_2;
    ELSE
        WITH p AS MATERIALIZED (
            SELECT x.id, nextval('taskyard.seq') AS token, x.device FROM unnest(p_ids, p_devices) AS x(id, device)
        ), started AS (
            UPDATE taskyard.task AS t
            SET state = 'running', attempt = t.attempt + 1, token = p.token, node = p_node, device = p.device,
                started_at = p_now, updated_at = p_now, note = NULL
            FROM p WHERE t.id BETWEEN p.id AND p.id
            RETURNING t.id, t.token, t.position, t.due_at, t.created_at, t.attempt, t.priority, t.uuid, t.consumer, t.queue,
                t.lane, t.args, num_nonnulls(t.timeout_s, t.key, t.dedupe_slot, t.retry, t.progress, t.error, t.checkpoint,
                    t.bucket, t.requires, t.origin, t.extra) > 0 OR t.retries + t.crashes + t.recoveries > 0 AS has_more
        )
        SELECT array_agg(id), array_agg(token), array_agg(position), array_agg(due_at), array_agg(created_at),
            array_agg(attempt), array_agg(priority), array_agg(uuid), array_agg(consumer), array_agg(queue), array_agg(args),
            bool_or(has_more), count(*)::integer, min(queue) = max(queue) AND min(lane) = max(lane), min(lane),
            max(position) FILTER (WHERE priority = 0), max(position) FILTER (WHERE priority = 1),
            max(position) FILTER (WHERE priority = 2)
        INTO v_claims.id, v_claims.token, v_claims.position, v_claims.due_at, v_claims.created_at, v_claims.attempt,
            v_claims.priority, v_claims.uuid, v_claims.consumer, v_claims.queue, v_claims.args, v_has_more,
            v_n, v_is_one_lane, v_lane, v_0, v_1, v_2
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
            CASE WHEN count(requires) > 0 THEN array_agg(requires ORDER BY ord) END,
            CASE WHEN count(origin) > 0 THEN array_agg(origin ORDER BY ord) END,
            CASE WHEN count(extra) > 0 THEN array_agg(extra ORDER BY ord) END
        INTO v_claims.timeout_s, v_claims.retries, v_claims.crashes, v_claims.recoveries, v_claims.key,
            v_claims.dedupe_slot, v_claims.retry, v_claims.progress, v_claims.error, v_claims.checkpoint, v_claims.bucket,
            v_claims.requires, v_claims.origin, v_claims.extra
        FROM unnest(v_claims.id) WITH ORDINALITY AS c(id, ord) JOIN taskyard.task AS t ON t.id = ANY (ARRAY[c.id]);
    END IF;
    IF v_is_one_lane THEN
        -- As it mostly is: then there is nothing to be put together.
        WITH told AS (
            INSERT INTO taskyard.event (xid, first, n, kind, queue, consumer, ats, uuids)
            VALUES (pg_current_xact_id()::text::bigint, p_first, v_n, 'running', v_claims.queue[1], v_claims.consumer[1],
                ARRAY[p_now], v_claims.uuid)
        )
        INSERT INTO taskyard.state_count (queue, state, n)
        VALUES (v_claims.queue[1], 'queued', -v_n), (v_claims.queue[1], 'running', v_n);
        IF random() * {{raise_one_in}} < v_n THEN
            PERFORM taskyard.raise_watermarks(v_claims.queue[1:1], ARRAY[v_lane], ARRAY[v_0], ARRAY[v_1], ARRAY[v_2]);
        END IF;
        RETURN v_claims;
    END IF;
    PERFORM taskyard.write_events(
        p_first, array_fill('running'::text, ARRAY[v_n]), v_claims.uuid, v_claims.queue, v_claims.consumer, ARRAY[p_now]);
    WITH lanes AS MATERIALIZED (
        SELECT queue, taskyard.lane_of(consumer, requires) AS lane, count(*) AS n,
            max(position) FILTER (WHERE priority = 0) AS high_0, max(position) FILTER (WHERE priority = 1) AS high_1,
            max(position) FILTER (WHERE priority = 2) AS high_2
        FROM unnest(v_claims.queue, v_claims.consumer, v_claims.requires, v_claims.priority, v_claims.position)
            AS c(queue, consumer, requires, priority, position)
        GROUP BY queue, lane
    ), counted AS (
        INSERT INTO taskyard.state_count (queue, state, n)
        SELECT queue, s.state, sum(n * s.sign) FROM lanes, (VALUES ('queued', -1), ('running', 1)) AS s(state, sign)
        GROUP BY queue, s.state
    )
    SELECT array_agg(queue), array_agg(lane), array_agg(high_0), array_agg(high_1), array_agg(high_2)
    INTO l_queues, l_lanes, l_0, l_1, l_2 FROM lanes;
    PERFORM taskyard.raise_watermarks(l_queues, l_lanes, l_0, l_1, l_2);
    RETURN v_claims;
END $$;

-- How many of the tasks that would start next may start in a claim that names its tasks: those before the first that is
-- not named.
CREATE OR REPLACE FUNCTION taskyard.count_allowed(p_now timestamptz, p_queues text[], p_total integer, d taskyard.demand_1)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_ids bigint[] := taskyard.pick(p_now, p_queues, p_total, d.lanes, d.rooms, d.others, true);
BEGIN
    RETURN coalesce((
        SELECT min(p.ord) - 1 FROM unnest(v_ids) WITH ORDINALITY AS p(id, ord) WHERE p.id <> ALL (d.only_ids)
    ), cardinality(v_ids));
END $$;

-- The tasks that a turn with this demand would claim now, first to start first. It locks and changes nothing, so what is
-- due is not queued for it. The settings are those of the connections for turns.
CREATE OR REPLACE FUNCTION taskyard.preview_1(p_now timestamptz, d taskyard.demand_1) RETURNS bigint[] LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN taskyard.pick(
        p_now, taskyard.claimable_queues(d.lanes, d.others > 0, NULL), d.total, d.lanes, d.rooms, d.others, true);
END $$;

-- One turn: settle, report, add, promote what is due, claim. It commits by itself before it answers: the answer may be
-- large, and a client that does not read it must not keep the queues locked. `ties` says what the claimed tasks have to do
-- with others, and who ended without having run; `hinted` whether others were told by `p_hint`.
CREATE OR REPLACE PROCEDURE taskyard.exchange_1(
    p_node text, p_now timestamptz, p_queues text[], c taskyard.completions_1, p_moves json, p_reports json, p_adds json,
    p_uuids text, p_args text, a taskyard.new_tasks_1, d taskyard.demand_1, p_hint text,
    OUT settled bigint[], OUT answers json[], OUT claims taskyard.claims_1, OUT next_due timestamptz, OUT told integer,
    OUT ties json, OUT hinted boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_total integer := coalesce(d.total, 0);
    v_queues text[] := p_queues;
    v_least text; v_most text;  -- of the queues that had such tasks once, beyond those that are locked anyway
    v_ids bigint[]; v_devices text[];
    v_done record;
    v_key_queues text[];
    v_keys text[];
    v_finished text[];
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
        SELECT * INTO v_is_apart, settled, told, next_due FROM taskyard.complete_apart(p_now, p_queues, c);
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
        taskyard.has_open('waiting', 'telling'),
        EXISTS (SELECT FROM taskyard.node WHERE incarnation = p_node), min(queue), max(queue)
    INTO next_due, v_has_waiters, v_is_known, v_least, v_most
    FROM taskyard.lane WHERE v_total > 0 AND (d.others > 0 OR lane = ANY (d.lanes)) AND queue <> ALL (p_queues);
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
        v_queues := v_queues || taskyard.claimable_queues(d.lanes, d.others > 0);
    END IF;
    IF v_total > 0 AND d.only_ids IS NOT NULL THEN
        -- The queues of the tasks that are named are locked, however many queues there are to draw lots from.
        v_queues := v_queues || ARRAY(
            SELECT DISTINCT queue FROM taskyard.task WHERE id = ANY (d.only_ids) AND queue <> ALL (v_queues));
    END IF;
    IF p_moves IS NOT NULL THEN
        v_moved := v_moved || ARRAY(SELECT id FROM json_to_recordset(p_moves) AS m(id bigint));
    END IF;
    IF v_has_waiters THEN
        v_queues := v_queues || taskyard.queues_of_dependents(v_moved);
    END IF;
    IF p_adds IS NOT NULL THEN
        v_queues := v_queues || taskyard.queues_of_parents(p_adds, a.dedupe_slot, p_now);
    END IF;
    v_is_apart := v_moved IS NULL AND NOT v_has_waiters AND p_adds IS NULL;
    IF cardinality(v_queues) = 1 THEN
        v_nothing := pg_advisory_xact_lock({{lock_queue}}, hashtext(v_queues[1]));
        IF NOT v_is_apart THEN
            v_nothing := pg_advisory_xact_lock({{lock_completions}}, hashtext(v_queues[1]));
        END IF;
    ELSE
        PERFORM taskyard.lock_queues(v_queues, NOT v_is_apart);
    END IF;

    IF c.id IS NOT NULL THEN
        SELECT * INTO v_done FROM taskyard.complete(c);
        settled := v_done.settled; told := v_done.told;
        v_key_queues := v_done.key_queues; v_keys := v_done.keys;
    END IF;
    IF p_moves IS NOT NULL THEN
        SELECT * INTO v_done FROM taskyard.settle(told, p_moves);
        settled := settled || v_done.settled; told := told + v_done.told;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
        PERFORM taskyard.lower_watermarks(v_done.queued);
        SELECT due_at INTO next_due FROM taskyard.task
        WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1;
    END IF;
    -- Race: somebody may have come to wait for one of these since the queues were chosen. He is told in the next turn.
    -- Or those who were to hear of an end have been pruned: then nobody else would take it off the list.
    IF v_has_waiters OR v_moved IS NOT NULL AND taskyard.has_open('waiting') THEN
        SELECT * INTO v_done FROM taskyard.release_dependents(told, p_now, v_queues, v_moved);
        told := told + v_done.told; v_finished := v_done.finished; v_may_release := true;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
    END IF;
    IF c.id IS NOT NULL OR p_moves IS NOT NULL THEN
        told := told + taskyard.pause_drained_queues(told, p_now, v_queues);
    END IF;
    IF p_reports IS NOT NULL THEN
        told := told + taskyard.report(told, p_now, p_reports);
    END IF;
    IF p_adds IS NOT NULL THEN
        SELECT * INTO v_done FROM taskyard.submit_checked(told, p_now, v_queues, p_adds, a);
        answers := v_done.answers; told := told + v_done.told; v_finished := v_finished || v_done.finished;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
    ELSIF a.uuid IS NOT NULL THEN
        -- A uuid may stand in a transaction that somebody keeps open: the turn then fails, instead of waiting for it.
        v_patience := current_setting('lock_timeout');
        v_nothing := set_config('lock_timeout', '50ms', true);
        -- Where anything else might start in this turn, also by what it has just settled, the new task stands in line.
        IF v_total > 0 AND cardinality(a.uuid) = 1 AND a.key IS NULL AND a.due_at[1] <= p_now AND v_keys IS NULL
            AND cardinality(v_queues) = 1 AND (next_due > p_now) IS NOT FALSE
            AND d.only_ids IS NULL
            AND coalesce(d.rooms[array_position(d.lanes, taskyard.lane_of(a.consumer[1], a.requires[1]))], d.others) > 0 THEN
            claims := taskyard.insert_running(told, p_node, p_now, a);
        END IF;
        IF claims.id IS NOT NULL THEN
            told := told + 2; v_total := 0;  -- there is nothing else to claim, and nothing may take the place of this one
        ELSE
            told := told + taskyard.insert_tasks(told, p_now, a);
        END IF;
        v_nothing := set_config('lock_timeout', v_patience, true);
    END IF;
    IF a.key IS NOT NULL THEN
        v_key_queues := v_key_queues || (
            SELECT array_agg(coalesce(q, a.queue[1])) FROM unnest(a.queue, a.key) AS u(q, k) WHERE k IS NOT NULL);
        v_keys := v_keys || (SELECT array_agg(k) FROM unnest(a.key) AS k WHERE k IS NOT NULL);
    END IF;
    IF next_due <= p_now THEN
        SELECT * INTO v_done FROM taskyard.promote(told, p_now, v_queues);
        told := told + v_done.told;
        v_key_queues := v_key_queues || v_done.key_queues; v_keys := v_keys || v_done.keys;
    END IF;
    IF v_keys IS NOT NULL THEN
        PERFORM taskyard.update_parked(v_key_queues, v_keys);
    END IF;
    IF v_total > 0 THEN
        IF d.only_ids IS NOT NULL THEN
            v_total := taskyard.count_allowed(p_now, v_queues, v_total, d);
        END IF;
        IF v_total > 0 THEN
            v_ids := taskyard.pick(p_now, v_queues, v_total, d.lanes, d.rooms, d.others, false);
        END IF;
        IF cardinality(v_ids) > 0 THEN
            IF d.only_ids IS NOT NULL THEN
                v_devices := ARRAY(SELECT d.only_devices[array_position(d.only_ids, id)]
                    FROM unnest(v_ids) WITH ORDINALITY AS p(id, ord) ORDER BY ord);
            END IF;
            claims := taskyard.start(told, p_node, p_now, v_ids, v_devices);
            told := told + cardinality(claims.id);
            SELECT json_agg(json_build_array(t.id, t.group_id, t.on_failure, t.dedupe_key, t.dedupe_scope)) INTO ties
            FROM taskyard.task_relation AS t WHERE t.id = ANY (claims.id);
            IF claims.dedupe_slot IS NOT NULL THEN
                UPDATE taskyard.task AS t SET dedupe_slot = NULL FROM taskyard.task_relation AS x
                WHERE t.id = ANY (claims.id) AND x.id = ANY (ARRAY[t.id]) AND x.dedupe_scope = 'queued';
            END IF;
        END IF;
    END IF;
    IF v_may_release OR next_due <= p_now OR p_now < ANY (a.due_at) THEN
        SELECT due_at INTO next_due FROM taskyard.task
        WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1;
    END IF;
    IF v_may_release AND taskyard.has_open('telling') THEN
        next_due := p_now;
    END IF;
    IF ties IS NOT NULL OR v_finished IS NOT NULL THEN
        ties := json_build_object('claims', ties, 'finished', v_finished);
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
