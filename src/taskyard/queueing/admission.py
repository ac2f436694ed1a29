"""How much this node may start now: running tasks counted in total and per source, told to the store as a `Demand`.

It only counts. Limits that hold across nodes (of queues, of keys) are the store's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum, auto

from taskyard.model.limits import Demand
from taskyard.ports.consumer import Consumer

NO_LIMITS: Mapping[str, int | None] = {}


class Hold(Enum):
    """Why a node claims nothing for a while: somebody drains it, or it cannot tell whether it still counts as alive."""

    DRAIN = auto()
    FENCE = auto()


class Slots:
    """`consumers` may grow while the node runs. `others` is the room for sources that are not among them. `capacities`
    is what each executor runs at once, where it has a limit: no source is asked for beyond what its executor has free.
    Sources that share an executor may together get more than that; it waits there, and goes back at a stop."""

    def __init__(
        self,
        consumers: Mapping[str, Consumer],
        *,
        max_running: int,
        others: int = 0,
        capacities: Mapping[str, int | None] = NO_LIMITS,
    ) -> None:
        self._consumers = consumers
        self._known = 0
        self._total = max_running
        self._others = others
        self._sources: dict[str, int] = {}
        self._capacities = {executor: limit for executor, limit in capacities.items() if limit is not None}
        self._room = dict(self._capacities)
        self._executors: dict[str, str] = {}
        self._strangers: Counter[str] = Counter()
        self._demand: Demand | None = None
        self._stale = True
        self._stopped = False
        self._holds: set[Hold] = set()

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """Ask for nothing from here on."""
        self._stopped = True
        self._demand, self._stale = None, False

    @property
    def is_fenced(self) -> bool:
        """Whether this node may hold nothing: neither claim, nor begin what it had claimed."""
        return Hold.FENCE in self._holds

    def hold(self, why: Hold) -> None:
        """Ask for nothing until `release`, of every reason there is."""
        self._holds.add(why)
        self._stale = not self._stopped

    def release(self, why: Hold) -> None:
        self._holds.discard(why)
        self._stale = not self._stopped

    def demand(self) -> Demand | None:
        """What there is room for, or None. Asked on every turn, so it is made anew only when something has changed."""
        if self._known != len(self._consumers) and not self._stopped:
            self._learn()
        if self._stale:
            self._demand = self._count()
            self._stale = False
        return self._demand

    def limits(self) -> dict[str, int]:
        """How many tasks of each source may run here at once."""
        return {
            name: min(own := _sensible(consumer.concurrent_count), self._capacities.get(consumer.executor, own))
            for name, consumer in self._consumers.items()
        }

    def take(self, source: str) -> None:
        self._total -= 1
        if source not in self._sources:
            self._learn()
        if source in self._sources:
            self._sources[source] -= 1
            if source in self._executors:
                self._room[self._executors[source]] -= 1
        else:
            self._others -= 1
            self._strangers[source] += 1
        self._stale = not self._stopped

    def free(self, source: str) -> None:
        self._total += 1
        # A source may have been registered since its task was taken as one of the others: it goes back there.
        if self._strangers and self._strangers[source]:
            self._others += 1
            self._strangers[source] -= 1
        else:
            self._sources[source] += 1
            if source in self._executors:
                self._room[self._executors[source]] += 1
        self._stale = not self._stopped

    def _learn(self) -> None:
        """Give each new consumer its slots."""
        for name, consumer in self._consumers.items():
            if name not in self._sources:
                self._sources[name] = _sensible(consumer.concurrent_count)
                if consumer.executor in self._room:
                    self._executors[name] = consumer.executor
        self._known = len(self._consumers)
        self._stale = True

    def _count(self) -> Demand | None:
        if self._total <= 0 or self._holds:
            return None
        sources = dict(self._sources)
        for source, executor in self._executors.items():
            sources[source] = max(0, min(sources[source], self._room[executor]))
        if self._others > 0:
            # Full sources are listed too: one that is not listed would be taken for unknown.
            return Demand(self._total, sources, self._others)
        free = {source: n for source, n in sources.items() if n > 0}
        return Demand(self._total, free) if free else None


def _sensible(count: object) -> int:
    """A count that is missing or makes no sense is 1, whatever its annotation promised."""
    return count if isinstance(count, int) and count >= 1 else 1
