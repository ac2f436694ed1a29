"""Adding tasks: in order, all or nothing, and the same work only once."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from taskyard.errors import ClaimLost, DuplicateTask, InvalidInput
from taskyard.model.command import Cancel
from taskyard.model.execution import ErrorKind
from taskyard.model.move import Move
from taskyard.model.notes import Note
from taskyard.model.order import Priority
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState
from taskyard.model.task import Dedupe, TaskRecord
from taskyard.ports.store import Added, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_add, an_error, room, seconds
from taskyard.testing.store_contract.desk import A, B, Desk, add, claim, everything, get, settle, start, try_add, uuids


def work(slot: str = "same") -> TaskRecord:
    """A task that is the same work as every other of this slot."""
    return a_record(dedupe_slot=slot)


class AddContract(Desk):
    async def test_a_task_is_stored_as_it_was_asked(self, store: Store, clock: ManualClock) -> None:
        """Everything a task was asked with is kept; the store adds its id, its place and its state."""
        asked = a_record(
            queue="cpu",
            consumer="shrink",
            args='{"path":"a.png","n":[1,2.5,null,"ü"]}',
            priority=Priority.HIGH,
            key="disk",
            timeout_s=2.5,
            retry=RetryPolicy(max_retries=7, give_up_on=("KeyError",)),
        )
        assert await add(store, asked) == [Added(asked.uuid, is_new=True)]
        kept = await get(store, asked)
        assert kept.state is TaskState.QUEUED
        for field in ("queue", "consumer", "args", "priority", "key", "timeout_s", "retry", "due_at", "created_at"):
            assert getattr(kept, field) == getattr(asked, field), field
        assert (kept.attempt, kept.retries, kept.crashes, kept.recoveries) == (0, 0, 0, 0)
        assert (kept.token, kept.node, kept.started_at, kept.finished_at, kept.result) == (None,) * 5
        assert kept.updated_at == clock.now()

    async def test_what_is_noted_of_a_new_task_stays_until_it_starts(self, store: Store, clock: ManualClock) -> None:
        """Its note is kept while it waits, whatever else it has, and is gone when it starts; one that is merged into
        another leaves that its own."""

        def noted(text: str, **fields: Any) -> TaskRecord:
            return a_record(note=Note.remark(text), **fields)

        tasks = [noted("for 0"), noted("for 1", origin="o"), noted("for 2", key="k")]
        await add(store, tasks[0], a_record(), *tasks[1:], dedupe=Dedupe.MERGE)
        late, held = noted("later", due_at=clock.now() + seconds(60)), noted("first", dedupe_slot="s")
        await add(store, late, held, dedupe=Dedupe.MERGE)
        await add(store, noted("second", dedupe_slot="s"), dedupe=Dedupe.MERGE)
        notes = [(await get(store, task)).note for task in (*tasks, late, held)]
        assert notes == [Note.remark(text) for text in ("for 0", "for 1", "for 2", "later", "first")]
        assert [claim.record.note for claim in await claim(store, 9)] == [None] * 5
        at_once = noted("gone at once")
        turned = await store.turn(A, adds=[an_add(at_once)], demand=room(1))
        assert [claim.record.note for claim in turned.claims] == [None]
        assert (await get(store, at_once)).note is None

    async def test_the_record_asked_with_is_left_alone(self, store: Store) -> None:
        """Adding changes nothing in the caller's record, and changing that afterwards changes nothing in the store."""
        asked = a_record()
        before = copy.copy(asked)
        await add(store, asked)
        assert asked == before
        asked.priority, asked.args, asked.state = Priority.LOW, "[]", TaskState.FAILED
        kept = await get(store, asked)
        assert (kept.priority, kept.args, kept.state) == (Priority.NORMAL, "{}", TaskState.QUEUED)

    @pytest.mark.spec("QUE-04")
    async def test_a_batch_is_queued_in_the_order_given(self, store: Store) -> None:
        """The tasks of one add are answered, numbered and started in the order they were given."""
        batch = [a_record() for _ in range(300)]
        assert uuids(await add(store, *batch)) == uuids(batch)
        ids = [(await get(store, record)).id for record in batch[:20]]
        assert ids == sorted(set(ids))
        assert uuids(await claim(store, 300)) == uuids(batch)

    async def test_adds_of_one_turn_are_queued_in_their_order(self, store: Store) -> None:
        """What two callers add in one turn is queued in the order of the adds, and answered add by add."""
        first, second, third = a_record(), a_record(), a_record()
        turned = await store.turn(A, adds=[an_add(first, second), an_add(), an_add(third)])
        assert turned.added == [[Added(first.uuid), Added(second.uuid)], [], [Added(third.uuid)]]
        assert uuids(await claim(store, 3)) == uuids([first, second, third])

    @pytest.mark.spec("QUE-04")
    async def test_an_add_is_all_or_nothing(self, store: Store) -> None:
        """When one task of a batch is refused, none of the batch is stored."""
        await add(store, work(), dedupe=Dedupe.REFUSE)
        before = await everything(store)
        refused = await try_add(store, work("x"), work("y"), work(), dedupe=Dedupe.REFUSE)
        assert isinstance(refused, DuplicateTask)
        assert await everything(store) == before
        assert sum((await store.count()).values()) == 1
        assert await add(store, again := work("x"), dedupe=Dedupe.REFUSE) == [Added(again.uuid)]

    async def test_an_add_that_fails_leaves_the_others_alone(self, store: Store) -> None:
        """Of the adds of one turn, exactly the one that does not fit comes back as an error."""
        (pending,) = await add(store, work(), dedupe=Dedupe.REFUSE)
        before, bad, after = a_record(), work(), a_record()
        turned = await store.turn(A, adds=[an_add(before), an_add(bad, dedupe=Dedupe.REFUSE), an_add(after)])
        assert turned.added[0] == [Added(before.uuid)]
        assert isinstance(turned.added[1], DuplicateTask)
        assert (turned.added[1].existing, turned.added[1].slot) == (pending.uuid, "same")
        assert turned.added[2] == [Added(after.uuid)]
        assert set(await everything(store)) == {pending.uuid, before.uuid, after.uuid}

    @pytest.mark.parametrize("twice", ["stored", "ended", "in-the-batch", "in-the-turn"])
    async def test_a_uuid_that_is_taken_is_refused(self, store: Store, clock: ManualClock, twice: str) -> None:
        """A uuid stands for one task: an add that brings it again is refused whole, and the rest of its turn is not."""
        taken, other, fine = a_record(), a_record(), a_record()
        batch = [other, a_record(uuid=taken.uuid)]
        adds = [an_add(*batch), an_add(fine)]
        if twice == "in-the-batch":
            batch.append(taken)
            adds = [an_add(*batch), an_add(fine)]
        elif twice == "in-the-turn":
            adds = [an_add(taken), *adds]
        else:
            (running,) = await start(store, taken)
            if twice == "ended":
                await settle(store, running, Move.completed(at=clock.now()))
        turned = await store.turn(A, adds=adds)
        assert isinstance(turned.added[-2], InvalidInput), turned.added[-2]
        assert turned.added[-1] == [Added(fine.uuid)]
        stored = await everything(store)
        assert other.uuid not in stored
        assert fine.uuid in stored
        assert (taken.uuid in stored) == (twice != "in-the-batch")
        assert sum((await store.count()).values()) == len(stored)

    async def test_the_other_parts_of_a_turn_survive_an_add_that_fails(self, store: Store, clock: ManualClock) -> None:
        """A settle and a claim in the same turn happen, whatever becomes of an add."""
        (running,) = await start(store, a_record())
        await add(store, waiting := a_record())
        turned = await store.turn(
            A,
            settles=[(running, Move.completed(at=clock.now()))],
            adds=[an_add(a_record(uuid=running.uuid))],
            demand=room(5),
        )
        assert turned.settled == [None]
        assert isinstance(turned.added[0], InvalidInput)
        assert uuids(turned.claims) == [waiting.uuid]
        assert (await get(store, running)).state is TaskState.COMPLETED

    async def test_the_same_work_is_merged(self, store: Store) -> None:
        """With merge, work that is pending already is answered with the pending task, and nothing is stored."""
        (pending,) = await add(store, work(), dedupe=Dedupe.MERGE)
        new, same = work("other"), work()
        added = await add(store, same, new, dedupe=Dedupe.MERGE)
        assert added == [Added(pending.uuid, is_new=False), Added(new.uuid)]
        assert set(await everything(store)) == {pending.uuid, new.uuid}

    async def test_duplicates_inside_a_batch_are_refused(self, store: Store) -> None:
        """With refuse, the same work twice in one batch refuses the batch, and nothing of it is stored."""
        refused = await try_add(store, work(), work("other"), work(), dedupe=Dedupe.REFUSE)
        assert isinstance(refused, DuplicateTask)
        assert (refused.existing, refused.slot) == ("", "same")
        assert await everything(store) == {}
        assert await add(store, again := work(), dedupe=Dedupe.REFUSE) == [Added(again.uuid)]

    async def test_duplicates_inside_a_batch_are_folded(self, store: Store) -> None:
        """With merge, the same work twice in one batch is one task, which both places of the answer name."""
        one, two, other = work(), work(), work("other")
        added = await add(store, one, other, two, dedupe=Dedupe.MERGE)
        assert added == [Added(one.uuid), Added(other.uuid), Added(one.uuid, is_new=False)]
        assert set(await everything(store)) == {one.uuid, other.uuid}

    async def test_duplicates_across_the_adds_of_a_turn_meet(self, store: Store) -> None:
        """The same work from two callers in one turn is merged, or refused, as the second of them asked."""
        one, merged, refused = work(), work(), work()
        turned = await store.turn(
            A,
            adds=[
                an_add(one, dedupe=Dedupe.MERGE),
                an_add(merged, dedupe=Dedupe.MERGE),
                an_add(refused, dedupe=Dedupe.REFUSE),
            ],
        )
        assert turned.added[:2] == [[Added(one.uuid)], [Added(one.uuid, is_new=False)]]
        assert isinstance(turned.added[2], DuplicateTask)
        assert set(await everything(store)) == {one.uuid}

    async def test_allowed_duplicates_take_no_slot(self, store: Store) -> None:
        """With allow the same work may pend many times, beside one that holds the slot."""
        allowed = [work() for _ in range(3)]
        await add(store, *allowed)
        (held,) = await add(store, work(), dedupe=Dedupe.REFUSE)
        await add(store, work())
        assert len(await everything(store)) == 5
        assert (await everything(store))[held.uuid].dedupe_slot == "same"
        assert (await get(store, allowed[0])).dedupe_slot is None

    async def test_work_without_a_slot_is_never_the_same(self, store: Store) -> None:
        """Tasks that name no slot are never merged or refused."""
        added = await add(store, a_record(), a_record(), dedupe=Dedupe.REFUSE)
        added += await add(store, a_record(), a_record(), dedupe=Dedupe.MERGE)
        assert [one.is_new for one in added] == [True] * 4

    @pytest.mark.parametrize("end", ["completed", "failed", "canceled", "canceled-waiting"])
    async def test_the_slot_is_free_when_the_task_has_ended(self, store: Store, clock: ManualClock, end: str) -> None:
        """The moment a task has ended, however it did, the same work may be added again."""
        (first,) = await add(store, work(), dedupe=Dedupe.REFUSE)
        if end == "canceled-waiting":
            await store.apply([first.uuid], Cancel())
        else:
            (held,) = await claim(store)
            moves = {
                "completed": Move.completed(at=clock.now()),
                "failed": Move.failed(at=clock.now(), error=an_error()),
                "canceled": Move.canceled(at=clock.now()),
            }
            await settle(store, held, moves[end])
        assert (await everything(store))[first.uuid].dedupe_slot is None
        assert await add(store, second := work(), dedupe=Dedupe.REFUSE) == [Added(second.uuid)]

    async def test_the_slot_stays_taken_while_the_task_pends(self, store: Store, clock: ManualClock) -> None:
        """Running, in backoff, given back or rescued, a task keeps its slot until it has ended."""
        (first,) = await add(store, work(), dedupe=Dedupe.REFUSE)

        async def taken() -> bool:
            return isinstance(await try_add(store, work(), dedupe=Dedupe.REFUSE), DuplicateTask)

        (held,) = await claim(store)
        assert await taken()
        await settle(store, held, Move.given_back(at=clock.now()))
        assert await taken()
        (held,) = await claim(store)
        await settle(store, held, Move.retrying(at=clock.now(), due_at=clock.now() + seconds(1), error=an_error()))
        assert await taken()
        clock.advance(1)
        (held,) = await claim(store)
        await store.rescue(A)
        assert await taken()
        assert (await everything(store))[first.uuid].dedupe_slot == "same"

    @pytest.mark.parametrize("dedupe", [Dedupe.MERGE, Dedupe.REFUSE])
    async def test_many_at_once_with_one_slot_make_one_task(self, store: Store, dedupe: Dedupe) -> None:
        """N concurrent adds of the same work store one task, and all the others are told which."""
        answers = await asyncio.gather(*(try_add(store, work(), dedupe=dedupe) for _ in range(32)))
        (only,) = await everything(store)
        new = [answer for answer in answers if answer == [Added(only)]]
        assert len(new) == 1
        for answer in answers:
            if isinstance(answer, DuplicateTask):
                assert answer.existing == only
            else:
                assert answer in ([Added(only)], [Added(only, is_new=False)])

    async def test_a_run_adds_children(self, store: Store) -> None:
        """A run that holds its claim may add tasks."""
        (parent,) = await start(store, a_record())
        assert await add(store, child := a_record(), parent=parent) == [Added(child.uuid)]

    @pytest.mark.parametrize("lost", ["rescued", "settled", "given-back", "running-again"])
    async def test_a_stale_run_adds_nothing(self, store: Store, clock: ManualClock, lost: str) -> None:
        """A run whose claim is lost adds nothing, even if its task runs again elsewhere; other adds are not touched."""
        (parent,) = await start(store, a_record())
        if lost == "settled":
            await settle(store, parent, Move.failed(at=clock.now(), error=an_error(ErrorKind.TIMEOUT)))
        elif lost == "given-back":
            await settle(store, parent, Move.given_back(at=clock.now()))
        else:
            await store.rescue(A)
            if lost == "running-again":
                await claim(store, node=B)
        child, other = a_record(), a_record()
        turned = await store.turn(A, adds=[an_add(child, parent=parent), an_add(other)])
        assert turned.added == [ClaimLost(parent.uuid, parent.token), [Added(other.uuid)]]
        assert await store.find(child.uuid) is None
