"""Taking back what dead nodes held. Whether a node is dead is the store's verdict, never guessed here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from taskyard.errors import StoreError
from taskyard.ports.sink import NO_SINKS, Sinks, TasksRescued
from taskyard.ports.store import Store

log = logging.getLogger("taskyard")


class Rescuer:
    """Looks when poked. It has no timer of its own, so that a node needs only one for all that is periodic."""

    def __init__(self, store: Store, rescued: Callable[[Sequence[str]], None], *, sinks: Sinks = NO_SINKS) -> None:
        self._store, self._rescued, self._sinks = store, rescued, sinks
        self._wake = asyncio.Event()
        self._is_away = False
        self._former: dict[str, tuple[Callable[[str], bool], Callable[[str], None]]] = {}

    def poke(self) -> None:
        self._wake.set()

    def bury(self, incarnation: str, is_over: Callable[[str], bool], buried: Callable[[str], None]) -> None:
        """This node has lost its lease and goes on under another incarnation. What is left of that one is taken back
        when `is_over` says that nothing of it runs or is still to be written here; `buried` is told."""
        self._former[incarnation] = is_over, buried

    async def run(self) -> None:
        """Look whenever poked, until cancelled. A store that is away is tried again at the next poke."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self.step()
                self._is_away = False
            except StoreError as error:
                if not self._is_away:
                    log.warning("cannot look for dead nodes: %s", error)
                self._is_away = True

    async def step(self) -> None:
        stuck: StoreError | None = None
        for incarnation in await self._store.dead_nodes():
            # Several nodes may see the same death: the store lets one of them have the tasks, the others get none.
            try:
                uuids = await self._rescue(incarnation)
            except StoreError as error:
                stuck = error  # one that cannot be taken back now must not keep the others waiting
                continue
            log.warning("node %s died; took back %d of its tasks", incarnation[:8], len(uuids))
        for incarnation, (is_over, buried) in list(self._former.items()):
            if is_over(incarnation):
                if uuids := await self._rescue(incarnation):
                    log.warning("took back %d tasks that this node had as %s", len(uuids), incarnation[:8])
                del self._former[incarnation]
                buried(incarnation)
        if stuck is not None:
            raise stuck

    async def _rescue(self, incarnation: str) -> list[str]:
        try:
            uuids = await self._store.rescue(incarnation)
        except Exception:
            # It may have been carried out all the same, and then nobody is told: the node is not dead any more, and who
            # has written something gets no hint of it.
            self._rescued(())
            raise
        self._rescued(uuids)
        self._sinks.tell(TasksRescued(incarnation, uuids))
        return uuids
