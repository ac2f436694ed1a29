"""The device as the code of a consumer sees it, for one run."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

from taskyard.errors import NoCurrentRun
from taskyard.model.device import DeviceSpec
from taskyard.ports.device import DeviceAdapter

CURRENT_DEVICE: ContextVar[Device] = ContextVar("taskyard_device")
"""The device of this run. The actor sets it in the context in which it runs the code."""


class Device:
    """The device that a task runs on. Parameters with this annotation get it; they are no arguments of the task."""

    def __init__(self, spec: DeviceSpec, adapter: DeviceAdapter) -> None:
        self.spec, self.adapter = spec, adapter

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

    async def shell(self, command: str, *, timeout_s: float = 30.0) -> str:
        """Run a command on the device; its output. An exit status other than 0 is a `DeviceError`."""
        return await self.adapter.shell(command, timeout_s=timeout_s)

    async def screenshot(self) -> bytes:
        """The screen as a PNG."""
        return await self.adapter.screenshot()

    async def tap(self, x: int, y: int) -> None:
        """Touch the screen, in pixels of a screenshot."""
        await self.adapter.tap(x, y)

    async def push(self, source: Path | bytes, target: str) -> None:
        """Copy a file, or these bytes, to the device."""
        await self.adapter.push(source, target)

    async def pull(self, source: str) -> bytes:
        """The content of a file of the device."""
        return await self.adapter.pull(source)

    async def restart_app(self) -> None:
        """End the app of the device, and start it again."""
        await self.adapter.restart_app()


def current_device() -> Device:
    """The device of this run; `NoCurrentRun` outside of a run on a device."""
    device = CURRENT_DEVICE.get(None)
    if device is None:
        raise NoCurrentRun
    return device
