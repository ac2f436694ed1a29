"""A queue in the order in which it will start, and why many tasks wait: asked of a yard while it works."""

import pytest

from taskyard import InvalidInput, Reason, StandaloneQueue, TaskConsumerRegistry, TaskFilter, TaskState
from taskyard.queueing import waiting
from tests.scenario.gates import PATIENCE_S
from tests.scenario.jobs import build

ONE_AT_A_TIME = {"default": {"concurrency": 1}}


@pytest.mark.spec("QUE-32")
async def test_tasks_start_in_the_order_that_was_shown(url, gates):
    """What waits behind a running task is shown with its places, and starts in that order: the high one first, then by
    arrival, past the held one."""
    async with build(url, gates.port, queues=ONE_AT_A_TIME) as yard:
        running = await yard.submit("gate", {"name": "running"})
        run = await gates.begun("running")
        tasks = {name: await yard.submit("gate", {"name": name}) for name in ("a", "held", "b")}
        tasks["urgent"] = await yard.submit("gate", {"name": "urgent"}, priority="high", title="for the boss")
        await yard.hold(tasks["held"].uuid, reason="not yet")
        view = await yard.queue().order()
        names = {task.uuid: name for name, task in tasks.items()}
        assert [entry.uuid for entry in view.running] == [running.uuid]
        assert [(names[entry.uuid], entry.place) for entry in view.waiting] == [("urgent", 1), ("a", 2), ("b", 3)]
        assert view.waiting[0].title == "for the boss"
        assert [(names[entry.uuid], entry.why and entry.why.reason) for entry in view.apart] == [("held", Reason.HELD)]
        assert (view.waiting_count, view.slots, view.find_place(tasks["b"].uuid)) == (3, 1, 3)
        assert (await yard.queue().order(limit=1)).waiting == view.waiting[:1]
        for name in ("urgent", "a", "b"):
            run.finish()
            run = await gates.begun(name)
        run.finish()
        await tasks["b"].result(timeout_s=PATIENCE_S)


@pytest.mark.spec("QUE-32")
async def test_expected_starts_need_three_runs(url, gates):
    """Expected starts and the end of a queue are told once its consumer has completed three runs; and what another
    concurrency would change."""
    async with build(url, gates.port, queues=ONE_AT_A_TIME) as yard:
        for n in range(3):
            await (await yard.submit("echo")).result(timeout_s=PATIENCE_S)
            medians = await yard.store.median_run_s(["echo"])
            assert ("echo" in medians) == (n == 2)
        await yard.queue().pause()
        for _ in range(2):
            await yard.submit("echo")
        paused = await yard.queue().order(concurrency=2)
        assert [entry.expected_start_at for entry in paused.waiting] == [None, None]
        assert paused.what_if is not None
        assert (paused.what_if.concurrency, paused.what_if.slots) == (2, 2)


@pytest.mark.spec("QUE-32")
async def test_a_queue_alone_can_be_asked():
    """`order` is a verb of a queue that stands alone; a limit that makes no sense is refused."""
    async with StandaloneQueue(TaskConsumerRegistry(), concurrency=1) as queue:
        assert (await queue.order(limit=5)).concurrency == 1
        for wrong in ({"limit": 0}, {"limit": 1001}, {"concurrency": 0}):
            with pytest.raises(InvalidInput):
                await queue.order(**wrong)


@pytest.mark.spec("QUE-32")
def test_blocking_code_can_ask(file_url):
    """The blocking yard has `order` of a queue, and the reasons of all tasks."""
    with build(file_url).blocking(serve=False) as yard:
        task = yard.submit("echo")
        assert yard.queue().order().find_place(task.uuid) == 1
        assert [one.reason for one in yard.why_all().groups] == [Reason.NO_NODE]


async def test_the_reasons_of_many_are_added_up(url, gates):
    """Each reason comes once, with how many wait for it, the largest first; tasks of other keys are told apart."""
    async with build(url, gates.port, queues={"default": {"concurrency": 9}}, max_running=9) as yard:
        holder = await yard.submit("gate", {"name": "holder"}, key="8841")
        run = await gates.begun("holder")
        other = await yard.submit("gate", {"name": "other"}, key="9000")
        other_run = await gates.begun("other")
        for _ in range(3):
            await yard.submit("echo", key="8841")
        later = [await yard.submit("echo", delay_s=3600) for _ in range(2)]
        await yard.submit("echo", key="9000")
        summary = await yard.why_all()
        assert [(one.count, one.reason, one.subject, one.blocker) for one in summary.groups] == [
            (3, Reason.KEY_BUSY, "8841", holder.uuid),
            (2, Reason.SCHEDULED, "", None),
            (1, Reason.KEY_BUSY, "9000", other.uuid),
        ]
        assert (summary.total, summary.explained, summary.is_sampled) == (6, 6, False)
        assert summary.groups[1].until == min([(await task.record()).due_at for task in later])
        only = await yard.why_all(TaskFilter(key="9000"))
        assert [one.count for one in only.groups] == [1]
        assert (await yard.why_all(TaskFilter(states=(TaskState.COMPLETED,)))).groups == []
        run.finish()
        other_run.finish()


async def test_of_very_many_a_sample_is_explained(url, monkeypatch):
    """Above ten thousand tasks, here fifty, a sample from all over is explained, and the counts are scaled."""
    monkeypatch.setattr(waiting, "EXPLAINED", 50)
    monkeypatch.setattr(waiting, "DRAWN_AT_ONCE", 5)
    async with build(url).client() as yard:
        await yard.submit_many("echo", [{}] * 100)
        await yard.submit_many("add", [{"a": 1}] * 100)
        summary = await yard.why_all(TaskFilter(queue="default"))
        assert (summary.total, summary.explained, summary.is_sampled) == (200, 50, True)
        assert [(one.count, one.reason, one.subject) for one in summary.groups] == [
            (100, Reason.NO_NODE, "add"),
            (100, Reason.NO_NODE, "echo"),
        ]
