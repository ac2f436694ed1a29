"""The circuit and the policy of direct calls, which decide purely."""

import pytest

from taskyard.execution.circuit import Circuit, CircuitPolicy, CircuitState, Pass
from taskyard.execution.policy import ExecutionPolicy
from taskyard.model.algorithm import AlgorithmSpec, ExecutionHints
from taskyard.model.execution import ErrorKind, ExecutionError, ExecutionResult
from taskyard.model.retry import RetryPolicy
from taskyard.ports.executor import ExecutionRequest
from taskyard.testing.samples import an_error

FINE = ExecutionResult(success=True)


def failed(kind: ErrorKind) -> ExecutionResult:
    return ExecutionResult(success=False, error=ExecutionError(kind=kind, message="x"))


CRASH = failed(ErrorKind.SYSTEM)


# --- the circuit ------------------------------------------------------------------------------------------------------


def crash(circuit: Circuit, now: float, times: int = 1) -> None:
    for _ in range(times):
        granted = circuit.admit(now)
        assert isinstance(granted, Pass)
        circuit.record(granted, CRASH, now)


@pytest.mark.spec("EXE-15")
def test_crashes_in_a_row_open_it():
    """Three in a row do; a success or an error of the code's own between them starts the row anew."""
    for between in (FINE, failed(ErrorKind.RUNTIME)):
        circuit = Circuit(CircuitPolicy(crashes=3, cool_down_s=10))
        crash(circuit, 0, times=2)
        granted = circuit.admit(0)
        assert isinstance(granted, Pass)
        circuit.record(granted, between, 0)
        crash(circuit, 0, times=2)
        assert isinstance(circuit.admit(0), Pass)
        crash(circuit, 0)
        assert circuit.state is CircuitState.OPEN
        assert circuit.admit(4) == 6


@pytest.mark.spec("EXE-15")
@pytest.mark.parametrize("kind", [ErrorKind.TIMEOUT, ErrorKind.REJECTED, ErrorKind.CANCELED, ErrorKind.VALIDATION])
def test_what_says_nothing_neither_counts_nor_clears(kind):
    """A timeout, a rejection or a cancel between crashes leaves the row as it is."""
    circuit = Circuit(CircuitPolicy(crashes=2))
    crash(circuit, 0)
    granted = circuit.admit(0)
    assert isinstance(granted, Pass)
    assert circuit.record(granted, failed(kind), 0) is None
    crash(circuit, 0)
    assert circuit.state is CircuitState.OPEN


@pytest.mark.spec("EXE-15")
def test_one_trial_at_a_time():
    """After the cool-down one request goes through; the others wait for what comes of it."""
    circuit = Circuit(CircuitPolicy(crashes=1, cool_down_s=10))
    crash(circuit, 0)
    trial = circuit.admit(10)
    assert trial == Pass(1, is_trial=True)
    assert circuit.admit(10) == 1.0
    assert circuit.record(trial, FINE, 11) is CircuitState.CLOSED
    assert circuit.admit(11) == Pass(1)


@pytest.mark.spec("EXE-15")
@pytest.mark.parametrize("result", [None, failed(ErrorKind.REJECTED), failed(ErrorKind.TIMEOUT)])
def test_a_trial_without_a_verdict_is_repeated(result):
    """A trial whose caller has gone, or that never ran, leaves the next request to be the trial."""
    circuit = Circuit(CircuitPolicy(crashes=1, cool_down_s=10))
    crash(circuit, 0)
    trial = circuit.admit(10)
    assert isinstance(trial, Pass)
    assert circuit.record(trial, result, 10) is None
    assert circuit.admit(10) == Pass(1, is_trial=True)


@pytest.mark.spec("EXE-15")
def test_what_began_before_it_opened_says_nothing():
    """A late answer of a run that began before neither closes the circuit nor counts for it."""
    circuit = Circuit(CircuitPolicy(crashes=1, cool_down_s=10))
    early, late = circuit.admit(0), circuit.admit(0)
    assert isinstance(early, Pass)
    assert isinstance(late, Pass)
    assert circuit.record(early, CRASH, 0) is CircuitState.OPEN
    assert circuit.record(late, FINE, 5) is None
    assert circuit.admit(5) == 5
    trial = circuit.admit(10)
    assert isinstance(trial, Pass)
    assert circuit.record(late, CRASH, 10) is None
    assert circuit.record(trial, CRASH, 12) is None
    assert circuit.state is CircuitState.OPEN
    assert circuit.admit(13) == 9


def test_a_circuit_may_never_open():
    """`crashes=None` switches it off."""
    circuit = Circuit(CircuitPolicy(crashes=None))
    crash(circuit, 0, times=100)
    assert circuit.state is CircuitState.CLOSED


# --- policy -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-05")
@pytest.mark.parametrize(
    ("own", "asked", "holds"), [(None, None, None), (5, None, 5), (None, 5, 5), (5, 7, 5), (7, 5, 5)]
)
def test_the_smaller_limit_holds(own, asked, holds):
    """Of the algorithm's and the request's, for the run and for the wait alike."""
    spec = AlgorithmSpec("a", execution=ExecutionHints(timeout_s=own, wait_s=own))
    request = ExecutionRequest(spec=spec, payload=None, request_id="r", timeout_s=asked, wait_s=asked)
    assert ExecutionPolicy().timeout_s(spec, request) == holds
    assert ExecutionPolicy().wait_s(spec, request) == holds


@pytest.mark.spec("EXE-19")
def test_retries_of_direct_calls():
    """None by default; with a policy, of what a run may fail with, but not of what only its caller can mend."""
    assert ExecutionPolicy().retry_after_s(an_error(), retries=0, jitter=0) is None
    patient = ExecutionPolicy(retry=RetryPolicy(max_retries=2, first_s=1, jitter=0))
    assert [patient.retry_after_s(an_error(), retries=n, jitter=0) for n in range(3)] == [1, 2, None]
    for kind in (ErrorKind.VALIDATION, ErrorKind.REJECTED, ErrorKind.CANCELED):
        assert patient.retry_after_s(an_error(kind, "x", "OSError"), retries=0, jitter=0) is None
    later = an_error(ErrorKind.RUNTIME, "later", "RetryLater", delay_s=9.0)
    assert patient.retry_after_s(later, retries=0, jitter=0) == 9.0
