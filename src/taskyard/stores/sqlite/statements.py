"""The SQL of the hot path, for blocks of rows.

Whatever is written goes in blocks (`INSERT … VALUES (…), (…)`, `UPDATE … FROM (VALUES …)`), and what is read comes back
as one JSON value. Both for one reason: SQLite gives up the GIL around every step, and with a busy event loop in the
same process each step then costs a switch interval (5 ms). A hundred single-row steps take half a second there, one
block of a hundred rows takes one wait. In an idle process blocks are as fast as anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from taskyard.model.order import Priority
from taskyard.stores.records import ARTIFACT, LINE, OF_ATTEMPT, TASK

BLOCKS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Rows a statement, largest first. apsw caches statements of up to 16 KB of text: 128 rows of 30 columns stay below."""

STAYS = {"note": "NULLIF(COALESCE({0}, note), '')", "position": "COALESCE({0}, position)"}
"""Columns that a null leaves as they are. An empty text clears the note."""

ALL = ", ".join(TASK.columns)

IN_LINE = "fifo_bucket IS NOT NULL AND (state IN ('queued', 'paused') OR blocked_by IS NOT NULL)"
"""What the index `task_fifo_bucket` holds, to the letter: else SQLite would not use the index."""


HAS_ENDED = {
    None: "finished_at IS NOT NULL",
    True: "state = 'failed' AND finished_at IS NOT NULL",
    False: "finished_at IS NOT NULL AND state <> 'failed'",
}
"""All that ended, what failed, and the others: as the indexes `task_finished` and `task_failed_at` have it."""


@cache
def values(rows: int, width: int) -> str:
    return ", ".join(["(" + ", ".join("?" * width) + ")"] * rows)


@cache
def insert(table: str, columns: tuple[str, ...], rows: int) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES {values(rows, len(columns))}"


@cache
def update(columns: tuple[str, ...], rows: int) -> str:
    """Set `columns[1:]` of the tasks whose ids come first in each row. A note or a
    position that is null stays as it is."""
    sets = ", ".join(
        f"{column} = {STAYS.get(column, '{0}').format(f'v.column{i}')}" for i, column in enumerate(columns[1:], 2)
    )
    return f"UPDATE task SET {sets} FROM (VALUES {values(rows, len(columns))}) AS v WHERE task.id = v.column1"


@cache
def start(rows: int) -> str:
    """Start the tasks whose (id, token) come last, on node ?1 at time ?2."""
    sets = (
        "state = 'running', is_parked = 0, note = NULL, attempt = attempt + 1, node = ?1, started_at = ?2, "
        "updated_at = ?2, token"
    )
    if rows == 1:
        return f"UPDATE task SET {sets} = ?4 WHERE id = ?3"
    return f"UPDATE task SET {sets} = v.column2 FROM (VALUES {values(rows, 2)}) AS v WHERE task.id = v.column1"


@cache
def complete(rows: int) -> str:
    """What `apply_move` does for a completed run, with (id, time, result, note) for each."""
    gone = ("token", "node", "worker_pid", "device", "dedupe_slot", "error", "checkpoint")
    sets = "state = 'completed', " + ", ".join(f"{column} = NULL" for column in gone)
    if rows == 1:
        own = "updated_at = ?2, finished_at = ?2, result = ?3, note = COALESCE(?4, note)"
        return f"UPDATE task SET {sets}, {own} WHERE id = ?1"
    own = "updated_at = v.column2, finished_at = v.column2, result = v.column3, note = COALESCE(v.column4, note)"
    return f"UPDATE task SET {sets}, {own} FROM (VALUES {values(rows, 4)}) AS v WHERE task.id = v.column1"


TRIM_RUNS = (
    "DELETE FROM attempt WHERE (task, token) IN (SELECT v.value, ("
    "SELECT r.token FROM attempt AS r WHERE r.task = v.value "
    "ORDER BY r.token DESC LIMIT 1 OFFSET ?) FROM json_each(?) AS v) RETURNING task, token"
)
"""Forget of each of these tasks the run that is one more than are kept."""

