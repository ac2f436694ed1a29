"""Devices of a pool while it runs: who serves them, what people do to them, and what becomes of their tasks."""

import asyncio
from datetime import datetime, timedelta
from functools import partial

import pytest

from taskyard import EventKind, ExecutorService, Task, TaskFilter, TaskState, Yard
from taskyard.devices import CommandDevice, Device, DeviceDefinition, GameAccount, SimulatedDevice
from taskyard.errors import AccountQuarantined, DeviceExists, InvalidInput, StoreUnavailable, UnknownDevice
from taskyard.model.device import DeviceSpec, DeviceState
from taskyard.ports.clock import SystemClock
from taskyard.stores.memory import MemoryStore
from tests.devices.farm import PATIENCE_S, Work, add_consumers, eventually, phones, serving

SEVEN, EIGHT = GameAccount(7), GameAccount(8)
DAILY, WEEKLY = Task(source="daily"), Task(source="weekly")


async def states(yard):
    return {one.name: str(one.state_at(yard.now())) for one in await yard.devices.list_all()}


async def become(yard, **expected):
    """Return when the devices (`emu_1`) are in these states in the store."""
    wanted = {name.replace("_", "-"): state for name, state in expected.items()}

    async def are():
        return wanted.items() <= (await states(yard)).items()

    await eventually(yard, are)


@pytest.mark.spec("DEV-12")
async def test_devices_come_and_go_while_the_pool_runs(url):
    """A device that is added gets tasks; drained, taken or quarantined it gets none until it is given back; removed it
    is gone."""
    work = Work()
    async with serving(url, work, devices=1) as service:
        devices, yard = service.devices, service.yard
        await become(yard, emu_1="idle")
        added = await devices.add(SimulatedDevice(2, name="emu-2", labels={"role": "eu"}), "devices", by="ana")
        assert (added.spec.from_code, added.name) == (False, "emu-2")
        await become(yard, emu_2="idle")
        for order, state in ((devices.drain, "draining"), (devices.take, "taken"), (devices.quarantine, "quarantined")):
            status = await order("emu-1", reason="to look at it", by="ana")
            assert status.state_at(yard.now()) == state
            await eventually(yard, lambda: [place.name for place in service.pool.places.ready()] == ["emu-2"])
            await devices.give_back("emu-1", by="ana")
            await eventually(yard, lambda: len(service.pool.places.ready()) == 2)
        await devices.label("emu-1", {"role": "us"}, by="ana")
        assert await service.enqueue(DAILY, SEVEN, requires={"role": "us"})
        assert await work.next() == ("daily", 7, "emu-1")
        await devices.drain("emu-1")
        await become(yard, emu_1="draining")
        assert await service.is_running(7)
        work.let_go(1)
        await eventually(yard, lambda: not service.workers[1].current)
        await devices.remove("emu-2", by="ana")
        await eventually(yard, lambda: set(service.workers) == {1})
        assert [one.name for one in await devices.list_all("devices")] == ["emu-1"]
        commands = [entry.command for entry in await yard.audit(by="ana")]
        assert commands[::-1][0] == "add_device"
        assert {"drain", "take", "quarantine", "give_back", "label", "remove_device"} <= set(commands)


@pytest.mark.spec("DEV-12")
async def test_a_device_is_reached_anew_when_its_settings_change():
    """A new setting waits for the end of the run, and the next one runs on a new connection."""
    work = Work()
    async with serving("memory://", work, devices=1) as service:
        assert await service.enqueue(DAILY, SEVEN)
        await work.next()
        before = service.workers[1]
        await service.devices.edit("emu-1", settings={"latency_s": 0.01})
        await eventually(service.yard, lambda: not service.pool.places.ready())
        assert await service.is_running(7)
        work.let_go()
        await eventually(service.yard, lambda: service.workers.get(1) not in (None, before))
        assert await service.enqueue(DAILY, SEVEN)
        assert await work.next() == ("daily", 7, "emu-1")


async def test_what_is_taken_for_a_time_comes_back():
    """A device that was taken for some seconds gets tasks again by itself."""
    work = Work()
    async with serving("memory://", work, devices=1) as service:
        await service.devices.take("emu-1", for_s=0.5)
        assert await service.enqueue(DAILY, SEVEN)
        await eventually(service.yard, lambda: not service.pool.places.ready())
        assert await work.next() == ("daily", 7, "emu-1")


