"""A queue in the order in which it will start: what a store reads for it, and what people are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from datetime import datetime

import msgspec

from taskyard.model.execution import Progress
from taskyard.model.fairness import NO_FAIRNESS_STATE, FairnessState
from taskyard.model.queue import QueueOrder, QueueState
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.why import Scene, Why

LARGEST_LIMIT = 1_000
"""Tasks listed at most: a person does not read more, and each is played."""

RUNS_NEEDED = 3
"""Completed runs of a consumer that make a median."""

RUNS_COUNTED = 50
"""Of the latest runs of a consumer, so many count for its median: an hour ago it may have had other work."""

RUNS_READ = 5_000
"""Finished tasks of all consumers that are read for the medians, the latest: some ten milliseconds."""

RUNS_SEARCHED = 100_000
"""Finished tasks that are read if a consumer has too few runs among those: consumers with many runs leave no others
there. Some fifty milliseconds; an index by consumer would cost each task that completes."""

MORE_READ = 50
"""Tasks that are read beyond the limit where some take a turn without a place: what holds up a line, what comes due."""

PARTS_READ = 4_000
"""Tasks that are read of all lanes together, of all lines, and of all keys: each has its share of them."""

FEWEST_READ = 5
"""Tasks of a lane, a line or a key that are read however many there are."""

RUNNING_READ = 1_000
LANES_READ = 200
"""Lanes, or lines, of which tasks are read. Those with more are forecast from a part of them."""

DUE_READ = 5_000
"""Tasks of all queues that wait for their time and are read to find those of one queue, the first to be due first."""

COUNTED = 10_000
"""Tasks of a lane that are counted where a store keeps no count of lanes."""


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a store reads of one queue, in a number of rows that does not grow with the queue. `counts` are exact.
    `consumers` says how many queued tasks each consumer has; where a store does not count them, it estimates.

    `records` has at most some thousands, each once and without its arguments: what runs; of each lane and priority, or
    of each line of a strict queue, the first tasks; of each key of those, the first that are queued; the first that are
    held or blocked; and the first that wait for their time. `scene` is what stands around them. `line_ends` has the
    last position that was read of each line with more tasks: behind it only those with a key were read. `cuts` has the
    ids of the last tasks that were read of a part with more: nobody knows what follows once such a task has started.
    `has_keys` is False if no queued task has a key."""

    queue: str
    scene: Scene
    counts: Mapping[TaskState, int] = {}
    consumers: Mapping[str, int] = {}
    fairness: FairnessState = NO_FAIRNESS_STATE
    records: Sequence[TaskRecord] = ()
    line_ends: Mapping[str, int] = {}
    cuts: Set[int] = frozenset()
    has_keys: bool = False

    @property
    def all_consumers(self) -> set[str]:
        return {*self.consumers, *(record.consumer for record in self.records)}


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a queue. `place` counts those that wait from 1, the first to start. `expected_start_at` is left out
    where it cannot be told: before a consumer has three completed runs, for all that starts after such a task, and
    where something holds it. `expected_end_at` is that of a task that runs; a task that has run longer than the median
    has none and `is_late`. `what_if_start_at` is when it would start under the concurrency that was asked about. With
    `is_estimated` these starts come after a run that is late: nobody knows how long it still takes. `why` says what
    holds a task that waits."""

    uuid: str
    consumer: str
    state: TaskState
    priority: int
    title: str = ""
    key: str | None = None
    place: int | None = None
    created_at: datetime
    due_at: datetime
    started_at: datetime | None = None
    progress: Progress | None = None
    expected_start_at: datetime | None = None
    expected_end_at: datetime | None = None
    is_late: bool = False
    is_estimated: bool = False
    what_if_start_at: datetime | None = None
    why: Why | None = None


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The same queue under another concurrency. `slots` is how many of its tasks would run at once then, by what the
    workers take: more concurrency than they have room for changes nothing."""

    concurrency: int
    slots: int | None
    finished_at: datetime | None
    is_lower_bound: bool = False


class QueueOrderView(msgspec.Struct, frozen=True, kw_only=True):
    """A queue in the order in which it will start, at `now`, as far as is known then.

    `running` is what runs, the longest first; `waiting` what will start, first to start first; `apart` what starts only
    when something else has happened: held, blocked, or waiting for its time. Each has at most as many entries as were
    asked for, and `waiting` fewer if the queue has very many lanes or keys; `counts` has all of them, by state.

    `finished_at` is when all that runs and waits now will have ended, None if that cannot be told. It is exact, as far
    as medians are, if all that waits is listed and no run is late (`is_exact`), and otherwise estimated from how many
    tasks each consumer has. With `is_lower_bound` it may be much later: tasks with a key wait for each other, and not
    all were read. `without_median` are the consumers with too few runs. `concurrency` is the limit of the queue, None
    if it has none; `slots` how many of its tasks the workers that are there run at once within it, None if they have no
    limit."""

    queue: str
    now: datetime
    state: QueueState
    order: QueueOrder
    concurrency: int | None
    slots: int | None
    counts: Mapping[TaskState, int]
    running: Sequence[QueueEntry] = ()
    waiting: Sequence[QueueEntry] = ()
    apart: Sequence[QueueEntry] = ()
    finished_at: datetime | None = None
    is_exact: bool = False
    is_lower_bound: bool = False
    without_median: Sequence[str] = ()
    what_if: WhatIf | None = None

    @property
    def waiting_count(self) -> int:
        """How many wait to start, listed or not: `place 3 of 14`."""
        return self.counts.get(TaskState.QUEUED, 0)

    def find_place(self, uuid: str) -> int | None:
        """The place of a task; None if it is not among those listed."""
        return next((entry.place for entry in self.waiting if entry.uuid == uuid), None)
