"""An event loop for a simulation: time is a number, the order of callbacks is drawn by lot, processes can die.

Of all callbacks that are ready any one may be next: code that only works in the order in which asyncio happens to call
it does not work here. When nothing is ready, time jumps to the next timer. Whatever is scheduled from inside a
`Process` belongs to it, by its context: a frozen process keeps its callbacks for later, a dead one never runs again.

Nothing here looks at a real clock, a socket or a thread: one seed gives one run, step by step.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
from asyncio.events import Handle, TimerHandle
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

PROCESS: ContextVar[Process | None] = ContextVar("taskyard_simulated_process", default=None)


TIDY_AT = 4096
"""So many asyncio tasks are kept before those that have ended are dropped."""


class Stalled(Exception):
    """Nothing is ready, and no timer is set: whatever is waited for will never come."""


class Process:
    """What lives and dies together on a `VirtualLoop`."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.is_frozen = self.is_dead = self.was_frozen = False
        self.tasks: list[asyncio.Task[Any]] = []
        self._tidy_at = TIDY_AT
        self._loop = loop
        self._held: list[Handle] = []
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    @property
    def is_alive(self) -> bool:
        """Whether it runs now."""
        return not self.is_frozen and not self.is_dead

    def spawn(self, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `coro` as a part of this process, in a context of its own."""
        return self._loop.create_task(coro, context=self.context.copy())

    def add_task(self, task: asyncio.Task[Any]) -> None:
        self.tasks.append(task)
        if len(self.tasks) >= self._tidy_at:
            self.tasks, self._tidy_at = _only_open(self.tasks)

    def kill(self) -> None:
        """Now, wherever its code is: nothing of it runs any more, not even what cleans up."""
        self.is_dead, self.is_frozen = True, False
        self._held.clear()

    def freeze(self) -> None:
        self.is_frozen = not self.is_dead
        self.was_frozen |= self.is_frozen

    def thaw(self) -> None:
        """Go on. All that came due meanwhile is ready at once."""
        self.is_frozen = False
        held, self._held = self._held, []
        for handle in held:
            self._loop.add_ready(handle)

    def hold(self, handle: Handle) -> None:
        self._held.append(handle)


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self, rng: random.Random, *, lateness_s: float = 0.0) -> None:
        """A timer fires up to `lateness_s` seconds after its time, so that others become ready together with it."""
        super().__init__()
        self.steps = 0
        self.broken: list[str] = []
        self._draw = rng.random
        self._lateness_s = lateness_s
        self._now = 0.0
        self._at_hand: list[Handle] = []
        self._timers: list[TimerHandle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._tidy_at = TIDY_AT
        self.set_exception_handler(self._note_broken)

    def time(self) -> float:
        return self._now

    # --- what asyncio asks for ----------------------------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        handle = Handle(callback, args, self, context)
        if not self.is_closed():  # what is cleaned up after the end leads nowhere
            self._at_hand.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        timer = TimerHandle(when, callback, args, self, context)
        if not self.is_closed():
            heapq.heappush(self._timers, timer)
        return timer

    def create_task(  # type: ignore[override]
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """All open tasks are kept: one that is collected while it waits would clean up at a time of the collector's
        own."""
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) >= self._tidy_at:
            self._tasks, self._tidy_at = _only_open(self._tasks)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.add_task(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """There are no threads: it is done at once."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def add_ready(self, handle: Handle) -> None:
        self._at_hand.append(handle)

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        """A timer that was cancelled is dropped when its time has come."""

    def _run_once(self) -> None:
        ready = self._at_hand
        if not ready:
            self._pass_time()
        chosen = int(self._draw() * len(ready))
        handle, ready[chosen] = ready[chosen], ready[-1]
        ready.pop()
        if handle._cancelled:
            return
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is not None and not process.is_alive:
            if process.is_frozen:
                process.hold(handle)
            return
        self.steps += 1
        handle._run()

    def _pass_time(self) -> None:
        timers = self._timers
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Stalled(f"nothing will ever happen again, {self._now:g} s after the start")
        self._now = max(self._now, timers[0].when() + self._draw() * self._lateness_s)
        while timers and timers[0].when() <= self._now:
            self._at_hand.append(heapq.heappop(timers))

    # --- the end ------------------------------------------------------------------------------------------------------

    def _note_broken(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback has raised. That an exception was never asked for is told by the collector, at any time or never:
        it proves nothing here."""
        if "handle" in context:
            self.broken.append(f"{context['message']}: {context.get('exception')!r}")

    def close(self) -> None:
        """End what still waits, without letting it go on: neither now nor when the collector finds it."""
        super().close()
        self._at_hand.clear()
        self._timers.clear()
        asyncio._set_running_loop(self)  # what they start when they are ended would otherwise go to another loop
        try:
            for task in self._tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    _end(task.get_coro())
        finally:
            asyncio._set_running_loop(None)
        self._tasks.clear()


def _only_open(tasks: list[asyncio.Task[Any]]) -> tuple[list[asyncio.Task[Any]], int]:
    """Those that have not ended, and the length at which to look again."""
    left = [task for task in tasks if not task.done()]
    return left, max(TIDY_AT, 2 * len(left))


def _end(coro: Any) -> None:
    """Close a coroutine, and again whenever it awaits something more instead of ending."""
    for _ in range(10):
        with contextlib.suppress(BaseException):
            coro.close()
            return
