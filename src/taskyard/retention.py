"""Forgetting ended tasks when their time is over, so that a store does not grow for ever."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

from taskyard.errors import StoreError
from taskyard.ports.clock import Clock
from taskyard.ports.store import Store

log = logging.getLogger("taskyard")

KEEP_S = 7 * 86_400.0
"""A week: whoever looks on Monday still sees what failed on the weekend."""

EVERY_S = 60.0

BATCH = 500

PAUSE_S = 0.05
"""Between two batches, so that tasks get their turns while a large backlog is forgotten."""


class Retention:
    """Prunes what ended more than `keep_s` seconds ago: once at the start, then every minute."""

    def __init__(self, store: Store, clock: Clock, keep_s: float) -> None:
        self._store, self._clock, self._keep = store, clock, timedelta(seconds=keep_s)
        self._is_away = False

    async def run(self) -> None:
        """Until cancelled. A store that is away, or a batch that fails, is tried again the next minute."""
        while True:
            try:
                await self.step()
                self._is_away = False
            except StoreError as error:
                if not self._is_away:
                    log.warning("ended tasks are not pruned for now: %s", error)
                self._is_away = True
            except Exception:
                log.exception("ended tasks were not pruned")
            await self._sleep(EVERY_S)

    async def step(self) -> None:
        before = self._clock.now() - self._keep
        while await self._store.prune(finished_before=before, limit=BATCH) == BATCH:
            await self._sleep(PAUSE_S)

    async def _sleep(self, seconds: float) -> None:
        await self._clock.wait(asyncio.Event(), self._clock.monotonic() + seconds)
