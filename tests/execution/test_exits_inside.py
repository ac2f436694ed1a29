"""Code that runs where it is not expected, in the thread of a pool, and wants to end more than itself."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from taskyard.execution.raising import CannotCross, RemoteError, WorkerDied
from taskyard.futures import ProcessPool
from tests.execution import deeds, misdeeds
from tests.execution.asking import PATIENCE_S

ENDS = [SystemExit, KeyboardInterrupt, asyncio.CancelledError]


def end(kind: type[BaseException]) -> None:
    raise kind


class Trap:
    """Raises where it is unpickled."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return end, (self.kind,)


class TrapError(Exception):
    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__("sprung")
        self.kind = kind

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return end, (self.kind,)


class Mine:
    """Raises where it is pickled."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> str:
        raise self.kind


def give_trap(kind: type[BaseException]) -> Trap:
    return Trap(kind)


def raise_trap(kind: type[BaseException]) -> None:
    raise TrapError(kind)


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(2, spare=False) as pool:
        yield pool


@pytest.fixture
def innocent(pool, stage):
    """A call that runs beside; at the end it must have been served."""
    future = pool.submit(deeds.hold, (stage.began, stage.gate), "served")
    stage.wait_until_begun()
    yield future
    stage.let_go()
    assert future.result(PATIENCE_S) == "served"
    assert pool.submit(misdeeds.add, 1, 2).result(PATIENCE_S) == 3


@pytest.mark.parametrize("kind", ENDS)
def test_a_result_that_ends_who_reads_it(pool, innocent, kind):
    """It cannot cross, and other calls are not touched."""
    assert isinstance(pool.submit(give_trap, kind).exception(PATIENCE_S), CannotCross)


@pytest.mark.parametrize("kind", ENDS)
def test_an_exception_that_ends_who_reads_it(pool, innocent, kind):
    """Its text arrives, and other calls are not touched."""
    exc = pool.submit(raise_trap, kind).exception(PATIENCE_S)
    assert isinstance(exc, RemoteError)
    assert exc.message == "sprung"


@pytest.mark.parametrize("kind", ENDS)
def test_an_argument_that_ends_who_sends_it(pool, innocent, kind):
    """It cannot cross, and other calls are not touched."""
    assert isinstance(pool.submit(deeds.echo, Mine(kind)).exception(PATIENCE_S), CannotCross)


@pytest.mark.parametrize("kind", ENDS)
def test_a_callback_that_ends_who_calls_it(pool, innocent, kind):
    """The next call is answered all the same."""
    future = pool.submit(deeds.echo, 1)
    future.add_done_callback(lambda _: end(kind))
    assert future.result(PATIENCE_S) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_is_ended_leaves_no_future_waiting(stage):
    """Should anything end the thread of a pool, all its calls raise, and it takes no more."""
    pool = ProcessPool(1, spare=False)
    running = pool.submit(deeds.hold, (stage.began, stage.gate))
    stage.wait_until_begun()
    waiting = pool.submit(misdeeds.add, 1, 2)
    thread = pool._loop._thread
    assert thread is not None
    thread.loop.call_soon_threadsafe(sys.exit)
    for future in (running, waiting):
        assert isinstance(future.exception(PATIENCE_S), WorkerDied)
    pool.ended.result(PATIENCE_S)
    assert pool.numbers.workers == 0
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        pool.submit(misdeeds.add, 1, 2)
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_cannot_even_end_leaves_no_future_waiting(stage, monkeypatch):
    """Also when its workers cannot be ended in good order."""
    pool = ProcessPool(1, spare=False)
    running = pool.submit(deeds.hold, (stage.began, stage.gate))
    stage.wait_until_begun()
    thread = pool._loop._thread
    assert thread is not None
    (worker,) = pool._loop._pool._workers
    monkeypatch.setattr(pool._loop._pool, "shutdown", sys.exit)
    monkeypatch.setattr(pool._loop._pool, "end_now", lambda *_: None)
    thread.loop.call_soon_threadsafe(sys.exit)
    assert isinstance(running.exception(PATIENCE_S), WorkerDied)
    thread.join()
    for sock in (worker._wire, vars(worker._process)["_control"]):
        sock.close()
