-- Tasks that wait for others, groups, and what is remembered of the work that a task stands for.

-- `waits` is how many of those it waits for are not done yet. `dedupe_key` is the slot that a task took, kept when it
-- gives the slot up: sent again by a person, it takes it again.
ALTER TABLE task ADD COLUMN group_id TEXT;
ALTER TABLE task ADD COLUMN waits INTEGER NOT NULL DEFAULT 0;
ALTER TABLE task ADD COLUMN on_failure TEXT;
ALTER TABLE task ADD COLUMN dedupe_key TEXT;
ALTER TABLE task ADD COLUMN dedupe_scope TEXT;

CREATE INDEX task_group ON task (group_id, id) WHERE group_id IS NOT NULL;

-- Kept until the child is pruned: who sends it again has to know what it waits for. `done` is set when the parent's end
-- has been counted.
CREATE TABLE dependency (
    child  INTEGER NOT NULL,
    parent INTEGER NOT NULL,
    done   INTEGER NOT NULL,
    PRIMARY KEY (child, parent)
) STRICT, WITHOUT ROWID;
CREATE INDEX dependency_open ON dependency (parent, child) WHERE done = 0;
-- A task is not pruned as long as one that waits, or has waited, for it has not ended.
CREATE INDEX dependency_parent ON dependency (parent, child);

-- Tasks that have ended, and whose end some that wait for them have not heard of yet: a turn tells a thousand.
CREATE TABLE releasing (
    place INTEGER PRIMARY KEY,
    task  INTEGER NOT NULL,
    uuid  TEXT NOT NULL,
    state TEXT NOT NULL
) STRICT;

-- Slots that are taken until a time, whatever becomes of the task.
CREATE TABLE slot_window (
    slot  TEXT PRIMARY KEY,
    uuid  TEXT NOT NULL,
    until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX slot_window_until ON slot_window (until);
