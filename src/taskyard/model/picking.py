"""Which tasks start next, over all queues: each queue offers by its own order, the best offer is taken, one at a time.

Pure, over feeds that a store reads its tasks through. It never decides who may run with a key: what waits for one is
parked, and a feed says so.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Generic, NamedTuple, Protocol, TypeVar

from taskyard.model.fairness import Patience, Turns, choose, note_start
from taskyard.model.limits import Quota
from taskyard.model.order import Priority

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Bid = tuple[int, int, int]
"""Priority, position and id: the smallest of all queues is served next. Places made by hand are different within their
queue; in two queues they may be the same, and then the older task goes first."""


class Head(NamedTuple):
    """The first task of a feed. `can_start` is false for one that stands in line and cannot leave it now."""

    priority: int
    position: int
    id: int
    source: str
    due_at: datetime
    can_start: bool = True


class Feed(Protocol[T_co]):
    """Tasks in the order of their places, read as they are needed."""

    def first(self) -> Head | None:
        """The first of those that were not taken; asked again and again, so it costs nothing the second time."""
        ...

    def take(self) -> T_co:
        """The first one, which is gone from here."""
        ...


class Offer(Protocol[T_co]):
    """One queue while tasks are picked."""

    queue: str
    turns: Turns

    def bid(self) -> Bid | None:
        """For what it is served next; None if nothing of it may start."""
        ...

    def take(self) -> tuple[str, T_co]:
        """The source and the task it gives, after a bid."""
        ...


class ByPriority(Generic[T]):
    """High, normal, low, with patience. `feeds` are lanes: of one priority and one source each. It bids with its first
    task, whichever it then gives."""

    def __init__(
        self, queue: str, turns: Turns, patience: Patience, feeds: Iterable[Feed[T]], *, quota: Quota, now: datetime
    ) -> None:
        self.queue, self.turns = queue, turns
        self._patience, self._quota, self._now = patience, quota, now
        self._levels: dict[int, list[tuple[int, int, Head, Feed[T]]]] = {}
        for number, feed in enumerate(feeds):
            head = feed.first()
            if head is not None:
                self._levels.setdefault(head.priority, []).append((head.position, number, head, feed))
        for lanes in self._levels.values():
            heapq.heapify(lanes)

    def bid(self) -> Bid | None:
        for level, lanes in list(self._levels.items()):
            # A lane whose source is full has nothing more to give: room only ever shrinks while tasks are picked.
            while lanes and self._quota.room(self.queue, lanes[0][2].source) <= 0:
                heapq.heappop(lanes)
            if not lanes:
                del self._levels[level]
        if not self._levels:
            return None
        top = min(self._levels)
        head = self._levels[top][0][2]
        return top, head.position, head.id

    def take(self) -> tuple[str, T]:
        heads = {level: lanes[0][2].due_at for level, lanes in self._levels.items()}
        level = choose(heads, self.turns, self._patience, self._now)
        self.turns = note_start(level, heads, self.turns, self._patience, self._now)
        lanes = self._levels[level]
        _, number, head, feed = lanes[0]
        taken, following = feed.take(), feed.first()
        if following is None:
            heapq.heappop(lanes)
        else:
            heapq.heapreplace(lanes, (following.position, number, following, feed))
        return head.source, taken


class InTurn(Generic[T]):
    """First in, first out, whatever the priority. The head is never skipped: one that cannot start holds up all behind
    it. `line` has everything that stands in line."""

    def __init__(self, queue: str, turns: Turns, line: Feed[T], *, quota: Quota) -> None:
        self.queue, self.turns = queue, turns
        self._line, self._quota = line, quota

    def bid(self) -> Bid | None:
        head = self._line.first()
        return _bid(head) if _may_start(head, self.queue, self._quota) and head is not None else None

    def take(self) -> tuple[str, T]:
        head = self._line.first()
        assert head is not None
        return head.source, self._line.take()


class RoundRobin(Generic[T]):
    """Buckets that are served one after the other, each first in, first out. A bucket whose head cannot start is passed
    over. `lines` is in the order of their names."""

    def __init__(self, queue: str, turns: Turns, lines: Sequence[tuple[str, Feed[T]]], *, quota: Quota) -> None:
        self.queue, self.turns = queue, turns
        self._quota = quota
        served = 0 if turns.bucket is None else sum(name <= turns.bucket for name, _ in lines)
        self._ring = deque((*lines[served:], *lines[:served]))

    def bid(self) -> Bid | None:
        while self._ring:
            head = self._ring[0][1].first()
            if head is not None and _may_start(head, self.queue, self._quota):
                return _bid(head)
            self._ring.popleft()  # nothing that happens while tasks are picked lets it start
        return None

    def take(self) -> tuple[str, T]:
        name, line = self._ring[0]
        head = line.first()
        assert head is not None
        self._ring.rotate(-1)
        self.turns = Turns(self.turns.passed, self.turns.let_in_at, name)
        return head.source, line.take()


def _may_start(head: Head | None, queue: str, quota: Quota) -> bool:
    return head is not None and head.can_start and quota.room(queue, head.source) > 0


def _bid(head: Head) -> Bid:
    """Priorities have no effect in a queue that keeps to the order of arrival, nor beside others."""
    return Priority.NORMAL.value, head.position, head.id


def pick(offers: Iterable[Offer[T]], quota: Quota) -> list[T]:
    """What starts next, first to start first, for as long as the quota lasts."""
    picked: list[T] = []
    bids = _bids(offers)
    while bids and quota.left > 0:
        _, number, offer = bids[0]
        source, taken = offer.take()
        picked.append(taken)
        quota.admit(offer.queue, source)
        if quota.is_full(source):
            bids = _bids(offer for _, _, offer in bids)  # others may have had this source in mind
        elif (bid := offer.bid()) is None:
            heapq.heappop(bids)
        else:
            heapq.heapreplace(bids, (bid, number, offer))
    return picked


def _bids(offers: Iterable[Offer[T]]) -> list[tuple[Bid, int, Offer[T]]]:
    bids = [(bid, number, offer) for number, offer in enumerate(offers) if (bid := offer.bid()) is not None]
    heapq.heapify(bids)
    return bids
