"""`taskyard queue show`: a queue in the order in which it will start."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.application.queue_order_documents import QueueEntry, QueueOrderDocument, WhatIf
from taskyard.cli.console import complain, make_console, say_json, show
from taskyard.cli.errors import DONE, UsageError
from taskyard.cli.formatting import progress_text, state_symbol, why_line
from taskyard.cli.queues import STATES
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import clean, cut, duration, one_line, short_id, time_text
from taskyard.errors import quote
from taskyard.model.queue import QueueState
from taskyard.model.state import WAITING_FOR_TIME, TaskState
from taskyard.model.why import Reason

START_WORKER = "taskyard worker module:yard"

MANY_COLUMNS = 110
"""Columns of a window from which on titles are shown."""

APART = (TaskState.PAUSED, TaskState.BLOCKED, TaskState.RETRYING, TaskState.SCHEDULED)


SHOWN_FOR_ALL = frozenset({
    Reason.QUEUE_FULL, Reason.QUEUE_PAUSED, Reason.KEY_BUSY, Reason.CONSUMER_FULL, Reason.EXECUTOR_FULL,
    Reason.NODES_FULL, Reason.HEAD_OF_LINE,
})  # fmt: skip
"""Reasons that most tasks of a queue have: the place, the key or the first line says enough."""


async def show_order(target: Target, name: str, *, limit: int, assumed: str | None, as_json: bool) -> int:
    concurrency = None if assumed is None else _parse_assumption(assumed)
    async with opened_application(target) as application:
        queue = await application.queues.order(name, limit=limit, concurrency=concurrency)
    if concurrency is not None and queue.state is not QueueState.RUNNING:
        complain("note", f"queue {quote(name)} is {queue.state}, so --if has no effect; resume it first")
    if as_json:
        say_json(queue)
    else:
        console = make_console()
        show(console, draw(queue, console.width))
    return DONE


def _parse_assumption(text: str) -> int:
    name, equals, value = text.partition("=")
    if name.strip() != "concurrency" or not equals:
        raise UsageError(f"--if {quote(text)} is not an assumption: write --if concurrency=2")
    if not value.strip().isdecimal() or int(value) < 1:
        raise UsageError(f"--if {quote(text)}: the concurrency must be a whole number from 1")
    return int(value)


# --- for people -------------------------------------------------------------------------------------------------------


def draw(queue: QueueOrderDocument, width: int) -> RenderableType:
    """For a window of this width."""
    return Group(*_parts(queue, width))


def _parts(queue: QueueOrderDocument, width: int) -> Iterator[RenderableType]:
    yield _head(queue)
    if queue.running or queue.waiting or queue.apart:
        yield Text()
        yield _table(queue, width)
    yield Text()
    yield from _last_lines(queue)


def _head(queue: QueueOrderDocument) -> Text:
    """`cpu  ● running   2 of 2 run   14 wait   1 held`."""
    counts = queue.counts
    running = counts.get(TaskState.RUNNING, 0)
    limit = "" if queue.concurrency is None else f" of {queue.concurrency:,}"
    words = [f"{running:,}{limit} running", f"{counts.get(TaskState.QUEUED, 0):,} waiting"]
    words += [f"{counts[state]:,} {_NAMES[state]}" for state in APART if counts.get(state)]
    line = Text.assemble((clean(queue.queue), "bold"), "  ", Text(*STATES[queue.state]), "   ")
    return line.append(" · ".join(words))


_NAMES = {
    TaskState.PAUSED: "held",
    TaskState.BLOCKED: "blocked",
    TaskState.RETRYING: "to be retried",
    TaskState.SCHEDULED: "scheduled",
}


def _table(queue: QueueOrderDocument, width: int) -> Table:
    """What runs, what waits, and all others, one below the other in the same columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("PLACE", no_wrap=True, justify="right")
    table.add_column("ID", no_wrap=True)
    table.add_column("CONSUMER", no_wrap=True)
    table.add_column("PRIORITY", no_wrap=True)
    table.add_column("STARTS", no_wrap=True)
    has_what_if = any(entry.what_if_start_at is not None for entry in queue.waiting)
    if queue.what_if is not None and has_what_if:
        table.add_column(f"WITH {queue.what_if.concurrency}", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    room = max(20, width - 62 - (14 if has_what_if else 0))
    for part, total in (
        (queue.running, queue.counts.get(TaskState.RUNNING, 0)),
        (queue.waiting, queue.counts.get(TaskState.QUEUED, 0)),
        (queue.apart, sum(queue.counts.get(state, 0) for state in APART)),
    ):
        for entry in part:
            table.add_row(*_cells(entry, queue, room, has_title=width >= MANY_COLUMNS, has_what_if=has_what_if))
        if total > len(part):
            table.add_row(Text("…", "dim"), Text(f"{total - len(part):,} more", "dim"))
        if part and part is not queue.apart:
            table.add_section()
    return table


def _cells(
    entry: QueueEntry, queue: QueueOrderDocument, room: int, *, has_title: bool, has_what_if: bool
) -> Iterator[Text]:
    at = queue.at
    yield state_symbol(entry.state) if entry.place is None else Text(f"{entry.place:,}")
    yield Text(short_id(entry.uuid))
    yield Text(cut(clean(entry.consumer), 20), "bold")
    yield Text(entry.priority, "" if entry.priority == "normal" else "bold" if entry.priority == "high" else "dim")
    yield Text(_when(entry, at))
    if has_what_if:
        yield Text(_start_text(entry.what_if_start_at, entry, at), "cyan")
    words = [entry.title if has_title else "", *_words(entry, queue)]
    yield Text(one_line(" · ".join(filter(None, words)), room), "dim")


def _when(entry: QueueEntry, at: datetime) -> str:
    if entry.state is TaskState.RUNNING and entry.started_at is not None:
        return f"{duration((at - entry.started_at).total_seconds())} ago"
    if entry.state in WAITING_FOR_TIME:
        return f"due {time_text(entry.due_at, at)}"
    return _start_text(entry.expected_start_at, entry, at)


def _start_text(start_at: datetime | None, entry: QueueEntry, at: datetime) -> str:
    if start_at is None or start_at <= at or not entry.is_estimated:
        return time_text(start_at, at)
    return _about(start_at, at)


def _words(entry: QueueEntry, queue: QueueOrderDocument) -> Iterator[str]:
    if entry.state is TaskState.RUNNING:
        if entry.is_late:
            yield "takes longer than usual"
        elif entry.expected_end_at is not None:
            yield f"ends {time_text(entry.expected_end_at, queue.at)}"
        yield progress_text(entry.progress, 60)
        return
    if entry.key is not None:
        yield f"key {clean(entry.key)}"
    if entry.why is not None and entry.why.reason not in SHOWN_FOR_ALL:
        yield why_line(entry.why) or ""


def _last_lines(queue: QueueOrderDocument) -> Iterator[Text]:
    running, waiting = queue.counts.get(TaskState.RUNNING, 0), queue.counts.get(TaskState.QUEUED, 0)
    if not running and not waiting:
        yield Text("nothing runs or waits", "dim")
        return
    line = Text()
    if queue.finished_at is not None:
        line.append("finished ").append(_end_text(queue, queue.at), "bold")
    other = queue.what_if
    if other is not None and other.finished_at is not None:
        line.append(f"; with concurrency {other.concurrency:,} " if line else "finished ")
        line.append(_end_text(other, queue.at), "bold cyan")
    yield line or Text(_explain_no_time(queue), "dim")
    wanted, slots = (queue.concurrency, queue.slots) if other is None else (other.concurrency, other.slots)
    if slots is not None and wanted is not None and slots < wanted:
        room = f"the workers have room for {slots:,} of these tasks at once; start another"
        yield Text(f"{room if slots else 'no worker takes these tasks; start one'}: {START_WORKER}", "yellow")


def _end_text(end: QueueOrderDocument | WhatIf, now: datetime) -> str:
    """A lower bound is told as one: `in at least 3m`."""
    assert end.finished_at is not None
    return _about(end.finished_at, now, "at least" if end.is_lower_bound else "about")


def _about(at: datetime, now: datetime, about: str = "about") -> str:
    text = time_text(at, now)
    if text.startswith("in "):
        return f"in {about} {text[3:]}"
    return f"{about} {text}" if about == "about" else f"{text} at the earliest"


def _explain_no_time(queue: QueueOrderDocument) -> str:
    if queue.state is not QueueState.RUNNING:
        return f"it starts nothing: taskyard queue resume {clean(queue.queue)}"
    if queue.without_median:
        names = ", ".join(map(clean, queue.without_median[:3]))
        return f"when it will be finished is not known before three runs of {names} have completed"
    return f"when it will be finished is not known; what holds it: taskyard why --queue {clean(queue.queue)}"
