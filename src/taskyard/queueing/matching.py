"""The same command for all tasks that match a filter, a few hundred at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from taskyard.errors import ChangedMeanwhile, CommandRefused, DependencyLost, TaskyardError, describe_refusal
from taskyard.model.audit import AuditEntry, bulk_entry
from taskyard.model.command import (
    FITS,
    Cancel,
    Command,
    Hold,
    Release,
    Reschedule,
    Retry,
    SetPriority,
    Skip,
    StartNow,
    refusal_code,
)
from taskyard.model.dependency import DEPENDENCY_FAILED
from taskyard.model.given import check_by, check_priority, check_reason, check_time
from taskyard.model.kinds import checked_verbs
from taskyard.model.order import Priority
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.clock import Clock
from taskyard.ports.paging import id_pages, task_pages
from taskyard.ports.store import Applied
from taskyard.queueing.audit import finish_audit

T = TypeVar("T")

CHUNK = 500
"""Tasks a transaction changes: some ten milliseconds, in which nobody else writes."""

PATIENCE = 2
"""How many times as long as a chunk took, reading included, others have the store to themselves before the next: while
all that match are changed, the others keep two thirds of what they had at least."""


class BulkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of all that match: how many were found, how many of them were changed, how many changed meanwhile so
    that they are not meant any more, and how many the command does not fit, by code; `reasons` has a sentence for each
    code. `quarantined` were left out from the start: they took their workers down, and would again."""

    matched: int = 0
    moved: int = 0
    changed_meanwhile: int = 0
    unfit: dict[str, int] = {}
    reasons: dict[str, str] = {}
    quarantined: int = 0

    @property
    def fitting(self) -> int:
        """How many of those that were found the command fits: after a dry run, what it would change."""
        return self.matched - sum(self.unfit.values())

    @property
    def refused(self) -> int:
        return self.changed_meanwhile + sum(self.unfit.values())


class RerunReport(BulkReport, frozen=True, kw_only=True):
    """The same where new tasks were made of those that match: `made` are their ids, oldest first. `run_again` were left
    out: new ones were made of them before, or by somebody else at the same time."""

    run_again: int = 0
    made: tuple[str, ...] = ()


class Tally:
    """A report that grows."""

    def __init__(self) -> None:
        self.matched = self.moved = self.changed_meanwhile = self.quarantined = 0
        self.unfit: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self.first_refused: TaskyardError | None = None

    def refuse(self, refused: TaskyardError) -> None:
        self.first_refused = self.first_refused or refused
        if isinstance(refused, CommandRefused) and not isinstance(refused, ChangedMeanwhile):
            self.set_unfit(refused.code, describe_refusal(refused.code))
        else:
            self.changed_meanwhile += 1  # it may even be forgotten by now

    def set_unfit(self, code: str, reason: str, count: int = 1) -> None:
        self.unfit[code] += count
        self.reasons.setdefault(code, reason)

    def set_aside(self, code: str, count: int) -> None:
        """Found, but not to be asked."""
        if count:
            self.matched += count
            self.set_unfit(code, describe_refusal(code), count)

    def report(self) -> BulkReport:
        return BulkReport(
            matched=self.matched,
            moved=self.moved,
            changed_meanwhile=self.changed_meanwhile,
            unfit=dict(self.unfit),
            reasons=dict(self.reasons),
            quarantined=self.quarantined,
        )


class Bulk(Protocol):
    """What it takes to change many."""

    @property
    def clock(self) -> Clock: ...

    async def apply(
        self,
        uuids: Sequence[str],
        command: Command,
        *,
        by: str = ...,
        where: TaskFilter = ...,
        audit: AuditEntry | None = ...,
    ) -> list[Applied]: ...

    async def put_audit(self, entry: AuditEntry) -> None: ...

    async def list_ids(self, where: TaskFilter, *, before_id: int | None, limit: int) -> list[tuple[int, str]]: ...

    async def list_tasks(self, where: TaskFilter, *, before_id: int | None, limit: int) -> list[TaskRecord]: ...


