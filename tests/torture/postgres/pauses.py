"""P3 on PostgreSQL: a node stands still past its lease, so that the others take over what it runs; then it goes on, and
can commit nothing: no result, no note, no progress, no new task.

Half of the time it goes on while the others are still at it, where the state of a task tells nothing; half of the time
when they have ended. After every few of these it stands still for about as long as the lease, so that its beat and the
verdict of the others race: then whichever comes first must have it wholly.
"""

import random
import signal
import time
from functools import partial
from pathlib import Path

from taskyard.testing.ledger import Entry
from taskyard.testing.postgres import Databases
from tests.torture.fencing import check
from tests.torture.figures import Figures
from tests.torture.postgres.crew import NODES, Crew, await_
from tests.torture.postgres.mutations import mutate
from tests.torture.postgres.site import Site, open_site
from tests.torture.postgres.spread import spread
from tests.torture.procs import Child
from tests.torture.verdict import drain_and_judge
from tests.torture.work import LEASE_S

KINDS = ("guard", "guard_in_thread", "guard", "guard_in_thread", "guard", "guard_in_thread")
REFUSED = "would have become"
"""What a node says of each result that the store did not take."""

CLOSE_EVERY = 4


def run(where: Path, *, trials: int, seed: int) -> Figures:
    figures = spread(run_part, where, trials=trials, seed=seed)
    figures.note = f"{NODES} nodes, lease {LEASE_S:g} s; taken over: {figures.told()}"
    return figures


def run_part(where: Path, *, trials: int, seed: int, databases: Databases | None = None, mutation: str = "") -> Figures:
    with open_site(where, databases=databases) as site:
        return Pauses(site, random.Random(seed), mutation).run(trials)


class Pauses:
    def __init__(self, site: Site, rng: random.Random, mutation: str = "") -> None:
        self.folder = site.make_folder()
        if mutation:
            mutate(site, self.folder, mutation)
        # An heir need not wait until the run before it is dead: it is only stopped.
        self.crew = Crew(self.folder, rng, dying_s=0.01)
        self._held: list[Entry] = []
        self.figures = Figures("P3 PostgreSQL: a stale run commits nothing", 0)
        self._number = 0

    def run(self, trials: int) -> Figures:
        figures, crew = self.figures, self.crew
        with crew.gathered():
            while figures.trials < trials:
                self._past_the_lease(is_over=figures.trials % 2 == 1)
                figures.trials += 1
                if figures.trials % CLOSE_EVERY == 0:
                    self._about_the_lease()
        faults, stored = drain_and_judge(self.folder)
        stale = {run.token for run in self._held if crew.seen.find_next(run) is not None}
        figures.failures += crew.troop.failures + faults + check(stale, stored)
        if figures.counts["refused"] < figures.counts["stale runs"]:
            figures.failures.append(f"not every stale result was refused: {figures.counts}")
        return figures

    def _begin(self) -> tuple[str, Child]:
        """Tasks that wait at a gate, and a node that runs some of them, or is just claiming more."""
        self._number += 1
        gate = f"gate-{self._number}"
        for kind in KINDS:
            self.crew.submit(kind, {"gate": gate})
        node = await_(self._find_holder, "a node that holds the tasks")
        return gate, node

    def _find_holder(self) -> Child | None:
        nodes = self.crew.nodes()
        held = {child.pid: len(self.crew.seen.held_by(child.pid)) for child in nodes}
        return max(nodes, key=lambda child: held[child.pid]) if sum(held.values()) == len(KINDS) else None

    def _stop(self, node: Child) -> list[Entry]:
        """What it runs is anybody's from here on."""
        time.sleep(self.crew.rng.random() * LEASE_S / 5)  # anywhere between two beats
        node.signal(signal.SIGSTOP)
        self.crew.ledger.expired(node.pid)
        held = self.crew.seen.held_by(node.pid)
        self._held += held
        return held

    def _past_the_lease(self, *, is_over: bool) -> None:
        gate, node = self._begin()
        began = time.monotonic()
        stale = self._stop(node)
        heirs = [await_(partial(self.crew.seen.find_next, run), "that it is taken over") for run in stale]
        self.figures.took += [run.at_mono - began for run in heirs]
        refused = node.count(REFUSED)
        if is_over:
            self._open(gate, heirs)
        (self.folder / f"{gate}-{node.pid}").touch()
        node.signal(signal.SIGCONT)
        for run in stale:
            await_(partial(self._has_ended, run), "that the stale run ends")
        await_(lambda: node.count(REFUSED) >= refused + len(stale), f"that {len(stale)} results are refused", 10.0)
        self.figures.counts["stale runs"] += len(stale)
        self.figures.counts["refused"] += node.count(REFUSED) - refused
        self._open(gate, heirs)

    def _about_the_lease(self) -> None:
        gate, node = self._begin()
        self._stop(node)
        time.sleep(LEASE_S * (0.9 + self.crew.rng.random() * 0.4))
        node.signal(signal.SIGCONT)
        time.sleep(self.crew.rng.random())
        (self.folder / gate).touch()
        await_(lambda: self.crew.unfinished() == 0, "that all tasks end")
        self.figures.counts["close calls"] += 1

    def _open(self, gate: str, heirs: list[Entry]) -> None:
        (self.folder / gate).touch()
        for run in heirs:
            await_(partial(self._has_ended, run), "that the heir ends")

    def _has_ended(self, run: Entry) -> bool:
        return self.crew.seen.has_ended(run)
