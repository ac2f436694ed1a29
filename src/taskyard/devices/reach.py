"""`Reach`: the devices that this node cannot reach, and leaves to other nodes of the pool.

Of several nodes that may serve a device the first one does, and it may be one that is not connected to that device. A
node that has not reached a device for a while lets go of it, and takes it back only if no other node does. It tries
twice as long each time, so that the recovery ladder comes to its end for a device that no node reaches. A device that
was up here is kept: the ladder looks after its outage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from taskyard.devices.actor import WorkerActor
from taskyard.model.device import DeviceState
from taskyard.ports.store import Store

TRY_S = 50.0
"""Seconds that a node tries to reach a device at first: a little less than until the ladder restarts it."""

AGAIN_S = 15.0
"""Seconds until a node that found no other node of the pool looks for one again."""

YIELD_S = 5.0
"""Seconds that a free device is left to other nodes, for each time that this node has failed to reach it."""

YIELD_MOST_S = 30.0
"""Seconds, at most: the other nodes ask for a free device within about two."""


class Reach:
    """Times are those of a monotonic clock."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._late_mono: dict[str, float] = {}
        """When a device that was not up here yet is to be left to others."""
        self._failures: dict[str, int] = {}
        """How often a device was left to others, until it was up here."""
        self._free_mono: dict[str, float] = {}
        """Since when one of these is seen to be served by no node."""
        self.leaving: set[str] = set()
        """Those that this node serves still, and is to let go of."""

    def begin(self, name: str, now: float) -> None:
        """This node starts to look after the device."""
        self._late_mono[name] = now + TRY_S * 2 ** self._failures.get(name, 0)
        self._free_mono.pop(name, None)

    def end(self, name: str) -> None:
        """It looks after the device no more."""
        self._late_mono.pop(name, None)

    def note_up(self, name: str) -> None:
        """The device has answered here."""
        self._late_mono.pop(name, None)
        self._failures.pop(name, None)

    def clear(self) -> None:
        """The node serves no device any more."""
        self._late_mono.clear()
        self._failures.clear()
        self._free_mono.clear()
        self.leaving.clear()

    def may_ask(self, name: str, served_by: str, now: float) -> bool:
        """Whether this node may ask for a device that `served_by` serves, if any node does."""
        if served_by:
            self._free_mono.pop(name, None)
            return False
        failures = self._failures.get(name, 0)
        return now >= self._free_mono.setdefault(name, now) + min(failures * YIELD_S, YIELD_MOST_S)

    async def leave(self, store: Store, node: str, actors: Mapping[str, WorkerActor], now: float) -> list[str]:
        """Devices that are to be left to the other nodes from now on."""
        late = list(self._find_late(actors, now))
        if not late:
            return []
        if not await self._has_others(store, node):
            self._late_mono.update(dict.fromkeys(late, now + AGAIN_S))
            return []
        for name in late:
            del self._late_mono[name]
            self._failures[name] = self._failures.get(name, 0) + 1
        self.leaving.update(late)
        return late

    def _find_late(self, actors: Mapping[str, WorkerActor], now: float) -> Iterator[str]:
        for name, late_mono in list(self._late_mono.items()):
            actor = actors.get(name)
            if actor is None or actor.spec.host:
                continue
            if actor.state is not DeviceState.DOWN or actor.is_reachable:
                self.begin(name, now)
            elif now >= late_mono:
                yield name

    async def _has_others(self, store: Store, node: str) -> bool:
        """Whether another living node has consumers of the pool."""
        return any(
            self._pool in one.node.queues
            for one in await store.nodes()
            if one.node.incarnation != node and not (one.is_silent or one.is_draining or one.node.is_stopping)
        )
