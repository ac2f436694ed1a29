"""Which tasks may start here, decided before the store starts them.

A node that has places or admission checks claims in two steps. It asks the store what it would claim, gives each of
these tasks a place and runs the checks, and then claims exactly the tasks that passed. So no task starts that has no
place, none is started and put back, and the order of every queue holds. A task that a check refuses is stored as
blocked, and leaves the line, or holds it where the order is strict.

A node without places and checks claims in one step: nothing here is asked then.

Invariants: at most `LOOKS_AT_MOST` tasks of a lane are checked for one blocker until that is freed. An admission is
claimed by the next turn, or dropped: it is never kept while the store is away, the node drains or a place changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from taskyard.errors import StoreError
from taskyard.model.blocker import satisfies, split_key, split_lane
from taskyard.model.command import Block
from taskyard.model.limits import Demand
from taskyard.model.task import TaskRecord
from taskyard.ports.clock import Clock
from taskyard.ports.consumer import Consumer
from taskyard.ports.places import Place, Places
from taskyard.ports.store import Store, Turned
from taskyard.queueing.blockers import LOOKS_OF_A_SLOW_ANSWER, BlockerLoop, KnownBlockers
from taskyard.queueing.capacity import Slots
from taskyard.queueing.checks import Answer, Checks

log = logging.getLogger("taskyard")

LANES_AT_ONCE = 10
"""Lanes whose first tasks are checked at the same time: a check that hangs costs a look 2 s for each ten."""
JUDGE_S = 0.05
"""When a look takes longer and some tasks have passed, those are claimed before the look goes on."""
RECHECK_WAIT_S = 1.0
"""How long a node that starts waits for its first round of rechecks before it looks at tasks."""
FRUITLESS_FIRST_S, FRUITLESS_CAP_S = 0.01, 1.0
"""The pause after a claim that brought nothing; it doubles until one brings something."""

_read_lane = lru_cache(maxsize=1024)(split_lane)


class Admitted(NamedTuple):
    """Tasks that passed, by id, with their places."""

    places: dict[int, str | None]
    lanes: list[str]
    taken: list[tuple[str, str]]
    """The consumer and the place of each task that has one."""


class Pending(NamedTuple):
    """What the next turn claims, and how many claims it brought."""

    demand: Demand
    taken: Sequence[tuple[str, str]]
    answer: asyncio.Future[int]


class AdmissionControl:
    """`consumers` may come and go: call `refresh` then. `node` names this node in events. `announce` is called after
    tasks were blocked or freed. `run` and `blockers.run` are the loops; other calls are made on their event loop."""

    def __init__(
        self,
        store: Store,
        slots: Slots,
        blockers: BlockerLoop,
        *,
        consumers: Mapping[str, Consumer],
        checks: Checks,
        node: str,
        announce: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._store, self._slots, self._consumers = store, slots, consumers
        self._checks, self._node, self._announce, self._clock = checks, node, announce, clock
        self.blockers, self._known = blockers, blockers.known
        self._claim: Callable[[], None] = lambda: None
        self._wake = asyncio.Event()
        self._pending: Pending | None = None
        self._fruitless = 0
        self._is_in_doubt = False
        self._cut_lanes: set[str] = set()
        """The lanes of tasks that passed and were not claimed, because others came before them meanwhile."""
        self.is_active = bool(checks)

    def connect(self, claim: Callable[[], None]) -> None:
        """`claim` makes the dispatcher take a turn."""
        self._claim = claim

    def refresh(self) -> None:
        """Consumers or their places have changed."""
        self.is_active = bool(self._checks) or self._slots.has_places
        self._look()

    # --- what the dispatcher asks -------------------------------------------------------------------------------------

    def demand(self) -> Demand | None:
        """What the next turn claims for: what was admitted, or all there is room for where nothing has to be."""
        room = self._slots.demand()
        if not self.is_active:
            return room
        pending = self._pending
        if pending is None:
            return None
        if room is None or not self._slots.are_free(pending.taken):
            # The node drains or stops, or a place has changed: what was admitted is judged again.
            self._answer(pending, 0)
            return None
        return pending.demand

    def _look(self) -> None:
        """Something may have become startable."""
        if self.is_active:
            self._wake.set()

    def turned(self, demand: Demand | None, turned: Turned, *, has_written: bool) -> None:
        """The store has answered a turn. `has_written` says that it carried settles or adds."""
        self._is_in_doubt = False
        pending = self._pending
        is_ours = demand is not None and pending is not None and demand is pending.demand
        if is_ours and pending is not None:
            self._answer(pending, len(turned.claims))
        if has_written or not is_ours:
            # After a claim of what was admitted `run` looks again by itself.
            self._look()

    def failed(self, demand: Demand | None) -> None:
        """A turn was not answered. The dispatcher finds what it may have claimed before its next turn; until that is
        answered, what seems free may be taken."""
        pending = self._pending
        if pending is not None and demand is pending.demand:
            self._is_in_doubt = True
            self._answer(pending, 0)

    def _answer(self, pending: Pending, claims: int) -> None:
        self._pending = None
        if not pending.answer.done():
            pending.answer.set_result(claims)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Admit tasks until cancelled."""
        self._pending = None
        until = self._clock.monotonic() + RECHECK_WAIT_S
        if self._checks:
            await self._clock.wait(self.blockers.has_rechecked, until)
        while True:
            self._wake.clear()
            while self.is_active and await self._admit_some():
                pass
            await self._clock.wait(self._wake, None)

    async def _admit_some(self) -> bool:
        """Look at what would start next; whether there may be more."""
        room = None if self._is_in_doubt else self._slots.demand()
        demand = None if room is None else self._by_lane(room, await self._store.list_lanes())
        if demand is None:
            self._cut_lanes.clear()
            return False
        picked = await self._store.preview(demand)
        self.blockers.freed_meanwhile.clear()
        admitted, blocked = await self._judge(picked)
        await self._block(blocked)
        was_cut = bool(self._cut_lanes)
        self._cut_lanes.clear()
        if not admitted.places:
            return bool(blocked) or was_cut
        claims = await self._claim_all(admitted, demand)
        self._fruitless = 0 if claims else self._fruitless + 1
        if claims < len(admitted.lanes):
            # Others came first meanwhile. Of these lanes alone the next look is not disturbed by those of other lanes.
            self._cut_lanes.update(admitted.lanes[claims:])
        # What was claimed is to begin before the next look, which is as much work again.
        await asyncio.sleep(0)
        await self._pause()
        return True

    async def _claim_all(self, admitted: Admitted, demand: Demand) -> int:
        """Let the next turn claim these; how many it claimed. What it asks for is what the preview was asked, so that
        it finds the tasks in the same order."""
        lanes = {lane: room for lane, room in demand.per_lane.items() if self._known.is_open(lane, _read_lane(lane)[1])}
        only = Demand(len(admitted.places), lanes, demand.others, admitted.places)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending = pending = Pending(only, admitted.taken, answer)
        try:
            self._claim()
            return await answer
        finally:
            if self._pending is pending:
                self._pending = None

    async def _pause(self) -> None:
        """If claims brought nothing, others are faster, or this node counts as dead. The first look is at once."""
        if self._fruitless > 1:
            pause_s = min(FRUITLESS_CAP_S, FRUITLESS_FIRST_S * 2 ** min(self._fruitless, 10))
            await self._clock.wait(asyncio.Event(), self._clock.monotonic() + pause_s)

    async def _block(self, blocked: Mapping[str, Sequence[str]]) -> None:
        """Store these tasks as blocked, by key of the blocker."""
        for key, uuids in blocked.items():
            try:
                await self._store.apply(uuids, Block(*split_key(key)), by=self._node)
            except StoreError:
                raise
            except Exception:
                log.exception("tasks could not be blocked by %r; they are looked at again", key)
            if key in self.blockers.freed_meanwhile:
                # Race: it was freed after the check had named it, and before the tasks were stored as blocked.
                self.blockers.free_key(key)
        if blocked:
            self._announce()

    def _by_lane(self, demand: Demand, lanes: Iterable[str]) -> Demand | None:
        """The same room by lanes: of each, as much as its consumer has, or as it has places that fit."""
        rooms: dict[str, int] = {}
        for lane in self._cut_lanes or {*lanes, *demand.per_lane}:
            consumer, requires = _read_lane(lane)
            room = self._room(consumer, requires, demand) if self._known.is_open(lane, requires) else 0
            if room > 0 or demand.others:  # where others are served, a lane that is not listed is one of them
                rooms[lane] = room
        if not any(rooms.values()) and not demand.others:
            return None
        return Demand(demand.total, rooms, demand.others)

    def _room(self, name: str, requires: Mapping[str, str], demand: Demand) -> int:
        room = demand.per_lane.get(name, 0)
        needs = self._labels_of(requires)
        consumer = self._consumers.get(name)
        if consumer is not None and consumer.places is not None:
            free = self._slots.free_places(name)
            return min(room, sum(satisfies(place.labels, needs) for place in free) if needs else len(free))
        return 0 if needs else room

    def _labels_of(self, requires: Mapping[str, str]) -> dict[str, str]:
        """What a place must have of these. The rest is for the checks."""
        return {name: value for name, value in requires.items() if name not in self._checks.kinds}

    # --- each task ----------------------------------------------------------------------------------------------------

    async def _judge(self, picked: Sequence[TaskRecord]) -> tuple[Admitted, dict[str, list[str]]]:
        """Of these tasks, in order: those that may start; and the others, by key of the blocker."""
        admitted = Admitted({}, [], [])
        free, asked = _Free(self._slots, self._consumers), _Asked(self._checks, self._known, picked)
        until = self._clock.monotonic() + JUDGE_S
        for record in picked:
            if admitted.places and self._clock.monotonic() > until:
                break
            place = free.find(record, self._labels_of(record.requirements))
            if place is None:
                break  # what follows may have to wait for this one
            if not self._known.is_open(record.lane, record.requirements):
                continue
            if await asked.is_blocked(record):
                continue
            name = free.take(record, place)
            admitted.places[record.id] = name
            admitted.lanes.append(record.lane)
            if name is not None:
                admitted.taken.append((record.consumer, name))
        return admitted, asked.blocked