async def test_the_time_of_a_take_begins_when_the_run_has_ended(url):
    """A person who takes a busy device gets it for the whole time, however long its task goes on; then it gets tasks
    again by itself."""
    work = Work()
    async with serving(url, work, devices=1) as service:
        devices, yard = service.devices, service.yard
        assert await service.enqueue(DAILY, SEVEN)
        await work.next()
        taken = await devices.take("emu-1", for_s=0.7, reason="a bug", by="ana")
        assert (taken.orders.taken_until, taken.orders.taken_for_s) == (None, 0.7)
        assert taken.state_at(yard.now() + timedelta(days=1)) is DeviceState.DRAINING
        assert await service.enqueue(DAILY, EIGHT)
        before = yard.now()
        work.let_go()

        async def has_begun():
            return (await devices.get("emu-1")).orders.taken_until

        until = await eventually(yard, has_begun)
        assert await work.next() == ("daily", 8, "emu-1")
        later, _ = await service.task_runs()
        assert isinstance(until, datetime)
        assert before + timedelta(seconds=0.7) <= until <= later.start
        events = (await yard.store.events(after=0)).events
        told = [(event.actor, event.code) for event in events if event.kind is EventKind.DEVICE_TAKEN]
        assert told == [("ana", "a bug")] * 2


async def test_wrong_orders_are_refused():
    """An unknown device, a taken number or address and a label that makes no sense are typed errors."""
    async with serving("memory://", Work()) as service:
        devices = service.devices
        for verb in (devices.drain, devices.take, devices.give_back, devices.quarantine, devices.remove, devices.get):
            with pytest.raises(UnknownDevice):
                await verb("nobody")
        with pytest.raises(DeviceExists):
            await devices.add(SimulatedDevice(1, name="other"), "devices")
        with pytest.raises(DeviceExists):
            await devices.add(DeviceSpec(pool="devices", name="emu-1", number=9, adapter="simulated"))
        with pytest.raises(InvalidInput):
            await devices.add(SimulatedDevice(9))
        with pytest.raises(InvalidInput):
            await devices.label("emu-1", {"a b": "c"})
        with pytest.raises(InvalidInput):
            await devices.drain(7)
        assert len(service.workers) == 2


async def test_settings_are_checked_before_they_are_stored():
    """Settings that the kind of a device does not have, and an address that it cannot have, are refused, and the device
    stays up. A kind that only another program knows is left to that."""
    async with serving("memory://", Work(), devices=1) as service:
        devices, before = service.devices, service.workers[1]
        for wrong in {"settings": {"latency": 3}}, {"settings": {"latency_s": "long"}}, {"address": "10.0.0.7"}:
            with pytest.raises(InvalidInput, match=r"latency|address"):
                await devices.edit("emu-1", **wrong)
        with pytest.raises(InvalidInput, match="latency"):
            await devices.add(
                DeviceSpec(pool="devices", name="x", number=9, adapter="simulated", settings={"latency": 3})
            )
        await devices.add(DeviceSpec(pool="devices", name="odd", number=8, adapter="telepathy", settings={"far": 1}))
        await devices.edit("odd", settings={"far": 2}, address="mind-7")
        assert [one.name for one in await devices.list_all()] == ["emu-1", "odd"]
        assert (await devices.get("emu-1")).version == 1
        assert service.workers[1] is before


async def test_a_device_that_cannot_be_made_is_honestly_down():
    """A device of an unknown kind, or with settings that make no sense, is down with the reason; the others work."""
    work = Work()
    async with serving("memory://", work, devices=1) as service:
        await service.devices.add(DeviceSpec(pool="devices", name="odd", number=8, adapter="telepathy"))
        wrong = DeviceSpec(pool="devices", name="wrong", number=9, adapter="simulated", settings={"latency_s": "long"})
        await service.yard.store.add_device(wrong, by="an older program")
        service.pool.look()

        async def reasons():
            found = {one.name: one.health.reason for one in await service.devices.list_all()}
            return "telepathy" in found["odd"] and "latency_s" in found["wrong"]

        await eventually(service.yard, reasons)
        assert (await states(service.yard))["odd"] == "down"
        await service.devices.edit("wrong", settings={})
        await become(service.yard, wrong="idle")
        assert await service.enqueue(DAILY, SEVEN)
        await work.next()


