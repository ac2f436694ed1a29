"""The base of requests and documents, and small values that several of them have.

A request is what a call takes, a document what it returns. Both are frozen structs of plain data with a JSON schema:
they mean the same in this process and over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from taskyard.model.state import TaskState


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a call takes. An unknown field is refused, not ignored. A subclass repeats `frozen`, for
    mypy, and `kw_only`."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What a call returns."""


class ErrorDocument(Document, frozen=True, kw_only=True):
    """An error. Programs compare the `code`, which never changes; people read the `message`. `field` is the parameter
    at fault, if one is, `hint` the part of the message that says what to do. `data` are the values that the error
    carries, such as the id of the task."""

    code: str
    message: str
    field: str | None = None
    hint: str = ""
    data: dict[str, Any] = {}


def sum_states(
    counts: Mapping[tuple[str, TaskState], int], queues: Iterable[str] | None = None
) -> dict[TaskState, int]:
    """Tasks per state, over all queues or over these; states without any are left out."""
    only = None if queues is None else set(queues)
    total: dict[TaskState, int] = {}
    for (queue, state), n in counts.items():
        if only is None or queue in only:
            total[state] = total.get(state, 0) + n
    return {state: total[state] for state in TaskState if total.get(state)}
