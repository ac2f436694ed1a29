"""Our own code with one safeguard taken out, to show that the torture would notice.

Chosen by name, in the process that is to misbehave: `TORTURE_MUTATION=acknowledge-before-commit`; several with a +
between them.
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any
from unittest.mock import ANY

from taskyard.cluster.leader import Leadership
from taskyard.model.task import Claim
from taskyard.ports.schedules import FireRow
from taskyard.queueing.dispatcher import Dispatcher
from taskyard.queueing.inbox import Batch
from taskyard.scheduling.recurring import RecurringLoop
from taskyard.stores.postgres import PostgresStore, connection
from taskyard.stores.sqlite.core import SqliteCore
from taskyard.stores.sqlite.schedules import ScheduleWrites
from taskyard.stores.sqlite.sidecar import Sidecar
from taskyard.stores.sqlite.writer import Job, Outcome, Writer

VARIABLE = "TORTURE_MUTATION"

THOUGHT = "has made up its mind"
THINK_S = 1.5


def acknowledge_before_commit() -> None:
    """Callers hear of their success while the transaction is still open."""
    inner = Writer._transact

    def transact(self: Any, batch: list[Job]) -> list[Outcome]:
        self._commit = lambda: None
        try:
            outcomes = inner(self, batch)
        finally:
            del self._commit
        self._deliver(batch, outcomes)
        time.sleep(0.05)  # long enough for the acknowledgement to be written down
        self._commit()
        return outcomes

    Writer._transact = transact  # type: ignore[method-assign]


def drop_the_token_check() -> None:
    """Whoever ever held a claim may settle it."""

    def held(self: SqliteCore, claims: Iterable[Claim]) -> Any:
        return {claim.token: (None, None) for claim in claims}

    SqliteCore._held = held  # type: ignore[method-assign]


def take_the_living_for_dead() -> None:
    """Every node believes that all others have died."""

    def is_dead(self: Sidecar, name: str) -> bool | None:
        return name not in self._mine

    Sidecar.is_dead = is_dead  # type: ignore[method-assign]


def acknowledge_before_flush() -> None:
    """PostgreSQL answers before a transaction is on disk."""
    connection.LIMITS["synchronous_commit"] = "off"


def think_before_rescue() -> None:
    """Time passes between the verdict that a node is dead and the deed. That is no fault, and must do no harm."""
    inner = PostgresStore.rescue

    async def rescue(self: PostgresStore, incarnation: str) -> list[str]:
        print(THOUGHT, file=sys.stderr, flush=True)
        await asyncio.sleep(THINK_S)
        return await inner(self, incarnation)

    PostgresStore.rescue = rescue  # type: ignore[method-assign]


def let_everybody_lead() -> None:
    """Every node believes that it leads. That is no fault either."""

    def leads(self: Leadership, nodes: Any, source: str) -> bool:
        return True

    Leadership._leads = leads  # type: ignore[method-assign]


def think_before_fire() -> None:
    """Some time passes between the decision to fire and the deed."""
    inner = RecurringLoop._carry_out

    async def carry_out(self: RecurringLoop, *args: Any, **options: Any) -> Any:
        await asyncio.sleep(random.random() * 0.03)
        return await inner(self, *args, **options)

    RecurringLoop._carry_out = carry_out  # type: ignore[method-assign]


def fire_without_looking() -> None:
    """Neither the version of a schedule nor the row of a fire time keeps a second task out."""
    inner, has_row = ScheduleWrites._note, ScheduleWrites._has_row

    def note(self: ScheduleWrites, name: str, row: FireRow, made: Sequence[str]) -> None:
        if not has_row(self, name, row.fire_at):
            inner(self, name, row, made)

    def has_no_row(self: ScheduleWrites, name: str, fire_at: datetime) -> bool:
        return False

    def version(self: ScheduleWrites, name: str) -> Any:
        return ANY

    ScheduleWrites._note = note  # type: ignore[method-assign]
    ScheduleWrites._has_row = has_no_row  # type: ignore[method-assign]
    ScheduleWrites._version = version  # type: ignore[method-assign]


def part_every_turn() -> None:
    """Ends go apart from the claims of their turn, however few they are. That is no fault either."""

    def is_worth_parting(self: Dispatcher, batch: Batch) -> bool:
        return bool(batch.settles) and batch.demand is not None

    Dispatcher._is_worth_parting = is_worth_parting  # type: ignore[method-assign]


MUTATIONS: dict[str, Callable[[], None]] = {
    "acknowledge-before-commit": acknowledge_before_commit,
    "acknowledge-before-flush": acknowledge_before_flush,
    "drop-the-token-check": drop_the_token_check,
    "take-the-living-for-dead": take_the_living_for_dead,
    "think-before-rescue": think_before_rescue,
    "everybody-leads": let_everybody_lead,
    "think-before-fire": think_before_fire,
    "fire-without-looking": fire_without_looking,
    "part-every-turn": part_every_turn,
}


def install(name: str) -> None:
    for one in filter(None, name.split("+")):
        MUTATIONS[one]()
