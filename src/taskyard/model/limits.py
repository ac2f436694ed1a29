"""How much may start: the rules of queues, what a node asks for, and counting it down while tasks are picked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import TypeVar

import msgspec

AnyLane = TypeVar("AnyLane", tuple[str, str], tuple[str, str, int])


def tighter(one: float | None, other: float | None) -> float | None:
    """The smaller of two limits, of which None is no limit."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


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
