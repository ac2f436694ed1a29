"""`taskyard failures`: the failed tasks of a store, by what they have in common."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.application.task_documents import FailureDocument, FailurePage
from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import age, clean, cut, one_line, seconds_between, short_id
from taskyard.model.task_filter import TaskFilter

MAX_ERROR_NAMES = 10
"""Error classes named when no failed task matches."""


async def list_failures(target: Target, where: TaskFilter, *, limit: int, as_json: bool) -> int:
    async with opened_application(target) as application:
        page = await application.tasks.failures(where, limit=limit)
    if as_json:
        say_json(page.groups)
    else:
        show(make_console(), draw(page, now=datetime.now(UTC)))
    return 0


def draw(page: FailurePage, *, now: datetime) -> RenderableType:
    if not page.groups:
        return Text(clean(page.no_match), "dim") if page.no_match else _no_failures(page.other_errors)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in ("COUNT", "ERROR", "CONSUMER", "NEWEST", "ID"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("COUNT", "NEWEST") else "left")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for group in page.groups:
        apart = Text("quarantined · " if group.quarantined else "", "magenta")
        table.add_row(
            Text(f"{group.count:,}"),
            Text(cut(clean(group.error), 28), "bold red"),
            Text(cut(clean(group.consumer), 20)),
            Text(age(seconds_between(group.newest_at, now)), "dim"),
            Text(short_id(group.uuid)),
            apart + Text(one_line(group.message, 120), "dim"),
        )
    hint = f"details: taskyard show ID; retry: taskyard retry --all{_options(page.groups[0])}"
    return Group(table, Text(), Text(hint, "dim"))


def _no_failures(others: dict[str, int]) -> Text:
    if not others:
        return Text("no task has failed", "dim")
    named = [f"{cut(clean(error), 60) or 'no error'} ({count:,})" for error, count in others.items()]
    more = ", …" if len(named) > MAX_ERROR_NAMES else ""
    return Text(f"no failed task matches; what failed ended with {', '.join(named[:MAX_ERROR_NAMES])}{more}", "dim")


def _options(group: FailureDocument) -> str:
    """How a command chooses what is in this group, whatever the consumer."""
    error = f" --error {shlex.quote(clean(group.error))}" if group.error else ""
    return error + (" --quarantined" if group.quarantined else "")
