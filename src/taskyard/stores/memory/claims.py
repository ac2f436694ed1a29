"""What starts next, in memory."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from datetime import datetime

import msgspec

from taskyard.model.event import EventKind
from taskyard.model.fairness import NO_FAIRNESS_STATE, FairnessState
from taskyard.model.limits import Demand, Quota
from taskyard.model.picking import ByPriority, InTurn, Level, Offer, RoundRobin, pick
from taskyard.model.queue import QueueOrder, rooms
from taskyard.model.state import QUEUED, RUNNING
from taskyard.model.task import Claim, DedupeScope, TaskRecord
from taskyard.stores.memory.lines import Lane, Place
from taskyard.stores.memory.tasks import Tasks

STARTED = EventKind.STARTED.value
WHILE_QUEUED = DedupeScope.QUEUED

EMPTY_LANES = 8
"""More than so many in which nothing is left are forgotten: each would be looked at by every claim."""

OpenLanes = dict[str, dict[int, Level[TaskRecord]]]
"""Of each queue and priority, the lines from which something may start, with the first task of each."""


class Claims(Tasks):
    def __init__(self, keep_ended: int | None) -> None:
        super().__init__(keep_ended)
        self._turns: dict[str, FairnessState] = {}

    def _claim(self, node: str, demand: Demand, now: datetime) -> list[Claim]:
        if demand.only is not None:
            allowed = demand.count_allowed(record.id for record in self._preview(demand, now))
            demand = msgspec.structs.replace(demand, total=allowed)
        return self._start(self._pick_all(demand, now), node, now, demand.only)

    def _preview(self, demand: Demand, now: datetime) -> list[TaskRecord]:
        """What would be claimed, put back at once."""
        turns = self._turns.copy()
        picked = self._pick_all(demand, now)
        self._turns = turns
        for record in picked:
            record.state = QUEUED
            self._offer(record)
            self._line_up(record)
        return picked

    def _pick_all(self, demand: Demand, now: datetime) -> list[TaskRecord]:
        quota = Quota(demand, rooms(self._queues, self._controls, self._running_in))
        opened = self._open_lanes(quota.select(self._lanes))
        if self._strict or not self._is_plain(opened):
            return self._pick_in_turn(opened, quota, now)
        return self._pick(opened, quota)

    def list_lanes(self) -> list[str]:
        lines = (line for lines in self._strict.values() for line in lines.values())
        heads = {head.lane for line in lines if (head := self.first_in_line(line)) is not None}
        return sorted({lane for _, lane in self._lanes} | heads)

    def _open_lanes(self, lanes: list[Lane]) -> OpenLanes:
        opened: OpenLanes = {}
        empty: list[tuple[Lane, int]] = []
        for lane in lanes:
            levels = opened.get(lane[0])
            if levels is None:
                opened[lane[0]] = levels = {}
            for priority, line in self._lanes[lane].items():
                tasks = iter(line)
                first = next(tasks, None)
                if first is None:
                    empty.append((lane, priority))
                elif priority in levels:
                    levels[priority].append((first.position, first.id, first, tasks))
                else:
                    levels[priority] = [(first.position, first.id, first, tasks)]
        if len(empty) > EMPTY_LANES:
            self._forget_lanes(empty)
        return opened

    def _forget_lanes(self, empty: list[tuple[Lane, int]]) -> None:
        for lane, priority in empty:
            del self._lanes[lane][priority]
            if not self._lanes[lane]:
                del self._lanes[lane]

    def _is_plain(self, opened: OpenLanes) -> bool:
        """Whether priority and place alone say who goes first: no queue has tasks of several priorities to start."""
        for queue, levels in opened.items():
            if len(levels) > 1 and not self._settings(queue).patience.is_endless:
                return False
            if queue in self._turns and any(self._turns[queue].passed_over[level] for level in levels):
                return False
        return True

    def _pick(self, opened: OpenLanes, quota: Quota) -> list[TaskRecord]:
        """What goes next over all lanes, by priority and place, for as long as the quota lasts."""
        heads = [
            ((priority, position, task_id), queue, first.lane, self._lanes[queue, first.lane][priority])
            for queue, levels in opened.items()
            for priority, lanes in levels.items()
            for position, task_id, first, _ in lanes
        ]
        if len(heads) == 1:  # nearly all there is
            _, queue, source, line = heads[0]
            return line.take_before(None, quota.room(queue, source))
        heapq.heapify(heads)
        picked: list[TaskRecord] = []
        while heads:
            _, queue, source, line = heads[0]
            room = quota.room(queue, source)
            # All that stands before the next lane's head is taken in one go.
            taken = line.take_before(min(heads[1:3])[0] if len(heads) > 1 else None, room)
            picked += taken
            quota.admit(queue, source, len(taken))
            following = None if len(taken) == room else next(iter(line), None)
            if following is None:
                heapq.heappop(heads)
            else:
                entry = following.priority, following.position, following.id
                heapq.heapreplace(heads, (entry, queue, source, line))
        return picked

    # --- queues with an order of their own ------------------------------------------------------------------------

    def _pick_in_turn(self, opened: OpenLanes, quota: Quota, now: datetime) -> list[TaskRecord]:
        offers: list[Offer[TaskRecord]] = [self._strict_offer(queue, quota) for queue in self._strict]
        for queue, levels in opened.items():
            patience, turns = self._settings(queue).patience, self._turns.get(queue, NO_FAIRNESS_STATE)
            offers.append(ByPriority(queue, turns, patience, levels, quota=quota, now=now))
        picked = pick(offers, quota)
        for record in picked:
            record.state = RUNNING  # of a lane the last one, after which nobody asked for the next
        self._turns.update({offer.queue: offer.turns for offer in offers})
        return picked

    def _strict_offer(self, queue: str, quota: Quota) -> Offer[TaskRecord]:
        turns, lines = self._turns.get(queue, NO_FAIRNESS_STATE), self._strict[queue]
        if self._settings(queue).order is QueueOrder.FIFO:
            return InTurn(queue, turns, _LineFeed(self, lines.setdefault("", [])), quota=quota)
        return RoundRobin(
            queue, turns, [(name, _LineFeed(self, line)) for name, line in sorted(lines.items())], quota=quota
        )

    def take_of_line(self, line: list[Place]) -> None:
        self._by_id[heapq.heappop(line)[1]].state = RUNNING

    def first_in_line(self, line: list[Place]) -> TaskRecord | None:
        while line:
            position, task_id = line[0]
            record = self._by_id.get(task_id)
            if record is not None and record.stands_in_line and record.position == position:
                return record
            heapq.heappop(line)
        return None

    def _oldest_due_at(self, queue: str) -> datetime | None:
        """Among those that are first of their lane."""
        firsts: dict[tuple[str, int], TaskRecord] = {}
        for record in self._by_id.values():
            if record.queue == queue and record.state is QUEUED and not record.is_parked:
                lane = record.lane, record.priority
                if lane not in firsts or record.position < firsts[lane].position:
                    firsts[lane] = record
        return min((record.due_at for record in firsts.values()), default=None)

    # --- starting -------------------------------------------------------------------------------------------------

    def _start(
        self, records: list[TaskRecord], node: str, now: datetime, places: Mapping[int, str | None] | None
    ) -> list[Claim]:
        claims = []
        if places is not None:
            for record in records:
                record.device = places[record.id]
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
            claims.append(Claim(record.clone(), attempt, token))
        self._seq = token
        self._events.extend([(STARTED, record, now, None) for record in records])
        self.event_seq += len(records)
        self._running[node].update([record.id for record in records])
        for queue, n in Counter([record.queue for record in records]).items():
            self._counts[queue][QUEUED] -= n
            self._counts[queue][RUNNING] += n
            self._running_in[queue] += n
        return claims


class _LineFeed:
    """All that stands in one line, startable or not."""

    __slots__ = ("_claims", "_line")

    def __init__(self, claims: Claims, line: list[Place]) -> None:
        self._claims, self._line = claims, line

    def first(self) -> TaskRecord | None:
        return self._claims.first_in_line(self._line)

    def take(self) -> None:
        self._claims.take_of_line(self._line)
