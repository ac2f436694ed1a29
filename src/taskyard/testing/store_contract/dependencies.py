"""Tasks that wait for others, and groups."""

from __future__ import annotations

import random
from typing import Any

import pytest

from taskyard.errors import ClaimLost, CommandRefused, DependencyCycle, DependencyLost, InvalidInput, UnknownTask
from taskyard.model.blocker import Blocker
from taskyard.model.command import Cancel, Hold, MoveBefore, Release, Reschedule, Retry, SetPriority, StartNow
from taskyard.model.dependency import DEPENDENCY_FAILED
from taskyard.model.event import EventKind
from taskyard.model.execution import ErrorCode, ErrorKind
from taskyard.model.move import Move
from taskyard.model.notes import Note, NoteCode
from taskyard.model.order import Priority
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task import Claim, Dedupe, OnFailure, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Add, Added, Store, Turned
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_add, an_error, room, seconds
from taskyard.testing.store_contract.desk import (
    A,
    Desk,
    add,
    claim,
    everything,
    get,
    settle,
    start,
    state_of,
    tick,
    uuids,
)

BLOCKED, QUEUED = TaskState.BLOCKED, TaskState.QUEUED
STRICT = pytest.mark.parametrize("order", [QueueOrder.FIFO, QueueOrder.BUCKETS])


def child(on_failure: OnFailure = OnFailure.FAIL, **fields: Any) -> TaskRecord:
    return a_record(consumer="shrink", on_failure=on_failure, **fields)


async def add_after(
    store: Store, *records: TaskRecord, after: list[TaskRecord], parent: Claim | None = None
) -> list[Added] | Exception:
    """Add tasks that all wait for the same others; what the store answers."""
    named = {record.uuid: uuids(after) for record in records}
    (added,) = (await store.turn(A, adds=[Add(records, parent=parent, after=named)])).added
    return added


async def end(store: Store, held: Claim, how: TaskState, clock: ManualClock) -> Turned:
    """The run ends, as completed, failed or canceled."""
    moves = {
        TaskState.COMPLETED: Move.completed(at=clock.now()),
        TaskState.FAILED: Move.failed(at=clock.now(), error=an_error()),
        TaskState.CANCELED: Move.canceled(at=clock.now()),
    }
    return await settle(store, held, moves[how])


class LineContract(Desk):
    """Where queues are strict about places."""

    @pytest.mark.spec("QUE-30")
    @STRICT
    async def test_while_it_waits_for_others_nobody_waits_behind_it(
        self, store: Store, clock: ManualClock, order: QueueOrder
    ) -> None:
        """A blocked task has not come to the line yet: others pass. Freed, it stands at the place it has always had."""
        (parent,) = await start(store, a_record())
        await store.set_queue(QueueSettings(name="cpu", order=order))
        await add_after(store, waits := child(queue="cpu", bucket="b"), after=[parent.record])
        await add(store, *(behind := [child(queue="cpu", bucket="b") for _ in range(3)]))
        assert uuids(await claim(store)) == [behind[0].uuid]
        await end(store, parent, TaskState.COMPLETED, clock)
        assert uuids(await claim(store, 9)) == [waits.uuid, behind[1].uuid, behind[2].uuid]

    @pytest.mark.spec("QUE-30")
    @STRICT
    @pytest.mark.parametrize("how", ["batch", "move", "retry", "due later"])
    async def test_it_may_stand_before_the_one_it_waits_for(
        self, store: Store, clock: ManualClock, order: QueueOrder, how: str
    ) -> None:
        """However a task came to stand before the one it waits for, that one starts, and then the task itself."""
        await store.set_queue(QueueSettings(name="cpu", order=order, concurrency=1))
        first = child(queue="cpu", due_at=clock.now() + seconds(how == "due later"))
        then = child(queue="cpu")
        if how == "batch":
            await store.turn(A, adds=[Add([then, first], after={then.uuid: [first.uuid]})])
        else:
            await add(store, first)
            await add_after(store, then, after=[first])
        if how == "move":
            await store.apply([then.uuid], MoveBefore(first.uuid))
        if how == "retry":
            (held,) = await claim(store)
            await end(store, held, TaskState.FAILED, clock)
            for again in (first, then):
                await store.apply([again.uuid], Retry(to_head=True))
        clock.advance(2)
        assert (await get(store, then)).state is BLOCKED
        (held,) = await claim(store, 9)
        assert held.uuid == first.uuid
        await end(store, held, TaskState.COMPLETED, clock)
        assert uuids(await claim(store, 9)) == [then.uuid]

    @pytest.mark.spec("QUE-30")
    @STRICT
    async def test_held_it_stands_in_line(self, store: Store, clock: ManualClock, order: QueueOrder) -> None:
        """Who holds a task that waits for others holds up all behind it; released before it is freed, it lets them
        pass."""
        (parent,) = await start(store, a_record())
        await store.set_queue(QueueSettings(name="cpu", order=order))
        await add_after(store, waits := child(queue="cpu", bucket="b"), after=[parent.record])
        await add(store, behind := child(queue="cpu", bucket="b"))
        await store.apply([waits.uuid], Hold())
        assert await claim(store, 9) == []
        await store.apply([waits.uuid], Release())
        assert uuids(await claim(store, 9)) == [behind.uuid]


