"""`taskyard show`: everything about one task."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskyard.application.task_documents import AttemptDocument, TaskDetail, TaskError
from taskyard.cli.console import json_text, make_console, say_json, show
from taskyard.cli.formatting import due_text, elapsed, error_text, progress_text, state_text
from taskyard.cli.outputs import artifact_text, line_text
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import clean, clock_time, cut, duration, label_text, moment, one_line, seconds_between
from taskyard.model.state import WAITING_FOR_TIME, TaskState


async def show_task(target: Target, ref: str, *, reveal: bool, as_json: bool) -> int:
    async with opened_application(target) as application:
        task = await application.tasks.get(ref, reveal=reveal)
    if as_json:
        say_json(task)
    else:
        show(make_console(), task_view(task, datetime.now(UTC)))
    return 0


def task_view(task: TaskDetail, now: datetime) -> RenderableType:
    head = Text.assemble((clean(task.consumer), "bold"), "  ", clean(task.uuid), "  ", state_text(task.state))
    parts: list[RenderableType] = [head, Text(), _facts(task, now), *_section("arguments", task.args)]
    if task.state is TaskState.COMPLETED:
        parts += _section("result", task.result)
    if task.error is not None:
        parts += _error(task.error)
    if task.attempts:
        parts += [Text("\nruns", "dim"), Padding(_attempt_table(task, now), (0, 0, 0, 2))]
    for title, lines in (("log", map(line_text, task.lines)), ("artifacts", map(artifact_text, task.artifacts))):
        text = "\n".join(lines)
        if text:
            parts += [Text(f"\n{title}", "dim"), Padding(Text(text), (0, 0, 0, 2))]
    return Group(*parts)


def _facts(task: TaskDetail, now: datetime) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _pairs(task, now):
        if value:
            table.add_row(Text(name), value if isinstance(value, Text) else Text(value))
    return table


def _pairs(task: TaskDetail, now: datetime) -> Iterator[tuple[str, str | Text]]:
    ago = duration(seconds_between(task.created_at, now))
    if task.why is not None:
        label = "but" if task.state is TaskState.RUNNING else "waits"
        yield label, clean(task.why.text)
    yield "title", clean(task.title)
    yield "labels", clean(label_text(task.labels))
    yield "submitted by", clean(task.submitted_by)
    yield "queue", clean(task.queue)
    yield "priority", task.priority
    yield (
        "key",
        "" if task.key is None else clean(task.key) + (" (waits for its key)" if task.waits_for_key else ""),
    )
    yield "bucket", "" if task.bucket is None else clean(task.bucket)
    yield "requires", clean(label_text(task.requires))
    yield "group", "" if task.group is None else clean(task.group)
    yield "made of", "" if task.origin is None else clean(task.origin)
    yield "created", f"{moment(task.created_at)}  ({ago} ago)"
    if task.due_at != task.created_at:
        later = f"  ({due_text(task, now)})" if task.state in WAITING_FOR_TIME else ""
        yield "due", moment(task.due_at) + later
    yield "started", moment(task.started_at)
    yield "ended", moment(task.finished_at)
    if task.state is TaskState.RUNNING or (task.finished_at and task.started_at):
        yield "took", duration(elapsed(task, now))
    yield "attempt", _attempt_text(task)
    yield "timeout", "" if task.timeout_s is None else duration(task.timeout_s)
    yield "node", "" if task.node is None else _node_text(task.node, task.node_name)
    yield "place", "" if task.device is None else clean(task.device)
    yield "cancel", "" if task.cancel is None else f"requested {moment(task.cancel.at)}"
    yield "progress", progress_text(task.progress, 200)
    yield "note", clean(task.remarks)


def _attempt_text(task: TaskDetail) -> str:
    more = [
        f"{n} {word}"
        for n, word in (
            (task.retries, "retried after a failure"),
            (task.crashes, "workers crashed"),
            (task.recoveries, "taken back from a dead node"),
        )
        if n
    ]
    return (f"{task.attempt}" if task.attempt else "not started yet") + (f"  ({', '.join(more)})" if more else "")


def _node_text(incarnation: str, name: str) -> str:
    return clean(f"{name} ({incarnation[:8]})" if name else incarnation[:8])


def _section(title: str, value: object) -> list[RenderableType]:
    return [Text(f"\n{title}", "dim"), Padding(Text(clean(json_text(value), lines=True)), (0, 0, 0, 2))]


def _error(error: TaskError) -> list[RenderableType]:
    what = Text.assemble((clean(error.type), "bold red"), (f" ({error.kind})", "dim"), "  ", clean(error.message))
    parts: list[RenderableType] = [Text("\nerror", "dim"), Padding(what, (0, 0, 0, 2))]
    if error.traceback:
        trace = clean(error.traceback.rstrip(), lines=True)
        parts.append(Padding(Text(trace, "dim"), (1, 0, 0, 2)))
    return parts


def _attempt_table(task: TaskDetail, now: datetime) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", expand=True)
    places = ["PLACE"] if any(attempt.device is not None for attempt in task.attempts) else []
    if any(attempt.device_number is not None for attempt in task.attempts):
        places = ["DEVICE"]
    for name in ("#", "ENDED AS", "STARTED", "TOOK", "NODE", "WORKER", *places):
        is_number = name in ("#", "TOOK", "WORKER")
        table.add_column(name, no_wrap=True, justify="right" if is_number else "left")
    table.add_column("", overflow="ellipsis", no_wrap=True, ratio=1)
    for attempt in task.attempts:
        why = "" if attempt.error is None else one_line(error_text(attempt.error), 200)
        place = [_place_text(attempt)] if places else []
        table.add_row(*_attempt_cells(attempt, now), *place, Text(why))
    return table


def _place_text(attempt: AttemptDocument) -> str:
    """`emu-7 (7)`: a device has a number."""
    name = cut(clean(attempt.device or ""), 20)
    return name if attempt.device_number is None else f"{name} ({attempt.device_number})"


def _attempt_cells(attempt: AttemptDocument, now: datetime) -> tuple[RenderableType, ...]:
    took = duration(seconds_between(attempt.started_at, attempt.finished_at or now))
    node = cut(_node_text(attempt.node, attempt.node_name), 24)
    worker = "" if attempt.worker_pid is None else str(attempt.worker_pid)
    started = clock_time(attempt.started_at)[:8]
    return str(attempt.attempt), state_text(attempt.state), started, took, Text(node, "dim"), worker
