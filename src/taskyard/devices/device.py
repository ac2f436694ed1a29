"""The device as the code of a consumer sees it, for one run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from taskyard.devices.recording import IS_OPTIONAL, Recording, StepRecord, is_expected
from taskyard.errors import DeviceError, DeviceLost, NoCurrentRun, quote, shorten
from taskyard.model.device import DeviceSpec
from taskyard.ports.device import DeviceAdapter

T = TypeVar("T")

CURRENT_DEVICE: ContextVar[Device] = ContextVar("taskyard_device")
"""The device of this run. The actor sets it in the context in which it runs the code."""

QUICK_LIMIT_S = 20.0
"""For a tap or a screenshot, which take milliseconds: a device that needs longer does not answer."""

COPY_LIMIT_S = 600.0
"""For a file to or from the device."""

RESTART_LIMIT_S = 180.0
"""For the restart of the app."""

SHELL_MARGIN_S = 10.0
"""Beyond the timeout of a command, by which the adapter has given it up."""


class Device:
    """The device that a task runs on. Parameters with this annotation get it; they are no arguments of the task.

    One object serves one run. Each call is a step, and is recorded. A run with a failed step is never completed, even
    if the code handles the error, unless the step was optional. Code of the run may use the device in several asyncio
    tasks: the device does one thing at a time. After the run every call is a `DeviceError`."""

    def __init__(self, spec: DeviceSpec, adapter: DeviceAdapter) -> None:
        self.spec, self.adapter = spec, adapter
        self.recording = Recording(spec.name)
        self._turn = asyncio.Lock()
        self._users: set[asyncio.Task[object]] = set()
        self._is_closed = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def number(self) -> int:
        """Its `emulator_id`."""
        return self.spec.number

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.spec.labels)

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The steps of this run that have ended, the latest 300."""
        return tuple(self.recording.steps)

    # --- steps --------------------------------------------------------------------------------------------------------

    async def shell(self, command: str, *, timeout_s: float = 30.0) -> str:
        """Run a command on the device; its output. An exit status other than 0 is a `DeviceError`."""
        with self.recording.step(f"shell {quote(command)}"):
            return await self._call(
                lambda: self.adapter.shell(command, timeout_s=timeout_s), limit_s=timeout_s + SHELL_MARGIN_S
            )

    async def screenshot(self, *, name: str | None = None) -> bytes:
        """The screen as a PNG. With a name it is kept as the artifact `<name>.png`."""
        with self.recording.step("screenshot" if name is None else f"screenshot {quote(name)}"):
            png = await self.look()
        if name is not None:
            await self.recording.keep_screenshot(name, png)
        return png

    async def tap(self, x: int, y: int) -> None:
        """Touch the screen, in pixels of a screenshot."""
        with self.recording.step(f"tap {x}, {y}"):
            await self._tap(x, y)

    async def push(self, source: Path | bytes, target: str) -> None:
        """Copy a file, or these bytes, to the device."""
        with self.recording.step(f"push {quote(target)}"):
            await self._call(lambda: self.adapter.push(source, target), limit_s=COPY_LIMIT_S)

    async def pull(self, source: str) -> bytes:
        """The content of a file of the device."""
        with self.recording.step(f"pull {quote(source)}"):
            return await self._call(lambda: self.adapter.pull(source), limit_s=COPY_LIMIT_S)

    async def restart_app(self) -> None:
        """End the app of the device, and start it again."""
        with self.recording.step("restart_app"):
            await self._call(self.adapter.restart_app, limit_s=RESTART_LIMIT_S)

    @contextmanager
    def optional(self) -> Iterator[None]:
        """Steps in this block may fail. A `DeviceError` ends the block, and the code goes on after it; save a
        `DeviceLost`, since nothing can go on without the device."""
        token = IS_OPTIONAL.set(True)
        try:
            yield
        except DeviceError as exc:
            if not is_expected(exc):
                raise
        finally:
            IS_OPTIONAL.reset(token)

    # --- the connection -----------------------------------------------------------------------------------------------

    async def _tap(self, x: int, y: int) -> None:
        await self._call(lambda: self.adapter.tap(x, y), limit_s=QUICK_LIMIT_S)

    async def look(self) -> bytes:
        png = await self._call(self.adapter.screenshot, limit_s=QUICK_LIMIT_S)
        self.recording.saw(png)
        return png

    async def _call(self, call: Callable[[], Awaitable[T]], *, limit_s: float) -> T:
        """One call of the adapter. One that takes too long is a `DeviceLost`: the device does not answer."""
        user = asyncio.current_task()
        assert user is not None
        async with self._turn:
            if self._is_closed:
                raise DeviceError(f"the run on {quote(self.name)} has ended: its code can no longer use the device")
            limit = asyncio.timeout(limit_s)
            self._users.add(user)
            try:
                async with limit:
                    return await call()
            except TimeoutError:
                if limit.expired():
                    raise DeviceLost(f"{shorten(self.name)} did not answer within {limit_s:g} s") from None
                raise
            finally:
                self._users.discard(user)

    def close(self) -> None:
        """The run has ended. What it has left behind, such as an asyncio task, can no longer use the device."""
        self._is_closed = True
        for user in self._users:
            user.cancel()


def current_device() -> Device:
    """The device of this run; `NoCurrentRun` outside of a run on a device."""
    device = CURRENT_DEVICE.get(None)
    if device is None:
        raise NoCurrentRun
    return device
