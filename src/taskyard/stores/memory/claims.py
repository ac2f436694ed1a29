"""What starts next, in memory."""

from __future__ import annotations

import heapq
from collections import Counter
from datetime import datetime

from taskyard.model.event import EventKind
from taskyard.model.fairness import NO_TURNS, Turns
from taskyard.model.limits import Demand, QueueOrder, Quota, rooms
from taskyard.model.picking import ByPriority, Head, InTurn, Offer, RoundRobin, pick
from taskyard.model.state import QUEUED, RUNNING
from taskyard.model.task import Claim, DedupeScope, TaskRecord
from taskyard.stores.memory.lines import Entry, Lane, Line, Place
from taskyard.stores.memory.tasks import Tasks

STARTED = EventKind.STARTED.value
WHILE_QUEUED = DedupeScope.QUEUED


class Claims(Tasks):
    def __init__(self, keep_ended: int | None) -> None:
        super().__init__(keep_ended)
        self._turns: dict[str, Turns] = {}

    def _claim(self, node: str, demand: Demand, now: datetime) -> list[Claim]:
        quota = Quota(demand, rooms(self._queues, self._controls, self._running_in))
        heads = [
            (entry, lane)
            for lane in self._lanes
            if quota.room(lane[0], lane[1]) > 0 and (entry := self._head(lane)) is not None
        ]
        if self._strict or not self._is_plain([lane for _, lane in heads]):
            picked = self._pick_in_turn([lane for _, lane in heads], quota, now)
        else:
            picked = self._pick(heads, quota)
        return self._start(picked, node, now)

    def _is_plain(self, lanes: list[Lane]) -> bool:
        """Whether priority and place alone say who goes first: no queue has tasks of several priorities to start."""
        levels: dict[str, int] = {}
        for queue, _, priority in lanes:
            if levels.setdefault(queue, priority) != priority and not self._settings(queue).patience.is_endless:
                return False
        return not any(self._turns[queue].passed[level] for queue, level in levels.items() if queue in self._turns)

    def _pick(self, heads: list[tuple[Entry, Lane]], quota: Quota) -> list[TaskRecord]:
        """What goes next over all lanes, by priority and place, for as long as the quota lasts."""
        picked: list[TaskRecord] = []
        heapq.heapify(heads)
        while heads:
            _, lane = heads[0]
            queue, source, _ = lane
            room = quota.room(queue, source)
            # All that stands before the next lane's head is taken in one go: of a single lane, all there is room for.
            limit = min(heads[1:3])[0] if len(heads) > 1 else None
            taken = self._take(self._lanes[lane], room, limit)
            picked += taken
            quota.admit(queue, source, len(taken))
            entry = self._head(lane)
            if entry is None or len(taken) == room:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (entry, lane))
        return picked

    def _take(self, lane: Line, room: int, limit: Entry | None) -> list[TaskRecord]:
        """The first of a lane, at most `room`, that stand before `limit`; they run from here on."""
        taken: list[TaskRecord] = []
        find = self._by_id.get
        while len(taken) < room and (entry := lane.first()) is not None and (limit is None or entry < limit):
            lane.pop()
            record = find(entry[2])
            if record is not None and _stands_at(record, entry):
                record.state = RUNNING  # now: the lane may hold the same entry twice
                taken.append(record)
        return taken

    def _head(self, name: Lane) -> Entry | None:
        lane = self._lanes[name]
        while (entry := lane.first()) is not None:
            record = self._by_id.get(entry[2])
            if record is not None and _stands_at(record, entry):
                return entry
            lane.pop()
        return None

    # --- queues with an order of their own ------------------------------------------------------------------------

    def _pick_in_turn(self, lanes: list[Lane], quota: Quota, now: datetime) -> list[TaskRecord]:
        by_queue: dict[str, list[Lane]] = {}
        for lane in lanes:
            by_queue.setdefault(lane[0], []).append(lane)
        offers: list[Offer[TaskRecord]] = [self._strict_offer(queue, quota) for queue in self._strict]
        for queue, own in by_queue.items():
            patience, turns = self._settings(queue).patience, self._turns.get(queue, NO_TURNS)
            feeds = [_LaneFeed(self, lane) for lane in own]
            offers.append(ByPriority(queue, turns, patience, feeds, quota=quota, now=now))
        picked = pick(offers, quota)
        self._turns.update({offer.queue: offer.turns for offer in offers})
        return picked

    def _strict_offer(self, queue: str, quota: Quota) -> Offer[TaskRecord]:
        turns, lines = self._turns.get(queue, NO_TURNS), self._strict[queue]
        if self._settings(queue).order is QueueOrder.FIFO:
            return InTurn(queue, turns, _LineFeed(self, lines.setdefault("", [])), quota=quota)
        return RoundRobin(
            queue, turns, [(name, _LineFeed(self, line)) for name, line in sorted(lines.items())], quota=quota
        )

    def lane_head(self, lane: Lane) -> Head | None:
        entry = self._head(lane)
        return None if entry is None else _head_of(self._by_id[entry[2]])

    def take_of_lane(self, lane: Lane) -> TaskRecord:
        (taken,) = self._take(self._lanes[lane], 1, None)
        return taken

    def line_head(self, line: list[Place]) -> Head | None:
        record = self._first_in_line(line)
        return None if record is None else _head_of(record)

    def take_of_line(self, line: list[Place]) -> TaskRecord:
        record = self._first_in_line(line)
        assert record is not None
        heapq.heappop(line)
        record.state = RUNNING
        return record

    def _first_in_line(self, line: list[Place]) -> TaskRecord | None:
        while line:
            position, task_id = line[0]
            record = self._by_id.get(task_id)
            if record is not None and record.stands_in_line and record.position == position:
                return record
            heapq.heappop(line)
        return None

    def _oldest_due_at(self, queue: str) -> datetime | None:
        """Among those that are first of their source and priority."""
        firsts: dict[tuple[str, int], TaskRecord] = {}
        for record in self._by_id.values():
            if record.queue == queue and record.state is QUEUED and not record.parked:
                lane = record.source, record.priority
                if lane not in firsts or record.position < firsts[lane].position:
                    firsts[lane] = record
        return min((record.due_at for record in firsts.values()), default=None)

    # --- starting -------------------------------------------------------------------------------------------------

    def _start(self, records: list[TaskRecord], node: str, now: datetime) -> list[Claim]:
        claims = []
        token = self._seq
        for record in records:
            token += 1
            record.attempt = attempt = record.attempt + 1
            record.token = token
            record.node = node
            record.started_at = record.updated_at = now
            record.note = None
            if record.dedupe_slot is not None and record.dedupe_scope is WHILE_QUEUED:
                self._slots.swap(record.uuid, record.dedupe_slot, None)
                record.dedupe_slot = None
            if record.key is not None:
                self._hold_key(record)
            claims.append(Claim(record.clone(), attempt, token))
        self._seq = token
        self._events.extend([(STARTED, record, now) for record in records])
        self.event_seq += len(records)
        self._running[node].update([record.id for record in records])
        for queue, n in Counter([record.queue for record in records]).items():
            self._counts[queue][QUEUED] -= n
            self._counts[queue][RUNNING] += n
            self._running_in[queue] += n
        return claims


class _LaneFeed:
    """One lane, read one task at a time."""

    __slots__ = ("_claims", "_lane")

    def __init__(self, claims: Claims, lane: Lane) -> None:
        self._claims, self._lane = claims, lane

    def first(self) -> Head | None:
        return self._claims.lane_head(self._lane)

    def take(self) -> TaskRecord:
        return self._claims.take_of_lane(self._lane)


class _LineFeed:
    """All that stands in one line, startable or not."""

    __slots__ = ("_claims", "_line")

    def __init__(self, claims: Claims, line: list[Place]) -> None:
        self._claims, self._line = claims, line

    def first(self) -> Head | None:
        return self._claims.line_head(self._line)

    def take(self) -> TaskRecord:
        return self._claims.take_of_line(self._line)


def _head_of(record: TaskRecord) -> Head:
    can_start = record.state is QUEUED and not record.parked
    return Head(record.priority, record.position, record.id, record.source, record.due_at, can_start)


def _stands_at(record: TaskRecord, entry: Entry) -> bool:
    """Whether an entry of a lane still counts."""
    priority, position, _ = entry
    return record.state is QUEUED and not record.parked and record.position == position and record.priority == priority
