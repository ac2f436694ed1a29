"""What callers of `concurrent.futures` rely on: the same tests for the standard library's executors and for ours."""

import asyncio
import concurrent.futures
import functools
import pickle
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import pytest

from tests.execution import deeds
from tests.execution.kinds import EVERY, PATIENCE_S, PROCESS, Maker

pytestmark = pytest.mark.spec("MGR-04")


@pytest.fixture(scope="module")
def pool(make: Maker) -> Iterator[Executor]:
    """Two workers, for as many tests as like them."""
    with make(2) as pool:
        yield pool


@pytest.fixture
def single(make: Maker) -> Iterator[Executor]:
    """One worker, for one test."""
    with make(1) as pool:
        yield pool


@pytest.fixture
def held(single, stage):
    """A call that runs on the only worker, until the test lets it go."""
    future = single.submit(deeds.hold, (stage.began, stage.gate), "held")
    stage.wait_until_begun()
    yield future
    if not future.done():
        stage.let_go()


# --- submit -----------------------------------------------------------------------------------------------------------


@EVERY
def test_submit(pool):
    """A submitted call gives its result."""
    assert pool.submit(pow, 2, 8).result(PATIENCE_S) == 256


@EVERY
def test_keywords(pool):
    """Keyword arguments reach the function, also those named like parameters of `submit`."""
    future = pool.submit(deeds.show, 1, self=2, fn=3, timeout_s=4)
    assert future.result(PATIENCE_S) == ((1,), {"self": 2, "fn": 3, "timeout_s": 4})
    with pytest.raises(TypeError):
        pool.submit(fn=deeds.show)


@EVERY
def test_partial_functions(pool):
    """A partial function is called with what it holds."""
    assert pool.submit(functools.partial(pow, 2), 5).result(PATIENCE_S) == 32


@EVERY
@pytest.mark.parametrize("count", [0, -1])
def test_a_pool_needs_workers(make, count):
    """A pool of no workers is refused."""
    with pytest.raises(ValueError, match="max_workers must be greater than 0"):
        make(count)


@EVERY
def test_from_many_threads(pool):
    """Many threads submit to one pool, and each gets its own results."""
    wrong: list[tuple[int, int]] = []

    def use(number: int) -> None:
        futures = [pool.submit(deeds.echo, (number, n)) for n in range(20)]
        wrong.extend(future.result() for n, future in enumerate(futures) if future.result(PATIENCE_S) != (number, n))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []


@EVERY
@pytest.mark.spec("MGR-14")
async def test_run_in_executor(pool):
    """`loop.run_in_executor` works, with results and exceptions."""
    loop = asyncio.get_running_loop()
    results = await asyncio.gather(*(loop.run_in_executor(pool, deeds.echo, n) for n in range(50)))
    assert results == list(range(50))
    with pytest.raises(deeds.Custom):
        await loop.run_in_executor(pool, deeds.fail, deeds.Custom, 3)


# --- map --------------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("chunksize", [1, 3, 10, 50])
def test_map(pool, chunksize):
    """`map` gives what the builtin gives, in order, whatever the chunks."""
    expected = list(map(pow, range(10), range(10)))
    assert list(pool.map(pow, range(10), range(10), chunksize=chunksize)) == expected


@EVERY
def test_map_of_generators(pool):
    """Iterables may be generators of different lengths: the shortest counts. They are read before `map` returns."""
    read: list[int] = []

    def numbers():
        for n in range(5):
            read.append(n)
            yield n

    results = pool.map(pow, numbers(), iter([2, 2, 2]), chunksize=2)
    assert read[:3] == [0, 1, 2]
    assert list(results) == [0, 1, 4]
    assert list(pool.map(pow, [], [])) == []


@EVERY
def test_map_raises_where_it_failed(pool):
    """What comes before a failure is given; the failure is raised in its place."""
    results = pool.map(divmod, [1, 1, 1, 1], [2, 3, 0, 5])
    assert [next(results), next(results)] == [(0, 1), (0, 1)]
    with pytest.raises(ZeroDivisionError):
        next(results)


@PROCESS
def test_chunks_of_less_than_one(pool):
    """A chunk has at least one item."""
    with pytest.raises(ValueError, match="chunksize must be >= 1"):
        pool.map(pow, range(4), range(4), chunksize=0)


@EVERY
def test_map_has_a_timeout(single, held):
    """Results that are not there in time are a TimeoutError."""
    results = single.map(deeds.echo, [1], timeout=0)
    with pytest.raises(concurrent.futures.TimeoutError):
        next(results)


@EVERY
def test_giving_up_a_map_cancels_the_rest(kind, single, stage, held, tmp_path):
    """What has not begun when a map fails never does. (The standard library's processes fetch two calls ahead.)"""
    paths = [tmp_path / str(n) for n in range(20)]
    results = single.map(deeds.touch, map(str, paths), timeout=0)
    with pytest.raises(concurrent.futures.TimeoutError):
        next(results)
    stage.let_go()
    assert held.result(PATIENCE_S) == "held"
    single.shutdown()
    assert sum(path.exists() for path in paths) <= (2 if kind == "stdlib" else 0)


# --- futures ----------------------------------------------------------------------------------------------------------


