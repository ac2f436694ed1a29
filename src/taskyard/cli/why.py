"""`taskyard why`: what holds a task that waits; and the same in the lists of others."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.documents import Revealed
from taskyard.cli.looks import state_text
from taskyard.cli.target import Target, opened, resolve
from taskyard.cli.text import clean, moment, short_id
from taskyard.model.task import TaskRecord
from taskyard.model.why import Reason, Why
from taskyard.yard import Yard

LONGEST_CHAIN = 10
"""Tasks that are asked about in a row, each because it is in the way of the one before."""

TOLD_OTHERWISE = frozenset({Reason.SCHEDULED, Reason.BACKOFF, Reason.TURN})
"""What a list says in its own way, or has no need to say."""

Link = tuple[TaskRecord, Why | None]


async def explain(target: Target, fragment: str, *, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        chain = await _follow(yard, await resolve(yard, fragment))
    if as_json:
        say_json([_link_document(record, why) for record, why in chain])
        return 0
    parts: list[RenderableType] = []
    for record, why in chain:
        parts += [*([Text()] if parts else []), _head(record), Padding(_facts(record, why), (0, 0, 0, 2))]
    show(make_console(), Group(*parts))
    return 0


async def _follow(yard: Yard, uuid: str) -> list[Link]:
    """The task, then whoever is in its way, and so on to one that does not wait or that no task holds."""
    chain: list[Link] = []
    left: str | None = uuid
    while left is not None and len(chain) < LONGEST_CHAIN and left not in {record.uuid for record, _ in chain}:
        record = await yard.store.find(left)
        if record is None:
            break  # it has been forgotten meanwhile
        (why,) = await yard.why_many([record])
        chain.append((record, why))
        left = None if why is None else why.blocker
    return chain


def why_document(why: Why | None, record: TaskRecord) -> dict[str, Any] | None:
    if why is None:
        return None
    return {
        "reason": why.reason,
        "text": Revealed(record).text(why.text),
        "remedy": why.remedy,
        "since": why.since,
        "until": why.until,
        "blocker": why.blocker,
    }


def _link_document(record: TaskRecord, why: Why | None) -> dict[str, Any]:
    return {
        "uuid": record.uuid,
        "consumer": record.consumer,
        "queue": record.queue,
        "state": record.state,
        "why": why_document(why, record),
    }


def why_line(why: Why | None, record: TaskRecord) -> str | None:
    """What holds it, for a line in a list; None where the list says enough."""
    if why is None or why.reason in TOLD_OTHERWISE:
        return None
    text = why.text if why.blocker is None else why.text.replace(why.blocker, short_id(why.blocker))
    return clean(Revealed(record).text(text))


def _head(record: TaskRecord) -> Text:
    return Text.assemble((clean(record.consumer), "bold"), "  ", clean(record.uuid), "  ", state_text(record.state))


def _facts(record: TaskRecord, why: Why | None) -> RenderableType:
    if why is None:
        return Text(f"it does not wait: it is {record.state}", "dim")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("why", clean(Revealed(record).text(why.text))),
        ("since", moment(why.since)),
        ("until", moment(why.until)),
        ("remedy", clean(why.remedy)),
    ):
        if value:
            table.add_row(name, Text(value))
    return table
