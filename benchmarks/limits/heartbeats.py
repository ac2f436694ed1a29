"""Simulated devices with nothing but their heartbeat: a sleeping asyncio task for each."""

import asyncio
import gc
import random
import time
from pathlib import Path

import uvloop

from benchmarks.ours.devices import HEARTBEAT_S, cpu_while_idle, resident_bytes
from benchmarks.reading import Reading
from taskyard.devices import SimulatedDevice


def idle(folder: Path, devices: int, seconds: float) -> Reading:
    """As `benchmarks.ours.devices:farm`."""
    return uvloop.run(_idle(devices, seconds))


async def _idle(devices: int, seconds: float) -> Reading:
    gc.collect()
    before = resident_bytes()
    began = time.perf_counter()
    adapters = [SimulatedDevice(number).make_adapter() for number in range(devices)]
    up = 0
    all_up = asyncio.Event()

    async def beat(number: int) -> None:
        nonlocal up
        await adapters[number].connect()
        await adapters[number].health()
        up += 1
        if up == devices:
            all_up.set()
        await asyncio.sleep(random.uniform(0, HEARTBEAT_S))
        while True:
            await asyncio.wait_for(adapters[number].health(), HEARTBEAT_S)
            await asyncio.sleep(HEARTBEAT_S)

    tasks = [asyncio.create_task(beat(number)) for number in range(devices)]
    await all_up.wait()
    up_s = time.perf_counter() - began
    cpu_s = await cpu_while_idle(seconds)
    memory = (resident_bytes() - before) / devices
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return Reading(cpu_s, given=devices, held=up, also={"up": up_s, "memory": memory})
