"""Events as lines of text: what `watch` prints in a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from taskyard.application.event_documents import EventDocument
from taskyard.cli.formatting import STATE_STYLES, error_text, progress_text
from taskyard.cli.text import clean, clock_time, duration, moment, one_line, seconds_between, short_id
from taskyard.model.event import ALERTS, EventKind
from taskyard.model.state import TaskState

_K = EventKind

VERBS = {
    _K.SUBMITTED: "submitted",
    _K.STARTED: "started",
    _K.PRIORITY_CHANGED: "priority",
    _K.REORDERED: "moved",
    _K.CANCEL_REQUESTED: "stopping",
    _K.QUEUE_PAUSED: "paused",
    _K.QUEUE_STOPPING: "stopping",
    _K.QUEUE_RESUMED: "resumed",
    _K.QUEUE_CHANGED: "changed",
    _K.DEVICE_ADDED: "added",
    _K.DEVICE_CHANGED: "changed",
    _K.DEVICE_REMOVED: "removed",
    _K.DEVICE_UP: "up",
    _K.DEVICE_DOWN: "down",
    _K.DEVICE_DRAINED: "drained",
    _K.DEVICE_TAKEN: "taken",
    _K.DEVICE_QUARANTINED: "quarantined",
    _K.DEVICE_GIVEN_BACK: "given back",
    _K.ACCOUNT_QUARANTINED: "quarantined",
    _K.ACCOUNT_RELEASED: "released",
}
"""Where the verb for people is not the name of the kind."""

ACCOUNTS = frozenset({_K.ACCOUNT_QUARANTINED, _K.ACCOUNT_RELEASED})
"""Events of accounts: their code is the account."""

STYLES = {EventKind(state): style for state, (_, style) in STATE_STYLES.items() if state is not TaskState.CREATED}
STYLES |= {
    _K.DEVICE_UP: "green",
    _K.DEVICE_DOWN: "red",
    _K.DEVICE_DRAINED: "magenta",
    _K.DEVICE_TAKEN: "yellow",
    _K.DEVICE_GIVEN_BACK: "green",
    _K.ACCOUNT_RELEASED: "green",
}
STYLES |= dict.fromkeys(ALERTS, "bold red")

PROGRESS_EVERY_S = 1.0
"""Seconds between two lines of progress of one task."""


def verb_of(event: EventDocument) -> str:
    return VERBS.get(event.kind, str(event.kind))


def subject_of(event: EventDocument, *, whole_ids: bool = True) -> str:
    """`hash 01a1e0e2-…`: what an event is about; it may be a whole queue, a device or an account."""
    if event.device and not event.uuid:
        return f"device {clean(event.device)}"
    if event.kind in ACCOUNTS and event.code:
        return f"account {clean(event.code)} of {clean(event.consumer)}"
    if not event.uuid:
        return f"queue {clean(event.queue)}"
    return f"{clean(event.consumer)} {clean(event.uuid) if whole_ids else short_id(event.uuid)}"


def detail_of(event: EventDocument, width: int = 200) -> str:
    """What there is to say besides verb and subject."""
    parts: list[str] = []
    if event.device and event.uuid:
        parts.append(f"on {clean(event.device)}")
    if event.kind is _K.STARTED and event.attempt is not None and event.attempt > 1:
        parts.append(f"attempt {event.attempt}")
    if event.kind is _K.PROGRESS and event.progress is not None:
        parts.append(progress_text(event.progress, width))
    parts.append(_due_text(event))
    if event.duration_s is not None:
        parts.append(("in " if event.kind is _K.COMPLETED else "after ") + duration(event.duration_s))
    if event.error is not None:
        parts.append(error_text(event.error))
    if event.kind is _K.BLOCKED:
        parts.append("waits for other tasks" if event.blocker is None else clean(event.blocker))
    if event.priority is not None:
        parts.append(event.priority)
    if event.device and event.code and not event.uuid:
        parts.append(clean(event.code))
    if event.actor:
        parts.append(f"by {clean(event.actor)}")
    return one_line(" · ".join(filter(None, parts)), width)


def _due_text(event: EventDocument) -> str:
    if event.due_at is None:
        return ""
    verb = "again" if event.kind is _K.RETRYING else "due"
    left = seconds_between(event.at, event.due_at) or 0.0
    if left > 86_400:
        return f"{verb} {moment(event.due_at)[:16]}"
    return f"{verb} in {duration(left)}" if left > 0 else f"{verb} now"


def event_line(event: EventDocument, *, whole_ids: bool = True) -> Text:
    style = STYLES.get(event.kind, "")
    line = Text.assemble(
        (clock_time(event.at), "dim"), "  ", (f"{verb_of(event):<11} ", style), subject_of(event, whole_ids=whole_ids),
        "  ", (detail_of(event), "dim"),
    )  # fmt: skip
    line.rstrip()
    return line


def print_event(console: Console, event: EventDocument) -> None:
    console.print(event_line(event), soft_wrap=True)


class ProgressFilter:
    """Lets one event of progress a second and task through, and every other event."""

    def __init__(self) -> None:
        self._shown_at: dict[str, float] = {}

    def lets_through(self, event: EventDocument) -> bool:
        if event.kind is not _K.PROGRESS:
            if event.after is not TaskState.RUNNING:
                self._shown_at.pop(event.uuid, None)
            return True
        at = event.at.timestamp()
        if at - self._shown_at.get(event.uuid, 0.0) < PROGRESS_EVERY_S:
            return False
        self._shown_at[event.uuid] = at
        return True
