"""Consumers and middleware that worker processes can import."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from taskyard import current_run
from taskyard.middleware import RunContext


def open_here(run: RunContext) -> Iterator[None]:
    """Open something where the code runs."""
    run.values["opened_in"] = os.getpid()
    print("opened")
    yield
    print("closed")


def swallow(run: RunContext) -> Iterator[None]:
    with contextlib.suppress(ValueError):
        yield


def see_values(x: int = 0) -> dict[str, Any]:
    print(f"code {x}")
    kept = {name: value for name, value in current_run().values.items() if name != "connection"}
    return {**kept, "pid": os.getpid()}


async def see_values_async(x: int = 0) -> dict[str, Any]:
    return see_values(x)


def fail(x: int = 0) -> None:
    raise ValueError("from the code")


async def fail_async(x: int = 0) -> None:
    raise ValueError("from the code")


def see_opened(data: int) -> list[int]:
    """As an algorithm: the process that the middleware has opened something in, and this one."""
    return [current_run().values["opened_in"], os.getpid(), data]
