"""`taskyard queue`: what the queues of a store hold, how fast they go, and steering them as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from taskyard.cli.asking import asker
from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.errors import DONE
from taskyard.cli.looks import rate_text
from taskyard.cli.story import look_back
from taskyard.cli.target import Target, opened, refuse_unknown_queue
from taskyard.cli.text import age, clean, counted, cut, one_line, seconds_between
from taskyard.model.notes import AuditStamp
from taskyard.model.queue import QueueOrder, QueueState, QueueStatus
from taskyard.model.state import ENDED, TaskState
from taskyard.ports.store import Store
from taskyard.queueing.controller import QueueController

ROOMY = 110
"""Columns of a window from which on there is room for everything."""

RATE_OVER_S = 60.0
"""How fast a queue goes is of the last minute."""

LOOK_BACK = 10_000
"""Events read to know it, which is what a store keeps of them; on a busy one they are of less than a minute."""

LATER = (TaskState.SCHEDULED, TaskState.RETRYING, TaskState.BLOCKED, TaskState.PAUSED)

PAGES = 20
"""Of a thousand events each, read at most: what is busier than we read must not keep us for ever."""

_S = QueueState
_LOOKS: dict[QueueState, tuple[str, str]] = {
    _S.RUNNING: ("● running", "green"),
    _S.STOPPING: ("◐ stopping", "yellow"),
    _S.PAUSED: ("‖ paused", "magenta"),
}

_ENDS = frozenset(str(state) for state in ENDED)

Ask = Callable[[QueueController], Awaitable[QueueStatus]]
Cell = Callable[[QueueStatus], Text]


async def list_queues(target: Target, *, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        found = await yard.queues()
        now = datetime.now(UTC)
        rates = await _rates(yard.store, now)
    if as_json:
        say_json([{**queue_document(status), "rate": rates.get(status.name, 0.0)} for status in found])
        return DONE
    console = make_console()
    if found:
        said = [line for status in found for line in _said(status, now)]
        show(console, Group(_table(found, rates, console.width, now), *([Text(), *said] if said else [])))
    else:
        show(console, Text("no queue has anything yet; one is made by the first task that is submitted to it", "dim"))
    return DONE


async def steer_queue(target: Target, name: str, ask: Ask, *, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        await refuse_unknown_queue(yard, name)
        status = await ask(yard.queue(name, by=asker()))
    if as_json:
        say_json(queue_document(status))
    else:
        line = Text.assemble((clean(status.name), "bold"), "  ", _state(status), (f"; {_what_next(status)}", "dim"))
        make_console().print(line, soft_wrap=True)
    return DONE


async def _rates(store: Store, now: datetime) -> dict[str, float]:
    """Tasks of each queue that ended, per second."""
    ended: Counter[str] = Counter()
    place, since, first = await look_back(store, LOOK_BACK), now - timedelta(seconds=RATE_OVER_S), now
    for _ in range(PAGES):
        page = await store.events(after=place)
        if not page.events:
            break
        first, place = min(first, page.events[0].at), page.last
        ended.update(event.queue for event in page.events if event.kind in _ENDS and event.at >= since)
    # What there was before the first event that is left is unknown, unless that is of long ago.
    over_s = min(RATE_OVER_S, max(1.0, (now - first).total_seconds()))
    return {queue: count / over_s for queue, count in ended.items()}


def queue_document(status: QueueStatus) -> dict[str, Any]:
    control = status.control
    return {
        "name": status.name,
        "state": control.state,
        "said": _said_document(control.state_set),
        "running": status.counts.get(TaskState.RUNNING, 0),
        "limit": _limit(status),
        "concurrency": status.settings.concurrency,
        "override": control.concurrency,
        "limited": _said_document(control.concurrency_set),
        "order": status.settings.order,
        "per_key": status.settings.per_key,
        "counts": status.counts,
        "oldest_due_at": status.oldest_due_at,
    }


def _said_document(said: AuditStamp | None) -> dict[str, Any] | None:
    return None if said is None else {"by": said.actor, "at": said.at, "why": said.reason}


def _limit(status: QueueStatus) -> int | None:
    """How many may run at once: a person's word goes before the rule."""
    said = status.control.concurrency
    return status.settings.concurrency if said is None else said


