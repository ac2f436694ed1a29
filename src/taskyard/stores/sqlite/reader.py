"""What is only read: short queries on a connection of their own, which never wait for the writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

import apsw
import msgspec

from taskyard.model.control import UNTOUCHED
from taskyard.model.event import Event, EventKind, EventPage
from taskyard.model.failures import FailureGroup
from taskyard.model.limits import QueueSettings
from taskyard.model.settle import QUARANTINE_AFTER
from taskyard.model.state import TaskState
from taskyard.model.task import Outcome, Run, TaskRecord
from taskyard.ports.store import RUNS_KEPT, Node, NodeStatus, QueueStatus, Signals, TaskFilter
from taskyard.stores.rows import (
    COLUMNS,
    RUN_COLUMNS,
    from_row,
    from_run_row,
    from_us,
    from_us_or_none,
    to_error,
    to_us_or_none,
)
from taskyard.stores.sqlite.statements import HAS_ENDED

T = TypeVar("T")

_ALL = ", ".join(COLUMNS)
_KINDS = {str(kind): kind for kind in EventKind}
# A partial index serves only a statement that names its state.
_INDEXED = {
    TaskState.RUNNING: "INDEXED BY task_running WHERE state = 'running' AND",
    TaskState.FAILED: "INDEXED BY task_failed WHERE state = 'failed' AND",
}


_FAILED = "state = 'failed'"
_FIELD = "CASE WHEN json_valid(error) THEN coalesce({}, '') ELSE '' END"
_TYPE = _FIELD.format("error ->> '$.types[0]', error ->> '$.kind'")
_MESSAGE = _FIELD.format("error ->> '$.message'")
# An error that nobody raised has no types, and goes by its kind.
_NAMED = (
    "json_valid(error) AND ? IN (SELECT value FROM json_each(error, '$.types') UNION ALL "
    "SELECT error ->> '$.kind' WHERE error ->> '$.types[0]' IS NULL)"
)
# Its uuid and message are those of the row with the largest time: SQLite promises that of bare columns beside max().
_FAILURES = (
    f"SELECT {_TYPE}, source, crashes >= {QUARANTINE_AFTER}, count(*), max(finished_at), uuid, {_MESSAGE} "
    "FROM task INDEXED BY task_failed"
)


class SqliteReader:
    def __init__(self, conn: apsw.Connection) -> None:
        self._conn = conn

    def close(self) -> None:
        self._conn.close()

    def look(self, run: Callable[[apsw.Connection], T]) -> T:
        return run(self._conn)

    def signals(self, node: str) -> Signals:
        rows: Any = self._conn.execute(
            "SELECT uuid, cancel_forced FROM task WHERE state = 'running' AND node = ? "
            "AND cancel_asked_at IS NOT NULL ORDER BY id",
            (node,),
        ).fetchall()
        forced = tuple(uuid for uuid, is_forced in rows if is_forced)
        draining = self._conn.execute("SELECT draining FROM node WHERE incarnation = ?", (node,)).get
        return Signals([uuid for uuid, _ in rows], is_draining=bool(draining), forced=forced)

    def outcomes(self, uuids: Sequence[str]) -> list[Outcome | None]:
        rows = self._conn.execute(
            "SELECT uuid, state, result, error FROM task WHERE uuid IN (SELECT value FROM json_each(?))",
            (msgspec.json.encode(list(uuids)).decode(),),
        )
        found = {uuid: Outcome(uuid, TaskState(state), result, to_error(error)) for uuid, state, result, error in rows}
        return [found.get(uuid) for uuid in uuids]

    def events(self, after: int, limit: int) -> EventPage:
        newest: Any = self._conn.execute("SELECT max(last) FROM event").get or 0
        if after < 0 or after >= newest:
            return EventPage([], newest, missed=after > newest)
        oldest: Any = self._conn.execute("SELECT min(first) FROM event").get
        events: list[Event] = []
        pages = self._conn.execute("SELECT first, body FROM event WHERE last > ? ORDER BY last LIMIT ?", (after, limit))
        for first, body in pages:
            for seq, (kind, uuid, source, queue, at) in enumerate(msgspec.json.decode(body), first):
                if seq > after and len(events) < limit:
                    events.append(Event(seq, from_us(at), _KINDS[kind], uuid, source, queue))
            if len(events) >= limit:
                break
        return EventPage(events, events[-1].seq if events else newest, missed=after + 1 < oldest)

    def find(self, uuid: str) -> TaskRecord | None:
        row = self._conn.execute(f"SELECT {_ALL} FROM task WHERE uuid = ?", (uuid,)).fetchone()
        return None if row is None else from_row(row)

    def list_uuids(self, fragment: str, limit: int) -> list[str]:
        # Ids of one millisecond differ at the end only, so ends count as well; for them the index is walked.
        rows = self._conn.execute(
            "SELECT uuid FROM task WHERE uuid >= ?1 AND uuid < ?1 || char(0x10FFFF) UNION "
            "SELECT uuid FROM task WHERE substr(uuid, -length(?1)) = ?1 LIMIT ?2",
            (fragment, limit),
        )
        return [uuid for (uuid,) in rows]

    def list_tasks(self, where: TaskFilter, before_id: int | None, limit: int) -> list[TaskRecord]:
        return [from_row(row) for row in self._select(_ALL, where, before_id, limit)]

    def list_ids(self, where: TaskFilter, before_id: int | None, limit: int) -> list[tuple[int, str]]:
        return [(id_, uuid) for id_, uuid in self._select("id, uuid", where, before_id, limit)]

    def _select(self, columns: str, where: TaskFilter, before_id: int | None, limit: int) -> Any:
        terms, values = _terms(where)
        # Left to itself the planner walks the table by id, and finds the one running task at its far end.
        index = _INDEXED.get(where.states[0], "") if where.states is not None and len(where.states) == 1 else ""
        if where.group is not None:
            index = "INDEXED BY task_group WHERE"
        asked = " AND ".join(["id < ?", *terms])
        sql = f"SELECT {columns} FROM task {index or 'WHERE'} {asked} ORDER BY id DESC LIMIT ?"
        return self._conn.execute(sql, (before_id if before_id is not None else 1 << 62, *values, limit))

    def list_origins(self, uuids: Sequence[str]) -> set[str]:
        rows: Any = self._conn.execute(
            "SELECT origin FROM json_each(?) AS v CROSS JOIN task INDEXED BY task_origin "
            "ON task.origin = v.value AND task.origin IS NOT NULL",
            (msgspec.json.encode(list(uuids)).decode(),),
        )
        return {origin for (origin,) in rows}

    def list_runs(self, uuid: str) -> list[Run]:
        rows = self._conn.execute(
            f"SELECT {', '.join(RUN_COLUMNS)} FROM run "
            "WHERE task = (SELECT id FROM task WHERE uuid = ?) ORDER BY token DESC LIMIT ?",
            (uuid, RUNS_KEPT),
        )
        return [from_run_row(row) for row in rows][::-1]

    def find_end(self, n: int, failed: bool | None = None) -> datetime | None:
        found: Any = self._conn.execute(
            f"SELECT finished_at FROM task WHERE {HAS_ENDED[failed]} ORDER BY finished_at DESC LIMIT 1 OFFSET ?",
            (n - 1,),
        ).get
        return from_us_or_none(found)

    def failures(self, where: TaskFilter, limit: int) -> list[FailureGroup]:
        terms, values = _terms(where)
        rows: Any = self._conn.execute(
            f"{_FAILURES} WHERE {' AND '.join([*terms, _FAILED])} GROUP BY 1, 2, 3 ORDER BY 4 DESC, 5 DESC LIMIT ?",
            (*values, limit),
        )
        return [
            FailureGroup(
                error=error,
                source=source,
                is_quarantined=bool(quarantined),
                count=n,
                newest_at=from_us(at),
                uuid=uuid,
                message=message,
            )
            for error, source, quarantined, n, at, uuid, message in rows
        ]

    def count(self) -> dict[tuple[str, TaskState], int]:
        rows = self._conn.execute("SELECT queue, state, sum(n) FROM tally GROUP BY queue, state HAVING sum(n) <> 0")
        return {(queue, TaskState(state)): n for queue, state, n in rows}

    def queues(self, name: str | None = None) -> list[QueueStatus]:
        """All of them, or the one of this name, be there anything of it or not."""
        rules: Any = dict(self._conn.execute("SELECT name, settings FROM queue"))
        said: Any = dict(self._conn.execute("SELECT queue, body FROM control"))
        counts: dict[str, dict[TaskState, int]] = {}
        for (queue, state), n in self.count().items():
            counts.setdefault(queue, {})[state] = n
        oldest: Any = dict(
            self._conn.execute(
                "SELECT queue, min((SELECT due_at FROM task WHERE task.queue = tally.queue AND task.source = "
                "tally.source AND task.priority = tally.priority AND task.state = 'queued' AND task.parked = 0 "
                "ORDER BY position LIMIT 1)) FROM tally WHERE state = 'queued' AND n > 0 GROUP BY queue"
            )
        )
        return [
            QueueStatus(
                name=queue,
                settings=_decoded(rules.get(queue), QueueSettings(name=queue)),
                control=_decoded(said.get(queue), UNTOUCHED),
                counts=counts.get(queue, {}),
                oldest_due_at=from_us_or_none(oldest.get(queue)),
            )
            for queue in ([name] if name is not None else sorted({*rules, *said, *counts}))
        ]

    def count_group(self, group: str) -> dict[TaskState, int]:
        rows = self._conn.execute(
            "SELECT state, count(*) FROM task INDEXED BY task_group WHERE group_id = ?1 AND uuid <> ?1 GROUP BY state",
            (group,),
        )
        return {TaskState(state): n for state, n in rows}

    def nodes(self) -> list[tuple[NodeStatus, str]]:
        """Every node that has joined, with the boot it joined in."""
        rows: Any = self._conn.execute(
            "SELECT info, boot_id, draining, (SELECT count(*) FROM task INDEXED BY task_running "
            "WHERE state = 'running' AND task.node = node.incarnation) FROM node ORDER BY incarnation"
        )
        return [
            (
                NodeStatus(node=msgspec.json.decode(info, type=Node), running=running, is_draining=bool(draining)),
                boot_id,
            )
            for info, boot_id, draining, running in rows
        ]

    def data_version(self) -> int:
        version: Any = self._conn.execute("PRAGMA data_version").get
        return int(version)


def _decoded(text: str | None, otherwise: T) -> T:
    return otherwise if text is None else msgspec.json.decode(text, type=type(otherwise))


def _terms(where: TaskFilter) -> tuple[list[str], list[Any]]:
    """What a filter asks, as `TaskFilter.matches` puts it, and the values for the marks in it."""
    asked: list[tuple[str, tuple[Any, ...]]] = []
    if where.states is not None:
        asked.append((f"state IN ({', '.join('?' * len(where.states))})", tuple(map(str, where.states))))
    for term, value in (
        ("queue = ?", where.queue),
        ("source = ?", where.source),
        ("group_id = ?", where.group),
        ("key = ?", where.key),
        ("node = ?", where.node),
        (_NAMED, where.error),
        ("created_at >= ?", to_us_or_none(where.created_after)),
        ("created_at < ?", to_us_or_none(where.created_before)),
        ("finished_at >= ?", to_us_or_none(where.finished_after)),
        ("finished_at < ?", to_us_or_none(where.finished_before)),
        (f"(state = 'failed' AND crashes >= {QUARANTINE_AFTER}) = ?", where.quarantined),
    ):
        if value is not None:
            asked.append((term, (value,)))
    if where.uuid is not None:
        part = where.uuid
        asked.append(("(substr(uuid, 1, length(?)) = ? OR substr(uuid, -length(?)) = ?)", (part,) * 4))
    return [term for term, _ in asked], [value for _, values in asked for value in values]
