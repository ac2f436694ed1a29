"""Documents of consumers."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from taskyard.application.documents import Document


class ConsumerDocument(Document, frozen=True, kw_only=True):
    """A consumer that nodes have published. `args_schema` and `result_schema` are JSON schemas, null if they are not
    known. `nodes` are the labels of the live nodes that serve it; `seen_at` is when a node last joined, changed or left
    with it. While a new version is rolled out, a name has several documents. `has_produce`: its own code makes its
    tasks, so a submit needs the app."""

    name: str
    queue: str
    executor: str
    version: str
    timeout_s: float | None
    has_produce: bool
    served: bool
    nodes: tuple[str, ...]
    seen_at: datetime | None
    args_schema: dict[str, Any] | None
    result_schema: dict[str, Any] | None
