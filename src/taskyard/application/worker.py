"""A worker: the yard of this process, which runs tasks until it is stopped or drained.

Unlike the rest of the application layer, this is about the process that calls it, so it has no counterpart over HTTP.
It installs no signal handlers, no event loop and no logging.
"""

from __future__ import annotations

from taskyard.application.documents import Document
from taskyard.application.local import LocalApplication
from taskyard.application.opening import check_write_lock, describe_store
from taskyard.telemetry.logs import RunLog
from taskyard.version import VERSION
from taskyard.yard import Yard


class ServedConsumer(Document, frozen=True, kw_only=True):
    """A consumer of this worker, and how many of its tasks run here at once."""

    name: str
    queue: str
    concurrency: int


class WorkerInfo(Document, frozen=True, kw_only=True):
    """What a worker is known by, and what it serves."""

    version: str
    name: str
    incarnation: str
    store: str
    consumers: tuple[ServedConsumer, ...]


class StopReport(Document, frozen=True, kw_only=True):
    """How a worker has stopped. `unstopped` runs are still going on: only the end of the process ends them, and their
    tasks go to another worker. `all_results_saved` is false if the store did not take everything that finished."""

    unstopped: int
    all_results_saved: bool


class WorkerProcess:
    """One life of a worker: `start`, then `stop`, also after an error. All calls on one event loop. With `logs_runs` it
    logs every run, with the standard library's logging."""

    def __init__(self, yard: Yard, *, logs_runs: bool = False) -> None:
        self._yard = yard
        if logs_runs:
            yard.add_sink(RunLog())

    async def start(self) -> None:
        """Open the store and run tasks. Raises `WriteLockHeld`, and what opening a store raises."""
        check_write_lock(self._yard)
        await self._yard.start()

    @property
    def info(self) -> WorkerInfo:
        engine = self._yard._engine
        consumers = self._yard.consumers.values()
        return WorkerInfo(
            version=VERSION,
            name=engine.name,
            incarnation=engine.incarnation,
            store=describe_store(self._yard),
            consumers=tuple(ServedConsumer(name=one.name, queue=one.queue, concurrency=one.slots) for one in consumers),
        )

    def application(self, actor: str) -> LocalApplication:
        """The application on this worker's yard, while it is started."""
        return LocalApplication(self._yard, actor=actor)

    @property
    def running(self) -> int:
        """Runs that are going on here."""
        return self._yard._engine.running

    async def wait_drained(self) -> None:
        """Return when this worker was asked to drain and nothing runs here any more."""
        await self._yard._engine.drained()

    def interrupt(self) -> None:
        """Interrupt what runs, for a stop that must not wait for its grace: the tasks go back to the store."""
        self._yard._engine.interrupt()

    async def stop(self, *, grace_s: float) -> StopReport:
        """Start nothing new, wait up to `grace_s` for what runs, interrupt the rest, and close the store."""
        engine = self._yard._engine
        await self._yard.stop(grace_s=grace_s)
        return StopReport(unstopped=engine.running, all_results_saved=engine.is_recorded)
