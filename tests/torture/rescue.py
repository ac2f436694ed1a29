"""P4: what a killed node was running is started elsewhere, and soon."""

import asyncio
import random
import time
from pathlib import Path

from taskyard.testing.ledger import Entry, Ledger, What
from tests.torture.figures import Figures, percentile
from tests.torture.procs import Troop
from tests.torture.verdict import drain_and_judge
from tests.torture.work import ledger_of, make_yard

NODES = 3
LIMIT_S = 5.0
"""A lease and 5 s are promised; on one host no lease is needed."""


def run(where: Path, *, trials: int, seed: int) -> Figures:
    """One task that never ends by itself, and the node that runs it is killed, again and again."""
    rng = random.Random(seed)
    ledger = ledger_of(where)
    troop = Troop(where, ledger)
    figures = Figures("P4 a dead node's task runs elsewhere", 0)
    took: list[float] = []
    with troop.gathered():
        for _ in range(NODES):
            troop.start("work", ready=True)
        asyncio.run(submit(where, ledger))
        running, seen = next_start(ledger, 0)
        while figures.trials < trials:
            time.sleep(rng.random() * 0.05)
            (child,) = [child for child in troop.living if child.pid == running.pid]
            killed = time.monotonic()
            troop.kill(child)
            running, seen = next_start(ledger, seen)
            took.append(running.at_mono - killed)
            troop.start("work", ready=True)
            figures.trials += 1
            if took[-1] > LIMIT_S:
                figures.failures.append(f"taken up again only after {took[-1]:.2f} s")
    ledger.close()
    (where / "gate").touch()
    figures.failures += troop.failures + drain_and_judge(where)[0]
    told = ", ".join(f"{name} {percentile(took, share) * 1000:.0f} ms" for name, share in (("p50", 0.5), ("p99", 0.99)))
    figures.note = f"{told}, longest {max(took) * 1000:.0f} ms; {NODES} nodes"
    return figures


async def submit(folder: Path, ledger: Ledger) -> None:
    """The one task, which holds on until there is a gate."""
    async with make_yard(folder, ledger).client() as yard:
        ledger.acknowledged((await yard.submit("guard", {"gate": "gate"})).uuid)


def next_start(ledger: Ledger, seen: int) -> tuple[Entry, int]:
    """The first start after the line `seen`, and its own line."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for line, entry in enumerate(ledger.entries(after=seen), seen + 1):
            if entry.what is What.START:
                return entry, line
        time.sleep(0.002)
    raise TimeoutError("nobody took the task up again within 30 s")
