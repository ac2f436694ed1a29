"""The work on a store, whatever the store: what runs, what waits for whom, what is late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from taskyard.cli.doctor.finding import Finding, problem, warning
from taskyard.cli.text import clean, duration, seconds_between
from taskyard.errors import quote
from taskyard.model.node import Node
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.ports.schedules import ScheduleStatus

CLOCK_S = 60.0
"""How late a task may be queued, and how far ahead of us the newest entry may be."""


@dataclass(frozen=True, slots=True)
class Work:
    """What was seen: tasks by state, those that run, the sources of those that could start, the nodes that live, when
    the first waiting task is due, when the newest change was made, and all schedules."""

    counts: Mapping[TaskState, int]
    running: Sequence[TaskRecord]
    waiting: Sequence[str]
    workers: Sequence[Node]
    due_at: datetime | None
    newest_at: datetime | None
    now: datetime
    schedules: Sequence[ScheduleStatus] = ()


def work(seen: Work) -> Iterator[Finding]:
    text = ", ".join(f"{n:,} {state}" for state, n in seen.counts.items()) or "none yet"
    yield Finding("tasks", text, data={"counts": dict(seen.counts)})
    yield from _oldest_running(seen)
    yield from _unserved(seen)
    yield from _overdue(seen)
    yield from _clock(seen)
    yield from _unreadable(seen)


def _oldest_running(seen: Work) -> Iterator[Finding]:
    if seen.running:
        task = min(seen.running, key=lambda task: task.started_at or seen.now)
        since = seconds_between(task.started_at, seen.now)
        text = f"{clean(task.consumer)} {clean(task.uuid)}, for {duration(since)}"
        yield Finding("oldest running", text, data={"uuid": task.uuid, "running_s": since})


def _unserved(seen: Work) -> Iterator[Finding]:
    """Tasks that wait for a consumer which no living worker has."""
    served = {source for node in seen.workers for source in node.consumers}
    for source in sorted(set(seen.waiting) - served):
        what = "no worker runs" if not seen.workers else "no running worker has this consumer"
        advice = "start a worker whose app has it: taskyard worker module:yard"
        yield warning("unserved", f"tasks for {clean(source)!r} wait, and {what}", advice, consumer=source)


def _overdue(seen: Work) -> Iterator[Finding]:
    """What is due is queued at once by any worker; if it is not, none is at work."""
    late = None if seen.due_at is None else (seen.now - seen.due_at).total_seconds()
    if late is not None and late > CLOCK_S:
        text = f"a task has been due for {duration(late)} and was not queued"
        yield warning("overdue", text, "start a worker" if not seen.workers else "see whether its workers hang")


def _unreadable(seen: Work) -> Iterator[Finding]:
    for status in seen.schedules:
        if status.schedule is None:
            yield problem(
                "schedule",
                f"{quote(status.name)} cannot be read here, and does not fire: {status.problem}",
                "upgrade Taskyard or tzdata here; or define it anew, or remove it: taskyard schedule rm",
                name=status.name,
            )


def _clock(seen: Work) -> Iterator[Finding]:
    ahead = 0.0 if seen.newest_at is None else (seen.newest_at - seen.now).total_seconds()
    if ahead > CLOCK_S:
        yield warning(
            "clock",
            f"the store's newest entry is {duration(ahead)} in the future",
            "a clock was or is wrong; check this machine's with `timedatectl`",
            ahead_s=ahead,
        )
