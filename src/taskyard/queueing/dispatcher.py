"""The loop around `Store.turn`: what was submitted, what has ended and what there is room for, in one transaction.

One turn is in flight at a time. Whatever is handed in meanwhile goes into the next one together with the standing
demand, so an idle node goes from submit to started in one commit, and many submitters share one. Two turns in flight
would be slower: the store's writer thread and the event loop then fight for the GIL at 5 ms a step. A store that is
a server has its own processor: of many claims, some begin only when the next turn is on its way to it, so that it has
work while they run here.

Invariants: a settle is handed in once and sent until the store has answered it. A slot is free from the moment its run
has ended, so the settle and the claim that fills the slot go together. A claim has its slot from the moment it is heard
of. A dispatcher with nothing to do makes no turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from taskyard.errors import (
    ClaimLost,
    NotOpen,
    OutcomeUnknown,
    StoreError,
    StoreReplaced,
    StoreUnavailable,
    TaskyardError,
)
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, Dedupe, TaskRecord
from taskyard.ports.clock import Clock
from taskyard.ports.paging import task_pages
from taskyard.ports.probe import SILENT, Probes
from taskyard.ports.store import Add, Added, LeasedStore, PromptStore, Report, Store, TaskFilter, Turned
from taskyard.queueing.admission import Slots

log = logging.getLogger("taskyard")

ADDS_AT_MOST = 1000
"""Tasks one turn adds, unless a single caller hands in more: a burst of submits must not keep claims waiting."""

PROMPT_AT_MOST = 64
"""Submits of one asyncio task that a prompt store answers on the spot between two turns. The next one waits for the
turn, so that a loop of submits gives way to everything else every millisecond or so."""

MANY = 48
"""Claims of one turn that are worth being begun in two parts. Of fewer, a turn is mostly the way there and back."""

BACKOFF_FIRST_S, BACKOFF_CAP_S = 0.1, 2.0
"""Between tries while the store is away: at most 2 s, so that claims resume soon after it is back."""

REASON_CHARS = 500
"""Of an error that is told in a task's own."""

STRIKES = 3
"""How often a settle must fail alone, with the store answering right after, before it is taken to be at fault."""

REPLACE = Dedupe.REPLACE  # looked at once, not once per submit

Settle = tuple[Claim, Move]
Waiter = asyncio.Future[list[Added]]


class _Batch(msgspec.Struct, frozen=True):
    """What one turn carries; `waiting[i]` waits for the answer to `adds[i]`."""

    settles: list[Settle]
    adds: list[Add]
    waiting: list[Waiter]
    reports: list[Report]
    demand: Demand | None


@dataclass(frozen=True, slots=True)
class Hooks:
    """Whom the dispatcher tells, on the loop; none of them may block or raise. `start` gets every claim,
    `is_running` says whether the run with this token is going on, `settled` gets every settle with the store's answer
    to it, `ended` the tasks that a turn has ended unrun, `next_due` hears after every turn when the next waiting task
    is due."""

    start: Callable[[Claim], None]
    is_running: Callable[[int], bool]
    settled: Callable[[Sequence[Settle], Sequence[ClaimLost | None]], None]
    ended: Callable[[Sequence[str]], None]
    next_due: Callable[[datetime | None], None]


