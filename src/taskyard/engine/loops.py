"""Loops that are kept going: one that fails is logged and started again, sooner or later. None dies silently."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from taskyard.errors import StoreError, StoreReplaced
from taskyard.ports.clock import Clock
from taskyard.ports.sink import LoopRestarted, Sinks

log = logging.getLogger("taskyard")

RESTART_FIRST_S, RESTART_CAP_S = 0.05, 5.0
"""Before a loop that has failed is started again; it doubles with each failure, until one start has lasted."""


class Loops:
    """`restarted` is told before a loop starts again, so that whatever it was in the middle of is looked at again."""

    def __init__(self, clock: Clock, restarted: Callable[[], None], *, sinks: Sinks) -> None:
        self._clock, self._restarted, self._sinks = clock, restarted, sinks
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Run the loop until `end`."""
        restarting = self._restarting(name, loop)
        self._tasks[name] = asyncio.get_running_loop().create_task(restarting, name=f"taskyard-{name}")

    def get(self, name: str) -> asyncio.Task[None]:
        """What keeps this loop going: it is done when somebody has cancelled it."""
        return self._tasks[name]

    async def end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _restarting(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        failures = 0
        while True:
            began, failure = self._clock.monotonic(), None
            try:
                await loop()
            except Exception as error:
                failure = error
                if self._clock.monotonic() - began > 2 * RESTART_CAP_S:
                    failures = 0
                _log_failure(name, error, is_first=failures == 0)
            self._sinks.tell(LoopRestarted(name, failure))
            pause = min(RESTART_FIRST_S * 2 ** min(failures, 10), RESTART_CAP_S)
            failures += 1
            await self._clock.wait(asyncio.Event(), self._clock.monotonic() + pause)
            self._restarted()


def _log_failure(name: str, error: Exception, *, is_first: bool) -> None:
    """A store that is away is no news the second time; a bug is, and comes with its stack. The store itself
    logs that its file was replaced."""
    if isinstance(error, StoreReplaced):
        return
    if not isinstance(error, StoreError):
        log.error("the %s loop failed and is started again", name, exc_info=error)
    elif is_first:
        log.warning("the %s loop waits for the store: %s", name, error)
