"""The standalone Scheduler and its registry, beyond the six acceptance cases."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from taskyard import BaseTaskConsumer, Scheduler, Task, TaskConsumerRegistry, TaskState
from taskyard.errors import DuplicateConsumer, InvalidConsumer, NaiveDatetime, StoreUnavailable
from taskyard.telemetry import RunLog
from tests.scenario.gates import Gates, attend

PATIENCE_S = 10


class Gate(BaseTaskConsumer):
    """A consumer whose runs the test holds by the hand."""

    def __init__(self, name: str, gates: Gates, count: Any = 1) -> None:
        self.name, self.concurrent_count, self._gates = name, count, gates

    def produce(self, args: dict[str, Any]) -> Task:
        return Task(source=self.name, args=args)

    async def consume(self, task: Task) -> Any:
        return await attend(self._gates.port, task.args["name"])


class Collector(BaseTaskConsumer):
    """Keeps the tasks it was given."""

    name = "collector"
    concurrent_count = 100

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._more = asyncio.Event()

    async def consume(self, task: Task) -> None:
        self.tasks.append(task)
        self._more.set()

    async def holds(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.tasks) < count:
                self._more.clear()
                await self._more.wait()


@pytest.fixture
def registry() -> TaskConsumerRegistry:
    return TaskConsumerRegistry()


@pytest.fixture
async def scheduler(registry: TaskConsumerRegistry) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(registry)
    await scheduler.start()
    yield scheduler
    await scheduler.stop(grace=0)


async def state_of(scheduler: Scheduler, task: Task) -> TaskState:
    record = await scheduler.store.find(task.uuid)
    assert record is not None
    return record.state


# --- consumers, tasks and the registry --------------------------------------------------------------------------------


@pytest.mark.spec("SCH-01")
async def test_a_subclass_produces_and_consumes(scheduler, registry):
    """A subclass with a name, produce and consume is a consumer; concurrent_count is 1 unless it says otherwise."""
    seen: list[str] = []
    done = asyncio.Event()

    class Greeter(BaseTaskConsumer):
        name = "greeter"

        def produce(self, args: dict[str, Any]) -> Task:
            return Task(source=self.name, args={"text": f"hello {args['who']}"})

        async def consume(self, task: Task) -> None:
            seen.append(task.args["text"])
            done.set()

    greeter = Greeter()
    registry.register(greeter)
    assert greeter.concurrent_count == 1
    scheduler.add_task(greeter.produce({"who": "yard"}))
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    assert seen == ["hello yard"]


@pytest.mark.spec("SCH-02")
async def test_a_task_can_be_written_down_and_restored(scheduler, registry):
    """A task goes through to_dict, JSON and from_dict unchanged, and runs under the uuid it had."""
    collector = Collector()
    registry.register(collector)
    east = timezone(timedelta(hours=8))
    task = Task(source="collector", args={"n": 1, "deep": {"list": [1, None, "x"]}}, schedule_at=datetime.now(east))
    restored = Task.from_dict(json.loads(json.dumps(task.to_dict())))
    assert restored == task
    scheduler.add_task(restored)
    await collector.holds(1)
    assert collector.tasks == [task]


@pytest.mark.spec("SCH-02")
def test_a_task_is_due_now_unless_it_says_otherwise():
    """The default time is the present moment, with a time zone, and every task has a uuid of its own."""
    before = datetime.now(UTC)
    one, two = Task(source="s"), Task(source="s")
    assert before <= one.schedule_at <= datetime.now(UTC)
    assert one.uuid != two.uuid


@pytest.mark.spec("SCH-02")
def test_a_naive_time_is_refused():
    """A time without a zone is refused, with a message that shows how to write one."""
    with pytest.raises(NaiveDatetime, match=r"has no time zone; write datetime\.now\(timezone\.utc\)"):
        Task(source="s", schedule_at=datetime(2030, 1, 1))  # noqa: DTZ001 - the point of the test


@pytest.mark.spec("SCH-03")
def test_the_registry_has_one_default_and_others_beside_it(registry):
    """`default()` is one instance for all; an instance of one's own shares nothing with it."""
    assert TaskConsumerRegistry.default() is TaskConsumerRegistry.default()
    collector = Collector()
    registry.register(collector)
    assert registry.sources == {"collector": collector}
    assert registry.find("collector") is collector
    assert registry.find("nobody") is None
    assert TaskConsumerRegistry.default().find("collector") is None


