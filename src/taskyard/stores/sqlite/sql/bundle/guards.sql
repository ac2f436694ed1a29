-- The table of legal moves (`LEGAL` in model/state.py), enforced by the database.

CREATE TRIGGER task_starts BEFORE INSERT ON task
WHEN {{illegal_start}}
BEGIN SELECT RAISE(ABORT, 'illegal move'); END;

CREATE TRIGGER task_moves BEFORE UPDATE OF state ON task
WHEN {{illegal_move}}
BEGIN SELECT RAISE(ABORT, 'illegal move'); END;
