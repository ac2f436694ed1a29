"""What one node does, with its parts: it starts and stops them, keeps their loops going, submits, waits and steers.

How the parts are made and what they tell each other is in `parts`. An engine lives once: `start`, then `stop`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from taskyard.engine.loops import Loops
from taskyard.engine.parts import Parts
from taskyard.engine.settings import EngineSettings, Ground
from taskyard.errors import DuplicateTask, NotOpen, StoreError, StoreReplaced, SubmitPending, UnusableConnection
from taskyard.model.audit import AuditEntry
from taskyard.model.command import Command
from taskyard.model.queue import QueueCommand, QueueSettings, QueueStatus
from taskyard.model.queue_order import QueueSnapshot
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task import Claim, Outcome, TaskRecord
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.ports.clock import Clock
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutorProtocol, ExecutorStats
from taskyard.ports.schedules import Fired
from taskyard.ports.sink import NO_SINKS, NodeSampled, Sinks
from taskyard.ports.store import Add, Added, Applied, Store, TransactionalStore
from taskyard.queueing.pending import insist

log = logging.getLogger("taskyard")

TICK_S = 1.0
"""The one periodic wake-up of a node: steps of the wall clock, dead nodes, a sign of life of the loop."""

UNWIND_S = 2.0
"""How long interrupted runs get to clean up when a stop has run out of grace."""

FLUSH_S = 5.0
"""How long a stop waits, at least, for a store that is away to take the last settles; longer if grace is left."""


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
        sinks: Sinks = NO_SINKS,
    ) -> None:
        self._store, self._clock, self._executors = store, clock, executors
        self.executors = executors
        self._settings = settings or EngineSettings()
        self._parts = parts = Parts(
            Ground(
                store=store,
                clock=clock,
                consumers=consumers,
                executors=executors,
                queues=queues if queues is not None else {},
                settings=self._settings,
                jitter=jitter,
                sinks=sinks,
            )
        )
        self._inbox, self._dispatcher, self._runner = parts.inbox, parts.dispatcher, parts.runner
        self._slots, self._membership, self._watcher = parts.slots, parts.membership, parts.watcher
        self._sinks = sinks
        self._loops = Loops(clock, parts.changed, sinks=sinks)
        self._applying: set[asyncio.Task[list[Applied]]] = set()
        self._silent_executors: set[str] = set()
        self._is_started = self._is_stopped = False
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
        return self._settings.node_name

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

    @property
    def is_draining(self) -> bool:
        """Whether this node was asked to take no more tasks."""
        return self._slots.is_draining

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
        return None if self._parts.submits.applies_to(add.records) else self._inbox.add_now(add)

    async def submit(self, add: Add, *, prompt: bool = True) -> list[Added]:
        """The same, on the spot where the store and what else is going on allow it, unless not `prompt`. While the same
        work is being submitted in a transaction that has not ended, that is waited for, then `SubmitPending`."""
        if self._parts.submits.applies_to(add.records):
            return await self._parts.submits.submit(add.records, lambda: self._submit(add, prompt=prompt))
        return await self._submit(add, prompt=prompt)

    async def fire(
        self, schedule: str, records: Sequence[TaskRecord], send: Callable[[], Awaitable[Fired | None]]
    ) -> Fired | None:
        """Have a schedule make these tasks by `send`, with the middleware around it. While the same work is being
        submitted in a transaction that has not ended, that is waited for, then `SubmitPending`."""

        async def send_all() -> Fired | None:
            try:
                return await send()
            except SubmitPending:
                return await insist(send, self._clock)

        return await self._parts.submits.fire(schedule, records, send_all)

    async def _submit(self, add: Add, *, prompt: bool) -> list[Added]:
        try:
            return (self._inbox.add_now(add) if prompt else None) or await self._inbox.add(add)
        except SubmitPending:
            return await insist(lambda: self._inbox.add(add), self._clock)
        except DuplicateTask as refused:
            raise await self._say_where(refused) from None

    async def submit_within(self, connection: object, add: Add) -> list[Added]:
        """The same inside of a transaction of the user's own."""
        if self._parts.submits.applies_to(add.records):
            return await self._parts.submits.submit(add.records, lambda: self._submit_within(connection, add))
        return await self._submit_within(connection, add)

    async def _submit_within(self, connection: object, add: Add) -> list[Added]:
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
        if refused.key is not None:
            return refused
        try:
            record = await self._store.find(refused.existing) if refused.existing else None
        except StoreError:
            return refused
        if record is None and refused.until is None:
            return refused
        state = "forgotten" if record is None else record.state  # only a window outlives its task
        return DuplicateTask(refused.existing, refused.slot, state, until=refused.until)

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
        self,
        uuids: Sequence[str],
        command: Command,
        *,
        by: str = "",
        where: TaskFilter = ALL_TASKS,
        audit: AuditEntry | None = None,
    ) -> list[Applied]:
        """Carry out a command, and let it take effect on this node at once; also when the caller is cancelled, since
        the store may have carried it out already."""
        applying = asyncio.get_running_loop().create_task(self._apply(uuids, command, by, where, audit))
        self._applying.add(applying)
        applying.add_done_callback(self._applied)
        return await asyncio.shield(applying)

    def _applied(self, applying: asyncio.Task[list[Applied]]) -> None:
        self._applying.discard(applying)
        if not applying.cancelled():
            applying.exception()  # its caller may be gone: then nobody else asks for it

    async def _apply(
        self, uuids: Sequence[str], command: Command, by: str, where: TaskFilter, audit: AuditEntry | None
    ) -> list[Applied]:
        try:
            applied = await self._store.apply(uuids, command, by=by, where=where, audit=audit)
        except BaseException:
            self._parts.changed()  # in part, or wholly, it may have been carried out
            raise
        for one in applied:
            record = one.record
            if record is None:
                continue
            if record.state in ENDED:
                self._watcher.ended(record)
            elif record.state is TaskState.RUNNING and record.cancel is not None:
                self._runner.cancel(record.uuid, force=record.cancel.is_forced)
        if any(one.record is not None and one.record.state in ENDED for one in applied):
            self._watcher.changed()  # others may have ended with those
        # Whatever was changed may have made room or something startable: a key set free, a failed task sent again.
        self._inbox.look()
        self._parts.announce()
        return applied

    async def control(
        self, queue: str, command: QueueCommand, *, by: str, audit: AuditEntry | None = None
    ) -> QueueStatus:
        """Carry out what is asked of a queue, and let it take effect on this node at once."""
        try:
            return await self._store.control(queue, command, by=by, audit=audit)
        finally:
            self._inbox.look()
            self._parts.announce()

    async def put_audit(self, entry: AuditEntry) -> None:
        await self._store.put_audit(entry)

    async def queues(self) -> list[QueueStatus]:
        return await self._store.queues()

    async def queue_snapshot(self, queue: str, *, limit: int) -> QueueSnapshot:
        return await self._store.queue_snapshot(queue, limit=limit)

    async def median_run_s(self, consumers: Sequence[str]) -> dict[str, float]:
        return await self._store.median_run_s(consumers)

    async def list_ids(self, where: TaskFilter, *, before_id: int | None, limit: int) -> list[tuple[int, str]]:
        return await self._store.list_ids(where, before_id=before_id, limit=limit)

    async def list_tasks(self, where: TaskFilter, *, before_id: int | None, limit: int) -> list[TaskRecord]:
        return await self._store.list_tasks(where, before_id=before_id, limit=limit)

    @property
    def clock(self) -> Clock:
        return self._clock

    def changes(self) -> AbstractContextManager[asyncio.Event]:
        """An event that is set whenever something may have happened in the store, here or elsewhere."""
        return self._parts.changes()

    def consumers_changed(self) -> None:
        """A consumer has come or gone. What runs goes on to its end; nothing more is claimed for one that has gone, and
        what was claimed and has not begun goes back."""
        self._parts.consumers_changed()

    def look_at_schedules(self) -> None:
        """A schedule was put, changed or fired by this process."""
        self._parts.fired()
        if self._parts.recurring is not None:
            self._parts.recurring.look()

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
            self._parts.close()
            await self._membership.give_up_joining()
            for executor in self._executors.values():
                await executor.shutdown()
            raise
        parts, keep = self._parts, self._loops.keep
        self._store.watch(parts.notified)
        keep("dispatcher", self._dispatcher.run)
        keep("outcomes", self._watcher.run)
        if self._settings.serve:
            keep("due", parts.due.run)
            keep("rescuer", parts.rescuer.run)
            keep("signals", parts.signals.run)
            keep("tick", self._tick)
            keep("membership", self._membership.run)
            if parts.recurring is not None:
                keep("recurring", parts.recurring.run)
            keep("admission", parts.admission.run)
            keep("blockers", parts.admission.blockers.run)
            self._inbox.promote()  # finds what is waiting already, and hears what is due next
            parts.signals.look()

    async def _join(self) -> None:
        if not self._settings.serve:
            self._slots.stop()
            return
        for executor in self._executors.values():
            await executor.start()
        self._parts.begin()
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
        finally:
            self._runner.close()
            self._parts.close()

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
            await asyncio.wait((flushing, self._loops.get("dispatcher")), return_when=asyncio.FIRST_COMPLETED)
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
        await self._loops.end()

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

    async def _tick(self) -> None:
        never = asyncio.Event()
        while True:
            await self._clock.wait(never, self._clock.monotonic() + TICK_S)
            never.clear()
            self._membership.tick()
            self._parts.due.look()
            self._parts.rescuer.poke()
            if NodeSampled in self._sinks.kinds:
                self._sinks.tell(self._sample())

    def _sample(self) -> NodeSampled:
        stats = {name: found for name in self._executors if (found := self._executor_stats(name)) is not None}
        return NodeSampled(self.running, self._settings.max_running, self._slots.available(), stats)

    def _executor_stats(self, name: str) -> ExecutorStats | None:
        """None if it raises: an executor of somebody else must not end the loop that samples it."""
        try:
            return self._executors[name].stats()
        except Exception:
            if name not in self._silent_executors:
                self._silent_executors.add(name)
                log.exception("stats() of the executor %s failed; the samples of this node leave it out", name)
            return None
