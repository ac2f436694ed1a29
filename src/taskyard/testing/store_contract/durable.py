"""What is still there when the store is closed and opened again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from taskyard.errors import ClaimLost, DuplicateTask
from taskyard.model.command import Cancel, MoveBefore
from taskyard.model.execution import Progress
from taskyard.model.move import Move
from taskyard.model.notes import Note, NoteCode
from taskyard.model.order import Priority
from taskyard.model.queue import Pause, QueueOrder, QueueSettings, SetConcurrency
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import Dedupe, TaskRecord
from taskyard.ports.store import Report, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import NOON, a_record, an_error, room, seconds
from taskyard.testing.store_contract.desk import (
    NODE_A,
    NODE_B,
    A,
    B,
    Desk,
    add,
    claim,
    everything,
    get,
    nodes_of,
    settle,
    start,
    tick,
    try_add,
    uuids,
)
from taskyard.testing.store_contract.events import told

Reopen = Callable[[], Awaitable[Store]]


class DurableContract(Desk):
    @pytest.fixture
    async def reopen(self, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Reopen]:
        """Open a store on the folder of the test, closing the one it opened before."""
        opened: list[Store] = []

        async def reopen() -> Store:
            if opened:
                await opened[-1].close()
            opened.append(self.make_store(clock, tmp_path))
            await opened[-1].open()
            if len(opened) == 1:  # the nodes do not leave when the store is closed: their process lives on
                await opened[-1].join(NODE_A)
                await opened[-1].join(NODE_B)
            return opened[-1]

        yield reopen
        await opened[-1].close()

    @pytest.mark.spec("QUE-22")
    async def test_everything_is_still_there(self, reopen: Reopen, clock: ManualClock) -> None:
        """Tasks, states, arguments, priorities, places, errors, counts, times, runs and events survive a restart."""
        store = await reopen()
        tasks: list[TaskRecord] = [
            a_record(args='{"n":1}', timeout_s=3.5, retry=RetryPolicy(max_retries=9)),
            a_record(priority=Priority.HIGH, queue="cpu"),
            a_record(priority=Priority.HIGH),
            a_record(key="k"),
            a_record(key="k"),
            a_record(due_at=clock.now() + seconds(60)),
            a_record(dedupe_slot="s", priority=Priority.LOW),
        ]
        await add(store, *tasks, dedupe=Dedupe.MERGE)
        one, two, three = await claim(store, 3)
        clock.advance(1)
        note = Note(NoteCode.MOVED, "ann", "why", NOON, {"n": 1, "s": "t"})
        await store.turn(A, reports=[Report(one, Progress(0.5, "half"), note=note, checkpoint="[1]")])
        await settle(store, two, Move.failed(at=clock.now(), error=an_error(), crashed=True))
        await settle(store, three, Move.retrying(at=clock.now(), due_at=clock.now() + seconds(2), error=an_error()))
        await store.apply([one.uuid], Cancel("stop"))
        await store.drain(A)

        async def all_of(store: Store) -> object:
            runs = [await store.list_attempts(task.uuid) for task in tasks]
            return await everything(store), await store.count(), runs, await told(store), await store.signals(A)

        before = await all_of(store)
        assert await all_of(await reopen()) == before

    @pytest.mark.spec("QUE-22")
    async def test_the_order_is_still_the_same(self, reopen: Reopen) -> None:
        """After a restart tasks start in the order they would have started before it, new ones behind the old."""
        store = await reopen()
        tasks = [
            a_record(priority=priority, consumer=source) for priority, source in zip((1, 0, 2, 1), "abab", strict=True)
        ]
        await add(store, *tasks)
        store = await reopen()
        await add(store, new := a_record())
        assert uuids(await claim(store, 9)) == uuids([tasks[1], tasks[0], tasks[3], new, tasks[2]])

    async def test_limits_and_keys_still_hold(self, reopen: Reopen, clock: ManualClock) -> None:
        """Queue settings, what runs under them, busy keys and taken slots are known after a restart."""
        store = await reopen()
        await store.set_queue(QueueSettings(name="default", concurrency=2, per_key=1))
        await add(
            store, a_record(key="k"), a_record(key="k"), a_record(dedupe_slot="s"), a_record(), dedupe=Dedupe.REFUSE
        )
        held, other = await claim(store, 9)
        store = await reopen()
        assert await claim(store, 9, node=B) == []
        assert isinstance(await try_add(store, a_record(dedupe_slot="s"), dedupe=Dedupe.REFUSE), DuplicateTask)
        await settle(store, other, Move.completed(at=clock.now()))
        (free,) = await claim(store, 9, node=B)
        assert free.record.key is None
        await settle(store, held, Move.completed(at=clock.now()))
        (keyed,) = await claim(store, 9, node=B)
        assert keyed.record.key == "k"

    async def test_claims_are_still_fenced(self, reopen: Reopen, clock: ManualClock) -> None:
        """A claim outlives a restart if nobody took its task, and tokens never start again from a smaller one."""
        store = await reopen()
        kept, lost = await start(store, a_record(), a_record())
        await settle(store, lost, Move.given_back(at=clock.now()))
        store = await reopen()
        (fresh,) = await claim(store, node=B)
        assert fresh.token > max(kept.token, lost.token)
        done = Move.completed(at=clock.now())
        turned = await store.turn(A, settles=[(lost, done), (kept, done)])
        assert turned.settled == [ClaimLost(lost.uuid, lost.token), None]
        assert (await get(store, fresh)).attempt == 1

    async def test_numbers_go_on(self, reopen: Reopen, clock: ManualClock) -> None:
        """After a restart in which everything was pruned, ids, tokens and event numbers still only grow."""
        store = await reopen()
        (first,) = await start(store, a_record())
        await settle(store, first, Move.completed(at=clock.now()))
        await store.prune(finished_before=tick(clock, 1))
        last = (await store.events(after=-1)).last
        store = await reopen()
        (second,) = await start(store, a_record())
        assert second.record.id > first.record.id
        assert second.token > first.token
        assert (await store.events(after=-1)).last > last
        assert len(await told(store, last)) == 2

    async def test_due_times_are_still_known(self, reopen: Reopen, clock: ManualClock) -> None:
        """A task that was scheduled before a restart becomes due after it, and is waited for."""
        store = await reopen()
        await add(store, task := a_record(due_at=clock.now() + seconds(5)))
        store = await reopen()
        assert (await store.turn(A)).next_due == task.due_at
        clock.advance(5)
        assert uuids(await claim(store)) == [task.uuid]

    @pytest.mark.spec("QUE-09", "QUE-22")
    async def test_what_people_said_is_still_known(self, reopen: Reopen) -> None:
        """A queue that was paused, or limited by hand, is so after a restart, by whom, when and why."""
        store = await reopen()
        said = (await store.control("default", Pause("backup"), by="ann")).control
        limited = (await store.control("cpu", SetConcurrency(1), by="bob")).control
        await add(store, *(a_record(queue=queue) for queue in ("default", "cpu", "cpu")))
        store = await reopen()
        assert {status.name: status.control for status in await store.queues()} == {"cpu": limited, "default": said}
        assert [held.record.queue for held in await claim(store, 9)] == ["cpu"]

    @pytest.mark.spec("QUE-08", "QUE-22")
    async def test_whose_turn_it_is_is_still_known(self, reopen: Reopen) -> None:
        """Starts are counted on, places made by hand stay, lines stand and buckets go on where they were."""
        store = await reopen()
        rules = QueueSettings(name="default", starve_after=2, starve_wait_s=None)
        await store.set_queue(rules)
        await store.set_queue(QueueSettings(name="ring", order=QueueOrder.BUCKETS))
        high = [a_record(priority=Priority.HIGH) for _ in range(3)]
        ring = [a_record(queue="ring", bucket=name) for name in "aabb"]
        await add(store, low := a_record(priority=Priority.LOW), *high, *ring)
        await store.apply([high[2].uuid], MoveBefore(high[0].uuid))
        assert uuids(await claim(store, room(3, fetch=3))) == uuids([high[2], high[0], low])
        await store.control("default", Pause(), by="ann")
        assert uuids(await claim(store, 1)) == [ring[0].uuid]
        store = await reopen()
        assert uuids(await claim(store, 9)) == uuids([ring[2], ring[1], ring[3]])

    async def test_closing_finishes_what_was_asked(self, reopen: Reopen) -> None:
        """Whatever was asked before the store is closed is answered, and what it answered is there afterwards."""
        store = await reopen()
        tasks = [a_record() for _ in range(50)]
        asked = [asyncio.ensure_future(add(store, task)) for task in tasks]
        await asyncio.sleep(0)  # all of them are on their way, none is answered
        store = await reopen()
        assert [uuids(await answer) for answer in asked] == [[task.uuid] for task in tasks]
        assert set(await everything(store)) == set(uuids(tasks))

    async def test_a_node_that_has_not_left_keeps_its_tasks(self, reopen: Reopen, clock: ManualClock) -> None:
        """Closing a store under a node that still runs something gives nothing away while its process lives."""
        store = await reopen()
        (held,) = await start(store, a_record())
        store = await reopen()
        assert await store.dead_nodes() == []
        assert A in await nodes_of(store)
        assert await claim(store, node=B) == []
        await settle(store, held, Move.completed(at=clock.now()))
