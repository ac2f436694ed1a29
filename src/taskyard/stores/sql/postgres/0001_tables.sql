-- Tasks, their runs, queues, lanes, nodes, events and schedules. JSON is text. Names are compared byte by byte: the order of a
-- locale would only make every index slower.

-- The one counter: ids, places and tokens. Never cached by a session: tokens must grow in the order they are handed out.
CREATE SEQUENCE taskyard.seq AS bigint CACHE 1;

-- What has not ended. It stays small whatever the history, so that it stays in memory and is vacuumed in no time. Starting
-- a task makes a second entry beside its first in two of the indexes: their pages leave room for it.
CREATE TABLE taskyard.task (
    id              bigint PRIMARY KEY WITH (fillfactor = 45),
    token           bigint,
    position        bigint NOT NULL,
    due_at          timestamptz NOT NULL,
    created_at      timestamptz NOT NULL,
    updated_at      timestamptz NOT NULL,
    started_at      timestamptz,
    cancel_asked_at timestamptz,
    timeout_s       double precision,
    attempt         integer NOT NULL DEFAULT 0,
    retries         integer NOT NULL DEFAULT 0,
    crashes         integer NOT NULL DEFAULT 0,
    recoveries      integer NOT NULL DEFAULT 0,
    priority        smallint NOT NULL CHECK (priority BETWEEN 0 AND 2),
    parked          boolean NOT NULL,
    cancel_forced   boolean NOT NULL DEFAULT false,
    state           text COLLATE "C" NOT NULL,
    uuid            text COLLATE "C" NOT NULL,
    source          text COLLATE "C" NOT NULL,
    queue           text COLLATE "C" NOT NULL,
    args            text NOT NULL,
    key             text COLLATE "C",
    dedupe_slot     text COLLATE "C",
    retry           text,
    node            text COLLATE "C",
    progress        text,
    error           text,
    note            text,
    cancel_reason   text,
    checkpoint      text,
    bucket          text COLLATE "C",
    origin          text COLLATE "C",
    -- The line it stands in, where its queue goes by places alone; where it does not, mostly null, which needs no index.
    line            text COLLATE "C",
    CHECK ((state = 'running') = (token IS NOT NULL) AND (token IS NULL) = (node IS NULL))
) WITH (
    fillfactor = 90,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0.5, autovacuum_analyze_scale_factor = 0.2
);

CREATE UNIQUE INDEX task_uuid ON taskyard.task (uuid) WITH (fillfactor = 45);
CREATE INDEX task_lane ON taskyard.task (queue, source, priority, position) WHERE state = 'queued' AND NOT parked;
CREATE INDEX task_due ON taskyard.task (due_at, id) WHERE state IN ('scheduled', 'retrying');
CREATE INDEX task_running ON taskyard.task (queue, token) WHERE state = 'running';
-- A node asks for these whenever it hears of something: what it ran before must not be in the way.
CREATE INDEX task_cancel ON taskyard.task (node, id) WHERE state = 'running' AND cancel_asked_at IS NOT NULL;
CREATE INDEX task_waits ON taskyard.task (queue, key, parked, priority, position) WHERE key IS NOT NULL AND state = 'queued';
CREATE INDEX task_holds ON taskyard.task (queue, key) WHERE key IS NOT NULL AND state IN ('running', 'retrying');
CREATE UNIQUE INDEX task_dedupe ON taskyard.task (dedupe_slot) WHERE dedupe_slot IS NOT NULL;
CREATE INDEX task_line ON taskyard.task (queue, line, position)
    WHERE line IS NOT NULL AND state IN ('queued', 'paused');
CREATE INDEX task_origin ON taskyard.task (origin) WHERE origin IS NOT NULL;
-- Places are handed out in multiples; what lies between was put there by hand.
CREATE INDEX task_placed ON taskyard.task (queue, position) WHERE position % {{gap}} <> 0;

