"""Hypothesis strategies for values of the model."""

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st

from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.move import Move
from taskyard.model.notes import CancelRequest, Note, NoteCode
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.testing.samples import NOON, a_record

states = st.sampled_from(TaskState)

moments = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - bounds

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)

json_objects = st.dictionaries(st.text(), json_values, max_size=4)

class_names = st.sampled_from(
    ["ValueError", "UnicodeError", "OSError", "FileNotFoundError", "PermissionError", "KeyError", "RetryLater", "Mine"]
)

errors = st.builds(
    ExecutionError,
    kind=st.sampled_from(ErrorKind),
    message=st.text(max_size=20),
    types=st.lists(class_names, max_size=4, unique=True).map(tuple),
    details=st.dictionaries(st.just("delay_s"), json_values | st.floats()),
)

retry_policies = st.builds(
    RetryPolicy,
    max_retries=st.integers(0, 200),
    first_s=st.floats(0, 1e6),
    factor=st.floats(1, 1e308),
    cap_s=st.floats(0, 1e6),
    jitter=st.floats(0, 1),
    give_up_on=st.lists(class_names, max_size=2).map(tuple),
    retry_on=st.lists(class_names, max_size=2).map(tuple),
)

jitters = st.floats(0, 1, exclude_max=True)


def _in_state(state: TaskState, counts: tuple[int, int, int, int], slot: str | None, asked: bool) -> TaskRecord:
    """A record as a store could hold it in `state`."""
    running = state is TaskState.RUNNING
    attempt, retries, crashes, recoveries = counts
    return a_record(
        state=state,
        attempt=attempt,
        retries=retries,
        crashes=crashes,
        recoveries=recoveries,
        dedupe_slot=slot,
        token=7 if running else None,
        node="node" if running else None,
        started_at=NOON if running else None,
        cancel=CancelRequest(NOON) if running and asked else None,
    )


counters = st.integers(0, 5)
records = st.builds(
    _in_state,
    states,
    st.tuples(st.integers(1, 9), counters, counters, counters),
    st.none() | st.just("slot"),
    st.booleans(),
)
running_records = st.builds(
    _in_state,
    st.just(TaskState.RUNNING),
    st.tuples(st.integers(1, 9), counters, counters, counters),
    st.none(),
    st.booleans(),
)

notes = st.builds(Note, code=st.sampled_from(NoteCode), reason=st.text(max_size=5))

moves = st.builds(
    Move,
    state=states,
    at=moments,
    result=st.none() | st.just("1"),
    error=st.none() | errors,
    note=st.none() | notes,
    due_at=st.none() | moments,
    retried=st.booleans(),
    crashed=st.booleans(),
    recovered=st.booleans(),
    unspent=st.booleans(),
    to_head=st.booleans(),
)


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)
