"""Objects of a `multiprocessing.Manager`, used from worker processes."""

import multiprocessing
import os
from typing import Any

import pytest

from tests.execution.kinds import PATIENCE_S, PROCESS, Maker


def put(shared: Any, key: str, value: Any) -> int:
    shared[key] = value
    return os.getpid()


def put_in_queue(queue: Any, value: Any) -> None:
    queue.put(value)


def add_under_lock(lock: Any, numbers: Any) -> None:
    with lock:
        numbers.append(len(numbers))


@pytest.fixture(scope="module")
def manager():
    with multiprocessing.get_context("spawn").Manager() as manager:
        yield manager


@pytest.fixture(scope="module")
def pool(make: Maker):
    with make(1) as pool:
        yield pool


@PROCESS
def test_a_dict(pool, manager):
    """A worker writes to a dict of a manager, and its host reads it."""
    shared = manager.dict()
    pid = pool.submit(put, shared, "one", 1).result(PATIENCE_S)
    assert pid != os.getpid()
    assert shared.copy() == {"one": 1}


@PROCESS
def test_a_queue(pool, manager):
    """A worker puts values into a queue of a manager."""
    queue = manager.Queue()
    pool.submit(put_in_queue, queue, "hello").result(PATIENCE_S)
    assert queue.get(timeout=PATIENCE_S) == "hello"


@PROCESS
def test_a_lock(pool, manager):
    """Workers take a lock of a manager in turn."""
    lock, numbers = manager.Lock(), manager.list()
    for future in [pool.submit(add_under_lock, lock, numbers) for _ in range(3)]:
        future.result(PATIENCE_S)
    assert list(numbers) == [0, 1, 2]


@PROCESS
def test_given_to_the_initializer(make: Maker, manager):
    """An initializer can use an object of a manager."""
    shared = manager.dict()
    with make(1, initializer=put, initargs=(shared, "ready", True)) as pool:
        assert pool.submit(abs, -1).result(PATIENCE_S) == 1
    assert shared.copy() == {"ready": True}