@pytest.mark.parametrize(
    "settings", [{}, {"adapters": [CommandDevice]}, {"devices": [CommandDevice(1, health="true")]}]
)
async def test_a_stored_command_is_run_only_if_the_program_says_so(tmp_path, settings):
    """A device in the store whose settings are commands is served only by a pool that was given this kind, or has such
    devices; on others it is down with the reason, and no command is run."""
    made = tmp_path / "made"
    stored = CommandDevice(9, name="lab", health=f"touch {made}")
    async with ExecutorService(**{"devices": [SimulatedDevice(1)], **settings}) as service:
        await service.devices.add(stored, service.pool.name)
        if settings:
            await become(service.yard, lab="idle")
            assert made.exists()
            return

        async def reason():
            return "give the pool adapters=[CommandDevice]" in (await service.devices.get("lab")).health.reason

        await eventually(service.yard, reason)
        await become(service.yard, simulated_1="idle")
        assert (await states(service.yard))["lab"] == "down"
        assert not made.exists()


@pytest.mark.spec("DEV-11", "DEV-05")
async def test_a_task_whose_device_is_lost_goes_to_another(url):
    """A device that disconnects is down; its task starts again on another device, before all others; back, it works."""
    work = Work()
    devices = phones(2)
    async with serving(url, work, devices=devices) as service:
        assert await service.enqueue(DAILY, SEVEN)
        _, _, name = await work.next()
        assert await service.enqueue(DAILY, EIGHT)
        await work.next()
        assert await service.enqueue(WEEKLY, GameAccount(9))
        lost = next(one for one in devices if one.name == name)
        lost.disconnect()
        await become(service.yard, **{name.replace("-", "_"): "down"})

        async def is_head():
            return [item["account_id"] for item in await service.queue_info()] == [7, 9]

        await eventually(service.yard, is_head)
        lost.reconnect()
        assert await work.next() == ("daily", 7, name)
        work.let_go()
        assert (await work.next())[:2] == ("weekly", 9)


@pytest.mark.spec("DEV-05", "DEV-12")
async def test_a_device_that_is_removed_by_force_runs_nothing(url):
    """Removed by force, a device's run is interrupted, and the task goes to another device."""
    work = Work()
    async with serving(url, work) as service:
        assert await service.enqueue(DAILY, SEVEN)
        _, _, name = await work.next()
        await service.devices.remove(name, force=True)
        account, other = (await work.next())[1:]
        assert account == 7
        assert other != name
        assert [one["device"] for one in await service.running_info()] == [other]


async def test_each_node_serves_its_own_devices(url, tmp_path):
    """Two nodes with devices of their own serve these; one line, one account at a time; each sees all that runs."""
    if url == "memory://":
        url = MemoryStore(SystemClock())
    work = Work()
    one = ExecutorService(devices=[SimulatedDevice(1, name="a-1")], store=url, heartbeat_s=1.0)
    two = ExecutorService(devices=[SimulatedDevice(2, name="b-1")], store=url, heartbeat_s=1.0)
    add_consumers(one, work)
    add_consumers(two, work)
    async with one, two:
        await become(one.yard, a_1="idle", b_1="idle")
        assert (set(one.workers), set(two.workers)) == ({1}, {2})
        for n in range(3):
            assert await one.enqueue(DAILY, GameAccount(n))
        assert {(await work.next())[2], (await work.next())[2]} == {"a-1", "b-1"}
        assert await two.enqueue(DAILY, GameAccount(0)) is False
        assert {item["emulator_id"] for item in await two.running_info()} == {1, 2}
        assert {item["node"] for item in await two.running_info()} == {
            service.yard._engine.incarnation for service in (one, two)
        }
        await two.devices.drain("a-1")
        await eventually(one.yard, lambda: one.workers[1].state == "draining")  # the other node looks once a second
        work.let_go()
        assert (await work.next())[1:] == (2, "b-1")


