"""A finding, and the rules on what every store has: its schema, tasks, schedules and the clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from taskyard.application.formatting import duration, seconds_between
from taskyard.errors import StoreMigrationChanged, StoreTooNew, quote
from taskyard.model.node import Node
from taskyard.model.state import TaskState
from taskyard.ports.store import Schema
from taskyard.stores.inspection import StoreActivity

LATE_S = 60.0
"""Seconds: how late a task may be queued, and how far in the future the newest change may be."""


class Level(StrEnum):
    """WARNING: worth a look. PROBLEM: keeps tasks from running, or soon will."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One result of the doctor: a short `topic`, what was found, and what to do about it. `data` is for programs."""

    topic: str
    level: Level
    text: str
    hint: str | None = None
    data: dict[str, Any] = {}


def ok(topic: str, text: str, **data: Any) -> Finding:
    return Finding(topic=topic, level=Level.OK, text=text, data=data)


def warning(topic: str, text: str, hint: str, **data: Any) -> Finding:
    return Finding(topic=topic, level=Level.WARNING, text=text, hint=hint, data=data)


def problem(topic: str, text: str, hint: str, **data: Any) -> Finding:
    return Finding(topic=topic, level=Level.PROBLEM, text=text, hint=hint, data=data)


# --- the schema -------------------------------------------------------------------------------------------------------


def describe_schema(found: Schema) -> Finding:
    text = f"version {found.version}"
    if found.pending:
        text += f"; `taskyard migrate`, or the next process that opens the store, applies {', '.join(found.pending)}"
    return ok("schema", text, schema=found.version, newest=found.newest)


def describe_refusal(error: StoreTooNew | StoreMigrationChanged) -> Finding:
    """This Taskyard cannot open the store."""
    if isinstance(error, StoreTooNew):
        kind = "" if error.what == "schema" else f"{error.what} "
        text = f"{kind}version {error.found}, while this Taskyard knows up to {error.supported}"
        return problem("schema", text, "upgrade Taskyard here; nothing was changed", schema=error.found)
    text = f"the store was made with another text of {error.changed} than this Taskyard has"
    return problem("schema", text, "install the Taskyard that made it, or a later release; nothing was changed")


# --- tasks ------------------------------------------------------------------------------------------------------------


def check_activity(seen: StoreActivity, workers: Sequence[Node]) -> Iterator[Finding]:
    """Tasks, schedules and the clock of a store on which these nodes are alive."""
    counts = _sum_states(seen.counts)
    yield ok("tasks", ", ".join(f"{n:,} {state}" for state, n in counts.items()) or "none yet", counts=counts)
    yield from _oldest_running(seen)
    yield from _without_consumer(seen, workers)
    yield from _overdue(seen, workers)
    yield from _clock(seen)
    yield from _unreadable_schedules(seen)


def _sum_states(counts: Mapping[tuple[str, TaskState], int]) -> dict[str, int]:
    total = {str(state): 0 for state in TaskState}
    for (_, state), n in counts.items():
        total[str(state)] += n
    return {state: n for state, n in total.items() if n}


def _oldest_running(seen: StoreActivity) -> Iterator[Finding]:
    if seen.running:
        task = min(seen.running, key=lambda task: task.started_at or seen.now)
        since = seconds_between(task.started_at, seen.now)
        text = f"{task.consumer} {task.uuid}, for {duration(since)}"
        yield ok("oldest running", text, uuid=task.uuid, running_s=since)


def _without_consumer(seen: StoreActivity, workers: Sequence[Node]) -> Iterator[Finding]:
    """Queued tasks whose consumer no living worker has."""
    served = {consumer for node in workers for consumer in node.consumers}
    for consumer in sorted(set(seen.waiting_consumers) - served):
        reason = "no worker is running" if not workers else "no running worker has this consumer"
        hint = "start a worker whose app has it: taskyard worker module:yard"
        yield warning("no consumer", f"tasks for {consumer!r} wait, and {reason}", hint, consumer=consumer)


def _overdue(seen: StoreActivity, workers: Sequence[Node]) -> Iterator[Finding]:
    """Any worker queues a due task at once."""
    late = None if seen.due_at is None else (seen.now - seen.due_at).total_seconds()
    if late is not None and late > LATE_S:
        text = f"a task has been due for {duration(late)} and was not queued"
        yield warning("overdue", text, "start a worker" if not workers else "check whether its workers hang")


def _clock(seen: StoreActivity) -> Iterator[Finding]:
    ahead = 0.0 if seen.newest_at is None else (seen.newest_at - seen.now).total_seconds()
    if ahead > LATE_S:
        text = f"the store's newest entry is {duration(ahead)} in the future"
        hint = "a clock is or was wrong: check the one of this machine with `timedatectl`"
        yield warning("clock", text, hint, ahead_s=ahead)


def _unreadable_schedules(seen: StoreActivity) -> Iterator[Finding]:
    for status in seen.schedules:
        if status.schedule is None:
            yield problem(
                "schedule",
                f"{quote(status.name)} cannot be read here, and does not fire: {status.problem}",
                "upgrade Taskyard or tzdata here, define the schedule again, or remove it: taskyard schedule rm",
                name=status.name,
            )
