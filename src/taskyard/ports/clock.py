"""Time, as a dependency, and the real one."""

from __future__ import annotations

import asyncio
import time
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
