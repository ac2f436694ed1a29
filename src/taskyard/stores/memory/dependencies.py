"""Tasks that wait for others or replace them, in memory."""

from __future__ import annotations

from datetime import datetime

from taskyard.errors import SlotTaken, TaskyardError
from taskyard.model.dedupe import replaced, take_slot
from taskyard.model.dependency import Stand, give_up, lost_to, refuse_revival, stand_of, unblock
from taskyard.model.move import Move
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.ports.store import Add
from taskyard.stores.memory.tasks import Tasks
from taskyard.stores.plan import RELEASE_AT_MOST, Holder, Plan, window_end

WAITS = frozenset({TaskState.BLOCKED, TaskState.PAUSED})
"""Where a task is told of the ends of those it waits for."""


class Dependencies(Tasks):
    def find_holder(self, slot: str, now: datetime) -> Holder | None:
        uuid = self._slots.holder(slot, now)
        if uuid is None:
            return None
        state = self._tasks[uuid].state if uuid in self._tasks else None
        return Holder(uuid, state, self._slots.window_end(slot, uuid))

    def find_running(self, queue: str, key: str) -> Holder | None:
        line = self._keyed.get((queue, key))
        if line is None:
            return None
        running = [i for i in line.holding | line.offered if self._by_id[i].state is TaskState.RUNNING]
        return Holder(self._by_id[min(running)].uuid, TaskState.RUNNING, key=key) if running else None

    def _take_slot(self, record: TaskRecord, add: Add, now: datetime) -> None:
        take_slot(record, add.dedupe)
        if record.dedupe_slot is not None:
            self._slots.swap(record.uuid, None, record.dedupe_slot)
        elif record.dedupe_key is not None and (until := window_end(record, add, now)) is not None:
            self._slots.open_window(record.dedupe_key, record.uuid, until)

    def _replace(self, holder: str, by: str, now: datetime) -> None:
        record = self._tasks[holder]
        if record.dedupe_key is not None:
            self._slots.close_window(record.dedupe_key)
        self._move(record, replaced(by, now=now))
        self._unrun.append(holder)

    def _weigh(self, plan: Plan) -> None:
        """Set of each new task for how many it waits. Those that come with it have not ended."""
        for record in plan.new:
            record.open_dependencies = sum(
                self._stand(parent, record) is not Stand.DONE for parent in plan.after.get(record.uuid, ())
            )

    def _stand(self, parent: str, child: TaskRecord) -> Stand:
        known = self._tasks.get(parent)
        return Stand.OPEN if known is None else stand_of(known.state, child.on_failure)

    def _tie(self, plan: Plan) -> None:
        """The new tasks are stored: from here on they hear of the ends of those they wait for."""
        for uuid, parents in plan.after.items():
            child = self._tasks[uuid]
            for parent in (self._tasks[name] for name in parents):
                stand = stand_of(parent.state, child.on_failure)
                self._edges.add(child.id, parent.id, is_open=stand is not Stand.DONE)
                if stand is Stand.LOST:
                    self._releasing.append((parent.id, parent.uuid, parent.state))

    # --- the end of one, told to those that wait for it ---------------------------------------------------------------

    def _release(self, now: datetime) -> None:
        """Tell those that wait of the ends of others, at most `RELEASE_AT_MOST`; some end by it in their turn."""
        left = RELEASE_AT_MOST
        while self._releasing and left > 0:
            task_id, uuid, state = self._releasing[0]
            told = self._edges.waiting_for(task_id, left)
            for child in told:
                self._edges.close(child, task_id)
                self._hear(self._by_id[child], uuid, state, now)
            left -= len(told)
            if task_id not in self._edges.open:
                self._releasing.popleft()

    def _hear(self, record: TaskRecord, parent: str, state: TaskState, now: datetime) -> None:
        if record.state not in WAITS:
            return
        if stand_of(state, record.on_failure) is Stand.LOST:
            self._lose(record, give_up(record, parent, state, now=now))
            return
        record.open_dependencies -= 1
        if record.open_dependencies == 0 and record.state is TaskState.BLOCKED:
            self._move(record, unblock(record, now=now))

    def _lose(self, record: TaskRecord, move: Move) -> None:
        if record.state is TaskState.PAUSED:
            self._move(record, Move(state=TaskState.BLOCKED, at=move.at))
        self._move(record, move)
        self._unrun.append(record.uuid)

    # --- sent again by a person ---------------------------------------------------------------------------------------

    def _revive(self, record: TaskRecord, move: Move) -> TaskyardError | None:
        """Carry out the move of a failed task back into line, or say why not."""
        holder = None if record.dedupe_key is None else self.find_holder(record.dedupe_key, move.at)
        if holder is not None and holder.uuid != record.uuid:
            return SlotTaken(record.uuid, record.state, holder.uuid, until=holder.until)
        known = [self._by_id[parent] for parent in self._edges.parents(record.id) if parent in self._by_id]
        stands = [(parent, stand_of(parent.state, record.on_failure)) for parent in known]
        for parent, stand in stands:
            if stand is Stand.LOST:
                record.error = lost_to(parent.uuid, parent.state)
                return refuse_revival(record, parent.uuid, parent.state)
        for parent, stand in stands:
            if stand is Stand.OPEN:
                self._edges.add(record.id, parent.id, is_open=True)
                record.open_dependencies += 1
            else:
                self._edges.close(record.id, parent.id)
        self._move(record, move)
        if record.open_dependencies:
            self._move(record, Move(state=TaskState.BLOCKED, at=move.at))
        return None
