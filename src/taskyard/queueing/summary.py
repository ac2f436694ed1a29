"""What a group's tasks have returned, for its summary."""

from __future__ import annotations

import msgspec

from taskyard.errors import PayloadTooLarge
from taskyard.model.state import COMPLETED
from taskyard.model.task import TaskRecord
from taskyard.ports.store import Store, TaskFilter

RESULTS = "results"
"""The argument of a summary that gets what the others returned."""

RESULTS_BYTES = 16 << 20
"""Of all together. They are in memory, and may have to reach another process: what is larger belongs into files."""

PAGE = 100
"""Records read at once: each may hold a megabyte of arguments, and one of result."""


def is_summary(record: TaskRecord) -> bool:
    return record.group_id is not None and record.group_id == record.uuid


async def with_results(store: Store, record: TaskRecord) -> TaskRecord:
    """The record of a summary, with the results of the others for its argument of that name, if it has one: in the
    order of their submit, and None for one that has not completed."""
    args = msgspec.json.decode(record.args, type=dict[str, msgspec.Raw])
    if RESULTS not in args:
        return record
    filled = record.clone()
    args[RESULTS] = msgspec.Raw(await _read(store, record.uuid))
    filled.args = msgspec.json.encode(args).decode()
    return filled


async def _read(store: Store, group: str) -> str:
    texts: list[str] = []
    size, before_id = 0, None
    while page := await store.list_tasks(TaskFilter(group=group), before_id=before_id, limit=PAGE):
        for record in page:
            if not is_summary(record):
                texts.append(record.result if record.state is COMPLETED and record.result is not None else "null")
                size += len(texts[-1])
        if size > RESULTS_BYTES:
            raise PayloadTooLarge("the results of the group", size, RESULTS_BYTES)
        before_id = page[-1].id
    return f"[{','.join(reversed(texts))}]"
