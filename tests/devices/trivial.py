"""A device that does what a test says, and an actor for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from taskyard.devices.actor import WorkerActor
from taskyard.devices.actor_settings import ActorSettings
from taskyard.errors import DeviceError, DeviceLost
from taskyard.model.device import DeviceSpec
from taskyard.ports.clock import Clock
from taskyard.testing.clock import ManualClock


def a_spec(number: int = 1, **fields: Any) -> DeviceSpec:
    given = {"pool": "phones", "name": f"emu-{number}", "number": number, "adapter": "scripted", **fields}
    return DeviceSpec(**given)


class ScriptedAdapter:
    """Healthy, unless a test sets it to something else. `calls` has what it was asked for, by name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_plugged_in = True
        self.hangs: set[str] = set()
        self.errors: dict[str, BaseException] = {}
        self.swallows = False
        """Whether a call that hangs ignores its cancellation, until `let_go`."""
        self.let_go = asyncio.Event()
        self.asked = asyncio.Event()
        self.active = 0

    def count(self, name: str) -> int:
        return self.calls.count(name)

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        self.asked.set()
        self.active += 1
        try:
            while name in self.hangs:
                try:
                    await self.let_go.wait()
                except asyncio.CancelledError:
                    if not self.swallows:
                        raise
                else:
                    break
            if name in self.errors:
                raise self.errors[name]
            if not self.is_plugged_in and name != "close":
                raise DeviceLost("it is unplugged")
        finally:
            self.active -= 1

    async def connect(self) -> None:
        await self._do("connect")

    async def close(self) -> None:
        await self._do("close")

    async def health(self) -> None:
        await self._do("health")

    async def shell(self, command: str, *, timeout_s: float = 30.0) -> str:
        await self._do("shell")
        if command == "false":
            raise DeviceError("exit status 1")
        return command

    async def screenshot(self) -> bytes:
        await self._do("screenshot")
        return b""

    async def tap(self, x: int, y: int) -> None:
        await self._do("tap")

    async def push(self, source: Path | bytes, target: str) -> None:
        await self._do("push")

    async def pull(self, source: str) -> bytes:
        await self._do("pull")
        return b""

    async def restart_app(self) -> None:
        await self._do("restart_app")

    async def restart(self) -> None:
        await self._do("restart")


async def settled() -> None:
    """Everything that is due at this moment has been done. Nothing here takes real time, save for threads."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(*actors: WorkerActor) -> AsyncIterator[None]:
    """The actors run, and are idle if their devices answer."""
    loops = [asyncio.create_task(actor.run_forever()) for actor in actors]
    await settled()
    try:
        yield
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


async def pass_time(clock: ManualClock, seconds: float, *, step_s: float = 0.25) -> None:
    """In small steps, so that every timer is seen near its time."""
    await settled()
    for _ in range(round(seconds / step_s)):
        clock.advance(step_s)
        await settled()


def an_actor(adapter: ScriptedAdapter, clock: Clock, number: int = 1, **fields: Any) -> WorkerActor:
    fields.setdefault("settings", ActorSettings())
    return WorkerActor(a_spec(number), adapter, clock=clock, jitter=lambda: 0.0, **fields)
