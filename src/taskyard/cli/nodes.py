"""`taskyard node`: lists the processes that run tasks, and drains one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from taskyard.application.node_documents import DrainReceipt, NodeDocument
from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import age, clean, counted, cut, duration, seconds_between
from taskyard.model.node import SKEW_S

WIDE_COLUMNS = 110
"""Columns of a window from which on every column has room."""

SHORT_INCARNATION = 8
"""Characters of an incarnation that are shown: it is random from the first one on."""

Cell = Callable[[NodeDocument], Text]


async def list_nodes(target: Target, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        found = await application.nodes.list()
    if as_json:
        say_json(found)
        return 0
    console = make_console()
    if found:
        show(console, _table(found, console.width, datetime.now(UTC)))
    else:
        show(console, Text("no node is on this store; start one with: taskyard worker module:yard", "dim"))
    return 0


async def drain_node(target: Target, ref: str, *, on: bool, as_json: bool) -> int:
    async with opened_application(target) as application:
        receipt = await application.nodes.drain(ref, draining=on)
    if as_json:
        say_json(receipt)
    else:
        state, next_ = (_state(receipt), _next_text(receipt)) if receipt.acknowledged else _not_acknowledged(receipt)
        label = f"{receipt.name} ({receipt.incarnation[:SHORT_INCARNATION]})"
        make_console().print(Text.assemble(clean(label), "  ", state, (f"; {next_}", "dim")), soft_wrap=True)
    return 0


def _next_text(node: NodeDocument) -> str:
    if not node.draining:
        return "it takes tasks again"
    left = f"it has {counted(node.running, 'task')} to finish, and" if node.running else "it runs nothing, and"
    return f"{left} takes no new ones"


def _not_acknowledged(receipt: DrainReceipt) -> tuple[Text, str]:
    request = "to drain" if receipt.draining else "to take tasks again"
    if not receipt.alive and receipt.beat_at is None:
        return _state(receipt), f"it was asked {request}, but its process is dead"
    state = Text("? not acknowledged", "yellow") if receipt.alive else _state(receipt)
    text = f"it was asked {request}, and has not answered; if it hangs, it does so when it goes on"
    if receipt.beat_at is not None:
        text += ", unless its tasks were given to others by then: see `taskyard node ls`"
    return state, text


def _table(nodes: Sequence[NodeDocument], width: int, now: datetime) -> Table:
    """A narrow window leaves out the columns that matter less."""
    is_wide = width >= WIDE_COLUMNS
    columns: dict[str, Cell] = {
        "NODE": lambda node: Text(clean(node.incarnation[:SHORT_INCARNATION])),
        "NAME": lambda node: Text(cut(clean(node.name), 32 if is_wide else 20), "bold"),
        "STATE": _state,
        "RUNNING": lambda node: Text(f"{node.running:,}"),
    }
    if any(node.beat_at is not None for node in nodes):
        columns["BEAT"] = lambda node: _ago(node.beat_at, now)
    if any(_clock_text(node) for node in nodes):
        columns["CLOCK"] = lambda node: Text(_clock_text(node), "yellow")
    if is_wide:
        columns["SINCE"] = lambda node: _ago(node.started_at, now)
        columns["HOST"] = lambda node: Text(cut(clean(node.host), 24), "dim")
        columns["PID"] = lambda node: Text(str(node.pid), "dim")
        columns["VERSION"] = lambda node: Text(cut(clean(node.version), 12), "dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right" if name in ("RUNNING", "PID") else "left")
    table.add_column("QUEUES", no_wrap=True, overflow="ellipsis", ratio=1)
    for node in nodes:
        table.add_row(*(cell(node) for cell in columns.values()), Text(clean(", ".join(node.queues)), "dim"))
    return table


def _clock_text(node: NodeDocument) -> str:
    """`1 h ahead`, if the clock of the node is wrong."""
    ahead_s = node.clock_ahead_s
    if ahead_s is None or abs(ahead_s) <= SKEW_S:
        return ""
    return f"{duration(abs(ahead_s))} {'ahead' if ahead_s > 0 else 'behind'}"


def _state(node: NodeDocument) -> Text:
    if not node.alive:
        return Text("✘ dead" if node.beat_at is None else "✘ silent", "bold red")
    if node.stopping:
        return Text("◐ stopping", "magenta")
    if node.draining:
        return Text("‖ draining" if node.running else "‖ drained", "magenta")
    return Text("● alive", "green")


def _ago(at: datetime | None, now: datetime) -> Text:
    return Text("" if at is None else f"{age(seconds_between(at, now))} ago", "dim")