@pytest.mark.spec("DEV-12")
async def test_a_device_of_two_nodes_is_served_by_one(url):
    """Of two nodes that define one device one serves it, and the other takes it over when that has left."""
    if url == "memory://":
        url = MemoryStore(SystemClock())
    one = ExecutorService(devices=phones(1), store=url, heartbeat_s=1.0)
    two = ExecutorService(devices=phones(1), store=url, heartbeat_s=1.0)
    await one.start()
    await become(one.yard, emu_1="idle")
    async with two:
        assert (set(one.workers), set(two.workers)) == ({1}, set())
        await one.stop()
        await eventually(two.yard, lambda: set(two.workers) == {1})
        await become(two.yard, emu_1="idle")


@pytest.mark.spec("DEV-10")
async def test_an_account_whose_runs_all_fail_is_quarantined(url):
    """After five failed runs in a row an account and consumer are refused until they are released; what else there is
    goes on; and then its failures so far no longer count."""
    service = ExecutorService(devices=phones(1), store=url, heartbeat_s=1.0)
    does_fail = True

    @service.consumer(name="daily")
    async def daily(account: GameAccount) -> None:
        if does_fail and account.account_id == 7:
            raise OSError("banned")

    @service.consumer(name="weekly")
    async def weekly(device: Device, account: GameAccount) -> None: ...

    async def ended(count):
        counts = await service.yard.store.count()
        return sum(n for (_, state), n in counts.items() if state in (TaskState.FAILED, TaskState.COMPLETED)) == count

    async def first_alert():
        return await anext(service.yard.events(kinds=[EventKind.ACCOUNT_QUARANTINED], after=0))

    async with service:
        for count in range(1, 6):
            assert await service.enqueue(DAILY, SEVEN)
            await eventually(service.yard, partial(ended, count))
        await eventually(service.yard, service.devices.quarantined_accounts)
        (quarantined,) = await service.devices.quarantined_accounts("devices")
        assert (quarantined.account, quarantined.consumer, quarantined.failures) == ("7", "daily", 5)
        assert await service.enqueue(DAILY, SEVEN) is False
        with pytest.raises(AccountQuarantined, match="or `taskyard device release` takes them again"):
            await daily.submit(account=SEVEN)
        assert await service.enqueue(WEEKLY, SEVEN)
        assert await service.enqueue(DAILY, EIGHT)
        await eventually(service.yard, lambda: ended(7))
        alert = await first_alert()
        assert (alert.queue, alert.consumer, alert.code, alert.is_alert) == ("devices", "daily", "7", True)
        assert await service.devices.release("devices", 7, by="ana") == 1
        assert await service.enqueue(DAILY, SEVEN)
        await eventually(service.yard, lambda: ended(8))
        assert await service.devices.quarantined_accounts() == []
        does_fail = False
        assert await service.enqueue(DAILY, SEVEN)
        await eventually(service.yard, lambda: ended(9))
        await service.devices.quarantine_account("devices", 8, "daily", reason="by hand", by="ana")
        assert await service.enqueue(DAILY, EIGHT) is False
        rates = {one.name: one.success_rate for one in await service.devices.success_rates(by_account=True)}
        assert rates == {"7": 0.25, "8": 1.0}
        assert len(await service.devices.history(account_id=7)) == 8


@pytest.mark.spec("DEV-11")
async def test_a_device_that_lies_gets_no_task():
    """A device that takes connections and never answers is never up; the others do the work."""
    work = Work()
    liar = SimulatedDevice(2, name="liar")
    liar.hang(connects=True)
    service = ExecutorService(devices=[*phones(1), liar], heartbeat_s=0.5)
    add_consumers(service, work)
    async with service:
        await become(service.yard, emu_1="idle", liar="down")
        work.let_go()
        for n in range(5):
            assert await service.enqueue(DAILY, GameAccount(n))
        assert {(await work.next())[2] for _ in range(5)} == {"emu-1"}


