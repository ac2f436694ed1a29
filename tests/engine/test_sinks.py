"""What a node tells its sinks, and that a sink never harms it."""

import asyncio
import logging
import time
from typing import Any

import pytest

from taskyard import errors
from taskyard.errors import InvalidInput, StoreUnavailable
from taskyard.execution.inline import InProcessExecutor
from taskyard.model.command import Cancel
from taskyard.model.execution import ExecutionResult
from taskyard.model.retry import RetryPolicy
from taskyard.ports import sink as sinks
from taskyard.ports.executor import ExecutionRequest, ExecutorStats
from taskyard.ports.explain import failed, rejected
from taskyard.ports.sink import (
    LoopRestarted,
    NodeEvent,
    NodeSampled,
    RunCanceled,
    RunCompleted,
    RunFailed,
    RunFinished,
    RunReturned,
    RunStarted,
    StoreCalled,
    StoreFailed,
    TasksClaimed,
    TasksSettled,
)
from taskyard.telemetry import RunLog
from tests.engine.support import Rig, Work, quiet


class Recorder:
    """Keeps the events of some kinds."""

    def __init__(self, *kinds: type[NodeEvent]) -> None:
        self.kinds = kinds or (NodeEvent,)
        self.events: list[Any] = []

    def tell(self, event: NodeEvent) -> None:
        self.events.append(event)


RUNS = (RunStarted, RunFinished)


async def give(record) -> int:
    return 1


async def fail(record) -> None:
    raise ConnectionError("away")


async def test_a_run_is_told_from_claim_to_settle(rig):
    """A completed task is claimed, started, completed and settled, in that order, with its claim and its wait."""
    recorder = Recorder(*RUNS, TasksClaimed, TasksSettled)
    rig.sinks.add(recorder)
    rig.consumer("give", give)
    record = rig.record("give", in_s=2)
    await rig.offer(record)
    await rig.advance(5)
    await rig.outcome(record.uuid)
    await quiet()
    started, claimed, completed, settled = recorder.events
    assert [type(event) for event in recorder.events] == [RunStarted, TasksClaimed, RunCompleted, TasksSettled]
    assert {started.claim.uuid, completed.claim.uuid, claimed.claims[0].uuid, settled.settles[0][0].uuid} == {
        record.uuid
    }
    assert (started.consumer.name, started.wait_s) == ("give", 3.0)
    assert (completed.status, completed.error, completed.move.result) == ("completed", None, "1")
    assert 0 < completed.duration_s < 5
    assert settled.answers == [None]


async def test_each_failed_attempt_says_what_follows(rig):
    """A failed attempt knows its number, how many there may be, and when the next one starts; the last one is final."""
    recorder = Recorder(RunFailed)
    rig.sinks.add(recorder)
    rig.consumer("fail", fail, retry=RetryPolicy(max_retries=2, jitter=0))
    uuid = await rig.submit("fail")
    for wait in (1, 2):
        await quiet()
        await rig.advance(wait)
    await rig.outcome(uuid)
    told = [(event.claim.attempt, event.attempts, event.retry_in_s, event.status) for event in recorder.events]
    assert told == [(1, 3, 1.0, "retrying"), (2, 3, 2.0, "retrying"), (3, 3, None, "failed")]
    assert [type(event.raised) for event in recorder.events] == [ConnectionError] * 3
    assert [event.is_final for event in recorder.events] == [False, False, True]


async def test_attempts_that_do_not_count_leave_the_number_of_retries(rig):
    """A run that was postponed is followed by as many attempts as before: the second of five, not of four."""
    recorder = Recorder(*RUNS)
    rig.sinks.add(recorder)

    async def later_then_fail(record) -> None:
        raise errors.RetryLater(7) if record.attempt == 1 else ConnectionError("away")

    rig.consumer("later", later_then_fail)
    await rig.submit("later")
    await quiet()
    await rig.advance(7)
    _, postponed, _, failed = recorder.events
    assert (type(postponed), postponed.status) == (RunReturned, "postponed")
    assert (failed.claim.attempt, failed.attempts) == (2, 5)


async def test_a_cancel_is_told(rig):
    """A run that ends by a cancel request is told as canceled, and no failure is."""
    recorder = Recorder(*RUNS)
    rig.sinks.add(recorder)
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    await rig.engine.apply([uuid], Cancel(), by="ann")
    await rig.outcome(uuid)
    assert [type(event) for event in recorder.events] == [RunStarted, RunCanceled]


