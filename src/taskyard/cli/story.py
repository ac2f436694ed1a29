"""Events as lines of text: what `watch` prints when nobody looks at a live view."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from taskyard.cli.documents import Revealed, priority_label
from taskyard.cli.looks import due_text, error_line, progress_text
from taskyard.cli.text import clean, duration, one_line, seconds_between
from taskyard.model.event import Event, EventKind
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task import Attempt, TaskRecord
from taskyard.ports.store import Store

_K = EventKind

WORDS = {
    _K.SUBMITTED: "submitted",
    _K.STARTED: "started",
    _K.PRIORITY_CHANGED: "priority",
    _K.REORDERED: "moved",
    _K.CANCEL_REQUESTED: "stopping",
    _K.QUEUE_PAUSED: "paused",
    _K.QUEUE_STOPPING: "stopping",
    _K.QUEUE_RESUMED: "resumed",
    _K.QUEUE_CHANGED: "changed",
}
"""Where the verb for people is not the name of the event."""

_ENDS = frozenset(EventKind(state) for state in ENDED)

RUN_ENDS = frozenset({_K.COMPLETED, _K.FAILED, _K.CANCELED, _K.RETRYING, _K.QUEUED, _K.INTERRUPTED})

PROGRESS_EVERY_S = 1.0
"""One line of progress a second and task is enough to read."""


@dataclass(frozen=True, slots=True)
class Happening:
    """An event with what is known of its task: the record as it is now, and the run that began or ended with it."""

    event: Event
    record: TaskRecord | None
    run: Attempt | None

    @property
    def verb(self) -> str:
        return WORDS.get(self.event.kind, str(self.event.kind))

    @property
    def took_s(self) -> float | None:
        if self.run is None or self.event.kind not in RUN_ENDS:
            return None
        return seconds_between(self.run.started_at, self.run.finished_at)

    def detail(self, width: int = 200) -> str:
        """What there is to say besides who and what."""
        record, kind = self.record, self.event.kind
        actor = f"by {clean(self.event.actor)}" if self.event.actor else ""
        if record is None:
            return one_line(actor, width)
        shown = Revealed(record)
        parts: list[str] = []
        if kind is _K.STARTED:
            attempt = self.run.attempt if self.run is not None else record.attempt
            parts.append(f"attempt {attempt}" if attempt > 1 else "")
        elif kind is _K.PROGRESS:
            parts.append(progress_text(record, shown, width))
        elif kind is _K.SCHEDULED or (kind is _K.RETRYING and record.state is TaskState.RETRYING):
            parts.append(due_text(record, self.event.at))
        elif kind is _K.SUBMITTED and not record.attempt and record.due_at > self.event.at:
            parts.append(f"due in {duration(seconds_between(self.event.at, record.due_at))}")
        if self.took_s is not None:
            parts.append(("after " if kind is not _K.COMPLETED else "in ") + duration(self.took_s))
        if kind in RUN_ENDS:
            parts.append(self._why(record, shown))
        elif kind is _K.BLOCKED:
            parts.append("waits for other tasks" if not self.event.code else clean(_blocker_text(self.event, record)))
        elif kind is _K.PRIORITY_CHANGED:
            parts.append(priority_label(record.priority))
        parts.append(actor)
        return one_line(" · ".join(filter(None, parts)), width)

    def _why(self, record: TaskRecord, shown: Revealed) -> str:
        error = self.run.error if self.run is not None else record.error
        if error is None or self.event.kind is _K.COMPLETED or (self.event.kind is _K.QUEUED and self.run is None):
            return ""
        return shown.text(error_line(error))


class Teller:
    """Looks up what events are about."""

    def __init__(self, store: Store, *, only: Sequence[str] = ()) -> None:
        self._store, self._only = store, frozenset(only)
        self._last_progress: dict[str, float] = {}

    async def tell(self, events: Sequence[Event]) -> AsyncIterator[Happening]:
        for event in events:
            if self._only and event.uuid not in self._only:
                continue
            if event.kind is _K.PROGRESS and not self._is_due(event):
                continue
            yield await self._look_up(event)

    def _is_due(self, event: Event) -> bool:
        at = event.at.timestamp()
        if at - self._last_progress.get(event.uuid, 0.0) < PROGRESS_EVERY_S:
            return False
        self._last_progress[event.uuid] = at
        return True

    async def _look_up(self, event: Event) -> Happening:
        record = await self._store.find(event.uuid)
        if event.kind in _ENDS:
            self._last_progress.pop(event.uuid, None)
        run = None
        if event.kind is _K.STARTED or event.kind in RUN_ENDS:
            runs = await self._store.list_attempts(event.uuid)
            run = next((run for run in runs if event.at == _edge(event, run)), None)
        return Happening(event, record, run)


def _blocker_text(event: Event, record: TaskRecord) -> str:
    """The blocker of this event, with its detail if the task still has it."""
    blocker = record.blocker
    return event.code if blocker is None or blocker.kind != event.code else blocker.label


def _edge(event: Event, run: Attempt) -> datetime | None:
    """When the run began, for an event that begins one; else when it ended."""
    return run.started_at if event.kind is _K.STARTED else run.finished_at


async def look_back(store: Store, events: int) -> int:
    """The number after which there are about so many events, or all there are. Numbers only grow: on some stores they
    follow each other, on others there is a gap of any size after each."""
    newest = (await store.events(after=-1)).last
    reach = events
    while True:
        start = max(0, newest - reach)
        page = await store.events(after=start, limit=events)
        if start == 0 or page.missed or len(page.events) == events:
            break
        reach *= 16
    seen: deque[int] = deque(maxlen=events)
    while page.events:
        seen.extend(event.seq for event in page.events)
        page = await store.events(after=page.last)
    return seen[0] - 1 if seen else newest


def subject(event: Event) -> str:
    """`hash 01a1e0e2-…`: what an event is about; it may be a whole queue."""
    if not event.uuid:
        return f"queue {clean(event.queue)}"
    return f"{clean(event.consumer)} {clean(event.uuid)}"
