"""P1: processes on one file are killed with SIGKILL, at named points and at random; the ledger judges."""

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from taskyard.testing.faults import PHASES, POINTS, phase_of
from tests.torture.figures import Figures
from tests.torture.procs import Child, Troop
from tests.torture.verdict import drain_and_judge
from tests.torture.work import ledger_of

WORKERS, SUBMITTERS = 3, 2
A_ROUND = 50
"""Kills before the store is judged and a new one begun."""

IN_EACH_PHASE = 50
"""Of 500 kills or more, at least so many must strike in each phase: else the figure says little about that phase."""

OVERDUE_S = 6.0
"""A child whose fault point has not come by then is killed like any other."""

STUCK_S = 60.0
"""A round that takes this much longer than a second a kill goes nowhere."""


class Round:
    """One store, from its first process to the verdict."""

    def __init__(self, folder: Path, rng: random.Random, before: Counter[str], mutation: str = "") -> None:
        """`before` is how often each phase was struck in earlier rounds: the rarest is aimed at next."""
        self.rng, self.before, self.mutation = rng, before, mutation
        self.troop = Troop(folder, ledger_of(folder))
        self.from_outside = 0

    def run(self, kills: int) -> None:
        until = time.monotonic() + STUCK_S + kills
        with self.troop.gathered():
            while self.troop.kills < kills:
                if time.monotonic() > until:
                    self.troop.failures.append(f"only {self.troop.kills} of {kills} kills came about")
                    break
                self._fill()
                time.sleep(self.rng.expovariate(1 / 0.1))
                self.troop.reap()
                self._kill_one()
        self.troop.ledger.close()

    def _fill(self) -> None:
        roles = Counter(child.role for child in self.troop.living)
        for role, wanted in (("work", WORKERS), ("submit", SUBMITTERS)):
            for _ in range(wanted - roles[role]):
                self.troop.start(
                    role, fault=self._aim(role), mutation=self.mutation, every_s=0.005, seed=self.rng.getrandbits(32)
                )

    def _aim(self, role: str) -> str:
        """Half of the children get a fault point, in the phase that was struck least so far."""
        if self.rng.random() < 0.5:
            return ""
        struck = self.before + self.troop.phases
        struck.update(phase_of(child.fault) for child in self.troop.living if child.fault)
        phases = ("submit",) if role == "submit" else ("claim", "run", "settle")
        phase = min(phases, key=lambda one: struck[one])
        point = self.rng.choice([point for point in POINTS if phase_of(point) == phase])
        return f"{point}:{self.rng.randint(1, 12)}"

    def _kill_one(self) -> None:
        if self.from_outside * 2 > self.troop.kills and any(child.fault for child in self.troop.living):
            return  # those that kill themselves have their turn
        candidates = [child for child in self.troop.living if self._may_be_killed(child)]
        if candidates:
            self.from_outside += 1
            self.troop.kill(self.rng.choice(candidates))

    def _may_be_killed(self, child: Child) -> bool:
        if child.fault:
            return time.monotonic() - child.born_mono > OVERDUE_S
        # Most are killed at work; a few while they start, open the store and join it.
        return child.is_ready() or self.rng.random() < 0.02


def run(where: Path, *, trials: int, seed: int) -> Figures:
    def make_folder(number: int) -> Path:
        folder = where / f"kills-{number}"
        folder.mkdir()
        return folder

    return run_rounds("P1 kill -9 at any instant", make_folder, trials=trials, seed=seed)


def run_rounds(promise: str, make_folder: Callable[[int], Path], *, trials: int, seed: int) -> Figures:
    rng = random.Random(seed)
    figures = Figures(promise, 0)
    phases: Counter[str] = Counter()
    tasks = 0
    number = 0
    while figures.trials < trials:
        number += 1
        folder = make_folder(number)
        one = Round(folder, rng, phases)
        one.run(min(A_ROUND, trials - figures.trials))
        faults, stored = drain_and_judge(folder)
        figures.trials += one.troop.kills
        figures.failures += [f"{folder.name}: {fault}" for fault in one.troop.failures + faults]
        phases += one.troop.phases
        tasks += len(stored)
    if figures.trials >= 500:
        few = [phase for phase in PHASES if phases[phase] < IN_EACH_PHASE]
        figures.failures += [f"only {phases[phase]} kills struck in {phase}" for phase in few]
    counts = ", ".join(f"{phase} {phases[phase]}" for phase in (*PHASES, "idle"))
    figures.note = f"killed in {counts}; {tasks} tasks, {number} stores"
    return figures
