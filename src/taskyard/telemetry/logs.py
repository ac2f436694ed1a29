"""Sinks that log what runs do, through the logger `taskyard`.

Each line has its facts as attributes of the log record (`log_fields`), so that a formatter can print them. It also has
`task_record`: a handler needs it to hide the secrets among the arguments. `run_line` is a shorter text for a terminal.
"""

from __future__ import annotations

import logging
from typing import Any

from taskyard.model.durations import duration
from taskyard.model.exception_attributes import find_traceback
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.notes import NoteCode
from taskyard.model.trace import attempt_trace_id
from taskyard.ports.sink import (
    CallFinished,
    NodeEvent,
    RunCanceled,
    RunCompleted,
    RunFailed,
    RunFinished,
    RunReturned,
    RunStarted,
)

log = logging.getLogger("taskyard")

LOG_FIELDS = (
    "request_id", "trace_id", "task", "consumer", "queue", "attempt", "algorithm", "version", "worker_pid",
    "status", "duration_ms", "wait_ms", "error_type",
)  # fmt: skip
"""The attributes that a line about a run may have. It also has `task_record`, which a handler must not print: it has
the arguments of the task."""


class FailureLog:
    """Logs every failed attempt once, with its traceback: a warning if the task is tried again, else an error. Every
    yard and scheduler has one.

    With `is_plain` the line is the one that the design of the standalone scheduler asks for, word by word."""

    kinds = (RunFailed,)

    def __init__(self, *, is_plain: bool = False) -> None:
        self._is_plain = is_plain

    def tell(self, event: NodeEvent) -> None:
        if not isinstance(event, RunFailed) or event.error is None:
            return
        if event.consumer is None and event.error.kind is ErrorKind.VALIDATION:
            return  # the runner logged that the consumer is unknown
        error, verdict = event.error, _verdict(event)
        reason = error_text(error)
        record, extra = event.claim.record, log_fields(event)
        extra["is_task_failure"] = True
        extra["run_line"] = run_line(event, verdict, reason)
        facts: tuple[object, ...] = (record.uuid, record.consumer, reason, verdict)
        level, text = logging.ERROR, "[fail] task %s from %s: %s (%s)"
        if not event.is_final:
            level, text = logging.WARNING, "task %s from %s failed: %s (%s)"
        elif self._is_plain:
            text, facts = "[fail] task %s from %s: %s", (record.uuid, record.consumer, error.text)
        log.log(level, text, *facts, exc_info=_exc_info(event, error), extra=extra)


class RunLog:
    """Logs at INFO that a run started, and that it completed, was canceled or went back to its queue. Failures are the
    affair of `FailureLog`: each attempt has two lines in all. A direct call of an algorithm has one."""

    kinds = (RunStarted, RunCompleted, RunCanceled, RunReturned, CallFinished)

    def tell(self, event: NodeEvent) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        if isinstance(event, CallFinished):
            _log_call(event)
            return
        if isinstance(event, RunStarted):
            details = f"attempt {event.claim.attempt}" if event.claim.attempt > 1 else ""
        elif isinstance(event, RunCompleted):
            details = ""
        elif isinstance(event, RunReturned):
            details = event.reason
        elif isinstance(event, RunFinished):
            details = "" if event.error is None else error_text(event.error)
        else:
            return
        record, extra = event.claim.record, log_fields(event)
        extra["run_line"] = run_line(event, details)
        status = extra["status"]
        if details:
            log.info("task %s from %s %s: %s", record.uuid, record.consumer, status, details, extra=extra)
        else:
            log.info("task %s from %s %s", record.uuid, record.consumer, status, extra=extra)


def _log_call(event: CallFinished) -> None:
    error = event.result.error
    fields = {
        "request_id": event.request_id,
        "trace_id": event.trace_id,
        "algorithm": event.algorithm,
        "version": event.version,
        "worker_pid": event.result.worker_pid,
        "status": event.status,
        "duration_ms": _ms(event.duration_s),
        "error_type": None if error is None else error.type,
    }
    extra = {name: value for name, value in fields.items() if value is not None}
    if error is None:
        log.info("call %s of %s completed", event.request_id, event.algorithm, extra=extra)
    else:
        log.info("call %s of %s failed: %s", event.request_id, event.algorithm, error_text(error), extra=extra)


def log_fields(event: RunStarted | RunFinished) -> dict[str, Any]:
    """The attributes of a log record about a run: `task_record`, and those of `LOG_FIELDS` that it has."""
    claim, consumer = event.claim, event.consumer
    record = claim.record
    fields: dict[str, Any] = {
        "task_record": record,
        "request_id": record.uuid,
        "trace_id": attempt_trace_id(claim),
        "task": record.uuid,
        "consumer": record.consumer,
        "queue": record.queue,
        "attempt": claim.attempt,
    }
    if consumer is not None and consumer.version is not None:
        fields["algorithm"], fields["version"] = consumer.name, consumer.version
    if isinstance(event, RunStarted):
        return fields | {"status": "started", "wait_ms": _ms(event.wait_s)}
    if event.worker_pid is not None:
        fields["worker_pid"] = event.worker_pid
    if event.error is not None and not isinstance(event, RunCompleted):
        fields["error_type"] = event.error.type
    return fields | {"status": event.status, "duration_ms": _ms(event.duration_s)}


def run_line(event: RunStarted | RunFinished, *details: str) -> str:
    """`completed fetch 01a1e0f9-7f10-78b0-8081-88e4c59ac1e8  in 1.0 s`."""
    record = event.claim.record
    status, took = "started", ""
    if isinstance(event, RunFinished):
        status = event.status
        took = f"{'in' if isinstance(event, RunCompleted) else 'after'} {duration(event.duration_s)}"
    rest = " · ".join(filter(None, (took, *details)))
    return f"{status:<9} {record.consumer} {record.uuid}" + (f"  {rest}" if rest else "")


def error_text(error: ExecutionError) -> str:
    """`ValueError: …`; where the class says nothing new, the message alone."""
    is_plain = error.kind in (ErrorKind.TIMEOUT, ErrorKind.CANCELED, ErrorKind.REJECTED) or not error.types
    return error.text if is_plain or error.type in error.text else f"{error.type}: {error.text}"


def _verdict(event: RunFailed) -> str:
    """`attempt 2 of 4, retrying in 4.0 s`, or why there is no further attempt."""
    attempt, error, note = event.claim.attempt, event.error, event.move.note
    if event.retry_in_s is not None:
        return f"attempt {attempt} of {event.attempts}, retrying in {duration(event.retry_in_s)}"
    if note is not None and note.code is NoteCode.QUARANTINED:
        return f"attempt {attempt} of {event.attempts}, final: it took down {note.facts.get('crashes')} workers"
    if note is not None and note.code is NoteCode.DEVICE_LOST:
        return f"attempt {attempt}, final: `auto_recover` of its queue is used up"
    if attempt < event.attempts and error is not None:
        return f"attempt {attempt} of {event.attempts}, final: {error.type} is not retried"
    return f"attempt {attempt} of {event.attempts}, final"


def _exc_info(event: RunFailed, error: ExecutionError) -> Any:
    """As a tuple: of a bare exception `logging` reads `__traceback__`, which its class may refuse."""
    raised = event.raised
    is_ours = error.kind is ErrorKind.TIMEOUT or event.has_crashed
    return None if raised is None or is_ours else (type(raised), raised, find_traceback(raised))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
