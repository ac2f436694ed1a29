"""The frame of one write transaction: what it knows of the store, what it leaves to be written at its end.

What a transaction needs to know (counters, lanes, queues, tallies) is cached, and read again whenever `data_version`
says that another process has written, or after a rollback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

import apsw
import msgspec

from taskyard.model.event import TOLD_AS, EventDetail, EventKind
from taskyard.model.fairness import FairnessState
from taskyard.model.move import Move, apply_move, event_detail
from taskyard.model.order import head_position, tail_position
from taskyard.model.queue import (
    UNTOUCHED,
    QueueControl,
    QueueOrder,
    QueueSettings,
    QueueState,
    control_detail,
    drained,
    told_as,
)
from taskyard.model.state import COMPLETED, ENDED, QUEUED, RUNNING, WAITING_FOR_TIME, TaskState
from taskyard.model.task import TaskRecord
from taskyard.ports.clock import Clock
from taskyard.ports.store import ATTEMPTS_KEPT
from taskyard.stores.records import ATTEMPT, MOVED_TASK, SQLITE, TASK, to_document_or_none, to_us
from taskyard.stores.sqlite.statements import ALL, TRIM_RUNS, blocks, complete, insert, keyed, tally, update

RING = 10_000
"""Events kept for readers that fall behind."""

_PARKED = ("id", "is_parked")
_MOVED = (*MOVED_TASK, "fifo_bucket")
_POSITION, _NOTE = _MOVED.index("position"), _MOVED.index("note")
_ATTEMPT = ("task", *ATTEMPT.columns, "account")
_to_record = TASK.reader(SQLITE)
_to_moved_row = TASK.writer(SQLITE, _MOVED, {"fifo_bucket": "fifo_bucket"}, "fifo_bucket")

Lane = tuple[str, str, int]
"""A queue, a source and a priority."""

EventRow = tuple[str, str, str, str, int] | tuple[str, str, str, str, int, EventDetail]
"""Kind, uuid, consumer, queue, time, and what else there is to say."""

Ended = tuple[int, str, TaskState]
"""A task that has ended, by id and uuid, and how."""

HAS_TIES = "SELECT EXISTS (SELECT 1 FROM dependency WHERE done = 0), EXISTS (SELECT 1 FROM pending_release)"


class Transaction:
    """Call `begin`, then verbs, then `finish`, then COMMIT; after a rollback, `forget`. Subclasses add the verbs."""

    def __init__(self, conn: apsw.Connection, clock: Clock) -> None:
        self._conn = conn
        self._clock = clock
        self._version: int | None = None
        self._is_stale = True
        self._seq = 0
        self._event_seq = 0
        self._queues: dict[str, QueueSettings] = {}
        self._strict: set[str] = set()
        self._controls: dict[str, QueueControl] = {}
        self._turns: dict[str, FairnessState] = {}
        self._queued: dict[Lane, int] = {}
        self._running_in: Counter[str] = Counter()
        self._next_due: int | None = None
        self._due_known = False
        self._has_open_edges = self._has_releasing = False
        self.isolated = False
        self.heard_others = False
        """Set when another process is found to have written; whoever tells of it takes it back."""
        self._reset()

    # --- the frame ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._conn.execute("BEGIN IMMEDIATE")
        self.refresh()

    def refresh(self) -> None:
        """Read again what is cached, if another process has written since."""
        version = self._one("PRAGMA data_version")
        if version != self._version or self._is_stale:
            self._load()
            self.heard_others |= self._version is not None and version != self._version
            self._version, self._is_stale = version, False

    def _load(self) -> None:
        newest = self._conn.execute("SELECT last, seq FROM event ORDER BY last DESC LIMIT 1").fetchone()
        self._event_seq, self._seq = newest or (0, 0)
        queues: Any = self._conn.execute("SELECT name, settings FROM queue").fetchall()
        self._queues = {name: msgspec.json.decode(text, type=QueueSettings) for name, text in queues}
        self._strict = {name for name, settings in self._queues.items() if settings.is_strict}
        controls: Any = self._conn.execute("SELECT queue, body FROM control").fetchall()
        self._controls = {name: msgspec.json.decode(text, type=QueueControl) for name, text in controls}
        turns: Any = self._conn.execute("SELECT queue, body FROM fairness").fetchall()
        self._turns = {name: msgspec.json.decode(text, type=FairnessState) for name, text in turns}
        self._queued, self._running_in = {}, Counter()
        tallies: Any = self._conn.execute(
            "SELECT queue, lane, state, priority, n FROM state_count WHERE state IN ('queued', 'running') AND n > 0"
        )
        for queue, lane, state, priority, n in tallies:
            if state == QUEUED:
                self._queued[queue, lane, priority] = n
            else:
                self._running_in[queue] += n
        self._due_known = False
        self._has_open_edges, self._has_releasing = map(bool, self._conn.execute(HAS_TIES).fetchall()[0])

    def _reset(self) -> None:
        self._events: list[EventRow] = []
        self._tally: dict[tuple[str, str, TaskState, int], int] = {}
        self._runs: list[tuple[Any, ...]] = []
        self._saves: list[TaskRecord] = []
        self._keep_place: set[int] = set()
        self._keep_note: set[int] = set()
        self._completed: list[tuple[Any, ...]] = []
        self._keys: set[tuple[str, str]] = set()
        self._ended: list[Ended] = []
        self._unrun: list[str] = []

    def finish(self) -> None:
        """Write what the verbs of this transaction left to be written once."""
        self._flush()
        if self._events:
            first, self._event_seq = self._event_seq + 1, self._event_seq + len(self._events)
            body = msgspec.json.encode(self._events).decode()
            self._conn.execute("INSERT INTO event VALUES (?, ?, ?, ?)", (self._event_seq, first, self._seq, body))
            if first // 1024 != self._event_seq // 1024:
                self._conn.execute("DELETE FROM event WHERE last <= ?", (self._event_seq - RING,))
                self._conn.execute("DELETE FROM state_count WHERE n = 0")
        for block in blocks([(*where, n) for where, n in self._tally.items() if n]):
            self._conn.execute(tally(len(block)), tuple(chain.from_iterable(block)))
        self._reset()

    def forget(self) -> None:
        """The transaction was rolled back: nothing cached can be trusted."""
        self._is_stale = True
        self._due_known = False
        self._reset()

    # --- one move -----------------------------------------------------------------------------------------------------

    def _move(self, record: TaskRecord, move: Move) -> None:
        """Carry out `move`, to be written by the next flush."""
        old = record.state
        if old is RUNNING:
            self._ran(record, move, to_us(move.at))
        apply_move(record, move)
        new = record.state
        self._count(record.queue, record.lane, old, -1, record.priority)
        self._count(record.queue, record.lane, new, 1, record.priority)
        if new is QUEUED and (move.to_head or move.to_tail or old is TaskState.FAILED):
            self._seq += 1
            record.position = head_position(self._seq) if move.to_head else tail_position(self._seq)
        if old in WAITING_FOR_TIME:
            self._due_known = False
        elif new in WAITING_FOR_TIME:
            self._note_due(to_us(record.due_at))
        if record.key is not None:
            record.is_parked = record.is_parked if new is TaskState.PAUSED else new is QUEUED
            self._keys.add((record.queue, record.key))
        self._tell(TOLD_AS[new], record, to_us(move.at), event_detail(old, move))
        self._saves.append(record)
        if self._has_open_edges and new in ENDED:
            self._ended.append((record.id, record.uuid, new))

    def _count(self, queue: str, lane: str, state: TaskState, n: int, priority: int = 0) -> None:
        """So many tasks more, or less, are in that state: known at once, written at the end. The priority matters for
        what is queued."""
        where = queue, lane, state, priority if state is QUEUED else 0
        self._tally[where] = self._tally.get(where, 0) + n
        if state is QUEUED:
            level = queue, lane, priority
            self._queued[level] = self._queued.get(level, 0) + n
            if not self._queued[level]:
                del self._queued[level]
        elif state is RUNNING:
            self._running_in[queue] += n

    def _ran(self, running: TaskRecord, move: Move, at: int) -> None:
        """The attempt's own row, in the order of `_ATTEMPT`. Asked before the record is changed."""
        error = to_document_or_none(move.error)
        started_at = to_us(running.started_at) if running.started_at is not None else at
        state = move.run or move.state
        worker_pid = move.worker_pid or running.worker_pid
        row = running.id, running.attempt, running.token, running.node, state, started_at, at, error, worker_pid
        device = move.device or running.device
        self._runs.append((*row, device, None if device is None else running.key))

    def _tell(self, kind: EventKind, record: TaskRecord, at: int, detail: EventDetail | None) -> None:
        row = kind, record.uuid, record.consumer, record.queue, at
        self._events.append(row if detail is None else (*row, detail))

    def tell_plainly(self, kind: EventKind, queue: str, consumer: str, at: int, detail: EventDetail | None) -> None:
        """Of what is no task: a queue, a device or an account."""
        row = kind, "", consumer, queue, at
        self._events.append(row if detail is None else (*row, detail))

    # --- queues -------------------------------------------------------------------------------------------------------

    def _set_control(self, queue: str, control: QueueControl, at: int) -> None:
        old = self._controls.get(queue, UNTOUCHED)
        kind = told_as(old, control)
        if kind is not None:
            self._controls[queue] = control
            text = msgspec.json.encode(control).decode()
            self._conn.execute("INSERT OR REPLACE INTO control VALUES (?, ?)", (queue, text))
            detail = control_detail(old, control)
            self.tell_plainly(kind, queue, "", at, detail)

    def _note_drained(self, at: int) -> None:
        """Runs have ended: a queue that was stopping and has none left is paused."""
        for queue, control in sorted(self._controls.items()):
            if control.state is QueueState.STOPPING and not self._running_in[queue]:
                self._set_control(queue, drained(control), at)

    def _line_of(self, record: TaskRecord) -> str | None:
        """The line it stands in, if its queue has lines."""
        if record.queue not in self._strict or (record.is_parked and record.state is TaskState.PAUSED):
            return None
        return "" if self._queues[record.queue].order is QueueOrder.FIFO else record.bucket or ""

    # --- what is left to the end --------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._save_moved()
        if self._runs:
            self._write_rows("attempt", _ATTEMPT, self._runs)
            if again := [task for task, _, _, _, state, *_ in self._runs if state is not COMPLETED]:
                trimmed: Any = self._conn.execute(TRIM_RUNS, (ATTEMPTS_KEPT, msgspec.json.encode(again).decode()))
                for attempt in trimmed.fetchall():
                    self._conn.execute("DELETE FROM attempt_line WHERE task = ? AND token = ?", attempt)
                    self._conn.execute("DELETE FROM artifact WHERE task = ? AND token = ?", attempt)
            self._runs = []
        if self._keys:
            keys, self._keys = sorted(self._keys), set()
            for by_place in (False, True):
                for block in blocks([key for key in keys if (key[0] in self._strict) is by_place]):
                    self._repark(block, by_place)

    def _save_moved(self) -> None:
        if self._completed:
            for block in blocks(self._completed):
                self._conn.execute(complete(len(block)), tuple(chain.from_iterable(block)))
            self._completed = []
        if self._saves:
            latest = {record.id: record for record in self._saves}  # a rescue moves a record twice
            self._update_rows(_MOVED, [self._moved_row(record) for record in latest.values()])
            self._saves, self._keep_place, self._keep_note = [], set(), set()

    def _moved_row(self, record: TaskRecord) -> tuple[Any, ...]:
        row = _to_moved_row(record, self._line_of(record))
        if record.id in self._keep_place:
            row = (*row[:_POSITION], None, *row[_POSITION + 1 :])
        if record.note is None and record.id not in self._keep_note:
            row = (*row[:_NOTE], "", *row[_NOTE + 1 :])
        return row

    def _repark(self, keys: list[tuple[str, str]], by_place: bool) -> None:
        """Of the tasks waiting with a key, exactly the first ones that fit under its limit may start. Where places
        alone count in a queue, they do so among those of a key."""
        most = max(self._settings(queue).per_key for queue, _ in keys)
        found = self._one(keyed(len(keys), by_place), (most, *chain.from_iterable(keys)))
        changed = []
        for queue, busy, offered, parked in msgspec.json.decode(found):
            free = max(0, self._settings(queue).per_key - busy)
            waiting = sorted([(*task, 0) for task in offered] + [(*task, 1) for task in parked])
            if by_place:
                waiting.sort(key=lambda task: task[1])
            for place, (_, _, id_, was_parked) in enumerate(waiting):
                if was_parked != (place >= free):
                    changed.append((id_, int(place >= free)))
        self._update_rows(_PARKED, changed)

    def _settings(self, queue: str) -> QueueSettings:
        return self._queues.get(queue) or QueueSettings(name=queue)

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

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _one(self, sql: str, bindings: Iterable[Any] = ()) -> Any:
        row = self._conn.execute(sql, tuple(bindings)).fetchone()
        return None if row is None else row[0]

    def _read(self, where: str, bindings: tuple[Any, ...]) -> list[TaskRecord]:
        """Whole records, a row a step: for what is asked for seldom, and may be large."""
        return [_to_record(row) for row in self._conn.execute(f"SELECT {ALL} FROM task WHERE {where}", bindings)]

    def _write_rows(self, table: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        for block in blocks(rows):
            self._conn.execute(insert(table, columns, len(block)), tuple(chain.from_iterable(block)))

    def _update_rows(self, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        for block in blocks(rows):
            self._conn.execute(update(columns, len(block)), tuple(chain.from_iterable(block)))
