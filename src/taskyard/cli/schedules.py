"""`taskyard schedule`: what recurs, in words and tables, and steering it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.cli.asking import asker
from taskyard.cli.console import complain, make_console, say, say_json, show
from taskyard.cli.errors import UsageError, option_of, typed_on_the_command_line
from taskyard.cli.looks import state_text
from taskyard.cli.submitting import fitting, stand_in
from taskyard.cli.target import Target, opened
from taskyard.cli.text import age, as_short_json, clean, counted, cut, duration, redact, seconds_between
from taskyard.cli.values import Arguments, parse_arguments, parse_duration, parse_moment, parse_option
from taskyard.errors import quote
from taskyard.handle import TaskHandle
from taskyard.model.recurrence import Cron, describe
from taskyard.model.schedule import Schedule, check_moment
from taskyard.model.task import Outcome
from taskyard.ports.schedules import FireRow, ScheduleStatus
from taskyard.schedules import Schedules, make_rule
from taskyard.yard import Yard

ROOMY = 110
"""Columns of a window from which on there is room for everything."""

LAST_FIRES = 10


# --- looking ----------------------------------------------------------------------------------------------------------


async def list_schedules(target: Target, *, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        found = [
            (status, await yard.schedules.next_fires(status, count=1)) for status in await yard.schedules.list_all()
        ]
    if as_json:
        say_json([schedule_document(*pair) for pair in found])
        return 0
    console = make_console()
    if found:
        show(console, _table(found, console.width, datetime.now(UTC)))
    else:
        hint = "taskyard schedule add NAME CONSUMER --cron '0 4 * * *'"
        show(console, Text(f"no schedules; add one with: {hint}", "dim"))
    return 0


async def show_schedule(target: Target, name: str, *, count: int, reveal: bool, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        status = await yard.schedules.get(name)
        upcoming = await yard.schedules.next_fires(status, count=max(1, count))
        rows = await yard.schedules.list_fires(name, limit=LAST_FIRES)
        outcomes = await yard.store.outcomes([row.task for row in rows])
    if as_json:
        document = schedule_document(status, upcoming, count=count, reveal=reveal)
        say_json({**document, "fires": [_fire_document(*pair) for pair in zip(rows, outcomes, strict=True)]})
    else:
        fires = list(zip(rows, outcomes, strict=True))
        show(make_console(), _page(status, upcoming, fires, count=count, reveal=reveal, now=datetime.now(UTC)))
    return 0


def schedule_document(
    status: ScheduleStatus, upcoming: Sequence[datetime], *, count: int = 1, reveal: bool = False
) -> dict[str, Any]:
    schedule, state = status.schedule, status.state
    document: dict[str, Any] = {
        "name": status.name,
        "state": _state_of(status, upcoming)[0],
        "next": upcoming[:count],
        "counts": {"fired": state.fired, "missed": state.missed, "skipped": state.skipped},
        "busy": status.is_busy,
        "buffered_at": state.buffered_at,
        "paused_at": state.paused_at,
        "paused_by": state.paused_by,
        "note": state.note,
        "watermark_at": state.watermark_at,
        "by": status.by,
        "from_code": status.from_code,
        "problem": status.problem,
    }
    if schedule is None:
        return document
    fields = msgspec.structs.asdict(schedule)
    args = _args(schedule, reveal=reveal)
    return {**document, **fields, "priority": schedule.priority.label, "args": args, "words": describe(schedule.rule)}


def _fire_document(row: FireRow, outcome: Outcome | None) -> dict[str, Any]:
    state = None if outcome is None else outcome.state
    return {"fire_at": row.fire_at, "kind": row.kind, "task": row.task, "state": state}


def _args(schedule: Schedule, *, reveal: bool) -> Any:
    args = msgspec.json.decode(schedule.args)
    return args if reveal else redact(args)


def _state_of(status: ScheduleStatus, upcoming: Sequence[datetime]) -> tuple[str, str, str]:
    """A word, its sign and its colour."""
    if status.schedule is None:
        return "unreadable", "✘", "bold red"
    if status.state.paused_at is not None:
        return "paused", "‖", "magenta"
    if not upcoming:
        return "over", "✔", "dim"
    return "active", "●", "green"


def _table(found: Sequence[tuple[ScheduleStatus, Sequence[datetime]]], width: int, now: datetime) -> Table:
    """In a narrow window what matters less is left out."""
    roomy = width >= ROOMY
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for heading in ("NAME", "STATE", "NEXT"):
        table.add_column(heading, no_wrap=True)
    for heading in ("FIRED", "MISSED", "SKIPPED") if roomy else ("FIRED",):
        table.add_column(heading, no_wrap=True, justify="right")
    if roomy:
        table.add_column("SOURCE", no_wrap=True)
    table.add_column("RULE", no_wrap=True, overflow="ellipsis", ratio=1)
    for status, upcoming in found:
        word, sign, style = _state_of(status, upcoming)
        state, schedule = status.state, status.schedule
        cells = [Text(cut(clean(status.name), 32 if roomy else 18), "bold"), Text(f"{sign} {word}", style)]
        cells.append(Text(f"in {age(seconds_between(now, upcoming[0]))}" if upcoming else ""))
        cells += [Text(f"{n:,}", "dim") for n in (state.fired, state.missed, state.skipped)[: 3 if roomy else 1]]
        if roomy:
            cells.append(Text("" if schedule is None else cut(clean(schedule.consumer), 24), "dim"))
        table.add_row(*cells, _rule_cell(status))
    return table


def _rule_cell(status: ScheduleStatus) -> Text:
    if status.schedule is None:
        return Text(clean(status.problem), "red")
    words = Text(clean(describe(status.schedule.rule)))
    if status.state.paused_at is not None and status.state.note:
        words.append(f" · {clean(status.state.note)}", "magenta")
    return words


def _page(
    status: ScheduleStatus,
    upcoming: Sequence[datetime],
    fires: Sequence[tuple[FireRow, Outcome | None]],
    *,
    count: int,
    reveal: bool,
    now: datetime,
) -> RenderableType:
    word, sign, style = _state_of(status, upcoming)
    parts: list[RenderableType] = [Text.assemble((clean(status.name), "bold"), "  ", (f"{sign} {word}", style))]
    facts = Table.grid(padding=(0, 2))
    for label, value in _facts(status, reveal=reveal, now=now):
        facts.add_row(Text(f"  {label}", "dim"), Text(clean(value)))
    parts.append(facts)
    if upcoming[:count]:
        parts.append(Text("next", "dim"))
        parts += [Text(f"  {_shown(status, at)}  in {duration(seconds_between(now, at))}") for at in upcoming[:count]]
    if fires:
        parts.append(Text("last", "dim"))
        last = Table.grid(padding=(0, 2))
        for row, outcome in fires:
            ended = Text("forgotten", "dim") if outcome is None else state_text(outcome.state)
            last.add_row(Text(f"  {_shown(status, row.fire_at)}"), Text(str(row.kind), "dim"), ended, Text(row.task))
        parts.append(last)
    return Group(*parts)


def _facts(status: ScheduleStatus, *, reveal: bool, now: datetime) -> list[tuple[str, str]]:
    schedule, state = status.schedule, status.state
    counts = f"{state.fired:,} fired, {state.missed:,} missed, {state.skipped:,} skipped"
    facts = [("problem", status.problem)]
    if state.paused_at is not None:
        ago = f"{duration(seconds_between(state.paused_at, now))} ago"
        facts.append(
            ("paused", f"{ago}{state.paused_by and f' by {state.paused_by}'}{state.note and f': {state.note}'}")
        )
    if schedule is not None:
        args = _args(schedule, reveal=reveal)
        facts += [
            ("rule", _rule_text(schedule)),
            ("consumer", schedule.consumer),
            ("arguments", as_short_json(args) if args else ""),
            ("queue", schedule.queue or ""),
            ("missed", f"{schedule.missed}, up to {duration(schedule.catch_up_s)} back"),
            ("overlap", schedule.overlap),
            ("jitter", f"up to {duration(schedule.jitter_s)}" if schedule.jitter_s else ""),
            ("from", "" if schedule.start_at is None else _shown(status, schedule.start_at)),
            ("to", "" if schedule.end_at is None else _shown(status, schedule.end_at)),
        ]
    facts += [("so far", counts), ("defined", "in code" if status.from_code else f"by {status.by}")]
    if status.is_busy:
        kept = f"; that of {_shown(status, state.buffered_at)} waits for it" if state.buffered_at is not None else ""
        facts.append(("now", f"a task of it has not ended{kept}"))
    return [(label, value) for label, value in facts if value]


def _rule_text(schedule: Schedule) -> str:
    words = describe(schedule.rule)
    return f"{words}  ({schedule.rule.expression})" if isinstance(schedule.rule, Cron) else words


def _shown(status: ScheduleStatus, at: datetime) -> str:
    """As the clocks of its zone show it, or those here."""
    rule = None if status.schedule is None else status.schedule.rule
    there = at.astimezone(ZoneInfo(rule.zone)) if isinstance(rule, Cron) else at.astimezone()
    return there.strftime("%a %Y-%m-%d %H:%M:%S %z")


# --- steering ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draft:
    """A schedule as it was typed: the consumer is still to be found."""

    name: str
    consumer: str
    arguments: Arguments
    rule: str | float
    zone: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def make_draft(
    name: str,
    consumer: str,
    pairs: Sequence[str],
    whole: str | None,
    *,
    cron: str | None,
    zone: str | None,
    every: str | None,
    **typed: str | None,
) -> Draft:
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
            settings[option] = parse_option(option_of(option), parse, settings.pop(short))
    rule = cron if cron is not None else parse_option("--every", parse_duration, every or "")
    with typed_on_the_command_line():
        Schedule(name=name, rule=make_rule(rule, zone), consumer=consumer, **settings)
    return Draft(name, consumer, parse_arguments(pairs, whole), rule, zone, settings)


def _find_yard(target: Target) -> Yard:
    """The app's, if there is one: it knows the consumer."""
    return target.bare() if target.app_name is None else target.load()


