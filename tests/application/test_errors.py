"""Errors as documents: a stable code, the parameter at fault, a hint, and the values that the class is made of."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from taskyard import Yard
from taskyard import errors as all_errors
from taskyard.application import errors
from taskyard.application.errors import WaitTimeout, describe_error
from taskyard.application.opening import open_application
from taskyard.application.task_requests import SubmitRequest
from taskyard.errors import DuplicateTask, InvalidInput, TaskFailed, TaskyardError, UnknownConsumer

CLASSES = [
    value
    for module in (all_errors, errors)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, TaskyardError)
]


def test_a_code_names_one_class() -> None:
    """Programs compare codes: no two classes of error share one."""
    by_code: dict[str, set[type[TaskyardError]]] = {}
    for cls in CLASSES:
        by_code.setdefault(cls.code, set()).add(cls)
    assert {code: classes for code, classes in by_code.items() if len(classes) > 1} == {}


def test_the_parameter_at_fault_is_named() -> None:
    """A form or an option that is wrong can be marked without reading the message."""
    with pytest.raises(InvalidInput) as caught:
        SubmitRequest(consumer="add", delay_s=-1)
    document = describe_error(caught.value)
    assert (document.code, document.field) == ("invalid_input", "delay_s")
    assert document.message.startswith("delay_s must be between 0")


def test_data_are_the_values_of_the_class() -> None:
    """A program gets the values that a message is made of; what an exception carries besides stays inside."""
    until = datetime(2030, 1, 1, tzinfo=UTC)
    error = DuplicateTask("a1", "slot", "queued", until=until)
    vars(error)["__notes__"] = ["written by somebody"]
    assert describe_error(error).data == {"existing": "a1", "slot": "slot", "state": "queued", "until": until}
    failed = describe_error(TaskFailed("a1", kind="runtime", message="no", error_type="ValueError", traceback="…"))
    assert failed.data == {"uuid": "a1", "kind": "runtime", "error_type": "ValueError"}
    assert describe_error(UnknownConsumer("x", {"b", "a"})).data == {"name": "x", "known": ["a", "b"]}


def test_a_wait_that_was_too_short_is_an_error_with_the_task() -> None:
    """It is a `TimeoutError` in Python and names the task that goes on."""
    error = WaitTimeout("a1", "no result within 1 s")
    assert isinstance(error, TimeoutError)
    assert msgspec.to_builtins(describe_error(error)) == {
        "code": "timeout", "message": "no result within 1 s", "field": None, "hint": "", "data": {"uuid": "a1"},
    }  # fmt: skip
    assert describe_error(TimeoutError("too late")).code == "timeout"


def test_an_error_of_a_call_says_no_secret(tmp_path: Path) -> None:
    """A task that fails with a secret in its message is told without it to a client that waits."""
    yard = Yard(tmp_path / "work.db")

    @yard.consumer
    async def login(token: str) -> None:
        raise ValueError(f"refused: {token}")

    async def wait() -> TaskyardError:
        async with yard, open_application(yard, actor="test") as application:
            receipt = await application.tasks.submit(
                SubmitRequest(consumer="login", args={"token": "xyzzy-42"}, retry=None)
            )
            with pytest.raises(TaskFailed) as caught:
                await application.tasks.wait(receipt.uuid, timeout_s=30)
            return caught.value

    document = describe_error(asyncio.run(wait()))
    assert "refused: ***" in document.message
    assert "xyzzy" not in str(document)
