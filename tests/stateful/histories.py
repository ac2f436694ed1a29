"""Many random histories of a store in one go, for the test suite and for `make torture`."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, Phase, core, settings
from hypothesis.stateful import run_state_machine_as_test

from taskyard.model import order, places
from taskyard.stores import migrate
from taskyard.stores.memory import core as memory_core
from taskyard.stores.memory import tasks as memory_tasks
from taskyard.stores.sqlite import commands
from tests.stateful.machine import StoreMachine

STEPS = 50

AT_ONCE = 500
"""Histories in one go: Hypothesis remembers each, at about half a megabyte, to make no history twice."""

FRESH = (Phase.generate, Phase.shrink)
"""New histories only, each of which a seed brings back."""


CROWDED = [
    *((where, "GAP", 16) for where in (order, places, memory_core, memory_tasks, migrate)),
    *((where, "SHARE", 2) for where in (places, migrate)),
    *((where, "SMALLEST", 4) for where in (places, migrate)),
    (migrate, "RAISE_AFTER", 0),
    (migrate, "RAISE_ONE_IN", 1),
    (migrate, "READ_AHEAD", 2),
    (migrate, "LANES_KEPT", 0),
    (migrate, "RULED_AT_MOST", 2),
    (migrate, "LOOKED_AT_MOST", 5),
    (commands._Puts, "_HAND_MADE", commands._Puts._HAND_MADE.replace(str(order.GAP), "16")),
]
"""Little room between places, so that a few moves to one spot already make others move; little is read at once; and
claims soon begin to read behind what was taken. Rules come to what waits in many steps."""


@contextmanager
def crowded() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for where, name, value in CROWDED:
            patch.setattr(where, name, value)
        yield


def check(
    histories: int, *, machine: type[StoreMachine] = StoreMachine, phases: Collection[Phase] = tuple(Phase)
) -> None:
    """Raise what is found wrong in so many histories of `STEPS` steps, by default shrunk to the shortest."""
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


def check_seed(seed: int, histories: int, *, machine: type[StoreMachine], phases: Collection[Phase] = FRESH) -> None:
    """The same of the histories that this seed gives, the same each time."""
    # What pytest's --hypothesis-seed sets.
    core.global_force_seed = seed  # type: ignore[assignment]
    try:
        check(histories, machine=machine, phases=phases)
    finally:
        core.global_force_seed = None
