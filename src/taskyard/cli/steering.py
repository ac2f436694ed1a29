"""What people ask of tasks: of those they name, one by one, with what became of each; of all that match, with a count.

Whoever is asked at a terminal is asked between two visits to the store, never while it is open: it may take long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec
from rich.text import Text

from taskyard.cli.asking import asker, confirm
from taskyard.cli.console import make_console, say_json
from taskyard.cli.documents import priority_label
from taskyard.cli.errors import DONE, REFUSED, AmbiguousTask, UsageError, error_document
from taskyard.cli.looks import due_text, state_text
from taskyard.cli.selecting import Selection
from taskyard.cli.target import Target, opened, refuse_unknown, resolve
from taskyard.cli.text import clean, counted
from taskyard.errors import CommandRefused, OutcomeUnknown, TaskyardError, UnknownTask
from taskyard.model.command import (
    VERBS,
    Cancel,
    Command,
    MoveAfter,
    MoveBefore,
    Release,
    Reschedule,
    Retry,
    SetPriority,
    StartNow,
)
from taskyard.model.state import WAITING_FOR_TIME, TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.model.why import Reason, Why
from taskyard.queueing.controller import ask_one
from taskyard.queueing.matching import BulkReport, RerunReport
from taskyard.yard import Yard


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one task: its record after the command, or why it was refused; and what it waits for that was to
    be told at once."""

    asked: str
    record: TaskRecord | None = None
    refused: TaskyardError | None = None
    why: Why | None = None

    def document(self) -> dict[str, object]:
        if self.refused is not None:
            return {"ok": False, "asked": self.asked, **error_document(self.refused)}
        assert self.record is not None
        asked_to_stop = self.record.state is TaskState.RUNNING and self.record.cancel is not None
        state = self.record.state
        return {"ok": True, "asked": self.asked, "uuid": self.record.uuid, "state": state, "stopping": asked_to_stop}


def steer(chosen: Selection, command: Command) -> int:
    """Carry out the command; 1 if anything was refused."""
    if chosen.where is None:
        return asyncio.run(_steer_named(chosen, command))
    return _steer_matching(chosen, msgspec.structs.replace(chosen.where, states=chosen.states), command)


# --- those that are named ---------------------------------------------------------------------------------------------


async def _steer_named(chosen: Selection, command: Command) -> int:
    async with opened(chosen.target.bare()) as yard:
        answers = [await _ask(yard, fragment, command) for fragment in dict.fromkeys(chosen.ids)]
        if isinstance(command, Cancel):
            answers = [await _look_at_node(yard, answer) for answer in answers]
    return tell(answers, command, as_json=chosen.as_json)


async def move(
    target: Target, fragments: Sequence[str], *, before: str | None, after: str | None, as_json: bool
) -> int:
    """Put tasks beside another, in the order they are named."""
    other = before if before is not None else after
    if other is None or (before is not None and after is not None):
        raise UsageError("say --before or --after which other task they are to be put")
    named = list(dict.fromkeys(fragments))
    async with opened(target.bare()) as yard:
        uuid = await resolve(yard, other)
        command = MoveBefore(uuid) if before is not None else MoveAfter(uuid)
        # Each goes right behind the other task, and so before those that went there earlier: the last goes first.
        turns = named if before is not None else named[::-1]
        answers = {fragment: await _ask(yard, fragment, command) for fragment in turns}
    return tell([answers[fragment] for fragment in named], command, as_json=as_json)


async def _ask(yard: Yard, fragment: str, command: Command) -> Answer:
    """One that is refused does not keep the others from being asked; a store that fails does."""
    try:
        return Answer(fragment, record=await ask_one(yard.engine, await resolve(yard, fragment), command, by=asker()))
    except (CommandRefused, UnknownTask, AmbiguousTask, UsageError) as exc:
        return Answer(fragment, refused=exc)


async def _look_at_node(yard: Yard, answer: Answer) -> Answer:
    """A run is asked in vain if its node is dead: then that is told."""
    if answer.record is None or answer.record.state is not TaskState.RUNNING:
        return answer
    return replace(answer, why=await yard.why(answer.record.uuid))


def tell(answers: Sequence[Answer], command: Command, *, as_json: bool) -> int:
    if as_json:
        say_json([answer.document() for answer in answers])
    else:
        console, now = make_console(), datetime.now(UTC)
        for answer in answers:
            console.print(_line(answer, command, now), soft_wrap=True)
    return REFUSED if any(answer.refused is not None for answer in answers) else DONE


def _line(answer: Answer, command: Command, now: datetime) -> Text:
    record = answer.record
    if record is None:
        return Text.assemble(("✘ refused  ", "bold red"), clean(str(answer.refused)))
    line = Text.assemble(clean(record.uuid), "  ", (clean(record.consumer), "bold"), "  ", state_text(record.state))
    words = _words(record, command, now)
    if answer.why is not None and answer.why.reason is Reason.NODE_SILENT:
        words = f"{clean(answer.why.text)}; it is canceled then"
    return line.append(f"; {words}", "dim") if words else line


