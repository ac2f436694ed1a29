"""What a node does when it loses its devices: its lease, one device, or the device itself for good."""

import asyncio
import logging

import pytest

from taskyard import EventKind, ExecutorService, Task, TaskFilter
from taskyard.devices import ActorSettings, Device, DeviceConsumer, GameAccount, RecoverySettings, SimulatedDevice
from taskyard.errors import DeviceLost
from taskyard.model.device import DeviceState
from taskyard.ports.clock import SystemClock
from taskyard.stores.memory import MemoryStore
from tests.devices.farm import Work, eventually, phones, serving
from tests.devices.test_pool import become
from tests.engine.leases import TimedStore

SEVEN, EIGHT = GameAccount(7), GameAccount(8)
DAILY, WEEKLY = Task(source="daily"), Task(source="weekly")


@pytest.mark.spec("DEV-05", "DEV-12")
async def test_a_node_that_lost_its_lease_serves_anew(caplog):
    """A node that the others gave up lets go of its devices, joins anew and serves them again; its task runs again."""
    caplog.set_level(logging.INFO, "taskyard")
    work, store = Work(), TimedStore(SystemClock(), lease_s=3.0)
    async with serving(store, work, devices=1) as service:
        assert await service.enqueue(DAILY, SEVEN)
        await work.next()
        before, actor = service.yard._engine.incarnation, service.workers[1]
        await store.rescue(before)
        store.leases[before].is_given_up = True
        assert await work.next() == ("daily", 7, "emu-1")
        assert service.yard._engine.incarnation != before
        assert service.workers[1] is not actor
        assert "device emu-1 is let go: this node" in caplog.text
        work.let_go()
        await eventually(service.yard, lambda: not service.workers[1].current)
        (record,) = await store.list_tasks(TaskFilter(queue="devices"))
        assert record.recoveries == 1


@pytest.mark.spec("DEV-05")
async def test_a_run_ends_when_its_device_is_served_no_more(url):
    """A node that has lost the presence of a device ends its actor and the run on it, and then serves it anew."""
    work = Work()
    async with serving(url, work, devices=1) as service:
        assert await service.enqueue(DAILY, SEVEN)
        await work.next()
        actor = service.workers[1]
        store, node = service.pool._find_store(), service.yard._engine.incarnation
        await store.unserve_devices(node, ["emu-1"])
        await eventually(service.yard, lambda: service.workers.get(1) not in (None, actor))
        assert actor.current is None
        assert await work.next() == ("daily", 7, "emu-1")
        assert [one["device"] for one in await service.running_info()] == ["emu-1"]


@pytest.mark.spec("DEV-11")
async def test_the_ladder_ends_in_quarantine(url):
    """A device that the actor has given up is quarantined in the name of its node, with an alert; given back, it is
    tried again."""
    devices, recovery = phones(2), RecoverySettings(reconnect_s=0.2, app_restarts=0, restarts=0)
    actor = ActorSettings(heartbeat_s=2.0, recovery=recovery)
    service = ExecutorService(devices=devices, store=url, name="farm-a", actor=actor)
    async with service:
        await become(service.yard, emu_1="idle", emu_2="idle")
        devices[0].fail_until("restart", "the screen is black")
        await become(service.yard, emu_1="quarantined", emu_2="idle")
        status = await service.devices.get("emu-1")
        assert status.orders.quarantined is not None
        assert status.orders.quarantined.actor == service.yard._engine.name
        assert "the screen is black" in status.orders.quarantined.reason
        alert = await anext(service.yard.events(kinds=[EventKind.DEVICE_QUARANTINED], after=0))
        assert (alert.device, alert.is_alert) == ("emu-1", True)
        assert {one.name for one in service.pool.places.ready()} == {"emu-2"}
        await devices[0].reboot()
        await service.devices.give_back("emu-1", by="ana")
        await become(service.yard, emu_1="idle")


@pytest.mark.spec("DEV-08", "DEV-04")
async def test_a_device_that_hangs_stalls_no_other():
    """While one device hangs in a run the others go on with the line, and it comes back by itself."""
    devices = phones(3)
    service = ExecutorService(devices=devices, heartbeat_s=0.5)
    done: list[int | str] = []

    @service.consumer(name="daily")
    async def daily(device: Device, account: GameAccount) -> None:
        await device.shell("am start game")
        done.append(account.account_id)

    async with service:
        await become(service.yard, emu_1="idle", emu_2="idle", emu_3="idle")
        devices[0].hang(connects=True)
        for n in range(30):
            assert await service.enqueue(DAILY, GameAccount(n))
        await eventually(service.yard, lambda: len(done) == 30)
        assert sorted(done) == list(range(30))
        await become(service.yard, emu_1="down")
        devices[0].unhang()
        await become(service.yard, emu_1="idle")
        states = {status.state_at(service.yard.now()) for status in await service.devices.list_all()}
        assert states == {DeviceState.IDLE}


async def test_two_yards_of_one_process_share_a_store():
    """Two services on one memory store, of which one stops while tasks wait, lose nothing."""
    store, work = MemoryStore(SystemClock()), Work()
    async with serving(store, work, devices=[SimulatedDevice(1, name="a")]) as first:
        async with serving(store, work, devices=[SimulatedDevice(2, name="b")], grace_s=0) as second:
            for n in range(4):
                assert await second.enqueue(DAILY, GameAccount(n))
            assert {(await work.next())[2], (await work.next())[2]} == {"a", "b"}
        work.let_go()

        async def is_over():
            return not await first.queue_info() and not await first.running_info()

        await eventually(first.yard, is_over)
        assert {account for _, account, _ in work.order} == set(range(4))


@pytest.mark.spec("DEV-05")
async def test_a_cleanup_ends_before_others_serve_the_device(monkeypatch):
    """A node that has lost its lease leaves a cleanup little time; then each call on its device is a `DeviceLost`."""
    monkeypatch.setattr("taskyard.devices.actor.REVOKED_CLEANUP_S", 0.2)
    cut: asyncio.Queue[str] = asyncio.Queue()
    begun: asyncio.Queue[str] = asyncio.Queue()

    class Daily(DeviceConsumer):
        name = "daily"

        async def execute(self, device, account):
            begun.put_nowait(device.name)
            await asyncio.Event().wait()

        async def cleanup(self, device, account):
            try:
                while True:
                    await device.shell("am force-stop game")
            except DeviceLost as error:
                cut.put_nowait(str(error))
                raise

    store = TimedStore(SystemClock(), lease_s=3.0)
    service = ExecutorService(phones(1, latency_s=0.01), registry=[Daily()], store=store, heartbeat_s=1.0, grace_s=0)
    async with service:
        assert await service.enqueue(DAILY, SEVEN)
        assert await begun.get() == "emu-1"
        actor = service.workers[1]
        node = service.yard._engine.incarnation
        await store.rescue(node)
        store.leases[node].is_given_up = True
        assert (await cut.get()).startswith("emu-1 is lost: this node ")
        await eventually(service.yard, lambda: service.workers.get(1) not in (None, actor))
        assert await begun.get() == "emu-1"
