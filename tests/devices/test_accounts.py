"""Accounts of device tasks: written as bare ids, refused while they are quarantined, and their failures counted."""

import asyncio
import logging
import threading
from functools import partial
from typing import Any

import pytest

from taskyard import BaseTaskConsumer, ExecutorService, Task, TaskFilter, TaskState, Yard, current_run
from taskyard.devices import Device, GameAccount, SimulatedDevice
from taskyard.devices.quarantine import AccountWatch
from taskyard.devices.roster import Roster
from taskyard.errors import AccountQuarantined, InvalidArguments, InvalidConsumer, InvalidInput
from taskyard.ports.clock import SystemClock
from taskyard.stores.memory import MemoryStore
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_node
from taskyard.testing.store_contract.desk import A, B
from taskyard.testing.store_contract.devices import bring_up, run
from tests.devices.farm import PATIENCE_S, Work, add_consumers, eventually, phones, serving

DAILY, WEEKLY = Task(source="daily"), Task(source="weekly")


def shared(url):
    """A store in memory that several yards of this process may open, or the URL."""
    return MemoryStore(SystemClock()) if url == "memory://" else url


async def ended(yard, count):
    """Whether so many tasks have ended."""
    counts = await yard.store.count()
    return sum(n for (_, state), n in counts.items() if state in (TaskState.FAILED, TaskState.COMPLETED)) == count


# --- bare ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "key"), [(7, "7"), ("7", '"7"'), ("ann", "ann"), (GameAccount(9), "9")])
async def test_an_id_is_an_account(given, key):
    """A bare id is taken wherever an account is: by a call, by `enqueue` and by a schedule. A number stays a number."""
    service = ExecutorService(devices=phones(1), heartbeat_s=1.0)

    @service.consumer(name="daily")
    async def daily(device: Device, account: GameAccount) -> list[str]:
        return [type(account.account_id).__name__, str(account.account_id)]

    service.schedule("daily", every_s=9e6, accounts=[given], name="listed")
    found = given.account_id if isinstance(given, GameAccount) else given
    async with service:
        schedules = service.yard.schedules
        await schedules.add("one", 9e6, "daily", {"account": found})
        handles = [await service.yard.submit("daily", {"account": given})]
        for ask in (schedules.run_now("one"), schedules.run_each("listed")):
            await handles[-1].result(timeout_s=PATIENCE_S)
            made = await ask
            handles.append(made.tasks[0] if hasattr(made, "tasks") else made)
        await handles[-1].result(timeout_s=PATIENCE_S)
        assert await service.enqueue(DAILY, given)
        await eventually(service.yard, partial(ended, service.yard, 4))
        for handle in handles:
            assert (await handle.record()).key == key
            assert await handle.result() == [type(found).__name__, str(found)]
        assert {run.account_id for run in await service.task_runs()} == {found}


@pytest.mark.parametrize("given", [True, 7.0, None, [7], {"account_id": True}, {"name": "x"}])
async def test_what_is_no_account_is_refused(given):
    """A truth value is not the account 1, and 7.0 is not the account 7."""
    service = ExecutorService(devices=phones(1))
    add_consumers(service, Work())
    async with service:
        with pytest.raises(InvalidArguments, match="account"):
            await service.yard.submit("daily", {"account": given})
        with pytest.raises(InvalidInput, match="account_id must be a whole number or a text"):
            await service.enqueue(DAILY, given)
        assert await service.yard.store.list_tasks() == []


@pytest.mark.parametrize(("given", "key"), [(7, "7"), ("7", '"7"'), ({"account_id": 7}, "7")])
async def test_a_process_without_the_pool_submits_for_an_id(url, given, key):
    """The schema in the catalogue says what an account is: a number, a text or an object. The task runs."""
    store = shared(url)
    service = ExecutorService(devices=phones(1), store=store, heartbeat_s=1.0)
    work = Work()
    work.let_go()
    add_consumers(service, work)
    async with service, Yard(store).client() as other:
        catalogue = await other.catalogue()
        handle = await other.submit_to(catalogue.stand_in("daily"), {"account": given})
        assert (await handle.record()).key == key
        assert await handle.result(timeout_s=PATIENCE_S) == (given["account_id"] if isinstance(given, dict) else given)
        with pytest.raises(InvalidArguments, match="account"):
            await other.submit_to(catalogue.stand_in("daily"), {"account": [7]})


# --- quarantine -------------------------------------------------------------------------------------------------------


