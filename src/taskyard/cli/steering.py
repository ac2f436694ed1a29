"""Commands on tasks: named ones, with one answer each, or all that match a filter, with counts.

The confirmation question is asked while the store is closed, because the answer may take long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime

import msgspec
from rich.text import Text

from taskyard.application.command_requests import (
    Cancel,
    MoveAfter,
    MoveBefore,
    Release,
    Reschedule,
    Retry,
    SetPriority,
    StartNow,
    TaskCommand,
    verb_of,
)
from taskyard.application.interface import Application
from taskyard.application.queue_order_documents import TaskPlace
from taskyard.application.task_documents import TaskDocument
from taskyard.application.task_requests import (
    BulkReport,
    CommandReceipt,
    RerunReport,
)
from taskyard.cli.asking import confirm
from taskyard.cli.console import make_console, say_json
from taskyard.cli.errors import DONE, REFUSED, UsageError
from taskyard.cli.formatting import due_text, state_text
from taskyard.cli.selecting import Selection
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import clean, counted
from taskyard.model.state import WAITING_FOR_TIME, TaskState
from taskyard.model.task_filter import TaskFilter


def apply_command(chosen: Selection, command: TaskCommand) -> int:
    """Carry out the command; 1 if anything was refused."""
    if chosen.where is None:
        return asyncio.run(_apply_named(chosen.target, chosen.ids, command, as_json=chosen.as_json))
    return _apply_matching(chosen, msgspec.structs.replace(chosen.where, states=chosen.states), command)


# --- named tasks ------------------------------------------------------------------------------------------------------


async def _apply_named(target: Target, refs: Sequence[str], command: TaskCommand, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        receipts = await application.tasks.apply(refs, command)
    return print_receipts(receipts, command, as_json=as_json)


async def move(target: Target, refs: Sequence[str], *, before: str | None, after: str | None, as_json: bool) -> int:
    """Put tasks beside another, in the order they are named."""
    other = before if before is not None else after
    if other is None or (before is not None and after is not None):
        raise UsageError("pass exactly one of --before ID and --after ID")
    async with opened_application(target) as application:
        (uuid,) = await application.tasks.resolve([other])
        command = MoveBefore(other=uuid) if before is not None else MoveAfter(other=uuid)
        receipts = await application.tasks.apply(refs, command)
    return print_receipts(receipts, command, as_json=as_json)


def print_receipts(receipts: Sequence[CommandReceipt], command: TaskCommand, *, as_json: bool) -> int:
    if as_json:
        say_json(receipts)
    else:
        console, now = make_console(), datetime.now(UTC)
        for receipt in receipts:
            console.print(_line(receipt, command, now), soft_wrap=True)
    return DONE if all(receipt.ok for receipt in receipts) else REFUSED


def refused_line(receipt: CommandReceipt) -> Text:
    message = "" if receipt.error is None else receipt.error.message
    return Text.assemble(("✘ refused  ", "bold red"), clean(message))


def _line(receipt: CommandReceipt, command: TaskCommand, now: datetime) -> Text:
    task = receipt.task
    if task is None:
        return refused_line(receipt)
    line = Text.assemble(clean(task.uuid), "  ", (clean(task.consumer), "bold"), "  ", state_text(task.state))
    words = _change_text(task, command, now)
    if receipt.why is not None:
        words = f"{clean(receipt.why.text)}; it is canceled then"
    elif receipt.place is not None:
        words = _place_text(receipt.place, words if isinstance(command, MoveBefore | MoveAfter) else "")
    return line.append(f"; {words}", "dim") if words else line


def _place_text(place: TaskPlace, words: str) -> str:
    """`place 1 of 14 in queue 'cpu', high priority`."""
    text = f"place {place.place:,} of {place.waiting:,} in queue {clean(place.queue)!r}, {place.priority} priority"
    return f"{words}; {text}" if words else text


def _change_text(task: TaskDocument, command: TaskCommand, now: datetime) -> str:
    """What has changed, where the state alone does not say it."""
    level = task.priority
    match command:
        case Cancel() if task.state is TaskState.RUNNING:
            if task.cancel is not None and task.cancel.is_forced:
                return "killing its run; it is canceled when the run has ended. Its output may be damaged"
            return "cancel requested; it is canceled when its run stops"
        case StartNow():
            return f"at the head of {level} priority on queue {clean(task.queue)!r}"
        case Retry(to_head=to_head):
            return f"at the {'head' if to_head else 'tail'} of {level} priority on queue {clean(task.queue)!r}"
        case SetPriority():
            return f"{level} priority now"
        case MoveBefore(other=other) | MoveAfter(other=other):
            side = "before" if isinstance(command, MoveBefore) else "after"
            return f"right {side} {clean(other)}"
        case Reschedule() | Release() if task.state in WAITING_FOR_TIME:
            return due_text(task, now)
        case Release():
            return f"at its old place on queue {clean(task.queue)!r}" if task.state is TaskState.QUEUED else ""
        case _:
            return ""


# --- all that match ---------------------------------------------------------------------------------------------------


Apply = Callable[[Application, bool], AsyncIterator[BulkReport]]
"""A bulk command; the flag asks for a dry run."""


def _apply_matching(chosen: Selection, where: TaskFilter, command: TaskCommand) -> int:
    def apply(application: Application, dry_run: bool) -> AsyncIterator[BulkReport]:
        return application.tasks.apply_matching(where, command, dry_run=dry_run)

    return confirm_and_apply(chosen, apply, verb_of(command))


def confirm_and_apply(chosen: Selection, apply: Apply, verb: str, *, after: str = "", needs_app: bool = False) -> int:
    """Count, ask, carry out, report; 1 if anything was refused. It would "run them again": `verb`, then `after`."""
    if not chosen.dry_run and not chosen.yes:
        counted_report = asyncio.run(_run(chosen, apply, f"{verb} them{after}", dry_run=True, needs_app=needs_app))
        found = counted_report.fitting
        confirm(f"{verb} {counted(found, 'task')}{after}", found, yes=False)
    report = asyncio.run(_run(chosen, apply, f"{verb} them{after}", dry_run=chosen.dry_run, needs_app=needs_app))
    print_report(report, f"{verb} them{after}", as_json=chosen.as_json)
    return REFUSED if report.refused else DONE


async def _run(chosen: Selection, apply: Apply, what: str, *, dry_run: bool, needs_app: bool) -> BulkReport:
    report = BulkReport()
    async with opened_application(chosen.target, needs_app=needs_app) as application:
        async for report in apply(application, dry_run):
            # The error that interrupts is printed by itself; a Ctrl-C has no other message than this one.
            if report.interrupted and (report.moved or _is_canceled()):
                print_report(report, what, as_json=chosen.as_json)
    return report


def _is_canceled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def print_report(report: BulkReport, what: str, *, as_json: bool) -> None:
    """`what` was done to those that match, or would be."""
    if as_json:
        say_json(report)
    else:
        make_console().print(_summary(report, what), soft_wrap=True)


def _summary(report: BulkReport, what: str) -> Text:
    line = Text(f"{counted(report.matched, 'task')} matched") if report.matched else Text("no task matches", "dim")
    if report.interrupted:
        line = Text.assemble(("interrupted: ", "bold yellow"), f"{counted(report.matched, 'task')} matched so far")
    if (report.matched or report.interrupted) and not report.dry_run:
        line.append("   ").append(f"✔ {report.moved:,} changed", "green")
    if report.changed_meanwhile:
        line.append(f"   ✘ {report.changed_meanwhile:,} skipped: changed in the meantime", "bold red")
    for code, count in sorted(report.unfit.items(), key=lambda item: -item[1]):
        line.append(f"   ✘ {count:,} refused: {report.reasons.get(code, code)}", "bold red")
    if report.quarantined:
        left = f"{report.quarantined:,} quarantined skipped: they crashed their workers; --quarantined includes them"
        line.append(f"   {left}", "yellow")
    if isinstance(report, RerunReport) and report.run_again:
        left = f"{report.run_again:,} skipped: already run again; --repeat runs them once more"
        line.append(f"   {left}", "yellow")
    if report.is_uncertain:
        line.append("; the last request got no answer, so more may have changed", "yellow")
    elif report.interrupted:
        line.append("; all others are unchanged", "dim")
    elif report.matched and report.dry_run:
        line.append(f"; dry run, nothing was changed: without --dry-run this would {what}", "dim")
    return line
