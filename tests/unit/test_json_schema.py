"""The checker of JSON Schema, alone and against pydantic."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from taskyard.consumers import function_consumer
from taskyard.errors import InvalidArguments
from taskyard.model.json_schema import fit


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Size:
    width: int
    height: int = 1


class Node(BaseModel):
    name: str
    children: list[Node] = []


NONE: Any = []
MAPPING: Any = {}


def everything(  # noqa: PLR0917 - one of each kind
    text: str,
    count: int = 1,
    ratio: float | None = None,
    flag: bool = False,
    colour: Colour = Colour.RED,
    mode: Literal["fast", 3] = "fast",
    size: Size | None = None,
    tree: Node | None = None,
    pair: tuple[int, str] | None = None,
    tags: list[str] = NONE,
    weights: dict[str, float] = MAPPING,
    few: Annotated[list[int], Field(max_length=2)] = NONE,
    bounded: Annotated[int, Field(ge=1, lt=10)] = 1,
    at: datetime | None = None,
    day: date | None = None,
    ident: UUID | None = None,
    price: Decimal | None = None,
    anything: Any = None,
    either: int | str = 0,
) -> Size:
    return Size(1)


CONSUMER, SIGNATURE = function_consumer(everything)
ARGS, RESULT = SIGNATURE.schemas
SCHEMA: dict[str, Any] = ARGS or {}

GOOD: list[dict[str, Any]] = [
    {"text": "a"},
    {"text": "", "count": -3, "ratio": 0.5, "flag": True, "colour": "blue", "mode": 3},
    {"text": "a", "ratio": 2, "size": {"width": 1}, "pair": [1, "b"], "tags": ["x"], "weights": {"a": 1}},
    {"text": "a", "tree": {"name": "r", "children": [{"name": "c", "children": [{"name": "d"}]}]}},
    {"text": "a", "few": [1, 2], "bounded": 9, "anything": {"b": [None]}, "either": "x"},
    {"text": "a", "at": "2030-01-31T12:00:00Z", "day": "2030-01-31", "price": "1.50"},
    {"text": "a", "ident": "12345678-1234-5678-1234-567812345678", "ratio": None, "size": None},
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "text: is missing"),
    ({"text": 3}, "text: must be a string, not 3"),
    ({"text": None}, "text: must be a string, not None"),
    ({"text": "a", "txet": "b"}, "txet: is unknown; known are: text, count"),
    ({"text": "a", "count": "many"}, "count: must be an integer, not 'many'"),
    ({"text": "a", "count": 1.5}, "count: must be an integer, not 1.5"),
    ({"text": "a", "count": None}, "count: must be an integer, not None"),
    ({"text": "a", "flag": "maybe"}, "flag: must be true or false, not 'maybe'"),
    ({"text": "a", "colour": "green"}, "colour: must be one of 'red', 'blue', not 'green'"),
    ({"text": "a", "mode": "slow"}, "mode: must be one of 'fast', 3, not 'slow'"),
    ({"text": "a", "ratio": "x"}, "ratio: must be a number, not 'x', or must be null, not 'x'"),
    ({"text": "a", "size": {"height": 1}}, "size.width: is missing"),
    ({"text": "a", "tree": {"name": "r", "children": [{"name": 1}]}}, "tree.children.0.name: must be a string, not 1"),
    ({"text": "a", "tags": ["x", 1]}, "tags.1: must be a string, not 1"),
    ({"text": "a", "weights": {"a": "heavy"}}, "weights.a: must be a number, not 'heavy'"),
    ({"text": "a", "few": [1, 2, 3]}, "few: must have at most 2 items, not 3"),
    ({"text": "a", "bounded": 0}, "bounded: must be at least 1, not 0"),
    ({"text": "a", "bounded": 10}, "bounded: must be less than 10, not 10"),
    ({"text": "a", "pair": [1]}, "pair: must have at least 2 items, not 1"),
    ({"text": "a", "at": "soon"}, "at: must be a date and time such as 2030-01-31T12:00:00Z, not 'soon'"),
    ({"text": "a", "ident": "12"}, "ident: must be a UUID, not '12'"),
]


@pytest.mark.parametrize("args", GOOD)
def test_what_fits_passes_as_it_is(args):
    """Arguments that the consumer takes fit its schema, and nothing in them is changed."""
    CONSUMER.encode(args)
    assert fit(SCHEMA, args) == (args, [])


@pytest.mark.parametrize(("args", "problem"), BAD)
def test_what_does_not_fit_is_named(args, problem):
    """Arguments that the consumer refuses are refused by the schema as well, and the message names the field."""
    with pytest.raises(InvalidArguments):
        CONSUMER.encode(args)
    _, misfits = fit(SCHEMA, args)
    assert misfits, args
    assert str(misfits[0]).startswith(problem)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("count", "3", 3), ("ratio", "0.5", 0.5), ("ratio", "1e3", 1000.0), ("flag", "true", True), ("bounded", "+2", 2),
     ("either", "3", "3"), ("text", "3", "3"), ("anything", "3", "3"), ("few", ["1"], ["1"])],
)  # fmt: skip
def test_text_is_converted_where_a_number_is_wanted(name, text, value):
    """A text becomes a number or a truth value only where the schema takes no text."""
    fitted, misfits = fit(SCHEMA, {"text": "a", name: text})
    if name == "few":
        assert fitted["few"] == [1]
        assert type(fitted["few"][0]) is int
    else:
        assert fitted[name] == value
        assert type(fitted[name]) is type(value)
    assert misfits == []


def test_the_result_has_a_schema():
    """The annotation of the return value is published too."""
    assert RESULT is not None
    assert fit(RESULT, {"width": 1, "height": 2}).misfits == []
    assert fit(RESULT, {"width": "a", "height": 2}).misfits != []


def test_defaults_are_published():
    """The defaults of parameters are in the schema where they are JSON values."""
    properties = SCHEMA["properties"]
    assert properties["count"]["default"] == 1
    assert properties["ratio"]["default"] is None
    assert "default" not in properties["text"]
    assert "default" not in properties["tags"]
    assert "title" not in properties["count"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 15) | st.floats(-5, 5) | st.sampled_from(["", "a", "red", "3", "2.5"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["width", "name", "a"]), inner),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(SCHEMA["properties"])), JSON)
@example("price", "")
@example("price", "a")
def test_whatever_the_schema_takes_the_consumer_takes(name, value):
    """Nothing that fits the schema is refused by the consumer: a worker never refuses what a submit let pass."""
    fitted, misfits = fit(SCHEMA, {"text": "a"} | {name: value})
    if not misfits:
        assert name in msgspec.json.decode(CONSUMER.encode(fitted))


def test_what_it_does_not_know_passes():
    """Unknown keywords, formats and patterns of other dialects are left to the worker."""
    assert fit({"type": "string", "contentEncoding": "base64", "format": "ipv6"}, "x").misfits == []
    assert fit({"type": "string", "pattern": "(?<name>[)"}, "x").misfits == []
    assert fit({"$ref": "#/$defs/missing"}, 3).misfits == []
    assert fit(True, 3).misfits == []
    assert fit(False, 3).misfits != []
    assert fit({"const": True}, 1).misfits != []
