-- Tasks, their runs, queues, nodes and events. Times are microseconds since 1970 in UTC; JSON is text.

CREATE TABLE task (
    id              INTEGER PRIMARY KEY,
    uuid            TEXT NOT NULL UNIQUE,
    source          TEXT NOT NULL,
    queue           TEXT NOT NULL,
    args            TEXT NOT NULL,
    state           TEXT NOT NULL,
    priority        INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 2),
    position        INTEGER NOT NULL,
    parked          INTEGER NOT NULL,
    key             TEXT,
    dedupe_slot     TEXT,
    timeout_s       REAL,
    retry           TEXT,
    due_at          INTEGER NOT NULL,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL,
    started_at      INTEGER,
    finished_at     INTEGER,
    attempt         INTEGER NOT NULL DEFAULT 0,
    retries         INTEGER NOT NULL DEFAULT 0,
    crashes         INTEGER NOT NULL DEFAULT 0,
    recoveries      INTEGER NOT NULL DEFAULT 0,
    token           INTEGER,
    node            TEXT,
    cancel_asked_at INTEGER,
    progress        TEXT,
    result          TEXT,
    error           TEXT,
    note            TEXT,
    CHECK ((state = 'running') = (token IS NOT NULL AND node IS NOT NULL))
) STRICT;

-- Every index is partial: a finished task stands in the table, in the index of its uuid and in that of its end only.
CREATE INDEX task_lane ON task (queue, source, priority, position) WHERE state = 'queued' AND parked = 0;
CREATE INDEX task_due ON task (due_at, id) WHERE state IN ('scheduled', 'retrying');
CREATE INDEX task_running ON task (node) WHERE state = 'running';
CREATE INDEX task_key ON task (queue, key, state, parked, priority, position)
    WHERE key IS NOT NULL AND state IN ('queued', 'running', 'retrying');
CREATE UNIQUE INDEX task_dedupe ON task (dedupe_slot) WHERE dedupe_slot IS NOT NULL;
CREATE INDEX task_ended ON task (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX task_failed ON task (id) WHERE state = 'failed';

-- The one table of legal moves (model/state.py), written out here when the triggers are made; no other state can appear.
-- When that table changes, a new migration drops these triggers and makes them again.
CREATE TRIGGER task_starts BEFORE INSERT ON task
WHEN {{illegal_start}}
BEGIN SELECT RAISE(ABORT, 'illegal move'); END;

CREATE TRIGGER task_moves BEFORE UPDATE OF state ON task
WHEN {{illegal_move}}
BEGIN SELECT RAISE(ABORT, 'illegal move'); END;

CREATE TABLE run (
    task       INTEGER NOT NULL,
    token      INTEGER NOT NULL,
    attempt    INTEGER NOT NULL,
    node       TEXT NOT NULL,
    state      TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    ended_at   INTEGER NOT NULL,
    error      TEXT,
    PRIMARY KEY (task, token)
) STRICT, WITHOUT ROWID;

CREATE TABLE queue (
    name     TEXT PRIMARY KEY,
    settings TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- How many tasks of each source each queue holds in each state, kept in the same transaction as the tasks. Those with
-- anything queued are the lanes: claims seek them instead of scanning for them.
CREATE TABLE tally (
    queue  TEXT NOT NULL,
    source TEXT NOT NULL,
    state  TEXT NOT NULL,
    n      INTEGER NOT NULL,
    PRIMARY KEY (queue, source, state)
) STRICT, WITHOUT ROWID;
CREATE INDEX tally_open ON tally (queue, source, state, n) WHERE state IN ('queued', 'running') AND n > 0;

CREATE TABLE node (
    incarnation TEXT PRIMARY KEY,
    info        TEXT NOT NULL,
    boot_id     TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- One row a transaction, holding events first..last, so that a hundred claims cost one insert. `seq` is the store's one
-- counter (ids, places, tokens) as that transaction left it; the newest row is never trimmed.
CREATE TABLE event (
    last  INTEGER PRIMARY KEY,
    first INTEGER NOT NULL,
    seq   INTEGER NOT NULL,
    body  TEXT NOT NULL
) STRICT;
