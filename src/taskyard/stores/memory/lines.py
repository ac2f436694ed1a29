"""Who stands before whom, in memory."""

from __future__ import annotations

import bisect
import heapq
from collections import deque

from taskyard.model.places import Put

Lane = tuple[str, str, int]
"""Queue, source and priority."""

Entry = tuple[int, int, int]
"""Priority, position and id of a task: the order in which tasks start."""

Place = tuple[int, int]
"""Position and id of a task, in a queue that goes by places alone."""


class Line:
    """Entries, smallest first. Nearly all come in order: those wait in a deque, where the first is taken at no cost;
    in a heap of 20,000 that would take fourteen comparisons. The few that were put forward are in a heap."""

    __slots__ = ("_ahead", "_in_order")

    def __init__(self) -> None:
        self._in_order: deque[Entry] = deque()
        self._ahead: list[Entry] = []

    def push(self, entry: Entry) -> None:
        if not self._in_order or entry > self._in_order[-1]:
            self._in_order.append(entry)
        else:
            heapq.heappush(self._ahead, entry)

    def first(self) -> Entry | None:
        if not self._in_order:
            return self._ahead[0] if self._ahead else None
        if self._ahead and self._ahead[0] < self._in_order[0]:
            return self._ahead[0]
        return self._in_order[0]

    def pop(self) -> None:
        if not self._in_order or (self._ahead and self._ahead[0] < self._in_order[0]):
            heapq.heappop(self._ahead)
        else:
            self._in_order.popleft()


class HandPlaced:
    """The tasks of one queue whose places were made by hand, in order."""

    __slots__ = ("_puts",)

    def __init__(self) -> None:
        self._puts: list[Put] = []

    def add(self, put: Put) -> None:
        bisect.insort(self._puts, put)

    def discard(self, put: Put) -> None:
        at = bisect.bisect_left(self._puts, put)
        if self._puts[at : at + 1] == [put]:
            del self._puts[at]

    def nearest(self, position: int, *, below: bool) -> int | None:
        if below:
            at = bisect.bisect_left(self._puts, (position,)) - 1
        else:
            at = bisect.bisect_left(self._puts, (position + 1,))
        return self._puts[at].position if 0 <= at < len(self._puts) else None

    def between(self, low: int, high: int) -> list[Put]:
        return self._puts[bisect.bisect_left(self._puts, (low,)) : bisect.bisect_left(self._puts, (high + 1,))]


class KeyLine:
    """The tasks of one queue with one key: which of them hold it, and which wait, first to start first. `offered` are
    those of the waiting that may start; the rest are parked. Entries of `waiting` may be stale, as those of lanes."""

    __slots__ = ("holding", "offered", "waiting")

    def __init__(self) -> None:
        self.holding: set[int] = set()
        self.waiting: list[Entry] = []
        self.offered: set[int] = set()
