"""This process among the nodes of a store: it joins, gives signs of life where the store wants them, joins anew under
another incarnation when it was given up, and leaves.

It never touches what runs. Whoever does is told to stop it (`fenced`) before the others may take it over, and to go on
(`rejoined`) when the node counts again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid as uuids
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from taskyard.cluster.heartbeat import Beating, Heartbeat, InThread
from taskyard.cluster.pulse import TRUSTED
from taskyard.errors import OutcomeUnknown, StoreError, StoreUnavailable
from taskyard.model.catalogue import ConsumerSpec
from taskyard.model.node import Node
from taskyard.ports.clock import Clock, SharedClock, suspended_s
from taskyard.ports.store import Lease, LeasedStore, Store

log = logging.getLogger("taskyard")

STALL_S = 120.0

REJOIN_FIRST_S, REJOIN_CAP_S = 0.5, 1.0
"""Between tries to join anew while the store is away."""


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """`stall_s`: a node whose event loop has not run for so long leaves its tasks to others. `beating` says where its
    heartbeat runs, `new_incarnation` names the node: no two that ever join one store may have the same. `suspended_s`
    says how long the machine has been suspended so far."""

    stall_s: float = STALL_S
    beating: Callable[[Heartbeat], Beating] = InThread
    new_incarnation: Callable[[], str] = lambda: uuids.uuid4().hex
    suspended_s: Callable[[], float] = suspended_s


@dataclass(frozen=True, slots=True)
class Hooks:
    """Whom the membership tells, on the loop; none may block or raise. `fenced` gets the incarnation whose claims
    are no longer to be trusted; `rejoined` that one, and the one that takes its place; `drained` is told, before that,
    of a drain that was given to the former one and not heard."""

    fenced: Callable[[str], None]
    rejoined: Callable[[str, str], None]
    drained: Callable[[], None]


class Membership:
    """`describe` makes the node of an incarnation that has joined, or joins, at a time, and the specifications of its
    consumers; `is_draining` says whether it was asked to drain."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        describe: Callable[[str, datetime], tuple[Node, list[ConsumerSpec]]],
        is_draining: Callable[[], bool],
        settings: LeaseSettings,
    ) -> None:
        self._store, self._settings = store, settings
        self._clock = SharedClock(clock, settings.suspended_s)
        self._describe, self._is_draining = describe, is_draining
        self._hooks: Hooks
        self.incarnation = settings.new_incarnation()
        self._heartbeat: Heartbeat | None = None
        self._beating: Beating | None = None
        self._fallen: str | None = None
        self._doubtful: set[str] = set()
        """Incarnations that the store may know, and that nobody goes on under."""
        self._wake = asyncio.Event()
        self._joined_at = clock.now()
        self._is_outdated = self._is_leaving = False

    def connect(self, hooks: Hooks) -> None:
        """Before `join`. Apart from the constructor, because who is told is made with our incarnation."""
        self._hooks = hooks

    # --- joining and leaving ------------------------------------------------------------------------------------------

    async def join(self) -> None:
        await self._join(self.incarnation)

    async def give_up_joining(self) -> None:
        """After a `join` that failed or was cancelled: the store may have heard it all the same."""
        await self._forget_doubtful()

    async def _join(self, incarnation: str) -> None:
        began = self._clock.monotonic()
        self._joined_at = self._clock.now()
        self._is_outdated = False
        self._doubtful.add(incarnation)
        try:
            await self._store.join(*self._describe(incarnation, self._joined_at))
        except StoreError as error:
            if not isinstance(error, OutcomeUnknown):
                self._doubtful.discard(incarnation)
            raise
        if self._is_draining():
            await self._store.drain(incarnation)
        if isinstance(self._store, LeasedStore):
            lease = self._store.lease(incarnation)
            if self._clock.monotonic() - began >= TRUSTED * lease.lease_s:
                # Joining is the first beat: the others may have given it up before anything could begin here.
                raise StoreUnavailable(f"the store took longer to answer than the lease of {lease.lease_s:g} s allows")
            self._beat(lease, incarnation, began)
        self._doubtful.discard(incarnation)
        self.incarnation = incarnation

    def _beat(self, lease: Lease, incarnation: str, began_mono: float) -> None:
        loop = asyncio.get_running_loop()

        def lost(why: str) -> None:
            """On the heartbeat's thread."""
            try:
                loop.call_soon_threadsafe(self._lost, incarnation, why)
            except RuntimeError:
                log.error("this node has lost its lease: %s; its event loop is over", why)

        self._heartbeat = Heartbeat(
            lease,
            clock=self._clock,
            began_mono=began_mono,
            stall_s=self._settings.stall_s,
            lost=lost,
        )
        self._beating = self._settings.beating(self._heartbeat)

    def tick(self) -> None:
        """The event loop runs."""
        if self._heartbeat is not None:
            self._heartbeat.ticked_mono = self._clock.monotonic()

    def describe_anew(self) -> None:
        """What this node says of itself has changed: it is told to the store, sooner or later."""
        self._is_outdated = True
        self._wake.set()

    def prepare_to_leave(self) -> None:
        """From here on a lost lease still fences, and nothing is joined anew."""
        self._is_leaving = True

    async def stop_beating(self) -> None:
        if self._beating is not None:
            await self._beating.stop()
        self._heartbeat = self._beating = None

    async def leave(self) -> None:
        await self.stop_beating()
        await self._store.leave(self.incarnation)

    def stay_behind(self) -> None:
        """Something of ours runs on that nobody can stop: the node goes on beating until the process ends, with nobody
        left to watch the loop."""
        if self._heartbeat is not None:
            self._heartbeat.ticked_mono = math.inf

    # --- losing the lease ---------------------------------------------------------------------------------------------

    def _lost(self, incarnation: str, why: str) -> None:
        if incarnation != self.incarnation:
            return
        log.error(
            "node %s has lost its lease: %s; what it runs is interrupted, since others may take it over",
            incarnation[:8],
            why,
        )
        # Here and not in `run`: by then the others may have begun.
        self._hooks.fenced(incarnation)
        self._fallen = incarnation
        self._wake.set()

    async def run(self) -> None:
        """Join anew whenever the lease was lost, and tell what has changed about this node, until cancelled."""
        while True:
            if self._fallen is None and not self._is_outdated:
                await self._wake.wait()
            self._wake.clear()
            if self._fallen is not None:
                await self._recover(self._fallen)
            elif self._is_outdated:
                await self._tell()

    async def _recover(self, fallen: str) -> None:
        await self.stop_beating()
        if not self._is_leaving:
            await self._rejoin(fallen)
        self._fallen = None
        await self._forget_doubtful()  # the lease may be lost again meanwhile

    async def _tell(self) -> None:
        self._is_outdated = False
        try:
            await self._store.describe(*self._describe(self.incarnation, self._joined_at))
        except BaseException:
            self._is_outdated = True  # told when this loop is started again
            raise

    async def _rejoin(self, old: str) -> None:
        tries = 0
        while True:
            # Another one each time: a join whose answer was lost may have been heard, and given up since.
            new = self._settings.new_incarnation()
            try:
                if not self._is_draining() and (await self._store.signals(old)).is_draining:
                    self._hooks.drained()
                await self._join(new)
                break
            except StoreError as error:
                if tries == 0:
                    log.warning("cannot join the store anew, trying again until it answers: %s", error)
                pause = min(REJOIN_FIRST_S * 2 ** min(tries, 10), REJOIN_CAP_S)
                tries += 1
                await self._clock.wait(asyncio.Event(), self._clock.monotonic() + pause)
        log.warning("node %s goes on as %s", old[:8], new[:8])
        self._hooks.rejoined(old, new)

    async def _forget_doubtful(self) -> None:
        """Nodes that never were, so that nobody has to look at them until their lease has passed."""
        for incarnation in sorted(self._doubtful):
            try:
                await self._store.leave(incarnation)
            except StoreError as error:
                log.debug("node %s is left to be given up: %s", incarnation[:8], error)
            self._doubtful.discard(incarnation)
