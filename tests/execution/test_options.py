"""What a pool is told, and what it is given to call: mistakes are named where they are made."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from taskyard.errors import InvalidInput
from taskyard.execution.mock import MockExecutor
from taskyard.execution.pool_settings import PoolSettings
from taskyard.futures import ProcessPool
from taskyard.manager import CallOptions, ManagerSettings, get_executor_manager
from taskyard.model.algorithm import AlgorithmSpec, ExecutionHints
from tests.execution import deeds

NAN, INF = float("nan"), float("inf")

WRONG_VALUES = [
    *[("max_workers", value) for value in (0, -1, 10**11)],
    *[("queue_limit", value) for value in (-1,)],
    *[("pipeline", value) for value in (0, -1)],
    *[("recycle_after", value) for value in (0, -1)],
    *[(name, value) for name in ("memory_limit", "recycle_rss") for value in (0, -1, 1000)],
    *[("load_s", value) for value in (0, -1, NAN, INF)],
    *[(name, value) for name in ("wait_s", "cancel_grace_s", "term_grace_s") for value in (-1, NAN, INF)],
]

WRONG_TYPES = [
    *[("max_workers", value) for value in (2.5, INF, "2", True)],
    *[(name, value) for name in ("queue_limit", "pipeline", "recycle_after") for value in (1.5, "1")],
    *[(name, value) for name in ("memory_limit", "recycle_rss") for value in ("1G", 1e9)],
    *[(name, value) for name in ("load_s", "wait_s", "cancel_grace_s", "term_grace_s") for value in ("x", True)],
    *[("spare", value) for value in (None, "no", 1)],
    *[("preload", value) for value in ("os", (1,), None, 5)],
    *[("environ", value) for value in ({"A": 1}, "A=1")],
    *[("setup", "text")],
]


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES, ids=str)
def test_a_value_that_makes_no_sense(name, value):
    """It is refused with the name of the option, what was given and what is allowed."""
    allowed = "(greater than 0|at least|at most|0 or more)"
    with pytest.raises(ValueError, match=rf"{name} .*must be {allowed}.*, not {value}"):
        PoolSettings(**{name: value})


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES, ids=str)
def test_a_type_that_makes_no_sense(name, value):
    """It is refused in the same way."""
    with pytest.raises(TypeError, match=rf"{name} must be ") as raised:
        PoolSettings(**{name: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("name", ["recycle_after", "queue_limit", "max_worker"])
def test_a_process_pool_knows_its_options(name):
    """An option that is none of its own is refused by name; what the standard library names has no second name."""
    unknown: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        ProcessPool(**unknown)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"max_workers": "2"}, TypeError),
        ({"max_workers": -1}, ValueError),
        ({"mp_context": "spawn"}, TypeError),
        ({"initializer": print, "initargs": 5}, TypeError),
        ({"initializer": 5}, TypeError),
        ({"timeout_s": "1"}, TypeError),
        *[({"timeout_s": value}, ValueError) for value in (0, -1.0, NAN)],
        ({"max_tasks_per_child": 1.5}, TypeError),
        ({"max_tasks_per_child": 0}, ValueError),
        ({"memory_limit": "1G"}, TypeError),
        ({"preload": (1,)}, TypeError),
        ({"portable": None}, TypeError),
    ],
    ids=str,
)
def test_a_process_pool_is_made_right_or_not_at_all(given, error):
    """Its constructor names the option that is wrong."""
    with pytest.raises(error, match=f"{list(given)[-1]} must be "):
        ProcessPool(**given)


@pytest.mark.parametrize(
    ("make", "name", "value", "error"),
    [
        (ManagerSettings, "cpu_workers", -1, ValueError),
        (ManagerSettings, "cpu_workers", "2", TypeError),
        (ManagerSettings, "io_workers", 0, ValueError),
        (ManagerSettings, "memory_limit", "1G", TypeError),
        (ManagerSettings, "recycle_after", 1.5, TypeError),
        (ManagerSettings, "portable", 1, TypeError),
        (ManagerSettings, "calls", {}, TypeError),
        (CallOptions, "retries", "1", TypeError),
        (CallOptions, "timeout_s", "1", TypeError),
    ],
)
def test_settings_of_a_manager(make: Callable[..., Any], name, value, error):
    """They are refused under the names that they have there."""
    with pytest.raises(error, match=f"{name} must be "):
        make(**{name: value})


def test_a_spec_without_hints():
    """What stands in the place of an algorithm's hints must be hints."""
    with pytest.raises(InvalidInput, match="the execution of 'x' must be ExecutionHints"):
        AlgorithmSpec("x", "1", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["x", 1, None], ids=str)
