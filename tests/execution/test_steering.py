"""Direct calls that are tried again or canceled."""

import asyncio

import pytest

from taskyard import ErrorKind, ExecutionPolicy, MockExecutor, RetryPolicy
from taskyard.algorithms import CircuitPolicy, Incident
from taskyard.testing.clock import START, ManualClock
from tests.execution import algorithms
from tests.execution.asking import PATIENCE_S, SYSTEM, begin, spec

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


@pytest.mark.spec("EXE-19")
async def test_the_next_try_waits_as_long_as_the_policy_says(dispatch):
    """Each delay passes on the dispatcher's clock, and incidents have its time."""
    clock = ManualClock()
    told: list[Incident] = []
    mock = MockExecutor({"crash": [SYSTEM, SYSTEM, "fine"]})
    retry = RetryPolicy(max_retries=2, first_s=600, factor=3, cap_s=86_400, jitter=0)
    dispatcher = dispatch(
        (algorithms.crash, spec("crash")),
        executors={"process": mock},
        policy=ExecutionPolicy(retry=retry),
        on_incident=told.append,
        clock=clock,
    )
    running = begin(dispatcher, "crash", True)
    for tries, delay_s in ((1, 600), (2, 1800)):
        while clock.next_wake_s is None:  # noqa: ASYNC110 -- it has no event for that
            await asyncio.sleep(0)
        assert (len(mock.requests), clock.next_wake_s) == (tries, delay_s)
        clock.advance(delay_s)
    assert (await running).data == "fine"
    assert [incident.at - START.timestamp() for incident in told] == [0, 600]


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
async def test_a_cancel_interrupts_async_code(dispatch):
    """A run on the loop is interrupted where it waits, and answers `canceled`; its caller goes on."""
    began = asyncio.Event()
    dispatcher = dispatch((algorithms.wait_for_ever, spec("wait_for_ever")), on_progress=lambda *_: began.set())
    running = begin(dispatcher, "wait_for_ever", None, request_id="r")
    async with asyncio.timeout(PATIENCE_S):
        await began.wait()
        assert dispatcher.cancel("r")
        error = (await running).error
    assert error is not None
    assert error.kind is ErrorKind.CANCELED
    assert running.cancelling() == 0


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
