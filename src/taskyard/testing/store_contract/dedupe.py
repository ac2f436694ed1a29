"""The same work twice: how long a task stands for it, who makes way, and what a retry takes back."""

from __future__ import annotations

import pytest

from taskyard.errors import DependencyCycle, DuplicateTask, SlotTaken
from taskyard.model.command import Cancel, Retry, Skip
from taskyard.model.move import Move
from taskyard.model.notes import CancelCode, CancelRequest
from taskyard.model.state import TaskState
from taskyard.model.task import Dedupe, DedupeScope, TaskRecord
from taskyard.ports.store import Add, Added, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_add, an_error, room, seconds
from taskyard.testing.store_contract.desk import A, Desk, add, claim, everything, get, settle, state_of, try_add, uuids

MOST = 60.0


def work(scope: DedupeScope | None = None, slot: str = "same") -> TaskRecord:
    return a_record(dedupe_slot=slot, dedupe_scope=scope)


async def submit(
    store: Store, *records: TaskRecord, dedupe: Dedupe = Dedupe.REFUSE, window_s: float | None = MOST
) -> list[Added] | Exception:
    """Add these, with a window where their scope is one; what the store answers."""
    (added,) = (await store.turn(A, adds=[Add(records, dedupe, window_s=window_s)])).added
    return added


async def is_taken(store: Store, scope: DedupeScope | None = None) -> str | None:
    """Who stands for the same work; None, and a new task does, if nobody did."""
    answer = await submit(store, work(scope))
    return answer.existing if isinstance(answer, DuplicateTask) else None


