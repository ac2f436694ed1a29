"""Tasks as JSON, for `--json`: what is stored, with its JSON unpacked and its secrets hidden."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from taskyard.application.documents import sum_states as sum_states  # noqa: PLC0414
from taskyard.cli.text import seconds_between
from taskyard.model.event import Event
from taskyard.model.execution import ExecutionError
from taskyard.model.order import Priority
from taskyard.model.redaction import Redactor
from taskyard.model.task import NO_EXTRA, Attempt, TaskRecord
from taskyard.stores.records import ATTEMPT, EXTRA, PUBLIC, TASK, Description, Kind

Revealed = Redactor


def task_document(record: TaskRecord, *, reveal: bool = False) -> dict[str, Any]:
    """The public fields of a task, and what follows from them."""
    shown = Revealed(record, reveal=reveal)
    fields = _document(TASK, PUBLIC, record, shown)
    return {
        "uuid": fields.pop("uuid"),
        **_document(EXTRA, EXTRA.columns, record.extra or NO_EXTRA, shown),
        "group": fields.pop("group_id"),
        **fields,
        "args": shown.args,
        "result": shown.result,
        "priority": priority_label(record.priority),
        "requires": record.requirements,
        "blocker": record.blocker,
        "duration_s": seconds_between(record.started_at, record.finished_at),
        "remarks": shown.text(record.remarks),
    }


def attempt_document(attempt: Attempt, shown: Revealed) -> dict[str, Any]:
    duration_s = seconds_between(attempt.started_at, attempt.finished_at)
    return {**_document(ATTEMPT, ATTEMPT.columns, attempt, shown), "duration_s": duration_s}


def _document(of: Description, columns: Iterable[str], record: Any, shown: Revealed) -> dict[str, Any]:
    """These fields of a record, their texts for people without the secrets among the arguments."""
    found = {}
    for name in columns:
        value = getattr(record, name)
        if isinstance(value, ExecutionError):
            value = error_fields(value, shown)
        elif of is EXTRA or of.fields[name].kind is Kind.DOCUMENT:
            value = shown.value(value)
        found[name] = value
    return found


def error_fields(error: ExecutionError, shown: Revealed) -> dict[str, Any]:
    return {
        "kind": error.kind,
        "type": error.type,
        "code": error.code,
        "message": shown.text(error.text),
        "traceback": None if error.traceback is None else shown.text(error.traceback),
    }


def event_document(event: Event) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "at": event.at,
        "kind": event.kind,
        "uuid": event.uuid,
        "consumer": event.consumer,
        "queue": event.queue,
        "before": event.before,
        "after": event.after,
        "actor": event.actor or None,
        "code": event.code or None,
        "progress": event.progress,
    }


def shown_document(record: TaskRecord, runs: Sequence[Attempt], *, reveal: bool = False) -> dict[str, Any]:
    """One task with its runs."""
    shown = Revealed(record, reveal=reveal)
    return {**task_document(record, reveal=reveal), "runs": [attempt_document(run, shown) for run in runs]}


def priority_label(priority: int) -> str:
    return Priority(priority).label
