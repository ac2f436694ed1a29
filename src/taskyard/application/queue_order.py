"""A queue in the order in which it will start, and the places of tasks after a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from taskyard.application import queue_order_documents as documents
from taskyard.application.queue_order_documents import QueueOrderDocument, TaskPlace
from taskyard.application.task_documents import TaskDocument, priority_name, why_document
from taskyard.model.queue_order import LARGEST_LIMIT, QueueEntry, QueueOrderView
from taskyard.model.redaction import Redactor
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.yard import Yard

FIRST_LOOK = 20
"""Places looked at first: most commands put a task at the head."""


async def find_order(yard: Yard, name: str, *, limit: int, concurrency: int | None) -> QueueOrderDocument:
    view = await yard.queue(name).order(limit=limit, concurrency=concurrency)
    other = view.what_if
    records = await _find_records(yard, (*view.running, *view.waiting, *view.apart))
    return QueueOrderDocument(
        queue=view.queue,
        at=view.now,
        state=view.state,
        order=view.order,
        concurrency=view.concurrency,
        slots=view.slots,
        counts=dict(view.counts),
        running=_entries(view.running, records),
        waiting=_entries(view.waiting, records),
        apart=_entries(view.apart, records),
        finished_at=view.finished_at,
        is_exact=view.is_exact,
        is_lower_bound=view.is_lower_bound,
        without_median=tuple(view.without_median),
        what_if=None
        if other is None
        else documents.WhatIf(
            concurrency=other.concurrency,
            slots=other.slots,
            finished_at=other.finished_at,
            is_lower_bound=other.is_lower_bound,
        ),
    )


async def _find_records(yard: Yard, entries: Sequence[QueueEntry]) -> Mapping[str, TaskRecord]:
    """Words that people wrote may quote a secret among the arguments, which a forecast does not read."""
    uuids = [e.uuid for e in entries if e.title or e.progress is not None or e.state is not TaskState.QUEUED]
    return await yard.store.find_tasks(uuids) if uuids else {}


def _entries(entries: Sequence[QueueEntry], records: Mapping[str, TaskRecord]) -> tuple[documents.QueueEntry, ...]:
    return tuple([_entry(entry, records.get(entry.uuid)) for entry in entries])


def _entry(entry: QueueEntry, record: TaskRecord | None) -> documents.QueueEntry:
    title = entry.title if record is None else Redactor(record).text(entry.title)
    why = None
    if entry.why is not None:
        why = why_document(entry.why, Redactor(record or _nameless(entry)))
    return documents.QueueEntry(
        uuid=entry.uuid,
        consumer=entry.consumer,
        title=title,
        state=entry.state,
        priority=priority_name(entry.priority),
        key=entry.key,
        place=entry.place,
        created_at=entry.created_at,
        due_at=entry.due_at,
        started_at=entry.started_at,
        progress=entry.progress if record is None else Redactor(record).value(entry.progress),
        expected_start_at=entry.expected_start_at,
        expected_end_at=entry.expected_end_at,
        is_late=entry.is_late,
        is_estimated=entry.is_estimated,
        what_if_start_at=entry.what_if_start_at,
        why=why,
    )


def _nameless(entry: QueueEntry) -> TaskRecord:
    return TaskRecord(entry.uuid, entry.consumer, entry.due_at, entry.created_at, entry.created_at)


async def find_places(yard: Yard, tasks: Sequence[TaskDocument]) -> dict[str, TaskPlace]:
    """The places of these tasks in their queues, by id; a task that does not wait, or is far behind, has none."""
    places: dict[str, TaskPlace] = {}
    for queue in {task.queue for task in tasks}:
        queued = [task for task in tasks if task.queue == queue and task.state is TaskState.QUEUED]
        for limit in (FIRST_LOOK, LARGEST_LIMIT) if queued else ():
            view = await yard.queue(queue).order(limit=limit)
            places |= _places(view, queued)
            if len(view.waiting) == view.waiting_count or all(task.uuid in places for task in queued):
                break
    return places


def _places(view: QueueOrderView, tasks: Sequence[TaskDocument]) -> dict[str, TaskPlace]:
    found = {task.uuid: view.find_place(task.uuid) for task in tasks}
    return {
        task.uuid: TaskPlace(queue=view.queue, place=place, waiting=view.waiting_count, priority=task.priority)
        for task in tasks
        if (place := found[task.uuid]) is not None
    }