async def test_no_process_gets_around_a_quarantine(url):
    """A process without the pool cannot submit for a quarantined account, nobody can run a task of it again, and once
    it is released all of that works at once."""
    store, work = shared(url), Work()
    work.let_go()
    service = ExecutorService(devices=phones(1), store=store, heartbeat_s=1.0)
    add_consumers(service, work)
    async with service, Yard(store).client() as other:
        first = await other.submit_to((await other.catalogue()).stand_in("daily"), {"account": 7})
        await first.result(timeout_s=PATIENCE_S)
        await other.devices.quarantine_account("devices", 7, "daily", reason="banned", by="ana")
        daily = (await other.catalogue()).stand_in("daily")
        for dedupe in ("refuse", "merge", "allow"):
            with pytest.raises(AccountQuarantined):
                await other.submit_to(daily, {"account": 7}, dedupe=dedupe)
        with pytest.raises(AccountQuarantined):
            await other.run_again(first.uuid)
        assert await service.enqueue(DAILY, 7) is False
        await other.devices.release("devices", 7)
        again = await other.run_again(first.uuid)
        assert await again.result(timeout_s=PATIENCE_S) == 7


async def test_many_tasks_that_run_again_leave_out_a_quarantined_account():
    """It counts as unfit, with the reason, and the tasks of the others run."""
    work = Work()
    work.let_go()
    async with serving("memory://", work) as service:
        for n in (7, 8):
            assert await service.enqueue(DAILY, n)
        await eventually(service.yard, partial(ended, service.yard, 2))
        await service.devices.quarantine_account("devices", 7, "daily")
        report = await service.yard.run_all_again(TaskFilter(queue="devices"))
        assert len(report.made) == 1
        assert report.unfit == {"account_quarantined": 1}
        await service.yard.handle(report.made[0]).result(timeout_s=PATIENCE_S)


async def test_enqueue_asks_the_store_for_nothing_but_the_submit():
    """No stamp and no list is read for a submit: the store itself looks for the quarantine."""
    work = Work()
    async with serving("memory://", work) as service:
        store, asked = service.yard.store, []

        async def count(verb, do, *args, **given):
            asked.append((verb, asyncio.current_task()))
            return await do(*args, **given)

        for verb in ("device_stamp", "list_devices", "list_quarantined_accounts"):
            setattr(store, verb, partial(count, verb, getattr(store, verb)))
        for n in range(20):
            assert await service.enqueue(DAILY, n)
        assert not [verb for verb, task in asked if task is asyncio.current_task()]


@pytest.mark.parametrize("auto_recover", [0, 1])
async def test_lost_devices_make_no_quarantine(auto_recover):
    """A task that fails since it has lost its devices says nothing of its account: its runs are interrupted in the
    history and in the rates, and do not count towards a quarantine."""
    work = Work()
    devices = phones(2)
    given = {"auto_recover": auto_recover, "quarantine_account_after": 1}
    async with serving("memory://", work, devices=devices, **given) as service:
        assert await service.enqueue(DAILY, 7)
        for _ in range(auto_recover + 1):
            *_, name = await work.next()
            device = next(device for device in devices if device.name == name)
            device.disconnect()
        await eventually(service.yard, partial(ended, service.yard, 1))
        assert {run.status for run in await service.task_runs()} == {"interrupted"}
        (tally,) = await service.devices.success_rates(by_account=True)
        assert (tally.failed, tally.interrupted) == (0, auto_recover + 1)
        for device in devices:
            device.reconnect()
        await eventually(service.yard, lambda: len(service.pool.places.ready()) == 2)
        assert await service.enqueue(WEEKLY, 7)
        await work.next()
        assert await service.devices.quarantined_accounts() == []


class Reads:
    """A store that counts the reads of runs."""

    def __init__(self, store):
        self._store, self.count = store, 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def list_device_runs(self, *args, **given):
        self.count += 1
        return await self._store.list_device_runs(*args, **given)


async def watching(clock, node=A):
    """A store with a device that `node` serves, and what watches its accounts."""
    store = MemoryStore(clock)
    await store.open()
    for name in "ab":
        await store.join(a_node(name))
    await bring_up(store, "emu-1", node=node)
    reads = Reads(store)
    return store, reads, Roster("phones", lambda: store), AccountWatch("phones", 3, clock)


async def fail(store, clock, watch, roster, reads, outcome="failed"):
    await run(store, clock, "emu-1", "7", outcome, consumer="daily")
    note = watch.note_failure if outcome == "failed" else watch.note_success
    note("7", "daily")
    await roster.look()
    await watch.look(reads, roster, node=A, by="node")


async def test_failures_in_a_row_are_counted_without_the_store():
    """The first failure that is seen and the one that makes the quarantine read the runs; those between read nothing,
    and a success begins anew."""
    clock = ManualClock()
    store, reads, roster, watch = await watching(clock)
    counts = []
    for outcome in ("failed", "failed", "completed", "failed", "failed", "failed"):
        await fail(store, clock, watch, roster, reads, outcome)
        counts.append(reads.count)
    assert counts == [1, 1, 1, 1, 1, 2]
    (quarantined,) = await store.list_quarantined_accounts()
    assert (quarantined.account, quarantined.failures) == ("7", 3)


async def test_failures_before_the_start_count():
    """A node that has just started, or has served other accounts, finds the failures before it in the store."""
    clock = ManualClock()
    store, reads, roster, watch = await watching(clock)
    for _ in range(2):
        await run(store, clock, "emu-1", "7", "failed", consumer="daily")
    await fail(store, clock, watch, roster, reads)
    assert len(await store.list_quarantined_accounts()) == 1