async def add_schedule(target: Target, draft: Draft, *, replace: bool, as_json: bool) -> int:
    yard = _find_yard(target)
    arguments, consumer = draft.arguments.values, None
    if target.app_name is not None:
        consumer = yard.get_consumer(draft.consumer)
        if consumer.produce is None:
            arguments = fitting(consumer, draft.arguments)  # what is wrong is told before the store is perhaps made
    async with opened(yard, makes=consumer is not None):
        if consumer is None:
            consumer = await stand_in(yard, draft.consumer)
            complain("note", "no --app given: the arguments are not checked before a worker takes a task of it")
        made = yard.schedules.make(draft.name, draft.rule, consumer, arguments, zone=draft.zone, **draft.settings)
        status = await yard.schedules.put(made, by=asker(), replace=replace)
        upcoming = await yard.schedules.next_fires(status, count=1)
    _answer(status, upcoming, as_json=as_json)
    return 0


async def steer_schedule(
    target: Target, ask: Callable[[Schedules], Awaitable[ScheduleStatus]], *, as_json: bool
) -> int:
    async with opened(target.bare()) as yard:
        status = await ask(yard.schedules)
        upcoming = await yard.schedules.next_fires(status, count=1)
    _answer(status, upcoming, as_json=as_json)
    return 0


