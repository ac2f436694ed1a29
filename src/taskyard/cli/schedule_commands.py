"""`taskyard schedule`: the commands and their options. What they do stands in `schedules`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from taskyard.cli.errors import typed_on_the_command_line
from taskyard.cli.options import AppOption, JsonOption, StoreOption, reason_option
from taskyard.cli.session import Target

schedules = typer.Typer(help="What recurs: when it fires, what has fired, and steering it.", no_args_is_help=True)


def _check_name(value: str) -> str:
    from taskyard.model.given import check_name

    with typed_on_the_command_line():
        return check_name("the name of a schedule", value)


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The schedule.", callback=_check_name)]
NextOption = Annotated[int, typer.Option("--next", min=0, max=1_000, help="So many of the next fire times.")]


@schedules.command("ls")
def ls_command(store: StoreOption = None, yard: AppOption = None, as_json: JsonOption = False) -> int:
    """List the schedules: the rule in words, when each fires next, what has fired."""
    from taskyard.cli.schedules import list_schedules

    return asyncio.run(list_schedules(Target(store, yard), as_json=as_json))


@schedules.command("show")
def show_command(
    name: NameArgument,
    count: NextOption = 5,
    reveal: Annotated[bool, typer.Option("--reveal", help="Show secrets among the arguments too.")] = False,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show everything about one schedule: its next fire times, and the last ones with their tasks."""
    from taskyard.cli.schedules import show_schedule

    return asyncio.run(show_schedule(Target(store, yard), name, count=count, reveal=reveal, as_json=as_json))


@schedules.command("add")
def add_command(
    name: NameArgument,
    consumer: Annotated[str, typer.Argument(metavar="CONSUMER", help="The consumer.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Arguments; JSON where it is JSON, else text.")
    ] = None,
    *,
    cron: Annotated[str | None, typer.Option(metavar="EXPRESSION", help="When: '30 4 * * MON', @daily.")] = None,
    zone: Annotated[str | None, typer.Option(help="Whose clocks cron looks at, as in Europe/Berlin; else UTC.")] = None,
    every: Annotated[str | None, typer.Option(metavar="TIME", help="How often, instead of cron: 90, 15m, 6h.")] = None,
    args: Annotated[
        str | None, typer.Option("--args", metavar="JSON", help="Arguments as an object; - reads it.")
    ] = None,
    priority: Annotated[str | None, typer.Option(metavar="LEVEL", help="high, normal or low.")] = None,
    queue: Annotated[str | None, typer.Option(help="Another queue than the consumer's.")] = None,
    key: Annotated[str | None, typer.Option(help="Tasks of one key run in turn.")] = None,
    timeout: Annotated[str | None, typer.Option(metavar="TIME", help="The longest a run may take.")] = None,
    missed: Annotated[str | None, typer.Option(metavar="HOW", help="Missed runs: skip, once or all.")] = None,
    catch_up: Annotated[str | None, typer.Option(metavar="TIME", help="How old a missed run may be.")] = None,
    grace: Annotated[str | None, typer.Option(metavar="TIME", help="How late a run is not missed yet.")] = None,
    overlap: Annotated[
        str | None, typer.Option(metavar="HOW", help="While one still runs: skip, buffer, allow or cancel.")
    ] = None,
    jitter: Annotated[str | None, typer.Option(metavar="TIME", help="Up to so much later, by lot.")] = None,
    start: Annotated[str | None, typer.Option("--from", metavar="MOMENT", help="Not before.")] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="MOMENT", help="Before then.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Change the one of this name, if there is.")] = False,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Add a schedule: taskyard schedule add nightly report --cron "0 4 * * *" --zone Europe/Berlin."""
    from taskyard.cli.schedules import add_schedule, make_schedule

    request = make_schedule(
        name, consumer, arguments or (), args, cron=cron, zone=zone, every=every, priority=priority, queue=queue,
        key=key, timeout=timeout, missed=missed, catch_up=catch_up, grace=grace, overlap=overlap, jitter=jitter,
        start=start, end=end,
    )  # fmt: skip
    return asyncio.run(add_schedule(Target(store, yard), request, replace=replace, as_json=as_json))


@schedules.command("pause")
def pause_command(
    name: NameArgument,
    note: Annotated[str, reason_option("schedule")] = "",
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Let a schedule fire nothing until it is resumed."""
    from taskyard.cli.schedules import pause_schedule

    return asyncio.run(pause_schedule(Target(store, yard), name, note=note, as_json=as_json))


@schedules.command("resume")
def resume_command(
    name: NameArgument, store: StoreOption = None, yard: AppOption = None, as_json: JsonOption = False
) -> int:
    """Let a schedule fire again, from now on."""
    from taskyard.cli.schedules import resume_schedule

    return asyncio.run(resume_schedule(Target(store, yard), name, as_json=as_json))


@schedules.command("run")
def run_command(
    name: NameArgument, store: StoreOption = None, yard: AppOption = None, as_json: JsonOption = False
) -> int:
    """Run it once, now, whatever its rule says; needs the app."""
    from taskyard.cli.schedules import run_schedule

    return asyncio.run(run_schedule(Target(store, yard), name, as_json=as_json))


@schedules.command("backfill")
def backfill_command(
    name: NameArgument,
    start: Annotated[str, typer.Option("--from", metavar="MOMENT", help="From then on.")],
    end: Annotated[str, typer.Option("--to", metavar="MOMENT", help="Before then.")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Not more than so many.")] = 1_000,
    again: Annotated[bool, typer.Option("--again", help="Also times so old that they may have fired.")] = False,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Run it for each of its times in a range that has passed, where it has not fired; needs the app."""
    from taskyard.cli.schedules import backfill_schedule

    target = Target(store, yard)
    return asyncio.run(backfill_schedule(target, name, start=start, end=end, limit=limit, again=again, as_json=as_json))


@schedules.command("rm")
def rm_command(
    name: NameArgument, store: StoreOption = None, yard: AppOption = None, as_json: JsonOption = False
) -> int:
    """Remove a schedule; its tasks stay."""
    from taskyard.cli.schedules import remove_schedule

    return asyncio.run(remove_schedule(Target(store, yard), name, as_json=as_json))
