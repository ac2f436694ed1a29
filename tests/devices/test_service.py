"""The interface of the first source design: what is enqueued, in which order it runs, and what can be asked."""

import asyncio
import logging
from typing import Any

import pytest

from taskyard import ExecutorService, Task, TaskConsumerRegistry, TaskFilter, TaskState, current_run
from taskyard.devices import DeviceConsumer, GameAccount, SimulatedDevice, current_device
from taskyard.errors import (
    DeviceExists,
    DuplicateTask,
    InvalidArguments,
    InvalidConsumer,
    InvalidInput,
    NotOpen,
    UnknownConsumer,
)
from taskyard.ports.consumer import BaseTaskConsumer
from tests.devices.farm import Work, add_consumers, eventually, phones, serving

SEVEN, EIGHT, NINE = GameAccount(7), GameAccount(8), GameAccount("nine")
DAILY, WEEKLY = Task(source="daily"), Task(source="weekly")


@pytest.mark.spec("DEV-01", "DEV-02", "DEV-05", "DEV-17")
async def test_an_account_is_queued_once_and_runs_once(url):
    """`enqueue` is False for an account and type that wait, and for any type of an account that runs; each query tells
    what there is."""
    work = Work()
    async with serving(url, work, devices=1) as service:
        assert await service.enqueue(DAILY, SEVEN) is True
        assert await work.next() == ("daily", 7, "emu-1")
        assert await service.enqueue(DAILY, SEVEN) is False
        assert await service.enqueue(WEEKLY, SEVEN) is False
        assert await service.enqueue(WEEKLY, EIGHT, priority="high") is True
        assert await service.enqueue(WEEKLY, EIGHT) is False
        assert await service.enqueue(DAILY, EIGHT) is True
        assert await service.enqueue(DAILY, NINE) is True
        assert (await service.is_running(7), await service.is_queued(7, "daily")) == (True, False)
        assert (await service.is_running(8), await service.is_queued(8, "weekly")) == (False, True)
        assert (await service.is_queued("nine", "daily"), await service.is_queued("nine", "weekly")) == (True, False)
        queued = await service.queue_info()
        fields = [(item["account_id"], item["task_type"], item["priority"]) for item in queued]
        assert fields == [(8, "weekly", "high"), (8, "daily", "normal"), ("nine", "daily", "normal")]
        assert all(item.keys() == {"task_id", "account_id", "task_type", "priority", "enqueue_ts"} for item in queued)
        assert len(await service.queue_info(limit=2)) == 2
        (running,) = await service.running_info()
        assert (running["account_id"], running["task_type"], running["emulator_id"]) == (7, "daily", 1)
        assert (running["device"], running["node"]) == ("emu-1", service.yard._engine.incarnation)
        work.let_go()
        for expected in ("weekly", 8), ("daily", 8), ("daily", "nine"):
            assert (await work.next())[:2] == expected
        await eventually(service.yard, lambda: idle(service))
        assert await service.enqueue(DAILY, SEVEN) is True


async def idle(service):
    return not await service.queue_info() and not await service.running_info()


@pytest.mark.spec("DEV-03", "DEV-17")
async def test_the_order_is_that_of_arrival(url):
    """Tasks start in the order in which they were enqueued, whatever their priority."""
    work = Work()
    work.let_go()
    async with serving(url, work, devices=1) as service:
        await service.yard.queue("devices").pause()
        for n in range(12):
            assert await service.enqueue(DAILY, GameAccount(n), priority="high" if n % 3 == 2 else "low")
        await service.yard.queue("devices").resume()
        assert [(await work.next())[1] for _ in range(12)] == list(range(12))


@pytest.mark.spec("DEV-03", "DEV-05")
async def test_the_head_is_never_passed(url):
    """While the account of the head runs, an idle device waits, and a task behind the head does not start."""
    work = Work()
    async with serving(url, work) as service:
        await service.yard.queue("devices").pause()
        assert await service.enqueue(DAILY, SEVEN)
        assert await service.enqueue(WEEKLY, SEVEN)
        assert await service.enqueue(DAILY, EIGHT)
        await service.yard.queue("devices").resume()
        assert (await work.next())[:2] == ("daily", 7)
        probe = await service.yard.why((await service.queue_info())[0]["task_id"])
        assert probe is not None
        assert [item["account_id"] for item in await service.queue_info()] == [7, 8]
        assert len(await service.running_info()) == 1
        work.let_go(1)
        assert {(await work.next())[:2], (await work.next())[:2]} == {("weekly", 7), ("daily", 8)}
        assert work.order[1][:2] == ("weekly", 7)


