"""Events: what happened on a store, page by page or as a stream."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from taskyard.application.calls import YardContext, check_limit
from taskyard.application.event_documents import EventDocument, EventPageDocument
from taskyard.application.formatting import seconds_between
from taskyard.application.rates import recent_cursor
from taskyard.application.task_documents import TaskDocument, priority_name, task_error
from taskyard.model.event import ANY_EVENT, Event, EventFilter, EventKind
from taskyard.model.redaction import Redactor
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, TaskRecord
from taskyard.ports.store import Store
from taskyard.yard import Yard

_K = EventKind

ATTEMPT_ENDS = frozenset({_K.COMPLETED, _K.FAILED, _K.CANCELED, _K.RETRYING, _K.QUEUED, _K.INTERRUPTED})
"""Kinds of events with which an attempt may finish."""

TASK_ENDS = frozenset({_K.FAILED, _K.CANCELED, _K.SKIPPED, _K.RETRYING, _K.INTERRUPTED})
"""Kinds of events after which the error of the task is news, also if no attempt finished."""

MAX_DESCRIBED = 2_000
"""Descriptions that are kept for other subscribers: as many events as wait for one that is slow."""


class LocalEvents:
    """`EventCalls` on a yard."""

    def __init__(self, context: YardContext) -> None:
        self._context = context

    async def read(
        self,
        where: EventFilter = ANY_EVENT,
        *,
        after: int | None = None,
        tail: int | None = None,
        limit: int = 1000,
    ) -> EventPageDocument:
        check_limit(limit)
        if tail is not None:
            check_limit(tail, field="tail")
        store = self._context.yard.store
        if after is None:
            after = -1 if tail is None else await recent_cursor(store, tail)
        page = await store.events(after=after, limit=limit)
        events = await describe_events(store, [event for event in page.events if where.matches(event)])
        return EventPageDocument(events=tuple(events), last=page.last, missed=page.missed)

    async def subscribe(
        self, where: EventFilter = ANY_EVENT, *, after: int | None = None
    ) -> AsyncIterator[EventDocument]:
        yard = self._context.yard
        describer = find_describer(yard)
        events = yard.events(after=after, kinds=where.kinds, queue=where.queue, consumer=where.consumer)
        async with aclosing(events):
            async for event in events:
                if where.matches(event):
                    yield await describer.describe(event)


class EventDescriber:
    """Describes an event once for all subscribers, with what its task was when the first of them got it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[int, tuple[Event, EventDocument]] = OrderedDict()
        """By number; the one that was asked for last comes last."""
        self._turn = asyncio.Lock()

    async def describe(self, event: Event) -> EventDocument:
        if (known := self._find(event)) is not None:
            return known
        async with self._turn:
            if (known := self._find(event)) is not None:  # another subscriber has had it described meanwhile
                return known
            (document,) = await describe_events(self._store, [event])
            self._known[event.seq] = (event, document)
            if len(self._known) > MAX_DESCRIBED:
                self._known.popitem(last=False)
            return document

    def _find(self, event: Event) -> EventDocument | None:
        described, document = self._known.get(event.seq, (None, None))
        if described != event:  # a store that was restored gives a number again
            return None
        self._known.move_to_end(event.seq)
        return document


_DESCRIBERS: WeakKeyDictionary[object, EventDescriber] = WeakKeyDictionary()
"""By engine: a yard that is opened again has another one."""


def find_describer(yard: Yard) -> EventDescriber:
    """The one of all applications on this open yard. Raises `NotOpen`."""
    return _DESCRIBERS.setdefault(yard._engine, EventDescriber(yard.store))


async def describe_events(store: Store, events: Sequence[Event]) -> list[EventDocument]:
    """The events with what their tasks are now. Each task is read once, however many of the events are about it."""
    records: dict[str, TaskRecord | None] = {}
    attempts: dict[str, list[Attempt]] = {}
    documents = []
    for event in events:
        uuid = event.uuid
        if uuid and uuid not in records:
            records[uuid] = await store.find(uuid)
        if uuid and uuid not in attempts and (event.kind is _K.STARTED or event.kind in ATTEMPT_ENDS):
            attempts[uuid] = await store.list_attempts(uuid)
        attempt = next((one for one in attempts.get(uuid, ()) if event.at == _edge(event, one)), None)
        documents.append(event_document(event, records.get(uuid), attempt))
    return documents


def _edge(event: Event, attempt: Attempt) -> datetime | None:
    """When the attempt began, for an event that begins one; else when it finished."""
    return attempt.started_at if event.kind is _K.STARTED else attempt.finished_at


def event_document(event: Event, record: TaskRecord | None, attempt: Attempt | None) -> EventDocument:
    """`record` is the task as it is now, `attempt` the one that began or finished with the event."""
    found: dict[str, Any] = {} if record is None else _from_record(event, record, attempt)
    return EventDocument(
        seq=event.seq,
        at=event.at,
        kind=event.kind,
        uuid=event.uuid,
        consumer=event.consumer,
        queue=event.queue,
        before=event.before,
        after=event.after,
        actor=event.actor or None,
        code=event.code or None,
        device=event.device or found.pop("device", None),
        is_alert=event.is_alert,
        **found,
    )


def _from_record(event: Event, record: TaskRecord, attempt: Attempt | None) -> dict[str, Any]:
    redactor, kind = Redactor(record), event.kind
    found: dict[str, Any] = {"attempt": record.attempt if attempt is None else attempt.attempt}
    if attempt is not None:
        found["node"] = attempt.node
        found["device"] = attempt.device
    elif kind is _K.STARTED:
        found["node"] = record.node
        found["device"] = record.device
    if attempt is not None and kind in ATTEMPT_ENDS:
        found["duration_s"] = seconds_between(attempt.started_at, attempt.finished_at)
    if kind is _K.PROGRESS:
        found["progress"] = redactor.value(event.progress or record.progress)
    error = record.error if attempt is None else attempt.error
    if error is not None and (kind in TASK_ENDS or attempt is not None):
        found["error"] = task_error(msgspec.structs.replace(error, traceback=None), redactor)
    if _waits_for_time(event, record):
        found["due_at"] = record.due_at
    if kind is _K.PRIORITY_CHANGED:
        found["priority"] = priority_name(record.priority)
    if kind is _K.BLOCKED and event.code:
        blocker = record.blocker
        found["blocker"] = event.code if blocker is None or blocker.kind != event.code else blocker.label
    return found


def _waits_for_time(event: Event, record: TaskRecord) -> bool:
    match event.kind:
        case EventKind.SCHEDULED:
            return True
        case EventKind.RETRYING:
            return record.state is TaskState.RETRYING
        case EventKind.SUBMITTED:
            return not record.attempt and record.due_at > event.at
        case _:
            return False


def standing_event(task: TaskDocument, seq: int) -> EventDocument:
    """The state of a task as an event, as if the task had just come into it."""
    at = task.started_at if task.state is TaskState.RUNNING else task.finished_at
    return EventDocument(
        seq=seq,
        at=at or task.updated_at,
        kind=EventKind.SUBMITTED if task.state is TaskState.CREATED else EventKind(task.state),
        uuid=task.uuid,
        consumer=task.consumer,
        queue=task.queue,
        attempt=task.attempt,
        duration_s=task.duration_s,
        error=None if task.state is TaskState.COMPLETED else task.error,
    )
