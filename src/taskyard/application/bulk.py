"""Commands on all tasks that match, with a report that grows while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from taskyard.application.calls import YardContext
from taskyard.application.task_requests import BulkReport, RerunReport
from taskyard.errors import OutcomeUnknown
from taskyard.model.command import Command
from taskyard.model.task_filter import TaskFilter
from taskyard.queueing import matching

REPORT_EVERY_S = 0.5
"""Seconds between two reports: often enough to be read."""

R = TypeVar("R", bound=BulkReport)


def follow_matching(
    context: YardContext, where: TaskFilter, command: Command, *, dry_run: bool
) -> AsyncGenerator[BulkReport, None]:
    """Apply the command to all that match."""
    selected = context.yard.matching(where, by=context.actor)

    def report() -> BulkReport:
        return BulkReport(**msgspec.structs.asdict(selected.report), dry_run=dry_run)

    return _follow(lambda: selected.apply(command, dry_run=dry_run), report)


def follow_rerun(
    context: YardContext, where: TaskFilter, changes: Mapping[str, Any] | None, *, repeat: bool, dry_run: bool
) -> AsyncGenerator[RerunReport, None]:
    """Make a new task of each that matches and has finished."""
    latest = matching.RerunReport()

    def note(report: matching.RerunReport) -> None:
        nonlocal latest
        latest = report

    async def work() -> None:
        note(
            await context.yard.run_all_again(
                where, changes=changes, repeat=repeat, dry_run=dry_run, so_far=note, by=context.actor
            )
        )

    def report() -> RerunReport:
        return RerunReport(**msgspec.structs.asdict(latest), dry_run=dry_run)

    return _follow(work, report)


async def _follow(work: Callable[[], Coroutine[Any, Any, object]], report: Callable[[], R]) -> AsyncGenerator[R, None]:
    """Run `work`, and yield its report whenever that has changed, and at the end. If the work fails or the caller is
    canceled, the last report is marked as interrupted, and the error is raised after it."""
    task, told = asyncio.create_task(work()), None
    try:
        while not task.done():
            await asyncio.wait([task], timeout=REPORT_EVERY_S)
            if not task.done() and (now := report()) != told:
                told = now
                yield now
        task.result()
    except GeneratorExit:
        raise
    except BaseException as interrupted:
        # The chunk that is on its way is seen through and counted before the report is made.
        await _stop(task)
        uncertain = isinstance(interrupted, OutcomeUnknown)
        yield msgspec.structs.replace(report(), interrupted=True, is_uncertain=uncertain)
        raise
    else:
        yield report()
    finally:
        await _stop(task)


async def _stop(task: asyncio.Task[object]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