class _Asked:
    """What the checks say of the tasks of one look. All blockers that they name are noted as known."""

    def __init__(self, checks: Checks, known: KnownBlockers, picked: Sequence[TaskRecord]) -> None:
        self._checks, self._known = checks, known
        self._answers: dict[int, Answer] = {}
        self._firsts: dict[str, TaskRecord] = {}
        """By lane, the first of its tasks, until that is checked."""
        self.blocked: dict[str, list[str]] = {}
        """The ids of those that may not start, by key of the blocker."""
        for record in picked if checks else ():
            if record.lane not in self._firsts and known.is_open(record.lane, record.requirements):
                self._firsts[record.lane] = record

    async def is_blocked(self, record: TaskRecord) -> bool:
        if record.id not in self._answers:
            await self._ask(record)
        return self._answers[record.id].blocker is not None

    async def _ask(self, record: TaskRecord) -> None:
        """Check this one. If it is the first of its lane, the first ones of other lanes are checked meanwhile."""
        first = self._firsts.pop(record.lane, None)
        others = [] if first is None else list(self._firsts.values())[: LANES_AT_ONCE - 1]
        if not others:
            self._answers[record.id] = await self._checks.find_blocker(record)
            self._note(record)
            return
        self._answers |= await self._checks.find_blockers([record, *others])
        for one in (record, *others):
            self._firsts.pop(one.lane, None)
            self._note(one)

    def _note(self, record: TaskRecord) -> None:
        blocker, is_slow = self._answers[record.id]
        if blocker is not None:
            self._known.note(blocker.key, record.lane, LOOKS_OF_A_SLOW_ANSWER if is_slow else 1)
            self.blocked.setdefault(blocker.key, []).append(record.uuid)


