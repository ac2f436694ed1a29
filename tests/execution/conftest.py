"""Pools and dispatchers to test with; each is shut down at the end, and must then have left nothing behind."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from taskyard.execution.calls import PendingCall
from taskyard.execution.nursery import NURSERY, Nursery
from taskyard.execution.pool import WorkerPool
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import make_pool
from taskyard.execution.router import ExecutionDispatcher
from taskyard.execution.run_handle import RunHandle, RunHost
from taskyard.execution.spawner import Spawner
from taskyard.execution.starting import Starter
from taskyard.model.execution import ExecutionResult
from taskyard.model.task import Claim
from taskyard.ports.store import Report
from taskyard.testing.pipe import Pipe
from taskyard.testing.samples import a_record
from tests.execution import deeds
from tests.execution.asking import PATIENCE_S, Held
from tests.execution.census import descendants, ended
from tests.execution.kinds import PROCESSES, THREADS, Maker

PRELOAD = ("tests.execution.misdeeds",)


class Desk:
    """A pool, and short ways to ask it."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.reports: list[Report] = []
        self.has_reported = asyncio.Event()

    def begin(self, function: Callable[..., Any], *args: Any, **fields: Any) -> PendingCall:
        call = PendingCall(function, args, **fields)
        assert self.pool.submit(call) is call.future
        return call

    async def ask(self, function: Callable[..., Any], *args: Any, **fields: Any) -> ExecutionResult:
        async with asyncio.timeout(PATIENCE_S):
            return await self.begin(function, *args, **fields).future

    async def value(self, function: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        result = await self.ask(function, *args, **fields)
        assert result.success, result.error
        return result.data

    def run(self) -> RunHandle:
        def report(report: Report) -> None:
            self.reports.append(report)
            self.has_reported.set()

        return RunHandle(Claim(a_record(), 1, 42), RunHost(asyncio.get_running_loop(), report))


@pytest.fixture
async def open_desk() -> AsyncIterator[Callable[..., Desk]]:
    pools: list[WorkerPool] = []

    def open_one(*, portable: bool = False, **settings: Any) -> Desk:
        settings.setdefault("preload", PRELOAD)
        pools.append(make_pool(PoolSettings(**settings), portable=portable))
        return Desk(pools[-1])

    yield open_one
    async with asyncio.timeout(PATIENCE_S):
        for pool in pools:
            await pool.shutdown()
    await all_ended()


@pytest.fixture
async def open_fresh() -> AsyncIterator[Callable[..., Desk]]:
    """Desks with one worker, whose nursery is their own and not running yet, or that of the desk they are `beside`."""
    pools: list[WorkerPool] = []
    nurseries: list[Nursery] = []

    def open_one(*, portable: bool = False, beside: Desk | None = None, **settings: Any) -> Desk:
        nurseries.append(Nursery())
        starter: Starter = Spawner() if portable else nurseries[-1]
        if beside is not None:
            starter = beside.pool._starter
        settings = {"max_workers": 1, "spare": False, **settings}
        pools.append(WorkerPool(PoolSettings(**settings), starter=starter, shares=not portable))
        return Desk(pools[-1])

    yield open_one
    async with asyncio.timeout(PATIENCE_S):
        for pool in pools:
            await pool.shutdown()
    for nursery in nurseries:
        nursery.close()


async def all_ended() -> None:
    for nursery in NURSERY.pids:
        for pid in descendants(nursery):
            await ended(pid)  # a keeper that has said its last word


def nursery_pid() -> int:
    """Of the one that desks have their workers from."""
    pid = NURSERY.find_pid(PRELOAD)
    assert pid is not None
    return pid


@pytest.fixture
async def desk(open_desk: Callable[..., Desk]) -> Desk:
    return open_desk(max_workers=1)


@pytest.fixture(scope="module")
def make(kind: str) -> Maker:
    return (PROCESSES | THREADS)[kind]


@pytest.fixture
def stage(tmp_path) -> deeds.Stage:
    return deeds.Stage(tmp_path)


@pytest.fixture
async def dispatch() -> AsyncIterator[Callable[..., ExecutionDispatcher]]:
    """Makes dispatchers, each with what it is to run; they are shut down at the end."""
    made: list[ExecutionDispatcher] = []

    def make(*targets: Any, **settings: Any) -> ExecutionDispatcher:
        dispatcher = ExecutionDispatcher(**settings)
        for target in targets:
            target, spec = target if isinstance(target, tuple) else (target, None)
            dispatcher.install(target, spec=spec)
        made.append(dispatcher)
        return dispatcher

    yield make
    async with asyncio.timeout(PATIENCE_S):
        for dispatcher in made:
            await dispatcher.shutdown()
    await all_ended()


@pytest.fixture
def make_pipe(tmp_path) -> Iterator[Callable[[str], Pipe]]:
    made: list[Pipe] = []

    def make(name: str) -> Pipe:
        made.append(Pipe(str(tmp_path / name)))
        return made[-1]

    yield make
    for pipe in made:
        pipe.close()


@pytest.fixture
def hold(tmp_path) -> Iterator[Callable[[], Held]]:
    made: list[Held] = []

    def make() -> Held:
        made.append(Held(tmp_path / str(len(made))))
        return made[-1]

    yield make
    for held in made:
        held.let_go()
        for pipe in held.pipes:
            pipe.close()