@pytest.mark.spec("DEV-15")
async def test_buckets_wait_apart():
    """With `bucket_by` a role without an idle device does not hold up the others, and the roles take turns."""
    work = Work()
    devices = [SimulatedDevice(1, labels={"role": "eu"}), SimulatedDevice(2, labels={"role": "us"})]
    async with serving("memory://", work, devices=devices, bucket_by="role") as service:
        await service.yard.queue("devices").pause()
        for n in range(3):
            assert await service.enqueue(DAILY, GameAccount(n), requires={"role": "eu"})
        assert await service.enqueue(DAILY, GameAccount(9), requires={"role": "us"})
        await service.yard.queue("devices").resume()
        assert {(await work.next())[1:], (await work.next())[1:]} == {(0, "simulated-1"), (9, "simulated-2")}
        work.let_go()
        assert [(await work.next())[1] for _ in range(2)] == [1, 2]


@pytest.mark.spec("DEV-01")
async def test_a_task_may_be_enqueued_again_and_again(url):
    """Each enqueue of a Task makes a stored task with it as origin, and the ids of accounts stay what they are."""
    work = Work()
    work.let_go()
    async with serving(url, work) as service:
        for account in SEVEN, EIGHT, GameAccount("7"):
            assert await service.enqueue(DAILY, account)
        await eventually(service.yard, lambda: len(work.order) == 3)
        records = await service.yard.store.list_tasks(TaskFilter(queue="devices"))
        assert {record.origin for record in records} == {DAILY.uuid}
        assert len({record.uuid for record in records} | {DAILY.uuid}) == 4
        assert sorted(map(repr, (one[1] for one in work.order))) == ["'7'", "7", "8"]


@pytest.mark.spec("DEV-01")
async def test_a_direct_submit_follows_the_same_rule(url):
    """`submit` of a consumer of devices raises DuplicateTask where `enqueue` is False, in each way to submit."""
    work = Work()
    service = ExecutorService(devices=phones(1), store=url)

    @service.consumer(name="daily")
    async def daily(account: GameAccount, level: int = 1) -> int:
        await work.do("daily", current_device(), account)
        return level

    async with service:
        handle = await daily.submit(account=GameAccount(7), level=2)
        await work.next()
        with pytest.raises(DuplicateTask):
            await daily.submit(account=SEVEN)
        with pytest.raises(DuplicateTask):
            await service.yard.submit("daily", {"account": {"account_id": 7}})
        with pytest.raises(DuplicateTask):
            await daily.submit_many([{"account": EIGHT}, {"account": SEVEN}])
        assert await service.enqueue(DAILY, SEVEN) is False
        assert not await service.is_queued(8, "daily")
        merged = await daily.options(dedupe="merge").submit(account=SEVEN)
        assert (merged.uuid, merged.is_new) == (handle.uuid, False)
        work.let_go()
        assert await handle.result(timeout_s=20) == 2
        with pytest.raises(InvalidInput, match="key of the account"):
            await daily.options(key="other").submit(account=SEVEN)


async def test_what_makes_no_sense_is_refused(caplog):
    """A wrong consumer, argument or account is a typed error, and the queue is as it was."""
    work = Work()
    async with serving("memory://", work) as service:
        service.yard.consumer(name="elsewhere")(lambda: 1)
        for source in "nobody", "elsewhere":
            with pytest.raises(UnknownConsumer):
                await service.enqueue(Task(source=source), SEVEN)
        with pytest.raises(InvalidArguments):
            await service.enqueue(Task(source="daily", args={"level": "high"}), SEVEN)
        with pytest.raises(InvalidArguments):
            await service.enqueue(Task(source="daily", args={"account": {"account_id": 8}}), SEVEN)
        for wrong in (7, "daily"):
            with pytest.raises(InvalidInput):
                await service.enqueue(wrong, SEVEN)
        for account in (True, None, 1.5, ""):
            with pytest.raises(InvalidInput):
                await service.enqueue(DAILY, account)
            with pytest.raises(InvalidInput):
                await service.is_running(account)
        assert await service.queue_info() == []
        assert await service.enqueue(DAILY, EIGHT, requires={"role": "mars"})
        assert "the pool devices has no device with role=mars" in caplog.text
        assert len(await service.queue_info()) == 1
        await service.devices.label("emu-2", {"role": "mars"})
        assert (await work.next())[1:] == (8, "emu-2")