class _Free:
    """What is free while tasks are judged. Consumers may share their places."""

    def __init__(self, slots: Slots, consumers: Mapping[str, Consumer]) -> None:
        self._slots, self._consumers = slots, consumers
        self._rooms: dict[str, int] = {}
        self._places: dict[Places, list[Place]] = {}

    def find(self, record: TaskRecord, needs: Mapping[str, str]) -> Place | bool | None:
        """A place that fits, or True where the consumer has no places; None if there is none, or no room."""
        if self._room(record.consumer) <= 0:
            return None
        consumer = self._consumers.get(record.consumer)
        if consumer is not None and consumer.places is not None:
            if consumer.places not in self._places:
                free = self._slots.free_places(consumer.name)
                # Those with the fewest labels first: others may need what the rest have.
                self._places[consumer.places] = sorted(free, key=lambda place: len(place.labels))
            return next((place for place in self._places[consumer.places] if satisfies(place.labels, needs)), None)
        return True

    def take(self, record: TaskRecord, place: Place | bool) -> str | None:
        """Take what was found; the name of the place."""
        self._rooms[record.consumer] = self._room(record.consumer) - 1
        if not isinstance(place, Place):
            return None
        places = self._consumers[record.consumer].places
        assert places is not None
        self._places[places].remove(place)
        return place.name

    def _room(self, name: str) -> int:
        if name not in self._rooms:
            demand = self._slots.demand()
            self._rooms[name] = 0 if demand is None else demand.per_lane.get(name, demand.others)
        return self._rooms[name]
