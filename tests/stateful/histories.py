"""Many random histories of the stores in one go, for the test suite and for `make torture`."""

import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, core, settings
from hypothesis.stateful import run_state_machine_as_test

from taskyard.model import order, places
from taskyard.stores import migrate
from taskyard.stores.memory import core as memory_core
from taskyard.stores.memory import tasks as memory_tasks
from taskyard.stores.sqlite import commands
from tests.stateful.machine import StoreMachine
from tests.torture.figures import Figures

STEPS = 50

AT_ONCE = 500
"""Histories in one go: Hypothesis remembers each, at about half a megabyte, to make no history twice."""


CROWDED = [
    *((where, "GAP", 16) for where in (order, places, memory_core, memory_tasks, migrate)),
    *((where, "SHARE", 2) for where in (places, migrate)),
    *((where, "SMALLEST", 4) for where in (places, migrate)),
    (migrate, "RAISE_AFTER", 8 * 16),
    (commands._Puts, "_HAND_MADE", commands._Puts._HAND_MADE.replace(str(order.GAP), "16")),
]
"""Little room between places, so that a few moves to one spot already make others move."""


@contextmanager
def crowded() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for where, name, value in CROWDED:
            patch.setattr(where, name, value)
        yield


def check(
    histories: int, *, machine: type[StoreMachine] = StoreMachine, phases: Collection[Phase] = tuple(Phase)
) -> None:
    """Raise what is found wrong in so many histories of at most `STEPS` steps, by default shrunk to the shortest."""
    for done in range(0, histories, AT_ONCE):
        with crowded():
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=min(AT_ONCE, histories - done),
                    stateful_step_count=STEPS,
                    deadline=None,
                    phases=phases,
                    suppress_health_check=list(HealthCheck),
                ),
            )


def run(_folder: Path, *, trials: int, seed: int, phases: Collection[Phase] = tuple(Phase)) -> Figures:
    """P7: no history leads a task out of the graph of states, nor SQLite and memory apart."""
    figures = Figures(f"P7 legal states, {STEPS} steps each", 0)
    try:
        while figures.trials < trials and not figures.failures:
            # What pytest's --hypothesis-seed sets; another one each time, or all would be the same.
            core.global_force_seed = seed + figures.trials  # type: ignore[assignment]
            histories = min(AT_ONCE, trials - figures.trials)
            figures.trials += histories
            check(histories, phases=phases)
    except Exception as exc:
        figures.failures.append("".join(traceback.format_exception(exc)))
    finally:
        core.global_force_seed = None
    return figures
