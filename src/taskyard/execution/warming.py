"""What a start does ahead, so that no first request waits for it: Pydantic is imported, types are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence


async def warm_up_all(steps: Sequence[Callable[[], object]]) -> None:
    """In a thread: it takes a fraction of a second, and the loop may be serving others."""
    if steps:
        await asyncio.to_thread(_take, steps)


def _take(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()
