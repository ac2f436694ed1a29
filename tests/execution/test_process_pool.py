"""`ProcessPool`: what it promises beyond the standard library's."""

import concurrent.futures
import gc
import multiprocessing
import os
import threading
from concurrent.futures.process import BrokenProcessPool

import pytest

from taskyard.futures import (
    CallKilled,
    CallTimedOut,
    CannotCross,
    PoolForked,
    ProcessPool,
    RemoteError,
    WorkerDied,
)
from tests.execution import deeds, misdeeds
from tests.execution.census import is_alive, open_fds

PATIENCE_S = 30

BOTH = pytest.mark.parametrize("portable", [False, True], ids=["nursery", "portable"])


@pytest.fixture
def pool():
    with ProcessPool(1) as pool:
        yield pool


def begin(pool, stage):
    """A call that runs; and its worker."""
    future = pool.submit(deeds.hold, (stage.began, stage.gate), "held")
    return future, int(stage.wait_until_begun())


def pool_threads():
    return [thread for thread in threading.enumerate() if thread.name == "taskyard-pool"]


# --- crashes ----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.spec("MGR-06", "MGR-08")
def test_a_crash_touches_one_call(portable):
    """Of many calls only those whose worker died raise, and what they raise says how it died."""
    with ProcessPool(2, portable=portable) as pool:
        futures = [pool.submit(deeds.die) if n % 5 == 3 else pool.submit(deeds.echo, n) for n in range(20)]
        for n, future in enumerate(futures):
            if n % 5 == 3:
                with pytest.raises(WorkerDied, match="die was not finished: its worker process exited with code 9"):
                    future.result(PATIENCE_S)
            else:
                assert future.result(PATIENCE_S) == n
        assert pool.numbers.crashed == 4
    assert issubclass(WorkerDied, BrokenProcessPool)


def test_a_running_call_survives_the_crash_of_another(stage):
    """A call that runs in another worker does not notice."""
    with ProcessPool(2) as pool:
        held, _ = begin(pool, stage)
        assert isinstance(pool.submit(misdeeds.segfault).exception(PATIENCE_S), WorkerDied)
        assert pool.submit(deeds.echo, 1).result(PATIENCE_S) == 1
        stage.let_go()
        assert held.result(PATIENCE_S) == "held"


def test_a_memory_limit():
    """What wants more memory than its worker may have gets a MemoryError that names the limit."""
    with ProcessPool(1, memory_limit=512 << 20) as pool:
        with pytest.raises(MemoryError, match="limit of 512 MiB"):
            pool.submit(misdeeds.take_memory, 1 << 30).result(PATIENCE_S)
        assert pool.submit(misdeeds.take_memory, 100 << 20).result(PATIENCE_S) == 100 << 20


def test_workers_are_recycled():
    """After so many calls a worker is replaced, also in the middle of a long queue."""
    with ProcessPool(1, max_tasks_per_child=2) as pool:
        pids = [future.result(PATIENCE_S) for future in [pool.submit(os.getpid) for _ in range(10)]]
        assert len(set(pids)) >= 5
        assert pool.numbers.recycled == 5


# --- ending a call ----------------------------------------------------------------------------------------------------


@BOTH
def test_a_hard_timeout(portable, stage):
    """A call that runs too long raises a TimeoutError when its process is gone; the next one runs."""
    with ProcessPool(1, timeout_s=0.3, portable=portable) as pool:
        held, pid = begin(pool, stage)
        with pytest.raises(CallTimedOut, match="hold was ended: it ran longer than its timeout of") as raised:
            held.result(PATIENCE_S)
        assert isinstance(raised.value, concurrent.futures.TimeoutError)
        assert not is_alive(pid)
        assert pool.submit(deeds.echo, 1).result(PATIENCE_S) == 1


def test_a_timeout_of_its_own(pool):
    """One call can have another limit than its pool."""
    with pytest.raises(CallTimedOut):
        pool.submit_within(0.05, misdeeds.hang).result(PATIENCE_S)
    assert pool.submit_within(None, deeds.echo, 1).result(PATIENCE_S) == 1


def test_a_timeout_of_the_function_is_its_own(pool):
    """A TimeoutError that the function raises is not taken for ours."""
    exc = pool.submit(deeds.fail, TimeoutError, "mine").exception(PATIENCE_S)
    assert type(exc) is TimeoutError


