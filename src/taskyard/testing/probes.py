"""Probes that can be awaited: a test waits for what happened, not for a time in which it should have."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from taskyard.ports import probe

PATIENCE_S = 10.0
"""A probe that stays silent this long fails its test, with a word on which one it was."""


class Signal:
    """One named probe. What it said is kept until it is read."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said: deque[Any] = deque(maxlen=10_000)
        self._wake = asyncio.Event()
        self.count = 0

    def __call__(self, value: object) -> None:
        self.count += 1
        self._said.append(value)
        self._wake.set()

    def forget(self) -> None:
        """Drop what was said so far."""
        self._said.clear()

    async def next(self) -> Any:
        """The next thing it says, or has said unread."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not self._said:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            raise AssertionError(f"the probe {self._name!r} said nothing for {PATIENCE_S:g} s") from None
        return self._said.popleft()


class Probes(probe.Probes):
    def __init__(self) -> None:
        self.claimed: Signal = Signal("claimed")
        self.settled: Signal = Signal("settled")
        self.reported: Signal = Signal("reported")
        self.rescued: Signal = Signal("rescued")
        self.idle: Signal = Signal("idle")
        self.outage: Signal = Signal("outage")
        self.stumbled: Signal = Signal("stumbled")
        self.fenced: Signal = Signal("fenced")
        self.rejoined: Signal = Signal("rejoined")
        self.fired: Signal = Signal("fired")
        self.looked: Signal = Signal("looked")
        self.freed: Signal = Signal("freed")
