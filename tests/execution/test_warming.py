"""What a start reads ahead."""

import asyncio
import threading
from typing import Any

import pytest
from pydantic_core import core_schema

from taskyard import Yard
from tests.execution.asking import PATIENCE_S, spec


@pytest.fixture
def slow_to_read():
    """A type that takes until the event loop has done something else, and whether it has."""
    gate = threading.Event()
    was_free: list[bool] = []

    class Slow:
        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
            was_free.append(gate.wait(PATIENCE_S))
            return core_schema.any_schema()

    return Slow, gate, was_free


async def test_a_dispatcher_starts_beside_the_loop(dispatch, slow_to_read):
    """Its start reads the types of its algorithms, and holds up nobody else on the loop."""
    slow, gate, was_free = slow_to_read

    def run(given: Any) -> None: ...

    run.__annotations__["given"] = slow
    dispatcher = dispatch((run, spec("slow", executor="thread")))
    asyncio.get_running_loop().call_soon(gate.set)
    await dispatcher.start()
    assert was_free == [True]


async def test_a_yard_opens_beside_the_loop(slow_to_read):
    """The same holds for the consumers of a yard."""
    slow, gate, was_free = slow_to_read
    yard = Yard("memory://")

    async def consume(given: Any) -> None: ...

    consume.__annotations__["given"] = slow
    yard.consumer(consume)
    asyncio.get_running_loop().call_soon(gate.set)
    async with yard:
        assert was_free
        assert all(was_free)