class DependencyContract(Desk):
    @pytest.mark.spec("QUE-27")
    async def test_a_task_starts_when_those_it_waits_for_have_completed(self, store: Store, clock: ManualClock) -> None:
        """It is blocked until the last of them has completed, and may start in that very turn."""
        one, two = await start(store, a_record(), a_record())
        waits = child()
        assert await add_after(store, waits, after=[one.record, two.record]) == [Added(waits.uuid)]
        kept = await get(store, waits)
        assert (kept.state, kept.open_dependencies, kept.on_failure) == (BLOCKED, 2, OnFailure.FAIL)
        assert await claim(store, 9) == []
        await end(store, one, TaskState.COMPLETED, clock)
        assert (await get(store, waits)).open_dependencies == 1
        done = Move.completed(at=clock.now())
        turned = await store.turn(A, settles=[(two, done)], demand=room(9))
        assert uuids(turned.claims) == [waits.uuid]
        assert (turned.claims[0].record.open_dependencies, turned.claims[0].record.on_failure) == (0, OnFailure.FAIL)

    async def test_two_ends_in_one_turn_are_both_counted(self, store: Store, clock: ManualClock) -> None:
        """When all that a task waits for ends in one turn, it may start."""
        claims = await start(store, *(a_record() for _ in range(5)))
        await add_after(store, waits := child(), after=[one.record for one in claims])
        done = Move.completed(at=clock.now())
        await store.turn(A, settles=[(one, done) for one in claims])
        assert await state_of(store, waits) is QUEUED

    @pytest.mark.spec("QUE-30")
    async def test_it_keeps_the_place_it_was_added_at(self, store: Store, clock: ManualClock) -> None:
        """Freed, a task stands before all that were added after it; until then it holds nobody up."""
        (parent,) = await start(store, a_record())
        await add(store, before := child())
        await add_after(store, waits := child(), after=[parent.record])
        await add(store, behind := child(), last := child())
        assert uuids(await claim(store)) == [before.uuid]
        await end(store, parent, TaskState.COMPLETED, clock)
        assert uuids(await claim(store, 9)) == [waits.uuid, behind.uuid, last.uuid]

    async def test_it_waits_for_its_time_as_well(self, store: Store, clock: ManualClock) -> None:
        """A task that is freed before it is due is scheduled; freed later, it is queued at once."""
        (parent,) = await start(store, a_record())
        early, late = child(due_at=clock.now() + seconds(60)), child(due_at=clock.now() + seconds(1))
        await add_after(store, early, late, after=[parent.record])
        assert (await store.turn(A)).next_due is None
        clock.advance(2)
        turned = await end(store, parent, TaskState.COMPLETED, clock)
        assert turned.next_due == early.due_at
        assert (await state_of(store, early), await state_of(store, late)) == (TaskState.SCHEDULED, QUEUED)
        clock.advance(60)
        assert uuids(await claim(store, 9)) == [late.uuid, early.uuid]

    async def test_a_key_counts_only_once_it_is_free(self, store: Store, clock: ManualClock) -> None:
        """While it is blocked a task does not stand in the line of its key; freed, it has its place there."""
        (parent,) = await start(store, a_record())
        await add_after(store, waits := child(key="k"), after=[parent.record])
        await add(store, other := child(key="k"))
        (held,) = await claim(store, 9)
        assert held.uuid == other.uuid
        await end(store, parent, TaskState.COMPLETED, clock)
        assert (await get(store, waits)).is_parked
        assert await claim(store, 9) == []
        await end(store, held, TaskState.COMPLETED, clock)
        assert uuids(await claim(store, 9)) == [waits.uuid]

    async def test_limits_hold_for_what_is_freed(self, store: Store, clock: ManualClock) -> None:
        """Ten tasks that are freed at once start within the concurrency of their queue."""
        await store.set_queue(QueueSettings(name="cpu", concurrency=2))
        (parent,) = await start(store, a_record())
        await add_after(store, *(child(queue="cpu") for _ in range(10)), after=[parent.record])
        turned = await store.turn(A, settles=[(parent, Move.completed(at=clock.now()))], demand=room(9))
        assert len(turned.claims) == 2

    # --- when one of them does not complete ---------------------------------------------------------------------------

    @pytest.mark.spec("QUE-27")
    @pytest.mark.parametrize("how", [TaskState.FAILED, TaskState.CANCELED])
    async def test_a_task_fails_with_what_it_waits_for(self, store: Store, clock: ManualClock, how: TaskState) -> None:
        """By default a task fails unrun when one it waits for did not complete, and its error names that one."""
        parent, other = await start(store, a_record(), a_record())
        await add_after(store, waits := child(dedupe_slot="s"), after=[parent.record, other.record])
        turned = await end(store, parent, how, clock)
        assert turned.ended == [waits.uuid]
        kept = await get(store, waits)
        assert (kept.state, kept.finished_at, kept.attempt, kept.open_dependencies) == (
            TaskState.FAILED,
            clock.now(),
            0,
            0,
        )
        assert kept.error is not None
        assert (kept.error.kind, kept.error.type) == (ErrorKind.REJECTED, DEPENDENCY_FAILED)
        assert kept.error.details == {"task": parent.uuid, "state": how}
        assert (kept.error.code, kept.error.message) == (ErrorCode.DEPENDENCY, "")
        assert await store.list_attempts(waits.uuid) == []
        await end(store, other, TaskState.COMPLETED, clock)
        assert await get(store, waits) == kept

    @pytest.mark.spec("QUE-27")
    async def test_a_task_is_skipped_if_it_asked_for_that(self, store: Store, clock: ManualClock) -> None:
        """With skip it is skipped instead, and its note says why."""
        (parent,) = await start(store, a_record())
        await add_after(store, waits := child(OnFailure.SKIP), after=[parent.record])
        turned = await end(store, parent, TaskState.FAILED, clock)
        assert turned.ended == [waits.uuid]
        kept = await get(store, waits)
        assert (kept.state, kept.error) == (TaskState.SKIPPED, None)
        assert kept.note == Note(NoteCode.DEPENDENCY, facts={"task": parent.uuid, "state": "failed"})

    @pytest.mark.spec("QUE-27")
    async def test_a_task_goes_on_if_it_asked_for_that(self, store: Store, clock: ManualClock) -> None:
        """With ignore the end of each counts, however it ended."""
        one, two = await start(store, a_record(), a_record())
        await add_after(store, waits := child(OnFailure.IGNORE), after=[one.record, two.record])
        await end(store, one, TaskState.FAILED, clock)
        assert await state_of(store, waits) is BLOCKED
        turned = await end(store, two, TaskState.COMPLETED, clock)
        assert turned.ended == []
        assert await state_of(store, waits) is QUEUED

    async def test_those_that_wait_for_it_end_with_it(self, store: Store, clock: ManualClock) -> None:
        """What ends unrun takes along, in the same turn, those that wait for it, each by its own choice."""
        (parent,) = await start(store, a_record())
        fails, skips, goes_on, last = child(), child(OnFailure.SKIP), child(OnFailure.IGNORE), child()
        after = {
            fails.uuid: [parent.uuid],
            skips.uuid: [fails.uuid],
            goes_on.uuid: [skips.uuid],
            last.uuid: [goes_on.uuid],
        }
        await store.turn(A, adds=[Add([last, goes_on, skips, fails], after=after)])
        turned = await end(store, parent, TaskState.FAILED, clock)
        assert sorted(turned.ended) == sorted([fails.uuid, skips.uuid])
        states = [await state_of(store, record) for record in (fails, skips, goes_on, last)]
        assert states == [TaskState.FAILED, TaskState.SKIPPED, QUEUED, BLOCKED]
        note = Note(NoteCode.DEPENDENCY, facts={"task": fails.uuid, "state": "failed"})
        assert (await get(store, skips)).note == note

    async def test_those_that_end_with_it_may_stand_in_other_queues(self, store: Store) -> None:
        """What ends unrun takes along those that wait for it at once, in whatever queue each of them stands."""
        await add(store, first := a_record(queue="one"))
        await add_after(store, second := child(queue="two"), after=[first])
        await add_after(store, third := child(queue="three"), after=[second])
        await store.apply([first.uuid], Cancel())
        assert [await state_of(store, record) for record in (second, third)] == [TaskState.FAILED] * 2

    async def test_a_retry_on_its_way_is_no_end(self, store: Store, clock: ManualClock) -> None:
        """A run that failed and is tried again, or was given back, leaves those that wait as they are."""
        (parent,) = await start(store, a_record())
        await add_after(store, waits := child(), after=[parent.record])
        later = clock.now() + seconds(1)
        await settle(store, parent, Move.retrying(at=clock.now(), due_at=later, error=an_error()))
        assert await state_of(store, waits) is BLOCKED
        clock.advance(1)
        (parent,) = await claim(store)
        await settle(store, parent, Move.given_back(at=clock.now()))
        (parent,) = await claim(store)
        await end(store, parent, TaskState.COMPLETED, clock)
        assert await state_of(store, waits) is QUEUED

    async def test_a_cancel_and_a_rescue_are_ends_as_well(self, store: Store) -> None:
        """Whatever ends a task, be it a command or the death of a node, is told to those that wait for it."""
        await store.set_queue(QueueSettings(name="default", auto_recover=0))
        (running,) = await start(store, a_record())
        await add(store, waiting := a_record())
        await add_after(store, one := child(), after=[waiting])
        await add_after(store, two := child(), after=[running.record])
        await store.apply([waiting.uuid], Cancel("not needed"))
        assert await state_of(store, one) is TaskState.FAILED
        await store.rescue(A)
        assert await state_of(store, running) is TaskState.FAILED
        assert await state_of(store, two) is TaskState.FAILED

    async def test_a_dependent_of_two_names_the_one_that_failed_first(self, store: Store, clock: ManualClock) -> None:
        """Failures spread in the order in which they happen, not in the order in which the tasks were added."""
        parents = await start(store, a_record(), a_record())
        middle = child(), child()
        for waits, parent in zip(middle, reversed(parents), strict=True):
            await add_after(store, waits, after=[parent.record])
        await add_after(store, last := child(), after=list(middle))
        failure = Move.failed(at=clock.now(), error=an_error())
        await store.turn(A, settles=[(parent, failure) for parent in parents])
        error = (await get(store, last)).error
        assert error is not None
        assert error.details["task"] == middle[1].uuid

    async def test_a_dependent_of_two_that_learns_of_both_ends_last(self, store: Store, clock: ManualClock) -> None:
        """A task ends when it loses a dependency, not when it first hears that another one completed."""
        done, failing, other = await start(store, a_record(), a_record(), a_record())
        await add_after(store, slow := child(), after=[done.record, failing.record])
        await add_after(store, quick := child(), after=[other.record])
        await add_after(store, last := child(), after=[slow, quick])
        failure = Move.failed(at=clock.now(), error=an_error())
        completed = Move.completed(at=clock.now())
        await store.turn(A, settles=[(done, completed), (other, failure), (failing, failure)])
        error = (await get(store, last)).error
        assert error is not None
        assert error.details["task"] == quick.uuid

    async def test_both_canceled_by_one_command_are_canceled(self, store: Store) -> None:
        """A command that reaches a task before it would have failed with the other counts."""
        await add(store, parent := a_record())
        await add_after(store, waits := child(), after=[parent])
        await store.apply([waits.uuid, parent.uuid], Cancel())
        assert await state_of(store, waits) is TaskState.CANCELED

    async def test_a_canceled_task_is_freed_by_nobody(self, store: Store, clock: ManualClock) -> None:
        """A blocked task can be canceled, and stays so when all that it waited for has completed."""
        (parent,) = await start(store, a_record())
        await add_after(store, waits := child(), after=[parent.record])
        (applied,) = await store.apply([waits.uuid], Cancel())
        assert applied.record is not None
        assert (applied.record.state, applied.record.open_dependencies) == (TaskState.CANCELED, 0)
        await end(store, parent, TaskState.COMPLETED, clock)
        assert await state_of(store, waits) is TaskState.CANCELED

    async def test_its_priority_can_be_changed_meanwhile(self, store: Store, clock: ManualClock) -> None:
        """A blocked task takes a new priority, and has it when it is freed."""
        (parent,) = await start(store, a_record())
        await add_after(store, waits := child(), after=[parent.record])
        await add(store, child())
        await store.apply([waits.uuid], SetPriority(Priority.HIGH))
        await end(store, parent, TaskState.COMPLETED, clock)
        assert uuids(await claim(store)) == [waits.uuid]

    # --- added when it is over ----------------------------------------------------------------------------------------

    async def test_what_has_completed_already_is_not_waited_for(self, store: Store, clock: ManualClock) -> None:
        """A task after others that are all completed is queued, or scheduled, like any other."""
        (parent,) = await start(store, a_record())
        await end(store, parent, TaskState.COMPLETED, clock)
        await add_after(store, now := child(), after=[parent.record])
        await add_after(store, later := child(due_at=clock.now() + seconds(5)), after=[parent.record])
        assert await state_of(store, now) is QUEUED
        assert await state_of(store, later) is TaskState.SCHEDULED
        assert (await get(store, now)).open_dependencies == 0

    @pytest.mark.parametrize("choice", OnFailure)
    async def test_what_has_failed_already_counts_at_once(
        self, store: Store, clock: ManualClock, choice: OnFailure
    ) -> None:
        """A task after one that has failed is stored, and ends, or goes on, by its choice in the same turn."""
        (parent,) = await start(store, a_record())
        await end(store, parent, TaskState.FAILED, clock)
        waits = child(choice)
        turned = await store.turn(A, adds=[Add([waits], after={waits.uuid: [parent.uuid]})])
        assert turned.added == [[Added(waits.uuid)]]
        expected = {OnFailure.FAIL: TaskState.FAILED, OnFailure.SKIP: TaskState.SKIPPED, OnFailure.IGNORE: QUEUED}
        assert await state_of(store, waits) is expected[choice]
        assert turned.ended == ([] if choice is OnFailure.IGNORE else [waits.uuid])

    async def test_an_unknown_task_is_not_waited_for(self, store: Store) -> None:
        """After a task that is not in the store nothing can be added: the add is refused whole, and the rest is not."""
        known, unknown, waits, fine = a_record(), a_record(), child(), a_record()
        await add(store, known)
        turned = await store.turn(
            A, adds=[Add([a_record(), waits], after={waits.uuid: [known.uuid, unknown.uuid]}), an_add(fine)]
        )
        assert isinstance(turned.added[0], UnknownTask)
        assert turned.added[0].uuid == unknown.uuid
        assert turned.added[1] == [Added(fine.uuid)]
        assert set(await everything(store)) == {known.uuid, fine.uuid}

    async def test_a_batch_may_wait_for_its_own(self, store: Store, clock: ManualClock) -> None:
        """Tasks of one add may wait for each other, in whatever order they are given."""
        first, second, third = child(), child(), child()
        after = {third.uuid: [second.uuid, first.uuid], second.uuid: [first.uuid, first.uuid]}
        turned = await store.turn(A, adds=[Add([third, second, first], after=after)], demand=room(9))
        assert turned.added == [[Added(third.uuid), Added(second.uuid), Added(first.uuid)]]
        order = []
        while turned.claims:
            order += uuids(turned.claims)
            done = Move.completed(at=clock.now())
            turned = await store.turn(A, settles=[(one, done) for one in turned.claims], demand=room(9))
        assert order == uuids([first, second, third])

    @pytest.mark.parametrize("length", [1, 2, 5])
    async def test_a_circle_is_refused(self, store: Store, length: int) -> None:
        """Tasks that wait for each other, or for themselves, are refused, and the error names them."""
        ring = [child() for _ in range(length)]
        after = {ring[n].uuid: [ring[n - 1].uuid] for n in range(length)}
        outside, behind = a_record(), child()
        after[behind.uuid] = [ring[0].uuid]
        (refused,) = (await store.turn(A, adds=[Add([outside, *ring, behind], after=after)])).added
        assert isinstance(refused, DependencyCycle)
        assert sorted(refused.uuids) == sorted(uuids(ring))
        assert await everything(store) == {}

    async def test_who_is_merged_is_waited_for_as_the_one_it_became(self, store: Store, clock: ManualClock) -> None:
        """A task of a batch that was merged into a pending one stands for it; a circle by way of that is refused."""
        (held,) = (await store.turn(A, adds=[Add([a_record(dedupe_slot="s")], Dedupe.MERGE)], demand=room(1))).claims
        same, waits = a_record(dedupe_slot="s"), child()
        (added,) = (await store.turn(A, adds=[Add([waits, same], Dedupe.MERGE, after={waits.uuid: [same.uuid]})])).added
        assert added == [Added(waits.uuid), Added(held.uuid, is_new=False)]
        await end(store, held, TaskState.COMPLETED, clock)
        assert await state_of(store, waits) is QUEUED
        one, two = child(dedupe_slot="t"), child(dedupe_slot="t")
        (refused,) = (await store.turn(A, adds=[Add([one, two], Dedupe.MERGE, after={one.uuid: [two.uuid]})])).added
        assert isinstance(refused, DependencyCycle)

    async def test_an_end_that_two_come_upon_counts_once(self, store: Store, clock: ManualClock) -> None:
        """Who replaces a task and waits for it comes too late; another that waits for it as well is told once."""
        old, new, other = a_record(dedupe_slot="s"), child(dedupe_slot="s"), child(OnFailure.IGNORE)
        (running,) = await start(store, a_record())
        await add(store, old, dedupe=Dedupe.REFUSE)
        await add_after(store, other, after=[old, running.record])
        turned = await store.turn(A, adds=[Add([new], Dedupe.REPLACE, after={new.uuid: [old.uuid]})])
        assert turned.ended == [old.uuid, new.uuid]
        assert ((await get(store, other)).state, (await get(store, other)).open_dependencies) == (BLOCKED, 1)
        await end(store, running, TaskState.COMPLETED, clock)
        assert await state_of(store, other) is QUEUED

    async def test_of_several_it_hears_first_of_the_one_it_replaces(self, store: Store) -> None:
        """A task that waits for one that was canceled, and for one that makes way for it, fails with the latter,
        whoever else waits for that."""
        for slot, others in (("a", 0), ("b", 2)):
            await add(store, canceled := a_record())
            await store.apply([canceled.uuid], Cancel())
            await add(store, old := a_record(dedupe_slot=slot), dedupe=Dedupe.REPLACE)
            for _ in range(others):
                await add_after(store, child(), after=[old])
            new = a_record(dedupe_slot=slot)
            await store.turn(A, adds=[Add([new], Dedupe.REPLACE, after={new.uuid: [canceled.uuid, old.uuid]})])
            error = (await get(store, new)).error
            assert error is not None
            assert error.details["task"] == old.uuid

    async def test_what_gives_up_at_once_keeps_what_it_came_with(self, store: Store, clock: ManualClock) -> None:
        """A task that ends as it is added, since what it waits for has failed, keeps its bucket and its origin."""
        (parent,) = await start(store, a_record())
        await end(store, parent, TaskState.FAILED, clock)
        await add_after(store, waits := child(bucket="b", origin="o"), after=[parent.record])
        kept = await get(store, waits)
        assert (kept.state, kept.bucket, kept.origin) == (TaskState.FAILED, "b", "o")

    async def test_a_blocked_task_is_rescheduled(self, store: Store, clock: ManualClock) -> None:
        """Due later, it waits for its time when the others have completed; due at once, it does not."""
        (running,) = await start(store, a_record())
        later, sooner = child(), child(due_at=clock.now() + seconds(60))
        await add_after(store, later, after=[running.record])
        await add_after(store, sooner, after=[running.record])
        for task, s in ((later, 9), (sooner, 0)):
            (applied,) = await store.apply([task.uuid], Reschedule(clock.now() + seconds(s)), by="ann")
            assert applied.record is not None, applied.refused
            assert applied.record.state is BLOCKED
            assert applied.record.note == Note(NoteCode.RESCHEDULED, "ann", at=clock.now())
        (refused,) = await store.apply([later.uuid], StartNow())
        assert isinstance(refused.refused, CommandRefused)
        assert refused.refused.code == "has_dependencies"
        await end(store, running, TaskState.COMPLETED, clock)
        assert [await state_of(store, task) for task in (later, sooner)] == [TaskState.SCHEDULED, QUEUED]
        clock.advance(9)
        await store.turn(A)
        assert await state_of(store, later) is QUEUED

    async def test_a_held_task_hears_of_the_ends_of_others(self, store: Store, clock: ManualClock) -> None:
        """Released before the last of them has ended it is blocked again, and afterwards it may start."""
        one, two = await start(store, a_record(), a_record())
        await add_after(store, waits := child(), after=[one.record, two.record])
        await store.apply([waits.uuid], Hold())
        await end(store, one, TaskState.COMPLETED, clock)
        (released,) = await store.apply([waits.uuid], Release())
        assert released.record is not None
        assert (released.record.state, released.record.open_dependencies) == (BLOCKED, 1)
        await store.apply([waits.uuid], Hold())
        await end(store, two, TaskState.COMPLETED, clock)
        assert await claim(store, 9) == []
        await store.apply([waits.uuid], Release())
        assert uuids(await claim(store, 9)) == [waits.uuid]

    async def test_adds_of_one_turn_may_wait_for_earlier_ones(self, store: Store, clock: ManualClock) -> None:
        """What an earlier add of the same turn has brought can be waited for."""
        first, second = a_record(), child()
        turned = await store.turn(
            A, adds=[an_add(first), Add([second], after={second.uuid: [first.uuid]})], demand=room(9)
        )
        assert uuids(turned.claims) == [first.uuid]
        await end(store, turned.claims[0], TaskState.COMPLETED, clock)
        assert await state_of(store, second) is QUEUED

    async def test_an_add_that_fails_leaves_no_trace(self, store: Store, clock: ManualClock) -> None:
        """A taken uuid, or a run that has lost its claim, keeps the tasks out, and nobody waits for anybody."""
        (parent,) = await start(store, a_record())
        waits = child()
        refused = await add_after(store, waits, a_record(uuid=parent.uuid), after=[parent.record])
        assert isinstance(refused, InvalidInput)
        assert await store.find(waits.uuid) is None
        await settle(store, parent, Move.given_back(at=clock.now()))
        lost = await add_after(store, waits, after=[parent.record], parent=parent)
        assert lost == ClaimLost(parent.uuid, parent.token)
        (parent,) = await claim(store)
        assert await add_after(store, waits, after=[parent.record]) == [Added(waits.uuid)]
        await end(store, parent, TaskState.COMPLETED, clock)
        assert await state_of(store, waits) is QUEUED

    async def test_its_way_is_told(self, store: Store, clock: ManualClock) -> None:
        """Events tell of a task that it was submitted, and then what its dependency made of it."""
        (parent,) = await start(store, a_record())
        await add_after(store, freed := child(), after=[parent.record])
        last = (await store.events(after=-1)).last
        await end(store, parent, TaskState.FAILED, clock)
        told = [(event.uuid, event.kind) for event in (await store.events(after=last)).events]
        assert told == [(parent.uuid, EventKind.FAILED), (freed.uuid, EventKind.FAILED)]
        assert await store.count() == {("default", TaskState.FAILED): 2}

    # --- many ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("how", [TaskState.COMPLETED, TaskState.FAILED])
    async def test_thousands_are_told_in_several_turns(self, store: Store, clock: ManualClock, how: TaskState) -> None:
        """An end that thousands wait for is told to about a thousand in a turn; each says that more are to come."""
        (parent,) = await start(store, a_record())
        await add_after(store, *(child() for _ in range(2_300)), after=[parent.record])
        turned, turns = await end(store, parent, how, clock), 1
        while turned.next_due is not None:
            assert turned.next_due <= clock.now()
            left = (await store.count())["default", BLOCKED]
            assert left >= 2_300 - 1_000 * turns
            turned, turns = await store.turn(A), turns + 1
            assert turns < 10
        expected = QUEUED if how is TaskState.COMPLETED else TaskState.FAILED
        assert (await store.count()).get(("default", BLOCKED), 0) == 0
        assert (await store.count())["default", expected] >= 2_300

    async def test_one_may_wait_for_thousands(self, store: Store, clock: ManualClock) -> None:
        """A task after 3,000 others starts when the last has completed."""
        parents = [a_record() for _ in range(3_000)]
        waits = child()
        await store.turn(A, adds=[Add([*parents, waits], after={waits.uuid: uuids(parents)})])
        done = Move.completed(at=clock.now())
        turned = await store.turn(A, demand=room(1_000))
        for _ in range(2):
            turned = await store.turn(A, settles=[(one, done) for one in turned.claims], demand=room(1_000))
            assert (await state_of(store, waits)) is BLOCKED
        turned = await store.turn(A, settles=[(one, done) for one in turned.claims], demand=room(1_000))
        assert uuids(turned.claims) == [waits.uuid]

    @pytest.mark.spec("QUE-27")
    @pytest.mark.parametrize("seed", range(20))
    async def test_every_task_of_a_random_plan_ends(self, store: Store, clock: ManualClock, seed: int) -> None:
        """Whatever waits for whatever, and whatever fails: all end, none starts before those it waits for have ended as
        it needs, and what failed unrun names one that did not complete."""
        rng = random.Random(seed)
        plan = [child(rng.choice(list(OnFailure))) for _ in range(30)]
        after = {
            record.uuid: uuids(rng.sample(plan[:n], min(n, rng.randrange(4)))) for n, record in enumerate(plan) if n
        }
        for n in range(0, 30, 10):
            batch = plan[n : n + 10]
            rng.shuffle(batch)
            await store.turn(A, adds=[Add(batch, after=after)])
        turned = await store.turn(A, demand=room(3))
        while turned.claims:
            stored = await everything(store)
            for held in turned.claims:
                for parent in after.get(held.uuid, ()):
                    ignores = held.record.on_failure is OnFailure.IGNORE and stored[parent].state in ENDED
                    assert ignores or stored[parent].state is TaskState.COMPLETED
            at = tick(clock, 1)
            moves = [
                Move.completed(at=at) if rng.random() < 0.7 else Move.failed(at=at, error=an_error())
                for _ in turned.claims
            ]
            turned = await store.turn(A, settles=list(zip(turned.claims, moves, strict=True)), demand=room(3))
        for record in (await everything(store)).values():
            assert record.state in ENDED
            assert record.open_dependencies == 0
            if record.attempt == 0:
                ended = {(await get(store, a)).state for a in plan if a.uuid in after[record.uuid]}
                assert ended - {TaskState.COMPLETED}

    # --- sent again ---------------------------------------------------------------------------------------------------

    async def failed_pair(self, store: Store, clock: ManualClock, **fields: Any) -> tuple[TaskRecord, TaskRecord]:
        """One that failed, and one that failed with it."""
        (parent,) = await start(store, a_record())
        await add_after(store, waits := child(**fields), after=[parent.record])
        await end(store, parent, TaskState.FAILED, clock)
        return parent.record, waits

    async def test_a_retry_of_the_one_does_not_revive_the_other(self, store: Store, clock: ManualClock) -> None:
        """A person who sends a failed task again sends that task, and none of those that failed with it."""
        parent, waits = await self.failed_pair(store, clock)
        await store.apply([parent.uuid], Retry())
        (held,) = await claim(store, 9)
        await end(store, held, TaskState.COMPLETED, clock)
        assert await state_of(store, waits) is TaskState.FAILED

    async def test_sent_again_it_waits_again(self, store: Store, clock: ManualClock) -> None:
        """Sent again together, the one waits for the other as it did the first time."""
        parent, waits = await self.failed_pair(store, clock)
        again_at, last = tick(clock, 5), (await store.events(after=-1)).last
        one, two = await store.apply([parent.uuid, waits.uuid], Retry(), by="ann")
        assert (one.refused, two.refused) == (None, None)
        assert two.record is not None
        assert (two.record.state, two.record.open_dependencies) == (BLOCKED, 1)
        assert two.record.blocker == Blocker("dependency", "1", again_at)
        assert (await get(store, waits)).blocker == two.record.blocker
        assert uuids(await store.list_tasks(TaskFilter(blocker="dependency"))) == [waits.uuid]
        events = [event for event in (await store.events(after=last)).events if event.uuid == waits.uuid]
        assert [(event.before, event.after, event.actor, event.code) for event in events] == [
            (TaskState.FAILED, TaskState.QUEUED, "ann", "retried"),
            (TaskState.QUEUED, BLOCKED, "", ""),
        ]
        (held,) = await claim(store, 9)
        assert held.uuid == parent.uuid
        await end(store, held, TaskState.COMPLETED, clock)
        assert uuids(await claim(store, 9)) == [waits.uuid]

    async def test_sent_again_alone_it_is_refused(self, store: Store, clock: ManualClock) -> None:
        """While what it waits for has failed, a task is not sent again: it would only fail once more."""
        parent, waits = await self.failed_pair(store, clock)
        (applied,) = await store.apply([waits.uuid], Retry())
        assert isinstance(applied.refused, CommandRefused)
        assert parent.uuid in str(applied.refused)
        assert await state_of(store, waits) is TaskState.FAILED

    async def test_sent_again_in_vain_it_names_what_is_in_the_way(self, store: Store, clock: ManualClock) -> None:
        """The one that it failed with may run again, or have completed: refused, its error names the one that now
        keeps it from running."""
        one, two, three = await start(store, a_record(), a_record(), a_record())
        await add_after(store, waits := child(), after=[one.record, two.record, three.record])
        for held, how in ((one, TaskState.FAILED), (two, TaskState.CANCELED), (three, TaskState.COMPLETED)):
            await end(store, held, how, clock)
        await store.apply([one.uuid], Retry())
        error = (await get(store, waits)).error
        assert error is not None
        assert error.details == {"task": one.uuid, "state": "failed"}
        (applied,) = await store.apply([waits.uuid], Retry())
        assert isinstance(applied.refused, DependencyLost)
        record = await get(store, waits)
        assert record.error is not None
        assert record.error.code is ErrorCode.DEPENDENCY
        assert record.error.details == {"task": two.uuid, "state": "canceled"}
        assert (record.state, record.error.type) == (TaskState.FAILED, DEPENDENCY_FAILED)

    async def test_sent_again_when_the_other_has_completed_it_runs(self, store: Store, clock: ManualClock) -> None:
        """A task that failed by itself, or whose dependency has completed since, is sent again as any other."""
        parent, waits = await self.failed_pair(store, clock)
        await store.apply([parent.uuid], Retry())
        (held,) = await claim(store, 9)
        await end(store, held, TaskState.COMPLETED, clock)
        (applied,) = await store.apply([waits.uuid], Retry())
        assert applied.record is not None
        assert (applied.record.state, applied.record.open_dependencies) == (QUEUED, 0)
        (held,) = await claim(store, 9)
        await end(store, held, TaskState.FAILED, clock)
        (applied,) = await store.apply([waits.uuid], Retry())
        assert applied.record is not None
        assert applied.record.state is QUEUED

    async def test_what_was_pruned_is_waited_for_no_more(self, store: Store, clock: ManualClock) -> None:
        """When what it waited for is forgotten, a failed task can be sent again; forgotten itself, it is waited for by
        nobody and waits for nobody."""
        _, waits = await self.failed_pair(store, clock)
        at = tick(clock, 1)
        assert await store.prune(finished_before=at, limit=1) == 1
        (applied,) = await store.apply([waits.uuid], Retry())
        assert applied.record is not None
        assert applied.record.state is QUEUED
        await store.apply([waits.uuid], Cancel())
        (parent,) = await start(store, a_record())
        await add_after(store, gone := child(), after=[parent.record])
        await store.apply([gone.uuid], Cancel())
        await store.prune(finished_before=tick(clock, 1))
        assert await store.find(gone.uuid) is None
        await end(store, parent, TaskState.COMPLETED, clock)

    @pytest.mark.spec("QUE-27")
    async def test_what_is_needed_is_not_pruned(self, store: Store, clock: ManualClock) -> None:
        """What ended is kept for as long as one that waits, or has waited, for it has not ended, and no longer."""
        first, second, alone = await start(store, a_record(), a_record(), a_record())
        await add_after(store, waits := child(), after=[first.record, second.record])
        for held in (first, alone, second):
            await end(store, held, TaskState.COMPLETED, clock)
        assert await store.prune(finished_before=tick(clock, 1), limit=1) == 1
        assert await store.prune(finished_before=tick(clock, 1)) == 0
        assert set(await everything(store)) == {first.uuid, second.uuid, waits.uuid}
        (last,) = await claim(store, 9)
        await end(store, last, TaskState.FAILED, clock)
        await store.apply([waits.uuid], Retry())
        assert await store.prune(finished_before=tick(clock, 1)) == 0
        (last,) = await claim(store, 9)
        await end(store, last, TaskState.COMPLETED, clock)
        assert await store.prune(finished_before=tick(clock, 1)) == 3
        assert await everything(store) == {}

    # --- groups -------------------------------------------------------------------------------------------------------

    @pytest.mark.spec("QUE-27")
    async def test_a_group_is_counted_and_listed(self, store: Store, clock: ManualClock) -> None:
        """The tasks of a group are listed newest first with its summary, and counted by state without it."""
        summary = child()
        summary.group_id = summary.uuid
        members = [a_record(group_id=summary.uuid) for _ in range(5)]
        await add(store, a_record(group_id="other"), a_record())
        await store.turn(A, adds=[Add([*members, summary], after={summary.uuid: uuids(members)})])
        claims = [one for one in await claim(store, 4) if one.record.group_id == summary.uuid]
        assert len(claims) == 2
        await end(store, claims[0], TaskState.COMPLETED, clock)
        await end(store, claims[1], TaskState.FAILED, clock)
        expected = {TaskState.COMPLETED: 1, TaskState.FAILED: 1, QUEUED: 3}
        assert await store.count_group(summary.uuid) == expected
        assert await store.count_group("nobody") == {}
        listed = await store.list_tasks(TaskFilter(group=summary.uuid))
        assert uuids(listed) == uuids([summary, *reversed(members)])
        page = await store.list_tasks(TaskFilter(group=summary.uuid), before_id=listed[2].id, limit=2)
        assert uuids(page) == uuids([members[2], members[1]])
        failed = await store.list_tasks(TaskFilter(group=summary.uuid, states=(TaskState.FAILED,)))
        assert uuids(failed) == uuids([summary, claims[1]])

    async def test_a_pruned_group_is_empty(self, store: Store, clock: ManualClock) -> None:
        """Of a group whose tasks are forgotten, nothing is left."""
        (held,) = await start(store, a_record(group_id="g"))
        await end(store, held, TaskState.COMPLETED, clock)
        assert await store.count_group("g") == {TaskState.COMPLETED: 1}
        await store.prune(finished_before=tick(clock, 1))
        assert await store.count_group("g") == {}
        assert await store.list_tasks(TaskFilter(group="g")) == []
