-- The lanes are read by state, so the state comes first. Until here an index did that, which cost every commit one page.

CREATE TABLE tally_by_state (
    queue  TEXT NOT NULL,
    source TEXT NOT NULL,
    state  TEXT NOT NULL,
    n      INTEGER NOT NULL,
    PRIMARY KEY (state, queue, source)
) STRICT, WITHOUT ROWID;
INSERT INTO tally_by_state SELECT queue, source, state, n FROM tally;
DROP TABLE tally;
ALTER TABLE tally_by_state RENAME TO tally;
