"""Looks at a SQLite store from outside: its file, schema, integrity, write lock, nodes and tasks. Changes nothing.

The file may be damaged, foreign, locked or not readable. Each part is read as far as it can be, and what went wrong is
in the answer: `inspect` raises no error of SQLite.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from pathlib import Path
from typing import Any

import apsw

from taskyard.errors import StoreError, StoreMigrationChanged, StoreTooNew
from taskyard.model.node import Node, NodeStatus
from taskyard.model.state import TaskState
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Schema
from taskyard.stores.inspection import RUNNING_AT_MOST, StoreActivity
from taskyard.stores.records import from_us
from taskyard.stores.sqlite.locks import LockOwner, find_node_process, find_sqlite_writer, find_write_lock_owner
from taskyard.stores.sqlite.place import APPLICATION_ID, find_schema_of, to_store_error
from taskyard.stores.sqlite.reader import SqliteReader
from taskyard.stores.sqlite.schedules import read_schedules
from taskyard.stores.sqlite.sidecar import LockFile, folder_of, node_file_name
from taskyard.stores.sqlite.store import boot_id

CHECK_S = 20.0
"""Seconds the check of all pages may take; a very large file is then checked in part."""

LOCK_SAMPLES, LOCK_SAMPLE_S = 10, 0.1
"""The write lock is sampled so often. One owner in all samples, with no commit in between, is stuck."""

BUSY_MS = 2_000
"""Milliseconds to wait for a lock of SQLite."""


class Contents(Enum):
    """Whose database the file is."""

    EMPTY = auto()
    STORE = auto()
    FOREIGN = auto()


@dataclass(frozen=True, slots=True)
class IntegrityCheck:
    """The lines of SQLite's quick check, none if it passed. `is_complete` is false if time ran out."""

    problems: Sequence[str]
    took_s: float
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class StuckWriter:
    """A process that blocks every writer: it has the write lock of the store, or a write transaction of SQLite."""

    owner: LockOwner
    has_write_lock: bool


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """A node and its process. `process` is None if the kernel names none; without `has_file` others cannot wake it."""

    status: NodeStatus
    is_alive: bool
    has_file: bool
    process: LockOwner | None


@dataclass(slots=True)
class SqliteInspection:
    """Parts that were not read are None: `refusal`, `damage` or `error` says why."""

    file_bytes: int
    wal_bytes: int
    contents: Contents | None = None
    schema: Schema | None = None
    refusal: StoreTooNew | StoreMigrationChanged | None = None
    integrity: IntegrityCheck | None = None
    stuck_writer: StuckWriter | None = None
    nodes: Sequence[NodeProcess] = field(default_factory=list)
    activity: StoreActivity | None = None
    damage: str | None = None
    error: StoreError | None = None


def inspect(path: Path) -> SqliteInspection:
    """Look at the file at `path`, which exists. Takes up to `CHECK_S`, and a second more if a writer seems stuck."""
    wal = path.with_name(path.name + "-wal")
    found = SqliteInspection(path.stat().st_size, wal.stat().st_size if wal.exists() else 0)
    try:
        with _opened_read_only(path) as conn:
            _read(path, conn, found)
    except (apsw.NotADBError, apsw.CorruptError) as exc:
        found.damage = str(exc)
    except apsw.Error as exc:
        found.error = to_store_error(path, exc)
    return found


def _read(path: Path, conn: apsw.Connection, found: SqliteInspection) -> None:
    found.contents = _contents(conn)
    if found.contents is not Contents.STORE:
        return
    try:
        found.schema = find_schema_of(conn, path)
    except (StoreTooNew, StoreMigrationChanged) as error:
        found.refusal = error
        return
    found.integrity = _check_pages(conn)
    found.stuck_writer = _find_stuck_writer(path, conn)
    # The rows of a damaged file are not to be trusted, and those of an older schema cannot be read.
    if found.integrity.problems or found.schema.version != found.schema.newest:
        return
    reader = SqliteReader(conn)
    found.nodes = [_find_process(path, status, boot) for status, boot in reader.nodes()]
    found.activity = _read_activity(conn, reader)


@contextmanager
def _opened_read_only(path: Path) -> Iterator[apsw.Connection]:
    """A connection that writes nothing. Where SQLite cannot make its shared memory, it reads the file without the
    WAL."""
    try:
        conn = _connect(path, "mode=ro")
    except apsw.CantOpenError:
        conn = _connect(path, "immutable=1")
    try:
        yield conn
    finally:
        conn.close()


