"""What has to be done now and then, beside the turns of this process: putting together what was counted and trimming
events, which comes with what is written; forgetting queues of which nothing is left, and going on with rules that
others have left on their way, which comes with time.
"""

from __future__ import annotations

import asyncio
import logging

from taskyard.errors import StoreError
from taskyard.ports.clock import Clock
from taskyard.stores.postgres.database import Database
from taskyard.stores.postgres.rules import Rules

log = logging.getLogger("taskyard")

RING = 10_000
"""Events kept for readers that fall behind."""

TIDY_AFTER = 2_000
"""Events that this process writes between two looks whether there are too many. A turn counts for ten at least: what it
has counted is to be put together as well, before claims from queues with a limit have much to add up."""

CLEAN_EVERY_S = 60.0


class Upkeep:
    def __init__(self, db: Database, rules: Rules, clock: Clock) -> None:
        self._db, self._rules, self._clock = db, rules, clock
        self._written = 0
        self._clean_at = clock.monotonic() + CLEAN_EVERY_S
        self._tidying: asyncio.Task[None] | None = None
        self._cleaning: asyncio.Task[None] | None = None

    def after_turn(self, told: int) -> None:
        """A turn has written so many events."""
        self._written += max(told, 10)
        loop = asyncio.get_running_loop()
        if self._written >= TIDY_AFTER and self._tidying is None:
            self._written = 0
            self._tidying = loop.create_task(self._tidy())
        if self._clock.monotonic() >= self._clean_at and self._cleaning is None:
            self._clean_at = self._clock.monotonic() + CLEAN_EVERY_S
            self._cleaning = loop.create_task(self._clean())

    async def _tidy(self) -> None:
        try:
            await self._db.write("SELECT taskyard.compact_1($1)", RING)
        except StoreError as error:
            log.debug("events were not trimmed: %s", error)  # the next time will do
        finally:
            self._tidying = None

    async def _clean(self) -> None:
        try:
            while self._db.is_open and await self._rules.go_on():
                pass
            for routine in ("drop_empty_lanes_1", "drop_spent_lanes_1"):
                name = ""
                while self._db.is_open and name is not None:
                    name = (await self._db.write(f"SELECT taskyard.{routine}($1)", name))[0]
        except StoreError as error:
            log.debug("empty queues were not forgotten, or rules are still on their way: %s", error)
        finally:
            self._cleaning = None

    async def tidied(self) -> None:
        """Return when nothing is being tidied up; it takes milliseconds."""
        if self._tidying is not None:
            await asyncio.wait([self._tidying])

    async def finish(self) -> None:
        """Return when nothing is being done any more. Of what takes long, the rest is left to others."""
        running = [task for task in (self._tidying, self._cleaning) if task is not None]
        if running:
            await asyncio.wait(running)
