"""Threads: taken by what they can run, given back what they cannot."""

import asyncio
import threading

from tests.engine.support import quiet


async def test_a_node_takes_what_its_threads_can_run(start_rig):
    """A consumer that may run six at once on one thread runs one; the others stay queued, for whoever has room."""
    rig = await start_rig(threads=1)
    go_on = threading.Event()
    rig.consumer("work", lambda record: go_on.wait(10), concurrency=6)
    uuids = await rig.submit_many("work", 6)
    await quiet()
    assert [await rig.state(uuid) for uuid in uuids] == ["running"] + ["queued"] * 5
    go_on.set()
    for uuid in uuids:
        assert (await rig.outcome(uuid)).state == "completed"


async def test_what_waits_for_a_thread_goes_back_at_a_stop(start_rig):
    """A run that was accepted and has no thread yet is given back when the node stops, and never begins."""
    rig = await start_rig(threads=1)
    go_on, began = threading.Event(), []

    def work(record) -> None:
        began.append(record.uuid)
        go_on.wait(10)

    rig.consumer("one", work)
    rig.consumer("two", work)
    first, second = rig.record("one"), rig.record("two")
    await rig.offer(first, second)
    await quiet()
    assert await rig.state(second.uuid) == "running"
    stopping = asyncio.create_task(rig.engine.stop())
    await quiet()
    await rig.advance(1)
    assert (await rig.state(first.uuid), await rig.state(second.uuid)) == ("running", "queued")
    go_on.set()
    await stopping
    assert (await rig.state(first.uuid), began) == ("completed", [first.uuid])


async def test_a_thread_that_cannot_be_started_costs_no_worker(start_rig, monkeypatch):
    """When the system has no thread to give, the task goes back and runs when there is one."""
    rig = await start_rig(threads=1)
    rig.consumer("work", lambda record: 7)
    start, refusals = threading.Thread.start, [2]

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("taskyard") and refusals[0]:
            refusals[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    uuid = await rig.submit("work")
    for _ in range(5):
        await rig.advance(1)
    outcome = await rig.outcome(uuid)
    assert (outcome.result, (await rig.found(uuid)).attempt) == ("7", 1)
    assert (await rig.outcome(await rig.submit("work"))).state == "completed"
