"""Consumers that are registered and unregistered while everything runs, and who hears of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from taskyard import (
    BaseTaskConsumer,
    Reason,
    RetryPolicy,
    Scheduler,
    Task,
    TaskConsumerRegistry,
    TaskFailed,
    TaskState,
    Yard,
)
from taskyard.errors import UnknownConsumer
from taskyard.model.catalogue import ConsumerSpec
from taskyard.model.node import Node
from taskyard.ports.clock import SystemClock
from taskyard.ports.consumer import ConsumerChange
from taskyard.standalone import StandaloneQueue
from taskyard.stores.memory import MemoryStore
from tests.scenario.gates import PATIENCE_S, until, until_node
from tests.scenario.jobs import build


@pytest.mark.spec("SCH-27")
async def test_what_runs_goes_on_and_what_waits_waits(url, gates):
    """When a consumer goes, its run ends as it would have, nothing more of it starts or is submitted, and `why` says
    that nobody serves it; when it comes back, the rest is run."""
    async with build(url, gates.port) as yard:
        first, second = [await yard.submit("narrow_gate", {"name": name}) for name in ("first", "second")]
        run = await gates.begun("first")
        yard.unregister("narrow_gate")
        with pytest.raises(UnknownConsumer):
            await yard.submit("narrow_gate", {"name": "third"})
        with pytest.raises(UnknownConsumer):
            yard.unregister("narrow_gate")
        await until_node(yard, lacks="narrow_gate")
        why = await yard.why(second.uuid)
        assert why is not None
        assert why.reason is Reason.NO_NODE
        run.finish(7)
        assert await first.result(timeout_s=PATIENCE_S) == 7
        await (await yard.submit("echo")).result(timeout_s=PATIENCE_S)
        assert await second.state() is TaskState.QUEUED

        @yard.consumer(name="narrow_gate")
        async def successor(name: str) -> str:
            return f"{name} of another"

        assert await second.result(timeout_s=PATIENCE_S) == "second of another"


@pytest.mark.spec("SCH-27")
async def test_a_run_is_judged_by_the_rules_it_began_with(url):
    """A run whose consumer goes meanwhile, and that then fails, is tried again as that consumer said: here never."""
    yard = Yard(url)
    began, end = asyncio.Event(), asyncio.Event()

    @yard.consumer(retry=RetryPolicy(max_retries=0))
    async def brittle() -> None:
        began.set()
        await end.wait()
        raise OSError("down")

    async with yard:
        handle = await brittle.submit()
        await asyncio.wait_for(began.wait(), PATIENCE_S)
        yard.unregister("brittle")
        end.set()
        with pytest.raises(TaskFailed, match="down"):
            await handle.result(timeout_s=PATIENCE_S)
        with pytest.raises(UnknownConsumer):
            await brittle.submit()
        with pytest.raises(UnknownConsumer):
            await brittle.submit_many([{}])


@pytest.mark.spec("SCH-27")
async def test_others_hear_of_consumers(url):
    """A subscriber is told of each consumer that comes and goes, until it has heard enough; one that fails is no
    harm."""
    heard: list[tuple[str, ConsumerChange]] = []
    yard = Yard(url)

    def fail(name: str, change: ConsumerChange) -> None:
        raise RuntimeError("no ears")

    yard.subscribe(fail)
    unsubscribe = yard.subscribe(lambda name, change: heard.append((name, change)))

    @yard.consumer
    async def early() -> None: ...

    async with yard:

        @yard.consumer
        async def late() -> str:
            return "here"

        await until_node(yard, serves="late")
        assert await (await late.submit()).result(timeout_s=PATIENCE_S) == "here"
        yard.unregister("early")
        unsubscribe()
        yard.unregister("late")
    assert heard == [("early", "registered"), ("late", "registered"), ("early", "unregistered")]


@pytest.mark.spec("SCH-27")
async def test_who_comes_while_the_yard_is_opened_is_served():
    """A consumer that is registered, and one that is taken out, between the first and the last step of opening."""

    class SlowStore(MemoryStore):
        async def join(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
            await super().join(node, specs)
            yard.unregister("early")
            yard.consumer(late)

    yard = Yard(SlowStore(SystemClock()))

    @yard.consumer
    async def early() -> None: ...

    async def late() -> str:
        return "here"

    async with yard:
        assert await (await yard.submit("late")).result(timeout_s=PATIENCE_S) == "here"
        await until_node(yard, serves="late", lacks="early")


@pytest.mark.spec("SCH-27")
async def test_consumers_come_and_go_from_other_threads(url):
    """Registering and unregistering from another thread than the yard's takes effect as it does from its own."""
    async with Yard(url) as yard:

        async def late() -> str:
            return threading.current_thread().name

        await asyncio.to_thread(yard.consumer, late)
        assert await (await yard.submit("late")).result(timeout_s=PATIENCE_S) == threading.current_thread().name
        await asyncio.to_thread(yard.unregister, "late")
        await until_node(yard, lacks="late")


class Bell(BaseTaskConsumer):
    def __init__(self, name: str) -> None:
        self.name = name
        self.rung = asyncio.Event()
        self.may_end = asyncio.Event()
        self.has_ended = False

    async def consume(self, task: Task) -> None:
        self.rung.set()
        await self.may_end.wait()
        self.has_ended = True


@pytest.mark.spec("SCH-27")
async def test_a_scheduler_follows_its_registry():
    """What is registered while a scheduler runs is fired; what runs of a consumer that goes ends; what is due after
    that has an unknown source, unless another of the name is there."""
    registry = TaskConsumerRegistry()
    scheduler = Scheduler(registry)
    heard: list[tuple[str, ConsumerChange]] = []
    unsubscribe = registry.subscribe(lambda name, change: heard.append((name, change)))
    await scheduler.start()
    bell = Bell("bell")
    await asyncio.to_thread(registry.register, bell)
    scheduler.add_task(Task("bell"))
    await asyncio.wait_for(bell.rung.wait(), PATIENCE_S)
    registry.unregister("bell")
    stray = Task("bell")
    scheduler.add_task(stray)

    async def is_failed() -> bool:
        record = await scheduler.store.find(stray.uuid)
        return record is not None and record.state is TaskState.FAILED

    await until(is_failed)
    successor = Bell("bell")
    registry.register(successor)
    bell.may_end.set()
    successor.may_end.set()
    scheduler.add_task(Task("bell", schedule_at=datetime.now(UTC)))
    await asyncio.wait_for(successor.rung.wait(), PATIENCE_S)
    await scheduler.stop()
    assert (bell.has_ended, successor.has_ended) == (True, True)
    unsubscribe()
    registry.unregister("bell")  # nobody listens any more, and nothing happens
    assert heard == [("bell", "registered"), ("bell", "unregistered"), ("bell", "registered")]
    with pytest.raises(UnknownConsumer):
        registry.unregister("bell")


@pytest.mark.spec("SCH-27")
async def test_a_queue_alone_follows_its_registry():
    """A queue takes tasks for who is registered while it is open, and none for who has gone."""
    registry = TaskConsumerRegistry()
    async with StandaloneQueue(registry) as queue:
        with pytest.raises(UnknownConsumer):
            await queue.add(Task("bell"))
        bell = Bell("bell")
        bell.may_end.set()
        registry.register(bell)
        (uuid,) = await queue.add(Task("bell"))
        await asyncio.wait_for(queue.outcome(uuid), PATIENCE_S)
        registry.unregister("bell")
        with pytest.raises(UnknownConsumer):
            await queue.add(Task("bell"))
