"""Several processes on one file: limits hold over all of them, results reach any, and a dead one loses nothing."""

from __future__ import annotations

import asyncio
import os

import pytest
import uvloop

from taskyard import EventKind, TaskCanceled, TaskFailed, TaskState
from tests.scenario.gates import heard, told
from tests.scenario.jobs import build
from tests.scenario.processes import run_python

SUBMIT = """
import asyncio, sys
from tests.scenario.jobs import build

async def main(url):
    async with build(url).client() as yard:
        await yard.submit("add", {"a": 1})

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.spec("QUE-02")
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_queue_keeps_its_limit_over_all_processes(file_url, gates, nodes, concurrency):
    """However many processes share the store, a queue never runs more than its concurrency at once."""
    rules = {"zip": {"concurrency": concurrency}}
    for _ in range(3):
        await nodes.start(file_url, queues=rules, each=1)
    async with build(file_url, queues=rules).client() as yard:
        handles = await yard.submit_many("gate", [{"name": str(n)} for n in range(12)], queue="zip")
        runs = [await gates.next() for _ in range(concurrency)]
        for _ in range(12 - concurrency):
            runs.pop(0).finish()
            runs.append(await gates.next())
        for run in runs:
            run.finish()
        await asyncio.gather(*(handle.result(timeout_s=10) for handle in handles))
    assert gates.most_at_once == concurrency
    assert sorted(map(int, gates.names)) == list(range(12))
    assert len({run.pid for run in gates.visits}) >= concurrency


@pytest.mark.spec("QUE-03")
async def test_a_task_starts_in_another_process_at_once(file_url, gates, nodes):
    """A process that only waits hears of a new task right away, and takes it."""
    node = await nodes.start(file_url)
    async with build(file_url).client() as yard:
        loop = asyncio.get_running_loop()
        await yard.submit("gate", {"name": "warm-up"})
        (await gates.begun("warm-up")).finish()
        submitted = loop.time()
        handle = await yard.submit("gate", {"name": "now"})
        run = await gates.begun("now")
        assert run.pid == node.pid
        assert loop.time() - submitted < 0.9  # sooner than any poll would find it
        run.finish()
        await handle.result(timeout_s=10)


async def test_a_result_reaches_every_process(file_url, gates, nodes):
    """The process that submitted, the one that ran it and any other can wait for a result, before and after the end."""
    await nodes.start(file_url)
    ask = """
import asyncio, sys
from tests.scenario.jobs import build

async def main(url, uuid):
    async with build(url).client() as yard:
        print(await yard.handle(uuid).result(timeout_s=10))

