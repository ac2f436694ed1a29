"""The dispatcher: limits on time, room and rate; crashes and the circuit; retries, cancels, and what is told."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from taskyard import (
    AlgorithmSpec,
    CircuitPolicy,
    CircuitState,
    ErrorKind,
    ExecutionDispatcher,
    ExecutionError,
    ExecutionHints,
    ExecutionPolicy,
    ExecutionRequest,
    ExecutionResult,
    Incident,
    IncidentKind,
    MockExecutor,
    RetryPolicy,
)
from taskyard.testing.clock import ManualClock
from taskyard.testing.pipe import Pipe
from tests.execution import algorithms

PATIENCE_S = 20


def spec(name: str, *, fallback: str | None = None, **hints: Any) -> AlgorithmSpec:
    return AlgorithmSpec(name, "1.0", execution=ExecutionHints(**hints), fallback=fallback)


class Held:
    """A run of `wait` that is let go when the test says so."""

    def __init__(self, folder: Any) -> None:
        folder.mkdir()
        self.folder = str(folder)
        self.pipes = [Pipe(f"{folder}/began"), Pipe(f"{folder}/gate")]

    async def began(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.pipes[0].is_set():  # noqa: ASYNC110 -- another process writes to it
                await asyncio.sleep(0.001)

    def let_go(self) -> None:
        self.pipes[1].write()


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


def begin(dispatcher: ExecutionDispatcher, *args: Any, **fields: Any) -> asyncio.Task[ExecutionResult]:
    return asyncio.get_running_loop().create_task(dispatcher.run(*args, **fields))


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-05")
@pytest.mark.parametrize(("own_s", "asked_s"), [(60, 0.1), (0.1, 60), (0.1, None), (None, 0.1)])
async def test_the_smaller_timeout_holds_and_is_told(dispatch, hold, own_s, asked_s):
    """A run is ended at the smaller of the algorithm's and the request's timeout; an incident says so."""
    told: list[Incident] = []
    dispatcher = dispatch((algorithms.wait, spec("wait", isolated_pool=True, timeout_s=own_s)), on_incident=told.append)
    result = await dispatcher.run("wait", hold().folder, request_id="r", trace_id="t", timeout_s=asked_s)
    assert result.error.kind is ErrorKind.TIMEOUT
    assert "0.1 s" in result.error.message
    [incident] = told
    assert (incident.kind, incident.algorithm, incident.version) == (IncidentKind.TIMEOUT, "wait", "1.0")
    assert (incident.request_id, incident.trace_id) == ("r", "t")
    assert incident.worker_pid == result.worker_pid != None  # noqa: E711


@pytest.mark.spec("EXE-05")
@pytest.mark.parametrize("place", ["thread", "process", "isolated"])
async def test_waiting_for_a_worker_has_a_limit_of_its_own(dispatch, hold, place):
    """A request that finds no free worker in time is `timeout` without having run; who holds the worker is not hurt."""
    dispatcher = dispatch((algorithms.wait, spec("wait", executor=place, max_workers=1)))
    held = hold()
    running = begin(dispatcher, "wait", held.folder)
    await held.began()
    error = (await dispatcher.run("wait", "never", wait_s=0.05)).error
    assert error.kind is ErrorKind.TIMEOUT
    assert "no worker was free" in error.message
    held.let_go()
    assert (await running).data == "!"


@pytest.mark.spec("EXE-05")
async def test_what_is_left_of_the_wait_is_for_the_executor(dispatch):
    """The limit covers both waits, for the algorithm's own turn and for a worker: the executor gets what is left."""
    mock = MockExecutor(otherwise=None)
    dispatcher = dispatch((algorithms.double, spec("double", wait_s=60)), executors={"process": mock})
    await dispatcher.run("double", 1, wait_s=5)
    await dispatcher.run("double", 1)
    first, second = (request.wait_s or 0.0 for request in mock.requests)
    assert 4 < first <= 5
    assert 59 < second <= 60


