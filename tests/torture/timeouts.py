"""P5, P6: hard timeouts of code that hangs in every way, each with a grandchild that hides. Nothing of it is alive soon
after its deadline, no innocent call fails, and the host neither grows nor leaks descriptors."""

import asyncio
import os
import random
import time
from pathlib import Path

from taskyard.execution.calls import PendingCall
from taskyard.execution.nursery import NURSERY
from taskyard.execution.pool import WorkerPool
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import make_pool
from taskyard.model.execution import ErrorKind
from tests.execution import misdeeds
from tests.execution.census import descendants, is_alive, open_fds
from tests.torture.figures import Figures, percentile

TIMEOUT_S = 0.1
LIMIT_S = 2.0
"""What may pass between a deadline and the end of the last descendant."""

GROWTH_LIMIT = 16 << 20
WARM_UP = 20
HANGS = [misdeeds.hang, misdeeds.spin, misdeeds.hold_the_gil, misdeeds.ignore_sigterm]


class Timeouts:
    def __init__(self, folder: Path, rng: random.Random, pool: WorkerPool) -> None:
        self._folder, self._rng, self._pool = folder, rng, pool
        self.faults: list[str] = []
        self.late_s: list[float] = []

    async def trial(self, number: int) -> None:
        hidden = self._folder / str(number)
        hang = self._rng.choice(HANGS)
        call = PendingCall(misdeeds.act_hidden, (str(hidden), hang, ()), timeout_s=TIMEOUT_S)
        asked = time.monotonic()
        hung = self._pool.submit(call)
        innocent = [self._pool.submit(PendingCall(misdeeds.add, (number, n))) for n in range(self._rng.randrange(1, 6))]
        error = (await hung).error
        self.late_s.append(max(0.0, time.monotonic() - asked - TIMEOUT_S))
        if error is None or error.kind is not ErrorKind.TIMEOUT:
            self.faults.append(f"{hang.__name__} was answered {error}")
        if hidden.exists() and is_alive(int(hidden.read_text())):
            self.faults.append(f"the grandchild of {hang.__name__} is alive after its call was answered")
        for n, future in enumerate(innocent):
            result = await future
            if result.data != number + n:
                self.faults.append(f"an innocent call was answered {result.error}")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def _run(folder: Path, trials: int, rng: random.Random) -> Figures:
    pool = make_pool(PoolSettings(max_workers=2, preload=("tests.execution.misdeeds",)))
    timeouts = Timeouts(folder, rng, pool)
    for number in range(WARM_UP):
        await timeouts.trial(number)
    fds, resident = open_fds(), _resident()
    for number in range(WARM_UP, WARM_UP + trials):
        await timeouts.trial(number)
    grown = _resident() - resident
    await pool.shutdown()
    if open_fds() > fds:
        timeouts.faults.append(f"{open_fds()} descriptors are open, {fds} were")
    if grown > GROWTH_LIMIT:
        timeouts.faults.append(f"the host has grown by {grown >> 20} MiB")
    await asyncio.sleep(LIMIT_S)
    if left := [pid for nursery in NURSERY.pids for pid in descendants(nursery)]:
        timeouts.faults.append(f"{len(left)} processes are alive {LIMIT_S:g} s after the last deadline")
    worst = max(timeouts.late_s)
    if worst > LIMIT_S:
        timeouts.faults.append(f"a call was answered {worst:.1f} s after its deadline")
    note = (
        f"deadline → tree gone p50 {percentile(timeouts.late_s, 0.5) * 1e3:.0f} ms, max {worst * 1e3:.0f} ms; "
        f"descriptors {fds} → {open_fds()}, RSS {grown / (1 << 20):+.1f} MiB"
    )
    return Figures("P5 hard timeouts", trials, timeouts.faults, note)


def run(folder: Path, *, trials: int, seed: int) -> Figures:
    return asyncio.run(_run(folder, trials, random.Random(seed)))
