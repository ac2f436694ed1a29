"""Many subscribers to the events of one yard: one reader of the store, and nobody waits for a slow one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from taskyard import Event, EventKind, Yard, event_tail, steering
from taskyard import listening as following
from taskyard.errors import EventsMissed, StoreUnavailable
from taskyard.model.event import EventPage
from taskyard.ports.clock import SystemClock
from taskyard.stores.memory import MemoryStore
from tests.scenario.gates import PATIENCE_S
from tests.scenario.jobs import build


class CountingStore(MemoryStore):
    """Counts reads of events that anybody but the engine asks for, and can be away."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.reads = 0
        self.away: Exception | None = None
        self.broken: Exception | None = None

    async def events(self, *, after: int, limit: int = 1000) -> EventPage:
        if asyncio.current_task() in engine_tasks():
            return await super().events(after=after, limit=limit)
        self.reads += 1
        if self.away is not None:
            raise self.away
        if self.broken is not None:
            raise self.broken
        await asyncio.sleep(0)
        return await super().events(after=after, limit=limit)


def engine_tasks() -> set[asyncio.Task[Any]]:
    """The loops of engines, one of which reads events as well."""
    return {task for task in asyncio.all_tasks() if task.get_name() == "taskyard-outcomes"}


class Listener:
    """Subscribes at once; `slow` ones read no further than they are told to."""

    def __init__(self, yard: Yard, **asked: Any) -> None:
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self.may_read = asyncio.Event()
        self.may_read.set()
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._listen(yard, asked))

    async def _listen(self, yard: Yard, asked: dict[str, Any]) -> None:
        try:
            async with aclosing(yard.events(**asked)) as events:
                async for event in events:
                    self.events.append(event)
                    self._more.set()
                    await self.may_read.wait()
        except Exception as error:
            self.error = error
        finally:
            self._more.set()

    async def until(self, count: int) -> list[Event]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.events) < count and not self.task.done():
                self._more.clear()
                await self._more.wait()
        return self.events


@asynccontextmanager
async def listening(yard: Yard, count: int, **asked: Any) -> AsyncIterator[list[Listener]]:
    listeners = [Listener(yard, **asked) for _ in range(count)]
    try:
        yield listeners
    finally:
        for one in listeners:
            one.task.cancel()
        await asyncio.wait([one.task for one in listeners])


async def reads_with(subscribers: int, tasks: int = 20) -> tuple[int, list[list[Event]]]:
    """How often the store is read while tasks are run one after the other, and what each subscriber gets."""
    store = CountingStore()
    async with build(store) as yard, listening(yard, subscribers, after=0) as listeners:
        for one in listeners:
            await one.until(0)
        before = store.reads
        for _ in range(tasks):
            await (await yard.submit("echo")).result(timeout_s=PATIENCE_S)
        heard = [await one.until(3 * tasks) for one in listeners]
        return store.reads - before, heard


@pytest.mark.spec("QUE-29")
async def test_a_hundred_subscribers_read_the_store_as_often_as_one():
    """All subscribers of a process share one reader: a hundred cost the store no more reads than one, and each gets
    every event in order."""
    alone, (events,) = await reads_with(1)
    together, heard = await reads_with(100)
    assert together <= alone + 100 + 5, "each may read once to catch up when it starts"
    numbers = [event.seq for event in heard[0]]
    assert len(numbers) == len(events) == 60
    assert numbers == sorted(set(numbers))
    assert all([event.seq for event in one] == numbers for one in heard)


