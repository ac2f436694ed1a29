"""One legal state change, as a value, and what it does to a record.

Both stores follow `apply_move`; the SQL stores write the same columns in bulk on the hot path, and the Hypothesis
machine holds them to it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Self

import msgspec

from taskyard.model.blocker import Blocker
from taskyard.model.event import TOLD_AS, EventDetail, make_detail
from taskyard.model.execution import ExecutionError
from taskyard.model.notes import AuditStamp, CancelRequest, Note
from taskyard.model.state import COMPLETED, ENDED, QUEUED, RUNNING, WAITING_FOR_TIME, TaskState, check_move
from taskyard.model.task import DedupeScope, TaskRecord


class Move(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`state` is where the task goes. The flags say what the move counts as; `run` is what the attempt's row will say,
    when that differs from the state (a run given back, taken back or lost is recorded as interrupted)."""

    state: TaskState
    at: datetime
    result: str | None = None
    error: ExecutionError | None = None
    note: Note | None = None
    hold: AuditStamp | None = None
    cancel: CancelRequest | None = None
    due_at: datetime | None = None
    run: TaskState | None = None
    retried: bool = False
    crashed: bool = False
    recovered: bool = False
    unspent: bool = False
    to_head: bool = False
    to_tail: bool = False
    priority: int | None = None
    worker_pid: int | None = None
    device: str | None = None
    blocker: Blocker | None = None
    actor: str = ""

    @classmethod
    def completed(cls, *, at: datetime, result: str = "null", note: Note | None = None) -> Self:
        return cls(state=COMPLETED, at=at, result=result, note=note)

    @classmethod
    def failed(cls, *, at: datetime, error: ExecutionError, crashed: bool = False, note: Note | None = None) -> Self:
        return cls(state=TaskState.FAILED, at=at, error=error, crashed=crashed, note=note)

    @classmethod
    def retrying(
        cls, *, at: datetime, due_at: datetime, error: ExecutionError, retried: bool = True, crashed: bool = False
    ) -> Self:
        return cls(state=TaskState.RETRYING, at=at, due_at=due_at, error=error, retried=retried, crashed=crashed)

    @classmethod
    def canceled(
        cls,
        *,
        at: datetime,
        error: ExecutionError | None = None,
        note: Note | None = None,
        cancel: CancelRequest | None = None,
    ) -> Self:
        return cls(state=TaskState.CANCELED, at=at, error=error, note=note, cancel=cancel)

    @classmethod
    def given_back(cls, *, at: datetime, note: Note | None = None) -> Self:
        """The run ends without having counted: rejected, or cut short by a graceful stop."""
        return cls(state=QUEUED, at=at, run=TaskState.INTERRUPTED, unspent=True, note=note)

    @classmethod
    def taken_back(cls, *, at: datetime, error: ExecutionError, note: Note) -> Self:
        """The run ended because the place where it ran is gone, and its node lives: it counts as a recovery."""
        return cls(state=QUEUED, at=at, run=TaskState.INTERRUPTED, error=error, note=note, recovered=True, to_head=True)

    @classmethod
    def lost(cls, *, at: datetime, error: ExecutionError, note: Note) -> Self:
        """The run ended as for `taken_back`, and the task has used up its recoveries."""
        return cls(state=TaskState.FAILED, at=at, run=TaskState.INTERRUPTED, error=error, note=note)

    @classmethod
    def interrupted(cls, *, at: datetime, error: ExecutionError, note: Note) -> Self:
        """The error is that of the attempt. The task has one only if it fails by it."""
        return cls(state=TaskState.INTERRUPTED, at=at, error=error, note=note)

    @classmethod
    def recover(cls, *, at: datetime) -> Self:
        return cls(state=QUEUED, at=at, recovered=True, to_head=True)

    @classmethod
    def queued(cls, *, at: datetime, to_head: bool = False, note: Note | None = None) -> Self:
        return cls(state=QUEUED, at=at, to_head=to_head, note=note)


def event_detail(old: TaskState, move: Move) -> EventDetail | None:
    """What the event of this move says beyond its kind."""
    code, actor = "", move.actor
    if move.error is not None:
        code = str(move.error.code or move.error.type)
    if move.note is not None:
        code, actor = code or str(move.note.code), move.note.actor or actor
    if move.cancel is not None:
        code, actor = code or str(move.cancel.code), move.cancel.actor
    if move.hold is not None:
        actor = move.hold.actor
    if move.blocker is not None:
        code = move.blocker.kind
    return make_detail(TOLD_AS[move.state], old, actor=actor, code=code)


def apply_move(record: TaskRecord, move: Move) -> None:
    """Change `record` as `move` says. Places and parking are the store's part: they depend on the other tasks."""
    old, new = record.state, move.state
    check_move(old, new)
    if new is COMPLETED:
        apply_completed(record, move)
        return
    record.state = new
    record.updated_at = move.at
    record.retries += move.retried
    record.crashes += move.crashed
    record.recoveries += move.recovered
    record.attempt -= move.unspent
    if move.due_at is not None:
        record.due_at = move.due_at
    if move.error is not None and new is not TaskState.INTERRUPTED:
        record.error = move.error
    if move.note is not None:
        record.note = move.note
    if move.priority is not None:
        record.priority = move.priority
    _leave_and_enter(record, old, move)
    if new in ENDED:
        if move.cancel is not None:
            record.cancel, record.note = move.cancel, move.note  # what was done to the task before matters no longer
        record.finished_at = move.at
        record.dedupe_slot = None
        record.open_dependencies = 0
        record.result = move.result
    elif old is TaskState.FAILED:
        # Sent again by a person: a fresh set of retries, the old error stays until the next run.
        record.finished_at = record.cancel = None
        record.retries = record.crashes = record.recoveries = 0
        if record.dedupe_scope is not DedupeScope.WINDOW:
            record.dedupe_slot = record.dedupe_key


def _leave_and_enter(record: TaskRecord, old: TaskState, move: Move) -> None:
    """What a task has only while it runs, is held or is blocked."""
    if old is RUNNING:
        record.token = record.node = record.worker_pid = record.device = None
    elif TaskState.PAUSED in (old, move.state):
        record.is_parked = old in WAITING_FOR_TIME
        record.hold = move.hold
    if TaskState.BLOCKED in (old, move.state):
        record.blocked_by = None if move.blocker is None else move.blocker.key
        blocked_at = move.at if move.blocker is None else move.blocker.since
        record.blocked_at = blocked_at if move.state is TaskState.BLOCKED else None


def apply_completed(record: TaskRecord, move: Move) -> None:
    """The same for the end of most tasks, apart from the rest for speed alone: the record runs, the move completes."""
    record.state = COMPLETED
    record.updated_at = record.finished_at = move.at
    record.result = move.result
    record.token = record.node = record.worker_pid = record.device = None
    record.dedupe_slot = record.error = record.checkpoint = None
    if move.note is not None:
        record.note = move.note
