"""What one write transaction on the SQLite store does: synchronous, on the writer thread's connection.

Whatever is written goes in blocks of rows (`INSERT … VALUES (…), (…)`, `UPDATE … FROM (VALUES …)`), and what is read
comes back as one JSON value. Both for one reason: SQLite gives up the GIL around every step, and with a busy event loop
in the same process each step then costs a switch interval (5 ms). A hundred single-row steps take half a second there,
one block of a hundred rows takes one wait. On an idle process blocks are as fast as anything else.

What a transaction needs to know of the store (counters, lanes, queues, tallies) is cached and read again whenever
`data_version` says that another process has written, or after a rollback.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import cache
from itertools import chain
from typing import Any

import apsw
import msgspec

from taskyard.errors import ClaimLost, CommandRefused, DuplicateTask, InvalidInput, TaskyardError, UnknownTask
from taskyard.model.command import Command, Reprioritize, apply_decision, decide
from taskyard.model.event import TOLD_AS, EventKind
from taskyard.model.limits import Demand, QueueSettings, Quota
from taskyard.model.move import Move, apply_move
from taskyard.model.order import head_position, tail_position
from taskyard.model.settle import heed_cancel, rescue
from taskyard.model.state import WAITING_FOR_TIME, TaskState
from taskyard.model.task import Claim, Dedupe, TaskRecord
from taskyard.ports.clock import Clock
from taskyard.ports.store import PROMOTE_AT_MOST, Add, Added, Applied, Node, Report, Turned
from taskyard.stores.rows import (
    COLUMNS,
    MOVED,
    NEW,
    RUN_COLUMNS,
    from_row,
    from_us,
    to_moved_row,
    to_new_row,
    to_us,
)

RING = 10_000
"""Events kept for readers that fall behind."""

BLOCKS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Rows a statement, largest first. apsw caches statements of up to 16 KB of text: 128 rows of 29 columns stay below."""

_ALL = ", ".join(COLUMNS)
_AS_JSON = f"json_group_array(json_array({_ALL}))"


@cache
def _values(rows: int, width: int) -> str:
    return ", ".join(["(" + ", ".join("?" * width) + ")"] * rows)


@cache
def _insert(table: str, columns: tuple[str, ...], rows: int) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES {_values(rows, len(columns))}"


@cache
def _update(columns: tuple[str, ...], rows: int) -> str:
    """Set `columns[1:]` of the tasks whose ids come first in each row. A note is only ever replaced by another."""
    sets = ", ".join(
        f"note = COALESCE(v.column{i}, note)" if column == "note" else f"{column} = v.column{i}"
        for i, column in enumerate(columns[1:], 2)
    )
    return f"UPDATE task SET {sets} FROM (VALUES {_values(rows, len(columns))}) AS v WHERE task.id = v.column1"


@cache
def _start(rows: int) -> str:
    """Start the tasks whose (id, token) come last, on node ?1 at time ?2."""
    return (
        "UPDATE task SET state = 'running', attempt = attempt + 1, token = v.column2, node = ?1, started_at = ?2, "
        f"updated_at = ?2 FROM (VALUES {_values(rows, 2)}) AS v WHERE task.id = v.column1"
    )


@cache
def _complete(rows: int) -> str:
    """What `apply_move` does for a completed run, with (id, time, result, note) for each."""
    return (
        "UPDATE task SET state = 'completed', updated_at = v.column2, finished_at = v.column2, result = v.column3, "
        "note = COALESCE(v.column4, note), token = NULL, node = NULL, cancel_asked_at = NULL, dedupe_slot = NULL, "
        f"error = NULL FROM (VALUES {_values(rows, 4)}) AS v WHERE task.id = v.column1"
    )


_PROMOTED = ("id", "position", "parked", "updated_at", "state")
_PARKED = ("id", "parked")