def test_a_running_call_can_be_killed(pool, stage):
    """`kill` ends what runs, cancels what waits, and says whether there was anything to end."""
    held, pid = begin(pool, stage)
    waiting = pool.submit(deeds.echo, 1)
    assert waiting.kill()
    assert waiting.cancelled()
    assert held.kill()
    with pytest.raises(CallKilled, match="its future was told to"):
        held.result(PATIENCE_S)
    assert not is_alive(pid)
    assert not held.kill()
    assert pool.submit(deeds.echo, 2).result(PATIENCE_S) == 2


def test_killing_all(stage):
    """`kill_workers` ends the pool now: what runs is killed, what waits is cancelled, nothing is left."""
    pool = ProcessPool(1)
    held, pid = begin(pool, stage)
    waiting = [pool.submit(deeds.echo, n) for n in range(3)]
    pool.kill_workers()
    with pytest.raises(CallKilled, match="its pool was told to kill its workers"):
        held.result(timeout=0)
    assert all(future.cancelled() for future in waiting)
    assert not is_alive(pid)
    with pytest.raises(RuntimeError):
        pool.submit(deeds.echo, 1)


def test_ctrl_c_in_a_block_does_not_wait(stage):
    """A KeyboardInterrupt that leaves the block ends what runs, as it ends the standard library's workers."""
    pool = ProcessPool(1)
    held, _ = begin(pool, stage)
    with pytest.raises(KeyboardInterrupt), pool:
        raise KeyboardInterrupt
    with pytest.raises(CallKilled, match="its host was interrupted"):
        held.result(timeout=0)


# --- what cannot cross ------------------------------------------------------------------------------------------------


@pytest.mark.spec("MGR-05")
def test_what_cannot_be_sent_is_named(pool):
    """The error names the function and says what to do; it is a ValueError, and a PicklingError as well."""
    for function, args, name in ((lambda: 1, (), "<lambda>"), (deeds.echo, (threading.Lock(),), "echo")):
        with pytest.raises(
            ValueError, match=f"{name} cannot run in a worker process: .*top level of a module"
        ) as raised:
            pool.submit(function, *args).result(PATIENCE_S)
        assert isinstance(raised.value, CannotCross)
        assert not raised.value.has_run


@pytest.mark.spec("MGR-05")
def test_a_result_that_cannot_be_sent(pool):
    """A result that cannot come back is told apart from a call that was not made."""
    why = "lock has run in a worker process, but its result could not be sent back"
    with pytest.raises(CannotCross, match=rf"{why}.*; return what can be pickled") as raised:
        pool.submit(deeds.lock).result(PATIENCE_S)
    assert raised.value.has_run


@pytest.mark.spec("MGR-05")
def test_a_type_error_of_the_function_is_its_own(pool):
    """What the function raises is not mistaken for trouble with pickling, whatever its type."""
    for function, kind in ((deeds.type_error, TypeError), (misdeeds.Unfindable(), CannotCross)):
        assert type(pool.submit(function).exception(PATIENCE_S)) is kind
    exc = pool.submit(deeds.fail, ValueError, "mine").exception(PATIENCE_S)
    assert type(exc) is ValueError


@pytest.mark.parametrize(("kind", "args"), [(deeds.OneWay, ("a", "b")), (deeds.Stuck, ())])
def test_an_exception_that_cannot_come_back(pool, kind, args):
    """What cannot be pickled, or not be read again, is a RemoteError that says what it was and where."""
    with pytest.raises(RemoteError, match=kind.__name__) as raised:
        pool.submit(deeds.fail, kind, *args).result(PATIENCE_S)
    assert raised.value.types[0] == kind.__name__
    assert "raise kind(*args)" in str(raised.value.__cause__)


def test_many_that_cannot_be_sent(pool):
    """A long row of them is answered one after the other, without deep recursion."""
    futures = [pool.submit(lambda: 1) for _ in range(3000)]
    assert all(isinstance(future.exception(PATIENCE_S), CannotCross) for future in futures)
    assert pool.submit(deeds.echo, 1).result(PATIENCE_S) == 1


def test_an_initializer_that_fails_is_named():
    """Who waits for a worker is told what its initializer raised: some messages say nothing without their class."""
    with ProcessPool(1, initializer=deeds.fail, initargs=(KeyError, "k")) as pool:
        future = pool.submit(abs, 1)
    with pytest.raises(WorkerDied, match=r"a worker process could not start: KeyError: 'k' \("):
        future.result(PATIENCE_S)


def test_an_initializer_that_cannot_be_sent():
    """It is refused when the pool is made."""
    with pytest.raises(CannotCross, match="set_mark"):
        ProcessPool(1, initializer=deeds.set_mark, initargs=(threading.Lock(),))
    with pytest.raises(TypeError, match="initializer must be a callable"):
        ProcessPool(1, initializer="no")  # type: ignore[arg-type]


