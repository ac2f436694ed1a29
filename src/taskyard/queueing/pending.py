"""Submitting what somebody else is about to submit, in a transaction that has not ended: trying again until it has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from taskyard.errors import SubmitPending
from taskyard.ports.clock import Clock

T = TypeVar("T")

PENDING_S = 5.0
"""How long a submitter waits for a transaction of somebody else's: most take milliseconds, and who keeps one open for
longer may keep it open for hours."""

FIRST_S, CAP_S = 0.01, 0.25
"""Between two tries: nobody tells us that a transaction was rolled back."""


async def insist(submit: Callable[[], Awaitable[T]], clock: Clock) -> T:
    """Called after a first `SubmitPending`; it is raised again if the transaction outlasts our patience."""
    until, pause = clock.monotonic() + PENDING_S, FIRST_S
    while True:
        await clock.wait(asyncio.Event(), min(until, clock.monotonic() + pause))
        try:
            return await submit()
        except SubmitPending:
            if clock.monotonic() >= until:
                raise
        pause = min(2 * pause, CAP_S)
