"""What is asked of this node elsewhere: that runs are canceled, and that it drains. Read from the store on a hint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from taskyard.execution.runner import Runner
from taskyard.ports.store import Store
from taskyard.queueing.capacity import Hold, Slots
from taskyard.queueing.inbox import Inbox

log = logging.getLogger("taskyard")


class SignalLoop:
    """`incarnation` says under which this node is known now; `announce` is told when it drains, or no longer does."""

    def __init__(
        self,
        store: Store,
        incarnation: Callable[[], str],
        *,
        runner: Runner,
        slots: Slots,
        inbox: Inbox,
        announce: Callable[[], None],
    ) -> None:
        self._store, self._incarnation, self._announce = store, incarnation, announce
        self._runner, self._slots, self._inbox = runner, slots, inbox
        self._wake = asyncio.Event()
        self.has_pending_cancel = False
        """Whether a run is to be canceled that has not come here yet: say `look_again` when a turn is over."""

    def look(self) -> None:
        """Somebody may have asked for something."""
        self._wake.set()

    def look_again(self) -> None:
        self.has_pending_cancel = False
        self._wake.set()

    def drain(self) -> None:
        """It was asked of this node under a name that it no longer has."""
        self._drain(True)

    async def run(self) -> None:
        """Heed what is asked, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                signals = await self._store.signals(self._incarnation())
                self._drain(signals.is_draining)
                for uuid in signals.cancels:
                    # Race: the cancel came after the commit of a claim that is still on its way here. It is asked for
                    # again when the turn is over.
                    self.has_pending_cancel |= not self._runner.cancel(uuid, force=uuid in signals.forced)
            except BaseException:
                self._wake.set()  # looked at again when this loop is started again
                raise

    def _drain(self, on: bool) -> None:
        """Claim nothing, or claim again. A claim that is on its way here when this is heard is run."""
        if on is self._slots.is_draining:
            return
        if on:
            self._slots.hold(Hold.DRAIN)
            log.warning("this node is drained: it takes no new tasks, and has %d to finish", len(self._runner))
        else:
            self._slots.release(Hold.DRAIN)
            log.warning("this node is no longer drained, and takes tasks again")
            self._inbox.look()
        self._announce()
