"""Our adapters, held to the one contract."""

import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from taskyard.devices import AdbDevice, CommandDevice, SimulatedDevice
from taskyard.ports.device import DeviceAdapter
from taskyard.testing.adb_device import EmulatedAdbDevice
from taskyard.testing.adb_server import AdbServer
from taskyard.testing.device_contract import DeviceContract, DeviceUnderTest

pytestmark = pytest.mark.spec("DEV-16")


@dataclass
class OnPhone:
    """An adapter with a simulated phone at its end."""

    phone: SimulatedDevice
    adapter: DeviceAdapter

    async def hang(self) -> None:
        self.phone.hang()

    async def unhang(self) -> None:
        self.phone.unhang()

    async def disconnect(self) -> None:
        self.phone.disconnect()

    async def reconnect(self) -> None:
        self.phone.reconnect()


@dataclass
class OnEmulated(OnPhone):
    """An adapter behind which a real adb server reaches the phone: it is gone, or back, when the server can see it."""

    emulated: EmulatedAdbDevice

    async def disconnect(self) -> None:
        self.phone.disconnect()
        await self.emulated.settled()

    async def reconnect(self) -> None:
        self.phone.reconnect()
        await self.emulated.settled()


class TestSimulated(DeviceContract):
    @pytest.fixture
    async def device(self) -> DeviceUnderTest:
        phone = SimulatedDevice(1, boot_s=0.1)
        return OnPhone(phone, phone.make_adapter())


class TestAdb(DeviceContract):
    """Through the real adb server."""

    @pytest.fixture
    async def device(self, adb_server: AdbServer) -> AsyncIterator[DeviceUnderTest]:
        phone = SimulatedDevice(1, boot_s=0.1)
        async with EmulatedAdbDevice(phone) as emulated:
            definition = AdbDevice(
                1, serial=emulated.serial, server_host="127.0.0.1", server_port=adb_server.port, app="com.example.game"
            )
            yield OnEmulated(phone, definition.make_adapter(), emulated)


class TestAdbBeforeAndroid7(TestAdb):
    """A shell that tells no exit status."""

    @pytest.fixture
    async def device(self, adb_server: AdbServer) -> AsyncIterator[DeviceUnderTest]:
        phone = SimulatedDevice(1)
        async with EmulatedAdbDevice(phone, has_shell_v2=False) as emulated:
            definition = AdbDevice(
                1, serial=emulated.serial, server_host="127.0.0.1", server_port=adb_server.port, app="com.example.game"
            )
            yield OnEmulated(phone, definition.make_adapter(), emulated)


SSH = """#!/bin/sh
# Stands for ssh: hands the command to a shell, while the machine is up and answers.
cd "$(dirname "$0")"
exec 3<&0
while [ -e hung ]; do sleep 0.02; done
sh -c "$2" <&3 &
while kill -0 $! 2>/dev/null; do
    [ ! -e down ] || { kill -9 $!; echo "ssh: connect to host $1: No route to host" >&2; exit 255; }
    sleep 0.02
done
wait $!
"""


@dataclass
class OnMachine:
    """An adapter that reaches a machine through a program in this folder."""

    folder: Path
    adapter: DeviceAdapter

    async def hang(self) -> None:
        (self.folder / "hung").touch()

    async def unhang(self) -> None:
        (self.folder / "hung").unlink()

    async def disconnect(self) -> None:
        (self.folder / "down").touch()

    async def reconnect(self) -> None:
        (self.folder / "down").unlink()


class TestCommand(DeviceContract):
    has_screen = False
    takes_long = "exec sleep 600"

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = f"{tmp_path}/files"

    @pytest.fixture
    async def device(self, tmp_path: Path) -> DeviceUnderTest:
        ssh = tmp_path / "ssh"
        ssh.write_text(SSH)
        ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
        definition = CommandDevice(1, prefix=f"{ssh} lab-3", health="true", restart="true", restart_app="true")
        return OnMachine(tmp_path, definition.make_adapter())
