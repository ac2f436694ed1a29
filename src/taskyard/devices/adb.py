"""Android phones and emulators, reached through an adb server."""

from __future__ import annotations

import asyncio
import functools
import shlex
from collections.abc import Callable, Mapping
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from taskyard.devices.adapter_threads import AdapterThreads
from taskyard.devices.definitions import DeviceDefinition
from taskyard.devices.device_settings import (
    check_seconds,
    check_settings,
    command_failed,
    command_timed_out,
    open_source,
)
from taskyard.devices.extra import require_extra
from taskyard.errors import DeviceError, DeviceLost, InvalidInput
from taskyard.model.device import DeviceSpec
from taskyard.model.given import check_count, check_name, check_text

if TYPE_CHECKING:
    from taskyard.devices.adb_client import AdbCall

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 20.0
"""Seconds: `adb connect` alone takes 10 for a device that does not answer."""

DEFAULT_BOOT_TIMEOUT_S = 180.0
"""Seconds: old phones take two minutes."""

BOOT_POLL_S = 0.5

BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""The file of Linux that has another content after each boot: how a phone that has not gone down yet is told from one
that is up again."""

HEALTH = "echo taskyard; getprop sys.boot_completed"

_SETTINGS = ("app", "activity", "server_host", "server_port", "timeout_s", "boot_timeout_s")


class AdbDevice(DeviceDefinition):
    """An Android device. `serial` is what `adb devices` shows: that of a phone, `emulator-5554`, or an address such as
    `192.168.0.7:5555`, to which adb is then told to connect.

    `app` is the package that `restart_app` restarts, `activity` its first one; without it the launcher's is taken.
    `server_host` and `server_port` say where the adb server is: by default where `ANDROID_ADB_SERVER_HOST` and
    `ANDROID_ADB_SERVER_PORT` say, else `127.0.0.1:5037`; one is started if none runs on this machine. A device that is
    silent for `timeout_s` is lost. A restart may take `boot_timeout_s`."""

    adapter = "adb"

    def __init__(  # noqa: PLR0913 - how it is reached, each part with a name and a default
        self,
        number: int,
        *,
        serial: str,
        name: str = "",
        labels: Mapping[str, str] | None = None,
        host: str = "",
        app: str = "",
        activity: str = "",
        server_host: str = "",
        server_port: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        boot_timeout_s: float = DEFAULT_BOOT_TIMEOUT_S,
    ) -> None:
        super().__init__(number, name=name, labels=labels, host=host)
        self.serial = check_name("serial", serial)
        self.app, self.activity = check_text("app", app), check_text("activity", activity)
        if activity and not app:
            raise InvalidInput("is the first activity of an app: give the app too", field="activity", given=activity)
        self.server_host = check_text("server_host", server_host)
        self.server_port = check_count("server_port", server_port, least=0, most=65_535)
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self.boot_timeout_s = check_seconds("boot_timeout_s", boot_timeout_s)

    @property
    def address(self) -> str:
        return self.serial

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    @property
    def restart_app_s(self) -> float:
        return self.timeout_s

    @property
    def restart_s(self) -> float:
        # It reads the boot id, says that the phone is to reboot, and waits until it has.
        return 2 * self.timeout_s + self.boot_timeout_s

    @classmethod
    def from_spec(cls, spec: DeviceSpec) -> AdbDevice:
        if not spec.address:
            raise InvalidInput("is missing: give the serial that `adb devices` shows", field="address")
        settings = check_settings(cls.adapter, spec.settings, _SETTINGS)
        return cls(spec.number, serial=spec.address, name=spec.name, labels=spec.labels, host=spec.host, **settings)

    def make_adapter(self) -> AdbAdapter:
        require_extra("adbutils")
        return AdbAdapter(self)


class AdbAdapter:
    """A connection to an Android device: each call is one of its own to the adb server, in a thread of this device. A
    call that is cancelled is abandoned: its connection is broken, so that its thread is free again."""

    def __init__(self, device: AdbDevice) -> None:
        self._device = device
        self._threads = AdapterThreads(device.name)
        self._client: Any = None
        self._features: frozenset[str] | None = None
        """Those of the device; None while it is not connected."""
        self._was_connected = False

    async def connect(self) -> None:
        self._client = await asyncio.to_thread(import_module, "taskyard.devices.adb_client")
        # One that was connected, and has to be connected again, does not answer: its old connection is not trusted.
        anew, self._was_connected, self._features = self._was_connected, True, None
        self._features = await self._run(lambda call: call.connect_device(anew=anew))

    async def close(self) -> None:
        self._features = None
        self._threads.close()

    async def health(self) -> None:
        lines = (await self._shell(HEALTH, timeout_s=self._device.timeout_s)).split()
        if lines == ["taskyard"]:
            raise DeviceError(f"{self._device.serial} has not booted yet; wait a moment")
        if lines != ["taskyard", "1"]:
            raise DeviceError(f"{self._device.serial}: its shell answers nonsense: {' '.join(lines)[:200]!r}")

    async def shell(self, command: str, *, timeout_s: float = 30.0) -> str:
        late = command_timed_out(self._device.serial, command, timeout_s)
        return await self._shell(command, timeout_s=timeout_s, late=late)

    async def screenshot(self) -> bytes:
        return await self._call(lambda call: call.take_screenshot(), timeout_s=self._device.timeout_s)

    async def tap(self, x: int, y: int) -> None:
        await self._shell(f"input tap {x:d} {y:d}", timeout_s=self._device.timeout_s)

    async def push(self, source: Path | bytes, target: str) -> None:
        # A local file does not hang: any thread may open it.
        opened = await asyncio.to_thread(open_source, source) if isinstance(source, Path) else BytesIO(source)
        with opened as content:
            await self._call(lambda call: call.push(content, target))

    async def pull(self, source: str) -> bytes:
        return await self._call(lambda call: call.pull(source))

    async def restart_app(self) -> None:
        app, activity = self._device.app, self._device.activity
        if not app:
            raise DeviceError(f'{self._device.serial} has no app to restart; give AdbDevice one with app="com.example"')
        start = (
            f"am start -n {shlex.quote(f'{app}/{activity}')}"
            if activity
            else f"monkey -p {shlex.quote(app)} -c android.intent.category.LAUNCHER 1"
        )
        await self.shell(f"am force-stop {shlex.quote(app)} && {start}", timeout_s=self._device.timeout_s)

    async def restart(self) -> None:
        before = await self._find_boot_id()
        await self._call(lambda call: call.reboot(), timeout_s=self._device.timeout_s)
        try:
            async with asyncio.timeout(self._device.boot_timeout_s):
                await self._wait_for_boot(before)
        except TimeoutError:
            limit_s = self._device.boot_timeout_s
            raise DeviceLost(f"{self._device.serial} has not booted within {limit_s:g} s; look at it") from None

    async def _wait_for_boot(self, before: str | None) -> None:
        has_gone = False
        while True:
            await asyncio.sleep(BOOT_POLL_S)
            try:
                await self.connect()
                await self.health()
                if has_gone or await self._find_boot_id() not in (before, None):
                    return
            except DeviceLost:
                has_gone = True
            except DeviceError:
                pass  # It answers, and has not booted.

    async def _find_boot_id(self) -> str | None:
        try:
            return await self.shell(f"cat {BOOT_ID}", timeout_s=self._device.timeout_s)
        except DeviceError:
            return None

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _shell(self, command: str, *, timeout_s: float, late: DeviceError | None = None) -> str:
        has_shell_v2 = "shell_v2" in (self._features or ())
        status, content = await self._call(
            lambda call: call.run(command, has_shell_v2=has_shell_v2), timeout_s=timeout_s, late=late
        )
        output = content.decode(errors="replace").rstrip("\r\n")
        if status:
            raise command_failed(self._device.serial, command, status, output)
        return output

    async def _call(
        self, function: Callable[[AdbCall], T], *, timeout_s: float | None = None, late: DeviceError | None = None
    ) -> T:
        """Run it in a thread, once connected. `timeout_s` is all the time it has, and `late` the error if that is not
        enough; without it, the call may take long, if only something happens."""
        if self._features is None:
            raise DeviceLost(f"{self._device.serial} is not connected; connect first")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._run(function, timeout_s)
        except TimeoutError:
            raise late or DeviceLost(f"{self._device.serial} has not answered within {timeout_s:g} s") from None

    async def _run(self, function: Callable[[AdbCall], T], timeout_s: float | None = None) -> T:
        client, device = self._client, self._device
        call = client.AdbCall(
            device.server_host,
            device.server_port,
            serial=device.serial,
            timeout_s=max(timeout_s or 0.0, device.timeout_s),
        )
        try:
            return await self._threads.run(functools.partial(function, call), abort=call.abort)
        except client.FAILURES as error:
            raise client.as_device_error(error, device.serial) from None
