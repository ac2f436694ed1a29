"""Looking: outcomes, lists, counts, runs; and forgetting."""

from __future__ import annotations

import copy
from collections import Counter

from taskyard.model.command import Cancel, Retry, SetPriority
from taskyard.model.execution import ErrorKind
from taskyard.model.move import Move
from taskyard.model.notes import AuditStamp, CancelRequest, Note
from taskyard.model.order import Priority
from taskyard.model.queue import QueueSettings
from taskyard.model.settle import node_died
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, Dedupe, Outcome, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.paging import id_pages, task_pages
from taskyard.ports.store import ATTEMPTS_KEPT, Added, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import NOON, a_record, an_error, seconds
from taskyard.testing.store_contract.desk import (
    NODE_B,
    A,
    B,
    Desk,
    add,
    claim,
    everything,
    get,
    settle,
    start,
    tick,
    uuids,
)


def spoil(record: TaskRecord) -> None:
    """Change every field that can tell."""
    record.state = TaskState.SKIPPED
    record.priority = record.position = record.attempt = record.retries = record.id = 77
    record.key = record.queue = record.consumer = record.args = record.node = "spoiled"
    record.token = 99
    record.is_parked = not record.is_parked
    record.dedupe_slot = record.result = record.progress = record.error = None
    record.checkpoint = "spoiled"
    record.note, record.hold, record.cancel = Note.remark("spoiled"), AuditStamp("", NOON), CancelRequest(NOON)


