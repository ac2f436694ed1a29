"""Why a task waits, asked by people while others work."""

import pytest

from taskyard import Reason, UnknownTask
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
        assert (why.reason, why.blocker) == (Reason.SOURCE_FULL, first.uuid)
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


async def test_an_unknown_task_is_named(url):
    """Asked of a task that is not there, the answer is that it is not there."""
    async with build(url) as yard:
        with pytest.raises(UnknownTask):
            await yard.why(new_uuid())


async def test_a_process_that_runs_nothing_may_ask(file_url, gates, nodes):
    """A client sees what other processes run, and that none is left when the last was killed: nobody has buried it."""
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
