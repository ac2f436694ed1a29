"""Which tasks to list, or to apply a command to."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from taskyard.errors import ChangedMeanwhile, InvalidInput, quote
from taskyard.model.blocker import BlockerKind, split_key
from taskyard.model.command import VERBS, Command
from taskyard.model.failures import is_quarantined
from taskyard.model.given import check_labels, check_text, check_time
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tasks to list, or to ask something of; None means any. `node` is the incarnation that runs the task;
    `error` the name of a class among those of its last error, its bases included, or the kind of one that nobody
    raised, such as "system"; `uuid` how its id begins or ends; `quarantined` whether it was failed because it took its
    workers down; `labels` those that it must have, all of them; `blocker` a kind, such as "disk", or
    a kind and a detail, such as "disk:/data"; "dependency" finds what waits for other tasks."""

    states: tuple[TaskState, ...] | None = None
    queue: str | None = None
    consumer: str | None = None
    group: str | None = None
    key: str | None = None
    node: str | None = None
    error: str | None = None
    uuid: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    finished_after: datetime | None = None
    finished_before: datetime | None = None
    quarantined: bool | None = None
    labels: dict[str, str] = {}
    blocker: str | None = None

    def __post_init__(self) -> None:
        """What is no filter is told at once: it would match nothing, or fail within a store."""
        if self.states is not None:
            force_setattr(self, "states", _states(self.states))
        for name in ("queue", "consumer", "group", "key", "node", "error", "uuid", "blocker"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                hint = f"give its name, {value.__name__!r}" if isinstance(value, type) else ""
                raise InvalidInput("must be a string, or None for any", field=name, given=value, hint=hint)
            if value is not None:
                check_text(name, value)
        for name in ("created_after", "created_before", "finished_after", "finished_before"):
            if (at := getattr(self, name)) is not None:
                force_setattr(self, name, check_time(name, at))
        if self.labels:
            force_setattr(self, "labels", check_labels(self.labels))
        if self.quarantined not in (None, True, False):
            raise InvalidInput("must be True, False, or None for any", field="quarantined", given=self.quarantined)

    def matches(self, record: TaskRecord) -> bool:
        """The same question of one record; from `_after` on, and until right before `_before`."""
        return (
            (self.states is None or record.state in self.states)
            and (self.queue is None or record.queue == self.queue)
            and (self.consumer is None or record.consumer == self.consumer)
            and (self.group is None or record.group_id == self.group)
            and (self.key is None or record.key == self.key)
            and (self.node is None or record.node == self.node)
            and (self.error is None or (record.error is not None and self.error in record.error.names))
            and (self.uuid is None or record.uuid.startswith(self.uuid) or record.uuid.endswith(self.uuid))
            and _is_within(record.created_at, self.created_after, self.created_before)
            and _is_within(record.finished_at, self.finished_after, self.finished_before)
            and (self.quarantined is None or is_quarantined(record) is self.quarantined)
            and (not self.labels or self.labels.items() <= record.labels.items())
            and (self.blocker is None or _is_blocked_by(record, self.blocker))
        )

    def check(self, record: TaskRecord, command: Command) -> None:
        """`ChangedMeanwhile` if the record is not, or no longer, among those that the command is for."""
        if self is not ALL_TASKS and not self.matches(record):
            why = "it does not match the filter, or no longer does"
            if self.queue is not None and self.queue != record.queue:
                why = f"it is in queue {quote(record.queue)}, and this command is for {quote(self.queue)}"
            verb, detail = VERBS[type(command)], f"it is {record.state}; {why}"
            raise ChangedMeanwhile(record.uuid, verb, record.state, code="changed_meanwhile", detail=detail)


def _states(given: Any) -> tuple[TaskState, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidInput("must be a list of states, such as ['failed']", field="states", given=given)
    states = tuple(dict.fromkeys(given))
    for state in states:
        if state not in set(TaskState):
            raise InvalidInput(
                f"has {quote(state)}, which is not a state", field="states", hint=f"states are {', '.join(TaskState)}"
            )
    return tuple(map(TaskState, states))


def _is_within(at: datetime | None, after: datetime | None, before: datetime | None) -> bool:
    if at is None:
        return after is None and before is None
    return (after is None or at >= after) and (before is None or at < before)


def _is_blocked_by(record: TaskRecord, wanted: str) -> bool:
    if wanted == BlockerKind.DEPENDENCY:
        return record.state is TaskState.BLOCKED and record.blocked_by is None
    return record.blocked_by is not None and wanted in (record.blocked_by, split_key(record.blocked_by)[0])


ALL_TASKS = TaskFilter()