async def test_failures_on_other_nodes_count():
    """While another node serves a device of the pool, each failure reads the runs: some may be those of that node."""
    clock = ManualClock()
    store, reads, roster, watch = await watching(clock)
    await fail(store, clock, watch, roster, reads)
    await bring_up(store, "emu-2", node=B)
    await run(store, clock, "emu-2", "7", "failed", consumer="daily")
    await fail(store, clock, watch, roster, reads)
    assert len(await store.list_quarantined_accounts()) == 1


async def test_a_failure_while_the_store_is_read_is_not_missed():
    """It is found by the next look, without another failure."""
    clock = ManualClock()
    store, reads, roster, watch = await watching(clock)
    await run(store, clock, "emu-1", "7", "failed", consumer="daily")
    watch.note_failure("7", "daily")
    await roster.look()
    honest = reads.list_device_runs

    async def slow(*args, **given):
        found = await honest(*args, **given)
        for _ in range(2):
            await run(store, clock, "emu-1", "7", "failed", consumer="daily")
            watch.note_failure("7", "daily")
        return found

    reads.list_device_runs = slow
    await watch.look(reads, roster, node=A, by="node")
    assert await store.list_quarantined_accounts() == []
    reads.list_device_runs = honest
    await watch.look(reads, roster, node=A, by="node")
    assert len(await store.list_quarantined_accounts()) == 1


# --- labels that no device has ----------------------------------------------------------------------------------------


async def test_warnings_about_labels_are_bounded(caplog):
    """A program that asks for a new label each time is warned each time, and what was said before is forgotten."""
    service = ExecutorService(devices=phones(1, labels={"role": "eu"}))
    add_consumers(service, Work())
    async with service:
        with caplog.at_level(logging.WARNING, "taskyard.devices"):
            for n in range(300):
                assert await service.enqueue(DAILY, n, requires={"role": f"r{n}"})
            said = len(caplog.messages)
            assert await service.enqueue(WEEKLY, 299, requires={"role": "r299"})
            assert await service.enqueue(DAILY, 300, requires={"role": "eu"})
        assert (said, len(caplog.messages)) == (300, 300)
        assert len(service.pool._warned) <= 100


# --- plain functions --------------------------------------------------------------------------------------------------


async def test_a_plain_function_runs_in_the_thread_of_its_device():
    """Functions and classes alike; `current_run().device` names the device, and one that blocks holds up no other."""
    service = ExecutorService(devices=phones(2), heartbeat_s=1.0)
    both = threading.Barrier(2, timeout=PATIENCE_S)

    @service.consumer(name="daily")
    def daily(account: GameAccount, level: int = 1) -> list[object]:
        both.wait()
        return [account.account_id, level, threading.current_thread().name, current_run().device]

    class Sweep(BaseTaskConsumer):
        name = "sweep"

        def produce(self, args: dict[str, Any]) -> Task:
            return Task(source=self.name, args=args)

        def consume(self, task: Task) -> Any:
            return [threading.current_thread().name, current_run().device]

    service.register(Sweep())
    async with service:
        await eventually(service.yard, lambda: len(service.pool.places.ready()) == 2)
        handles = [await service.yard.submit("daily", {"account": n, "level": 2}) for n in (7, 8)]
        results = [await handle.result(timeout_s=PATIENCE_S) for handle in handles]
        assert [result[:2] for result in results] == [[7, 2], [8, 2]]
        assert {result[3] for result in results} == {"emu-1", "emu-2"}
        assert all(result[2] == f"taskyard-device-{result[3]}" for result in results)
        thread, device = await (await service.yard.submit("sweep", {"account_id": 9})).result(timeout_s=PATIENCE_S)
        assert thread == f"taskyard-device-{device}"


async def test_a_plain_function_that_fails_fails_its_task():
    """Its exception is the error of the task, and counts towards the quarantine of its account."""
    service = ExecutorService(devices=phones(1), heartbeat_s=1.0, quarantine_account_after=1)

    @service.consumer(name="daily")
    def daily(account: GameAccount) -> None:
        raise OSError("banned")

    async with service:
        assert await service.enqueue(DAILY, 7)
        await eventually(service.yard, service.devices.quarantined_accounts)
        (run,) = await service.task_runs()
        assert (run.status, "banned" in run.error) == ("failed", True)


def test_a_plain_function_with_a_device_is_refused():
    """The calls of a `Device` are awaited, so a function that gets one is `async def`."""
    service = ExecutorService(devices=[SimulatedDevice(1)])
    with pytest.raises(InvalidConsumer, match="whose calls are awaited: write it as `async def`"):

        @service.consumer(name="daily")
        def daily(device: Device, account: GameAccount) -> None: ...

    with pytest.raises(InvalidConsumer, match="is a generator"):

        @service.consumer(name="weekly")
        def weekly(account: GameAccount):
            yield account
