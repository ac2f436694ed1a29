"""A memory store whose nodes have to beat, with leases that a test can break: what else could make a database hang, or
have a node given up at a chosen moment?"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from taskyard.model.catalogue import ConsumerSpec
from taskyard.model.node import Node
from taskyard.model.task import TaskRecord
from taskyard.testing.clock import ManualClock
from tests.engine.support import ShakyStore


class LeasedShakyStore(ShakyStore):
    def __init__(self, clock: ManualClock, lease_s: float = 15.0) -> None:
        super().__init__(clock)
        self.clock, self.lease_s = clock, lease_s
        self.joined: list[str] = []
        self.beats: list[str] = []
        self.opened = self.closed = 0
        self.beat_error: Exception | None = None
        self.beat_hangs = False
        self.close_hangs = False
        self.beat_takes_s = 0.0
        self.lists_away: Exception | None = None
        self.join_unanswered: Exception | None = None
        self.join_takes_s = 0.0
        self.leave_waits_for: asyncio.Event | None = None

    async def list_tasks(self, *args: Any, **options: Any) -> list[TaskRecord]:
        if self.lists_away is not None:
            raise self.lists_away
        return await super().list_tasks(*args, **options)

    async def join(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        await super().join(node, specs)
        self.joined.append(node.incarnation)
        self.clock.advance(self.join_takes_s)
        if self.join_unanswered is not None:
            raise self.join_unanswered

    async def leave(self, incarnation: str) -> None:
        if self.leave_waits_for is not None:
            await self.leave_waits_for.wait()
        await super().leave(incarnation)

    def lease(self, incarnation: str) -> "ShakyLease":
        return ShakyLease(self, incarnation)

    async def give_up(self, incarnation: str) -> list[str]:
        """As another node does when it has not seen the beat for the lease."""
        self.dead.append(incarnation)
        return await self.rescue(incarnation)

    async def rescue(self, incarnation: str) -> list[str]:
        if self.away is not None:
            raise self.away
        if incarnation not in self.dead:
            self.dead.append(incarnation)
        return await super().rescue(incarnation)

    async def dead_nodes(self) -> list[str]:
        await super().dead_nodes()
        return []


class ShakyLease:
    def __init__(self, store: LeasedShakyStore, incarnation: str) -> None:
        self.lease_s = store.lease_s
        self._store, self._incarnation = store, incarnation

    async def open(self) -> None:
        self._store.opened += 1

    async def beat(self) -> bool:
        store = self._store
        if store.beat_hangs:
            await asyncio.Event().wait()
        if store.beat_error is not None:
            raise store.beat_error
        store.beats.append(self._incarnation)
        await store.clock.wait(asyncio.Event(), store.clock.monotonic() + store.beat_takes_s)
        return any(status.node.incarnation == self._incarnation for status in await store.nodes())

    async def close(self) -> None:
        self._store.closed += 1
        if self._store.close_hangs:
            await asyncio.Event().wait()


class TimedLease:
    """A lease in real time, for a heartbeat on a real thread: once no beat has come for `lease_s`, the node is given up
    for good, and the next beat hears of it. It notes the longest pause between beats."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.beats = 0
        self.longest_s = 0.0
        self.is_given_up = False
        self._last = time.monotonic()

    async def open(self) -> None: ...

    async def beat(self) -> bool:
        now = time.monotonic()
        pause_s, self._last = now - self._last, now
        self.longest_s = max(self.longest_s, pause_s)
        self.is_given_up |= pause_s > self.lease_s
        self.beats += 1
        return not self.is_given_up

    async def close(self) -> None: ...


class TimedStore(ShakyStore):
    """Hands out timed leases. A node that was given up is rescued before it hears of it."""

    def __init__(self, clock: Any, lease_s: float) -> None:
        super().__init__(clock)
        self._lease_s = lease_s
        self.leases: dict[str, TimedLease] = {}

    def lease(self, incarnation: str) -> TimedLease:
        lease = self.leases[incarnation] = TimedLease(self._lease_s)
        return lease

    async def dead_nodes(self) -> list[str]:
        return []

    async def rescue(self, incarnation: str) -> list[str]:
        self.dead.append(incarnation)
        return await super().rescue(incarnation)
