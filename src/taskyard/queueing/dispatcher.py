"""The loop around `Store.turn`: what was submitted, what has ended and what there is room for, in one transaction.

One turn is in flight at a time. Whatever is handed in meanwhile goes into the next one together with the standing
demand, so an idle node goes from submit to started in one commit, and many submitters share one. Two turns in flight
would be slower: the store's writer thread and the event loop then fight for the GIL at 5 ms a step. A store that is
a server has its own processors: of many claims, some begin only when the next turn is on its way to it, so that it has
work while they run here; and very many ends go apart from the claims of their turn, which are made meanwhile.

What is handed in waits in the inbox, and `Blame` finds out what in a turn the store cannot take. Here are the turns,
the claims they bring, and what to do while the store is away.

Invariants: a settle is handed in once and sent until the store has answered it. A slot is free from the moment its run
has ended, so the settle and the claim that fills the slot go at the same time. A claim has its slot from the moment it
is heard of. A dispatcher with nothing to do makes no turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain

import msgspec

from taskyard.errors import ClaimLost, OutcomeUnknown, StoreError, StoreReplaced, StoreUnavailable
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.move import Move
from taskyard.model.notes import Note, NoteCode
from taskyard.model.state import COMPLETED, TaskState
from taskyard.model.task import Claim, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.clock import Clock
from taskyard.ports.paging import task_pages
from taskyard.ports.sink import (
    NO_SINKS,
    ReportsStored,
    Sinks,
    StoreCalled,
    StoreFailed,
    TasksClaimed,
    TasksSettled,
)
from taskyard.ports.store import LeasedStore, Store, Turned
from taskyard.queueing.admission import AdmissionControl
from taskyard.queueing.blame import Blame
from taskyard.queueing.capacity import Slots
from taskyard.queueing.inbox import Batch, Inbox, Settle

log = logging.getLogger("taskyard")

MANY = 48
"""Claims of one turn that are worth being begun in two parts. Of fewer, a turn is mostly the way there and back."""

MANY_ENDS = 400
"""Ends of one turn that are worth being sent apart from its claims. Of fewer, a second call costs more than it brings,
above all on a server that is busy with other nodes as well."""

BEGIN_AT_ONCE = 64
"""Claims that were put off and begin in one pass of the loop. Short runs are over then before the garbage collector has
seen them twice: to begin a thousand at once takes a node four tenths more time for each."""

BACKOFF_FIRST_S, BACKOFF_CAP_S = 0.1, 2.0
"""Between tries while the store is away: at most 2 s, so that claims resume soon after it is back."""


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


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """What is on its way to the store, and under which incarnation."""

    node: str
    batch: Batch


class Dispatcher:
    def __init__(  # noqa: PLR0913 - what it works with, each part with a name
        self,
        store: Store,
        node: str,
        *,
        slots: Slots,
        clock: Clock,
        jitter: Callable[[], float],
        admission: AdmissionControl | None = None,
        sinks: Sinks = NO_SINKS,
        many: int = MANY,
        many_ends: int = MANY_ENDS,
    ) -> None:
        self._store, self._node, self._slots, self._clock = store, node, slots, clock
        self._jitter, self._sinks = jitter, sinks
        self._hooks: Hooks
        self._admission = admission
        self.inbox = Inbox(store, slots, admission)
        if admission is not None:
            admission.connect(self.inbox.claim)
        self._blame = Blame(self.inbox)
        self._former: set[str] = set()
        self._sent: list[_Sent] = []
        self.refused = 0
        """Settles the store did not take, because somebody else had their tasks by then."""
        # Where nodes have leases, the store is a server.
        is_server = isinstance(store, LeasedStore)
        self._many = many if is_server else None
        self._many_ends = many_ends if is_server else None
        self._held: list[Claim] = []
        self._is_beginning = False
        self._flushed: asyncio.Event | None = None
        self._failures = 0
        self._has_warned = False
        self._is_hopeless = False
        self._doubtful: set[int] = set()
        self._claims_in_doubt = False

    def connect(self, hooks: Hooks) -> None:
        """Before `run`. Apart from the constructor, because the runner is made with this dispatcher's inbox."""
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
        if self._claims_in_doubt or any(sent.node == node for sent in self._sent):
            return True
        settles = chain(self.inbox.settles, *(sent.batch.settles for sent in self._sent))
        claims = [*self._held, *(claim for claim, _ in settles)]
        return any(claim.record.node == node for claim in claims)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take turns until cancelled."""
        while True:
            if not (self.inbox.has_work() or self._claims_in_doubt):
                if self._held:
                    self._begin_held()
                    await asyncio.sleep(0)
                    continue
                await self.inbox.wait()
            await self._turn()
            # Whom the turn has set free goes first: submitters that were answered submit again, short runs end, and all
            # of it goes into the next turn.
            await asyncio.sleep(0)

    async def _turn(self) -> None:
        if self._claims_in_doubt and not await self._adopt():
            return
        batch = self._blame.take_part() if self._blame.is_apart else self.inbox.take()
        self._begin_beside()
        if self._is_worth_parting(batch):
            answers = await self._send_apart(batch)
            # Race: the claims may have been counted before the ends had made room for more.
            self.inbox.look()
        else:
            answers = [(batch, await self._send(self._note_sent(batch)))]
        dues = [answer.next_due for _, answer in answers if isinstance(answer, Turned)]
        if dues:
            # Of two, neither need have seen what the other brought.
            self._hooks.next_due(min((due for due in dues if due is not None), default=None))
        failed = [(part, answer) for part, answer in answers if isinstance(answer, Exception)]
        if failed:
            await self._failed(*failed[0])

    def _is_worth_parting(self, batch: Batch) -> bool:
        """Whether the ends of this turn are so many that they go apart, and such that it is of use: those of runs that
        did not complete, or with a key, concern who is claimed next."""
        if self._many_ends is None or len(batch.settles) < self._many_ends or batch.demand is None or self._failures:
            return False
        return all(move.state is COMPLETED and claim.record.key is None for claim, move in batch.settles)

    async def _send_apart(self, batch: Batch) -> list[tuple[Batch, Turned | Exception]]:
        rest = self._note_sent(msgspec.structs.replace(batch, settles=[]))
        ends = self._note_sent(Batch(batch.settles))
        try:
            async with asyncio.TaskGroup() as group:
                ending = group.create_task(self._send(ends))
                turned = await self._send(rest)
                self._begin_beside()  # the ends may take longer
        finally:
            # Race: whoever ends the loop may cancel a task before its first step: nothing of it has run then.
            if ends in self._sent:
                self._sent.remove(ends)
                self.inbox.put_back(ends.batch)
        return [(rest.batch, turned), (ends.batch, ending.result())]

    def _note_sent(self, batch: Batch) -> _Sent:
        """Nobody else has it from here on, until `_send` has been answered."""
        sent = _Sent(self._node, batch)
        self._sent.append(sent)
        return sent

    async def _send(self, sent: _Sent) -> Turned | Exception:
        """Take a turn with this, and let the answer take effect."""
        batch, began = sent.batch, 0.0
        is_timed = StoreCalled in self._sinks.kinds
        if is_timed:
            began = self._clock.monotonic()
        try:
            turned = await self._store.turn(
                sent.node, settles=batch.settles, adds=batch.adds, reports=batch.reports, demand=batch.demand
            )
        except BaseException as error:
            self._put_back(batch, error)
            if is_timed:
                self._tell_called(batch, began, 0, error)
            if not isinstance(error, Exception):
                raise
            return error
        finally:
            self._sent.remove(sent)
        if is_timed:
            self._tell_called(batch, began, len(turned.claims))
        if self._failures:
            self._succeeded(batch)
        self._finish(batch, turned)
        return turned

    def _tell_called(self, batch: Batch, began: float, claimed: int, error: BaseException | None = None) -> None:
        added = sum(len(add.records) for add in batch.adds)
        took_s = self._clock.monotonic() - began
        self._sinks.tell(StoreCalled(took_s, len(batch.settles), added, claimed, error))

    async def _failed(self, batch: Batch, error: Exception) -> None:
        if _is_refusal(error):
            await self._find_fault(batch, error)
        # Who submits has it as his error: what is tried again here is the rest.
        await self._back_off(error, is_told=not (batch.settles or batch.reports or batch.demand))

    def _finish(self, batch: Batch, turned: Turned) -> None:
        # What may run goes ahead of whoever submitted it: the one is to start on time, the other has all it wanted.
        if turned.claims:
            self._accept(turned.claims)
        if self._admission is not None:
            self._admission.turned(batch.demand, turned, has_written=bool(batch.settles or batch.adds))
        if batch.waiting:
            batch.answer(turned.added)
        if batch.settles:
            self._answered(batch.settles, turned.settled)
        if turned.ended:
            self._hooks.ended(turned.ended)
        if batch.reports and ReportsStored in self._sinks.kinds:
            self._sinks.tell(ReportsStored([report.claim for report in batch.reports]))
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
        if TasksSettled in self._sinks.kinds:
            self._sinks.tell(TasksSettled(settles, answers))

    def _accept(self, claims: list[Claim]) -> None:
        """Begin these claims: all of them now, or the first half, or, if there is enough for the next turn or others
        are put off that come before them, none."""
        if self._many is None or (len(claims) < self._many and not self._held):
            self._begin(claims)
            return
        now = 0 if self._held or len(self.inbox.settles) * 2 >= len(claims) else len(claims) // 2
        self._begin(claims[:now])
        for claim in claims[now:]:
            self._slots.take(claim.record.consumer, claim.record.device)
        self._held += claims[now:]

    def _begin_beside(self) -> None:
        """Begin those that were put off when the turn is on its way: some of them in each pass of the loop."""
        if self._held and not self._is_beginning:
            self._is_beginning = True
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _begin_some(self) -> None:
        self._is_beginning = False
        self._begin_held(BEGIN_AT_ONCE)
        self._begin_beside()

    def _begin_held(self, at_most: int | None = None) -> None:
        held = self._held[:at_most]
        del self._held[:at_most]
        for claim in held:
            self._slots.free(claim.record.consumer, claim.record.device)
        self._begin(held)

    def _begin(self, claims: list[Claim]) -> None:
        if self._slots.is_stopped or self._slots.is_fenced or self._former:
            claims = self._give_back_unwanted(claims)
        take, start = self._slots.take, self._hooks.start
        for claim in claims:
            take(claim.record.consumer, claim.record.device)
            try:
                start(claim)
            except Exception as error:  # a bug of ours, which is to cost this task alone
                log.error("task %s could not be begun", claim.uuid, exc_info=error)
                self.inbox.settle(claim, _unbegun(error, at=self._clock.now()))
        if claims and TasksClaimed in self._sinks.kinds:
            self._sinks.tell(TasksClaimed(claims))

    def _give_back_unwanted(self, claims: list[Claim]) -> list[Claim]:
        """Race: stop() came, or the lease was lost, while this turn was in flight. What was claimed then does not
        start, and goes back as it came; the rest."""
        wanted: list[Claim] = []
        for claim in claims:
            is_stale = self._slots.is_fenced or claim.record.node != self._node
            if not is_stale and not self._slots.is_stopped:
                wanted.append(claim)
                continue
            code = NoteCode.LEASE_LOST if is_stale else NoteCode.NODE_STOPPED
            self._slots.take(claim.record.consumer, claim.record.device)
            self.inbox.settle(claim, Move.given_back(at=self._clock.now(), note=Note(code)))
        return wanted

    # --- when the store is away ---------------------------------------------------------------------------------------

    def _put_back(self, batch: Batch, error: BaseException) -> None:
        """Keep what must not be lost; tell submitters what happened, they can ask again."""
        if isinstance(error, OutcomeUnknown) or not isinstance(error, Exception):
            self._doubtful.update(claim.token for claim, _ in batch.settles)
            self._claims_in_doubt |= batch.demand is not None
        self.inbox.put_back(batch)
        if self._admission is not None:
            self._admission.failed(batch.demand)
        if not self._blame.is_apart and batch.settles and _is_refusal(error):
            # It may be a settle that is at fault: who submits is told when his tasks have been refused by themselves.
            self.inbox.put_back_adds(batch)
        else:
            batch.refuse(error)

    async def _adopt(self) -> bool:
        """After a turn whose outcome is unknown: find what it may have claimed for this node without our hearing of it,
        and run that now. Nobody else would: this node is alive. Whether the store answered."""
        try:
            running = [task for node in (self._node, *sorted(self._former)) async for task in self._running_tasks(node)]
        except StoreError as error:
            await self._back_off(error)
            return False
        self._begin_held()
        settling = {claim.token for claim, _ in self.inbox.settles} | self._blame.dropped
        self._accept(
            [
                Claim(task, task.attempt, task.token)
                for task in running
                if task.token is not None and task.token not in settling and not self._hooks.is_running(task.token)
            ]
        )
        self._claims_in_doubt = False
        return True

    async def _running_tasks(self, node: str) -> AsyncIterator[TaskRecord]:
        where = TaskFilter(states=(TaskState.RUNNING,), node=node)
        async for page in task_pages(self._store.list_tasks, where):
            for task in page:
                yield task

    async def _find_fault(self, batch: Batch, error: Exception) -> None:
        """Not the store but something in the batch may be at fault. Sent apart, it can only hold up itself."""
        if not self._blame.refused(batch, error):
            return
        try:
            turned = await self._store.turn(self._node)
        except Exception:
            return  # the store is at fault, or what is due: a settle that is given up would never be written
        if turned.ended:
            self._hooks.ended(turned.ended)
        if self._blame.strike(error) and self._flushed is not None:
            self._flushed.set()

    async def _back_off(self, error: Exception, *, is_told: bool = False) -> None:
        self._failures += 1
        if not (is_told or self._has_warned or isinstance(error, StoreReplaced)):  # which the store itself has told
            self._has_warned = True
            is_away = isinstance(error, StoreUnavailable | OutcomeUnknown)
            what = "does not answer, trying again until it does" if is_away else "did not take it, trying again"
            # A store's own errors say what to do; anything else is a bug, and needs its stack.
            log.warning("the store %s: %s", what, error, exc_info=error if _is_refusal(error) else None)
        if isinstance(error, StoreReplaced):
            self._is_hopeless = True
            if self._flushed is not None:
                self._flushed.set()
        self._sinks.tell(StoreFailed(error, self._failures))
        wait = min(BACKOFF_CAP_S, BACKOFF_FIRST_S * 2 ** min(self._failures - 1, 10)) * (0.5 + self._jitter() / 2)
        await self._clock.wait(asyncio.Event(), self._clock.monotonic() + wait)

    def _succeeded(self, batch: Batch) -> None:
        if not self._blame.taken(batch):
            return
        if self._has_warned:
            tries = "1 failed try" if self._failures == 1 else f"{self._failures} failed tries"
            log.warning("the store answers again, after %s", tries)
        self._failures, self._has_warned = 0, False

    # --- stopping -----------------------------------------------------------------------------------------------------

    async def flush(self, until_mono: float) -> bool:
        """Wait until all that was handed in is written and no claim is in doubt, or `until_mono`; whether it is.
        A store that was replaced will take nothing more, and is not waited for."""
        self.inbox.rouse()
        while self.inbox.settles or self.inbox.adds or self._held or self._sent or self._claims_in_doubt:
            if self._is_hopeless or self._clock.monotonic() >= until_mono:
                return False
            self._flushed = asyncio.Event()
            await self._clock.wait(self._flushed, until_mono)
        return True

    async def write_rest(self, until_mono: float) -> bool:
        """The same when `run` has been cancelled: take the last turns here."""
        self._begin_held()
        while self.inbox.settles or self._claims_in_doubt:
            if self._is_hopeless or self._clock.monotonic() >= until_mono:
                return False
            await self._turn()
            self._begin_held()  # what it has found again, and put off: it goes back
        return True

    @property
    def has_dropped(self) -> bool:
        """Whether a settle was given up: its task is still claimed by this node."""
        return bool(self._blame.dropped)


def _is_refusal(error: BaseException) -> bool:
    """Whether not the store but something in the turn may be at fault."""
    return isinstance(error, Exception) and not isinstance(error, StoreError)


def _unbegun(error: Exception, *, at: datetime) -> Move:
    message = f"the run could not be begun: {error}"
    return Move.failed(
        at=at, error=ExecutionError(kind=ErrorKind.SYSTEM, message=message, types=(type(error).__name__,))
    )
