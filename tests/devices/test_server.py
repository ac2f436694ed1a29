"""What a node makes of the devices of its pools: when the store fails, when code goes on, when a device is out of
reach."""

import asyncio
import contextlib

import pytest

from taskyard import ExecutorService, Task, Yard
from taskyard.devices import Device, GameAccount, SimulatedDevice, reach, server
from taskyard.errors import StoreUnavailable
from taskyard.model.device import CODE_GOES_ON, DeviceSpec
from taskyard.ports.clock import SystemClock
from taskyard.stores.memory import MemoryStore
from tests.devices.farm import PATIENCE_S, Work, add_consumers, eventually, phones, serving
from tests.devices.test_pool import become

SEVEN, EIGHT = GameAccount(7), GameAccount(8)
DAILY = Task(source="daily")


class FailsOnce:
    """The next call of this verb of a store fails."""

    def __init__(self, store, verb):
        self.honest, self.has_failed = getattr(store, verb), False
        setattr(store, verb, self)

    async def __call__(self, *given, **named):
        if not self.has_failed:
            self.has_failed = True
            raise StoreUnavailable("gone for a moment")
        return await self.honest(*given, **named)


@pytest.mark.spec("DEV-12")
@pytest.mark.parametrize("verb", ["device_stamp", "list_devices", "list_quarantined_accounts", "serve_devices"])
async def test_a_device_that_is_added_is_served_although_a_verb_fails(verb):
    """Each verb that serving a device needs may fail once, and the device is served all the same."""
    async with serving("memory://", devices=0) as service:
        await service.devices.add(DeviceSpec(pool="devices", name="lab-1", number=1, adapter="simulated"))
        failing = FailsOnce(service.yard.store, verb)
        await eventually(service.yard, lambda: failing.has_failed)
        await become(service.yard, lab_1="idle")


@pytest.mark.spec("DEV-12")
async def test_a_device_of_another_host_is_let_go_although_a_verb_fails():
    """A device that another host is to serve is free for it, also if the store does not take that at first."""
    async with serving("memory://", devices=0) as service:
        await service.devices.add(DeviceSpec(pool="devices", name="lab-1", number=1, adapter="simulated"))
        await become(service.yard, lab_1="idle")
        failing = FailsOnce(service.yard.store, "unserve_devices")
        await service.devices.edit("lab-1", host="another-host")

        async def is_free():
            return not (await service.devices.get("lab-1")).node

        await eventually(service.yard, is_free)
        assert failing.has_failed
        assert service.workers == {}


@pytest.mark.spec("DEV-12")
async def test_a_length_that_could_not_be_read_is_logged_later(caplog):
    """The store fails when the length of the queue is asked for: the next look logs it."""
    caplog.set_level("INFO", "taskyard")
    async with serving("memory://", Work(), devices=1) as service:
        failing = FailsOnce(service.yard.store, "count")
        assert await service.enqueue(DAILY, SEVEN)
        await eventually(service.yard, lambda: failing.has_failed)
        await eventually(service.yard, lambda: "0 tasks wait, 1 run" in caplog.text)


# --- a stop that leaves code behind -----------------------------------------------------------------------------------


class Stubborn:
    """Code that ignores its cancellation until it is let go, and then tries to use its device."""

    def __init__(self) -> None:
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self, device: Device) -> None:
        self.began.set()
        while not self.go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.go.wait()
        try:
            self.answer.set_result(await device.shell("echo still here"))
        except Exception as exc:
            self.answer.set_result(str(exc))


@pytest.mark.spec("DEV-04", "DEV-13")
@pytest.mark.parametrize("url", ["memory", "sqlite"], indirect=True)  # on a server its node would beat on
async def test_a_service_starts_again_after_a_run_that_could_not_be_stopped(url):
    """A stop does not wait for code that ignores it. That code loses its device, which stays down; after a start the
    other devices work."""
    work, stubborn = Work(), Stubborn()
    service = ExecutorService(devices=phones(2), store=url, heartbeat_s=1.0, grace_s=0)
    add_consumers(service, work)

    @service.consumer(name="stubborn")
    async def run(device: Device, account: GameAccount) -> None:
        await stubborn.run(device)

    await service.start()
    await become(service.yard, emu_1="idle", emu_2="idle")
    await service.devices.drain("emu-2")
    await become(service.yard, emu_2="draining")
    assert await service.enqueue(Task(source="stubborn"), SEVEN)
    await stubborn.began.wait()
    await service.devices.give_back("emu-2")
    loop = asyncio.get_running_loop()
    began = loop.time()
    await service.stop()
    assert loop.time() - began < server.CLOSE_S  # 2 s are the runner's
    work.let_go()
    await service.start()
    await become(service.yard, emu_1="down", emu_2="idle")
    assert (await service.devices.get("emu-1")).health.reason == CODE_GOES_ON
    assert await service.enqueue(DAILY, EIGHT)
    assert await work.next() == ("daily", 8, "emu-2")
    stubborn.go.set()
    async with asyncio.timeout(PATIENCE_S):
        assert "can no longer use the device" in await stubborn.answer
    await service.stop()