class Pace:
    """Of something that takes many steps: before each but the first, others have their turn."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_mono: float | None = None

    async def step(self) -> None:
        """Whatever happens until the next call is one step."""
        now = self._clock.monotonic()
        if self._began_mono is not None:
            await self._clock.wait(asyncio.Event(), now + PATIENCE * (now - self._began_mono))
        self._began_mono = self._clock.monotonic()


async def list_chunks(bulk: Bulk, where: TaskFilter) -> AsyncIterator[list[str]]:
    """The ids of those that match, newest first; whoever comes later is not among them. To read a chunk, and whatever
    is done with it before the next is asked for, is one step, for which is given way."""
    if where.states == ():
        return
    pace = Pace(bulk.clock)

    async def read(where: TaskFilter, *, before_id: int | None, limit: int) -> list[tuple[int, str]]:
        await pace.step()
        return await bulk.list_ids(where, before_id=before_id, limit=limit)

    async for page in id_pages(read, where, size=CHUNK):
        yield [uuid for _, uuid in page]


async def in_chunks(bulk: Bulk, uuids: Sequence[str], *, size: int = CHUNK) -> AsyncIterator[Sequence[str]]:
    """The same for ids that are known."""
    pace = Pace(bulk.clock)
    for start in range(0, len(uuids), size):
        await pace.step()
        yield uuids[start : start + size]


async def see_through(doing: Coroutine[Any, Any, T], count: Callable[[T], None]) -> None:
    """What was sent to the store happens, though we are cancelled meanwhile: it is waited for, and counted."""
    sent = asyncio.ensure_future(doing)
    try:
        await asyncio.shield(sent)
    except asyncio.CancelledError:
        count(await sent)
        raise
    count(sent.result())


@checked_verbs
class Matching:
    """All tasks that match and that the command fits, newest first, save where they go to the tail. Each chunk is a
    transaction of its own, between which others have their turn; whoever comes later is not among them. A task that
    changes before its turn comes, so that it is not meant any more, is left alone and counted.

    Where no states are named, those are meant that the command fits. With `dry_run` they are only counted: by their
    states; that another task stands for the same work, or that a dependency is lost, shows when they are asked."""

    def __init__(self, where: TaskFilter, bulk: Bulk, *, by: str = "") -> None:
        self.where = where
        self._bulk, self._by = bulk, check_by(by)
        self._tally = Tally()
        # Who was sent again, where others are to be found that failed because of them.
        self._sent: set[str] | None = None
        self._audit: AuditEntry | None = None

    @property
    def report(self) -> BulkReport:
        """What the last command has done so far: all of it, or as much as was done before it was interrupted."""
        return self._tally.report()

    @property
    def first_refused(self) -> TaskyardError | None:
        """Why the first was refused to which the last command was not done, if there is one."""
        return self._tally.first_refused

    async def count(self) -> int:
        return await self._count(self.where)

    async def cancel(self, *, reason: str = "", force: bool = False, dry_run: bool = False) -> BulkReport:
        return await self.apply(Cancel(check_reason(reason), force), dry_run=dry_run)

    async def retry(
        self, *, to_head: bool = True, include_quarantined: bool = False, dry_run: bool = False
    ) -> BulkReport:
        """Send them again, the oldest first, before the others that wait or behind them. What failed because one of
        them did goes with them: a filter that names an error, or quarantine, need not match it in that. Those in
        quarantine only if the filter names them, or `include_quarantined`."""
        return await self._run(Retry(to_head), dry_run=dry_run, include_quarantined=include_quarantined)

    async def skip(self, *, reason: str = "", dry_run: bool = False) -> BulkReport:
        return await self.apply(Skip(check_reason(reason)), dry_run=dry_run)

    async def hold(self, *, reason: str = "", dry_run: bool = False) -> BulkReport:
        return await self.apply(Hold(check_reason(reason)), dry_run=dry_run)

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
        return await self._run(command, dry_run=dry_run)

    async def _run(self, command: Command, *, dry_run: bool, include_quarantined: bool = False) -> BulkReport:
        tally = self._tally = Tally()
        self._audit = None if dry_run else bulk_entry(self._by, command, self.where, now=self._bulk.clock.now())
        named, fits = self.where.states, FITS[type(command)]
        for state in named or ():
            if state not in fits:
                tally.set_aside(refusal_code(command, state), await self._count(replace(self.where, states=(state,))))
        meant = replace(self.where, states=tuple(state for state in named or TaskState if state in fits))
        if isinstance(command, Retry) and meant.quarantined is None and not include_quarantined:
            tally.quarantined = await self._count(replace(meant, quarantined=True))
            meant = replace(meant, quarantined=False)
        named_by_cause = isinstance(command, Retry) and (meant.error is not None or meant.quarantined)
        self._sent = set() if named_by_cause else None
        await self._do(self._in_order(meant, command), command, meant, dry_run)
        if self._sent:
            theirs = replace(meant, states=(TaskState.FAILED,), error=DEPENDENCY_FAILED, quarantined=None)
            found = await self._find_failed_with(self._sent, theirs, oldest_first=_is_to_tail(command))
            await self._do(in_chunks(self._bulk, found), command, theirs, dry_run)
        # Of a command that is interrupted, the entry has the counts of its last chunk and is never finished.
        await finish_audit(self._bulk.put_audit, self._audit, matched=tally.matched, changed=tally.moved)
        return tally.report()

    async def _find_failed_with(self, sent: set[str], theirs: TaskFilter, *, oldest_first: bool) -> list[str]:
        """Those that failed because one of these did, then those that did because of those, and so on."""
        failed = [
            (record.uuid, record.error.details.get("task"))
            async for page in task_pages(self._bulk.list_tasks, theirs)
            for record in page
            if record.error is not None and record.uuid not in sent
        ]
        because_of: dict[object, list[str]] = {}
        for uuid, cause in failed[::-1] if oldest_first else failed:
            because_of.setdefault(cause, []).append(uuid)
        found = [uuid for cause, uuids in because_of.items() if cause in sent for uuid in uuids]
        for uuid in found:  # it grows meanwhile
            found += because_of.get(uuid, ())
        return found

    async def _do(
        self, chunks: AsyncIterator[Sequence[str]], command: Command, meant: TaskFilter, dry_run: bool
    ) -> None:
        tally, failed = self._tally, list[Applied]()
        async for uuids in chunks:
            tally.matched += len(uuids)
            if not dry_run:
                failed += await self._change(uuids, command, meant)
            elif self._sent is not None:
                self._sent.update(uuids)
        # Who failed with another is refused until that is sent again, which may have been later in the same round.
        moved = 0
        while failed and tally.moved > moved:
            moved, again, failed = tally.moved, [one.uuid for one in failed], []
            async for uuids in in_chunks(self._bulk, again):
                failed += await self._change(uuids, command, meant)
        for one in failed:
            assert one.refused is not None
            tally.refuse(one.refused)

    async def _change(self, uuids: Sequence[str], command: Command, meant: TaskFilter) -> list[Applied]:
        """Those that may be sent again once another is."""
        failed: list[Applied] = []

        def count(answers: Sequence[Applied]) -> None:
            for one in answers:
                if one.refused is None:
                    self._tally.moved += 1
                    if self._sent is not None:
                        self._sent.add(one.uuid)
                elif isinstance(one.refused, DependencyLost) and one.refused.ended == TaskState.FAILED:
                    failed.append(one)
                else:
                    self._tally.refuse(one.refused)

        await see_through(self._bulk.apply(uuids, command, by=self._by, where=meant, audit=self._audit), count)
        return failed

    async def _count(self, where: TaskFilter) -> int:
        return sum([len(uuids) async for uuids in list_chunks(self._bulk, where)])

    async def _in_order(self, where: TaskFilter, command: Command) -> AsyncIterator[Sequence[str]]:
        """Who goes to the tail one after the other has to go in order: all of them are found before the first goes."""
        if not _is_to_tail(command):
            async for uuids in list_chunks(self._bulk, where):
                yield uuids
            return
        found = [uuid async for uuids in list_chunks(self._bulk, where) for uuid in uuids]
        async for some in in_chunks(self._bulk, found[::-1]):
            yield some


def _is_to_tail(command: Command) -> bool:
    return command == Retry(to_head=False)
