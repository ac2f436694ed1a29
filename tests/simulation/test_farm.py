"""The short version of `python -m tests.torture devices`, and that it would notice."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from taskyard.testing.simulation.farm import simulate_farm
from taskyard.testing.simulation.farm_plan import FarmSize
from tests.simulation.farm_mutations import MUTATIONS
from tests.torture import devices

SEEDS = 5

HALF_FULL = FarmSize(devices=50, accounts=500, tasks=2_000)
"""The farm of the torture run, for a tenth of its time."""

SMALL = FarmSize(devices=12, accounts=60, tasks=300)

MOST = 60
"""So many small seeds may pass before a mutation is noticed."""

REPLAY = """
import sys
from taskyard.testing.simulation.farm import simulate_farm
from taskyard.testing.simulation.farm_plan import FarmSize
for seed in sys.argv[1:]:
    print(simulate_farm(int(seed), FarmSize(12, 60, 300)).trace)
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Other tests of this process may ask for all asyncio tasks there are."""
    yield
    gc.collect()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.spec("DEV-01", "DEV-03", "DEV-05", "DEV-11", "DEV-15")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_farm_breaks_a_promise(seed: int) -> None:
    """Whatever devices, nodes and people do, the order is strict per bucket, no account and no device has two tasks at
    once, every task ends, and every device is idle at the end or says why not."""
    failures, seen = devices.run_seeds([seed], HALF_FULL)
    assert failures == []
    assert seen["runs"] > 1_000
    assert min(seen["deaths"], seen["failures"], seen["refusals"]) > 0


def test_a_farm_replays_exactly() -> None:
    """One seed gives one history, in any process."""
    seeds = (3, 4)
    traces = [simulate_farm(seed, SMALL).trace for seed in seeds]
    told = subprocess.run(
        [sys.executable, "-c", REPLAY, *map(str, seeds)],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert told.stdout.split() == traces
    assert len(set(traces)) == len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [pytest.param(mutate, id=name) for name, mutate in MUTATIONS.items()])
def test_a_farm_notices_a_missing_safeguard(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    """With one safeguard taken out of the pool, the actors or the store, one of the first seeds turns red."""
    mutate(monkeypatch)
    red = (seed for seed in range(MOST) if devices.check(seed, SMALL))
    assert list(islice(red, 1))