@pytest.mark.spec("DEV-13")
async def test_a_task_may_be_enqueued_while_the_service_is_stopped(url):
    """What is enqueued before a start, or after a stop, waits in the store, and runs after the next start."""
    work = Work()
    work.let_go()
    service = ExecutorService(devices=phones(1), store=url, heartbeat_s=1.0)
    add_consumers(service, work)
    assert await service.enqueue(DAILY, SEVEN)
    assert await service.enqueue(DAILY, SEVEN) is False
    async with service:
        assert await work.next() == ("daily", 7, "emu-1")
    assert await service.enqueue(DAILY, EIGHT)
    assert await service.is_queued(8, "daily")
    async with service:
        assert await work.next() == ("daily", 8, "emu-1")


# --- several nodes ----------------------------------------------------------------------------------------------------


class Near(SimulatedDevice):
    """A phone at the USB port of this machine."""

    adapter = "usb"


class Far(Near):
    """The same phone, as a machine sees it that it is not connected to."""

    def make_adapter(self):
        self.disconnect()
        return super().make_adapter()


@pytest.fixture
def soon(monkeypatch):
    """What takes a minute takes a moment."""
    monkeypatch.setattr(reach, "TRY_S", 0.3)
    monkeypatch.setattr(reach, "AGAIN_S", 0.1)
    monkeypatch.setattr(reach, "YIELD_S", 0.2)
    monkeypatch.setattr(server, "RETRY_S", 0.1)
    monkeypatch.setattr(server, "LOOK_S", 0.05)


def node(store, name, kind):
    """A service that may serve devices of this kind."""
    service = ExecutorService(adapters=[kind], store=store, heartbeat_s=0.5, name=name)
    add_consumers(service, Work())
    return service


@pytest.mark.spec("DEV-12")
async def test_a_device_is_served_by_the_node_that_reaches_it(url, soon):
    """A node that cannot reach a device leaves it to another one, and keeps it as long as there is none."""
    store = MemoryStore(SystemClock()) if url == "memory://" else url
    far, near = node(store, "far", Far), node(store, "near", Near)
    async with far:
        await far.devices.add(DeviceSpec(pool="devices", name="phone-1", number=1, adapter="usb"))
        await eventually(far.yard, lambda: set(far.workers) == {1})
        before, late = far.workers[1], dict(far.pool.server._reach._late_mono)
        await eventually(far.yard, lambda: far.pool.server._reach._late_mono["phone-1"] > late["phone-1"])
        assert far.workers[1] is before
        async with near:
            await become(near.yard, phone_1="idle")
            assert (set(far.workers), set(near.workers)) == (set(), {1})
        # It tries again when that node has left.
        await eventually(far.yard, lambda: set(far.workers) == {1})


async def test_a_device_that_no_node_reaches_goes_from_one_to_the_other(soon):
    """Each node tries for twice as long as before, so that its recovery comes to an end."""
    store = MemoryStore(SystemClock())
    one, two = node(store, "one", Far), node(store, "two", Far)
    async with one, two:
        await one.devices.add(DeviceSpec(pool="devices", name="phone-1", number=1, adapter="usb"))
        failures = [service.pool.server._reach._failures for service in (one, two)]
        await eventually(one.yard, lambda: all(one.get("phone-1", 0) >= 2 for one in failures))


async def test_a_device_that_was_left_and_is_added_anew_is_served(soon):
    """A device that a node leaves to others is removed meanwhile: another one of its name is served as any other."""
    store = MemoryStore(SystemClock())
    one, two = node(store, "one", Far), node(store, "two", Far)
    spec = DeviceSpec(pool="devices", name="phone-1", number=1, adapter="usb")
    async with one, two:
        await one.devices.add(spec)
        failures = [service.pool.server._reach._failures for service in (one, two)]
        await eventually(one.yard, lambda: any(failures))
        await one.devices.remove("phone-1")
        await one.devices.add(DeviceSpec(pool="devices", name="phone-1", number=2, adapter="simulated"))
        await become(one.yard, phone_1="idle")
        assert {2} in (set(one.workers), set(two.workers))


async def test_a_device_of_another_node_is_not_asked_for(soon, monkeypatch):
    """Of two nodes that define the same devices the second one asks the store for none that the first one serves."""
    store, looks, asked = MemoryStore(SystemClock()), 0, []
    one, two = Yard(store, name="one"), Yard(store, name="two")
    pools = [yard.device_pool("phones", devices=phones(2)) for yard in (one, two)]
    async with one:
        await become(one, emu_1="idle", emu_2="idle")
        read, serve, lists = store.device_stamp, store.serve_devices, store.list_devices
        listed = 0

        async def stamp():
            nonlocal looks
            looks += 1
            return await read()

        async def count_lists(pool=None):
            nonlocal listed
            listed += 1
            return await lists(pool)

        async def note(name, names):
            asked.append(names)
            return await serve(name, names)

        monkeypatch.setattr(store, "device_stamp", stamp)
        monkeypatch.setattr(store, "serve_devices", note)
        monkeypatch.setattr(store, "list_devices", count_lists)
        async with two:
            await eventually(two, lambda: looks > 30)
            assert asked == []
            assert listed <= 2  # once to begin with, and perhaps once for what changed then
            assert pools[1].server.actors == {}