# --- for people -------------------------------------------------------------------------------------------------------


def _table(queues: Sequence[QueueStatus], rates: Mapping[str, float], width: int, now: datetime) -> Table:
    """In a narrow window what matters less is left out."""
    roomy = width >= ROOMY
    columns: dict[str, Cell] = {
        "QUEUE": lambda status: Text(cut(clean(status.name), 32 if roomy else 16), "bold"),
        "STATE": _state,
        "RUNNING": _running,
        "QUEUED": lambda status: _number(status.counts.get(TaskState.QUEUED, 0)),
        "OLDEST": lambda status: Text(age(seconds_between(status.oldest_due_at, now)), "dim"),
        "LATER": lambda status: _number(sum(status.counts.get(state, 0) for state in LATER)),
        "FAILED": lambda status: _number(status.counts.get(TaskState.FAILED, 0), "red"),
        "RATE": lambda status: Text(_pace(rates.get(status.name, 0.0)), "dim"),
    }
    if roomy and any(status.settings.order is not QueueOrder.PRIORITY for status in queues):
        columns["ORDER"] = lambda status: Text(str(status.settings.order), "dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="left" if name in ("QUEUE", "STATE", "ORDER") else "right")
    for status in queues:
        table.add_row(*(cell(status) for cell in columns.values()))
    return table


def _state(status: QueueStatus) -> Text:
    return Text(*_LOOKS[status.control.state])


def _running(status: QueueStatus) -> Text:
    """`2/4`, with a mark where a person has set the limit."""
    running, limit = status.counts.get(TaskState.RUNNING, 0), _limit(status)
    if limit is None:
        return _number(running)
    mark = "*" if status.control.concurrency is not None else ""
    return Text(f"{running:,}/{limit:,}{mark}", "" if running else "dim")


def _number(count: int, style: str = "") -> Text:
    return Text(f"{count:,}", style) if count else Text("0", "dim")


def _pace(rate: float) -> str:
    if not rate:
        return ""
    return rate_text(rate) if rate >= 1 else f"{max(1, round(rate * 60))}/min"


def _said(status: QueueStatus, now: datetime) -> Iterator[Text]:
    """What people have said about a queue, as long as it holds."""
    control, name = status.control, (clean(status.name), "bold")
    if not control.is_open and control.state_set is not None:
        what = "paused" if control.state is QueueState.PAUSED else "told to stop"
        yield Text.assemble(name, f" was {what} {_whose(control.state_set, now)}")
    if control.concurrency is not None and control.concurrency_set is not None:
        rule = status.settings.concurrency
        own = f"; its own limit is {'none' if rule is None else f'{rule:,}'}"
        yield Text.assemble(
            name, f" was limited to {control.concurrency:,} (*) {_whose(control.concurrency_set, now)}{own}"
        )


def _whose(said: AuditStamp, now: datetime) -> str:
    """`4m ago by cli:ana: backup`."""
    why = f": {one_line(said.reason, 200)}" if said.reason else ""
    return f"{age(seconds_between(said.at, now))} ago by {clean(said.actor)}{why}"


def _what_next(status: QueueStatus) -> str:
    running, limit = status.counts.get(TaskState.RUNNING, 0), _limit(status)
    at_once = "no limit of its own" if limit is None else f"at most {limit:,} at once"
    match status.control.state:
        case QueueState.RUNNING:
            queued = counted(status.counts.get(TaskState.QUEUED, 0), "task")
            return f"it starts tasks, {at_once}; {queued} queued, {running:,} running"
        case QueueState.STOPPING:
            return f"nothing more starts, and it is paused when what runs has ended: {counted(running, 'task')}"
        case QueueState.PAUSED:
            left = f"; what runs goes on: {counted(running, 'task')}" if running else ""
            return f"nothing more starts until it is resumed, then {at_once}{left}"
