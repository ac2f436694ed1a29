"""Commands and rescue: decided here, or with words from here, and carried out by one call.

A command is decided on what was read without a lock. The call carries it out for those tasks that are still the version
that was read, and names the others, which are read and decided again. No lock ever waits for this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from taskyard.errors import ChangedMeanwhile, CommandRefused, DependencyLost, SlotTaken, UnknownTask
from taskyard.model.command import VERBS, Asked, Change, Reorder, apply_change, change_detail, decide
from taskyard.model.dependency import Stand, lost_to, refuse_revival, stand_of
from taskyard.model.event import TOLD_AS, EventDetail, EventKind
from taskyard.model.execution import ExecutionError
from taskyard.model.move import Move, apply_move, event_detail
from taskyard.model.node import Node
from taskyard.model.queue import QueueOrder
from taskyard.model.settle import rescue
from taskyard.model.state import ENDED as ENDED_STATES
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Applied
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.postgres.rows import FINISHED, HOT, clean, from_row, to_text

CHANGE = "CALL taskyard.apply_commands_1($1, $2, $3, $4, $5, $6, $7, $8, false, $9, $10, NULL, NULL, NULL)"
EXPLAIN = (
    "UPDATE taskyard.finished AS e SET error = l.error FROM unnest($1::bigint[], $2::text[], $3::text[]) "
    "AS l(id, version, error) WHERE e.id = l.id AND e.xmin::text = l.version"
)
CONTROL = "CALL taskyard.control_queue_1($1, $2, $3, $4, $5, $6, $7, $8, NULL, NULL, NULL)"
NOTE_AUDIT = "SELECT taskyard.note_audit_1($1, $2, 0)"
RESCUE = "CALL taskyard.rescue_1($1, $2, $3, $4, $5, NULL, NULL)"


class Decided:
    """What a command means for some tasks, as they were when they were read."""

    def __init__(
        self, asked: Asked, where: TaskFilter, bonds: Bonds, *, anchor: tuple[TaskRecord, str] | None = None
    ) -> None:
        """`anchor` is the task that the command puts others beside, and its version."""
        self._asked, self._where, self._now = asked, where, asked.now
        self._bonds, self._anchor = bonds, anchor
        self._changes: dict[int, dict[str, Any]] = {}
        self._events: list[tuple[EventKind, TaskRecord, EventDetail | None]] = []
        self._queues: set[str] = set()
        self._found: dict[str, TaskState] = {}
        self.applied: list[Applied] = []
        self.lost: list[tuple[int, str, str | None]] = []
        """Tasks that cannot be sent again because of another than their error says: id, version, what it is to say."""

    @property
    def changes_nothing(self) -> bool:
        return not self._changes

    @property
    def count(self) -> int:
        """The tasks that it changes."""
        return len(self._changes)

    def decide(self, uuid: str, found: tuple[TaskRecord, str] | None) -> None:
        """`found` is the record and its version; the record is changed."""
        if found is None:
            self.applied.append(Applied(uuid, refused=UnknownTask(uuid)))
            return
        record, version = found
        self._found.setdefault(uuid, record.state)
        try:
            self._where.check(record, self._asked.command)
            decision = decide(record, self._asked)
        except CommandRefused as refused:
            self.applied.append(Applied(uuid, refused=refused))
            return
        change: dict[str, Any] = {"id": record.id, "uuid": uuid, "version": version, "how": "change"}
        change["ord"] = len(self.applied)
        change["was"] = self._said(record, "was") or record.state
        if isinstance(decision, Move):
            if record.state in ENDED_STATES and (refusal := self._bonds.refuse(record)) is not None:
                if isinstance(refusal, DependencyLost):
                    self._explain(record, version, lost_to(refusal.parent, refusal.ended))
                self.applied.append(Applied(uuid, refused=refusal))
                return
            kind, detail = self._move(record, decision, change)
        else:
            detail = change_detail(record, decision)
            kind = self._change(record, decision, change)
        self._changes[record.id] = {
            "priority": record.priority,
            "hold": to_text(record.hold),
            "cancel": to_text(record.cancel),
            "blocked_by": record.blocked_by,
            "blocked_at": record.blocked_at,
            "note": to_text(record.note),
            "state": record.state,
            "error": to_text(record.error),
            "due_at": record.due_at,
            "open_dependencies": record.open_dependencies,
            "aside": record.is_parked and record.state is TaskState.PAUSED,
        } | change
        self._events.append((kind, record, detail))
        self._queues.add(record.queue)
        self.applied.append(Applied(uuid, record=record))

    def _explain(self, record: TaskRecord, version: str, error: ExecutionError) -> None:
        if record.error != error:
            record.error = error
            self.lost.append((record.id, version, to_text(error)))

    def _move(self, record: TaskRecord, move: Move, change: dict[str, Any]) -> tuple[EventKind, EventDetail | None]:
        is_again = record.state in ENDED_STATES
        detail = event_detail(record.state, move)
        if is_again:
            change["how"] = "again"
        elif move.state in ENDED_STATES:
            change["how"] = "end"
        change |= {"to_head": move.to_head, "to_tail": move.to_tail and move.state is TaskState.QUEUED}
        apply_move(record, move)
        record.is_parked = record.is_parked and record.state is TaskState.PAUSED  # if it waits for a key, `place` says
        if is_again and self._bonds.revive(record):
            self._events.append((TOLD_AS[record.state], record, detail))
            waits = Move(state=TaskState.BLOCKED, at=self._now)
            detail = event_detail(record.state, waits)
            apply_move(record, waits)
        change["slot"] = record.dedupe_slot
        return TOLD_AS[record.state], detail

    def _change(self, record: TaskRecord, decision: Change, change: dict[str, Any]) -> EventKind:
        before = record.note
        apply_change(record, decision)
        # Its run may say another by now.
        change["note"] = to_text(record.note) if record.note != before else self._said(record, "note")
        if isinstance(decision, Reorder):
            change["to_head"] = decision.beside is None
            if decision.beside is not None and self._anchor is not None:
                change |= {"beside": self._anchor[0].id, "before": decision.before}
        return decision.kind

    def _said(self, record: TaskRecord, what: str) -> Any:
        """What was put down of a task that is named a second time."""
        return self._changes.get(record.id, {}).get(what)

    def _looks(self) -> list[dict[str, Any]]:
        """What must not have changed either, and stays as it is."""
        if self._anchor is None or self._anchor[0].id in self._changes:
            return []
        record, version = self._anchor
        return [{"id": record.id, "uuid": record.uuid, "version": version, "how": "look"}]

    def arguments(self) -> tuple[Any, ...]:
        return (
            list(self._queues),
            msgspec.json.encode([*self._changes.values(), *self._looks()]).decode(),
            [str(kind) for kind, *_ in self._events],
            [record.uuid for _, record, _ in self._events],
            [record.queue for _, record, _ in self._events],
            [record.consumer for _, record, _ in self._events],
            [to_text(detail) for *_, detail in self._events],
            self._now,
        )

    def give_up(self, uuid: str) -> Applied:
        """The answer for a task that was another one each time it came to it."""
        verb, detail = VERBS[type(self._asked.command)], "others change it all the time; try again"
        refused = ChangedMeanwhile(uuid, verb, self._found[uuid], code="changed_meanwhile", detail=detail)
        return Applied(uuid, refused=refused)

    def place(self, places: str | None) -> None:
        """Where the tasks stand now: what the database decided."""
        stand = {id_: (position, parked) for id_, position, parked in msgspec.json.decode(places or "[]")}
        for one in self.applied:
            if one.record is not None and one.record.id in stand:
                one.record.position, one.record.is_parked = stand[one.record.id]


class Bonds:
    """What keeps failed tasks from being sent again, as it was when it was read, and as it is once some of them are."""

    def __init__(
        self, parents: dict[int, list[tuple[str, TaskState]]], holders: dict[str, tuple[str, datetime | None]]
    ) -> None:
        self._parents, self._holders = parents, holders
        self._again: set[str] = set()

    def _stands(self, record: TaskRecord) -> list[tuple[str, TaskState, Stand]]:
        known = [
            (uuid, TaskState.QUEUED if uuid in self._again else state)
            for uuid, state in self._parents.get(record.id, ())
        ]
        return [(uuid, state, stand_of(state, record.on_failure)) for uuid, state in known]

    def refuse(self, record: TaskRecord) -> CommandRefused | None:
        key = record.dedupe_key
        holder, until = (None, None) if key is None else self._holders.get(key, (None, None))
        if holder is not None and holder != record.uuid:
            return SlotTaken(record.uuid, record.state, holder, until=until)
        for uuid, state, stand in self._stands(record):
            if stand is Stand.LOST:
                return refuse_revival(record, uuid, state)
        return None

    def revive(self, record: TaskRecord) -> bool:
        """The record was put back in line: it takes its slot, and waits for others, which is the answer."""
        self._again.add(record.uuid)
        if record.dedupe_slot is not None:
            self._holders[record.dedupe_slot] = record.uuid, None
        record.open_dependencies = sum(stand is Stand.OPEN for *_, stand in self._stands(record))
        return record.open_dependencies > 0


async def read_bonds(conn: Connection, records: Sequence[TaskRecord], now: datetime) -> Bonds:
    """Of those of the records that have failed."""
    failed = [record for record in records if record.state is TaskState.FAILED]
    keys = [record.dedupe_key for record in failed if record.dedupe_key is not None]
    parents: dict[int, list[tuple[str, TaskState]]] = {}
    holders: dict[str, tuple[str, datetime | None]] = {}
    if any(record.on_failure is not None for record in failed):
        rows = await conn.fetch(
            "SELECT d.child, coalesce(p.uuid, e.uuid), coalesce(p.state, e.state) FROM taskyard.dependency AS d "
            "LEFT JOIN taskyard.task AS p ON p.id = ANY (ARRAY[d.parent]) "
            "LEFT JOIN taskyard.finished AS e ON e.id = ANY (ARRAY[d.parent]) "
            "WHERE d.child = ANY ($1) AND (p.id IS NOT NULL OR e.id IS NOT NULL) ORDER BY d.parent",
            [record.id for record in failed],
        )
        for child, uuid, state in rows:
            parents.setdefault(child, []).append((uuid, TaskState(state)))
    if keys:
        found = await conn.fetch(
            "SELECT k.slot, h.uuid, h.until FROM unnest($1::text[]) AS k(slot) "
            "CROSS JOIN LATERAL taskyard.dedupe_holder_1(k.slot, $2) AS h WHERE h.uuid IS NOT NULL",
            keys,
            now,
        )
        holders = {slot: (uuid, until) for slot, uuid, until in found}
    return Bonds(parents, holders)


async def read(conn: Connection, uuids: Sequence[str]) -> dict[str, tuple[TaskRecord, str]]:
    """The records of these tasks with their versions: what must still be so when a decision is carried out."""
    rows = await conn.fetch(
        f"SELECT {HOT}, taskyard.row_version_1(token, cancel, xmin) FROM taskyard.task WHERE uuid = ANY ($1) "
        f"UNION ALL "
        f"SELECT {FINISHED}, xmin::text FROM taskyard.finished WHERE uuid = ANY ($1)",
        [uuid for uuid in uuids if clean(uuid) == uuid],
    )
    return {row[0]: (from_row(row), row[-1]) for row in rows}


def rescue_arguments(incarnation: str, info: str | None, beats: int | None, now: datetime) -> tuple[Any, ...]:
    """The note that `rescue` writes on tasks of this node, and the error of those that are not recovered."""
    node = incarnation[:8] if info is None else msgspec.json.decode(info, type=Node).label
    task = TaskRecord("", "", now, now, now, state=TaskState.RUNNING)
    interrupted, failed = rescue(task, auto_recover=0, now=now, node=node)
    return incarnation, beats, now, to_text(interrupted.note), to_text(failed.error)


async def read_control(conn: Connection, queue: str) -> str | None:
    said: str | None = await conn.fetchval("SELECT control FROM taskyard.queue WHERE name = $1", queue)
    return said


async def read_order(conn: Connection, queue: str) -> QueueOrder:
    return QueueOrder(
        await conn.fetchval("SELECT ordering FROM taskyard.queue WHERE name = $1", queue) or QueueOrder.PRIORITY
    )
