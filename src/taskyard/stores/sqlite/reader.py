"""What is only read: short queries on a connection of their own, which never wait for the writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

import apsw
import msgspec

from taskyard.model.attempt import Artifact, AttemptArtifact, AttemptLine
from taskyard.model.blocker import BlockerKind
from taskyard.model.event import Event, EventDetail, EventKind, EventPage
from taskyard.model.execution import ExecutionError
from taskyard.model.failures import FailureGroup
from taskyard.model.node import Node, NodeStatus
from taskyard.model.notes import CancelRequest
from taskyard.model.queue import UNTOUCHED, QueueSettings, QueueStatus
from taskyard.model.settle import QUARANTINE_AFTER
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, Outcome, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import ATTEMPTS_KEPT, BlockedGroup, Signals
from taskyard.stores.records import (
    ARTIFACT,
    ARTIFACT_FACTS,
    ATTEMPT,
    LINE,
    OUTCOME,
    SQLITE,
    TASK,
    document_reader,
    from_us,
    to_us,
)
from taskyard.stores.sqlite.statements import HAS_ENDED

T = TypeVar("T")

_ALL = ", ".join(TASK.columns)
_to_record = TASK.reader(SQLITE)
_to_attempt = ATTEMPT.reader(SQLITE)
_to_outcome = OUTCOME.reader(SQLITE)
_to_line = LINE.reader(SQLITE)
_to_artifact, _to_artifact_facts = ARTIFACT.reader(SQLITE), ARTIFACT.reader(SQLITE, ARTIFACT_FACTS)
_ATTEMPT = ", ".join(ATTEMPT.columns)
# A running attempt has no row of its own, and the task has the same names for what is known of it.
_RUNNING_ATTEMPT = ", ".join("NULL" if name in ("finished_at", "error") else name for name in ATTEMPT.columns)
_OF_TASK = "task = (SELECT id FROM task WHERE uuid = ?)"
_read_cancel = document_reader(CancelRequest)
_read_error = document_reader(ExecutionError)
_KINDS = {str(kind): kind for kind in EventKind}
# A partial index serves only a statement that names its state.
_INDEXED = {
    TaskState.RUNNING: "INDEXED BY task_running WHERE state = 'running' AND",
    TaskState.FAILED: "INDEXED BY task_failed WHERE state = 'failed' AND",
}


_FAILED = "state = 'failed'"
_FIELD = "CASE WHEN json_valid(error) THEN coalesce({}, '') ELSE '' END"
_TYPE = _FIELD.format("error ->> '$.types[0]', error ->> '$.kind'")
# An error that nobody raised has no types, and goes by its kind.
_NAMED = (
    "json_valid(error) AND ? IN (SELECT value FROM json_each(error, '$.types') UNION ALL "
    "SELECT error ->> '$.kind' WHERE error ->> '$.types[0]' IS NULL)"
)
# Its uuid and message are those of the row with the largest time: SQLite promises that of bare columns beside max().
_FAILURES = (
    f"SELECT {_TYPE}, consumer, crashes >= {QUARANTINE_AFTER}, count(*), max(finished_at), uuid, error "
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
            "SELECT uuid, cancel FROM task WHERE state = 'running' AND node = ? AND cancel IS NOT NULL ORDER BY id",
            (node,),
        ).fetchall()
        forced = tuple(uuid for uuid, cancel in rows if (read := _read_cancel(cancel)) is not None and read.is_forced)
        draining = self._conn.execute("SELECT is_draining FROM node WHERE incarnation = ?", (node,)).get
        return Signals([uuid for uuid, _ in rows], is_draining=bool(draining), forced=forced)

    def outcomes(self, uuids: Sequence[str]) -> list[Outcome | None]:
        rows = self._conn.execute(
            f"SELECT {', '.join(OUTCOME.columns)} FROM task WHERE uuid IN (SELECT value FROM json_each(?))",
            (msgspec.json.encode(list(uuids)).decode(),),
        )
        found = {row[0]: _to_outcome(row) for row in rows}
        return [found.get(uuid) for uuid in uuids]

    def events(self, after: int, limit: int) -> EventPage:
        newest: Any = self._conn.execute("SELECT max(last) FROM event").get or 0
        if after < 0 or after >= newest:
            return EventPage([], newest, missed=after > newest)
        oldest: Any = self._conn.execute("SELECT min(first) FROM event").get
        events: list[Event] = []
        pages = self._conn.execute("SELECT first, body FROM event WHERE last > ? ORDER BY last LIMIT ?", (after, limit))
        for first, body in pages:
            for seq, row in enumerate(msgspec.json.decode(body), first):
                if seq > after and len(events) < limit:
                    events.append(_to_event(seq, *row))
            if len(events) >= limit:
                break
        return EventPage(events, events[-1].seq if events else newest, missed=after + 1 < oldest)

    def find(self, uuid: str) -> TaskRecord | None:
        row = self._conn.execute(f"SELECT {_ALL} FROM task WHERE uuid = ?", (uuid,)).fetchone()
        return None if row is None else _to_record(row)

    def find_tasks(self, uuids: Sequence[str]) -> dict[str, TaskRecord]:
        rows = self._conn.execute(
            f"SELECT {_ALL} FROM task WHERE uuid IN (SELECT value FROM json_each(?))",
            (msgspec.json.encode(list(uuids)).decode(),),
        )
        return {record.uuid: record for record in map(_to_record, rows)}

    def list_uuids(self, fragment: str, limit: int) -> list[str]:
        # Ids of one millisecond differ at the end only, so ends count as well; for them the index is walked.
        rows = self._conn.execute(
            "SELECT uuid FROM task WHERE uuid >= ?1 AND uuid < ?1 || char(0x10FFFF) UNION "
            "SELECT uuid FROM task WHERE substr(uuid, -length(?1)) = ?1 LIMIT ?2",
            (fragment, limit),
        )
        return [uuid for (uuid,) in rows]

    def list_tasks(self, where: TaskFilter, before_id: int | None, limit: int) -> list[TaskRecord]:
        return [_to_record(row) for row in self._select(_ALL, where, before_id, limit)]

    def list_ids(self, where: TaskFilter, before_id: int | None, limit: int) -> list[tuple[int, str]]:
        return [(id_, uuid) for id_, uuid in self._select("id, uuid", where, before_id, limit)]

    def _select(self, columns: str, where: TaskFilter, before_id: int | None, limit: int) -> Any:
        terms, values = _terms(where)
        # Left to itself the planner walks the table by id, and finds the one running task at its far end.
        index = _INDEXED.get(where.states[0], "") if where.states is not None and len(where.states) == 1 else ""
        if where.group is not None:
            index = "INDEXED BY task_group WHERE"
        if where.blocker is not None and where.blocker != BlockerKind.DEPENDENCY:
            index = "INDEXED BY task_blocked WHERE"
        before = before_id if before_id is not None else 1 << 62
        if where.labels:
            return self._select_labelled(columns, where, terms, (before, *values, limit))
        asked = " AND ".join(["id < ?", *terms])
        sql = f"SELECT {columns} FROM task {index or 'WHERE'} {asked} ORDER BY id DESC LIMIT ?"
        return self._conn.execute(sql, (before, *values, limit))

    def _select_labelled(
        self, columns: str, where: TaskFilter, terms: Sequence[str], values: tuple[Any, ...]
    ) -> apsw.Cursor:
        """The same by the index of labels: it walks the tasks that have the first label, newest first. CROSS JOIN keeps
        the planner from walking all tasks instead."""
        (name, value), *others = where.labels.items()
        asked = ["label.name = ?", "label.value = ?", "label.task < ?", *terms]
        bindings: list[Any] = [name, value, *values[:-1]]
        for other in others:
            asked.append("EXISTS (SELECT 1 FROM task_label AS l WHERE l.name = ? AND l.value = ? AND l.task = task.id)")
            bindings += other
        found = ", ".join(f"task.{column.strip()}" for column in columns.split(","))
        sql = (
            f"SELECT {found} FROM task_label AS label CROSS JOIN task ON task.id = label.task "
            f"WHERE {' AND '.join(asked)} ORDER BY label.task DESC LIMIT ?"
        )
        return self._conn.execute(sql, (*bindings, values[-1]))

    def list_blockers(self) -> list[BlockedGroup]:
        rows: Any = self._conn.execute(
            "SELECT b.blocked_by, b.consumer, b.n, task.uuid FROM ("
            "SELECT blocked_by, consumer, count(*) AS n, min(id) AS id FROM task INDEXED BY task_blocked "
            "WHERE blocked_by IS NOT NULL GROUP BY blocked_by, consumer) AS b "
            "JOIN task ON task.id = b.id ORDER BY b.blocked_by, b.consumer"
        )
        return [BlockedGroup(*row) for row in rows]

    def list_origins(self, uuids: Sequence[str]) -> set[str]:
        rows: Any = self._conn.execute(
            "SELECT origin FROM json_each(?) AS v CROSS JOIN task INDEXED BY task_origin "
            "ON task.origin = v.value AND task.origin IS NOT NULL",
            (msgspec.json.encode(list(uuids)).decode(),),
        )
        return {origin for (origin,) in rows}

    def list_known(self, uuids: Sequence[str]) -> set[str]:
        rows: Any = self._conn.execute(
            "SELECT uuid FROM task WHERE uuid IN (SELECT value FROM json_each(?))",
            (msgspec.json.encode(list(uuids)).decode(),),
        )
        return {uuid for (uuid,) in rows}

    def list_attempts(self, uuid: str) -> list[Attempt]:
        rows = self._conn.execute(
            f"SELECT {_ATTEMPT} FROM attempt WHERE {_OF_TASK} UNION ALL SELECT {_RUNNING_ATTEMPT} FROM task "
            "WHERE uuid = ? AND state = 'running' ORDER BY token DESC LIMIT ?",
            (uuid, uuid, ATTEMPTS_KEPT),
        )
        return [_to_attempt(row) for row in rows][::-1]

    def list_lines(self, uuid: str, token: int | None, limit: int) -> list[AttemptLine]:
        of_attempt, asked = ("", ()) if token is None else (" AND token = ?", (token,))
        rows: Any = self._conn.execute(
            f"SELECT token, {', '.join(LINE.columns)} FROM attempt_line WHERE {_OF_TASK}{of_attempt} "
            "ORDER BY token DESC, at DESC LIMIT ?",
            (uuid, *asked, limit),
        )
        return [AttemptLine(token, _to_line(line)) for token, *line in rows][::-1]

    def list_artifacts(self, uuid: str) -> list[AttemptArtifact]:
        rows: Any = self._conn.execute(
            f"SELECT token, {', '.join(ARTIFACT_FACTS)} FROM artifact WHERE {_OF_TASK} ORDER BY token, name", (uuid,)
        )
        return [AttemptArtifact(token, _to_artifact_facts(facts)) for token, *facts in rows]

    def find_artifact(self, uuid: str, token: int, name: str) -> Artifact | None:
        row = self._conn.execute(
            f"SELECT {', '.join(ARTIFACT.columns)} FROM artifact WHERE {_OF_TASK} AND token = ? AND name = ?",
            (uuid, token, name),
        ).fetchone()
        return None if row is None else _to_artifact(row)

    def find_end(self, n: int, failed: bool | None = None) -> datetime | None:
        found: Any = self._conn.execute(
            f"SELECT finished_at FROM task WHERE {HAS_ENDED[failed]} ORDER BY finished_at DESC LIMIT 1 OFFSET ?",
            (n - 1,),
        ).get
        return None if found is None else from_us(found)

    def failures(self, where: TaskFilter, limit: int) -> list[FailureGroup]:
        terms, values = _terms(where)
        for name, value in where.labels.items():
            terms.append("EXISTS (SELECT 1 FROM task_label AS l WHERE l.name = ? AND l.value = ? AND l.task = task.id)")
            values += (name, value)
        rows: Any = self._conn.execute(
            f"{_FAILURES} WHERE {' AND '.join([*terms, _FAILED])} GROUP BY 1, 2, 3 ORDER BY 4 DESC, 5 DESC LIMIT ?",
            (*values, limit),
        )
        return [
            FailureGroup(
                error=name,
                consumer=consumer,
                is_quarantined=bool(quarantined),
                count=n,
                newest_at=from_us(at),
                uuid=uuid,
                message=_message(error),
            )
            for name, consumer, quarantined, n, at, uuid, error in rows
        ]

    def count(self) -> dict[tuple[str, TaskState], int]:
        rows = self._conn.execute(
            "SELECT queue, state, sum(n) FROM state_count GROUP BY queue, state HAVING sum(n) <> 0"
        )
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
                "SELECT queue, min((SELECT due_at FROM task WHERE task.queue = c.queue AND task.lane = c.lane "
                "AND task.priority = c.priority AND task.state = 'queued' AND task.is_parked = 0 "
                "ORDER BY position LIMIT 1)) FROM state_count AS c WHERE state = 'queued' AND n > 0 GROUP BY queue"
            )
        )
        return [
            QueueStatus(
                name=queue,
                settings=_decoded(rules.get(queue), QueueSettings(name=queue)),
                control=_decoded(said.get(queue), UNTOUCHED),
                counts=counts.get(queue, {}),
                oldest_due_at=None if (at := oldest.get(queue)) is None else from_us(at),
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
            "SELECT info, boot_id, is_draining, (SELECT count(*) FROM task INDEXED BY task_running "
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


def _to_event(seq: int, kind: str, uuid: str, consumer: str, queue: str, at: int, detail: Any = None) -> Event:
    read = None if detail is None else msgspec.convert(detail, EventDetail)
    return Event.of(seq, from_us(at), _KINDS[kind], uuid, consumer, queue, read)


def _message(error: str | None) -> str:
    read = None if error is None else _read_error(error)
    return "" if read is None else read.text


def _to_us(at: datetime | None) -> int | None:
    return None if at is None else to_us(at)


def _terms(where: TaskFilter) -> tuple[list[str], list[Any]]:
    """What a filter asks, as `TaskFilter.matches` puts it, and the values for the marks in it."""
    asked: list[tuple[str, tuple[Any, ...]]] = []
    if where.states is not None:
        asked.append((f"state IN ({', '.join('?' * len(where.states))})", tuple(map(str, where.states))))
    for term, value in (
        ("queue = ?", where.queue),
        ("consumer = ?", where.consumer),
        ("group_id = ?", where.group),
        ("key = ?", where.key),
        ("node = ?", where.node),
        (_NAMED, where.error),
        ("created_at >= ?", _to_us(where.created_after)),
        ("created_at < ?", _to_us(where.created_before)),
        ("finished_at >= ?", _to_us(where.finished_after)),
        ("finished_at < ?", _to_us(where.finished_before)),
        (f"(state = 'failed' AND crashes >= {QUARANTINE_AFTER}) = ?", where.quarantined),
    ):
        if value is not None:
            asked.append((term, (value,)))
    if where.blocker == BlockerKind.DEPENDENCY:
        asked.append(("state = 'blocked' AND blocked_by IS NULL", ()))
    elif where.blocker is not None:
        # By the index `task_blocked`: a key, or all keys of a kind.
        is_key = ":" in where.blocker
        term = "blocked_by = ?" if is_key else "blocked_by >= ? || ':' AND blocked_by < ? || ';'"
        asked.append((f"blocked_by IS NOT NULL AND {term}", (where.blocker,) * (1 if is_key else 2)))
    if where.uuid is not None:
        part = where.uuid
        asked.append(("(substr(uuid, 1, length(?)) = ? OR substr(uuid, -length(?)) = ?)", (part,) * 4))
    return [term for term, _ in asked], [value for _, values in asked for value in values]
