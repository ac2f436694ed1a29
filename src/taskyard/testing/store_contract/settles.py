"""Settling and reporting: one transaction in a fixed order, and nothing from a claim that was lost."""

from __future__ import annotations

import asyncio

import pytest

from taskyard.errors import ClaimLost, IllegalMove
from taskyard.model.command import Cancel, Retry
from taskyard.model.event import EventKind
from taskyard.model.execution import ErrorKind, ExecutionError, Progress
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.notes import CancelRequest, Note, NoteCode
from taskyard.model.queue import QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, Dedupe, Outcome
from taskyard.ports.explain import device_lost
from taskyard.ports.store import Added, Report, Store, Turned
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_add, an_error, room, seconds
from taskyard.testing.store_contract.desk import (
    A,
    B,
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


async def lose(store: Store, clock: ManualClock, how: str) -> Claim:
    """A claim of node A that is lost."""
    (stale,) = await start(store, a_record())
    if how == "given-back":
        await settle(store, stale, Move.given_back(at=clock.now()))
    elif how == "ended":
        await settle(store, stale, Move.completed(at=clock.now(), result='"kept"'))
    elif how == "pruned":
        await settle(store, stale, Move.completed(at=clock.now()))
        assert await store.prune(finished_before=tick(clock, 1)) == 1
    elif how == "retrying":
        await settle(store, stale, Move.retrying(at=clock.now(), due_at=clock.now() + seconds(9), error=an_error()))
    else:
        await store.rescue(A)
        if how == "running-again":
            (again,) = await claim(store, node=B)
            assert (again.uuid, again.attempt) == (stale.uuid, 2)
    return stale


LOST = ["rescued", "running-again", "given-back", "retrying", "ended", "pruned"]


class SettleContract(Desk):
    async def test_an_empty_turn_changes_nothing(self, store: Store) -> None:
        """A turn that asks for nothing answers with nothing."""
        assert await store.turn(A) == Turned([], [], [], None)

    async def test_completed(self, store: Store, clock: ManualClock) -> None:
        """A completed task keeps its result and the time it ended, and runs nowhere."""
        (held,) = await start(store, a_record())
        at = tick(clock, 2)
        await settle(store, held, Move.completed(at=at, result='{"n":1}', note=Note.remark("done ü")))
        kept = await get(store, held)
        assert (kept.state, kept.result, kept.error) == (TaskState.COMPLETED, '{"n":1}', None)
        assert kept.note == Note.remark("done ü")
        assert (kept.finished_at, kept.updated_at, kept.started_at) == (at, at, held.record.started_at)
        assert (kept.token, kept.node, kept.attempt) == (None, None, 1)

    async def test_failed(self, store: Store, clock: ManualClock) -> None:
        """A failed task keeps its error whole, and its counts."""
        (held,) = await start(store, a_record())
        error = an_error(ErrorKind.SYSTEM, "died of ü", "WorkerDied", "Exception", pid=7, deep={"a": [1, None]})
        note = Note(NoteCode.QUARANTINED, facts={"crashes": 1})
        await settle(store, held, Move.failed(at=clock.now(), error=error, crashed=True, note=note))
        kept = await get(store, held)
        assert (kept.state, kept.error, kept.crashes, kept.note) == (TaskState.FAILED, error, 1, note)
        assert (kept.finished_at, kept.result) == (clock.now(), None)

    @pytest.mark.spec("QUE-13")
    async def test_retrying(self, store: Store, clock: ManualClock) -> None:
        """A task that will be tried again keeps its error, its count and when it is due."""
        (held,) = await start(store, a_record())
        error, due = an_error(), clock.now() + seconds(4)
        await settle(store, held, Move.retrying(at=clock.now(), due_at=due, error=error))
        kept = await get(store, held)
        assert (kept.state, kept.error, kept.due_at, kept.retries) == (TaskState.RETRYING, error, due, 1)
        assert (kept.token, kept.node, kept.finished_at) == (None, None, None)

    async def test_settles_are_answered_in_their_order(self, store: Store, clock: ManualClock) -> None:
        """Each settle is answered in its place, and a lost claim among them keeps no other from being written."""
        one, two, three = await start(store, a_record(), a_record(), a_record())
        await settle(store, two, Move.completed(at=clock.now()))
        done = Move.completed(at=clock.now())
        turned = await store.turn(A, settles=[(one, done), (two, done), (three, done)])
        assert turned.settled == [None, ClaimLost(two.uuid, two.token), None]
        assert [await state_of(store, one), await state_of(store, three)] == [TaskState.COMPLETED] * 2

    async def test_a_claim_is_spent_by_its_first_settle(self, store: Store, clock: ManualClock) -> None:
        """The second settle of one claim is lost, also within one turn, and the first stands."""
        (held,) = await start(store, a_record())
        failed = Move.failed(at=clock.now(), error=an_error())
        turned = await store.turn(A, settles=[(held, Move.completed(at=clock.now(), result="1")), (held, failed)])
        assert turned.settled == [None, ClaimLost(held.uuid, held.token)]
        kept = await get(store, held)
        assert (kept.state, kept.result) == (TaskState.COMPLETED, "1")

    @pytest.mark.parametrize("how", LOST)
    async def test_a_stale_claim_cannot_settle(self, store: Store, clock: ManualClock, how: str) -> None:
        """A run that lost its claim writes nothing, though its task may run again: the state alone cannot tell."""
        stale = await lose(store, clock, how)
        before = await everything(store), await store.count(), await store.list_attempts(stale.uuid)
        turned = await store.turn(A, settles=[(stale, Move.completed(at=clock.now(), result='"stale"'))])
        assert turned.settled == [ClaimLost(stale.uuid, stale.token)]
        assert (await everything(store), await store.count(), await store.list_attempts(stale.uuid)) == before

    async def test_the_same_attempt_with_another_token_is_another_claim(self, store: Store, clock: ManualClock) -> None:
        """A task given back runs again as the same attempt, and only the new token may settle it."""
        (stale,) = await start(store, a_record())
        await settle(store, stale, Move.given_back(at=clock.now()))
        (fresh,) = await claim(store, node=B)
        assert (fresh.attempt, fresh.uuid) == (stale.attempt, stale.uuid)
        turned = await store.turn(A, settles=[(stale, Move.completed(at=clock.now()))])
        assert turned.settled == [ClaimLost(stale.uuid, stale.token)]
        await settle(store, fresh, Move.completed(at=clock.now()), node=B)

    @pytest.mark.spec("QUE-01")
    async def test_an_illegal_move_is_refused_with_the_whole_turn(self, store: Store, clock: ManualClock) -> None:
        """A settle that the table of moves forbids raises, and nothing of its turn has happened."""
        one, two = await start(store, a_record(), a_record())
        await add(store, a_record())
        before, events = await everything(store), (await store.events(after=-1)).last
        illegal = Move(state=TaskState.SCHEDULED, at=clock.now(), due_at=clock.now())
        with pytest.raises(IllegalMove):
            await store.turn(
                A,
                settles=[(one, Move.completed(at=clock.now())), (two, illegal)],
                reports=[Report(two, Progress(0.5))],
                adds=[an_add(a_record())],
                demand=room(5),
            )
        assert await everything(store) == before
        assert (await store.events(after=-1)).last == events
        assert [await state_of(store, held) for held in (one, two)] == [TaskState.RUNNING] * 2
        await settle(store, two, Move.completed(at=clock.now()))

    # --- the order inside a turn --------------------------------------------------------------------------------------

    async def test_settles_come_before_reports(self, store: Store, clock: ManualClock) -> None:
        """A report that arrives with its run's own settle is too late."""
        (held,) = await start(store, a_record())
        done = Move.completed(at=clock.now())
        await store.turn(A, settles=[(held, done)], reports=[Report(held, Progress(0.9), note=Note.remark("late"))])
        kept = await get(store, held)
        assert (kept.progress, kept.note) == (None, None)

    async def test_settles_come_before_adds(self, store: Store, clock: ManualClock) -> None:
        """A slot that a settle frees can be taken in the same turn, and a run that settles has no children any more."""
        await add(store, a_record(dedupe_slot="s"), dedupe=Dedupe.REFUSE)
        (held,) = await claim(store)
        again, child = a_record(dedupe_slot="s"), a_record()
        turned = await store.turn(
            A,
            settles=[(held, Move.completed(at=clock.now()))],
            adds=[an_add(again, dedupe=Dedupe.REFUSE), an_add(child, parent=held)],
        )
        assert turned.added == [[Added(again.uuid)], ClaimLost(held.uuid, held.token)]

    async def test_settles_come_before_promotion_and_claims(self, store: Store, clock: ManualClock) -> None:
        """A task whose retry is due at once is started again in the turn that settles it."""
        (held,) = await start(store, a_record())
        retry = Move.retrying(at=clock.now(), due_at=clock.now(), error=an_error())
        turned = await store.turn(A, settles=[(held, retry)], demand=room(1))
        assert [(one.uuid, one.attempt) for one in turned.claims] == [(held.uuid, 2)]

    async def test_two_turns_of_one_node_at_the_same_time(self, store: Store, clock: ManualClock) -> None:
        """One settles while the other adds and claims: both happen, each as if it were alone."""
        claims = await start(store, *[a_record() for _ in range(50)])
        ends, rest = await asyncio.gather(
            store.turn(A, settles=[(one, Move.completed(at=clock.now())) for one in claims]),
            store.turn(A, adds=[an_add(*[a_record() for _ in range(50)])], demand=room(50)),
        )
        assert ends.settled == [None] * 50
        assert len(rest.claims) == 50
        assert await store.count() == {("default", TaskState.COMPLETED): 50, ("default", TaskState.RUNNING): 50}

    async def test_all_of_it_in_one_turn(self, store: Store, clock: ManualClock) -> None:
        """Settle, report, add, promote and claim happen in one turn, each seeing what came before it."""
        await store.set_queue(QueueSettings(name="default", concurrency=3))
        ending, going = await start(store, a_record(), a_record())
        await add(store, scheduled := a_record(due_at=clock.now() + seconds(1)))
        at = tick(clock, 1)
        child = a_record()
        turned = await store.turn(
            A,
            settles=[(ending, Move.completed(at=at))],
            reports=[Report(going, Progress(0.5))],
            adds=[an_add(child, parent=going)],
            demand=room(9),
        )
        assert (turned.settled, turned.added) == ([None], [[Added(child.uuid)]])
        assert uuids(turned.claims) == uuids([child, scheduled])  # the one added is older as queued
        assert turned.next_due is None
        assert (await get(store, going)).progress == Progress(0.5)

    # --- a device that was lost ---------------------------------------------------------------------------------------

    @pytest.mark.spec("QUE-23")
    async def test_a_task_whose_device_was_lost_goes_back_to_the_head(self, store: Store, clock: ManualClock) -> None:
        """It stands before all others, and counts a recovery and no retry; its attempt was interrupted, and says on
        which device and why."""
        task, other = a_record(), a_record()
        await add(store, task, other)
        record = await get(store, task)
        (held,) = await claim(store, Demand(1, {}, 1, only={record.id: "emu-1"}))
        at, error = tick(clock, 1), device_lost("emu-1")
        note = Note(NoteCode.DEVICE_LOST, facts={"device": "emu-1"})
        await settle(store, held, Move.taken_back(at=at, error=error, note=note))
        kept = await get(store, task)
        assert (kept.state, kept.note, kept.error, kept.device) == (TaskState.QUEUED, note, error, None)
        assert (kept.attempt, kept.recoveries, kept.retries, kept.crashes) == (1, 1, 0, 0)
        (run,) = await store.list_attempts(task.uuid)
        assert (run.state, run.device, run.error, run.finished_at) == (TaskState.INTERRUPTED, "emu-1", error, at)
        told = [event for event in (await store.events(after=0)).events if event.uuid == task.uuid][-1]
        assert (told.kind, told.before, told.code) == (EventKind.QUEUED, TaskState.RUNNING, "device_lost")
        first, second = await claim(store, 2)
        assert uuids([first, second]) == uuids([task, other])
        assert (first.attempt, first.record.recoveries, first.record.note) == (2, 1, None)
        await settle(store, first, Move.completed(at=clock.now()))
        assert (await get(store, task)).error is None

    # --- a cancel that comes late -------------------------------------------------------------------------------------

    @pytest.mark.spec("QUE-12")
    @pytest.mark.parametrize("move", ["given-back", "retrying", "device-lost"])
    async def test_a_late_cancel_is_not_lost(self, store: Store, clock: ManualClock, move: str) -> None:
        """A task that was asked to cancel does not run again, though its run ended before it could know."""
        (held,) = await start(store, a_record())
        await store.apply([held.uuid], Cancel("enough"), by="ann")
        asked_at = clock.now()
        clock.advance(1)
        moves = {
            "given-back": Move.given_back(at=clock.now()),
            "retrying": Move.retrying(at=clock.now(), due_at=clock.now(), error=an_error()),
            "device-lost": Move.taken_back(at=clock.now(), error=an_error(), note=Note(NoteCode.DEVICE_LOST)),
        }
        turned = await store.turn(A, settles=[(held, moves[move])], demand=room(9))
        assert (turned.settled, turned.claims) == ([None], [])
        kept = await get(store, held)
        assert (kept.state, kept.finished_at) == (TaskState.CANCELED, clock.now())
        assert kept.cancel == CancelRequest(asked_at, "ann", "enough")
        assert kept.note == Note(NoteCode.CANCELED_INSTEAD_OF_RETRY)
        assert kept.error == (None if move == "given-back" else an_error())
        assert [run.state for run in await store.list_attempts(held.uuid)] == [TaskState.CANCELED]

    @pytest.mark.spec("QUE-12")
    @pytest.mark.parametrize("reason", ["enough", ""])
    async def test_the_reason_of_a_cancel_is_kept(self, store: Store, clock: ManualClock, reason: str) -> None:
        """A run that was asked to cancel ends with the reason it was asked for, whatever was noted meanwhile."""
        (held,) = await start(store, a_record())
        await store.apply([held.uuid], Cancel(reason))
        asked = CancelRequest(clock.now(), reason=reason)
        assert (await get(store, held)).cancel == asked
        clock.advance(1)
        await store.turn(A, reports=[Report(held, note=Note.remark("cleaning up"))])
        how = ExecutionError(kind=ErrorKind.CANCELED, message="canceled while it was running")
        await settle(store, held, Move.canceled(at=clock.now(), error=how))
        kept = await get(store, held)
        assert (kept.state, kept.cancel, kept.error) == (TaskState.CANCELED, asked, None)
        assert kept.note == Note(NoteCode.STOPPED_BY_CANCEL, reason=how.message)
        (outcome,) = await store.outcomes([held.uuid])
        assert outcome == Outcome(held.uuid, TaskState.CANCELED, cancel=asked)
        assert outcome.cancel_text == reason

    @pytest.mark.spec("QUE-12")
    async def test_what_ended_before_the_cancel_keeps_its_end(self, store: Store, clock: ManualClock) -> None:
        """A run that completed or failed before it could be canceled keeps its end, and the task keeps the request."""
        done, failed = await start(store, a_record(), a_record())
        await store.apply([done.uuid, failed.uuid], Cancel("enough"), by="ann")
        asked = CancelRequest(clock.now(), "ann", "enough")
        clock.advance(1)
        await settle(store, done, Move.completed(at=clock.now(), result="1"))
        await settle(store, failed, Move.failed(at=clock.now(), error=an_error()))
        kept = await get(store, done)
        assert (kept.state, kept.result, kept.cancel, kept.note) == (TaskState.COMPLETED, "1", asked, None)
        kept = await get(store, failed)
        assert (kept.state, kept.error, kept.cancel, kept.note) == (TaskState.FAILED, an_error(), asked, None)
        assert await store.outcomes([done.uuid, failed.uuid]) == [
            Outcome(done.uuid, TaskState.COMPLETED, "1", cancel=asked),
            Outcome(failed.uuid, TaskState.FAILED, None, an_error(), asked),
        ]

    @pytest.mark.spec("QUE-12", "QUE-15")
    async def test_a_cancel_request_is_gone_when_the_task_is_sent_again(self, store: Store, clock: ManualClock) -> None:
        """A failed task that is sent again has no cancel request any more, before it starts and afterwards."""
        (held,) = await start(store, a_record())
        await store.apply([held.uuid], Cancel("enough"))
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        (applied,) = await store.apply([held.uuid], Retry())
        assert applied.record is not None
        assert (applied.record.cancel, (await get(store, held)).cancel) == (None, None)
        (again,) = await claim(store)
        assert again.record.cancel is None
        await settle(store, again, Move.completed(at=clock.now()))
        assert (await get(store, held)).cancel is None

    # --- reports ------------------------------------------------------------------------------------------------------

    async def test_a_run_reports_its_progress(self, store: Store, clock: ManualClock) -> None:
        """Progress and note of a report are kept, each only if it is given."""
        (held,) = await start(store, a_record())
        at = tick(clock, 1)
        progress = Progress(0.25, "a quarter", 12.5)
        turned = await store.turn(A, reports=[Report(held, progress)])
        assert turned == Turned([], [], [], None)
        kept = await get(store, held)
        assert (kept.progress, kept.note, kept.updated_at) == (progress, None, at)
        await store.turn(A, reports=[Report(held, note=Note.remark("by hand"))])
        kept = await get(store, held)
        assert (kept.progress, kept.note, kept.state) == (progress, Note.remark("by hand"), TaskState.RUNNING)

    async def test_a_reported_note_outlives_the_settle(self, store: Store, clock: ManualClock) -> None:
        """What a run noted of itself is kept when it ends without another note, whatever was noted before it ran."""
        (held,) = await start(store, a_record())
        retry = Move.retrying(at=clock.now(), due_at=clock.now(), error=an_error())
        await store.turn(A, reports=[Report(held, Progress(0.5), note=Note.remark("first run"))])
        turned = await store.turn(A, settles=[(held, retry)], demand=room(1))
        (again,) = turned.claims
        await store.turn(A, reports=[Report(again, Progress(0.7), note=Note.remark("second run"))])
        await settle(store, again, Move.completed(at=clock.now()))
        kept = await get(store, held)
        assert (kept.note, kept.progress) == (Note.remark("second run"), Progress(0.7))

    async def test_a_checkpoint_is_for_the_next_run(self, store: Store, clock: ManualClock) -> None:
        """What a run saved comes with the next claim of its task, whatever else is reported; the last one counts."""
        (held,) = await start(store, a_record())
        assert held.record.checkpoint is None
        await store.turn(A, reports=[Report(held, checkpoint="1"), Report(held, checkpoint="[2]"), Report(held)])
        await store.turn(A, reports=[Report(held, Progress(0.5), note=Note.remark("on"))])
        assert (await get(store, held)).checkpoint == "[2]"
        retry = Move.retrying(at=clock.now(), due_at=clock.now(), error=an_error())
        (again,) = (await store.turn(A, settles=[(held, retry)], demand=room(1))).claims
        assert again.record.checkpoint == "[2]"
        await store.turn(A, reports=[Report(again, checkpoint='{"n":3}')])
        await settle(store, again, Move.failed(at=clock.now(), error=an_error()))
        await store.apply([again.uuid], Retry())
        (sent_again,) = await claim(store)
        assert sent_again.record.checkpoint == '{"n":3}'

    async def test_a_checkpoint_survives_its_node(self, store: Store) -> None:
        """A task that is rescued from a dead node has what its run saved there."""
        (held,) = await start(store, a_record())
        await store.turn(A, reports=[Report(held, checkpoint="7")])
        await store.rescue(A)
        (again,) = await claim(store, node=B)
        assert (again.attempt, again.record.checkpoint) == (2, "7")

    async def test_a_completed_task_needs_no_checkpoint(self, store: Store, clock: ManualClock) -> None:
        """It never runs again: what was saved for that is forgotten."""
        (held,) = await start(store, a_record())
        await store.turn(A, reports=[Report(held, checkpoint="1")])
        await settle(store, held, Move.completed(at=clock.now()))
        assert (await get(store, held)).checkpoint is None

    async def test_the_last_report_of_a_turn_stands(self, store: Store) -> None:
        """Of several reports of one run in one turn the last one is seen."""
        (held,) = await start(store, a_record())
        await store.turn(A, reports=[Report(held, Progress(n / 4)) for n in range(4)])
        assert (await get(store, held)).progress == Progress(0.75)

    @pytest.mark.parametrize("how", LOST)
    async def test_a_stale_report_changes_nothing(self, store: Store, clock: ManualClock, how: str) -> None:
        """A report of a run that lost its claim is dropped without an error."""
        stale = await lose(store, clock, how)
        before, events = await everything(store), (await store.events(after=-1)).last
        turned = await store.turn(A, reports=[Report(stale, Progress(0.5), note=Note.remark("stale"), checkpoint="0")])
        assert turned.settled == []
        assert await everything(store) == before
        assert (await store.events(after=-1)).last == events
