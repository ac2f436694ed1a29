-- What people say about queues, what a queue remembers of whose turn it is, and lines for queues that go by places alone.

CREATE TABLE control (
    queue TEXT PRIMARY KEY,
    body  TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE turns (
    queue TEXT PRIMARY KEY,
    body  TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- `line` is null in queues by priority: no task of theirs stands in the index, which would cost each of them a page.
ALTER TABLE task ADD COLUMN bucket TEXT;
ALTER TABLE task ADD COLUMN line TEXT;
CREATE INDEX task_line ON task (queue, line, position)
    WHERE line IS NOT NULL AND state IN ('queued', 'paused', 'blocked');
CREATE INDEX task_held ON task (queue) WHERE state IN ('paused', 'blocked');

-- Lanes are of one priority each: what is queued is counted by priority as well. All else has 0 there.
CREATE TABLE tally_by_priority (
    queue    TEXT NOT NULL,
    source   TEXT NOT NULL,
    state    TEXT NOT NULL,
    priority INTEGER NOT NULL,
    n        INTEGER NOT NULL,
    PRIMARY KEY (state, queue, source, priority)
) STRICT, WITHOUT ROWID;
INSERT INTO tally_by_priority SELECT queue, source, state, 0, n FROM tally WHERE state <> 'queued';
INSERT INTO tally_by_priority
    SELECT queue, source, state, priority, count(*) FROM task WHERE state = 'queued' GROUP BY queue, source, priority;
DROP TABLE tally;
ALTER TABLE tally_by_priority RENAME TO tally;
