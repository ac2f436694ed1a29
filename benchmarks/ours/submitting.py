"""Submitting: a yard that takes tasks and runs none."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.ours.places import persisted, url_of
from benchmarks.reading import Reading
from taskyard import ConsumerFunction, Yard
from taskyard.model.state import TaskState

SLOTS = 200


async def noop(number: int) -> int:
    return number


async def queue_without_running(url: str, count: int) -> None:
    async with _submitting(url) as consumer:
        await consumer.submit_many([{"number": number} for number in range(count)])


@asynccontextmanager
async def _submitting(url: str) -> AsyncIterator[ConsumerFunction[..., Any]]:
    yard = Yard(url, max_running=SLOTS)
    consumer = yard.consumer(concurrency=SLOTS)(noop)
    async with yard.client():
        yield consumer


def clients(folder: Path, count: int, clients: int, dsn: str | None = None) -> Reading:
    return uvloop.run(_clients(url_of(folder, dsn), count, clients))


async def _clients(url: str, count: int, clients: int) -> Reading:
    async with _submitting(url) as consumer:
        numbers = iter(range(count))

        async def client() -> None:
            for number in numbers:
                await consumer.submit(number=number)

        began = time.perf_counter()
        await asyncio.gather(*[client() for _ in range(clients)])
        elapsed = time.perf_counter() - began
    return Reading(count / elapsed, given=count, held=await persisted(url, TaskState.QUEUED))


def batch(folder: Path, batches: int, size: int, dsn: str | None = None) -> Reading:
    return uvloop.run(_batch(url_of(folder, dsn), batches, size))


async def _batch(url: str, batches: int, size: int) -> Reading:
    async with _submitting(url) as consumer:
        began = time.perf_counter()
        for first in range(0, batches * size, size):
            await consumer.submit_many([{"number": number} for number in range(first, first + size)])
        elapsed = time.perf_counter() - began
    given = batches * size
    return Reading(given / elapsed, given=given, held=await persisted(url, TaskState.QUEUED))
