"""Many calls of one function as one call. Apart from the pool, because a worker imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taskyard.execution.calls import key_of
from taskyard.execution.code_loop import finish


class Chunk:
    """Calls a function for every row of a chunk."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.wire_key = key_of(function)

    def __reduce__(self) -> tuple[Any, ...]:
        return Chunk, (self.function,)

    def __call__(self, rows: tuple[tuple[Any, ...], ...]) -> list[Any]:
        return [finish(self.function(*row)) for row in rows]
