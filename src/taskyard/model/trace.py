"""The trace context of an attempt, as a W3C traceparent. It is computed, so that no store has to keep it."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from taskyard.model.task import NO_EXTRA, Claim, TaskRecord

SAMPLED = "01"


def attempt_trace(claim: Claim) -> str:
    """The traceparent of this attempt. Its span id is derived from uuid and token."""
    uuid, trace = claim.record.uuid, claim.record.trace
    return f"00-{attempt_trace_id(claim)}-{_digest(f'{uuid} {claim.token}', 8)}-{trace[-2:] if trace else SAMPLED}"


def attempt_trace_id(claim: Claim) -> str:
    """The trace id of the task, or else one derived from its uuid, so that all attempts of a task are in one trace."""
    return task_trace_id(claim.record) or _digest(claim.record.uuid, 16)


def task_trace_id(record: TaskRecord) -> str | None:
    """The trace id that was given with the submit."""
    return record.trace[3:35] or None


def inherit_trace(parent: Claim, records: Iterable[TaskRecord]) -> None:
    """Tasks that a run submits belong to its trace, unless they have one of their own. A run whose task was submitted
    without a trace hands none down: its tasks stay as small as they are."""
    if not parent.record.trace:
        return
    trace = attempt_trace(parent)
    for record in records:
        if not record.trace:
            record.extra = msgspec.structs.replace(record.extra or NO_EXTRA, trace=trace)


def _digest(text: str, size: int) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size, person=b"taskyard-trace").hexdigest()
