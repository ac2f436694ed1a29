"""`taskyard group`: tasks that were submitted together, looked at and steered together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from taskyard.application.task_documents import TaskDocument
from taskyard.application.task_requests import GroupDocument, GroupReceipt
from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.errors import DONE, REFUSED
from taskyard.cli.formatting import counts_text, elapsed, state_text, summary_text
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import clean, counted, cut, duration, short_id

WIDE = 140
"""Columns of a window from which on there is room for whole ids."""


async def show_group(target: Target, ref: str, *, limit: int, as_json: bool) -> int:
    async with opened_application(target) as application:
        group = await application.tasks.get_group(ref, limit=limit)
    if as_json:
        say_json(group)
    else:
        console = make_console()
        show(console, _draw(group, console))
    return DONE


async def cancel_group(target: Target, ref: str, *, reason: str, as_json: bool) -> int:
    async with opened_application(target) as application:
        receipt = await application.tasks.cancel_group(ref, reason=reason)
    return _print_receipt(receipt, "canceled, or asked to stop", as_json=as_json)


async def retry_group(target: Target, ref: str, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        receipt = await application.tasks.retry_group(ref)
    return _print_receipt(receipt, "sent again", as_json=as_json)


def _print_receipt(receipt: GroupReceipt, what: str, *, as_json: bool) -> int:
    changed = receipt.changed
    if as_json:
        say_json(receipt)
    else:
        console = make_console()
        verb = "was" if changed == 1 else "were"
        console.print(Text(f"{counted(changed, 'task')} {verb} {what}" if changed else "nothing to change"))
        console.print(counts_text(receipt.states), soft_wrap=True)
    return DONE if changed else REFUSED


def _draw(group: GroupDocument, console: Console) -> RenderableType:
    now = datetime.now(UTC)
    progress = f"{group.finished:,} of {group.total:,} ended"
    head = Text.assemble(("group", "bold"), f"  {clean(group.group)}  ", (progress, "bold"))
    rows = group.tasks if group.summary is None else [*group.tasks, group.summary]
    table = _table(rows, group.group, console.width, now)
    parts: list[RenderableType] = [head, counts_text(group.states), Text(), table]
    left = group.total - len(group.tasks)
    if left > 0:
        parts.append(Text(f"… and {counted(left, 'task')} more; --limit shows more of them", "dim"))
    return Lines(*parts)


def _table(tasks: Sequence[TaskDocument], group: str, width: int, now: datetime) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in ("ID", "STATE", "CONSUMER", "TOOK"):
        table.add_column(name, no_wrap=True, justify="right" if name == "TOOK" else "left")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for task in tasks:
        detail = summary_text(task, now, 120)
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
