"""Who did what to a task, when and why: values that are stored, and the sentences that people read.

A stored note has a code, an actor, a reason and facts. Code never reads a sentence: it compares codes. Sentences are
made here, when a task is shown.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

Fact = str | int | float


class AuditStamp(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Who set something, when, and why."""

    actor: str
    at: datetime
    reason: str = ""


class CancelCode(StrEnum):
    """Why a task is to be canceled."""

    REQUESTED = "requested"
    """A person or a program asked."""
    REPLACED = "replaced"
    """A newer task took its place; `subject` is the uuid of that task."""
    OVERLAP = "overlap"
    """The next run of a schedule came due; `subject` is the name of the schedule."""


class CancelRequest(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A request to cancel a task. It stays with the task after the task has finished, however it finished. A forced
    one kills the run instead of asking it to stop."""

    at: datetime
    actor: str = ""
    reason: str = ""
    code: CancelCode = CancelCode.REQUESTED
    subject: str = ""
    is_forced: bool = False


class NoteCode(StrEnum):
    """What happened last to a task, apart from its state. A hold and a cancel request have fields of their own."""

    REMARK = "remark"
    RELEASED = "released"
    SKIPPED = "skipped"
    RETRIED = "retried"
    RUN_AGAIN = "run_again"
    PRIORITY_CHANGED = "priority_changed"
    START_REQUESTED = "start_requested"
    MOVED = "moved"
    RESCHEDULED = "rescheduled"
    CANCEL_OVERDUE = "cancel_overdue"
    STOPPED_BY_CANCEL = "stopped_by_cancel"
    CANCELED_INSTEAD_OF_RETRY = "canceled_instead_of_retry"
    FAILED_WHILE_CANCELING = "failed_while_canceling"
    QUARANTINED = "quarantined"
    RETURNED = "returned"
    NODE_STOPPED = "node_stopped"
    LEASE_LOST = "lease_lost"
    NODE_DIED = "node_died"
    DEVICE_LOST = "device_lost"
    DEPENDENCY = "dependency"


class Note(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What happened last to a task. `reason` is text of a person, of the code that ran, or of an executor; `facts` are
    the values that the sentence of this code needs."""

    code: NoteCode
    actor: str = ""
    reason: str = ""
    at: datetime | None = None
    facts: dict[str, Fact] = {}

    @classmethod
    def remark(cls, text: str) -> Note:
        return cls(NoteCode.REMARK, reason=text)


DEPENDENCY_ENDED = {"failed": "failed", "canceled": "was canceled", "skipped": "was skipped"}

_SENTENCES = {
    NoteCode.REMARK: "",
    NoteCode.RELEASED: "released",
    NoteCode.SKIPPED: "skipped",
    NoteCode.RETRIED: "sent again",
    NoteCode.RUN_AGAIN: "run again",
    NoteCode.PRIORITY_CHANGED: "priority changed to {priority}",
    NoteCode.START_REQUESTED: "started",
    NoteCode.MOVED: "moved",
    NoteCode.RESCHEDULED: "rescheduled",
    NoteCode.CANCEL_OVERDUE: "it did not stop within {grace_s:g} s of the cancel request",
    NoteCode.STOPPED_BY_CANCEL: "",
    NoteCode.CANCELED_INSTEAD_OF_RETRY: "canceled instead of another run",
    NoteCode.FAILED_WHILE_CANCELING: "it failed while it was being canceled",
    NoteCode.QUARANTINED: "quarantined: it took down {crashes} workers",
    NoteCode.RETURNED: "",
    NoteCode.NODE_STOPPED: "its node was stopped",
    NoteCode.LEASE_LOST: "its node lost its lease",
    NoteCode.NODE_DIED: "its node {node} died",
    NoteCode.DEVICE_LOST: "its device {device} was lost",
    NoteCode.DEPENDENCY: "its dependency {task} {how}",
}


def describe_note(note: Note) -> str:
    """The sentence of a note: `priority changed to high by ann`."""
    facts = note.facts
    if note.code is NoteCode.DEPENDENCY:
        facts = {**facts, "how": DEPENDENCY_ENDED.get(str(facts.get("state")), "did not complete")}
    try:
        what = _SENTENCES[note.code].format(**facts)
    except (KeyError, ValueError):  # written by another version, with other facts
        what = str(note.code).replace("_", " ")
    return _sentence(what, note.actor, note.reason)


def describe_hold(hold: AuditStamp) -> str:
    return _sentence("held", hold.actor, hold.reason)


def describe_cancel(cancel: CancelRequest, *, is_canceled: bool) -> str:
    """The sentence of a cancel request, for a task that was canceled by it or not."""
    what = "canceled" if is_canceled else "cancel requested"
    if cancel.is_forced:
        what += " by force"
    sentence = _sentence(what, cancel.actor, cancel_reason(cancel))
    return f"{sentence}; what it was writing may be damaged" if cancel.is_forced else sentence


def cancel_reason(cancel: CancelRequest) -> str:
    match cancel.code:
        case CancelCode.REPLACED:
            return f"replaced by task {cancel.subject}"
        case CancelCode.OVERLAP:
            return f"the next run of schedule {cancel.subject} came due"
        case _:
            return cancel.reason


def _sentence(what: str, actor: str, reason: str) -> str:
    return ": ".join(filter(None, (f"{what} by {actor}" if actor else what, reason)))
