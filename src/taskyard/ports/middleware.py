"""The port of middleware: functions around every submit, every run and the code of every run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from taskyard.errors import InvalidInput, quote
from taskyard.model.execution import ExecutionResult
from taskyard.ports.store import Added

SubmitNext = Callable[[], Awaitable[Sequence[Added]]]
"""Goes on with the submit. Returns what became of each task, in their order."""

RunNext = Callable[[], Awaitable[ExecutionResult]]
"""Goes on with the run. Returns how it went, and never raises what the code has raised."""

AroundSubmit = Callable[[Any, SubmitNext], Awaitable[None]]
"""`async def f(submission, call_next)`: gets a `Submission`, awaits `call_next()` once or raises."""

AroundRun = Callable[[Any, RunNext], Awaitable[ExecutionResult]]
"""`async def f(run, call_next)`: gets the `RunContext`, awaits `call_next()` at most once and returns a result."""

AroundCode = Callable[[Any], Any]
"""`def f(run): … yield …`: gets the `RunContext`, and yields once, around the code."""


@dataclass(frozen=True, slots=True)
class Middleware:
    """Functions that belong together, for a yard or one consumer; each may be left out.

    `around_submit` runs in the process that submits. `around_run` runs on the event loop of the node that runs the
    task. `around_code` runs where the code runs: on that loop, in a thread or in a worker process."""

    around_submit: AroundSubmit | None = None
    around_run: AroundRun | None = None
    around_code: AroundCode | None = None

    def __post_init__(self) -> None:
        given = (self.around_submit, self.around_run, self.around_code)
        for one in given:
            if one is not None and not callable(one):
                raise InvalidInput(f"middleware must be a function, not {quote(one)}")
        if not any(given):
            raise InvalidInput(
                "a Middleware without any function has no effect",
                hint="give it around_submit, around_run or around_code",
            )


def check_middleware(given: Iterable[Middleware]) -> tuple[Middleware, ...]:
    """Raises `InvalidInput` for what is no list of `Middleware`."""
    if isinstance(given, str | Middleware) or not isinstance(given, Iterable):
        raise InvalidInput(f"middleware must be a list, such as [Middleware(around_run=…)], not {quote(given)}")
    checked = tuple(given)
    for one in checked:
        if not isinstance(one, Middleware):
            raise InvalidInput(
                f"middleware must be a list of Middleware, not of {quote(one)}",
                hint="write Middleware(around_run=…) around a function",
            )
    return checked


def name_of(function: Any) -> str:
    """The name of a middleware function, for messages."""
    return str(getattr(function, "__qualname__", None) or type(function).__name__)
