"""Many futures with a deadline each, and one timer for all of them.

`asyncio.timeout` around each wait makes five objects and a timer per waiter. With ten thousand waiters that is most of
what the garbage collector has to walk through, for deadlines that hardly ever come.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

import msgspec

Expired = Callable[[str, "asyncio.Future[Any]", float], None]


class _Deadline(msgspec.Struct, frozen=True, order=True, gc=False):
    """Ordered by its first two fields, which no two share."""

    at_mono: float
    number: int
    after_s: float
    name: str
    future: asyncio.Future[Any]


class Deadlines:
    def __init__(self, expired: Expired) -> None:
        """`expired(name, future, after_s)` is called when the time of a future that is not done has passed."""
        self._expired = expired
        self._heap: list[_Deadline] = []
        self._count = 0
        self._tidy_at = 1024
        self._timer: asyncio.TimerHandle | None = None

    def set(self, name: str, future: asyncio.Future[Any], after_s: float) -> None:
        loop = future.get_loop()
        self._count += 1
        deadline = _Deadline(loop.time() + after_s, self._count, after_s, name, future)
        heapq.heappush(self._heap, deadline)
        if self._heap[0] is deadline:
            self._arm(loop)
        if len(self._heap) > self._tidy_at:
            self._tidy()

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            self._timer = loop.call_at(self._heap[0].at_mono, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        # uvloop may call a timer up to a millisecond early: that counts as on time.
        now = loop.time() + 0.001
        while self._heap and self._heap[0].at_mono <= now:
            due = heapq.heappop(self._heap)
            if not due.future.done():
                self._expired(due.name, due.future, due.after_s)
        self._arm(loop)

    def _tidy(self) -> None:
        """Drop those that are done. Done whenever a quarter of all may be: four looks per wait, at most."""
        self._heap = [deadline for deadline in self._heap if not deadline.future.done()]
        heapq.heapify(self._heap)
        self._tidy_at = max(1024, len(self._heap) * 5 // 4)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()
