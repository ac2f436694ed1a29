"""`taskyard schedule`: what recurs, in words and tables, and steering it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.application.interface import Application
from taskyard.application.schedule_documents import (
    ScheduleDetail,
    ScheduleDocument,
    ScheduleRequest,
    ScheduleStateName,
    ScheduleTasks,
)
from taskyard.cli.console import complain, make_console, say, say_json, show
from taskyard.cli.errors import UsageError, typed_on_the_command_line
from taskyard.cli.formatting import state_text
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import age, as_short_json, clean, counted, cut, duration, seconds_between
from taskyard.cli.values import parse_arguments, parse_duration, parse_moment, parse_option
from taskyard.errors import quote
from taskyard.model.recurrence import Cron
from taskyard.model.schedule import Overlap, check_moment

ROOMY = 110
"""Columns of a window from which on there is room for everything."""

STYLES: dict[ScheduleStateName, tuple[str, str]] = {
    "active": ("●", "green"),
    "paused": ("‖", "magenta"),
    "over": ("✔", "dim"),
    "unreadable": ("✘", "bold red"),
}
"""The symbol and the colour of each state."""


# --- lists and details ------------------------------------------------------------------------------------------------


async def list_schedules(target: Target, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        found = await application.schedules.list()
    if as_json:
        say_json(found)
        return 0
    console = make_console()
    if found:
        show(console, _table(found, console.width, datetime.now(UTC)))
    else:
        hint = "taskyard schedule add NAME CONSUMER --cron '0 4 * * *'"
        show(console, Text(f"no schedules; add one with: {hint}", "dim"))
    return 0


async def show_schedule(target: Target, name: str, *, count: int, reveal: bool, as_json: bool) -> int:
    async with opened_application(target) as application:
        schedule = await application.schedules.get(name, next_count=count, reveal=reveal)
    if as_json:
        say_json(schedule)
    else:
        show(make_console(), _page(schedule, now=datetime.now(UTC)))
    return 0


def _state(schedule: ScheduleDocument) -> tuple[str, str]:
    symbol, style = STYLES[schedule.state]
    return f"{symbol} {schedule.state}", style


def _table(found: Sequence[ScheduleDocument], width: int, now: datetime) -> Table:
    """A narrow window shows only the main columns."""
    roomy = width >= ROOMY
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for heading in ("NAME", "STATE", "NEXT"):
        table.add_column(heading, no_wrap=True)
    for heading in ("FIRED", "MISSED", "SKIPPED") if roomy else ("FIRED",):
        table.add_column(heading, no_wrap=True, justify="right")
    if roomy:
        table.add_column("CONSUMER", no_wrap=True)
    table.add_column("RULE", no_wrap=True, overflow="ellipsis", ratio=1)
    for schedule in found:
        counts, next_at = schedule.counts, schedule.next
        cells = [Text(cut(clean(schedule.name), 32 if roomy else 18), "bold"), Text(*_state(schedule))]
        cells.append(Text(f"in {age(seconds_between(now, next_at[0]))}" if next_at else ""))
        cells += [Text(f"{n:,}", "dim") for n in (counts.fired, counts.missed, counts.skipped)[: 3 if roomy else 1]]
        if roomy:
            cells.append(Text(cut(clean(schedule.consumer or ""), 24), "dim"))
        table.add_row(*cells, _rule_cell(schedule))
    return table


def _rule_cell(schedule: ScheduleDocument) -> Text:
    if schedule.rule is None:
        return Text(clean(schedule.problem), "red")
    words = Text(clean(schedule.rule_text))
    if schedule.paused_at is not None and schedule.note:
        words.append(f" · {clean(schedule.note)}", "magenta")
    if schedule.last is not None:
        words.append(f" · {_made_text(schedule.last.made, schedule.last.skipped)}", "dim")
    if schedule.problem:
        words.append(f" · {clean(schedule.problem)}", "red")
    return words


def _page(schedule: ScheduleDetail, *, now: datetime) -> RenderableType:
    parts: list[RenderableType] = [Text.assemble((clean(schedule.name), "bold"), "  ", _state(schedule))]
    facts = Table.grid(padding=(0, 2))
    for label, value in _facts(schedule, now=now):
        facts.add_row(Text(f"  {label}", "dim"), Text(clean(value)))
    parts.append(facts)
    if schedule.next:
        parts.append(Text("next", "dim"))
        parts += [
            Text(f"  {_time_text(schedule, at)}  in {duration(seconds_between(now, at))}") for at in schedule.next
        ]
    if schedule.fires:
        parts.append(Text("last", "dim"))
        last = Table.grid(padding=(0, 2))
        for fire in schedule.fires:
            state = Text("forgotten", "dim") if fire.state is None else state_text(fire.state)
            made = Text(fire.task) if schedule.each is None else Text(_made_text(fire.made, fire.skipped))
            state = state if schedule.each is None else Text("")
            last.add_row(Text(f"  {_time_text(schedule, fire.fire_at)}"), Text(str(fire.kind), "dim"), state, made)
        parts.append(last)
    return Group(*parts)


def _facts(schedule: ScheduleDocument, *, now: datetime) -> list[tuple[str, str]]:
    counts = schedule.counts
    facts = [("problem", schedule.problem)]
    if schedule.paused_at is not None:
        ago = f"{duration(seconds_between(schedule.paused_at, now))} ago"
        by, note = schedule.paused_by and f" by {schedule.paused_by}", schedule.note and f": {schedule.note}"
        facts.append(("paused", f"{ago}{by}{note}"))
    if schedule.rule is not None:
        facts += [
            ("rule", _rule_text(schedule)),
            ("consumer", schedule.consumer or ""),
            ("arguments", as_short_json(schedule.args) if schedule.args else ""),
            ("for each of", _each_text(schedule)),
            ("queue", schedule.queue or ""),
            ("requires", ", ".join(f"{name}={value}" for name, value in (schedule.requires or {}).items())),
            ("missed", f"{schedule.missed}, up to {duration(schedule.catch_up_s)} back"),
            ("overlap", str(schedule.overlap)),
            ("jitter", f"up to {duration(schedule.jitter_s)}" if schedule.jitter_s else ""),
            ("from", "" if schedule.start_at is None else _time_text(schedule, schedule.start_at)),
            ("to", "" if schedule.end_at is None else _time_text(schedule, schedule.end_at)),
        ]
    failed = f", {counts.failed:,} failed" if counts.failed else ""
    facts += [
        ("so far", f"{counts.fired:,} fired, {counts.missed:,} missed, {counts.skipped:,} skipped{failed}"),
        ("last made", "" if schedule.last is None else _made_text(schedule.last.made, schedule.last.skipped)),
        ("next try", "" if schedule.retry_at is None else _time_text(schedule, schedule.retry_at)),
        ("defined", "in code" if schedule.from_code else f"by {schedule.by}"),
    ]
    if schedule.has_open_task:
        buffered_at = schedule.buffered_at
        kept = "" if buffered_at is None else f"; that of {_time_text(schedule, buffered_at)} waits for it"
        facts.append(("now", f"{'a task' if schedule.each is None else 'some task'} of it has not ended{kept}"))
    return [(label, value) for label, value in facts if value]


def _each_text(schedule: ScheduleDocument) -> str:
    """Where the items come from, and when one is skipped."""
    each = schedule.each
    if each is None:
        return ""
    items = f"{each.function}(), within {duration(each.timeout_s)}" if each.function else counted(each.count, "item")
    return f"{items}; skipped while {each.dedupe_scope}" if schedule.overlap is Overlap.SKIP else items


def _made_text(made: int, skipped: int) -> str:
    return f"{counted(made, 'task')}, {skipped:,} skipped"


def _rule_text(schedule: ScheduleDocument) -> str:
    words, rule = schedule.rule_text, schedule.rule
    return f"{words}  ({rule.expression})" if isinstance(rule, Cron) else words


def _time_text(schedule: ScheduleDocument, at: datetime) -> str:
    """In the time zone of the rule, or the local one."""
    rule = schedule.rule
    there = at.astimezone(ZoneInfo(rule.zone)) if isinstance(rule, Cron) else at.astimezone()
    return there.strftime("%a %Y-%m-%d %H:%M:%S %z")


# --- commands ---------------------------------------------------------------------------------------------------------


def make_schedule(
    name: str,
    consumer: str,
    pairs: Sequence[str],
    whole: str | None,
    *,
    cron: str | None,
    zone: str | None,
    every: str | None,
    **typed: str | None,
) -> ScheduleRequest:
    """A schedule as it was typed: durations and moments are still texts."""
    if (cron is None) == (every is None):
        raise UsageError("give either --cron or --every: when, or how often")
    settings: dict[str, Any] = {option: text for option, text in typed.items() if text is not None}
    for short, option, parse in (
        ("timeout", "timeout_s", parse_duration),
        ("catch_up", "catch_up_s", parse_duration),
        ("grace", "grace_s", parse_duration),
        ("jitter", "jitter_s", parse_duration),
        ("start", "start_at", parse_moment),
        ("end", "end_at", parse_moment),
    ):
        if short in settings:
            settings[option] = parse_option(option, parse, settings.pop(short))
    rule = cron if cron is not None else parse_option("every", parse_duration, every or "")
    settings |= {"name": name, "rule": rule, "zone": zone, "consumer": consumer}
    with typed_on_the_command_line():
        ScheduleRequest(**settings)
    given = parse_arguments(pairs, whole)
    return ScheduleRequest(**settings, args=given.values, args_text=given.typed)


async def add_schedule(target: Target, request: ScheduleRequest, *, replace: bool, as_json: bool) -> int:
    has_app = target.app_name is not None
    async with opened_application(target, needs_app=has_app, create=has_app, check=request) as application:
        schedule = await application.schedules.put(request, replace=replace)
    if not has_app:
        complain("note", "no --app given, so the arguments are checked only when a worker runs a task of it")
    _print_schedule(schedule, as_json=as_json)
    return 0


async def pause_schedule(target: Target, name: str, *, note: str, as_json: bool) -> int:
    async with opened_application(target) as application:
        schedule = await application.schedules.pause(name, note=note)
    _print_schedule(schedule, as_json=as_json)
    return 0


async def resume_schedule(target: Target, name: str, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        schedule = await application.schedules.resume(name)
    _print_schedule(schedule, as_json=as_json)
    return 0


async def run_schedule(target: Target, name: str, *, as_json: bool) -> int:
    nothing = f"schedule {quote(name)} has no items"
    return await _make_tasks(target, lambda application: application.schedules.run_now(name), nothing, as_json=as_json)


async def backfill_schedule(
    target: Target, name: str, *, start: str, end: str, limit: int, again: bool, as_json: bool
) -> int:
    first, last = parse_option("start", parse_moment, start), parse_option("end", parse_moment, end)
    with typed_on_the_command_line():
        check_moment("start", first)
        check_moment("end", last)
    if last <= first:
        raise UsageError(f"--to {quote(end)} must be later than --from {quote(start)}")

    def backfill(application: Application) -> Awaitable[ScheduleTasks]:
        return application.schedules.backfill(name, start=first, end=last, limit=limit, again=again)

    nothing = "nothing to backfill: every fire time in this range has a task"
    return await _make_tasks(target, backfill, nothing, as_json=as_json)


async def _make_tasks(
    target: Target, make: Callable[[Application], Awaitable[ScheduleTasks]], nothing: str, *, as_json: bool
) -> int:
    """Standard output gets the ids alone; the rest is for people. `nothing` says why there are none."""
    if target.app_name is None:
        raise UsageError("what the schedule makes depends on its consumer's code; name the app with --app module:yard")
    async with opened_application(target, needs_app=True) as application:
        made = await make(application)
    if as_json:
        say_json(made)
        return 0
    for uuid in made.tasks:
        say(uuid)
    count = f"{counted(len(made.tasks), 'task')} of schedule {quote(made.name)}"
    if made.skipped:
        words = f"{count}, {made.skipped:,} skipped: their work is there already"
    else:
        words = count if made.tasks else nothing
    make_console(stderr=True).print(Text(clean(words), "dim"), soft_wrap=True)
    return 0


async def remove_schedule(target: Target, name: str, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        removed = await application.schedules.remove(name)
    if as_json:
        say_json(removed)
        return 0
    line = Text.assemble((clean(name), "bold"), "  removed; its tasks stay")
    if removed.from_code:
        line.append("; it is defined in code, so its program adds it again at its next start", "yellow")
    make_console().print(line, soft_wrap=True)
    return 0


def _print_schedule(schedule: ScheduleDocument, *, as_json: bool) -> None:
    if as_json:
        say_json(schedule)
        return
    line = Text.assemble((clean(schedule.name), "bold"), "  ", _state(schedule))
    if schedule.rule is not None:
        line.append(f"  {clean(schedule.rule_text)}", "dim")
    if schedule.next:
        line.append(f"; next {_time_text(schedule, schedule.next[0])}", "dim")
    make_console().print(line, soft_wrap=True)
