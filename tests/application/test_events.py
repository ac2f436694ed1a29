"""Events as documents, page by page and as a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from taskyard import Yard
from taskyard.application.event_documents import EventDocument
from taskyard.application.events import standing_event
from taskyard.application.local import LocalApplication
from taskyard.errors import TaskEnded
from taskyard.model.event import EventFilter, EventKind
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord

PATIENCE_S = 20


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'work.db'}"}
    found: str = urls.get(request.param) or request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
async def yard(url: str) -> AsyncIterator[Yard]:
    yard = Yard(url)

    @yard.consumer
    async def double(n: int) -> int:
        return 2 * n

    @yard.consumer
    async def leak(password: str) -> None:
        raise ValueError(f"cannot log in with {password}")

    async with yard:
        yield yard


@pytest.fixture
def application(yard: Yard) -> LocalApplication:
    return LocalApplication(yard, actor="test")


async def run(yard: Yard, consumer: str, **args: object) -> str:
    """The id of a task that has finished."""
    handle = await yard.submit(consumer, args)
    with contextlib.suppress(TaskEnded):
        await handle.result(timeout_s=PATIENCE_S)
    return handle.uuid


async def test_a_page_tells_what_happened_to_each_task(yard: Yard, application: LocalApplication) -> None:
    """An attempt that began or finished comes with its number and node, one that finished with its duration."""
    uuid = await run(yard, "double", n=21)
    page = await application.events.read(after=0)
    assert [event.kind for event in page.events] == ["submitted", "running", "completed"]
    assert {event.uuid for event in page.events} == {uuid}
    submitted, began, completed = page.events
    assert (submitted.duration_s, began.duration_s, began.attempt) == (None, None, 1)
    assert began.node == completed.node == yard._engine.incarnation
    assert completed.duration_s is not None
    assert (page.last, page.missed) == (completed.seq, False)


async def test_errors_in_events_are_redacted(yard: Yard, application: LocalApplication) -> None:
    """An event of a failure has the error, without its traceback and without the secrets among the arguments."""
    await run(yard, "leak", password="sesame")
    failed = (await application.events.read(EventFilter(kinds=frozenset({EventKind.FAILED})), after=0)).events[-1]
    assert failed.error is not None
    assert (failed.error.message, failed.error.traceback) == ("cannot log in with ***", None)


async def test_a_page_begins_where_it_is_asked_to(yard: Yard, application: LocalApplication) -> None:
    """After a number, at the tail, or at the newest event, from which a reader goes on without a gap."""
    await run(yard, "double", n=1)
    newest = await application.events.read()
    assert newest.events == ()
    assert (await application.events.read(after=newest.last)).events == ()
    assert [event.kind for event in (await application.events.read(tail=1)).events] == ["completed"]
    await run(yard, "double", n=2)
    assert [event.kind for event in (await application.events.read(after=newest.last)).events] == [
        "submitted", "running", "completed",
    ]  # fmt: skip


async def test_a_page_goes_past_what_does_not_match(yard: Yard, application: LocalApplication) -> None:
    """A reader with a filter goes on after the whole page, so that it reads no event twice."""
    await run(yard, "double", n=1)
    page = await application.events.read(EventFilter(consumer="leak"), after=0)
    assert (page.events, page.last) == ((), (await application.events.read()).last)


async def test_a_subscriber_gets_what_matches(yard: Yard, application: LocalApplication) -> None:
    """Events after a number, and only those of its tasks and kinds."""
    other, mine = [await yard.submit("double", {"n": n}, delay_s=3600) for n in (1, 2)]
    where = EventFilter(kinds=frozenset({EventKind.CANCELED}), uuids=frozenset({mine.uuid}))
    async with asyncio.timeout(PATIENCE_S):
        await other.cancel()
        await mine.cancel()
        event = await anext(application.events.subscribe(where, after=0))
    assert (event.uuid, event.kind, event.after) == (mine.uuid, "canceled", TaskState.CANCELED)


async def test_subscribers_share_what_describes_an_event(
    yard: Yard, application: LocalApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task of an event is read once, however many subscribers of however many applications get the event."""
    for n in range(20):
        await yard.submit("double", {"n": n}, delay_s=3600)
    newest = (await application.events.read()).last
    find, asked = yard.store.find, []

    async def counted(uuid: str) -> TaskRecord | None:
        asked.append(uuid)
        return await find(uuid)

    async def listen(mine: LocalApplication) -> list[EventDocument]:
        heard: list[EventDocument] = []
        async for event in mine.events.subscribe(after=0):
            heard.append(event)
            if event.seq == newest:
                break
        return heard

    monkeypatch.setattr(yard.store, "find", counted)
    async with asyncio.timeout(PATIENCE_S):
        heard = await asyncio.gather(*(listen(LocalApplication(yard, actor=f"web:{n}")) for n in range(10)))
    assert len(heard[0]) == len(asked) == 20
    assert all(one == heard[0] for one in heard)


async def test_the_state_of_a_task_is_told_as_an_event(yard: Yard, application: LocalApplication) -> None:
    """A watcher that comes late is told where the task stands."""
    task = await application.tasks.get(await run(yard, "leak", password="sesame"))
    event = standing_event(task, 7)
    assert (event.seq, event.kind, event.at) == (7, "failed", task.finished_at)
    assert event.error == task.error
    assert event.duration_s == task.duration_s
