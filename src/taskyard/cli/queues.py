"""`taskyard queue`: what the queues of a store hold, how fast they go, and steering them as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Group
from rich.table import Table
from rich.text import Text

from taskyard.application.command_requests import QueueCommand
from taskyard.application.queue_documents import QueueDocument
from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.errors import DONE
from taskyard.cli.formatting import rate_text
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import age, clean, counted, cut, one_line, seconds_between
from taskyard.model.notes import AuditStamp
from taskyard.model.queue import QueueOrder, QueueState
from taskyard.model.state import TaskState

ROOMY = 110
"""Columns of a window from which on there is room for everything."""

LATER = (TaskState.SCHEDULED, TaskState.RETRYING, TaskState.BLOCKED, TaskState.PAUSED)

_S = QueueState
STATES: dict[QueueState, tuple[str, str]] = {
    _S.RUNNING: ("● running", "green"),
    _S.STOPPING: ("◐ stopping", "yellow"),
    _S.PAUSED: ("‖ paused", "magenta"),
}

Cell = Callable[[QueueDocument], Text]


async def list_queues(target: Target, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        found = await application.queues.list()
    if as_json:
        say_json(found)
        return DONE
    console, now = make_console(), datetime.now(UTC)
    if found:
        commands = [line for queue in found for line in _control_lines(queue, now)]
        show(console, Group(_table(found, console.width), *([Text(), *commands] if commands else [])))
    else:
        show(console, Text("no queue has anything yet; one is made by the first task that is submitted to it", "dim"))
    return DONE


async def control_queue(target: Target, name: str, command: QueueCommand, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        queue = await application.queues.apply(name, command)
    if as_json:
        say_json(queue)
    else:
        line = Text.assemble((clean(queue.name), "bold"), "  ", _state(queue), (f"; {_state_text(queue)}", "dim"))
        make_console().print(line, soft_wrap=True)
    return DONE


# --- for people -------------------------------------------------------------------------------------------------------


def _table(queues: Sequence[QueueDocument], width: int) -> Table:
    """A narrow window shows only the main columns."""
    now = datetime.now(UTC)
    roomy = width >= ROOMY
    columns: dict[str, Cell] = {
        "QUEUE": lambda queue: Text(cut(clean(queue.name), 32 if roomy else 16), "bold"),
        "STATE": _state,
        "RUNNING": _running,
        "QUEUED": lambda queue: _number(queue.counts.get(TaskState.QUEUED, 0)),
        "OLDEST": lambda queue: Text(age(seconds_between(queue.oldest_due_at, now)), "dim"),
        "LATER": lambda queue: _number(sum(queue.counts.get(state, 0) for state in LATER)),
        "FAILED": lambda queue: _number(queue.counts.get(TaskState.FAILED, 0), "red"),
        "RATE": lambda queue: Text(_pace(queue.rate or 0.0), "dim"),
    }
    if roomy and any(queue.order is not QueueOrder.PRIORITY for queue in queues):
        columns["ORDER"] = lambda queue: Text(str(queue.order), "dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="left" if name in ("QUEUE", "STATE", "ORDER") else "right")
    for queue in queues:
        table.add_row(*(cell(queue) for cell in columns.values()))
    return table


def _state(queue: QueueDocument) -> Text:
    return Text(*STATES[queue.state])


def _running(queue: QueueDocument) -> Text:
    """`2/4`, with a mark where a person has set the limit."""
    running, limit = queue.running, queue.concurrency
    if limit is None:
        return _number(running)
    mark = "*" if queue.concurrency_override is not None else ""
    return Text(f"{running:,}/{limit:,}{mark}", "" if running else "dim")


def _number(count: int, style: str = "") -> Text:
    return Text(f"{count:,}", style) if count else Text("0", "dim")


def _pace(rate: float) -> str:
    if not rate:
        return ""
    return rate_text(rate) if rate >= 1 else f"{max(1, round(rate * 60))}/min"


def _control_lines(queue: QueueDocument, now: datetime) -> Iterator[Text]:
    """The commands on a queue that are in force: who gave them, when and why."""
    name = (clean(queue.name), "bold")
    if queue.state is not QueueState.RUNNING and queue.state_set is not None:
        what = "paused" if queue.state is QueueState.PAUSED else "told to stop"
        yield Text.assemble(name, f" was {what} {_stamp_text(queue.state_set, now)}")
    if queue.concurrency_override is not None and queue.concurrency_set is not None:
        rule = queue.code_concurrency
        own = f"; its own limit is {'none' if rule is None else f'{rule:,}'}"
        yield Text.assemble(
            name, f" was limited to {queue.concurrency_override:,} (*) {_stamp_text(queue.concurrency_set, now)}{own}"
        )


def _stamp_text(stamp: AuditStamp, now: datetime) -> str:
    """`4m ago by cli:ana: backup`."""
    why = f": {one_line(stamp.reason, 200)}" if stamp.reason else ""
    return f"{age(seconds_between(stamp.at, now))} ago by {clean(stamp.actor)}{why}"


def _state_text(queue: QueueDocument) -> str:
    running, limit = queue.running, queue.concurrency
    at_once = "no limit of its own" if limit is None else f"at most {limit:,} at once"
    match queue.state:
        case QueueState.RUNNING:
            queued = counted(queue.counts.get(TaskState.QUEUED, 0), "task")
            return f"it starts tasks, {at_once}; {queued} queued, {running:,} running"
        case QueueState.STOPPING:
            return f"nothing more starts, and it is paused when what runs has ended: {counted(running, 'task')}"
        case QueueState.PAUSED:
            left = f"; what runs goes on: {counted(running, 'task')}" if running else ""
            return f"nothing more starts until it is resumed, then {at_once}{left}"
