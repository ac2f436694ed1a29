"""What a tour leaves behind, in words: what ran, what failed and why, and what to try next."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.cli.demo.script import Script
from taskyard.cli.looks import counts_text, detail_text, sign
from taskyard.cli.text import clean, duration, seconds_between, short_id
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task import TaskRecord

APP = "taskyard.cli.demo.work:yard"


def summarize(script: Script, records: Sequence[TaskRecord], url: str) -> RenderableType:
    counts = Counter(record.state for record in records)
    parts: list[RenderableType] = [
        Text("\nThat was the tour. What was submitted has become:", "bold"),
        counts_text(counts),
        Text(),
        _by_source(records),
        *_remarks(script, records),
        Text(f"\nAll of it is in {clean(url)}. Try:", "bold"),
        _commands(records, url),
    ]
    return Group(*parts)


def _by_source(records: Sequence[TaskRecord]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for source in dict.fromkeys(record.consumer for record in records):
        own = [record for record in records if record.consumer == source]
        ran = [seconds_between(r.started_at, r.finished_at) or 0.0 for r in own if r.started_at and r.finished_at]
        done = sum(record.state is TaskState.COMPLETED for record in own)
        again = sum(record.retries for record in own)
        table.add_row(
            Text(f"  {source}", "bold"),
            Text(f"{done} of {len(own)} completed"),
            Text(f"{duration(sum(ran) / len(ran))} each" if ran else "", "dim"),
            Text(f"{again} tried again" if again else "", "yellow"),
        )
    return table


def _remarks(script: Script, records: Sequence[TaskRecord]) -> list[RenderableType]:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=3, justify="right")
    for record in records:
        if record.state in ENDED and record.state is not TaskState.COMPLETED:
            why = detail_text(record, record.updated_at, 200)
            table.add_row(sign(record.state), Text.assemble(f"{record.consumer} {record.state}: ", why))
    left = sum(record.state not in ENDED for record in records)
    if left:
        stay = "it stays in the store until a worker takes it" if left == 1 else "they stay until a worker takes them"
        table.add_row(sign(TaskState.QUEUED), f"{left} not done yet: {stay}")
    overtaken = _overtaken(script, records)
    if overtaken:
        table.add_row(sign(TaskState.RUNNING), f"the urgent task overtook {overtaken} that were submitted before it")
    return [Text(), table] if table.rows else []


def _overtaken(script: Script, records: Sequence[TaskRecord]) -> int:
    """How many were submitted before the urgent task and started after it."""
    urgent = next((r for r in records if script.urgent is not None and r.uuid == script.urgent.uuid), None)
    if urgent is None or urgent.started_at is None:
        return 0
    return sum(
        1
        for record in records
        if record.id < urgent.id and record.consumer == urgent.consumer and record.attempt
        and record.started_at is not None and record.started_at > urgent.started_at
    )  # fmt: skip


def _commands(records: Sequence[TaskRecord], url: str) -> RenderableType:
    failed = next((record for record in records if record.state is TaskState.FAILED), None)
    lines = [("ls", "what is in the store")]
    if failed is not None:
        lines += [
            (f"show {short_id(failed.uuid)}", "why it failed"),
            (f"retry {short_id(failed.uuid)}", "send it again"),
        ]
    if failed is not None or any(record.state not in ENDED for record in records):
        lines.append((f"worker {APP}", "run what is queued"))
    lines.append(("doctor", "is everything well?"))
    where = f"export TASKYARD_STORE={clean(url)}"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for command, what in lines:
        table.add_row(Text(f"  taskyard {command}"), Text(f"# {what}", "dim"))
    return Group(*_how_to_call(), Text(f"  {where}"), table)


def _how_to_call() -> list[Text]:
    """What makes `taskyard` a command, if it is none yet: an environment that nobody has activated."""
    if shutil.which("taskyard") is not None or sys.prefix == sys.base_prefix:
        return []
    return [Text(f"  . {clean(os.path.relpath(sys.prefix))}/bin/activate")]
