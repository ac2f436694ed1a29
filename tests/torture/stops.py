"""P17: SIGTERM at any moment. The worker is gone within its grace, and no attempt of any task is used up by that."""

import asyncio
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from taskyard import TaskState, Yard
from taskyard.model.state import ENDED
from taskyard.testing.ledger import Ledger, Stored
from tests.torture.figures import Figures, percentile
from tests.torture.procs import Child, Troop
from tests.torture.verdict import drain_and_judge
from tests.torture.work import ledger_of, make_yard

GRACE_S = 0.25
LIMIT_S = 2.0
"""What may pass beyond the grace, on a busy machine, until the process is gone."""

BACKLOG = 24


class Stops:
    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng = rng
        self.ledger: Ledger = ledger_of(folder)
        self.troop = Troop(folder, self.ledger)
        self.yard: Yard = make_yard(folder, self.ledger)
        self.faults: list[str] = []
        self.over_s: list[float] = []
        self.ends: Counter[str] = Counter()

    async def trial(self) -> None:
        await self._top_up()
        child = self.troop.start(self.rng.choice(("work", "cli")), grace_s=GRACE_S)
        if self.rng.random() < 0.7:
            # At work; the others are met while they start.
            while (said := child.read()) and not said.endswith(("ready", "is running")):
                pass
        time.sleep(self.rng.random() * 0.3)
        self.ledger.stop(child.pid)
        sent = time.monotonic()
        child.signal(signal.SIGTERM)
        if not child.has_ended(GRACE_S + 10):
            self.faults.append(f"{child.name} has not ended 10 s after its grace: {child.errors()}")
            self.troop.kill(child)
            return
        self._bury(child, time.monotonic() - sent - GRACE_S)
        await self._look(child)

    async def _top_up(self) -> None:
        """Tasks of all lengths, some longer than the grace."""
        waiting = sum(n for (_, state), n in (await self.yard.store.count()).items() if state not in ENDED)
        for _ in range(BACKLOG - waiting):
            name = self.rng.choice(("breathe", "breathe", "chew"))
            ms = self.rng.choice((self.rng.random() * 10, self.rng.random() * 100, 400.0))
            self.ledger.acknowledged((await self.yard.submit(name, {"ms": ms})).uuid)

    def _bury(self, child: Child, over_s: float) -> None:
        self.troop.living.remove(child)
        code = child.bury(self.ledger)
        if code == -signal.SIGTERM:
            self.ends["before it listened"] += 1
            return
        self.over_s.append(over_s)
        self.ends["in time" if over_s <= LIMIT_S else "late"] += 1
        if code != 0:
            self.faults.append(f"{child.name} ended with {code}: {child.errors()}")
        elif over_s > LIMIT_S:
            self.faults.append(f"{child.name} took {over_s:.2f} s more than its grace: {child.errors()}")

    async def _look(self, child: Child) -> None:
        """Whatever it held it has given back, and it has left."""
        counts = await self.yard.store.count()
        running = sum(n for (_, state), n in counts.items() if state is TaskState.RUNNING)
        nodes = await self.yard.store.nodes()
        if running or nodes:
            self.faults.append(f"{child.name} is gone and left {running} tasks running and {len(nodes)} nodes")


def run(where: Path, *, trials: int, seed: int) -> Figures:
    stops = Stops(where, random.Random(seed))
    figures = Figures("P17 SIGTERM at any moment", 0)
    with asyncio.Runner() as runner, stops.troop.gathered():
        runner.run(stops.yard.start(serve=False))
        try:
            for _ in range(trials):
                runner.run(stops.trial())
                figures.trials += 1
        finally:
            runner.run(stops.yard.stop())
    stops.ledger.close()
    judged, stored = drain_and_judge(where)
    figures.failures = stops.faults + stops.troop.failures + judged + _check_attempts(stored)
    longest = f"{percentile(stops.over_s, 1.0) * 1000:+.0f} ms" if stops.over_s else "none"
    given_back = sum(len(one.runs) - 1 for one in stored.values())
    ends = ", ".join(f"{end} {count}" for end, count in stops.ends.most_common())
    figures.note = f"{ends}; longest {longest} of a grace of {GRACE_S * 1000:.0f} ms; {given_back} runs given back"
    return figures


def _check_attempts(stored: dict[str, Stored]) -> list[str]:
    faults = []
    for uuid, one in stored.items():
        record: Any = one.record
        spent = (record.attempt, record.retries, record.recoveries, record.crashes)
        if record.state is not TaskState.COMPLETED or spent != (1, 0, 0, 0):
            faults.append(f"task {uuid}: is {record.state}, (attempt, retries, recoveries, crashes) {spent}")
    return faults