class ReadingContract(Desk):
    async def test_outcomes_come_in_the_order_asked(self, store: Store, clock: ManualClock) -> None:
        """For each task asked, in order: its state, result and error; None for one that is not in the store."""
        done, failed, running = await start(store, a_record(), a_record(), a_record())
        error = an_error()
        await settle(store, done, Move.completed(at=clock.now(), result="[1,2]"))
        await settle(store, failed, Move.failed(at=clock.now(), error=error))
        stranger = a_record()
        assert await store.outcomes(uuids([failed, stranger, running, done, failed])) == [
            Outcome(failed.uuid, TaskState.FAILED, None, error),
            None,
            Outcome(running.uuid, TaskState.RUNNING),
            Outcome(done.uuid, TaskState.COMPLETED, "[1,2]"),
            Outcome(failed.uuid, TaskState.FAILED, None, error),
        ]
        assert await store.outcomes([]) == []

    async def test_many_outcomes_at_once(self, store: Store) -> None:
        """One question may ask for thousands."""
        tasks = [a_record() for _ in range(3000)]
        await add(store, *tasks)
        found = await store.outcomes(uuids(tasks))
        assert [one.uuid for one in found if one is not None] == uuids(tasks)

    async def test_those_are_found_that_others_were_made_of(self, store: Store, clock: ManualClock) -> None:
        """Of the tasks asked for, those that others name as their origin, whether these wait or have ended."""
        one, two, three = await start(store, a_record(), a_record(), a_record())
        (again,) = await start(store, a_record(origin=one.uuid))
        await settle(store, again, Move.completed(at=clock.now()))
        await add(store, a_record(origin=two.uuid), a_record(origin=two.uuid))
        assert await store.list_origins(uuids([one, two, three, again])) == {one.uuid, two.uuid}
        assert await store.list_origins([three.uuid, "nobody"]) == await store.list_origins([]) == set()

    async def test_tasks_that_are_in_the_store(self, store: Store, clock: ManualClock) -> None:
        """Of the tasks asked for, those that wait, run or have ended, and none that was pruned."""
        gone, done, running = await start(store, a_record(), a_record(), a_record())
        (waiting,) = await add(store, a_record())
        await settle(store, gone, Move.completed(at=clock.now()))
        await store.prune(finished_before=tick(clock, 1))
        await settle(store, done, Move.completed(at=clock.now()))
        asked = uuids([gone, done, running, waiting, a_record(), done])
        assert await store.list_known([*asked, "nobody"]) == set(uuids([done, running, waiting]))
        assert await store.list_known([]) == set()

    async def test_many_tasks_are_found_at_once(self, store: Store, clock: ManualClock) -> None:
        """Tasks are found by their ids as `find` finds each of them, finished or not; those that are not there are left
        out."""
        (done,) = await start(store, a_record(args='{"n": 1}'))
        await settle(store, done, Move.completed(at=clock.now()))
        await add(store, waiting := a_record())
        found = await store.find_tasks([done.uuid, waiting.uuid, done.uuid, "nobody", "\x00"])
        assert found == {uuid: await store.find(uuid) for uuid in (done.uuid, waiting.uuid)}
        assert await store.find_tasks([]) == {}

    async def test_a_part_of_an_id_finds_it(self, store: Store) -> None:
        """An id is found by how it begins and by how it ends, and what is no part of any finds none."""
        await add(store, *(tasks := [a_record() for _ in range(3)]))
        one = tasks[0].uuid
        assert await store.list_uuids(one) == [one]
        assert await store.list_uuids(one[-12:]) == [one]
        assert sorted(await store.list_uuids(one[:8], limit=100)) == sorted(
            other for other in uuids(tasks) if other.startswith(one[:8])
        )
        assert len(await store.list_uuids("", limit=2)) == 2
        assert await store.list_uuids("%") == await store.list_uuids("_") == []

    async def test_find_finds_one_or_none(self, store: Store) -> None:
        """A task is found by its uuid, and what is not there is None."""
        await add(store, task := a_record())
        found = await store.find(task.uuid)
        assert found is not None
        assert found.uuid == task.uuid
        assert await store.find(a_record().uuid) is None

    async def test_a_task_is_found_by_a_piece_of_its_id(self, store: Store) -> None:
        """The ids that begin or end with a piece are found, each once and at most so many; others are not."""
        ids = [f"0000000{n}-aaaa-7000-8000-00000000000{9 - n}" for n in range(4)]
        await add(store, *(a_record(uuid=uuid) for uuid in ids))
        assert await store.list_uuids("00000002") == [ids[2]]
        assert await store.list_uuids("0007") == [ids[2]]
        assert await store.list_uuids(ids[1]) == [ids[1]]
        assert sorted(await store.list_uuids("0000000")) == ids
        assert len(await store.list_uuids("0000000", limit=3)) == 3
        for stranger in ("aaaa", "1", "%", "_", "0000000%", "00000004"):
            assert await store.list_uuids(stranger) == [], stranger

    async def test_tasks_are_listed_newest_first_in_pages(self, store: Store) -> None:
        """Pages of at most `limit`, newest first, together hold every task once, though more are added meanwhile."""
        tasks = [a_record() for _ in range(25)]
        await add(store, *tasks)
        seen: list[str] = []
        before_id = None
        while page := await store.list_tasks(before_id=before_id, limit=10):
            assert len(page) <= 10
            seen += uuids(page)
            before_id = page[-1].id
            await add(store, a_record())
        assert seen == uuids(tasks)[::-1]
        assert await store.list_tasks(limit=0) == []

    async def test_pages_go_on_while_tasks_are_forgotten(self, store: Store, clock: ManualClock) -> None:
        """What was pruned since the last page is missing from the next ones, and nothing else is."""
        ended = await start(store, *(a_record() for _ in range(8)))
        await add(store, *(waiting := [a_record() for _ in range(4)]))
        last = await store.list_tasks(limit=2)
        assert uuids(await store.list_tasks(before_id=last[-1].id, limit=2)) == uuids(waiting[1::-1])
        for held in ended:
            await settle(store, held, Move.completed(at=clock.now()))
        tick(clock, 1)
        for left in (5, 2, 0):
            await store.prune(finished_before=clock.now(), limit=3)
            await add(store, newer := a_record())
            page = await store.list_tasks(before_id=last[-1].id, limit=20)
            assert len(page) == 2 + left
            assert uuids(page)[:2] == uuids(waiting[1::-1])
            assert uuids(await store.list_tasks(limit=1)) == [newer.uuid]

    async def test_tasks_are_listed_by_state_queue_and_source(self, store: Store, clock: ManualClock) -> None:
        """A filter lists exactly the tasks that fit all it names, and pages through them as well."""
        await add(store, *(a_record(queue=q, consumer=s) for q in ("default", "cpu") for s in ("fetch", "shrink") * 3))
        for held in await claim(store, 5):
            await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        await claim(store, 2)
        records = sorted((await everything(store)).values(), key=lambda record: -record.id)
        some = (TaskState.FAILED, TaskState.QUEUED)
        for states in (None, (), (TaskState.FAILED,), some, (TaskState.RUNNING,), (TaskState.SKIPPED,)):
            for queue in (None, "cpu", "none"):
                for source in (None, "fetch"):
                    where = TaskFilter(states=states, queue=queue, consumer=source)
                    expected = [
                        r.uuid
                        for r in records
                        if (states is None or r.state in states)
                        and queue in (None, r.queue)
                        and source in (None, r.consumer)
                    ]
                    assert uuids(await store.list_tasks(where)) == expected, where
                    first = await store.list_tasks(where, limit=2)
                    rest = await store.list_tasks(where, before_id=first[-1].id) if first else []
                    assert uuids([*first, *rest]) == expected, where

    async def test_counts_are_exact(self, store: Store, clock: ManualClock) -> None:
        """After every kind of change the counts are those of a real count, and name nothing that is empty."""

        async def check() -> None:
            counted = Counter((record.queue, record.state) for record in (await everything(store)).values())
            assert await store.count() == dict(counted)

        await check()
        await add(store, *(a_record(queue=queue) for queue in ("default", "cpu") * 4), a_record(dedupe_slot="s"))
        await add(store, a_record(due_at=clock.now() + seconds(1)), a_record(key="k"), a_record(key="k"))
        await add(store, a_record(dedupe_slot="s"), dedupe=Dedupe.MERGE)
        await check()
        one, two, three, four, five = await claim(store, 5)
        await check()
        await settle(store, one, Move.completed(at=clock.now()))
        await settle(store, two, Move.failed(at=clock.now(), error=an_error()))
        await settle(store, three, Move.given_back(at=clock.now()))
        await settle(store, four, Move.retrying(at=clock.now(), due_at=clock.now(), error=an_error()))
        await check()
        await store.apply([five.uuid, four.uuid, a_record().uuid], Cancel())
        await store.rescue(A)
        await check()
        clock.advance(2)
        await claim(store, 3)
        await check()
        await store.prune(finished_before=clock.now(), limit=2)
        await check()

    async def test_every_ended_attempt_has_one_row(self, store: Store, clock: ManualClock) -> None:
        """Each attempt that ended is listed once, in order, as it ended; the one that runs is not listed yet."""
        await add(store, task := a_record())
        error = an_error(ErrorKind.TIMEOUT, "slow", "TimeoutError", limit_s=3)
        errors = {
            (TaskState.RETRYING, B): error,
            (TaskState.INTERRUPTED, B): node_died(NODE_B.label),
        }
        expected: list[Attempt] = []
        for state, node in [
            (TaskState.INTERRUPTED, A),  # given back
            (TaskState.RETRYING, B),
            (TaskState.INTERRUPTED, B),  # its node died
            (TaskState.COMPLETED, A),
        ]:
            started = tick(clock, 1)
            (held,) = await claim(store, node=node)
            assert (await store.list_attempts(task.uuid))[:-1] == expected
            at = tick(clock, 1)
            if state is TaskState.INTERRUPTED and node == B:
                await store.rescue(B)
            elif state is TaskState.INTERRUPTED:
                await settle(store, held, Move.given_back(at=at))
            elif state is TaskState.RETRYING:
                await settle(store, held, Move.retrying(at=at, due_at=at, error=error), node=B)
            else:
                await settle(store, held, Move.completed(at=at))
            expected.append(
                Attempt(
                    attempt=held.attempt,
                    token=held.token,
                    node=node,
                    state=state,
                    started_at=started,
                    finished_at=at,
                    error=errors.get((state, node)),
                )
            )
        assert await store.list_attempts(task.uuid) == expected
        assert [run.attempt for run in expected] == [1, 1, 2, 3]
        assert await store.list_attempts(a_record().uuid) == []

    async def test_the_latest_runs_are_kept(self, store: Store, clock: ManualClock) -> None:
        """Of a task that has run more often than that, the latest hundred runs are kept, oldest first."""
        await add(store, task := a_record())
        for _ in range(ATTEMPTS_KEPT + 4):
            (held,) = await claim(store, 1)
            retry = Move.retrying(at=clock.now(), due_at=clock.now(), error=an_error(), retried=False)
            await settle(store, held, retry)
        assert [run.attempt for run in await store.list_attempts(task.uuid)] == list(range(5, ATTEMPTS_KEPT + 5))
        (held,) = await claim(store, 1)
        await settle(store, held, Move.completed(at=clock.now()))
        runs = await store.list_attempts(task.uuid)
        assert [run.attempt for run in runs] == list(range(6, ATTEMPTS_KEPT + 6))
        assert [run.token for run in runs] == sorted(run.token for run in runs)

    async def test_what_never_ran_has_no_runs(self, store: Store) -> None:
        """A task that was canceled before it started has no attempt to show."""
        await add(store, task := a_record())
        await store.apply([task.uuid], Cancel())
        assert await store.list_attempts(task.uuid) == []

    async def test_prune_forgets_the_oldest_ended(self, store: Store, clock: ManualClock) -> None:
        """At most `limit` tasks that ended before the time are forgotten, those that ended first before the others."""
        held = await start(store, *(a_record() for _ in range(6)))
        ends = {}
        for i in (4, 3, 0, 1):
            ends[i] = tick(clock, 1)
            await settle(store, held[i], Move.completed(at=ends[i]))
        await settle(store, held[5], Move.failed(at=tick(clock, 1), error=an_error()))
        assert await store.prune(finished_before=ends[4]) == 0
        assert await store.prune(finished_before=ends[1], limit=2) == 2
        assert set(await everything(store)) == {held[i].uuid for i in (0, 1, 2, 5)}
        assert await store.prune(finished_before=ends[1]) == 1
        assert await store.prune(finished_before=ends[1]) == 0
        assert await store.prune(finished_before=tick(clock, 1)) == 2
        assert set(await everything(store)) == {held[2].uuid}
        assert await store.count() == {("default", TaskState.RUNNING): 1}

    async def test_what_was_pruned_is_gone(self, store: Store, clock: ManualClock) -> None:
        """A pruned task has no record, no runs and no outcome any more, and its uuid may be used again."""
        (held,) = await start(store, a_record())
        await settle(store, held, Move.completed(at=clock.now()))
        await store.prune(finished_before=tick(clock, 1))
        assert await store.find(held.uuid) is None
        assert await store.outcomes([held.uuid]) == [None]
        assert await store.list_attempts(held.uuid) == []
        assert await add(store, a_record(uuid=held.uuid)) == [Added(held.uuid)]
        assert await store.list_attempts(held.uuid) == []

    async def test_prune_leaves_what_has_not_ended(self, store: Store, clock: ManualClock) -> None:
        """Waiting, scheduled, running and retried tasks are never forgotten, however old they are."""
        (again, backoff) = await start(store, a_record(), a_record())
        await settle(store, again, Move.failed(at=clock.now(), error=an_error()))
        later = clock.now() + seconds(10**8)
        await settle(store, backoff, Move.retrying(at=clock.now(), due_at=later, error=an_error()))
        await start(store, a_record())
        await store.apply([again.uuid], Retry())
        await add(store, a_record(), a_record(due_at=later))
        assert await store.prune(finished_before=tick(clock, 10**7)) == 0
        assert len(await everything(store)) == 5

    async def test_a_record_handed_out_is_a_copy(self, store: Store) -> None:
        """Whoever changes a record it was handed changes nothing in the store."""
        await store.set_queue(QueueSettings(name="default", per_key=2))
        tasks = [a_record(key="k"), a_record(), a_record(dedupe_slot="s")]
        await add(store, *tasks, dedupe=Dedupe.REFUSE)
        (held,) = await claim(store)
        (applied,) = await store.apply([tasks[1].uuid], SetPriority(Priority.HIGH))
        before = {record.uuid: copy.copy(record) for record in (await everything(store)).values()}
        assert applied.record is not None
        for record in [held.record, applied.record, await get(store, tasks[2]), *await store.list_tasks()]:
            spoil(record)
        assert await everything(store) == before
        assert uuids(await claim(store, 9)) == uuids(tasks[1:])

    async def test_pages_follow_each_other(self, store: Store) -> None:
        """Each page is behind the last of the one before, newest first, up to the oldest; who comes meanwhile is in
        none, and nobody is asked for what is behind a page that is not full."""
        tasks = [a_record() for _ in range(5)]
        await add(store, *tasks)
        asked: list[int | None] = []

        async def read(where: TaskFilter, *, before_id: int | None, limit: int) -> list[tuple[int, str]]:
            asked.append(before_id)
            return await store.list_ids(where, before_id=before_id, limit=limit)

        seen: list[list[str]] = []
        async for page in id_pages(read, TaskFilter(), size=2):
            seen.append([uuid for _, uuid in page])
            await add(store, a_record())
        newest_first = uuids(reversed(tasks))
        assert (seen, len(asked)) == ([newest_first[:2], newest_first[2:4], newest_first[4:]], 3)
        whole = [uuids(page) async for page in task_pages(store.list_tasks, TaskFilter(), size=4)]
        assert (len(whole), len(whole[0]), whole[1]) == (2, 4, newest_first[1:])

    async def test_watching_is_allowed(self, store: Store) -> None:
        """A store takes a watcher, even one that no other process can ever write to."""
        store.watch(lambda _: None)
        record = a_record()
        await add(store, record)
        assert await store.find(record.uuid) is not None
