"""The code under test with one safeguard taken out, to show that the simulation would notice."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from taskyard.engine.parts import Parts
from taskyard.errors import OutcomeUnknown
from taskyard.execution.runner import Runner
from taskyard.model.limits import Demand, Quota
from taskyard.model.move import Move
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import Claim, Dedupe, TaskRecord
from taskyard.ports.store import Add, Added
from taskyard.queueing.blockers import BlockerLoop
from taskyard.queueing.capacity import Hold, Slots
from taskyard.queueing.dispatcher import Dispatcher
from taskyard.queueing.inbox import Inbox
from taskyard.queueing.outcomes import OutcomeWatcher
from taskyard.scheduling.due import DueLoop
from taskyard.stores.memory import MemoryCore, claims, core
from taskyard.testing.simulation.network import Line

Patch = pytest.MonkeyPatch


def nothing(*_: Any, **__: Any) -> None:
    """In the place of something."""


def drop_the_token_check(patch: Patch) -> None:
    """Whoever ever held a claim may settle it."""

    def held(self: MemoryCore, claim: Claim) -> TaskRecord | None:
        record = self._by_id.get(claim.record.id)
        return record if record is not None and record.token is not None else None

    patch.setattr(MemoryCore, "_held", held)


def acknowledge_before_effect(patch: Patch) -> None:
    """Submitters hear of their success before the store does."""
    inner = Inbox.add

    def add(self: Inbox, add: Add) -> "asyncio.Future[list[Added]]":
        inner(self, add).add_done_callback(lambda asked: None if asked.cancelled() else nothing(asked.exception()))
        done: asyncio.Future[list[Added]] = asyncio.get_running_loop().create_future()
        done.set_result([Added(record.uuid) for record in add.records])
        return done

    patch.setattr(Inbox, "add", add)


def claim_twice(patch: Patch) -> None:
    """The store hands out what is running already."""
    inner = MemoryCore._claim

    def claim(self: MemoryCore, node: str, demand: Demand, now: datetime) -> list[Claim]:
        claims = inner(self, node, demand, now)
        running = [self._by_id[task_id] for ids in self._running.values() for task_id in sorted(ids)]
        again = [record for record in running if record.node != node][: max(0, demand.total - len(claims))]
        return claims + [Claim(record.clone(), record.attempt, record.token or 0) for record in again]

    patch.setattr(MemoryCore, "_claim", claim)


def start_twice(patch: Patch) -> None:
    """A node does not know what it is running."""
    patch.setattr(Runner, "is_running", lambda self, token: False)


def never_adopt(patch: Patch) -> None:
    """What a turn has claimed whose answer was lost is forgotten."""

    async def adopt(self: Dispatcher) -> bool:
        self._claims_in_doubt = False
        return True

    patch.setattr(Dispatcher, "_adopt", adopt)


def forget_settles(patch: Patch) -> None:
    """What ended while the store did not answer is not told again."""
    inner = Dispatcher._put_back

    def put_back(self: Dispatcher, batch: Any, error: BaseException) -> None:
        lost = isinstance(error, OutcomeUnknown)
        inner(self, msgspec.structs.replace(batch, settles=[]) if lost else batch, error)

    patch.setattr(Dispatcher, "_put_back", put_back)


def lose_hints(patch: Patch) -> None:
    """Nodes never hear of each other."""
    patch.setattr(Line, "hint", nothing)


def ignore_queue_concurrency(patch: Patch) -> None:
    patch.setattr(claims, "Quota", lambda demand, room: Quota(demand, {}))


def ignore_keys(patch: Patch) -> None:
    """A claim does not count against the limit of its key."""
    patch.setattr(MemoryCore, "_note_claimed", nothing)


def ignore_dedupe(patch: Patch) -> None:
    inner = MemoryCore._add_one

    def add_one(self: MemoryCore, asked: TaskRecord, add: Add, now: datetime) -> Added:
        return inner(self, asked, msgspec.structs.replace(add, dedupe=Dedupe.ALLOW), now)

    patch.setattr(MemoryCore, "_add_one", add_one)


def ignore_parents(patch: Patch) -> None:
    """A stale run may submit."""
    inner = MemoryCore._add

    def add(self: MemoryCore, add: Add, now: datetime) -> Any:
        return inner(self, msgspec.structs.replace(add, parent=None), now)

    patch.setattr(MemoryCore, "_add", add)


def retry_for_ever(patch: Patch) -> None:
    patch.setattr(RetryPolicy, "exhausted", lambda self, retries, error: retries >= self.max_retries + 1)


def start_too_early(patch: Patch) -> None:
    inner = MemoryCore._promote
    patch.setattr(MemoryCore, "_promote", lambda self, now: inner(self, now + timedelta(seconds=0.5)))


def trust_the_wall_clock(patch: Patch) -> None:
    """Nobody looks whether it was set."""
    patch.setattr(DueLoop, "look", nothing)


def lose_a_late_cancel(patch: Patch) -> None:
    def heed(move: Move) -> Move:
        return move

    patch.setattr(core, "heed_cancel", heed)


def tell_nobody(patch: Patch) -> None:
    """Who waits for the result of a task that runs elsewhere is forgotten."""
    patch.setattr(OutcomeWatcher, "changed", nothing)


def overfill_nodes(patch: Patch) -> None:
    """A node does not count what it runs."""
    patch.setattr(Slots, "take", nothing)
    patch.setattr(Slots, "free", nothing)


def run_on_without_a_lease(patch: Patch) -> None:
    """A node that may have been given up claims nothing more, and lets run what runs."""
    patch.setattr(Parts, "_fenced", lambda self, incarnation: self.slots.hold(Hold.FENCE))


def never_recheck(patch: Patch) -> None:
    """A task whose blocker is gone, and the signal with it, stays blocked."""

    async def recheck(self: BlockerLoop) -> None:
        """Nothing is checked again."""

    patch.setattr(BlockerLoop, "_recheck", recheck)


def share_places(patch: Patch) -> None:
    """A node forgets what runs at its places."""
    patch.setattr(Slots, "free_places", lambda self, source: list(self._placed.get(source, ())))


def look_without_a_turn(patch: Patch) -> None:
    """A node that prepares its claims does not hear when the next task is due."""

    def look(self: Inbox) -> None:
        if self._demands is not None:
            self._demands._look()  # type: ignore[attr-defined]
        self.claim()

    patch.setattr(Inbox, "look", look)


MUTATIONS: dict[str, Callable[[Patch], None]] = {
    mutation.__name__.replace("_", "-"): mutation
    for mutation in (
        drop_the_token_check,
        acknowledge_before_effect,
        claim_twice,
        start_twice,
        never_adopt,
        forget_settles,
        lose_hints,
        ignore_queue_concurrency,
        ignore_keys,
        ignore_dedupe,
        ignore_parents,
        retry_for_ever,
        start_too_early,
        trust_the_wall_clock,
        lose_a_late_cancel,
        tell_nobody,
        overfill_nodes,
        run_on_without_a_lease,
        never_recheck,
        share_places,
        look_without_a_turn,
    )
}
