-- Devices: their definitions, who serves them, their health, and quarantined accounts.
--
-- What a command makes of a device is decided in Python, on what was read with a stamp, and written if the stamp is still
-- that one. Every routine here takes the lock of devices, which comes last of all locks.

-- Something that `device_stamp` tells of has changed.
CREATE OR REPLACE FUNCTION taskyard.bump_device_stamp() RETURNS void LANGUAGE sql AS $$
    UPDATE taskyard.device_stamp SET n = n + 1
$$;

-- Tell of devices or accounts: one event for each of these pools, consumers and details.
CREATE OR REPLACE FUNCTION taskyard.tell_of_devices(
    p_first integer, p_now timestamptz, p_kinds text[], p_pools text[], p_consumers text[], p_details text[]
) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RETURN taskyard.write_events(
        p_first, p_kinds, array_fill(''::text, ARRAY[cardinality(p_kinds)]), p_pools, p_consumers, ARRAY[p_now], p_details);
END $$;

-- Write these devices, if the stamp is still `p_stamp`; whether it was. Those of version 1 are new. The health and the node
-- of the others stay as they are. The events are those of each device, in order; null where nothing is told.
CREATE OR REPLACE FUNCTION taskyard.write_devices_1(p_stamp bigint, p_devices json, p_now timestamptz, p_audit json)
RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM pg_advisory_xact_lock({{lock_devices}}, 0);
    IF (SELECT n FROM taskyard.device_stamp) <> p_stamp THEN
        RETURN false;
    END IF;
    -- Devices that change together may swap numbers or addresses: first all of them give up those that they have.
    UPDATE taskyard.device AS d SET number = {{lowest}} + d.number, address = NULL
    FROM json_populate_recordset(NULL::taskyard.device, p_devices) AS j WHERE d.name = j.name;
    UPDATE taskyard.device AS d SET pool = j.pool, number = j.number, adapter = j.adapter, address = j.address,
        definition = j.definition, edits = j.edits, orders = j.orders, version = j.version
    FROM json_populate_recordset(NULL::taskyard.device, p_devices) AS j WHERE d.name = j.name AND j.version > 1;
    INSERT INTO taskyard.device SELECT * FROM json_populate_recordset(NULL::taskyard.device, p_devices) AS j
    WHERE j.version = 1;
    PERFORM taskyard.bump_device_stamp();
    PERFORM taskyard.tell_of_devices(0, p_now, array_agg(kind ORDER BY ord), array_agg(pool ORDER BY ord),
        array_agg(''::text), array_agg(detail ORDER BY ord))
    FROM (
        SELECT ord, one ->> 'kind' AS kind, one ->> 'pool' AS pool, one ->> 'detail' AS detail
        FROM json_array_elements(p_devices) WITH ORDINALITY AS u(one, ord)) AS told;
    PERFORM taskyard.note_audit_1(p_audit, 1, 1);
    RETURN true;
END $$;

-- Forget a device. Not if a task runs on it, which is then `busy`, unless `p_force`.
CREATE OR REPLACE FUNCTION taskyard.remove_device_1(
    p_name text, p_force boolean, p_now timestamptz, p_detail text, p_audit json, OUT is_known boolean, OUT busy text
) LANGUAGE plpgsql AS $$
DECLARE
    v_pool text;
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM pg_advisory_xact_lock({{lock_devices}}, 0);
    SELECT d.pool INTO v_pool FROM taskyard.device AS d WHERE d.name = p_name;
    is_known := v_pool IS NOT NULL;
    IF is_known AND NOT p_force THEN
        SELECT t.uuid INTO busy FROM taskyard.task AS t WHERE t.state = 'running' AND t.device = p_name LIMIT 1;
    END IF;
    IF NOT is_known OR busy IS NOT NULL THEN
        RETURN;
    END IF;
    DELETE FROM taskyard.device WHERE name = p_name;
    PERFORM taskyard.bump_device_stamp();
    PERFORM taskyard.tell_of_devices(0, p_now, ARRAY['device_removed'], ARRAY[v_pool], ARRAY[''], ARRAY[p_detail]);
    PERFORM taskyard.note_audit_1(p_audit, 1, 1);
END $$;

-- From now on the node serves these, as far as no other node does; those that it serves. A node that is not known serves none.
-- Race: a node that goes deletes its row first, then takes our lock and lets go of its devices. So what is given to it while
-- its row is still seen here, it lets go of right after.
CREATE OR REPLACE FUNCTION taskyard.serve_devices_1(p_node text, p_names text[], p_now timestamptz) RETURNS text[]
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({{lock_devices}}, 0);
    IF NOT EXISTS (SELECT FROM taskyard.node WHERE incarnation = p_node) THEN
        RETURN '{}';
    END IF;
    UPDATE taskyard.device AS d SET node = p_node, is_up = false, reason = '{{not_checked}}', step = '',
        since = CASE WHEN d.is_up OR d.since IS NULL THEN p_now ELSE d.since END
    WHERE d.name = ANY (p_names) AND d.node <> p_node
        AND NOT EXISTS (SELECT FROM taskyard.node AS n WHERE n.incarnation = d.node);
    IF FOUND THEN
        PERFORM taskyard.bump_device_stamp();
    END IF;
    RETURN ARRAY(
        SELECT d.name FROM unnest(p_names) WITH ORDINALITY AS u(name, ord)
        JOIN taskyard.device AS d ON d.name = u.name AND d.node = p_node ORDER BY u.ord);
END $$;

