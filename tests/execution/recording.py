"""A store that remembers the reports it was sent, and a yard on it: what stores keep of them is tested elsewhere."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from taskyard import RetryPolicy, TaskFailed, Yard
from taskyard.model.attempt import Artifact, LogLine
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Report
from taskyard.stores.memory import MemoryStore

PATIENCE_S = 30
NO_RETRY = RetryPolicy(max_retries=0)

INLINE, THREAD, PROCESS, ISOLATED = EXECUTORS = ("inline", "thread", "process", "isolated")


class RecordingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.told: list[tuple[str, Any]] = []
        """What came in each turn, in the order in which stores take it: settles, then reports."""

    async def turn(self, node: str, *, settles: Any = (), reports: Any = (), **rest: Any) -> Any:
        self.told += [("settle", claim.uuid) for claim, _ in settles] + [("report", report) for report in reports]
        return await super().turn(node, settles=settles, reports=reports, **rest)

    @property
    def reports(self) -> list[Report]:
        return [what for kind, what in self.told if kind == "report"]

    def lines(self, uuid: str) -> list[LogLine]:
        return [line for report in self.reports if report.claim.uuid == uuid for line in report.lines]

    def artifacts(self, uuid: str) -> list[Artifact]:
        return [artifact for report in self.reports if report.claim.uuid == uuid for artifact in report.artifacts]


class Site:
    """A yard, and short ways to run one function in it."""

    def __init__(self, artifacts: Path | None = None) -> None:
        self.store = RecordingStore()
        self.yard = Yard(self.store, grace_s=5, artifacts=artifacts)
        self._consumers: dict[tuple[Any, str], Any] = {}

    async def submit(self, function: Callable[..., Any], *args: Any, executor: str) -> Any:
        key = function, executor
        if key not in self._consumers:
            make = self.yard.consumer(
                name=f"{function.__name__}-{executor}", executor=executor, retry=NO_RETRY, concurrency=4
            )
            self._consumers[key] = make(function)
        return await self._consumers[key].submit(*args)

    async def run(self, function: Callable[..., Any], *args: Any, executor: str = "thread") -> str:
        """Run it to its end, however it ends; its uuid."""
        handle = await self.submit(function, *args, executor=executor)
        with contextlib.suppress(TaskFailed):
            await handle.result(timeout_s=PATIENCE_S)
        return str(handle.uuid)

    async def lines(self, function: Callable[..., Any], *args: Any, executor: str = "thread") -> list[LogLine]:
        return self.store.lines(await self.run(function, *args, executor=executor))


@contextlib.asynccontextmanager
async def open_site(artifacts: Path | None = None) -> AsyncIterator[Site]:
    site = Site(artifacts)
    async with site.yard:
        yield site
