"""The short version of `python -m tests.torture simulation`, and that it would notice."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from taskyard.testing.simulation import simulate
from tests.simulation.mutations import MUTATIONS
from tests.torture import simulation

SEEDS = 200
CHUNK = 25

REPLAY = """
import sys
from taskyard.testing.simulation import simulate
for seed in sys.argv[1:]:
    print(simulate(int(seed)).trace)
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Other tests of this process may ask for all asyncio tasks there are."""
    yield
    gc.collect()


@pytest.mark.slow
@pytest.mark.spec("SCH-14", "SCH-16", "SCH-17", "QUE-02", "QUE-23")
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_seed_breaks_a_promise(first: int) -> None:
    """Whatever the order of events, and whatever the store, the clocks and the nodes do, every promise is kept."""
    failures, seen = simulation.run_seeds(range(first, first + CHUNK))
    assert failures == []
    assert seen["runs"] > CHUNK
    assert seen["deaths"] > CHUNK


def test_a_seed_replays_exactly() -> None:
    """One seed gives one history, step by step, in any process: hashes, ids and the real clock play no part."""
    seeds = range(30, 36)
    traces = [simulate(seed).trace for seed in seeds]
    assert [simulate(seed).trace for seed in seeds] == traces
    assert len(set(traces)) == len(traces)
    told = subprocess.run(
        [sys.executable, "-c", REPLAY, *map(str, seeds)],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert told.stdout.split() == traces


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [pytest.param(mutate, id=name) for name, mutate in MUTATIONS.items()])
def test_a_missing_safeguard_is_noticed(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    """With one safeguard taken out of engine or store, one of the first seeds turns red."""
    mutate(monkeypatch)
    red = (seed for seed in range(4 * SEEDS) if simulation.check(seed))
    assert list(islice(red, 1))