@pytest.mark.spec("SCH-03")
def test_two_consumers_cannot_share_a_name(registry):
    """A second consumer of the same name, and one without any, is an error, and the first stays."""
    first = Collector()
    registry.register(first)
    with pytest.raises(DuplicateConsumer, match="give one of the two another name"):
        registry.register(Collector())
    assert registry.find("collector") is first
    nameless = Collector()
    nameless.name = ""
    with pytest.raises(InvalidConsumer, match="set the class attribute `name`"):
        registry.register(nameless)


@pytest.mark.spec("SCH-03")
async def test_without_a_registry_the_default_one_is_used():
    """A scheduler that is given no registry finds what was registered in the default one."""
    collector = Collector()
    collector.name = "collector-of-the-default-registry"
    TaskConsumerRegistry.default().register(collector)
    try:
        scheduler = Scheduler()
        await scheduler.start()
        scheduler.add_task(task := Task(source=collector.name))
        await collector.holds(1)
        assert collector.tasks == [task]
        await scheduler.stop()
    finally:
        del TaskConsumerRegistry.default().sources[collector.name]


@pytest.mark.spec("SCH-25")
async def test_a_task_is_never_changed(scheduler, registry):
    """Whatever a consumer does to the task it gets, the one that was handed in stays as it was."""

    class Vandal(Collector):
        async def consume(self, task: Task) -> None:
            task.args["mine"] = task.args.pop("yours")
            await super().consume(task)

    vandal = Vandal()
    registry.register(vandal)
    task = Task(source="collector", args={"yours": [1, 2]})
    before = json.dumps(task.to_dict())
    scheduler.add_task(task)
    await vandal.holds(1)
    assert vandal.tasks[0].args == {"mine": [1, 2]}
    assert json.dumps(task.to_dict()) == before


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-08")
@pytest.mark.parametrize("count", [0, -3, None, "two", True, 2.5])
async def test_a_count_that_makes_no_sense_is_one(scheduler, registry, gates, count):
    """A source whose concurrent_count is missing or invalid runs one task at a time."""
    registry.register(Gate("g", gates, count))
    for name in "ab":
        scheduler.add_task(Task(source="g", args={"name": name}))
    for name in "ab":
        run = await gates.begun(name)
        run.finish()
        await run.gone()
    assert gates.most_at_once == 1


@pytest.mark.spec("SCH-08")
async def test_sources_do_not_hold_each_other_up(scheduler, registry, gates):
    """A source at its limit, with a long backlog, keeps no other source waiting."""
    registry.register(Gate("slow", gates))
    registry.register(Gate("swift", gates))
    for n in range(50):
        scheduler.add_task(Task(source="slow", args={"name": f"slow-{n}"}))
    await gates.begun("slow-0")
    scheduler.add_task(Task(source="swift", args={"name": "swift"}))
    (await gates.begun("swift")).finish()
    assert gates.names == ["slow-0", "swift"]


@pytest.mark.spec("SCH-08", "SCH-10")
async def test_an_error_frees_the_slot(scheduler, registry, gates):
    """A task that raises gives its slot to the next one."""
    registry.register(Gate("g", gates))
    for name in "ab":
        scheduler.add_task(Task(source="g", args={"name": name}))
    (await gates.begun("a")).fail("OSError", "broken pipe")
    (await gates.begun("b")).finish()
    assert gates.most_at_once == 1


@pytest.mark.spec("SCH-15")
async def test_a_limit_on_all_together(registry, gates):
    """`max_running` bounds what runs at once over all sources, whatever each of them may."""
    scheduler = Scheduler(registry, max_running=3)
    await scheduler.start()
    for source in ("one", "two"):
        registry.register(Gate(source, gates, count=5))
    for n in range(5):
        for source in ("one", "two"):
            scheduler.add_task(Task(source=source, args={"name": f"{source}-{n}"}))
    for _ in range(10):
        run = await gates.next()
        if len(gates.visits) >= 3:
            run.finish()
    for run in gates.going_on:
        run.finish()
    await scheduler.stop()
    assert gates.most_at_once == 3
    assert len(gates.visits) == 10


