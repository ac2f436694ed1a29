-- Recurring schedules, and which of their fire times have become tasks.

CREATE TABLE schedule (
    name       TEXT PRIMARY KEY,
    definition TEXT NOT NULL,
    state      TEXT NOT NULL,
    version    TEXT NOT NULL,
    by         TEXT NOT NULL,
    from_code  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The unique pair is what makes a fire time one task, whoever fires it. `ended` is set by a later fire, when the task is
-- found to have ended: only the others are asked for when it matters whether one has not.
CREATE TABLE fire (
    id       INTEGER PRIMARY KEY,
    schedule TEXT NOT NULL,
    fire_at  INTEGER NOT NULL,
    task     TEXT NOT NULL,
    kind     TEXT NOT NULL,
    ended    INTEGER NOT NULL DEFAULT 0,
    UNIQUE (schedule, fire_at)
) STRICT;
CREATE INDEX fire_order ON fire (schedule, id);
CREATE INDEX fire_open ON fire (schedule, task) WHERE ended = 0;