-- The node lets go of these devices, or of all; how many events tell of it.
CREATE OR REPLACE FUNCTION taskyard.let_devices_go(p_first integer, p_node text, p_names text[], p_now timestamptz)
RETURNS integer LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_freed integer; v_kinds text[]; v_pools text[]; v_details text[];
BEGIN
    PERFORM pg_advisory_xact_lock({{lock_devices}}, 0);
    WITH served AS MATERIALIZED (
        SELECT name, is_up FROM taskyard.device
        WHERE node = p_node AND node <> '' AND (p_names IS NULL OR name = ANY (p_names))
    ), freed AS (
        UPDATE taskyard.device AS d SET node = '', is_up = false, reason = '{{not_served}}', step = '',
            since = CASE WHEN s.is_up OR d.since IS NULL THEN p_now ELSE d.since END
        FROM served AS s WHERE d.name = s.name
        RETURNING d.name, d.pool, s.is_up AS was_up
    )
    SELECT count(*), array_agg('device_down'::text) FILTER (WHERE was_up), array_agg(pool ORDER BY name) FILTER (WHERE was_up),
        array_agg(json_build_object('code', '{{not_served}}', 'device', name)::text ORDER BY name) FILTER (WHERE was_up)
    INTO v_freed, v_kinds, v_pools, v_details FROM freed;
    IF v_freed > 0 THEN
        PERFORM taskyard.bump_device_stamp();
    END IF;
    IF v_kinds IS NULL THEN
        RETURN 0;
    END IF;
    RETURN taskyard.tell_of_devices(
        p_first, p_now, v_kinds, v_pools, array_fill(''::text, ARRAY[cardinality(v_kinds)]), v_details);
END $$;

CREATE OR REPLACE FUNCTION taskyard.unserve_devices_1(p_node text, p_names text[], p_now timestamptz) RETURNS integer
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    RETURN taskyard.let_devices_go(0, p_node, p_names, p_now);
END $$;

-- Write the health of the devices that the node serves; the names of those that it serves. Each report brings the detail of
-- the event that tells of it if the device has gone up or down by it.
CREATE OR REPLACE FUNCTION taskyard.report_devices_1(p_node text, p_reports json, p_now timestamptz) RETURNS text[]
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_served text[]; v_kinds text[]; v_pools text[]; v_details text[];
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM pg_advisory_xact_lock({{lock_devices}}, 0);
    WITH told AS MATERIALIZED (
        SELECT j.ord, j.one ->> 'detail' AS detail, r.*, d.pool, d.is_up AS was_up
        FROM json_array_elements(p_reports) WITH ORDINALITY AS j(one, ord)
        CROSS JOIN LATERAL json_to_record(j.one) AS r(
            name text, is_up boolean, since timestamptz, reason text, step text, beat_at timestamptz)
        JOIN taskyard.device AS d ON d.name = r.name AND d.node = p_node
    ), written AS (
        UPDATE taskyard.device AS d SET is_up = told.is_up, since = told.since, reason = told.reason, step = told.step,
            beat_at = told.beat_at
        FROM told WHERE d.name = told.name
    )
    SELECT array_agg(name),
        array_agg(CASE WHEN is_up THEN 'device_up' ELSE 'device_down' END ORDER BY ord) FILTER (WHERE is_up <> was_up),
        array_agg(pool ORDER BY ord) FILTER (WHERE is_up <> was_up),
        array_agg(detail ORDER BY ord) FILTER (WHERE is_up <> was_up)
    INTO v_served, v_kinds, v_pools, v_details FROM told;
    IF v_kinds IS NOT NULL THEN
        PERFORM taskyard.tell_of_devices(
            0, p_now, v_kinds, v_pools, array_fill(''::text, ARRAY[cardinality(v_kinds)]), v_details);
    END IF;
    RETURN coalesce(v_served, '{}');
END $$;

-- Take no more tasks of this account and consumer. A second time it stays as it is.
CREATE OR REPLACE FUNCTION taskyard.quarantine_account_1(
    p_pool text, p_account text, p_consumer text, p_failures integer, p_quarantined text, p_detail text, p_now timestamptz,
    p_audit json
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM pg_advisory_xact_lock({{lock_devices}}, 0);
    INSERT INTO taskyard.quarantined_account (pool, account, consumer, failures, quarantined)
    VALUES (p_pool, p_account, p_consumer, p_failures, p_quarantined) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM taskyard.bump_device_stamp();
    PERFORM taskyard.tell_of_devices(
        0, p_now, ARRAY['account_quarantined'], ARRAY[p_pool], ARRAY[p_consumer], ARRAY[p_detail]);
    PERFORM taskyard.note_audit_1(p_audit, 1, 1);
    RETURN true;
END $$;

-- Take tasks of this account again, of one consumer or of all; how many were quarantined.
CREATE OR REPLACE FUNCTION taskyard.release_account_1(
    p_pool text, p_account text, p_consumer text, p_detail text, p_now timestamptz, p_audit json
) RETURNS integer LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_consumers text[];
    v_n integer;
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM pg_advisory_xact_lock({{lock_devices}}, 0);
    WITH gone AS (
        DELETE FROM taskyard.quarantined_account
        WHERE pool = p_pool AND account = p_account AND (p_consumer IS NULL OR consumer = p_consumer)
        RETURNING consumer
    )
    SELECT array_agg(consumer ORDER BY consumer) INTO v_consumers FROM gone;
    IF v_consumers IS NULL THEN
        RETURN 0;
    END IF;
    v_n := cardinality(v_consumers);
    PERFORM taskyard.bump_device_stamp();
    PERFORM taskyard.tell_of_devices(0, p_now, array_fill('account_released'::text, ARRAY[v_n]),
        array_fill(p_pool, ARRAY[v_n]), v_consumers, array_fill(p_detail, ARRAY[v_n]));
    PERFORM taskyard.note_audit_1(p_audit, v_n, v_n);
    RETURN v_n;
END $$;
