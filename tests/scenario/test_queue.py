"""Which task goes next: order, priorities, limits, keys, due times and dedupe, as the submitter sees them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone

import pytest

from taskyard import EventKind, Priority, TaskCanceled, TaskState
from taskyard.errors import CommandRefused, DuplicateTask, InvalidArguments
from tests.scenario.gates import Gates, heard, told
from tests.scenario.jobs import build

ONE = {"zip": {"concurrency": 1}}


async def play(gates: Gates, count: int) -> list[str]:
    """Let so many runs begin and finish, each as soon as it has begun; the order in which they did."""
    names = []
    for _ in range(count):
        run = await gates.next()
        names.append(run.name)
        run.finish()
    return names


@pytest.mark.spec("QUE-03")
async def test_an_idle_queue_starts_a_task_at_once(url, gates):
    """A task for an idle queue starts at once; those behind it wait as queued, and each starts when one ends."""
    async with build(url, gates.port, queues=ONE) as yard:
        a, b, c = [await yard.submit("gate", {"name": name}, queue="zip") for name in "abc"]
        run = await gates.begun("a")
        assert [await one.state() for one in (a, b, c)] == [TaskState.RUNNING, TaskState.QUEUED, TaskState.QUEUED]
        run.finish()
        run = await gates.begun("b")
        assert [await one.state() for one in (a, b, c)] == [TaskState.COMPLETED, TaskState.RUNNING, TaskState.QUEUED]
        run.finish()
        (await gates.begun("c")).finish()
        await c.result(timeout_s=10)
        ended, began = await a.record(), await b.record()
        assert ended.finished_at is not None
        assert began.started_at is not None
        assert began.started_at - ended.finished_at < timedelta(seconds=0.5)


@pytest.mark.spec("QUE-03", "SCH-08")
@pytest.mark.parametrize("ending", ["finish", "fail", "give_up", "cancel"])
async def test_however_a_task_ends_the_next_one_starts(url, gates, ending):
    """Completed, failed, given up or canceled: the slot goes to the next task."""
    async with build(url, gates.port, queues=ONE) as yard:
        first = await yard.submit("gate", {"name": "first"}, queue="zip")
        await yard.submit("gate", {"name": "next"}, queue="zip")
        run = await gates.begun("first")
        match ending:
            case "finish":
                run.finish()
            case "fail":
                run.fail("ValueError")
            case "give_up":
                run.give_up("not today")
            case "cancel":
                await first.cancel()
        (await gates.begun("next")).finish()
    assert gates.most_at_once == 1


@pytest.mark.spec("QUE-04")
async def test_a_batch_keeps_its_order(url, gates):
    """Tasks submitted together start in the order given."""
    names = [f"n{n}" for n in range(20)]
    async with build(url, gates.port, queues=ONE) as yard:
        handles = await yard.submit_many("gate", [{"name": name} for name in names], queue="zip")
        assert await play(gates, 20) == names
        assert [(await handle.record()).args for handle in handles] == [f'{{"name":"{name}"}}' for name in names]


@pytest.mark.spec("QUE-04")
async def test_a_batch_is_all_or_nothing(url):
    """One bad task in a batch keeps the whole batch out."""
    async with build(url).client() as yard:
        with pytest.raises(InvalidArguments, match="a: Input should be a valid integer"):
            await yard.submit_many("add", [{"a": 1}, {"a": 2}, {"a": "three"}])
        await yard.submit("add", {"a": 1}, dedupe="refuse", dedupe_key="k")
        with pytest.raises(DuplicateTask):
            await yard.submit_many("add", [{"a": 5}, {"a": 6}], dedupe="refuse", dedupe_key="k")
        assert await yard.submit_many("add", []) == []
        assert await yard.store.count() == {("default", TaskState.QUEUED): 1}


@pytest.mark.spec("QUE-05")
async def test_priority_goes_before_age(url, gates):
    """High goes before normal and normal before low; within one priority, first in, first out."""
    async with build(url, gates.port, queues=ONE) as yard:
        await yard.submit("gate", {"name": "blocker"}, queue="zip")
        blocker = await gates.begun("blocker")
        for name in ("low-1", "normal-1", "high-1", "low-2", "normal-2", "high-2"):
            options = {} if name.startswith("normal") else {"priority": name.partition("-")[0]}
            await yard.submit("gate", {"name": name}, queue="zip", **options)
        blocker.finish()
        assert await play(gates, 6) == ["high-1", "high-2", "normal-1", "normal-2", "low-1", "low-2"]


@pytest.mark.spec("QUE-05")
async def test_priority_can_be_changed_while_queued(url, gates):
    """A queued task that is made urgent overtakes, one that is made unimportant falls back, and both keep their age."""
    async with build(url, gates.port, queues=ONE) as yard:
        running = await yard.submit("gate", {"name": "blocker"}, queue="zip")
        blocker = await gates.begun("blocker")
        a, b, c = [await yard.submit("gate", {"name": name}, queue="zip") for name in "abc"]
        urgent = await yard.submit("gate", {"name": "urgent"}, queue="zip", priority="high")
        assert (await yard.set_priority(c.uuid, "high")).priority == Priority.HIGH
        await yard.set_priority(a.uuid, Priority.LOW)
        assert await told(yard, c.uuid) == [EventKind.SUBMITTED, EventKind.PRIORITY_CHANGED]
        with pytest.raises(CommandRefused, match=r"cannot change the priority of task .* it is running"):
            await yard.set_priority(running.uuid, "high")
        blocker.finish()
        assert await play(gates, 4) == ["c", "urgent", "b", "a"]
        assert [await one.state() for one in (urgent, b)] == [TaskState.COMPLETED] * 2


@pytest.mark.spec("QUE-11")
async def test_a_queued_task_that_is_canceled_never_runs(url, gates):
    """Canceling a task that waits takes it out of the queue at once; the others keep their order."""
    async with build(url, gates.port, queues=ONE) as yard:
        await yard.submit("gate", {"name": "blocker"}, queue="zip")
        blocker = await gates.begun("blocker")
        a, b, c = [await yard.submit("gate", {"name": name}, queue="zip") for name in "abc"]
        waiting = asyncio.create_task(b.result(timeout_s=10))
        canceled = await b.cancel(reason="changed my mind")
        assert canceled.state is TaskState.CANCELED
        with pytest.raises(TaskCanceled, match="changed my mind"):
            await waiting
        with pytest.raises(CommandRefused, match=r"cannot cancel task .*: it is canceled"):
            await b.cancel()
        blocker.finish()
        assert await play(gates, 2) == ["a", "c"]
        assert (await b.record()).attempt == 0
        assert await a.result(timeout_s=10) is None
        assert await c.result(timeout_s=10) is None


@pytest.mark.spec("QUE-11")
async def test_a_scheduled_task_can_be_canceled(url):
    """A task that waits for its time is canceled at once, too."""
    async with build(url) as yard:
        handle = await yard.submit("echo", {"value": 1}, delay_s=3600)
        await yard.cancel(handle.uuid)
        with pytest.raises(TaskCanceled):
            await handle.result(timeout_s=10)


@pytest.mark.spec("QUE-26")
async def test_more_than_one_at_a_time_keeps_the_other_rules(url, gates):
    """A queue of concurrency 3 runs three at once, never more, by priority and age, past what was canceled."""
    async with build(url, gates.port, queues={"wide": {"concurrency": 3}}) as yard:
        handles = {name: await yard.submit("gate", {"name": name}, queue="wide") for name in "abcdef"}
        first = [await gates.next() for _ in range(3)]
        assert sorted(run.name for run in first) == ["a", "b", "c"]
        await yard.submit("gate", {"name": "urgent"}, queue="wide", priority="high")
        await handles["d"].cancel()
        first[0].finish()
        urgent = await gates.begun("urgent")
        first[1].finish()
        (await gates.begun("e")).finish()
        (await gates.begun("f")).finish()
        first[2].finish()
        urgent.finish()
        await asyncio.gather(*(handle.result(timeout_s=10) for name, handle in handles.items() if name != "d"))
    assert gates.most_at_once == 3
    assert len(gates.visits) == 6


@pytest.mark.spec("SCH-08", "QUE-26")
async def test_the_tightest_limit_wins(url, gates):
    """A consumer that runs one at a time does so in a wide queue, and lets other consumers of the queue pass."""
    async with build(url, gates.port, queues={"wide": {"concurrency": 3}}) as yard:
        await yard.submit_many("narrow_gate", [{"name": "narrow-1"}, {"name": "narrow-2"}], queue="wide")
        narrow = await gates.begun("narrow-1")
        await yard.submit("gate", {"name": "other"}, queue="wide")
        (await gates.begun("other")).finish()
        assert narrow.is_going_on
        narrow.finish()
        (await gates.begun("narrow-2")).finish()


async def test_one_key_runs_in_order_one_at_a_time(url, gates):
    """Of the tasks with one key only one runs at a time, in order; other keys are not held up."""
    async with build(url, gates.port) as yard:
        disk1 = [await yard.submit("gate", {"name": f"one-{n}"}, key="disk-1") for n in range(3)]
        first = await gates.begun("one-0")
        await yard.submit("gate", {"name": "two-0"}, key="disk-2")
        (await gates.begun("two-0")).finish()
        assert [await handle.state() for handle in disk1[1:]] == [TaskState.QUEUED] * 2
        first.finish()
        (await gates.begun("one-1")).finish()
        (await gates.begun("one-2")).finish()
        await disk1[-1].result(timeout_s=10)


async def test_a_key_keeps_its_order_across_retries(url, gates):
    """While a task waits for its next try, those behind it with the same key wait with it."""
    async with build(url, gates.port) as yard:
        handle = await yard.submit("gate", {"name": "first"}, key="k")
        after = await yard.submit("gate", {"name": "second"}, key="k")
        (await gates.begun("first")).later(0.1)
        await heard(yard, EventKind.RETRYING, handle.uuid)
        assert await after.state() is TaskState.QUEUED
        run = await gates.begun("first")
        assert run.attempt == 2
        run.finish()
        (await gates.begun("second")).finish()
        await after.result(timeout_s=10)


async def test_a_queue_may_allow_several_of_a_key(url, gates):
    """`per_key` says how many tasks of one key run at once."""
    async with build(url, gates.port, queues={"pairs": {"per_key": 2}}) as yard:
        await yard.submit_many("gate", [{"name": f"n{n}"} for n in range(6)], queue="pairs", key="k")
        pair = [await gates.next(), await gates.next()]
        for _ in range(4):
            pair.pop(0).finish()
            pair.append(await gates.next())
        for run in pair:
            run.finish()
    assert gates.most_at_once == 2


@pytest.mark.spec("SCH-05", "SCH-06")
async def test_a_task_starts_when_it_is_due(url):
    """`delay_s` and `schedule_at`, in whatever zone, say when; a time in the past means now."""
    async with build(url) as yard:
        start = datetime.now(UTC)
        tokyo = timezone(timedelta(hours=9))
        due = {
            "delay": await yard.submit("echo", delay_s=0.3),
            "at": await yard.submit("echo", schedule_at=(start + timedelta(seconds=0.2)).astimezone(tokyo)),
            "past": await yard.submit("echo", schedule_at=start - timedelta(days=1)),
        }
        assert await due["delay"].state() is TaskState.SCHEDULED
        for handle in due.values():
            await handle.result(timeout_s=10)
        began = {name: (await handle.record()).started_at for name, handle in due.items()}
    waited = {name: (at - start).total_seconds() for name, at in began.items() if at is not None}
    assert 0 <= waited["past"] < 1
    assert 0.2 <= waited["at"] < 1.2
    assert 0.3 <= waited["delay"] < 1.3


async def test_the_same_work_is_merged(url, gates):
    """With dedupe=merge, the same arguments give the pending task's handle; once it has ended, a new task."""
    async with build(url, gates.port) as yard:
        first = await yard.submit("gate", {"name": "a"}, dedupe="merge")
        again = await yard.submit("gate", {"name": "a"}, dedupe="merge")
        other = await yard.submit("gate", {"name": "b"}, dedupe="merge")
        assert (again == first, again.is_new, first.is_new) == (True, False, True)
        assert (other == first, other.is_new) == (False, True)
        runs = [await gates.next(), await gates.next()]
        for run in runs:
            run.finish(run.name)
        assert await again.result(timeout_s=10) == "a"
        await other.result(timeout_s=10)
        anew = await yard.submit("gate", {"name": "a"}, dedupe="merge")
        assert (anew == first, anew.is_new) == (False, True)
        (await gates.begun("a")).finish()


