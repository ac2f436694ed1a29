"""taskiq on its InMemoryBroker, every result kept, on uvloop."""

import time
from pathlib import Path

import uvloop
from taskiq import InMemoryBroker

from benchmarks.reading import Reading

KEEP_ALL = -1
WARM_UP = 500

broker = InMemoryBroker(max_stored_results=KEEP_ALL)


async def _noop(number: int) -> int:
    return number


noop = broker.task(_noop)


async def _submit_and_wait(count: int) -> list[str]:
    tasks = [await noop.kiq(number) for number in range(count)]
    await broker.wait_all()
    return [task.task_id for task in tasks]


async def _measure(count: int) -> Reading:
    await broker.startup()
    await _submit_and_wait(WARM_UP)
    began = time.perf_counter()
    ids = await _submit_and_wait(count)
    elapsed = time.perf_counter() - began
    kept = broker.result_backend.results
    held = sum(kept[task].return_value == number for number, task in enumerate(ids) if task in kept)
    await broker.shutdown()
    return Reading(count / elapsed, given=count, held=held)


def read(folder: Path, count: int) -> Reading:
    return uvloop.run(_measure(count))
