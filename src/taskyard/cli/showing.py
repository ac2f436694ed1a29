"""`taskyard show`: everything about one task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskyard.cli.console import json_text, make_console, say_json, show
from taskyard.cli.documents import Revealed, priority_label, shown_document
from taskyard.cli.looks import due_text, elapsed, error_line, progress_text, state_text
from taskyard.cli.outputs import (
    SHOWN_LINES,
    artifact_documents,
    artifact_text,
    line_documents,
    line_text,
)
from taskyard.cli.target import Target, opened, resolve
from taskyard.cli.text import clean, clock_time, cut, duration, label_text, moment, one_line, seconds_between
from taskyard.cli.why import why_document
from taskyard.model.attempt import AttemptArtifact, AttemptLine
from taskyard.model.execution import ExecutionError
from taskyard.model.node import Node
from taskyard.model.state import WAITING_FOR_TIME, TaskState
from taskyard.model.task import Attempt, TaskRecord
from taskyard.model.why import Why


async def show_task(target: Target, fragment: str, *, reveal: bool, as_json: bool) -> int:
    async with opened(target.bare()) as yard:
        record = await yard.handle(await resolve(yard, fragment)).record()
        runs = await yard.attempts(record.uuid)
        lines = await yard.log_lines(record.uuid, limit=SHOWN_LINES)
        artifacts = await yard.artifacts(record.uuid)
        nodes = [status.node for status in await yard.store.nodes()]
        (why,) = await yard.why_many([record])
    if as_json:
        outputs = {
            "lines": line_documents(lines, runs, Revealed(record, reveal=reveal)),
            "artifacts": artifact_documents(artifacts, runs),
        }
        say_json({**shown_document(record, runs, reveal=reveal), **outputs, "why": why_document(why, record)})
    else:
        sheet = Sheet(record, runs, nodes, why=why, now=datetime.now(UTC), reveal=reveal)
        show(make_console(), sheet.draw(lines, artifacts))
    return 0


class Sheet:
    """One task on paper."""

    def __init__(
        self,
        record: TaskRecord,
        runs: Sequence[Attempt],
        nodes: Sequence[Node],
        *,
        now: datetime,
        reveal: bool,
        why: Why | None = None,
    ) -> None:
        self._record, self._runs, self._now, self._why = record, runs, now, why
        self._names = {node.incarnation: node.name for node in nodes}
        self._shown = Revealed(record, reveal=reveal)

    def draw(self, lines: Sequence[AttemptLine] = (), artifacts: Sequence[AttemptArtifact] = ()) -> RenderableType:
        record = self._record
        head = Text.assemble((clean(record.consumer), "bold"), "  ", clean(record.uuid), "  ", state_text(record.state))
        parts: list[RenderableType] = [head, Text(), self._facts(), *self._section("arguments", self._shown.args)]
        if record.state is TaskState.COMPLETED:
            parts += self._section("result", self._shown.result)
        if record.error is not None:
            parts += self._error(record.error)
        if self._runs:
            parts += [Text("\nruns", "dim"), Padding(self._run_table(), (0, 0, 0, 2))]
        if lines:
            text = "\n".join(line_text(line, self._shown) for line in lines)
            parts += [Text("\nlog", "dim"), Padding(Text(text), (0, 0, 0, 2))]
        if artifacts:
            text = "\n".join(artifact_text(one.artifact) for one in artifacts)
            parts += [Text("\nartifacts", "dim"), Padding(Text(text), (0, 0, 0, 2))]
        return Group(*parts)

    def _facts(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._pairs():
            if value:
                table.add_row(Text(name), value if isinstance(value, Text) else Text(value))
        return table

    def _pairs(self) -> Iterator[tuple[str, str | Text]]:
        record, now = self._record, self._now
        ago = duration(seconds_between(record.created_at, now))
        if self._why is not None:
            label = "but" if record.state is TaskState.RUNNING else "waits"
            yield label, clean(self._shown.text(self._why.text))
        yield "title", clean(self._shown.text(record.title))
        yield "labels", clean(label_text(record.labels))
        yield "submitted by", clean(record.submitted_by)
        yield "queue", clean(record.queue)
        yield "priority", priority_label(record.priority)
        yield (
            "key",
            "" if record.key is None else clean(record.key) + (" (waits for its key)" if record.is_parked else ""),
        )
        yield "bucket", "" if record.bucket is None else clean(record.bucket)
        yield "requires", clean(label_text(record.requirements))
        yield "group", "" if record.group_id is None else clean(record.group_id)
        yield "made of", "" if record.origin is None else clean(record.origin)
        yield "created", f"{moment(record.created_at)}  ({ago} ago)"
        if record.due_at != record.created_at:
            later = f"  ({due_text(record, now)})" if record.state in WAITING_FOR_TIME else ""
            yield "due", moment(record.due_at) + later
        yield "started", moment(record.started_at)
        yield "ended", moment(record.finished_at)
        if record.state is TaskState.RUNNING or (record.finished_at and record.started_at):
            yield "took", duration(elapsed(record, now))
        yield "attempt", self._attempt()
        yield "timeout", "" if record.timeout_s is None else duration(record.timeout_s)
        yield "node", "" if record.node is None else self._node(record.node)
        yield "place", "" if record.device is None else clean(record.device)
        yield "cancel", "" if record.cancel is None else f"requested {moment(record.cancel.at)}"
        yield "progress", progress_text(record, self._shown, 200)
        yield "note", clean(self._shown.text(record.remarks))

    def _attempt(self) -> str:
        record = self._record
        more = [
            f"{n} {word}"
            for n, word in (
                (record.retries, "retried after a failure"),
                (record.crashes, "workers crashed"),
                (record.recoveries, "taken back from a dead node"),
            )
            if n
        ]
        return (f"{record.attempt}" if record.attempt else "not started yet") + (
            f"  ({', '.join(more)})" if more else ""
        )

    def _node(self, incarnation: str) -> str:
        name = self._names.get(incarnation)
        return clean(f"{name} ({incarnation[:8]})" if name else incarnation[:8])

    def _section(self, title: str, value: object) -> list[RenderableType]:
        return [Text(f"\n{title}", "dim"), Padding(Text(clean(json_text(value), lines=True)), (0, 0, 0, 2))]

    def _error(self, error: ExecutionError) -> list[RenderableType]:
        what = Text.assemble(
            (clean(error.type), "bold red"), (f" ({error.kind})", "dim"), "  ", clean(self._shown.text(error.text))
        )
        parts: list[RenderableType] = [Text("\nerror", "dim"), Padding(what, (0, 0, 0, 2))]
        if error.traceback:
            trace = clean(self._shown.text(error.traceback).rstrip(), lines=True)
            parts.append(Padding(Text(trace, "dim"), (1, 0, 0, 2)))
        return parts

    def _run_table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", expand=True)
        places = ["PLACE"] if any(run.device is not None for run in self._runs) else []
        for name in ("#", "ENDED AS", "STARTED", "TOOK", "NODE", "WORKER", *places):
            is_number = name in ("#", "TOOK", "WORKER")
            table.add_column(name, no_wrap=True, justify="right" if is_number else "left")
        table.add_column("", overflow="ellipsis", no_wrap=True, ratio=1)
        for run in self._runs:
            why = "" if run.error is None else one_line(self._shown.text(error_line(run.error)), 200)
            place = [cut(clean(run.device or ""), 20)] if places else []
            table.add_row(*self._run_cells(run), *place, Text(why))
        return table

    def _run_cells(self, run: Attempt) -> tuple[RenderableType, ...]:
        took = duration(seconds_between(run.started_at, run.finished_at or self._now))
        node, worker = cut(self._node(run.node), 24), "" if run.worker_pid is None else str(run.worker_pid)
        started = clock_time(run.started_at)[:8]
        return str(run.attempt), state_text(run.state), started, took, Text(node, "dim"), worker
