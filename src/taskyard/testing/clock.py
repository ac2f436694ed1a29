"""A clock that moves when the test says so."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 1, 12, tzinfo=UTC)


class ManualClock:
    """Time stands still until `advance`. Whoever waits is woken as by a real timer: in the order of their moments, each
    when its own has come."""

    def __init__(self, at: datetime = START) -> None:
        self._now = at
        self._mono = 1_000.0
        self._sleepers: dict[asyncio.Event, float] = {}
        self.waits = 0

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._mono

    async def wait(self, wake: asyncio.Event, until_mono: float | None) -> None:
        if until_mono is not None:
            if until_mono <= self._mono or wake.is_set():
                return
            self._sleepers[wake] = until_mono
        try:
            await wake.wait()
        finally:
            self.waits += 1
            self._sleepers.pop(wake, None)

    @property
    def next_wake_s(self) -> float | None:
        """How long until the first of those who wait would be woken."""
        return min(self._sleepers.values()) - self._mono if self._sleepers else None

    def advance(self, seconds: float) -> None:
        """Time passes, on both clocks."""
        self._now += timedelta(seconds=seconds)
        self._mono += seconds
        due = [wake for wake, until in sorted(self._sleepers.items(), key=lambda item: item[1]) if until <= self._mono]
        for wake in due:
            del self._sleepers[wake]
            wake.set()

    def step(self, seconds: float) -> None:
        """Somebody sets the wall clock; no time passes."""
        self._now += timedelta(seconds=seconds)
