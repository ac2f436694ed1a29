"""What events say beyond their kind, and the fields of a task that people use to find it."""

from __future__ import annotations

import pytest

from taskyard.model.command import Cancel, Hold, Release, Retry, SetPriority
from taskyard.model.event import Event, EventKind
from taskyard.model.execution import Progress
from taskyard.model.move import Move
from taskyard.model.notes import Note, NoteCode
from taskyard.model.order import Priority
from taskyard.model.queue import Pause, SetConcurrency
from taskyard.model.state import TaskState as S
from taskyard.model.task import Dedupe, OnFailure, TaskExtra
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Add, Report, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_error, seconds
from taskyard.testing.store_contract.desk import A, Desk, add, claim, get, settle, start, uuids

Told = tuple[EventKind, S | None, S | None, str, str]


async def told(store: Store, after: int = 0) -> list[Told]:
    page = await store.events(after=after)
    return [_told(event) for event in page.events]


def _told(event: Event) -> Told:
    return event.kind, event.before, event.after, event.actor, event.code


class DetailContract(Desk):
    @pytest.mark.spec("QUE-29")
    async def test_a_move_tells_the_states_before_and_after(self, store: Store, clock: ManualClock) -> None:
        """Every move says which state the task left and which it entered, and a failure the class of its error."""
        await add(store, a_record(due_at=clock.now() + seconds(1)))
        clock.advance(1)
        (held,) = await claim(store)
        await settle(store, held, Move.retrying(at=clock.now(), due_at=clock.now() + seconds(1), error=an_error()))
        clock.advance(1)
        (held,) = await claim(store)
        await settle(store, held, Move.given_back(at=clock.now(), note=Note(NoteCode.NODE_STOPPED)))
        (held,) = await claim(store)
        await settle(store, held, Move.completed(at=clock.now()))
        assert await told(store) == [
            (EventKind.SUBMITTED, S.CREATED, S.SCHEDULED, "", ""),
            (EventKind.QUEUED, S.SCHEDULED, S.QUEUED, "", ""),
            (EventKind.STARTED, S.QUEUED, S.RUNNING, "", ""),
            (EventKind.RETRYING, S.RUNNING, S.RETRYING, "", "OSError"),
            (EventKind.QUEUED, S.RETRYING, S.QUEUED, "", ""),
            (EventKind.STARTED, S.QUEUED, S.RUNNING, "", ""),
            (EventKind.QUEUED, S.RUNNING, S.QUEUED, "", "node_stopped"),
            (EventKind.STARTED, S.QUEUED, S.RUNNING, "", ""),
            (EventKind.COMPLETED, S.RUNNING, S.COMPLETED, "", ""),
        ]

    @pytest.mark.spec("QUE-29")
    async def test_a_command_tells_who_asked(self, store: Store, clock: ManualClock) -> None:
        """The event of a command names its actor, and the code of a cancel."""
        await add(store, task := a_record())
        after = (await store.events(after=-1)).last
        await store.apply([task.uuid], SetPriority(Priority.HIGH), by="ann")
        await store.apply([task.uuid], Hold("later"), by="bob")
        await store.apply([task.uuid], Release(), by="cid")
        (held,) = await claim(store)
        await store.apply([task.uuid], Cancel("enough"), by="dan")
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        await store.apply([task.uuid], Retry(), by="eve")
        await store.apply([task.uuid], Cancel(), by="fay")
        assert await told(store, after) == [
            (EventKind.PRIORITY_CHANGED, S.QUEUED, S.QUEUED, "ann", ""),
            (EventKind.PAUSED, S.QUEUED, S.PAUSED, "bob", ""),
            (EventKind.QUEUED, S.PAUSED, S.QUEUED, "cid", "released"),
            (EventKind.STARTED, S.QUEUED, S.RUNNING, "", ""),
            (EventKind.CANCEL_REQUESTED, S.RUNNING, S.RUNNING, "dan", "requested"),
            (EventKind.FAILED, S.RUNNING, S.FAILED, "", "OSError"),
            (EventKind.QUEUED, S.FAILED, S.QUEUED, "eve", "retried"),
            (EventKind.CANCELED, S.QUEUED, S.CANCELED, "fay", "requested"),
        ]

    @pytest.mark.spec("QUE-29")
    async def test_a_submit_tells_the_first_state_and_who_submitted(self, store: Store, clock: ManualClock) -> None:
        """A task that waits for another is told as blocked, one that is due later as scheduled."""
        ann = TaskExtra(submitted_by="ann")
        later = clock.now() + seconds(9)
        (held,) = await start(store, a_record())
        last = (await store.events(after=-1)).last
        await add(store, a_record(extra=ann), a_record())
        await add(store, a_record(extra=ann, due_at=later), a_record(extra=TaskExtra(title="no name"), queue="cpu"))
        child = a_record(extra=ann, on_failure=OnFailure.FAIL)
        await store.turn(A, adds=[Add((child, a_record()), after={child.uuid: [held.uuid]})])
        assert await told(store, last) == [
            (EventKind.SUBMITTED, S.CREATED, S.QUEUED, "ann", ""),
            (EventKind.SUBMITTED, S.CREATED, S.QUEUED, "", ""),
            (EventKind.SUBMITTED, S.CREATED, S.SCHEDULED, "ann", ""),
            (EventKind.SUBMITTED, S.CREATED, S.QUEUED, "", ""),
            (EventKind.SUBMITTED, S.CREATED, S.BLOCKED, "ann", ""),
            (EventKind.SUBMITTED, S.CREATED, S.QUEUED, "", ""),
        ]

    async def test_a_cancel_request_replaces_the_note(self, store: Store) -> None:
        """A waiting task that is canceled keeps the request, and no note of what was done to it before."""
        await add(store, task := a_record())
        await store.apply([task.uuid], SetPriority(Priority.HIGH), by="ann")
        await store.apply([task.uuid], Cancel("enough"), by="bob")
        kept = await get(store, task)
        assert kept.cancel is not None
        assert (kept.cancel.actor, kept.cancel.reason, kept.note) == ("bob", "enough", None)

    async def test_a_queue_command_tells_who_asked(self, store: Store) -> None:
        """The event of a queue that was paused, or got another limit, names its actor."""
        await store.control("cpu", Pause("backup"), by="ann")
        await store.control("cpu", SetConcurrency(2), by="bob")
        assert await told(store) == [
            (EventKind.QUEUE_PAUSED, None, None, "ann", ""),
            (EventKind.QUEUE_CHANGED, None, None, "bob", ""),
        ]

    @pytest.mark.spec("QUE-25")
    async def test_progress_is_told_with_its_values(self, store: Store) -> None:
        """A progress event carries the progress that was reported."""
        (held,) = await start(store, a_record())
        after = (await store.events(after=-1)).last
        await store.turn(A, reports=[Report(held, Progress(0.5, "second pass", 51.0))])
        (event,) = (await store.events(after=after)).events
        assert (event.progress, event.before) == (Progress(0.5, "second pass", 51.0), S.RUNNING)

    async def test_a_rescue_tells_that_the_node_died(self, store: Store) -> None:
        """A task that is taken back from a dead node says so in its events."""
        await start(store, a_record())
        after = (await store.events(after=-1)).last
        await store.rescue(A)
        assert await told(store, after) == [
            (EventKind.INTERRUPTED, S.RUNNING, S.INTERRUPTED, "", "node_died"),
            (EventKind.QUEUED, S.INTERRUPTED, S.QUEUED, "", ""),
        ]

    @pytest.mark.spec("QUE-31")
    async def test_title_and_labels_are_kept(self, store: Store, clock: ManualClock) -> None:
        """Title and labels stay with a task from its submit to its end, and come with its claim."""
        extra = TaskExtra(title="Holiday video", labels={"customer": "42", "region": "eu"})
        await add(store, task := a_record(extra=extra), plain := a_record())
        assert (await get(store, task)).extra == extra
        held, other = await claim(store, 2)
        assert (held.record.title, held.record.labels) == ("Holiday video", {"customer": "42", "region": "eu"})
        assert (other.uuid, other.record.extra) == (plain.uuid, None)
        await settle(store, held, Move.completed(at=clock.now()))
        assert (await get(store, task)).extra == extra

    @pytest.mark.spec("QUE-31")
    async def test_labels_are_filtered_by(self, store: Store, clock: ManualClock) -> None:
        """A filter finds the tasks that have all of its labels, newest first and page by page, finished or not."""
        labels = [{"customer": "42"}, {"customer": "42", "region": "eu"}, {"customer": "43"}, {}]
        tasks = [a_record(extra=TaskExtra(labels=some)) for some in labels]
        await add(store, *tasks)
        (held,) = await claim(store)
        await settle(store, held, Move.completed(at=clock.now()))
        where = TaskFilter(labels={"customer": "42"})
        assert uuids(await store.list_tasks(where)) == [tasks[1].uuid, tasks[0].uuid]
        (first,) = await store.list_tasks(where, limit=1)
        assert uuids(await store.list_tasks(where, before_id=first.id)) == [tasks[0].uuid]
        both = TaskFilter(labels={"region": "eu", "customer": "42"})
        assert [uuid for _, uuid in await store.list_ids(both)] == [tasks[1].uuid]
        waiting = TaskFilter(labels={"customer": "42"}, states=(S.QUEUED,))
        assert uuids(await store.list_tasks(waiting)) == [tasks[1].uuid]
        assert await store.list_tasks(TaskFilter(labels={"customer": "4"})) == []

    @pytest.mark.spec("QUE-31")
    async def test_labels_go_with_their_task(self, store: Store, clock: ManualClock) -> None:
        """A pruned task is found by its labels no longer."""
        (held,) = await start(store, a_record(extra=TaskExtra(labels={"customer": "42"})))
        await settle(store, held, Move.completed(at=clock.now()))
        assert await store.prune(finished_before=clock.now() + seconds(1)) in (0, 1)
        clock.advance(3600)
        await store.prune(finished_before=clock.now())
        assert await store.list_tasks(TaskFilter(labels={"customer": "42"})) == []

    async def test_labels_come_with_every_way_to_submit(self, store: Store) -> None:
        """Tasks that merge, wait for others or carry a key are found by their labels as well."""
        extra = TaskExtra(labels={"customer": "42"})
        first, second, third = (
            a_record(extra=extra, key="k"),
            a_record(extra=extra, dedupe_slot="s"),
            a_record(extra=extra),
        )
        third.on_failure = OnFailure.FAIL
        await add(store, first)
        await add(store, second, dedupe=Dedupe.MERGE)
        await store.turn(A, adds=[Add([third], after={third.uuid: [first.uuid]})])
        found = await store.list_tasks(TaskFilter(labels={"customer": "42"}))
        assert uuids(found) == [third.uuid, second.uuid, first.uuid]
