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
from taskyard.model.task import NO_EXTRA, Attempt, TaskRecord
from taskyard.stores.records import ATTEMPT, EXTRA, PUBLIC, TASK, Description, Kind


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

    def value(self, value: Any) -> Any:
        """A stored value as JSON, its texts without the secrets among the arguments."""
        found = msgspec.to_builtins(value)
        if isinstance(found, str):
            return self.text(found)
        if isinstance(found, dict):
            return {name: self.value(value) for name, value in found.items()}
        return found

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
