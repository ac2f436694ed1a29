"""What a person asks of tasks that wait: hold, release, skip, start now, move, reschedule; of one or of many."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.errors import CommandRefused
from taskyard.model.command import (
    Cancel,
    Command,
    Hold,
    MoveAfter,
    MoveBefore,
    Release,
    Reschedule,
    Retry,
    SetPriority,
    Skip,
    StartNow,
)
from taskyard.model.event import EventKind
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.move import Move
from taskyard.model.notes import AuditStamp, CancelRequest, Fact, Note, NoteCode
from taskyard.model.order import Priority
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import Outcome, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Signals, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_error, room, seconds
from taskyard.testing.store_contract.desk import A, B, Desk, add, claim, get, settle, start, state_of, tick, uuids

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW
S, K = TaskState, EventKind


async def ask(store: Store, task: TaskRecord | Any, command: Command, *, by: str = "") -> TaskRecord:
    """Ask it of one task, which must fit; the answer is what is stored."""
    (applied,) = await store.apply([task.uuid], command, by=by)
    assert applied.record is not None, applied.refused
    assert applied.record == await get(store, task)
    return applied.record


class AskingContract(Desk):
    # --- hold and release ---------------------------------------------------------------------------------------------

    @pytest.mark.spec("QUE-17", "QUE-30")
    async def test_a_held_task_does_not_start_and_keeps_its_place(self, store: Store, clock: ManualClock) -> None:
        """Held, it lets others pass; released, it stands where it stood. Who held it, and why, is noted."""
        tasks = [a_record() for _ in range(3)]
        await add(store, *tasks)
        held = await ask(store, tasks[0], Hold("cold"), by="ann")
        assert (held.state, held.hold, held.note) == (S.PAUSED, AuditStamp("ann", clock.now(), "cold"), None)
        assert uuids(await claim(store, 1)) == [tasks[1].uuid]
        released = await ask(store, tasks[0], Release(), by="bob")
        assert (released.state, released.position, released.hold) == (S.QUEUED, held.position, None)
        assert released.note == Note(NoteCode.RELEASED, "bob", at=clock.now())
        assert uuids(await claim(store, 9)) == uuids([tasks[0], tasks[2]])

    @pytest.mark.spec("QUE-17")
    async def test_who_holds_a_task_is_kept_while_it_is_held(self, store: Store, clock: ManualClock) -> None:
        """Other commands leave the hold as it is; whatever ends it, nobody holds the task any more."""
        tasks = [a_record() for _ in range(4)]
        await add(store, *tasks)
        hold = AuditStamp("ann", clock.now(), "cold")
        for task in tasks:
            await ask(store, task, Hold("cold"), by="ann")
        clock.advance(1)
        changed = await ask(store, tasks[0], SetPriority(LOW), by="bob")
        facts: dict[str, Fact] = {"priority": "low"}
        assert (changed.hold, changed.note) == (hold, Note(NoteCode.PRIORITY_CHANGED, "bob", "", clock.now(), facts))
        assert (await ask(store, tasks[0], Reschedule(clock.now() + seconds(9)), by="eve")).hold == hold
        ends: list[Command] = [Release(), StartNow(), Skip(), Cancel()]
        for task, command in zip(tasks, ends, strict=True):
            assert (await ask(store, task, command)).hold is None

    @pytest.mark.spec("QUE-17")
    async def test_a_released_task_goes_where_it_belongs_now(self, store: Store, clock: ManualClock) -> None:
        """One that is due later waits for that, one in backoff for its retry, and what is due by now stands in line."""
        (running,) = await start(store, a_record())
        retry = Move.retrying(at=clock.now(), due_at=clock.now() + seconds(9), error=an_error())
        await settle(store, running, retry)
        scheduled, soon = (a_record(due_at=clock.now() + seconds(s)) for s in (60, 1))
        await add(store, scheduled, soon)
        for task in (running, scheduled, soon):
            await ask(store, task, Hold())
        clock.advance(2)
        turned = await store.turn(A, demand=room(9))
        assert (turned.claims, turned.next_due) == ([], None)
        assert [(await ask(store, task, Release())).state for task in (running, scheduled, soon)] == [
            S.RETRYING,
            S.SCHEDULED,
            S.QUEUED,
        ]
        turned = await store.turn(A, demand=room(9))
        assert (uuids(turned.claims), turned.next_due) == ([soon.uuid], running.record.due_at + seconds(9))

    async def test_a_held_task_does_not_hold_its_key(self, store: Store, clock: ManualClock) -> None:
        """Held while it waits for its retry, it lets the next of its key start; released, it waits for that one."""
        await add(store, a_record(key="k"), second := a_record(key="k"))
        (first,) = await claim(store, 9)
        retry = Move.retrying(at=clock.now(), due_at=clock.now() + seconds(1), error=an_error())
        await settle(store, first, retry)
        await ask(store, first, Hold())
        (held,) = await claim(store, 9)
        assert held.uuid == second.uuid
        clock.advance(2)
        assert (await ask(store, first, Release())).is_parked
        turned = await store.turn(A, settles=[(held, Move.completed(at=clock.now()))], demand=room(9))
        assert uuids(turned.claims) == [first.uuid]

    @pytest.mark.spec("QUE-30", "DEV-03")
    async def test_a_held_head_holds_up_a_strict_queue(self, store: Store) -> None:
        """In a strict queue nobody passes it; in buckets it holds up its own."""
        await store.set_queue(QueueSettings(name="default", order=QueueOrder.FIFO))
        tasks = [a_record(bucket=name) for name in "aab"]
        await add(store, *tasks)
        await ask(store, tasks[0], Hold())
        assert await claim(store, 9) == []
        await store.set_queue(QueueSettings(name="default", order=QueueOrder.BUCKETS))
        assert uuids(await claim(store, 9)) == [tasks[2].uuid]
        await ask(store, tasks[0], Release())
        assert uuids(await claim(store, 9)) == uuids(tasks[:2])

    # --- skip ---------------------------------------------------------------------------------------------------------

    @pytest.mark.spec("QUE-16")
    async def test_a_skipped_task_is_over(self, store: Store, clock: ManualClock) -> None:
        """It ends as skipped, frees its slot and its key, and the others are untouched; what runs cannot be skipped."""
        await add(store, *(a_record(key="k") for _ in range(2)), other := a_record())
        first, second = [task for task in await store.list_tasks() if task.key][::-1]
        at = tick(clock, 1)
        skipped = await ask(store, first, Skip("old"), by="ann")
        assert (skipped.state, skipped.finished_at) == (S.SKIPPED, at)
        assert skipped.note == Note(NoteCode.SKIPPED, "ann", "old", at)
        held = await claim(store, 9)
        assert uuids(held) == uuids([second, other])
        (refused,) = await store.apply([held[0].uuid], Skip())
        assert isinstance(refused.refused, CommandRefused)
        assert await store.count() == {("default", S.SKIPPED): 1, ("default", S.RUNNING): 2}

    # --- start now ----------------------------------------------------------------------------------------------------

    @pytest.mark.spec("QUE-06")
    async def test_start_now_puts_a_task_at_the_head(self, store: Store) -> None:
        """To the head of its priority, or of the high ones; the last one asked goes first, and nothing is preempted."""
        high, *tasks = [a_record(priority=p) for p in (HIGH, NORMAL, NORMAL, NORMAL, LOW)]
        await add(store, high, *tasks)
        await ask(store, tasks[1], StartNow())
        await ask(store, tasks[2], StartNow())
        raised = await ask(store, tasks[3], StartNow(urgent=True))
        assert raised.priority == HIGH
        assert uuids(await claim(store, 9)) == uuids([tasks[3], high, tasks[2], tasks[1], tasks[0]])

    @pytest.mark.spec("QUE-06")
    @pytest.mark.parametrize("order", QueueOrder)
    async def test_what_waits_for_its_time_can_start_now(
        self, store: Store, clock: ManualClock, order: QueueOrder
    ) -> None:
        """Scheduled, in backoff or held: it is due now, and first, in queues of whatever order."""
        await store.set_queue(QueueSettings(name="default", order=order))
        (backoff,) = await start(store, a_record())
        retry = Move.retrying(at=clock.now(), due_at=clock.now() + seconds(9), error=an_error())
        await settle(store, backoff, retry)
        await add(store, waiting := a_record(), held := a_record(), later := a_record(due_at=clock.now() + seconds(60)))
        await ask(store, held, Hold())
        for task in (later, held, backoff):
            assert (await ask(store, task, StartNow())).due_at == clock.now()
        turned = await store.turn(A, demand=room(9))
        assert (uuids(turned.claims), turned.next_due) == (uuids([backoff, held, later, waiting]), None)

    # --- moving -------------------------------------------------------------------------------------------------------

    @pytest.mark.spec("QUE-07")
    async def test_a_task_is_put_before_or_after_another(self, store: Store) -> None:
        """Right before or right after it, whatever their sources, also beside one that is held; others stay."""
        tasks = [a_record(consumer=s) for s in ("a", "b", "a", "b", "a")]
        await add(store, *tasks)
        await ask(store, tasks[2], Hold())
        moved = await ask(store, tasks[4], MoveBefore(tasks[0].uuid))
        assert (moved.state, moved.priority) == (S.QUEUED, NORMAL)
        await ask(store, tasks[0], MoveAfter(tasks[2].uuid))
        await ask(store, tasks[3], MoveBefore(tasks[2].uuid))
        await ask(store, tasks[2], Release())
        assert uuids(await claim(store, 9)) == [tasks[i].uuid for i in (4, 1, 3, 2, 0)]

    @pytest.mark.spec("QUE-07")
    @pytest.mark.parametrize("order", QueueOrder)
    async def test_many_moves_to_one_spot_keep_the_order(self, store: Store, order: QueueOrder) -> None:
        """A hundred and more put before the same one, one after the other, stand in that order."""
        await store.set_queue(QueueSettings(name="default", order=order))
        first, last, *rest = [a_record(key=f"k{n}" if n % 3 == 0 else None) for n in range(260)]
        await add(store, first, *rest, last)
        applied = await store.apply(uuids(rest), MoveBefore(last.uuid))
        assert all(one.record is not None for one in applied)
        await store.apply(uuids(rest[:100]), MoveAfter(first.uuid))
        expected = [first, *rest[99::-1], *rest[100:], last]
        assert uuids(await claim(store, 999)) == uuids(expected)

    @pytest.mark.spec("QUE-07")
    @pytest.mark.parametrize("leave", [Cancel(), StartNow()], ids=["ends", "goes"])
    async def test_a_place_is_free_when_its_task_has_left_it(self, store: Store, leave: Command) -> None:
        """Who is put where another one stood until it ended, or went elsewhere, gets the very same place."""
        await add(store, first := a_record(), one := a_record(), other := a_record())
        left = (await ask(store, one, MoveAfter(first.uuid))).position
        await ask(store, one, leave)
        assert (await ask(store, other, MoveAfter(first.uuid))).position == left

    @pytest.mark.spec("QUE-07")
    async def test_a_moved_task_keeps_its_place_through_its_runs(self, store: Store, clock: ManualClock) -> None:
        """Given back or tried again, it stands where it was put, though others were put there since."""
        tasks = [a_record() for _ in range(4)]
        await add(store, *tasks)
        await ask(store, tasks[3], MoveBefore(tasks[1].uuid))
        _, held = await claim(store, 2)
        assert held.uuid == tasks[3].uuid
        crowd = [a_record() for _ in range(220)]
        await add(store, *crowd)
        await store.apply(uuids(crowd), MoveBefore(tasks[1].uuid))
        await settle(store, held, Move.given_back(at=clock.now()))
        assert uuids(await claim(store, 999)) == uuids([held, *crowd, tasks[1], tasks[2]])

    @pytest.mark.spec("QUE-07")
    async def test_a_place_that_was_left_belongs_to_nobody(self, store: Store, clock: ManualClock) -> None:
        """A task that was moved, rescheduled and came due stands at the end, whatever is moved to its old place."""
        tasks = [a_record() for _ in range(3)]
        await add(store, *tasks)
        await ask(store, tasks[2], MoveBefore(tasks[1].uuid))
        await ask(store, tasks[2], Reschedule(clock.now() + seconds(1)))
        tick(clock, 2)
        await store.turn(A)
        crowd = [a_record() for _ in range(220)]
        await add(store, *crowd)
        await store.apply(uuids(crowd), MoveBefore(tasks[1].uuid))
        assert uuids(await claim(store, 999)) == uuids([tasks[0], *crowd, tasks[1], tasks[2]])

    @pytest.mark.spec("QUE-07")
    async def test_a_move_that_makes_no_sense_is_refused(self, store: Store) -> None:
        """Beside one of another queue or priority, one that runs, one that is unknown, or itself: nothing changes."""
        task, other, queue = a_record(), a_record(priority=LOW), a_record(queue="cpu")
        (running,) = await start(store, a_record())
        await add(store, task, other, queue)
        before = await get(store, task)
        for beside in (other, queue, running, task, a_record()):
            (applied,) = await store.apply([task.uuid], MoveBefore(beside.uuid))
            assert isinstance(applied.refused, CommandRefused)
            assert "task" in str(applied.refused) or "itself" in str(applied.refused)
        assert await get(store, task) == before

    async def test_a_moved_task_may_change_its_priority(self, store: Store) -> None:
        """Its place is nobody else's, in its queue: among those of another priority it has its turn by that."""
        tasks = [a_record(priority=p) for p in (NORMAL, HIGH, NORMAL, HIGH, NORMAL)]
        await add(store, *tasks)
        await ask(store, tasks[4], MoveBefore(tasks[2].uuid))
        await ask(store, tasks[4], SetPriority(HIGH))
        assert uuids(await claim(store, 9)) == [tasks[i].uuid for i in (1, 4, 3, 0, 2)]

    async def test_a_move_changes_the_order_of_a_key(self, store: Store) -> None:
        """Of those waiting for a key, the one that is put first may start."""
        tasks = [a_record(key="k") for _ in range(3)]
        await add(store, *tasks)
        assert not (await ask(store, tasks[2], MoveBefore(tasks[0].uuid))).is_parked
        assert uuids(await claim(store, 9)) == [tasks[2].uuid]

    # --- another time -------------------------------------------------------------------------------------------------

    async def test_a_task_is_rescheduled(self, store: Store, clock: ManualClock) -> None:
        """Later, and it leaves the line until then; earlier, and it is due then; what runs has its time behind it."""
        (running,) = await start(store, a_record())
        now = clock.now()
        await add(store, task := a_record(), scheduled := a_record(due_at=now + seconds(60)))
        later = await ask(store, task, Reschedule(now + seconds(30)))
        assert (later.state, later.due_at) == (S.SCHEDULED, now + seconds(30))
        turned = await store.turn(A, demand=room(9))
        assert (turned.claims, turned.next_due) == ([], now + seconds(30))
        await ask(store, scheduled, Reschedule(now + seconds(5)))
        assert (await store.turn(A)).next_due == now + seconds(5)
        clock.advance(5)
        assert uuids(await claim(store, 9)) == [scheduled.uuid]
        await ask(store, task, Reschedule(now))
        assert uuids(await claim(store, 9)) == [task.uuid]
        (applied,) = await store.apply([running.uuid], Reschedule(now))
        assert isinstance(applied.refused, CommandRefused)

    async def test_a_retry_is_put_off_or_brought_forward(self, store: Store, clock: ManualClock) -> None:
        """A task in backoff stays in it until the new time."""
        (held,) = await start(store, a_record())
        retry = Move.retrying(at=clock.now(), due_at=clock.now() + seconds(60), error=an_error())
        await settle(store, held, retry)
        assert (await ask(store, held, Reschedule(clock.now() + seconds(1)))).state is S.RETRYING
        clock.advance(1)
        assert [(one.uuid, one.attempt) for one in await claim(store, 9)] == [(held.uuid, 2)]

    # --- force, events ------------------------------------------------------------------------------------------------

    @pytest.mark.spec("QUE-12")
    async def test_a_cancel_by_force_is_signaled_as_such(self, store: Store, clock: ManualClock) -> None:
        """The node hears which of its runs are to be killed, also when a cancel was asked before; a new run is not."""
        one, two = await start(store, a_record(), a_record())
        await store.apply([one.uuid, two.uuid], Cancel())
        forced = CancelRequest(clock.now(), is_forced=True)
        clock.advance(1)
        assert (await ask(store, two, Cancel(force=True))).cancel == forced
        assert await store.signals(A) == Signals([one.uuid, two.uuid], forced=(two.uuid,))
        await settle(store, two, Move.failed(at=clock.now(), error=an_error()))
        assert (await get(store, two)).cancel == forced
        await ask(store, two, Retry())
        (again,) = await claim(store, node=B)
        assert (again.uuid, again.record.cancel, await store.signals(B)) == (two.uuid, None, Signals([]))

    @pytest.mark.spec("QUE-12")
    async def test_who_canceled_by_force_is_kept_with_the_warning(self, store: Store, clock: ManualClock) -> None:
        """Asked first and killed then, a task says to the end who did that, and that its output may be damaged."""
        killed, asked, again = await start(store, a_record(), a_record(), a_record())
        await store.apply([killed.uuid, asked.uuid, again.uuid], Cancel("late"), by="ann")
        at = clock.now()
        clock.advance(1)
        await ask(store, killed, Cancel(force=True), by="bob")
        how = ExecutionError(kind=ErrorKind.CANCELED, message="killed")
        await settle(store, killed, Move.canceled(at=clock.now(), error=how))
        await settle(store, asked, Move.canceled(at=clock.now(), error=how))
        await settle(store, again, Move.given_back(at=clock.now(), note=Note(NoteCode.RETURNED, reason="no room")))
        by_ann, by_bob = CancelRequest(at, "ann", "late"), CancelRequest(at, "bob", "late", is_forced=True)
        stopped = Note(NoteCode.STOPPED_BY_CANCEL, reason="killed")
        kept = [await get(store, one) for one in (killed, asked, again)]
        assert [(one.cancel, one.note) for one in kept] == [
            (by_bob, stopped),
            (by_ann, stopped),
            (by_ann, Note(NoteCode.CANCELED_INSTEAD_OF_RETRY)),
        ]
        assert "may be damaged" in kept[0].remarks
        (outcome,) = await store.outcomes([killed.uuid])
        assert outcome == Outcome(killed.uuid, S.CANCELED, cancel=by_bob)
        assert outcome.cancel_text == "late"

    async def test_who_moved_a_task_is_kept(self, store: Store, clock: ManualClock) -> None:
        """What leaves a task in its state is noted with who asked as well."""
        first, second, later = a_record(), a_record(), a_record(due_at=clock.now() + seconds(60))
        await add(store, first, second, later)
        asked: list[tuple[TaskRecord, Command, NoteCode, dict[str, Fact]]] = [
            (second, MoveBefore(first.uuid), NoteCode.MOVED, {}),
            (second, StartNow(), NoteCode.START_REQUESTED, {}),
            (first, SetPriority(LOW), NoteCode.PRIORITY_CHANGED, {"priority": "low"}),
            (later, Reschedule(clock.now() + seconds(9)), NoteCode.RESCHEDULED, {}),
        ]
        for task, command, code, facts in asked:
            note = Note(code, "ann", at=tick(clock, 1), facts=facts)
            assert (await ask(store, task, command, by="ann")).note == note
            assert (await ask(store, task, SetPriority(LOW))).note == note

    @pytest.mark.spec("QUE-29")
    async def test_what_is_asked_is_told(self, store: Store, clock: ManualClock) -> None:
        """Every command leaves one event of its task, named after what happened to it."""
        await add(store, task := a_record(), other := a_record())
        last = (await store.events(after=-1)).last
        due = Reschedule(clock.now() + seconds(9))
        commands: list[Command] = [
            Hold(),
            Release(),
            MoveAfter(other.uuid),
            StartNow(),
            SetPriority(LOW),
            due,
            due,
            StartNow(),
            Skip(),
        ]
        for command in commands:
            await ask(store, task, command)
        assert [event.kind for event in (await store.events(after=last)).events] == [
            K.PAUSED, K.QUEUED, K.REORDERED, K.REORDERED, K.PRIORITY_CHANGED, K.SCHEDULED, K.RESCHEDULED, K.QUEUED,
            K.SKIPPED,
        ]  # fmt: skip

    async def test_a_task_that_is_named_twice(self, store: Store, clock: ManualClock) -> None:
        """What was said of it the first time stays, and it is counted once, where it is now."""
        (running,) = await start(store, a_record())
        await store.apply([running.uuid] * 2, Cancel("cold", force=True), by="ann")
        assert (await get(store, running)).cancel == CancelRequest(clock.now(), "ann", "cold", is_forced=True)
        await add(store, task := a_record(due_at=clock.now() + seconds(9)))
        await store.apply([task.uuid] * 2, StartNow())
        assert await store.count() == {(task.queue, S.RUNNING): 1, (task.queue, S.QUEUED): 1}

    async def test_the_events_of_a_task_that_is_named_twice(self, store: Store, clock: ManualClock) -> None:
        """They come in the order in which it changed, whatever else is changed in the same way before it."""
        await add(store, waiting := a_record(), late := a_record(due_at=clock.now() + seconds(9)))
        last = (await store.events(after=-1)).last
        await store.apply([waiting.uuid, late.uuid, late.uuid], StartNow())
        events = [event.kind for event in (await store.events(after=last)).events if event.uuid == late.uuid]
        assert events == [K.QUEUED, K.REORDERED]

    # --- all that match -----------------------------------------------------------------------------------------------

    async def test_only_those_that_were_meant_are_asked(self, store: Store) -> None:
        """A task that is no longer as it was when it was chosen is refused, with the state it has, and left alone."""
        await add(store, *(tasks := [a_record() for _ in range(3)]))
        (running,) = await claim(store)
        where = TaskFilter(states=(S.QUEUED,))
        applied = await store.apply(uuids(tasks), Cancel(), where=where)
        assert isinstance(applied[0].refused, CommandRefused)
        assert applied[0].refused.state == S.RUNNING
        assert (await get(store, running)).cancel is None
        assert [await state_of(store, task) for task in tasks[1:]] == [S.CANCELED] * 2

    async def test_tasks_are_chosen_by_a_filter(self, store: Store, clock: ManualClock) -> None:
        """By state, queue, source, key, node, class of error, id, and the times they were made and ended, together."""
        early = clock.now()
        plan: list[dict[str, Any]] = [{"queue": "cpu"}, {"consumer": "shrink"}, {"key": "k"}, {}, {}]
        tasks = [a_record(**fields) for fields in plan]
        await add(store, *tasks[:3])
        failing = await claim(store, 3)
        at = tick(clock, 10)
        await settle(store, failing[1], Move.failed(at=at, error=an_error()))
        late = [a_record(at=at, uuid=task.uuid) for task in tasks[3:]]
        await add(store, *late)
        for where, expected in (
            (TaskFilter(), [4, 3, 2, 1, 0]),
            (TaskFilter(queue="cpu"), [0]),
            (TaskFilter(consumer="shrink"), [1]),
            (TaskFilter(key="k"), [2]),
            (TaskFilter(node=A), [2, 0]),
            (TaskFilter(node="another"), []),
            (TaskFilter(error="OSError"), [1]),
            (TaskFilter(error="Exception"), [1]),
            (TaskFilter(error="OS"), []),
            (TaskFilter(uuid=tasks[3].uuid[-12:]), [3]),
            (TaskFilter(uuid=tasks[4].uuid), [4]),
            (TaskFilter(created_after=at), [4, 3]),
            (TaskFilter(created_before=at), [2, 1, 0]),
            (TaskFilter(created_after=early, created_before=at, queue="default"), [2, 1]),
            (TaskFilter(finished_after=at), [1]),
            (TaskFilter(finished_before=at), []),
            (TaskFilter(states=(S.QUEUED, S.FAILED)), [4, 3, 1]),
            (TaskFilter(states=(S.FAILED,), error="OSError", consumer="shrink"), [1]),
        ):
            assert uuids(await store.list_tasks(where)) == [tasks[n].uuid for n in expected], where
            assert [uuid for _, uuid in await store.list_ids(where)] == [tasks[n].uuid for n in expected], where
            for task in await store.list_tasks():
                assert where.matches(task) == (task.uuid in {tasks[n].uuid for n in expected})
        page = await store.list_ids(limit=2)
        assert [uuid for _, uuid in await store.list_ids(before_id=page[-1][0])] == [tasks[n].uuid for n in (2, 1, 0)]
