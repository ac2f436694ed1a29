-- What people say about queues, what a queue remembers of whose turn it is, lines for queues that go by places alone, and
-- places that were made by hand.

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
    WHERE line IS NOT NULL AND state IN ('queued', 'paused');
CREATE INDEX task_held ON task (queue) WHERE state IN ('paused', 'blocked');

-- The ended task that this one was made of, and whether its run is to be killed. Both are null for nearly all.
ALTER TABLE task ADD COLUMN origin TEXT;
ALTER TABLE task ADD COLUMN cancel_forced INTEGER;
CREATE INDEX task_origin ON task (origin) WHERE origin IS NOT NULL;

-- What failed is kept by an age and a number of its own.
CREATE INDEX task_failed_at ON task (finished_at) WHERE state = 'failed' AND finished_at IS NOT NULL;

-- Places are handed out in multiples; what lies between was put there by hand.
CREATE INDEX task_placed ON task (queue, position) WHERE position % {{gap}} <> 0 AND finished_at IS NULL;

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
