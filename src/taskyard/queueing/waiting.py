"""Why tasks wait, asked of a store: a page at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.model.why import Why, explain_wait
from taskyard.model.why_groups import DRAWN_AT_ONCE, EXPLAINED, WAITING, WaitSummary, WaitTally
from taskyard.ports.paging import id_pages, task_pages
from taskyard.ports.store import Store

PAGE = 1000
"""Tasks whose scene is read at once."""

IDS_AT_ONCE = 5000


async def explain_waits(store: Store, records: Sequence[TaskRecord]) -> list[Why | None]:
    """What holds each of these tasks, in their order; None for one that runs or has ended."""
    found: list[Why | None] = []
    for start in range(0, len(records), PAGE):
        page = records[start : start + PAGE]
        scene = await store.scene(page)
        found += [explain_wait(record, scene) for record in page]
    return found


async def explain_all(store: Store, where: TaskFilter) -> WaitSummary:
    """The reasons of all tasks that wait and match, added up. Up to `EXPLAINED` each is explained; of more, so many are
    drawn, in blocks that lie evenly among all of them."""
    states = WAITING if where.states is None else tuple(state for state in where.states if state in WAITING)
    waiting = msgspec.structs.replace(where, states=states)
    tally = WaitTally()
    if not states:
        return tally.summary(0)
    total, starts = await _count(store, waiting)
    if total <= EXPLAINED:
        pages = task_pages(store.list_tasks, waiting, size=PAGE)
    else:
        blocks = EXPLAINED // DRAWN_AT_ONCE
        pages = _blocks(store, waiting, [starts[n * len(starts) // blocks] for n in range(blocks)])
    async for page in pages:
        tally.add(zip(page, await explain_waits(store, page), strict=True))
    # Race: some may have come or gone since they were counted. Only a sample stands for more than was explained.
    return tally.summary(total if total > EXPLAINED else tally.explained)


async def _count(store: Store, where: TaskFilter) -> tuple[int, list[int]]:
    """How many match, and the id of every hundredth, the newest first."""
    total, starts = 0, list[int]()
    async for page in id_pages(store.list_ids, where, size=IDS_AT_ONCE):
        starts += [id_ for n, (id_, _) in enumerate(page, total) if n % DRAWN_AT_ONCE == 0]
        total += len(page)
    return total, starts


async def _blocks(store: Store, where: TaskFilter, starts: Sequence[int]) -> AsyncIterator[list[TaskRecord]]:
    """The tasks of these blocks."""
    for start in starts:
        yield await store.list_tasks(where, before_id=start + 1, limit=DRAWN_AT_ONCE)
