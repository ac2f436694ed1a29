-- All tables and indexes; routines and triggers are in ../bundle. JSON is stored as text. Names are compared byte by byte
-- (COLLATE "C"): the order of a locale would only make every index slower.
-- This file is literal and never changes once it is released: the checksum of an applied migration is stored.

CREATE TABLE taskyard.migration (
    number     integer PRIMARY KEY,
    name       text NOT NULL,
    checksum   text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- The routines, types and triggers, which are replaced as a whole. One row. `objects` names them as DROP does: only these
-- are dropped for the next bundle. A program whose own bundle is older than `needs_program` may not use this one.
CREATE TABLE taskyard.bundle (
    version       integer PRIMARY KEY,
    needs_program integer NOT NULL,
    checksum      text NOT NULL,
    objects       text[] NOT NULL,
    installed_at  timestamptz NOT NULL DEFAULT now()
);

-- The one counter: ids, positions and tokens. No session caches numbers: tokens must grow in the order in which they are
-- handed out.
CREATE SEQUENCE taskyard.seq AS bigint CACHE 1;

-- Unfinished tasks. The table stays small whatever the history, so it stays in memory and a vacuum takes no time.
-- Starting a task adds a second entry beside the first one in two of the indexes: their pages leave room for it.
-- `fifo_bucket` is set in queues that go by position alone ('' or the bucket). In other queues it is mostly null, which
-- needs no index entry.
-- `requires` is JSON of the labels that a place must have. Tasks of one consumer that require the same form a lane. Inserts
-- write `lane`: PostgreSQL 18 reads the expression of a generated column again for every row that is updated.
-- `blocked_by` is the kind and the detail of a blocker, such as disk:/data. A task that waits for others has none.
CREATE TABLE taskyard.task (
    id              bigint PRIMARY KEY WITH (fillfactor = 45),
    token           bigint,
    position        bigint NOT NULL,
    due_at          timestamptz NOT NULL,
    created_at      timestamptz NOT NULL,
    updated_at      timestamptz NOT NULL,
    started_at      timestamptz,
    blocked_at      timestamptz,
    timeout_s       double precision,
    attempt         integer NOT NULL DEFAULT 0,
    retries         integer NOT NULL DEFAULT 0,
    crashes         integer NOT NULL DEFAULT 0,
    recoveries      integer NOT NULL DEFAULT 0,
    worker_pid      integer,
    priority        smallint NOT NULL CHECK (priority BETWEEN 0 AND 2),
    is_parked       boolean NOT NULL,
    state           text COLLATE "C" NOT NULL,
    uuid            text COLLATE "C" NOT NULL,
    consumer        text COLLATE "C" NOT NULL,
    queue           text COLLATE "C" NOT NULL,
    args            text NOT NULL,
    key             text COLLATE "C",
    dedupe_slot     text COLLATE "C",
    retry           text,
    node            text COLLATE "C",
    device          text,
    progress        text,
    error           text,
    note            text,
    hold            text,
    cancel          text,
    blocked_by      text COLLATE "C",
    extra           text,
    checkpoint      text,
    bucket          text COLLATE "C",
    origin          text COLLATE "C",
    fifo_bucket     text COLLATE "C",
    requires        text COLLATE "C",
    lane            text COLLATE "C" NOT NULL,
    CHECK ((state = 'running') = (token IS NOT NULL) AND (token IS NULL) = (node IS NULL)),
    CHECK (blocked_by IS NULL OR state = 'blocked')
) WITH (
    fillfactor = 90,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0.5, autovacuum_analyze_scale_factor = 0.2
);

CREATE UNIQUE INDEX task_uuid ON taskyard.task (uuid) WITH (fillfactor = 45);
CREATE INDEX task_lane ON taskyard.task (queue, lane, priority, position) WHERE state = 'queued' AND NOT is_parked;
CREATE INDEX task_due ON taskyard.task (due_at, id) WHERE state IN ('scheduled', 'retrying');
CREATE INDEX task_running ON taskyard.task (queue, token) WHERE state = 'running';
-- A node reads these after every change hint. Tasks that it ran before must not be in the way.
CREATE INDEX task_cancel ON taskyard.task (node, id) WHERE state = 'running' AND cancel IS NOT NULL;
CREATE INDEX task_waits ON taskyard.task (queue, key, is_parked, priority, position) WHERE key IS NOT NULL AND state = 'queued';
CREATE INDEX task_holds ON taskyard.task (queue, key) WHERE key IS NOT NULL AND state IN ('running', 'retrying');
CREATE UNIQUE INDEX task_dedupe ON taskyard.task (dedupe_slot) WHERE dedupe_slot IS NOT NULL;
CREATE INDEX task_fifo_bucket ON taskyard.task (queue, fifo_bucket, position)
    WHERE fifo_bucket IS NOT NULL AND (state IN ('queued', 'paused') OR blocked_by IS NOT NULL);
CREATE INDEX task_blocked ON taskyard.task (blocked_by, id) WHERE blocked_by IS NOT NULL;
CREATE INDEX task_blocked_lane ON taskyard.task (queue, lane, id) WHERE blocked_by IS NOT NULL;
-- For the list of what a queue holds. Only a query that says queue <> '' can use it: others that look for blocked tasks know their ids.
CREATE INDEX task_held ON taskyard.task (queue, id) WHERE queue <> '' AND state IN ('paused', 'blocked');
CREATE INDEX task_origin ON taskyard.task (origin) WHERE origin IS NOT NULL;
-- Positions are handed out in multiples of 1048576 (GAP). A position between two multiples was set by a person.
CREATE INDEX task_placed ON taskyard.task (queue, position) WHERE position % 1048576 <> 0;

-- Finished tasks: written once (except the error of a task that a person retries in vain), read by people, pruned by age.
-- A completed attempt has no row in `attempt`. This row has all of it: run_token, run_node, run_worker_pid, run_device,
-- attempt, started_at, finished_at. `previous_state` is the state before the end.
CREATE TABLE taskyard.finished (
    id             bigint PRIMARY KEY,
    run_token      bigint,
    position       bigint NOT NULL,
    due_at         timestamptz NOT NULL,
    created_at     timestamptz NOT NULL,
    started_at     timestamptz,
    finished_at    timestamptz NOT NULL,
    timeout_s      double precision,
    attempt        integer NOT NULL,
    retries        integer NOT NULL,
    crashes        integer NOT NULL,
    recoveries     integer NOT NULL,
    run_worker_pid integer,
    priority       smallint NOT NULL,
    previous_state text COLLATE "C" NOT NULL,
    state          text COLLATE "C" NOT NULL CHECK (state IN ('completed', 'failed', 'canceled', 'skipped')),
    uuid           text COLLATE "C" NOT NULL,
    consumer       text COLLATE "C" NOT NULL,
    queue          text COLLATE "C" NOT NULL,
    args           text NOT NULL,
    key            text COLLATE "C",
    retry          text,
    run_node       text COLLATE "C",
    run_device     text,
    progress       text,
    result         text,
    error          text,
    note           text,
    cancel         text,
    extra          text,
    checkpoint     text,
    bucket         text COLLATE "C",
    origin         text COLLATE "C",
    requires       text COLLATE "C"
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_insert_scale_factor = 0.5);

CREATE UNIQUE INDEX finished_uuid ON taskyard.finished (uuid);
CREATE INDEX finished_order ON taskyard.finished (finished_at, id);
CREATE INDEX finished_failed ON taskyard.finished (finished_at, id) WHERE state = 'failed';
CREATE INDEX finished_origin ON taskyard.finished (origin) WHERE origin IS NOT NULL;
CREATE INDEX finished_other ON taskyard.finished (id) WHERE state <> 'completed';

-- The labels of tasks, which `extra` has as well: for filters. A row stays when its task finishes.
CREATE TABLE taskyard.task_label (
    name  text COLLATE "C" NOT NULL,
    value text COLLATE "C" NOT NULL,
    task  bigint NOT NULL,
    PRIMARY KEY (name, value, task)
);
CREATE INDEX task_label_task ON taskyard.task_label (task);

-- The history of devices and accounts. Tasks that ran on no device are in none of these indexes.
CREATE INDEX finished_on_device ON taskyard.finished (run_token) WHERE run_device IS NOT NULL;
CREATE INDEX finished_device ON taskyard.finished (run_device, run_token) WHERE run_device IS NOT NULL;
CREATE INDEX finished_account ON taskyard.finished (key, run_token) WHERE run_device IS NOT NULL;

-- Attempts that did not complete. `device` is the place where it ran, if its consumer has places; then `account` is the
-- key of the task, if it has one.
CREATE TABLE taskyard.attempt (
    task        bigint NOT NULL,
    token       bigint NOT NULL,
    started_at  timestamptz NOT NULL,
    finished_at timestamptz NOT NULL,
    attempt     integer NOT NULL,
    worker_pid  integer,
    node        text COLLATE "C" NOT NULL,
    state       text COLLATE "C" NOT NULL,
    error       text,
    device      text,
    account     text COLLATE "C",
    PRIMARY KEY (task, token)
);
CREATE INDEX attempt_on_device ON taskyard.attempt (token) WHERE device IS NOT NULL;
CREATE INDEX attempt_device ON taskyard.attempt (device, token) WHERE device IS NOT NULL;
CREATE INDEX attempt_account ON taskyard.attempt (account, token) WHERE device IS NOT NULL;

-- Log lines of attempts, finished or running.
CREATE TABLE taskyard.attempt_line (
    task    bigint NOT NULL,
    token   bigint NOT NULL,
    at      timestamptz NOT NULL,
    dropped integer NOT NULL,
    level   text NOT NULL,
    origin  text NOT NULL,
    text    text NOT NULL,
    PRIMARY KEY (task, token, at)
);

-- Artifacts of attempts. A small one is in `data`. A large one is the file `path` on the machine `host`.
CREATE TABLE taskyard.artifact (
    task       bigint NOT NULL,
    token      bigint NOT NULL,
    size       bigint NOT NULL,
    created_at timestamptz NOT NULL,
    name       text COLLATE "C" NOT NULL,
    sha256     text NOT NULL,
    media_type text NOT NULL,
    host       text,
    path       text,
    data       bytea,
    PRIMARY KEY (task, token, name)
);

-- `concurrency` is the limit in force: what a person set, else the one in `settings`. `control` is all that people set.
-- `ordering` is the order in force. `target_ordering` is an order by position that is wanted, and is rolled out in steps:
-- first all tasks get their `fifo_bucket`, by id, up to `rollout_task_id` (null: all have it); then it is decided again, key
-- by key, which tasks are parked, up to `rollout_key` (null: all are decided), as after a change of `per_key`; then
-- `ordering` becomes `target_ordering`.
CREATE TABLE taskyard.queue (
    name            text COLLATE "C" PRIMARY KEY,
    concurrency     integer,
    per_key         integer NOT NULL,
    auto_recover    integer NOT NULL,
    starve_after    integer DEFAULT 8,
    starve_wait     interval DEFAULT interval '600 seconds',
    ordering        text COLLATE "C" NOT NULL DEFAULT 'priority',
    target_ordering text COLLATE "C",
    rollout_task_id bigint,
    rollout_key     text COLLATE "C",
    state           text COLLATE "C" NOT NULL DEFAULT 'running',
    settings        text NOT NULL,
    control         text
);

-- What a queue remembers in order to alternate. For priority 1 (normal) and 2 (low): how many tasks of a higher priority
-- started since, and when one of its tasks was last favored over a higher one. `bucket` is the bucket served last.
CREATE TABLE taskyard.fairness (
    queue          text COLLATE "C" PRIMARY KEY,
    passed_over_1  integer NOT NULL,
    passed_over_2  integer NOT NULL,
    last_favored_1 timestamptz,
    last_favored_2 timestamptz,
    bucket         text COLLATE "C"
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Every (queue, lane) that had a claimable task since its queue was last dropped by `drop_empty_lanes_1`. low_p is 0 if it
-- had one of priority p, else null.
CREATE TABLE taskyard.lane (
    queue text COLLATE "C" NOT NULL,
    lane  text COLLATE "C" NOT NULL,
    low_0 bigint,
    low_1 bigint,
    low_2 bigint,
    PRIMARY KEY (queue, lane)
);

-- No claimable task of priority p is below position low_p (null means 0). Claims start to read there, and so do not walk
-- over dead rows that were claimed before and are not vacuumed yet. A row is never updated: its successor gets a larger
-- `n` and is found from that end, however many dead predecessors a foreign snapshot keeps alive.
CREATE TABLE taskyard.watermark (
    queue text COLLATE "C" NOT NULL,
    lane  text COLLATE "C" NOT NULL,
    n     bigint NOT NULL,
    low_0 bigint,
    low_1 bigint,
    low_2 bigint,
    PRIMARY KEY (queue, lane, n)
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0);

-- How many tasks each queue has in each state: the sum of all rows from `compaction.state_count_from` on. Rows are only
-- added, and compacted now and then: a row that every exchange updates would leave a chain of dead versions while a
-- foreign snapshot keeps them alive. `xid` is the transaction that counted. Rows with an empty queue count open
-- dependencies ('waiting') and finished tasks with dependents to tell ('telling'): their own tables cannot say "none"
-- without a walk over dead rows.
CREATE TABLE taskyard.state_count (
    queue text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,
    n     bigint NOT NULL,
    xid   bigint NOT NULL DEFAULT (pg_current_xact_id()::text::bigint)
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

-- A query for one queue, or for the empty queue, must not use this index and walk over the counts of all queues.
CREATE INDEX state_count_xid ON taskyard.state_count (xid) WHERE queue <> '';
CREATE INDEX state_count_running ON taskyard.state_count (queue, xid) WHERE state = 'running';
CREATE INDEX state_count_open ON taskyard.state_count (state, xid) WHERE queue = '';

-- The same for tasks submitted in transactions of users, which may commit in any order: from
-- `compaction.external_count_from` on. All of them are scheduled.
CREATE TABLE taskyard.external_count (
    xid   bigint NOT NULL DEFAULT (pg_current_xact_id()::text::bigint),
    queue text COLLATE "C" NOT NULL,
    n     bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX external_count_xid ON taskyard.external_count (xid);

CREATE TABLE taskyard.node (
    incarnation text COLLATE "C" PRIMARY KEY,
    beats       bigint NOT NULL DEFAULT 0,
    beat_at     timestamptz NOT NULL DEFAULT now(),
    lease_s     double precision NOT NULL,
    is_draining boolean NOT NULL DEFAULT false,
    info        text NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- The specifications of consumers that nodes have published, as JSON. `node.info` names them by consumer and hash.
CREATE TABLE taskyard.consumer (
    name    text COLLATE "C" NOT NULL,
    hash    text COLLATE "C" NOT NULL,
    spec    text NOT NULL,
    seen_at timestamptz NOT NULL,
    PRIMARY KEY (name, hash)
);

-- What people asked for, one row per call. A command for many tasks adds to the counts, chunk by chunk.
CREATE TABLE taskyard.audit (
    id          bigint PRIMARY KEY,
    at          timestamptz NOT NULL,
    matched     bigint NOT NULL,
    changed     bigint NOT NULL,
    is_finished boolean NOT NULL,
    uuid        text COLLATE "C" NOT NULL UNIQUE,
    actor       text COLLATE "C" NOT NULL,
    via         text COLLATE "C" NOT NULL,
    command     text COLLATE "C" NOT NULL,
    kind        text COLLATE "C" NOT NULL,
    target      text COLLATE "C" NOT NULL,
    reason      text NOT NULL,
    details     text NOT NULL
);
CREATE INDEX audit_actor ON taskyard.audit (actor, id);
CREATE INDEX audit_target ON taskyard.audit (kind, target, id);
CREATE INDEX audit_at ON taskyard.audit (at, id);

-- One row for all tasks of a queue and a consumer that did the same in one transaction: `n` events, numbered from `first` within the
-- transaction `xid`. `ats` has one time for all of them, or one for each.
CREATE TABLE taskyard.event (
    xid      bigint NOT NULL,
    first    integer NOT NULL,
    n        integer NOT NULL,
    kind     text COLLATE "C" NOT NULL,
    queue    text COLLATE "C" NOT NULL,
    consumer text COLLATE "C" NOT NULL,
    ats      timestamptz[] NOT NULL,
    uuids    text[] COLLATE "C" NOT NULL,
    -- JSON of what else each event says, null where none of them says more.
    details  text[],
    PRIMARY KEY (xid, first)
) WITH (toast_tuple_target = 8160, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);
-- Events live for minutes: compressing them takes longer than writing them.
ALTER TABLE taskyard.event ALTER COLUMN uuids SET STORAGE EXTERNAL;

-- How far `compact_1` came: the number of the last trimmed event, and from where counts are read. One row. Its successor
-- gets a larger `n`, for the same reason as in `watermark`.
CREATE TABLE taskyard.compaction (
    n                   bigint PRIMARY KEY,
    trimmed             bigint NOT NULL,
    state_count_from    bigint NOT NULL,
    external_count_from bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0);

INSERT INTO taskyard.compaction VALUES (0, 0, 0, 0);

-- Group, dependency and dedupe fields of the few tasks that have any. The row stays when the task finishes and when it is
-- retried. `open_dependencies` counts the parents that are not done. `dedupe_key` is the slot that the task took; it stays
-- when the task gives the slot up.
CREATE TABLE taskyard.task_relation (
    id                bigint PRIMARY KEY,
    open_dependencies integer NOT NULL DEFAULT 0,
    group_id          text COLLATE "C",
    on_failure        text COLLATE "C",
    dedupe_key        text COLLATE "C",
    dedupe_scope      text COLLATE "C"
);
CREATE INDEX task_relation_group ON taskyard.task_relation (group_id, id) WHERE group_id IS NOT NULL;

-- Kept until the child is pruned: a retry of the child needs to know its parents. `done` is set when the end of the parent
-- was counted.
CREATE TABLE taskyard.dependency (
    child  bigint NOT NULL,
    parent bigint NOT NULL,
    done   boolean NOT NULL,
    PRIMARY KEY (child, parent)
);
CREATE INDEX dependency_open ON taskyard.dependency (parent, child) WHERE NOT done;
-- A task is not pruned while an unfinished task depends on it, or once did.
CREATE INDEX dependency_parent ON taskyard.dependency (parent, child);

-- Finished tasks with dependents that were not told yet. One exchange tells a thousand.
CREATE TABLE taskyard.pending_release (
    place bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task  bigint NOT NULL,
    uuid  text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL
);

-- Dedupe slots that are taken until a time, whatever happens to the task.
CREATE TABLE taskyard.dedupe_window (
    slot  text COLLATE "C" PRIMARY KEY,
    uuid  text COLLATE "C" NOT NULL,
    until timestamptz NOT NULL
);
CREATE INDEX dedupe_window_until ON taskyard.dedupe_window (until);

-- Recurring schedules.
CREATE TABLE taskyard.schedule (
    name       text COLLATE "C" PRIMARY KEY,
    definition text NOT NULL,
    state      text NOT NULL,
    version    text COLLATE "C" NOT NULL,
    actor      text NOT NULL,
    from_code  boolean NOT NULL
);

-- The fire times of schedules that became tasks: one, or one for each item. The unique pair makes each of them fire once,
-- whichever node fires it. `task` is the first of the `made`.
CREATE TABLE taskyard.fire (
    id       bigint PRIMARY KEY,
    fire_at  timestamptz NOT NULL,
    made     integer NOT NULL DEFAULT 1,
    skipped  integer NOT NULL DEFAULT 0,
    schedule text COLLATE "C" NOT NULL,
    task     text COLLATE "C" NOT NULL,
    kind     text COLLATE "C" NOT NULL,
    UNIQUE (schedule, fire_at)
);
CREATE INDEX fire_order ON taskyard.fire (schedule, id);

-- The tasks of a schedule that had not finished when it last fired: the question whether it is busy reads these only.
CREATE TABLE taskyard.fire_task (
    fire     bigint NOT NULL,
    schedule text COLLATE "C" NOT NULL,
    task     text COLLATE "C" NOT NULL,
    PRIMARY KEY (schedule, fire, task)
);

-- `definition`, `edits` and `orders` are JSON. `node` is the incarnation that serves the device, or empty: a node that goes
-- lets go of its devices in the same transaction. `address` is null if the device has none. Whether a device is busy is in
-- `task`.
CREATE TABLE taskyard.device (
    number     bigint NOT NULL,
    version    bigint NOT NULL,
    since      timestamptz,
    beat_at    timestamptz,
    is_up      boolean NOT NULL,
    name       text COLLATE "C" PRIMARY KEY,
    pool       text COLLATE "C" NOT NULL,
    adapter    text COLLATE "C" NOT NULL,
    address    text COLLATE "C",
    node       text COLLATE "C" NOT NULL,
    reason     text NOT NULL,
    step       text NOT NULL,
    definition text NOT NULL,
    edits      text NOT NULL,
    orders     text NOT NULL,
    UNIQUE (pool, number),
    UNIQUE (adapter, address)
);
CREATE INDEX device_node ON taskyard.device (node) WHERE node <> '';

-- Accounts of device pools of which no more tasks are taken. `quarantined` is JSON: by which node or person, when and why.
CREATE TABLE taskyard.quarantined_account (
    failures    integer NOT NULL,
    pool        text COLLATE "C" NOT NULL,
    account     text COLLATE "C" NOT NULL,
    consumer    text COLLATE "C" NOT NULL,
    quarantined text NOT NULL,
    PRIMARY KEY (pool, account, consumer)
);

-- One row. `n` grows with every change of devices, except of their health, and of quarantined accounts.
CREATE TABLE taskyard.device_stamp (
    n bigint PRIMARY KEY
);

INSERT INTO taskyard.device_stamp VALUES (0);

-- On which servers and timelines this database lived. PostgreSQL starts a new timeline when a standby takes over and when
-- a recovery ends. See `skip_numbers_1`.
CREATE TABLE taskyard.server_history (
    place text COLLATE "C" PRIMARY KEY
);
