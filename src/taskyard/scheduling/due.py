"""The due-time loop: it knows one moment, that of the next waiting task, and asks for a turn when it has come.

The moment is on the wall clock, which may step; waiting is done on the monotonic one. So somebody must look at both now
and then: `look`, which whoever owns this loop calls once a second. With nothing scheduled the loop never wakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from taskyard.ports.clock import Clock

LONGEST_S = 86_400.0
"""No timer is set for longer: epoll counts milliseconds in 32 bits."""

STEPPED_S = 0.01
"""A wall clock that is further than this from where it was expected has stepped."""

AGAIN_AFTER_S, AGAIN_CAP_S = 0.005, 1.28
"""When a turn leaves the same moment behind as the next, it is asked again after this, not at once: more was due than
one turn promotes, or the store's clock is behind ours. After `AGAIN_OFTEN` times it can only be the clock, which may be
behind for hours: then the wait doubles each time."""

AGAIN_OFTEN = 100
"""As many turns promote 100,000 tasks of one moment."""


class DueLoop:
    def __init__(self, clock: Clock, due: Callable[[], None]) -> None:
        self._clock, self._due = clock, due
        self._next: datetime | None = None
        self._last: datetime | None = None
        self._again = 0
        self._until_mono = 0.0
        self._wake = asyncio.Event()

    def tell(self, next_due: datetime | None) -> None:
        """The next waiting task is due then. Told after every turn; an earlier one wakes the loop."""
        if next_due is None or next_due == self._next:
            self._next = next_due
            return
        is_earlier = self._next is None or next_due < self._next
        self._next = next_due
        if is_earlier:
            self._wake.set()

    def look(self) -> None:
        """Wake the loop if the wall clock has stepped since it went to sleep."""
        if self._next is None:
            return
        expected = self._until_mono - self._clock.monotonic()
        left = min(_seconds(self._next, self._clock.now()), LONGEST_S)
        if abs(left - expected) > STEPPED_S:
            self._wake.set()

    async def run(self) -> None:
        """Wait and ask for turns until cancelled."""
        while True:
            # Race: tell() may come after we read the moment and before we wait. The moment is read after clear(), so
            # an earlier one is either read here or leaves the event set.
            self._wake.clear()
            due = self._next
            if due is None:
                await self._clock.wait(self._wake, None)
                continue
            left = _seconds(due, self._clock.now())
            if left > 0:
                await self._sleep(min(left, LONGEST_S))
                continue
            self._again = self._again + 1 if due == self._last else 0
            if self._again:
                await self._clock.wait(asyncio.Event(), self._clock.monotonic() + _pause_s(self._again))
            self._last, self._next = due, None
            self._due()

    async def _sleep(self, seconds: float) -> None:
        self._until_mono = self._clock.monotonic() + seconds
        await self._clock.wait(self._wake, self._until_mono)


def _pause_s(again: int) -> float:
    return min(AGAIN_CAP_S, AGAIN_AFTER_S * 2.0 ** min(max(0, again - AGAIN_OFTEN), 10))


def _seconds(due: datetime, now: datetime) -> float:
    """How long until then, by the wall clock as it stands: only ever good until the next look."""
    return (due - now).total_seconds()
