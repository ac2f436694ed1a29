"""What becomes of a task when a run of it has ended: pure, decided once, written once."""

from __future__ import annotations

from datetime import datetime, timedelta

from taskyard.model.execution import INTERNAL_FAULT, ErrorCode, ErrorKind, ExecutionError, ExecutionResult
from taskyard.model.move import Move
from taskyard.model.notes import Note, NoteCode
from taskyard.model.queue import AUTO_RECOVER
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord

QUARANTINE_AFTER = 3
"""Workers one task may take down before it is failed for good, whatever its retries."""

RETRY_LATER = "RetryLater"

LONGEST_WAIT_S = 10 * 365 * 86_400.0
"""Ten years: a wait beyond it is a mistake, and must not lead to a date that does not exist."""

SHORTEST_SENSIBLE_WAIT_S = 1.0


def settle(
    record: TaskRecord,
    result: ExecutionResult,
    *,
    retry: RetryPolicy,
    now: datetime,
    jitter: float,
    auto_recover: int = AUTO_RECOVER,
    result_json: str = "null",
    cancel_asked: bool = False,
) -> Move:
    """The move that `result` asks for. `retry` and `auto_recover` are those of the task and its queue; `result_json` is
    the value to keep; `jitter` is drawn from [0, 1)."""
    if result.success:
        return settle_success(result, now=now, result_json=result_json)
    error = result.error or ExecutionError(kind=ErrorKind.RUNTIME, message="it failed without saying why")
    if error.kind is ErrorKind.CANCELED:
        return Move.canceled(at=now, error=error, note=result.note)
    if cancel_asked:
        return Move.canceled(at=now, error=error, note=Note(NoteCode.FAILED_WHILE_CANCELING))
    if error.kind is ErrorKind.REJECTED:
        return Move.given_back(at=now, note=Note(NoteCode.RETURNED, reason=error.text))
    if error.code is ErrorCode.DEVICE_LOST:
        return _settle_device_lost(record, error, auto_recover=auto_recover, now=now)
    if error.type == RETRY_LATER:
        due = _later(now, _asked_s(error, or_else_s=retry.delay(record.retries, jitter)))
        return Move.retrying(at=now, due_at=due, error=error, retried=False)
    return _settle_failure(record, error, retry=retry, now=now, jitter=jitter, note=result.note)


def settle_success(result: ExecutionResult, *, now: datetime, result_json: str) -> Move:
    """The move of a run that went well: most do, and it depends on neither record nor policy."""
    return Move(state=TaskState.COMPLETED, at=now, result=result_json, note=result.note, worker_pid=result.worker_pid)


def _settle_device_lost(record: TaskRecord, error: ExecutionError, *, auto_recover: int, now: datetime) -> Move:
    """As after the death of a node: the task did nothing wrong, so neither a retry nor a crash is counted."""
    note = Note(NoteCode.DEVICE_LOST, facts={"device": str(error.details.get("device", ""))})
    if record.recoveries < auto_recover:
        return Move.taken_back(at=now, error=error, note=note)
    return Move.lost(at=now, error=error, note=note)


def _settle_failure(
    record: TaskRecord, error: ExecutionError, *, retry: RetryPolicy, now: datetime, jitter: float, note: Note | None
) -> Move:
    crashed = error.kind is ErrorKind.SYSTEM and not error.details.get(INTERNAL_FAULT)
    if crashed and record.crashes + 1 >= QUARANTINE_AFTER:
        note = Note(NoteCode.QUARANTINED, facts={"crashes": record.crashes + 1})
        return Move.failed(at=now, error=error, crashed=True, note=note)
    if retry.exhausted(record.retries, error):
        return Move.failed(at=now, error=error, crashed=crashed, note=note)
    due = _later(now, retry.delay(record.retries, jitter))
    return Move.retrying(at=now, due_at=due, error=error, crashed=crashed)


def _asked_s(error: ExecutionError, *, or_else_s: float) -> float:
    """The wait that a run asked for. What is no wait must not mean at once: the task would run in a hot loop."""
    delay_s = error.details.get("delay_s")
    if isinstance(delay_s, int | float) and delay_s >= 0:
        return delay_s
    return max(or_else_s, SHORTEST_SENSIBLE_WAIT_S)


def _later(now: datetime, delay_s: float) -> datetime:
    return now + timedelta(seconds=min(delay_s, LONGEST_WAIT_S))


def heed_cancel(move: Move) -> Move:
    """What `move` becomes if a cancel was requested of the run that it ends. A task that would run again is canceled
    instead. The request itself stays with the task, so nothing else has to say that there was one."""
    if move.state is TaskState.CANCELED:
        error = move.error
        if error is None or error.types:
            return move
        # The executor's words for having carried out the request: how it did, not why.
        note = move.note or (Note(NoteCode.STOPPED_BY_CANCEL, reason=error.message) if error.message else None)
        return _canceled(move, note)
    if move.state not in {TaskState.QUEUED, TaskState.RETRYING}:
        return move
    error = move.error if move.error is not None and move.error.types else None
    return _canceled(move, Note(NoteCode.CANCELED_INSTEAD_OF_RETRY), error)


def _canceled(move: Move, note: Note | None, error: ExecutionError | None = None) -> Move:
    """A cancel in place of `move`, by the same attempt."""
    return Move(
        state=TaskState.CANCELED, at=move.at, error=error, note=note, worker_pid=move.worker_pid, device=move.device
    )


def rescue(record: TaskRecord, *, auto_recover: int, now: datetime, node: str) -> tuple[Move, Move]:
    """What becomes of a task whose node died: it is interrupted, then recovered to the front, failed, or canceled if
    that was requested. `node` is the label of the node."""
    first = Move.interrupted(at=now, error=node_died(node), note=Note(NoteCode.NODE_DIED, facts={"node": node}))
    if record.cancel is not None:
        return first, Move.canceled(at=now)
    if record.recoveries < auto_recover:
        return first, Move.recover(at=now)
    return first, Move.failed(at=now, error=node_died(node))


def node_died(node: str) -> ExecutionError:
    types = (TaskState.INTERRUPTED.capitalize(),)
    return ExecutionError(kind=ErrorKind.SYSTEM, code=ErrorCode.NODE_DIED, types=types, details={"node": node})