def test_a_flag_of_hints(value):
    """It is True or False, and not what might be taken for one of them."""
    with pytest.raises(InvalidInput, match="isolated_pool must be True or False, not "):
        ExecutionHints(isolated_pool=value)


@pytest.mark.parametrize("value", [5, [1], "x"], ids=str)
def test_results_of_a_mock(value):
    """They are answers by name; anything else is refused with that."""
    with pytest.raises(InvalidInput, match=r"results must be a dict of answers .*, not "):
        MockExecutor(value)


@pytest.mark.parametrize("value", [1.5, "2", None], ids=str)
def test_a_size_of_chunks(value):
    """It is a whole number, whatever the tools inside would say to another."""
    with ProcessPool(1) as pool, pytest.raises(TypeError, match="chunksize must be a whole number, not "):
        pool.map(abs, [1], chunksize=value)


# --- functions --------------------------------------------------------------------------------------------------------


class AsyncTool:
    async def __call__(self, value: int) -> int:
        return await later(value)

    async def method(self, value: int) -> int:
        return await later(value)


async def later(value: int) -> int:
    await asyncio.sleep(0)
    return value * 2


asked: list[int] = []


async def ask_ahead(value: int) -> None:
    asked.append(await later(value))


def what_was_asked() -> list[int]:
    return asked


@pytest.mark.parametrize("function", [0, -5, None, "abs", [abs]], ids=str)
def test_what_is_no_function(function):
    """It is refused at once. A number is not taken for one that a worker knows functions by."""
    with ProcessPool(1) as pool:
        assert pool.submit(abs, -1).result(30) == 1
        with pytest.raises(TypeError, match="a pool calls functions, not "):
            pool.submit(function, -5)
        assert pool.numbers.crashed == 0


async def test_a_number_is_no_function_for_a_worker(desk):
    """Not even where nobody has looked at it before: the call fails, and not the worker."""
    await desk.value(abs, -1)
    error = (await desk.ask(0, -5)).error
    assert error is not None
    assert error.types[0] == "TypeError"
    assert desk.pool.numbers.crashed == 0


ASYNC_FUNCTIONS = pytest.mark.parametrize(
    "function",
    [later, functools.partial(later), AsyncTool(), AsyncTool().method],
    ids=["plain", "partial", "object", "method"],
)


@ASYNC_FUNCTIONS
def test_an_async_function(function):
    """A worker runs one to its end: what it returns is the result of the call, also in a chunk of calls."""
    with ProcessPool(1) as pool:
        assert pool.submit(function, 1).result(30) == 2
        assert pool.submit_within(30, function, 2).result(30) == 4
        for chunksize in (1, 2):
            assert list(pool.map(function, range(5), timeout=30, chunksize=chunksize)) == [0, 2, 4, 6, 8]


def test_an_async_initializer():
    """It has run to its end before the first call."""
    with ProcessPool(1, initializer=ask_ahead, initargs=(3,)) as pool:
        assert pool.submit(what_was_asked).result(30) == [6]


@ASYNC_FUNCTIONS
async def test_an_async_function_for_a_thread(function):
    """It is refused, instead of making a coroutine that nobody awaits."""
    manager = get_executor_manager(ManagerSettings(cpu_workers=1, io_workers=1))
    with pytest.raises(TypeError, match=r"is async.*await it"):
        await manager.run_io_intensive(function, 1)
    await manager.shutdown()


def test_a_limit_of_one_call():
    """It is checked like the pool's own."""
    with ProcessPool(1) as pool:
        with pytest.raises(TypeError, match="timeout_s must be a number of seconds, not '1'"):
            pool.submit_within("1", deeds.echo, 1)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="timeout_s must be greater than 0, not 0"):
            pool.submit_within(0, deeds.echo, 1)
