"""Executors of the standard library and ours: how they end, and how their workers begin and end."""

import collections
import concurrent.futures
import gc
import os
from concurrent.futures.process import BrokenProcessPool

import pytest

from tests.execution import deeds
from tests.execution.kinds import EVERY, PATIENCE_S, PROCESS, PROCESSES, THREADS

pytestmark = pytest.mark.spec("MGR-04")

# --- the end ----------------------------------------------------------------------------------------------------------


@EVERY
def test_nothing_after_a_shutdown(make):
    """After a shutdown a submit is a RuntimeError; to shut down again does no harm."""
    pool = make(1)
    pool.shutdown()
    pool.shutdown()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        pool.submit(pow, 2, 5)


@EVERY
def test_a_shutdown_waits_for_all_work(make):
    """Leaving the block waits until what was submitted is done."""
    with make(2) as pool:
        futures = [pool.submit(deeds.echo, n) for n in range(50)]
    assert [future.result(timeout=0) for future in futures] == list(range(50))


@EVERY
def test_a_shutdown_that_does_not_wait(make, stage):
    """With `wait=False` shutdown returns at once, and the work is done all the same."""
    pool = make(1)
    futures = [pool.submit(deeds.hold, (stage.began, stage.gate), 1), pool.submit(deeds.echo, 2)]
    stage.wait_until_begun()
    pool.shutdown(wait=False)
    assert not futures[0].done()
    stage.let_go()
    assert [future.result(PATIENCE_S) for future in futures] == [1, 2]


@EVERY
def test_a_shutdown_that_cancels(kind, make, stage):
    """With `cancel_futures` what runs is done and what waits is cancelled. (With ours whoever waits for several futures
    hears of it; the standard library forgets to tell.)"""
    pool = make(1)
    running = pool.submit(deeds.hold, (stage.began, stage.gate), 1)
    waiting = [pool.submit(deeds.echo, n) for n in range(10)]
    stage.wait_until_begun()
    pool.shutdown(wait=False, cancel_futures=True)
    stage.let_go()
    assert running.result(PATIENCE_S) == 1
    pool.shutdown()
    assert sum(future.cancelled() for future in waiting) >= 8
    if not kind.startswith("stdlib"):
        assert concurrent.futures.wait(waiting, timeout=0).not_done == set()


@pytest.mark.parametrize("kind", [kind for kind in (*PROCESSES, *THREADS) if kind != "stdlib"], scope="module")
def test_a_cancelled_future_does_not_hold_up_the_shutdown(make):
    """A shutdown right after a cancel ends. (Now and then the standard library's does not, in Python 3.11.2.)"""
    pool = make(1)
    assert pool.submit(int).result(PATIENCE_S) == 0
    pool.submit(int).cancel()
    pool.shutdown()


@PROCESS
def test_a_pool_that_nobody_holds(make):
    """A pool that is dropped without a shutdown still does its work."""
    pool = make(1)
    futures = [pool.submit(deeds.echo, n) for n in range(5)]
    del pool
    gc.collect()
    assert [future.result(PATIENCE_S) for future in futures] == list(range(5))


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*PROCESSES, "stdlib-threads"], scope="module")
def test_an_initializer(make):
    """The initializer is called in every worker, with its arguments, before the first call."""
    with make(1, initializer=deeds.set_mark, initargs=("here",)) as pool:
        assert pool.submit(deeds.get_mark).result(PATIENCE_S)[0] == "here"


@PROCESS
def test_workers_with_few_tasks_each(make):
    """With `max_tasks_per_child` no worker serves more calls than that."""
    with make(1, max_tasks_per_child=2) as pool:
        pids = [pool.submit(os.getpid).result(PATIENCE_S) for _ in range(6)]
    assert max(collections.Counter(pids).values()) <= 2
    with pytest.raises(ValueError, match="must be"):
        make(1, max_tasks_per_child=0)


@PROCESS
def test_an_initializer_that_fails(make):
    """When workers cannot be set up, calls raise BrokenProcessPool instead of waiting for ever."""
    with make(1, initializer=deeds.fail, initargs=(deeds.Custom, 1)) as pool:
        future = pool.submit(deeds.echo, 1)
        with pytest.raises(BrokenProcessPool):
            future.result(PATIENCE_S)


@PROCESS
@pytest.mark.spec("MGR-06")
def test_a_dead_worker(make):
    """A worker that dies is a BrokenProcessPool for its call, and no exception of the function."""
    with make(1) as pool:
        exc = pool.submit(deeds.die).exception(PATIENCE_S)
    assert isinstance(exc, BrokenProcessPool)
