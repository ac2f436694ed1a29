"""What has to be done now and then, beside the turns of this process: putting together what was counted, trimming
events, forgetting queues of which nothing is left, and finishing what others have left undone.
"""

from __future__ import annotations

import asyncio
import logging

from taskyard.errors import StoreError
from taskyard.ports.clock import Clock
from taskyard.stores.migrate import LOCKED_AT_MOST
from taskyard.stores.postgres.database import Database
from taskyard.stores.postgres.rules import Rules

log = logging.getLogger("taskyard")

RING = 10_000
"""Events kept for readers that fall behind."""

TIDY_AFTER = 2_000
"""Events that this process writes between two looks whether there are too many. A turn counts for ten at least: what it
has counted is to be put together as well, before claims from queues with a limit have much to add up."""

EVERY_S = 60.0
"""How long after the last time all the rest is seen to."""


class Upkeep:
    def __init__(self, db: Database, rules: Rules, clock: Clock) -> None:
        self._db, self._rules, self._clock = db, rules, clock
        self._written = 0
        self._next = clock.monotonic() + EVERY_S
        self._running: asyncio.Task[None] | None = None

    def after_turn(self, told: int) -> None:
        """A turn has written so many events."""
        self._written += max(told, 10)
        is_due = self._written >= TIDY_AFTER or self._clock.monotonic() >= self._next
        if is_due and self._running is None:
            self._written = 0
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._db.write("SELECT taskyard.tidy_1($1)", RING)
            if self._clock.monotonic() >= self._next:
                self._next = self._clock.monotonic() + EVERY_S
                while (await self._db.write("SELECT taskyard.forget_1()"))[0] >= LOCKED_AT_MOST:
                    pass  # there are more
                if await self._rules.go_on():
                    self._next = self._clock.monotonic()
        except StoreError as error:
            log.debug("the store was not tidied up: %s", error)  # the next time will do
        finally:
            self._running = None

    async def done(self) -> None:
        """Return when nothing is being done; it takes milliseconds."""
        if self._running is not None:
            await asyncio.wait([self._running])