async def test_a_stop_returns_what_runs(start_rig):
    """A run that a stop cuts short goes back, and its event says so."""
    rig = await start_rig()
    recorder = Recorder(RunFinished)
    rig.sinks.add(recorder)
    rig.consumer("work", Work())
    await rig.submit("work")
    await quiet()
    await rig.engine.stop(0.0)
    (event,) = recorder.events
    assert (type(event), event.status) == (RunReturned, "interrupted")
    assert "stopped" in event.reason


class Full(InProcessExecutor):
    """Has no room for the first request."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        self.requests += 1
        return await super().submit(request) if self.requests > 1 else failed(rejected("all seats are taken"))


async def test_a_rejection_is_told_with_its_reason(rig, caplog):
    """A run that its executor has no room for goes back, with the words of the executor, and is logged at INFO."""
    caplog.set_level(logging.INFO, "taskyard")
    recorder = Recorder(*RUNS)
    rig.sinks.add(recorder)
    rig.sinks.add(RunLog())
    rig.executors["full"] = Full()
    rig.consumer("give", give, executor="full")
    uuid = await rig.submit("give")
    await quiet()
    await rig.advance(1)
    assert (await rig.outcome(uuid)).state == "completed"
    assert [type(event) for event in recorder.events] == [RunStarted, RunReturned, RunStarted, RunCompleted]
    assert (recorder.events[1].status, "all seats are taken" in recorder.events[1].reason) == ("rejected", True)
    (line,) = [record for record in caplog.records if "rejected" in record.getMessage()]
    assert (line.levelno, "all seats are taken" in line.getMessage()) == (logging.INFO, True)


async def test_a_call_of_the_store_is_timed(rig):
    """Every transaction is told with its duration, what it carried and what it brought, and a failed one with its
    error."""
    recorder = Recorder(StoreCalled, StoreFailed)
    rig.sinks.add(recorder)
    rig.consumer("give", give)
    await rig.outcome(await rig.submit("give"))
    calls = [event for event in recorder.events if isinstance(event, StoreCalled)]
    assert [sum(getattr(call, name) for call in calls) for name in ("added", "claimed", "settled")] == [1, 1, 1]
    recorder.events.clear()
    rig.store.away = StoreUnavailable("gone")
    with pytest.raises(StoreUnavailable):
        await rig.submit("give")
    await quiet()
    called, failed = recorder.events[:2]
    assert (called.error, failed.error, failed.failures) == (rig.store.away, rig.store.away, 1)


class Broken(Recorder):
    def tell(self, event: NodeEvent) -> None:
        super().tell(event)
        raise ZeroDivisionError("a bug in a sink")


class Leaving(Recorder):
    def tell(self, event: NodeEvent) -> None:
        super().tell(event)
        raise SystemExit(3)


@pytest.mark.parametrize("bad", [Broken, Leaving])
async def test_a_sink_that_raises_harms_nobody(rig, caplog, bad):
    """Whatever a sink raises, tasks complete, other sinks are told, the error is logged once, and it goes on being
    told."""
    broken, recorder = bad(*RUNS), Recorder(*RUNS)
    rig.sinks.add(broken)
    rig.sinks.add(recorder)
    rig.consumer("give", give)
    for uuid in await rig.submit_many("give", 3):
        assert (await rig.outcome(uuid)).state == "completed"
    assert len(broken.events) == len(recorder.events) == 6
    [entry] = [entry for entry in caplog.records if f"the sink {bad.__name__} failed" in entry.getMessage()]
    assert entry.exc_info is not None


async def test_a_slow_sink_is_named_once(rig, caplog):
    """A sink that blocks the loop for longer than it may is logged once, with how long it took."""

    class Slow(Recorder):
        def tell(self, event: NodeEvent) -> None:
            time.sleep(sinks.SLOW_S + 0.01)

    rig.sinks.add(Slow(RunStarted))
    rig.consumer("give", give)
    for uuid in await rig.submit_many("give", 2):
        await rig.outcome(uuid)
    assert len([text for text in caplog.messages if "the sink Slow took 0.1 s for one event" in text]) == 1


async def test_sinks_come_and_go(rig):
    """A sink that is added while the node runs is told from then on, and not after it was removed."""
    recorder = Recorder(RunCompleted)
    rig.consumer("give", give)
    await rig.outcome(await rig.submit("give"))
    remove = rig.sinks.add(recorder)
    await rig.outcome(await rig.submit("give"))
    remove()
    remove()
    await rig.outcome(await rig.submit("give"))
    assert len(recorder.events) == 1


async def test_nothing_is_made_for_nobody(monkeypatch):
    """On the way of a task from submit to settle no event is made unless a sink wants it."""
    rig = Rig()
    rig.probes.kinds = frozenset()
    told = []
    bare = sinks.Sinks([Recorder(LoopRestarted)])
    monkeypatch.setattr(sinks.Sinks, "tell", lambda self, event: told.append(event))
    rig.engine = type(rig.engine)(
        rig.store, clock=rig.clock, consumers=rig.consumers, executors=rig.executors, sinks=bare
    )
    await rig.engine.start()
    try:
        rig.consumer("give", give)
        rig.consumer("fail", fail)
        await rig.outcome(await rig.submit("give"))
        await rig.submit("fail")
        await quiet()
    finally:
        await rig.engine.stop(0.0)
    assert [event for event in told if not isinstance(event, sinks.SchedulesChecked)] == []


@pytest.mark.parametrize(
    "bad",
    [print, object(), type("Kindless", (), {"tell": print})(), type("Odd", (), {"tell": print, "kinds": "all"})()],
)
def test_what_is_no_sink_is_refused(bad):
    """A sink without `tell`, or without kinds of events, is refused with what it needs."""
    with pytest.raises(InvalidInput, match=r"a sink has a method tell\(event\) and an attribute kinds"):
        sinks.Sinks().add(bad)


def test_every_kind_can_be_wanted():
    """A sink that wants all events is told of every class of event that there is."""

    def leaves(kind: type) -> set[type]:
        below: list[type] = kind.__subclasses__()
        return set().union(*map(leaves, below)) if below else {kind}

    assert set(sinks.KINDS) == leaves(NodeEvent)
    assert sinks.Sinks([Recorder()]).kinds == set(sinks.KINDS)


async def test_a_node_is_sampled_every_second(rig):
    """Once a second a sink gets the runs, the free slots and the numbers of each executor, and other sinks do not make
    the node count them."""
    recorder, work = Recorder(NodeSampled), Work()
    rig.sinks.add(recorder)
    rig.consumer("work", work, concurrency=3)
    first, _ = await rig.submit_many("work", 2)
    await quiet()
    await rig.advance(1)
    work.let_go(first)
    await quiet()
    await rig.advance(1)
    told = [(event.running, event.max_running, event.available) for event in recorder.events]
    assert told == [(2, 100, {"work": 1}), (1, 100, {"work": 2})]
    inline = [event.executors["inline"] for event in recorder.events]
    assert [(stats.active, stats.done) for stats in inline] == [(2, 0), (1, 1)]


async def test_a_loop_that_starts_again_is_told(rig, monkeypatch):
    """A loop of the engine that failed is told with its name and its error."""
    recorder = Recorder(LoopRestarted)
    rig.sinks.add(recorder)
    take = rig.engine._inbox.take

    def fail_once() -> Any:
        rig.engine._inbox.take = take
        raise ZeroDivisionError("a bug")

    rig.engine._inbox.take = fail_once
    rig.consumer("give", give)
    submitted = asyncio.ensure_future(rig.submit("give"))
    await quiet()
    await rig.advance(1)
    await rig.outcome(await submitted)
    assert [(event.name, str(event.error)) for event in recorder.events] == [("dispatcher", "a bug")]


class Deaf(InProcessExecutor):
    """Raises when it is asked for its numbers, as one of somebody else may."""

    def stats(self, name: str | None = None) -> ExecutorStats:
        raise ConnectionError("the cluster is away")


async def test_an_executor_without_numbers_is_left_out(start_rig, caplog):
    """An executor whose `stats()` raises is left out of the samples, which go on, and is logged once."""
    rig = await start_rig()
    recorder = Recorder(NodeSampled, LoopRestarted)
    rig.executors["deaf"] = Deaf()
    rig.sinks.add(recorder)
    await quiet()
    for _ in range(3):
        await rig.advance(1)
    assert [type(event) for event in recorder.events] == [NodeSampled] * 3
    assert {tuple(event.executors) for event in recorder.events} == {("inline", "thread")}
    assert caplog.text.count("stats() of the executor deaf failed") == 1
