-- The audit record: what people asked for.

-- A command has looked at some tasks and changed some of them, in this transaction. An entry of one thing that was not changed
-- is not kept; null is no entry. As `taskyard.model.audit` says it.
CREATE OR REPLACE FUNCTION taskyard.note_audit_1(p_entry json, p_matched bigint, p_changed bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_entry IS NULL OR p_changed = 0 AND (p_entry ->> 'is_finished')::boolean THEN
        RETURN;
    END IF;
    INSERT INTO taskyard.audit AS a (
        id, uuid, at, actor, via, command, kind, target, reason, details, matched, changed, is_finished)
    SELECT nextval('taskyard.seq'), uuid, at, actor, via, command, kind, target, reason, details, p_matched, p_changed,
        is_finished
    FROM json_populate_record(NULL::taskyard.audit, p_entry)
    ON CONFLICT (uuid) DO UPDATE SET matched = a.matched + excluded.matched, changed = a.changed + excluded.changed;
END $$;

-- Write an entry with its counts, or replace that of the same call.
CREATE OR REPLACE FUNCTION taskyard.put_audit_1(p_entry json) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO taskyard.audit (
        id, uuid, at, actor, via, command, kind, target, reason, details, matched, changed, is_finished)
    SELECT nextval('taskyard.seq'), uuid, at, actor, via, command, kind, target, reason, details, matched, changed,
        is_finished
    FROM json_populate_record(NULL::taskyard.audit, p_entry)
    ON CONFLICT (uuid) DO UPDATE SET matched = excluded.matched, changed = excluded.changed,
        is_finished = excluded.is_finished, details = excluded.details;
END $$;

-- Ask a node to drain, or take that back; false if there is no such node.
CREATE OR REPLACE FUNCTION taskyard.drain_node_1(p_node text, p_on boolean, p_audit json) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE taskyard.node SET is_draining = p_on WHERE incarnation = p_node;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM taskyard.note_audit_1(p_audit, 1, 1);
    RETURN true;
END $$;
