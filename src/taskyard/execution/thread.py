"""Code in threads: a bounded pool of daemon threads, started when they are first needed.

A thread cannot be stopped. A run that is cancelled or past its deadline is told (`current_run().cancelled`), and keeps
its thread until it ends: two runs of one task never overlap. Async code has an event loop of its thread's, and is
cancelled there. The threads are daemons, so that one that never ends cannot hold up the end of the process;
`concurrent.futures` would join it for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from taskyard.execution.checks import check_whole
from taskyard.execution.code_loop import close_loop_here, loop_here
from taskyard.model.execution import ExecutionError, ExecutionResult
from taskyard.ports.executor import Abilities, ExecutionRequest, ExecutorHealth, ExecutorStats
from taskyard.ports.explain import canceled, explain, rejected, timed_out, waited_long


class ThreadExecutor:
    """At most `max_workers` at once; up to `queue_limit` more wait for a thread, and what comes on top is rejected.
    Belongs to the event loop that first submits."""

    def __init__(self, *, max_workers: int = 32, queue_limit: int = 1000, now: Callable[[], float] = time.time) -> None:
        check_whole("max_workers", max_workers)
        check_whole("queue_limit", queue_limit, least=0)
        self.abilities = Abilities(capacity=max_workers)
        self._max_workers, self._queue_limit, self._now = max_workers, queue_limit, now
        self._waiting: deque[_Job] = deque()
        self._running = self._ended = 0
        self._crew = _Crew()
        self._leaving: list[_Crew] = []
        self._is_closed = False

    async def start(self) -> None:
        """Threads are started on demand; this only opens the executor again after a shutdown."""
        self._is_closed = False

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        refusal = self._refuse(request)
        if refusal is not None:
            return ExecutionResult(success=False, error=refusal, started_at=self._now(), ended_at=self._now())
        job = _Job(request, asyncio.get_running_loop(), self._done)
        run = request.run
        if run is not None:
            run.set_interrupt(job.interrupt)
            run.mark_queued()
        self._waiting.append(job)
        self._hand_out()
        job.wait_at_most(request.wait_s)
        try:
            await job.finished
        except asyncio.CancelledError:
            if job.is_over:
                raise
            # Our caller goes, the thread stays: whoever owns the run must not take it for ended.
            job.detach()
            job.interrupt()
            if job.is_started and request.spec.is_async:
                await job.ended()  # it is being cancelled as well
            raise
        return job.result(self._now())

    def stats(self, name: str | None = None) -> ExecutorStats:
        queued = sum(not job.finished.done() for job in self._waiting)
        return ExecutorStats(self._max_workers, self._running, queued, self._ended)

    def health(self) -> ExecutorHealth:
        return ExecutorHealth(not self._is_closed, "it is shut down" if self._is_closed else "")

    def _refuse(self, request: ExecutionRequest) -> ExecutionError | None:
        if self._is_closed:
            return rejected("the thread executor is shut down")
        if self._running >= self._max_workers and len(self._waiting) >= self._queue_limit:
            # Some of them may have been given up since.
            self._waiting = deque(job for job in self._waiting if not job.finished.done())
            if len(self._waiting) >= self._queue_limit:
                return rejected(f"all {self._max_workers} threads are busy")
        return None

    def _hand_out(self) -> None:
        while self._waiting and self._running < self._max_workers:
            job = self._waiting.popleft()
            if job.finished.done():
                continue  # cancelled while it waited
            try:
                self._crew.make_room()
            except Exception as exc:
                job.reject(f"no thread could be started: {exc}")
                continue
            self._running += 1
            job.begin(self._now(), self._crew)
            self._crew.take(job)

    def _done(self, job: _Job) -> None:
        self._running -= 1
        self._ended += 1
        job.crew.busy -= 1
        self._hand_out()

    async def shutdown(self, *, wait: bool = True) -> None:
        self._is_closed = True
        while self._waiting:
            self._waiting.popleft().reject("the thread executor was shut down before it began")
        # After a start there are new threads: those of before end with what they run.
        self._crew.dismiss()
        self._leaving = [crew for crew in (*self._leaving, self._crew) if crew.is_there]
        self._crew = _Crew()
        if wait:
            for crew in list(self._leaving):
                await crew.gone()


class _Crew:
    """Threads that share the work they are given, until they are dismissed. Belongs to the event loop."""

    def __init__(self) -> None:
        self.threads: dict[threading.Thread, asyncio.Future[None]] = {}
        self.busy = 0
        self._work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    @property
    def is_there(self) -> bool:
        return any(not gone.done() and not gone.get_loop().is_closed() for gone in self.threads.values())

    def make_room(self) -> None:
        """Have a thread that is free; raises when the system has no more."""
        if self.busy == len(self.threads):
            gone = asyncio.get_running_loop().create_future()
            thread = threading.Thread(target=_work, args=(self._work, gone), name="taskyard-thread", daemon=True)
            thread.start()
            self.threads[thread] = gone

    def take(self, job: _Job) -> None:
        self.busy += 1
        self._work.put(job)

    def dismiss(self) -> None:
        for _ in self.threads:
            self._work.put(None)

    async def gone(self) -> None:
        """Wait for the end of the threads, and of what their algorithms have left to do then."""
        here = asyncio.get_running_loop()
        # Those of a loop that was closed before they ended can tell nobody.
        left = {thread: gone for thread, gone in self.threads.items() if gone.get_loop() is here}
        if left:
            await asyncio.wait(left.values())  # unlike a bare await it leaves the futures alone when it is cancelled
        for thread in left:
            thread.join()


class _Job:
    """One request on its way through a thread. All but `run` belongs to the event loop."""

    crew: _Crew
    """Whose thread runs it, from `begin` on."""

    def __init__(
        self, request: ExecutionRequest, loop: asyncio.AbstractEventLoop, done: Callable[[_Job], None]
    ) -> None:
        self.request = request
        self.finished: asyncio.Future[None] = loop.create_future()
        self.is_started = self.is_over = False
        self._loop, self._done = loop, done
        self._context = contextvars.copy_context()
        self._deadline: asyncio.TimerHandle | None = None
        self._is_expired = False
        self._refusal = rejected("it was interrupted while it waited for a thread")
        self._started_at = 0.0
        self._value: Any = None
        self._raised: BaseException | None = None
        self._ended: asyncio.Future[None] | None = None
        self._is_asked = self._is_canceled = self._is_detached = False
        self._cancel: Callable[[], object] | None = None

    def wait_at_most(self, wait_s: float | None) -> None:
        if wait_s is not None and not self.is_started:
            self._deadline = self._loop.call_later(wait_s, self._refuse, waited_long(wait_s))

    def begin(self, now: float, crew: _Crew) -> None:
        self.is_started, self._started_at, self.crew = True, now, crew
        if self._deadline is not None:
            self._deadline.cancel()
        if self.request.run is not None:
            self.request.run.mark_started()
        if self.request.timeout_s is not None:
            self._deadline = self._loop.call_later(self.request.timeout_s, self._expire)

    def run(self) -> None:
        """In the thread."""
        try:
            self._value = self._context.run(self.request.spec.call, self.request.payload)
            if self.request.spec.is_async:
                self._value = loop_here().run(self._value, during=self._steered, context=self._context)
        except BaseException as exc:
            # SystemExit too, which would end the thread without a word.
            self._raised = exc
        # A closed loop raises: nobody waits for this any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._over)

    @contextlib.contextmanager
    def _steered(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """In the thread, while its coroutine runs."""
        self._cancel = functools.partial(task.get_loop().call_soon_threadsafe, self._cancel_once, task)
        # Race: whoever asks may have done so before he could find this. If both see each other, the second is no news.
        if self._is_asked:
            self._cancel_once(task)
        try:
            yield
        finally:
            self._cancel = None

    def _cancel_once(self, task: asyncio.Task[Any]) -> None:
        if not self._is_canceled:
            self._is_canceled = True
            task.cancel()

    async def ended(self) -> None:
        """Wait until the code has ended, whoever else has stopped waiting for it."""
        if not self.is_over:
            self._ended = self._loop.create_future()
            await self._ended

    def detach(self) -> None:
        """Our caller stops waiting. Code that has begun goes on, and the run is told when it has ended."""
        run = self.request.run
        if run is not None and self.is_started:
            self._is_detached = True
            run.detach()

    def _over(self) -> None:
        self.is_over = True
        if self._is_detached and self.request.run is not None:
            self.request.run.reattach()
        if self._deadline is not None:
            self._deadline.cancel()
        if not self.finished.done():
            self.finished.set_result(None)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        self._done(self)

    def _expire(self) -> None:
        self._is_expired = True
        run = self.request.run
        if run is not None:
            run.mark_expired()
        if self.request.spec.is_async:
            self.interrupt()
        elif run is not None:
            run.add_remark(
                f"past its timeout of {self.request.timeout_s:g} s; a thread cannot be stopped, "
                f"so it keeps its slot until it ends"
            )

    def interrupt(self) -> None:
        """A job that waits for a thread is given up; one that runs has been told by its context's flag, and is
        cancelled if it is async."""
        if not self.is_started:
            if not self.finished.done():
                self.finished.set_result(None)
            return
        self._is_asked = True
        cancel = self._cancel
        if cancel is not None:
            with contextlib.suppress(RuntimeError):  # its loop has just been closed
                cancel()

    def reject(self, why: str) -> None:
        self._refuse(rejected(why))

    def _refuse(self, error: ExecutionError) -> None:
        self._refusal = error
        self.interrupt()

    def result(self, now: float) -> ExecutionResult:
        error = self._error()
        started_at = self._started_at or now
        if error is not None:
            return ExecutionResult(success=False, error=error, started_at=started_at, ended_at=now)
        return ExecutionResult(success=True, data=self._value, started_at=started_at, ended_at=now)

    def _error(self) -> ExecutionError | None:
        run = self.request.run
        if not self.is_started:
            if run is not None and run.cancel_requested:
                return canceled("canceled while it waited for a thread")
            return self._refusal
        if self._is_expired:
            return timed_out(self.request.timeout_s or 0.0)
        if self._raised is None:
            return None
        if isinstance(self._raised, asyncio.CancelledError) and run is not None and run.cancel_requested:
            return canceled()
        if run is not None:
            run.keep_exception(self._raised)
        return explain(self._raised)


def _work(jobs: queue.SimpleQueue[_Job | None], gone: asyncio.Future[None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # an idle thread must not keep the last arguments alive
    try:
        close_loop_here()
    finally:
        with contextlib.suppress(RuntimeError):  # the host's loop is closed: nobody waits for this
            gone.get_loop().call_soon_threadsafe(gone.set_result, None)
