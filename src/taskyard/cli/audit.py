"""`taskyard audit`: who asked for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from taskyard.application.audit_documents import AuditDocument, AuditPage
from taskyard.cli.console import json_text, make_console, say_json, show
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import clean, cut, moment
from taskyard.model.audit import SHELL_WORDS
from taskyard.model.order import Priority

_WORDS = {name: word for word, names in SHELL_WORDS.items() for name in names}

SHORT_ID = 8
"""Characters of an id that are shown, its last ones: the ids of one moment begin alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRequest:
    """Which entries to list."""

    by: str | None
    command: str | None
    task: str | None
    queue: str | None
    device: str | None
    limit: int
    before: int | None


async def show_audit(target: Target, asked: AuditRequest, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        page = await application.audit.list(**asdict(asked))
    if as_json:
        say_json(page)
        return 0
    console = make_console()
    if page.entries:
        show(console, _table(page.entries))
        _tell_next(page)
    elif any(
        value is not None for value in (asked.by, asked.command, asked.task, asked.queue, asked.device, asked.before)
    ):
        show(console, Text("nothing matches", "dim"))
    else:
        show(console, Text("nothing is recorded; commands on tasks, queues, schedules, nodes and devices are", "dim"))
    return 0


def _tell_next(page: AuditPage) -> None:
    if page.next is not None:
        make_console(stderr=True).print(Text(f"older: --before {page.next}", "dim"), soft_wrap=True)


def _table(entries: Sequence[AuditDocument]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in ("WHEN", "WHO", "VIA", "COMMAND"):
        table.add_column(name, no_wrap=True)
    table.add_column("CHANGED", no_wrap=True, justify="right")
    table.add_column("TARGET", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("REASON", no_wrap=True, overflow="ellipsis", ratio=1)
    for one in entries:
        table.add_row(
            Text(moment(one.at), "dim"),
            Text(cut(clean(one.actor), 24), "bold"),
            Text(one.via, "dim"),
            Text(clean(_WORDS.get(one.command, one.command))),
            _counts_text(one),
            Text(clean(target_text(one))),
            Text(clean(one.reason), "dim"),
        )
    return table


def _counts_text(entry: AuditDocument) -> Text:
    counts = f"{entry.changed:,}" if entry.changed == entry.matched else f"{entry.changed:,} of {entry.matched:,}"
    return Text(counts) if entry.finished else Text(f"{counts}, not finished", "yellow")


def target_text(entry: AuditDocument) -> str:
    """`queue cpu`, `task …23a4b5c6`, or the filter as JSON."""
    details = {name: value for name, value in entry.details.items() if name != "where"}
    if "priority" in details:
        details["priority"] = Priority.of(details["priority"]).name.lower()
    words = [f"{name}={json_text(value, pretty=False)}" for name, value in details.items()]
    if entry.kind == "tasks":
        target = f"tasks {json_text(entry.details.get('where', {}), pretty=False)}"
    elif entry.kind == "task":
        target = f"task …{entry.target[-SHORT_ID:]}"
    else:
        target = f"{entry.kind} {entry.target}"
    return "  ".join([target, *words])
