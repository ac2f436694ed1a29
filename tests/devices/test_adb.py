"""The adapter of Android devices, through the real adb server: devices that do not work, restarts, and calls."""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from taskyard.devices import AdbDevice, SimulatedDevice, adb_client
from taskyard.devices.adb import BOOT_ID
from taskyard.devices.kinds import make_definition
from taskyard.devices.simulated_shell import ShellResult
from taskyard.errors import DeviceError, DeviceLost, InvalidInput
from taskyard.ports.device import DeviceAdapter
from taskyard.testing.adb_device import EmulatedAdbDevice
from taskyard.testing.adb_server import AdbServer
from tests.devices.waiting import PATIENCE_S, adb_state

pytestmark = pytest.mark.spec("DEV-16")


@pytest.fixture
def own_server() -> Iterator[AdbServer]:
    """A server that is not started."""
    server = AdbServer()
    yield server
    server.stop()


@pytest.fixture
async def emulated() -> AsyncIterator[EmulatedAdbDevice]:
    async with EmulatedAdbDevice(SimulatedDevice(1)) as device:
        yield device


def reach(serial: str, server: AdbServer, **settings: object) -> DeviceAdapter:
    definition = AdbDevice(1, serial=serial, server_host="127.0.0.1", server_port=server.port, **settings)  # type: ignore[arg-type]
    return definition.make_adapter()


async def reached(serial: str, server: AdbServer, **settings: object) -> DeviceAdapter:
    adapter = reach(serial, server, **settings)
    await adapter.connect()
    return adapter


# --- servers and devices that do not work -----------------------------------------------------------------------------


