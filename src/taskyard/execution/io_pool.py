"""`ThreadPool`: a `concurrent.futures` executor of threads that says what it is doing and can be left behind.

The standard library's joins its threads at the interpreter's end, whatever they do. A thread cannot be ended: where a
deadline has passed, ours are abandoned, and the process can end without them.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from taskyard.execution.checks import check_whole
from taskyard.execution.forks import Home
from taskyard.execution.pool import PoolNumbers

P = ParamSpec("P")
T = TypeVar("T")


_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _run(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = function(*args, **kwargs)
    except BaseException as exc:
        # SystemExit too, which would end the thread without a word.
        future.set_exception(exc)
        del future  # the exception knows this frame, and the frame would know the exception
    else:
        future.set_result(value)


class ThreadPool(Executor):
    """At most `max_workers` threads, started when they are needed. `ended` is done when the last of them is gone after
    a shutdown."""

    def __init__(self, max_workers: int) -> None:
        check_whole("max_workers", max_workers)
        self.max_workers = max_workers
        self.ended: Future[None] = Future()
        self._news = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = self._active = self._done = 0
        self._is_closed = self._has_ended = False
        self._home = Home()

    @property
    def numbers(self) -> PoolNumbers:
        """Of this moment. Threads do not crash, and nobody kills or replaces them."""
        return PoolNumbers(
            workers=len(self._threads),
            active=self._active,
            queued=len(self._jobs),
            done=self._done,
            crashed=0,
            killed=0,
            recycled=0,
        )

    @property
    def _max_workers(self) -> int:
        """Where other libraries look for it."""
        return self.max_workers

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._home.claim()
        with self._news:
            if self._is_closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._jobs.append((future, fn, args, kwargs))
            if self._idle >= len(self._jobs):
                self._news.notify()
            elif len(self._threads) < self.max_workers:
                self._start_thread()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._close(wait=wait, cancel=cancel_futures)

    def _close(self, *, wait: bool, cancel: bool = False) -> None:
        if self._home.is_elsewhere:
            return  # its threads are the parent's
        self._home.claim()
        with self._news:
            self._is_closed = True
            given_up = [future for future, *_ in self._jobs] if cancel else []
            if cancel:
                self._jobs.clear()
            threads = list(self._threads)
            self._news.notify_all()
        for future in given_up:
            future.cancel()
            future.set_running_or_notify_cancel()
        if not threads:
            self._note_end()
        for thread in threads if wait else ():
            thread.join()

    def abandon(self) -> int:
        """Take nothing new, cancel what waits, and do not wait for what runs, not even at the interpreter's end; how
        much that is."""
        _OPEN.discard(self)
        self._close(wait=False, cancel=True)
        return self._active

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="taskyard-io", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            self._threads.discard(thread)
            if not self._threads:
                self._jobs.pop()  # nobody would ever come to it
                raise
        _OPEN.add(self)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            _run(*job)
            del job  # an idle thread must not keep the last arguments alive
            with self._news:
                self._active -= 1
                self._done += 1
        with self._news:
            self._threads.discard(threading.current_thread())
            is_last = not self._threads
        if is_last:
            _OPEN.discard(self)
            self._note_end()

    def _note_end(self) -> None:
        # Race: a second shutdown finds no thread while the last one is on its way to say so.
        with self._news:
            is_first, self._has_ended = not self._has_ended, True
        if is_first:
            self.ended.set_result(None)

    def _next(self) -> _Job | None:
        with self._news:
            self._idle += 1
            while not self._jobs and not self._is_closed:
                self._news.wait()
            self._idle -= 1
            if not self._jobs:
                return None
            self._active += 1
            return self._jobs.popleft()


_OPEN: set[ThreadPool] = set()


@atexit.register
def _finish_all() -> None:
    """What was submitted is done before the interpreter ends."""
    for pool in list(_OPEN):
        pool._close(wait=True)
