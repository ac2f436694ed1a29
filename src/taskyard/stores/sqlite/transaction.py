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

from taskyard.model.event import TOLD_AS, EventKind
from taskyard.model.limits import QueueSettings
from taskyard.model.move import Move, apply_move
from taskyard.model.order import head_position, tail_position
from taskyard.model.state import WAITING_FOR_TIME, TaskState
from taskyard.model.task import TaskRecord
from taskyard.ports.clock import Clock
from taskyard.stores.rows import MOVED, RUN_COLUMNS, from_row, to_moved_row, to_us
from taskyard.stores.sqlite.statements import blocks, complete, insert, update, values

RING = 10_000
"""Events kept for readers that fall behind."""

_PARKED = ("id", "parked")


class Transaction:
    """Call `begin`, then verbs, then `finish`, then COMMIT; after a rollback, `forget`. Subclasses add the verbs."""

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

    # --- the frame ----------------------------------------------------------------------------------------------------

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
                f"INSERT INTO tally (queue, state, n) VALUES {values(len(changed), 3)} "
                "ON CONFLICT DO UPDATE SET n = n + excluded.n",
                tuple(chain.from_iterable(changed)),
            )
        self._reset()

    def forget(self) -> None:
        """The transaction was rolled back: nothing cached can be trusted."""
        self._version = None
        self._due_known = False
        self._reset()

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
            for block in blocks(self._completed):
                self._conn.execute(complete(len(block)), tuple(chain.from_iterable(block)))
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

    def _read(self, sql: str, bindings: tuple[Any, ...]) -> list[TaskRecord]:
        return [from_row(row) for row in msgspec.json.decode(self._one(sql, bindings))]

    def _write_rows(self, table: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        for block in blocks(rows):
            self._conn.execute(insert(table, columns, len(block)), tuple(chain.from_iterable(block)))

    def _update_rows(self, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        for block in blocks(rows):
            self._conn.execute(update(columns, len(block)), tuple(chain.from_iterable(block)))
