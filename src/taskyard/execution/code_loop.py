"""Async code away from the host's event loop: in a thread or in a worker process, on a loop of its own.

Each thread keeps one loop for all the calls it runs one after the other, so that what code holds on to between them, a
client or a lock, goes on working. Between calls the loop stands still: tasks that a call leaves behind are cancelled
at its end.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from types import CoroutineType
from typing import Any

from taskyard.model.exception_attributes import find_traceback, set_traceback

log = logging.getLogger("taskyard")

During = Callable[[asyncio.Task[Any]], AbstractContextManager[Any]]
"""Made of the asyncio task that runs the code, and entered for as long as it does."""


class CodeLoop:
    """Belongs to the thread that made it."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}
        """What belongs to this loop and is to be found again by the next call."""
        self._runner = asyncio.Runner()
        self._closers: list[Callable[[], Awaitable[None]]] = []

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        *,
        during: During = nullcontext,
        context: contextvars.Context | None = None,
    ) -> Any:
        """What the coroutine returns or raises, in `context`, by default a copy of the present one."""
        try:
            context = context or contextvars.copy_context()
            value, raised = self._runner.run(_outcome(coroutine, during), context=context)
        finally:
            # Also after a signal that interrupted the loop itself: then the code is among those left behind.
            self._cancel_rest()
        if raised is None:
            return value
        try:
            raise raised
        finally:
            del raised  # it knows this frame, and the frame would know it

    @property
    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self._runner.get_loop()

    def at_close(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Have `closer` run here when the loop is closed, the last one first."""
        self._closers.append(closer)

    def close(self) -> None:
        try:
            while self._closers:
                self._runner.run(_outcome(self._closers.pop()(), nullcontext))
        finally:
            self._runner.close()

    def _cancel_rest(self) -> None:
        left = asyncio.all_tasks(self._runner.get_loop())
        if left:
            self._runner.run(_cancel(left))


async def _outcome(awaitable: Awaitable[Any], during: During) -> tuple[Any, BaseException | None]:
    """Whatever it raises is handed over as a value: a SystemExit would end the loop, and the frames of asyncio would
    stand in every traceback."""
    task = asyncio.current_task()
    assert task is not None
    try:
        with during(task):
            # Inside the `with`: a generator context manager sets `__traceback__` on what passes it, which the user's
            # exception may refuse.
            try:
                return await awaitable, None
            except BaseException as exc:
                return None, _without_first_frame(exc)
    except BaseException as exc:
        return None, _without_first_frame(exc)


def _without_first_frame(exc: BaseException) -> BaseException:
    """The first frame is that of `_outcome`. It stays if there is no other."""
    tb = find_traceback(exc)
    if tb is not None and tb.tb_next is not None:
        set_traceback(exc, tb.tb_next)
    return exc


async def _cancel(left: set[asyncio.Task[Any]]) -> None:
    for task in left:
        task.cancel()
    for failure in await asyncio.gather(*left, return_exceptions=True):
        if isinstance(failure, Exception):
            log.error("a task that a run had left behind failed when it was cancelled", exc_info=failure)


_here = threading.local()


def loop_here() -> CodeLoop:
    """The loop of this thread for such code, made by the first call."""
    found: CodeLoop | None = getattr(_here, "loop", None)
    if found is None:
        found = _here.loop = CodeLoop()
    return found


def finish(value: Any, *, during: During = nullcontext) -> Any:
    """The value; if it is a coroutine, what that returns when it has been run here."""
    return loop_here().run(value, during=during) if type(value) is CoroutineType else value


def find_loop_here() -> CodeLoop | None:
    """The same, if code runs on it now; None on any other loop."""
    found: CodeLoop | None = getattr(_here, "loop", None)
    return found if found is not None and found.is_running else None


def close_loop_here() -> None:
    """This thread ends."""
    found: CodeLoop | None = getattr(_here, "loop", None)
    if found is not None:
        del _here.loop
        found.close()
