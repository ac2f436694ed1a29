"""Who goes first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.model.order import GAP, Priority, head_position, tail_position

sequence = st.integers(1, 2**43 - 1)


@pytest.mark.spec("QUE-05")
@pytest.mark.parametrize("priority", Priority)
def test_a_priority_may_be_named_numbered_or_given(priority: Priority):
    """A name in any case, the number and the priority itself mean the same."""
    forms = (priority, int(priority), priority.name, priority.label)
    assert {Priority.of(form) for form in forms} == {priority}


@pytest.mark.spec("QUE-05")
def test_high_goes_before_normal_before_low():
    """Sorting by the number puts the high ones first, in Python as in SQL."""
    assert sorted(Priority) == [Priority.HIGH, Priority.NORMAL, Priority.LOW]


@pytest.mark.parametrize("wrong", ["urgent", "", "high ", 3, -1])
def test_an_unknown_priority_is_refused(wrong: str | int):
    """What is no priority is refused and named."""
    with pytest.raises(ValueError, match=repr(wrong)):
        Priority.of(wrong)


@pytest.mark.spec("QUE-05")
@given(sequence, sequence)
def test_tails_stand_in_the_order_they_came(a: int, b: int):
    """Of two tasks put at the tail, the earlier stands first, with room for others between them."""
    assert (tail_position(a) < tail_position(b)) == (a < b)
    assert abs(tail_position(a) - tail_position(b)) >= (GAP if a != b else 0)


@given(sequence, sequence)
def test_heads_stand_before_everything(a: int, b: int):
    """What is put at the head stands before every tail and before every earlier head."""
    assert head_position(a) < tail_position(b)
    assert (head_position(b) < head_position(a)) == (a < b)


@given(sequence)
def test_a_position_fits_a_column(a: int):
    """Eight million million tasks fit into a signed 64-bit integer."""
    assert -(2**63) <= head_position(a) < tail_position(a) < 2**63
