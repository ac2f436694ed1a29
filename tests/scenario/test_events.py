"""What happened, as people and code can follow it: in this process and from another."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from taskyard import Event, EventKind, InvalidInput, Yard
from taskyard.errors import EventsMissed
from tests.scenario.gates import PATIENCE_S, heard
from tests.scenario.jobs import build


class Listener:
    """Listens from its making on; `until` waits for a kind and returns what was heard."""

    def __init__(self, yard: Yard) -> None:
        self.events: list[Event] = []
        self._yard = yard
        self._more = asyncio.Event()
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async with aclosing(self._yard.events(after=0)) as events:
            async for event in events:
                self.events.append(event)
                self._more.set()

    async def until(self, kind: EventKind, uuid: str) -> list[EventKind]:
        async with asyncio.timeout(PATIENCE_S):
            while not any(event.kind is kind and event.uuid == uuid for event in self.events):
                self._more.clear()
                await self._more.wait()
        return [event.kind for event in self.events if event.uuid == uuid and event.kind is not EventKind.PROGRESS]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@pytest.mark.spec("QUE-29")
async def test_what_happens_is_told_as_it_happens(url, gates):
    """New, started, finished, failed, canceled, priority changed: a listener hears of each, in order, once."""
    async with build(url, gates.port, queues={"q": {"concurrency": 1}}) as yard:
        listener = Listener(yard)
        good, bad, gone = [await yard.submit("gate", {"name": name}, queue="q") for name in ("good", "bad", "gone")]
        run = await gates.begun("good")
        await yard.set_priority(bad.uuid, "high")
        await gone.cancel()
        run.finish()
        (await gates.begun("bad")).fail("ValueError")
        assert await listener.until(EventKind.COMPLETED, good.uuid) == ["submitted", "running", "completed"]
        assert await listener.until(EventKind.FAILED, bad.uuid) == [
            "submitted",
            "priority_changed",
            "running",
            "failed",
        ]
        assert await listener.until(EventKind.CANCELED, gone.uuid) == ["submitted", "canceled"]
        numbers = [event.seq for event in listener.events]
        assert numbers == sorted(set(numbers))
        assert {(event.consumer, event.queue) for event in listener.events} == {("gate", "q")}
        await listener.close()


@pytest.mark.spec("QUE-29", "QUE-25")
async def test_another_process_is_heard(file_url, gates, nodes):
    """What another process does to a task is heard here, its progress included, and the record shows it."""
    node = await nodes.start(file_url)
    async with build(file_url).client() as yard:
        listener = Listener(yard)
        handle = await yard.submit("gate", {"name": "far"})
        run = await gates.begun("far")
        assert run.pid == node.pid
        run.progress(0.25, "a quarter")
        await heard(yard, EventKind.PROGRESS, handle.uuid)
        progress = (await handle.record()).progress
        assert progress is not None
        assert (progress.fraction, progress.message) == (0.25, "a quarter")
        run.finish()
        assert await listener.until(EventKind.COMPLETED, handle.uuid) == ["submitted", "running", "completed"]
        await listener.close()


@pytest.mark.spec("QUE-29")
async def test_a_listener_goes_on_where_it_left_off(url):
    """A listener that knows the last number it has seen misses nothing in between, and sees nothing twice."""
    async with build(url) as yard:
        first = await yard.submit("echo")
        await first.result(timeout_s=10)
        seen = await heard(yard, EventKind.COMPLETED, first.uuid)
        second = await yard.submit("echo")
        await second.result(timeout_s=10)
        page = await yard.store.events(after=seen.seq)
        assert [(event.uuid, event.kind) for event in page.events] == [
            (second.uuid, EventKind.SUBMITTED),
            (second.uuid, EventKind.STARTED),
            (second.uuid, EventKind.COMPLETED),
        ]


@pytest.mark.spec("QUE-29")
async def test_the_events_end_with_the_yard(url):
    """Closing a yard ends its streams of events: whoever listens neither holds up the stop nor hangs after it."""
    kinds: list[EventKind] = []

    async def listen(yard: Yard) -> None:
        async for event in yard.events(after=0):
            kinds.append(event.kind)  # noqa: PERF401 - what was heard must be seen although it was cut off

    async with build(url) as yard:
        handle = await yard.submit("echo")
        listening = asyncio.create_task(listen(yard))
        await handle.result(timeout_s=10)
    await asyncio.wait_for(listening, PATIENCE_S)
    assert kinds == ["submitted", "running", "completed"]


@pytest.mark.spec("QUE-29")
async def test_a_listener_hears_only_what_comes(url):
    """Without a number to start from, a listener hears from now on."""
    async with build(url) as yard:
        before = await yard.submit("echo")
        await before.result(timeout_s=10)
        async with aclosing(yard.events()) as events:
            following = asyncio.ensure_future(anext(events))
            while not following.done():
                await yard.submit("echo")
            assert (await following).uuid != before.uuid


@pytest.mark.spec("QUE-29")
async def test_a_listener_of_a_store_that_was_begun_anew_is_told(url):
    """A number that the store has not come to is an error, not a gap, and it says where to go on; the last one is
    none."""
    async with build(url).client() as yard:
        handle = await yard.submit("echo")
        with pytest.raises(EventsMissed, match="of another store") as missed:
            await anext(yard.events(after=2**50))
        async with aclosing(yard.events(after=missed.value.now)) as events:
            following = asyncio.ensure_future(anext(events))
            await yard.cancel(handle.uuid)
            assert (await following).kind is EventKind.CANCELED


@pytest.mark.spec("QUE-29")
async def test_a_listener_that_came_too_late_is_told():
    """A listener that asks for events the store no longer keeps gets an error, not a gap; it says where to go on."""
    async with build("memory://").client() as yard:
        for _ in range(2):
            await yard.submit_many("echo", [{}] * 6000, delay_s=3600)
        with pytest.raises(EventsMissed, match="no longer kept") as missed:
            await anext(yard.events(after=0))
        assert missed.value.after == 0
        async with aclosing(yard.events(after=missed.value.now)) as events:
            assert (await anext(events)).seq == missed.value.now + 1


@pytest.mark.spec("QUE-29")
async def test_a_listener_hears_what_it_asks_for(url):
    """By kind, queue, consumer, task or group, or several of them together; of a queue as a whole, where it fits."""
    async with build(url) as yard:
        one = await yard.submit("echo", {"value": 1}, queue="quick")
        two = await yard.submit("add", {"a": 1})
        group = await yard.submit_group([yard.bind("echo")], summary=yard.bind("add", {"a": 2}))
        (member,) = group.tasks
        for handle in (one, two, group.summary):
            await handle.result(timeout_s=10)
        await yard.queue("quick").pause()
        last = await yard.submit("echo", queue="slow")  # what comes next, where nothing else is heard
        await last.result(timeout_s=10)
        end = ("completed", last.uuid)
        asked: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
            ({"kinds": "completed", "consumer": "echo"}, [("completed", one.uuid), ("completed", member.uuid), end]),
            (
                {"kinds": ["queue_paused", "submitted"], "queue": "quick"},
                [("submitted", one.uuid), ("queue_paused", "")],
            ),
            ({"kinds": [EventKind.QUEUE_PAUSED, EventKind.FAILED]}, [("queue_paused", "")]),
            ({"queue": "slow"}, [("submitted", last.uuid), ("running", last.uuid), end]),
            (
                {"task": two.uuid, "kinds": [EventKind.STARTED, "completed"]},
                [("running", two.uuid), ("completed", two.uuid)],
            ),
            ({"group": group.id, "kinds": "completed"}, [("completed", member.uuid), ("completed", group.id)]),
            ({"group": group.id, "task": member.uuid, "kinds": "running"}, [("running", member.uuid)]),
        ]
        for where, expected in asked:
            async with aclosing(yard.events(after=0, **where)) as events, asyncio.timeout(PATIENCE_S):
                told = [await anext(events) for _ in expected]
            assert [(event.kind, event.uuid) for event in told] == expected


@pytest.mark.spec("QUE-29")
async def test_a_filtered_listener_does_not_fall_behind(url):
    """What it did not ask for is behind it too: however much of that there was, it goes on from there, and from the
    last number it was told another goes on with another filter."""
    async with build("memory://") as yard:
        async with aclosing(yard.events(consumer="add")) as events:
            following = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            for _ in range(3):
                await yard.submit_many("echo", [{}] * 5000, delay_s=3600)
                await (await yard.submit("echo")).result(timeout_s=10)
            handle = await yard.submit("add", {"a": 1})
            first = await asyncio.wait_for(following, PATIENCE_S)
            assert (first.kind, first.uuid) == ("submitted", handle.uuid)
        async with aclosing(yard.events(after=first.seq, task=handle.uuid, kinds="completed")) as events:
            assert (await asyncio.wait_for(anext(events), PATIENCE_S)).uuid == handle.uuid


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"kinds": "finished"}, "'finished' is no kind of event; known are submitted, "),
        ({"kinds": ["completed", 3]}, "3 is no kind of event"),
        ({"kinds": 3}, "3 is no kind of event"),
        ({"kinds": []}, "nothing would ever be heard"),
        ({"queue": ""}, "queue"),
        ({"consumer": 3}, "consumer"),
        ({"task": ""}, "uuid"),
        ({"group": "nobody"}, "no task of a group nobody"),
        ({"after": -1}, "after must be a whole number"),
    ],
)
async def test_a_filter_that_makes_no_sense_is_refused(where, message):
    """A listener that could never hear anything is told so, with the words that there are."""
    async with build("memory://") as yard:
        with pytest.raises(InvalidInput, match=message):
            await anext(yard.events(**where))
