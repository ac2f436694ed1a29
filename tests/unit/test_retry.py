"""When a failed run is tried again."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.retry import NO_RETRY, RetryPolicy
from tests.unit.strategies import errors, jitters, retry_policies


def raised(exc: type[BaseException], kind: ErrorKind = ErrorKind.RUNTIME) -> ExecutionError:
    """The error an executor would answer with for an exception of this class."""
    return ExecutionError(kind=kind, message="", types=tuple(c.__name__ for c in exc.__mro__[:-1]))


class ParseError(ValueError): ...


class DeepParseError(ParseError): ...


@pytest.mark.spec("QUE-13")
def test_the_default_waits_double_up_to_thirty_seconds():
    """By default the waits are 1, 2, 4, 8, 16 and then 30 seconds, with three retries."""
    policy = RetryPolicy()
    assert [policy.delay(n, 0.0) for n in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert policy.max_retries == 3


@pytest.mark.spec("QUE-13")
@given(retry_policies, st.integers(0, 10_000))
def test_waits_never_shrink_and_never_pass_the_cap(policy: RetryPolicy, n: int):
    """Whatever the policy, a wait is finite, not negative, at most the cap and at least the one before it."""
    wait, following = policy.delay(n, 0.0), policy.delay(n + 1, 0.0)
    assert 0 <= wait <= following <= policy.cap_s
    assert math.isfinite(wait)


@pytest.mark.spec("QUE-13")
@given(retry_policies, st.integers(0, 1000), jitters)
def test_jitter_only_shortens(policy: RetryPolicy, n: int, jitter: float):
    """Jitter takes away at most its share of the wait and never adds to it."""
    whole = policy.delay(n, 0.0)
    assert whole * (1 - policy.jitter) <= policy.delay(n, jitter) <= whole


def test_a_fixed_wait_is_factor_one():
    """With factor 1 every wait is the same."""
    policy = RetryPolicy(first_s=5, factor=1)
    assert {policy.delay(n, 0.0) for n in range(100)} == {5}


@pytest.mark.spec("QUE-14")
@pytest.mark.parametrize(
    ("exc", "again"),
    [
        (ValueError, False),
        (TypeError, False),
        (UnicodeDecodeError, False),
        (FileNotFoundError, False),
        (NotImplementedError, False),
        (ModuleNotFoundError, False),
        (PermissionError, True),
        (BlockingIOError, True),
        (ConnectionResetError, True),
        (TimeoutError, True),
        (OSError, True),
        (KeyError, True),
        (RuntimeError, True),
        (ZeroDivisionError, True),
    ],
)
def test_errors_are_classed(exc: type[BaseException], again: bool):
    """Bad arguments and missing input are given up on; transient trouble and what is in no class is tried again."""
    assert RetryPolicy().retries_error(raised(exc)) is again


@pytest.mark.spec("QUE-14")
def test_validation_is_never_tried_again():
    """Arguments that do not fit will not fit the next time, whatever a policy says."""
    error = raised(OSError, ErrorKind.VALIDATION)
    assert not RetryPolicy(retry_on=("OSError",)).retries_error(error)


@pytest.mark.spec("QUE-14")
@pytest.mark.parametrize(
    ("policy", "exc", "again"),
    [
        (RetryPolicy.on(retry_on=[ParseError]), ParseError, True),
        (RetryPolicy.on(retry_on=[ParseError]), DeepParseError, True),
        (RetryPolicy.on(retry_on=[ParseError]), ValueError, False),
        (RetryPolicy.on(retry_on=[ValueError], give_up_on=[ParseError]), DeepParseError, False),
        (RetryPolicy.on(retry_on=[DeepParseError], give_up_on=[ParseError]), DeepParseError, True),
        (RetryPolicy.on(retry_on=[DeepParseError], give_up_on=[ParseError]), ParseError, False),
        (RetryPolicy.on(give_up_on=[OSError]), PermissionError, True),
        (RetryPolicy.on(give_up_on=[PermissionError]), PermissionError, False),
        (RetryPolicy.on(give_up_on=[Exception]), KeyError, False),
    ],
)
def test_the_nearest_class_decides(policy: RetryPolicy, exc: type[BaseException], again: bool):
    """Of all names that match, the one nearest to the raised class wins, be it the consumer's own or a default."""
    assert policy.retries_error(raised(exc)) is again


@pytest.mark.spec("QUE-13")
@given(retry_policies, st.integers(0, 300), errors)
def test_a_policy_is_exhausted_after_its_count(policy: RetryPolicy, retries: int, error: ExecutionError):
    """After `max_retries` nothing is tried again, and before it exactly what is worth it."""
    assert policy.exhausted(retries, error) == (retries >= policy.max_retries or not policy.retries_error(error))
    assert NO_RETRY.exhausted(0, error)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_retries": -1},
        {"first_s": -0.1},
        {"first_s": math.nan},
        {"cap_s": -1},
        {"cap_s": math.inf},
        {"factor": 0.5},
        {"factor": math.nan},
        {"jitter": 1.1},
        {"jitter": math.nan},
    ],
    ids=str,
)
def test_a_policy_without_meaning_is_refused(wrong: dict[str, float]):
    """Negative counts and waits, shrinking factors and numbers that are none are refused when the policy is made."""
    with pytest.raises(ValueError, match="must"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


@given(retry_policies)
def test_a_policy_survives_being_written_down(policy: RetryPolicy):
    """A policy is stored as JSON and comes back the same."""
    assert msgspec.json.decode(msgspec.json.encode(policy), type=RetryPolicy) == policy
