"""Who stands before whom, in memory."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import Any, TypeVar

from taskyard.model.places import Put
from taskyard.model.state import QUEUED, RUNNING
from taskyard.model.task import TaskRecord

T = TypeVar("T", bound=tuple[Any, ...])

Lane = tuple[str, str]
"""Queue and lane; it has a line for each priority."""

Entry = tuple[int, int, int]
"""Priority, position and id of a task: the order in which tasks start."""

Place = tuple[int, int]
"""Position and id of a task, in a queue that goes by places alone."""


class Line:
    """The tasks of a lane, smallest entry first. Nearly all come in order: those wait in a deque, where the first is
    taken at no cost; in a heap of 20,000 that would take fourteen comparisons. The few that were put forward are in a
    heap. An entry counts while the task that `find` has under its id still stands there; others are dropped when they
    come first."""

    __slots__ = ("_ahead", "_find", "_in_order")

    def __init__(self, find: Callable[[int], TaskRecord | None]) -> None:
        self._find = find
        self._in_order: deque[Entry] = deque()
        self._ahead: list[Entry] = []

    def push(self, entry: Entry) -> None:
        if not self._in_order or entry > self._in_order[-1]:
            self._in_order.append(entry)
        else:
            heapq.heappush(self._ahead, entry)

    def __iter__(self) -> Iterator[TaskRecord]:
        """The tasks, first to start first. Whoever asks for the next one has taken the one before, which runs from then
        on: there may be the same entry twice."""
        in_order, ahead, find = self._in_order, self._ahead, self._find
        while in_order or ahead:
            is_ahead = bool(ahead) and (not in_order or ahead[0] < in_order[0])
            priority, position, task_id = ahead[0] if is_ahead else in_order[0]
            record = find(task_id)
            if (
                record is not None
                and record.state is QUEUED
                and record.position == position
                and record.priority == priority
                and not record.is_parked
            ):
                yield record
                record.state = RUNNING
            if is_ahead:
                heapq.heappop(ahead)
            else:
                in_order.popleft()

    def first(self, limit: int) -> list[TaskRecord]:
        """The first tasks, left where they are."""
        # The same entry may be there several times.
        entries = (entry for entry, _ in groupby(heapq.merge(self._in_order, in_heap_order(self._ahead))))
        found = (
            record for entry in entries if (record := self._find(entry[2])) is not None and _stands_at(record, entry)
        )
        return list(islice(found, limit))

    def take_before(self, limit: Entry | None, most: int) -> list[TaskRecord]:
        """All that stand before `limit`, at most so many: they run from here on."""
        taken: list[TaskRecord] = []
        in_order, ahead, find = self._in_order, self._ahead, self._find
        while len(taken) < most and (in_order or ahead):
            is_ahead = bool(ahead) and (not in_order or ahead[0] < in_order[0])
            entry = ahead[0] if is_ahead else in_order[0]
            if limit is not None and entry > limit:
                break
            if is_ahead:
                heapq.heappop(ahead)
            else:
                in_order.popleft()
            record = find(entry[2])
            if record is not None and _stands_at(record, entry):
                record.state = RUNNING
                taken.append(record)
        return taken


def in_heap_order(heap: list[T]) -> Iterator[T]:
    """What a heap holds, smallest first and each entry once, without changing it: the first few cost little, however
    long it is."""
    nexts = [(heap[0], 0)] if heap else []
    last: T | None = None
    while nexts:
        entry, at = heapq.heappop(nexts)
        if entry != last:
            yield entry
        last = entry
        for child in (2 * at + 1, 2 * at + 2):
            if child < len(heap):
                heapq.heappush(nexts, (heap[child], child))


def _stands_at(record: TaskRecord, entry: Entry) -> bool:
    """Whether an entry of a lane still counts."""
    priority, position, _ = entry
    return (
        record.state is QUEUED and not record.is_parked and record.position == position and record.priority == priority
    )


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
    those of the waiting that may start, and those claimed since somebody looked; the rest are parked. Entries of
    `waiting` may be stale, as those of lanes."""

    __slots__ = ("holding", "offered", "waiting")

    def __init__(self) -> None:
        self.holding: set[int] = set()
        self.waiting: list[Entry] = []
        self.offered: set[int] = set()