def test_settings_that_make_no_sense_are_refused():
    """Devices that collide, consumers of another kind and pools of one name are typed errors."""
    with pytest.raises(DeviceExists):
        ExecutorService(devices=[*phones(1), SimulatedDevice(2, name="emu-1")])
    with pytest.raises(DeviceExists):
        ExecutorService(devices=[*phones(1), SimulatedDevice(1, name="other")])
    wrong: Any
    for wrong in ["emu-1"], "emu-1", SimulatedDevice(1):
        with pytest.raises(InvalidInput):
            ExecutorService(devices=wrong)
        with pytest.raises(InvalidInput):
            ExecutorService(adapters=wrong)
    service: Any = ExecutorService()
    with pytest.raises(InvalidConsumer):
        service.consumer(lambda: 1)
    with pytest.raises(InvalidConsumer):
        service.consumer(name="daily", queue="other")
    with pytest.raises(InvalidConsumer):
        service.register("daily")
    with pytest.raises(InvalidInput):
        service.yard.device_pool("devices")
    with pytest.raises(InvalidConsumer):

        @service.consumer
        async def two(one: GameAccount, other: GameAccount) -> None: ...


async def without_types(device, account): ...


async def other_names(phone, who): ...


async def forgotten(device, account: GameAccount, level): ...


@pytest.mark.parametrize("function", [without_types, other_names, forgotten])
def test_parameters_without_annotation_are_refused(function):
    """A function whose device or account would be an argument that nobody gives is refused when it is registered, and
    the error says what to write."""
    with pytest.raises(InvalidConsumer, match=r"has no annotation\. Write `device: Device`"):
        ExecutorService().consumer(function)


def test_other_parameters_need_no_annotation():
    """An argument without an annotation is one of any type."""
    service: Any = ExecutorService()

    @service.consumer
    async def daily(account: GameAccount, level): ...

    assert daily.consumer.account == "account"


class WrongPrepare(DeviceConsumer):
    name = "daily"

    async def prepare(self, device, account, lvl): ...

    async def execute(self, device, account, level: int = 1): ...


class WrongCleanup(DeviceConsumer):
    name = "daily"

    async def execute(self, device, account): ...

    async def cleanup(self, device): ...  # type: ignore[override]


class WrongScreen(DeviceConsumer):
    name = "daily"

    async def ensure_ui(self, device, account): ...  # type: ignore[override]

    async def execute(self, device, account): ...


@pytest.mark.parametrize(
    ("consumer", "text"),
    [
        (WrongPrepare(), "prepare takes .* execute, which has level: missing a required argument: 'lvl'"),
        (WrongCleanup(), "cleanup takes .* execute, which has none: too many positional arguments"),
        (WrongScreen(), "ensure_ui takes the device alone: missing a required argument: 'account'"),
    ],
)
def test_parts_that_cannot_be_called_are_refused(consumer, text):
    """A part of a class that asks for what it does not get is refused when it is registered."""
    with pytest.raises(InvalidConsumer, match=text):
        ExecutorService().register(consumer)


async def test_errors_speak_of_the_service():
    """Users of a service have no yard: to start it twice, or to submit before, is told in its words."""
    service = ExecutorService(devices=phones(1))
    add_consumers(service, Work())
    with pytest.raises(NotOpen, match="the service is not open; use it inside `async with service:`"):
        await service.devices.list_all()
    async with service:
        with pytest.raises(InvalidInput, match="this service is open already"):
            await service.start()


async def test_a_refused_enqueue_logs_why(caplog):
    """The log says which task is in the way, in words for those who enqueue, and that an account is quarantined."""
    work = Work()
    async with serving("memory://", work, devices=1) as service:
        assert await service.enqueue(DAILY, SEVEN)
        await work.next()
        (running,) = await service.running_info()
        assert await service.enqueue(DAILY, EIGHT)
        (waiting,) = await service.queue_info()
        await service.devices.quarantine_account("devices", 9, "daily")
        with caplog.at_level(logging.INFO, logger="taskyard.devices"):
            for account in SEVEN, EIGHT, GameAccount(9):
                assert not await service.enqueue(DAILY, account)
        texts = [record.getMessage() for record in caplog.records if "not enqueued" in record.getMessage()]
    assert texts == [
        f"daily for account 7 was not enqueued: task {running['task_id']} of this account runs",
        f"daily for account 8 was not enqueued: task {waiting['task_id']} of this account and consumer has not ended",
        "daily for account 9 was not enqueued: this account and consumer are quarantined; `release` takes tasks again",
    ]


@pytest.mark.spec("DEV-09")
async def test_each_run_is_recorded(url):
    """A run has the device, the times, how it ended and what it left, and is stored before its account is free."""
    service = ExecutorService(devices=phones(1), store=url)

    @service.consumer(name="daily")
    async def daily(account: GameAccount) -> None:
        current_run().artifact("note.txt", b"seen")
        if account.account_id == 8:
            raise OSError("the game is down")

    async with service:
        for account in SEVEN, EIGHT:
            assert await service.enqueue(DAILY, account)
        await eventually(service.yard, lambda: idle(service))
        failed, completed = await service.task_runs()
    assert (completed.account_id, completed.task_type, completed.emulator_id) == (7, "daily", 1)
    assert (completed.worker_id, completed.status, failed.status) == ("emu-1", "completed", "failed")
    assert completed.finished_at is not None
    assert failed.finished_at is not None
    assert completed.start <= completed.finished_at <= failed.finished_at
    assert "the game is down" in failed.error
    assert "note.txt" in completed.artifacts
    assert "note.txt" in failed.artifacts
    (one,) = await service.task_runs(account_id=8)
    assert one == failed