asyncio.run(main(*sys.argv[1:]))
"""
    async with build(file_url).client() as yard:
        handle = await yard.submit("gate", {"name": "shared"})
        run = await gates.begun("shared")
        before = asyncio.create_task(asyncio.to_thread(run_python, ask, file_url, handle.uuid))
        here = asyncio.create_task(handle.result(timeout_s=10))
        run.finish({"answer": 42})
        assert await here == {"answer": 42}
        assert await before == "{'answer': 42}\n"
        assert await asyncio.to_thread(run_python, ask, file_url, handle.uuid) == "{'answer': 42}\n"


async def test_a_process_stops_in_good_order(file_url, gates, nodes):
    """A process that is told to stop finishes what it runs, starts nothing more, and another takes the rest."""
    node = await nodes.start(file_url, each=1)
    async with build(file_url).client() as yard:
        first, second = await yard.submit_many("gate", [{"name": "first"}, {"name": "second"}])
        run = await gates.begun("first")
        stopping = asyncio.create_task(node.stop())
        run.finish("done")
        assert await stopping == 0
        assert await first.result(timeout_s=10) == "done"
        assert await second.state() is TaskState.QUEUED
        assert await yard.store.nodes() == []
        await nodes.start(file_url)
        (await gates.begun("second")).finish()
        await second.result(timeout_s=10)


# --- restarts and deaths ----------------------------------------------------------------------------------------------


@pytest.mark.spec("QUE-22")
async def test_everything_survives_a_restart(file_url, gates, nodes):
    """Tasks, states, arguments, priorities, order, errors, retry counts and times are the same after a restart."""
    node = await nodes.start(file_url, queues={"q": {"concurrency": 1, "auto_recover": 2}})
    async with build(file_url).client() as yard:
        done = await yard.submit("add", {"a": 2, "b": 3})
        assert await done.result(timeout_s=10) == 5
        failed = await yard.submit("gate", {"name": "flaky"}, timeout_s=30)
        (await gates.begun("flaky")).fail("OSError", "disk on fire")
        (await gates.begun("flaky")).fail("ValueError", "never mind")
        with pytest.raises(TaskFailed):
            await failed.result(timeout_s=10)
        assert await node.stop() == 0
        await yard.submit("gate", {"name": "later"}, delay_s=3600, priority="low")
        for name, options in [("one", {}), ("two", {"priority": "high"}), ("three", {"key": "k", "dedupe": "merge"})]:
            await yard.submit("gate", {"name": name}, queue="q", **options)
        canceled = await yard.submit("echo")
        await canceled.cancel(reason="no")
        before = [await yard.store.find(record.uuid) for record in await yard.store.list_tasks()]
        runs = [await yard.store.list_attempts(record.uuid) for record in before if record]
    assert len(before) == 7
    async with build(file_url).client() as yard:
        assert await yard.store.list_tasks() == before
        assert [await yard.store.list_attempts(record.uuid) for record in before if record] == runs
        record = await yard.handle(failed.uuid).record()
        assert record.error is not None
        assert (record.error.message, record.retries, record.timeout_s) == ("never mind", 1, 30)
    await nodes.start(file_url)  # the rules of the queue are kept as well: one at a time, by priority and age
    for name in ("two", "one", "three"):
        (await gates.begun(name)).finish()


@pytest.mark.spec("QUE-23")
async def test_what_a_killed_process_ran_goes_to_the_front_once(file_url, gates, nodes):
    """After kill -9 a running task is interrupted and goes back to the front, before what waits; the second time it is
    failed, and a person can send it again."""
    rules = {"q": {"concurrency": 1}}
    async with build(file_url, queues=rules).client() as yard:
        node = await nodes.start(file_url, queues=rules)
        handle = await yard.submit("gate", {"name": "victim"}, queue="q")
        run = await gates.begun("victim")
        await yard.submit("gate", {"name": "waits"}, queue="q")
        await node.kill()
        await run.gone()

        node = await nodes.start(file_url, queues=rules)
        again = await gates.begun("victim")
        assert (again.attempt, again.token > run.token) == (2, True)
        record = await handle.record()
        assert (record.recoveries, record.retries) == (1, 0)
        await node.kill()

        await nodes.start(file_url, queues=rules)
        with pytest.raises(TaskFailed, match="died") as failed:
            await handle.result(timeout_s=10)
        assert failed.value.kind == "system"
        (await gates.begun("waits")).finish()
        assert await told(yard, handle.uuid) == [
            *["submitted", "running", "interrupted", "queued"],
            *["running", "interrupted", "failed"],
        ]
        assert [one.state for one in await yard.store.list_attempts(handle.uuid)] == [TaskState.INTERRUPTED] * 2

        await yard.retry(handle.uuid)
        (await gates.begun("victim")).finish("survived")
        assert await handle.result(timeout_s=10) == "survived"


@pytest.mark.spec("QUE-23")
async def test_without_auto_recover_it_is_failed_at_once(file_url, gates, nodes):
    """In a queue with auto_recover=0 a task whose process was killed is failed, not run again by itself."""
    rules = {"q": {"auto_recover": 0}}
    node = await nodes.start(file_url, queues=rules)
    async with build(file_url, gates.port, queues=rules).client() as yard:
        handle = await yard.submit("gate", {"name": "once"}, queue="q")
        await gates.begun("once")
        await node.kill()
        await nodes.start(file_url, queues=rules)
        with pytest.raises(TaskFailed, match=r"its node .* died"):
            await handle.result(timeout_s=10)
        assert await told(yard, handle.uuid) == ["submitted", "running", "interrupted", "failed"]
        assert len(gates.visits) == 1


@pytest.mark.spec("QUE-23")
async def test_a_living_process_takes_over_from_a_killed_one(file_url, gates, nodes):
    """Another process on the store takes the task over within a moment, and does not touch what lives."""
    doomed = await nodes.start(file_url, each=1)
    async with build(file_url).client() as yard:
        handle = await yard.submit("gate", {"name": "orphan"})
        run = await gates.begun("orphan")
        assert run.pid == doomed.pid
        keeper = await nodes.start(file_url, each=3)
        kept = await yard.submit("gate", {"name": "kept"})
        untouched = await gates.begun("kept")
        killed = asyncio.get_running_loop().time()
        await doomed.kill()
        again = await gates.begun("orphan")
        assert again.pid == keeper.pid
        assert asyncio.get_running_loop().time() - killed < 5
        again.finish("adopted")
        assert await handle.result(timeout_s=10) == "adopted"
        assert untouched.is_going_on
        untouched.finish()
        await kept.result(timeout_s=10)
        assert len(await yard.store.nodes()) == 1


@pytest.mark.spec("QUE-12")
async def test_the_reason_of_a_cancel_reaches_other_processes(file_url, gates, nodes):
    """Who waits for a task that another process runs, and somebody cancels, is told why; whatever the run notes."""
    await nodes.start(file_url)
    async with build(file_url).client() as yard, build(file_url).client() as other:
        handle = await yard.submit("gate", {"name": "far"})
        await gates.begun("far")
        await other.cancel(handle.uuid, reason="no longer needed")
        with pytest.raises(TaskCanceled, match=r"was canceled: no longer needed$"):
            await handle.result(timeout_s=10)


@pytest.mark.spec("QUE-23", "QUE-12")
async def test_a_cancel_outlives_the_process_that_should_have_heard_it(file_url, gates, nodes):
    """A task that was asked to cancel when its process died is canceled, not run again."""
    node = await nodes.start(file_url)
    async with build(file_url).client() as yard:
        handle = await yard.submit("thread_gate", {"name": "deaf"})
        await gates.begun("deaf")
        await handle.cancel()
        await node.kill()
        await nodes.start(file_url)
        await heard(yard, EventKind.CANCELED, handle.uuid)
        assert (await handle.record()).attempt == 1
        assert len(gates.visits) == 1


def test_uvloop_works_as_well(file_url):
    """A yard works on uvloop as on asyncio's own loop, hints from another process included."""

    async def main() -> list[int]:
        async with build(file_url) as yard:
            await asyncio.to_thread(run_python, SUBMIT, file_url)
            records = await yard.store.list_tasks()
            return [await yard.handle(record.uuid).result(timeout_s=10) for record in records]

    assert uvloop.run(main()) == [2]


async def test_this_process_may_be_one_of_several(file_url, gates, nodes):
    """A yard in this process shares the work with another process; each runs within its own limits."""
    node = await nodes.start(file_url, each=1)
    async with build(file_url, gates.port, each=1) as yard:
        handles = await yard.submit_many("gate", [{"name": str(n)} for n in range(4)])
        pair = [await gates.next(), await gates.next()]
        assert {run.pid for run in pair} == {node.pid, os.getpid()}
        for _ in range(2):
            pair.pop(0).finish()
            pair.append(await gates.next())
        for run in pair:
            run.finish()
        await asyncio.gather(*(handle.result(timeout_s=10) for handle in handles))
    assert gates.most_at_once == 2
