"""`taskyard failures`: the failed tasks of a store, by what they have in common."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.documents import Revealed
from taskyard.cli.target import Target, opened, why_nothing
from taskyard.cli.text import age, clean, cut, one_line, seconds_between, short_id
from taskyard.model.failures import FailureGroup
from taskyard.model.task_filter import TaskFilter
from taskyard.yard import Yard

Row = tuple[FailureGroup, str]
"""A group, and its message as it may be shown."""

NAMED = 10
"""Classes of error that are named where none matches."""


async def list_failures(target: Target, where: TaskFilter, *, limit: int, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        rows = [(group, await _message(yard, group)) for group in await yard.failures(where, limit=limit)]
        others = [] if rows else await yard.failures()
        unknown = "" if rows or as_json else await why_nothing(yard, target, where)
    if as_json:
        say_json([_document(group, message) for group, message in rows])
    else:
        show(make_console(), draw(rows, now=datetime.now(UTC), others=others, unknown=unknown))
    return 0


async def _message(yard: Yard, group: FailureGroup) -> str:
    """Without the secrets among the arguments of the task it is of."""
    record = await yard.store.find(group.uuid)
    return "" if record is None else Revealed(record).text(group.message)


def _document(group: FailureGroup, message: str) -> dict[str, Any]:
    return {
        "error": group.error,
        "consumer": group.consumer,
        "quarantined": group.is_quarantined,
        "count": group.count,
        "newest_at": group.newest_at,
        "uuid": group.uuid,
        "message": message,
    }


def draw(
    rows: Sequence[Row], *, now: datetime, others: Sequence[FailureGroup] = (), unknown: str = ""
) -> RenderableType:
    """`others` is what there is when nothing matches, and `unknown` what was asked for and nobody knows."""
    if not rows:
        return Text(clean(unknown), "dim") if unknown else _nothing(others)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in ("COUNT", "ERROR", "SOURCE", "NEWEST", "ID"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("COUNT", "NEWEST") else "left")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for group, message in rows:
        apart = Text("quarantined · " if group.is_quarantined else "", "magenta")
        table.add_row(
            Text(f"{group.count:,}"),
            Text(cut(clean(group.error), 28), "bold red"),
            Text(cut(clean(group.consumer), 20)),
            Text(age(seconds_between(group.newest_at, now)), "dim"),
            Text(short_id(group.uuid)),
            apart + Text(one_line(message, 120), "dim"),
        )
    hint = f"every run of one: taskyard show ID; send them again: taskyard retry --all{_options(rows[0][0])}"
    return Group(table, Text(), Text(hint, "dim"))


def _nothing(others: Sequence[FailureGroup]) -> Text:
    if not others:
        return Text("no task has failed", "dim")
    errors = sum((Counter({group.error: group.count}) for group in others), Counter[str]())
    known = ", ".join(
        f"{cut(clean(error), 60) or 'no error'} ({count:,})" for error, count in errors.most_common(NAMED)
    )
    return Text(f"no failed task matches; what failed ended with {known}{', …' * (len(errors) > NAMED)}", "dim")


def _options(group: FailureGroup) -> str:
    """How a command chooses what is in this group, whatever the consumer."""
    error = f" --error {shlex.quote(clean(group.error))}" if group.error else ""
    return error + (" --quarantined" if group.is_quarantined else "")
