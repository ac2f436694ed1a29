"""Threads in which the blocking calls of one adapter run: one that hangs holds up neither the event loop nor another
device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

KEPT = 2
"""Idle threads: one for the task, one for a heartbeat meanwhile."""

_Call = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class AdapterThreads:
    """The threads of one adapter, made when they are first needed: mostly one, and another while that one is busy. They
    are daemons, since nothing can end a thread that a library blocks for ever."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[SimpleQueue[_Call | None]] = []
        self._is_closed = False

    async def run(self, function: Callable[[], T], *, abort: Callable[[], None]) -> T:
        """What `function` answers. If this is cancelled, `abort` is to make it end; its answer is then dropped."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._is_closed = False
        calls = self._idle.pop() if self._idle else self._start()

        def resolve(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)
            self._give_back(calls)

        def resolve_soon(result: Any, error: BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(resolve, result, error)
            except RuntimeError:
                calls.put(None)  # The loop has ended: nobody asks for the answer, and this thread ends too.

        calls.put((function, resolve_soon))
        try:
            return await answer
        except asyncio.CancelledError:
            abort()
            raise

    def close(self) -> None:
        """Let the threads end, those that are busy as soon as they are not."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _start(self) -> SimpleQueue[_Call | None]:
        calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=_run_calls, args=(calls,), name=f"taskyard-adapter-{self._name}", daemon=True).start()
        return calls

    def _give_back(self, calls: SimpleQueue[_Call | None]) -> None:
        if self._is_closed or len(self._idle) >= KEPT:
            calls.put(None)
        else:
            self._idle.append(calls)


def _run_calls(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        function, resolve = call
        try:
            result = function()
        except BaseException as error:
            resolve(None, error)
            # The frames of the error would keep what the call has used until the next one.
            del error
        else:
            resolve(result, None)
            del result
        del call, function, resolve
