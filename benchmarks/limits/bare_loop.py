"""The least an in-memory scheduler can do: a heap by due time, a semaphore, a task per job, a future per submit."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from benchmarks.reading import Reading

SLOTS = 100
WARM_UP = 500

Job = Callable[[int], Awaitable[int]]


async def noop(number: int) -> int:
    return number


class BareLoop:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, asyncio.Future[int], Job, int]] = []
        self._sequence = itertools.count()
        self._slots = asyncio.Semaphore(SLOTS)
        self._filled = asyncio.Event()

    def submit(self, job: Job, number: int) -> asyncio.Future[int]:
        future: asyncio.Future[int] = self._loop.create_future()
        heapq.heappush(self._heap, (time.monotonic(), next(self._sequence), future, job, number))
        self._filled.set()
        return future

    async def serve(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._heap:
                await self._slots.acquire()
                _, _, future, job, number = heapq.heappop(self._heap)
                # No reference is kept: the loop itself holds a job that never suspends.
                _ = self._loop.create_task(self._run(future, job, number))

    async def _run(self, future: asyncio.Future[int], job: Job, number: int) -> None:
        future.set_result(await job(number))
        self._slots.release()


async def _by_one(loop: BareLoop, count: int) -> list[int]:
    """One submitter: everything is submitted, then every result is awaited."""
    futures = [loop.submit(noop, number) for number in range(count)]
    return [await future for future in futures]


async def _by_many(loop: BareLoop, count: int) -> list[int]:
    """A client for each task, which submits it and waits for its result."""

    async def client(number: int) -> int:
        return await loop.submit(noop, number)

    return await asyncio.gather(*[client(number) for number in range(count)])


async def _measure(count: int, clients: str) -> Reading:
    submit_and_wait = {"one": _by_one, "many": _by_many}[clients]
    loop = BareLoop()
    server = asyncio.create_task(loop.serve())
    await submit_and_wait(loop, WARM_UP)
    began = time.perf_counter()
    results = await submit_and_wait(loop, count)
    elapsed = time.perf_counter() - began
    server.cancel()
    held = sum(result == number for number, result in enumerate(results))
    return Reading(count / elapsed, given=count, held=held)


def read(folder: Path, count: int, clients: str) -> Reading:
    return uvloop.run(_measure(count, clients))
