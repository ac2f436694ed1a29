"""A process pool on an event loop of its own, in a thread: what stands between `concurrent.futures` and `WorkerPool`.

Submits come from any thread and leave with one wake-up of the loop for as many as have come together. No more calls are
given to the pool than it can run: what waits, waits here, where it can still be cancelled. The thread starts with the
first submit and ends when the pool has been shut down and its work is done; at the interpreter's end that is waited
for. Callbacks of futures run in this thread, as those of the standard library run in theirs.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from taskyard.execution.calls import PendingCall
from taskyard.execution.forks import Home
from taskyard.execution.loop_thread import LoopThread
from taskyard.execution.pool import PoolNumbers
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import make_pool
from taskyard.execution.raising import RemoteError, WorkerDied, name_of, to_exception
from taskyard.execution.scene import refuse_while_loading
from taskyard.execution.wire import KEEPS_EXCEPTION
from taskyard.model.execution import ExecutionResult

T = TypeVar("T")

TELL_EVERY_S = 0.001

BROKEN = "the event loop of its pool has ended"

log = logging.getLogger("taskyard")


class CallFuture(Future[T]):
    """A future of a call in a worker process, which unlike others can be ended while it runs."""

    owner: PoolLoop | None = None
    call: FutureCall | None = None

    def kill(self) -> bool:
        """Cancel it, or if it runs, end its worker and everything that one started: the future then raises
        `CallKilled` as soon as that is done. False if it was done already."""
        if self.cancel():
            return True
        owner = self.owner  # the loop's thread may forget it at any moment
        if self.done() or owner is None:
            return False
        owner.end_now(self, "its future was told to")
        return True


class Work(msgspec.Struct, gc=False):
    """A call that waits for its turn."""

    future: CallFuture[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout_s: float | None


class FutureCall(PendingCall):
    """A call whose answer goes to a future, at once and on the loop's thread."""

    marks = KEEPS_EXCEPTION

    def __init__(self, work: Work, on_over: Callable[[FutureCall], None]) -> None:
        super().__init__(work.function, work.args, work.kwargs, timeout_s=work.timeout_s)
        self._target, self._on_over = work.future, on_over

    def answer(self, result: ExecutionResult) -> None:
        super().answer(result)
        self._on_over(self)

    def tell(self) -> None:
        """Give the answer to whoever waits for it."""
        target, result = self._target, self.future.result()
        # The future outlives the call: it must not keep the arguments.
        target.owner = target.call = None
        if result.error is None:
            target.set_result(result.data)
            return
        try:
            raised = to_exception(result.error, self.function)
        except BaseException:
            # No way to get here is known; a future that is never done would be worse than a stand-in.
            log.exception("what a call raised could not be rebuilt")
            raised = RemoteError(result.error.types, result.error.message)
        target.set_exception(raised)

    def break_off(self, why: str) -> None:
        """Nobody is left to answer it."""
        if not self._target.done():
            self._target.set_exception(WorkerDied(name_of(self.function), why))


