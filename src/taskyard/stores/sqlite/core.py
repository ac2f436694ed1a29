"""The hot path of the SQLite store: one turn, as part of one write transaction on the writer thread's connection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import chain

import apsw
import msgspec

from taskyard.errors import ClaimLost, DuplicateTask, InvalidInput, TaskyardError
from taskyard.model.dedupe import take_slot
from taskyard.model.event import EventKind
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.order import tail_position
from taskyard.model.settle import heed_cancel
from taskyard.model.state import COMPLETED, QUEUED, RUNNING, TaskState
from taskyard.model.task import Claim, Dedupe, TaskRecord
from taskyard.ports.clock import Clock
from taskyard.ports.store import PROMOTE_AT_MOST, Add, Added, Report, Turned
from taskyard.stores.plan import Holder, is_tied, make_plan, refuse, window_end
from taskyard.stores.rows import NEW, SPECIAL, TIES, from_us, has_ties, ties_of, to_new_row, to_started, to_us
from taskyard.stores.sqlite.claims import Claims
from taskyard.stores.sqlite.schedules import ScheduleWrites
from taskyard.stores.sqlite.statements import blocks, report, values

SUBMITTED, TOLD_COMPLETED = EventKind.SUBMITTED.value, EventKind.COMPLETED.value

_DUE = "due_at, id, uuid, queue, source, state, key, position, priority"
_PROMOTED = ("id", "position", "parked", "updated_at", "state")


class SqliteCore(Claims):
    """All that a transaction can do."""

    def __init__(self, conn: apsw.Connection, clock: Clock) -> None:
        super().__init__(conn, clock)
        self.schedules = ScheduleWrites(self, conn)

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
            # Race: a cancel may be asked after the run has ended and before its node could know.
            reason, note = held.pop(claim.token)
            self._end(claim.record, move if reason is None else heed_cancel(move, reason, note))
            settled.append(None)
            if move.state is COMPLETED:
                lane = claim.record.queue, claim.record.source
                completed[lane] = completed.get(lane, 0) + 1
        for lane, n in completed.items():
            self._count(*lane, RUNNING, -n)
            self._count(*lane, COMPLETED, n)
        self._save_moved()  # before reports and adds look at these tasks
        return settled

    def _end(self, running: TaskRecord, move: Move) -> None:
        if move.state is not COMPLETED:
            record = running.clone()
            record.note = None  # the row may have a newer one, which stays unless the move brings another
            if not move.to_head:
                self._keep_place.add(record.id)  # and another place, if it had to move for others meanwhile
            self._move(record, move)
            return
        # The end of most tasks: the same as `_move`, in one narrow statement for all of a turn.
        at = to_us(move.at)
        self._completed.append((running.id, at, move.result, move.note))
        self._ran(running, move, at)
        if running.key is not None:
            self._keys.add((running.queue, running.key))
        self._events.append((TOLD_COMPLETED, running.uuid, running.source, running.queue, at))
        if self._has_open_edges:
            self._ended.append((running.id, running.uuid, COMPLETED))

    def _held(self, claims: Iterable[Claim]) -> dict[int, tuple[str | None, str | None]]:
        """The tokens of those claims that still hold their task, with reason and note if a cancel was asked of it."""
        held: dict[int, tuple[str | None, str | None]] = {}
        for rows in blocks([(claim.record.id, claim.token, claim.attempt) for claim in claims]):
            found = self._one(
                "SELECT json_group_array(json_array(task.token, "
                "CASE WHEN task.cancel_asked_at IS NOT NULL THEN COALESCE(task.cancel_reason, '') END, "
                "CASE WHEN task.cancel_asked_at IS NOT NULL THEN task.note END)) FROM "
                f"(VALUES {values(len(rows), 3)}) AS v CROSS JOIN task ON task.id = v.column1 "
                "WHERE task.token = v.column2 AND task.attempt = v.column3 AND task.state = 'running'",
                chain.from_iterable(rows),
            )
            held.update((token, (reason, note)) for token, reason, note in msgspec.json.decode(found))
        return held

    def _report(self, reports: Sequence[Report], now: datetime) -> None:
        held = self._held(said.claim for said in reports)
        at = to_us(now)
        rows: dict[int, tuple[int, int, str | None, str | None, str | None]] = {}
        for said in reports:
            if said.claim.token not in held:
                continue
            text = None if said.progress is None else msgspec.json.encode(said.progress).decode()
            _, _, earlier, noted, saved = rows.get(said.claim.token, (0, 0, None, None, None))
            noted = noted if said.note is None else said.note
            rows[said.claim.token] = (said.claim.record.id, at, text or earlier, noted, said.checkpoint or saved)
            if text is not None:
                self._tell(EventKind.PROGRESS, said.claim.record, at)
        for block in blocks(list(rows.values())):
            self._conn.execute(report(len(block)), tuple(chain.from_iterable(block)))

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

    def add_plainly(self, add: Add) -> None:
        """One add as part of something larger, which fails with it."""
        now = self._clock.now()
        fresh: list[TaskRecord] = []
        added = self._admit(add, now, fresh, {})
        if isinstance(added, TaskyardError):
            raise added
        self._insert_tasks(fresh, now)
        self._flush()

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
        plan = make_plan(add, now, lambda slot: self._find_holder(slot, now))
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
        if record.waits:
            record.state = TaskState.BLOCKED
        record.parked = record.key is not None and record.state is QUEUED
        record.updated_at = now

    def _admit(
        self, add: Add, now: datetime, fresh: list[TaskRecord], slots: dict[str, Holder]
    ) -> list[Added] | TaskyardError:
        """Decide about one add: extends `fresh` by the records to insert, and `slots` by the dedupe slots they take."""
        if add.parent is not None and not self._held([add.parent]):
            return ClaimLost(add.parent.uuid, add.parent.token)
        if add.dedupe is Dedupe.REFUSE and (duplicate := self._find_duplicate(add, slots, now)) is not None:
            return duplicate
        added = []
        is_merged = add.dedupe is Dedupe.MERGE
        for asked in add.records:
            holder = self._slot_holder(asked.dedupe_slot, slots, now) if is_merged else None
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
        for slot in (record.dedupe_slot for record in add.records if record.dedupe_slot is not None):
            holder = self._slot_holder(slot, slots, now)
            if slot in batch or holder is not None:
                return refuse(slot, holder)
            batch.add(slot)
        return None

    def _slot_holder(self, slot: str | None, slots: dict[str, Holder], now: datetime) -> Holder | None:
        """Who stands for this work; `slots` are those of tasks that are about to be stored."""
        if slot is None or slot in slots:
            return None if slot is None else slots[slot]
        return self._find_holder(slot, now)

    def _insert_tasks(self, records: list[TaskRecord], now: datetime) -> None:
        at = to_us(now)
        new: dict[tuple[str, str, TaskState, int], int] = {}
        is_special = bool(self._strict)
        for record in records:
            where = record.queue, record.source, record.state, record.priority
            is_special = is_special or (record.bucket or record.origin or record.note) is not None
            new[where] = new.get(where, 0) + 1
            self._events.append((SUBMITTED, record.uuid, record.source, record.queue, at))
            if record.state is QUEUED:
                if record.key is not None:
                    self._keys.add((record.queue, record.key))
            elif record.state is TaskState.SCHEDULED:
                self._note_due(to_us(record.due_at))
        for (queue, source, state, priority), n in new.items():
            self._count(queue, source, state, n, priority)
        tied = [record for record in records if has_ties(record)]
        plain = [record for record in records if not has_ties(record)] if tied else records
        for some, more in ((plain, ()), (tied, TIES)):
            rows = [to_new_row(record, at) for record in some]
            if is_special:
                rows = [(*row, r.bucket, r.origin, r.note, self._line_of(r)) for row, r in zip(rows, some, strict=True)]
            if more:
                rows = [(*row, *ties_of(r)) for row, r in zip(rows, some, strict=True)]
            self._write_rows("task", (*(SPECIAL if is_special else NEW), *more), rows)

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
        for _, id_, uuid, queue, source, state, key, position, priority in sorted(msgspec.json.decode(found)):
            self._count(queue, source, TaskState(state), -1)
            self._count(queue, source, TaskState.QUEUED, 1, priority)
            if state == TaskState.SCHEDULED:
                self._seq += 1
                position = tail_position(self._seq)
            if key is not None:
                self._keys.add((queue, key))
            rows.append((id_, position, int(key is not None), at, TaskState.QUEUED))
            self._events.append((EventKind.QUEUED, uuid, source, queue, at))
        self._update_rows(_PROMOTED, rows)
        self._due_known = False

    # --- claiming -----------------------------------------------------------------------------------------------------

    def _start_fresh(
        self, fresh: list[TaskRecord], node: str, demand: Demand | None, now: datetime
    ) -> list[Claim] | None:
        """Insert and start tasks that nothing stands before, which is how a yard with nothing to do meets a task. They
        are inserted parked, so they never enter the lane that they would be taken out of again. None, and nothing is
        done, unless all of them can start, with nothing else waiting that might go first, and by priority and place."""
        if demand is None or self._queued or not fresh or len(fresh) > demand.total:
            return None
        if not self._is_plain([(record.queue, record.source, record.priority) for record in fresh]):
            return None
        due = self._find_next_due()
        if due is not None and due <= to_us(now):
            return None
        quota = self._quota(demand)
        for record in fresh:
            if record.state is not QUEUED or record.key is not None or quota.room(record.queue, record.source) <= 0:
                return None
            quota.admit(record.queue, record.source)
        for record in fresh:
            record.parked = True
        self._insert_tasks(fresh, now)
        fresh.sort(key=lambda record: (record.priority, record.position))
        return self._start([to_started(record, now) for record in fresh], node, now)
