"""Time, as a dependency, and the real one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """The wall clock, aware, in UTC. Stored and shown; it may step either way, so it is never subtracted."""
        ...

    def monotonic(self) -> float:
        """Seconds that only go forward: timeouts, backoff, trust in a lease."""
        ...

    async def wait(self, wake: asyncio.Event, until_mono: float | None) -> None:
        """Return when `wake` is set or `monotonic()` has reached `until_mono`, if it is given."""
        ...


NOISE_S = 0.1
"""Between two clocks that are read one after the other: the thread may have waited for its turn."""


class SystemClock:
    """What is used unless somebody gives another."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def wait(self, wake: asyncio.Event, until_mono: float | None) -> None:
        if until_mono is None:
            await wake.wait()
            return
        delay = until_mono - time.monotonic()
        if delay <= 0 or wake.is_set():
            return
        # A timer that sets the same event costs a third of `asyncio.timeout` around the wait. A late timer can at most
        # set `wake` once more, which every loop takes as a reason to look again.
        timer = asyncio.get_running_loop().call_later(delay, wake.set)
        try:
            await wake.wait()
        finally:
            timer.cancel()


def suspended_s() -> float:
    """For how long this machine has been suspended since it was started, where that can be told. `monotonic()` leaves
    it out; other machines do not."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


class SharedClock:
    """Another clock, on which the time goes on while this machine is suspended: what is promised to others counts on
    it, as on theirs. A wait that was begun before a suspend ends late by as much."""

    def __init__(self, clock: Clock, suspended_s: Callable[[], float] = suspended_s) -> None:
        self._clock, self._suspended_s = clock, suspended_s
        self._before_s = suspended_s()

    def _asleep_s(self) -> float:
        asleep_s = self._suspended_s() - self._before_s
        return asleep_s if asleep_s > NOISE_S else 0.0

    def now(self) -> datetime:
        return self._clock.now()

    def monotonic(self) -> float:
        return self._clock.monotonic() + self._asleep_s()

    async def wait(self, wake: asyncio.Event, until_mono: float | None) -> None:
        await self._clock.wait(wake, None if until_mono is None else until_mono - self._asleep_s())
