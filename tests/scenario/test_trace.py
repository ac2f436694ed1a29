"""The trace context of tasks and attempts."""

import re

import pytest

from taskyard import InvalidInput, RetryPolicy, Yard, current_run
from taskyard.options import TRACEPARENT

pytestmark = pytest.mark.anyio

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"


def make_yard() -> tuple[Yard, list[str]]:
    yard, seen = Yard("memory://"), []

    @yard.consumer
    async def inner() -> None:
        seen.append(current_run().trace)

    @yard.consumer(retry=RetryPolicy(first_s=0.001))
    async def outer() -> str:
        seen.append(current_run().trace)
        if current_run().attempt == 1:
            raise OSError("again")
        return (await yard.submit("inner")).uuid

    return yard, seen


async def test_attempts_and_their_tasks_are_part_of_the_trace():
    """Every attempt has the trace id of the submit and a span id of its own; tasks that it submits inherit that."""
    yard, seen = make_yard()
    async with yard:
        handle = await yard.submit("outer", trace=TRACE)
        child = yard.handle(await handle.result(timeout_s=10))
        await child.result(timeout_s=10)
        assert (await handle.record()).trace == TRACE
        assert (await child.record()).trace == seen[1]
    assert all(TRACEPARENT.fullmatch(one) for one in seen)
    assert {one[:35] for one in seen} == {TRACE[:35]}
    assert {one[-2:] for one in seen} == {"00"}
    assert len({one[36:52] for one in [*seen, TRACE]}) == 4


async def test_a_task_without_a_trace():
    """The attempts of a task that was submitted without a trace share a trace id; nothing is stored or inherited."""
    yard, seen = make_yard()
    async with yard:
        handle = await yard.submit("outer")
        child = yard.handle(await handle.result(timeout_s=10))
        await child.result(timeout_s=10)
        assert (await handle.record()).extra is (await child.record()).extra is None
    first, second, other = seen
    assert first[:35] == second[:35] != other[:35]
    assert all(TRACEPARENT.fullmatch(one) for one in seen)


@pytest.mark.parametrize("trace", ["x", TRACE.upper(), TRACE + "0", "00" + TRACE[2:].replace("4", "g"), 5])
async def test_what_is_no_trace_is_refused(trace):
    """A trace must be a W3C traceparent."""
    yard, _ = make_yard()
    async with yard.client():
        with pytest.raises(InvalidInput, match=re.escape("trace must be a W3C traceparent")):
            await yard.submit("inner", trace=trace)
