"""Many random histories of a store in one go, for the test suite and for `make torture`."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, core, settings
from hypothesis.stateful import run_state_machine_as_test

from taskyard.model import order, places
from taskyard.stores.memory import core as memory_core
from taskyard.stores.memory import tasks as memory_tasks
from taskyard.stores.migrations import Migration, list_migrations
from taskyard.stores.postgres import constants, schema
from taskyard.stores.sqlite import commands, place
from tests.stateful.machine import StoreMachine

STEPS = 50

AT_ONCE = 500
"""Histories in one go: Hypothesis remembers each, at about half a megabyte, to make no history twice."""

FRESH = (Phase.generate, Phase.shrink)
"""New histories only, each of which a seed brings back."""


STORED_GAP, GAP = order.GAP, 16


def crowded_migrations(database: str) -> list[Migration]:
    """The index of positions set by hand, for the smaller gap. A store that is made with it is no other program's."""
    return [
        msgspec.structs.replace(migration, sql=migration.sql.replace(str(STORED_GAP), str(GAP)))
        for migration in list_migrations(database)
    ]


CROWDED = [
    *((where, "GAP", GAP) for where in (order, places, memory_core, memory_tasks, constants)),
    *((where, "SHARE", 2) for where in (places, constants)),
    *((where, "SMALLEST", 4) for where in (places, constants)),
    (constants, "RAISE_AFTER", 0),
    (constants, "RAISE_ONE_IN", 1),
    (constants, "READ_AHEAD", 2),
    (constants, "LANES_KEPT", 0),
    (constants, "RULED_AT_MOST", 2),
    (constants, "LOOKED_AT_MOST", 5),
    (commands._Puts, "_HAND_MADE", commands._Puts._HAND_MADE.replace(str(order.GAP), str(GAP))),
    *((where, "list_migrations", crowded_migrations) for where in (place, schema)),
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