class SqliteCore:
    """Call `begin`, then verbs, then `finish`, then COMMIT; after a rollback, `forget`."""

    def __init__(self, conn: apsw.Connection, clock: Clock) -> None:
        self._conn = conn
        self._clock = clock
        self._version: int | None = None
        self._seq = 0
        self._event_seq = 0
        self._lanes: set[tuple[str, str]] = set()
        self._queues: dict[str, QueueSettings] = {}
        self._tally: Counter[tuple[str, str]] = Counter()
        self._next_due: int | None = None
        self._due_known = False
        self.isolated = False
        self._reset()

    # --- the frame of a transaction -----------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Start a transaction; true if another process has written since the last one."""
        self._conn.execute("BEGIN IMMEDIATE")
        return self.refresh()

    def refresh(self) -> bool:
        version = self._one("PRAGMA data_version")
        if version == self._version:
            return False
        self._load()
        foreign = self._version is not None
        self._version = version
        return foreign

    def _load(self) -> None:
        newest = self._conn.execute("SELECT last, seq FROM event ORDER BY last DESC LIMIT 1").fetchone()
        self._event_seq, self._seq = newest or (0, 0)
        self._lanes = {(q, s) for q, s in self._conn.execute("SELECT queue, source FROM lane")}
        queues: Any = self._conn.execute("SELECT name, settings FROM queue").fetchall()
        self._queues = {name: msgspec.json.decode(text, type=QueueSettings) for name, text in queues}
        self._tally = Counter({(q, s): n for q, s, n in self._conn.execute("SELECT queue, state, n FROM tally")})
        self._due_known = False

    def _reset(self) -> None:
        self._events: list[tuple[str, str, str, str, int]] = []
        self._moved_tally: Counter[tuple[str, str]] = Counter()
        self._runs: list[tuple[Any, ...]] = []
        self._saves: list[TaskRecord] = []
        self._completed: list[tuple[Any, ...]] = []
        self._keys: set[tuple[str, str]] = set()

    def finish(self) -> None:
        """Write what the verbs of this transaction left to be written once."""
        self._flush()
        if self._events:
            first, self._event_seq = self._event_seq + 1, self._event_seq + len(self._events)
            body = msgspec.json.encode(self._events).decode()
            self._conn.execute("INSERT INTO event VALUES (?, ?, ?, ?)", (self._event_seq, first, self._seq, body))
            if first // 1024 != self._event_seq // 1024:
                self._conn.execute("DELETE FROM event WHERE last <= ?", (self._event_seq - RING,))
        changed = [(queue, state, n) for (queue, state), n in self._moved_tally.items() if n]
        if changed:
            self._tally.update(self._moved_tally)
            self._conn.execute(
                f"INSERT INTO tally (queue, state, n) VALUES {_values(len(changed), 3)} "
                "ON CONFLICT DO UPDATE SET n = n + excluded.n",
                tuple(chain.from_iterable(changed)),
            )
        self._reset()

    def forget(self) -> None:
        """The transaction was rolled back: nothing cached can be trusted."""
        self._version = None
        self._due_known = False
        self._reset()

    # --- the hot path -------------------------------------------------------------------------------------------------

    def peek(self, demand: Demand | None) -> Turned | None:
        """The answer to a turn that only asks, if there is nothing to give: found without a write lock."""
        self.refresh()
        due = self._find_next_due()
        if due is not None and due <= to_us(self._clock.now()):
            return None
        if demand is not None and any(self._lane(*lane, chunk=1) for lane in self._open_lanes(self._quota(demand))):
            return None
        return Turned([], [], [], None if due is None else from_us(due))

    def turn(
        self,
        node: str,
        settles: Sequence[tuple[Claim, Move]],
        adds: Sequence[Add],
        reports: Sequence[Report],
        demand: Demand | None,
    ) -> Turned:
        now = self._clock.now()
        settled = self._settle(settles) if settles else []
        if reports:
            self._report(reports, now)
        added = self._add_all(adds, now) if adds else []
        self._promote(now)
        self._flush()
        claims = self._claim(node, demand, now) if demand is not None and demand.total > 0 else []
        due = self._find_next_due()
        return Turned(settled, added, claims, None if due is None else from_us(due))

    def _settle(self, settles: Sequence[tuple[Claim, Move]]) -> list[ClaimLost | None]:
        held = self._held(claim for claim, _ in settles)
        settled: list[ClaimLost | None] = []
        for claim, move in settles:
            # A claim is spent by its first settle, also within one turn.
            asked = held.pop(claim.token, None)
            if asked is None:
                settled.append(ClaimLost(claim.uuid, claim.token))
                continue
            # Race: a cancel may be asked after the run has ended and before its node could know.
            self._end(claim.record, heed_cancel(move) if asked else move)
            settled.append(None)
        self._save_moved()  # before reports and adds look at these tasks
        return settled

    def _end(self, running: TaskRecord, move: Move) -> None:
        if move.state is not TaskState.COMPLETED:
            record = running.clone()
            record.note = None  # the row may have a newer one, which stays unless the move brings another
            self._move(record, move)
            return
        # The end of most tasks: the same as `_move`, in one narrow statement for all of a turn.
        at = to_us(move.at)
        self._completed.append((running.id, at, move.result, move.note))
        self._ran(running, move, at)
        self._moved_tally[running.queue, TaskState.RUNNING] -= 1
        self._moved_tally[running.queue, TaskState.COMPLETED] += 1
        if running.key is not None:
            self._keys.add((running.queue, running.key))
        self._tell(EventKind.COMPLETED, running, at)

    def _held(self, claims: Iterable[Claim]) -> dict[int, int]:
        """The tokens of those claims that still hold their task, and whether a cancel was asked of it."""
        held: dict[int, int] = {}
        for rows in _blocks([(claim.record.id, claim.token, claim.attempt) for claim in claims]):
            found = self._one(
                "SELECT json_group_array(json_array(task.token, task.cancel_asked_at IS NOT NULL)) FROM "
                f"(VALUES {_values(len(rows), 3)}) AS v CROSS JOIN task ON task.id = v.column1 "
                "WHERE task.token = v.column2 AND task.attempt = v.column3 AND task.state = 'running'",
                chain.from_iterable(rows),
            )
            held.update(msgspec.json.decode(found))
        return held

    def _report(self, reports: Sequence[Report], now: datetime) -> None:
        held = self._held(report.claim for report in reports)
        for report in reports:
            if report.claim.token not in held:
                continue
            text = None if report.progress is None else msgspec.json.encode(report.progress).decode()
            self._conn.execute(
                "UPDATE task SET progress = COALESCE(?, progress), note = COALESCE(?, note), updated_at = ? "
                "WHERE id = ?",
                (text, report.note, to_us(now), report.claim.record.id),
            )
            if text is not None:
                self._tell(EventKind.PROGRESS, report.claim.record, to_us(now))

    # --- adding -------------------------------------------------------------------------------------------------------

    def _add_all(self, adds: Sequence[Add], now: datetime) -> list[list[Added] | TaskyardError]:
        if self.isolated:
            return [self._add_isolated(add, now) for add in adds]
        fresh: list[TaskRecord] = []
        slots: dict[str, str] = {}
        added = [self._admit(add, now, fresh, slots) for add in adds]
        self._insert_tasks(fresh, now)
        return added

    def _add_isolated(self, add: Add, now: datetime) -> list[Added] | TaskyardError:
        """The same for one add under a savepoint, when the plain way met an error that was somebody's own."""
        events = len(self._events)
        tally, keys = self._moved_tally.copy(), self._keys.copy()
        try:
            with self._conn:
                fresh: list[TaskRecord] = []
                added = self._admit(add, now, fresh, {})
                self._insert_tasks(fresh, now)
        except apsw.ConstraintError as exc:
            del self._events[events:]
            self._moved_tally, self._keys = tally, keys
            self._lanes = {(q, s) for q, s in self._conn.execute("SELECT queue, source FROM lane")}
            self._due_known = False
            return InvalidInput(f"these tasks cannot be stored: {exc}; a task's uuid must be new")
        return added

    def _admit(
        self, add: Add, now: datetime, fresh: list[TaskRecord], slots: dict[str, str]
    ) -> list[Added] | TaskyardError:
        """Decide about one add: extends `fresh` by the records to insert, and `slots` by the dedupe slots they take."""
        if add.parent is not None and not self._held([add.parent]):
            return ClaimLost(add.parent.uuid, add.parent.token)
        if add.dedupe is Dedupe.REFUSE:
            for record in add.records:
                holder = self._slot_holder(record.dedupe_slot, slots)
                if holder is not None:
                    return DuplicateTask(holder, record.dedupe_slot or "")
        added = []
        for asked in add.records:
            holder = None if add.dedupe is Dedupe.ALLOW else self._slot_holder(asked.dedupe_slot, slots)
            if holder is not None:
                added.append(Added(holder, is_new=False))
                continue
            record = asked.clone()
            if add.dedupe is Dedupe.ALLOW:
                record.dedupe_slot = None
            elif record.dedupe_slot is not None:
                slots[record.dedupe_slot] = record.uuid
            self._seq += 1
            record.id, record.position = self._seq, tail_position(self._seq)
            record.state = TaskState.SCHEDULED if record.due_at > now else TaskState.QUEUED
            record.parked = record.key is not None and record.state is TaskState.QUEUED
            record.updated_at = now
            fresh.append(record)
            added.append(Added(record.uuid))
        return added

    def _slot_holder(self, slot: str | None, slots: dict[str, str]) -> str | None:
        if slot is None:
            return None
        found: str | None = slots.get(slot) or self._one("SELECT uuid FROM task WHERE dedupe_slot = ?", (slot,))
        return found

    def _insert_tasks(self, records: list[TaskRecord], now: datetime) -> None:
        at = to_us(now)
        for record in records:
            self._moved_tally[record.queue, record.state] += 1
            self._tell(EventKind.SUBMITTED, record, at)
            if record.state is TaskState.SCHEDULED:
                self._note_due(to_us(record.due_at))
            elif record.key is not None:
                self._keys.add((record.queue, record.key))
            if (record.queue, record.source) not in self._lanes:
                self._conn.execute("INSERT OR IGNORE INTO lane VALUES (?, ?)", (record.queue, record.source))
                self._lanes.add((record.queue, record.source))
        self._write_rows("task", NEW, [to_new_row(record, at) for record in records])

    # --- time ---------------------------------------------------------------------------------------------------------

    def _find_next_due(self) -> int | None:
        if not self._due_known:
            self._next_due = self._one(
                "SELECT due_at FROM task WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT 1"
            )
            self._due_known = True
        return self._next_due

    def _note_due(self, due: int) -> None:
        if self._due_known and (self._next_due is None or due < self._next_due):
            self._next_due = due

    def _promote(self, now: datetime) -> None:
        due = self._find_next_due()
        at = to_us(now)
        if due is None or due > at:
            return
        records = self._read(
            f"SELECT {_AS_JSON} FROM (SELECT {_ALL} FROM task WHERE state IN ('scheduled', 'retrying') AND due_at <= ? "
            "ORDER BY due_at, id LIMIT ?)",
            (at, PROMOTE_AT_MOST),
        )
        records.sort(key=lambda record: (record.due_at, record.id))
        rows = []
        for record in records:
            self._moved_tally[record.queue, record.state] -= 1
            self._moved_tally[record.queue, TaskState.QUEUED] += 1
            if record.state is TaskState.SCHEDULED:
                self._seq += 1
                record.position = tail_position(self._seq)
            if record.key is not None:
                self._keys.add((record.queue, record.key))
            rows.append((record.id, record.position, int(record.key is not None), at, TaskState.QUEUED))
            self._tell(EventKind.QUEUED, record, at)
        self._update_rows(_PROMOTED, rows)
        self._due_known = False

    # --- claiming -----------------------------------------------------------------------------------------------------

    def _quota(self, demand: Demand) -> Quota:
        running = TaskState.RUNNING
        room = {
            name: queue.concurrency - self._tally[name, running] - self._moved_tally[name, running]
            for name, queue in self._queues.items()
            if queue.concurrency is not None
        }
        return Quota(demand, room)

    def _open_lanes(self, quota: Quota) -> list[tuple[str, str]]:
        return [lane for lane in self._lanes if quota.room(*lane) > 0]

    def _claim(self, node: str, demand: Demand, now: datetime) -> list[Claim]:
        quota = self._quota(demand)
        lanes = self._open_lanes(quota)
        records = self._lane(*lanes[0], chunk=quota.room(*lanes[0])) if len(lanes) == 1 else self._merge(lanes, quota)
        at = to_us(now)
        claims = [self._start(record, node, now, at) for record in records]
        for queue, n in Counter(record.queue for record in records).items():
            self._moved_tally[queue, TaskState.QUEUED] -= n
            self._moved_tally[queue, TaskState.RUNNING] += n
        for block in _blocks([(claim.record.id, claim.token) for claim in claims]):
            self._conn.execute(_start(len(block)), (node, at, *chain.from_iterable(block)))
        return claims

    def _merge(self, lanes: list[tuple[str, str]], quota: Quota) -> list[TaskRecord]:
        """What goes next over many lanes, read a little at a time: most of what they hold will not be taken."""
        share = max(4, 2 * quota.left // max(1, len(lanes)))
        heads = (self._follow_lane(lane, chunk=min(share, quota.room(*lane))) for lane in lanes)
        picked: list[TaskRecord] = []
        for record in heapq.merge(*heads, key=lambda r: (r.priority, r.position)):
            if quota.room(record.queue, record.source) > 0:
                quota.admit(record.queue, record.source)
                picked.append(record)
                if quota.left <= 0:
                    break
        return picked

    def _follow_lane(self, lane: tuple[str, str], chunk: int) -> Iterator[TaskRecord]:
        after = (-1, 0)
        while records := self._lane(*lane, chunk=chunk, after=after):
            yield from records
            if len(records) < chunk:
                return
            after = (records[-1].priority, records[-1].position)

    def _lane(self, queue: str, source: str, *, chunk: int, after: tuple[int, int] = (-1, 0)) -> list[TaskRecord]:
        records = self._read(
            f"SELECT {_AS_JSON} FROM (SELECT {_ALL} FROM task WHERE queue = ? AND source = ? AND state = 'queued' "
            "AND parked = 0 AND (priority, position) > (?, ?) ORDER BY priority, position LIMIT ?)",
            (queue, source, *after, chunk),
        )
        records.sort(key=lambda record: (record.priority, record.position))
        return records

    def _start(self, record: TaskRecord, node: str, now: datetime, at: int) -> Claim:
        self._seq = token = self._seq + 1
        record.state = TaskState.RUNNING
        record.attempt += 1
        record.token = token
        record.node = node
        record.started_at = record.updated_at = now
        self._events.append((EventKind.STARTED, record.uuid, record.source, record.queue, at))
        return Claim(record, record.attempt, token)

    # --- one move -----------------------------------------------------------------------------------------------------

    def _move(self, record: TaskRecord, move: Move) -> None:
        """Carry out `move`, to be written by the next flush."""
        old = record.state
        if old is TaskState.RUNNING:
            self._ran(record, move, to_us(move.at))
        apply_move(record, move)
        new = record.state
        self._moved_tally[record.queue, old] -= 1
        self._moved_tally[record.queue, new] += 1
        if new is TaskState.QUEUED and (move.to_head or old is TaskState.FAILED):
            self._seq += 1
            record.position = head_position(self._seq) if move.to_head else tail_position(self._seq)
        if old in WAITING_FOR_TIME:
            self._due_known = False
        elif new in WAITING_FOR_TIME:
            self._note_due(to_us(record.due_at))
        if record.key is not None:
            record.parked = new is TaskState.QUEUED
            self._keys.add((record.queue, record.key))
        self._tell(TOLD_AS[new], record, to_us(move.at))
        self._saves.append(record)

    def _ran(self, running: TaskRecord, move: Move, at: int) -> None:
        """The attempt's own row, in the order of `RUN_COLUMNS`. Asked before the record is changed."""
        error = None if move.error is None else msgspec.json.encode(move.error).decode()
        started_at = to_us(running.started_at) if running.started_at is not None else at
        state = move.run or move.state
        self._runs.append((running.id, running.token, running.attempt, running.node, state, started_at, at, error))

    def _tell(self, kind: EventKind, record: TaskRecord, at: int) -> None:
        self._events.append((kind, record.uuid, record.source, record.queue, at))

    def _flush(self) -> None:
        self._save_moved()
        if self._runs:
            self._write_rows("run", RUN_COLUMNS, self._runs)
            self._runs = []
        if self._keys:
            for queue, key in sorted(self._keys):
                self._repark(queue, key)
            self._keys = set()

    def _save_moved(self) -> None:
        if self._completed:
            for block in _blocks(self._completed):
                self._conn.execute(_complete(len(block)), tuple(chain.from_iterable(block)))
            self._completed = []
        if self._saves:
            latest = {record.id: record for record in self._saves}  # a rescue moves a record twice
            self._update_rows(MOVED, [to_moved_row(record) for record in latest.values()])
            self._saves = []

    def _repark(self, queue: str, key: str) -> None:
        """Of the tasks waiting with this key, exactly the first ones that fit under its limit may start."""
        where = "FROM task WHERE queue = ? AND key = ? AND state"
        per_key = self._settings(queue).per_key
        busy = self._one(f"SELECT count(*) {where} IN ('running', 'retrying')", (queue, key))
        free = max(0, per_key - busy)
        query = f"SELECT priority, position, id, parked {where} = 'queued' AND parked = ? ORDER BY priority, position"
        offered: Any = self._conn.execute(query, (queue, key, 0)).fetchall()
        waiting: Any = self._conn.execute(query + " LIMIT ?", (queue, key, 1, free)).fetchall()
        wanted = (
            (id_, parked, int(place >= free)) for place, (_, _, id_, parked) in enumerate(sorted(offered + waiting))
        )
        self._update_rows(_PARKED, [(id_, new) for id_, old, new in wanted if old != new])

    def _settings(self, queue: str) -> QueueSettings:
        return self._queues.get(queue) or QueueSettings(name=queue)

    # --- commands, rescue, retention ----------------------------------------------------------------------------------

    def apply(self, uuids: Sequence[str], command: Command) -> list[Applied]:
        now = self._clock.now()
        found = self._read(
            f"SELECT {_AS_JSON} FROM task WHERE uuid IN (SELECT value FROM json_each(?))",
            (msgspec.json.encode(list(uuids)).decode(),),
        )
        records = {record.uuid: record for record in found}
        applied = [self._apply_one(uuid, records.get(uuid), command, now) for uuid in uuids]
        self._flush()
        # Parking is decided at the flush, after the records were changed: read what it decided.
        return [self._with_parking(one) for one in applied]

    def _apply_one(self, uuid: str, record: TaskRecord | None, command: Command, now: datetime) -> Applied:
        if record is None:
            return Applied(uuid, refused=UnknownTask(uuid))
        try:
            decision = decide(record, command, now=now)
        except CommandRefused as refused:
            return Applied(uuid, refused=refused)
        if isinstance(decision, Move):
            self._move(record, decision)
        else:
            apply_decision(record, decision)
            kind = EventKind.CANCEL_ASKED
            if isinstance(decision, Reprioritize):
                kind = EventKind.PRIORITY_CHANGED
                if record.key is not None and record.state is TaskState.QUEUED:
                    record.parked = True
                    self._keys.add((record.queue, record.key))
            self._tell(kind, record, to_us(now))
            self._saves.append(record)
        return Applied(uuid, record=record)

    def _with_parking(self, applied: Applied) -> Applied:
        record = applied.record
        if record is not None and record.key is not None:
            record.parked = bool(self._one("SELECT parked FROM task WHERE id = ?", (record.id,)))
        return applied

    def set_queue(self, settings: QueueSettings) -> None:
        old = self._settings(settings.name)
        text = msgspec.json.encode(settings).decode()
        self._conn.execute("INSERT OR REPLACE INTO queue VALUES (?, ?)", (settings.name, text))
        self._queues[settings.name] = settings
        if settings.per_key != old.per_key:
            keys: Any = self._conn.execute(
                "SELECT DISTINCT key FROM task WHERE queue = ? AND key IS NOT NULL AND state IN ('queued', 'running', "
                "'retrying')",
                (settings.name,),
            )
            self._keys.update((settings.name, key) for (key,) in keys.fetchall())

    def join(self, node: Node, boot_id: str) -> None:
        info = msgspec.json.encode(node).decode()
        self._conn.execute("INSERT OR REPLACE INTO node VALUES (?, ?, ?)", (node.incarnation, info, boot_id))

    def leave(self, incarnation: str) -> None:
        self._conn.execute("DELETE FROM node WHERE incarnation = ?", (incarnation,))

    def rescue(self, incarnation: str) -> list[str]:
        now = self._clock.now()
        why = f"its node {incarnation} died"
        rescued = self._read(f"SELECT {_AS_JSON} FROM task WHERE state = 'running' AND node = ?", (incarnation,))
        rescued.sort(key=lambda record: record.position, reverse=True)  # the last to be put at the head stands first
        for record in rescued:
            for move in rescue(record, auto_recover=self._settings(record.queue).auto_recover, now=now, why=why):
                self._move(record, move)
        self.leave(incarnation)
        return [record.uuid for record in rescued]

    def prune(self, finished_before: datetime, limit: int) -> int:
        old: Any = self._conn.execute(
            "SELECT id, queue, state FROM task WHERE finished_at IS NOT NULL AND finished_at < ? "
            "ORDER BY finished_at, id LIMIT ?",
            (to_us(finished_before), limit),
        ).fetchall()
        ids = msgspec.json.encode([id_ for id_, _, _ in old]).decode()
        self._conn.execute("DELETE FROM run WHERE task IN (SELECT value FROM json_each(?))", (ids,))
        self._conn.execute("DELETE FROM task WHERE id IN (SELECT value FROM json_each(?))", (ids,))
        for _, queue, state in old:
            self._moved_tally[queue, state] -= 1
        return len(old)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _one(self, sql: str, bindings: Iterable[Any] = ()) -> Any:
        row = self._conn.execute(sql, tuple(bindings)).fetchone()
        return None if row is None else row[0]

    def _read(self, sql: str, bindings: tuple[Any, ...]) -> list[TaskRecord]:
        return [from_row(row) for row in msgspec.json.decode(self._one(sql, bindings))]

    def _write_rows(self, table: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        for block in _blocks(rows):
            self._conn.execute(_insert(table, columns, len(block)), tuple(chain.from_iterable(block)))

    def _update_rows(self, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        for block in _blocks(rows):
            self._conn.execute(_update(columns, len(block)), tuple(chain.from_iterable(block)))


def _blocks(rows: list[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """`rows` in as few pieces as the sizes of `BLOCKS` allow."""
    start = 0
    for size in BLOCKS:
        while len(rows) - start >= size:
            yield rows[start : start + size]
            start += size
