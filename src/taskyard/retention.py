"""Forgetting ended tasks when their time is over, so that a store does not grow for ever."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta

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
    """Prunes what ended more than `keep_s` seconds ago, and all but the latest `keep_ended`: once at the start, then
    every minute. None is no limit."""

    def __init__(self, store: Store, clock: Clock, *, keep_s: float | None, keep_ended: int | None = None) -> None:
        self._store, self._clock = store, clock
        self._keep_s, self._keep_ended = keep_s, keep_ended
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
        if self._keep_s is not None:
            await self._prune(self._clock.now() - timedelta(seconds=self._keep_s))
        # Not so many, but by the time of the last to keep: several nodes that do this at once forget no more than one.
        if self._keep_ended is not None and (cut := await self._store.find_end(self._keep_ended)) is not None:
            await self._prune(cut)

    async def _prune(self, before: datetime) -> None:
        while await self._store.prune(finished_before=before, limit=BATCH) == BATCH:
            await self._sleep(PAUSE_S)

    async def _sleep(self, seconds: float) -> None:
        await self._clock.wait(asyncio.Event(), self._clock.monotonic() + seconds)
