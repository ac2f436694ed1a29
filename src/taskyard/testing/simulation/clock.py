"""The clock of one simulated machine: its monotonic time is the loop's, its wall clock may be wrong."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from taskyard.testing.clock import START


class VirtualClock:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ahead_s = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self._loop.time() + self.ahead_s)

    def monotonic(self) -> float:
        return self._loop.time()

    async def wait(self, wake: asyncio.Event, until_mono: float | None) -> None:
        if until_mono is None:
            await wake.wait()
            return
        if until_mono <= self._loop.time() or wake.is_set():
            return
        timer = self._loop.call_at(until_mono, wake.set)
        try:
            await wake.wait()
        finally:
            timer.cancel()
