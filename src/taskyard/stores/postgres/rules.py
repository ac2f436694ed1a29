"""The rules of queues on one PostgreSQL database, and how they come to hold for what waits there already.

That may be a million tasks, which nobody must be held up by: they are brought under another order, or another limit of
a key, some at a time. How far it has come stands in the database, and whoever is there goes on with it.
"""

from __future__ import annotations

import logging

import msgspec

from taskyard.errors import StoreError
from taskyard.model.queue import QueueSettings
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.postgres.database import Database

log = logging.getLogger("taskyard")

SET = "CALL taskyard.configure_queue_1($1, $2, $3, $4, $5, $6, $7, $8, NULL, NULL)"
STEP = "CALL taskyard.rollout_step_1($1, NULL)"
UNFINISHED = (
    "SELECT name FROM taskyard.queue WHERE rollout_task_id IS NOT NULL OR rollout_key IS NOT NULL ORDER BY name"
)

STEPS_WORTH_A_WORD = 10
"""With less it is done in a second, and nobody need hear of it."""


class Rules:
    def __init__(self, db: Database) -> None:
        self._db = db

    async def set(self, settings: QueueSettings) -> None:
        """They hold for all tasks when this returns; or, if others were set meanwhile, those do."""
        if await self.declare(settings):
            await self._finish(settings.name)

    async def declare(self, settings: QueueSettings) -> bool:
        """From here on they are the rules of the queue. Whether it takes steps until they hold for all tasks."""
        row = await self._db.write(
            SET,
            settings.name,
            settings.concurrency,
            settings.per_key,
            settings.auto_recover,
            msgspec.json.encode(settings).decode(),
            settings.order,
            settings.starve_after,
            settings.patience.wait,
        )
        if row["changed"]:
            self._db.hints.tell()
        more: bool = row["more"]
        return more

    async def go_on(self) -> bool:
        """A step on with each that is under way, whoever has begun it: he may have died. Whether any is left to which a
        step could be made."""
        more = False
        for name in await self._db.read(_list_unfinished):
            if not self._db.is_open:
                return False
            try:
                if await self._step(name):
                    more = True
                else:
                    log.info("all that waits in queue %r goes by its rules now; another process had left it", name)
            except StoreError as error:
                log.debug("the new rules of queue %r have not come on: %s", name, error)  # the next time will do
        return more

    async def _finish(self, queue: str) -> None:
        steps = 1
        while await self._step(queue):
            if not self._db.is_open:
                return  # others finish it
            steps += 1
            if steps == STEPS_WORTH_A_WORD:
                log.warning("queue %r has other rules now, and much waits in it: that takes a while", queue)
        if steps >= STEPS_WORTH_A_WORD:
            log.warning("all that waits in queue %r goes by its rules now", queue)

    async def _step(self, queue: str) -> bool:
        """Whether there is another to be made."""
        more: bool = (await self._db.write(STEP, queue))["more"]
        self._db.hints.tell()
        return more


async def _list_unfinished(conn: Connection) -> list[str]:
    return [name for (name,) in await conn.fetch(UNFINISHED)]
