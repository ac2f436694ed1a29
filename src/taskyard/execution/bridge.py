"""From futures that threads complete to an event loop: many answers with one wake-up of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Bridge:
    """The way to one event loop. Futures are handed over by whatever thread completes them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._arrived: deque[asyncio.Future[None]] = deque()
        self._is_woken = False

    def watch(self, future: Future[Any]) -> asyncio.Future[None]:
        """Done on the loop soon after `future` is done, however it ended."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._arrive(waiter))
        return waiter

    def _arrive(self, waiter: asyncio.Future[None]) -> None:
        with self._lock:
            self._arrived.append(waiter)
            if self._is_woken:
                return
            self._is_woken = True
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: nobody waits there any more
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self._lock:
            self._is_woken = False
            arrived, self._arrived = self._arrived, deque()
        for waiter in arrived:
            if not waiter.done():  # its caller may have gone
                waiter.set_result(None)


_BRIDGES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bridge] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def bridge_here() -> Bridge:
    """The bridge to the running loop."""
    loop = asyncio.get_running_loop()
    bridge = _BRIDGES.get(loop)
    if bridge is None:
        with _making:
            bridge = _BRIDGES.setdefault(loop, Bridge(loop))
    return bridge


async def outcome(future: Future[T]) -> T:
    """What the future gives or raises. Unlike `wrap_future` it can also raise `StopIteration` (as the RuntimeError that
    every coroutine makes of it) instead of waiting for ever, and cancelling it leaves the future alone."""
    if not future.done():
        await bridge_here().watch(future)
    return future.result()
