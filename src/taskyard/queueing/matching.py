"""The same command for all tasks that match a filter, a few hundred at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from taskyard.model.command import Cancel, Command, Hold, Release, Reschedule, Retry, SetPriority, Skip, StartNow
from taskyard.model.given import check_priority, check_text, check_time
from taskyard.model.order import Priority
from taskyard.ports.clock import Clock
from taskyard.ports.store import Applied, TaskFilter

CHUNK = 500
"""Tasks a transaction changes: some ten milliseconds, in which nobody else writes."""


class BulkReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks were found, how many of them were changed, and how many did not fit, or had changed meanwhile."""

    matched: int = 0
    moved: int = 0
    refused: int = 0


class Bulk(Protocol):
    """What it takes to change many."""

    @property
    def clock(self) -> Clock: ...

    async def apply(
        self, uuids: Sequence[str], command: Command, *, by: str = ..., where: TaskFilter = ...
    ) -> list[Applied]: ...

    async def list_ids(self, where: TaskFilter, *, before_id: int | None, limit: int) -> list[tuple[int, str]]: ...


class Matching:
    """All tasks that match, newest first, save where they go to the tail. Each chunk is a transaction of its own,
    between which others have their turn; whoever comes later is not among them. A task that changes before its turn
    comes, so that it is not meant any more, is left alone and counted as refused. With `dry_run` they are only
    counted."""

    def __init__(self, where: TaskFilter, bulk: Bulk, *, by: str = "") -> None:
        self.where = where
        self._bulk, self._by = bulk, by

    async def count(self) -> int:
        return (await self._each(None)).matched

    async def cancel(self, *, reason: str = "", force: bool = False, dry_run: bool = False) -> BulkReport:
        return await self.apply(Cancel(check_text("reason", reason), force), dry_run=dry_run)

    async def retry(self, *, to_head: bool = True, dry_run: bool = False) -> BulkReport:
        """Send them again, the oldest first, before the others that wait or behind them."""
        return await self.apply(Retry(to_head), dry_run=dry_run)

    async def skip(self, *, reason: str = "", dry_run: bool = False) -> BulkReport:
        return await self.apply(Skip(check_text("reason", reason)), dry_run=dry_run)

    async def hold(self, *, reason: str = "", dry_run: bool = False) -> BulkReport:
        return await self.apply(Hold(check_text("reason", reason)), dry_run=dry_run)

    async def release(self, *, dry_run: bool = False) -> BulkReport:
        return await self.apply(Release(), dry_run=dry_run)

    async def set_priority(self, priority: Priority | str, *, dry_run: bool = False) -> BulkReport:
        return await self.apply(SetPriority(check_priority(priority)), dry_run=dry_run)

    async def reschedule(self, at: datetime, *, dry_run: bool = False) -> BulkReport:
        return await self.apply(Reschedule(check_time("at", at)), dry_run=dry_run)

    async def start_now(self, *, urgent: bool = False, dry_run: bool = False) -> BulkReport:
        """To the head, the oldest first."""
        return await self.apply(StartNow(urgent), dry_run=dry_run)

    async def apply(self, command: Command, *, dry_run: bool = False) -> BulkReport:
        """Any of these, given as a value."""
        return await self._each(None if dry_run else command)

    async def _each(self, command: Command | None) -> BulkReport:
        matched = moved = 0
        async for uuids in self._oldest_first() if command == Retry(to_head=False) else self._chunks():
            matched += len(uuids)
            if command is not None:
                moved += await self._change(uuids, command)
        return BulkReport(matched=matched, moved=moved, refused=0 if command is None else matched - moved)

    async def _chunks(self) -> AsyncIterator[list[str]]:
        before_id: int | None = None
        while page := await self._bulk.list_ids(self.where, before_id=before_id, limit=CHUNK):
            yield [uuid for _, uuid in page]
            before_id = page[-1][0]
            if len(page) < CHUNK:
                break

    async def _oldest_first(self) -> AsyncIterator[list[str]]:
        """Who goes to the tail one after the other has to go in order: all of them are found before the first goes."""
        for uuids in reversed([uuids async for uuids in self._chunks()]):
            yield uuids[::-1]

    async def _change(self, uuids: list[str], command: Command) -> int:
        clock = self._bulk.clock
        began = clock.monotonic()
        applied = await self._bulk.apply(uuids, command, by=self._by, where=self.where)
        # As long as it took, others have the store to themselves: they keep half of what they had at least.
        now = clock.monotonic()
        await clock.wait(asyncio.Event(), now + (now - began))
        return sum(one.record is not None for one in applied)
