"""The engine: the loops of one node, wired to each other and to a store.

It joins the parts that must not know each other: the dispatcher (which), the due and the recurring loop (when), the
runner (how), the rescuer (other nodes) and the watcher of outcomes (who waits). `Yard` and `Scheduler` stand on it. An
engine lives once: `start`, then `stop`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from taskyard.cluster.leader import Leadership
from taskyard.cluster.membership import Hooks as MemberHooks
from taskyard.cluster.membership import LeaseSettings, Membership
from taskyard.cluster.rescuer import Rescuer
from taskyard.errors import DuplicateTask, NotOpen, StoreError, StoreReplaced, SubmitPending, UnusableConnection
from taskyard.execution.runner import Hooks as RunHooks
from taskyard.execution.runner import Runner, RunnerSettings
from taskyard.model.command import Command
from taskyard.model.control import QueueCommand
from taskyard.model.limits import QueueSettings
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task import Claim, Outcome, TaskRecord
from taskyard.ports.clock import Clock
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutorProtocol
from taskyard.ports.probe import SILENT, Probes
from taskyard.ports.schedules import ScheduleStore
from taskyard.ports.store import (
    ANY,
    Add,
    Added,
    Applied,
    News,
    Node,
    QueueStatus,
    Store,
    TaskFilter,
    TransactionalStore,
)
from taskyard.queueing.admission import Hold, Slots
from taskyard.queueing.dispatcher import MANY, Dispatcher
from taskyard.queueing.dispatcher import Hooks as DispatchHooks
from taskyard.queueing.outcomes import OutcomeWatcher
from taskyard.queueing.pending import insist
from taskyard.queueing.summary import with_results
from taskyard.scheduling.due import DueLoop
from taskyard.scheduling.recurring import RecurringLoop
from taskyard.version import VERSION

log = logging.getLogger("taskyard")

TICK_S = 1.0
"""The one periodic wake-up of a node: steps of the wall clock, dead nodes, a sign of life of the loop."""

LOST_LEASE = "its node lost its lease"

UNWIND_S = 2.0
"""How long interrupted runs get to clean up when a stop has run out of grace."""

FLUSH_S = 5.0
"""How long a stop waits, at least, for a store that is away to take the last settles; longer if grace is left."""

RESTART_FIRST_S, RESTART_CAP_S = 0.05, 5.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`serve=False` makes an engine that only submits and waits. `others` is the room for tasks of unknown sources,
    which are taken only to be reported (the standalone Scheduler does that). Of `many` claims at once, some begin while
    the next turn is on its way."""

    serve: bool = True
    name: str = ""
    max_running: int = 100
    others: int = 0
    many: int = MANY
    runner: RunnerSettings = field(default_factory=RunnerSettings)
    lease: LeaseSettings = field(default_factory=LeaseSettings)


