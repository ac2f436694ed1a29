"""The store's transactions in memory, each of them one synchronous call."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from taskyard.errors import (
    ClaimLost,
    CommandRefused,
    DuplicateTask,
    InvalidInput,
    TaskyardError,
    UnknownNode,
    UnknownTask,
)
from taskyard.model.audit import AuditEntry
from taskyard.model.catalogue import ConsumerSpec, StoredSpec
from taskyard.model.command import (
    Asked,
    Change,
    Command,
    Redate,
    Reorder,
    anchor_of,
    apply_change,
    change_detail,
    decide,
)
from taskyard.model.event import EventDetail, EventKind, submit_detail
from taskyard.model.fairness import NO_FAIRNESS_STATE
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.node import Node
from taskyard.model.order import GAP, head_position, tail_position
from taskyard.model.places import Put, place_beside
from taskyard.model.queue import (
    UNTOUCHED,
    QueueCommand,
    QueueControl,
    QueueSettings,
    QueueState,
    QueueStatus,
    control_detail,
    drained,
    steer,
    told_as,
)
from taskyard.model.queue_order import QueueSnapshot
from taskyard.model.settle import heed_cancel, rescue
from taskyard.model.state import COMPLETED, QUEUED, RUNNING, STANDS_IN_LINE, WAITING_FOR_TIME, TaskState, check_move
from taskyard.model.task import Claim, Dedupe, TaskRecord
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.model.why import Scene
from taskyard.ports.clock import Clock
from taskyard.ports.store import PROMOTE_AT_MOST, Add, Added, Applied, Report, Turned
from taskyard.stores.memory.audit import AuditLog
from taskyard.stores.memory.catalogue import Catalogue
from taskyard.stores.memory.claims import Claims
from taskyard.stores.memory.dependencies import Dependencies
from taskyard.stores.memory.devices import DeviceBook
from taskyard.stores.memory.schedules import ScheduleBook, is_pending
from taskyard.stores.memory.sight import Sight
from taskyard.stores.plan import find_duplicate, is_kept_out, is_tied, make_plan, refuse, refuse_quarantined

# As in `model.state`: looked at once, not once per task.
ALLOW = Dedupe.ALLOW
SUBMITTED = EventKind.SUBMITTED.value


class MemoryCore(Claims, Dependencies, Sight):
    def __init__(self, clock: Clock, *, keep_ended: int | None = None) -> None:
        super().__init__(keep_ended)
        self._clock = clock
        self._catalogue, self.audit = Catalogue(), AuditLog()
        self.schedules = ScheduleBook(lambda uuid: is_pending(self._tasks.get(uuid)))
        self.devices = DeviceBook(self._tell_plainly)

    def now(self) -> datetime:
        return self._clock.now()

    # --- the hot path ---------------------------------------------------------------------------------------------

    def turn(
        self,
        node: str,
        settles: Sequence[tuple[Claim, Move]],
        adds: Sequence[Add],
        reports: Sequence[Report],
        demand: Demand | None,
    ) -> Turned:
        now = self._clock.now()
        for state in {move.state for _, move in settles}:
            check_move(RUNNING, state)  # before anything is written: a turn happens as a whole or not
        self._unrun = []
        settled = [self._settle(claim, move) for claim, move in settles]
        if self._releasing:
            self._release(now)
        if self._controls and settles:
            self._note_drained(now)
        for report in reports:
            self._report(report, now)
        added = [self._add(add, now) for add in adds]
        self._promote(now)
        claims = self._claim(node, demand, now) if demand is not None and demand.total > 0 else []
        return Turned(settled, added, claims, now if self._releasing else self._next_due(), self._unrun)

    def add(self, add: Add) -> list[Added] | TaskyardError:
        """One add and nothing else."""
        return self._add(add, self._clock.now())

    def preview(self, demand: Demand) -> list[TaskRecord]:
        return [record.clone() for record in self._preview(demand, self._clock.now())]

    def _held(self, claim: Claim) -> TaskRecord | None:
        """The record the claim still holds, or None."""
        record = self._by_id.get(claim.record.id)
        if record is None or record.token != claim.token or record.attempt != claim.attempt:
            return None
        return record

    def _settle(self, claim: Claim, move: Move) -> ClaimLost | None:
        record = self._held(claim)
        if record is None:
            return ClaimLost(claim.uuid, claim.token)
        # Race: a cancel may be asked after the run has ended and before its node could know.
        if record.cancel is not None:
            move = heed_cancel(move)
        if move.state is COMPLETED and record.key is None and record.dedupe_slot is None and not self._placed:
            self._complete(record, move)
        else:
            self._move(record, move)
        return None

    def _report(self, report: Report, now: datetime) -> None:
        record = self._held(report.claim)
        if record is None:
            return
        if report.progress is not None:
            record.progress = report.progress
            self._tell(EventKind.PROGRESS, record, now, EventDetail(progress=report.progress))
        if report.note is not None:
            record.note = report.note
        if report.checkpoint is not None:
            record.checkpoint = report.checkpoint
        if report.worker_pid is not None:
            record.worker_pid = report.worker_pid
        if report.lines:
            self._outputs.add_lines(record.id, report.claim.token, report.lines)
        if report.artifacts:
            self._outputs.add_artifacts(record.id, report.claim.token, report.artifacts)
        record.updated_at = now

    def _add(self, add: Add, now: datetime) -> list[Added] | TaskyardError:
        if add.parent is not None and self._held(add.parent) is None:
            return ClaimLost(add.parent.uuid, add.parent.token)
        if len(add.records) == 1 and add.dedupe is ALLOW and not add.after:
            # Most adds are of this kind.
            (record,) = add.records
            if record.uuid not in self._tasks:
                return [self._add_one(record, add, now)]
        if is_tied(add):
            return self._add_tied(add, now)
        if (quarantined := refuse_quarantined(self, add)) is not None:
            return quarantined
        if add.dedupe is Dedupe.REFUSE and (duplicate := self._find_duplicate(add, now)) is not None:
            return duplicate
        if (taken := self._taken_uuid(add, now)) is not None:
            return _taken(taken)
        return [self._add_one(record, add, now) for record in add.records]

    def _add_tied(self, add: Add, now: datetime) -> list[Added] | TaskyardError:
        """The same for tasks that replace others, or wait for others."""
        plan = make_plan(add, now, self)
        if isinstance(plan, TaskyardError):
            return plan
        if (unknown := plan.refuse_unknown(self._tasks)) is not None:
            return unknown
        uuids = Counter(record.uuid for record in plan.new)
        for uuid, n in uuids.items():
            if n > 1 or uuid in self._tasks:
                return _taken(uuid)
        for holder, by in plan.replaced:
            self._replace(holder, by, now)
        self._weigh(plan)
        for record in plan.new:
            self._enter(record, add, now)
        self._tie(plan)
        self._release(now)
        return plan.added

    def _find_duplicate(self, add: Add, now: datetime) -> DuplicateTask | None:
        """The first work that is pending already, or is in the batch a second time."""
        batch: set[str] = set()
        for record in add.records:
            if (slot := record.dedupe_slot) is None:
                continue
            holder = find_duplicate(self, record, add.dedupe, now)
            if slot in batch or holder is not None:
                return refuse(slot, holder)
            batch.add(slot)
        return None

    def is_quarantined(self, pool: str, account: str, consumer: str) -> bool:
        return (pool, account, consumer) in self.devices.accounts

    def _taken_uuid(self, add: Add, now: datetime) -> str | None:
        """The first uuid that stands for another task already, among those that would not be merged away."""
        batch: set[str] = set()
        slots: set[str] = set()
        for record in add.records:
            slot = record.dedupe_slot if add.dedupe is not ALLOW else None
            if slot is not None and (slot in slots or find_duplicate(self, record, add.dedupe, now) is not None):
                continue
            if record.uuid in self._tasks or record.uuid in batch:
                return record.uuid
            batch.add(record.uuid)
            if slot is not None:
                slots.add(slot)
        return None

    def _add_one(self, asked: TaskRecord, add: Add, now: datetime) -> Added:
        if add.leaves_out and is_kept_out(self, asked):
            return Added("", is_new=False)
        if add.dedupe is not ALLOW and asked.dedupe_slot is not None:
            holder = find_duplicate(self, asked, add.dedupe, now)
            if holder is not None:
                return Added(holder.uuid, is_new=False, until=holder.until)
        record = asked.clone()
        self._enter(record, add, now)
        return Added(record.uuid)

    def _enter(self, record: TaskRecord, add: Add, now: datetime) -> None:
        """Store a new record; it is ours from here on."""
        if add.dedupe is ALLOW:
            record.dedupe_slot = record.dedupe_scope = None  # `take_slot`, without the call
        else:
            self._take_slot(record, add, now)
        self._seq = record.id = seq = self._seq + 1
        record.position = seq * GAP  # `tail_position`, without the call
        self._tasks[record.uuid] = self._by_id[seq] = record
        if record.group_id is not None:
            self._groups[record.group_id][seq] = record
        record.updated_at = now
        if record.open_dependencies:
            record.state = TaskState.BLOCKED
        elif record.due_at > now:
            record.state = TaskState.SCHEDULED
            heapq.heappush(self._due, (record.due_at, seq))
        else:
            record.state = QUEUED
            if record.key is None:
                self._offer(record)
            else:
                self._track_key(record)
        if self._strict and record.state in STANDS_IN_LINE:
            self._line_up(record)
        self._counts[record.queue][record.state] += 1
        self._events.append((SUBMITTED, record, now, submit_detail(record.state, record.submitted_by)))
        self.event_seq += 1

    def _promote(self, now: datetime) -> None:
        due = self._due
        for _ in range(PROMOTE_AT_MOST):
            self._drop_stale_due()
            if not due or due[0][0] > now:
                return
            record = self._by_id[heapq.heappop(due)[1]]
            if record.state is TaskState.SCHEDULED:
                self._unplace(record)
                self._seq += 1
                record.position = tail_position(self._seq)
            self._move(record, Move.queued(at=now))

    def _drop_stale_due(self) -> None:
        due = self._due
        while due:
            at, task_id = due[0]
            record = self._by_id.get(task_id)
            if record is not None and record.state in WAITING_FOR_TIME and record.due_at == at:
                return
            heapq.heappop(due)

    def _next_due(self) -> datetime | None:
        self._drop_stale_due()
        return self._due[0][0] if self._due else None

    # --- commands, rescue, retention --------------------------------------------------------------------------------

    def set_queue(self, settings: QueueSettings) -> None:
        old = self._settings(settings.name)
        self._queues[settings.name] = settings
        if settings.order is not old.order:
            self._reorder(settings.name)
        for (queue, _), line in self._keyed.items():
            if queue == settings.name:
                if settings.order is not old.order:
                    waiting = [self._by_id[task_id] for _, _, task_id in line.waiting if task_id in self._by_id]
                    line.waiting = [self._turn_of(record) for record in waiting]
                    heapq.heapify(line.waiting)
                self._repark(line, queue)

    def control(self, queue: str, command: QueueCommand, by: str, audit: AuditEntry | None = None) -> QueueStatus:
        now = self._clock.now()
        control = self._controls.get(queue, UNTOUCHED)
        is_changed = self._set_control(
            queue, steer(control, command, by=by, now=now, running=self._running_in[queue]), now
        )
        self.audit.note(audit, 1, int(is_changed))
        return self._queue_status(queue)

    def _set_control(self, queue: str, control: QueueControl, now: datetime) -> bool:
        """Whether it is another one."""
        old = self._controls.get(queue, UNTOUCHED)
        kind = told_as(old, control)
        if kind is not None:
            self._controls[queue] = control
            self._tell_plainly(kind, queue, "", now, control_detail(old, control))
        return kind is not None

    def _note_drained(self, now: datetime) -> None:
        """Runs have ended: a queue that was stopping and has none left is paused."""
        for queue, control in sorted(self._controls.items()):
            if control.state is QueueState.STOPPING and not self._running_in[queue]:
                self._set_control(queue, drained(control), now)

    def queues(self) -> list[QueueStatus]:
        tallied = {queue for queue, states in self._counts.items() if any(states.values())}
        return [self._queue_status(queue) for queue in sorted(tallied | self._queues.keys() | self._controls.keys())]

    def _queue_status(self, queue: str) -> QueueStatus:
        return QueueStatus(
            name=queue,
            settings=self._settings(queue),
            control=self._controls.get(queue, UNTOUCHED),
            counts={state: n for state, n in self._counts[queue].items() if n},
            oldest_due_at=self._oldest_due_at(queue),
        )

    def apply(
        self,
        uuids: Sequence[str],
        command: Command,
        by: str = "",
        where: TaskFilter = ALL_TASKS,
        audit: AuditEntry | None = None,
    ) -> list[Applied]:
        now = self._clock.now()
        applied = [self._apply_one(uuid, command, by, where, now) for uuid in uuids]
        self._release(now)
        self.audit.note(audit, len(uuids), sum(one.record is not None for one in applied))
        return applied

    def _apply_one(self, uuid: str, command: Command, by: str, where: TaskFilter, now: datetime) -> Applied:
        record = self._tasks.get(uuid)
        if record is None:
            return Applied(uuid, refused=UnknownTask(uuid))
        anchor, order = self._tasks.get(anchor_of(command) or ""), self._settings(record.queue).order
        try:
            where.check(record, command)
            decision = decide(record, Asked(command=command, now=now, by=by, order=order, anchor=anchor))
        except CommandRefused as refused:
            return Applied(uuid, refused=refused)
        if isinstance(decision, Move) and record.state is TaskState.FAILED:
            if (refusal := self._revive(record, decision)) is not None:
                return Applied(uuid, refused=refusal)
        elif isinstance(decision, Move):
            self._move(record, decision)
        else:
            self._change(record, decision)
        return Applied(uuid, record=record.clone())

    def _change(self, record: TaskRecord, change: Change) -> None:
        apply_change(record, change)
        match change:
            case Reorder():
                self._place(record, change)
            case Redate() if record.state in WAITING_FOR_TIME:
                heapq.heappush(self._due, (record.due_at, record.id))
        self._reordered(record)
        self._tell(change.kind, record, change.at, change_detail(record, change))

    def _place(self, record: TaskRecord, asked: Reorder) -> None:
        if asked.beside is None:
            self._unplace(record)
            self._seq += 1
            record.position = head_position(self._seq)
            return
        placing = place_beside(asked.beside, self._placed[record.queue], before=asked.before)
        for position, task_id in placing.moved:
            self._put(self._by_id[task_id], position)
        self._put(record, placing.position)

    def _put(self, record: TaskRecord, position: int) -> None:
        """Give it a place that was made by hand."""
        self._unplace(record)
        record.position = position
        self._placed[record.queue].add(Put(position, record.id))
        self._reordered(record)

    def _reordered(self, record: TaskRecord) -> None:
        """It may stand somewhere else."""
        if self._strict and record.stands_in_line:
            self._line_up(record)
        if record.state is not QUEUED:
            return
        if record.key is None:
            self._offer(record)
        else:
            self._track_key(record)

    def join(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        self._nodes[node.incarnation] = node
        self._draining.discard(node.incarnation)
        self._catalogue.publish(specs, self._nodes.values(), self._clock.now())

    def describe(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        if (old := self._nodes.get(node.incarnation)) is not None:
            self._nodes[node.incarnation] = node
            self._catalogue.see(old, self._clock.now())
            self._catalogue.publish(specs, self._nodes.values(), self._clock.now())

    def list_specs(self) -> list[StoredSpec]:
        return self._catalogue.list_all()

    def drain(self, incarnation: str, *, on: bool, audit: AuditEntry | None = None) -> None:
        if incarnation not in self._nodes:
            raise UnknownNode(incarnation)
        self.audit.note(audit, 1, 1)
        if on:
            self._draining.add(incarnation)
        else:
            self._draining.discard(incarnation)

    def leave(self, incarnation: str) -> None:
        if (node := self._nodes.pop(incarnation, None)) is not None:
            self._catalogue.see(node, self._clock.now())
            self._catalogue.publish((), self._nodes.values(), self._clock.now())
        self.devices.release(incarnation, None, self._clock.now())
        self._draining.discard(incarnation)
        if not self._running.get(incarnation):
            self._running.pop(incarnation, None)

    def rescue(self, incarnation: str) -> list[str]:
        now = self._clock.now()
        known = self._nodes.get(incarnation)
        node = incarnation[:8] if known is None else known.label
        rescued = [self._by_id[task_id] for task_id in self._running.get(incarnation, ())]
        rescued.sort(key=lambda record: record.position, reverse=True)  # the last to be put at the head stands first
        for record in rescued:
            for move in rescue(record, auto_recover=self._settings(record.queue).auto_recover, now=now, node=node):
                self._move(record, move)
        self._release(now)
        self._note_drained(now)
        self.leave(incarnation)
        return [record.uuid for record in rescued]

    def scene(self, records: Sequence[TaskRecord]) -> Scene:
        return self._find_scene(records, self._clock.now())

    def queue_snapshot(self, queue: str, limit: int) -> QueueSnapshot:
        return self._find_snapshot(queue, limit, self._turns.get(queue, NO_FAIRNESS_STATE), self._clock.now())

    def prune(
        self, finished_before: datetime, limit: int, failed: bool | None = None, audit: AuditEntry | None = None
    ) -> int:
        self._slots.trim(self._clock.now(), limit)
        pruned = 0
        while pruned < limit and (ended := self._find_oldest(failed)) and ended[0][0] < finished_before:
            pruned += self._forget_first(ended)
        self.audit.note(audit, pruned, pruned)
        return pruned


def _taken(uuid: str) -> InvalidInput:
    return InvalidInput(f"a task {uuid} is in the store already; a task's uuid must be new")
