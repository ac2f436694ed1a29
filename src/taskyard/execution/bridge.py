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

Waiters = deque[asyncio.Future[None]]


class Bridge:
    """The way to one event loop. Futures are handed over by whatever thread completes them.

    What has arrived belongs to the loop, which forgets it when it is closed: a bridge that kept it would keep the loop,
    by which it is known, and so itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._arrived: weakref.ref[Waiters] | None = None

    def watch(self, future: Future[Any]) -> asyncio.Future[None]:
        """Done on the loop soon after `future` is done, however it ended."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._arrive(waiter))
        return waiter

    def _arrive(self, waiter: asyncio.Future[None]) -> None:
        with self._lock:
            arrived = None if self._arrived is None else self._arrived()
            if arrived is not None:
                arrived.append(waiter)
                return
            arrived = Waiters([waiter])
            self._arrived = weakref.ref(arrived)
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: nobody waits there any more
                loop.call_soon_threadsafe(self._wake, arrived)

    def _wake(self, arrived: Waiters) -> None:
        with self._lock:
            self._arrived = None
        for waiter in arrived:
            if not waiter.done():  # its caller may have gone
                waiter.set_result(None)


_BRIDGES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bridge] = weakref.WeakKeyDictionary()


def bridge_here() -> Bridge:
    """The bridge to the running loop. No lock: only the thread that runs a loop asks for its bridge."""
    loop = asyncio.get_running_loop()
    bridge = _BRIDGES.get(loop)
    if bridge is None:
        bridge = _BRIDGES[loop] = Bridge(loop)
    return bridge


async def outcome(future: Future[T]) -> T:
    """What the future gives or raises. Unlike `wrap_future` it can also raise `StopIteration` (as the RuntimeError that
    every coroutine makes of it) instead of waiting for ever, and cancelling it leaves the future alone."""
    if not future.done():
        await bridge_here().watch(future)
    return future.result()
