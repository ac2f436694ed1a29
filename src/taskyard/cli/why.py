"""`taskyard why`: why a task waits, and why the tasks in its way do."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskyard.application.task_documents import ChainLink
from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.formatting import state_text
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import clean, moment


async def explain(target: Target, ref: str, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        chain = await application.tasks.explain(ref)
    if as_json:
        say_json(chain)
        return 0
    parts: list[RenderableType] = []
    for link in chain:
        parts += [*([Text()] if parts else []), _head(link), Padding(_facts(link), (0, 0, 0, 2))]
    show(make_console(), Group(*parts))
    return 0


def _head(link: ChainLink) -> Text:
    return Text.assemble((clean(link.consumer), "bold"), "  ", clean(link.uuid), "  ", state_text(link.state))


def _facts(link: ChainLink) -> RenderableType:
    why = link.why
    if why is None:
        return Text(f"it does not wait: it is {link.state}", "dim")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("why", clean(why.text)),
        ("since", moment(why.since)),
        ("until", moment(why.until)),
        ("remedy", clean(why.remedy)),
    ):
        if value:
            table.add_row(name, Text(value))
    return table