# --- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-06", "EXE-16")
@pytest.mark.parametrize("place", ["thread", "process", "isolated"])
async def test_a_full_queue_rejects(dispatch, hold, place):
    """`max_workers` run and `queue_limit` wait; one more is `rejected` unrun, and what waited runs."""
    dispatcher = dispatch((algorithms.wait, spec("wait", executor=place, max_workers=1, queue_limit=1)))
    first, second = hold(), hold()
    running = begin(dispatcher, "wait", first.folder)
    await first.began()
    waiting = begin(dispatcher, "wait", second.folder)
    await asyncio.sleep(0)
    assert (await dispatcher.run("wait", "never")).error.kind is ErrorKind.REJECTED
    if place != "isolated":
        health = dispatcher.health()["wait"]
        assert (health.place, health.active, health.queued) == (place, 1, 1)
    assert not second.pipes[0].is_set()
    first.let_go()
    await second.began()
    second.let_go()
    assert [(await one).data for one in (running, waiting)] == ["!", "!"]


@pytest.mark.spec("EXE-06")
async def test_a_caller_that_goes_gives_its_turn_to_the_next(dispatch, hold):
    """Neither a caller who is cancelled while waiting nor one who just got the turn takes it along."""
    dispatcher = dispatch((algorithms.wait, spec("wait", executor="thread", max_workers=1)))
    first, last = hold(), hold()
    running = begin(dispatcher, "wait", first.folder)
    await first.began()
    gone = begin(dispatcher, "wait", "never")
    waiting = begin(dispatcher, "wait", last.folder)
    await asyncio.sleep(0)
    gone.cancel()
    first.let_go()
    await running
    await last.began()
    last.let_go()
    assert (await waiting).data == "!"
    assert gone.cancelled()
    assert dispatcher.health()["wait"].active == 0


@pytest.mark.spec("EXE-16", "EXE-06")
async def test_a_rate_limit_rejects_and_says_when_to_come_again(dispatch):
    """Two a second, two at once: the third is `rejected` with the time to wait, after which one more passes."""
    clock = ManualClock()
    mock = MockExecutor(otherwise=None)
    dispatcher = dispatch(
        (algorithms.double, spec("double", rate_limit=2)), executors={"process": mock}, monotonic=clock.monotonic
    )
    assert [(await dispatcher.run("double", n)).success for n in range(3)] == [True, True, False]
    error = (await dispatcher.run("double", 4)).error
    assert (error.kind, error.details) == (ErrorKind.REJECTED, {"retry_after_s": 0.5})
    clock.advance(0.5)
    assert (await dispatcher.run("double", 5)).success
    assert not (await dispatcher.run("double", 6)).success
    assert len(mock.requests) == 3


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-15", "EXE-05", "EXE-08")
async def test_the_circuit_opens_on_crashes_and_closes_by_itself(dispatch):
    """Three dead workers in a row, and requests are rejected early; after the cool-down a trial closes it."""
    clock = ManualClock()
    told: list[Incident] = []
    dispatcher = dispatch(
        (algorithms.crash, spec("crash")),
        circuit=CircuitPolicy(crashes=3, cool_down_s=30),
        monotonic=clock.monotonic,
        on_incident=told.append,
    )
    for _ in range(3):
        assert (await dispatcher.run("crash", True)).error.kind is ErrorKind.SYSTEM
    assert dispatcher.health()["crash"].circuit is CircuitState.OPEN
    clock.advance(10)
    refused = await dispatcher.run("crash", False)
    assert (refused.error.kind, refused.error.details) == (ErrorKind.REJECTED, {"retry_after_s": 20.0})
    assert "crashed 3 times" in refused.error.message
    assert refused.worker_pid is None
    clock.advance(20)
    assert (await dispatcher.run("crash", True)).error.kind is ErrorKind.SYSTEM
    assert (await dispatcher.run("crash", False)).error.kind is ErrorKind.REJECTED
    clock.advance(30)
    assert (await dispatcher.run("crash", False)).data == "fine"
    assert dispatcher.health()["crash"].circuit is CircuitState.CLOSED
    crash, opened, closed = IncidentKind.CRASH, IncidentKind.CIRCUIT_OPENED, IncidentKind.CIRCUIT_CLOSED
    assert [incident.kind for incident in told] == [crash, crash, crash, opened, crash, closed]


