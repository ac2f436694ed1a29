"""The table of legal moves, against the design's table written out here once more."""

import itertools

import apsw
import pytest

from taskyard.errors import IllegalMove
from taskyard.model.event import EventKind
from taskyard.model.state import ENDED, HOLDS_KEY, LEGAL, WAITING_FOR_TIME, TaskState, check_move, sql_guard

DESIGN = """
    created     | scheduled queued blocked canceled
    scheduled   | queued blocked paused canceled skipped
    queued      | running scheduled blocked paused canceled skipped
    blocked     | queued scheduled paused canceled skipped failed
    paused      | queued scheduled blocked retrying canceled skipped
    running     | completed failed retrying canceled interrupted queued
    retrying    | queued paused canceled skipped failed
    interrupted | queued failed canceled
    failed      | queued
    completed   |
    canceled    |
    skipped     |
"""
TABLE = {
    old.strip(): frozenset(after.split()) for old, after in (line.split("|") for line in DESIGN.strip().splitlines())
}
PAIRS = list(itertools.product(TaskState, TaskState))


@pytest.mark.spec("QUE-01")
def test_the_table_is_the_designs():
    """The twelve states and the moves between them are those of the design, no more and no fewer."""
    assert {str(old): frozenset(map(str, after)) for old, after in LEGAL.items()} == TABLE
    assert len(TaskState) == len(TABLE) == 12


@pytest.mark.spec("QUE-01")
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_check_move_lets_only_legal_moves_pass(old: TaskState, new: TaskState):
    """A move is let through exactly when the table has it; staying where one is is no move."""
    if new in TABLE[old]:
        check_move(old, new)
    else:
        with pytest.raises(IllegalMove, match=f"{old} cannot become {new}") as caught:
            check_move(old, new)
        assert (caught.value.old, caught.value.new) == (old, new)


@pytest.mark.spec("QUE-01")
def test_the_sql_guard_says_the_same_in_the_database():
    """In a real SQLite the guard is true for exactly the illegal ones of all 144 pairs; a row may stay as it is."""
    rows = ", ".join(f"('{old}', '{new}')" for old, new in PAIRS)
    question = f"WITH pair(a, b) AS (VALUES {rows}) SELECT a, b, {sql_guard('a', 'b')} FROM pair"
    answers = {(old, new): bool(illegal) for old, new, illegal in apsw.Connection(":memory:").execute(question)}
    assert answers == {(old, new): old != new and new not in TABLE[old] for old, new in PAIRS}


@pytest.mark.spec("QUE-01")
def test_ended_states_are_those_nothing_but_a_person_leads_out_of():
    """A task has ended when no move leads on, or only a person's retry of a failed one."""
    assert {state for state in TaskState if LEGAL[state] <= {TaskState.QUEUED}} == ENDED
    assert not ENDED & (WAITING_FOR_TIME | HOLDS_KEY)


@pytest.mark.spec("QUE-01")
def test_every_task_can_end():
    """From every state that is not an end, some chain of legal moves leads to one."""
    reaches = set(ENDED)
    while more := {state for state in TaskState if state not in reaches and LEGAL[state] & reaches}:
        reaches |= more
    assert reaches == set(TaskState)


@pytest.mark.spec("QUE-01")
def test_every_state_not_ended_can_be_canceled():
    """Whatever is not yet final can be canceled."""
    assert all(TaskState.CANCELED in LEGAL[state] for state in TaskState if state not in ENDED)


@pytest.mark.spec("QUE-29")
def test_every_state_has_an_event():
    """A move can always be told: each state a task can reach has an event of its own."""
    assert all(EventKind(state) for state in TaskState if state is not TaskState.CREATED)
