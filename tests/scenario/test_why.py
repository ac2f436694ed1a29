"""Why a task waits, asked by people while others work."""

import asyncio

import pytest

from taskyard import Reason
from taskyard.errors import UnknownTask
from taskyard.model.task import new_uuid
from tests.scenario.gates import PATIENCE_S
from tests.scenario.jobs import build


async def test_limits_of_a_running_node_are_named(url, gates):
    """What stands in the way is told of the yard that runs: its source is full, its node is full, or nothing is."""
    async with build(url, gates.port, each=5, max_running=2) as yard:
        first = await yard.submit("narrow_gate", {"name": "first"})
        run = await gates.begun("first")
        second = await yard.submit("narrow_gate", {"name": "second"})
        why = await yard.why(second.uuid)
        assert why is not None
        assert (why.reason, why.blocker) == (Reason.CONSUMER_FULL, first.uuid)
        assert await yard.why(first.uuid) is None
        filling = await yard.submit("gate", {"name": "filling"})
        other = await gates.begun("filling")
        third = await yard.submit("echo")
        why = await yard.why(third.uuid)
        assert why is not None
        assert (why.reason, why.blocker) == (Reason.NODES_FULL, first.uuid)
        other.finish()
        await filling.result(timeout_s=PATIENCE_S)
        await third.result(timeout_s=PATIENCE_S)
        run.finish()
        (await gates.begun("second")).finish()
        await second.result(timeout_s=PATIENCE_S)
        assert await yard.why(second.uuid) is None


async def test_a_task_waits_for_a_pause_from_when_it_came(url):
    """A pause is told with its own time; the task has waited for it since it was there, or since then if that is
    later."""
    async with build(url).client() as yard:
        early = await yard.submit("echo")
        paused = (await yard.queue().pause()).control.state_set
        late = await yard.submit("echo")
        assert paused is not None
        for task, since in ((early, paused.at), (late, (await late.record()).created_at)):
            why = await yard.why(task)
            assert why is not None
            assert (why.reason, why.since) == (Reason.QUEUE_PAUSED, since)
            assert f"since {paused.at:%Y-%m-%d %H:%M:%S} UTC" in why.text


async def test_threads_that_others_have_taken_are_named(url, gates):
    """Two consumers share the yard's threads: what the one runs there holds up the other, and is said to."""
    async with build(url, gates.port, threads=1) as yard:

        @yard.consumer
        def also_in_a_thread() -> None: ...

        first = await yard.submit("thread_gate", {"name": "first"})
        run = await gates.begun("first")
        second = await also_in_a_thread.submit()
        why = await yard.why(second.uuid)
        assert why is not None
        assert (why.reason, why.blocker) == (Reason.EXECUTOR_FULL, first.uuid)
        run.finish()
        await second.result(timeout_s=PATIENCE_S)


async def test_a_yard_that_stops_takes_nothing_more(file_url, gates):
    """While a yard waits for what it runs, another process is told that what waits has nobody to wait for."""
    async with build(file_url).client() as asking:
        running = build(file_url, gates.port, grace_s=None)
        await running.start()
        first, second = await asking.submit_many("narrow_gate", [{"name": "a"}, {"name": "b"}])
        run = await gates.begun("a")
        stopping = asyncio.create_task(running.stop())
        async with asyncio.timeout(PATIENCE_S):
            while not (await asking.store.nodes())[0].node.is_stopping:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0)
        why = await asking.why(second.uuid)
        assert why is not None
        assert why.reason is Reason.NO_NODE
        assert "is stopping" in why.text
        run.finish()
        await stopping
        assert await first.state() == "completed"


async def test_an_unknown_task_is_named(url):
    """Asked of a task that is not there, the answer is that it is not there."""
    async with build(url) as yard:
        with pytest.raises(UnknownTask):
            await yard.why(new_uuid())


async def test_a_process_that_runs_nothing_may_ask(file_url, gates, nodes):
    """A client sees what other processes run, and that none is left when the last was killed, also of what it ran:
    nobody has buried it."""
    node = await nodes.start(file_url, queues={"q": {"concurrency": 1}})
    async with build(file_url).client() as yard:
        first, second = await yard.submit_many("gate", [{"name": "a"}, {"name": "b"}], queue="q")
        await gates.begun("a")
        page = await yard.store.list_tasks()
        found = {record.uuid: why for record, why in zip(page, await yard.why_many(page), strict=True)}
        why = found[second.uuid]
        assert found[first.uuid] is None
        assert why is not None
        assert (why.reason, why.blocker) == (Reason.QUEUE_FULL, first.uuid)
        await node.kill()
        why = await yard.why(second.uuid)
        assert why is not None
        assert why.reason is Reason.NO_NODE
        lost = await yard.why(first.uuid)
        assert lost is not None
        assert (lost.reason, lost.remedy) == (Reason.NODE_SILENT, "start a worker")
        assert "has died, and there is no other to take the task back" in lost.text
