"""The rules for a store in a SQLite file."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from taskyard.application.doctor.findings import (
    Finding,
    check_activity,
    describe_refusal,
    describe_schema,
    ok,
    problem,
    warning,
)
from taskyard.application.doctor.machine import check_disk_space, check_file_system, check_permissions
from taskyard.application.formatting import counted, cut, duration, seconds_between, size
from taskyard.errors import StoreError
from taskyard.stores.sqlite.inspection import (
    CHECK_S,
    LOCK_SAMPLE_S,
    LOCK_SAMPLES,
    Contents,
    IntegrityCheck,
    NodeProcess,
    SqliteInspection,
    StuckWriter,
    inspect,
)
from taskyard.stores.sqlite.place import check_place

LARGE_WAL = 64_000_000
"""Bytes: a checkpoint starts at 16 MB, so a reader blocks it if the WAL is much larger."""

COMMAND_CHARS = 60


def check_file(path: Path) -> Iterator[Finding]:
    try:
        check_place(path)
    except StoreError as error:
        yield problem("file", str(error), "correct the address, or what is there")
        return
    yield from check_file_system(path)
    yield from check_disk_space(path.parent)
    if not path.exists():
        yield problem("file", f"there is no file {path}", "correct the address; the first `taskyard run` makes it")
        return
    yield from check_permissions(path)
    yield from _judge(path, inspect(path))


def _judge(path: Path, seen: SqliteInspection) -> Iterator[Finding]:
    yield _sizes(path, seen)
    yield from _schema(seen)
    if seen.integrity is not None:
        yield _integrity(path, seen.integrity)
        yield _write_lock(seen.stuck_writer)
    if seen.activity is not None:
        yield from _nodes(seen.nodes, seen.activity.now)
        yield from check_activity(seen.activity, [one.status.node for one in seen.nodes if one.is_alive])
    elif seen.schema is not None and seen.schema.version != seen.schema.newest:
        yield ok("tasks", "not checked: the tables are of an earlier version")
    if seen.damage is not None:
        yield _damaged(path, seen.damage)
    if seen.error is not None:
        yield problem("open", str(seen.error), "see the other findings")


def _sizes(path: Path, seen: SqliteInspection) -> Finding:
    text = f"{path}, {size(seen.file_bytes)} and {size(seen.wal_bytes)} of WAL"
    if seen.wal_bytes > LARGE_WAL:
        hint = "the WAL is not checkpointed, because a reader keeps a transaction open: stop that program"
        return warning("file", text, hint, file_bytes=seen.file_bytes, wal_bytes=seen.wal_bytes)
    return ok("file", text, file_bytes=seen.file_bytes, wal_bytes=seen.wal_bytes)


def _schema(seen: SqliteInspection) -> Iterator[Finding]:
    if seen.contents is Contents.EMPTY:
        yield ok("schema", "none yet: the file is empty, and becomes a store when it is first opened")
    elif seen.contents is Contents.FOREIGN:
        text = "this is not a Taskyard store, but another program's database"
        yield problem("schema", text, "name another file; nothing was changed in this one")
    elif seen.refusal is not None:
        yield describe_refusal(seen.refusal)
    elif seen.schema is not None:
        yield describe_schema(seen.schema)


def _integrity(path: Path, check: IntegrityCheck) -> Finding:
    if not check.is_complete:
        return warning(
            "integrity",
            f"the file is too large to be checked within {duration(CHECK_S)}; no damage was found so far",
            "check a copy of it with PRAGMA integrity_check",
        )
    if check.problems:
        return _damaged(path, "; ".join(check.problems))
    return ok("integrity", f"quick check passed in {duration(check.took_s)}")


def _damaged(path: Path, reason: str) -> Finding:
    return problem(
        "integrity",
        f"the file is damaged, or no database at all: {reason}",
        f"stop everything that uses it, keep a copy of the file with its -wal, and restore a backup or try "
        f"`sqlite3 {path} .recover`",
    )


def _write_lock(stuck: StuckWriter | None) -> Finding:
    if stuck is None:
        return ok("write lock", "free, or passed on quickly")
    owner = stuck.owner
    action = "holds the write lock" if stuck.has_write_lock else "is inside a write transaction of SQLite"
    text = f"process {owner.pid} ({cut(owner.command, COMMAND_CHARS)}) {action}"
    if owner.is_stopped:
        text += " and is stopped; every writer waits"
        hint = f"let it go on with `kill -CONT {owner.pid}`, or end it with `kill -KILL {owner.pid}`"
    else:
        text += f" for {duration(LOCK_SAMPLES * LOCK_SAMPLE_S)} and longer, and has committed nothing"
        hint = f"find out what it does; if it hangs, end it with `kill {owner.pid}`"
    return problem("write lock", text, hint, pid=owner.pid, stopped=owner.is_stopped)


# --- nodes ------------------------------------------------------------------------------------------------------------


def _nodes(nodes: Sequence[NodeProcess], now: datetime) -> Iterator[Finding]:
    if not nodes:
        yield ok("workers", "none is running on this store", alive=[], dead=[])
    alive = [one for one in nodes if one.is_alive]
    for one in alive:
        yield _alive(one, now)
    for one in nodes:
        if not one.is_alive:
            yield _dead(one, now, others_alive=bool(alive))


def _describe(one: NodeProcess, now: datetime) -> str:
    node = one.status.node
    since = duration(seconds_between(node.started_at, now)) or "an unknown time"
    host = "" if node.host == socket.gethostname() else f" on {node.host}"
    return f"{node.name} (pid {node.pid}{host}), since {since}"


def _alive(one: NodeProcess, now: datetime) -> Finding:
    node, held, process = one.status.node, one.status.running, one.process
    if not one.has_file:
        text = f"{_describe(one, now)}, is running, but its file beside the store was removed: others cannot wake it"
        return warning("worker", text, "restart it, which makes the file again; no task is lost", pid=node.pid)
    if process is None or not process.is_stopped:
        return ok("worker", f"{_describe(one, now)}, runs {', '.join(node.consumers) or 'nothing'}")
    grip = f"holds {counted(held, 'task')}, which no other worker may run" if held else "takes no tasks"
    text = f"{_describe(one, now)}, is stopped and {grip}"
    hint = (
        f"let it go on with `kill -CONT {process.pid}`; or end it with `kill -KILL {process.pid}`, and others take over"
    )
    make = problem if held else warning
    return make("stopped worker", text, hint, pid=process.pid, held=held)


def _dead(one: NodeProcess, now: datetime, *, others_alive: bool) -> Finding:
    held = one.status.running
    text = f"{_describe(one, now)}, is dead and held {counted(held, 'task')}"
    pid = one.status.node.pid
    if others_alive:
        hint = "a living worker takes them back within a second or two: run the doctor again"
        return warning("dead worker", text, hint, pid=pid, held=held)
    make = problem if held else warning
    return make("dead worker", text, "start a worker: it takes them back first", pid=pid, held=held)