async def test_the_same_work_is_refused(url):
    """With dedupe=refuse the error names the task that is pending; a key of one's own stands for the arguments."""
    async with build(url) as yard:
        first = await yard.submit("echo", {"value": 1}, delay_s=60, dedupe="refuse", dedupe_key="nightly")
        with pytest.raises(
            DuplicateTask, match=r"^task \S+ stands for the same work: it is scheduled\. Wait for it"
        ) as refused:
            await yard.submit("echo", {"value": 2}, dedupe="refuse", dedupe_key="nightly")
        assert refused.value.existing == first.uuid
        assert await (await yard.submit("echo", {"value": 2})).result(timeout_s=10) == 2
        await first.cancel()
        again = await yard.submit("echo", {"value": 3}, dedupe="refuse", dedupe_key="nightly")
        assert await again.result(timeout_s=10) == 3


async def test_many_submitters_make_one_task(url):
    """However many submit the same work at once, one task comes of it, and all hold it."""
    async with build(url).client() as yard:
        handles = await asyncio.gather(*(yard.submit("echo", {"value": 1}, dedupe="merge") for _ in range(50)))
        assert len({handle.uuid for handle in handles}) == 1
        assert sum(handle.is_new for handle in handles) == 1
        assert await yard.store.count() == {("default", TaskState.QUEUED): 1}


async def test_names_do_not_run_over_into_keys(url):
    """Two consumers never share a dedupe key, whatever they are called."""
    yard = build(url)
    for name in ("a", "a key b"):
        yard.consumer(name=name)(lambda: None)
    async with yard.client():
        first = await yard.submit("a", dedupe="merge", dedupe_key="b key c")
        second = await yard.submit("a key b", dedupe="merge", dedupe_key="c")
        assert (second.is_new, second.uuid != first.uuid) == (True, True)
