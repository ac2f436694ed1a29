"""`taskyard ls`: the tasks of a store, newest first."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.application.task_documents import PriorityName, TaskDocument, TaskPage
from taskyard.cli.console import LINE_WIDTH, make_console, say_json, show
from taskyard.cli.formatting import counts_text, elapsed, state_text, summary_text, why_line
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import age, clean, cut, duration, label_text, one_line, seconds_between, short_id
from taskyard.model.state import TaskState
from taskyard.model.task import DEFAULT_QUEUE
from taskyard.model.task_filter import TaskFilter

KEYED, ROOMY, WIDE = 76, 100, 140
"""Columns of a window from which on there is room for keys where there is no title, for everything, and for whole ids
as well."""

PAGE = 20
"""Tasks on a page, unless one asks for another number."""


async def list_tasks(target: Target, where: TaskFilter, *, before: str | None, limit: int, as_json: bool) -> int:
    async with opened_application(target) as application:
        page = await application.tasks.list(where, before=before, limit=limit)
    if as_json:
        say_json(page)
    else:
        console = make_console(pipe_width=LINE_WIDTH)
        show(console, draw(page, console, again=_again(where, limit), now=datetime.now(UTC)))
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


def draw(page: TaskPage, console: Console, *, again: str = "taskyard ls", now: datetime) -> RenderableType:
    parts: list[RenderableType] = []
    counts = page.counts or page.store_counts
    if page.tasks:
        parts += [_table(page, console.width, now), Text()]
    elif counts:
        why = f"{clean(page.no_match)}. In" if page.no_match else "no task matches; in"
        parts.append(Text(f"{why} the store there are:", "dim"))
    parts.append(counts_text(counts))
    if page.next_before is not None:
        parts.append(Text(f"next page: {again} --before {short_id(page.next_before)}", "dim"))
    return Group(*parts)


def _table(page: TaskPage, width: int, now: datetime) -> Table:
    """What would be the same in every row is left out, and in a narrow window what matters less."""
    tasks = page.tasks
    roomy, wide = width >= ROOMY, width >= WIDE
    room = LINE_WIDTH if width >= LINE_WIDTH else 120
    columns: dict[str, Callable[[TaskDocument], Text]] = {
        "ID": lambda task: Text(clean(task.uuid) if wide else short_id(task.uuid)),
        "STATE": lambda task: state_text(task.state),
        "CONSUMER": lambda task: Text(cut(clean(task.consumer), 24 if roomy else 14)),
    }
    if roomy and any(task.queue != DEFAULT_QUEUE for task in tasks):
        columns["QUEUE"] = lambda task: Text(cut(clean(task.queue), 16), "dim")
    if any(task.priority != "normal" for task in tasks):
        columns["PRIORITY" if roomy else ""] = lambda task: _priority(task.priority, roomy)
    if roomy or any(task.attempt > 1 for task in tasks):
        columns["TRY"] = lambda task: Text(str(task.attempt or ""), "dim")
    titled = any(task.title for task in tasks)
    if any(task.key for task in tasks) and (roomy or (width >= KEYED and not titled)):
        columns["KEY"] = lambda task: Text(cut(clean(task.key or ""), 20 if wide else 12))
    if titled:
        columns["TITLE"] = lambda task: Text(cut(clean(task.title), 40 if roomy else 20))
    if roomy and any(task.labels for task in tasks):
        columns["LABELS"] = lambda task: Text(cut(clean(label_text(task.labels)), 40), "dim")
    if roomy and any(task.device for task in tasks):
        columns["PLACE"] = lambda task: Text(cut(clean(task.device or ""), 16), "dim")
    columns["AGE"] = lambda task: Text(age(seconds_between(task.created_at, now)), "dim")
    columns["TOOK"] = lambda task: Text(_took(task, now), "dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right" if name in ("TRY", "AGE", "TOOK") else "left")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for task in tasks:
        waits = why_line(task.why)
        detail = summary_text(task, now, room) if waits is None else Text(one_line(waits, room), "dim")
        table.add_row(*(cell(task) for cell in columns.values()), detail)
    return table


def _priority(priority: PriorityName, in_words: bool) -> Text:
    symbol, style = {"high": ("↑", "bold"), "low": ("↓", "dim")}.get(priority, ("", ""))
    return Text(priority if in_words else symbol, style)


def _took(task: TaskDocument, now: datetime) -> str:
    ran = task.started_at is not None and (task.state is TaskState.RUNNING or task.finished_at is not None)
    return duration(elapsed(task, now)) if ran else ""
