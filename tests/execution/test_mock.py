"""Executors that run nothing, and the blocking face."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from taskyard import (
    AlgorithmSpec,
    ErrorKind,
    ExecutionDispatcher,
    ExecutionError,
    ExecutionRequest,
    ExecutionResult,
    InvalidInput,
    MockExecutor,
    NoopExecutor,
    ProcessPoolExecutor,
)
from taskyard.algorithms import BlockingExecutor
from taskyard.errors import BlockingOnLoop, NotOpen
from tests.execution.algorithms import Ledger


def error_of(result: ExecutionResult) -> ExecutionError:
    assert result.error is not None
    return result.error


def request(name: str, payload: object = None) -> ExecutionRequest:
    return ExecutionRequest(spec=AlgorithmSpec(name), payload=payload, request_id="r")


@pytest.mark.spec("EXE-17")
async def test_presets_by_name():
    """Values, errors, results, functions and lists of them are served by the algorithm's name, and asked requests
    are kept."""
    timeout = ExecutionError(kind=ErrorKind.TIMEOUT, message="late")
    mock = MockExecutor(
        {
            "value": {"boxes": []},
            "error": timeout,
            "raised": KeyError("x"),
            "result": ExecutionResult(success=True, data=1, worker_pid=4),
            "function": lambda asked: asked.payload * 2,
            "fails": lambda asked: 1 / 0,
            "several": [1, timeout, 3],
        }
    )
    assert (await mock.submit(request("value"))).data == {"boxes": []}
    assert (await mock.submit(request("error"))).error == timeout
    assert error_of(await mock.submit(request("raised"))).type == "KeyError"
    assert (await mock.submit(request("result"))).worker_pid == 4
    assert (await mock.submit(request("function", 21))).data == 42
    assert error_of(await mock.submit(request("fails"))).type == "ZeroDivisionError"
    several = [await mock.submit(request("several")) for _ in range(4)]
    assert [one.data for one in several] == [1, None, 3, 3]
    unknown = await mock.submit(request("unknown"))
    assert error_of(unknown).kind is ErrorKind.VALIDATION
    assert [asked.payload for asked in mock.asked("function")] == [21]
    assert len(mock.requests) == 11


@pytest.mark.spec("EXE-17")
async def test_a_dispatcher_needs_no_algorithm_for_a_mock():
    """With everything sent to a mock, a service can be tested where no algorithm is installed."""
    mock = MockExecutor({"detector": "boxes"})
    dispatcher = ExecutionDispatcher(executors={"mock": mock}, place="mock")
    await dispatcher.start()
    assert (await dispatcher.run("detector", {"frame": 1}, request_id="r-1")).data == "boxes"
    assert [(asked.request_id, asked.payload) for asked in mock.requests] == [("r-1", {"frame": 1})]
    await dispatcher.shutdown()
    assert error_of(await dispatcher.run("detector", {})).kind is ErrorKind.REJECTED


@pytest.mark.spec("EXE-17", "EXE-04")
async def test_what_is_installed_is_checked_for_a_mock_as_well():
    """A mock behind a real algorithm's name gets only input that fits."""
    mock = MockExecutor({"ledger": "served"})
    dispatcher = ExecutionDispatcher(executors={"mock": mock}, place="mock")
    dispatcher.install(Ledger)
    assert error_of(await dispatcher.run("ledger", {"n": "x"})).kind is ErrorKind.VALIDATION
    assert (await dispatcher.run("ledger", {"n": 1})).data == "served"
    assert len(mock.requests) == 1


@pytest.mark.spec("EXE-03")
async def test_noop_does_nothing_well():
    """Every request is a success without data."""
    result = await NoopExecutor().run("anything", {"n": 1})
    assert (result.success, result.data) == (True, None)


# --- without a loop ---------------------------------------------------------------------------------------------------


def test_plain_code_runs_algorithms():
    """`with BlockingExecutor(…)` serves code without a loop, from any thread, and leaves no thread behind."""
    before = set(threading.enumerate())
    dispatcher = ExecutionDispatcher()
    dispatcher.install(Ledger)
    with BlockingExecutor(dispatcher) as sync:
        assert sync.run(Ledger, {"n": 3}).data.n == 9
        asked = ExecutionRequest(spec=Ledger.spec, payload={"n": "x"}, request_id="r")
        assert error_of(sync.submit(asked)).kind is ErrorKind.VALIDATION
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda n: sync.run("ledger", {"n": n}).data.n, range(8)))
        assert found == [n**2 for n in range(8)]
    assert set(threading.enumerate()) <= before
    with pytest.raises(NotOpen):
        sync.run(Ledger, {"n": 3})
    with sync as again:
        assert again.run(Ledger, {"n": 4}).data.n == 16


def test_blocking_on_its_own_loop_is_refused():
    """A listener, which is called on the loop, is told to await instead of waiting for itself for ever."""
    raised: list[BaseException] = []

    def ask_back(asked: ExecutionRequest) -> None:
        try:
            sync.run("other", None)
        except BlockingOnLoop as exc:
            raised.append(exc)

    with BlockingExecutor(MockExecutor({"ask": ask_back, "other": 1})) as sync:
        assert sync.run("ask", None).success
    assert len(raised) == 1


async def test_blocking_on_any_loop_is_refused():
    """A thread that runs an event loop must not stand still: neither to open it, nor for a call."""
    with pytest.raises(BlockingOnLoop):
        BlockingExecutor(NoopExecutor()).__enter__()
    opened = await asyncio.to_thread(BlockingExecutor(NoopExecutor()).__enter__)
    try:
        with pytest.raises(BlockingOnLoop):
            opened.run("any", None)
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)


def test_an_executor_that_runs_no_algorithms_says_so():
    """`run` needs something that knows algorithms; `submit` does not."""
    with BlockingExecutor(ProcessPoolExecutor(warm=False)) as sync, pytest.raises(InvalidInput, match="Dispatcher"):
        sync.run("any", None)


async def test_it_works_beside_another_loop():
    """Code in a thread beside a running loop may block without holding it up."""

    def plain() -> object:
        with BlockingExecutor(NoopExecutor()) as sync:
            return sync.run("any", None).success

    assert await asyncio.to_thread(plain)
