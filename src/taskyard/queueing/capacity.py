"""How much this node may start now: running tasks counted in total and per consumer, told to the store as a `Demand`.

It only counts. Limits that hold across nodes (of queues, of keys) are the store's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto

from taskyard.model.limits import Demand
from taskyard.ports.consumer import Consumer
from taskyard.ports.places import Place, Places

NO_LIMITS: Mapping[str, int | None] = {}


class Hold(Enum):
    """Why a node claims nothing for a while: somebody drains it, or it cannot tell whether it still counts as alive."""

    DRAIN = auto()
    FENCE = auto()


class Slots:
    """`consumers` may come and go while the node runs: call `refresh` then. What runs of one that has gone is counted
    until it ends, also against the slots of one that comes under the same name. `others` is the room for sources that
    are not among them. `capacities` is what each executor runs at once, where it has a limit: no source is asked for
    beyond what its executor has free. Sources that share an executor may together get more than that; it waits there,
    and goes back at a stop."""

    def __init__(
        self,
        consumers: Mapping[str, Consumer],
        *,
        max_running: int,
        others: int = 0,
        capacities: Mapping[str, int | None] = NO_LIMITS,
    ) -> None:
        self._consumers = consumers
        self._total = max_running
        self._others = others
        self._limits: dict[str, int] = {}
        """How many of each source that is served may run."""
        self._sources: dict[str, int] = {}
        """How many more may start; less than none where a source has gone and some of it still runs."""
        self._capacities = {executor: limit for executor, limit in capacities.items() if limit is not None}
        self._room = dict(self._capacities)
        self._executors: dict[str, str] = {}
        self._strangers: Counter[str] = Counter()
        self._placed: dict[str, Places] = {}
        """The places of the consumers that have some. Consumers may share them."""
        self._running_at: dict[tuple[str, str], Places] = {}
        """By consumer and name of a place where a task runs, the places that it is one of: those may be given up
        meanwhile."""
        self._taken: dict[Places, set[str]] | None = None
        """What `_find_taken` has found, until a run starts or ends or a consumer gets other places."""
        self._free: dict[Places, tuple[int, list[Place]]] = {}
        """What `free_places` has found, and at which `changes` of the places; as long as `_taken` holds."""
        self._demand: Demand | None = None
        self._stale = True
        self._stopped = False
        self._holds: set[Hold] = set()
        self.refresh()

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """Ask for nothing from here on."""
        self._stopped = True
        self._demand, self._stale = None, False

    @property
    def is_draining(self) -> bool:
        return Hold.DRAIN in self._holds

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
        if self._stale:
            self._demand = self._count()
            self._stale = False
        return self._demand

    def limits(self) -> dict[str, int]:
        """How many tasks of each source may run here at once, as far as its own limit goes."""
        return dict(self._limits)

    def available(self) -> dict[str, int]:
        """How many more runs of each consumer could start here, as far as its own limit goes."""
        return {name: self._sources[name] for name in self._limits}

    def executors(self) -> dict[str, str]:
        """Where each source runs, of those whose executor has a limit."""
        return {source: executor for source, executor in self._executors.items() if source in self._limits}

    def capacities(self) -> dict[str, int]:
        """How many tasks each executor runs at once, where it has a limit."""
        return dict(self._capacities)

    def take(self, source: str, place: str | None = None) -> None:
        """A task of this consumer starts, at this place if the consumer has places."""
        if place is not None and source in self._placed:
            self._running_at[source, place] = self._placed[source]
            self._taken = None
        self._total -= 1
        if source in self._limits:
            self._sources[source] -= 1
            if source in self._executors:
                self._room[self._executors[source]] -= 1
        else:
            self._others -= 1
            self._strangers[source] += 1
        self._stale = not self._stopped

    def free(self, source: str, place: str | None = None) -> None:
        if place is not None:
            self._running_at.pop((source, place), None)
            self._taken = None
        self._total += 1
        # A source may have been registered since its task was taken as one of the others: it goes back there.
        if self._strangers and self._strangers[source]:
            self._others += 1
            self._strangers[source] -= 1
        else:
            self._sources[source] += 1
            if source in self._executors:
                self._room[self._executors[source]] += 1
            if source not in self._limits:
                self._forget_if_over(source)
        self._stale = not self._stopped

    def refresh(self) -> None:
        """Consumers have come or gone: those that are there have their slots, the others none."""
        for name in self._limits.keys() - self._consumers.keys():
            self._sources[name] -= self._limits.pop(name)
            self._forget_if_over(name)
        self._placed, self._taken = {}, None
        for name, consumer in list(self._consumers.items()):  # a thread may be registering another
            if consumer.places is not None:
                self._placed[name] = consumer.places
            limit = _sensible(consumer.concurrency) if consumer.places is None else len(consumer.places)
            self._sources[name] = self._sources.get(name, 0) + limit - self._limits.get(name, 0)
            self._limits[name] = limit
            self._settle_in(name, consumer.executor)
        self._stale = not self._stopped

    @property
    def has_places(self) -> bool:
        return bool(self._placed)

    def free_places(self, source: str) -> Sequence[Place]:
        """The places of this consumer that are ready and where nothing runs."""
        if source not in self._placed:
            return []
        if self._taken is None:
            self._taken, self._free = self._find_taken(), {}
        places = self._placed[source]
        known = self._free.get(places)
        if known is None or known[0] != places.changes:
            # Race: a thread may change the places meanwhile. The number is read first, so that is found next time.
            changes, taken = places.changes, self._taken.get(places, ())
            known = changes, [place for place in places.ready() if place.name not in taken]
            self._free[places] = known
        return known[1]

    def _find_taken(self) -> dict[Places, set[str]]:
        """The names of the places where tasks run. If a consumer was registered again with other places, its earlier
        runs take the places of the same names there too."""
        taken: dict[Places, set[str]] = {}
        for (source, name), places in self._running_at.items():
            for one in {places, self._placed.get(source, places)}:
                taken.setdefault(one, set()).add(name)
        return taken

    def are_free(self, wanted: Iterable[tuple[str, str]]) -> bool:
        """Whether all of these places, each with its consumer, are free."""
        free: dict[str, set[str]] = {}
        for source, name in wanted:
            if source not in free:
                free[source] = {place.name for place in self.free_places(source)}
            if name not in free[source]:
                return False
        return True

    def places(self) -> dict[str, list[dict[str, str]]]:
        """The labels of each place of each consumer that has places."""
        return {name: [place.labels for place in places] for name, places in self._placed.items()}

    def _settle_in(self, source: str, executor: str) -> None:
        """Let the source count for its executor. What runs of an earlier one of that name counts for the same: at worst
        a few wait for a thread or a worker that another has."""
        before, after = self._executors.get(source), executor if executor in self._capacities else None
        if before == after:
            return
        running = self._limits[source] - self._sources[source]
        if before is not None:
            self._room[self._executors.pop(source)] += running
        if after is not None:
            self._executors[source] = after
            self._room[after] -= running

    def _forget_if_over(self, source: str) -> None:
        """Nothing is left to be known of a source that has gone when the last of it has ended."""
        if self._sources[source] == 0:
            del self._sources[source]
            self._executors.pop(source, None)

    def _count(self) -> Demand | None:
        if self._total <= 0 or self._holds:
            return None
        sources = {source: max(0, self._sources[source]) for source in self._limits}
        for name in self._placed:
            sources[name] = len(self.free_places(name))
        for source, executor in self._executors.items():
            if source in sources:
                sources[source] = max(0, min(sources[source], self._room[executor]))
        if self._others > 0:
            # Full sources are listed too: one that is not listed would be taken for unknown.
            return Demand(self._total, sources, self._others)
        free = {source: n for source, n in sources.items() if n > 0}
        return Demand(self._total, free) if free else None


def _sensible(count: object) -> int:
    """A count that is missing or makes no sense is 1, whatever its annotation promised."""
    return count if isinstance(count, int) and count >= 1 else 1
