"""Devices as an executor, held to the contract of all executors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest

from taskyard.devices.actor import WorkerActor
from taskyard.devices.executor import DeviceExecutor
from taskyard.ports.clock import SystemClock
from taskyard.ports.executor import ExecutorProtocol
from taskyard.testing.contract import ExecutorContract
from tests.contract.test_executors import AsyncContract
from tests.devices.trivial import ScriptedAdapter, an_actor


class DevicesContract(ExecutorContract):
    """Two devices, each of which lets one item wait."""

    queue_limit = 2

    def make_executor(self) -> DeviceExecutor:
        clock = SystemClock()
        self.actors = {actor.name: actor for actor in (an_actor(ScriptedAdapter(), clock, n) for n in range(2))}
        return DeviceExecutor(self.actors, clock=clock)

    @pytest.fixture
    async def executor(self) -> AsyncIterator[ExecutorProtocol]:
        executor = self.make_executor()
        await executor.start()
        running = [asyncio.create_task(actor.run_forever()) for actor in self.actors.values()]
        await are_idle(self.actors.values())
        yield executor
        await executor.shutdown(wait=True)
        for actor in self.actors.values():
            await actor.close()
        await asyncio.gather(*running)


async def are_idle(actors: Iterable[WorkerActor]) -> None:
    async with asyncio.timeout(10):
        while not all(actor.is_idle() for actor in actors):  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.spec("EXE-21")
class TestDeviceExecutor(DevicesContract):
    is_async = False


@pytest.mark.spec("EXE-21")
class TestDeviceExecutorAsync(DevicesContract, AsyncContract):
    is_async = True
