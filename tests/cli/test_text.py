"""What is printed of somebody else's data: safe and short."""

import json
import unicodedata
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.cli.text import age, clean, clean_json, duration, one_line, size
from taskyard.cli.values import parse_duration, parse_moment, parse_value
from taskyard.errors import InvalidInput

HARMFUL = {"Cc", "Cs", "Zl", "Zp"}
ANY_TEXT = st.text(st.characters(exclude_categories=[]))


@given(ANY_TEXT)
def test_clean_text_has_no_control_characters(text: str) -> None:
    """Whatever comes in, no control character, separator of lines or lone surrogate comes out; what is safe is kept."""
    cleaned = clean(text)
    assert not any(unicodedata.category(char) in HARMFUL for char in cleaned)
    assert clean(cleaned) == cleaned
    if text.isascii() and text.isprintable():
        assert cleaned == text


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_clean_json_is_the_same_data(value: Any) -> None:
    """Escaping what JSON leaves raw changes no value, and leaves nothing raw that could steer a terminal."""
    text = clean_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value
    assert not any(unicodedata.category(char) in HARMFUL for char in text)


DURATIONS = [(0, "0 ms"), (0.0851, "85 ms"), (1, "1.0 s"), (42.4, "42 s"), (60, "1 min"), (250, "4 min 10 s"),
             (7500, "2 h 5 min"), (3600, "1 h"), (273_600, "3 d 4 h")]  # fmt: skip


@pytest.mark.parametrize(("seconds", "text"), DURATIONS)
def test_durations_are_short(seconds: float, text: str) -> None:
    """At most two units, the larger first."""
    assert duration(seconds) == text


@given(st.floats(0, 1e9))
def test_every_duration_and_age_has_words(seconds: float) -> None:
    """No length of time is left without a text."""
    assert duration(seconds)
    assert age(seconds)


def test_sizes_and_lines_are_short() -> None:
    """Sizes have one unit; of a long text the first line is kept, cut at the width."""
    assert [size(n) for n in (0, 999, 3_400_000, 12e9)] == ["0 B", "999 B", "3.4 MB", "12 GB"]
    assert one_line("first\nsecond", 20) == "first …"
    assert one_line("x" * 30, 10) == "x" * 9 + "…"


VALUES = [("3", 3), ("true", True), ("[1,2]", [1, 2]), ('"3"', "3"), ("a.png", "a.png"), ("007", "007"), ("", ""),
          ("null", None), ("NaN", "NaN"), ("{", "{"), ("1e3", 1000.0)]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_values_are_json_where_they_can_be(text: str, value: object) -> None:
    """What is JSON is taken as JSON, all else as the text it is."""
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_times_are_read_as_people_write_them() -> None:
    """Durations have units, moments have zones; what has neither a number nor a zone is refused."""
    durations = {"90": 90, "1.5s": 1.5, "250ms": 0.25, "5m": 300, "2 h": 7200, "1d": 86400}
    assert {text: parse_duration(text) for text in durations} == durations
    assert parse_moment("2030-01-31T09:00+01:00") == datetime(2030, 1, 31, 8, tzinfo=UTC)
    assert parse_moment("2030-01-31T09:00Z").utcoffset() == timedelta(0)
    for wrong in ("", "-1", "5x", "inf", "9" * 400):
        with pytest.raises(InvalidInput):
            parse_duration(wrong)
