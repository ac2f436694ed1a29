"""Work that goes on while somebody changes many other tasks at once.

Clients submit no-op tasks and wait for their results, one after the other, all the while. Meanwhile all tasks of
another queue, which is paused, are held, and in the next pass released; after each pass nothing of the kind happens for
as long as it took. Both rates are of the same process, the same clients and the same minute.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable
from pathlib import Path

import uvloop

from benchmarks.ours.places import url_of
from benchmarks.ours.submitting import SLOTS, noop
from benchmarks.reading import Reading
from taskyard import Yard
from taskyard.model.state import TaskState

CLIENTS = 32
OTHERS = "others"
FILL_AT_ONCE = 10_000


def work_meanwhile(folder: Path, matching: int, passes: int, dsn: str | None = None) -> Reading:
    """Results a second while `matching` other tasks are changed, and `also` without that."""
    return uvloop.run(_work_meanwhile(url_of(folder, dsn), matching, passes))


async def _work_meanwhile(url: str, matching: int, passes: int) -> Reading:
    yard = Yard(url, max_running=SLOTS)
    work = Work(yard)
    async with yard:
        await work.line_up(matching)
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(work.go_on())
            for number in range(passes):
                began = time.perf_counter()
                await work.watch("meanwhile", work.change(matching, hold=number % 2 == 0))
                await work.watch("without", asyncio.sleep(time.perf_counter() - began))
            work.is_over = True
        counts = await yard.store.count()
    held = counts["default", TaskState.COMPLETED] + sum(n for (queue, _), n in counts.items() if queue == OTHERS)
    rates = {what: work.results[what] / work.elapsed[what] for what in work.results}
    return Reading(rates["meanwhile"], given=work.done + matching, held=held, also={"without": rates["without"]})


class Work:
    """What the clients of a yard do, how much of it is done, and by what it was accompanied."""

    def __init__(self, yard: Yard) -> None:
        self._yard = yard
        self._noop = yard.consumer(concurrency=SLOTS)(noop)
        self._others = yard.consumer(name="others", queue=OTHERS)(noop)
        self.done = 0
        self.is_over = False
        self.results: Counter[str] = Counter()
        self.elapsed: defaultdict[str, float] = defaultdict(float)

    async def line_up(self, count: int) -> None:
        await self._yard.queue(OTHERS).pause()
        for first in range(0, count, FILL_AT_ONCE):
            numbers = range(first, min(count, first + FILL_AT_ONCE))
            await self._others.submit_many([{"number": number} for number in numbers])

    async def go_on(self) -> None:
        while not self.is_over:
            handle = await self._noop.submit(number=self.done)
            await handle.result()
            self.done += 1

    async def watch(self, what: str, doing: Awaitable[None]) -> None:
        """Note how much is done while that happens."""
        before, began = self.done, time.perf_counter()
        await doing
        self.results[what] += self.done - before
        self.elapsed[what] += time.perf_counter() - began

    async def change(self, count: int, *, hold: bool) -> None:
        matching = self._yard.queue(OTHERS).matching()
        report = await (matching.hold() if hold else matching.release())
        if report.moved != count:
            raise RuntimeError(f"{report.moved:,} tasks were changed, not {count:,}")
