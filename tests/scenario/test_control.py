"""Whole queues, steered by people while they work."""

import logging

import pytest

from taskyard import InvalidInput, QueueOrder, QueueState, TaskState
from tests.scenario.gates import PATIENCE_S
from tests.scenario.jobs import build

ONE = {"zip": {"concurrency": 1}}


@pytest.mark.spec("QUE-09")
async def test_a_pause_lets_what_runs_finish_and_starts_nothing(url, gates):
    """Paused by somebody for a reason, a queue starts nothing more; resumed, it starts its head at once."""
    async with build(url, gates.port, queues=ONE) as yard:
        zips = yard.queue("zip", by="ann")
        a, b = [await yard.submit("gate", {"name": name}, queue="zip") for name in "ab"]
        run = await gates.begun("a")
        status = await zips.pause(reason="backup")
        assert status.control.state_set is not None
        assert (status.control.state, status.control.state_set.actor, status.control.state_set.reason) == (
            "paused",
            "ann",
            "backup",
        )
        run.finish()
        await a.result(timeout_s=PATIENCE_S)
        await (await yard.submit("echo")).result(timeout_s=PATIENCE_S)
        assert await b.state() is TaskState.QUEUED
        assert (await zips.status()).counts == {TaskState.COMPLETED: 1, TaskState.QUEUED: 1}
        await zips.resume()
        (await gates.begun("b")).finish()


@pytest.mark.spec("QUE-10")
async def test_stop_after_current_ends_in_a_pause(url, gates):
    """The queue is stopping while its task runs and paused when it has ended; the next task waits."""
    async with build(url, gates.port, queues=ONE) as yard:
        zips = yard.queue("zip")
        a, b = [await yard.submit("gate", {"name": name}, queue="zip") for name in "ab"]
        run = await gates.begun("a")
        assert (await zips.stop_after_current()).control.state is QueueState.STOPPING
        run.finish()
        await a.result(timeout_s=PATIENCE_S)
        assert (await zips.status()).control.state is QueueState.PAUSED
        assert await b.state() is TaskState.QUEUED


@pytest.mark.spec("QUE-09", "QUE-22")
async def test_what_was_said_survives_a_restart(file_url, gates):
    """A paused queue is paused when its yard is opened again and sets its rules; a client may resume it from afar."""
    async with build(file_url, gates.port, queues=ONE) as yard:
        await yard.queue("zip").pause(reason="moving house")
        await yard.submit("gate", {"name": "a"}, queue="zip")
    async with build(file_url, gates.port, queues=ONE) as yard, build(file_url).client() as afar:
        await (await yard.submit("echo")).result(timeout_s=PATIENCE_S)
        (status,) = [status for status in await yard.queues() if status.name == "zip"]
        assert (status.control.state, status.settings.concurrency) == (QueueState.PAUSED, 1)
        await afar.queue("zip").resume()
        (await gates.begun("a")).finish()


async def test_a_concurrency_is_changed_while_tasks_run(url, gates):
    """More start at once when somebody raises the limit; lifted, the rule of the code holds again."""
    async with build(url, gates.port, queues=ONE) as yard:
        handles = [await yard.submit("gate", {"name": name}, queue="zip") for name in "abcd"]
        runs = [await gates.begun("a")]
        await yard.queue("zip").set_concurrency(3, reason="night")
        runs += [await gates.begun(name) for name in "bc"]
        status = await yard.queue("zip").set_concurrency(None)
        assert status.control.concurrency is None
        for run, handle in zip(runs[:2], handles, strict=False):
            run.finish()
            await handle.result(timeout_s=PATIENCE_S)
        assert await handles[3].state() is TaskState.QUEUED
        runs[2].finish()
        (await gates.begun("d")).finish()


@pytest.mark.spec("DEV-03", "DEV-15")
async def test_a_queue_has_the_order_it_was_defined_with(url, gates):
    """A strict queue goes by arrival whatever the priority; buckets take turns."""
    queues = {"line": {"concurrency": 1, "order": "fifo"}, "ring": {"concurrency": 1, "order": QueueOrder.BUCKETS}}
    async with build(url, gates.port, queues=queues) as yard:
        for queue in queues:
            await yard.queue(queue).pause()
        for name, priority in (("low", "low"), ("high", "high")):
            await yard.submit("gate", {"name": name}, queue="line", priority=priority)
        for name in ("x1", "x2", "y1", "y2"):
            await yard.submit("gate", {"name": name}, queue="ring", bucket=name[0])
        for queue, order in (("line", ["low", "high"]), ("ring", ["x1", "y1", "x2", "y2"])):
            await yard.queue(queue).resume()
            for name in order:
                run = await gates.next()
                assert run.name == name
                run.finish()


async def test_a_bucket_where_there_are_none_is_told_once(url, caplog):
    """The task is taken, since others may define its queue and do so later; the log says how to, once for a queue."""
    yard = build(url, queues={"line": {"order": "fifo"}, "ring": {"order": "buckets"}})
    async with yard:
        for queue in ("line", "ring", "default") * 2:
            await yard.submit("echo", queue=queue, bucket="b")
        async with build(url).client() as client:  # it serves nothing, and leaves the rules to those who do
            await client.submit("echo", bucket="b")
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.partition(";")[0] for text in told if "bucket" in text] == [
        "a bucket has no effect in queue line, which goes by fifo here",
        "a bucket has no effect in queue default, which goes by priority here",
    ]


async def test_what_makes_no_sense_is_refused(url):
    """A concurrency that is none, a nameless queue, an order or a patience that does not exist."""
    yard = build(url)
    for rules in ({"order": "random"}, {"starve_after": 0}, {"starve_wait_s": 0}):
        with pytest.raises(InvalidInput):
            yard.define_queue("q", **rules)
    async with yard.client():
        for concurrency in (0, -1, True, 1.5):
            with pytest.raises(InvalidInput, match="concurrency"):
                await yard.queue("q").set_concurrency(concurrency)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="the name of a queue"):
            yard.queue("")
        with pytest.raises(InvalidInput, match="bucket"):
            await yard.submit("echo", bucket="")
