"""P9: the node that leads is killed or stopped at the second at which schedules fire, or everybody believes that he
leads: each fire time becomes one task, and none is lost."""

import asyncio
import math
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from taskyard import TaskRecord, Yard
from taskyard.testing.postgres import Databases
from tests.torture.figures import Figures
from tests.torture.postgres.mutations import mutate
from tests.torture.postgres.site import Site, open_site
from tests.torture.postgres.spread import spread
from tests.torture.procs import Child, Troop
from tests.torture.work import ledger_of, make_yard

NODES = 3
SCHEDULES = 5
"""All of them fire every second."""

ITEMS = 3
"""One more schedule makes a task for each of these, every second."""

NAMES = [f"s{n}" for n in range(SCHEDULES)] + [f"item {n}" for n in range(ITEMS)]
"""What is owed a task every second."""

FORCED = "everybody-leads+think-before-fire"
"""Several leaders are no fault, and neither is time that passes between a decision and the deed."""

STOPS_S = (0.3, 1.2, 2.5, 3.5)
"""How long a node stands still: less than the deputies wait, about as long, and longer."""

PATIENCE_S = 40.0


def run(where: Path, *, trials: int, seed: int) -> Figures:
    return _told(spread(run_part, where, trials=trials, seed=seed))


def run_postgres(where: Path, *, trials: int, seed: int) -> Figures:
    return _told(spread(run_postgres_part, where, trials=trials, seed=seed))


def _told(figures: Figures) -> Figures:
    figures.note = f"{NODES} nodes, {len(NAMES)} tasks a second; late by {figures.told()}"
    return figures


def run_part(where: Path, *, trials: int, seed: int, mutation: str = "") -> Figures:
    figures = Figures("P9 each fire time once", 0)
    Watch(where, random.Random(seed), figures, mutation, forced=bool(mutation)).run(trials)
    return figures


def run_postgres_part(
    where: Path, *, trials: int, seed: int, databases: Databases | None = None, mutation: str = ""
) -> Figures:
    figures = Figures("P9 PostgreSQL: each fire time once", 0)
    with open_site(where, databases=databases) as site:
        folder = _make_folder(site, mutation)
        Watch(folder, random.Random(seed), figures, forced=bool(mutation)).run(trials)
    return figures


def _make_folder(site: Site, mutation: str) -> Path:
    folder = site.make_folder()
    if mutation:
        mutate(site, folder, mutation)
    return folder


class Watch:
    """Some nodes, and what happens to them. Half of them believe that they lead, or all if that is `forced`."""

    def __init__(
        self, folder: Path, rng: random.Random, figures: Figures, mutation: str = "", *, forced: bool = False
    ) -> None:
        self._forced = forced
        self.folder, self.rng, self.figures, self.mutation = folder, rng, figures, mutation
        self.ledger = ledger_of(folder)
        self.troop = Troop(folder, self.ledger)

    def run(self, trials: int) -> None:
        with asyncio.Runner() as runner, self.troop.gathered():
            yard = make_yard(self.folder, self.ledger)
            runner.run(yard.start(serve=False))
            try:
                self._fill()
                began = runner.run(self._add_schedules(yard))
                while self.figures.trials < trials:
                    self._trial()
                    self.figures.trials += 1
                    self.troop.reap()
                    self._fill()
                runner.run(self._judge(yard, began))
            finally:
                runner.run(yard.stop())
        self.ledger.close()
        self.figures.failures += self.troop.failures

    async def _add_schedules(self, yard: Yard) -> datetime:
        """Each makes up for whatever is missed, so that every second is owed one task of each."""
        for n in range(SCHEDULES):
            args = {"ms": 0.0, "pad": f"s{n}"}
            await yard.schedules.add(f"s{n}", 1, "breathe", args, missed="all", overlap="allow")
        each = [{"pad": f"item {n}"} for n in range(ITEMS)]
        await yard.schedules.add("items", 1, "breathe", {"ms": 0.0}, each=each, missed="all", overlap="allow")
        return max(status.state.watermark_at for status in await yard.schedules.list_all())

    def _fill(self) -> None:
        while len(self.troop.living) < NODES:
            forced = FORCED if self._forced or self.rng.random() < 0.5 else ""
            mutation = "+".join(filter(None, (forced, self.mutation)))
            self.troop.start("work", ready=True, mutation=mutation)

    def _trial(self) -> None:
        victim: Child = self.troop.living[0] if self.rng.random() < 0.7 else self.rng.choice(self.troop.living)
        fires_at = math.ceil(time.time() + 0.2)
        time.sleep(max(0.0, fires_at + self.rng.uniform(-0.01, 0.06) - time.time()))
        if self.rng.random() < 0.5:
            self.figures.counts["killed"] += 1
            self.troop.kill(victim)
            return
        self.figures.counts["stopped"] += 1
        victim.signal(signal.SIGSTOP)
        time.sleep(self.rng.choice(STOPS_S))
        victim.signal(signal.SIGCONT)

    async def _judge(self, yard: Yard, began: datetime) -> None:
        """By the tasks alone: what the store has written down of fire times is part of what is judged."""
        end = datetime.now(UTC)
        until = time.monotonic() + PATIENCE_S
        while min(status.state.watermark_at for status in await yard.schedules.list_all()) < end:
            if time.monotonic() > until:
                self.figures.failures.append(f"what came due until {end} is not handled {PATIENCE_S:g} s later")
                break
            await asyncio.sleep(0.1)
        tasks = [task async for task in _all_tasks(yard)]
        made = Counter((task.due_at, _schedule_of(task)) for task in tasks)
        first = began.replace(microsecond=0) + timedelta(seconds=1)
        owed = {
            (first + timedelta(seconds=n), name)
            for n in range(int((end - first).total_seconds()) + 1)
            for name in NAMES
        }
        lost = sorted((at.isoformat(), name) for at, name in owed - made.keys())
        twice = sorted((at.isoformat(), name, n) for (at, name), n in made.items() if n > 1)
        self.figures.failures += [f"never fired: {one}" for one in lost]
        self.figures.failures += [f"fired more than once: {one}" for one in twice]
        self.figures.took += [(task.created_at - task.due_at).total_seconds() for task in tasks]
        self.figures.counts["fire times"] += len(made)


async def _all_tasks(yard: Yard) -> AsyncIterator[TaskRecord]:
    before = None
    while page := await yard.store.list_tasks(before_id=before, limit=1_000):
        for task in page:
            yield task
        before = page[-1].id


def _schedule_of(task: TaskRecord) -> str:
    return str(task.task.args["pad"])