def _with_code(target: Target) -> Yard:
    """The app's: queue and arguments of a task that a schedule makes are as the consumer's code says."""
    if target.app_name is None:
        raise UsageError("what the schedule makes depends on its consumer's code; name the app with --app module:yard")
    return target.load()


async def run_schedule(target: Target, name: str, *, as_json: bool) -> int:
    async with opened(_with_code(target)) as yard:
        handle = await yard.schedules.run_now(name)
    _answer_with_tasks(name, [handle], as_json=as_json)
    return 0


async def backfill_schedule(
    target: Target, name: str, *, start: str, end: str, limit: int, again: bool, as_json: bool
) -> int:
    first, last = parse_option("--from", parse_moment, start), parse_option("--to", parse_moment, end)
    with typed_on_the_command_line():
        check_moment("start", first)
        check_moment("end", last)
    if last <= first:
        raise UsageError(f"--to {quote(end)} must be later than --from {quote(start)}")
    async with opened(_with_code(target)) as yard:
        handles = await yard.schedules.backfill(name, first, last, limit=limit, again=again)
    _answer_with_tasks(name, handles, as_json=as_json)
    return 0


async def remove_schedule(target: Target, name: str, *, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        status = await yard.schedules.get(name)
        await yard.schedules.remove(name)
    if as_json:
        say_json({"name": name, "removed": True, "from_code": status.from_code})
        return 0
    line = Text.assemble((clean(name), "bold"), "  removed; its tasks stay")
    if status.from_code:
        line.append("; the program that defines it puts it back when it starts", "yellow")
    make_console().print(line, soft_wrap=True)
    return 0


def _answer(status: ScheduleStatus, upcoming: Sequence[datetime], *, as_json: bool) -> None:
    if as_json:
        say_json(schedule_document(status, upcoming))
        return
    word, sign, style = _state_of(status, upcoming)
    line = Text.assemble((clean(status.name), "bold"), "  ", (f"{sign} {word}", style))
    if status.schedule is not None:
        line.append(f"  {clean(describe(status.schedule.rule))}", "dim")
    if upcoming:
        line.append(f"; next {_shown(status, upcoming[0])}", "dim")
    make_console().print(line, soft_wrap=True)


def _answer_with_tasks(name: str, handles: Sequence[TaskHandle], *, as_json: bool) -> None:
    """Standard output gets the ids alone; the rest is for people."""
    if as_json:
        say_json({"name": name, "tasks": [handle.uuid for handle in handles]})
        return
    for handle in handles:
        say(handle.uuid)
    words = f"{counted(len(handles), 'task')} of schedule {quote(name)}" if handles else "all have fired already"
    make_console(stderr=True).print(Text(clean(words), "dim"), soft_wrap=True)