async def test_a_server_is_started_if_none_runs(
    own_server: AdbServer, emulated: EmulatedAdbDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting starts an adb server on this machine, also after one has been killed, and never on another port."""
    for name, value in own_server.environment.items():
        monkeypatch.setenv(name, value)
    adapter = await reached(emulated.serial, own_server)
    await adapter.health()
    await asyncio.to_thread(own_server.adb, "kill-server")
    with pytest.raises(DeviceLost, match="connecting again starts one"):
        await adapter.health()
    await adapter.connect()
    await adapter.health()
    await adapter.close()


async def test_no_server_is_started_on_another_machine(own_server: AdbServer) -> None:
    """A server elsewhere is not ours to start; the error says how to."""
    definition = AdbDevice(1, serial="phone", server_host="127.0.0.2", server_port=own_server.port)
    with pytest.raises(DeviceLost, match=f"start it there with `adb -a -P {own_server.port} start-server`"):
        await definition.make_adapter().connect()


async def test_the_server_does_not_get_the_address_of_the_store(
    own_server: AdbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server outlives the program: it gets no variable of ours, which may have a password, and all others."""
    adb = tmp_path / "adb"
    adb.write_text(f"#!/bin/sh\nenv >{tmp_path}/environment\nexit 1\n")
    adb.chmod(0o700)
    monkeypatch.setattr(adb_client, "adb_path", lambda: str(adb))
    monkeypatch.setenv("TASKYARD_STORE", "postgresql://me:secret@db/farm")
    monkeypatch.setenv("LAB", "3")
    with pytest.raises(DeviceLost, match="none starts"):
        await reach("phone", own_server).connect()
    lines = (tmp_path / "environment").read_text().splitlines()
    assert {"LAB=3", "ADB_MDNS=0"} <= set(lines)
    assert not [line for line in lines if "TASKYARD" in line or "secret" in line]


async def test_an_unknown_serial_is_told(adb_server: AdbServer) -> None:
    """A phone that is not plugged in is a `DeviceLost` that says what to do."""
    with pytest.raises(DeviceLost, match=r"nobody: adb knows no device of this serial; plug it in or start"):
        await reach("nobody", adb_server).connect()


async def test_an_address_where_nothing_listens_is_told(adb_server: AdbServer, emulated: EmulatedAdbDevice) -> None:
    """What adb says of an address that it cannot reach is part of the error."""
    emulated.phone.disconnect()
    await emulated.settled()
    with pytest.raises(DeviceLost, match="Connection refused"):
        await reach(emulated.serial, adb_server).connect()


async def test_an_old_connection_does_not_hide_why_a_phone_is_lost(
    adb_server: AdbServer, emulated: EmulatedAdbDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phone that adb shows for a moment after it could not connect is lost with what adb said, as any other."""
    emulated.phone.disconnect()
    await emulated.settled()
    states = iter([None, "offline"])
    find_state = adb_client.AdbCall.find_state
    monkeypatch.setattr(adb_client.AdbCall, "find_state", lambda call: next(states, None) or find_state(call))
    monkeypatch.setattr(adb_client, "READY_S", 0.1)
    with pytest.raises(DeviceLost, match=r"adb cannot reach it: .*Connection refused"):
        await reach(emulated.serial, adb_server).connect()
    assert next(states, "none left") == "none left"


async def test_a_phone_that_knows_the_key_is_used(adb_server: AdbServer) -> None:
    """A phone that asks for the key of this computer, and accepts it, is connected."""
    async with EmulatedAdbDevice(SimulatedDevice(1), auth="accepted") as emulated:
        adapter = await reached(emulated.serial, adb_server)
        assert await adapter.shell("echo in") == "in"
        await adapter.close()


async def test_an_unauthorized_phone_is_told(adb_server: AdbServer) -> None:
    """A phone on which nobody has allowed debugging is a `DeviceLost` that says where to do that."""
    async with EmulatedAdbDevice(SimulatedDevice(1), auth="unauthorized") as emulated:
        with pytest.raises(DeviceLost, match="allow debugging by this computer"):
            await reach(emulated.serial, adb_server).connect()


async def test_a_phone_that_only_takes_connections_is_not_healthy(
    adb_server: AdbServer, emulated: EmulatedAdbDevice
) -> None:
    """A phone that is connected and answers nothing fails its health check after `timeout_s`."""
    emulated.phone.hang(connects=True)
    adapter = await reached(emulated.serial, adb_server, timeout_s=0.3)
    with pytest.raises(DeviceLost, match=r"has not answered within 0\.3 s"):
        await adapter.health()
    emulated.phone.unhang()
    await adapter.health()
    await adapter.close()


async def test_connecting_to_a_phone_that_hangs_may_be_cancelled(
    adb_server: AdbServer, emulated: EmulatedAdbDevice
) -> None:
    """`adb connect` waits ten seconds for a phone that accepts and says nothing; a cancel does not."""
    emulated.phone.hang()
    adapter = reach(emulated.serial, adb_server)
    connecting = asyncio.create_task(adapter.connect())
    done, _ = await asyncio.wait([connecting], timeout=0.3)
    assert not done
    began = time.monotonic()
    connecting.cancel()
    await asyncio.wait([connecting])
    assert time.monotonic() - began < 1
    emulated.phone.unhang()
    async with asyncio.timeout(30):
        await adapter.connect()
    await adapter.health()
    await adapter.close()


async def test_an_offline_phone_is_told_and_comes_back(adb_server: AdbServer, emulated: EmulatedAdbDevice) -> None:
    """A call on a phone that adb shows as offline is a `DeviceLost` that says so; connecting anew drops that state."""
    adapter = await reached(emulated.serial, adb_server)
    emulated.phone.hang()
    # The phone breaks the connection and takes the next one, but says nothing on it.
    emulated.phone.disconnect(for_s=0.0)
    await adb_state(adb_server, emulated.serial, "offline")
    with pytest.raises(DeviceLost, match="offline: adb sees it, but it does not answer"):
        await adapter.shell("echo")
    emulated.phone.unhang()
    await adapter.connect()
    await adapter.health()
    await adapter.close()


async def test_an_emulator_is_reached_by_its_name(adb_server: AdbServer, emulated: EmulatedAdbDevice) -> None:
    """A serial such as `emulator-5554` needs no address: adb has found that device by itself."""
    import adbutils

    client = adbutils.AdbClient("127.0.0.1", adb_server.port)

    def announce() -> None:
        # As an emulator does when it has started.
        with client.make_connection() as connection:
            connection.send_command(f"host:emulator:{emulated.port}")

    await asyncio.to_thread(announce)
    serial = f"emulator-{emulated.port - 1}"
    await adb_state(adb_server, serial, "device")
    adapter = await reached(serial, adb_server)
    assert await adapter.shell("echo in") == "in"
    await adapter.connect()
    await adapter.health()
    await adapter.close()


async def test_an_emulated_phone_has_settled_when_it_listens(
    adb_server: AdbServer, emulated: EmulatedAdbDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a phone that is back listens late: until then it has not settled. If it is gone again by then,
    it refuses connections."""
    adapter = await reached(emulated.serial, adb_server)
    may_listen, start = asyncio.Event(), asyncio.start_server

    async def start_late(*arguments: Any, **options: Any) -> asyncio.Server:
        await may_listen.wait()
        return await start(*arguments, **options)

    monkeypatch.setattr(asyncio, "start_server", start_late)
    emulated.phone.disconnect()
    await emulated.settled()
    emulated.phone.reconnect()
    settling = asyncio.create_task(emulated.settled())
    with pytest.raises(DeviceLost, match="Connection refused"):
        await adapter.connect()
    assert not settling.done()
    may_listen.set()
    await settling
    await adapter.connect()
    emulated.phone.disconnect()
    await emulated.settled()
    may_listen.clear()
    emulated.phone.reconnect()
    with pytest.raises(DeviceLost, match="Connection refused"):
        await adapter.connect()
    emulated.phone.disconnect()
    may_listen.set()
    await emulated.settled()
    with pytest.raises(DeviceLost, match="Connection refused"):
        await adapter.connect()
    await adapter.close()


# --- restarts ---------------------------------------------------------------------------------------------------------


async def test_a_restart_waits_until_the_phone_has_booted(adb_server: AdbServer) -> None:
    """A phone that takes connections again has not booted yet: `restart` goes on waiting, and `health` says so."""
    phone = SimulatedDevice(1, boot_s=3.0)
    async with EmulatedAdbDevice(phone) as emulated:
        adapter = await reached(emulated.serial, adb_server)
        await adapter.restart()
        assert phone.phone.boots == 2
        assert await adapter.shell("getprop sys.boot_completed") == "1"
        phone.phone.booted_mono = time.monotonic() + 60
        with pytest.raises(DeviceError, match="has not booted yet"):
            await adapter.health()
        await adapter.close()


async def test_a_phone_that_goes_down_late_is_not_taken_for_a_booted_one(
    adb_server: AdbServer, emulated: EmulatedAdbDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phone that answers for a while after it was told to reboot is told from one that is up again."""
    reboot, run = emulated.phone.reboot, emulated.phone.run
    is_told, is_asked, has_rebooted = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def reboot_late() -> None:
        is_told.set()
        await is_asked.wait()
        await reboot()
        has_rebooted.set()

    async def run_meanwhile(link: int | None, command: str) -> ShellResult:
        result = await run(link, command)
        if is_told.is_set() and BOOT_ID in command:
            is_asked.set()
        return result

    monkeypatch.setattr(emulated.phone, "reboot", reboot_late)
    monkeypatch.setattr(emulated.phone, "run", run_meanwhile)
    adapter = await reached(emulated.serial, adb_server)
    await adapter.restart()
    assert has_rebooted.is_set()
    await adapter.close()


async def test_a_phone_that_does_not_boot_is_lost(adb_server: AdbServer) -> None:
    """After `boot_timeout_s` a restart is given up."""
    phone = SimulatedDevice(1, boot_s=600.0)
    async with EmulatedAdbDevice(phone) as emulated:
        adapter = await reached(emulated.serial, adb_server, boot_timeout_s=0.3)
        with pytest.raises(DeviceLost, match=r"has not booted within 0\.3 s"):
            await adapter.restart()
        await adapter.close()


async def test_the_app_of_the_settings_is_restarted(adb_server: AdbServer, emulated: EmulatedAdbDevice) -> None:
    """An app is started by its activity, or as the launcher does; without an app the error says how to name one."""
    phone = emulated.phone.phone
    adapter = await reached(emulated.serial, adb_server, app="com.example.game")
    await adapter.restart_app()
    assert phone.app == "com.example.game"
    assert "LAUNCHER" in list(phone.commands or ())[-1]
    adapter = await reached(emulated.serial, adb_server, app="com.example.game", activity=".Main")
    await adapter.restart_app()
    assert list(phone.commands or ())[-1].endswith("am start -n com.example.game/.Main")
    adapter = await reached(emulated.serial, adb_server)
    with pytest.raises(DeviceError, match=r'app="com\.example"'):
        await adapter.restart_app()


# --- calls ------------------------------------------------------------------------------------------------------------


async def test_a_tap_and_a_screenshot_show_the_phone(adb_server: AdbServer, emulated: EmulatedAdbDevice) -> None:
    """The screenshot is the one that the phone drew, byte by byte, and a tap reaches its screen."""
    adapter = await reached(emulated.serial, adb_server)
    drawn: list[bytes] = []
    draw = emulated.phone.draw

    def keep() -> bytes:
        drawn.append(draw())
        return drawn[-1]

    emulated.phone.draw = keep  # type: ignore[method-assign]
    assert await adapter.screenshot() == drawn[0]
    await adapter.tap(180, 290)
    assert emulated.phone.phone.screen == "title"
    emulated.phone.draw = lambda: b"no display"  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="screencap wrote no image: no display"):
        await adapter.screenshot()
    emulated.phone.draw = lambda: drawn[0][:-5]  # type: ignore[method-assign]
    with pytest.raises(DeviceLost, match="in the middle of a screenshot"):
        await adapter.screenshot()
    await adapter.close()


async def test_a_phone_that_stops_in_the_middle_of_a_file_is_lost(
    adb_server: AdbServer, emulated: EmulatedAdbDevice
) -> None:
    """A push of a file that makes no progress ends after `timeout_s`, however large the file is."""
    adapter = await reached(emulated.serial, adb_server, timeout_s=0.5)
    emulated.phone.hang()
    with pytest.raises(DeviceLost, match="does not answer"):
        await adapter.push(bytes(5_000_000), "/sdcard/file")
    emulated.phone.unhang()
    await adapter.push(b"1", "/sdcard/file")
    assert await adapter.pull("/sdcard/file") == b"1"
    await adapter.close()


@pytest.mark.parametrize("has_shell_v2", [True, False])
async def test_what_is_too_large_is_cut_off(
    adb_server: AdbServer, monkeypatch: pytest.MonkeyPatch, has_shell_v2: bool
) -> None:
    """Output, a screenshot and a file of a size that memory should not hold are a `DeviceError`; the device goes on."""
    monkeypatch.setattr(adb_client, "LARGEST_OUTPUT", 1 << 20)
    monkeypatch.setattr(adb_client, "LARGEST_PULL", 1 << 20)
    async with EmulatedAdbDevice(SimulatedDevice(1), has_shell_v2=has_shell_v2) as emulated:
        adapter = await reached(emulated.serial, adb_server)
        emulated.phone.draw = lambda: bytes(2 << 20)  # type: ignore[method-assign]
        await adapter.push(bytes((1 << 20) + 1), "/sdcard/file")
        for call in (adapter.shell("seq 300000"), adapter.screenshot(), adapter.pull("/sdcard/file")):
            with pytest.raises(DeviceError, match="wrote more than 1 MB") as caught:
                await call
            assert not isinstance(caught.value, DeviceLost)
        await adapter.push(bytes(1 << 20), "/sdcard/file")
        assert await adapter.pull("/sdcard/file") == bytes(1 << 20)
        await adapter.health()
        await adapter.close()


@pytest.mark.spec("DEV-08")
async def test_a_device_uses_few_threads_and_returns_them(adb_server: AdbServer, emulated: EmulatedAdbDevice) -> None:
    """One thread does for calls one after the other, a second one for a heartbeat meanwhile; `close` ends them."""

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "taskyard-adapter-farm-7"]

    adapter = await reached(emulated.serial, adb_server, name="farm-7")
    for _ in range(5):
        await adapter.shell("echo")
    assert len(threads()) == 1
    running = asyncio.create_task(adapter.shell("sleep 600", timeout_s=600))
    for _ in range(5):
        await adapter.health()
    both = threads()
    assert len(both) == 2
    running.cancel()
    await asyncio.wait([running])
    await adapter.close()
    for thread in both:
        await asyncio.to_thread(thread.join, PATIENCE_S)
    assert threads() == []


# --- definitions ------------------------------------------------------------------------------------------------------


def test_a_stored_device_is_made_again() -> None:
    """The definition that is made of a spec has the same spec; the serial is its address."""
    spec = AdbDevice(3, serial="emulator-5554", name="emu-3", app="com.example", timeout_s=5.0).spec("phones")
    assert spec.address == "emulator-5554"
    assert make_definition(spec).spec("phones") == spec


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"serial": ""}, "serial"),
        ({"serial": "a", "activity": ".Main"}, "give the app too"),
        ({"serial": "a", "server_port": 70_000}, "65,535"),
        ({"serial": "a", "timeout_s": "long"}, "timeout_s"),
    ],
)
def test_settings_that_make_no_sense_are_told(settings: dict[str, str], match: str) -> None:
    """A bad setting is an `InvalidInput` that names it."""
    with pytest.raises(InvalidInput, match=match):
        AdbDevice(1, **settings)  # type: ignore[arg-type]


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is not even made without adbutils."""
    monkeypatch.setitem(sys.modules, "adbutils", None)
    with pytest.raises(InvalidInput, match=r"pip install taskyard\[devices\]"):
        AdbDevice(1, serial="emulator-5554").make_adapter()
