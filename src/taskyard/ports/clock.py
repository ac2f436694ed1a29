"""Time, as a dependency."""

from __future__ import annotations

import asyncio
from datetime import datetime
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