# --- failing, starting, stopping --------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-10")
async def test_an_exception_is_logged_with_its_stack(scheduler, registry, caplog):
    """What consume raises is logged as `[fail] …` with the stack, is not tried again, and the next task runs."""

    class Clumsy(Collector):
        async def consume(self, task: Task) -> None:
            await super().consume(task)
            if task.args.get("drop"):
                raise KeyError("butter fingers")

    clumsy = Clumsy()
    registry.register(clumsy)
    bad, good = Task(source="collector", args={"drop": True}), Task(source="collector")
    with caplog.at_level(logging.ERROR, "taskyard"):
        scheduler.add_task(bad)
        await clumsy.holds(1)
        scheduler.add_task(good)
        await clumsy.holds(2)
    [entry] = [entry for entry in caplog.records if entry.getMessage().startswith("[fail]")]
    assert entry.getMessage() == f"[fail] task {bad.uuid} from collector: 'butter fingers'"
    assert entry.exc_info is not None
    assert entry.exc_info[0] is KeyError
    assert 'raise KeyError("butter fingers")' in caplog.text
    assert await state_of(scheduler, bad) is TaskState.FAILED
    assert [task.uuid for task in clumsy.tasks] == [bad.uuid, good.uuid]


@pytest.mark.spec("SCH-10", "EXE-12")
async def test_runs_are_logged_by_a_sink(registry, caplog):
    """A scheduler takes sinks: with one for runs, start and end of a task are logged with its fields."""
    collector = Collector()
    registry.register(collector)
    scheduler, task = Scheduler(registry, sinks=[RunLog()]), Task(source="collector")
    with caplog.at_level(logging.INFO, "taskyard"):
        await scheduler.start()
        scheduler.add_task(task)
        await collector.holds(1)
        await scheduler.stop()
    lines: list[Any] = [line for line in caplog.records if hasattr(line, "request_id")]
    assert [(line.request_id, line.consumer, line.status) for line in lines] == [
        (task.uuid, "collector", "started"),
        (task.uuid, "collector", "completed"),
    ]


@pytest.mark.spec("SCH-11")
async def test_start_is_idempotent(scheduler, registry, caplog):
    """Starting a scheduler that runs changes nothing: each task fires once, and one start is logged."""
    collector = Collector()
    registry.register(collector)
    with caplog.at_level(logging.INFO, "taskyard"):
        await scheduler.start()
        await scheduler.start()
    for _ in range(10):
        scheduler.add_task(Task(source="collector"))
    await collector.holds(10)
    await scheduler.stop()
    assert len(collector.tasks) == 10
    assert "Scheduler started" not in caplog.messages


@pytest.mark.spec("SCH-11")
async def test_a_stopped_scheduler_can_be_started_again(scheduler, registry):
    """What waits when a scheduler is stopped, and what is added while it is, fires after the next start."""
    collector = Collector()
    registry.register(collector)
    waiting = Task(source="collector", schedule_at=datetime.now(UTC) + timedelta(seconds=0.2))
    scheduler.add_task(waiting)
    await scheduler.stop()
    await scheduler.stop()  # twice does no harm
    meanwhile = Task(source="collector", schedule_at=waiting.schedule_at + timedelta(milliseconds=50))
    scheduler.add_task(meanwhile)
    assert collector.tasks == []
    await scheduler.start()
    await collector.holds(2)
    assert [task.uuid for task in collector.tasks] == [waiting.uuid, meanwhile.uuid]


@pytest.mark.spec("SCH-12")
async def test_after_the_grace_what_runs_is_interrupted(scheduler, registry, gates):
    """stop(grace=…) cancels what still runs when the grace is over, and records the run as interrupted."""
    registry.register(Gate("g", gates))
    task = Task(source="g", args={"name": "endless"})
    scheduler.add_task(task)
    run = await gates.begun("endless")
    async with asyncio.timeout(PATIENCE_S):
        await scheduler.stop(grace=0.05)
    await run.gone()
    [recorded] = await scheduler.store.list_attempts(task.uuid)
    assert recorded.state is TaskState.INTERRUPTED
    assert await state_of(scheduler, task) is TaskState.QUEUED


