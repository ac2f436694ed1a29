"""Values to test with: records, nodes, demands, errors. A builder takes the fields that matter."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.limits import Demand
from taskyard.model.node import Node
from taskyard.model.task import Claim, Dedupe, TaskRecord, new_uuid
from taskyard.ports.store import Add
from taskyard.testing.clock import START

NOON = START


def seconds(n: float) -> timedelta:
    return timedelta(seconds=n)


def a_record(at: datetime = NOON, **fields: Any) -> TaskRecord:
    """A record as a submit makes it, due `at` unless `due_at` says otherwise."""
    return TaskRecord(
        **{"uuid": new_uuid(), "consumer": "fetch", "due_at": at, "created_at": at, "updated_at": at, **fields}
    )


def an_add(*records: TaskRecord, dedupe: Dedupe = Dedupe.ALLOW, parent: Claim | None = None) -> Add:
    return Add(records, dedupe, parent)


def a_node(name: str) -> Node:
    return Node(
        incarnation=f"incarnation-{name}",
        name=name,
        pid=1,
        host="host",
        consumers=("fetch", "shrink"),
        started_at=NOON,
        version="1.2",
        queues=("cpu", "default"),
    )


def room(total: int, *, others: int = 0, **sources: int) -> Demand:
    """Room for `total`; without sources, for that many of any source."""
    if not sources and not others:
        return Demand(total, {}, total)
    return Demand(total, sources, others)


def an_error(kind: ErrorKind = ErrorKind.RUNTIME, message: str = "boom", *types: str, **details: Any) -> ExecutionError:
    names = types or ("OSError", "Exception", "BaseException")
    return ExecutionError(kind=kind, message=message, types=names, details=details)
