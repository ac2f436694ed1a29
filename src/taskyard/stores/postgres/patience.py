"""How often something is tried that another transaction got in the way of, and what is waited for in between."""

from __future__ import annotations

import asyncio
import random

TRIES = 20

PAUSE_S, PAUSE_CAP_S = 0.002, 0.1
"""Before the third try, at most, and before the last ones: whoever got in the way twice is given time to end."""


async def give_way(n: int) -> None:
    """Before the try with this number, counted from 0."""
    await asyncio.sleep(random.random() * min(PAUSE_S * 2 ** (n - 2), PAUSE_CAP_S))