@pytest.mark.spec("SCH-12")
async def test_what_ends_within_the_grace_is_left_alone(scheduler, registry, gates):
    """A task that ends by itself within the grace completes, and stop returns at once then."""
    registry.register(Gate("g", gates))
    task = Task(source="g", args={"name": "brief"})
    scheduler.add_task(task)
    run = await gates.begun("brief")
    stopping = asyncio.create_task(scheduler.stop(grace=60))
    run.finish()
    async with asyncio.timeout(PATIENCE_S):
        await stopping
    assert await state_of(scheduler, task) is TaskState.COMPLETED


@pytest.mark.spec("SCH-23")
async def test_start_and_stop_are_logged(registry, caplog):
    """INFO lines say that the scheduler started, and that it stopped."""
    scheduler = Scheduler(registry)
    with caplog.at_level(logging.INFO, "taskyard"):
        await scheduler.start()
        assert caplog.record_tuples == [("taskyard", logging.INFO, "Scheduler started")]
        await scheduler.stop()
    assert caplog.record_tuples[1:] == [("taskyard", logging.INFO, "Scheduler stopped")]


@pytest.mark.spec("SCH-23", "SCH-10")
async def test_a_stop_is_logged_after_a_failure_too(registry, caplog, monkeypatch):
    """A loop that fails is logged and goes on by itself, and stopping it says `Scheduler stopped` all the same."""
    collector = Collector()
    registry.register(collector)
    scheduler = Scheduler(registry)
    turn, failed = scheduler.store.turn, asyncio.Event()

    async def broken(*args: Any, **parts: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise StoreUnavailable("somebody pulled the plug")
        return await turn(*args, **parts)

    monkeypatch.setattr(scheduler.store, "turn", broken)
    with caplog.at_level(logging.INFO, "taskyard"):
        await scheduler.start()
        await asyncio.wait_for(failed.wait(), PATIENCE_S)
        scheduler.add_task(Task(source="collector"))
        await collector.holds(1)
        await scheduler.stop()
    assert any("somebody pulled the plug" in message for message in caplog.messages)
    assert caplog.messages[-1] == "Scheduler stopped"


@pytest.mark.spec("SCH-20")
async def test_tasks_are_added_from_other_threads(scheduler, registry):
    """add_task may be called from any thread, before the start and after it, and every task fires once."""
    collector = Collector()
    registry.register(collector)
    tasks = [[Task(source="collector", args={"n": n}) for n in range(50)] for _ in range(8)]

    def add(own: list[Task]) -> None:
        for task in own:
            scheduler.add_task(task)

    threads = [threading.Thread(target=add, args=(own,)) for own in tasks]
    for thread in threads:
        thread.start()
    await collector.holds(400)
    for thread in threads:
        thread.join()
    assert {task.uuid for task in collector.tasks} == {task.uuid for own in tasks for task in own}
    assert len(collector.tasks) == 400


@pytest.mark.spec("SCH-05", "SCH-06", "SCH-20")
@pytest.mark.parametrize("is_started", [False, True])
async def test_what_is_overdue_fires_by_time_too(registry, gates, is_started):
    """Overdue tasks that are handed in together, before the start or after it, fire by time, equal times as added."""
    registry.register(Gate("g", gates))
    scheduler = Scheduler(registry)
    if is_started:
        await scheduler.start()
    now = datetime.now(UTC)
    for name, ago in [("b1", 1), ("a", 2), ("b2", 1), ("c", 0.5)]:
        scheduler.add_task(Task(source="g", args={"name": name}, schedule_at=now - timedelta(seconds=ago)))
    await scheduler.start()
    for _ in range(4):
        (await gates.next()).finish()
    assert gates.names == ["a", "b1", "b2", "c"]
    await scheduler.stop()


@pytest.mark.spec("SCH-20")
def test_tasks_can_be_added_before_there_is_a_loop(registry):
    """A scheduler takes tasks in code that has no event loop yet."""
    scheduler = Scheduler(registry)
    scheduler.add_task(Task(source="collector"))

    async def run() -> int:
        collector = Collector()
        registry.register(collector)
        await scheduler.start()
        await collector.holds(1)
        await scheduler.stop()
        return len(collector.tasks)

    assert asyncio.run(run()) == 1


async def test_only_the_last_ended_tasks_are_kept(registry, monkeypatch):
    """However much is fired, a bounded number of ended tasks stays in memory, the latest, besides all that wait."""
    monkeypatch.setattr("taskyard.standalone.KEEP_ENDED", 5)
    scheduler, collector = Scheduler(registry), Collector()
    registry.register(collector)
    waiting = Task(source="collector", schedule_at=datetime.now(UTC) + timedelta(hours=1))
    scheduler.add_task(waiting)
    await scheduler.start()
    tasks = [Task(source="collector") for _ in range(20)]
    for n, task in enumerate(tasks, 1):
        scheduler.add_task(task)
        await collector.holds(n)
    await scheduler.stop()
    kept = {record.uuid for record in await scheduler.store.list_tasks()}
    assert kept == {waiting.uuid, *(task.uuid for task in tasks[-5:])}


@pytest.mark.spec("SCH-25")
async def test_a_task_that_is_added_twice_runs_twice(scheduler, registry):
    """Each `add_task` runs its task, and `consume` gets it as it was given, also if the same task was added before."""
    collector = Collector()
    registry.register(collector)
    task = Task(source="collector", args={"n": [1]})
    before = task.to_dict()
    scheduler.add_task(task)
    scheduler.add_task(task)
    await collector.holds(2)
    scheduler.add_task(task)
    await collector.holds(3)
    assert collector.tasks == [task] * 3
    assert task.to_dict() == before


async def test_a_task_that_is_added_again_is_a_new_stored_task(scheduler, registry):
    """The first add is stored under the task's uuid, every other one under a new uuid with the task as its origin."""
    collector = Collector()
    registry.register(collector)
    task = Task(source="collector")
    for n in range(1, 4):
        scheduler.add_task(task)
        await collector.holds(n)
    records = await scheduler.store.list_tasks()
    assert len({record.uuid for record in records}) == 3
    assert sorted(record.origin or record.uuid for record in records) == [task.uuid] * 3
    assert await scheduler.store.find(task.uuid) is not None


@pytest.mark.spec("SCH-05")
async def test_a_task_that_is_added_twice_keeps_the_order(registry):
    """Tasks that are due at the same time run in the order they were added, a repeated one among them."""
    scheduler, collector = Scheduler(registry), Collector()
    collector.concurrent_count = 1
    registry.register(collector)
    at = datetime.now(UTC)
    one, two = Task(source="collector", schedule_at=at), Task(source="collector", schedule_at=at)
    for task in (one, one, two, one):
        scheduler.add_task(task)
    await scheduler.start()
    await collector.holds(4)
    await scheduler.stop()
    assert collector.tasks == [one, one, two, one]


async def test_added_again_long_after(registry, monkeypatch):
    """A task is run again also if the scheduler has forgotten that its uuid is in the store."""
    monkeypatch.setattr("taskyard.standalone.KEEP_ENDED", 2)
    scheduler, collector = Scheduler(registry), Collector()
    registry.register(collector)
    waiting = Task(source="collector", schedule_at=datetime.now(UTC) + timedelta(hours=1))
    scheduler.add_task(waiting)
    await scheduler.start()
    for n in range(1, 10):
        scheduler.add_task(Task(source="collector"))
        await collector.holds(n)
    scheduler.add_task(waiting)
    for n in (10, 11):  # the store refuses the uuid in the first turn, and takes the new one in the next
        scheduler.add_task(Task(source="collector"))
        await collector.holds(n)
    await scheduler.stop()
    records = await scheduler.store.list_tasks()
    assert [record.state for record in records if waiting.uuid in (record.uuid, record.origin)] == ["scheduled"] * 2


class Unfit(BaseTaskConsumer):
    name = "unfit"
    timeout_s = float("inf")

    async def consume(self, task: Task) -> None: ...


async def test_an_unfit_consumer_harms_nobody_else(scheduler, registry, caplog):
    """A consumer that cannot be run fails its own tasks, and says why; the others run on."""
    collector = Collector()
    registry.register(collector)
    registry.register(Unfit())
    scheduler.add_task(Task(source="unfit"))
    for n in range(1, 4):
        scheduler.add_task(Task(source="collector"))
        await collector.holds(n)
    await scheduler.stop()
    assert "timeout_s must be more than 0 and less than 1e9" in caplog.text
