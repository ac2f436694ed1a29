"""What a person asks of tasks."""

from __future__ import annotations

import asyncio
from itertools import cycle

import pytest

from taskyard.errors import CommandRefused, UnknownTask
from taskyard.model.command import Cancel, Retry, SetPriority
from taskyard.model.event import EventKind
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.notes import CancelRequest, Note
from taskyard.model.order import Priority
from taskyard.model.state import TaskState
from taskyard.model.task import Claim
from taskyard.ports.store import Signals, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_error, seconds
from taskyard.testing.store_contract.desk import A, B, Desk, add, claim, get, settle, start, state_of, tick, uuids


class CommandContract(Desk):
    @pytest.mark.spec("QUE-11")
    async def test_canceling_a_queued_task_ends_it(self, store: Store, clock: ManualClock) -> None:
        """A queued task that is canceled leaves the queue with the reason it was given; the answer is its record."""
        await add(store, task := a_record())
        clock.advance(1)
        (applied,) = await store.apply([task.uuid], Cancel("not needed"), by="ann")
        kept = await get(store, task)
        assert (applied.uuid, applied.record, applied.refused) == (task.uuid, kept, None)
        assert (kept.state, kept.finished_at) == (TaskState.CANCELED, clock.now())
        assert (kept.error, kept.cancel) == (None, CancelRequest(clock.now(), "ann", "not needed"))
        (outcome,) = await store.outcomes([task.uuid])
        assert outcome is not None
        assert (outcome.cancel, outcome.cancel_text) == (kept.cancel, "not needed")
        assert await claim(store) == []

    @pytest.mark.spec("QUE-05")
    async def test_a_command_for_many_beside_a_busy_queue(self, store: Store, clock: ManualClock) -> None:
        """While tasks start and come back all the time, each of many is changed or answers why not, and only once."""
        tasks = [a_record(consumer=("fetch", "shrink")[n % 2]) for n in range(500)]
        await add(store, *tasks)
        started: set[str] = set()
        is_over = asyncio.Event()

        async def work() -> None:
            """The first of either source starts, and comes back when that of the other does."""
            claims: list[Claim] = []
            for source in cycle(["fetch", "shrink"]):
                back = [(one, Move.given_back(at=clock.now(), note=Note.remark("later"))) for one in claims]
                claims = (await store.turn(A, settles=back, demand=Demand(1, {source: 1}))).claims
                started.update(uuids(claims))
                await asyncio.sleep(0)  # a store in memory never lets others go on
                if is_over.is_set():
                    return

        working = asyncio.gather(*(work() for _ in range(4)))
        applied = await store.apply(uuids(tasks), SetPriority(Priority.LOW))
        is_over.set()
        await working
        assert uuids(applied) == uuids(tasks)
        for one, task in zip(applied, tasks, strict=True):
            assert (one.record is None) == isinstance(one.refused, CommandRefused)
            assert one.record is not None or task.uuid in started
            assert (await get(store, task)).priority == (Priority.NORMAL if one.record is None else Priority.LOW)
        page = await store.events(after=0, limit=100_000)
        told = [event.uuid for event in page.events if event.kind is EventKind.PRIORITY_CHANGED]
        assert sorted(told) == sorted(one.uuid for one in applied if one.record is not None)

    @pytest.mark.spec("QUE-11")
    async def test_what_waits_for_a_time_can_be_canceled(self, store: Store, clock: ManualClock) -> None:
        """A scheduled task and one in backoff are canceled at once and never start."""
        (held,) = await start(store, a_record())
        await settle(store, held, Move.retrying(at=clock.now(), due_at=clock.now() + seconds(1), error=an_error()))
        await add(store, scheduled := a_record(due_at=clock.now() + seconds(1)))
        await store.apply([held.uuid, scheduled.uuid], Cancel())
        clock.advance(2)
        turned = await store.turn(A)
        assert turned.next_due is None
        assert [await state_of(store, one) for one in (held, scheduled)] == [TaskState.CANCELED] * 2
        assert await claim(store, 9) == []

    @pytest.mark.spec("QUE-12")
    async def test_canceling_a_running_task_asks_its_node(self, store: Store, clock: ManualClock) -> None:
        """A running task goes on running, its node is told, and the first request is kept."""
        mine, other = await start(store, a_record(), a_record())
        (theirs,) = await start(store, a_record(), node=B)
        assert await store.signals(A) == await store.signals(B) == Signals([])
        first = tick(clock, 1)
        (applied,) = await store.apply([mine.uuid], Cancel("enough"), by="ann")
        clock.advance(1)
        await store.apply([mine.uuid, theirs.uuid], Cancel("late"), by="bob")
        assert await store.signals(A) == Signals([mine.uuid])
        assert await store.signals(B) == Signals([theirs.uuid])
        assert await store.signals("nobody") == Signals([])
        assert applied.record is not None
        asked = CancelRequest(first, "ann", "enough")
        assert (applied.record.state, applied.record.cancel) == (TaskState.RUNNING, asked)
        assert (await get(store, mine)).cancel == asked
        assert (await get(store, theirs)).cancel == CancelRequest(clock.now(), "bob", "late")
        assert (await get(store, other)).cancel is None

    @pytest.mark.spec("QUE-12")
    async def test_a_signal_ends_with_the_run(self, store: Store, clock: ManualClock) -> None:
        """Once the run has settled, nobody is asked any more."""
        (held,) = await start(store, a_record())
        await store.apply([held.uuid], Cancel())
        await settle(store, held, Move.canceled(at=clock.now()))
        assert await store.signals(A) == Signals([])
        kept = await get(store, held)
        assert (kept.state, kept.cancel) == (TaskState.CANCELED, CancelRequest(clock.now()))

    async def test_signals_are_only_for_what_runs_now(self, store: Store, clock: ManualClock) -> None:
        """A cancel that was asked of one run is not told to the node of a later run of another task or attempt."""
        (held,) = await start(store, a_record())
        await store.apply([held.uuid], Cancel())
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        await store.apply([held.uuid], Retry())
        (again,) = await claim(store, node=B)
        assert again.uuid == held.uuid
        assert await store.signals(A) == await store.signals(B) == Signals([])

    async def test_commands_are_answered_in_their_order(self, store: Store, clock: ManualClock) -> None:
        """Each task is answered in its place: with its record, as unknown, or refused with the state that was found."""
        (done,) = await start(store, a_record())
        await settle(store, done, Move.completed(at=clock.now()))
        await add(store, waiting := a_record())
        before = await get(store, done)
        stranger = a_record()
        applied = await store.apply([done.uuid, waiting.uuid, stranger.uuid, waiting.uuid], Cancel())
        assert uuids(applied) == uuids([done, waiting, stranger, waiting])
        assert isinstance(applied[0].refused, CommandRefused)
        assert applied[0].refused.state == TaskState.COMPLETED
        assert applied[1].record is not None
        assert applied[1].record.state is TaskState.CANCELED
        assert isinstance(applied[2].refused, UnknownTask)
        assert isinstance(applied[3].refused, CommandRefused)
        assert applied[3].refused.state == TaskState.CANCELED
        assert [one.record is None for one in applied] == [True, False, True, True]
        assert await get(store, done) == before

    async def test_a_command_may_name_no_task_or_very_many(self, store: Store) -> None:
        """A command for nothing does nothing, and one for more than a chunk reaches all."""
        assert await store.apply([], Cancel()) == []
        tasks = [a_record() for _ in range(1203)]
        await add(store, *tasks)
        applied = await store.apply(uuids(tasks), Cancel())
        assert uuids(applied) == uuids(tasks)
        assert await store.count() == {("default", TaskState.CANCELED): 1203}

    @pytest.mark.parametrize("to_head", [True, False])
    async def test_a_failed_task_is_sent_again(self, store: Store, clock: ManualClock, to_head: bool) -> None:
        """A retried task goes to the head or to the tail of its priority as asked, with all its retries before it."""
        (held,) = await start(store, a_record())
        await settle(store, held, Move.failed(at=clock.now(), error=an_error(), crashed=True))
        await add(store, other := a_record(), low := a_record(priority=Priority.LOW))
        (applied,) = await store.apply([held.uuid], Retry(to_head=to_head))
        kept = await get(store, held)
        assert applied.record == kept
        assert (kept.state, kept.finished_at, kept.crashes, kept.retries) == (TaskState.QUEUED, None, 0, 0)
        claims = await claim(store, 9)
        assert uuids(claims) == uuids([held, other, low] if to_head else [other, held, low])
        assert {one.uuid: one.attempt for one in claims}[held.uuid] == 2

    async def test_a_task_sent_to_the_tail_forgets_its_old_place(self, store: Store, clock: ManualClock) -> None:
        """Sent to the tail a task goes behind all that wait, whatever places and priorities it had before."""
        before, task, after = a_record(), a_record(), a_record()
        await add(store, before, task)
        await store.apply([task.uuid], SetPriority(Priority.HIGH))
        (held,) = await claim(store)
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        await add(store, after)
        await store.apply([task.uuid], Retry(to_head=False))
        await store.apply([task.uuid], SetPriority(Priority.NORMAL))
        assert uuids(await claim(store, 9)) == uuids([before, after, task])

    async def test_the_last_sent_to_the_head_goes_first(self, store: Store, clock: ManualClock) -> None:
        """Of two tasks sent to the head one after the other, the later one is first."""
        one, two = await start(store, a_record(), a_record())
        for held in (one, two):
            await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        await store.apply([one.uuid], Retry(to_head=True))
        await store.apply([two.uuid], Retry(to_head=True))
        assert uuids(await claim(store, 9)) == uuids([two, one])

    @pytest.mark.spec("QUE-05")
    async def test_a_priority_is_changed_until_the_task_runs(self, store: Store, clock: ManualClock) -> None:
        """A waiting task takes its new priority, a scheduled one too; a running or ended one refuses."""
        await add(store, scheduled := a_record(due_at=clock.now() + seconds(9)))
        (running,) = await start(store, a_record())
        (applied, refused) = await store.apply([scheduled.uuid, running.uuid], SetPriority(Priority.HIGH))
        assert applied.record is not None
        assert applied.record == await get(store, scheduled)
        assert (applied.record.priority, applied.record.state) == (Priority.HIGH, TaskState.SCHEDULED)
        assert isinstance(refused.refused, CommandRefused)
        assert (await get(store, running)).priority == Priority.NORMAL

    @pytest.mark.spec("QUE-12")
    async def test_cancel_and_finish_race_to_one_end(self, store: Store, clock: ManualClock) -> None:
        """When cancels and settles race, each task ends once, as its run ended, and has one run."""
        tasks = [a_record() for _ in range(20)]
        held = await start(store, *tasks)
        done = Move.completed(at=clock.now())
        results = await asyncio.gather(
            *(store.turn(A, settles=[(one, done)]) for one in held),
            *(store.apply([one.uuid], Cancel()) for one in held),
        )
        assert len(results) == 40
        assert await store.count() == {("default", TaskState.COMPLETED): 20}
        assert [len(await store.list_attempts(one.uuid)) for one in held] == [1] * 20
