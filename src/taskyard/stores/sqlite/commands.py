"""Commands, queues, nodes, rescue and retention: everything but the hot path."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import apsw
import msgspec

from taskyard.errors import CommandRefused, UnknownNode, UnknownTask
from taskyard.model.audit import AuditEntry
from taskyard.model.catalogue import ConsumerSpec
from taskyard.model.command import (
    Asked,
    Change,
    Command,
    Redate,
    Reorder,
    anchor_of,
    apply_change,
    change_detail,
    decide,
)
from taskyard.model.move import Move
from taskyard.model.node import Node
from taskyard.model.order import GAP, head_position
from taskyard.model.places import Put, place_beside
from taskyard.model.queue import UNTOUCHED, QueueCommand, QueueControl, QueueOrder, QueueSettings, steer
from taskyard.model.settle import rescue
from taskyard.model.state import QUEUED, TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.ports.clock import Clock
from taskyard.ports.store import Applied
from taskyard.stores.records import to_us
from taskyard.stores.sqlite import audit as audit_log
from taskyard.stores.sqlite.catalogue import publish, see
from taskyard.stores.sqlite.dependencies import Dependencies
from taskyard.stores.sqlite.devices import DeviceWrites
from taskyard.stores.sqlite.statements import HAS_ENDED

_PLACE = ("id", "position")
_IN_NEED = (
    "SELECT 1 FROM dependency AS d CROSS JOIN task AS c ON c.id = d.child "
    "WHERE d.parent = task.id AND c.finished_at IS NULL"
)
"""Those that wait, or have waited, for a task, and have not ended."""


class Commands(Dependencies):
    def __init__(self, conn: apsw.Connection, clock: Clock) -> None:
        super().__init__(conn, clock)
        self.devices = DeviceWrites(self, conn, clock)

    def apply(
        self,
        uuids: Sequence[str],
        command: Command,
        by: str = "",
        where: TaskFilter = ALL_TASKS,
        audit: AuditEntry | None = None,
    ) -> list[Applied]:
        now = self._clock.now()
        found = self._read("uuid IN (SELECT value FROM json_each(?))", (msgspec.json.encode(list(uuids)).decode(),))
        records = {record.uuid: record for record in found}
        asked = Asked(command=command, now=now, by=by)
        applied = [self._apply_one(uuid, records.get(uuid), asked, where) for uuid in uuids]
        self._release(now)
        self._flush()
        audit_log.note(self._conn, audit, len(uuids), sum(one.record is not None for one in applied))
        # Parking is decided at the flush, after the records were changed: read what it decided.
        return [self._with_parking(one) for one in applied]

    def _apply_one(self, uuid: str, record: TaskRecord | None, asked: Asked, where: TaskFilter) -> Applied:
        if record is None:
            return Applied(uuid, refused=UnknownTask(uuid))
        try:
            where.check(record, asked.command)
            decision = decide(record, self._look_beside(record, asked))
        except CommandRefused as refused:
            return Applied(uuid, refused=refused)
        if isinstance(decision, Move) and record.state is TaskState.FAILED:
            if (refusal := self._revive(record, decision)) is not None:
                return Applied(uuid, refused=refusal)
        elif isinstance(decision, Move):
            self._move(record, decision)
        else:
            self._change(record, decision)
        return Applied(uuid, record=record)

    def _look_beside(self, record: TaskRecord, asked: Asked) -> Asked:
        """What else has to be known to decide. The other task may have had to move for the one before."""
        other = anchor_of(asked.command)
        if other is None:
            return asked
        self._save_moved()
        anchor = next(iter(self._read("uuid = ?", (other,))), None)
        return msgspec.structs.replace(asked, order=self._settings(record.queue).order, anchor=anchor)

    def _change(self, record: TaskRecord, change: Change) -> None:
        was = record.priority
        apply_change(record, change)
        if isinstance(change, Reorder):
            self._place(record, change)
        if isinstance(change, Redate):
            self._due_known = False
        elif record.state is QUEUED:
            self._changed_lane(record, was)
        self._tell(change.kind, record, to_us(change.at), change_detail(record, change))
        self._saves.append(record)

    def _place(self, record: TaskRecord, asked: Reorder) -> None:
        if asked.beside is None:
            self._seq += 1
            record.position = head_position(self._seq)
            return
        placing = place_beside(asked.beside, _Puts(self._conn, record.queue), before=asked.before)
        self._update_rows(_PLACE, [(id_, position) for position, id_ in placing.moved])
        record.position = placing.position

    def _changed_lane(self, record: TaskRecord, was: int) -> None:
        """A queued task stood somewhere else until now, in the lane of this priority."""
        if was != record.priority:
            self._count(record.queue, record.lane, QUEUED, -1, was)
            self._count(record.queue, record.lane, QUEUED, 1, record.priority)
        if record.key is not None:
            record.is_parked = True
            self._keys.add((record.queue, record.key))

    def _with_parking(self, applied: Applied) -> Applied:
        record = applied.record
        if record is not None and record.key is not None:
            record.is_parked = bool(self._one("SELECT is_parked FROM task WHERE id = ?", (record.id,)))
        return applied

    def set_queue(self, settings: QueueSettings) -> None:
        old = self._settings(settings.name)
        if self._queues.get(settings.name) == settings:
            return
        text = msgspec.json.encode(settings).decode()
        self._conn.execute("INSERT OR REPLACE INTO queue VALUES (?, ?)", (settings.name, text))
        self._queues[settings.name] = settings
        if settings.order is not old.order:
            self._reorder(settings)
        if (settings.per_key, settings.order) != (old.per_key, old.order):
            keys: Any = self._conn.execute(
                "SELECT DISTINCT key FROM task WHERE queue = ? AND key IS NOT NULL AND state IN ('queued', 'running', "
                "'retrying')",
                (settings.name,),
            )
            self._keys.update((settings.name, key) for (key,) in keys.fetchall())

    def _reorder(self, settings: QueueSettings) -> None:
        """The queue's order is another one: everybody in it gets the line he stands in by that, if any."""
        self._strict.discard(settings.name)
        if settings.is_strict:
            self._strict.add(settings.name)
        line = {QueueOrder.PRIORITY: "NULL", QueueOrder.FIFO: "''", QueueOrder.BUCKETS: "COALESCE(bucket, '')"}
        for states in (  # as the indexes have them: what has ended is not looked at
            "state = 'queued' AND is_parked = 0",
            "key IS NOT NULL AND state IN ('queued', 'running', 'retrying')",
            "state IN ('scheduled', 'retrying')",
            "state = 'running'",
            "state IN ('paused', 'blocked') AND NOT (state = 'paused' AND is_parked)",
        ):
            sql = f"UPDATE task SET fifo_bucket = {line[settings.order]} WHERE queue = ? AND {states}"
            self._conn.execute(sql, (settings.name,))

    def control(self, queue: str, command: QueueCommand, by: str, audit: AuditEntry | None = None) -> QueueControl:
        now, old = self._clock.now(), self._controls.get(queue, UNTOUCHED)
        new = steer(old, command, by=by, now=now, running=self._running_in[queue])
        self._set_control(queue, new, to_us(now))
        audit_log.note(self._conn, audit, 1, int(new is not old))
        return new

    def join(self, node: Node, specs: Sequence[ConsumerSpec], boot_id: str) -> None:
        info = msgspec.json.encode(node).decode()
        self._conn.execute(
            "INSERT OR REPLACE INTO node (incarnation, info, boot_id) VALUES (?, ?, ?)",
            (node.incarnation, info, boot_id),
        )
        publish(self._conn, specs, self._clock.now())

    def describe(self, node: Node, specs: Sequence[ConsumerSpec]) -> None:
        info, now = msgspec.json.encode(node).decode(), self._clock.now()
        see(self._conn, node.incarnation, now)
        known = self._one("UPDATE node SET info = ? WHERE incarnation = ? RETURNING 1", (info, node.incarnation))
        if known is not None:
            publish(self._conn, specs, now)

    def drain(self, incarnation: str, on: bool, audit: AuditEntry | None = None) -> None:
        known = self._one("UPDATE node SET is_draining = ? WHERE incarnation = ? RETURNING 1", (on, incarnation))
        if known is None:
            raise UnknownNode(incarnation)
        audit_log.note(self._conn, audit, 1, 1)

    def leave(self, incarnation: str) -> bool:
        """Whether the node could go. One that still holds a task stays, to be rescued."""
        if self._one("SELECT 1 FROM task WHERE state = 'running' AND node = ? LIMIT 1", (incarnation,)):
            return False
        self._forget_node(incarnation)
        return True

    def _forget_node(self, incarnation: str) -> None:
        now = self._clock.now()
        see(self._conn, incarnation, now)
        self._conn.execute("DELETE FROM node WHERE incarnation = ?", (incarnation,))
        self.devices.release(incarnation, None)
        publish(self._conn, (), now)

    def rescue(self, incarnation: str) -> list[str]:
        now = self._clock.now()
        info = self._one("SELECT info FROM node WHERE incarnation = ?", (incarnation,))
        node = incarnation[:8] if info is None else msgspec.json.decode(info, type=Node).label
        rescued = self._read("state = 'running' AND node = ?", (incarnation,))
        rescued.sort(key=lambda record: record.position, reverse=True)  # the last to be put at the head stands first
        for record in rescued:
            for move in rescue(record, auto_recover=self._settings(record.queue).auto_recover, now=now, node=node):
                self._move(record, move)
        self._release(now)
        self._note_drained(to_us(now))
        self._forget_node(incarnation)
        return [record.uuid for record in rescued]

    def prune(
        self, finished_before: datetime, limit: int, failed: bool | None = None, audit: AuditEntry | None = None
    ) -> int:
        old: Any = self._conn.execute(
            f"SELECT id, queue, lane, state FROM task WHERE {HAS_ENDED[failed]} AND finished_at < ? "
            f"AND NOT EXISTS ({_IN_NEED}) ORDER BY finished_at, id LIMIT ?",
            (to_us(finished_before), limit),
        ).fetchall()
        ids = msgspec.json.encode([id_ for id_, *_ in old]).decode()
        self._trim_windows(self._clock.now(), limit)
        self._conn.execute("DELETE FROM dependency WHERE child IN (SELECT value FROM json_each(?))", (ids,))
        for table in ("attempt", "attempt_line", "artifact", "task_label"):
            self._conn.execute(f"DELETE FROM {table} WHERE task IN (SELECT value FROM json_each(?))", (ids,))
        self._conn.execute("DELETE FROM task WHERE id IN (SELECT value FROM json_each(?))", (ids,))
        for _, queue, lane, state in old:
            self._count(queue, lane, TaskState(state), -1)
        audit_log.note(self._conn, audit, len(old), len(old))
        return len(old)

    def put_audit(self, entry: AuditEntry) -> None:
        audit_log.put(self._conn, entry)

    def prune_audit(self, before: datetime, limit: int) -> int:
        return audit_log.prune(self._conn, before, limit)


class _Puts:
    """The places in one queue that were made by hand, by the index `task_placed`."""

    _HAND_MADE = f"queue = ? AND position % {GAP} <> 0 AND finished_at IS NULL"

    def __init__(self, conn: apsw.Connection, queue: str) -> None:
        self._conn, self._queue = conn, queue

    def nearest(self, position: int, *, below: bool) -> int | None:
        end = "max(position)" if below else "min(position)"
        sql = f"SELECT {end} FROM task INDEXED BY task_placed WHERE {self._HAND_MADE} AND position {'<>'[not below]} ?"
        found: Any = self._conn.execute(sql, (self._queue, position)).get
        return None if found is None else int(found)

    def between(self, low: int, high: int) -> list[Put]:
        rows: Any = self._conn.execute(
            f"SELECT position, id FROM task INDEXED BY task_placed WHERE {self._HAND_MADE} "
            "AND position BETWEEN ? AND ? ORDER BY position",
            (self._queue, low, high),
        )
        return [Put(*row) for row in rows]
