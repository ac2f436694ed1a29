"""`taskyard ls`: the tasks of a store, newest first."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.cli.console import LINE_WIDTH, make_console, say_json, show
from taskyard.cli.documents import priority_label, sum_states, task_document
from taskyard.cli.looks import counts_text, detail_text, elapsed, state_text
from taskyard.cli.target import Target, opened, resolve, why_nothing
from taskyard.cli.text import age, clean, cut, duration, label_text, one_line, seconds_between, short_id
from taskyard.cli.why import why_document, why_line
from taskyard.model.order import Priority
from taskyard.model.state import TaskState
from taskyard.model.task import DEFAULT_QUEUE, TaskRecord
from taskyard.model.task_filter import TaskFilter

ROOMY, WIDE = 100, 140
"""Columns of a window from which on there is room for everything, and for whole ids as well."""

PAGE = 20
"""Tasks on a page, unless one asks for another number."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One page. `before` is where the next one begins, if there is more; `held` says by uuid what a task waits for, and
    `unknown` what of that which was asked for nobody knows, if that is why there is none."""

    tasks: Sequence[TaskRecord]
    counts: Mapping[TaskState, int]
    before: str | None
    held: Mapping[str, str] = field(default_factory=dict)
    unknown: str = ""


async def list_tasks(target: Target, where: TaskFilter, *, before: str | None, limit: int, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        before_id = None
        if before is not None:
            record = await yard.handle(await resolve(yard, before)).record()
            before_id = record.id
        # One more than is shown tells whether there is more.
        found = await yard.store.list_tasks(where, before_id=before_id, limit=limit + 1)
        counted = await yard.store.count()
        counts = sum_states(counted, None if where.queue is None else [where.queue])
        whys = await yard.why_many(found[:limit])
        unknown = "" if found or as_json else await why_nothing(yard, target, where)
    held = {task.uuid: line for task, why in zip(found, whys, strict=False) if (line := why_line(why, task))}
    listing = Listing(
        found[:limit],
        counts or sum_states(counted),
        found[limit - 1].uuid if len(found) > limit else None,
        held,
        unknown,
    )
    if as_json:
        tasks = [
            {**task_document(task), "why": why_document(why, task)}
            for task, why in zip(listing.tasks, whys, strict=True)
        ]
        say_json({"tasks": tasks, "counts": counts, "before": listing.before})
    else:
        console = make_console(pipe_width=LINE_WIDTH)
        show(console, draw(listing, console, again=_again(where, limit), now=datetime.now(UTC)))
    return 0


def _again(where: TaskFilter, limit: int) -> str:
    """What was asked for, as it is typed."""
    states = [] if where.states is None else ["--state", ",".join(where.states)]
    queue = [] if where.queue is None else ["--queue", where.queue]
    source = [] if where.consumer is None else ["--consumer", where.consumer]
    blocker = [] if where.blocker is None else ["--blocker", where.blocker]
    labels = [part for name, value in where.labels.items() for part in ("--label", f"{name}={value}")]
    number = [] if limit == PAGE else ["-n", str(limit)]
    return clean(shlex.join(["taskyard", "ls", *states, *queue, *source, *labels, *blocker, *number]))


def draw(listing: Listing, console: Console, *, again: str = "taskyard ls", now: datetime) -> RenderableType:
    parts: list[RenderableType] = []
    if listing.tasks:
        parts += [_table(listing, console.width, now), Text()]
    elif listing.counts:
        why = f"{clean(listing.unknown)}. In" if listing.unknown else "no task fits; in"
        parts.append(Text(f"{why} the store there are:", "dim"))
    parts.append(counts_text(listing.counts))
    if listing.before is not None:
        parts.append(Text(f"the next ones: {again} --before {short_id(listing.before)}", "dim"))
    return Group(*parts)


def _table(listing: Listing, width: int, now: datetime) -> Table:
    """What would be the same in every row is left out, and in a narrow window what matters less."""
    tasks = listing.tasks
    roomy, wide = width >= ROOMY, width >= WIDE
    room = LINE_WIDTH if width >= LINE_WIDTH else 120
    columns: dict[str, Callable[[TaskRecord], Text]] = {
        "ID": lambda task: Text(clean(task.uuid) if wide else short_id(task.uuid)),
        "STATE": lambda task: state_text(task.state),
        "SOURCE": lambda task: Text(cut(clean(task.consumer), 24 if roomy else 14)),
    }
    if roomy and any(task.queue != DEFAULT_QUEUE for task in tasks):
        columns["QUEUE"] = lambda task: Text(cut(clean(task.queue), 16), "dim")
    if any(task.priority != Priority.NORMAL for task in tasks):
        columns["PRIORITY" if roomy else ""] = lambda task: _priority(task.priority, roomy)
    if roomy or any(task.attempt > 1 for task in tasks):
        columns["TRY"] = lambda task: Text(str(task.attempt or ""), "dim")
    if any(task.title for task in tasks):
        columns["TITLE"] = lambda task: Text(cut(clean(task.title), 40 if roomy else 20))
    if roomy and any(task.labels for task in tasks):
        columns["LABELS"] = lambda task: Text(cut(clean(label_text(task.labels)), 40), "dim")
    columns["AGE"] = lambda task: Text(age(seconds_between(task.created_at, now)), "dim")
    columns["TOOK"] = lambda task: Text(_took(task, now), "dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right" if name in ("TRY", "AGE", "TOOK") else "left")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for task in tasks:
        held = listing.held.get(task.uuid)
        detail = detail_text(task, now, room) if held is None else Text(one_line(held, room), "dim")
        table.add_row(*(cell(task) for cell in columns.values()), detail)
    return table


def _priority(priority: int, in_words: bool) -> Text:
    sign, style = {Priority.HIGH: ("↑", "bold"), Priority.LOW: ("↓", "dim")}.get(Priority(priority), ("", ""))
    return Text(priority_label(priority) if in_words else sign, style)


def _took(task: TaskRecord, now: datetime) -> str:
    ran = task.started_at is not None and (task.state is TaskState.RUNNING or task.finished_at is not None)
    return duration(elapsed(task, now)) if ran else ""