def _words(record: TaskRecord, command: Command, now: datetime) -> str:
    """What has changed, where the state alone does not say it."""
    level = priority_label(record.priority)
    match command:
        case Cancel() if record.state is TaskState.RUNNING:
            if record.cancel is not None and record.cancel.is_forced:
                return "its run is killed, and it is canceled when that has ended; what it was writing may be damaged"
            return "its run was asked to stop, and it is canceled when it has"
        case StartNow():
            return f"at the head of {level} priority on queue {clean(record.queue)!r}"
        case Retry(to_head):
            return f"at the {'head' if to_head else 'tail'} of {level} priority on queue {clean(record.queue)!r}"
        case SetPriority():
            return f"{level} priority now"
        case MoveBefore(other) | MoveAfter(other):
            side = "before" if isinstance(command, MoveBefore) else "after"
            return f"right {side} {clean(other)}"
        case Reschedule() | Release() if record.state in WAITING_FOR_TIME:
            return due_text(record, now)
        case Release():
            return f"at its old place on queue {clean(record.queue)!r}" if record.state is TaskState.QUEUED else ""
        case _:
            return ""


# --- all that match ---------------------------------------------------------------------------------------------------


def _steer_matching(chosen: Selection, where: TaskFilter, command: Command) -> int:
    if not chosen.dry_run and not chosen.yes:
        found = asyncio.run(_apply(chosen, where, command, dry_run=True)).fitting
        confirm(f"{VERBS[type(command)]} {counted(found, 'task')}", found, yes=False)
    report = asyncio.run(_apply(chosen, where, command, dry_run=chosen.dry_run))
    tell_report(chosen, report, f"{VERBS[type(command)]} them")
    return REFUSED if report.refused else DONE


async def _apply(chosen: Selection, where: TaskFilter, command: Command, *, dry_run: bool) -> BulkReport:
    async with opened(chosen.target.bare()) as yard:
        await refuse_unknown(yard, chosen.target, where)
        matching = yard.matching(where, by=asker())
        try:
            return await matching.apply(command, dry_run=dry_run)
        except BaseException as exc:
            tell_interrupted(chosen, matching.report, f"{VERBS[type(command)]} them", exc)
            raise


def tell_interrupted(chosen: Selection, report: BulkReport, what: str, exc: BaseException) -> None:
    """What was done until Ctrl-C, or an error, which is told by itself: then only if there is something."""
    if report.moved or isinstance(exc, asyncio.CancelledError):
        tell_report(chosen, report, what, interrupted=exc)


def tell_report(chosen: Selection, report: BulkReport, what: str, *, interrupted: BaseException | None = None) -> None:
    """`what` is what was done to those that match, or would be."""
    if chosen.as_json:
        ends = {"dry_run": chosen.dry_run, "interrupted": interrupted is not None}
        say_json({**msgspec.structs.asdict(report), **ends})
    else:
        line = _summary(report, what, dry_run=chosen.dry_run, interrupted=interrupted)
        make_console().print(line, soft_wrap=True)


def _summary(report: BulkReport, what: str, *, dry_run: bool, interrupted: BaseException | None) -> Text:
    line = Text(f"{counted(report.matched, 'task')} matched") if report.matched else Text("no task matches", "dim")
    if interrupted is not None:
        line = Text.assemble(("interrupted: ", "bold yellow"), f"{counted(report.matched, 'task')} matched so far")
    if (report.matched or interrupted is not None) and not dry_run:
        line.append("   ").append(f"✔ {report.moved:,} changed", "green")
    if report.changed_meanwhile:
        line.append(f"   ✘ {report.changed_meanwhile:,} changed meanwhile, and left alone", "bold red")
    for code, count in sorted(report.unfit.items(), key=lambda item: -item[1]):
        line.append(f"   ✘ {count:,} not: {report.reasons.get(code, code)}", "bold red")
    if report.quarantined:
        left = f"{report.quarantined:,} in quarantine left out: they took their workers down; --quarantined sends them"
        line.append(f"   {left}", "yellow")
    if isinstance(report, RerunReport) and report.run_again:
        left = f"{report.run_again:,} left out: they were run again before; --repeat runs them once more"
        line.append(f"   {left}", "yellow")
    if isinstance(interrupted, OutcomeUnknown):
        line.append("; whether some more were is not known", "yellow")
    elif interrupted is not None:
        line.append("; all others are as they were", "dim")
    elif report.matched and dry_run:
        line.append(f"; nothing was changed: without --dry-run it would {what}", "dim")
    return line