async def test_a_pool_works_beside_other_consumers(url):
    """A yard runs tasks on devices and elsewhere, and a client of it may look and steer."""
    if url == "memory://":
        url = MemoryStore(SystemClock())

    def make():
        yard = Yard(url)
        pool = yard.device_pool("phones", devices=phones(2))

        @pool.consumer(name="daily")
        async def daily(device: Device, account: GameAccount) -> str:
            return await device.shell("echo hello")

        @yard.consumer(name="add")
        def add(x: int, y: int) -> int:
            return x + y

        return yard, pool

    (yard, _), (other, other_pool) = make(), make()
    async with yard, other.client():
        sums = await other.submit("add", {"x": 1, "y": 2})
        assert await other_pool.enqueue(DAILY, SEVEN)
        assert await sums.result(timeout_s=PATIENCE_S) == 3

        async def is_done():
            found = await other.store.list_tasks(TaskFilter(queue="phones", states=(TaskState.COMPLETED,)))
            return [record.result for record in found]

        assert await eventually(other, is_done) == ['"hello"']
        await other.devices.drain("emu-1", by="ana")
        await become(yard, emu_1="draining")
        await other.devices.quarantine_account("phones", 7, "daily")
        assert await other_pool.enqueue(DAILY, SEVEN) is False
        (run,) = await other_pool.task_runs()
        assert run.status == "completed"


async def test_a_store_that_is_away_loses_no_report():
    """What happens to a device while the store does not answer is written when it answers again."""
    work = Work()
    devices = phones(2)
    async with serving("memory://", work, devices=devices) as service:
        await become(service.yard, emu_1="idle", emu_2="idle")
        store = service.yard.store
        honest, tried = store.report_devices, asyncio.Event()

        async def refuse(node, reports):
            tried.set()
            raise StoreUnavailable("gone for a while")

        store.report_devices = refuse
        devices[0].disconnect()
        async with asyncio.timeout(PATIENCE_S):
            await tried.wait()
        assert (await states(service.yard))["emu-1"] == "idle"
        store.report_devices = honest
        await become(service.yard, emu_1="down", emu_2="idle")


async def test_the_devices_of_a_definition_of_my_own():
    """A pool is given another kind of devices, and serves one of these that a person has added."""

    class MyDevice(SimulatedDevice):
        adapter = "mine"

    assert issubclass(MyDevice, DeviceDefinition)
    service = ExecutorService(adapters=[MyDevice], heartbeat_s=1.0)
    async with service:
        await service.devices.add(DeviceSpec(pool="devices", name="lab-1", number=1, adapter="mine"))
        await become(service.yard, lab_1="idle")
        status = await service.devices.get("lab-1")
        assert status.state_at(service.yard.now()) is DeviceState.IDLE


async def test_devices_that_collide_keep_a_node_from_starting(url, caplog):
    """A node whose devices collide with those of the store does not start, and changes nothing; a pool without devices,
    and one with more than the node runs, say so."""
    if url == "memory://":
        url = MemoryStore(SystemClock())
    async with serving(url, Work(), devices=1) as service:
        other = ExecutorService(devices=[SimulatedDevice(1, name="other")], store=url)
        with pytest.raises(DeviceExists):
            await other.start()
        await other.stop()
        assert [one.name for one in await service.devices.list_all()] == ["emu-1"]
    none = Yard("memory://", max_running=1)
    empty, crowded = none.device_pool("empty"), none.device_pool("crowded", devices=phones(2))
    add_consumers(empty, Work())
    async with none:
        assert await empty.enqueue(DAILY, SEVEN)
        assert crowded.definitions.keys() == {"emu-1", "emu-2"}
    assert "the pool empty has no device: tasks that need one wait" in caplog.text
    assert "the pool crowded has 2 devices, but this node runs 1 tasks at once" in caplog.text


def test_devices_can_be_asked_without_a_loop(tmp_path):
    """A script without a loop lists, labels and drains devices, and gets the same errors."""
    yard = Yard(f"sqlite:///{tmp_path}/farm.db")
    with yard.blocking(serve=False) as sync:
        sync.devices.add(SimulatedDevice(1, name="emu-1"), "phones", by="ana")
        sync.devices.label("emu-1", {"role": "eu"})
        sync.devices.drain("emu-1")
        (status,) = sync.devices.list_all("phones")
        assert (status.spec.labels, status.orders.drained is not None) == ({"role": "eu"}, True)
        with pytest.raises(UnknownDevice):
            sync.devices.drain("emu-2")
        with pytest.raises(AttributeError):
            sync.devices.explode("emu-1")
