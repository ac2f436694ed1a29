"""Why tasks wait, asked of a store: a page at a time."""

from __future__ import annotations

from collections.abc import Sequence

from taskyard.model.task import TaskRecord
from taskyard.model.why import Why, explain_wait
from taskyard.ports.store import Store

PAGE = 1000
"""Tasks whose scene is read at once."""


async def explain_waits(store: Store, records: Sequence[TaskRecord]) -> list[Why | None]:
    """What holds each of these tasks, in their order; None for one that runs or has ended."""
    found: list[Why | None] = []
    for start in range(0, len(records), PAGE):
        page = records[start : start + PAGE]
        scene = await store.scene(page)
        found += [explain_wait(record, scene) for record in page]
    return found