def test_every_worker_is_initialized():
    """Also those that take the place of others."""
    with ProcessPool(1, initializer=deeds.set_mark, initargs=("here",), max_tasks_per_child=1) as pool:
        seen = [pool.submit(deeds.get_mark).result(PATIENCE_S) for _ in range(4)]
    assert {mark for mark, _ in seen} == {"here"}
    assert len({pid for _, pid in seen}) == 4


def test_start_methods():
    """A context of `multiprocessing` says how workers start, except by forking the host."""
    for method in ("spawn", "forkserver"):
        with ProcessPool(1, multiprocessing.get_context(method)) as pool:
            assert pool.submit(deeds.echo, method).result(PATIENCE_S) == method
    with pytest.raises(ValueError, match="never forks the process it serves"):
        ProcessPool(1, multiprocessing.get_context("fork"))


# --- life -------------------------------------------------------------------------------------------------------------


def test_a_pool_starts_when_it_is_used():
    """Until the first submit there is no thread and no process; after the last shutdown there is neither."""
    with ProcessPool(1) as warm:
        warm.submit(int).result(PATIENCE_S)  # the nursery stays
    gc.collect()
    fds = open_fds()
    before = len(pool_threads())
    pool = ProcessPool(1)
    assert len(pool_threads()) == before
    assert pool.numbers.workers == 0
    pid = pool.submit(os.getpid).result(PATIENCE_S)
    assert len(pool_threads()) == before + 1
    pool.shutdown()
    assert len(pool_threads()) == before
    assert not is_alive(pid)
    assert open_fds() == fds


def test_a_dropped_pool_ends(stage):
    """A pool that nobody holds any more ends its thread and workers when its work is done."""
    pool = ProcessPool(1)
    held, pid = begin(pool, stage)
    ended = pool.ended
    del pool
    gc.collect()
    assert not ended.done()
    stage.let_go()
    ended.result(PATIENCE_S)
    assert held.result(timeout=0) == "held"
    assert not is_alive(pid)


def test_numbers(stage):
    """The numbers are those of the moment."""
    with ProcessPool(1) as pool:
        held, _ = begin(pool, stage)
        waiting = [pool.submit(deeds.echo, n) for n in range(3)]
        numbers = pool.numbers
        assert (numbers.active, numbers.queued, numbers.done) == (1, 3, 0)
        stage.let_go()
        concurrent.futures.wait([held, *waiting], PATIENCE_S)
        assert (pool.numbers.active, pool.numbers.queued, pool.numbers.done) == (0, 0, 4)


def test_a_shutdown_from_a_callback_does_not_wait_for_itself(pool):
    """It is refused with a RuntimeError, where it would wait for ever; the pool ends all the same."""
    said: list[BaseException] = []

    def end(_):
        try:
            pool.shutdown()
        except RuntimeError as exc:
            said.append(exc)

    pool.submit(deeds.echo).add_done_callback(end)
    pool.ended.result(PATIENCE_S)
    assert "current thread" in str(said[0])


def test_a_pool_in_use_is_refused_after_a_fork(pool):
    """In a forked child the parent's pool says so at once and does not hang; one not used before works there."""
    assert pool.submit(deeds.echo, 1).result(PATIENCE_S) == 1
    fresh = ProcessPool(1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pool.shutdown()
            try:
                pool.submit(deeds.echo, 1)
            except PoolForked:
                code = fresh.submit(deeds.echo, 0).result(PATIENCE_S)
                fresh.shutdown()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.submit(deeds.echo, 2).result(PATIENCE_S) == 2


def test_a_shutdown_among_submits():
    """When a pool is shut down while threads submit, each of them is refused in the end, and no future is forgotten."""
    pool = ProcessPool(2)
    futures: list[concurrent.futures.Future[int]] = []
    is_busy = threading.Event()

    def submit() -> None:
        while True:
            try:
                futures.append(pool.submit(deeds.echo, 1))
            except RuntimeError:
                return
            if len(futures) >= 200:
                is_busy.set()

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert is_busy.wait(PATIENCE_S)
    pool.shutdown(wait=False, cancel_futures=True)
    for thread in threads:
        thread.join(PATIENCE_S)
    pool.shutdown()
    assert all(future.done() for future in futures)
    assert {future.result() for future in futures if not future.cancelled()} <= {1}


def test_callers_are_told_in_order():
    """Answers that are told together are told in the order in which they came."""
    with ProcessPool(1) as pool:
        told: list[int] = []
        for n in range(300):
            pool.submit(deeds.echo, n).add_done_callback(lambda future: told.append(future.result()))
    assert told == list(range(300))
