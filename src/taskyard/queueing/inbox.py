"""What is handed in for the next turn, who waits for an answer to it, and what one turn carries.

Whoever submits and whatever ends is heard here, on the loop. The dispatcher waits here, takes a batch for each turn and
puts back what the store has not taken. This never talks to the store, but for what a prompt one answers on the spot.

Invariants: a settle is in here from the moment it is handed in until a batch takes it, and comes back with that batch
if the store has not answered it. Whoever waits for an add is answered once, by the batch that carries it or by `close`.
What a run says goes at least one turn ahead of how it ended. Handing in never waits, and wakes who does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from taskyard.errors import NotOpen, StoreUnavailable, TaskyardError
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.task import Claim, Dedupe
from taskyard.ports.store import Add, Added, PromptStore, Report, Store
from taskyard.queueing.capacity import Slots

ADDS_AT_MOST = 1000
"""Tasks one turn adds, unless a single caller hands in more: a burst of submits must not keep claims waiting."""

PROMPT_AT_MOST = 64
"""Submits of one asyncio task that a prompt store answers on the spot between two turns. The next one waits for the
turn, so that a loop of submits gives way to everything else every millisecond or so."""

REPLACE = Dedupe.REPLACE  # looked at once, not once per submit

Settle = tuple[Claim, Move]
Waiter = asyncio.Future[list[Added]]


class DemandSource(Protocol):
    """What the next turn claims for."""

    is_active: bool
    """Whether what is claimed has to be prepared."""

    def demand(self) -> Demand | None: ...


class Batch(msgspec.Struct, frozen=True):
    """What one turn carries; `waiting[i]` waits for the answer to `adds[i]`."""

    settles: list[Settle] = []
    adds: list[Add] = []
    waiting: list[Waiter] = []
    reports: list[Report] = []
    demand: Demand | None = None

    def answer(self, answers: Sequence[list[Added] | TaskyardError]) -> None:
        """Tell the submitters what the store has answered each of them."""
        for waiter, answer in zip(self.waiting, answers, strict=True):
            if not waiter.done():
                _answer(waiter, answer)

    def refuse(self, error: BaseException) -> None:
        """Tell the submitters what kept their tasks out; they can ask again."""
        told = _as_ours(error)
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_exception(told)


class Inbox:
    """`settles`, `adds` and `reports` are what is there now, for looking; in `settles` who finds a fault may also put
    one in the place of another."""

    def __init__(self, store: Store, slots: Slots, demands: DemandSource | None = None) -> None:
        self._slots = slots
        self._demands = demands
        self.settles: list[Settle] = []
        self.adds: deque[tuple[Add, Waiter]] = deque()
        self.reports: dict[int, Report] = {}
        self._look = False
        self._must_turn = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._prompt = store if isinstance(store, PromptStore) else None
        self._prompt_left = 0
        self._submitter: asyncio.Task[Any] | None = None

    # --- handed in ----------------------------------------------------------------------------------------------------

    def add(self, add: Add) -> Waiter:
        """The future answers after the commit; it raises what kept the tasks out."""
        # The loop is remembered: asking for it costs a system call, once per task.
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        future: Waiter = loop.create_future()
        if self._closed:
            future.set_exception(NotOpen("this yard has been stopped; it takes no more tasks"))
            return future
        self.adds.append((add, future))
        if self._waiter is not None:
            self.rouse()
        return future

    def add_now(self, add: Add) -> list[Added] | None:
        """The same on the spot. None, and nothing was added, if the store is not prompt, if others wait for the next
        turn, or if this asyncio task has had too many such answers since the last one."""
        if self._prompt is None or self.adds or self._closed or add.after or add.dedupe is REPLACE:
            return None  # what ends others is a turn's: it is told of them
        submitter = asyncio.current_task(self._loop)
        if submitter is not self._submitter:
            self._submitter, self._prompt_left = submitter, PROMPT_AT_MOST
        if self._prompt_left == 0:
            return None
        self._prompt_left -= 1
        try:
            answer = self._prompt.add_now(add)
        except Exception as error:
            raise _as_ours(error) from error
        if isinstance(answer, TaskyardError):
            raise answer
        self._must_turn = True
        if self._waiter is not None:
            self.rouse()
        return answer

    def settle(self, claim: Claim, move: Move) -> None:
        """The run of `claim` has ended: its slot is free, and `move` will be written, however long that takes."""
        self._slots.free(claim.record.consumer, claim.record.device)
        self.settles.append((claim, move))
        if self._waiter is not None:
            self.rouse()

    def report(self, report: Report) -> None:
        """Reports of one run that wait for the same turn become one: the later says more."""
        earlier = self.reports.get(report.claim.token)
        self.reports[report.claim.token] = report if earlier is None else report.after(earlier)
        if self._waiter is not None:
            self.rouse()

    def look(self) -> None:
        """Something may have become startable elsewhere: claim if there is room. What is prepared first is prepared
        after a turn, which queues what is due and answers when the next task is."""
        if self._demands is None or not self._demands.is_active:
            self.claim()
        elif self._slots.demand() is not None:
            self.promote()

    def claim(self) -> None:
        """Take a turn if there is anything to claim for."""
        self._look = True
        if self._waiter is not None and self._demand() is not None:
            self.rouse()

    def _demand(self) -> Demand | None:
        return self._slots.demand() if self._demands is None else self._demands.demand()

    def promote(self) -> None:
        """Something is due: take a turn even without room, so that it joins its queue."""
        self._must_turn = True
        if self._waiter is not None:
            self.rouse()

    def close(self) -> None:
        """Take no more tasks; whoever still waits for an add is told."""
        self._closed = True
        for _, waiter in self.adds:
            if not waiter.done():
                waiter.set_exception(NotOpen("the yard was stopped before these tasks were stored; nothing was added"))
        self.adds.clear()

    # --- waited for ---------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether there is anything to take a turn for."""
        if self.settles or self.adds or self.reports or self._must_turn:
            return True
        return self._look and self._demand() is not None

    async def wait(self) -> None:
        """Return when something is handed in. Called when there is no work, by one at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def rouse(self) -> None:
        """End the wait."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- taken and put back -------------------------------------------------------------------------------------------

    def take(self) -> Batch:
        """Everything for the next turn. What is handed in from here on belongs to the one after it."""
        settles = self.take_settles(len(self.settles))
        adds, waiting = self._take_adds(ADDS_AT_MOST)
        reports = self._take_reports()
        self._look = self._must_turn = False
        self._submitter = None  # who submits may be answered on the spot as often again
        return Batch(settles, adds, waiting, reports, self._demand())

    def take_settles(self, count: int) -> list[Settle]:
        """A turn settles first, and what a run says after its end is ignored: its last word goes one turn ahead."""
        if not self.reports:
            taken, self.settles = self.settles[:count], self.settles[count:]
            return taken
        taken = [settle for settle in self.settles if settle[0].token not in self.reports][:count]
        tokens = {claim.token for claim, _ in taken}
        self.settles = [settle for settle in self.settles if settle[0].token not in tokens]
        return taken

    def take_new(self) -> Batch:
        """What is added and reported, without the rest."""
        adds, waiting = self._take_adds(ADDS_AT_MOST)
        return Batch(adds=adds, waiting=waiting, reports=self._take_reports())

    def take_demand(self) -> Batch:
        """What there is room for, without the rest."""
        self._look = self._must_turn = False
        self._submitter = None
        return Batch(demand=self._demand())

    def _take_reports(self) -> list[Report]:
        if not self.reports:
            return []
        reports = list(self.reports.values())
        self.reports.clear()
        return reports

    def _take_adds(self, tasks: int) -> tuple[list[Add], list[Waiter]]:
        """As many callers as bring about `tasks` tasks together."""
        adds: list[Add] = []
        waiting: list[Waiter] = []
        queue = self.adds
        while queue and tasks > 0:
            add, waiter = queue.popleft()
            # A submitter that was cancelled before its tasks went out has submitted nothing.
            if not waiter.done():
                adds.append(add)
                waiting.append(waiter)
                tasks -= len(add.records)
        return adds, waiting

    def put_back(self, batch: Batch) -> None:
        """Keep what must not be lost, ahead of what has come since; turn again, also without room to claim: what is due
        may wait for it. The adds are the submitters' to send again, unless they are put back as well."""
        self.settles = batch.settles + self.settles
        for report in batch.reports:
            later = self.reports.get(report.claim.token)
            self.reports[report.claim.token] = report if later is None else later.after(report)
        self._look = self._must_turn = True

    def put_back_adds(self, batch: Batch) -> None:
        self.adds.extendleft(zip(reversed(batch.adds), reversed(batch.waiting), strict=True))

    def drop_reports(self, batch: Batch) -> None:
        """Forget what these runs have said, here as well as in the batch."""
        for report in batch.reports:
            self.reports.pop(report.claim.token, None)


def _answer(waiter: Waiter, answer: list[Added] | TaskyardError) -> None:
    if isinstance(answer, TaskyardError):
        waiter.set_exception(answer)
    else:
        waiter.set_result(answer)


def _as_ours(error: BaseException) -> TaskyardError:
    """What a submitter is told."""
    if isinstance(error, TaskyardError):
        return error
    if isinstance(error, Exception):
        return StoreUnavailable(f"the store failed: {error!r}")
    return NotOpen("the yard was stopped while these tasks were being stored; look before you submit again")
