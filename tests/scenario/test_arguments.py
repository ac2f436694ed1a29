"""Arguments on their way into the store: one by one or many at once, written by msgspec or by pydantic."""

from datetime import UTC, datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taskyard import InvalidInput, Yard
from taskyard.consumers import Signature, function_consumer
from taskyard.options import TaskOptions, make_record, make_records
from tests.scenario.jobs import build

NOW = datetime(2030, 1, 1, tzinfo=UTC)


class Size(IntEnum):
    LARGE = 3


class Word(StrEnum):
    YES = "yes"


class Text(str):
    __slots__ = ()


async def plain(
    number: int = 0,
    share: float = 0.0,
    text: str = "",
    flag: bool = False,
    nothing: None = None,
    either: int | str | None = None,
    numbers: list[int | float] = [],  # noqa: B006 - never called
) -> None: ...


SCALARS = st.one_of(
    st.integers(),
    st.floats(),
    st.text(),
    st.booleans(),
    st.none(),
    st.sampled_from([Size.LARGE, Word.YES, Text("derived"), "5", "true", Decimal("1.5"), b"bytes", 2**80, 10**4400]),
)
NAMES = st.sampled_from(["number", "share", "text", "flag", "nothing", "either", "numbers"])


@given(st.dictionaries(NAMES, SCALARS | st.lists(SCALARS, max_size=3)))
def test_both_writers_say_the_same(args: dict[str, Any]):
    """What is written by the fast writer reads as what pydantic would have written, and the same is refused."""
    fast, slow = Signature("plain", plain), Signature("plain", plain)
    assert fast.is_json
    slow.is_json = False
    written = [_written(signature, args) for signature in (fast, slow)]
    assert written[0] == written[1]


def _written(signature: Signature, args: dict[str, Any]) -> object:
    try:
        return msgspec.json.decode(signature.encode(args))
    except InvalidInput as refused:
        return type(refused), str(refused)


@given(st.lists(st.dictionaries(NAMES, SCALARS | st.lists(SCALARS, max_size=3)), max_size=4))
@example([{"text": "one\u2028line\n"}, {"text": "two"}])
@example([{"number": 1}, {"number": 10**5000}])
@example([{"number": 1}, {"text": "\ud800"}])
@example([{"text": "x" * 5000}, {"nothing": None}])
def test_arguments_of_a_batch_are_written_as_if_alone(many: list[dict[str, Any]]):
    """Several at a time are written as each would be, and refused if one would be."""
    signature = Signature("plain", plain)
    alone = [_written(signature, args) for args in many]
    together = _written_together(signature, many)
    assert together == alone if isinstance(together, list) else together in alone


def _written_together(signature: Signature, many: list[dict[str, Any]]) -> object:
    try:
        return [msgspec.json.decode(text) for text in signature.encode_many(iter(many))]
    except InvalidInput as refused:
        return type(refused), str(refused)


async def anything(value) -> None: ...


async def named_by_caller(**values: int) -> None: ...


async def of_numbers(value: dict[int, int]) -> None: ...


@pytest.mark.parametrize("function", [anything, named_by_caller, of_numbers])
def test_what_json_does_not_have_is_written_by_pydantic(function):
    """A parameter that may hold more than JSON has keeps its signature away from the fast writer."""
    assert not Signature("function", function).is_json


OPTIONS = [{}, {"priority": "high", "key": "disk", "delay_s": 5}, {"dedupe": "merge", "queue": "other", "timeout_s": 3}]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_task_of_a_batch_is_as_if_alone(options):
    """The records of a batch are those that its tasks would have had one by one, but for their ids."""
    consumer, _ = function_consumer(plain, timeout_s=10)
    checked = TaskOptions.of(**options)
    given = [{"number": number, "text": f"number {number}"} for number in range(3)]
    together = make_records(consumer, given, checked, now=NOW, max_bytes=1000)
    alone = [make_record(consumer, args, checked, now=NOW, max_bytes=1000) for args in given]
    assert len({record.uuid for record in together + alone}) == 6
    for record, other in zip(together, alone, strict=True):
        other.uuid = record.uuid
    assert together == alone


async def test_a_batch_is_read_as_it_is_made():
    """A generator may hand out the same dict again and again, with other values in it."""

    def numbers():
        given: dict[str, int] = {}
        for number in range(3):
            given["number"] = number
            yield given

    yard = Yard("memory://")

    @yard.consumer
    async def echo(number: int) -> int:
        return number

    async with yard:
        handles = await echo.submit_many(numbers())
        assert [await handle.result(timeout_s=10) for handle in handles] == [0, 1, 2]


async def test_what_is_too_large_in_a_batch_is_refused():
    """One task of a batch whose arguments are too large keeps all of it out."""
    async with build("memory://", max_payload_bytes=100).client() as yard:
        with pytest.raises(InvalidInput, match="212 bytes of JSON are more than the limit of 100"):
            await yard.submit_many("echo", [{}, {"value": "x" * 200}])
        assert await yard.store.count() == {}
