"""Stores that answer a submit on the spot."""

from __future__ import annotations

import pytest

from taskyard.errors import ClaimLost, DuplicateTask, InvalidInput
from taskyard.model.move import Move
from taskyard.model.state import TaskState
from taskyard.model.task import Dedupe, Outcome
from taskyard.ports.store import Added, PromptStore, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_add, seconds
from taskyard.testing.store_contract.desk import A, B, Desk, claim, everything, start, state_of, uuids


class PromptContract(Desk):
    @pytest.fixture
    def prompt(self, store: Store) -> PromptStore:
        assert isinstance(store, PromptStore)
        return store

    async def test_an_add_on_the_spot_is_an_add(self, store: Store, prompt: PromptStore) -> None:
        """What is added without a turn is stored in order and claimed by the next turn, behind what was there."""
        first, second, third = a_record(), a_record(), a_record()
        assert prompt.add_now(an_add(first)) == [Added(first.uuid)]
        assert prompt.add_now(an_add(second, third)) == [Added(second.uuid), Added(third.uuid)]
        assert uuids(await claim(store, 9)) == uuids([first, second, third])

    async def test_an_add_on_the_spot_is_refused_alike(self, store: Store, prompt: PromptStore) -> None:
        """Pending work, a taken uuid and a lost claim are answered as a turn answers them, and nothing is stored."""
        (parent,) = await start(store, a_record())
        await store.rescue(A)
        await claim(store, node=B)
        prompt.add_now(an_add(pending := a_record(dedupe_slot="s"), dedupe=Dedupe.REFUSE))
        before = await everything(store)
        same = a_record(dedupe_slot="s")
        assert isinstance(prompt.add_now(an_add(a_record(), same, dedupe=Dedupe.REFUSE)), DuplicateTask)
        assert prompt.add_now(an_add(same, dedupe=Dedupe.MERGE)) == [Added(pending.uuid, is_new=False)]
        assert isinstance(prompt.add_now(an_add(a_record(), a_record(uuid=pending.uuid))), InvalidInput)
        assert prompt.add_now(an_add(a_record(), parent=parent)) == ClaimLost(parent.uuid, parent.token)
        assert await everything(store) == before

    async def test_an_add_on_the_spot_promotes_nothing(
        self, store: Store, prompt: PromptStore, clock: ManualClock
    ) -> None:
        """What has become due meanwhile is promoted by the next turn, which also says when the new task is due."""
        prompt.add_now(an_add(soon := a_record(due_at=clock.now() + seconds(1))))
        clock.advance(1)
        prompt.add_now(an_add(later := a_record(due_at=clock.now() + seconds(9))))
        assert await state_of(store, soon) is TaskState.SCHEDULED
        turned = await store.turn(A)
        assert await state_of(store, soon) is TaskState.QUEUED
        assert turned.next_due == later.due_at

    async def test_an_outcome_on_the_spot(self, store: Store, prompt: PromptStore) -> None:
        """It is what `outcomes` says: of a task that waits, of one that has ended, and of one that nobody knows."""
        (ended,) = await start(store, a_record())
        await store.turn(A, settles=[(ended, Move.completed(at=ended.record.created_at, result="7"))])
        prompt.add_now(an_add(waiting := a_record()))
        uuids_asked = [ended.uuid, waiting.uuid, a_record().uuid]
        assert [prompt.outcome_now(uuid) for uuid in uuids_asked] == await store.outcomes(uuids_asked)
        assert prompt.outcome_now(ended.uuid) == Outcome(ended.uuid, TaskState.COMPLETED, "7")
