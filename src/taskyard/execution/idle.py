"""Waiting for the end of what runs: any number may wait at once, and on one event loop after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Idle:
    """Whoever ends something says so with `tell`; those who wait look then whether they may go on. Each has an event of
    its own: one that they shared would belong to the first loop, and one that each replaced would lose the others."""

    def __init__(self) -> None:
        self._watchers: set[asyncio.Event] = set()

    def tell(self) -> None:
        for event in self._watchers:
            event.set()

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """An event that the next `tell` sets."""
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            yield event
        finally:
            self._watchers.discard(event)

    async def wait_while(self, is_busy: Callable[[], object]) -> None:
        while is_busy():
            with self.watch() as event:
                await event.wait()
