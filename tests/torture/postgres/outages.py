"""P13: the database goes away in every way it can, and comes back. Claims resume on every node within 10 s, without a
rush of connections meanwhile, and nothing is lost."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from taskyard.testing.ledger import What
from tests.torture.figures import Figures
from tests.torture.postgres import links
from tests.torture.postgres.crew import NODES, Crew, await_
from tests.torture.postgres.site import Site, crash, freeze, open_site, thaw
from tests.torture.postgres.spread import spread
from tests.torture.postgres.wires import Proxy, Wire, make_wire
from tests.torture.procs import Child
from tests.torture.verdict import drain_and_judge
from tests.torture.work import LEASE_S, address_of, lease_of

AWAY_S = 20.0
LIMIT_S = 10.0
MOST_CONNECTS = 2.0
"""A second and node."""

LEASES_S = (LEASE_S, 15.0)
"""With the one, nodes are given up meanwhile; with the other they may beat again in time, and try for longer."""

WAYS = ("stopped", "killed", "frozen", "half-open", "slow")


def run(where: Path, *, trials: int, seed: int, way: str) -> Figures:
    figures = spread(partial(run_part, way=way), where, trials=trials, seed=seed)
    figures.note = f"{NODES} nodes, away {AWAY_S:g} s; claims resumed: {figures.told()}"
    return figures


def run_part(where: Path, *, trials: int, seed: int, way: str, away_s: float = AWAY_S) -> Figures:
    lease_s = LEASES_S[seed % 2]
    with ExitStack() as stack:
        site = stack.enter_context(open_site(where, settings=("listen_addresses=*",)))
        return Outages(site, random.Random(seed), way, away_s, lease_s, stack).run(trials)


class Outages:
    def __init__(
        self, site: Site, rng: random.Random, way: str, away_s: float, lease_s: float, stack: ExitStack
    ) -> None:
        self.site, self.rng, self.way, self.away_s = site, rng, way, away_s
        self.folder = site.make_folder()
        lease_of(self.folder).write_text(str(lease_s))
        self.figures = Figures(f"P13 PostgreSQL is {way}", 0)
        self._direct = address_of(self.folder).read_text()
        self.wire: Wire | None = None
        options: dict[str, Any] = {}
        if way in ("half-open", "slow"):
            self.wire = make_wire(site.server) if way == "half-open" else Proxy(site.server.port)
            stack.callback(self.wire.close)
            options["network"] = self.wire.network
        self._client = Crew(self.folder, rng, **options)
        if self.wire is not None:
            address_of(self.folder).write_text(self.wire.address(self._direct))
        self._options = options

    def run(self, trials: int) -> Figures:
        figures, crew = self.figures, self._client
        with crew.gathered():
            crew.troop.start("submit", ready=True, every_s=0.02, patient=1, **self._options)
            while figures.trials < trials:
                self._trial()
                figures.trials += 1
        address_of(self.folder).write_text(self._direct)
        faults, stored = drain_and_judge(self.folder)
        figures.failures += crew.troop.failures + faults
        figures.counts["tasks"] = len(stored)
        return figures

    def _trial(self) -> None:
        crew = self._client
        self._await_claims(time.monotonic(), 30.0)
        for _ in range(30):
            # Due when the database is back: something to claim, whoever else is not back yet.
            crew.submit("breathe", {"ms": 50.0}, delay_s=self.away_s)
        time.sleep(self.rng.random())
        for node in crew.nodes():
            crew.ledger.stop(node.pid)  # a node that cannot beat gives back what it runs
        began = time.monotonic()
        self._go_away()
        back = time.monotonic()
        took = self._await_claims(back, LIMIT_S + 20)
        self.figures.took += took
        if max(took) > LIMIT_S:
            self.figures.failures.append(f"claims resumed only {max(took):.1f} s after the database was back")
        self._check_connects(began)
        dead = crew.troop.reap()
        if dead:
            self.figures.failures.append(f"{[child.name for child in dead]} did not survive it")

    def _await_claims(self, since_mono: float, timeout_s: float) -> list[float]:
        """When each node, and the submitter, were at work again."""
        again = []
        for child in self._client.troop.living:
            what = What.START if child.role == "work" else What.ACKNOWLEDGED
            entry = await_(partial(self._find, child, what, since_mono), f"that {child.name} goes on", timeout_s)
            again.append(entry - since_mono)
        return again

    def _find(self, child: Child, what: What, since_mono: float) -> float | None:
        self._client.seen.read()
        times = (e.at_mono for e in reversed(self._client.seen.entries) if e.pid == child.pid and e.what is what)
        later = []
        for at in times:
            if at < since_mono:
                break
            later.append(at)
        return min(later, default=None)

    def _check_connects(self, began: float) -> None:
        for child in self._client.nodes():
            tries = links.read_connects(self.folder, child.name, since_mono=began)
            rate = links.busiest(tries)
            self.figures.measured("connections a second and node at most", rate)
            if rate > MOST_CONNECTS:
                self.figures.failures.append(f"{child.name} tried to connect {rate:g} times a second")

    # --- ways to go away ----------------------------------------------------------------------------------------------

    def _go_away(self) -> None:
        """Away, and back again when this returns."""
        ways: dict[str, Callable[[], None]] = {
            "stopped": self._stop,
            "killed": self._kill,
            "frozen": self._freeze,
            "half-open": self._cut,
            "slow": self._slow,
        }
        ways[self.way]()

    def _stop(self) -> None:
        server = self.site.server
        if self.figures.trials % 2:
            # A smart shutdown waits for its clients, and takes no new ones meanwhile.
            os.kill(server.pid, signal.SIGTERM)
            time.sleep(self.away_s / 4)
        server.halt(signal.SIGINT)
        time.sleep(self.away_s)
        server.start()

    def _kill(self) -> None:
        crash(self.site.server)
        time.sleep(self.away_s)
        self.site.server.start()

    def _freeze(self) -> None:
        freeze(self.site.server)
        try:
            time.sleep(self.away_s)
        finally:
            thaw(self.site.server)

    def _cut(self) -> None:
        assert self.wire is not None
        self.wire.cut()
        try:
            time.sleep(self.away_s)
        finally:
            self.wire.mend()

    def _slow(self) -> None:
        assert isinstance(self.wire, Proxy)
        self.wire.slow(self.rng.uniform(0.2, 3.0))
        try:
            time.sleep(self.away_s)
        finally:
            self.wire.mend()
