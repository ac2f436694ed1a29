"""What a worker says of its own runs when it is verbose: started, completed, failed, with how long each took.

It only tells. Whatever goes wrong with that, the worker does not notice: a story that cannot be read waits for the
store, and one that cannot be told ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from taskyard.cli.logs import STORY
from taskyard.cli.story import Happening, Teller, look_back, subject
from taskyard.cli.target import is_shared
from taskyard.errors import NotOpen, StoreError
from taskyard.model.event import EventKind
from taskyard.ports.store import Store
from taskyard.yard import Yard

log = logging.getLogger(STORY)

LOOK_BACK = 200

AGAIN_S = 1.0
"""Between two tries to read on, while the store does not answer."""

LAST_S = 3.0
"""How long the end of the worker waits for the end of the story."""

_LOUD = frozenset({EventKind.FAILED, EventKind.RETRYING, EventKind.INTERRUPTED})


@contextlib.asynccontextmanager
async def narrated(yard: Yard) -> AsyncIterator[None]:
    """Inside, the runs of this yard's node are logged. What ends while the yard stops is told as well, so the story is
    read through a client of its own where the store can have one."""
    narrator = Narrator(yard)
    telling = asyncio.create_task(narrator.run())
    try:
        yield
    finally:
        narrator.finish()
        await asyncio.wait({telling}, timeout=LAST_S)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


class Narrator:
    def __init__(self, yard: Yard) -> None:
        self._yard, self._engine = yard, yard.engine
        self._nodes = {self._engine.incarnation}
        self._place: int | None = None
        self._is_last = False
        self._wake = asyncio.Event()

    def finish(self) -> None:
        """The yard has stopped: tell what is left, and no more."""
        self._is_last = True
        self._wake.set()

    async def run(self) -> None:
        is_told = False
        while True:
            try:
                async with self._reading() as reader:
                    await self._follow(reader)
                return
            except NotOpen:
                return
            except StoreError as error:
                if self._is_last:
                    return
                if not is_told:
                    log.warning("of what runs nothing is told before the store answers: %s", error)
                is_told = True
            except Exception as error:
                log.error("what runs can no longer be told; it goes on", exc_info=error)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self._wake.wait()

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[Yard]:
        if not is_shared(self._yard):
            yield self._yard
            return
        async with Yard(self._yard.where).client() as reader:
            yield reader

    async def _follow(self, reader: Yard) -> None:
        """Until all is told that happened before `finish`."""
        store = reader.store
        teller = Teller(store, nodes=self._nodes)
        if self._place is None:
            # A little earlier: this node may have started its first tasks already, and no other has its incarnation.
            self._place = await look_back(store, LOOK_BACK)
        with reader.engine.changes() as self._wake:
            while True:
                self._wake.clear()
                is_last = self._is_last
                self._nodes.add(self._engine.incarnation)  # another, when the lease was lost
                self._place, is_news = await _tell_new(store, teller, self._place)
                if not is_news and is_last:
                    return
                if not is_news:
                    await self._wake.wait()


async def _tell_new(store: Store, teller: Teller, place: int) -> tuple[int, bool]:
    """How far the story has come, and whether there was something to tell."""
    page = await store.events(after=place)
    async for happening in teller.tell(page.events):
        _log(happening)
    return page.last, bool(page.events)


def _log(happening: Happening) -> None:
    level = logging.WARNING if happening.event.kind in _LOUD else logging.INFO
    detail = happening.detail()
    log.log(level, "%-9s %s%s", happening.verb, subject(happening.event), f"  {detail}" if detail else "")
