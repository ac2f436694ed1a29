"""The dispatcher: limits on time, room and rate; crashes and the circuit, and what is told."""

import asyncio
import logging
from typing import Any

import pytest

from taskyard import (
    Algorithm,
    AlgorithmContext,
    ErrorKind,
    ExecutionDispatcher,
    ExecutionRequest,
    ExecutionResult,
    MockExecutor,
    NoopExecutor,
    Progress,
)
from taskyard.algorithms import CircuitPolicy, CircuitState, Incident, IncidentKind
from taskyard.executor_port import Abilities
from taskyard.telemetry import RunLog
from taskyard.testing.clock import ManualClock
from tests.execution import algorithms
from tests.execution.asking import PATIENCE_S, SYSTEM, begin, spec

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
    error = (await dispatcher.run("wait", "never", wait_s=0.2)).error
    assert error.kind is ErrorKind.TIMEOUT
    assert error.message == "no worker was free for it within 0.2 s"
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


@pytest.mark.spec("EXE-02", "EXE-06")
async def test_a_thread_keeps_its_place_until_it_ends(dispatch):
    """When the caller of a run in a thread goes, the run is told and counts until it has ended."""
    began = asyncio.Event()
    dispatcher = dispatch(
        (algorithms.hurry, spec("hurry", executor="thread", max_workers=1)), on_progress=lambda *_: began.set()
    )
    waited: list[tuple[int, bool]] = []

    async def call() -> None:
        try:
            await dispatcher.run("hurry", None)
        finally:
            waited.append((dispatcher.health()["hurry"].active, began.is_set()))

    running = asyncio.get_running_loop().create_task(call())
    async with asyncio.timeout(PATIENCE_S):
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await dispatcher.shutdown()
    assert waited == [(1, True)]
    assert dispatcher.health()["hurry"].active == 0


@pytest.mark.spec("EXE-16", "EXE-06")
async def test_a_rate_limit_rejects_and_says_when_to_come_again(dispatch):
    """Two a second, two at once: the third is `rejected` with the time to wait, after which one more passes."""
    clock = ManualClock()
    mock = MockExecutor(otherwise=None)
    dispatcher = dispatch((algorithms.double, spec("double", rate_limit=2)), executors={"process": mock}, clock=clock)
    assert [(await dispatcher.run("double", n)).success for n in range(3)] == [True, True, False]
    error = (await dispatcher.run("double", 4)).error
    assert (error.kind, error.type, error.details) == (ErrorKind.REJECTED, "RateLimited", {"retry_after_s": 0.5})
    clock.advance(0.5)
    assert (await dispatcher.run("double", 5)).success
    assert not (await dispatcher.run("double", 6)).success
    assert len(mock.requests) == 3


class Raising(NoopExecutor):
    """An executor with a fault: it raises before there is anything to await."""

    is_faulty = True

    def submit(self, request: ExecutionRequest) -> Any:
        if self.is_faulty:
            raise OSError("no")
        return super().submit(request)


@pytest.mark.parametrize("kills", [True, False], ids=["kills", "cannot-kill"])
async def test_an_executor_that_raises_takes_no_slot_along(dispatch, kills):
    """A fault of an executor is answered as `system`, and the place of that request is free again."""
    faulty = Raising()
    faulty.abilities = Abilities(kills=kills)
    dispatcher = dispatch(
        (algorithms.double, spec("double", max_workers=1, queue_limit=0)), executors={"process": faulty}
    )
    for _ in range(2):
        assert (await dispatcher.run("double", 1)).error.kind is ErrorKind.SYSTEM
    faulty.is_faulty = False
    assert (await dispatcher.run("double", 1)).success
    assert dispatcher.health()["double"].active == 0


def test_asking_for_abilities_makes_nothing():
    """To ask what a dispatcher can do makes no executor: with nothing installed there is none to shut down."""
    dispatcher = ExecutionDispatcher()
    assert (dispatcher.abilities.kills, dispatcher.abilities.runs_code) == (True, True)
    assert dispatcher._executors == {}
    assert not ExecutionDispatcher(place="noop").abilities.runs_code


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-15", "EXE-05", "EXE-08")
async def test_the_circuit_opens_on_crashes_and_closes_by_itself(dispatch):
    """Three dead workers in a row, and requests are rejected early; after the cool-down a trial closes it."""
    clock = ManualClock()
    told: list[Incident] = []
    dispatcher = dispatch(
        (algorithms.crash, spec("crash")),
        circuit=CircuitPolicy(crashes=3, cool_down_s=30),
        clock=clock,
        on_incident=told.append,
    )
    for _ in range(3):
        assert (await dispatcher.run("crash", True)).error.kind is ErrorKind.SYSTEM
    assert dispatcher.health()["crash"].circuit is CircuitState.OPEN
    clock.advance(10)
    refused = await dispatcher.run("crash", False)
    assert (refused.error.kind, refused.error.details) == (ErrorKind.REJECTED, {"retry_after_s": 20.0})
    assert "crashed 3 times" in refused.error.message
    assert refused.error.type == "CircuitOpen"
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
    assert result.note.reason.startswith("answered by 'spare': algorithm 'crash' has crashed 1 times")


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


