"""What happened, in order."""

from __future__ import annotations

import asyncio

import pytest

from taskyard.model.command import Cancel, Retry, SetPriority
from taskyard.model.event import Event, EventKind
from taskyard.model.execution import Progress
from taskyard.model.move import Move
from taskyard.model.order import Priority
from taskyard.model.task import Dedupe
from taskyard.ports.store import Report, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_error, room, seconds
from taskyard.testing.store_contract.desk import A, B, Desk, add, claim, settle, start, tick


async def told(store: Store, after: int = 0) -> list[Event]:
    """Everything that happened after this number."""
    events: list[Event] = []
    while (page := await store.events(after=after)).events:
        assert not page.missed
        events += page.events
        after = page.last
    return events


class EventContract(Desk):
    @pytest.mark.spec("QUE-29")
    async def test_a_life_is_told_in_order(self, store: Store, clock: ManualClock) -> None:
        """Submitted, due, started, in backoff, due, started, completed: each is told once, with time and task."""
        await add(store, task := a_record(queue="cpu", consumer="shrink", due_at=clock.now() + seconds(1)))
        clock.advance(1)
        (held,) = await claim(store)
        await store.turn(A, reports=[Report(held, Progress(0.5))])
        await settle(store, held, Move.retrying(at=clock.now(), due_at=clock.now() + seconds(1), error=an_error()))
        clock.advance(1)
        (held,) = await claim(store)
        await settle(store, held, Move.completed(at=tick(clock, 1)))
        events = await told(store)
        assert [event.kind for event in events] == [
            EventKind.SUBMITTED,
            EventKind.QUEUED,
            EventKind.STARTED,
            EventKind.PROGRESS,
            EventKind.RETRYING,
            EventKind.QUEUED,
            EventKind.STARTED,
            EventKind.COMPLETED,
        ]
        assert {(event.uuid, event.consumer, event.queue) for event in events} == {(task.uuid, "shrink", "cpu")}
        assert [(event.at - task.created_at).total_seconds() for event in events] == [0, 1, 1, 1, 1, 2, 2, 3]

    @pytest.mark.spec("QUE-29")
    async def test_commands_and_ends_are_told(self, store: Store, clock: ManualClock) -> None:
        """A changed priority, an asked cancel, a cancel, a failure and a retry are told."""
        await add(store, a_record())
        await add(store, second := a_record())
        after = (await store.events(after=-1)).last
        await store.apply([second.uuid], SetPriority(Priority.HIGH))
        (held,) = await claim(store)
        await store.apply([held.uuid], Cancel())
        await settle(store, held, Move.canceled(at=clock.now()))
        (held,) = await claim(store)
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        await store.apply([held.uuid], Retry())
        await store.apply([held.uuid], Cancel())
        assert [event.kind for event in await told(store, after)] == [
            EventKind.PRIORITY_CHANGED,
            EventKind.STARTED,
            EventKind.CANCEL_REQUESTED,
            EventKind.CANCELED,
            EventKind.STARTED,
            EventKind.FAILED,
            EventKind.QUEUED,
            EventKind.CANCELED,
        ]

    @pytest.mark.spec("QUE-29", "QUE-23")
    async def test_a_rescue_is_told(self, store: Store) -> None:
        """A task taken back from a dead node was interrupted, then queued."""
        await start(store, a_record())
        after = (await store.events(after=-1)).last
        await store.rescue(A)
        assert [event.kind for event in await told(store, after)] == [EventKind.INTERRUPTED, EventKind.QUEUED]

    async def test_what_did_not_happen_is_not_told(self, store: Store, clock: ManualClock) -> None:
        """Refused and merged adds, refused commands, lost claims, stale reports and empty turns leave no event."""
        await add(store, a_record(dedupe_slot="s"), dedupe=Dedupe.MERGE)
        (held,) = await claim(store)
        await store.rescue(A)
        after = (await store.events(after=-1)).last
        await store.turn(A, settles=[(held, Move.completed(at=clock.now()))], reports=[Report(held, Progress(0.1))])
        await add(store, a_record(dedupe_slot="s"), dedupe=Dedupe.MERGE)
        await store.turn(A)
        await store.apply([held.uuid], Retry())
        assert (await store.events(after=-1)).last == after
        assert await told(store, after) == []

    async def test_each_number_is_told_once_and_in_order(self, store: Store, clock: ManualClock) -> None:
        """However events are paged and however many write at once, each number comes once and in order."""
        done = Move.completed(at=clock.now())

        async def work(node: str) -> None:
            for _ in range(5):
                await add(store, a_record(), a_record())
                for held in await claim(store, 2, node=node):
                    await store.turn(node, settles=[(held, done)])

        await asyncio.gather(*(work(node) for node in [A, B] * 3))
        seen: list[int] = []
        page = await store.events(after=0, limit=7)
        while page.events:
            assert len(page.events) <= 7
            assert page.last == page.events[-1].seq
            seen += [event.seq for event in page.events]
            page = await store.events(after=page.last, limit=7)
        assert seen == sorted(set(seen))
        assert len(seen) == 6 * 5 * 2 * 3
        assert page.last == seen[-1]

    async def test_each_task_is_told_in_the_order_of_its_states(self, store: Store, clock: ManualClock) -> None:
        """For every task the events follow each other as its states did, whoever wrote them."""
        await add(store, *(a_record() for _ in range(30)))

        async def work(node: str) -> None:
            while held := await claim(store, 3, node=node):
                await store.turn(node, settles=[(one, Move.completed(at=clock.now())) for one in held])

        await asyncio.gather(work(A), work(B), work(A))
        by_task: dict[str, list[EventKind]] = {}
        for event in await told(store):
            by_task.setdefault(event.uuid, []).append(event.kind)
        assert len(by_task) == 30
        assert all(kinds == [EventKind.SUBMITTED, EventKind.STARTED, EventKind.COMPLETED] for kinds in by_task.values())

    async def test_a_reader_can_ask_where_the_ring_stands(self, store: Store) -> None:
        """`after=-1` answers with no events and the number to go on from."""
        start = await store.events(after=-1)
        assert (start.events, start.missed) == ([], False)
        await add(store, *(a_record() for _ in range(3)))
        page = await store.events(after=-1)
        assert (page.events, page.missed) == ([], False)
        assert page.last == (await told(store, start.last))[2].seq > start.last
        await add(store, newest := a_record())
        assert [event.uuid for event in (await store.events(after=page.last)).events] == [newest.uuid]
        last = (await store.events(after=-1)).last
        page = await store.events(after=last)
        assert (page.events, page.last, page.missed) == ([], last, False)

    async def test_a_reader_with_a_number_the_store_has_not_come_to_is_told(self, store: Store) -> None:
        """The store was begun anew, or restored: what has happened since is not passed over in silence. To go on after
        the very last event is no such case, also where nothing has happened yet."""
        page = await store.events(after=(await store.events(after=-1)).last)
        assert (page.events, page.missed) == ([], False)
        await add(store, *(a_record() for _ in range(3)))
        last = (await told(store))[-1].seq
        for after in (last + 1, last + 10**6):
            page = await store.events(after=after)
            assert (page.events, page.last, page.missed) == ([], last, True)
        page = await store.events(after=last)
        assert (page.events, page.last, page.missed) == ([], last, False)

    async def test_a_reader_that_comes_too_late_is_told(self, store: Store) -> None:
        """When the ring has dropped what a reader has not seen, it is told so, and goes on with what is left."""
        seen: list[int] = []
        while len(seen) < 2 * self.ring + 2048:
            await store.turn(A, adds=[], demand=room(1))
            await add(store, *(a_record() for _ in range(2000)))
            seen += [event.seq for event in await told(store, seen[-1] if seen else 0)]
        page = await store.events(after=0)
        assert page.missed
        first = seen.index(page.events[0].seq)
        assert 2 <= first <= len(seen) - self.ring
        assert [event.seq for event in page.events] == seen[first : first + len(page.events)]
        assert page.last == page.events[-1].seq
        assert [event.seq for event in await told(store, page.last)] == seen[first + len(page.events) :]
        assert not (await store.events(after=seen[first - 1])).missed
        assert (await store.events(after=seen[first - 2])).missed
