-- All tables and indexes. Times are microseconds since 1970 in UTC. JSON is stored as text.
-- This file is literal and never changes once it is released: the checksum of an applied migration is stored.

CREATE TABLE migration (
    number     INTEGER PRIMARY KEY,
    name       TEXT NOT NULL,
    checksum   TEXT NOT NULL,
    applied_at INTEGER NOT NULL
) STRICT;

-- The triggers, which are replaced as a whole. One row. `objects` is JSON of their names: only these are dropped for the
-- next bundle. A program whose own bundle is older than `needs_program` may not use this one.
CREATE TABLE bundle (
    version       INTEGER PRIMARY KEY,
    needs_program INTEGER NOT NULL,
    checksum      TEXT NOT NULL,
    objects       TEXT NOT NULL,
    installed_at  INTEGER NOT NULL
) STRICT;

-- `requires` is JSON of the labels that a place must have. Tasks of one consumer that require the same form a lane.
-- `blocked_by` is the kind and the detail of a blocker, such as disk:/data. A task that waits for others has none.
-- `fifo_bucket` is null in queues that go by priority: their tasks are not in the index, which would cost a page each.
-- `open_dependencies` counts the parents that are not done. `dedupe_key` is the slot that the task took. It stays when
-- the task gives the slot up, because a retry takes the slot again. `origin` is the finished task that this one reruns.
CREATE TABLE task (
    id                INTEGER PRIMARY KEY,
    uuid              TEXT NOT NULL UNIQUE,
    consumer          TEXT NOT NULL,
    queue             TEXT NOT NULL,
    args              TEXT NOT NULL,
    state             TEXT NOT NULL,
    priority          INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 2),
    position          INTEGER NOT NULL,
    is_parked         INTEGER NOT NULL,
    key               TEXT,
    dedupe_slot       TEXT,
    timeout_s         REAL,
    retry             TEXT,
    due_at            INTEGER NOT NULL,
    created_at        INTEGER NOT NULL,
    updated_at        INTEGER NOT NULL,
    started_at        INTEGER,
    finished_at       INTEGER,
    attempt           INTEGER NOT NULL DEFAULT 0,
    retries           INTEGER NOT NULL DEFAULT 0,
    crashes           INTEGER NOT NULL DEFAULT 0,
    recoveries        INTEGER NOT NULL DEFAULT 0,
    token             INTEGER,
    node              TEXT,
    worker_pid        INTEGER,
    device            TEXT,
    progress          TEXT,
    result            TEXT,
    error             TEXT,
    note              TEXT,
    hold              TEXT,
    cancel            TEXT,
    blocked_by        TEXT,
    blocked_at        INTEGER,
    checkpoint        TEXT,
    bucket            TEXT,
    fifo_bucket       TEXT,
    origin            TEXT,
    extra             TEXT,
    group_id          TEXT,
    open_dependencies INTEGER NOT NULL DEFAULT 0,
    on_failure        TEXT,
    dedupe_key        TEXT,
    dedupe_scope      TEXT,
    requires          TEXT,
    lane              TEXT NOT NULL AS (CASE WHEN requires IS NULL THEN consumer ELSE consumer || char(31) || requires END),
    CHECK ((state = 'running') = (token IS NOT NULL AND node IS NOT NULL)),
    CHECK (blocked_by IS NULL OR state = 'blocked')
) STRICT;

-- Every index is partial: a finished task is in the table, in the index of its uuid and in the index of its end only.
CREATE INDEX task_lane ON task (queue, lane, priority, position) WHERE state = 'queued' AND is_parked = 0;
CREATE INDEX task_due ON task (due_at, id) WHERE state IN ('scheduled', 'retrying');
CREATE INDEX task_running ON task (node) WHERE state = 'running';
CREATE INDEX task_key ON task (queue, key, state, is_parked, priority, position)
    WHERE key IS NOT NULL AND state IN ('queued', 'running', 'retrying');
