"""Which events a listener hears."""

import pytest

from taskyard.model.event import Event, EventFilter, EventKind
from taskyard.testing.samples import NOON

STARTED = Event(7, NOON, EventKind.STARTED, "t", "zip", "media")
PAUSED = Event(8, NOON, EventKind.QUEUE_PAUSED, "", "", "media")


@pytest.mark.parametrize(
    ("where", "heard"),
    [
        ({}, [STARTED, PAUSED]),
        ({"kinds": frozenset({EventKind.STARTED})}, [STARTED]),
        ({"queue": "media"}, [STARTED, PAUSED]),
        ({"queue": "other"}, []),
        ({"consumer": "zip"}, [STARTED]),
        ({"consumer": "mail"}, []),
        ({"uuids": frozenset({"t", "u"})}, [STARTED]),
        ({"uuids": frozenset()}, []),
        ({"queue": "media", "kinds": frozenset({EventKind.FAILED})}, []),
    ],
)
def test_everything_asked_for_must_fit(where, heard):
    """An event is heard if each part of the filter fits it; what is told of a whole queue is of no task."""
    assert [event for event in (STARTED, PAUSED) if EventFilter(**where).matches(event)] == heard
