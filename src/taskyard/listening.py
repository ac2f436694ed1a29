"""What a subscriber to events asks for, checked."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from uuid import UUID

from taskyard.errors import StoreBusy, StoreUnavailable, UnknownGroup
from taskyard.model.event import EventFilter, EventKind, check_kinds
from taskyard.model.given import AnyTask, check_count, check_name, check_uuid
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.paging import id_pages
from taskyard.ports.store import Store

AWAY = (StoreUnavailable, StoreBusy)
"""Errors of a store that may answer later."""

AGAIN_S = 1.0
"""Between two tries to read on."""


async def pause(changes: asyncio.Event) -> None:
    """Before a store that was away is asked again: for a while, or until something has happened."""
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