@pytest.mark.spec("QUE-29")
async def test_each_subscriber_has_its_own_filter(url):
    """Subscribers of one reader get what each has asked for and nothing else."""
    async with build(url) as yard:
        one, other = await yard.submit("echo"), await yard.submit("add", {"a": 1})
        async with (
            listening(yard, 1, after=0, kinds="completed") as (ends,),
            listening(yard, 1, after=0, task=one) as (of_one,),
            listening(yard, 1, after=0, consumer="add") as (of_add,),
        ):
            for handle in (one, other):
                await handle.result(timeout_s=PATIENCE_S)
            assert {event.uuid for event in await ends.until(2)} == {one.uuid, other.uuid}
            assert [event.kind for event in await of_one.until(3)] == ["submitted", "running", "completed"]
            assert {event.uuid for event in await of_add.until(3)} == {other.uuid}


@pytest.mark.spec("QUE-29")
async def test_a_slow_subscriber_holds_up_nobody_and_misses_nothing(url, monkeypatch):
    """A subscriber that does not read keeps a bounded number of events; the others get theirs at once, and when it
    reads again it gets all events that the store still has."""
    monkeypatch.setattr(event_tail, "UNREAD_AT_MOST", 10)
    async with build(url) as yard, listening(yard, 2, after=0) as (slow, quick):
        first = await yard.submit("echo")
        await slow.until(1)
        await quick.until(1)
        slow.may_read.clear()
        had = len(slow.events)
        await first.result(timeout_s=PATIENCE_S)
        for _ in range(5):
            handles = await yard.submit_many("echo", [{}] * 20)
            for handle in handles:
                await handle.result(timeout_s=PATIENCE_S)
        await quick.until(303)
        assert len(slow.events) <= had + 1
        slow.may_read.set()
        assert [event.seq for event in await slow.until(303)] == [event.seq for event in quick.events]
        assert slow.error is None


@pytest.mark.spec("QUE-29")
async def test_a_subscriber_that_is_too_slow_is_told(monkeypatch):
    """If the store has forgotten events that a slow subscriber has not read, it gets `EventsMissed` after what it was
    given, and the others go on."""
    monkeypatch.setattr(event_tail, "UNREAD_AT_MOST", 10)
    store = MemoryStore(SystemClock())
    async with (
        build(store) as yard,
        listening(yard, 1, after=0) as (slow,),
        listening(yard, 1, after=0, kinds="submitted") as (quick,),
    ):
        await yard.submit("echo")
        await slow.until(1)
        await quick.until(1)
        slow.may_read.clear()
        for n in range(1, 25):
            handles = await yard.submit_many("echo", [{}] * 200)
            await handles[-1].result(timeout_s=PATIENCE_S)
            await quick.until(1 + 200 * n)
        slow.may_read.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([slow.task])
        assert isinstance(slow.error, EventsMissed)
        await yard.submit("echo")
        assert len(await quick.until(4802)) == 4802


@pytest.mark.spec("QUE-29")
async def test_who_starts_in_the_past_catches_up_and_joins(url):
    """A subscriber that starts at a number gets all events since, each once, also those that happen meanwhile."""
    async with build(url) as yard, listening(yard, 1, after=0) as (first,):
        await (await yard.submit("echo")).result(timeout_s=PATIENCE_S)
        await first.until(3)
        async with listening(yard, 10, after=first.events[0].seq) as late:
            await (await yard.submit("echo")).result(timeout_s=PATIENCE_S)
            numbers = [event.seq for event in await first.until(6)]
            for one in late:
                assert [event.seq for event in await one.until(5)] == numbers[1:]


@pytest.mark.spec("QUE-29")
async def test_a_store_that_is_away_is_waited_for(monkeypatch, caplog):
    """While the store is away the subscribers wait; when it is back they get what has happened. One line says so."""
    monkeypatch.setattr(following, "AGAIN_S", 0.01)
    store = CountingStore()
    async with build(store) as yard, listening(yard, 3, after=0) as listeners:
        await (await yard.submit("echo")).result(timeout_s=PATIENCE_S)
        for one in listeners:
            await one.until(3)
        store.away = StoreUnavailable("away")
        handle = await yard.submit("echo")
        async with asyncio.timeout(PATIENCE_S):
            while store.away is not None:
                if "events are read on" in caplog.text:
                    store.away = None
                await asyncio.sleep(0)
        await handle.result(timeout_s=PATIENCE_S)
        for one in listeners:
            assert len(await one.until(6)) == 6
    assert caplog.text.count("events are read on when the store answers") == 1


