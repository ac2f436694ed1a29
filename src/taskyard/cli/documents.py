"""Tasks as JSON, for `--json`: what is stored, with its JSON unpacked and its secrets hidden."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from taskyard.cli.text import hide, redact, seconds_between, secrets_of
from taskyard.errors import TaskEnded
from taskyard.model.event import Event
from taskyard.model.execution import ExecutionError
from taskyard.model.order import Priority
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, TaskRecord


class Revealed:
    """The data of one task as it may be shown. `reveal` shows secrets as well."""

    def __init__(self, record: TaskRecord, *, reveal: bool = False) -> None:
        raw = _decode(record.args)
        self._secrets = set() if reveal else secrets_of(raw)
        self._reveal = reveal
        self.args: Any = raw if reveal else redact(raw)
        result = None if record.result is None else _decode(record.result)
        self.result: Any = result if reveal else redact(result)

    def text(self, text: str) -> str:
        """A message or traceback without the secrets among the arguments."""
        return text if self._reveal else hide(text, self._secrets)

    def value(self, value: msgspec.Struct | None) -> Any:
        """A stored value as JSON, its texts without the secrets among the arguments."""
        if value is None:
            return None
        found = msgspec.to_builtins(value)
        return {name: self.text(text) if isinstance(text, str) else text for name, text in found.items()}

    def error(self, ended: TaskEnded) -> TaskEnded:
        """The same error, its text and its fields without those secrets."""
        ended.args = (self.text(str(ended)),)
        for name, value in vars(ended).items():
            if isinstance(value, str):
                setattr(ended, name, self.text(value))
        return ended


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text  # written by somebody else; shown as it is


def task_document(record: TaskRecord, *, reveal: bool = False) -> dict[str, Any]:
    shown = Revealed(record, reveal=reveal)
    return {
        "uuid": record.uuid,
        "title": shown.text(record.title),
        "labels": record.labels,
        "consumer": record.consumer,
        "queue": record.queue,
        "state": record.state,
        "priority": priority_label(record.priority),
        "key": record.key,
        "bucket": record.bucket,
        "requires": record.requirements,
        "blocker": record.blocker,
        "group": record.group_id,
        "origin": record.origin,
        "args": shown.args,
        "due_at": record.due_at,
        "created_at": record.created_at,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "duration_s": seconds_between(record.started_at, record.finished_at),
        "attempt": record.attempt,
        "retries": record.retries,
        "timeout_s": record.timeout_s,
        "node": record.node,
        "device": record.device,
        "hold": shown.value(record.hold),
        "cancel": shown.value(record.cancel),
        "progress": record.progress,
        "result": shown.result,
        "error": None if record.error is None else error_fields(record.error, shown),
        "note": shown.value(record.note),
        "remarks": shown.text(record.remarks),
    }


def run_document(run: Attempt, shown: Revealed) -> dict[str, Any]:
    return {
        "attempt": run.attempt,
        "token": run.token,
        "node": run.node,
        "worker_pid": run.worker_pid,
        "device": run.device,
        "state": run.state,
        "started_at": run.started_at,
        "ended_at": run.finished_at,
        "duration_s": seconds_between(run.started_at, run.finished_at),
        "error": None if run.error is None else error_fields(run.error, shown),
    }


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
    return {**task_document(record, reveal=reveal), "runs": [run_document(run, shown) for run in runs]}


def sum_states(
    counts: Mapping[tuple[str, TaskState], int], queues: Iterable[str] | None = None
) -> dict[TaskState, int]:
    """Tasks per state, over all queues or over these; states without any are left out."""
    only = None if queues is None else set(queues)
    total: dict[TaskState, int] = {}
    for (queue, state), n in counts.items():
        if only is None or queue in only:
            total[state] = total.get(state, 0) + n
    return {state: total[state] for state in TaskState if total.get(state)}


def priority_label(priority: int) -> str:
    return Priority(priority).label
