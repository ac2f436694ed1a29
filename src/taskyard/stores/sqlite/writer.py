"""The one thread that writes, with group commit.

Jobs that wait when the thread is free become one transaction, and each caller's future resolves after the commit its
job is part of. If a job raises, the batch is rolled back and played again, each job under a savepoint of its own, so
that nobody fails for another's fault. A COMMIT that fails leaves the outcome unknown to all in it, except on a full
disk.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import apsw

from taskyard.errors import OutcomeUnknown, StoreBusy, StoreFull
from taskyard.stores.sqlite.checkpoints import Checkpoints
from taskyard.stores.sqlite.core import SqliteCore
from taskyard.stores.sqlite.place import from_os_error, to_store_error
from taskyard.stores.sqlite.sidecar import WriteTurn

BATCH = 256
"""Jobs a transaction takes at most. One job may be a whole turn of a node, so a batch is seldom more than a few."""


class Job(NamedTuple):
    run: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    peek: Callable[[], Any] | None
    """Answers without a write transaction, or with None if one is needed."""


Outcome = tuple[asyncio.Future[Any], Any, BaseException | None]


class Writer:
    def __init__(
        self,
        core: SqliteCore,
        conn: apsw.Connection,
        turn: WriteTurn,
        *,
        committed: Callable[[], None],
        heard_others: Callable[[], None],
    ) -> None:
        """Both are called on the writer's thread: `committed` after each commit, `heard_others` when another process is
        found to have written."""
        self._core = core
        self._conn = conn
        self._turn = turn
        self._checkpoints = Checkpoints(conn)
        self._committed, self._heard_others = committed, heard_others
        self._lock = threading.Lock()
        self._queueing: list[Job] = []
        self._queueing_since = 0.0
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="taskyard-writer", daemon=True)
        self._path = Path(conn.filename)
        self._thread.start()

    def submit(self, run: Callable[[], Any], peek: Callable[[], Any] | None = None) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put(Job(run, future, loop, peek))
        return future

    def stop(self, timeout_s: float) -> bool:
        """Finish what was submitted, then end; whether it has within `timeout_s`. Blocks. A thread that waits for a
        turn which another process does not give up is left behind: a daemon, its callers told `StoreBusy`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.give_up(0.0)
        return not self._thread.is_alive()

    def give_up(self, after_s: float) -> None:
        """Answer `StoreBusy` to all whose batch has waited for the write turn longer than that. From any thread."""
        with self._lock:
            if not self._queueing or time.monotonic() - self._queueing_since < after_s:
                return
            batch, self._queueing = self._queueing, []
            with suppress(Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    batch.append(job)
                self._jobs.put(None)  # the thread still has to hear that it should end
        self._deliver(batch, [(job.future, None, StoreBusy(str(self._path))) for job in batch])

    def _work(self) -> None:
        while (job := self._next()) is not None:
            batch = [job]
            stopping = False
            while len(batch) < BATCH and not stopping:
                try:
                    following = self._jobs.get_nowait()
                except Empty:
                    break
                if following is None:
                    stopping = True
                else:
                    batch.append(following)
            self._answer(batch)
            if self._core.heard_others:
                self._core.heard_others = False
                self._heard_others()
            if stopping:
                return

    def _next(self) -> Job | None:
        """The next job; a quiet moment is used for the log."""
        try:
            return self._jobs.get(timeout=self._checkpoints.quiet_s)
        except Empty:
            # The folder beside the database may be gone: then the next job hears of it, this thread must not end.
            with suppress(OSError), self._turn.taken():
                self._checkpoints.copy()
            return self._jobs.get()

    def _answer(self, batch: list[Job]) -> None:
        try:
            if len(batch) == 1 and batch[0].peek is not None:
                answer = batch[0].peek()
                if answer is not None:
                    self._deliver(batch, [(batch[0].future, answer, None)])
                    return
            self._queue_up(batch)
            with self._turn.taken():
                batch = self._begin()
                outcomes = self._transact(batch) if batch else []
                if self._checkpoints.is_long:
                    self._deliver(batch, outcomes)
                    batch, outcomes = [], []
                    self._checkpoints.copy()
            self._deliver(batch, outcomes)
        except Exception as exc:
            # Also a bug of ours: it must reach its callers, not end the thread.
            error = self._typed(exc)
            self._deliver(batch, [(job.future, None, error) for job in batch])

    def _queue_up(self, batch: list[Job]) -> None:
        with self._lock:
            self._queueing, self._queueing_since = batch, time.monotonic()

    def _begin(self) -> list[Job]:
        """It is our turn: what `give_up` has not answered meanwhile is now ours to carry out."""
        with self._lock:
            batch, self._queueing = self._queueing, []
            return batch

    def _typed(self, exc: Exception) -> Exception:
        match exc:
            case apsw.Error():
                return to_store_error(self._path, exc)
            case OSError():
                return from_os_error(self._path, exc)
            case _:
                return exc

    def _transact(self, batch: list[Job]) -> list[Outcome]:
        self._core.begin()
        try:
            outcomes: list[Outcome] = [(job.future, job.run(), None) for job in batch]
            self._core.finish()
        except Exception as exc:
            self._roll_back()
            if isinstance(exc, apsw.Error) and not isinstance(exc, apsw.ConstraintError | apsw.TooBigError):
                raise  # the store's fault, not one caller's: playing it again would not help
            self._core.begin()
            outcomes = self._isolate(batch)
        self._commit()
        self._committed()
        return outcomes

    def _isolate(self, batch: list[Job]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        self._core.isolated = True
        try:
            for job in batch:
                try:
                    with self._conn:
                        answer = job.run()
                        self._core.finish()
                    outcomes.append((job.future, answer, None))
                except (apsw.ConstraintError, apsw.TooBigError) as exc:
                    outcomes.append((job.future, None, to_store_error(self._path, exc)))
                    self._start_over()
                except apsw.Error:
                    raise
                except Exception as exc:
                    outcomes.append((job.future, None, exc))
                    self._start_over()
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._core.isolated = False
        return outcomes

    def _start_over(self) -> None:
        """A savepoint was rolled back: what the core knows must be read again."""
        self._core.forget()
        self._core.refresh()

    def _commit(self) -> None:
        try:
            self._conn.execute("COMMIT")
        except apsw.FullError as exc:
            # Frames go to the log in order, the one that commits last: with no room for it, nothing was committed.
            self._roll_back()
            raise StoreFull(str(self._path)) from exc
        except apsw.Error as exc:
            self._roll_back()
            raise OutcomeUnknown(str(exc)) from exc

    def _roll_back(self) -> None:
        self._core.forget()
        if self._conn.in_transaction:
            self._conn.execute("ROLLBACK")

    def _deliver(self, batch: list[Job], outcomes: list[Outcome]) -> None:
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[Outcome]] = defaultdict(list)
        for job, outcome in zip(batch, outcomes, strict=True):
            by_loop[job.loop].append(outcome)
        for loop, own in by_loop.items():
            with suppress(RuntimeError):  # the loop was closed; nobody waits any more
                loop.call_soon_threadsafe(_resolve, own)


def _resolve(outcomes: list[Outcome]) -> None:
    for future, answer, error in outcomes:
        if future.done():
            continue  # the caller gave up waiting; what it asked has happened all the same
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)
