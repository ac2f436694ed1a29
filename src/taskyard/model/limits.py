"""How much may start: what a node asks for, and counting it down while tasks are picked."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from taskyard.model.retry import RetryPolicy


def tighter(one: float | None, other: float | None) -> float | None:
    """The smaller of two limits, of which None is no limit."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one queue, held across every process on the store. `concurrency=None` sets no limit of its own;
    `per_key` is how many tasks with one key may run at once; `auto_recover` how often a task is taken back from a dead
    node before it is failed; `retry` the policy of consumers that name none."""

    name: str
    concurrency: int | None = None
    per_key: int = 1
    auto_recover: int = 1
    retry: RetryPolicy = RetryPolicy()

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"queue {self.name!r}: concurrency must be at least 1, or None for no limit")
        if self.per_key < 1 or self.auto_recover < 0:
            raise ValueError(f"queue {self.name!r}: per_key must be at least 1 and auto_recover not negative")


class Demand(msgspec.Struct, frozen=True):
    """What a node has room for: `total` tasks, and of each source at most so many. `others` is the room for sources
    that are not listed (the standalone Scheduler takes those to report them as unknown)."""

    total: int
    sources: Mapping[str, int]
    others: int = 0


class Quota:
    """Counts a demand and the queues' room down as tasks are admitted; the tightest limit wins."""

    __slots__ = ("_others", "_queues", "_sources", "left")

    def __init__(self, demand: Demand, queues: Mapping[str, int]) -> None:
        self.left = demand.total
        self._sources = dict(demand.sources)
        self._others = demand.others
        self._queues = dict(queues)

    def room(self, queue: str, source: str) -> int:
        """How many more of this lane may be admitted. A queue that is not named has no limit."""
        return min(self.left, self._sources.get(source, self._others), self._queues.get(queue, self.left))

    def admit(self, queue: str, source: str, n: int = 1) -> None:
        self.left -= n
        if source in self._sources:
            self._sources[source] -= n
        else:
            self._others -= n
        if queue in self._queues:
            self._queues[queue] -= n
