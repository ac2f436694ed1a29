"""How late a bare event loop is, and how late it would be if it also had to commit once before starting.

On asyncio's own loop: uvloop's clock is cached and coarse, so its timers also fire before their time.
"""

import asyncio
import random
import time
from pathlib import Path

from benchmarks.limits.raw_sqlite import commit_times
from benchmarks.reading import Reading, percentile

LEAD_S = 0.5  # the timers are set before the first is due
COMMITS = 300


async def _lateness(count: int, within_s: float) -> list[float]:
    loop = asyncio.get_running_loop()
    all_fired = loop.create_future()
    late: list[float] = []

    def fire(due_mono: float) -> None:
        late.append(time.monotonic() - due_mono)
        if len(late) == count:
            all_fired.set_result(None)

    start_mono = time.monotonic() + LEAD_S
    for _ in range(count):
        due_mono = start_mono + random.uniform(0, within_s)
        loop.call_at(due_mono, fire, due_mono)
    await all_fired
    return late


def call_at_and_commit(folder: Path, count: int, within_s: float) -> Reading:
    """p99 of `loop.call_at` plus p50 of one raw commit."""
    late = asyncio.run(_lateness(count, within_s))
    # With the pauses that the tasks have between them: a disk that was left alone answers later.
    commit_s = percentile(commit_times(folder, COMMITS, within_s / count), 50)
    call_at_s = percentile(late, 99)
    return Reading(
        call_at_s + commit_s, given=count, held=len(late), also={"call_at_s": call_at_s, "commit_s": commit_s}
    )
