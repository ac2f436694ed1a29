"""A queue in the order in which it will start, asked of a store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from taskyard.model.forecast import forecast
from taskyard.model.queue_order import QueueOrderView, QueueSnapshot


class Snapshots(Protocol):
    """A store, or an engine on one."""

    async def queue_snapshot(self, queue: str, *, limit: int) -> QueueSnapshot: ...

    async def median_run_s(self, consumers: Sequence[str]) -> dict[str, float]: ...


async def find_order(store: Snapshots, queue: str, *, limit: int, concurrency: int | None = None) -> QueueOrderView:
    snapshot = await store.queue_snapshot(queue, limit=limit)
    medians = await store.median_run_s(sorted(snapshot.all_consumers))
    # A thousand places take some tenths of a second, in which other tasks of the event loop must go on.
    return await asyncio.to_thread(forecast, snapshot, medians, limit=limit, concurrency=concurrency)
