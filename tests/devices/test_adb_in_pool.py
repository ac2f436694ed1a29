"""Pools whose devices are reached through the real adb server, or by commands."""

import asyncio
import time
from pathlib import Path

import pytest

from taskyard import ExecutorService, Task
from taskyard.devices import AdbDevice, CommandDevice, Device, GameAccount, SimulatedDevice
from taskyard.testing.adb_device import EmulatedAdbDevice
from taskyard.testing.adb_server import AdbServer
from tests.devices.farm import eventually

HEARTBEAT_S = 1.0


def android(number: int, emulated: EmulatedAdbDevice, server: AdbServer) -> AdbDevice:
    return AdbDevice(
        number, name=f"phone-{number}", serial=emulated.serial, server_host="127.0.0.1", server_port=server.port
    )


@pytest.mark.spec("DEV-16", "DEV-11", "DEV-08")
@pytest.mark.parametrize("outage", ["hang", "disconnect"])
async def test_a_phone_that_fails_in_a_run_loses_it_to_another(adb_server: AdbServer, outage: str) -> None:
    """A phone that hangs or vanishes in the middle of a command is down within two heartbeats, its task runs on
    another one, and the phone is idle again within a heartbeat and a second after its return."""
    phones = {"phone-1": SimulatedDevice(1), "phone-2": SimulatedDevice(2)}
    async with EmulatedAdbDevice(phones["phone-1"]) as first, EmulatedAdbDevice(phones["phone-2"]) as second:
        service = ExecutorService(
            devices=[android(1, first, adb_server), android(2, second, adb_server)], heartbeat_s=HEARTBEAT_S
        )
        begun: asyncio.Queue[str] = asyncio.Queue()
        ended: asyncio.Queue[str] = asyncio.Queue()

        @service.consumer(name="daily")
        async def daily(device: Device, account: GameAccount) -> None:
            assert (await device.screenshot()).startswith(b"\x89PNG")
            begun.put_nowait(device.name)
            await device.shell("sleep 2", timeout_s=600)
            ended.put_nowait(device.name)

        def ready() -> set[str]:
            return {place.name for place in service.pool.places.ready()}

        async with service:
            await eventually(service.yard, lambda: len(ready()) == 2)
            assert await service.enqueue(Task(source="daily"), GameAccount(7))
            name = await begun.get()
            phone = phones[name]
            failed_mono = time.monotonic()
            getattr(phone, outage)()
            await eventually(service.yard, lambda: ready() == phones.keys() - {name})
            assert time.monotonic() - failed_mono < 2 * HEARTBEAT_S + 1
            assert {await begun.get()} == phones.keys() - {name}
            assert {await ended.get()} == phones.keys() - {name}
            back_mono = time.monotonic()
            phone.unhang()
            phone.reconnect()
            await eventually(service.yard, lambda: len(ready()) == 2)
            assert time.monotonic() - back_mono < HEARTBEAT_S + 1


@pytest.mark.spec("DEV-16")
async def test_a_device_that_is_reached_by_commands_runs_tasks(tmp_path: Path) -> None:
    """A machine whose health command succeeds gets a task, and one whose health command fails gets none."""
    (tmp_path / "up").touch()
    machines = [
        CommandDevice(1, name="lab-1", prefix="sh -c", health=f"test -e {tmp_path}/down"),
        CommandDevice(2, name="lab-2", prefix="sh -c", health=f"test -e {tmp_path}/up"),
    ]
    service = ExecutorService(devices=machines, heartbeat_s=HEARTBEAT_S)

    said: asyncio.Queue[str] = asyncio.Queue()

    @service.consumer(name="train")
    async def train(device: Device, account: GameAccount) -> None:
        said.put_nowait(await device.shell(f"echo {device.name} | tr a-z A-Z"))

    async with service:
        assert await service.enqueue(Task(source="train"), GameAccount(7))
        assert await said.get() == "LAB-2"
        listed = {status.name: status for status in await service.yard.devices.list_all()}
        assert "ended with status 1" in listed["lab-1"].health.reason