class Dispatcher:
    def __init__(
        self,
        store: Store,
        node: str,
        *,
        slots: Slots,
        clock: Clock,
        jitter: Callable[[], float],
        probes: Probes = SILENT,
        many: int = MANY,
    ) -> None:
        self._store, self._node, self._slots, self._clock = store, node, slots, clock
        self._former: set[str] = set()
        self._sent: tuple[str, list[Settle]] | None = None
        self.refused = 0
        """Settles the store did not take, because somebody else had their tasks by then."""
        self._jitter, self._probes = jitter, probes
        self._hooks: Hooks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._prompt = store if isinstance(store, PromptStore) else None
        self._prompt_left = 0
        self._submitter: asyncio.Task[Any] | None = None
        # Where nodes have leases, the store is a server.
        self._many = many if isinstance(store, LeasedStore) else None
        self._held: list[Claim] = []
        self._settles: list[Settle] = []
        self._waiting: deque[tuple[Add, Waiter]] = deque()
        self._reports: dict[int, Report] = {}
        self._look = False
        self._must_turn = False
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._flushed: asyncio.Event | None = None
        self._failures = 0
        self._is_hopeless = False
        self._doubtful: set[int] = set()
        self._claims_in_doubt = False
        self._is_apart = False
        self._part = 0
        # Tokens of settles that failed without anything else in their turn: they are the first of `_settles`.
        self._suspects: set[int] = set()
        self._strikes: Counter[int] = Counter()
        # Of those, the ones that are now to be settled as failed, because their own end could not be stored.
        self._failed: set[int] = set()
        self._dropped: set[int] = set()

    def connect(self, hooks: Hooks) -> None:
        """Before `run`. Apart from the constructor, because the runner is made with this dispatcher's `settle`."""
        self._hooks = hooks

    # --- under which name ---------------------------------------------------------------------------------------------

    def rejoin(self, node: str) -> None:
        """The node counts under another incarnation from here on. What ended under the one before is still written:
        the store takes it if nobody else has the task."""
        self._former.add(self._node)
        self._node = node

    def forget(self, node: str) -> None:
        """Nothing is left of that earlier incarnation."""
        self._former.discard(node)

    def is_ours(self, node: str | None) -> bool:
        return node == self._node or node in self._former

    def owes(self, node: str) -> bool:
        """Whether something that was claimed under this incarnation may still have to be written."""
        if self._claims_in_doubt or (self._sent is not None and self._sent[0] == node):
            return True
        settles = self._settles if self._sent is None else self._settles + self._sent[1]
        claims = [*self._held, *(claim for claim, _ in settles)]
        return any(claim.record.node == node for claim in claims)

    # --- handed in, on the loop ---------------------------------------------------------------------------------------

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
        self._waiting.append((add, future))
        if self._waiter is not None:
            self._rouse()
        return future

    def add_now(self, add: Add) -> list[Added] | None:
        """The same on the spot. None, and nothing was added, if the store is not prompt, if others wait for the next
        turn, or if this asyncio task has had too many such answers since the last one."""
        if self._prompt is None or self._waiting or self._closed or add.after or add.dedupe is REPLACE:
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
            self._rouse()
        return answer

    def settle(self, claim: Claim, move: Move) -> None:
        """The run of `claim` has ended: its slot is free, and `move` will be written, however long that takes."""
        self._slots.free(claim.record.source)
        self._settles.append((claim, move))
        if self._waiter is not None:
            self._rouse()

    def report(self, report: Report) -> None:
        """Reports of one run that wait for the same turn become one: the later says more."""
        earlier = self._reports.get(report.claim.token)
        self._reports[report.claim.token] = report if earlier is None else report.after(earlier)
        if self._waiter is not None:
            self._rouse()

    def look(self) -> None:
        """Something may have become startable elsewhere: claim if there is room."""
        self._look = True
        if self._waiter is not None and self._slots.demand() is not None:
            self._rouse()

    def promote(self) -> None:
        """Something is due: take a turn even without room, so that it joins its queue."""
        self._must_turn = True
        if self._waiter is not None:
            self._rouse()

    def _rouse(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take turns until cancelled."""
        while True:
            if not self._has_work():
                if self._held:
                    self._begin_held()
                    await asyncio.sleep(0)
                    continue
                await self._sleep()
            self._submitter = None
            await self._turn()
            # Whom the turn has set free goes first: submitters that were answered submit again, short runs end, and all
            # of it goes into the next turn.
            await asyncio.sleep(0)

    def _has_work(self) -> bool:
        if self._settles or self._waiting or self._reports or self._must_turn or self._claims_in_doubt:
            return True
        return self._look and self._slots.demand() is not None

    async def _sleep(self) -> None:
        self._probes.idle(None)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def _turn(self) -> None:
        if self._claims_in_doubt and not await self._adopt():
            return
        batch = self._take()
        self._sent = self._node, batch.settles
        if self._held:
            asyncio.get_running_loop().call_soon(self._begin_held)  # when the turn is on its way
        try:
            turned = await self._store.turn(
                self._node, settles=batch.settles, adds=batch.adds, reports=batch.reports, demand=batch.demand
            )
        except BaseException as error:
            self._put_back(batch, error)
            if not isinstance(error, Exception):
                raise
            if _is_refusal(error):
                await self._suspect(batch, error)
            await self._back_off(error)
            return
        finally:
            self._sent = None
        if self._failures:
            self._succeeded(batch)
        # Should telling the others go wrong, the claims are found again when this loop is started again.
        is_in_doubt, self._claims_in_doubt = self._claims_in_doubt, True
        self._finish(batch, turned)
        self._claims_in_doubt = is_in_doubt

    def _take(self) -> _Batch:
        """Everything for the next turn. What is handed in from here on belongs to the one after it."""
        if self._is_apart:
            return self._take_part()
        settles = self._take_settles(len(self._settles))
        adds, waiting = self._take_adds(ADDS_AT_MOST)
        reports = self._take_reports()
        self._look = self._must_turn = False
        return _Batch(settles, adds, waiting, reports, self._slots.demand())

    def _take_part(self) -> _Batch:
        """Settles, what is new, and claims in turn, each without the others: whatever fails, fails alone."""
        while True:
            self._part = (self._part + 1) % 3
            if self._part == 0 and (settles := self._take_settles(1 if self._suspects else len(self._settles))):
                return _Batch(settles, [], [], [], None)
            if self._part == 1 and (self._waiting or self._reports):
                adds, waiting = self._take_adds(ADDS_AT_MOST)
                return _Batch([], adds, waiting, self._take_reports(), None)
            if self._part == 2:
                self._look = self._must_turn = False
                return _Batch([], [], [], [], self._slots.demand())

    def _take_settles(self, count: int) -> list[tuple[Claim, Move]]:
        """A turn settles first, and what a run says after its end is ignored: its last word goes one turn ahead."""
        if not self._reports:
            taken, self._settles = self._settles[:count], self._settles[count:]
            return taken
        taken = [settle for settle in self._settles if settle[0].token not in self._reports][:count]
        tokens = {claim.token for claim, _ in taken}
        self._settles = [settle for settle in self._settles if settle[0].token not in tokens]
        return taken

    def _take_reports(self) -> list[Report]:
        if not self._reports:
            return []
        reports = list(self._reports.values())
        self._reports.clear()
        return reports

    def _take_adds(self, tasks: int) -> tuple[list[Add], list[Waiter]]:
        """As many callers as bring about `tasks` tasks together."""
        adds: list[Add] = []
        waiting: list[Waiter] = []
        queue = self._waiting
        while queue and tasks > 0:
            add, waiter = queue.popleft()
            # A submitter that was cancelled before its tasks went out has submitted nothing.
            if not waiter.done():
                adds.append(add)
                waiting.append(waiter)
                tasks -= len(add.records)
        return adds, waiting

    def _finish(self, batch: _Batch, turned: Turned) -> None:
        try:
            # What may run goes ahead of whoever submitted it: the one is to start on time, the other has all it wanted.
            if turned.claims:
                self._accept(turned.claims)
        finally:
            for waiter, answer in zip(batch.waiting, turned.added, strict=True):
                if not waiter.done():
                    _answer(waiter, answer)
            if batch.settles:
                self._answered(batch.settles, turned.settled)
        if turned.ended:
            self._hooks.ended(turned.ended)
        if batch.reports:
            self._probes.reported([report.claim.uuid for report in batch.reports])
        self._hooks.next_due(turned.next_due)
        if self._flushed is not None:
            self._flushed.set()

    def _answered(self, settles: list[Settle], answers: list[ClaimLost | None]) -> None:
        for (claim, move), lost in zip(settles, answers, strict=True) if any(answers) else ():
            if lost is not None:
                # After a commit whose outcome is unknown the first settle may well have been written: then this is it.
                is_known = claim.token in self._doubtful
                self.refused += not is_known
                level = logging.INFO if is_known else logging.WARNING
                log.log(level, "%s (it would have become %s)", lost, move.state)
        if self._doubtful:
            self._doubtful.difference_update(claim.token for claim, _ in settles)
        self._hooks.settled(settles, answers)
        if self._probes is not SILENT:
            self._probes.settled([claim.uuid for claim, _ in settles])

    def _accept(self, claims: list[Claim]) -> None:
        """Begin these claims: all of them now, or the first half, or, if there is enough for the next turn, none."""
        if self._many is None or len(claims) < self._many:
            self._begin(claims)
            return
        now = 0 if len(self._settles) * 2 >= len(claims) else len(claims) // 2
        self._begin(claims[:now])
        for claim in claims[now:]:
            self._slots.take(claim.record.source)
        self._held += claims[now:]

    def _begin_held(self) -> None:
        held, self._held = self._held, []
        for claim in held:
            self._slots.free(claim.record.source)
        try:
            self._begin(held)
        except Exception as error:
            log.error("of %d claims not all could be begun; they are looked for", len(held), exc_info=error)
            self._claims_in_doubt = True

    def _begin(self, claims: list[Claim]) -> None:
        if self._slots.is_stopped or self._slots.is_fenced or self._former:
            claims = self._give_back_unwanted(claims)
        take, start = self._slots.take, self._hooks.start
        for claim in claims:
            start(claim)
            take(claim.record.source)
        if self._probes is not SILENT:
            self._probes.claimed([claim.uuid for claim in claims])

    def _give_back_unwanted(self, claims: list[Claim]) -> list[Claim]:
        """Race: stop() came, or the lease was lost, while this turn was in flight. What was claimed then does not
        start, and goes back as it came; the rest."""
        wanted: list[Claim] = []
        for claim in claims:
            is_stale = self._slots.is_fenced or claim.record.node != self._node
            if not is_stale and not self._slots.is_stopped:
                wanted.append(claim)
                continue
            note = "its node had lost its lease" if is_stale else "the node was stopping"
            self._slots.take(claim.record.source)
            self.settle(claim, Move.given_back(at=self._clock.now(), note=note))
        return wanted

    # --- when the store is away ---------------------------------------------------------------------------------------

    def _put_back(self, batch: _Batch, error: BaseException) -> None:
        """Keep what must not be lost; tell submitters what happened, they can ask again."""
        if isinstance(error, OutcomeUnknown) or not isinstance(error, Exception):
            self._doubtful.update(claim.token for claim, _ in batch.settles)
            self._claims_in_doubt = batch.demand is not None
        self._settles = batch.settles + self._settles
        for report in batch.reports:
            later = self._reports.get(report.claim.token)
            self._reports[report.claim.token] = report if later is None else later.after(report)
        self._look = True
        if not self._is_apart and batch.settles and _is_refusal(error):
            # It may be a settle that is at fault: who submits is told when his tasks have been refused by themselves.
            self._waiting.extendleft(zip(reversed(batch.adds), reversed(batch.waiting), strict=True))
            return
        told = _as_ours(error)
        for waiter in batch.waiting:
            if not waiter.done():
                waiter.set_exception(told)

    async def _adopt(self) -> bool:
        """After a turn whose outcome is unknown: find what it may have claimed for this node without our hearing of it,
        and run that now. Nobody else would: this node is alive. Whether the store answered."""
        try:
            running = [task for node in (self._node, *self._former) async for task in self._running_tasks(node)]
        except StoreError as error:
            await self._back_off(error)
            return False
        self._begin_held()
        self._claims_in_doubt = False
        settling = {claim.token for claim, _ in self._settles} | self._dropped
        self._accept(
            [
                Claim(task, task.attempt, task.token)
                for task in running
                if task.token is not None and task.token not in settling and not self._hooks.is_running(task.token)
            ]
        )
        return True

    async def _running_tasks(self, node: str) -> AsyncIterator[TaskRecord]:
        where = TaskFilter(states=(TaskState.RUNNING,), node=node)
        async for page in task_pages(self._store.list_tasks, where):
            for task in page:
                yield task

    async def _suspect(self, batch: _Batch, error: Exception) -> None:
        """Not the store but something in the batch may be at fault. Sent apart, it can only hold up itself."""
        if not self._is_apart:
            # The settles go first.
            self._is_apart, self._part = True, 2
            return
        if batch.reports:
            log.error("the progress and notes of %d runs cannot be stored", len(batch.reports), exc_info=error)
            for report in batch.reports:
                self._reports.pop(report.claim.token, None)
        if self._suspects and batch.settles:
            await self._strike(error)
        elif batch.settles:
            self._suspects = {claim.token for claim, _ in batch.settles}

    async def _strike(self, error: Exception) -> None:
        """The first settle has failed all by itself. If the store takes a turn without it, that counts against it; the
        other suspects are next. How it ended may be what the store cannot take: the task is failed then, with words of
        ours; if that cannot be stored either, it is given up."""
        try:
            await self._store.turn(self._node)
        except Exception:
            return  # the store is at fault, or what is due: a settle that is given up would never be written
        claim, move = self._settles.pop(0)
        self._strikes[claim.token] += 1
        if self._strikes[claim.token] < STRIKES:
            self._settles.insert(len(self._suspects) - 1, (claim, move))
            return
        if claim.token not in self._failed:
            log.error("task %s is failed: that it is %s cannot be stored", claim.uuid, move.state, exc_info=error)
            self._failed.add(claim.token)
            del self._strikes[claim.token]
            self._settles.insert(len(self._suspects) - 1, (claim, _unstorable(move, error)))
            return
        self._suspects.discard(claim.token)
        self._dropped.add(claim.token)
        log.error(
            "task %s cannot be settled as %s and stays claimed until this process ends",
            claim.uuid,
            move.state,
            exc_info=error,
        )
        if self._flushed is not None:
            self._flushed.set()

    async def _back_off(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1 and not isinstance(error, StoreReplaced):  # which the store itself has told
            is_away = isinstance(error, StoreUnavailable | OutcomeUnknown)
            what = "does not answer, trying again until it does" if is_away else "did not take it, trying again"
            log.warning("the store %s: %s", what, error, exc_info=_trace(error))
        if isinstance(error, StoreReplaced):
            self._is_hopeless = True
            if self._flushed is not None:
                self._flushed.set()
        self._probes.outage(error)
        wait = min(BACKOFF_CAP_S, BACKOFF_FIRST_S * 2 ** min(self._failures - 1, 10)) * (0.5 + self._jitter() / 2)
        await self._clock.wait(asyncio.Event(), self._clock.monotonic() + wait)

    def _succeeded(self, batch: _Batch) -> None:
        """The store answers again; all of it, if what it was sent apart has gone through, the claims last."""
        if self._suspects:
            self._suspects.difference_update(claim.token for claim, _ in batch.settles)
        if self._is_apart and (self._part != 2 or self._suspects):
            return
        tries = "1 failed try" if self._failures == 1 else f"{self._failures} failed tries"
        log.warning("the store answers again, after %s", tries)
        self._failures, self._is_apart = 0, False
        self._strikes.clear()
        self._failed.clear()

    # --- stopping -----------------------------------------------------------------------------------------------------

    async def flush(self, until_mono: float) -> bool:
        """Wait until all that was handed in is written and no claim is in doubt, or `until_mono`; whether it is.
        A store that was replaced will take nothing more, and is not waited for."""
        self._rouse()
        while self._settles or self._waiting or self._held or self._sent is not None or self._claims_in_doubt:
            if self._is_hopeless or self._clock.monotonic() >= until_mono:
                return False
            self._flushed = asyncio.Event()
            await self._clock.wait(self._flushed, until_mono)
        return True

    async def write_rest(self, until_mono: float) -> bool:
        """The same when `run` has been cancelled: take the last turns here."""
        self._begin_held()
        while self._settles or self._claims_in_doubt:
            if self._is_hopeless or self._clock.monotonic() >= until_mono:
                return False
            await self._turn()
        return True

    @property
    def has_dropped(self) -> bool:
        """Whether a settle was given up: its task is still claimed by this node."""
        return bool(self._dropped)

    def close(self) -> None:
        """Take no more tasks; whoever still waits for an add is told."""
        self._closed = True
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(NotOpen("the yard was stopped before these tasks were stored; nothing was added"))
        self._waiting.clear()


def _answer(waiter: Waiter, answer: list[Added] | TaskyardError) -> None:
    if isinstance(answer, TaskyardError):
        waiter.set_exception(answer)
    else:
        waiter.set_result(answer)


def _is_refusal(error: BaseException) -> bool:
    """Whether not the store but something in the turn may be at fault."""
    return isinstance(error, Exception) and not isinstance(error, StoreError)


def _unstorable(move: Move, error: Exception) -> Move:
    """In plain letters, whatever it is that the store does not take."""
    why = ascii(str(error))[1:-1][:REASON_CHARS]
    message = f"the run ended as {move.state}, which cannot be stored: {why}"
    failure = ExecutionError(kind=ErrorKind.SYSTEM, message=message, types=(type(error).__name__,))
    return Move.failed(at=move.at, error=failure)


def _as_ours(error: BaseException) -> TaskyardError:
    """What a submitter is told."""
    if isinstance(error, TaskyardError):
        return error
    if isinstance(error, Exception):
        return StoreUnavailable(f"the store failed: {error!r}")
    return NotOpen("the yard was stopped while these tasks were being stored; look before you submit again")


def _trace(error: Exception) -> Exception | None:
    """A store's own errors say what to do; anything else is a bug, and needs its stack."""
    return None if isinstance(error, StoreError) else error
