"""The commands that steer tasks, and their options. What they do stands in `steering` and its neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import typer

from taskyard.cli.options import AppOption, IdsArgument, JsonOption, StoreOption, reason_option
from taskyard.cli.selecting import Selection, selecting
from taskyard.cli.session import Target

ReasonOption = Annotated[str, reason_option("task")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, however many they are.")]


@selecting
def start_command(
    chosen: Selection,
    urgent: Annotated[bool, typer.Option("--raise", help="Before all others: make them high as well.")] = False,
) -> int:
    """Put tasks at the head of their queue, also what waits for its time or is held. What runs is not disturbed."""
    from taskyard.application.command_requests import StartNow
    from taskyard.cli.steering import apply_command

    return apply_command(chosen, StartNow(urgent=urgent))


@selecting
def cancel_command(
    chosen: Selection,
    reason: ReasonOption = "",
    force: Annotated[bool, typer.Option("--force", help="Kill what runs at once: its output may be damaged.")] = False,
) -> int:
    """Cancel tasks: at once where they wait; where they run, they are asked to stop."""
    from taskyard.application.command_requests import Cancel
    from taskyard.cli.steering import apply_command

    return apply_command(chosen, Cancel(reason=reason, force=force))


@selecting
def retry_command(
    chosen: Selection,
    tail: Annotated[bool, typer.Option("--tail/--head", help="Behind the others, or before them.")] = False,
) -> int:
    """Send failed tasks again, before the others that wait or behind them. With --all, what took its workers down is
    left out, unless you say --quarantined."""
    from taskyard.application.command_requests import Retry
    from taskyard.cli.steering import apply_command

    return apply_command(chosen, Retry(to_head=not tail))


@selecting
def skip_command(chosen: Selection, reason: ReasonOption = "") -> int:
    """End tasks that have not started, as skipped."""
    from taskyard.application.command_requests import Skip
    from taskyard.cli.steering import apply_command

    return apply_command(chosen, Skip(reason=reason))


@selecting
def hold_command(chosen: Selection, reason: ReasonOption = "") -> int:
    """Keep tasks that have not started from starting, until they are released. They keep their places."""
    from taskyard.application.command_requests import Hold
    from taskyard.cli.steering import apply_command

    return apply_command(chosen, Hold(reason=reason))


@selecting
def release_command(chosen: Selection) -> int:
    """Let held tasks go: to their old places, or on waiting for their time."""
    from taskyard.application.command_requests import Release
    from taskyard.cli.steering import apply_command

    return apply_command(chosen, Release())


@selecting
def priority_command(
    chosen: Selection,
    level: Annotated[str, typer.Argument(metavar="LEVEL", help="high, normal or low.")],
) -> int:
    """Change the priority of tasks that have not started: taskyard priority ID high."""
    from taskyard.application.command_requests import SetPriority
    from taskyard.cli.steering import apply_command
    from taskyard.cli.values import parse_priority

    return apply_command(chosen, SetPriority(priority=parse_priority(level)))


@selecting
def reschedule_command(
    chosen: Selection,
    when: Annotated[str, typer.Argument(metavar="TIME", help="From now: 90, 5m, 2h. Or 2030-01-31T09:00+01:00.")],
) -> int:
    """Make tasks that have not started due at another time, earlier or later: taskyard reschedule ID 2h."""
    from taskyard.application.command_requests import Reschedule
    from taskyard.cli.errors import typed_on_the_command_line
    from taskyard.cli.steering import apply_command
    from taskyard.cli.values import parse_when

    with typed_on_the_command_line():
        command = Reschedule(due_at=parse_when(when))
    return apply_command(chosen, command)


def move_command(
    tasks: IdsArgument,
    before: Annotated[str | None, typer.Option(metavar="ID", help="Right before this one.")] = None,
    after: Annotated[str | None, typer.Option(metavar="ID", help="Right after this one.")] = None,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Put tasks right before, or right after, another of their queue and priority."""
    from taskyard.cli.steering import move

    return asyncio.run(move(Target(store, yard), tasks, before=before, after=after, as_json=as_json))


@selecting
def run_again_command(
    chosen: Selection,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another argument; needs --app. Repeatable.")
    ] = None,
    repeat: Annotated[
        bool, typer.Option("--repeat", help="With --all: also those of which a new task was made before.")
    ] = False,
) -> int:
    """Make new tasks of tasks that have ended, with the same arguments or with some changed."""
    from taskyard.cli.rerunning import run_again

    return run_again(chosen, change or (), repeat=repeat)


def prune_command(
    older: Annotated[str, typer.Option(metavar="TIME", help="Ended longer ago than that: 90, 5m, 2h, 1d.")] = "1w",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count them.")] = False,
    yes: YesOption = False,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Forget tasks that ended long ago, with all their runs and results."""
    from taskyard.cli.pruning import prune
    from taskyard.cli.values import parse_duration, parse_option

    older_s = parse_option("older", parse_duration, older)
    return prune(Target(store, yard), older_s=older_s, dry_run=dry_run, yes=yes, as_json=as_json)


COMMANDS: dict[str, Callable[..., int]] = {
    "start": start_command,
    "cancel": cancel_command,
    "retry": retry_command,
    "run-again": run_again_command,
    "skip": skip_command,
    "hold": hold_command,
    "release": release_command,
    "move": move_command,
    "priority": priority_command,
    "reschedule": reschedule_command,
    "prune": prune_command,
}
"""By name, in the order the help lists them."""