-- What has ended: written once (but for the error of a task that is sent again in vain), read by people, pruned by age. A
-- completed run has no row of its own in `run`: all there is to say of it stands here (run_token, run_node, attempt,
-- started_at, finished_at). `was` is the state it came from.
CREATE TABLE taskyard.ended (
    id          bigint PRIMARY KEY,
    run_token   bigint,
    position    bigint NOT NULL,
    due_at      timestamptz NOT NULL,
    created_at  timestamptz NOT NULL,
    started_at  timestamptz,
    finished_at timestamptz NOT NULL,
    timeout_s   double precision,
    attempt     integer NOT NULL,
    retries     integer NOT NULL,
    crashes     integer NOT NULL,
    recoveries  integer NOT NULL,
    priority    smallint NOT NULL,
    was         text COLLATE "C" NOT NULL,
    state       text COLLATE "C" NOT NULL CHECK (state IN ('completed', 'failed', 'canceled', 'skipped')),
    uuid        text COLLATE "C" NOT NULL,
    source      text COLLATE "C" NOT NULL,
    queue       text COLLATE "C" NOT NULL,
    args        text NOT NULL,
    key         text COLLATE "C",
    retry       text,
    run_node    text COLLATE "C",
    progress    text,
    result      text,
    error       text,
    note        text,
    checkpoint  text,
    bucket      text COLLATE "C",
    origin      text COLLATE "C"
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_insert_scale_factor = 0.5);

CREATE UNIQUE INDEX ended_uuid ON taskyard.ended (uuid);
CREATE INDEX ended_at ON taskyard.ended (finished_at, id);
CREATE INDEX ended_failed ON taskyard.ended (finished_at, id) WHERE state = 'failed';
CREATE INDEX ended_origin ON taskyard.ended (origin) WHERE origin IS NOT NULL;
CREATE INDEX ended_other ON taskyard.ended (id) WHERE state <> 'completed';

-- The one table of legal moves (model/state.py), written out here when the function is made. What goes as it mostly does
-- needs no look at it: the WHEN clauses are read anew by every statement, and have to be short. A trigger before an update
-- would lock, and log, each row beforehand. A new task may begin as running (`begin_1`).
CREATE FUNCTION taskyard.check_move() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_old text := '{{created}}';
BEGIN
    IF TG_TABLE_NAME = 'ended' THEN
        v_old := NEW.was;
    ELSIF TG_OP = 'UPDATE' THEN
        v_old := OLD.state;
    END IF;
    IF {{illegal_move}} THEN
        RAISE EXCEPTION 'illegal move' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER task_starts BEFORE INSERT ON taskyard.task
    FOR EACH ROW WHEN (NEW.state NOT IN ('queued', 'running')) EXECUTE FUNCTION taskyard.check_move();
CREATE TRIGGER task_moves AFTER UPDATE OF state ON taskyard.task
    FOR EACH ROW WHEN (NEW.state <> 'running' OR OLD.state <> 'queued') EXECUTE FUNCTION taskyard.check_move();
CREATE TRIGGER ended_moves BEFORE INSERT ON taskyard.ended
    FOR EACH ROW WHEN (NEW.state <> 'completed' OR NEW.was <> 'running') EXECUTE FUNCTION taskyard.check_move();

CREATE TABLE taskyard.run (
    task       bigint NOT NULL,
    token      bigint NOT NULL,
    started_at timestamptz NOT NULL,
    ended_at   timestamptz NOT NULL,
    attempt    integer NOT NULL,
    node       text COLLATE "C" NOT NULL,
    state      text COLLATE "C" NOT NULL,
    error      text,
    PRIMARY KEY (task, token)
);

-- `concurrency` is what holds: what a person has said, or else the rule in `settings`. `control` is all that was said.
-- `ordering` is the order that holds. Another that goes by `lines` may be on its way: first all tasks are put into them, of which
-- those up to the id `lined_to` have been, and all if it is null; then those who wait with a key do so by their places, up to
-- the key `reparked_to`, and all if it is null, as after another limit of a key; then it holds.
CREATE TABLE taskyard.queue (
    name         text COLLATE "C" PRIMARY KEY,
    concurrency  integer,
    per_key      integer NOT NULL,
    auto_recover integer NOT NULL,
    starve_after integer DEFAULT 8,
    starve_wait  interval DEFAULT interval '600 seconds',
    ordering     text COLLATE "C" NOT NULL DEFAULT 'priority',
    lines        text COLLATE "C",
    lined_to     bigint,
    reparked_to  text COLLATE "C",
    state        text COLLATE "C" NOT NULL DEFAULT 'running',
    settings     text NOT NULL,
    control      text
);

