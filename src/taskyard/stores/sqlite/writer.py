"""The one thread that writes, with group commit.

Jobs that wait when the thread is free become one transaction, and each caller's future resolves after the commit its
job is part of. If a job raises, the batch is rolled back and played again, each job under a savepoint of its own, so
that nobody fails for another's fault. A COMMIT that fails leaves the outcome unknown to all in it, except on a full
disk.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import apsw

from taskyard.errors import OutcomeUnknown, StoreError, StoreFull
from taskyard.stores.sqlite.core import SqliteCore
from taskyard.stores.sqlite.place import to_store_error
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
        self, core: SqliteCore, conn: apsw.Connection, turn: WriteTurn, *, committed: Callable[[bool], None]
    ) -> None:
        """`committed(foreign)` is called on the writer's thread after each commit, and says whether another process has
        written since the one before."""
        self._core = core
        self._conn = conn
        self._turn = turn
        self._committed = committed
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="taskyard-writer", daemon=True)
        self._path = Path(conn.filename)
        self._thread.start()

    def submit(self, run: Callable[[], Any], peek: Callable[[], Any] | None = None) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put(Job(run, future, loop, peek))
        return future

    def stop(self) -> None:
        """Finish what was submitted, then end. Blocks."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
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
            self._deliver(batch, self._answer(batch))
            if stopping:
                return

    def _answer(self, batch: list[Job]) -> list[Outcome]:
        try:
            if len(batch) == 1 and batch[0].peek is not None:
                answer = batch[0].peek()
                if answer is not None:
                    return [(batch[0].future, answer, None)]
            with self._turn.taken():
                return self._transact(batch)
        except apsw.Error as exc:
            error = to_store_error(self._path, exc)
        except StoreError as exc:
            error = exc
        except Exception as exc:  # a bug of ours must reach its callers, not end the thread
            return [(job.future, None, exc) for job in batch]
        return [(job.future, None, error) for job in batch]

    def _transact(self, batch: list[Job]) -> list[Outcome]:
        foreign = self._core.begin()
        try:
            outcomes: list[Outcome] = [(job.future, job.run(), None) for job in batch]
            self._core.finish()
        except Exception as exc:
            self._roll_back()
            if isinstance(exc, apsw.Error) and not isinstance(exc, apsw.ConstraintError):
                raise  # the store's fault, not one caller's: playing it again would not help
            foreign = self._core.begin() or foreign
            outcomes = self._isolate(batch)
        self._commit()
        self._committed(foreign)
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
                except apsw.ConstraintError as exc:
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
