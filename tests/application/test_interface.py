"""The interface: every call is of values that have a JSON schema, and the local application has every call."""

import collections.abc
import inspect
import typing

import msgspec
import pytest

from taskyard.application.documents import ErrorDocument
from taskyard.application.interface import Application
from taskyard.application.local import LocalApplication

NOUNS = {
    name: typing.get_type_hints(value.fget)["return"]
    for name, value in vars(Application).items()
    if isinstance(value, property) and name != "store"
}
CALLS = [
    pytest.param(noun, name, call, id=f"{noun}.{name}")
    for noun, calls in NOUNS.items()
    for name, call in vars(calls).items()
    if inspect.isfunction(call) and not name.startswith("_")
]


def values_of(call: object) -> dict[str, object]:
    """The types of what a call takes and returns; of an iterator, the type of its items."""
    hints = typing.get_type_hints(call)
    returned = hints["return"]
    if typing.get_origin(returned) is collections.abc.AsyncIterator:
        (hints["return"],) = typing.get_args(returned)
    return hints


def parameters_of(call: object) -> list[tuple[object, ...]]:
    assert callable(call)
    return [(one.name, one.kind, one.default) for one in inspect.signature(call).parameters.values()]


@pytest.mark.parametrize(("noun", "name", "call"), CALLS)
def test_every_call_is_of_values_with_a_json_schema(noun: str, name: str, call: object) -> None:
    """No yard, handle or callback crosses the interface: HTTP can carry every call."""
    values = values_of(call)
    assert set(values) == {*inspect.signature(call).parameters, "return"} - {"self"}  # type: ignore[arg-type]
    schemas, _ = msgspec.json.schema_components(list(values.values()))
    assert len(schemas) == len(values)


def test_all_calls_share_one_set_of_schemas() -> None:
    """One document describes the whole interface, as OpenAPI has it: no two types have one name."""
    values = [value for call in CALLS for value in values_of(call.values[2]).values()]
    _, components = msgspec.json.schema_components(values, ref_template="#/components/schemas/{name}")
    assert {"SubmitRequest", "TaskDetail", "BulkReport", "QueueDocument", "ScheduleRequest"} <= components.keys()
    assert not [name for name in components if "." in name or "_" in name]


@pytest.mark.parametrize(("noun", "name", "call"), CALLS)
def test_the_local_application_has_every_call(noun: str, name: str, call: object) -> None:
    """With the parameters that the interface names."""
    nouns = LocalApplication(None, actor="test")  # type: ignore[arg-type]
    found = getattr(type(getattr(nouns, noun)), name)
    assert parameters_of(found) == parameters_of(call)


def test_an_error_has_a_schema() -> None:
    """What a call raises is told as one kind of document."""
    assert msgspec.json.schema(ErrorDocument)["$defs"]["ErrorDocument"]["properties"].keys() == {
        "code", "message", "field", "hint", "data",
    }  # fmt: skip