def _connect(path: Path, parameters: str) -> apsw.Connection:
    uri = path.absolute().as_uri() + "?" + parameters
    conn = apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        conn.set_busy_timeout(BUSY_MS)
        conn.execute("PRAGMA query_only = ON; PRAGMA mmap_size = 0; SELECT count(*) FROM sqlite_schema").fetchall()
    except BaseException:
        conn.close()
        raise
    return conn


def _contents(conn: apsw.Connection) -> Contents:
    owner, version = _one(conn, "PRAGMA application_id"), _one(conn, "PRAGMA user_version")
    if owner == APPLICATION_ID:
        return Contents.STORE
    is_empty = owner == 0 and version == 0 and _one(conn, "SELECT count(*) FROM sqlite_schema") == 0
    return Contents.EMPTY if is_empty else Contents.FOREIGN


def _check_pages(conn: apsw.Connection) -> IntegrityCheck:
    """SQLite's quick check of every page, within a bounded time."""
    began = time.monotonic()
    conn.set_progress_handler(lambda: time.monotonic() - began > CHECK_S, 100_000)
    try:
        rows = [str(row[0]) for row in conn.execute("PRAGMA quick_check(5)")]
    except apsw.InterruptError:
        return IntegrityCheck((), time.monotonic() - began, is_complete=False)
    finally:
        conn.set_progress_handler(None)
    lines = [] if rows == ["ok"] else [line for row in rows for line in row.splitlines() if not line.startswith("***")]
    return IntegrityCheck(lines, time.monotonic() - began)


# --- the write lock ---------------------------------------------------------------------------------------------------


def _find_stuck_writer(path: Path, conn: apsw.Connection) -> StuckWriter | None:
    for find, has_write_lock in ((find_write_lock_owner, True), (find_sqlite_writer, False)):
        owner = _find_stuck(path, conn, find)
        if owner is not None:
            return StuckWriter(owner, has_write_lock)
    return None


def _find_stuck(path: Path, conn: apsw.Connection, find: Callable[[Path], LockOwner | None]) -> LockOwner | None:
    """The process that has the lock in every sample, while nothing is committed."""
    owner = find(path)
    version = _one(conn, "PRAGMA data_version")
    for _ in range(LOCK_SAMPLES):
        if owner is None or owner.is_stopped:
            return owner
        time.sleep(LOCK_SAMPLE_S)
        again = find(path)
        if again is None or again.pid != owner.pid or _one(conn, "PRAGMA data_version") != version:
            return None
    return owner


# --- nodes and tasks --------------------------------------------------------------------------------------------------


def _find_process(path: Path, status: NodeStatus, boot: str) -> NodeProcess:
    node = status.node
    file = folder_of(path) / node_file_name(node.incarnation)
    process = find_node_process(path, node.incarnation)
    return NodeProcess(status, is_alive=_is_alive(file, node, boot), has_file=file.exists(), process=process)


def _is_alive(file: Path, node: Node, boot: str) -> bool:
    """Its lock tells. Where the file is gone, the process list does."""
    try:
        lock = LockFile(file, create=False)
    except OSError:
        return boot == boot_id() and os.path.exists(f"/proc/{node.pid}")
    try:
        return lock.is_held_elsewhere()
    finally:
        lock.close()


def _read_activity(conn: apsw.Connection, reader: SqliteReader) -> StoreActivity:
    waiting = conn.execute("SELECT DISTINCT consumer FROM task WHERE state = 'queued' AND is_parked = 0").fetchall()
    due = _one(conn, "SELECT min(due_at) FROM task WHERE state IN ('scheduled', 'retrying')")
    newest = _one(conn, "SELECT max(updated_at) FROM task")
    return StoreActivity(
        counts=reader.count(),
        running=reader.list_tasks(TaskFilter(states=(TaskState.RUNNING,)), None, RUNNING_AT_MOST),
        waiting_consumers=[str(consumer) for (consumer,) in waiting],
        due_at=None if due is None else from_us(due),
        newest_at=None if newest is None else from_us(newest),
        schedules=read_schedules(conn),
        now=datetime.now(UTC),
    )


def _one(conn: apsw.Connection, sql: str) -> Any:
    return conn.execute(sql).get
