"""Nodes that join, leave and die."""

from __future__ import annotations

import msgspec
import pytest

from taskyard.errors import ClaimLost, UnknownNode
from taskyard.model.command import Cancel
from taskyard.model.execution import ErrorCode
from taskyard.model.move import Move
from taskyard.model.notes import CancelRequest, Note, NoteCode
from taskyard.model.order import Priority
from taskyard.model.queue import QueueSettings
from taskyard.model.state import TaskState
from taskyard.ports.store import Signals, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_node, a_record, an_error, seconds
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
    uuids,
)


class NodeContract(Desk):
    async def test_nodes_join_and_leave(self, store: Store) -> None:
        """Exactly those that joined and did not leave are known, as they joined; leaving twice is no error."""
        assert {name: status.node for name, status in (await nodes_of(store)).items()} == {A: NODE_A, B: NODE_B}
        await store.leave(A)
        await store.leave(A)
        assert [status.node for status in await store.nodes()] == [NODE_B]
        await store.join(third := a_node("c"))
        assert set(await nodes_of(store)) == {B, third.incarnation}

    async def test_a_node_is_shown_with_what_it_runs(self, store: Store, clock: ManualClock) -> None:
        """Of each node the tasks it holds are counted: not those that wait, have ended, or run elsewhere."""
        one, _ = await start(store, a_record(), a_record())
        await start(store, a_record(), node=B)
        await add(store, a_record())
        assert {name: status.running for name, status in (await nodes_of(store)).items()} == {A: 2, B: 1}
        await settle(store, one, Move.completed(at=clock.now()))
        assert {name: status.running for name, status in (await nodes_of(store)).items()} == {A: 1, B: 1}

    async def test_a_node_is_asked_to_drain(self, store: Store) -> None:
        """The node that is drained is told and shown as such until that is taken back; no other is, and no task is
        touched."""
        (held,) = await start(store, a_record())
        for _ in range(2):
            await store.drain(A)
            assert await store.signals(A) == Signals([], is_draining=True)
            assert await store.signals(B) == Signals([])
            assert {name: s.is_draining for name, s in (await nodes_of(store)).items()} == {A: True, B: False}
        assert (await get(store, held)).state is TaskState.RUNNING
        for _ in range(2):
            await store.drain(A, on=False)
            assert await store.signals(A) == Signals([])
            assert {name: s.is_draining for name, s in (await nodes_of(store)).items()} == {A: False, B: False}

    async def test_draining_is_told_with_the_cancels(self, store: Store) -> None:
        """A node that is drained hears of cancels as before."""
        (held,) = await start(store, a_record())
        await store.drain(A)
        await store.apply([held.uuid], Cancel())
        assert await store.signals(A) == Signals([held.uuid], is_draining=True)

    async def test_only_a_node_can_be_drained(self, store: Store) -> None:
        """Draining a node that was never here, has left or was rescued is refused, and is not remembered."""
        await store.leave(A)
        await store.rescue(B)
        for gone in (A, B, "nobody"):
            for on in (True, False):
                with pytest.raises(UnknownNode) as refused:
                    await store.drain(gone, on=on)
                assert refused.value.node == gone
        await store.join(NODE_A)
        assert await store.signals(A) == Signals([])

    async def test_a_node_that_joins_is_asked_nothing(self, store: Store) -> None:
        """Who was drained, and joins again after leaving or without, is drained no more."""
        await store.drain(A)
        await store.join(NODE_A)
        assert await store.signals(A) == Signals([])
        await store.drain(A)
        await store.leave(A)
        await store.join(NODE_A)
        assert not (await nodes_of(store))[A].is_draining

    async def test_a_node_describes_itself_anew(self, store: Store) -> None:
        """What a node says of itself may change while it is joined, and what was asked of it, or runs on it, stays."""
        (held,) = await start(store, a_record())
        await store.drain(A)
        changed = msgspec.structs.replace(NODE_A, consumers=("late",), is_stopping=True)
        await store.describe(changed)
        status = (await nodes_of(store))[A]
        assert (status.node, status.is_draining, status.running) == (changed, True, 1)
        assert (await nodes_of(store))[B].node == NODE_B
        assert (await get(store, held)).state is TaskState.RUNNING

    async def test_who_is_no_node_describes_nothing(self, store: Store) -> None:
        """Somebody who never joined, or has left, does not become a node by describing himself."""
        await store.leave(A)
        await store.describe(NODE_A)
        await store.describe(a_node("never"))
        assert set(await nodes_of(store)) == {B}

    async def test_a_living_node_is_not_dead(self, store: Store) -> None:
        """The caller's own nodes are never called dead, whether they hold claims or not."""
        await start(store, a_record())
        assert await store.dead_nodes() == []

    async def test_a_node_that_leaves_touches_no_other(self, store: Store) -> None:
        """What another node runs goes on when one leaves."""
        (held,) = await start(store, a_record(), node=B)
        await store.leave(A)
        turned = await store.turn(B, settles=[(held, Move.completed(at=held.record.updated_at))])
        assert turned.settled == [None]

    @pytest.mark.spec("QUE-23")
    async def test_rescue_takes_everything_back(self, store: Store, clock: ManualClock) -> None:
        """Every task of a dead node is interrupted and queued again, no other is touched, and the node is forgotten."""
        mine = await start(store, a_record(), a_record(queue="cpu", consumer="shrink"))
        (theirs,) = await start(store, a_record(), node=B)
        at = tick(clock, 5)
        assert sorted(await store.rescue(A)) == sorted(uuids(mine))
        for held in mine:
            kept = await get(store, held)
            assert (kept.state, kept.recoveries, kept.attempt) == (TaskState.QUEUED, 1, 1)
            assert (kept.token, kept.node, kept.updated_at) == (None, None, at)
            (run,) = await store.list_attempts(held.uuid)
            assert (run.state, run.node, run.finished_at) == (TaskState.INTERRUPTED, A, at)
        assert (await get(store, theirs)).state is TaskState.RUNNING
        assert set(await nodes_of(store)) == {B}
        assert await store.count() == {
            ("default", TaskState.QUEUED): 1,
            ("default", TaskState.RUNNING): 1,
            ("cpu", TaskState.QUEUED): 1,
        }

    async def test_rescue_twice_takes_nothing_back(self, store: Store) -> None:
        """A second rescue of the same node, or of one nobody knows, finds nothing and changes nothing."""
        await start(store, a_record())
        await store.rescue(A)
        before = await everything(store)
        assert await store.rescue(A) == await store.rescue("nobody") == []
        assert await everything(store) == before

    @pytest.mark.spec("QUE-23")
    async def test_rescued_tasks_go_to_the_head_in_their_order(self, store: Store) -> None:
        """What was running goes before all that waits, in the order it stood before, within its priority."""
        running = [a_record(priority=priority) for priority in (1, 0, 1, 0)]
        await add(store, *running)
        await claim(store, 4)
        await add(store, low := a_record(priority=Priority.LOW), normal := a_record(), high := a_record(priority=0))
        await store.rescue(A)
        expected = [running[1], running[3], high, running[0], running[2], normal, low]
        assert uuids(await claim(store, 9, node=B)) == uuids(expected)

    async def test_a_rescue_voids_the_claims(self, store: Store, clock: ManualClock) -> None:
        """A node that was rescued and is not dead after all cannot write a result any more."""
        (stale,) = await start(store, a_record())
        await store.rescue(A)
        (fresh,) = await claim(store, node=B)
        assert fresh.uuid == stale.uuid
        assert (fresh.attempt, fresh.token > stale.token) == (stale.attempt + 1, True)
        turned = await store.turn(A, settles=[(stale, Move.completed(at=clock.now()))])
        assert turned.settled == [ClaimLost(stale.uuid, stale.token)]
        assert (await get(store, fresh)).state is TaskState.RUNNING

    @pytest.mark.spec("QUE-23")
    @pytest.mark.parametrize("auto_recover", [0, 1, 2])
    async def test_a_task_is_recovered_as_often_as_its_queue_says(self, store: Store, auto_recover: int) -> None:
        """A task is recovered `auto_recover` times, then failed with an error that says what happened."""
        await store.set_queue(QueueSettings(name="default", auto_recover=auto_recover))
        await add(store, task := a_record())
        states = []
        for n in range(auto_recover + 1):
            await store.join(node := a_node(f"mortal-{n}"))
            assert len(await claim(store, node=node.incarnation)) == 1
            assert await store.rescue(node.incarnation) == [task.uuid]
            states.append((await get(store, task)).state)
        assert states == [TaskState.QUEUED] * auto_recover + [TaskState.FAILED]
        kept = await get(store, task)
        assert (kept.recoveries, kept.attempt) == (auto_recover, auto_recover + 1)
        assert kept.error is not None
        node = a_node(f"mortal-{auto_recover}")
        assert (kept.error.code, kept.error.details) == (ErrorCode.NODE_DIED, {"node": node.label})
        assert kept.note == Note(NoteCode.NODE_DIED, facts={"node": node.label})
        assert await claim(store) == []

    @pytest.mark.spec("QUE-23")
    async def test_a_queue_nobody_configured_recovers_once(self, store: Store) -> None:
        """By default a task is taken back from a dead node once, and failed the second time."""
        await add(store, task := a_record(queue="unheard-of"))
        for node, expected in ((A, TaskState.QUEUED), (B, TaskState.FAILED)):
            assert len(await claim(store, node=node)) == 1
            await store.rescue(node)
            assert (await get(store, task)).state is expected

    @pytest.mark.spec("QUE-12", "QUE-23")
    async def test_rescue_cancels_what_was_asked_to_cancel(self, store: Store, clock: ManualClock) -> None:
        """A task that was asked to cancel is not run again because its node died: it is canceled."""
        (held,) = await start(store, a_record())
        await store.apply([held.uuid], Cancel("enough"), by="ann")
        assert await store.rescue(A) == [held.uuid]
        kept = await get(store, held)
        assert (kept.state, kept.cancel) == (TaskState.CANCELED, CancelRequest(clock.now(), "ann", "enough"))
        assert (kept.error, kept.note and kept.note.code) == (None, NoteCode.NODE_DIED)
        assert [run.state for run in await store.list_attempts(held.uuid)] == [TaskState.INTERRUPTED]
        assert await claim(store, node=B) == []

    @pytest.mark.spec("QUE-02", "QUE-23")
    async def test_a_rescue_frees_the_queue(self, store: Store) -> None:
        """The places a dead node's tasks took in their queue are free again."""
        await store.set_queue(QueueSettings(name="default", concurrency=2))
        await add(store, *(a_record() for _ in range(4)))
        before = await claim(store, 9)
        assert await claim(store, 9, node=B) == []
        await store.rescue(A)
        assert uuids(await claim(store, 9, node=B)) == uuids(before)

    async def test_rescue_leaves_what_waits_in_peace(self, store: Store, clock: ManualClock) -> None:
        """A task that the dead node ran earlier, and that waits to be tried again, is not taken back."""
        (held,) = await start(store, a_record())
        due = clock.now() + seconds(9)
        await store.turn(A, settles=[(held, Move.retrying(at=clock.now(), due_at=due, error=an_error()))])
        assert await store.rescue(A) == []
        kept = await get(store, held)
        assert (kept.state, kept.due_at, kept.recoveries) == (TaskState.RETRYING, due, 0)
