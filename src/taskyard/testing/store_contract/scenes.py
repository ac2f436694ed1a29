"""What stands around tasks that wait, and so why they do."""

from __future__ import annotations

import msgspec

from taskyard.model.command import Hold
from taskyard.model.move import Move
from taskyard.model.queue import Pause, QueueOrder, QueueSettings, SetConcurrency
from taskyard.model.task import TaskRecord
from taskyard.model.why import Reason, Why, explain_wait
from taskyard.ports.store import Add, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_node, a_record, an_error, room, seconds
from taskyard.testing.store_contract.desk import NODE_A, A, B, Desk, add, claim, get, settle, start, tick

ONE_EACH = msgspec.structs.replace(a_node("c"), limits={"fetch": 1, "shrink": 1}, max_running=2)
C = ONE_EACH.incarnation


async def why(store: Store, task: TaskRecord) -> Why:
    record = await get(store, task)
    found = explain_wait(record, await store.scene([record]))
    assert found is not None
    return found


async def blocked_by(store: Store, task: TaskRecord) -> tuple[Reason, str | None]:
    found = await why(store, task)
    return found.reason, found.blocker


class SceneContract(Desk):
    async def test_what_is_free_waits_for_its_turn(self, store: Store) -> None:
        """A task that nothing holds is told so; one that runs or has ended has no reason."""
        await add(store, task := a_record())
        assert await blocked_by(store, task) == (Reason.TURN, None)
        (claimed,) = await claim(store)
        assert explain_wait(await get(store, task), await store.scene([await get(store, task)])) is None
        await settle(store, claimed, Move.completed(at=task.due_at))
        assert explain_wait(await get(store, task), await store.scene([await get(store, task)])) is None

    async def test_what_was_said_of_the_queue_is_seen(self, store: Store, clock: ManualClock) -> None:
        """A paused queue, with who, when and why."""
        await add(store, task := a_record())
        await store.control("default", Pause("backup"), by="ann")
        found = await why(store, task)
        assert (found.reason, found.since) == (Reason.QUEUE_PAUSED, clock.now())
        assert "by ann: backup" in found.text

    async def test_what_runs_in_the_queue_is_seen(self, store: Store, clock: ManualClock) -> None:
        """A queue at its concurrency, on whatever nodes, and who of it has run longest; a person's word counts."""
        await store.set_queue(QueueSettings(name="default", concurrency=2))
        (first,) = await start(store, a_record())
        since = clock.now()
        tick(clock, 5)
        await start(store, a_record(), node=B)
        await add(store, early := a_record(at=since), task := a_record(at=clock.now()))
        assert await blocked_by(store, task) == (Reason.QUEUE_FULL, first.uuid)
        assert [(await why(store, one)).since for one in (early, task)] == [since, clock.now()]
        await store.control("default", SetConcurrency(3), by="ann")
        assert await blocked_by(store, task) == (Reason.TURN, None)

    async def test_who_holds_the_key_is_seen(self, store: Store, clock: ManualClock) -> None:
        """Who runs with the key; who will be tried again with it; who goes first with it."""
        (held,) = await start(store, a_record(key="k"))
        await add(store, first := a_record(key="k"), second := a_record(key="k"), a_record(queue="cpu", key="k"))
        assert await blocked_by(store, second) == (Reason.KEY_BUSY, held.uuid)
        assert (await why(store, second)).since == clock.now()
        await settle(store, held, Move.retrying(at=clock.now(), due_at=clock.now() + seconds(9), error=an_error()))
        assert await blocked_by(store, second) == (Reason.KEY_BUSY, held.uuid)
        assert "which will be tried again" in (await why(store, second)).text
        tick(clock, 9)
        (again,) = await claim(store, room(1, fetch=1))
        await settle(store, again, Move.completed(at=clock.now()))
        assert await blocked_by(store, second) == (Reason.KEY_BUSY, first.uuid)
        assert (await why(store, second)).text == f"task {first.uuid} with key 'k' goes first"
        assert await blocked_by(store, first) == (Reason.TURN, None)

    async def test_who_stands_first_is_seen(self, store: Store, clock: ManualClock) -> None:
        """The head of a queue, or of a bucket, that keeps to the order of arrival, and since when; also one that is
        held, and never one that waits for others."""
        await store.set_queue(QueueSettings(name="default", order=QueueOrder.FIFO))
        await store.set_queue(QueueSettings(name="cpu", order=QueueOrder.BUCKETS))
        head, other, behind, waits = a_record(), a_record(bucket="x"), a_record(bucket="y"), a_record()
        await store.turn(A, adds=[Add([waits, head, other, behind], after={waits.uuid: [behind.uuid]})])
        assert await blocked_by(store, head) == (Reason.TURN, None)
        assert await blocked_by(store, behind) == (Reason.HEAD_OF_LINE, head.uuid)
        assert (await why(store, behind)).since == clock.now()
        tick(clock, 5)
        await store.apply([head.uuid], Hold("wait"))
        assert await blocked_by(store, other) == (Reason.HEAD_OF_LINE, head.uuid)
        assert (await why(store, other)).since == clock.now()
        assert "which is paused" in (await why(store, other)).text
        x, y, y2 = (a_record(queue="cpu", bucket=bucket) for bucket in ("x", "y", "y"))
        await add(store, x, y, y2)
        assert [await blocked_by(store, task) for task in (x, y, y2)] == [
            (Reason.TURN, None),
            (Reason.TURN, None),
            (Reason.HEAD_OF_LINE, y.uuid),
        ]

    async def test_what_the_nodes_run_is_seen(self, store: Store, clock: ManualClock) -> None:
        """Limits that a node has told: of one source, then of all."""
        await add(store, first := a_record(), second := a_record(), other := a_record(consumer="shrink"))
        await store.leave(A)
        await store.leave(B)
        assert await blocked_by(store, first) == (Reason.NO_NODE, None)
        await store.join(ONE_EACH)
        (running,) = await claim(store, room(1, fetch=1), node=C)
        assert await blocked_by(store, second) == (Reason.CONSUMER_FULL, running.uuid)
        assert await blocked_by(store, other) == (Reason.TURN, None)
        tick(clock, 1)
        (_,) = await claim(store, room(1, shrink=1), node=C)
        await add(store, third := a_record(consumer="shrink"))
        assert (await blocked_by(store, third))[0] is Reason.CONSUMER_FULL
        await store.rescue(C)

    async def test_an_executor_that_others_fill_is_seen(self, store: Store) -> None:
        """Where a source runs, and how much that takes, a node has told: what others run there counts."""
        await store.leave(A)
        await store.leave(B)
        shared = msgspec.structs.replace(
            a_node("c"),
            limits={"fetch": 5, "shrink": 5},
            executors={"fetch": "process", "shrink": "process"},
            capacities={"process": 1},
        )
        await store.join(shared)
        (running,) = await start(store, a_record(consumer="shrink"), node=C)
        await add(store, task := a_record())
        assert await blocked_by(store, task) == (Reason.EXECUTOR_FULL, running.uuid)
        await store.describe(msgspec.structs.replace(shared, capacities={"process": 2}))
        assert await blocked_by(store, task) == (Reason.TURN, None)

    async def test_a_node_that_stops_does_not_count(self, store: Store) -> None:
        """From when it says that it stops, nobody waits for it."""
        await store.leave(B)
        await add(store, task := a_record())
        assert await blocked_by(store, task) == (Reason.TURN, None)
        await store.describe(msgspec.structs.replace(NODE_A, is_stopping=True))
        found = await why(store, task)
        assert found.reason is Reason.NO_NODE
        assert f"{NODE_A.label} is stopping" in found.text

    async def test_a_node_that_is_drained_does_not_count(self, store: Store) -> None:
        """Who takes nothing new will not take this either."""
        await store.leave(B)
        await store.drain(A)
        await add(store, task := a_record())
        found = await why(store, task)
        assert found.reason is Reason.NO_NODE
        assert "drained" in found.text

    async def test_a_page_is_one_scene(self, store: Store, clock: ManualClock) -> None:
        """One scene serves any number of tasks, each with a reason of its own."""
        (held,) = await start(store, a_record(key="k"))
        await add(store, late := a_record(due_at=clock.now() + seconds(60)))
        await add(store, keyed := a_record(key="k"), stuck := a_record(consumer="unheard of"))
        page = await store.list_tasks()
        scene = await store.scene(page)
        found = {record.uuid: explained for record in page if (explained := explain_wait(record, scene)) is not None}
        assert {uuid: (one.reason, one.blocker) for uuid, one in found.items()} == {
            late.uuid: (Reason.SCHEDULED, None),
            keyed.uuid: (Reason.KEY_BUSY, held.uuid),
            stuck.uuid: (Reason.NO_NODE, None),
        }


class TiedSceneContract(Desk):
    """The same for tasks that wait for others."""

    async def test_who_is_waited_for_is_seen(self, store: Store, clock: ManualClock) -> None:
        """The first of those that have not ended, and how it is doing."""
        one, two, child = a_record(), a_record(), a_record()
        await store.turn(A, adds=[Add((one, two, child), after={child.uuid: [one.uuid, two.uuid]})])
        assert await blocked_by(store, child) == (Reason.DEPENDENCY, one.uuid)
        (running,) = await claim(store)
        assert "which is running, and 1 more" in (await why(store, child)).text
        await settle(store, running, Move.completed(at=clock.now()))
        assert await blocked_by(store, child) == (Reason.DEPENDENCY, two.uuid)