class Engine:
    """`consumers` may come and go while the engine runs, on its loop; say `consumers_changed` then. The store is opened
    and closed by the owner, the executors are started and shut down here."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        consumers: Mapping[str, Consumer],
        executors: Mapping[str, ExecutorProtocol],
        queues: Mapping[str, QueueSettings] | None = None,
        settings: EngineSettings | None = None,
        jitter: Callable[[], float] = random.random,
        probes: Probes = SILENT,
    ) -> None:
        self._store, self._clock, self._probes = store, clock, probes
        self._consumers, self._executors = consumers, executors
        self._settings = settings or EngineSettings()
        self._membership = Membership(
            store,
            clock=clock,
            describe=self._describe,
            is_draining=lambda: self.is_draining,
            settings=self._settings.lease,
        )
        self._slots = Slots(
            consumers,
            max_running=self._settings.max_running,
            others=self._settings.others,
            capacities={name: executor.abilities.capacity for name, executor in executors.items()},
        )
        self._watcher = OutcomeWatcher(store)
        self._dispatcher = Dispatcher(
            store,
            self.incarnation,
            slots=self._slots,
            clock=clock,
            jitter=jitter,
            probes=probes,
            many=self._settings.many,
        )
        self._inbox = self._dispatcher.inbox
        self._due = DueLoop(clock, self._inbox.promote)
        self._recurring: RecurringLoop | None = None
        if isinstance(store, ScheduleStore):
            self._recurring = RecurringLoop(
                store,
                clock=clock,
                consumers=consumers,
                look_for_leader=Leadership(store, lambda: self.incarnation).look,
                fired=self._fired,
                probes=probes,
            )
        self._rescuer = Rescuer(store, lambda _: self._changed(), probes=probes)
        self._membership.connect(MemberHooks(self._fenced, self._rejoined))
        self._runner = Runner(
            consumers=consumers,
            executors=executors,
            queues=queues if queues is not None else {},
            clock=clock,
            hooks=RunHooks(self._inbox.settle, self._inbox.report, partial(with_results, store)),
            jitter=jitter,
            settings=self._settings.runner,
            fails_unknown=self._settings.others > 0,
        )
        self._dispatcher.connect(
            DispatchHooks(
                self._runner.start,
                self._runner.is_running,
                self._watcher.settled,
                self._watcher.ended_unrun,
                self._turned,
            )
        )
        self._listeners: set[asyncio.Event] = set()
        self._hint = asyncio.Event()
        self._has_unheard = False
        self._applying: set[asyncio.Task[list[Applied]]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._is_started = self._is_stopped = False
        self.is_draining = False
        # After `stop`: whether the store has taken all that ended here. What it has not will be run again.
        self.is_recorded = True

    # --- what Yard and Scheduler ask ----------------------------------------------------------------------------------

    @property
    def incarnation(self) -> str:
        """Under which this node is known now; another after every lease it has lost."""
        return self._membership.incarnation

    @property
    def name(self) -> str:
        """Under which people know this node; the same for as long as the process lives."""
        return self._settings.name or f"{socket.gethostname()}-{os.getpid()}"

    @property
    def refused(self) -> int:
        """Results the store did not take, because their tasks had been given to other nodes by then."""
        return self._dispatcher.refused

    def is_ours(self, claim: Claim) -> bool:
        """Whether this node made the claim, be it under an earlier incarnation."""
        return self._dispatcher.is_ours(claim.record.node)

    @property
    def running(self) -> int:
        """Runs that are going on here now."""
        return len(self._runner)

    async def drained(self) -> None:
        """Return when this node was asked to drain and all that ran here has ended."""
        with self.changes() as changes:
            while not self.is_draining or self.running:
                changes.clear()
                await changes.wait()

    def add(self, add: Add) -> asyncio.Future[list[Added]]:
        """Submit; the future answers when the tasks are stored. On the engine's loop only."""
        return self._inbox.add(add)

    def submit_now(self, add: Add) -> list[Added] | None:
        """The same on the spot, where the store and what else is going on allow it; None if they do not."""
        return self._inbox.add_now(add)

    async def submit(self, add: Add, *, prompt: bool = True) -> list[Added]:
        """The same, on the spot where the store and what else is going on allow it, unless not `prompt`. While the same
        work is being submitted in a transaction that has not ended, that is waited for, then `SubmitPending`."""
        try:
            return (self._inbox.add_now(add) if prompt else None) or await self._inbox.add(add)
        except SubmitPending:
            return await insist(lambda: self._inbox.add(add), self._clock)
        except DuplicateTask as refused:
            raise await self._say_where(refused) from None

    async def submit_within(self, connection: object, add: Add) -> list[Added]:
        """The same inside of a transaction of the user's own."""
        store = self._store
        if not isinstance(store, TransactionalStore):
            raise UnusableConnection(
                f"a {type(store).__name__} takes no part in transactions of your own; use PostgreSQL, or leave "
                f"`connection` out and the task is stored at once"
            )
        try:
            return await store.add_within(connection, add)
        except SubmitPending:
            return await insist(lambda: store.add_within(connection, add), self._clock)
        except DuplicateTask as refused:
            raise await self._say_where(refused) from None

    async def _say_where(self, refused: DuplicateTask) -> DuplicateTask:
        """The same, with the state of who stands for the work: what to do depends on it."""
        try:
            record = await self._store.find(refused.existing) if refused.existing else None
        except StoreError:
            return refused
        if record is None:
            return refused
        return DuplicateTask(record.uuid, refused.slot, record.state, until=refused.until)

    def find_outcome(self, uuid: str) -> Outcome | None:
        """How the task ended, if this node remembers; None says nothing."""
        return self._watcher.find(uuid)

    def outcome(self, uuid: str, timeout_s: float | None = None) -> asyncio.Future[Outcome]:
        """How the task ended, when it has, wherever it runs; `ResultGone` if the store does not know it, `TimeoutError`
        if it has not ended within `timeout_s` seconds. Whoever gives up waiting says `forget_outcome`."""
        return self._watcher.wait(uuid, timeout_s)

    def forget_outcome(self, uuid: str, waiter: asyncio.Future[Outcome]) -> None:
        self._watcher.forget(uuid, waiter)

    async def apply(
        self, uuids: Sequence[str], command: Command, *, by: str = "", where: TaskFilter = ANY
    ) -> list[Applied]:
        """Carry out a command, and let it take effect on this node at once; also when the caller is cancelled, since
        the store may have carried it out already."""
        applying = asyncio.get_running_loop().create_task(self._apply(uuids, command, by, where))
        self._applying.add(applying)
        applying.add_done_callback(self._applied)
        return await asyncio.shield(applying)

    def _applied(self, applying: asyncio.Task[list[Applied]]) -> None:
        self._applying.discard(applying)
        if not applying.cancelled():
            applying.exception()  # its caller may be gone: then nobody else asks for it

    async def _apply(self, uuids: Sequence[str], command: Command, by: str, where: TaskFilter) -> list[Applied]:
        try:
            applied = await self._store.apply(uuids, command, by=by, where=where)
        except BaseException:
            self._changed()  # in part, or wholly, it may have been carried out
            raise
        for one in applied:
            record = one.record
            if record is None:
                continue
            if record.state in ENDED:
                self._watcher.ended(record)
            elif record.state is TaskState.RUNNING and record.cancel_asked_at is not None:
                self._runner.cancel(record.uuid, force=record.cancel_forced)
        if any(one.record is not None and one.record.state in ENDED for one in applied):
            self._watcher.changed()  # others may have ended with those
        # Whatever was changed may have made room or something startable: a key set free, a failed task sent again.
        self._inbox.look()
        self._announce()
        return applied

    async def control(self, queue: str, command: QueueCommand, *, by: str) -> QueueStatus:
        """Carry out what is asked of a queue, and let it take effect on this node at once."""
        try:
            return await self._store.control(queue, command, by=by)
        finally:
            self._inbox.look()
            self._announce()

    async def queues(self) -> list[QueueStatus]:
        return await self._store.queues()

    async def list_ids(self, where: TaskFilter, *, before_id: int | None, limit: int) -> list[tuple[int, str]]:
        return await self._store.list_ids(where, before_id=before_id, limit=limit)

    async def list_tasks(self, where: TaskFilter, *, before_id: int | None, limit: int) -> list[TaskRecord]:
        return await self._store.list_tasks(where, before_id=before_id, limit=limit)

    @property
    def clock(self) -> Clock:
        return self._clock

    @contextmanager
    def changes(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something may have happened in the store, here or elsewhere."""
        event = asyncio.Event()
        self._listeners.add(event)
        try:
            yield event
        finally:
            self._listeners.discard(event)

    def consumers_changed(self) -> None:
        """A consumer has come or gone. What runs goes on to its end; nothing more is claimed for one that has gone, and
        what was claimed and has not begun goes back."""
        self._slots.learn()
        self._membership.describe_anew()
        self._inbox.look()
        if self._recurring is not None:
            self._recurring.look()

    def look_at_schedules(self) -> None:
        """A schedule was put, changed or fired by this process."""
        self._fired()
        if self._recurring is not None:
            self._recurring.look()

    # --- starting and stopping ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the store and start the loops. Idempotent; a stopped engine does not start again."""
        if self._is_stopped:
            raise NotOpen("this engine has been stopped; make a new one")
        if self._is_started:
            return
        self._is_started = True
        try:
            await self._join()
        except BaseException:
            self._is_started = False
            for executor in self._executors.values():
                await executor.shutdown()
            raise
        self._store.watch(self._heard)
        self._keep("dispatcher", self._dispatcher.run)
        self._keep("outcomes", self._watcher.run)
        if self._settings.serve:
            self._keep("due", self._due.run)
            self._keep("rescuer", self._rescuer.run)
            self._keep("hints", self._follow_hints)
            self._keep("tick", self._tick)
            self._keep("membership", self._membership.run)
            if self._recurring is not None:
                self._keep("recurring", self._recurring.run)
            self._inbox.promote()  # finds what is waiting already, and hears what is due next
            self._hint.set()

    async def _join(self) -> None:
        if not self._settings.serve:
            self._slots.stop()
            return
        for executor in self._executors.values():
            await executor.start()
        self._slots.learn()
        await self._membership.join()

    async def stop(self, grace_s: float | None = None) -> None:
        """Start nothing new, let what runs finish, write what has ended, leave. After `grace_s` what still runs is
        interrupted and given back; None waits for ever. A thread that cannot be stopped keeps its claim, and the node
        then stays joined until the process ends. Cancelled, it goes on as if the grace were over, then raises."""
        if not self._is_started or self._is_stopped:
            return
        self._is_stopped = True
        self._slots.stop()
        self._membership.prepare_to_leave()
        try:
            await self._stop(grace_s)
        except asyncio.CancelledError:
            await self._stop_now()
            raise

    async def _stop(self, grace_s: float | None) -> None:
        until = self._clock.monotonic() + (grace_s or 0.0)
        try:
            stuck = await self._wind_down(grace_s)
            await asyncio.gather(*self._applying, return_exceptions=True)
            is_flushed = await self._flush(max(until, self._clock.monotonic() + FLUSH_S))
        finally:
            await self._end_loops()
        await self._leave(stuck, is_flushed)

    async def _flush(self, until: float) -> bool:
        """Write what is left, here if need be: the end of `asyncio.run` cancels the loops together with whoever then
        calls `stop`."""
        flushing = asyncio.get_running_loop().create_task(self._dispatcher.flush(until))
        try:
            await asyncio.wait((flushing, self._loops[0]), return_when=asyncio.FIRST_COMPLETED)
        finally:
            flushing.cancel()
        return flushing.result() if flushing.done() else await self._dispatcher.write_rest(until)

    async def _stop_now(self) -> None:
        """Give back what runs and leave, without the loops: whoever cancels a stop may have cancelled them as well."""
        stuck = await self._wind_down(0.0)
        is_flushed = await self._dispatcher.write_rest(self._clock.monotonic() + FLUSH_S)
        await self._leave(stuck, is_flushed)

    def interrupt(self) -> None:
        """Cut short what runs here; it goes back to the store. For a stop that must not wait for its grace to pass."""
        self._runner.interrupt()

    async def _wind_down(self, grace_s: float | None) -> list[str]:
        """What could not be ended."""
        self._runner.give_back_waiting()
        if self.running and self._settings.serve:
            self._membership.describe_anew()  # for as long as that takes, nobody is to wait for this node
        until = None if grace_s is None else self._clock.monotonic() + grace_s
        if await self._runner.drain(until):
            return []
        self._runner.interrupt()
        if await self._runner.drain(self._clock.monotonic() + UNWIND_S):
            return []
        stuck = await self._runner.abandon()
        log.warning("could not be stopped, and stay claimed until this process ends: %s", ", ".join(stuck))
        return stuck

    async def _end_loops(self) -> None:
        self._inbox.close()
        self._watcher.close()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._loops.clear()

    async def _leave(self, stuck: Sequence[str], is_flushed: bool) -> None:
        self.is_recorded = is_flushed and not self._dispatcher.has_dropped
        if not self._settings.serve:
            return
        for executor in self._executors.values():
            await executor.shutdown(wait=not stuck)
        if not is_flushed:
            log.error("the store took too long; what ended last is not recorded, and will be run again elsewhere")
        # A claim may be left: the node stays joined, so that it is rescued. Where nodes beat, that is when the process
        # ends if something runs on, else when the lease has passed.
        if stuck:
            self._membership.stay_behind()
            return
        if not self.is_recorded:
            await self._membership.stop_beating()
            return
        try:
            await self._membership.leave()
        except StoreReplaced:
            self.is_recorded = False  # what it took, it took into a file that nobody will read; it has said so
        except StoreError as error:
            log.warning("could not leave the store: %s", error)

    def _describe(self, incarnation: str, since: datetime) -> Node:
        return Node(
            incarnation=incarnation,
            name=self.name,
            pid=os.getpid(),
            host=socket.gethostname(),
            sources=tuple(self._consumers),
            started_at=since,
            version=VERSION,
            queues=tuple(sorted({consumer.queue for consumer in list(self._consumers.values())})),
            limits=self._slots.limits(),
            max_running=self._settings.max_running,
            executors=self._slots.executors(),
            capacities=self._slots.capacities(),
            is_stopping=self._is_stopped,
        )

    # --- the lease ----------------------------------------------------------------------------------------------------

    def _fenced(self, incarnation: str) -> None:
        """Others may take over what runs here. It is cut short now; how it ended is written all the same, since the
        store takes that only of tasks that nobody else has."""
        self._slots.hold(Hold.FENCE)
        self._runner.interrupt(LOST_LEASE)
        self._probes.fenced(incarnation)

    def _rejoined(self, old: str, new: str) -> None:
        self._dispatcher.rejoin(new)
        self._slots.release(Hold.FENCE)
        self._rescuer.bury(old, self._is_over, self._dispatcher.forget)
        self._changed()
        self._probes.rejoined(new)

    def _is_over(self, incarnation: str) -> bool:
        return not self._runner.holds_of(incarnation) and not self._dispatcher.owes(incarnation)

    # --- loops --------------------------------------------------------------------------------------------------------

    def _turned(self, next_due: datetime | None) -> None:
        self._due.tell(next_due)
        self._announce()
        if self._recurring is not None:
            self._recurring.turned()
        if self._has_unheard:
            self._has_unheard = False
            self._hint.set()

    def _fired(self) -> None:
        """Schedules have made tasks, and perhaps canceled others."""
        self._inbox.promote()
        self._changed()

    def _announce(self) -> None:
        for event in self._listeners:
            event.set()

    def _heard(self, news: News) -> None:
        """Another process has written."""
        if news is News.ADDED:
            # As most of what is heard is, where others submit what runs here: the store is asked for nothing else.
            self._inbox.look()
            self._announce()
            return
        self._changed()
        if news is News.NODES:
            self._rescuer.poke()

    def _changed(self) -> None:
        """Something has happened that is not known here: everything is looked at again."""
        self._inbox.look()  # first: what may start is to start soon
        self._announce()
        self._watcher.changed()
        self._hint.set()
        if self._recurring is not None:
            self._recurring.hint()

    async def _follow_hints(self) -> None:
        """What was asked elsewhere: cancels, and that this node drains."""
        while True:
            await self._hint.wait()
            self._hint.clear()
            try:
                signals = await self._store.signals(self.incarnation)
                self._drain(signals.is_draining)
                for uuid in signals.cancels:
                    # Race: the cancel came after the commit of a claim that is still on its way here. It is asked for
                    # again when the turn is over.
                    self._has_unheard |= not self._runner.cancel(uuid, force=uuid in signals.forced)
            except BaseException:
                self._hint.set()  # looked at again when this loop is started again
                raise

    def _drain(self, on: bool) -> None:
        """Claim nothing, or claim again. A claim that is on its way here when this is heard is run."""
        if on is self.is_draining:
            return
        self.is_draining = on
        if on:
            self._slots.hold(Hold.DRAIN)
            log.warning("this node is drained: it takes no new tasks, and has %d to finish", self.running)
        else:
            self._slots.release(Hold.DRAIN)
            log.warning("this node is no longer drained, and takes tasks again")
            self._inbox.look()
        self._announce()

    async def _tick(self) -> None:
        never = asyncio.Event()
        while True:
            await self._clock.wait(never, self._clock.monotonic() + TICK_S)
            never.clear()
            self._membership.tick()
            self._due.look()
            self._rescuer.poke()

    def _keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        self._loops.append(
            asyncio.get_running_loop().create_task(self._restarting(name, loop), name=f"taskyard-{name}")
        )

    async def _restarting(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """A loop that fails is logged and started again, sooner or later: it never dies silently."""
        failures = 0
        while True:
            began = self._clock.monotonic()
            try:
                await loop()
            except Exception as error:
                if self._clock.monotonic() - began > 2 * RESTART_CAP_S:
                    failures = 0
                _log_failure(name, error, is_first=failures == 0)
            self._probes.stumbled(name)
            pause = min(RESTART_FIRST_S * 2 ** min(failures, 10), RESTART_CAP_S)
            failures += 1
            await self._clock.wait(asyncio.Event(), self._clock.monotonic() + pause)
            self._changed()  # whatever it was in the middle of is looked at again


def _log_failure(name: str, error: Exception, *, is_first: bool) -> None:
    """A store that is away is no news the second time; a bug is, and comes with its stack."""
    if not isinstance(error, StoreError):
        log.error("the %s loop failed and is started again", name, exc_info=error)
    elif is_first:
        log.warning("the %s loop waits for the store: %s", name, error)
