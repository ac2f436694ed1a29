"""Many futures with a deadline each, and one timer for all of them.

`asyncio.timeout` around each wait makes five objects and a timer per waiter. With ten thousand waiters that is most of
what the garbage collector has to walk through, for deadlines that hardly ever come.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

Expired = Callable[[str, "asyncio.Future[Any]", float], None]


class Deadlines:
    def __init__(self, expired: Expired) -> None:
        """`expired(name, future, after_s)` is called when the time of a future that is not done has passed."""
        self._expired = expired
        self._heap: list[tuple[float, int, float, str, asyncio.Future[Any]]] = []
        self._count = 0
        self._tidy_at = 1024
        self._timer: asyncio.TimerHandle | None = None

    def set(self, name: str, future: asyncio.Future[Any], after_s: float) -> None:
        loop = future.get_loop()
        deadline = loop.time() + after_s
        self._count += 1
        heapq.heappush(self._heap, (deadline, self._count, after_s, name, future))
        if self._heap[0][1] == self._count:
            self._arm(loop)
        if len(self._heap) > self._tidy_at:
            self._tidy()

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            self._timer = loop.call_at(self._heap[0][0], self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        # uvloop may call a timer up to a millisecond early: that counts as on time.
        now = loop.time() + 0.001
        while self._heap and self._heap[0][0] <= now:
            _, _, after_s, name, future = heapq.heappop(self._heap)
            if not future.done():
                self._expired(name, future, after_s)
        self._arm(loop)

    def _tidy(self) -> None:
        """Drop those that are done. Done when there are twice as many as were left last time: little per wait."""
        self._heap = [entry for entry in self._heap if not entry[4].done()]
        heapq.heapify(self._heap)
        self._tidy_at = max(1024, 2 * len(self._heap))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()