CREATE UNIQUE INDEX task_dedupe ON task (dedupe_slot) WHERE dedupe_slot IS NOT NULL;
CREATE INDEX task_finished ON task (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX task_failed ON task (id) WHERE state = 'failed';
CREATE INDEX task_failed_at ON task (finished_at) WHERE state = 'failed' AND finished_at IS NOT NULL;
CREATE INDEX task_fifo_bucket ON task (queue, fifo_bucket, position)
    WHERE fifo_bucket IS NOT NULL AND (state IN ('queued', 'paused') OR blocked_by IS NOT NULL);
CREATE INDEX task_blocked ON task (blocked_by, id) WHERE blocked_by IS NOT NULL;
CREATE INDEX task_blocked_lane ON task (queue, lane) WHERE blocked_by IS NOT NULL;
CREATE INDEX task_held ON task (queue) WHERE state IN ('paused', 'blocked');
CREATE INDEX task_origin ON task (origin) WHERE origin IS NOT NULL;
CREATE INDEX task_group ON task (group_id, id) WHERE group_id IS NOT NULL;
-- Positions are handed out in multiples of 1048576 (GAP). A position between two multiples was set by a person.
CREATE INDEX task_placed ON task (queue, position) WHERE position % 1048576 <> 0 AND finished_at IS NULL;

-- The labels of tasks, which `task.extra` has as well: for filters.
CREATE TABLE task_label (
    name  TEXT NOT NULL,
    value TEXT NOT NULL,
    task  INTEGER NOT NULL,
    PRIMARY KEY (name, value, task)
) STRICT, WITHOUT ROWID;
CREATE INDEX task_label_task ON task_label (task);

-- `device` is the place where it ran, if its consumer has places; then `account` is the key of the task, if it has one.
CREATE TABLE attempt (
    task        INTEGER NOT NULL,
    token       INTEGER NOT NULL,
    attempt     INTEGER NOT NULL,
    node        TEXT NOT NULL,
    state       TEXT NOT NULL,
    started_at  INTEGER NOT NULL,
    finished_at INTEGER NOT NULL,
    error       TEXT,
    worker_pid  INTEGER,
    device      TEXT,
    account     TEXT,
    PRIMARY KEY (task, token)
) STRICT, WITHOUT ROWID;
-- The history of devices and accounts. Attempts without a device are in none of these indexes.
CREATE INDEX attempt_on_device ON attempt (token) WHERE device IS NOT NULL;
CREATE INDEX attempt_device ON attempt (device, token) WHERE device IS NOT NULL;
CREATE INDEX attempt_account ON attempt (account, token) WHERE device IS NOT NULL;

-- Log lines and artifacts of attempts, finished or running. Both tables have a rowid: the index of the key stays small
-- beside long texts.
CREATE TABLE attempt_line (
    task    INTEGER NOT NULL,
    token   INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    level   TEXT NOT NULL,
    text    TEXT NOT NULL,
    origin  TEXT NOT NULL,
    dropped INTEGER NOT NULL,
    PRIMARY KEY (task, token, at)
) STRICT;

-- A small artifact is in `data`. A large one is the file `path` on the machine `host`.
CREATE TABLE artifact (
    task       INTEGER NOT NULL,
    token      INTEGER NOT NULL,
    name       TEXT NOT NULL,
    size       INTEGER NOT NULL,
    sha256     TEXT NOT NULL,
    media_type TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    data       BLOB,
    host       TEXT,
    path       TEXT,
    PRIMARY KEY (task, token, name)
) STRICT;

CREATE TABLE queue (
    name     TEXT PRIMARY KEY,
    settings TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- What people set on a queue.
CREATE TABLE control (
    queue TEXT PRIMARY KEY,
    body  TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- What a queue remembers in order to alternate between priorities or buckets.
CREATE TABLE fairness (
    queue TEXT PRIMARY KEY,
    body  TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- How many tasks of each lane each queue has in each state, written in the transaction that changes the tasks.
-- Only queued tasks are counted by priority, all others have 0 there. Lanes are read by state, so the state comes first.
CREATE TABLE state_count (
    queue    TEXT NOT NULL,
    lane     TEXT NOT NULL,
    state    TEXT NOT NULL,
    priority INTEGER NOT NULL,
    n        INTEGER NOT NULL,
    PRIMARY KEY (state, queue, lane, priority)
) STRICT, WITHOUT ROWID;

CREATE TABLE node (
    incarnation TEXT PRIMARY KEY,
    info        TEXT NOT NULL,
    boot_id     TEXT NOT NULL,
    is_draining INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- The specifications of consumers that nodes have published, as JSON. `node.info` names them by consumer and hash.
CREATE TABLE consumer (
    name    TEXT NOT NULL,
    hash    TEXT NOT NULL,
    spec    TEXT NOT NULL,
    seen_at INTEGER NOT NULL,
    PRIMARY KEY (name, hash)
) STRICT;

-- What people asked for, one row per call. A command for many tasks adds to the counts, chunk by chunk.
CREATE TABLE audit (
    id          INTEGER PRIMARY KEY,
    uuid        TEXT NOT NULL UNIQUE,
    at          INTEGER NOT NULL,
    actor       TEXT NOT NULL,
    via         TEXT NOT NULL,
    command     TEXT NOT NULL,
    kind        TEXT NOT NULL,
    target      TEXT NOT NULL,
    reason      TEXT NOT NULL,
    details     TEXT NOT NULL,
    matched     INTEGER NOT NULL,
    changed     INTEGER NOT NULL,
    is_finished INTEGER NOT NULL
) STRICT;
CREATE INDEX audit_actor ON audit (actor, id);
CREATE INDEX audit_target ON audit (kind, target, id);
CREATE INDEX audit_at ON audit (at, id);

-- One row per transaction, with the events first..last: a hundred claims cost one insert. `seq` is the one counter of
-- the store (ids, positions, tokens) after that transaction. The newest row is never trimmed.
CREATE TABLE event (
    last  INTEGER PRIMARY KEY,
    first INTEGER NOT NULL,
    seq   INTEGER NOT NULL,
    body  TEXT NOT NULL
) STRICT;

-- Kept until the child is pruned: a retry of the child needs to know its parents. `done` is set when the end of the
-- parent was counted.
CREATE TABLE dependency (
    child  INTEGER NOT NULL,
    parent INTEGER NOT NULL,
    done   INTEGER NOT NULL,
    PRIMARY KEY (child, parent)
) STRICT, WITHOUT ROWID;
CREATE INDEX dependency_open ON dependency (parent, child) WHERE done = 0;
-- A task is not pruned while an unfinished task depends on it, or once did.
CREATE INDEX dependency_parent ON dependency (parent, child);

-- Finished tasks with dependents that were not told yet. One transaction tells a thousand.
CREATE TABLE pending_release (
    place INTEGER PRIMARY KEY,
    task  INTEGER NOT NULL,
    uuid  TEXT NOT NULL,
    state TEXT NOT NULL
) STRICT;

-- Dedupe slots that are taken until a time, whatever happens to the task.
CREATE TABLE dedupe_window (
    slot  TEXT PRIMARY KEY,
    uuid  TEXT NOT NULL,
    until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX dedupe_window_until ON dedupe_window (until);

CREATE TABLE schedule (
    name       TEXT PRIMARY KEY,
    definition TEXT NOT NULL,
    state      TEXT NOT NULL,
    version    TEXT NOT NULL,
    actor      TEXT NOT NULL,
    from_code  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The fire times of schedules that became tasks: one, or one for each item. The unique pair makes each of them fire once,
-- whichever node fires it. `task` is the first of the `made`.
CREATE TABLE fire (
    id       INTEGER PRIMARY KEY,
    schedule TEXT NOT NULL,
    fire_at  INTEGER NOT NULL,
    task     TEXT NOT NULL,
    kind     TEXT NOT NULL,
    made     INTEGER NOT NULL DEFAULT 1,
    skipped  INTEGER NOT NULL DEFAULT 0,
    UNIQUE (schedule, fire_at)
) STRICT;
CREATE INDEX fire_order ON fire (schedule, id);

-- The tasks of a schedule that had not finished when it last fired: the question whether it is busy reads these only.
CREATE TABLE fire_task (
    schedule TEXT NOT NULL,
    fire     INTEGER NOT NULL,
    task     TEXT NOT NULL,
    PRIMARY KEY (schedule, fire, task)
) STRICT, WITHOUT ROWID;

-- `definition`, `edits`, `orders` and `health` are JSON. `node` is the incarnation that serves the device, or empty: a node
-- that goes lets go of its devices in the same transaction. Whether a device is busy is in `task`.
CREATE TABLE device (
    name       TEXT PRIMARY KEY,
    definition TEXT NOT NULL,
    edits      TEXT NOT NULL,
    orders     TEXT NOT NULL,
    health     TEXT NOT NULL,
    version    INTEGER NOT NULL,
    node       TEXT NOT NULL,
    pool       TEXT NOT NULL AS (definition ->> '$.pool'),
    number     INTEGER NOT NULL AS (definition ->> '$.number'),
    adapter    TEXT NOT NULL AS (definition ->> '$.adapter'),
    address    TEXT NOT NULL AS (definition ->> '$.address')
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX device_number ON device (pool, number);
CREATE UNIQUE INDEX device_address ON device (adapter, address) WHERE address <> '';
CREATE INDEX device_node ON device (node) WHERE node <> '';

-- Accounts of device pools of which no more tasks are taken. `quarantined` is JSON: by which node or person, when and why.
CREATE TABLE quarantined_account (
    pool        TEXT NOT NULL,
    account     TEXT NOT NULL,
    consumer    TEXT NOT NULL,
    failures    INTEGER NOT NULL,
    quarantined TEXT NOT NULL,
    PRIMARY KEY (pool, account, consumer)
) STRICT, WITHOUT ROWID;

-- One row. `n` grows with every change of devices, except of their health, and of quarantined accounts.
CREATE TABLE device_stamp (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    n  INTEGER NOT NULL
) STRICT;
INSERT INTO device_stamp VALUES (1, 0);