@pytest.mark.spec("EXE-15")
async def test_an_open_circuit_may_have_a_fallback(dispatch):
    """While it rests, the named algorithm answers in its place and says so; its own circuit is another."""
    dispatcher = dispatch(
        (algorithms.crash, spec("crash", executor="ours", fallback="spare")),
        (algorithms.double, spec("spare", executor="ours")),
        executors={"ours": MockExecutor({"crash": SYSTEM, "spare": "instead"})},
        circuit=CircuitPolicy(crashes=1),
    )
    assert (await dispatcher.run("crash", True)).error.kind is ErrorKind.SYSTEM
    result = await dispatcher.run("crash", True)
    assert (result.success, result.data) == (True, "instead")
    assert result.note.startswith("answered by 'spare': algorithm 'crash' has crashed 1 times")


SYSTEM = ExecutionError(kind=ErrorKind.SYSTEM, message="its worker died")


@pytest.mark.spec("EXE-15")
async def test_two_that_stand_in_for_each_other_do_not_turn_in_circles(dispatch):
    """When both rest, the request is rejected."""
    dispatcher = dispatch(
        (algorithms.crash, spec("one", executor="ours", fallback="other")),
        (algorithms.crash, spec("other", executor="ours", fallback="one")),
        executors={"ours": MockExecutor(otherwise=SYSTEM)},
        circuit=CircuitPolicy(crashes=1),
    )
    await dispatcher.run("one", True)
    await dispatcher.run("other", True)
    assert (await dispatcher.run("one", True)).error.kind is ErrorKind.REJECTED


async def test_incidents_are_logged_unless_somebody_listens(dispatch, caplog):
    """A crash leaves a warning with the ids of its request; a listener that fails does no harm."""
    mock = MockExecutor(otherwise=SYSTEM)
    dispatcher = dispatch((algorithms.crash, spec("crash")), executors={"process": mock})
    await dispatcher.run("crash", True, request_id="r-9")
    [line] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert line.getMessage() == "[crash] algorithm crash: its worker died"
    assert line.request_id == "r-9"

    def broken(incident: Incident) -> None:
        raise RuntimeError("no ears")

    deaf = dispatch((algorithms.crash, spec("crash")), executors={"process": mock}, on_incident=broken)
    assert (await deaf.run("crash", True)).error == SYSTEM


async def test_an_executor_that_raises_is_a_system_error(dispatch):
    """Whoever wrote the executor, the caller gets an answer."""

    class Broken(MockExecutor):
        async def submit(self, request: ExecutionRequest) -> ExecutionResult:
            raise KeyError("lost")

    dispatcher = dispatch((algorithms.crash, spec("crash")), executors={"process": Broken()})
    error = (await dispatcher.run("crash", True)).error
    assert (error.kind, error.type) == (ErrorKind.SYSTEM, "KeyError")


# --- policy -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-19")
async def test_a_direct_call_is_tried_once_unless_the_policy_says_otherwise(dispatch, tmp_path):
    """By default the caller hears of the first failure; a policy with retries tries again, and the code sees which."""
    file = tmp_path / "tries"
    file.write_text("3")
    once = dispatch((algorithms.fail_until, spec("f")))
    assert (await once.run("f", str(file))).error.message == "try 1"
    patient = dispatch(
        (algorithms.fail_until, spec("f")), policy=ExecutionPolicy(retry=RetryPolicy(max_retries=2, first_s=0.001))
    )
    assert (await patient.run("f", str(file))).data == 3
    file.write_text("4")
    assert (await patient.run("f", str(file))).error.message == "try 3"


