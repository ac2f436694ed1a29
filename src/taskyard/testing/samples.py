"""Values to test with: a clock that stands still, records, nodes, demands. A builder takes the fields that matter."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.limits import Demand
from taskyard.model.task import Claim, Dedupe, TaskRecord, new_uuid
from taskyard.ports.store import Add, Node

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class FixedClock:
    """A clock that stands still until it is moved."""

    def __init__(self, at: datetime = NOON) -> None:
        self._now = at
        self._mono = 1000.0

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._mono

    async def wait(self, wake: asyncio.Event, until_mono: float | None) -> None:
        if until_mono is None or until_mono > self._mono:
            await wake.wait()

    def advance(self, seconds: float) -> datetime:
        """Time passes; the new wall time."""
        self._now += timedelta(seconds=seconds)
        self._mono += seconds
        return self._now

    def step(self, seconds: float) -> datetime:
        """Somebody sets the wall clock; no time passes."""
        self._now += timedelta(seconds=seconds)
        return self._now


def seconds(n: float) -> timedelta:
    return timedelta(seconds=n)


def a_record(at: datetime = NOON, **fields: Any) -> TaskRecord:
    """A record as a submit makes it, due `at` unless `due_at` says otherwise."""
    return TaskRecord(
        **{"uuid": new_uuid(), "source": "fetch", "due_at": at, "created_at": at, "updated_at": at, **fields}
    )


def an_add(*records: TaskRecord, dedupe: Dedupe = Dedupe.ALLOW, parent: Claim | None = None) -> Add:
    return Add(records, dedupe, parent)


def a_node(name: str) -> Node:
    return Node(incarnation=f"incarnation-{name}", name=name, pid=1, host="host", sources=("fetch", "shrink"))


def room(total: int, *, others: int = 0, **sources: int) -> Demand:
    """Room for `total`; without sources, for that many of any source."""
    if not sources and not others:
        return Demand(total, {}, total)
    return Demand(total, sources, others)


def an_error(kind: ErrorKind = ErrorKind.RUNTIME, message: str = "boom", *types: str, **details: Any) -> ExecutionError:
    names = types or ("OSError", "Exception", "BaseException")
    return ExecutionError(kind=kind, message=message, types=names, details=details)
