"""P12: the disk runs full while tasks are submitted and run, and later has room again."""

import random
from pathlib import Path

from tests.torture.disks import SIZE_KB, SmallDisk
from tests.torture.figures import Figures
from tests.torture.procs import Troop
from tests.torture.work import ledger_of


def run(where: Path, *, trials: int, seed: int) -> Figures:
    rng = random.Random(seed)
    figures = Figures("P12 the disk runs full", 0)
    refused, kind = 0, ""
    for number in range(trials):
        folder = where / f"full-{number}"
        folder.mkdir()
        ledger = ledger_of(folder)
        troop = Troop(folder, ledger)
        with troop.gathered():
            child = troop.start("fill", seed=rng.getrandbits(32))
            said = []
            while line := child.read(timeout_s=60):
                said.append(line)
            troop.end(child)
        ledger.close()
        figures.trials += 1
        faults = [line.removeprefix("fault ") for line in said if line.startswith("fault ")] + troop.failures
        if not faults and said[-1:] != ["done"]:
            faults = [f"did not get to the end, it said {said}"]
        figures.failures += [f"{folder.name}: {fault}" for fault in faults]
        refused += sum(int(line.split()[1]) for line in said if line.startswith("refused "))
        kind = next((line.split()[1] for line in said if line.startswith("ready ")), kind)
    disk = f"a disk of {SIZE_KB} KB" if kind == SmallDisk.__name__ else "a pretended disk (this user cannot mount one)"
    figures.note = f"{disk}; {refused} submits refused with StoreFull"
    return figures