class DedupeContract(Desk):
    @pytest.mark.spec("QUE-19")
    async def test_a_task_stands_for_its_work_until_it_starts(self, store: Store, clock: ManualClock) -> None:
        """With the scope `queued` the same work may be added the moment its task has started, and never merges back."""
        first = work(DedupeScope.QUEUED)
        await submit(store, first)
        assert await is_taken(store, DedupeScope.QUEUED) == first.uuid
        (held,) = await claim(store)
        assert held.record.dedupe_slot is None
        second = work(DedupeScope.QUEUED)
        assert await submit(store, second) == [Added(second.uuid)]
        await settle(store, held, Move.given_back(at=clock.now()))
        assert await is_taken(store, DedupeScope.QUEUED) == second.uuid
        assert (await get(store, first)).dedupe_slot is None

    async def test_a_task_that_starts_as_it_is_added_gives_its_slot_up(self, store: Store) -> None:
        """Added and claimed in one turn, a task of the scope `queued` stands for nothing any more."""
        first = work(DedupeScope.QUEUED)
        turned = await store.turn(A, adds=[Add([first], Dedupe.REFUSE)], demand=room(1))
        assert uuids(turned.claims) == [first.uuid]
        assert turned.claims[0].record.dedupe_slot is None
        assert (await get(store, first)).dedupe_slot is None
        assert await is_taken(store) is None

    @pytest.mark.spec("QUE-19")
    async def test_a_window_outlives_its_task(self, store: Store, clock: ManualClock) -> None:
        """With the scope `window` the same work is refused until the time is over, also when it was done before."""
        first = work(DedupeScope.WINDOW)
        await submit(store, first)
        (held,) = await claim(store)
        await settle(store, held, Move.completed(at=clock.now()))
        clock.advance(MOST - 1)
        assert await is_taken(store, DedupeScope.WINDOW) == first.uuid
        assert await is_taken(store) == first.uuid
        clock.advance(1)
        second = work(DedupeScope.WINDOW)
        assert await submit(store, second) == [Added(second.uuid)]
        assert await is_taken(store) == second.uuid

    @pytest.mark.parametrize("scope", [DedupeScope.WINDOW, DedupeScope.PENDING])
    async def test_who_comes_too_late_hears_when_the_window_ends(
        self, store: Store, clock: ManualClock, scope: DedupeScope
    ) -> None:
        """Refused or merged, before and after the other has ended: it is told until when that stands for the work,
        where it is a matter of time."""
        until = clock.now() + seconds(MOST) if scope is DedupeScope.WINDOW else None
        first = work(scope)
        await submit(store, first)
        clock.advance(1)

        async def check() -> None:
            refused = await submit(store, work(scope))
            assert isinstance(refused, DuplicateTask)
            assert (refused.existing, refused.until) == (first.uuid, until)
            for another, window_s in ((DedupeScope.WINDOW, 2 * MOST), (DedupeScope.PENDING, None)):
                merged = await submit(store, work(another), work(another), dedupe=Dedupe.MERGE, window_s=window_s)
                assert merged == [Added(first.uuid, is_new=False, until=until)] * 2

        await check()
        (held,) = await claim(store)
        await check()
        if scope is DedupeScope.WINDOW:
            await settle(store, held, Move.completed(at=clock.now()))
            await check()

    async def test_a_window_ends_while_its_task_pends(self, store: Store, clock: ManualClock) -> None:
        """A window is a matter of time alone: when it is over, the same work may pend a second time."""
        await submit(store, work(DedupeScope.WINDOW))
        clock.advance(MOST)
        assert await is_taken(store) is None
        assert len(await claim(store, 9)) == 2

    @pytest.mark.spec("QUE-19")
    @pytest.mark.parametrize("command", [Cancel(), Skip()], ids=["canceled", "skipped"])
    @pytest.mark.parametrize("dedupe", [Dedupe.REFUSE, Dedupe.MERGE, Dedupe.REPLACE])
    async def test_what_was_called_off_has_not_been_done(
        self, store: Store, clock: ManualClock, command: Cancel | Skip, dedupe: Dedupe
    ) -> None:
        """A task that was canceled or skipped gives its work up, though its window is not over; one that failed does
        not: it can be sent again."""
        first, second = work(DedupeScope.WINDOW), work(DedupeScope.WINDOW)
        await submit(store, first)
        await store.apply([first.uuid], command)
        await store.turn(A)
        assert await submit(store, second, dedupe=dedupe) == [Added(second.uuid)]
        (held,) = await claim(store)
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        assert await is_taken(store, DedupeScope.WINDOW) == second.uuid

    async def test_a_window_outlives_the_record(self, store: Store, clock: ManualClock) -> None:
        """What is forgotten of a task leaves its window as it is; a window that is over is forgotten with the rest."""
        first, until = work(DedupeScope.WINDOW), clock.now() + seconds(MOST)
        await submit(store, first)
        (held,) = await claim(store)
        await settle(store, held, Move.completed(at=clock.now()))
        assert await store.prune(finished_before=clock.now() + seconds(1)) == 1
        assert await is_taken(store) == first.uuid
        assert isinstance(await submit(store, work(), dedupe=Dedupe.REPLACE), DuplicateTask)
        merged = await submit(store, work(), dedupe=Dedupe.MERGE)
        assert merged == [Added(first.uuid, is_new=False, until=until)]
        clock.advance(MOST)
        await store.prune(finished_before=clock.now())
        assert await is_taken(store) is None

    async def test_windows_are_forgotten_a_few_at_a_time(self, store: Store, clock: ManualClock) -> None:
        """Of many windows that are over, each round forgets its share, those that ended first: a clock that is set back
        shows it."""
        for slot in "cab":
            await submit(store, work(DedupeScope.WINDOW, slot))
            clock.advance(1)
        clock.advance(MOST)
        await store.prune(finished_before=clock.now(), limit=2)
        clock.advance(-MOST)
        answers = [await submit(store, work(DedupeScope.WINDOW, slot)) for slot in "cab"]
        assert [isinstance(answer, DuplicateTask) for answer in answers] == [False, False, True]

    @pytest.mark.parametrize("is_kept", [True, False])
    async def test_who_waits_for_himself_by_way_of_a_window(
        self, store: Store, clock: ManualClock, is_kept: bool
    ) -> None:
        """A task with the uuid of one that has ended, whose window stands, waits for work that is merged into that one:
        for itself, which is refused."""
        first = work(DedupeScope.WINDOW)
        await submit(store, first)
        (held,) = await claim(store)
        await settle(store, held, Move.completed(at=clock.now()))
        if not is_kept:
            assert await store.prune(finished_before=clock.now() + seconds(1)) == 1
        merged, again = work(), a_record(uuid=first.uuid)
        asked = Add([merged, again], Dedupe.MERGE, after={again.uuid: [merged.uuid]})
        (refused,) = (await store.turn(A, adds=[asked])).added
        assert isinstance(refused, DependencyCycle)

    @pytest.mark.parametrize("scope", DedupeScope)
    async def test_work_twice_in_one_turn_meets_whatever_its_scope(
        self, store: Store, clock: ManualClock, scope: DedupeScope
    ) -> None:
        """Of two callers in one turn the second is merged into what the first has brought, and so is the second
        of two in one batch."""
        until = clock.now() + seconds(MOST) if scope is DedupeScope.WINDOW else None
        one, two = work(scope), work(scope)
        adds = [Add([record], Dedupe.MERGE, window_s=MOST) for record in (one, two)]
        turned = await store.turn(A, adds=adds)
        assert turned.added == [[Added(one.uuid)], [Added(one.uuid, is_new=False, until=until)]]
        three, four = work(scope, "other"), work(scope, "other")
        added = await submit(store, three, four, dedupe=Dedupe.MERGE)
        assert added == [Added(three.uuid), Added(three.uuid, is_new=False, until=until)]

    # --- replacing ----------------------------------------------------------------------------------------------------

    @pytest.mark.spec("QUE-19")
    @pytest.mark.parametrize("where", ["queued", "scheduled", "retrying", "blocked"])
    async def test_the_same_work_is_replaced(self, store: Store, clock: ManualClock, where: str) -> None:
        """With replace, work that has not begun is canceled and says by whom, and the new task joins at the tail."""
        old = work()
        if where == "scheduled":
            old.due_at = clock.now() + seconds(5)
        if where == "blocked":
            await add(store, parent := a_record(consumer="shrink"))
            await store.turn(A, adds=[Add([old], Dedupe.REFUSE, after={old.uuid: [parent.uuid]})])
        else:
            await submit(store, old)
        if where == "retrying":
            (held,) = await claim(store)
            later = clock.now() + seconds(5)
            await settle(store, held, Move.retrying(at=clock.now(), due_at=later, error=an_error()))
        assert await state_of(store, old) is TaskState(where)
        await add(store, other := a_record())
        turned = await store.turn(A, adds=[an_add(new := work(), dedupe=Dedupe.REPLACE)])
        assert turned.added == [[Added(new.uuid)]]
        assert turned.ended == [old.uuid]
        gone = await get(store, old)
        assert gone.state is TaskState.CANCELED
        assert gone.cancel == CancelRequest(clock.now(), code=CancelCode.REPLACED, subject=new.uuid)
        assert gone.error == (an_error() if where == "retrying" else None)
        assert await is_taken(store) == new.uuid
        assert uuids(await claim(store, room(9, fetch=9))) == [other.uuid, new.uuid]

    async def test_what_runs_is_not_replaced(self, store: Store, clock: ManualClock) -> None:
        """A task that runs does not make way: the newcomer is refused, and told who it is; nothing else happens."""
        waiting = work(slot="other")
        await submit(store, waiting)
        await claim(store, 0)
        running = work()
        await submit(store, running)
        claims = await claim(store, 2)
        assert uuids(claims) == [waiting.uuid, running.uuid]
        await settle(store, claims[0], Move.given_back(at=clock.now()))
        before = await everything(store)
        refused = await try_add(store, work(slot="other"), work(), dedupe=Dedupe.REPLACE)
        assert isinstance(refused, DuplicateTask)
        assert (refused.existing, refused.slot) == (running.uuid, "same")
        assert await everything(store) == before

    async def test_what_was_done_within_the_window_is_not_replaced(self, store: Store, clock: ManualClock) -> None:
        """Within a window the same work is done once: what has ended cannot make way; what waits can."""
        first, second = work(DedupeScope.WINDOW), work(DedupeScope.WINDOW)
        await submit(store, first)
        clock.advance(1)
        assert await submit(store, second, dedupe=Dedupe.REPLACE) == [Added(second.uuid)]
        assert await state_of(store, first) is TaskState.CANCELED
        assert await is_taken(store) == second.uuid
        clock.advance(MOST - 1)
        assert await is_taken(store) == second.uuid  # whose window began a second later
        (held,) = await claim(store)
        await settle(store, held, Move.completed(at=clock.now()))
        refused = await submit(store, work(DedupeScope.WINDOW), dedupe=Dedupe.REPLACE)
        assert isinstance(refused, DuplicateTask)
        assert refused.existing == second.uuid

    async def test_who_replaces_a_window_need_not_have_one(self, store: Store, clock: ManualClock) -> None:
        """The window goes with the task that is replaced: from then on the newcomer's own scope counts."""
        await submit(store, work(DedupeScope.WINDOW))
        (new,) = await add(store, work(), dedupe=Dedupe.REPLACE)
        (held,) = await claim(store)
        assert held.uuid == new.uuid
        await settle(store, held, Move.completed(at=clock.now()))
        assert await is_taken(store) is None

    async def test_a_batch_does_not_replace_itself(self, store: Store) -> None:
        """With replace, the same work twice in one batch refuses the batch, and what pends is left alone."""
        (first,) = await add(store, work(), dedupe=Dedupe.REFUSE)
        refused = await try_add(store, work(slot="other"), work(slot="other"), work(), dedupe=Dedupe.REPLACE)
        assert isinstance(refused, DuplicateTask)
        assert (refused.existing, refused.slot) == ("", "other")
        assert set(await everything(store)) == {first.uuid}
        assert (await everything(store))[first.uuid].state is TaskState.QUEUED

    async def test_who_comes_later_in_a_turn_replaces_who_came_before(self, store: Store) -> None:
        """Of two callers in one turn the second replaces what the first has brought."""
        one, two = work(), work()
        turned = await store.turn(A, adds=[an_add(work, dedupe=Dedupe.REPLACE) for work in (one, two)], demand=room(9))
        assert turned.added == [[Added(one.uuid)], [Added(two.uuid)]]
        assert turned.ended == [one.uuid]
        assert uuids(turned.claims) == [two.uuid]

    async def test_a_replacement_that_cannot_be_stored_replaces_nothing(self, store: Store) -> None:
        """A uuid that is taken keeps the whole add out: nobody makes way for it."""
        (first,) = await add(store, work(), dedupe=Dedupe.REFUSE)
        refused = await try_add(store, a_record(uuid=first.uuid, dedupe_slot="same"), dedupe=Dedupe.REPLACE)
        assert isinstance(refused, Exception)
        assert (await everything(store))[first.uuid].state is TaskState.QUEUED
        assert await is_taken(store) == first.uuid

    # --- sent again ---------------------------------------------------------------------------------------------------

    async def fail(self, store: Store, clock: ManualClock, record: TaskRecord) -> None:
        """Add it, run it, fail it."""
        await submit(store, record)
        (held,) = await claim(store)
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))

    @pytest.mark.parametrize("scope", [None, DedupeScope.PENDING, DedupeScope.QUEUED])
    async def test_a_retry_takes_its_slot_again(
        self, store: Store, clock: ManualClock, scope: DedupeScope | None
    ) -> None:
        """A failed task that is sent again stands for its work once more."""
        await self.fail(store, clock, first := work(scope))
        (applied,) = await store.apply([first.uuid], Retry())
        assert applied.record is not None
        assert applied.record.dedupe_slot == "same"
        assert await is_taken(store) == first.uuid

    @pytest.mark.spec("QUE-19")
    async def test_a_retry_whose_slot_is_taken_is_refused(self, store: Store, clock: ManualClock) -> None:
        """While another stands for the same work, a failed task is not sent again, and the answer names the other."""
        await self.fail(store, clock, first := work())
        (second,) = await add(store, work(), dedupe=Dedupe.REFUSE)
        (applied,) = await store.apply([first.uuid], Retry())
        assert isinstance(applied.refused, SlotTaken)
        assert (applied.refused.uuid, applied.refused.holder) == (first.uuid, second.uuid)
        assert second.uuid in str(applied.refused)
        assert await state_of(store, first) is TaskState.FAILED
        await store.apply([second.uuid], Cancel())
        (applied,) = await store.apply([first.uuid], Retry())
        assert applied.refused is None

    async def test_of_two_that_are_sent_again_together_one_is_refused(self, store: Store, clock: ManualClock) -> None:
        """Two failed tasks of the same work, sent again by one command: the first takes the slot, the second hears."""
        await self.fail(store, clock, first := work())
        await self.fail(store, clock, second := work())
        one, two = await store.apply([first.uuid, second.uuid], Retry())
        assert one.refused is None
        assert isinstance(two.refused, SlotTaken)
        assert two.refused.holder == first.uuid

    async def test_a_retry_within_its_own_window_is_fine(self, store: Store, clock: ManualClock) -> None:
        """The window of a task does not keep the task itself from being sent again; that of another does."""
        await self.fail(store, clock, first := work(DedupeScope.WINDOW))
        (applied,) = await store.apply([first.uuid], Retry())
        assert applied.refused is None
        (held,) = await claim(store)
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        clock.advance(MOST)
        await submit(store, second := work(DedupeScope.WINDOW))
        (applied,) = await store.apply([first.uuid], Retry())
        assert isinstance(applied.refused, SlotTaken)
        assert applied.refused.holder == second.uuid

    @pytest.mark.parametrize("scope", [DedupeScope.WINDOW, DedupeScope.PENDING])
    async def test_a_retry_that_is_refused_hears_when_the_window_ends(
        self, store: Store, clock: ManualClock, scope: DedupeScope
    ) -> None:
        """Before and after the other has ended, who is not sent again is told until when that stands for the work,
        where it is a matter of time."""
        await self.fail(store, clock, first := work())
        until = clock.now() + seconds(MOST) if scope is DedupeScope.WINDOW else None
        await submit(store, second := work(scope))
        clock.advance(1)

        async def check() -> None:
            (applied,) = await store.apply([first.uuid], Retry())
            assert isinstance(applied.refused, SlotTaken)
            assert (applied.refused.holder, applied.refused.until) == (second.uuid, until)
            assert ("its window ends at" in str(applied.refused)) == (until is not None)

        await check()
        (held,) = await claim(store)
        await check()
        await settle(store, held, Move.completed(at=clock.now()))
        if until is not None:
            await check()
            clock.advance(MOST)
        (applied,) = await store.apply([first.uuid], Retry())
        assert applied.refused is None

    async def test_work_that_was_allowed_twice_is_sent_again_as_it_is(self, store: Store, clock: ManualClock) -> None:
        """A task that stood for nothing takes no slot when it is sent again, whoever holds one."""
        await add(store, allowed := work())
        (held,) = await claim(store)
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        await add(store, work(), dedupe=Dedupe.REFUSE)
        (applied,) = await store.apply([allowed.uuid], Retry())
        assert applied.record is not None
        assert applied.record.dedupe_slot is None
