"""A phone that exists only in this process: seeded, with controls that make it fail, hang or vanish. For tests, for
demonstrations, and for writing consumers without a phone at hand."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from taskyard.devices.definitions import DeviceDefinition
from taskyard.devices.device_settings import check_seconds, check_settings, check_share, command_timed_out, read_source
from taskyard.devices.simulated_screen import Phone, draw_png
from taskyard.devices.simulated_shell import Shell, ShellResult
from taskyard.errors import DeviceError, DeviceLost
from taskyard.model.device import DeviceSpec
from taskyard.model.given import check_count
from taskyard.ports.clock import Clock, SystemClock

Repair = Literal["connect", "restart_app", "restart"]
"""The call of an adapter that ends a fault."""

_SETTINGS = (
    "seed",
    "latency_s",
    "failure_rate",
    "disconnect_rate",
    "hang_rate",
    "outage_s",
    "boot_s",
    "load_s",
)


@dataclass(slots=True)
class _Hang:
    until_mono: float | None
    repair: Repair | None
    connects: bool


class SimulatedDevice(DeviceDefinition):
    """A simulated phone, and its definition. Adapters made of it connect to it; the controls act on the phone. All of
    it belongs to one event loop.

    Every call takes `latency_s`. Of the calls, these shares fail, lose the device or hang it: `failure_rate`,
    `disconnect_rate`, `hang_rate`, drawn from `seed`; such an outage ends after `outage_s`. A restart takes `boot_s`.
    An app that starts shows for `load_s` that it loads."""

    adapter = "simulated"

    def __init__(  # noqa: PLR0913 - how it behaves, each part with a name and a default
        self,
        number: int,
        *,
        name: str = "",
        labels: Mapping[str, str] | None = None,
        host: str = "",
        seed: int | None = None,
        clock: Clock | None = None,
        latency_s: float = 0.0,
        failure_rate: float = 0.0,
        disconnect_rate: float = 0.0,
        hang_rate: float = 0.0,
        outage_s: float = 5.0,
        boot_s: float = 0.0,
        load_s: float = 0.0,
    ) -> None:
        super().__init__(number, name=name, labels=labels, host=host)
        self.seed = check_count("seed", self.number if seed is None else seed, least=0)
        self.latency_s = check_seconds("latency_s", latency_s)
        self.failure_rate = check_share("failure_rate", failure_rate)
        self.disconnect_rate = check_share("disconnect_rate", disconnect_rate)
        self.hang_rate = check_share("hang_rate", hang_rate)
        self.outage_s = check_seconds("outage_s", outage_s)
        self.boot_s = check_seconds("boot_s", boot_s)
        self.load_s = check_seconds("load_s", load_s)
        self.phone = Phone(self.name, self.number, load_s=self.load_s)
        self.calls = 0
        """How many calls it has answered."""
        self._clock: Clock = clock or SystemClock()
        self._chance: random.Random | None = None
        self._waiting: dict[asyncio.Event, None] = {}
        self.link = 0
        """Grows when all connections break, which are of the link at which they were made."""
        self._unplugged_until: float | None = None
        self._hang: _Hang | None = None
        self._fault: tuple[str, Repair] | None = None
        self._failures: deque[DeviceError] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    @property
    def restart_app_s(self) -> float:
        return self.latency_s

    @property
    def restart_s(self) -> float:
        return self.latency_s + self.boot_s

    @classmethod
    def from_spec(cls, spec: DeviceSpec) -> SimulatedDevice:
        settings = check_settings(cls.adapter, spec.settings, _SETTINGS)
        return cls(spec.number, name=spec.name, labels=spec.labels, host=spec.host, **settings)

    def make_adapter(self) -> SimulatedAdapter:
        return SimulatedAdapter(self)

    # --- controls -----------------------------------------------------------------------------------------------------

    def hang(self, *, for_s: float | None = None, until: Repair | None = None, connects: bool = False) -> None:
        """From now on answer nothing: until `unhang`, for some seconds, or until this call of an adapter. With
        `connects` it still takes connections, and looks alive."""
        self._hang = _Hang(None if for_s is None else self._clock.monotonic() + for_s, until, connects)
        self._wake()

    def unhang(self) -> None:
        """Answer again, also what was asked meanwhile."""
        self._hang = None
        self._wake()

    def disconnect(self, *, for_s: float | None = None) -> None:
        """Break all connections, and take none: until `reconnect`, or for some seconds."""
        self._unplugged_until = float("inf") if for_s is None else self._clock.monotonic() + for_s
        self.link += 1
        self._wake()

    def reconnect(self) -> None:
        """Take connections again; adapters have to connect anew."""
        self._unplugged_until = None
        self._wake()

    def fail_next(self, count: int = 1, message: str = "the device was told to fail", *, lost: bool = False) -> None:
        """Let the next calls fail, those of `connect` and `health` not counted; with `lost` as a `DeviceLost`."""
        error = DeviceLost if lost else DeviceError
        self._failures = deque(error(f"{self.name}: {message}") for _ in range(count))

    def fail_until(self, repair: Repair, message: str = "the device was told to fail") -> None:
        """Let all calls fail, `health` too, until this call of an adapter."""
        self._fault = (message, repair)

    # --- the device, as a connection to it sees it --------------------------------------------------------------------

    @property
    def is_connectable(self) -> bool:
        """Whether it takes connections."""
        return self._unplugged_until is None or self._clock.monotonic() >= self._unplugged_until

    async def connect(self) -> int:
        """Take a connection; the link that it belongs to. All of a link break at once."""
        self._end_faults("connect")
        if self._hang is None or not self._hang.connects:
            await self.answer(None)
        self._check(None)
        return self.link

    async def answer(self, link: int | None, *, until_mono: float = float("inf"), latency_s: float = -1.0) -> None:
        """Return when the device answers something that was asked on this link. `TimeoutError` after `until_mono`."""
        ready_mono = 0.0
        if latency_s < 0:
            latency_s = self.latency_s
        if latency_s:
            ready_mono = self._clock.monotonic() + latency_s
        while True:
            self._check(link)
            hung_until = self._hung_until()
            if not hung_until and not ready_mono:
                self.calls += 1
                return
            now = self._clock.monotonic()
            if not hung_until and now >= ready_mono:
                self.calls += 1
                return
            if now >= until_mono:
                raise TimeoutError
            await self._wait(min(max(hung_until, ready_mono), until_mono))

    async def call(self, link: int | None, what: str, *, until_mono: float = float("inf")) -> None:
        """Return when the device has taken a call, or fail as it is told to."""
        if self._fault is not None or self._hang is not None:
            self._end_faults(what)
        if self.failure_rate or self.disconnect_rate or self.hang_rate:
            self._draw()
        await self.answer(link, until_mono=until_mono)
        if self._failures:
            raise self._failures.popleft()
        self._check_fault()

    async def check_health(self, link: int | None) -> None:
        await self.answer(link)
        self._check_fault()
        if self._clock.monotonic() < self.phone.booted_mono:
            raise DeviceError(f"{self.name} has not booted yet; wait a moment")

    async def run(self, link: int | None, command: str, *, until_mono: float = float("inf")) -> ShellResult:
        """Run a command line as its shell does."""
        what = "restart_app" if command.startswith("am force-stop") else "shell"
        await self.call(link, what, until_mono=until_mono)
        self.phone.remember(command)

        async def sleep(seconds: float) -> None:
            if seconds > 0:
                await self.answer(link, until_mono=until_mono, latency_s=seconds)

        return await Shell(self.phone, self._clock, sleep=sleep, draw=self.draw).run(command)

    def draw(self) -> bytes:
        """What is on the screen, as a PNG."""
        return draw_png(self.phone, now=self._clock.now(), mono=self._clock.monotonic())

    def touch(self, x: int, y: int) -> None:
        self.phone.tap(x, y, mono=self._clock.monotonic())

    def restart_app(self) -> None:
        self._end_faults("restart_app")
        self.phone.start_app(self.phone.app or "game", mono=self._clock.monotonic())

    async def reboot(self) -> None:
        """Break all connections, boot, and return when it takes some again."""
        self._check(None)
        self._end_faults("restart")
        await self.answer(None, latency_s=0.0)
        booted_mono = self.mono_after(self.boot_s)
        self.phone.boot(until_mono=booted_mono)
        # As with a real phone: it takes connections before it is ready.
        self.disconnect(for_s=self.boot_s / 2)
        while self._clock.monotonic() < booted_mono:
            await self._wait(booted_mono)
        await self.connectable()

    def mono_after(self, seconds: float) -> float:
        """The time of its clock that many seconds from now."""
        return self._clock.monotonic() + seconds

    async def connectable(self) -> None:
        """Return when it takes connections."""
        while not self.is_connectable:
            await self._wait(self._unplugged_until)

    async def broken(self, link: int) -> None:
        """Return when this link has broken."""
        while link == self.link:
            await self._wait(None)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check(self, link: int | None) -> None:
        if not self.is_connectable:
            raise DeviceLost(
                f"the simulated device {self.name} is disconnected; it takes connections after reconnect()"
            )
        if link is not None and link != self.link:
            raise DeviceLost(f"the connection to the simulated device {self.name} broke; connect again")

    def _check_fault(self) -> None:
        if self._fault is not None:
            raise DeviceError(f"{self.name}: {self._fault[0]}")

    def _end_faults(self, what: str) -> None:
        if self._fault is not None and self._fault[1] == what:
            self._fault = None
        if self._hang is not None and self._hang.repair == what:
            self.unhang()

    def _hung_until(self) -> float:
        """When it answers again; 0 if it does."""
        if self._hang is None:
            return 0.0
        until = self._hang.until_mono
        if until is None:
            return float("inf")
        if self._clock.monotonic() >= until:
            self._hang = None
            return 0.0
        return until

    def _draw(self) -> None:
        """Let chance decide whether this call fails."""
        if self._chance is None:
            self._chance = random.Random(self.seed)
        drawn = self._chance.random()
        if drawn < self.failure_rate:
            raise DeviceError(f"{self.name}: the call failed at random")
        drawn -= self.failure_rate
        if drawn < self.disconnect_rate:
            self.disconnect(for_s=self.outage_s)
        elif drawn < self.disconnect_rate + self.hang_rate and self._hang is None:
            self.hang(for_s=self.outage_s)

    async def _wait(self, until_mono: float | None) -> None:
        """Until then, or until something has changed."""
        wake = asyncio.Event()
        self._waiting[wake] = None
        try:
            await self._clock.wait(wake, None if until_mono == float("inf") else until_mono)
        finally:
            del self._waiting[wake]

    def _wake(self) -> None:
        for wake in self._waiting:
            wake.set()


class SimulatedAdapter:
    """A connection to a simulated phone."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._link: int | None = None

    async def connect(self) -> None:
        self._link = None
        self._link = await self._device.connect()

    async def close(self) -> None:
        self._link = None

    async def health(self) -> None:
        await self._device.check_health(self._linked())

    async def shell(self, command: str, *, timeout_s: float = 30.0) -> str:
        until = self._device.mono_after(timeout_s)
        try:
            result = await self._device.run(self._linked(), command, until_mono=until)
        except TimeoutError:
            raise command_timed_out(self._device.name, command, timeout_s) from None
        return result.checked(self._device.name, command)

    async def screenshot(self) -> bytes:
        await self._device.call(self._linked(), "screenshot")
        return await asyncio.to_thread(self._device.draw)

    async def tap(self, x: int, y: int) -> None:
        await self._device.call(self._linked(), "tap")
        self._device.touch(x, y)

    async def push(self, source: Path | bytes, target: str) -> None:
        content = await asyncio.to_thread(read_source, source) if isinstance(source, Path) else bytes(source)
        await self._device.call(self._linked(), "push")
        self._device.phone.write(target, content)

    async def pull(self, source: str) -> bytes:
        await self._device.call(self._linked(), "pull")
        content = self._device.phone.read(source)
        if content is None:
            raise DeviceError(f"{self._device.name}: no such file: {source}")
        return content

    async def restart_app(self) -> None:
        await self._device.call(self._linked(), "restart_app")
        self._device.restart_app()

    async def restart(self) -> None:
        self._link = None
        await self._device.reboot()

    def _linked(self) -> int:
        if self._link is None:
            raise DeviceLost(f"the device {self._device.name} is not connected; connect first")
        return self._link
