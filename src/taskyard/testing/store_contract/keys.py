"""Tasks with a key: at most so many of one key at a time, in order."""

from __future__ import annotations

import pytest

from taskyard.model.command import Cancel, Retry, SetPriority
from taskyard.model.move import Move
from taskyard.model.order import Priority
from taskyard.model.queue import QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import Claim
from taskyard.ports.store import Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_add, an_error, room, seconds
from taskyard.testing.store_contract.desk import A, B, Desk, add, claim, get, settle, uuids


def retrying(clock: ManualClock, after_s: float = 1) -> Move:
    return Move.retrying(at=clock.now(), due_at=clock.now() + seconds(after_s), error=an_error())


class KeyContract(Desk):
    async def complete(self, store: Store, held: Claim, clock: ManualClock) -> list[Claim]:
        """Complete it, and claim whatever may start then, in one turn."""
        turned = await store.turn(A, settles=[(held, Move.completed(at=clock.now()))], demand=room(9))
        assert turned.settled == [None]
        return turned.claims

    async def test_one_key_runs_one_at_a_time_in_order(self, store: Store, clock: ManualClock) -> None:
        """Of the tasks with one key one runs at a time, on whatever node, in their order; others go past them."""
        keyed = [a_record(key="k") for _ in range(3)]
        free, other = a_record(), a_record(key="other")
        await add(store, *keyed, free, other)
        first, *rest = await claim(store, 9)
        assert uuids([first, *rest]) == uuids([keyed[0], free, other])
        assert await claim(store, 9, node=B) == []
        (second,) = await self.complete(store, first, clock)
        assert second.uuid == keyed[1].uuid
        (third,) = await self.complete(store, second, clock)
        assert third.uuid == keyed[2].uuid
        assert await self.complete(store, third, clock) == []

    async def test_one_turn_starts_no_key_twice(self, store: Store) -> None:
        """A turn that adds many tasks of one key and has room for all claims one of them."""
        turned = await store.turn(A, adds=[an_add(*(a_record(key="k") for _ in range(5)))], demand=room(9))
        assert len(turned.claims) == 1

    async def test_a_key_belongs_to_its_queue(self, store: Store) -> None:
        """The same key in two queues are two keys; over the sources of one queue it is one."""
        tasks = [a_record(key="k"), a_record(key="k", queue="cpu"), a_record(key="k", consumer="shrink")]
        await add(store, *tasks)
        assert uuids(await claim(store, 9)) == uuids(tasks[:2])

    @pytest.mark.spec("QUE-26")
    async def test_a_queue_may_run_several_of_a_key(self, store: Store, clock: ManualClock) -> None:
        """With `per_key` above one, so many of a key run at once, still in their order."""
        await store.set_queue(QueueSettings(name="default", per_key=2))
        tasks = [a_record(key="k") for _ in range(4)]
        await add(store, *tasks)
        first, second = await claim(store, 9)
        (third,) = await self.complete(store, second, clock)
        (fourth,) = await self.complete(store, first, clock)
        assert uuids([first, second, third, fourth]) == uuids(tasks)

    async def test_a_task_in_backoff_holds_its_key(self, store: Store, clock: ManualClock) -> None:
        """The order within a key survives a retry: while the first waits to run again, the second does not start."""
        first, second = a_record(key="k"), a_record(key="k")
        await add(store, first, second)
        (held,) = await claim(store, 9)
        turned = await store.turn(A, settles=[(held, retrying(clock))], demand=room(9))
        assert turned.claims == []
        clock.advance(1)
        (again,) = await claim(store, 9)
        assert (again.uuid, again.attempt) == (first.uuid, 2)
        assert uuids(await self.complete(store, again, clock)) == [second.uuid]

    @pytest.mark.parametrize("end", ["failed", "canceled"])
    async def test_a_key_is_free_when_its_task_has_ended(self, store: Store, clock: ManualClock, end: str) -> None:
        """However the task of a key ends, the next of that key may start."""
        await add(store, a_record(key="k"), second := a_record(key="k"))
        (held,) = await claim(store, 9)
        moves = {"failed": Move.failed(at=clock.now(), error=an_error()), "canceled": Move.canceled(at=clock.now())}
        turned = await store.turn(A, settles=[(held, moves[end])], demand=room(9))
        assert uuids(turned.claims) == [second.uuid]

    async def test_given_back_stays_first_of_its_key(self, store: Store, clock: ManualClock) -> None:
        """A task given back goes before the others of its key, as it did."""
        first, second = a_record(key="k"), a_record(key="k")
        await add(store, first, second)
        (held,) = await claim(store, 9)
        turned = await store.turn(A, settles=[(held, Move.given_back(at=clock.now()))], demand=room(9))
        assert uuids(turned.claims) == [first.uuid]

    @pytest.mark.spec("QUE-05")
    async def test_a_newcomer_of_higher_priority_goes_first(self, store: Store, clock: ManualClock) -> None:
        """Within a key as anywhere, priority goes before age."""
        old, new = a_record(key="k"), a_record(key="k", priority=Priority.HIGH)
        await add(store, old)
        await add(store, new)
        (held,) = await claim(store, 9)
        assert held.uuid == new.uuid
        assert uuids(await self.complete(store, held, clock)) == [old.uuid]

    @pytest.mark.spec("QUE-05")
    async def test_a_changed_priority_changes_the_order_of_a_key(self, store: Store, clock: ManualClock) -> None:
        """A waiting task that is raised goes to the front of its key; lowering the front one lets the next pass."""
        tasks = [a_record(key="k") for _ in range(3)]
        await add(store, *tasks)
        await store.apply([tasks[2].uuid], SetPriority(Priority.HIGH))
        (held,) = await claim(store, 9)
        assert held.uuid == tasks[2].uuid
        await store.apply([tasks[0].uuid], SetPriority(Priority.LOW))
        (second,) = await self.complete(store, held, clock)
        assert second.uuid == tasks[1].uuid
        assert uuids(await self.complete(store, second, clock)) == [tasks[0].uuid]

    @pytest.mark.spec("QUE-11")
    async def test_canceling_the_head_of_a_key_lets_the_next_start(self, store: Store) -> None:
        """When the task at the front of a key is canceled while it waits, the next of that key may start."""
        tasks = [a_record(key="k") for _ in range(3)]
        await add(store, *tasks)
        await store.apply([tasks[0].uuid], Cancel())
        assert uuids(await claim(store, 9)) == [tasks[1].uuid]

    async def test_canceling_the_one_in_backoff_lets_the_next_start(self, store: Store, clock: ManualClock) -> None:
        """When the task that holds a key in backoff is canceled, the next of that key may start."""
        await add(store, a_record(key="k"), second := a_record(key="k"))
        (held,) = await claim(store, 9)
        await settle(store, held, retrying(clock, 60))
        await store.apply([held.uuid], Cancel())
        assert uuids(await claim(store, 9)) == [second.uuid]

    async def test_a_retried_task_joins_its_key_again(self, store: Store, clock: ManualClock) -> None:
        """A failed task that is sent again to the head waits for its key, and goes before the others of it."""
        tasks = [a_record(key="k") for _ in range(3)]
        await add(store, *tasks)
        (held,) = await claim(store, 9)
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        (second,) = await claim(store, 9)
        await store.apply([held.uuid], Retry(to_head=True))
        assert await claim(store, 9) == []
        assert uuids(await self.complete(store, second, clock)) == [held.uuid]

    async def test_rescue_frees_keys(self, store: Store) -> None:
        """A rescued task goes to the head of its key, and holds it only once it runs again."""
        first, second = a_record(key="k"), a_record(key="k")
        await add(store, first, second)
        await claim(store, 9, node=A)
        await store.rescue(A)
        assert uuids(await claim(store, 9, node=B)) == [first.uuid]

    async def test_a_scheduled_task_does_not_hold_its_key(self, store: Store, clock: ManualClock) -> None:
        """A task that is not due yet keeps nobody of its key waiting."""
        await add(store, later := a_record(key="k", due_at=clock.now() + seconds(1)), now := a_record(key="k"))
        (held,) = await claim(store, 9)
        assert held.uuid == now.uuid
        clock.advance(1)
        assert await claim(store, 9) == []
        assert uuids(await self.complete(store, held, clock)) == [later.uuid]

    async def test_a_changed_per_key_holds_from_the_next_turn(self, store: Store, clock: ManualClock) -> None:
        """Raising `per_key` lets more of a key start; lowering it stops none, and starts none until there is room."""
        await add(store, *(a_record(key="k") for _ in range(6)))
        held = await claim(store, 9)
        await store.set_queue(QueueSettings(name="default", per_key=3))
        held += await claim(store, 9)
        assert len(held) == 3
        await store.set_queue(QueueSettings(name="default", per_key=2))
        assert await self.complete(store, held[0], clock) == []
        assert len(await self.complete(store, held[1], clock)) == 1

    async def test_a_lowered_per_key_parks_what_was_about_to_start(self, store: Store) -> None:
        """Tasks that might have started under the old limit and did not wait under the new one."""
        await store.set_queue(QueueSettings(name="default", per_key=3))
        tasks = [a_record(key="k") for _ in range(3)]
        await add(store, *tasks)
        await store.set_queue(QueueSettings(name="default", per_key=1))
        assert uuids(await claim(store, 9)) == [tasks[0].uuid]

    async def test_the_queue_and_the_key_are_both_kept(self, store: Store, clock: ManualClock) -> None:
        """A queue's concurrency and its key's limit hold together: keys at their limit give their room to others."""
        await store.set_queue(QueueSettings(name="default", concurrency=2))
        tasks = [a_record(key=key) for key in ("k", "k", "m", None)]
        await add(store, *tasks)
        first, second = await claim(store, 9)
        assert uuids([first, second]) == [tasks[0].uuid, tasks[2].uuid]
        assert uuids(await self.complete(store, first, clock)) == [tasks[1].uuid]

    async def test_parked_says_who_waits_for_a_key(self, store: Store) -> None:
        """A task that waits because its key is busy says so, and the one that may start does not."""
        first, second = a_record(key="k"), a_record(key="k")
        await add(store, first, second)
        assert [(await get(store, one)).is_parked for one in (first, second)] == [False, True]
        (applied,) = await store.apply([second.uuid], SetPriority(Priority.HIGH))
        assert applied.record is not None
        assert not applied.record.is_parked
        assert [(await get(store, one)).is_parked for one in (first, second)] == [True, False]
        await store.apply([second.uuid], Cancel())
        assert not (await get(store, second)).is_parked
        assert (await get(store, second)).state is TaskState.CANCELED

    async def test_one_that_is_canceled_waits_for_nothing(self, store: Store) -> None:
        """A task that is canceled while it waits for its key is answered, and stored, as one that does not."""
        await add(store, a_record(key="k"), second := a_record(key="k"))
        (applied,) = await store.apply([second.uuid], Cancel())
        assert applied.record == await get(store, second)
        assert not (await get(store, second)).is_parked
