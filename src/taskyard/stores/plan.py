"""What an add comes to that replaces other work or waits for other tasks: decided before anything is written, and the
same for every store that decides in Python."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

from taskyard.errors import AccountQuarantined, DependencyCycle, DuplicateTask, TaskyardError, UnknownTask
from taskyard.model.dedupe import is_replaceable
from taskyard.model.dependency import find_cycle
from taskyard.model.device import read_account
from taskyard.model.state import TaskState
from taskyard.model.task import Dedupe, DedupeScope, OnFailure, TaskRecord
from taskyard.ports.store import Add, Added

RELEASE_AT_MOST = 1000
"""How many tasks are told at once that one they wait for has ended: the rest hear of it in the turns that follow."""


class Holder(NamedTuple):
    """Who stands for some work, and where it is; None if that is forgotten and only its window is left. `until` is when
    that ends, if it stands for a window. `key` is set if the task only runs with that key, and its work is another."""

    uuid: str
    state: TaskState | None
    until: datetime | None = None
    key: str | None = None


class Plan(NamedTuple):
    """`new` are the records to store, in order; `after` says which of them waits for whom; `replaced` which holder
    makes way for which of them."""

    added: list[Added]
    new: list[TaskRecord]
    after: dict[str, list[str]]
    replaced: list[tuple[str, str]]

    def refuse_unknown(self, known: Iterable[str]) -> UnknownTask | None:
        """The first that is waited for and neither `known` nor part of the batch."""
        there = {*known, *(record.uuid for record in self.new)}
        parents = (parent for record in self.new for parent in self.after.get(record.uuid, ()))
        unknown = next((parent for parent in parents if parent not in there), None)
        return None if unknown is None else UnknownTask(unknown)


def is_tied(add: Add) -> bool:
    """Whether an add needs a plan: few do."""
    return bool(add.after) or add.dedupe is Dedupe.REPLACE


def window_end(record: TaskRecord, add: Add, now: datetime) -> datetime | None:
    """Until when a task that is added now stands for its work, if that is a matter of time."""
    if record.dedupe_scope is not DedupeScope.WINDOW or add.window_s is None:
        return None
    return now + timedelta(seconds=add.window_s)


class Holders(Protocol):
    """A store, as far as it is asked for the duplicates of a new task."""

    def find_holder(self, slot: str, now: datetime) -> Holder | None:
        """The task that stands for the work of this slot."""
        ...

    def find_running(self, queue: str, key: str) -> Holder | None:
        """The oldest running task of the queue with this key."""
        ...

    def is_quarantined(self, pool: str, account: str, consumer: str) -> bool:
        """Whether tasks of this account and consumer are refused."""
        ...


def find_duplicate(store: Holders, asked: TaskRecord, dedupe: Dedupe, now: datetime) -> Holder | None:
    """The task that keeps this new one, which has a slot, from being stored, or that it replaces. A task of the same
    work comes before one that only has the same key, except for a replacement: that is refused while the key runs."""
    slot, key = asked.dedupe_slot or "", asked.key
    if asked.dedupe_scope is not DedupeScope.KEY_IDLE or key is None:
        return store.find_holder(slot, now)
    if dedupe is Dedupe.REPLACE:
        return store.find_running(asked.queue, key) or store.find_holder(slot, now)
    return store.find_holder(slot, now) or store.find_running(asked.queue, key)


def is_kept_out(store: Holders, asked: TaskRecord) -> bool:
    """Whether this new task is of an account that is quarantined with its consumer."""
    if asked.dedupe_scope is not DedupeScope.KEY_IDLE or asked.key is None:
        return False
    return store.is_quarantined(asked.queue, asked.key, asked.consumer)


def refuse_quarantined(store: Holders, add: Add) -> AccountQuarantined | None:
    """The first task of a quarantined account, where it keeps all of the add out."""
    if add.dedupe is Dedupe.ALLOW or add.leaves_out:
        return None
    out = next((asked for asked in add.records if is_kept_out(store, asked)), None)
    return None if out is None else AccountQuarantined(read_account(out.key or ""), out.consumer, out.queue)


def make_plan(add: Add, now: datetime, store: Holders) -> Plan | TaskyardError:
    """The plan, or what keeps all of it out."""
    if (quarantined := refuse_quarantined(store, add)) is not None:
        return quarantined
    plan = Plan([], [], {}, [])
    twins: dict[str, Holder] = {}
    stands_for: dict[str, str] = {}
    for asked in add.records:
        slot = None if add.dedupe is Dedupe.ALLOW else asked.dedupe_slot
        if slot is not None:
            holder, twin = find_duplicate(store, asked, add.dedupe, now), twins.get(slot)
            if add.dedupe is Dedupe.MERGE and (existing := twin or holder) is not None:
                plan.added.append(Added(existing.uuid, is_new=False, until=existing.until))
                stands_for[asked.uuid] = existing.uuid
                continue
            if twin is not None or (holder is not None and not _makes_way(add, holder)):
                return refuse(slot, holder)
            if holder is not None:
                plan.replaced.append((holder.uuid, asked.uuid))
            twins[slot] = Holder(asked.uuid, None, window_end(asked, add, now))
        plan.new.append(asked.clone())
        plan.added.append(Added(asked.uuid))
    gone = {holder: place for place, (holder, _) in enumerate(plan.replaced)}
    for record in plan.new:
        if parents := add.after.get(record.uuid):
            meant = dict.fromkeys(stands_for.get(parent, parent) for parent in parents)
            # Those that make way end first, and are what it hears of first.
            plan.after[record.uuid] = sorted(meant, key=lambda parent: gone.get(parent, len(gone)))
            record.on_failure = record.on_failure or OnFailure.FAIL
    cycle = find_cycle({record.uuid: plan.after.get(record.uuid, ()) for record in plan.new})
    return plan if cycle is None else DependencyCycle(cycle)


def refuse(slot: str, holder: Holder | None) -> DuplicateTask:
    """The same work is there, or is twice in the batch, or its key runs."""
    if holder is None:
        return DuplicateTask("", slot)
    return DuplicateTask(holder.uuid, slot, until=holder.until, key=holder.key)


def _makes_way(add: Add, holder: Holder) -> bool:
    return add.dedupe is Dedupe.REPLACE and is_replaceable(holder.state)