@pytest.mark.parametrize("place", ["thread", "process"])
async def test_the_next_try_finds_what_was_saved(dispatch, place):
    """A checkpoint of a direct call is there for its retries."""
    policy = ExecutionPolicy(retry=RetryPolicy(max_retries=1, first_s=0.001))
    dispatcher = dispatch((algorithms.go_on, spec("go_on", executor=place)), policy=policy)
    assert (await dispatcher.run("go_on", None)).data == {"at": 3}
    other = dispatch((algorithms.go_on, spec("go_on", executor=place)))
    assert (await other.run("go_on", None)).error.message == "once"


@pytest.mark.spec("EXE-19")
async def test_the_policy_can_be_replaced(dispatch):
    """Timeouts and retries are whatever a policy of one's own makes of them."""

    class Ours(ExecutionPolicy):
        def timeout_s(self, spec, request):
            return 7.5

        def retry_after_s(self, error, *, retries, jitter):
            return 0.0 if retries < 4 else None

    mock = MockExecutor(otherwise=SYSTEM)
    dispatcher = dispatch(
        (algorithms.crash, spec("crash")), executors={"process": mock}, policy=Ours(), circuit=CircuitPolicy(crashes=9)
    )
    assert (await dispatcher.run("crash", True)).error == SYSTEM
    assert [request.timeout_s for request in mock.requests] == [7.5] * 5


async def test_a_circuit_that_opens_ends_the_retries(dispatch):
    """What crashes is not tried again and again by its own retries."""
    mock = MockExecutor(otherwise=SYSTEM)
    policy = ExecutionPolicy(retry=RetryPolicy(max_retries=20, first_s=0.0))
    dispatcher = dispatch((algorithms.crash, spec("crash")), executors={"process": mock}, policy=policy)
    assert (await dispatcher.run("crash", True)).error == SYSTEM
    assert len(mock.requests) == 3


# --- cancels ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-07")
@pytest.mark.parametrize("place", ["thread", "process"])
async def test_a_cancel_reaches_the_code(dispatch, place):
    """`cancel` by request id is seen by `context.cancelled`; code that heeds it ends by itself."""
    began = asyncio.Event()
    dispatcher = dispatch(
        (algorithms.hurry, spec("hurry", executor=place)), on_progress=lambda request_id, _: began.set()
    )
    assert not dispatcher.cancel("r")
    running = begin(dispatcher, "hurry", None, request_id="r")
    async with asyncio.timeout(PATIENCE_S):
        await began.wait()
        assert dispatcher.cancel("r")
        assert (await running).data == "ended by itself"
    assert not dispatcher.cancel("r")


@pytest.mark.spec("EXE-07")
async def test_a_cancel_ends_a_wait(dispatch, hold):
    """A request that waits for its turn, or for its next try, is `canceled` at once."""
    policy = ExecutionPolicy(retry=RetryPolicy(max_retries=1, first_s=600, cap_s=600))
    mock = MockExecutor(otherwise=SYSTEM)
    dispatcher = dispatch(
        (algorithms.wait, spec("wait", executor="thread", max_workers=1)),
        (algorithms.crash, spec("crash", executor="ours")),
        executors={"ours": mock},
        policy=policy,
    )
    held = hold()
    running = begin(dispatcher, "wait", held.folder)
    await held.began()
    waiting = begin(dispatcher, "wait", "never", request_id="turn")
    trying = begin(dispatcher, "crash", True, request_id="try")
    await asyncio.sleep(0)
    assert dispatcher.cancel("turn")
    assert dispatcher.cancel("try")
    async with asyncio.timeout(PATIENCE_S):
        errors = [(await one).error for one in (waiting, trying)]
    assert [error and error.kind for error in errors] == [ErrorKind.CANCELED] * 2
    held.let_go()
    await running
