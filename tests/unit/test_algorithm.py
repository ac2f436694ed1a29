"""Hints and specs as values, and the bucket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.errors import InvalidInput
from taskyard.model.algorithm import AlgorithmSpec, ExecutionHints, choose_place
from taskyard.model.rate import TokenBucket

# --- hints ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-16")
@pytest.mark.parametrize(
    "hints",
    [
        {"max_workers": 0},
        {"max_workers": True},
        {"queue_limit": -1},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"wait_s": float("inf")},
        {"load_s": "long"},
        {"load_s": 5, "executor": "thread"},
        {"rate_limit": 0},
        {"rate_limit": float("nan")},
        {"burst": 0},
        {"recycle_after": 0},
        {"rate_limit": "1"},
        {"memory_limit": 0},
        {"memory_limit": 1000},
        {"memory_limit": "1G"},
        {"gpu": -1},
        {"gpu": [1]},
        {"executor": "thread", "gpu": 0},
        {"executor": "process", "memory_limit": 1 << 30},
        {"executor": "inline", "isolated_pool": True},
    ],
    ids=str,
)
def test_hints_that_make_no_sense_are_refused(hints):
    """Numbers out of bounds, and hints that the named place cannot follow."""
    with pytest.raises(InvalidInput):
        ExecutionHints(**hints)


@pytest.mark.spec("EXE-03", "EXE-16")
@pytest.mark.parametrize(
    ("hints", "is_async", "place"),
    [
        ({}, False, "process"),
        ({}, True, "inline"),
        ({"max_workers": 3}, False, "process"),
        ({"isolated_pool": True}, False, "isolated"),
        ({"gpu": 0}, False, "isolated"),
        ({"memory_limit": 1 << 30}, False, "isolated"),
        ({"recycle_after": 9}, False, "isolated"),
        ({"executor": "thread"}, False, "thread"),
        ({"executor": "mock", "gpu": 0}, False, "mock"),
        ({"executor": "ray"}, True, "ray"),
    ],
)
def test_the_place_follows_from_the_hints(hints, is_async, place):
    """A name decides; else what needs workers of its own has them, async code is on the loop, the rest shares."""
    assert choose_place(ExecutionHints(**hints), is_async=is_async) == place


@pytest.mark.parametrize("fields", [("",), ("a" * 300,), ("a", ""), ("a\0",)])
def test_a_spec_has_a_name_and_a_version(fields):
    """Both are short texts."""
    with pytest.raises(InvalidInput):
        AlgorithmSpec(*fields)


# --- the bucket -------------------------------------------------------------------------------------------------------


@given(
    rate=st.floats(0.1, 1000),
    burst=st.integers(1, 20),
    steps=st.lists(st.floats(0, 10), max_size=60),
)
def test_a_bucket_keeps_its_rate(rate, burst, steps):
    """However requests come, no more pass than the burst and what the time since the first has filled in."""
    bucket, now, first, passed = TokenBucket(rate, burst), 0.0, None, 0
    for step in steps:
        now += step
        if first is None:
            first = now
        passed += bucket.take(now) == 0
        assert passed <= burst + rate * (now - first) + 1e-6


@given(rate=st.floats(0.1, 1000), burst=st.integers(1, 20))
def test_a_bucket_says_when(rate, burst):
    """After the wait it names, and not before, one more passes; a clock that goes back changes nothing."""
    bucket = TokenBucket(rate, burst)
    assert [bucket.take(100.0) for _ in range(burst)] == [0] * burst
    wait_s = bucket.take(100.0)
    assert 0 < wait_s <= 1 / rate * 1.001
    assert bucket.take(99.0) > 0
    assert bucket.take(99.0 + wait_s / 2) > 0
    assert bucket.take(99.0 + wait_s * 1.001) == 0


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0)])
def test_a_bucket_that_never_fills_is_refused(rate, burst):
    """A rate must let something through."""
    with pytest.raises(ValueError, match="rate"):
        TokenBucket(rate, burst)
