"""Which tasks start next, over all queues: each queue offers by its own order, the best offer is taken, one at a time.

Pure, over feeds that a store reads its tasks through. It never decides who may run with a key: what waits for one is
parked, and a feed says so.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Generic, Protocol, TypeVar

from taskyard.model.fairness import Fairness, FairnessState, Patience
from taskyard.model.limits import Quota
from taskyard.model.order import Priority

Bid = tuple[int, int, int]
"""Priority, position and id: the smallest of all queues is served next. Places made by hand are different within their
queue; in two queues they may be the same, and then the older task goes first."""


class Head(Protocol):
    """The first task of a feed. `can_start` is false for one that stands in line and cannot leave it now."""

    @property
    def priority(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def id(self) -> int: ...

    @property
    def lane(self) -> str: ...

    @property
    def due_at(self) -> datetime: ...

    @property
    def can_start(self) -> bool: ...


T = TypeVar("T", bound=Head)
T_co = TypeVar("T_co", bound=Head, covariant=True)


class Feed(Protocol[T_co]):
    """All that stand in one line, in the order of their places, read as they are needed."""

    def first(self) -> T_co | None:
        """The first of those that were not taken; asked again and again, so it costs little the second time."""
        ...

    def take(self) -> None:
        """Whoever is first, by what was just asked, is gone from here."""
        ...


class Offer(Protocol[T]):
    """One queue while tasks are picked."""

    queue: str

    @property
    def turns(self) -> FairnessState: ...

    def bid(self) -> Bid | None:
        """For what it is served next; None if nothing of it may start."""
        ...

    def take(self, limit: Bid | None) -> list[T]:
        """What it gives after a bid, and admits: one task, or as many as it would give one by one while its bids stay
        below `limit`, that of the next queue."""
        ...


Level = list[tuple[int, int, T, Iterator[T]]]
"""The lanes of one priority: of each its first task, with place and id, and those that follow. A lane has only tasks
that can start, in the order of their places; to ask for the next one is to take the one before."""


class ByPriority(Generic[T]):
    """High, normal, low, with patience. It bids with its first task, whichever it then gives. `levels` are, by
    priority, the lanes of which something may be admitted."""

    def __init__(
        self,
        queue: str,
        turns: FairnessState,
        patience: Patience,
        levels: dict[int, Level[T]],
        *,
        quota: Quota,
        now: datetime,
    ) -> None:
        self.queue = queue
        self._fairness = Fairness(turns, patience, now)
        self._levels, self._quota, self._closed = levels, quota, quota.closed
        for lanes in levels.values():
            heapq.heapify(lanes)

    @property
    def turns(self) -> FairnessState:
        return self._fairness.turns

    def bid(self) -> Bid | None:
        if self._closed != self._quota.closed:
            self._leave_closed()
        if not self._levels:
            return None
        top = min(self._levels)
        return top, *self._levels[top][0][:2]

    def _leave_closed(self) -> None:
        """A lane that is full has nothing more to give: room only ever shrinks while tasks are picked."""
        self._closed = self._quota.closed
        for level, lanes in list(self._levels.items()):
            still = [entry for entry in lanes if self._quota.is_open(self.queue, entry[2].lane)]
            heapq.heapify(still)
            self._levels[level] = still
            if not still:
                del self._levels[level]

    def take(self, limit: Bid | None) -> list[T]:
        taken: list[T] = []
        quota, fairness, levels = self._quota, self._fairness, self._levels
        heads = {level: lanes[0][2].due_at for level, lanes in levels.items()}
        while heads:
            level, most = fairness.choose(heads)
            before = len(taken)
            self._take(taken, level, limit, quota.left if most is None else most)
            fairness.note(len(taken) - before, level, heads)
            if quota.left <= 0 or quota.closed != self._closed:
                break
            if level in levels:
                heads[level] = levels[level][0][2].due_at
            else:
                del heads[level]
            if limit is not None and ((bid := self.bid()) is None or bid > limit):
                break
        return taken

    def _take(self, taken: list[T], level: int, limit: Bid | None, most: int) -> None:
        """The first of a level, until something changes for the others: it has no more, or a source is full."""
        lanes, queue, admit = self._levels[level], self.queue, self._quota.admit
        while True:
            _, _, head, lane = lanes[0]
            taken.append(head)
            has_room = admit(queue, head.lane)
            following = next(lane, None) if has_room else None  # a lane that is full may be long
            if following is not None:
                heapq.heapreplace(lanes, (following.position, following.id, following, lane))
            else:
                heapq.heappop(lanes)
                if not lanes:
                    del self._levels[level]
                    return
            most -= 1
            if most == 0 or not has_room or (limit is not None and (level, *lanes[0][:2]) > limit):
                return


class InTurn(Generic[T]):
    """First in, first out, whatever the priority. The head is never skipped: one that cannot start holds up all behind
    it. `line` has everything that stands in line."""

    def __init__(self, queue: str, turns: FairnessState, line: Feed[T], *, quota: Quota) -> None:
        self.queue, self.turns = queue, turns
        self._line, self._quota = line, quota

    def bid(self) -> Bid | None:
        head = self._line.first()
        return _bid(head) if _may_start(head, self.queue, self._quota) and head is not None else None

    def take(self, limit: Bid | None) -> list[T]:
        head = self._line.first()
        assert head is not None
        self._line.take()
        self._quota.admit(self.queue, head.lane)
        return [head]


class RoundRobin(Generic[T]):
    """Buckets that are served one after the other, each first in, first out. A bucket whose head cannot start is passed
    over. `lines` is in the order of their names."""

    def __init__(self, queue: str, turns: FairnessState, lines: Sequence[tuple[str, Feed[T]]], *, quota: Quota) -> None:
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

    def take(self, limit: Bid | None) -> list[T]:
        name, line = self._ring[0]
        head = line.first()
        assert head is not None
        self._ring.rotate(-1)
        self.turns = FairnessState(self.turns.passed_over, self.turns.last_favored_at, name)
        line.take()
        self._quota.admit(self.queue, head.lane)
        return [head]


def _may_start(head: Head | None, queue: str, quota: Quota) -> bool:
    return head is not None and head.can_start and quota.is_open(queue, head.lane)


def _bid(head: Head) -> Bid:
    """Priorities have no effect in a queue that keeps to the order of arrival, nor beside others."""
    return Priority.NORMAL.value, head.position, head.id


def pick(offers: Iterable[Offer[T]], quota: Quota) -> list[T]:
    """What starts next, first to start first, for as long as the quota lasts."""
    picked: list[T] = []
    bids = _bids(offers)
    while bids and quota.left > 0:
        closed = quota.closed
        _, number, offer = bids[0]
        picked += offer.take(min(bids[1:3])[0] if len(bids) > 1 else None)
        if quota.left <= 0:
            break
        if quota.closed != closed:
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
