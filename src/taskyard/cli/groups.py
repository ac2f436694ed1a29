"""`taskyard group`: tasks that were submitted together, looked at and steered together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from taskyard.cli.asking import asker
from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.documents import task_document
from taskyard.cli.errors import DONE, REFUSED, NoGroup
from taskyard.cli.looks import counts_text, detail_text, elapsed, state_text
from taskyard.cli.target import Target, opened, resolve
from taskyard.cli.text import clean, counted, cut, duration, short_id
from taskyard.errors import UnknownGroup, UnknownTask
from taskyard.group import Group, GroupProgress
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.yard import Yard

WIDE = 140
"""Columns of a window from which on there is room for whole ids."""


async def show_group(target: Target, fragment: str, *, limit: int, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        group = await find_group(yard, fragment)
        progress = await group.progress()
        summary = await yard.store.find(group.id)
        tasks = await _list(yard, group.id, limit)
    if as_json:
        say_json({
            "group": group.id,
            "total": progress.total,
            "ended": progress.ended,
            "completed": progress.completed,
            "states": progress.states,
            "summary": None if summary is None else task_document(summary),
            "tasks": [task_document(task) for task in tasks],
        })  # fmt: skip
    else:
        console = make_console()
        show(console, _draw(group.id, progress, summary, tasks, console))
    return DONE


async def cancel_group(target: Target, fragment: str, *, reason: str, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        group = await find_group(yard, fragment)
        count = await group.cancel(reason=reason, by=asker())
        progress = await group.progress()
    return _tell(group.id, "canceled, or asked to stop", count, progress, as_json=as_json)


async def retry_group(target: Target, fragment: str, *, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        group = await find_group(yard, fragment)
        count = await group.retry(by=asker())
        progress = await group.progress()
    return _tell(group.id, "sent again", count, progress, as_json=as_json)


async def find_group(yard: Yard, fragment: str) -> Group:
    """The group of this id, or the one that the task of this id belongs to; the end or beginning of either will do
    where it is that of a task."""
    try:
        uuid = await resolve(yard, fragment)
    except UnknownTask:
        # Without a summary there is no task of the group's own id.
        if not await yard.store.count_group(fragment):
            raise UnknownGroup(fragment) from None
        return yard.group(fragment)
    record = await yard.handle(uuid).record()
    if record.group_id is None:
        raise NoGroup(uuid)
    return yard.group(record.group_id)


async def _list(yard: Yard, group: str, limit: int) -> list[TaskRecord]:
    """The tasks of a group, at most so many, those that have not completed first; each kind as it was submitted."""
    rest = tuple(state for state in TaskState if state is not TaskState.COMPLETED)
    found: list[TaskRecord] = []
    for states in (rest, (TaskState.COMPLETED,)):
        # One more: the summary, which is shown by itself, may be among them.
        page = await yard.store.list_tasks(TaskFilter(group=group, states=states), limit=limit + 1)
        found += sorted((record for record in page if record.uuid != group), key=lambda record: record.id)
    return found[:limit]


def _tell(group: str, what: str, count: int, progress: GroupProgress, *, as_json: bool) -> int:
    if as_json:
        say_json({"group": group, "changed": count, "states": progress.states})
    else:
        console = make_console()
        verb = "was" if count == 1 else "were"
        console.print(Text(f"{counted(count, 'task')} {verb} {what}" if count else "nothing is left to change"))
        console.print(counts_text(progress.states), soft_wrap=True)
    return DONE if count else REFUSED


def _draw(
    group: str, progress: GroupProgress, summary: TaskRecord | None, tasks: Sequence[TaskRecord], console: Console
) -> RenderableType:
    now = datetime.now(UTC)
    head = Text.assemble(
        ("group", "bold"), f"  {clean(group)}  ", (f"{progress.ended:,} of {progress.total:,} ended", "bold")
    )
    rows = tasks if summary is None else [*tasks, summary]
    parts: list[RenderableType] = [head, counts_text(progress.states), Text(), _table(rows, group, console.width, now)]
    left = progress.total - len(tasks)
    if left > 0:
        parts.append(Text(f"… and {counted(left, 'task')} more; --limit shows more of them", "dim"))
    return Lines(*parts)


def _table(tasks: Sequence[TaskRecord], group: str, width: int, now: datetime) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in ("ID", "STATE", "SOURCE", "TOOK"):
        table.add_column(name, no_wrap=True, justify="right" if name == "TOOK" else "left")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for task in tasks:
        detail = detail_text(task, now, 120)
        if task.uuid == group:
            detail = Text.assemble(("summary", "bold"), ("  " if detail else ""), detail)
        table.add_row(
            Text(clean(task.uuid) if width >= WIDE else short_id(task.uuid)),
            state_text(task.state),
            Text(cut(clean(task.consumer), 24)),
            Text(duration(elapsed(task, now)) if task.started_at else "", "dim"),
            detail,
        )
    return table