@EVERY
def test_a_future_has_states(single, stage, held):
    """A future is pending, running, done; and its result can be waited for with a limit."""
    waiting = [single.submit(deeds.echo, n) for n in range(4)]
    assert (held.running(), held.done(), held.cancelled()) == (True, False, False)
    assert (waiting[-1].running(), waiting[-1].done()) == (False, False)
    with pytest.raises(concurrent.futures.TimeoutError):
        waiting[-1].result(timeout=0)
    stage.let_go()
    assert [future.result(PATIENCE_S) for future in waiting] == [0, 1, 2, 3]
    assert (held.running(), held.done(), held.exception()) == (False, True, None)


@EVERY
def test_cancel_works_until_it_runs(single, stage, held):
    """What waits can be cancelled, what runs cannot; those who wait for several futures hear of it."""
    waiting = [single.submit(deeds.echo, n) for n in range(5)]
    assert not held.cancel()
    assert waiting[-1].cancel()
    assert waiting[-1].cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        waiting[-1].result()
    stage.let_go()
    done = concurrent.futures.wait([held, *waiting], timeout=PATIENCE_S)
    assert not done.not_done
    assert [future.result() for future in waiting[:-1]] == [0, 1, 2, 3]


@EVERY
def test_callbacks(single, stage, held):
    """Callbacks get their future once, in the order they were added, also when one raises; late ones at once."""
    heard: list[Any] = []
    all_heard = threading.Event()
    held.add_done_callback(lambda future: heard.append(("first", future)))
    held.add_done_callback(lambda _: 1 / 0)
    held.add_done_callback(lambda future: heard.append(("second", future)))
    held.add_done_callback(lambda _: all_heard.set())
    stage.let_go()
    assert all_heard.wait(PATIENCE_S)
    held.add_done_callback(lambda future: heard.append(("late", future)))
    assert heard == [("first", held), ("second", held), ("late", held)]


@EVERY
def test_a_callback_may_submit(pool):
    """From a callback more work can be submitted to the same pool."""
    got: concurrent.futures.Future[int] = concurrent.futures.Future()

    def go_on(future):
        pool.submit(deeds.echo, future.result() + 1).add_done_callback(lambda more: got.set_result(more.result()))

    pool.submit(deeds.echo, 1).add_done_callback(go_on)
    assert got.result(PATIENCE_S) == 2


@EVERY
def test_waiting_for_several(single, stage, held):
    """`wait` and `as_completed` work: first completed, first exception, all."""
    bad = single.submit(deeds.fail, deeds.Custom, 1)
    good = single.submit(deeds.echo, 1)
    done, not_done = concurrent.futures.wait([held, bad, good], timeout=0)
    assert (done, not_done) == (set(), {held, bad, good})
    stage.let_go()
    done, _ = concurrent.futures.wait([held, bad, good], PATIENCE_S, concurrent.futures.FIRST_EXCEPTION)
    assert bad in done
    assert list(concurrent.futures.as_completed([held, bad, good], PATIENCE_S))
    assert concurrent.futures.wait([held, bad, good], PATIENCE_S).not_done == set()


@EVERY
def test_arguments_are_let_go(single):
    """When a call is over nobody holds its function and arguments any more."""
    collected = threading.Event()
    thing = deeds.Thing()
    reference = weakref.ref(thing, lambda _: collected.set())
    future = single.submit(thing.touch)
    del thing
    assert future.result(PATIENCE_S) is None
    assert collected.wait(PATIENCE_S), reference()


@PROCESS
def test_results_are_let_go(pool):
    """A result that was given out by `map` is not held by it, or by the pool."""
    for thing in pool.map(deeds.make_thing, range(10)):
        collected = threading.Event()
        reference = weakref.finalize(thing, collected.set)
        del thing
        assert collected.wait(PATIENCE_S), reference


# --- exceptions -------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize(
    ("kind_of", "args"),
    [(ValueError, ("no",)), (KeyError, (1, 2)), (deeds.Custom, (7,)), (SystemExit, (3,)), (KeyboardInterrupt, ())],
)
def test_what_the_function_raised(pool, kind_of, args):
    """An exception comes back as what it was, with its arguments."""
    exc = pool.submit(deeds.fail, kind_of, *args).exception(PATIENCE_S)
    assert type(exc) is kind_of
    assert exc.args == args


@PROCESS
def test_the_traceback_of_the_worker_is_the_cause(pool):
    """What a worker raised shows where it was raised there, and each future has an exception of its own."""
    first, second = (pool.submit(deeds.fail, deeds.Custom, 5).exception(PATIENCE_S) for _ in range(2))
    assert first is not second
    assert first.code == 5
    assert "raise kind(*args)" in str(first.__cause__)


UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


@PROCESS
def test_what_cannot_be_sent(pool):
    """A function, an argument or a result that cannot be pickled raises, and the pool goes on."""
    for future in (pool.submit(lambda: 1), pool.submit(deeds.echo, threading.Lock()), pool.submit(deeds.lock)):
        assert isinstance(future.exception(PATIENCE_S), UNPICKLABLE)
        assert pool.submit(deeds.echo, 1).result(PATIENCE_S) == 1
