"""Records as rows, for the SQL stores: one order of columns, and the conversions both ways.

Times are whole microseconds, so that they compare and round-trip exactly; small values are JSON text.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from taskyard.model.execution import ExecutionError, Progress
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import RUNNING, TaskState
from taskyard.model.task import DedupeScope, OnFailure, Run, TaskRecord

log = logging.getLogger("taskyard")

T = TypeVar("T")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_STATES = {str(state): state for state in TaskState}
_ON_FAILURE = {str(how): how for how in OnFailure}
_SCOPES = {str(scope): scope for scope in DedupeScope}

COLUMNS = TaskRecord.__struct_fields__
"""The columns of `task`, in the order of the record's fields."""

NEW = COLUMNS[:16]
"""The columns an insert gives; the rest start at their defaults."""

SPECIAL = (*NEW, "bucket", "origin", "note", "line")
"""The same where a task has a bucket, an origin or a note, or stands in a line."""

TIES = ("group_id", "waits", "on_failure", "dedupe_key", "dedupe_scope")
"""The columns an insert gives as well of a task that has to do with others: few have."""

MOVED = (
    "id", "state", "position", "parked", "priority", "dedupe_slot", "due_at", "updated_at", "finished_at", "attempt",
    "retries", "crashes", "recoveries", "token", "node", "cancel_asked_at", "cancel_reason", "result", "error", "note",
    "line", "waits", "cancel_forced",
)  # fmt: skip
"""What a move or a command can change, after the id that finds the row."""


def to_us(at: datetime) -> int:
    return (at - EPOCH) // _MICROSECOND


def to_us_or_none(at: datetime | None) -> int | None:
    return None if at is None else (at - EPOCH) // _MICROSECOND


