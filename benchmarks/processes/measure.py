"""One reading of one side, each by its name in `CALLERS`."""

import asyncio
import gc
import os
import pickle
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from benchmarks.processes.callers import CALLERS, Ask, CallFailed, taskyard
from benchmarks.processes.functions import burn, crash_sometimes, echo, ends, hang, noop
from benchmarks.reading import Reading, percentile

WARM_UP = 50
CLIENTS = 8
TICK_S = 0.005


def _measured(name: str, measure: Callable[[Ask], Awaitable[Reading]]) -> Reading:
    async def run() -> Reading:
        async with CALLERS[name]() as ask:
            await asyncio.gather(*[ask(noop) for _ in range(WARM_UP)])
            gc.collect()
            return await measure(ask)

    return uvloop.run(run())


def one_at_a_time(folder: Path, side: str, count: int) -> Reading:
    """p50 of a call that does nothing."""

    async def measure(ask: Ask) -> Reading:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            await ask(noop)
            times.append(time.perf_counter() - began)
        return Reading(percentile(times, 50), given=count, held=len(times))

    return _measured(side, measure)


def raw_echo(folder: Path, count: int) -> Reading:
    """The same without a pool and without a loop: two processes, a socketpair and pickle."""
    own, other = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        own.close()
        while data := other.recv(1 << 16):
            function, args = pickle.loads(data)
            other.send(pickle.dumps(function(*args), 5))
        os._exit(0)
    other.close()
    times = []
    for _ in range(count + WARM_UP):
        began = time.perf_counter()
        own.send(pickle.dumps((noop, ()), 5))
        pickle.loads(own.recv(1 << 16))
        times.append(time.perf_counter() - began)
    own.close()
    os.waitpid(pid, 0)
    return Reading(percentile(times[WARM_UP:], 50), given=count, held=len(times) - WARM_UP)


def in_parallel(folder: Path, side: str, count: int, clients: int = CLIENTS) -> Reading:
    return _measured(side, lambda ask: _echoes(ask, count, clients))


async def _echoes(ask: Ask, count: int, clients: int) -> Reading:
    numbers, answers = iter(range(count)), 0

    async def client() -> None:
        nonlocal answers
        for number in numbers:
            answer = await ask(echo, number)
            answers += answer == number

    began = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(clients)])
    return Reading(count / (time.perf_counter() - began), given=count, held=answers)


def bytes_there_and_back(folder: Path, side: str, count: int, size: int) -> Reading:
    async def measure(ask: Ask) -> Reading:
        data, answers = os.urandom(size), 0
        began = time.perf_counter()
        for _ in range(count):
            answer = await ask(echo, data)
            answers += len(answer) == size
        return Reading(count / (time.perf_counter() - began), given=count, held=answers)

    return _measured(side, measure)


def array_in(folder: Path, side: str, count: int, size: int) -> Reading:
    """Arrays a second, each of `size` bytes; what comes back is a number."""
    import numpy

    async def measure(ask: Ask) -> Reading:
        array, answers = numpy.ones(size // 8), 0
        await ask(ends, array)
        began = time.perf_counter()
        for _ in range(count):
            answer = await ask(ends, array)
            answers += answer == 2.0
        return Reading(count / (time.perf_counter() - began), given=count, held=answers)

    return _measured(side, measure)


def hung(folder: Path, side: str, count: int, timeout_s: float) -> Reading:
    """From the deadline of a call that ignores SIGTERM until it is answered and the next call is done, p50."""

    async def measure(ask: Ask) -> Reading:
        times = []
        for number in range(count):
            await ask(echo, number)
            began = time.perf_counter()
            try:
                await ask(hang, timeout_s=timeout_s)
            except (TimeoutError, CallFailed):
                await ask(echo, number)
                times.append(time.perf_counter() - began - timeout_s)
        return Reading(percentile(times, 50), given=count, held=len(times))

    return _measured(side, measure)


async def _ticks(seconds: float) -> list[float]:
    """How late each of many short sleeps ended. By the system's clock: uvloop's own only has milliseconds."""
    late: list[float] = []
    until = time.monotonic() + seconds
    while (now := time.monotonic()) < until:
        await asyncio.sleep(TICK_S)
        late.append(max(0.0, time.monotonic() - now - TICK_S))
    return late


def lag(folder: Path, side: str, busy_s: float) -> Reading:
    """p99 of how late a timer fires while as many calls as there are cores, less one, keep busy."""

    async def measure(ask: Ask) -> Reading:
        busy = max(1, len(os.sched_getaffinity(0)) - 1)
        burning = [asyncio.ensure_future(ask(burn, busy_s)) for _ in range(busy)]
        late = await _ticks(busy_s)
        turns = await asyncio.gather(*burning)
        return Reading(percentile(late, 99), given=busy, held=sum(turn > 0 for turn in turns))

    return _measured(side, measure)


def idle_lag(folder: Path, busy_s: float) -> Reading:
    """The same with nothing to do."""

    return Reading(percentile(uvloop.run(_ticks(busy_s)), 99), given=1, held=1)


def crashing(folder: Path, count: int, every: int) -> Reading:
    """Calls a second when every so-manieth takes its worker down; all others have to succeed."""

    async def run() -> Reading:
        async with taskyard() as ask:
            await ask(noop)
            numbers, right, crashed = iter(range(1, count + 1)), 0, 0

            async def client() -> None:
                nonlocal right, crashed
                for number in numbers:
                    try:
                        answer = await ask(crash_sometimes, number, every)
                        right += answer == number
                    except CallFailed:
                        crashed += number % every == 0

            began = time.perf_counter()
            await asyncio.gather(*[client() for _ in range(CLIENTS)])
            elapsed = time.perf_counter() - began
        return Reading(count / elapsed, given=count, held=right + crashed)

    return uvloop.run(run())


def restarting(folder: Path, count: int, every: int) -> Reading:
    """What as many restarts cost by themselves: as many calls, where each worker is replaced after `every`."""

    async def run() -> Reading:
        async with taskyard(recycle_after=every) as ask:
            await ask(noop)
            return await _echoes(ask, count, CLIENTS)

    return uvloop.run(run())
