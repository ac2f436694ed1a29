"""How much may start: the rules of queues, what a node asks for, and counting it down while tasks are picked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from itertools import takewhile
from typing import TypeVar

import msgspec

from taskyard.model.fairness import Patience
from taskyard.model.queue import QueueControl
from taskyard.model.retry import RetryPolicy

AnyLane = TypeVar("AnyLane", tuple[str, str], tuple[str, str, int])

RETRIES_PER_S = 500.0
"""More than a node has to try again in ordinary times, and far less than what it could send at whoever is down."""


def tighter(one: float | None, other: float | None) -> float | None:
    """The smaller of two limits, of which None is no limit."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


class QueueOrder(StrEnum):
    """Who goes first in a queue.

    `priority`: high, normal, low; within one, first in first out among those that can start. `fifo`: first in first
    out, whatever the priority, and the head is never skipped: while it cannot start, nobody behind it does. `buckets`:
    the same within each bucket, and the buckets take turns; one whose head cannot start is passed over.

    What waits for its time, before its first attempt or between two, stands in no line and holds up nobody; for the
    next attempt it comes back to its place."""

    PRIORITY = "priority"
    FIFO = "fifo"
    BUCKETS = "buckets"


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one queue, held across every process on the store. `concurrency=None` sets no limit of its own;
    `per_key` is how many tasks with one key may run at once; `auto_recover` how often a task is taken back from a dead
    node before it is failed; `retry` the policy of consumers that name none.

    At most `retries_per_s` of its retries become due in a second, on each node; None lets all come when their policy
    says, however many they are.

    With `order="priority"` a lower priority is let in once after `starve_after` starts of higher ones, or when it has
    waited for `starve_wait_s` seconds; None waits for ever."""

    name: str
    concurrency: int | None = None
    per_key: int = 1
    auto_recover: int = 1
    retry: RetryPolicy = RetryPolicy()
    order: QueueOrder = QueueOrder.PRIORITY
    starve_after: int | None = 8
    starve_wait_s: float | None = 600.0
    retries_per_s: float | None = RETRIES_PER_S

    @property
    def patience(self) -> Patience:
        return _patience(self.starve_after, self.starve_wait_s)

    @property
    def is_strict(self) -> bool:
        """Whether places alone count, and what cannot start holds up others."""
        return self.order is not QueueOrder.PRIORITY

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"queue {self.name!r}: concurrency must be at least 1, or None for no limit")
        if self.per_key < 1 or self.auto_recover < 0:
            raise ValueError(f"queue {self.name!r}: per_key must be at least 1 and auto_recover not negative")
        if self.starve_after is not None and self.starve_after < 1:
            raise ValueError(f"queue {self.name!r}: starve_after must be at least 1, or None for never")
        if self.starve_wait_s is not None and self.starve_wait_s <= 0:
            raise ValueError(f"queue {self.name!r}: starve_wait_s must be more than 0, or None for never")
        if self.retries_per_s is not None and not 0 < self.retries_per_s < math.inf:
            raise ValueError(f"queue {self.name!r}: retries_per_s must be more than 0, or None for no limit")


@lru_cache(maxsize=64)
def _patience(after: int | None, wait_s: float | None) -> Patience:
    """Every claim asks for it, and queues have few different ones."""
    return Patience(after, None if wait_s is None else timedelta(seconds=wait_s))


def rooms(
    queues: Mapping[str, QueueSettings], controls: Mapping[str, QueueControl], running: Mapping[str, int]
) -> dict[str, int]:
    """How many more each queue may start, of those that have a limit. What a person has said goes before the rules."""
    room = {
        name: queue.concurrency - running.get(name, 0)
        for name, queue in queues.items()
        if queue.concurrency is not None
    }
    for name, control in controls.items():
        if not control.is_open:
            room[name] = 0
        elif control.concurrency is not None:
            room[name] = control.concurrency - running.get(name, 0)
    return room


class Demand(msgspec.Struct, frozen=True):
    """What a node has room for: `total` tasks, and at most so many of each lane. A lane is a consumer, or a consumer
    and what its tasks require (`lane_of`). `others` is the room for lanes that are not listed (the standalone Scheduler
    takes those to report them as unknown).

    `only`: claim nothing but these tasks, each at the place that is named here (None: no place). What would be claimed
    first ends the claim if it is not among them."""

    total: int
    per_lane: Mapping[str, int]
    others: int = 0
    only: Mapping[int, str | None] | None = None

    def count_allowed(self, picked: Iterable[int]) -> int:
        """How many of the tasks that would be claimed, first to start first, may be."""
        only = self.only
        return 0 if only is None else sum(1 for _ in takewhile(only.__contains__, picked))


class Quota:
    """Counts a demand and the queues' room down as tasks are admitted; the tightest limit wins. `closed` counts how
    often a lane or a queue was filled by that."""

    __slots__ = ("_lanes", "_others", "_queues", "closed", "left")

    def __init__(self, demand: Demand, queues: Mapping[str, int]) -> None:
        self.left = demand.total
        self.closed = 0
        self._lanes = dict(demand.per_lane)
        self._others = demand.others
        self._queues = dict(queues)

    def room(self, queue: str, lane: str) -> int:
        """How many more of this lane may be admitted. A queue that is not named has no limit."""
        return min(self.left, self._lanes.get(lane, self._others), self._queues.get(queue, self.left))

    def select(self, lanes: Iterable[AnyLane]) -> list[AnyLane]:
        """Those of which something may be admitted. Each begins with its queue and its lane."""
        rooms, others, queues = self._lanes, self._others, self._queues
        if self.left <= 0:
            return []
        return [lane for lane in lanes if rooms.get(lane[1], others) > 0 and queues.get(lane[0], 1) > 0]

    def is_open(self, queue: str, lane: str) -> bool:
        """Whether one more may be."""
        return self.left > 0 and self._lanes.get(lane, self._others) > 0 and self._queues.get(queue, 1) > 0

    def admit(self, queue: str, lane: str, n: int = 1) -> bool:
        """Count them; whether more of this lane may be."""
        self.left -= n
        room = self._lanes.get(lane)
        if room is not None:
            self._lanes[lane] = room = room - n
        else:
            self._others = room = self._others - n
        if queue in self._queues:
            self._queues[queue] -= n
            room = min(room, self._queues[queue])
        if room <= 0:
            self.closed += 1
            return False
        return self.left > 0
