"""`taskyard queue` and `taskyard group`: the commands and their options. What they do stands in `queues` and in
`groups`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from taskyard.cli.options import AppOption, JsonOption, StoreOption, reason_option
from taskyard.cli.session import Target

queues = typer.Typer(help="Queues: what each holds, and steering them as a whole.", no_args_is_help=True)
groups = typer.Typer(help="Tasks that were submitted together.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The queue.")]
ReasonOption = Annotated[str, reason_option("queue")]
GroupArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The group's id, or that of one of its tasks; an end or beginning will do.")
]


@queues.command("ls")
def ls_command(store: StoreOption = None, yard: AppOption = None, as_json: JsonOption = False) -> int:
    """List the queues: whether they start tasks, what runs, what waits and since when, how fast it goes."""
    from taskyard.cli.queues import list_queues

    return asyncio.run(list_queues(Target(store, yard), as_json=as_json))


@queues.command("show")
def order_command(
    name: NameArgument,
    assumed: Annotated[
        str | None, typer.Option("--if", metavar="concurrency=N", help="Also: when, if so many ran at once.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many of each part.")] = 20,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show a queue in the order in which it will start: places, expected starts, what is held or blocked."""
    from taskyard.cli.queue_order import show_order

    return asyncio.run(show_order(Target(store, yard), name, limit=limit, assumed=assumed, as_json=as_json))


@queues.command("pause")
def pause_command(
    name: NameArgument,
    reason: ReasonOption = "",
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Start nothing more of a queue, until it is resumed; what runs goes on."""
    from taskyard.application.command_requests import Pause
    from taskyard.cli.queues import control_queue

    return asyncio.run(control_queue(Target(store, yard), name, Pause(reason=reason), as_json=as_json))


@queues.command("resume")
def resume_command(
    name: NameArgument, store: StoreOption = None, yard: AppOption = None, as_json: JsonOption = False
) -> int:
    """Start tasks of a queue again; takes back a pause, and a stop that is under way."""
    from taskyard.application.command_requests import Resume
    from taskyard.cli.queues import control_queue

    return asyncio.run(control_queue(Target(store, yard), name, Resume(), as_json=as_json))


@queues.command("stop-after-current")
def stop_after_current_command(
    name: NameArgument,
    reason: ReasonOption = "",
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Pause a queue, and show it as stopping until what runs has ended."""
    from taskyard.application.command_requests import StopAfterCurrent
    from taskyard.cli.queues import control_queue

    return asyncio.run(control_queue(Target(store, yard), name, StopAfterCurrent(reason=reason), as_json=as_json))


@queues.command("set")
def set_command(
    name: NameArgument,
    concurrency: Annotated[
        str, typer.Option(metavar="N", help="At most so many at once; none gives the word back to the app's own rule.")
    ],
    reason: ReasonOption = "",
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Change how many tasks of a queue run at once, in all processes, from now on."""
    from taskyard.application.command_requests import SetConcurrency
    from taskyard.cli.queues import control_queue
    from taskyard.cli.values import parse_limit, parse_option

    command = SetConcurrency(concurrency=parse_option("concurrency", parse_limit, concurrency), reason=reason)
    return asyncio.run(control_queue(Target(store, yard), name, command, as_json=as_json))


@groups.command("show")
def show_command(
    group: GroupArgument,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many tasks.")] = 20,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show how far a group is, its summary, and its tasks, what has not completed first."""
    from taskyard.cli.groups import show_group

    return asyncio.run(show_group(Target(store, yard), group, limit=limit, as_json=as_json))


@groups.command("cancel")
def cancel_command(
    group: GroupArgument,
    reason: Annotated[str, reason_option("tasks")] = "",
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Cancel all of a group that has not ended; what runs is asked to stop."""
    from taskyard.cli.groups import cancel_group

    return asyncio.run(cancel_group(Target(store, yard), group, reason=reason, as_json=as_json))


@groups.command("retry")
def retry_command(
    group: GroupArgument, store: StoreOption = None, yard: AppOption = None, as_json: JsonOption = False
) -> int:
    """Send what failed of a group again, and its summary after it."""
    from taskyard.cli.groups import retry_group

    return asyncio.run(retry_group(Target(store, yard), group, as_json=as_json))
