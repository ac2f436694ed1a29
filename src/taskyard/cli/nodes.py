"""`taskyard node`: who runs tasks on a store, and taking one of them out of service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.errors import AmbiguousNode
from taskyard.cli.target import SHORTEST, Target, opened
from taskyard.cli.text import age, clean, counted, cut, duration, seconds_between
from taskyard.errors import UnknownNode
from taskyard.model.node import NodeStatus
from taskyard.ports.store import Store

ROOMY = 110
"""Columns of a window from which on there is room for everything."""

SHORT = 8
"""Characters of an incarnation that are shown: it is random from its first one on."""

HEARD_S, LOOK_S = 2.0, 0.1
"""How long a node may take to say that it has heard of a drain, and how often it is looked at meanwhile."""

Cell = Callable[[NodeStatus], Text]


async def list_nodes(target: Target, *, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        found = sorted(await yard.store.nodes(), key=lambda status: (status.node.name, status.node.incarnation))
        dead = await yard.store.dead_nodes()
    if as_json:
        say_json([node_document(status, dead) for status in found])
        return 0
    console = make_console()
    if found:
        show(console, _table(found, dead, console.width, datetime.now(UTC)))
    else:
        show(console, Text("no node is on this store; start one with: taskyard worker module:yard", "dim"))
    return 0


async def drain_node(target: Target, given: str, *, on: bool, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        found = resolve_node(await yard.store.nodes(), given)
        dead = await yard.store.dead_nodes()
        await yard.store.drain(found.node.incarnation, on=on)
        is_heard = node_document(found, dead)["alive"] and await _hears(yard.store, found.node.incarnation, on)
    # As it was found: a worker that runs nothing may be gone by now.
    status = msgspec.structs.replace(found, is_draining=on)
    if as_json:
        say_json(node_document(status, dead) | {"heard": is_heard})
    else:
        state, next_ = (_state(status, dead), _what_next(status)) if is_heard else _unheard(status, dead)
        line = Text.assemble(clean(status.node.label), "  ", state, (f"; {next_}", "dim"))
        make_console().print(line, soft_wrap=True)
    return 0


async def _hears(store: Store, incarnation: str, on: bool) -> bool:
    """Whether the node says so, or is gone: a worker that is drained and runs nothing ends."""
    until = time.monotonic() + HEARD_S
    while True:
        nodes = {status.node.incarnation: status.node for status in await store.nodes()}
        if incarnation not in nodes or nodes[incarnation].is_draining is on:
            return True
        if time.monotonic() >= until:
            return False
        await asyncio.sleep(LOOK_S)


def _unheard(status: NodeStatus, dead: Collection[str]) -> tuple[Text, str]:
    """A drain that was asked for, and may never be heard."""
    what = "to drain" if status.is_draining else "to take tasks again"
    if status.node.incarnation in dead:
        return _state(status, dead), f"it was asked {what}, but will not hear of it"
    state = _state(status, dead) if status.is_silent else Text("? not heard", "yellow")
    text = f"it was asked {what}, and has not said that it heard of it; if it hangs, it hears when it goes on"
    if status.beat_at is not None:
        text += ", unless the others have given it up by then: look at `taskyard node ls` again"
    return state, text


def resolve_node(nodes: Sequence[NodeStatus], given: str) -> NodeStatus:
    """The one node with this name or incarnation, or whose incarnation begins so."""
    exact = [status for status in nodes if given in (status.node.name, status.node.incarnation)]
    begins = [status for status in nodes if status.node.incarnation.startswith(given.lower())]
    found = exact or (begins if len(given) >= SHORTEST else [])
    if not found:
        raise UnknownNode(given)
    if len(found) > 1:
        raise AmbiguousNode(given, [clean(status.node.label) for status in found])
    return found[0]


def node_document(status: NodeStatus, dead: Collection[str]) -> dict[str, Any]:
    node = status.node
    return {
        "name": node.name,
        "incarnation": node.incarnation,
        "version": node.version,
        "host": node.host,
        "pid": node.pid,
        "queues": node.queues,
        "consumers": node.consumers,
        "running": status.running,
        "draining": status.is_draining,
        "stopping": node.is_stopping,
        "alive": not status.is_silent and node.incarnation not in dead,
        "beat_at": status.beat_at,
        "started_at": node.started_at,
        "clock_ahead_s": status.ahead_s,
    }


def _what_next(status: NodeStatus) -> str:
    if not status.is_draining:
        return "it takes tasks again"
    left = f"it has {counted(status.running, 'task')} to finish, and" if status.running else "it runs nothing, and"
    return f"{left} takes no new ones"


def _table(nodes: Sequence[NodeStatus], dead: Collection[str], width: int, now: datetime) -> Table:
    """In a narrow window what matters less is left out."""
    roomy = width >= ROOMY
    columns: dict[str, Cell] = {
        "NODE": lambda status: Text(clean(status.node.incarnation[:SHORT])),
        "NAME": lambda status: Text(cut(clean(status.node.name), 32 if roomy else 20), "bold"),
        "STATE": lambda status: _state(status, dead),
        "RUNNING": lambda status: Text(f"{status.running:,}"),
    }
    if any(status.beat_at is not None for status in nodes):
        columns["BEAT"] = lambda status: _ago(status.beat_at, now)
    if any(status.is_clock_off for status in nodes):
        columns["CLOCK"] = lambda status: Text(clock_text(status), "yellow")
    if roomy:
        columns["SINCE"] = lambda status: _ago(status.node.started_at, now)
        columns["HOST"] = lambda status: Text(cut(clean(status.node.host), 24), "dim")
        columns["PID"] = lambda status: Text(str(status.node.pid), "dim")
        columns["VERSION"] = lambda status: Text(cut(clean(status.node.version), 12), "dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right" if name in ("RUNNING", "PID") else "left")
    table.add_column("QUEUES", no_wrap=True, overflow="ellipsis", ratio=1)
    for status in nodes:
        table.add_row(*(cell(status) for cell in columns.values()), Text(clean(", ".join(status.node.queues)), "dim"))
    return table


def clock_text(status: NodeStatus) -> str:
    """`1 h ahead`, of a clock that is wrong."""
    if status.ahead_s is None or not status.is_clock_off:
        return ""
    return f"{duration(abs(status.ahead_s))} {'ahead' if status.ahead_s > 0 else 'behind'}"


def _state(status: NodeStatus, dead: Collection[str]) -> Text:
    if status.node.incarnation in dead:
        return Text("✘ dead", "bold red")
    if status.is_silent:
        return Text("✘ silent", "bold red")
    if status.node.is_stopping:
        return Text("◐ stopping", "magenta")
    if status.is_draining:
        return Text("‖ draining" if status.running else "‖ drained", "magenta")
    return Text("● alive", "green")


def _ago(at: datetime | None, now: datetime) -> Text:
    return Text("" if at is None else f"{age(seconds_between(at, now))} ago", "dim")
