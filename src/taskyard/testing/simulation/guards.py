"""Places and an admission check, in some of the seeds: what else has to be free before a task may start."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from taskyard.model.blocker import Blocker
from taskyard.model.task import TaskRecord
from taskyard.ports.places import Places

ONE_IN = 3
"""Of so many seeds one has places or a check: the other nodes claim in one step."""

KIND = "gate"


class Closing(NamedTuple):
    """The gate of a consumer is closed for a while. The signal that it is open again may be lost."""

    at_s: float
    consumer: str
    seconds: float
    is_signal_lost: bool


class Guards(NamedTuple):
    """What a seed has: which consumers have places, whether nodes check, and when gates are closed."""

    placed: tuple[str, ...] = ()
    has_check: bool = False
    closings: tuple[Closing, ...] = ()

    def places(self, consumer: str, room: int) -> Places | None:
        """As many as the consumer has room for, if it has places."""
        return Places([f"place-{n}" for n in range(room)]) if consumer in self.placed else None


def draw_guards(seed: int) -> Guards:
    """By random numbers of their own: without guards a seed is what it would be without this module."""
    if seed % ONE_IN:
        return Guards()
    rng = random.Random(f"guards of {seed}")
    closings = [
        Closing(rng.random() * 8, rng.choice(("work", "chore")), rng.random() * 4, rng.random() < 0.3)
        for _ in range(rng.randrange(6))
    ]
    return Guards(rng.choice(((), ("chore",), ("work", "chore"))), rng.random() < 0.7, tuple(closings))


class Gates:
    """The gates of all consumers, which are open when the simulation begins. `freed` of a node that was killed is kept
    until another takes its name."""

    def __init__(self) -> None:
        self.closed: dict[str, int] = {}
        """How many closings of a consumer's gate are in force."""
        self._freed: dict[str, Callable[[str, str], None]] = {}

    def check(self, node: str) -> GateCheck:
        return GateCheck(self, node)

    def connect(self, node: str, freed: Callable[[str, str], None]) -> Callable[[], None]:
        self._freed[node] = freed
        return partial(self._disconnect, node, freed)

    def _disconnect(self, node: str, freed: Callable[[str, str], None]) -> None:
        if self._freed.get(node) is freed:  # another node may have the name by now
            del self._freed[node]

    def signal(self, consumer: str) -> None:
        for freed in list(self._freed.values()):
            freed(KIND, consumer)


class GateCheck:
    """The check of one node: a task is blocked while the gate of its consumer is closed."""

    kinds = (KIND,)

    def __init__(self, gates: Gates, node: str) -> None:
        self._gates, self._node = gates, node

    async def check(self, record: TaskRecord) -> Blocker | None:
        await asyncio.sleep(0)
        return Blocker(KIND, record.consumer) if self._gates.closed.get(record.consumer) else None

    def connect(self, freed: Callable[[str, str], None]) -> Callable[[], None]:
        return self._gates.connect(self._node, freed)