LINE_COLUMNS, ARTIFACT_COLUMNS = OF_ATTEMPT + LINE.columns, OF_ATTEMPT + ARTIFACT.columns


@cache
def add_lines(rows: int) -> str:
    """Lines that are there already stay as they are."""
    return f"{insert('attempt_line', LINE_COLUMNS, rows)} ON CONFLICT DO NOTHING"


TRIM_LINES = (
    "DELETE FROM attempt_line WHERE rowid IN (SELECT l.rowid FROM json_each(?) AS v CROSS JOIN attempt_line AS l "
    "ON l.task = v.value ->> 0 AND l.token = v.value ->> 1 AND l.at <= (SELECT o.at FROM attempt_line AS o "
    "WHERE o.task = v.value ->> 0 AND o.token = v.value ->> 1 ORDER BY o.at DESC LIMIT 1 OFFSET ?))"
)
"""Of each of these attempts (task, token), forget the lines before the latest so many."""

SET_ARTIFACT = (
    f"{insert('artifact', ARTIFACT_COLUMNS, 1)} ON CONFLICT DO UPDATE SET "
    f"{', '.join(f'{name} = excluded.{name}' for name in ARTIFACT.columns if name != 'name')}"
)
"""An artifact replaces the one of the same name."""


@cache
def tally(rows: int) -> str:
    return f"INSERT INTO state_count VALUES {values(rows, 5)} ON CONFLICT DO UPDATE SET n = n + excluded.n"


@cache
def report(rows: int) -> str:
    """(id, time, progress, note, checkpoint, worker) of runs that go on; what is not given stays."""
    return (
        "UPDATE task SET updated_at = v.column2, progress = COALESCE(v.column3, progress), "
        "note = COALESCE(v.column4, note), checkpoint = COALESCE(v.column5, checkpoint), "
        "worker_pid = COALESCE(v.column6, worker_pid) "
        f"FROM (VALUES {values(rows, 6)}) AS v WHERE task.id = v.column1"
    )


@cache
def keyed(rows: int, by_place: bool) -> str:
    """For each (queue, key): how many hold the key, who may start, and the first ?1 of those who may not; `by_place`
    the first ?1 of each priority, among which are the first by place alone.

    The list of three states is that of the index `task_key`, to the letter: else SQLite would not use the index."""
    term = "task.queue = v.column1 AND task.key = v.column2 AND task.state IN ('queued', 'running', 'retrying')"
    place = "json_group_array(json_array(priority, position, id))"
    wait = f"SELECT priority, position, id FROM task WHERE {term} AND task.state = 'queued' AND task.is_parked ="
    parked = f"{wait} 1 ORDER BY priority, position LIMIT ?1"
    if by_place:
        of_each = (f"SELECT * FROM ({wait} 1 AND priority = {p} ORDER BY position LIMIT ?1)" for p in Priority)
        parked = " UNION ALL ".join(of_each)
    return (
        "SELECT json_group_array(json_array(v.column1, "
        f"(SELECT count(*) FROM task WHERE {term} AND task.state = 'running') "
        f"+ (SELECT count(*) FROM task WHERE {term} AND task.state = 'retrying'), "
        f"json((SELECT {place} FROM ({wait} 0 ORDER BY priority, position))), "
        f"json((SELECT {place} FROM ({parked}))))) "
        f"FROM (VALUES {values(rows, 2)}) AS v"
    )


FIND_RUNNING = (
    "SELECT uuid FROM task WHERE queue = ? AND key = ? AND state IN ('queued', 'running', 'retrying') "
    "AND state = 'running' ORDER BY id LIMIT 1"
)
"""The oldest running task of a queue and a key. The three states are those of `task_key`, as in `keyed`."""


IS_QUARANTINED = "SELECT 1 FROM quarantined_account WHERE pool = ? AND account = ? AND consumer = ?"


def blocks(rows: list[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """`rows` in as few pieces as the sizes of `BLOCKS` allow."""
    if len(rows) == 1:
        yield rows
        return
    start = 0
    for size in BLOCKS:
        while len(rows) - start >= size:
            yield rows[start : start + size]
            start += size
