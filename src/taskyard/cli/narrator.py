"""What a worker says of its own runs when it is verbose: started, completed, failed, with how long each took."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from taskyard.cli.logs import STORY
from taskyard.cli.story import Happening, Teller, look_back, subject
from taskyard.cli.target import is_shared
from taskyard.errors import NotOpen
from taskyard.model.event import EventKind
from taskyard.ports.store import Store
from taskyard.yard import Yard

log = logging.getLogger(STORY)

LOOK_BACK = 200

_LOUD = frozenset({EventKind.FAILED, EventKind.RETRYING, EventKind.INTERRUPTED})


@contextlib.asynccontextmanager
async def narrated(yard: Yard) -> AsyncIterator[None]:
    """Inside, the runs of this yard's node are logged. What ends while the yard stops is told as well, so the story is
    read through a client of its own where the store can have one."""
    node = yard.engine.incarnation
    if not is_shared(yard):
        async with _following(yard, node):
            yield
        return
    async with Yard(yard.where).client() as reader, _following(reader, node):
        yield


@contextlib.asynccontextmanager
async def _following(reader: Yard, node: str) -> AsyncIterator[None]:
    store = reader.store
    teller = Teller(store, node=node)
    # From a little earlier on: this node may have started its first tasks already, and no other has its incarnation.
    place = [await look_back(store, LOOK_BACK)]
    task = asyncio.create_task(_follow(reader, store, teller, place))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(NotOpen):
            await _tell_new(store, teller, place)


async def _follow(reader: Yard, store: Store, teller: Teller, place: list[int]) -> None:
    with reader.engine.changes() as changes:
        while True:
            changes.clear()
            if not await _tell_new(store, teller, place):
                await changes.wait()


async def _tell_new(store: Store, teller: Teller, place: list[int]) -> bool:
    page = await store.events(after=place[0])
    async for happening in teller.tell(page.events):
        _log(happening)
    place[0] = page.last
    return bool(page.events)


def _log(happening: Happening) -> None:
    level = logging.WARNING if happening.event.kind in _LOUD else logging.INFO
    detail = happening.detail()
    log.log(level, "%-9s %s%s", happening.verb, subject(happening.event), f"  {detail}" if detail else "")
