"""Who waits for which task to end, and telling them: one watcher per process, one question for all who wait.

What this node settles itself is told without asking the store, and remembered for a while for those who ask later. For
the rest the store is asked once when a wait begins, and again, by its events, whenever another process may have written
something.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from taskyard.errors import ClaimLost, NotOpen, ResultGone
from taskyard.model.event import Event
from taskyard.model.move import Move
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task import Claim, Outcome, TaskRecord
from taskyard.ports.store import PromptStore, Store
from taskyard.queueing.deadlines import Deadlines

log = logging.getLogger("taskyard")

ASK_AT_MOST = 500
"""Tasks per question, so that many waiters do not hold the store for long."""

REMEMBER = 16_384
"""Outcomes of this node that are kept twice over at most, about 5 MB: who submits much and reads the results afterwards
would otherwise ask the store for each one."""

REMEMBER_CHARS = 1_000
"""Larger results are asked for: the store keeps them, not we."""

FOR_GOOD = frozenset({TaskState.COMPLETED, TaskState.CANCELED, TaskState.SKIPPED})
"""Ends that nobody can take back. A failed task may be sent again, so the store is asked how it stands."""

KNOWN_HERE = ENDED - {TaskState.CANCELED}
"""Ends of which who settled the run knows all. Why a task was canceled, the store alone knows."""

ENDINGS = frozenset(str(state) for state in ENDED)

Waiter = asyncio.Future[Outcome]


class OutcomeWatcher:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._prompt = store if isinstance(store, PromptStore) else None
        self._waiting: dict[str, Waiter] = {}
        self._also: dict[str, list[Waiter]] = {}
        self._new: list[str] = []
        self._changed = False
        self._cursor: int | None = None
        self._recent: dict[str, Outcome] = {}
        self._older: dict[str, Outcome] = {}
        self._wake = asyncio.Event()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadlines = Deadlines(self._expire)

    def find(self, uuid: str) -> Outcome | None:
        """How the task ended, if this node has ended it lately; None says nothing."""
        return self._recent.get(uuid) or self._older.get(uuid)

    def wait(self, uuid: str, timeout_s: float | None = None) -> Waiter:
        """How the task ended, when it has, as the store says; `ResultGone` if it does not know it, `TimeoutError` if it
        has not ended in time. A failed task may later be sent again: this answers with the first end it sees. Whoever
        no longer wants the answer says so with `forget`."""
        if self._closed:
            raise NotOpen("this yard has been stopped; open it again to wait for results")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        waiter: Waiter = self._loop.create_future()
        if self._prompt is not None:
            now = self._prompt.outcome_now(uuid)
            if now is None:
                waiter.set_exception(ResultGone(uuid))
                return waiter
            if now.state in ENDED:
                waiter.set_result(now)
                return waiter
        if timeout_s is not None:
            self._deadlines.set(uuid, waiter, timeout_s)
        if uuid in self._waiting:
            self._also.setdefault(uuid, []).append(waiter)
            return waiter
        self._waiting[uuid] = waiter
        if self._prompt is None:
            self._new.append(uuid)
            self._wake.set()
        return waiter

    def _expire(self, uuid: str, waiter: Waiter, after_s: float) -> None:
        self.forget(uuid, waiter)
        waiter.set_exception(TimeoutError(f"task {uuid} has not ended within {after_s:g} s; it goes on"))

    def forget(self, uuid: str, waiter: Waiter) -> None:
        """The waiter has given up."""
        also = self._also.get(uuid, [])
        if waiter in also:
            also.remove(waiter)
        elif self._waiting.get(uuid) is waiter:
            if also:
                self._waiting[uuid] = also.pop()
            else:
                del self._waiting[uuid]
        if not also:
            self._also.pop(uuid, None)

    def _waiters(self, uuid: str) -> list[Waiter]:
        first = self._waiting.get(uuid)
        return [] if first is None else [first, *self._also.get(uuid, ())]

    def _take(self, uuid: str) -> list[Waiter]:
        """All who wait for the task, who wait no longer."""
        first = self._waiting.pop(uuid, None)
        if first is None:
            return []
        return [first, *self._also.pop(uuid, ())] if self._also else [first]

    # --- told ---------------------------------------------------------------------------------------------------------

    def settled(self, settles: Sequence[tuple[Claim, Move]], answers: Sequence[ClaimLost | None]) -> None:
        """This node has settled these; those that were lost are somebody else's to end, or have ended."""
        recent = self._recent
        for (claim, move), lost in zip(settles, answers, strict=True):
            uuid = claim.record.uuid
            if lost is not None or move.state not in KNOWN_HERE:
                # Race: a cancel may have come after the run had ended. Then the store has canceled what would have run
                # again, and since this process wrote it, no event will wake us. Nor will one when the first answer to
                # this settle was lost, and the second says that the claim is spent.
                if uuid in self._waiting:
                    self._new.append(uuid)
                    self._wake.set()
                continue
            outcome = Outcome(uuid, move.state, move.result, move.error)
            if uuid in self._waiting:
                self._tell(outcome)
            if move.state in FOR_GOOD and (move.result is None or len(move.result) <= REMEMBER_CHARS):
                recent[uuid] = outcome
        if len(recent) >= REMEMBER:
            # Two generations: forgetting half at once costs nothing per task, unlike an order of use.
            self._older, self._recent = recent, {}

    def ended_unrun(self, uuids: Sequence[str]) -> None:
        """This node has ended these by the way, and since it wrote that itself, no event will wake us."""
        new = [uuid for uuid in uuids if uuid in self._waiting]
        if new:
            self._new += new
            self._wake.set()

    def ended(self, record: TaskRecord) -> None:
        """A command carried out by this process has ended the task."""
        if record.uuid in self._waiting and record.state in ENDED:
            self._tell(Outcome(record.uuid, record.state, record.result, record.error, record.cancel))

    def changed(self) -> None:
        """Somebody else may have written to the store."""
        if self._waiting:
            self._changed = True
            self._wake.set()

    def close(self) -> None:
        """Nobody will be told any more."""
        self._closed = True
        self._deadlines.close()
        for uuid in list(self._waiting):
            self._fail(uuid, NotOpen(f"the yard was stopped while task {uuid} was waited for; the task goes on"))

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ask for those who wait, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._look()
            except BaseException:
                # Whoever came before the failure is asked for again when this loop is started again.
                self._changed, self._cursor = True, None
                self._wake.set()
                raise

    async def _look(self) -> None:
        new, self._new = self._new, []
        changed, self._changed = self._changed, False
        if self._cursor is None:
            # Where the events stand is read before the outcomes: what ends in between is seen by at least one.
            self._cursor = (await self._store.events(after=-1)).last
            changed, new = False, list(self._waiting)
        if changed:
            new += await self._ended_since()
        await self._ask(new)
        if not self._waiting:
            self._cursor = None

    async def _ended_since(self) -> list[str]:
        """The waited-for tasks that ended since the last look; all of them if the events do not reach back that far."""
        ended: list[str] = []
        while self._waiting:
            assert self._cursor is not None
            page = await self._store.events(after=self._cursor)
            self._cursor = page.last
            if page.missed:
                return list(self._waiting)
            ended += self._waited_for(page.events)
            if not page.events:
                break
        return ended

    def _waited_for(self, events: Iterable[Event]) -> list[str]:
        return [event.uuid for event in events if event.uuid in self._waiting and event.kind in ENDINGS]

    async def _ask(self, uuids: Iterable[str]) -> None:
        ask = [uuid for uuid in dict.fromkeys(uuids) if uuid in self._waiting]
        for start in range(0, len(ask), ASK_AT_MOST):
            part = ask[start : start + ASK_AT_MOST]
            asked = [self._waiters(uuid) for uuid in part]
            for uuid, waiters, outcome in zip(part, asked, await self._store.outcomes(part), strict=True):
                if outcome is None:
                    self._gone(uuid, waiters)
                elif outcome.state in ENDED:
                    self._tell(outcome)

    def _gone(self, uuid: str, asked: Sequence[Waiter]) -> None:
        """The store did not know the task when it was asked for these waiters. Race: it may have been added since, and
        whoever began to wait for it after that is asked for again."""
        later = [waiter for waiter in self._waiters(uuid) if waiter not in asked]
        self._fail(uuid, ResultGone(uuid), but=later)
        if later:
            self._waiting[uuid], *also = later
            if also:
                self._also[uuid] = also
            self._new.append(uuid)
            self._wake.set()

    def _tell(self, outcome: Outcome) -> None:
        for waiter in self._take(outcome.uuid):
            if not waiter.done():
                waiter.set_result(outcome)

    def _fail(self, uuid: str, error: Exception, *, but: Sequence[Waiter] = ()) -> None:
        for waiter in self._take(uuid):
            if not waiter.done() and waiter not in but:
                waiter.set_exception(error)
