"""`taskyard run-again`: new tasks made of finished ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
from rich.text import Text

from taskyard.application.interface import Application
from taskyard.application.task_requests import CommandReceipt, RerunReport
from taskyard.cli.console import make_console, say_json
from taskyard.cli.errors import DONE, REFUSED, UsageError
from taskyard.cli.formatting import state_text
from taskyard.cli.selecting import Selection
from taskyard.cli.session import opened_application
from taskyard.cli.steering import confirm_and_apply, refused_line
from taskyard.cli.text import clean
from taskyard.cli.values import Arguments, parse_arguments


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

    def apply(application: Application, dry_run: bool) -> AsyncIterator[RerunReport]:
        return application.tasks.rerun_matching(where, changes=given.values, repeat=repeat, dry_run=dry_run)

    return confirm_and_apply(chosen, apply, "run", after=" again", needs_app=bool(given.values))


async def _run_named(chosen: Selection, given: Arguments) -> int:
    async with opened_application(chosen.target, needs_app=bool(given.values)) as application:
        receipts = await application.tasks.rerun(chosen.ids, changes=given.values, changes_text=given.typed)
    if chosen.as_json:
        say_json(receipts)
    else:
        console = make_console()
        for receipt in receipts:
            console.print(_line(receipt), soft_wrap=True)
    return DONE if all(receipt.ok for receipt in receipts) else REFUSED


def _line(receipt: CommandReceipt) -> Text:
    task = receipt.task
    if task is None:
        return refused_line(receipt)
    line = Text.assemble(clean(task.uuid), "  ", (clean(task.consumer), "bold"), "  ", state_text(task.state))
    return line.append(f"; a new task, made of {clean(task.origin or '')}", "dim")
