"""Commands and rescue: decided here, or with words from here, and carried out by one call.

A command is decided on what was read without a lock. The call that carries it out does so only if every task is still
the version that was read, and else nothing; then it is read and decided again. No lock ever waits for this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from taskyard.errors import CommandRefused, UnknownTask
from taskyard.model.command import Asked, Change, Reorder, apply_change, decide
from taskyard.model.event import TOLD_AS, EventKind
from taskyard.model.limits import QueueOrder
from taskyard.model.move import Move, apply_move
from taskyard.model.settle import rescue
from taskyard.model.state import ENDED as ENDED_STATES
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.ports.store import Applied, Node, TaskFilter
from taskyard.stores.migrate import REASON
from taskyard.stores.postgres.place import Connection
from taskyard.stores.postgres.rows import ENDED, HOT, clean, from_row
from taskyard.stores.rows import json_or_none

CHANGE = "CALL taskyard.change_1($1, $2, $3, $4, $5, $6, $7, NULL, NULL, NULL)"
CONTROL = "CALL taskyard.control_1($1, $2, $3, $4, $5, $6, NULL, NULL, NULL)"
RESCUE = "CALL taskyard.rescue_1($1, $2, $3, $4, $5, $6, $7, NULL, NULL)"


class Decided:
    """What a command means for some tasks, as they were when they were read."""

    def __init__(self, asked: Asked, where: TaskFilter, *, anchor: tuple[TaskRecord, str] | None = None) -> None:
        """`anchor` is the task that the command puts others beside, and its version."""
        self._asked, self._where, self._now = asked, where, asked.now
        self._anchor = anchor
        self._changes: dict[int, dict[str, Any]] = {}
        self._events: list[tuple[EventKind, TaskRecord]] = []
        self._queues: set[str] = set()
        self.applied: list[Applied] = []

    @property
    def changes_nothing(self) -> bool:
        return not self._changes

    def decide(self, uuid: str, found: tuple[TaskRecord, str] | None) -> None:
        """`found` is the record and its version; the record is changed."""
        if found is None:
            self.applied.append(Applied(uuid, refused=UnknownTask(uuid)))
            return
        record, version = found
        try:
            self._where.check(record, self._asked.command)
            decision = decide(record, self._asked)
        except CommandRefused as refused:
            self.applied.append(Applied(uuid, refused=refused))
            return
        change: dict[str, Any] = {"id": record.id, "version": version, "how": "change", "ord": len(self.applied)}
        change["was"] = record.state
        if isinstance(decision, Move):
            kind = self._move(record, decision, change)
        else:
            kind = self._change(record, decision, change)
        record.note, record.cancel_reason = clean(record.note), clean(record.cancel_reason)
        self._changes[record.id] = {
            "priority": record.priority,
            "cancel_asked_at": record.cancel_asked_at,
            "cancel_reason": record.cancel_reason,
            "note": record.note,
            "cancel_forced": record.cancel_forced,
            "state": record.state,
            "error": json_or_none(record.error),
            "due_at": record.due_at,
        } | change
        self._events.append((kind, record))
        self._queues.add(record.queue)
        self.applied.append(Applied(uuid, record=record))

    def _move(self, record: TaskRecord, move: Move, change: dict[str, Any]) -> EventKind:
        if record.state in ENDED_STATES:
            change["how"] = "again"
        elif move.state in ENDED_STATES:
            change["how"] = "end"
        change["to_head"] = move.to_head
        apply_move(record, move)
        record.parked = False  # where it waits now, if it does, `place` says
        return TOLD_AS[record.state]

    def _change(self, record: TaskRecord, decision: Change, change: dict[str, Any]) -> EventKind:
        before = record.note
        apply_change(record, decision)
        change["note"] = clean(record.note) if record.note != before else None  # its run may say another by now
        if isinstance(decision, Reorder):
            change["to_head"] = decision.beside is None
            if decision.beside is not None and self._anchor is not None:
                change |= {"beside": self._anchor[0].id, "before": decision.before}
        return decision.kind

    def _looks(self) -> list[dict[str, Any]]:
        """What must not have changed either, and stays as it is."""
        if self._anchor is None or self._anchor[0].id in self._changes:
            return []
        record, version = self._anchor
        return [{"id": record.id, "version": version, "how": "look"}]

    def arguments(self) -> tuple[Any, ...]:
        return (
            list(self._queues),
            msgspec.json.encode([*self._changes.values(), *self._looks()]).decode(),
            [str(kind) for kind, _ in self._events],
            [record.uuid for _, record in self._events],
            [record.queue for _, record in self._events],
            [record.source for _, record in self._events],
            self._now,
        )

    def place(self, places: str | None) -> None:
        """Where the tasks stand now: what the database decided."""
        stand = {id_: (position, parked) for id_, position, parked in msgspec.json.decode(places or "[]")}
        for one in self.applied:
            if one.record is not None and one.record.id in stand:
                one.record.position, one.record.parked = stand[one.record.id]


async def read(conn: Connection, uuids: Sequence[str]) -> dict[str, tuple[TaskRecord, str]]:
    """The records of these tasks with their versions: what must still be so when a decision is carried out."""
    rows = await conn.fetch(
        f"SELECT {HOT}, taskyard.version_1(token, cancel_asked_at, xmin) FROM taskyard.task WHERE uuid = ANY ($1) "
        f"UNION ALL "
        f"SELECT {ENDED}, xmin::text FROM taskyard.ended WHERE uuid = ANY ($1)",
        [uuid for uuid in uuids if clean(uuid) == uuid],
    )
    return {row[0]: (from_row(row), row[-1]) for row in rows}


def rescue_arguments(incarnation: str, info: str | None, beats: int | None, now: datetime) -> tuple[Any, ...]:
    """What `rescue` would write of tasks that are not recovered, in its own words."""
    node = incarnation[:8] if info is None else msgspec.json.decode(info, type=Node).label
    why = f"its node {node} died"
    task = TaskRecord("", "", now, now, now, state=TaskState.RUNNING)
    _, failed = rescue(task, auto_recover=0, now=now, why=why)
    task.cancel_asked_at = now
    _, unexplained = rescue(task, auto_recover=0, now=now, why=why)
    task.cancel_reason = REASON
    _, canceled = rescue(task, auto_recover=0, now=now, why=why)
    assert unexplained.error is not None
    no_reason = unexplained.error.message.removesuffix(f", then {why}")
    return incarnation, beats, now, clean(why), json_or_none(failed.error), json_or_none(canceled.error), no_reason


async def read_control(conn: Connection, queue: str) -> str | None:
    said: str | None = await conn.fetchval("SELECT control FROM taskyard.queue WHERE name = $1", queue)
    return said


async def read_order(conn: Connection, queue: str) -> QueueOrder:
    return QueueOrder(
        await conn.fetchval("SELECT ordering FROM taskyard.queue WHERE name = $1", queue) or QueueOrder.PRIORITY
    )