-- What a queue remembers of whose turn it is: of normal and low, how many higher ones have started meanwhile, and when
-- they were last let in before one; and the bucket served last.
CREATE TABLE taskyard.turns (
    queue    text COLLATE "C" PRIMARY KEY,
    passed_1 integer NOT NULL,
    passed_2 integer NOT NULL,
    let_in_1 timestamptz,
    let_in_2 timestamptz,
    bucket   text COLLATE "C"
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Every (queue, source) that has had a task which may start since its queue was last forgotten (`forget_1`), with 0 for each
-- priority that it had one of.
CREATE TABLE taskyard.lane (
    queue  text COLLATE "C" NOT NULL,
    source text COLLATE "C" NOT NULL,
    low_0  bigint,
    low_1  bigint,
    low_2  bigint,
    PRIMARY KEY (queue, source)
);

-- No task of priority p that may start stands below low_p: claims begin to read there, instead of walking over what was
-- claimed before and could not be vacuumed yet. Where it is null, that is 0. A mark is never updated: the next one gets
-- a larger `n`, and is found from that end, however many of its forerunners a foreign snapshot keeps alive.
CREATE TABLE taskyard.mark (
    queue  text COLLATE "C" NOT NULL,
    source text COLLATE "C" NOT NULL,
    n      bigint NOT NULL,
    low_0  bigint,
    low_1  bigint,
    low_2  bigint,
    PRIMARY KEY (queue, source, n)
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0);

-- How many tasks each queue holds in each state: the sum of all rows, from `tidied.tally_from` on. Rows are only added,
-- and put together now and then: a row that every turn updates would leave a chain of versions that a foreign snapshot
-- keeps alive. `xid` is the transaction that has counted. Of no queue: how many edges are open ('waiting'), and ends are still
-- to be told ('telling'). That there are none cannot be seen in their own tables without walking over all that there were.
CREATE TABLE taskyard.tally (
    queue text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,
    n     bigint NOT NULL,
    xid   bigint NOT NULL DEFAULT (pg_current_xact_id()::text::bigint)
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

-- Where somebody asks for one queue, or for none, no plan may take this one, and walk over what all of them counted.
CREATE INDEX tally_xid ON taskyard.tally (xid) WHERE queue <> '';
CREATE INDEX tally_running ON taskyard.tally (queue, xid) WHERE state = 'running';
CREATE INDEX tally_open ON taskyard.tally (state, xid) WHERE queue = '';

-- The same of what was submitted in transactions of others, which may end in any order: from `tidied.submitted_from` on.
CREATE TABLE taskyard.submitted (
    xid   bigint NOT NULL DEFAULT (pg_current_xact_id()::text::bigint),
    queue text COLLATE "C" NOT NULL,
    n     bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX submitted_xid ON taskyard.submitted (xid);

CREATE TABLE taskyard.node (
    incarnation text COLLATE "C" PRIMARY KEY,
    beats       bigint NOT NULL DEFAULT 0,
    beat_at     timestamptz NOT NULL DEFAULT now(),
    lease_s     double precision NOT NULL,
    is_draining boolean NOT NULL DEFAULT false,
    info        text NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- What happened, a row for all tasks of a lane that did the same in one transaction: `n` events, numbered from `first`
-- on within the transaction `xid`. `ats` has one time for all of them, or one for each.
CREATE TABLE taskyard.event (
    xid    bigint NOT NULL,
    first  integer NOT NULL,
    n      integer NOT NULL,
    kind   text COLLATE "C" NOT NULL,
    queue  text COLLATE "C" NOT NULL,
    source text COLLATE "C" NOT NULL,
    ats    timestamptz[] NOT NULL,
    uuids  text[] COLLATE "C" NOT NULL,
    PRIMARY KEY (xid, first)
) WITH (toast_tuple_target = 8160, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);
-- They live for minutes: to compress them takes longer than to write them.
ALTER TABLE taskyard.event ALTER COLUMN uuids SET STORAGE EXTERNAL;

-- How far it was tidied up: the number of the last event that was trimmed, and where to begin reading what was counted.
-- One row, which is replaced by one with a larger `n`, for the reason that `mark` has.
CREATE TABLE taskyard.tidied (
    n              bigint PRIMARY KEY,
    trimmed        bigint NOT NULL,
    tally_from     bigint NOT NULL,
    submitted_from bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0);

INSERT INTO taskyard.tidied VALUES (0, 0, 0, 0);

-- Of the few tasks that have to do with others. It stays where it is when a task ends, and when it is sent again.
-- `waits` is how many of those it waits for are not done yet; `dedupe_key` the slot that it took, kept when it gives the
-- slot up.
CREATE TABLE taskyard.tie (
    id           bigint PRIMARY KEY,
    waits        integer NOT NULL DEFAULT 0,
    group_id     text COLLATE "C",
    on_failure   text COLLATE "C",
    dedupe_key   text COLLATE "C",
    dedupe_scope text COLLATE "C"
);
CREATE INDEX tie_group ON taskyard.tie (group_id, id) WHERE group_id IS NOT NULL;

-- Kept until the child is pruned: who sends it again has to know what it waits for. `done` is set when the parent's end
-- has been counted.
CREATE TABLE taskyard.dependency (
    child  bigint NOT NULL,
    parent bigint NOT NULL,
    done   boolean NOT NULL,
    PRIMARY KEY (child, parent)
);
CREATE INDEX dependency_open ON taskyard.dependency (parent, child) WHERE NOT done;
-- A task is not pruned as long as one that waits, or has waited, for it has not ended.
CREATE INDEX dependency_parent ON taskyard.dependency (parent, child);

CREATE FUNCTION taskyard.count_open() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_n bigint := 0;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        v_n := v_n - (SELECT count(*) FROM former WHERE NOT done);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        v_n := v_n + (SELECT count(*) FROM latter WHERE NOT done);
    END IF;
    IF v_n <> 0 THEN
        INSERT INTO taskyard.tally (queue, state, n) VALUES ('', 'waiting', v_n);
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER edges_come AFTER INSERT ON taskyard.dependency REFERENCING NEW TABLE AS latter
    FOR EACH STATEMENT EXECUTE FUNCTION taskyard.count_open();
CREATE TRIGGER edges_change AFTER UPDATE ON taskyard.dependency REFERENCING OLD TABLE AS former NEW TABLE AS latter
    FOR EACH STATEMENT EXECUTE FUNCTION taskyard.count_open();
CREATE TRIGGER edges_go AFTER DELETE ON taskyard.dependency REFERENCING OLD TABLE AS former
    FOR EACH STATEMENT EXECUTE FUNCTION taskyard.count_open();

-- Tasks that have ended, and whose end some that wait for them have not heard of yet: a turn tells a thousand.
CREATE TABLE taskyard.releasing (
    place bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task  bigint NOT NULL,
    uuid  text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL
);

-- Slots that are taken until a time, whatever becomes of the task.
CREATE TABLE taskyard.slot_window (
    slot  text COLLATE "C" PRIMARY KEY,
    uuid  text COLLATE "C" NOT NULL,
    until timestamptz NOT NULL
);
CREATE INDEX slot_window_until ON taskyard.slot_window (until);

-- Recurring schedules, and which of their fire times have become tasks.
CREATE TABLE taskyard.schedule (
    name       text COLLATE "C" PRIMARY KEY,
    definition text NOT NULL,
    state      text NOT NULL,
    version    text COLLATE "C" NOT NULL,
    by         text NOT NULL,
    from_code  boolean NOT NULL
);

-- The unique pair is what makes a fire time one task, whoever fires it. `ended` is set by a later fire, when the task is
-- found to have ended: only the others are asked for when it matters whether one has not.
CREATE TABLE taskyard.fire (
    id       bigint PRIMARY KEY,
    fire_at  timestamptz NOT NULL,
    ended    boolean NOT NULL DEFAULT false,
    schedule text COLLATE "C" NOT NULL,
    task     text COLLATE "C" NOT NULL,
    kind     text COLLATE "C" NOT NULL,
    UNIQUE (schedule, fire_at)
);
CREATE INDEX fire_order ON taskyard.fire (schedule, id);
CREATE INDEX fire_open ON taskyard.fire (schedule, task) WHERE NOT ended;
