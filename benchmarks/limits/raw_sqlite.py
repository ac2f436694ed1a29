"""SQLite by itself, as fast as plain statements go at full durability: what any store on it is held against.

The table is a realistic one, not a toy: twelve columns, a 16-byte time-ordered id as primary key, and one
secondary index over what is queued. WAL, `synchronous=FULL`: a commit returns when it is on the disk.
"""

import os
import time
from pathlib import Path
from typing import Any

import apsw
import msgspec

from benchmarks.reading import Reading, percentile

QUEUED, RUNNING, COMPLETED = 1, 2, 3
CLAIMED_AT_ONCE = 100

SCHEMA = """
CREATE TABLE task (
    id BLOB PRIMARY KEY,
    queue TEXT NOT NULL,
    name TEXT NOT NULL,
    state INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    position INTEGER NOT NULL,
    arguments TEXT NOT NULL,
    created_at REAL NOT NULL,
    due_at REAL NOT NULL,
    attempt INTEGER NOT NULL,
    finished_at REAL,
    result TEXT
);
CREATE INDEX task_queued ON task (queue, priority, position) WHERE state = 1;
"""
INSERT = "INSERT INTO task VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
CLAIM = f"""
UPDATE task SET state = {RUNNING}, attempt = attempt + 1
WHERE id IN (SELECT id FROM task WHERE queue = ? AND state = {QUEUED} ORDER BY priority, position LIMIT ?)
RETURNING id, arguments
"""
COMPLETE = f"UPDATE task SET state = {COMPLETED}, finished_at = ?, result = ? WHERE id = ?"

Row = tuple[bytes, str, str, int, int, int, str, float, float, int, None, None]
_encode = msgspec.json.encode


def _open(folder: Path) -> apsw.Connection:
    database = apsw.Connection(str(folder / "raw.db"))
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute(SCHEMA)
    return database


def _row(number: int) -> Row:
    """What a submit has to make at the very least: a fresh id and the arguments as JSON."""
    now = time.time()
    fresh = int(now * 1000).to_bytes(6, "big") + os.urandom(10)
    arguments = _encode({"number": number}).decode()
    return fresh, "default", "noop", QUEUED, 0, number << 32, arguments, now, now, 0, None, None


def _insert_all(database: apsw.Connection, rows: list[Row]) -> None:
    database.execute("BEGIN IMMEDIATE")
    database.executemany(INSERT, rows)
    database.execute("COMMIT")


def _held(folder: Path, state: int) -> int:
    """Counted through a new connection: only what was committed."""
    database = apsw.Connection(str(folder / "raw.db"), flags=apsw.SQLITE_OPEN_READONLY)
    return int(database.execute("SELECT count(*) FROM task WHERE state = ?", (state,)).get)


def _claim(database: apsw.Connection) -> list[tuple[bytes, str]]:
    database.execute("BEGIN IMMEDIATE")
    claimed: list[Any] = database.execute(CLAIM, ("default", CLAIMED_AT_ONCE)).fetchall()
    database.execute("COMMIT")
    return claimed


def _complete(database: apsw.Connection, claimed: list[tuple[bytes, str]]) -> None:
    now = time.time()
    database.execute("BEGIN IMMEDIATE")
    database.executemany(COMPLETE, [(now, result, task) for task, result in claimed])
    database.execute("COMMIT")


def drain(folder: Path, count: int) -> Reading:
    """Claim 100, commit, complete 100 with a result, commit; until nothing is queued."""
    database = _open(folder)
    _insert_all(database, [_row(number) for number in range(count)])
    began = time.perf_counter()
    while claimed := _claim(database):
        _complete(database, claimed)
    elapsed = time.perf_counter() - began
    database.close()
    return Reading(count / elapsed, given=count, held=_held(folder, COMPLETED))


def insert_one_by_one(folder: Path, count: int) -> Reading:
    """One row per commit, one after the other."""
    database = _open(folder)
    began = time.perf_counter()
    for number in range(count):
        database.execute(INSERT, _row(number))
    elapsed = time.perf_counter() - began
    database.close()
    return Reading(count / elapsed, given=count, held=_held(folder, QUEUED))


def insert_batches(folder: Path, batches: int, size: int) -> Reading:
    """Rows made (an id, the arguments as JSON) and inserted, `size` per commit."""
    database = _open(folder)
    began = time.perf_counter()
    for batch in range(batches):
        _insert_all(database, [_row(batch * size + offset) for offset in range(size)])
    elapsed = time.perf_counter() - began
    database.close()
    return Reading(batches * size / elapsed, given=batches * size, held=_held(folder, QUEUED))


def insert_ready_batches(folder: Path, batches: int, size: int) -> Reading:
    """The same with rows made beforehand: what the database alone takes."""
    database = _open(folder)
    made = [[_row(batch * size + offset) for offset in range(size)] for batch in range(batches)]
    began = time.perf_counter()
    for rows in made:
        _insert_all(database, rows)
    elapsed = time.perf_counter() - began
    database.close()
    return Reading(batches * size / elapsed, given=batches * size, held=_held(folder, QUEUED))


def commit_times(folder: Path, count: int, gap_s: float) -> list[float]:
    """Seconds for each of `count` one-row commits on a machine that is otherwise left alone between them."""
    database = _open(folder)
    times = []
    for number in range(count):
        time.sleep(gap_s)
        row = _row(number)
        began = time.perf_counter()
        database.execute(INSERT, row)
        times.append(time.perf_counter() - began)
    database.close()
    return times


def commit(folder: Path, count: int, gap_s: float) -> Reading:
    """p50 of one commit."""
    times = commit_times(folder, count, gap_s)
    return Reading(percentile(times, 50), given=count, held=_held(folder, QUEUED))
