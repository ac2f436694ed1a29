-- The specifications of consumers that nodes publish.

-- Store these specifications, and forget those that no node has, except the last one of a consumer that no node has at
-- all, for a while, by the clock of the server if that of the node is ahead. As `taskyard.model.catalogue` says it.
CREATE OR REPLACE FUNCTION taskyard.publish_specs(p_specs json, p_now timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({{lock_catalogue}}, 0);
    INSERT INTO taskyard.consumer (name, hash, spec, seen_at)
    SELECT j.name, j.hash, j.spec, p_now FROM json_to_recordset(p_specs) AS j(name text, hash text, spec text)
    ON CONFLICT (name, hash) DO UPDATE SET seen_at = excluded.seen_at;
    WITH used AS MATERIALIZED (
        SELECT DISTINCT s.key COLLATE "C" AS name, s.value COLLATE "C" AS hash
        FROM taskyard.node AS n CROSS JOIN LATERAL json_each_text(n.info::json -> 'specs') AS s
    )
    DELETE FROM taskyard.consumer AS c
    WHERE NOT EXISTS (SELECT FROM used AS u WHERE u.name = c.name AND u.hash = c.hash) AND (
        EXISTS (SELECT FROM used AS u WHERE u.name = c.name)
        OR EXISTS (SELECT FROM taskyard.consumer AS later
            WHERE later.name = c.name AND (later.seen_at, later.hash) > (c.seen_at, c.hash))
        OR c.seen_at < least(p_now, now()) - interval '{{spec_kept_s}} seconds');
END $$;

-- This node leaves or changes, and has had its specifications until now.
CREATE OR REPLACE FUNCTION taskyard.see_specs(p_node text, p_now timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({{lock_catalogue}}, 0);
    UPDATE taskyard.consumer AS c SET seen_at = p_now
    FROM taskyard.node AS n CROSS JOIN LATERAL json_each_text(n.info::json -> 'specs') AS s
    WHERE n.incarnation = p_node AND s.key = c.name AND s.value = c.hash;
END $$;

CREATE OR REPLACE FUNCTION taskyard.join_node_1(
    p_node text, p_info text, p_lease_s double precision, p_specs json, p_now timestamptz
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({{lock_catalogue}}, 0);
    INSERT INTO taskyard.node (incarnation, info, lease_s) VALUES (p_node, p_info, p_lease_s)
    ON CONFLICT (incarnation) DO UPDATE SET info = excluded.info, lease_s = excluded.lease_s,
        beats = node.beats + 1, beat_at = now(), is_draining = false;
    PERFORM taskyard.publish_specs(p_specs, p_now);
END $$;

CREATE OR REPLACE FUNCTION taskyard.describe_node_1(p_node text, p_info text, p_specs json, p_now timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM taskyard.see_specs(p_node, p_now);
    UPDATE taskyard.node SET info = p_info WHERE incarnation = p_node;
    IF FOUND THEN
        PERFORM taskyard.publish_specs(p_specs, p_now);
    END IF;
END $$;

-- Forget a node; false if it runs tasks, and stays to be rescued.
CREATE OR REPLACE FUNCTION taskyard.leave_node_1(p_node text, p_now timestamptz) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared({{lock_events}}, 0);
    PERFORM taskyard.see_specs(p_node, p_now);
    DELETE FROM taskyard.node WHERE incarnation = p_node
        AND NOT EXISTS (SELECT FROM taskyard.task WHERE state = 'running' AND node = p_node);
    IF NOT FOUND AND EXISTS (SELECT FROM taskyard.node WHERE incarnation = p_node) THEN
        RETURN false;
    END IF;
    PERFORM taskyard.publish_specs('[]', p_now);
    PERFORM taskyard.let_devices_go(0, p_node, NULL, p_now);
    RETURN true;
END $$;
