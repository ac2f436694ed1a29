"""What a group's tasks have returned, for its summary."""

from __future__ import annotations

import msgspec

from taskyard.errors import PayloadTooLarge, ResultsPruned
from taskyard.model.state import COMPLETED
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.paging import task_pages
from taskyard.ports.store import Store

RESULTS = "results"
"""The argument of a summary that gets what the others returned."""

RESULTS_BYTES = 16 << 20
"""Of all together. They are in memory, and may have to reach another process: what is larger belongs into files."""

PAGE = 100
"""Records read at once: each may hold a megabyte of arguments, and one of result."""


def is_summary(record: TaskRecord) -> bool:
    return record.group_id is not None and record.group_id == record.uuid


def expect_results(record: TaskRecord, count: int) -> None:
    """Note in a new summary how many results it is to get, in place of the argument that they are for, if it has it."""
    args = msgspec.json.decode(record.args, type=dict[str, msgspec.Raw])
    if RESULTS in args:
        args[RESULTS] = msgspec.Raw(str(count))
        record.args = msgspec.json.encode(args).decode()


async def with_results(store: Store, record: TaskRecord) -> TaskRecord:
    """The record of a summary, with the results of the others for its argument of that name, if it has one: in the
    order of their submit, and None for one that has not completed. `ResultsPruned` if there are fewer than it was to
    get: it was sent again after the others were forgotten."""
    args = msgspec.json.decode(record.args, type=dict[str, msgspec.Raw])
    if RESULTS not in args:
        return record
    texts = await _read(store, record.uuid)
    expected = msgspec.json.decode(args[RESULTS], type=int)
    if len(texts) != expected:
        raise ResultsPruned(record.uuid, len(texts), expected)
    filled = record.clone()
    args[RESULTS] = msgspec.Raw(f"[{','.join(texts)}]")
    filled.args = msgspec.json.encode(args).decode()
    return filled


async def _read(store: Store, group: str) -> list[str]:
    texts: list[str] = []
    size = 0
    async for page in task_pages(store.list_tasks, TaskFilter(group=group), size=PAGE):
        for record in page:
            if not is_summary(record):
                texts.append(record.result if record.state is COMPLETED and record.result is not None else "null")
                size += len(texts[-1])
        if size > RESULTS_BYTES:
            raise PayloadTooLarge("the results of the group", size, RESULTS_BYTES)
    return texts[::-1]
