"""Reading what happened a little while ago."""

from pathlib import Path
from typing import Any

import pytest

from taskyard.application.events import event_document
from taskyard.application.rates import recent_cursor
from taskyard.cli.story import detail_of
from taskyard.model.event import Event, EventKind
from taskyard.model.state import TaskState
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Store
from taskyard.settings import make_store
from taskyard.testing.samples import NOON, a_record, an_add

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


@pytest.mark.parametrize(("event", "fields", "text"), A_LINE)
def test_a_line_says_who_and_why(event: Event, fields: dict[str, Any] | None, text: str) -> None:
    """The actor of an event, its blocker and its priority are in the line."""
    record = None if fields is None else a_record(**fields)
    assert detail_of(event_document(event, record, None)) == text


@pytest.fixture(params=["sqlite", "postgres", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    urls = {"sqlite": f"sqlite:///{tmp_path / 'work.db'}", "memory": "memory://"}
    url = urls.get(request.param) or request.getfixturevalue("postgres_url")
    return make_store(url, SystemClock())


@pytest.mark.parametrize("there_are", [0, 3, 7, 40])
async def test_the_last_events_are_found(store, there_are):
    """However a store numbers its events, the last seven are found, or all there are."""
    await store.open()
    uuids = []
    for _ in range(there_are):
        record = a_record()
        uuids.append(record.uuid)
        await store.turn("node", adds=[an_add(record)])
    page = await store.events(after=await recent_cursor(store, 7))
    assert [event.uuid for event in page.events][-there_are:] == uuids[-7:]
    await store.close()
