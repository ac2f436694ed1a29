"""Calls of an adapter, each in an asyncio task of its own with a time limit: an actor never awaits a device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from taskyard.errors import DeviceLost
from taskyard.ports.explain import in_words

SETTLE_S = 1.0
"""Seconds: a call that was cancelled has so long to end before the adapter is asked for something else."""

STUCK_AT_MOST = 3
"""Calls that ignore their cancellation and are still there: the adapter is asked for nothing more then."""


Call = Callable[[], Coroutine[Any, Any, object]]


class AdapterCall:
    """One call under way. `name` says what it does."""

    __slots__ = ("began_mono", "name", "task", "timeout_s")

    def __init__(self, name: str, task: asyncio.Task[None], began_mono: float, timeout_s: float) -> None:
        self.name, self.task, self.began_mono, self.timeout_s = name, task, began_mono, timeout_s

    @property
    def until_mono(self) -> float:
        return self.began_mono + self.timeout_s


class CallFailed(Exception):
    """`is_lost`: the adapter says that the device is gone. `is_stuck`: it cannot be asked any more."""

    def __init__(self, reason: str, *, is_lost: bool = False, is_stuck: bool = False) -> None:
        self.reason, self.is_lost, self.is_stuck = reason, is_lost, is_stuck
        super().__init__(reason)


class AdapterCalls:
    """The calls of one adapter: one at a time, save for those that ignore their cancellation."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.current: AdapterCall | None = None
        self._ended = ended
        self._left: set[asyncio.Task[None]] = set()
        self._left_mono = 0.0

    def start(
        self, name: str, call: Callable[[], Coroutine[Any, Any, object]], *, now: float, timeout_s: float
    ) -> None:
        task = asyncio.get_running_loop().create_task(_only_call(call))
        task.add_done_callback(self._on_end)
        self.current = AdapterCall(name, task, now, timeout_s)

    def free_at(self, now: float) -> float | None:
        """From when on the next call may begin; None if that depends on the end of one that is stuck."""
        if not self._left:
            return now
        return None if len(self._left) >= STUCK_AT_MOST else max(now, self._left_mono + SETTLE_S)

    def take_ended(self, now: float) -> AdapterCall | None:
        """The call that has ended, or whose time is up. See `check` for how it went."""
        call = self.current
        if call is None or not (call.task.done() or now >= call.until_mono):
            return None
        self.current = None
        if not call.task.done():
            self._leave(call.task, now)
        return call

    def drop(self, now: float) -> None:
        """Nobody wants to know how the current call ends."""
        call, self.current = self.current, None
        if call is not None and not call.task.done():
            self._leave(call.task, now)
        elif call is not None:
            _forget(call.task)

    def cancel_all(self) -> list[asyncio.Task[None]]:
        """The end of the actor: nothing is waited for. The calls that are still under way."""
        self.drop(0.0)
        for task in self._left:
            task.cancel()
        return list(self._left)

    def _leave(self, task: asyncio.Task[None], now: float) -> None:
        self._left.add(task)
        self._left_mono = now
        task.cancel()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if task in self._left:
            self._left.discard(task)
            _forget(task)
        self._ended()


def _forget(task: asyncio.Task[None]) -> None:
    """What it raised is not to be logged as never retrieved."""
    if not task.cancelled():
        task.exception()


async def _only_call(call: Call) -> None:
    try:
        await call()
    except (SystemExit, KeyboardInterrupt) as exc:
        # An adapter must not end the loop that all others run on.
        raise CallFailed(in_words(exc)) from exc


def check(call: AdapterCall) -> None:
    """Raises `CallFailed` if it did not go well."""
    task = call.task
    if not task.done():
        raise CallFailed(f"no answer within {call.timeout_s:g} s: {call.name}")
    if task.cancelled():
        raise CallFailed(f"it was cancelled: {call.name}")
    exc = task.exception()
    if isinstance(exc, CallFailed):
        raise exc
    if exc is not None:
        raise CallFailed(in_words(exc), is_lost=isinstance(exc, DeviceLost)) from exc
