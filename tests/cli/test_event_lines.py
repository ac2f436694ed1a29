"""Events as lines of text."""

from typing import Any

import pytest

from taskyard.application.events import event_document
from taskyard.cli.story import detail_of, subject_of, verb_of
from taskyard.model.event import Event, EventKind
from taskyard.model.state import TaskState
from taskyard.testing.samples import NOON, a_record

A_LINE = [
    (Event(1, NOON, EventKind.CANCELED, "u", "add", "default", actor="ann"), {}, "by ann"),
    (Event(1, NOON, EventKind.QUEUE_PAUSED, "", "", "cpu", actor="ann"), None, "by ann"),
    (Event(1, NOON, EventKind.PRIORITY_CHANGED, "u", "add", "default", actor="ann"), {"priority": 0}, "high · by ann"),
    (Event(1, NOON, EventKind.BLOCKED, "u", "add", "default"), {}, "waits for other tasks"),
    (
        Event(1, NOON, EventKind.BLOCKED, "u", "add", "default", actor="node", code="disk"),
        {"state": TaskState.BLOCKED, "blocked_by": "disk:/data"},
        "disk /data · by node",
    ),
    (Event(1, NOON, EventKind.BLOCKED, "u", "add", "default", code="disk"), {}, "disk"),
]


A_SUBJECT = [
    (Event(1, NOON, EventKind.QUEUE_PAUSED, "", "", "cpu"), "paused", "queue cpu", ""),
    (
        Event(1, NOON, EventKind.DEVICE_DOWN, "", "", "phones", code="no answer", device="emu-1"),
        "down",
        "device emu-1",
        "no answer",
    ),
    (
        Event(1, NOON, EventKind.ACCOUNT_QUARANTINED, "", "daily", "phones", actor="node-1", code="7"),
        "quarantined",
        "account 7 of daily",
        "by node-1",
    ),
]


@pytest.mark.parametrize(("event", "verb", "subject", "detail"), A_SUBJECT)
def test_a_line_names_what_the_event_is_about(event: Event, verb: str, subject: str, detail: str) -> None:
    """An event that is not of a task names its queue, its device or its account."""
    document = event_document(event, None, None)
    assert (verb_of(document), subject_of(document), detail_of(document)) == (verb, subject, detail)


@pytest.mark.parametrize(("event", "fields", "text"), A_LINE)
def test_a_line_says_who_and_why(event: Event, fields: dict[str, Any] | None, text: str) -> None:
    """The actor of an event, its blocker and its priority are in the line."""
    record = None if fields is None else a_record(**fields)
    assert detail_of(event_document(event, record, None)) == text