@pytest.mark.parametrize("place", ["inline", "process"])
async def test_a_listener_for_progress_that_fails_does_no_harm(dispatch, caplog, place):
    """Neither the run nor its answer hears of it; it is logged."""

    def broken(request_id: str, progress: Progress) -> None:
        raise RuntimeError("no ears")

    dispatcher = dispatch((algorithms.say_how_far, spec("far", executor=place, max_workers=1)), on_progress=broken)
    assert (await dispatcher.run("far", 3, request_id="r")).data == 3
    assert "a listener for progress failed" in caplog.text
    assert not dispatcher.cancel("r")
    assert dispatcher.health()["far"].active == 0


# --- life -------------------------------------------------------------------------------------------------------------


class Shaky(NoopExecutor):
    """Counts what it is asked, and fails at it if told to."""

    def __init__(self, *, start: Exception | None = None, shutdown: Exception | None = None) -> None:
        super().__init__()
        self._fails = {"start": start, "shutdown": shutdown}
        self.asked: list[str] = []

    async def start(self) -> None:
        self._ask("start")

    async def shutdown(self, *, wait: bool = True) -> None:
        self._ask("shutdown")

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        failure = self._fails[what]
        if failure is not None:
            raise failure


async def test_all_executors_start_or_none():
    """If one cannot be started, those that were are shut down again."""
    good, bad, never = Shaky(), Shaky(start=OSError("no room")), Shaky()
    dispatcher = ExecutionDispatcher(executors={"good": good, "bad": bad, "never": never})
    with pytest.raises(OSError, match="no room"):
        await dispatcher.start()
    assert (good.asked, bad.asked, never.asked) == (["start", "shutdown"], ["start"], [])


async def test_a_failing_shutdown_leaves_nothing_else_open():
    """The other executors and the algorithms are shut down all the same; then the failure is raised, or all of them."""
    bad, good, ended = Shaky(shutdown=OSError("stuck")), Shaky(), []

    class Kept(Algorithm):
        spec = spec("kept", executor="inline")

        async def run(self, given: int, context: AlgorithmContext) -> int:
            return given

        def shutdown(self) -> None:
            ended.append("kept")

    dispatcher = ExecutionDispatcher(executors={"bad": bad, "good": good})
    dispatcher.install(Kept)
    assert (await dispatcher.run("kept", 1)).success
    with pytest.raises(OSError, match="stuck"):
        await dispatcher.shutdown()
    assert (good.asked, ended) == (["shutdown"], ["kept"])
    two = ExecutionDispatcher(executors={"bad": bad, "worse": Shaky(shutdown=KeyError("lost"))})
    with pytest.raises(ExceptionGroup) as raised:
        await two.shutdown()
    assert [type(failure) for failure in raised.value.exceptions] == [OSError, KeyError]


async def test_an_executor_that_raises_is_a_system_error(dispatch):
    """Whoever wrote the executor, the caller gets an answer."""

    class Broken(MockExecutor):
        async def submit(self, request: ExecutionRequest) -> ExecutionResult:
            raise KeyError("lost")

    dispatcher = dispatch((algorithms.crash, spec("crash")), executors={"process": Broken()})
    error = (await dispatcher.run("crash", True)).error
    assert (error.kind, error.type) == (ErrorKind.SYSTEM, "KeyError")


# --- sinks ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-12")
async def test_every_call_is_told_to_sinks_and_logged(dispatch, caplog):
    """Each answer is one event and one log line with request, trace, algorithm, version, worker, duration, status and
    error; also one whose arguments do not fit, and one for an algorithm that there is not."""
    caplog.set_level(logging.INFO, "taskyard")
    dispatcher = dispatch((algorithms.double, spec("double", executor="process")), sinks=[RunLog()])
    good = await dispatcher.run("double", 4, request_id="good", trace_id="t")
    assert good.success, good.error
    await dispatcher.run("double", "no number", request_id="bad")
    await dispatcher.run("third", 4, request_id="unknown")
    lines: list[Any] = [line for line in caplog.records if hasattr(line, "request_id")]
    completed, bad, unknown = lines
    assert completed.getMessage() == "call good of double completed"
    assert (completed.trace_id, completed.algorithm, completed.version) == ("t", "double", "1.0")
    assert (completed.status, completed.worker_pid, hasattr(completed, "error_type")) == (
        "completed",
        good.worker_pid,
        False,
    )
    assert 0 <= completed.duration_ms < 60_000
    assert (bad.request_id, bad.status, bad.error_type) == ("bad", "validation", "InvalidArguments")
    assert (unknown.algorithm, unknown.status, hasattr(unknown, "version")) == ("third", "validation", False)
