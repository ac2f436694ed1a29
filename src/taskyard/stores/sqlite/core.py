"""The hot path of the SQLite store: one turn, as part of one write transaction on the writer thread's connection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import chain
from typing import NamedTuple

import apsw
import msgspec

from taskyard.errors import ClaimLost, DuplicateTask, InvalidInput, TaskyardError
from taskyard.model.attempt import LINES_KEPT
from taskyard.model.dedupe import take_slot
from taskyard.model.event import EventDetail, EventKind, submit_detail
from taskyard.model.limits import Demand
from taskyard.model.move import Move, event_detail
from taskyard.model.notes import CancelRequest
from taskyard.model.order import tail_position
from taskyard.model.settle import heed_cancel
from taskyard.model.state import COMPLETED, QUEUED, RUNNING, WAITING_FOR_TIME, TaskState
from taskyard.model.task import Claim, Dedupe, TaskRecord
from taskyard.ports.clock import Clock
from taskyard.ports.store import PROMOTE_AT_MOST, Add, Added, Report, Turned
from taskyard.stores.plan import (
    Holder,
    find_duplicate,
    is_kept_out,
    is_tied,
    make_plan,
    refuse,
    refuse_quarantined,
    window_end,
)
from taskyard.stores.records import (
    ARTIFACT,
    LINE,
    NEW_TASK,
    RARE_FIELDS,
    SQLITE,
    TASK,
    document_reader,
    from_us,
    has_rare_fields,
    started_record,
    to_document,
    to_us,
)
from taskyard.stores.sqlite.claims import Claims
from taskyard.stores.sqlite.schedules import ScheduleWrites
from taskyard.stores.sqlite.statements import SET_ARTIFACT, TRIM_LINES, add_lines, blocks, report, values

SUBMITTED, TOLD_COMPLETED = EventKind.SUBMITTED.value, EventKind.COMPLETED.value

_DUE = "due_at, id, uuid, queue, consumer, lane, state, key, position, priority"
_WIDE = (*NEW_TASK, *RARE_FIELDS, "fifo_bucket")
# Most tasks are due when they are created: a time that is the same is converted once.
_TIMES = {
    "due_at": "(due := to_us(r.due_at))",
    "created_at": "due if r.created_at is r.due_at else to_us(r.created_at)",
}
_to_new_row = TASK.writer(SQLITE, NEW_TASK, _TIMES | {"updated_at": "now"}, "now")
_to_wide_row = TASK.writer(SQLITE, _WIDE, {"fifo_bucket": "fifo_bucket"}, "fifo_bucket")
_to_line_row = LINE.writer(SQLITE, LINE.columns)
_to_artifact_row = ARTIFACT.writer(SQLITE, ARTIFACT.columns)
_read_cancel = document_reader(CancelRequest)
_PROMOTED_FROM = {str(state): EventDetail(before=state) for state in WAITING_FOR_TIME}
_PROMOTED = ("id", "position", "is_parked", "updated_at", "state")


class _Held(NamedTuple):
    """What a task got while it ran: a request to cancel it, as JSON, and its worker process."""

    cancel: str | None
    worker_pid: int | None


class SqliteCore(Claims):
    """All that a transaction can do."""

    def __init__(self, conn: apsw.Connection, clock: Clock) -> None:
        super().__init__(conn, clock)
        self.schedules = ScheduleWrites(self, conn)

    def preview(self, demand: Demand) -> list[TaskRecord]:
        """What a turn would claim, found without a write lock."""
        self.refresh()
        return self._preview(demand, self._clock.now())

    def list_lanes(self) -> list[str]:
        self.refresh()
        return sorted({lane for _, lane, _ in self._queued})

    def peek(self, demand: Demand | None) -> Turned | None:
        """The answer to a turn that only asks, if there is nothing to give: found without a write lock."""
        self.refresh()
        due = self._find_next_due()
        if due is not None and due <= to_us(self._clock.now()):
            return None
        if self._has_releasing:
            return None
        if demand is not None and self._could_claim(demand):
            return None
        return Turned([], [], [], None if due is None else from_us(due))

    def turn(
        self,
        node: str,
        settles: Sequence[tuple[Claim, Move]],
        adds: Sequence[Add],
        reports: Sequence[Report],
        demand: Demand | None,
    ) -> Turned:
        now = self._clock.now()
        self._unrun = []
        settled = self._settle(settles) if settles else []
        self._release(now)
        if self._controls and settles:
            self._note_drained(to_us(now))
        if reports:
            self._report(reports, now)
        added: list[list[Added] | TaskyardError] = []
        claims: list[Claim] | None = None
        if self.isolated:
            added = [self._add_isolated(add, now) for add in adds]
        elif adds:
            added, claims = self._add_all(adds, node, demand, now)
        self._promote(now)
        self._flush()
        if claims is None:
            claims = self._claim(node, demand, now) if demand is not None and demand.total > 0 else []
        due = to_us(now) if self._has_releasing else self._find_next_due()
        return Turned(settled, added, claims, None if due is None else from_us(due), self._unrun)

    def _settle(self, settles: Sequence[tuple[Claim, Move]]) -> list[ClaimLost | None]:
        held = self._held(claim for claim, _ in settles)
        settled: list[ClaimLost | None] = []
        completed: dict[tuple[str, str], int] = {}
        for claim, move in settles:
            # A claim is spent by its first settle, also within one turn.
            if claim.token not in held:
                settled.append(ClaimLost(claim.uuid, claim.token))
                continue
            # Race: a cancel may be requested after the run has ended and before its node could know.
            meanwhile = held.pop(claim.token)
            self._end(claim.record, move if meanwhile.cancel is None else heed_cancel(move), meanwhile)
            settled.append(None)
            if move.state is COMPLETED:
                lane = claim.record.queue, claim.record.lane
                completed[lane] = completed.get(lane, 0) + 1
        for lane, n in completed.items():
            self._count(*lane, RUNNING, -n)
            self._count(*lane, COMPLETED, n)
        self._save_moved()  # before reports and adds look at these tasks
        return settled

    def _end(self, running: TaskRecord, move: Move, meanwhile: _Held) -> None:
        if meanwhile.worker_pid is not None and move.worker_pid is None:
            move = msgspec.structs.replace(move, worker_pid=meanwhile.worker_pid)
        if move.state is not COMPLETED:
            record = running.clone()
            record.cancel = None if meanwhile.cancel is None else _read_cancel(meanwhile.cancel)
            record.note = None
            self._keep_note.add(record.id)  # the row may have a newer one, which stays unless the move brings another
            if not move.to_head:
                self._keep_place.add(record.id)  # and another place, if it had to move for others meanwhile
            self._move(record, move)
            return
        # The end of most tasks: the same as `_move`, in one narrow statement for all of a turn.
        at = to_us(move.at)
        note = None if move.note is None else to_document(move.note)
        self._completed.append((running.id, at, move.result, note))
        self._ran(running, move, at)
        if running.key is not None:
            self._keys.add((running.queue, running.key))
        row = TOLD_COMPLETED, running.uuid, running.consumer, running.queue, at
        detail = None if move.note is None else event_detail(RUNNING, move)
        self._events.append(row if detail is None else (*row, detail))
        if self._has_open_edges:
            self._ended.append((running.id, running.uuid, COMPLETED))

    def _held(self, claims: Iterable[Claim]) -> dict[int, _Held]:
        """The tokens of those claims that still hold their task, with what the task got meanwhile."""
        held: dict[int, _Held] = {}
        for rows in blocks([(claim.record.id, claim.token, claim.attempt) for claim in claims]):
            found = self._one(
                "SELECT json_group_array(json_array(task.token, task.cancel, task.worker_pid)) FROM "
                f"(VALUES {values(len(rows), 3)}) AS v CROSS JOIN task ON task.id = v.column1 "
                "WHERE task.token = v.column2 AND task.attempt = v.column3 AND task.state = 'running'",
                chain.from_iterable(rows),
            )
            held.update((token, _Held(*meanwhile)) for token, *meanwhile in msgspec.json.decode(found))
        return held

    def _report(self, reports: Sequence[Report], now: datetime) -> None:
        held = self._held(said.claim for said in reports)
        at = to_us(now)
        rows: dict[int, tuple[int, int, str | None, str | None, str | None, int | None]] = {}
        for said in reports:
            if said.claim.token not in held:
                continue
            text = None if said.progress is None else msgspec.json.encode(said.progress).decode()
            _, _, earlier, noted, saved, pid = rows.get(said.claim.token, (0, 0, None, None, None, None))
            noted = noted if said.note is None else to_document(said.note)
            saved, pid = said.checkpoint or saved, said.worker_pid or pid
            rows[said.claim.token] = (said.claim.record.id, at, text or earlier, noted, saved, pid)
            if text is not None:
                self._tell(EventKind.PROGRESS, said.claim.record, at, EventDetail(progress=said.progress))
        for block in blocks(list(rows.values())):
            self._conn.execute(report(len(block)), tuple(chain.from_iterable(block)))
        self._add_outputs([said for said in reports if said.claim.token in held and (said.lines or said.artifacts)])

    def _add_outputs(self, reports: Sequence[Report]) -> None:
        lines = [
            (said.claim.record.id, said.claim.token, *_to_line_row(line)) for said in reports for line in said.lines
        ]
        for block in blocks(lines):
            self._conn.execute(add_lines(len(block)), tuple(chain.from_iterable(block)))
        if lines:
            grown = msgspec.json.encode(sorted({line[:2] for line in lines})).decode()
            self._conn.execute(TRIM_LINES, (grown, LINES_KEPT))
        for said in reports:
            for artifact in said.artifacts:
                row = (said.claim.record.id, said.claim.token, *_to_artifact_row(artifact))
                self._conn.execute(SET_ARTIFACT, row)

    # --- adding -------------------------------------------------------------------------------------------------------

    def _add_all(
        self, adds: Sequence[Add], node: str, demand: Demand | None, now: datetime
    ) -> tuple[list[list[Added] | TaskyardError], list[Claim] | None]:
        """The answer to each, and what could be started at once; None if the lanes have to be looked at for that."""
        fresh: list[TaskRecord] = []
        slots: dict[str, Holder] = {}
        added: list[list[Added] | TaskyardError] = []
        for add in adds:
            if is_tied(add):
                self._insert_tasks(fresh, now)
                fresh, slots = [], {}
                added.append(self._add_tied(add, now))
            else:
                added.append(self._admit(add, now, fresh, slots))
        claims = self._start_fresh(fresh, node, demand, now)
        if claims is None:
            self._insert_tasks(fresh, now)
        return added, claims

    def add_plainly(self, add: Add) -> list[Added]:
        """One add as part of something larger, which fails with it."""
        now = self._clock.now()
        fresh: list[TaskRecord] = []
        added = self._admit(add, now, fresh, {})
        if isinstance(added, TaskyardError):
            raise added
        self._insert_tasks(fresh, now)
        self._flush()
        return added

    def _add_isolated(self, add: Add, now: datetime) -> list[Added] | TaskyardError:
        """The same for one add under a savepoint, when the plain way met an error that was somebody's own."""
        events, unrun = len(self._events), len(self._unrun)
        known = self._tally.copy(), self._queued.copy(), self._running_in.copy(), self._keys.copy()
        try:
            with self._conn:
                fresh: list[TaskRecord] = []
                added = self._add_tied(add, now) if is_tied(add) else self._admit(add, now, fresh, {})
                self._insert_tasks(fresh, now)
        except (apsw.ConstraintError, apsw.TooBigError, ValueError, TypeError, OverflowError) as exc:
            del self._events[events:], self._unrun[unrun:]
            self._saves, self._ended = [], []
            self._tally, self._queued, self._running_in, self._keys = known
            self._due_known = False
            return InvalidInput(f"these tasks cannot be stored: {exc}; a task's uuid must be new, its values plain")
        return added

    def _add_tied(self, add: Add, now: datetime) -> list[Added] | TaskyardError:
        """One add whose tasks replace others, or wait for others."""
        if add.parent is not None and not self._held([add.parent]):
            return ClaimLost(add.parent.uuid, add.parent.token)
        plan = make_plan(add, now, self)
        if isinstance(plan, TaskyardError):
            return plan
        if (unknown := plan.refuse_unknown(self._find_parents(plan))) is not None:
            return unknown
        self._replace(plan, now)
        known = self._find_parents(plan)
        self._weigh(plan, known)
        for record in plan.new:
            self._number(record, add, now)
        self._insert_tasks(plan.new, now)
        self._tie(plan, known)
        self._release(now)
        return plan.added

    def _number(self, record: TaskRecord, add: Add, now: datetime) -> None:
        """Give a new record its slot, its place and its state."""
        take_slot(record, add.dedupe)
        if add.window_s is not None:
            self._open_window(record, add, now)
        self._seq += 1
        record.id, record.position = self._seq, tail_position(self._seq)
        record.state = TaskState.SCHEDULED if record.due_at > now else QUEUED
        if record.open_dependencies:
            record.state = TaskState.BLOCKED
        record.is_parked = record.key is not None and record.state is QUEUED
        record.updated_at = now

    def _admit(
        self, add: Add, now: datetime, fresh: list[TaskRecord], slots: dict[str, Holder]
    ) -> list[Added] | TaskyardError:
        """Decide about one add: extends `fresh` by the records to insert, and `slots` by the dedupe slots they take."""
        if add.parent is not None and not self._held([add.parent]):
            return ClaimLost(add.parent.uuid, add.parent.token)
        if (quarantined := refuse_quarantined(self, add)) is not None:
            return quarantined
        if add.dedupe is Dedupe.REFUSE and (duplicate := self._find_duplicate(add, slots, now)) is not None:
            return duplicate
        added = []
        is_merged = add.dedupe is Dedupe.MERGE
        for asked in add.records:
            if add.leaves_out and is_kept_out(self, asked):
                added.append(Added("", is_new=False))
                continue
            holder = self._find_known(asked, add.dedupe, slots, now) if is_merged else None
            if holder is not None:
                added.append(Added(holder.uuid, is_new=False, until=holder.until))
                continue
            record = asked.clone()
            self._number(record, add, now)
            if record.dedupe_key is not None:
                slots[record.dedupe_key] = Holder(record.uuid, record.state, window_end(record, add, now))
            fresh.append(record)
            added.append(Added(record.uuid))
        return added

    def _find_duplicate(self, add: Add, slots: dict[str, Holder], now: datetime) -> DuplicateTask | None:
        """The first work that is pending already, or is in the batch a second time."""
        batch: set[str] = set()
        for record in add.records:
            if (slot := record.dedupe_slot) is None:
                continue
            holder = self._find_known(record, add.dedupe, slots, now)
            if slot in batch or holder is not None:
                return refuse(slot, holder)
            batch.add(slot)
        return None

    def _find_known(self, asked: TaskRecord, dedupe: Dedupe, slots: dict[str, Holder], now: datetime) -> Holder | None:
        """The duplicate of this new task; `slots` are those of tasks that are about to be stored."""
        slot = asked.dedupe_slot
        if slot is None or slot in slots:
            return None if slot is None else slots[slot]
        return find_duplicate(self, asked, dedupe, now)

    def _insert_tasks(self, records: list[TaskRecord], now: datetime) -> None:
        at = to_us(now)
        new: dict[tuple[str, str, TaskState, int], int] = {}
        is_wide = bool(self._strict)
        for record in records:
            where = record.queue, record.lane, record.state, record.priority
            is_wide = is_wide or has_rare_fields(record)
            new[where] = new.get(where, 0) + 1
            event = SUBMITTED, record.uuid, record.consumer, record.queue, at
            detail = submit_detail(record.state, record.submitted_by)
            self._events.append(event if detail is None else (*event, detail))
            if record.state is QUEUED:
                if record.key is not None:
                    self._keys.add((record.queue, record.key))
            elif record.state is TaskState.SCHEDULED:
                self._note_due(to_us(record.due_at))
        for (queue, lane, state, priority), n in new.items():
            self._count(queue, lane, state, n, priority)
        if is_wide:
            self._write_rows("task", _WIDE, [_to_wide_row(record, self._line_of(record)) for record in records])
            self._write_labels(records)
        else:
            self._write_rows("task", NEW_TASK, [_to_new_row(record, at) for record in records])

    def _write_labels(self, records: list[TaskRecord]) -> None:
        labels = [(name, value, record.id) for record in records for name, value in record.labels.items()]
        if labels:
            self._write_rows("task_label", ("name", "value", "task"), labels)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _promote(self, now: datetime) -> None:
        due = self._find_next_due()
        at = to_us(now)
        if due is None or due > at:
            return
        found = self._one(
            f"SELECT json_group_array(json_array({_DUE})) FROM (SELECT {_DUE} FROM task "
            "WHERE state IN ('scheduled', 'retrying') AND due_at <= ? ORDER BY due_at, id LIMIT ?)",
            (at, PROMOTE_AT_MOST),
        )
        rows = []
        for _, id_, uuid, queue, consumer, lane, state, key, position, priority in sorted(msgspec.json.decode(found)):
            self._count(queue, lane, TaskState(state), -1)
            self._count(queue, lane, TaskState.QUEUED, 1, priority)
            if state == TaskState.SCHEDULED:
                self._seq += 1
                position = tail_position(self._seq)
            if key is not None:
                self._keys.add((queue, key))
            rows.append((id_, position, int(key is not None), at, TaskState.QUEUED))
            self._events.append((EventKind.QUEUED, uuid, consumer, queue, at, _PROMOTED_FROM[state]))
        self._update_rows(_PROMOTED, rows)
        self._due_known = False

    # --- claiming -----------------------------------------------------------------------------------------------------

    def _start_fresh(
        self, fresh: list[TaskRecord], node: str, demand: Demand | None, now: datetime
    ) -> list[Claim] | None:
        """Insert and start tasks that nothing stands before, which is how a yard with nothing to do meets a task. They
        are inserted parked, so they never enter the lane that they would be taken out of again. None, and nothing is
        done, unless all of them can start, with nothing else waiting that might go first, and by priority and place."""
        if demand is None or demand.only is not None or self._queued or not fresh or len(fresh) > demand.total:
            return None
        if not self._is_plain([(record.queue, record.lane, record.priority) for record in fresh]):
            return None
        due = self._find_next_due()
        if due is not None and due <= to_us(now):
            return None
        quota = self._quota(demand)
        for record in fresh:
            if record.state is not QUEUED or record.key is not None or quota.room(record.queue, record.lane) <= 0:
                return None
            quota.admit(record.queue, record.lane)
        for record in fresh:
            record.is_parked = True
        self._insert_tasks(fresh, now)
        fresh.sort(key=lambda record: (record.priority, record.position))
        return self._start([started_record(record, now) for record in fresh], node, now)
