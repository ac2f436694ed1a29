"""A device whose screen a test paints: it shows what the test says, and writes down what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from taskyard.devices import Device
from taskyard.errors import DeviceError, DeviceLost
from taskyard.model.device import DeviceSpec
from taskyard.ports.device import DeviceAdapter

T = TypeVar("T")

SPEC = DeviceSpec(pool="phones", name="emu-1", number=1, adapter="painted", labels={"role": "eu"})


class PaintedAdapter:
    """An adapter that does at once what it is asked, unless `hangs` or `is_lost` says otherwise."""

    def __init__(self, png: bytes = b"") -> None:
        self.png = png
        self.calls: list[str] = []
        self.hangs: set[str] = set()
        self.is_lost = self.answers_nothing = False
        self.answered = asyncio.Event()
        """Set by each call, before it hangs."""
        self.on_tap: Callable[[int, int], object] = lambda x, y: None
        self.on_look: Callable[[], object] = lambda: None

    async def until(self, call: str) -> None:
        """Wait until this was asked of it."""
        while call not in self.calls:
            self.answered.clear()
            await self.answered.wait()

    async def _do(self, call: str) -> None:
        self.calls.append(call)
        self.answered.set()
        if self.is_lost:
            raise DeviceLost("emu-1 is gone")
        if call.split(maxsplit=1)[0] in self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0)

    async def connect(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> None: ...

    async def shell(self, command: str, *, timeout_s: float = 30.0) -> str:
        await self._do(f"shell {command}")
        if command.startswith("false"):
            raise DeviceError("exit status 1")
        return command.upper()

    async def screenshot(self) -> bytes:
        await self._do("screenshot")
        self.on_look()
        if not self.png and not self.answers_nothing:
            raise DeviceError("it has no screen")
        return self.png

    async def tap(self, x: int, y: int) -> None:
        await self._do(f"tap {x} {y}")
        self.on_tap(x, y)

    async def push(self, source: Path | bytes, target: str) -> None:
        await self._do(f"push {target}")

    async def pull(self, source: str) -> bytes:
        await self._do(f"pull {source}")
        return b"content"

    async def restart_app(self) -> None:
        await self._do("restart_app")

    async def restart(self) -> None:
        await self._do("restart")


class Kept(dict[str, bytes]):
    """What a run keeps, by name."""

    def __call__(self, name: str, data: bytes, *, media_type: str) -> None:
        self[name] = data


async def started(adapter: PaintedAdapter, run: Coroutine[Any, Any, T], call: str) -> asyncio.Task[T]:
    """The run as a task, once it has made this call."""
    task = asyncio.create_task(run)
    await adapter.until(call)
    return task


def make_device(adapter: DeviceAdapter) -> Device:
    return Device(SPEC, adapter)
