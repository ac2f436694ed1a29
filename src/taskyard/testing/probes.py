"""A sink whose events can be awaited: a test waits for what happened, not for a time in which it should have."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from taskyard.ports.sink import (
    BlockerFreed,
    LeaseLost,
    LeaseRegained,
    LoopRestarted,
    NodeEvent,
    ReportsStored,
    ScheduleFired,
    SchedulesChecked,
    Sinks,
    StoreFailed,
    TasksClaimed,
    TasksRescued,
    TasksSettled,
)

PROBE_TIMEOUT_S = 10.0
"""A probe that stays silent this long fails its test, and the failure names it."""


class AwaitableProbe:
    """One named probe. It keeps what it was told until that is read."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._values: deque[Any] = deque(maxlen=10_000)
        self._wake = asyncio.Event()
        self.count = 0

    def tell(self, value: object) -> None:
        self.count += 1
        self._values.append(value)
        self._wake.set()

    def clear(self) -> None:
        """Drop what was not read."""
        self._values.clear()

    async def next(self) -> Any:
        """The next value it is told, or was told and nobody has read."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                while not self._values:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            raise AssertionError(f"the probe {self._name!r} was told nothing for {PROBE_TIMEOUT_S:g} s") from None
        return self._values.popleft()


class Probes:
    """The sink. `sinks` is what an engine takes."""

    def __init__(self) -> None:
        self._told: dict[type[NodeEvent], tuple[AwaitableProbe, Callable[[Any], object]]] = {}
        self.claimed = self._probe("claimed", TasksClaimed, lambda event: [claim.uuid for claim in event.claims])
        self.settled = self._probe("settled", TasksSettled, lambda event: [claim.uuid for claim, _ in event.settles])
        self.reported = self._probe("reported", ReportsStored, lambda event: [claim.uuid for claim in event.claims])
        self.rescued = self._probe("rescued", TasksRescued, lambda event: event.uuids)
        self.outage = self._probe("outage", StoreFailed, lambda event: event.error)
        self.restarted = self._probe("restarted", LoopRestarted, lambda event: event.name)
        self.fenced = self._probe("fenced", LeaseLost, lambda event: event.incarnation)
        self.rejoined = self._probe("rejoined", LeaseRegained, lambda event: event.incarnation)
        self.fired = self._probe("fired", ScheduleFired, lambda event: event.uuids)
        self.looked = self._probe("looked", SchedulesChecked, lambda event: event.next_at)
        self.freed = self._probe("freed", BlockerFreed, lambda event: event.key)
        self.kinds = frozenset(self._told)
        self.sinks = Sinks([self])

    def _probe(self, name: str, kind: type[NodeEvent], value: Callable[[Any], object]) -> AwaitableProbe:
        probe = AwaitableProbe(name)
        self._told[kind] = probe, value
        return probe

    def tell(self, event: NodeEvent) -> None:
        probe, value = self._told[type(event)]
        probe.tell(value(event))
