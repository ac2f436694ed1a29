"""Slots, and tasks that wait for others or replace them: parts of a write transaction."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from taskyard.errors import SlotTaken, TaskyardError
from taskyard.model.dedupe import counts_as_done, replaced
from taskyard.model.dependency import Stand, give_up, lost_to, refuse_revival, stand_of, unblock
from taskyard.model.move import Move
from taskyard.model.state import TaskState
from taskyard.model.task import OnFailure, TaskRecord
from taskyard.ports.store import Add
from taskyard.stores.plan import RELEASE_AT_MOST, Holder, Plan, window_end
from taskyard.stores.records import from_us, to_document, to_us
from taskyard.stores.sqlite.statements import FIND_RUNNING, IS_QUARANTINED, blocks, values
from taskyard.stores.sqlite.transaction import HAS_TIES, Ended, Transaction

_EDGE = ("child", "parent", "done")
_WAITS = ("id", "open_dependencies")

# One loop inside of the other, in this order: what the planner knows of a table that was empty is nothing.
_TOLD = (
    "SELECT v.key, d.child, c.state, c.on_failure, c.open_dependencies FROM json_each(?) AS v "
    "CROSS JOIN dependency AS d ON d.parent = v.value AND d.done = 0 CROSS JOIN task AS c ON c.id = d.child LIMIT ?"
)


class Known(NamedTuple):
    """A task that is waited for."""

    id: int
    state: TaskState


class _Fate:
    """What becomes of a task that waits: for how many it still does, and which end of another it cannot survive.
    `decided_at` is the number of the end that decided it."""

    __slots__ = ("decided_at", "lost", "state", "waits")

    def __init__(self, state: TaskState, waits: int) -> None:
        self.state, self.waits = state, waits
        self.lost: Ended | None = None
        self.decided_at = 0

    @property
    def is_moving(self) -> bool:
        return self.lost is not None or (self.waits == 0 and self.state is TaskState.BLOCKED)


class Dependencies(Transaction):
    # --- slots --------------------------------------------------------------------------------------------------------

    def find_holder(self, slot: str, now: datetime) -> Holder | None:
        found = self._conn.execute(
            "SELECT uuid, state, NULL FROM task WHERE dedupe_slot = ?1 UNION ALL "
            "SELECT w.uuid, t.state, w.until FROM dedupe_window AS w LEFT JOIN task AS t ON t.uuid = w.uuid "
            "WHERE w.slot = ?1 AND w.until > ?2 LIMIT 1",
            (slot, to_us(now)),
        ).fetchone()
        if found is None:
            return None
        state = None if found[1] is None else TaskState(str(found[1]))
        return (
            Holder(str(found[0]), state, None if found[2] is None else from_us(found[2]))
            if counts_as_done(state)
            else None
        )

    def find_running(self, queue: str, key: str) -> Holder | None:
        uuid = self._one(FIND_RUNNING, (queue, key))
        return None if uuid is None else Holder(uuid, TaskState.RUNNING, key=key)

    def is_quarantined(self, pool: str, account: str, consumer: str) -> bool:
        return self._one(IS_QUARANTINED, (pool, account, consumer)) is not None

    def _open_window(self, record: TaskRecord, add: Add, now: datetime) -> None:
        """Of a new task, if it stands for its work for a time."""
        until = window_end(record, add, now)
        if until is not None and record.dedupe_slot is None and record.dedupe_key is not None:
            self._conn.execute(
                "INSERT OR REPLACE INTO dedupe_window VALUES (?, ?, ?)", (record.dedupe_key, record.uuid, to_us(until))
            )

    def _trim_windows(self, now: datetime, limit: int) -> None:
        self._conn.execute(
            "DELETE FROM dedupe_window WHERE slot IN "
            "(SELECT slot FROM dedupe_window WHERE until <= ? ORDER BY until, slot LIMIT ?)",
            (to_us(now), limit),
        )

    def _replace(self, plan: Plan, now: datetime) -> None:
        """Cancel those that make way for new tasks."""
        for holder, by in plan.replaced:
            (record,) = self._read("uuid = ?", (holder,))
            self._conn.execute("DELETE FROM dedupe_window WHERE slot = ?", (record.dedupe_key,))
            self._move(record, replaced(by, now=now))
            self._unrun.append(holder)
        self._save_moved()

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _find_parents(self, plan: Plan) -> dict[str, Known]:
        """Those of the tasks waited for that are in the store."""
        wanted = list(dict.fromkeys(chain.from_iterable(plan.after.values())))
        rows: Any = self._conn.execute(
            "SELECT uuid, id, state FROM task WHERE uuid IN (SELECT value FROM json_each(?))", (_json(wanted),)
        )
        return {uuid: Known(id_, TaskState(state)) for uuid, id_, state in rows}

    def _weigh(self, plan: Plan, known: dict[str, Known]) -> None:
        """Set of each new task for how many it waits. Those that come with it have not ended."""
        for record in plan.new:
            parents = [known[parent] for parent in plan.after.get(record.uuid, ()) if parent in known]
            done = sum(stand_of(parent.state, record.on_failure) is Stand.DONE for parent in parents)
            record.open_dependencies = len(plan.after.get(record.uuid, ())) - done

    def _tie(self, plan: Plan, known: dict[str, Known]) -> None:
        """The new tasks have their ids: from here on they hear of the ends of those they wait for."""
        known = known | {record.uuid: Known(record.id, TaskState.QUEUED) for record in plan.new}
        edges: list[tuple[int, int, int]] = []
        for record in plan.new:
            for parent in plan.after.get(record.uuid, ()):
                stand = stand_of(known[parent].state, record.on_failure)
                edges.append((record.id, known[parent].id, int(stand is Stand.DONE)))
                if stand is Stand.LOST:
                    self._ended.append((known[parent].id, parent, known[parent].state))
        self._write_rows("dependency", _EDGE, edges)
        self._has_open_edges |= any(not done for *_, done in edges)

    # --- the end of one, told to those that wait for it ---------------------------------------------------------------

    def _release(self, now: datetime) -> None:
        """Tell those that wait of the ends of others, at most `RELEASE_AT_MOST`; some end by it in their turn."""
        if not self._ended and not self._has_releasing:
            return
        self._save_moved()  # what was moved in this transaction is looked at as well
        ended = self._take_ended()
        left = RELEASE_AT_MOST
        while ended and left > 0:
            told = self._told(ended, left)
            self._hear(ended, told, now)
            # Cut short, all are asked for again: what has been told is told no more.
            left -= len(told)
            ended = (ended if left <= 0 else []) + self._ended
            self._ended = []
        self._keep_ended(ended)
        if self._has_open_edges:
            self._has_open_edges = bool(self._conn.execute(HAS_TIES).fetchall()[0][0])

    def _take_ended(self) -> list[Ended]:
        earlier: list[Ended] = []
        if self._has_releasing:
            rows: Any = self._conn.execute("SELECT task, uuid, state FROM pending_release ORDER BY place")
            earlier = [(task, uuid, TaskState(state)) for task, uuid, state in rows]
        found, self._ended = earlier + self._ended, []
        # Once each, as it ended first: an add may have come upon an end that it has brought about itself.
        once: dict[int, Ended] = {}
        for ended in found:
            once.setdefault(ended[0], ended)
        return list(once.values())

    def _keep_ended(self, ended: list[Ended]) -> None:
        """What is left is for the turns that follow, whoever takes them."""
        if self._has_releasing:
            self._conn.execute("DELETE FROM pending_release")
        self._write_rows("pending_release", ("task", "uuid", "state"), list(ended))
        self._has_releasing = bool(ended)

    def _told(self, ended: list[Ended], limit: int) -> list[list[Any]]:
        """Those who are to hear of these ends: by the ends in their order, then by age."""
        found = self._one(
            f"SELECT json_group_array(json_array(key, child, state, on_failure, open_dependencies)) FROM ({_TOLD})",
            (_json([task for task, *_ in ended]), limit),
        )
        told: list[list[Any]] = sorted(msgspec.json.decode(found), key=lambda row: row[:2])
        return told

    def _hear(self, ended: list[Ended], told: list[list[Any]], now: datetime) -> None:
        fates: dict[int, _Fate] = {}
        for number, (n, child, state, on_failure, waits) in enumerate(told):
            if state not in (TaskState.BLOCKED, TaskState.PAUSED):
                continue
            fate = fates.setdefault(child, _Fate(TaskState(state), waits))
            if fate.lost is not None:
                continue
            fate.decided_at = number
            if stand_of(ended[n][2], None if on_failure is None else OnFailure(on_failure)) is Stand.LOST:
                fate.lost = ended[n]
            else:
                fate.waits -= 1
        self._set_done([(child, ended[n][0], 1) for n, child, *_ in told])
        self._update_rows(_WAITS, [(child, fate.waits) for child, fate in fates.items() if not fate.is_moving])
        # In the order in which each was decided: a dependent of two that fail here names the one that failed first.
        moving = sorted((fate.decided_at, child) for child, fate in fates.items() if fate.is_moving)
        found = self._read("id IN (SELECT value FROM json_each(?))", (_json(child for _, child in moving),))
        records = {record.id: record for record in found}
        for _, child in moving:
            self._meet(records[child], fates[child], now)
        self._save_moved()

    def _meet(self, record: TaskRecord, fate: _Fate, now: datetime) -> None:
        record.open_dependencies = fate.waits
        if fate.lost is None:
            self._move(record, unblock(record, now=now))
            return
        if record.state is TaskState.PAUSED:
            self._move(record, Move(state=TaskState.BLOCKED, at=now))
            self._save_moved()
        _, parent, state = fate.lost
        self._move(record, give_up(record, parent, state, now=now))
        self._unrun.append(record.uuid)

    def _set_done(self, edges: list[tuple[int, int, int]]) -> None:
        for block in blocks(edges):
            self._conn.execute(
                f"UPDATE dependency SET done = v.column3 FROM (VALUES {values(len(block), 3)}) AS v "
                "WHERE dependency.child = v.column1 AND dependency.parent = v.column2",
                tuple(chain.from_iterable(block)),
            )

    # --- sent again by a person ---------------------------------------------------------------------------------------

    def _revive(self, record: TaskRecord, move: Move) -> TaskyardError | None:
        """Carry out the move of a failed task back into line, or say why not."""
        self._save_moved()  # another of the same work may have been sent again a moment ago
        holder = None if record.dedupe_key is None else self.find_holder(record.dedupe_key, move.at)
        if holder is not None and holder.uuid != record.uuid:
            return SlotTaken(record.uuid, record.state, holder.uuid, until=holder.until)
        rows: Any = self._conn.execute(
            "SELECT t.id, t.uuid, t.state FROM dependency AS d JOIN task AS t ON t.id = d.parent "
            "WHERE d.child = ? ORDER BY t.id",
            (record.id,),
        )
        parents = [(id_, uuid, TaskState(state)) for id_, uuid, state in rows]
        stands = [stand_of(state, record.on_failure) for _, _, state in parents]
        for (_, uuid, state), stand in zip(parents, stands, strict=True):
            if stand is Stand.LOST:
                self._update_rows(("id", "error"), [(record.id, to_document(lost_to(uuid, state)))])
                return refuse_revival(record, uuid, state)
        edges = [(record.id, id_, int(stand is Stand.DONE)) for (id_, *_), stand in zip(parents, stands, strict=True)]
        self._set_done(edges)
        record.open_dependencies = stands.count(Stand.OPEN)
        self._move(record, move)
        if record.open_dependencies:
            self._has_open_edges = True
            self._save_moved()  # by way of the queue: the database knows no other
            self._move(record, Move(state=TaskState.BLOCKED, at=move.at))
        return None


def _json(given: Iterable[Any]) -> str:
    return msgspec.json.encode(list(given)).decode()