async def test_a_reader_that_fails_fails_its_subscribers():
    """An error that will not pass reaches every subscriber; who subscribes afterwards starts anew."""
    store = CountingStore()
    async with build(store) as yard:
        async with listening(yard, 3, after=0) as listeners:
            await yard.submit("echo")
            for one in listeners:
                await one.until(1)
            store.broken = ZeroDivisionError("broken")
            await yard.submit("echo")
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait([one.task for one in listeners])
            assert {repr(one.error) for one in listeners} == {"ZeroDivisionError('broken')"}
        store.broken = None
        async with listening(yard, 1, after=0) as (again,):
            assert len(await again.until(6)) == 6


def named_readers() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "taskyard-events"]


@pytest.mark.spec("QUE-29")
async def test_the_reader_ends_with_its_last_subscriber(url):
    """Without subscribers nothing reads events, and the yard closes with no task left."""
    async with build(url) as yard:
        async with listening(yard, 2), asyncio.timeout(PATIENCE_S):
            await yard.submit("echo")
            while not (readers := named_readers()):  # noqa: ASYNC110 -- nothing tells that the reader has started
                await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait(readers)
        assert len(readers) == 1


@pytest.mark.spec("QUE-29")
async def test_closing_ends_all_streams_after_what_has_happened(url):
    """When the yard closes, every subscriber gets what has happened until then, and its stream ends."""
    async with build(url) as yard:
        listeners = [Listener(yard, after=0) for _ in range(5)]
        handle = await yard.submit("echo")
        await handle.result(timeout_s=PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait([one.task for one in listeners])
    assert [one.error for one in listeners] == [None] * 5
    assert all([event.kind for event in one.events] == ["submitted", "running", "completed"] for one in listeners)
    assert EventKind.COMPLETED in {event.kind for event in listeners[0].events}


@pytest.mark.spec("QUE-29")
async def test_a_number_from_the_future_is_refused_while_others_listen(url):
    """A subscriber with a number that the store has not come to gets `EventsMissed`, also if a reader runs already: it
    would drop all events up to that number without a word."""
    async with build(url) as yard, listening(yard, 1, after=0) as (first,):
        await (await yard.submit("echo")).result(timeout_s=PATIENCE_S)
        last = (await first.until(3))[-1].seq
        async with listening(yard, 1, after=last + 1_000_000) as (future,):
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait([future.task])
            assert isinstance(future.error, EventsMissed)
        await (await yard.submit("echo")).result(timeout_s=PATIENCE_S)
        assert len(await first.until(6)) == 6


@pytest.mark.spec("QUE-29")
async def test_a_subscription_that_begins_while_the_yard_closes_ends(monkeypatch):
    """The yard closes its reader while somebody subscribes: that stream ends as well, and no reader is left."""
    is_closing, may_close = asyncio.Event(), asyncio.Event()

    class SlowToClose(event_tail.EventTail):
        async def close(self) -> None:
            await super().close()
            is_closing.set()
            await may_close.wait()

    monkeypatch.setattr(steering, "EventTail", SlowToClose)
    yard = build(MemoryStore(SystemClock()))
    await yard.start()
    first = Listener(yard, after=0)
    await (await yard.submit("echo")).result(timeout_s=PATIENCE_S)
    await first.until(3)
    async with asyncio.timeout(PATIENCE_S):
        stopping = asyncio.create_task(yard.stop())
        await is_closing.wait()
        late = Listener(yard, after=0)
        await asyncio.wait([late.task])
        may_close.set()
        await asyncio.wait([stopping, first.task, late.task])
    assert (stopping.exception(), first.error, late.error) == (None, None, None)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "taskyard-events"]
