"""Spreading retries over time."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from taskyard.model.budget import SLOT_S, RetryBudget

rates = st.sampled_from([0.5, 1.0, 7.0, 50.0, 333.0])


@given(rates, st.lists(st.floats(0, 60), max_size=400))
def test_no_second_gets_more_than_the_budget(per_s: float, wanted: list[float]):
    """Whatever is wanted, nobody is back before he wants to be, and no slot of the budget is used beyond its size."""
    budget = RetryBudget(per_s)
    given_s = [budget.book(at, now_s=0.0) for at in wanted]
    assert all(got >= at for got, at in zip(given_s, wanted, strict=True))
    width_s = max(1, int(per_s * SLOT_S)) / per_s
    # A hair later, since a time that is the beginning of a slot may be a hair before it as a float.
    used = Counter(int((got + 1e-9) // width_s) for got in given_s)
    assert max(used.values(), default=0) <= max(1, int(per_s * SLOT_S)) + 1


def test_a_few_come_when_they_want():
    """As long as the budget has room, nobody is put off."""
    budget = RetryBudget(500.0)
    assert [budget.book(3.21, now_s=0.0) for _ in range(50)] == [3.21] * 50
    assert budget.book(3.21, now_s=0.0) > 3.21


def test_who_waits_long_is_in_nobodys_way():
    """Retries that want to be back late do not put off those that want to be back soon."""
    budget = RetryBudget(10.0)
    for _ in range(1000):
        budget.book(30.0, now_s=0.0)
    assert budget.book(1.0, now_s=0.0) == 1.0


def test_many_at_once_come_back_steadily():
    """Fifty thousand that fail in one instant come back at the budget's rate, with no pause and no peak."""
    budget = RetryBudget(500.0)
    given_s = [budget.book(1.0, now_s=0.0) for _ in range(50_000)]
    each = Counter(int(at + 1e-9) for at in given_s)
    assert max(each.values()) <= 1.1 * 500
    assert max(given_s) < 1.0 + 50_000 / 500 + 1


def test_slots_that_have_passed_are_forgotten():
    """A node that retries for years remembers only what is still to come."""
    budget = RetryBudget(10.0)
    for n in range(20_000):
        budget.book(n * 0.2 + 1.0, now_s=n * 0.2)
    assert len(budget._booked) + len(budget._following) < 2000
