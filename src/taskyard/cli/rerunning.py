"""`taskyard run-again`: new tasks made of ended ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.text import Text

from taskyard.cli.asking import asker, confirm
from taskyard.cli.console import make_console, say_json
from taskyard.cli.errors import DONE, REFUSED, UsageError, error_document
from taskyard.cli.looks import state_text
from taskyard.cli.selecting import Selection
from taskyard.cli.steering import tell_interrupted, tell_report
from taskyard.cli.target import opened, refuse_unknown, resolve
from taskyard.cli.text import clean, counted
from taskyard.cli.values import Arguments, parse_arguments
from taskyard.errors import InvalidArguments, StoreError, TaskyardError
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.queueing.matching import RerunReport
from taskyard.yard import Yard

RUN_AGAIN = "run them again"


def run_again(chosen: Selection, changes: Sequence[str], *, repeat: bool = False) -> int:
    """Submit each again; 1 if any was refused. With changes the consumer is needed, to check them."""
    if changes and chosen.target.app_name is None:
        raise UsageError("changed arguments are checked by the consumer; name the app with --app module:yard")
    if repeat and chosen.where is None:
        raise UsageError("--repeat goes with --all; tasks that are named are run again however often")
    given = parse_arguments(changes, None)
    if chosen.where is None:
        return asyncio.run(_run_named(chosen, given))
    where = msgspec.structs.replace(chosen.where, states=chosen.states)
    if not chosen.dry_run and not chosen.yes:
        found = asyncio.run(_run_all(chosen, where, given, repeat=repeat, dry_run=True)).fitting
        confirm(f"run {counted(found, 'task')} again", found, yes=False)
    report = asyncio.run(_run_all(chosen, where, given, repeat=repeat, dry_run=chosen.dry_run))
    tell_report(chosen, report, RUN_AGAIN)
    return REFUSED if report.refused else DONE


async def _run_all(
    chosen: Selection, where: TaskFilter, given: Arguments, *, repeat: bool, dry_run: bool
) -> RerunReport:
    """As the arguments were typed: what one consumer takes as JSON, another may want as text."""
    done = RerunReport()

    def note(report: RerunReport) -> None:
        nonlocal done
        done = report

    async with opened(_yard(chosen, given)) as yard:
        await refuse_unknown(yard, chosen.target, where)
        try:
            return await yard.run_all_again(
                where, changes=given.values or None, repeat=repeat, dry_run=dry_run, so_far=note, by=asker()
            )
        except BaseException as exc:
            tell_interrupted(chosen, done, RUN_AGAIN, exc)
            raise


def _yard(chosen: Selection, given: Arguments) -> Yard:
    return chosen.target.load() if given.values else chosen.target.bare()


async def _run_named(chosen: Selection, given: Arguments) -> int:
    answers: list[tuple[str, TaskRecord | TaskyardError]] = []
    async with opened(_yard(chosen, given)) as yard:
        for fragment in dict.fromkeys(chosen.ids):
            try:
                answers.append((fragment, await _run_one(yard, fragment, given)))
            except StoreError:
                raise
            except TaskyardError as exc:
                answers.append((fragment, exc))
    if chosen.as_json:
        say_json([_document(asked, answer) for asked, answer in answers])
    else:
        console = make_console()
        for _, answer in answers:
            console.print(_line(answer), soft_wrap=True)
    return REFUSED if any(isinstance(answer, TaskyardError) for _, answer in answers) else DONE


async def _run_one(yard: Yard, fragment: str, given: Arguments) -> TaskRecord:
    uuid = await resolve(yard, fragment)
    try:
        handle = await yard.run_again(uuid, changes=given.values or None, by=asker())
    except InvalidArguments as refused:  # what the consumer refuses as JSON, it may take as the text that was typed
        handle = await yard.run_again(uuid, changes=given.as_text(refused.names), by=asker())
    return await handle.record()


def _document(asked: str, answer: TaskRecord | TaskyardError) -> dict[str, Any]:
    if isinstance(answer, TaskyardError):
        return {"ok": False, "asked": asked, **error_document(answer)}
    return {"ok": True, "asked": asked, "uuid": answer.uuid, "origin": answer.origin, "state": answer.state}


def _line(answer: TaskRecord | TaskyardError) -> Text:
    if isinstance(answer, TaskyardError):
        return Text.assemble(("✘ refused  ", "bold red"), clean(str(answer)))
    line = Text.assemble(clean(answer.uuid), "  ", (clean(answer.consumer), "bold"), "  ", state_text(answer.state))
    return line.append(f"; a new task, made of {clean(answer.origin or '')}", "dim")