class Weekly(DeviceConsumer):
    """Counts its parts on the device."""

    name = "weekly"

    async def prepare(self, device, account):
        await device.shell("am start game")

    async def execute(self, device, account, level: int = 1):
        return [account.account_id, level, device.number]

    async def cleanup(self, device, account):
        await device.shell("am force-stop game")


class Plain(BaseTaskConsumer):
    name = "plain"

    async def consume(self, task):
        return [task.args, current_device().name]


async def test_consumers_come_from_a_registry():
    """A registry brings consumers of both class forms, also later; one that is taken out is unknown."""
    registry = TaskConsumerRegistry()
    registry.register(Plain())
    service = ExecutorService(devices=phones(1), registry=registry)
    service.register(Weekly())
    async with service:
        assert await service.enqueue(Task(source="weekly", args={"level": 3}), SEVEN)
        assert await service.enqueue(Task(source="plain", args={"x": 1}), EIGHT)
        await eventually(service.yard, lambda: idle(service))
        records = await service.yard.store.list_tasks(TaskFilter(queue="devices"))
        assert [record.result for record in records] == ['[{"x":1},"emu-1"]', "[7,3,1]"]
        registry.unregister("plain")
        with pytest.raises(UnknownConsumer):
            await service.enqueue(Task(source="plain"), EIGHT)


@pytest.mark.spec("DEV-13")
async def test_a_stop_keeps_what_waits(url):
    """After a stop nothing runs, what ran is back at the head, what waited is there, and a start goes on with it."""
    work = Work()
    service = ExecutorService(devices=phones(1), store=url, grace_s=0)
    add_consumers(service, work)
    await service.start()
    for account in SEVEN, EIGHT, NINE:
        assert await service.enqueue(DAILY, account)
    await work.next()
    await service.stop()
    assert await service.running_info() == []
    assert [item["account_id"] for item in await service.queue_info()] == [7, 8, "nine"]
    assert (await service.is_running(7), await service.is_queued(7, "daily")) == (False, True)
    assert service.workers == {}
    work.let_go()
    await service.start()
    assert [(await work.next())[1] for _ in range(3)] == [7, 8, "nine"]
    await service.stop(grace_s=None)


@pytest.mark.spec("DEV-14")
async def test_the_log_tells_what_happens(caplog):
    """The log has the length of the queue, assignments, the states of actors, and start and end with the duration."""
    work = Work()
    with caplog.at_level(logging.INFO, "taskyard"):
        async with serving("memory://", work, devices=1) as service:
            assert await service.enqueue(DAILY, SEVEN)
            await work.next()
            assert await service.enqueue(DAILY, EIGHT)
            await eventually(service.yard, lambda: "1 tasks wait, 1 run" in caplog.text)
            work.let_go()
            await eventually(service.yard, lambda: idle(service))
            await eventually(service.yard, lambda: "0 tasks wait, 0 run" in caplog.text)
            assert await service.enqueue(DAILY, SEVEN)
    for text in (
        "from daily for account 7 goes to the device emu-1",
        "device emu-1: idle, was down",
        "device emu-1: busy, was idle",
        "from daily begins",
        "from daily has ended after",
    ):
        assert text in caplog.text, text


@pytest.mark.spec("DEV-18")
async def test_nothing_is_polled():
    """A task starts within the same turn of the loop as its enqueue, though the server looks once a second only."""
    work = Work()
    work.let_go()
    async with serving("memory://", work, devices=1) as service:
        loop = asyncio.get_running_loop()
        took = []
        for n in range(20):
            began = loop.time()
            assert await service.enqueue(DAILY, GameAccount(n))
            await work.next()
            took.append(loop.time() - began)
        assert sorted(took)[10] < 0.1


@pytest.mark.spec("DEV-01")
async def test_many_at_once_are_enqueued_once(url):
    """Of a hundred enqueues of one account and type at the same time, one is accepted."""
    work = Work()
    async with serving(url, work, devices=1) as service:
        answers = await asyncio.gather(*(service.enqueue(DAILY, SEVEN) for _ in range(100)))
        assert answers.count(True) == 1
        assert await service.yard.store.count() in (
            {("devices", TaskState.RUNNING): 1},
            {("devices", TaskState.QUEUED): 1},
        )