class PoolLoop:
    """`ended` is done when the thread, and with it every worker, is gone."""

    def __init__(self, settings: PoolSettings, *, portable: bool) -> None:
        self.ended: Future[None] = Future()
        self._pool = make_pool(settings, portable=portable)
        self._most = settings.max_workers * settings.pipeline
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: LoopThread | None = None
        self._home = Home()
        self._inbox: deque[Work] = deque()
        self._is_woken = False
        # What follows belongs to the thread.
        self._waiting: deque[Work] = deque()
        self._given: set[FutureCall] = set()
        self._answered: list[FutureCall] = []
        self._telling: asyncio.TimerHandle | None = None
        self._is_feeding = self._is_ending = False
        self._finished = asyncio.Event()

    @property
    def numbers(self) -> PoolNumbers:
        numbers = self._pool.numbers
        return msgspec.structs.replace(numbers, queued=numbers.queued + len(self._waiting) + len(self._inbox))

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        self._home.claim()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            thread = self._thread or self._start()
            work.future.owner = self
            self._inbox.append(work)
            if not self._is_woken:
                self._is_woken = True
                thread.loop.call_soon_threadsafe(self._drain)

    def shutdown(self, *, wait: bool, cancel: bool = False, kill: str = "") -> None:
        """Take nothing new, and end when all is done; `cancel` what waits; `kill` all, for that reason."""
        if self._home.is_elsewhere:
            return  # it is the parent's
        self._home.claim()
        with self._lock:
            self._is_closed = True
            thread = self._thread
            if thread is None:
                self._note_end()
                return
            self._tell(self._end, cancel, kill)
        if wait:
            thread.join()

    def abandon(self) -> None:
        """Nobody holds the pool any more: the work that it has is its last. May come from the collector at any moment,
        so it takes no lock."""
        self._tell(self._end, False, "")

    def end_now(self, future: CallFuture[Any], why: str) -> None:
        self._tell(self._end_call, future, why)

    def _start(self) -> LoopThread:
        refuse_while_loading()
        if _is_exiting:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        _RUNNING.add(self)
        try:
            self._thread = LoopThread(
                self._serve, name="taskyard-pool", make_loop=asyncio.SelectorEventLoop, on_end=self._ended
            )
        except BaseException:
            _RUNNING.discard(self)
            raise
        return self._thread

    def _tell(self, what: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            if self._thread is not None and not self._home.is_elsewhere:
                self._thread.loop.call_soon_threadsafe(what, *args)

    def _note_end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    # --- in the thread ------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            await self._finished.wait()
        except asyncio.CancelledError:
            log.error("the event loop of a process pool was ended from inside; its calls are given up")
            self._close(BROKEN)
            self._tell_callers()
            for call in list(self._given):
                self._pool.end_now(call, BROKEN)
        await self._pool.shutdown()

    def _ended(self) -> None:
        """The last resort, whatever has ended the thread: no future waits for ever."""
        self._close(BROKEN)
        self._tell_callers()
        for call in self._given:
            call.break_off(BROKEN)
        _RUNNING.discard(self)
        self._note_end()

    def _close(self, why: str) -> None:
        """Take nothing new, and fail what waits."""
        with self._lock:
            self._is_closed = True
        self._collect()
        while self._waiting:
            work = self._waiting.popleft()
            if work.future.set_running_or_notify_cancel():
                work.future.set_exception(WorkerDied(name_of(work.function), why))

    def _drain(self) -> None:
        self._collect()
        self._feed()

    def _collect(self) -> None:
        with self._lock:
            self._is_woken = False
            arrived, self._inbox = self._inbox, deque()
        self._waiting += arrived

    def _feed(self) -> None:
        """Give the pool as much as it can run. A call that cannot even be sent is answered at once, and so comes back
        here: the flag keeps a long row of those from being a deep recursion."""
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._waiting and len(self._given) < self._most:
                self._give(self._waiting.popleft())
        finally:
            self._is_feeding = False
        self._note_idle()

    def _note_idle(self) -> None:
        if self._is_ending and not self._given and not self._answered:
            self._finished.set()

    def _give(self, work: Work) -> None:
        if not work.future.set_running_or_notify_cancel():
            return
        call = work.future.call = FutureCall(work, self._over)
        self._given.add(call)
        try:
            _ = self._pool.submit(call)  # its own future is not needed: the answer comes to `FutureCall`
        except BaseException:
            # No way to get here is known; a future that is never done would be worse than this one.
            log.exception("a call could not be given to its process pool")
            self._pool.end_now(call, "it could not be given to its pool")

    def _over(self, call: FutureCall) -> None:
        """Worker first, caller second: whoever is woken wants the interpreter for itself, and the worker would wait.
        While there is a line, callers are told together once a millisecond: those with so many calls lose nothing by
        that, and interrupt us once instead of twenty times."""
        self._given.discard(call)
        self._answered.append(call)
        self._feed()
        if not self._waiting:
            self._tell_callers()
        elif self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_EVERY_S, self._tell_callers)

    def _tell_callers(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        answered, self._answered = self._answered, []
        answered.reverse()
        while answered:
            try:
                answered.pop().tell()
            except BaseException:  # a callback of the future's may raise anything
                log.exception("the answer to a call could not be told")
        self._note_idle()

    def _end(self, cancel: bool, kill: str) -> None:
        self._collect()
        self._is_ending = True
        while (cancel or kill) and self._waiting:
            future = self._waiting.popleft().future
            future.cancel()
            future.set_running_or_notify_cancel()  # tells those who wait for several futures
        for call in list(self._given) if kill else ():
            self._pool.end_now(call, kill)
        self._feed()

    def _end_call(self, future: CallFuture[Any], why: str) -> None:
        if future.call is not None:
            self._pool.end_now(future.call, why)


_RUNNING: set[PoolLoop] = set()
_is_exiting = False


@atexit.register
def _finish_all() -> None:
    """What was submitted is done before the interpreter ends. The nursery registered before us, so it closes later."""
    global _is_exiting
    _is_exiting = True
    for running in list(_RUNNING):
        running.shutdown(wait=True)
