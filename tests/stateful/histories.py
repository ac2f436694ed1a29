"""Many random histories of the stores in one go, for the test suite and for `make torture`."""

import traceback
from collections.abc import Collection
from pathlib import Path

from hypothesis import HealthCheck, Phase, core, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.machine import StoreMachine
from tests.torture.figures import Figures

STEPS = 50


def check(histories: int, *, phases: Collection[Phase] = tuple(Phase)) -> None:
    """Raise what is found wrong in so many histories of at most `STEPS` steps, by default shrunk to the shortest."""
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=STEPS,
            deadline=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def run(_folder: Path, *, trials: int, seed: int, phases: Collection[Phase] = tuple(Phase)) -> Figures:
    """P7: no history leads a task out of the graph of states, nor SQLite and memory apart."""
    figures = Figures(f"P7 legal states, {STEPS} steps each", trials)
    core.global_force_seed = seed  # type: ignore[assignment] # what pytest's --hypothesis-seed sets
    try:
        check(trials, phases=phases)
    except Exception as exc:
        figures.failures.append("".join(traceback.format_exception(exc)))
    finally:
        core.global_force_seed = None
    return figures
