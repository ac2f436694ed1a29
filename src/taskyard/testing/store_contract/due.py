"""Tasks that wait for a time."""

from __future__ import annotations

import pytest

from taskyard.model.command import Cancel
from taskyard.model.move import Move
from taskyard.model.order import Priority
from taskyard.model.state import TaskState
from taskyard.ports.store import PROMOTE_AT_MOST, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_add, an_error, room, seconds
from taskyard.testing.store_contract.desk import A, Desk, add, claim, get, settle, start, state_of, uuids


class DueContract(Desk):
    @pytest.mark.spec("SCH-06")
    async def test_a_task_due_now_or_earlier_is_queued_at_once(self, store: Store, clock: ManualClock) -> None:
        """What is due now, or was due long ago, can be claimed in the very turn that adds it."""
        past, present = a_record(due_at=clock.now() - seconds(86_400)), a_record(due_at=clock.now())
        turned = await store.turn(A, adds=[an_add(past, present)], demand=room(2))
        assert uuids(turned.claims) == uuids([past, present])

    @pytest.mark.spec("SCH-06")
    async def test_what_is_not_due_is_not_claimed(self, store: Store, clock: ManualClock) -> None:
        """A task is scheduled until the microsecond it is due, and startable from then on."""
        await add(store, task := a_record(due_at=clock.now() + seconds(1)))
        assert await state_of(store, task) is TaskState.SCHEDULED
        clock.advance(0.999999)
        assert await claim(store) == []
        clock.advance(0.000001)
        assert uuids(await claim(store)) == [task.uuid]

    async def test_a_turn_says_when_the_next_task_is_due(self, store: Store, clock: ManualClock) -> None:
        """`next_due` is exactly the earliest time among all tasks that wait for one, or None."""
        assert (await store.turn(A)).next_due is None
        soon, later = clock.now() + seconds(1.234567), clock.now() + seconds(60)
        assert (await store.turn(A, adds=[an_add(a_record(due_at=later))])).next_due == later
        turned = await store.turn(A, adds=[an_add(early := a_record(due_at=soon))])
        assert turned.next_due == soon
        await store.apply([early.uuid], Cancel())
        assert (await store.turn(A)).next_due == later
        assert (await store.turn(A, adds=[an_add(a_record())], demand=room(1))).next_due == later
        clock.advance(60)
        assert (await store.turn(A)).next_due is None

    async def test_a_retry_counts_for_the_next_due_time(self, store: Store, clock: ManualClock) -> None:
        """A task in backoff is waited for like a scheduled one."""
        await add(store, a_record(due_at=clock.now() + seconds(60)))
        (held,) = await start(store, a_record())
        due = clock.now() + seconds(4)
        turned = await settle(store, held, Move.retrying(at=clock.now(), due_at=due, error=an_error()))
        assert turned.next_due == due

    @pytest.mark.spec("SCH-05")
    async def test_due_tasks_go_by_time_then_by_age(self, store: Store, clock: ManualClock) -> None:
        """Tasks that have become due start in the order of their times; equal times in the order they were added."""
        at = [clock.now() + seconds(s) for s in (3, 1, 2, 1, 3, 2)]
        tasks = [a_record(due_at=due, consumer=source) for due, source in zip(at, "ababab", strict=True)]
        await add(store, *tasks)
        clock.advance(10)
        claims = await claim(store, 6)
        assert uuids(claims) == [tasks[i].uuid for i in (1, 3, 2, 5, 0, 4)]

    async def test_what_becomes_due_stands_behind_what_waits(self, store: Store, clock: ManualClock) -> None:
        """A scheduled task takes its place when it becomes due, not when it was added."""
        scheduled, queued = a_record(due_at=clock.now() + seconds(1)), a_record()
        await add(store, scheduled)
        await add(store, queued)
        clock.advance(1)
        assert uuids(await claim(store, 2)) == uuids([queued, scheduled])

    @pytest.mark.spec("QUE-05")
    async def test_a_due_task_keeps_its_priority(self, store: Store, clock: ManualClock) -> None:
        """Of the tasks that have become due, those of higher priority start first."""
        low = a_record(due_at=clock.now() + seconds(1), priority=Priority.LOW)
        high = a_record(due_at=clock.now() + seconds(2), priority=Priority.HIGH)
        await add(store, low, high)
        clock.advance(2)
        assert uuids(await claim(store, 2)) == uuids([high, low])

    async def test_a_turn_promotes_a_bounded_number(self, store: Store, clock: ManualClock) -> None:
        """A burst is promoted a thousand a turn, those due first first, and `next_due` says that there are more."""
        late = [a_record(due_at=clock.now() + seconds(2)) for _ in range(300)]
        early = [a_record(due_at=clock.now() + seconds(1)) for _ in range(PROMOTE_AT_MOST - 100)]
        await add(store, *late, *early)
        clock.advance(10)
        turned = await store.turn(A)
        assert (await store.count())["default", TaskState.QUEUED] == PROMOTE_AT_MOST
        assert (await store.count())["default", TaskState.SCHEDULED] == 200
        assert turned.next_due == late[0].due_at
        turned = await store.turn(A, demand=room(2000))
        assert turned.next_due is None
        assert uuids(turned.claims) == uuids([*early, *late])

    async def test_promotion_is_told_and_timed(self, store: Store, clock: ManualClock) -> None:
        """A promoted task says when it was last changed."""
        await add(store, task := a_record(due_at=clock.now() + seconds(5)))
        clock.advance(7)
        await store.turn(A)
        kept = await get(store, task)
        assert (kept.state, kept.updated_at, kept.due_at) == (TaskState.QUEUED, clock.now(), task.due_at)

    async def test_a_clock_set_back_unqueues_nothing(self, store: Store, clock: ManualClock) -> None:
        """When the wall clock is set back an hour, what was queued stays queued and what is not due is not started."""
        soon, later = a_record(due_at=clock.now() + seconds(1)), a_record(due_at=clock.now() + seconds(2))
        await add(store, soon, later)
        clock.advance(1)
        await store.turn(A)
        clock.step(-3600)
        assert uuids(await claim(store, 5)) == [soon.uuid]
        clock.step(3602)
        assert uuids(await claim(store, 5)) == [later.uuid]
