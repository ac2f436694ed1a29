"""Waiting for what other processes and threads do."""

import asyncio
from collections.abc import Callable

PATIENCE_S = 30.0
"""Seconds: what anything may take on a busy machine."""


async def until(holds: Callable[[], bool]) -> None:
    """Return when it holds; it is asked in a thread, so that it may take its time."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await asyncio.to_thread(holds):
                return
            await asyncio.sleep(0.02)
