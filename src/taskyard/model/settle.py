"""What becomes of a task when a run of it has ended: pure, decided once, written once."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from taskyard.model.execution import ErrorKind, ExecutionError, ExecutionResult
from taskyard.model.move import Move
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord

QUARANTINE_AFTER = 3
"""Workers one task may take down before it is failed for good, whatever its retries."""

RETRY_LATER = "RetryLater"

LONGEST_WAIT_S = 10 * 365 * 86_400.0
"""Ten years: a wait beyond it is a mistake, and must not lead to a date that does not exist."""

SHORTEST_SENSIBLE_WAIT_S = 1.0

ASKED_TO_CANCEL, CANCELED_BY_FORCE = "asked to cancel", "canceled by force"
"""How the note begins of a task that runs and is to be canceled."""

TOO_LATE = "a cancel was asked, but the task completed all the same"
FAILED_FIRST = "a cancel was asked, but the task had failed by then"


def settle(
    record: TaskRecord,
    result: ExecutionResult,
    *,
    retry: RetryPolicy,
    now: datetime,
    jitter: float,
    result_json: str = "null",
    cancel_asked: bool = False,
) -> Move:
    """The move that `result` asks for. `result_json` is the value to keep; `jitter` is drawn from [0, 1)."""
    if result.success:
        return settle_success(result, now=now, result_json=result_json, cancel_asked=cancel_asked)
    error = result.error or ExecutionError(kind=ErrorKind.RUNTIME, message="it failed without saying why")
    if error.kind is ErrorKind.CANCELED:
        return Move.canceled(at=now, error=error, note=result.note)
    if cancel_asked:
        return Move.canceled(at=now, error=error, note="it failed while it was being canceled")
    if error.kind is ErrorKind.REJECTED:
        return Move.given_back(at=now, note=error.message)
    if error.type == RETRY_LATER:
        due = _later(now, _asked_s(error, or_else_s=retry.delay(record.retries, jitter)))
        return Move.retrying(at=now, due_at=due, error=error, retried=False)
    return _settle_failure(record, error, retry=retry, now=now, jitter=jitter, note=result.note)


def settle_success(result: ExecutionResult, *, now: datetime, result_json: str, cancel_asked: bool = False) -> Move:
    """The move of a run that went well: most do, and it depends on neither record nor policy."""
    return Move.completed(at=now, result=result_json, note=TOO_LATE if cancel_asked else result.note)


def _settle_failure(
    record: TaskRecord, error: ExecutionError, *, retry: RetryPolicy, now: datetime, jitter: float, note: str | None
) -> Move:
    crashed = error.kind is ErrorKind.SYSTEM
    if crashed and record.crashes + 1 >= QUARANTINE_AFTER:
        note = f"quarantined: it took down {record.crashes + 1} workers"
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


def heed_cancel(move: Move, reason: str = "", note: str | None = None) -> Move:
    """What `move` becomes when a cancel was asked of the run it ends: what would run again is canceled instead, what
    completed or failed says that it was asked, and what was canceled says why. `note` is that of the task: if it says
    who asked, and perhaps by force, it stays."""
    if move.state is TaskState.COMPLETED:
        return Move.completed(at=move.at, result=move.result or "null", note=TOO_LATE)
    if move.state is TaskState.FAILED:
        return msgspec.structs.replace(move, note=FAILED_FIRST if move.note is None else f"{move.note}; {FAILED_FIRST}")
    error = _because(reason, move.error)
    if move.state is TaskState.CANCELED:
        how = None if move.error is None or move.error.types else move.error.message
        return Move.canceled(at=move.at, error=error, note=_who_and_how(note, move.note or how))
    if move.state not in {TaskState.QUEUED, TaskState.RETRYING}:
        return move
    return Move.canceled(
        at=move.at, error=error, note=_who_and_how(note, "it was asked to cancel, and would have run again")
    )


def _who_and_how(note: str | None, how: str | None) -> str | None:
    if note is None or how is None or not note.startswith((ASKED_TO_CANCEL, CANCELED_BY_FORCE)):
        return how
    return f"{note}; {how}"


def _because(reason: str, error: ExecutionError | None) -> ExecutionError:
    """Why a task was canceled. What its code raised meanwhile is told as well; words of our own only say how."""
    if error is None or not error.types:
        return ExecutionError(kind=ErrorKind.CANCELED, message=reason)
    return msgspec.structs.replace(error, message=f"{reason}; {error.message}") if reason else error


def rescue(record: TaskRecord, *, auto_recover: int, now: datetime, why: str) -> tuple[Move, Move]:
    """What becomes of a task whose node died: it is interrupted, then recovered to the front, or failed."""
    first = Move.interrupted(at=now, note=why)
    if record.cancel_asked_at is not None:
        reason = record.cancel_reason or "a cancel was asked"
        error = ExecutionError(kind=ErrorKind.CANCELED, message=f"{reason}, then {why}")
        return first, Move.canceled(at=now, error=error)
    if record.recoveries < auto_recover:
        return first, Move.recover(at=now)
    error = ExecutionError(kind=ErrorKind.SYSTEM, message=why, types=(TaskState.INTERRUPTED.capitalize(),))
    return first, Move.failed(at=now, error=error)
