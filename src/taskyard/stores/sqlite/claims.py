"""What starts next, on SQLite: lanes are read a little at a time, in as few statements as their order allows."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import chain, islice
from typing import Any, NamedTuple

import apsw
import msgspec

from taskyard.model.blocker import lane_of
from taskyard.model.event import EventKind
from taskyard.model.fairness import NO_FAIRNESS_STATE
from taskyard.model.limits import Demand, Quota
from taskyard.model.picking import ByPriority, Feed, InTurn, Level, Offer, RoundRobin, pick
from taskyard.model.queue import QueueOrder, rooms
from taskyard.model.state import QUEUED, RUNNING
from taskyard.model.task import Claim, DedupeScope, TaskRecord
from taskyard.stores.records import CLAIM_READS, SET_BY_START, SQLITE, TASK, from_us, to_us
from taskyard.stores.sqlite.commands import Commands
from taskyard.stores.sqlite.statements import IN_LINE, blocks, start, values
from taskyard.stores.sqlite.transaction import Lane

STARTED = EventKind.STARTED.value

LANE_CHUNK = 64
"""Rows read of a lane at once: with arguments of a megabyte each that is still far from what one value may hold."""

LOWEST = -(1 << 63)

_ID, _QUEUE = CLAIM_READS.index("id"), CLAIM_READS.index("queue")

_WAITING = ", ".join(CLAIM_READS)
_RUNNING = SET_BY_START | {
    "attempt": "attempt + 1",
    # Most tasks are due when they are created: a time that is the same is converted once.
    "due_at": "(due := from_us(due_at))",
    "created_at": "due if created_at == due_at else from_us(created_at)",
}
_to_running = TASK.reader(SQLITE, CLAIM_READS, _RUNNING, "now")
_STANDING = f"{_WAITING}, can_start"

Row = list[Any]
"""The values of `CLAIM_READS`."""

OF_LANE = (
    f"SELECT {_WAITING} FROM task WHERE queue = ? AND lane = ? AND state = 'queued' AND is_parked = 0 "
    "AND priority = ? AND position > ? ORDER BY position LIMIT ?"
)
OF_LINE = (
    f"SELECT {_WAITING}, state = 'queued' AND is_parked = 0 AS can_start FROM task INDEXED BY task_fifo_bucket "
    f"WHERE queue = ? AND fifo_bucket = ? AND {IN_LINE} AND position > ? ORDER BY position LIMIT ?"
)


@cache
def of_lanes(count: int) -> str:
    """The first ?1 of each of so many lanes, in one go: SQLite gives up the GIL around every step."""
    first = (
        f"SELECT {_WAITING} FROM task WHERE queue = v.column1 AND lane = v.column2 AND state = 'queued' "
        "AND is_parked = 0 AND priority = v.column3 ORDER BY position LIMIT ?1"
    )
    lane = f"SELECT json_group_array(json_array({_WAITING})) FROM ({first})"
    return f"SELECT json_group_array(json(({lane}))) FROM (VALUES {values(count, 3)}) AS v"


LINES = (
    "WITH RECURSIVE named (fifo_bucket) AS ("
    f"SELECT min(fifo_bucket) FROM task INDEXED BY task_fifo_bucket WHERE queue = ?1 AND {IN_LINE} "
    "UNION ALL SELECT (SELECT min(task.fifo_bucket) FROM task INDEXED BY task_fifo_bucket WHERE queue = ?1 AND "
    f"task.fifo_bucket > named.fifo_bucket AND {IN_LINE}) FROM named WHERE named.fifo_bucket IS NOT NULL) "
    "SELECT json_group_array(fifo_bucket) FROM named WHERE fifo_bucket IS NOT NULL"
)


class RowHead(NamedTuple):
    """A `Head`, and the row it is of."""

    priority: int
    position: int
    id: int
    lane: str
    due_at: datetime
    can_start: bool
    row: Row


class Claims(Commands):
    def _quota(self, demand: Demand) -> Quota:
        return Quota(demand, rooms(self._queues, self._controls, self._running_in))

    def _open_lanes(self, quota: Quota) -> list[Lane]:
        return quota.select(self._queued)

    def _could_claim(self, demand: Demand) -> bool:
        """Whether there is anything to claim; changes nothing."""
        quota = self._quota(demand)
        lanes = self._open_lanes(quota)
        if self._is_plain(lanes):
            return any(self._first_of(lanes, 1))
        return any(offer.bid() is not None for offer in self._offers(lanes, quota, self._clock.now()))

    def _claim(self, node: str, demand: Demand, now: datetime) -> list[Claim]:
        if demand.only is not None:
            allowed = demand.count_allowed(row[_ID] for row in self._pick(demand, now, is_preview=True))
            demand = msgspec.structs.replace(demand, total=allowed)
        claims = self._start([_to_running(row, now) for row in self._pick(demand, now)], node, now)
        if demand.only is not None:
            self._set_places(claims, demand.only)
        return claims

    def _preview(self, demand: Demand, now: datetime) -> list[TaskRecord]:
        rows = self._pick(demand, now, is_preview=True)
        ids = msgspec.json.encode([row[_ID] for row in rows]).decode()
        found = {record.id: record for record in self._read("id IN (SELECT value FROM json_each(?))", (ids,))}
        # Race: another process may have started or pruned some of them since.
        records = (found.get(row[_ID]) for row in rows)
        return [record for record in records if record is not None and record.state is QUEUED]

    def _pick(self, demand: Demand, now: datetime, *, is_preview: bool = False) -> list[Row]:
        """What would start next. A preview leaves whose turn it is as it was."""
        quota = self._quota(demand)
        lanes = self._open_lanes(quota)
        if self._is_plain(lanes):
            return self._merge(lanes, quota)
        return self._pick_in_turn(lanes, quota, now, is_preview=is_preview)

    def _set_places(self, claims: list[Claim], places: Mapping[int, str | None]) -> None:
        rows: list[tuple[Any, ...]] = []
        for claim in claims:
            claim.record.device = places[claim.record.id]
            if claim.record.device is not None:
                rows.append((claim.record.id, claim.record.device))
        self._update_rows(("id", "device"), rows)

    def _is_plain(self, lanes: Sequence[Lane]) -> bool:
        """Whether priority and place alone say who goes first: no queue has an order of its own, or tasks of several
        priorities to start."""
        levels: dict[str, int] = {}
        for queue, _, priority in lanes:
            if queue in self._strict:
                return False
            if levels.setdefault(queue, priority) != priority and not self._settings(queue).patience.is_endless:
                return False
        return not any(self._turns[queue].passed_over[level] for queue, level in levels.items() if queue in self._turns)

    def _start(self, records: list[TaskRecord], node: str, now: datetime) -> list[Claim]:
        at = to_us(now)
        claims: list[Claim] = []
        started: dict[Lane, int] = {}
        unslotted: list[tuple[int, None]] = []
        for record in records:
            self._seq += 1
            record.token, record.node = self._seq, node
            lane = record.queue, record.lane, record.priority
            started[lane] = started.get(lane, 0) + 1
            if record.dedupe_slot is not None and record.dedupe_scope is DedupeScope.QUEUED:
                record.dedupe_slot = None
                unslotted.append((record.id, None))
            self._events.append((STARTED, record.uuid, record.consumer, record.queue, at))
            claims.append(Claim(record, record.attempt, self._seq))
        for (queue, name, priority), n in started.items():
            self._count(queue, name, QUEUED, -n, priority)
            self._count(queue, name, RUNNING, n)
        for block in blocks([(claim.record.id, claim.token) for claim in claims]):
            self._conn.execute(start(len(block)), (node, at, *chain.from_iterable(block)))
        if unslotted:
            self._update_rows(("id", "dedupe_slot"), unslotted)
        return claims

    def _merge(self, lanes: list[Lane], quota: Quota) -> list[Row]:
        """What goes next over all lanes, read a little at a time: of many lanes most will not be taken."""
        if len(lanes) == 1:
            room = quota.room(*lanes[0][:2])
            return list(islice(self._follow(OF_LANE, lanes[0], room), room))
        share = max(4, 2 * quota.left // max(1, len(lanes)))
        heads = [(next(rows), rows) for rows in self._follow_lanes(lanes, min(share, quota.left))]
        heapq.heapify(heads)
        picked: list[Row] = []
        while heads and quota.left > 0:
            row, rows = heads[0]
            queue, lane = row[_QUEUE], _lane(row)
            following = None  # a lane that is full is left alone: it may be long
            if quota.room(queue, lane) > 0:
                quota.admit(queue, lane)
                picked.append(row)
                following = next(rows, None)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (following, rows))
        return picked

    def _follow_lanes(self, lanes: list[Lane], chunk: int) -> list[Iterator[Row]]:
        """Those lanes that have a task to start, each read on as it is needed."""
        chunk = min(chunk, LANE_CHUNK)
        return [self._follow_on(rows, chunk) for rows in self._first_of(lanes, chunk) if rows]

    def _follow_on(self, rows: list[Row], chunk: int) -> Iterator[Row]:
        yield from rows
        if len(rows) == chunk:
            priority, position, _, queue = rows[-1][:4]
            yield from self._follow(OF_LANE, (queue, _lane(rows[-1]), priority), chunk, position)

    def _first_of(self, lanes: list[Lane], chunk: int) -> list[list[Row]]:
        """The first rows of each lane; which lane it is, they say themselves."""
        try:
            found: list[list[Row]] = []
            for block in blocks(lanes):
                found += msgspec.json.decode(self._one(of_lanes(len(block)), (chunk, *chain.from_iterable(block))))
        except (apsw.TooBigError, msgspec.DecodeError):
            return [self._read_rows(OF_LANE, (*lane, LOWEST, chunk)) for lane in lanes]
        for rows in found:
            rows.sort(key=_position)
        return found

    def _follow(self, sql: str, given: tuple[Any, ...], chunk: int, after: int = LOWEST) -> Iterator[Row]:
        chunk = min(chunk, LANE_CHUNK)
        while rows := self._read_rows(sql, (*given, after, chunk)):
            yield from rows
            if len(rows) < chunk:
                return
            after = rows[-1][1]

    def _read_rows(self, sql: str, given: tuple[Any, ...]) -> list[Row]:
        """Rows in the order of their places."""
        columns = _STANDING if sql is OF_LINE else _WAITING
        try:
            found = self._one(f"SELECT json_group_array(json_array({columns})) FROM ({sql})", given)
            rows: list[Row] = msgspec.json.decode(found)
        except (apsw.TooBigError, msgspec.DecodeError):
            # Arguments too large together for one value, or a number that JSON has no way to write.
            rows = [list(row) for row in self._conn.execute(sql, given)]
        rows.sort(key=_position)
        return rows

    # --- queues with an order of their own ----------------------------------------------------------------------------

    def _pick_in_turn(self, lanes: list[Lane], quota: Quota, now: datetime, *, is_preview: bool) -> list[Row]:
        offers = self._offers(lanes, quota, now)
        picked = [head.row for head in pick(offers, quota)]
        for offer in () if is_preview else offers:
            if offer.turns != self._turns.get(offer.queue, NO_FAIRNESS_STATE):
                self._turns[offer.queue] = offer.turns
                text = msgspec.json.encode(offer.turns).decode()
                self._conn.execute("INSERT OR REPLACE INTO fairness VALUES (?, ?)", (offer.queue, text))
        return picked

    def _offers(self, lanes: list[Lane], quota: Quota, now: datetime) -> list[Offer[RowHead]]:
        by_queue: dict[str, list[Lane]] = {}
        for lane in lanes:
            by_queue.setdefault(lane[0], []).append(lane)
        share = max(4, 2 * quota.left // max(1, len(lanes)))
        offers: list[Offer[RowHead]] = []
        for queue, own in by_queue.items():
            settings, turns = self._settings(queue), self._turns.get(queue, NO_FAIRNESS_STATE)
            if settings.order is QueueOrder.FIFO:
                offers.append(InTurn(queue, turns, self._line(queue, "", quota.left), quota=quota))
            elif settings.order is QueueOrder.BUCKETS:
                names: list[str] = msgspec.json.decode(self._one(LINES, (queue,)))
                lines = [(name, self._line(queue, name, share)) for name in names]
                offers.append(RoundRobin(queue, turns, lines, quota=quota))
            else:
                levels: dict[int, Level[RowHead]] = {}
                for rows in self._follow_lanes(own, min(share, quota.left)):
                    heads = map(_head_of, rows)
                    first = next(heads)
                    levels.setdefault(first.priority, []).append((first.position, first.id, first, heads))
                offers.append(ByPriority(queue, turns, settings.patience, levels, quota=quota, now=now))
        return offers

    def _line(self, queue: str, name: str, chunk: int) -> Feed[RowHead]:
        return _RowFeed(self._follow(OF_LINE, (queue, name), max(1, chunk)))


def _position(row: Row) -> Any:
    return row[1]


def _lane(row: Row) -> str:
    consumer, requires = row[4:6]
    return consumer if requires is None else lane_of(consumer, requires)


def _head_of(row: Row) -> RowHead:
    """Rows of a line say at their end whether they can start."""
    can_start = len(row) == len(CLAIM_READS) or bool(row.pop())
    priority, position, id_, _, _, _, _, due_at = row[:8]
    return RowHead(priority, position, id_, _lane(row), from_us(due_at), can_start, row)


class _RowFeed:
    """Rows as they are read."""

    __slots__ = ("_head", "_rows")

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self._head: RowHead | None = None

    def first(self) -> RowHead | None:
        if self._head is None:
            row = next(self._rows, None)
            self._head = None if row is None else _head_of(row)
        return self._head

    def take(self) -> None:
        self._head = None