def from_us(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


def from_us_or_none(us: int | None) -> datetime | None:
    return None if us is None else EPOCH + timedelta(microseconds=us)


def json_or_none(value: msgspec.Struct | None) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


@lru_cache(maxsize=256)
def to_retry(text: str) -> RetryPolicy | None:
    return _decode(text, RetryPolicy)


def to_new_row(r: TaskRecord, now: int) -> tuple[Any, ...]:
    """The columns of `NEW`, of a task that is stored at `now`."""
    created_at = to_us(r.created_at)
    due_at = created_at if r.due_at is r.created_at else to_us(r.due_at)
    return (
        r.uuid, r.source, due_at, created_at, now, r.id, r.queue, r.args, r.state, r.priority, r.position, r.parked,
        r.key, r.dedupe_slot, r.timeout_s, json_or_none(r.retry),
    )  # fmt: skip


def has_ties(r: TaskRecord) -> bool:
    """Whether a new task has anything in the columns of `TIES`."""
    return r.group_id is not None or r.dedupe_key is not None or r.on_failure is not None


def ties_of(r: TaskRecord) -> tuple[Any, ...]:
    """The columns of `TIES`."""
    return r.group_id, r.waits, r.on_failure, r.dedupe_key, r.dedupe_scope


def to_moved_row(r: TaskRecord, line: str | None) -> tuple[Any, ...]:
    """The columns of `MOVED`, of a task that stands in this line of its queue, if it has lines."""
    return (
        r.id, r.state, r.position, r.parked, r.priority, r.dedupe_slot, to_us(r.due_at), to_us(r.updated_at),
        to_us_or_none(r.finished_at), r.attempt, r.retries, r.crashes, r.recoveries, r.token, r.node,
        to_us_or_none(r.cancel_asked_at), r.cancel_reason, r.result, json_or_none(r.error), r.note, line, r.waits,
        r.cancel_forced or None,
    )  # fmt: skip


def from_row(row: Any) -> TaskRecord:
    """The record of a row that holds `COLUMNS`."""
    (
        uuid, source, due_at, created_at, updated_at, id_, queue, args, state, priority, position, parked, key, slot,
        timeout_s, retry, started_at, finished_at, attempt, retries, crashes, recoveries, token, node, cancel_asked_at,
        progress, result, error, note, cancel_reason, checkpoint, bucket, group_id, waits, on_failure, dedupe_key,
        scope, origin, forced,
    ) = row  # fmt: skip
    return TaskRecord(
        uuid, source, from_us(due_at), from_us(created_at), from_us(updated_at), id_, queue, args, _STATES[state],
        priority, position, bool(parked), key, slot, timeout_s, None if retry is None else to_retry(retry),
        from_us_or_none(started_at), from_us_or_none(finished_at), attempt, retries, crashes, recoveries, token, node,
        from_us_or_none(cancel_asked_at), to_progress(progress), result, to_error(error), note, cancel_reason,
        checkpoint, bucket, group_id, waits, to_on_failure(on_failure), dedupe_key, to_scope(scope), origin,
        bool(forced),
    )  # fmt: skip


WAITING = (
    "priority", "position", "id", "queue", "source", "uuid", "due_at", "created_at", "args", "key", "dedupe_slot",
    "timeout_s", "retry", "attempt", "retries", "crashes", "recoveries", "progress", "error", "checkpoint", "bucket",
    "group_id", "on_failure", "dedupe_key", "dedupe_scope", "origin",
)  # fmt: skip
"""What is read of a task to start it: in order of its first two columns, and without what starting it sets anew."""


def to_running(row: Any, now: datetime) -> TaskRecord:
    """The record of a row that holds `WAITING`, as it is once started, but for its node and token."""
    (
        priority, position, id_, queue, source, uuid, due_at, created_at, args, key, slot, timeout_s, retry, attempt,
        retries, crashes, recoveries, progress, error, checkpoint, bucket, group_id, on_failure, dedupe_key, scope,
        origin,
    ) = row  # fmt: skip
    due = from_us(due_at)
    # Most are due when they are created, and have none of the rest: what need not be called is not.
    return TaskRecord(
        uuid, source, due, due if created_at == due_at else from_us(created_at), now, id_, queue, args, RUNNING,
        priority, position, False, key, slot, timeout_s, None if retry is None else to_retry(retry), now, None,
        attempt + 1, retries, crashes, recoveries, None, None, None,
        None if progress is None else to_progress(progress), None, None if error is None else to_error(error), None,
        None, checkpoint, bucket, group_id, 0, None if on_failure is None else to_on_failure(on_failure), dedupe_key,
        None if scope is None else to_scope(scope), origin,
    )  # fmt: skip


def to_started(r: TaskRecord, now: datetime) -> TaskRecord:
    """The same of a record that was inserted a moment ago: of its fields, those of `SPECIAL` and `TIES` are in its
    row."""
    started = TaskRecord(
        r.uuid, r.source, r.due_at, r.created_at, now, r.id, r.queue, r.args, RUNNING, r.priority, r.position, False,
        r.key, r.dedupe_slot, r.timeout_s, r.retry, now, None, 1, bucket=r.bucket,
        origin=r.origin,
    )  # fmt: skip
    if has_ties(r):
        for name in TIES:
            setattr(started, name, getattr(r, name))
    return started


def to_on_failure(text: str | None) -> OnFailure | None:
    return None if text is None else _ON_FAILURE[text]


def to_scope(text: str | None) -> DedupeScope | None:
    return None if text is None else _SCOPES[text]


def to_error(text: str | None) -> ExecutionError | None:
    return None if text is None else _decode(text, ExecutionError)


def to_progress(text: str | None) -> Progress | None:
    return None if text is None else _decode(text, Progress)


def _decode(text: str, kind: type[T]) -> T | None:
    """What does not decode is left out: one bad cell must never keep a whole lane from being read."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError:
        log.warning("a stored %s cannot be read: %.200s", kind.__name__, text)
        return None


RUN_COLUMNS = ("task", "token", "attempt", "node", "state", "started_at", "ended_at", "error")


def from_run_row(row: Any) -> Run:
    _, token, attempt, node, state, started_at, ended_at, error = row
    return Run(
        attempt=attempt, token=token, node=node, state=_STATES[state], started_at=from_us(started_at),
        ended_at=from_us(ended_at), error=to_error(error),
    )  # fmt: skip
