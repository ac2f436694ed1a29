"""Which task starts next, and how many."""

from __future__ import annotations

import asyncio

import pytest

from taskyard.model.command import SetPriority
from taskyard.model.move import Move
from taskyard.model.notes import Note, NoteCode
from taskyard.model.order import Priority
from taskyard.model.queue import QueueSettings
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState
from taskyard.ports.store import Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import NOON, a_record, an_add, an_error, room, seconds
from taskyard.testing.store_contract.desk import A, B, Desk, add, claim, get, settle, start, state_of, uuids


class ClaimContract(Desk):
    async def test_a_claim_starts_the_next_attempt(self, store: Store, clock: ManualClock) -> None:
        """A claimed task runs on its node, from now, as attempt + 1 under its token, and the claim has its record."""
        await add(store, task := a_record(args='{"n":1}', key="k"))
        clock.advance(3)
        (held,) = await claim(store, node=B)
        assert (held.uuid, held.attempt, held.token) == (task.uuid, 1, held.record.token)
        record = held.record
        assert (record.state, record.node, record.attempt) == (TaskState.RUNNING, B, 1)
        assert record.started_at == record.updated_at == clock.now()
        assert (record.args, record.is_parked) == ('{"n":1}', False)
        assert await get(store, task) == record

    async def test_a_claim_clears_the_note(self, store: Store, clock: ManualClock) -> None:
        """A note says how a task stands: that of an earlier run is gone when the next begins."""
        (held,) = await start(store, task := a_record())
        await settle(store, held, Move.given_back(at=clock.now(), note=Note(NoteCode.NODE_STOPPED)))
        assert (await get(store, task)).note == Note(NoteCode.NODE_STOPPED)
        (again,) = await claim(store)
        assert (again.record.note, (await get(store, task)).note) == (None, None)

    @pytest.mark.spec("QUE-03")
    async def test_an_idle_queue_starts_a_task_in_the_turn_that_adds_it(self, store: Store) -> None:
        """With a standing demand a new task is started in the same transaction that stores it."""
        turned = await store.turn(A, adds=[an_add(task := a_record())], demand=room(1))
        assert uuids(turned.claims) == [task.uuid]

    async def test_what_is_added_and_started_at_once_is_stored_as_any_other(
        self, store: Store, clock: ManualClock
    ) -> None:
        """The claim has the stored record: running, not parked, in its first attempt, with all that was asked."""
        asked = a_record(args='{"n":1}', priority=Priority.LOW, timeout_s=5.0, retry=RetryPolicy(max_retries=7))
        (held,) = (await store.turn(B, adds=[an_add(asked)], demand=room(1))).claims
        assert held.record == await get(store, asked)
        assert (held.record.state, held.record.node, held.record.attempt) == (TaskState.RUNNING, B, 1)
        assert (held.record.is_parked, held.record.started_at) == (False, clock.now())
        assert (held.record.args, held.record.timeout_s, held.record.retry) == (asked.args, 5.0, asked.retry)
        assert await store.count() == {("default", TaskState.RUNNING): 1}

    async def test_what_waits_goes_before_what_is_added(self, store: Store) -> None:
        """A task that is added does not overtake the one that was there, though there is room for only one."""
        await add(store, first := a_record())
        turned = await store.turn(A, adds=[an_add(second := a_record())], demand=room(1))
        assert uuids(turned.claims) == [first.uuid]
        assert uuids(await claim(store)) == [second.uuid]

    async def test_what_is_added_together_starts_by_priority(self, store: Store) -> None:
        """Also when all of it can start at once: the first claim is the first to run, under the smallest token."""
        low, normal, high = (a_record(priority=priority) for priority in reversed(Priority))
        turned = await store.turn(A, adds=[an_add(low, normal), an_add(high)], demand=room(5))
        assert uuids(turned.claims) == [high.uuid, normal.uuid, low.uuid]
        tokens = [held.token for held in turned.claims]
        assert tokens == sorted(tokens)

    @pytest.mark.parametrize("limit", ["queue", "consumer", "total", "key"])
    async def test_what_is_added_together_keeps_every_limit(self, store: Store, limit: str) -> None:
        """Of three tasks in one turn, no more start than the tightest limit allows, and the rest wait their turn."""
        await store.set_queue(QueueSettings(name="default", concurrency=2 if limit == "queue" else None, per_key=2))
        tasks = [a_record(consumer="fetch", key="k" if limit == "key" else None) for _ in range(3)]
        demand = room(2 if limit == "total" else 5, fetch=2 if limit == "consumer" else 5)
        turned = await store.turn(A, adds=[an_add(*tasks)], demand=demand)
        assert uuids(turned.claims) == uuids(tasks[:2])
        assert await state_of(store, tasks[2]) is TaskState.QUEUED
        following = await settle(store, turned.claims[0], Move.completed(at=NOON))
        assert following.claims == []
        assert uuids(await claim(store, 5)) == [tasks[2].uuid]

    @pytest.mark.spec("QUE-03")
    async def test_the_next_task_starts_in_the_turn_that_ends_one(self, store: Store, clock: ManualClock) -> None:
        """When a task of a full queue ends, the next is started in the same transaction."""
        await store.set_queue(QueueSettings(name="default", concurrency=1))
        await add(store, a_record(), following := a_record())
        (held,) = await claim(store, 5)
        turned = await store.turn(A, settles=[(held, Move.completed(at=clock.now()))], demand=room(5))
        assert uuids(turned.claims) == [following.uuid]

    async def test_without_demand_nothing_starts(self, store: Store) -> None:
        """A turn with no demand, no total, or no room for the source claims nothing."""
        await add(store, task := a_record(consumer="fetch"))
        assert (await store.turn(A)).claims == []
        for demand in (room(0, fetch=5), room(5, shrink=5), room(5, fetch=0), room(5, others=5, fetch=0)):
            assert await claim(store, demand) == []
        assert await state_of(store, task) is TaskState.QUEUED

    @pytest.mark.spec("QUE-05")
    async def test_priority_then_place_over_all_lanes(self, store: Store) -> None:
        """Whatever their queues and sources, high goes before normal before low, and first in goes first within one."""
        plan = [
            ("cpu", "fetch", Priority.LOW),
            ("default", "shrink", Priority.NORMAL),
            ("cpu", "shrink", Priority.HIGH),
            ("default", "fetch", Priority.NORMAL),
            ("default", "shrink", Priority.LOW),
            ("default", "fetch", Priority.HIGH),
            ("cpu", "shrink", Priority.NORMAL),
            ("cpu", "fetch", Priority.HIGH),
        ]
        tasks = [a_record(queue=queue, consumer=source, priority=priority) for queue, source, priority in plan]
        for task in tasks:
            await add(store, task)
        expected = [tasks[i].uuid for i in (2, 5, 7, 1, 3, 6, 0, 4)]
        claims = await claim(store, room(3, fetch=9, shrink=9))
        claims += await claim(store, room(9, fetch=9, shrink=9))
        assert uuids(claims) == expected

    @pytest.mark.spec("QUE-05")
    async def test_a_priority_can_be_changed_while_queued(self, store: Store) -> None:
        """A queued task whose priority is changed takes its place among those of its new priority, by age."""
        first, second, third = a_record(), a_record(priority=Priority.HIGH), a_record()
        await add(store, first, second, third)
        await store.apply([third.uuid], SetPriority(Priority.HIGH))
        await store.apply([first.uuid], SetPriority(Priority.LOW))
        assert uuids(await claim(store, 3)) == uuids([second, third, first])

    @pytest.mark.spec("QUE-05")
    async def test_a_priority_can_be_changed_to_and_fro(self, store: Store) -> None:
        """A task that gets its old priority back stands where it stood, and starts once."""
        tasks = [a_record() for _ in range(3)]
        await add(store, *tasks)
        for priority in (Priority.LOW, Priority.HIGH, Priority.NORMAL):
            await store.apply([tasks[1].uuid], SetPriority(priority))
        assert uuids(await claim(store, 9)) == uuids(tasks)

    @pytest.mark.spec("SCH-15")
    async def test_no_more_than_the_total_start(self, store: Store) -> None:
        """A turn claims at most the total of the demand, however much room the sources have."""
        await add(store, *(a_record(consumer=source) for source in "abcabc"))
        assert len(await claim(store, room(4, a=9, b=9, c=9))) == 4

    @pytest.mark.spec("SCH-08")
    async def test_no_more_than_its_room_of_a_source_start(self, store: Store) -> None:
        """Of each source at most its room is claimed, and a source that is full does not hold the others up."""
        tasks = [a_record(consumer=source) for source in ["fetch"] * 5 + ["shrink"] * 5]
        await add(store, *tasks)
        claims = await claim(store, room(9, fetch=1, shrink=3))
        assert uuids(claims) == [tasks[i].uuid for i in (0, 5, 6, 7)]

    @pytest.mark.spec("SCH-08")
    async def test_a_saturated_source_does_not_hide_the_others(self, store: Store) -> None:
        """However many tasks of a full source stand at the head, the next startable one is found."""
        await add(store, *(a_record(consumer="fetch", priority=Priority.HIGH) for _ in range(2500)))
        await add(store, other := a_record(consumer="shrink", priority=Priority.LOW))
        assert uuids(await claim(store, room(5, fetch=0, shrink=1))) == [other.uuid]

    async def test_sources_not_listed_share_their_own_room(self, store: Store) -> None:
        """`others` is the room for all sources that are not listed, together."""
        tasks = [a_record(consumer=source) for source in ("x", "fetch", "y", "fetch", "z")]
        await add(store, *tasks)
        claims = await claim(store, room(9, fetch=1, others=2))
        assert uuids(claims) == [tasks[i].uuid for i in (0, 1, 2)]

    @pytest.mark.spec("QUE-02")
    async def test_a_queue_never_runs_more_than_its_concurrency(self, store: Store, clock: ManualClock) -> None:
        """A queue's concurrency holds over all its sources and all nodes, and a place is free when a task has ended."""
        await store.set_queue(QueueSettings(name="cpu", concurrency=2))
        tasks = [a_record(queue="cpu", consumer=source) for source in ("fetch", "shrink", "fetch", "shrink")]
        await add(store, *tasks)
        (first,) = await claim(store, 1, node=A)
        (second,) = await claim(store, 9, node=B)
        assert await claim(store, 9, node=A) == await claim(store, 9, node=B) == []
        await settle(store, second, Move.failed(at=clock.now(), error=an_error()), node=B)
        (third,) = await claim(store, 9, node=A)
        assert uuids([first, second, third]) == uuids(tasks[:3])

    @pytest.mark.spec("QUE-02")
    async def test_a_full_queue_does_not_hold_up_another(self, store: Store) -> None:
        """While one queue is at its limit, the others start their tasks, whatever their place."""
        await store.set_queue(QueueSettings(name="cpu", concurrency=1))
        tasks = [a_record(queue="cpu", priority=Priority.HIGH), a_record(queue="cpu"), a_record(priority=Priority.LOW)]
        await add(store, *tasks)
        assert uuids(await claim(store, 9)) == [tasks[0].uuid, tasks[2].uuid]

    @pytest.mark.spec("QUE-02", "SCH-08", "SCH-15")
    async def test_the_tightest_limit_wins(self, store: Store) -> None:
        """Of total, source and queue the one with the least room decides, and what one refuses another may not take."""
        await store.set_queue(QueueSettings(name="cpu", concurrency=2))
        tasks = [
            a_record(queue=queue, consumer=source) for queue, source in [("cpu", "a")] * 3 + [("default", "a")] * 3
        ]
        tasks += [a_record(queue="cpu", consumer="b"), a_record(queue="default", consumer="b")]
        await add(store, *tasks)
        claims = await claim(store, room(5, a=3, b=1))
        assert uuids(claims) == [tasks[i].uuid for i in (0, 1, 3, 7)]

    @pytest.mark.spec("QUE-02", "QUE-03")
    @pytest.mark.parametrize("limit", [1, None])
    async def test_the_room_of_one_queue_is_not_that_of_another(self, store: Store, limit: int | None) -> None:
        """A queue whose source has no room on the node lends its own limit to no other: not when both have something
        new, and only one may start."""
        await store.set_queue(QueueSettings(name="downloads", concurrency=3))
        await store.set_queue(QueueSettings(name="printer", concurrency=limit))
        added = [
            a_record(queue="downloads", consumer="fetch"),
            *(a_record(queue="printer", consumer="p") for _ in range(8)),
        ]
        turned = await store.turn(A, adds=[an_add(*added)], demand=room(8, fetch=0, p=8))
        assert uuids(turned.claims) == uuids(added[1 : 1 + (limit or 8)])

    @pytest.mark.spec("QUE-02")
    async def test_two_nodes_at_once_keep_the_limit(self, store: Store) -> None:
        """Turns of two nodes that race never start a task twice, nor more tasks than the queue has room for."""
        await store.set_queue(QueueSettings(name="default", concurrency=5))
        await add(store, *(a_record() for _ in range(20)))
        turns = await asyncio.gather(*(claim(store, 2, node=node) for node in [A, B] * 8))
        started = [one.uuid for claims in turns for one in claims]
        assert len(started) == len(set(started)) == 5

    @pytest.mark.spec("QUE-02")
    async def test_many_nodes_share_the_tasks_without_overlap(self, store: Store) -> None:
        """With no limit in the way, racing turns share the tasks out: each to one node."""
        tasks = [a_record() for _ in range(50)]
        await add(store, *tasks)
        turns = await asyncio.gather(*(claim(store, 3, node=node) for node in [A, B] * 10))
        assert sorted(one.uuid for claims in turns for one in claims) == sorted(uuids(tasks))

    @pytest.mark.spec("QUE-02")
    async def test_a_changed_concurrency_holds_from_the_next_turn(self, store: Store, clock: ManualClock) -> None:
        """Raising a queue's concurrency lets more start; lowering it stops none, and starts none without room."""
        await store.set_queue(QueueSettings(name="default", concurrency=1))
        await add(store, *(a_record() for _ in range(6)))
        held = await claim(store, 9)
        assert len(held) == 1
        await store.set_queue(QueueSettings(name="default", concurrency=3))
        held += await claim(store, 9)
        assert len(held) == 3
        await store.set_queue(QueueSettings(name="default", concurrency=2))
        assert await claim(store, 9) == []
        await settle(store, held[0], Move.completed(at=clock.now()))
        assert await claim(store, 9) == []
        await settle(store, held[1], Move.completed(at=clock.now()))
        assert len(await claim(store, 9)) == 1
        await store.set_queue(QueueSettings(name="default"))
        assert len(await claim(store, 9)) == 2

    @pytest.mark.spec("QUE-26")
    async def test_concurrency_above_one_keeps_the_order(self, store: Store, clock: ManualClock) -> None:
        """With three places, tasks still start by priority and place, as places become free one by one."""
        await store.set_queue(QueueSettings(name="default", concurrency=3))
        tasks = [a_record(priority=priority) for priority in (1, 2, 0, 1, 0, 2, 1)]
        await add(store, *tasks)
        running = await claim(store, 9)
        started = uuids(running)
        while running:
            turned = await store.turn(A, settles=[(running.pop(0), Move.completed(at=clock.now()))], demand=room(9))
            assert len(turned.claims) <= 1
            running += turned.claims
            started += uuids(turned.claims)
        assert started == [tasks[i].uuid for i in (2, 4, 0, 3, 6, 1, 5)]

    @pytest.mark.spec("QUE-13", "SCH-08")
    async def test_a_task_in_backoff_leaves_its_slot_free(self, store: Store, clock: ManualClock) -> None:
        """While a task waits to be tried again, another takes its place in the queue."""
        await store.set_queue(QueueSettings(name="default", concurrency=1))
        await add(store, a_record(), other := a_record())
        (held,) = await claim(store, 9)
        retry = Move.retrying(at=clock.now(), due_at=clock.now() + seconds(1), error=an_error())
        turned = await store.turn(A, settles=[(held, retry)], demand=room(9))
        assert uuids(turned.claims) == [other.uuid]

    async def test_tokens_only_grow(self, store: Store, clock: ManualClock) -> None:
        """Every claim has a larger token than every claim before it, whatever task, node or attempt it is for."""
        tokens = []
        for round_ in range(4):
            await add(store, a_record(), a_record())
            held = await claim(store, 9, node=A if round_ % 2 else B)
            tokens += [one.token for one in held]
            for one in held:
                await settle(store, one, Move.given_back(at=clock.now()))
        assert tokens == sorted(set(tokens))
        assert len(tokens) == 2 + 4 + 6 + 8

    @pytest.mark.spec("QUE-13")
    async def test_a_retried_task_returns_to_its_own_place(self, store: Store, clock: ManualClock) -> None:
        """When its wait is over, a task stands where it stood: before all that came after it."""
        first, second = a_record(), a_record()
        await add(store, first, second)
        (held,) = await claim(store)
        await settle(store, held, Move.retrying(at=clock.now(), due_at=clock.now() + seconds(1), error=an_error()))
        clock.advance(1)
        await add(store, third := a_record())
        claims = await claim(store, 9)
        assert uuids(claims) == uuids([first, second, third])
        assert [one.attempt for one in claims] == [2, 1, 1]
        assert [one.record.retries for one in claims] == [1, 0, 0]

    async def test_given_back_keeps_its_place_and_its_attempt(self, store: Store, clock: ManualClock) -> None:
        """A task given back stands where it stood, and its next run has the same number under a new token."""
        (held,) = await start(store, a_record())
        await add(store, other := a_record())
        await settle(store, held, Move.given_back(at=clock.now(), note=Note(NoteCode.NODE_STOPPED)))
        given = await get(store, held)
        assert (given.state, given.attempt, given.position) == (TaskState.QUEUED, 0, held.record.position)
        again, following = await claim(store, 9)
        assert (again.uuid, again.attempt, following.uuid) == (held.uuid, 1, other.uuid)
        assert again.token > held.token
