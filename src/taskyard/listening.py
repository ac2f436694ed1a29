"""Following what happens on a store, from any process: all of it, or what a listener asks for."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from typing import Any
from uuid import UUID

from taskyard.errors import EventsMissed, StoreBusy, StoreUnavailable, UnknownGroup
from taskyard.model.event import Event, EventFilter, EventKind, check_kinds
from taskyard.model.given import AnyTask, check_count, check_name, check_uuid
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.paging import id_pages
from taskyard.ports.store import Store

log = logging.getLogger("taskyard")

AWAY = (StoreUnavailable, StoreBusy)
"""What passes by itself, sooner or later."""

AGAIN_S = 1.0
"""Between two tries to read on."""


async def follow(
    store: Store, changes: asyncio.Event, is_open: Callable[[], bool], *, after: int, where: EventFilter
) -> AsyncGenerator[Event, None]:
    """What `where` is about, after event number `after`, until the yard is closed. A store that is away is waited for:
    the events are read on where it was lost."""
    seen, is_away = after, False
    while is_open():
        changes.clear()
        try:
            page = await store.events(after=seen)
        except AWAY as error:
            if not is_away:
                log.warning("events are read on when the store answers: %s", error)
            is_away = True
            await pause(changes)
            continue
        is_away = False
        if page.missed:
            raise EventsMissed(seen, page.last)
        # Past what nobody asked for as well: it need not be kept for this listener.
        seen = page.last
        for event in page.events:
            if where.matches(event):
                yield event
        if not page.events:
            await changes.wait()


async def pause(changes: asyncio.Event) -> None:
    """Before the store is asked again that was away: for a while, or until something has happened."""
    with suppress(TimeoutError):
        async with asyncio.timeout(AGAIN_S):
            await changes.wait()


async def make_filter(
    store: Store,
    *,
    kinds: Iterable[EventKind | str] | EventKind | str | None,
    queue: str | None,
    consumer: str | None,
    task: AnyTask | None,
    group: str | UUID | None,
) -> EventFilter:
    """What a listener asks for, checked. The tasks of a group are looked up: they are the same for as long as it is
    there."""
    uuids = None if task is None else frozenset({check_uuid(task)})
    if group is not None:
        members = await _members(store, check_uuid(group))
        uuids = members if uuids is None else uuids & members
    return EventFilter(
        kinds=None if kinds is None else check_kinds(kinds),
        queue=None if queue is None else check_name("queue", queue),
        consumer=None if consumer is None else check_name("consumer", consumer),
        uuids=uuids,
    )


def check_after(after: Any) -> int | None:
    if after is None:
        return None
    return check_count("after", after, least=0, most=sys.maxsize, hint=", or None for what comes from now on")


async def _members(store: Store, group: str) -> frozenset[str]:
    pages = id_pages(store.list_ids, TaskFilter(group=group))
    found = frozenset([uuid async for page in pages for _, uuid in page])
    if not found:
        raise UnknownGroup(group)
    return found
