"""huey in memory, its consumer with one thread, results on.

Everything is submitted before the consumer starts. That is its faster way: with both at once the two threads
fight for the interpreter (28–38 k/s against 38–43 k/s when this was written).
"""

import time
from pathlib import Path

from huey import MemoryHuey

from benchmarks.reading import Reading

POLL_S = 0.001

huey = MemoryHuey(results=True)


def _noop(number: int) -> int:
    return number


noop = huey.task()(_noop)


def read(folder: Path, count: int) -> Reading:
    consumer = huey.create_consumer(
        workers=1, worker_type="thread", periodic=False, initial_delay=POLL_S, max_delay=POLL_S
    )
    began = time.perf_counter()
    results = [noop(number) for number in range(count)]
    consumer.start()
    while huey.storage.result_store_size() < count:
        time.sleep(POLL_S)
    elapsed = time.perf_counter() - began
    consumer.stop(graceful=True)
    held = sum(result.get(preserve=True) == number for number, result in enumerate(results))
    return Reading(count / elapsed, given=count, held=held)
