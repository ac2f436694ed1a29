"""One simulated process: the real engine on a remote store, and the code of its tasks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from taskyard.cluster.heartbeat import InTask
from taskyard.cluster.membership import LeaseSettings
from taskyard.engine import Engine, EngineSettings
from taskyard.errors import (
    Cancel,
    ClaimLost,
    CommandRefused,
    DuplicateTask,
    NotOpen,
    OutcomeUnknown,
    ResultGone,
    RetryLater,
    SlotTaken,
    StoreError,
    UnknownNode,
    UnknownTask,
)
from taskyard.execution.context import CURRENT, RunContext, current_run
from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.runner import RunnerSettings
from taskyard.model.command import Command
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, Dedupe, TaskRecord
from taskyard.ports.consumer import Consumer
from taskyard.ports.store import Add, Added, Applied
from taskyard.testing.ledger import Entry, What
from taskyard.testing.simulation.clock import VirtualClock
from taskyard.testing.simulation.history import Fate, Kind, Op, Start, Submitted
from taskyard.testing.simulation.loop import Process
from taskyard.testing.simulation.plan import QUICK, Act, Order
from taskyard.testing.simulation.remote import PromptRemote, RemoteStore, pid_of

if TYPE_CHECKING:
    from taskyard.testing.simulation.world import World


class SimulatedNode:
    """`serve=False` makes a client: it submits, commands and waits."""

    def __init__(self, world: World, name: str, *, serve: bool) -> None:
        self._world, self._loop, self._history = world, world.loop, world.history
        self.name, self.serve = name, serve
        self.incarnations: list[str] = []
        self.process = Process(world.loop, name)
        self.clock: VirtualClock = world.clocks[name]
        self.is_up = self.is_stopping = False
        self._told: set[int] = set()
        self._stopping: asyncio.Task[None] | None = None
        self.remote = (PromptRemote if world.plan.is_prompt else RemoteStore)(world.network, name)
        self.engine = self.process.context.copy().run(self._make_engine, world.rng)
        self.living = self.process.spawn(self._live())

    def _make_engine(self, rng: random.Random) -> Engine:
        plan = self._world.plan
        return Engine(
            self.remote,
            clock=self.clock,
            consumers={name: self._consumer(name) for name in plan.room},
            executors={"inline": InProcessExecutor(now=self._loop.time)},
            queues={queue.name: queue for queue in plan.queues},
            settings=EngineSettings(
                serve=self.serve,
                name=self.name,
                max_running=plan.max_running,
                many=2,
                many_ends=2,
                runner=RunnerSettings(retry=QUICK),
                checks=(self._world.gates.check(self.name),) if self._world.guards.has_check else (),
                lease=LeaseSettings(beating=InTask, new_incarnation=self._new_incarnation, suspended_s=lambda: 0.0),
            ),
            jitter=rng.random,
        )

    def _new_incarnation(self) -> str:
        self.incarnations.append(f"{self.name}/{self._world.number()}")
        return self.incarnations[-1]

    @property
    def incarnation(self) -> str:
        """The one it counts under now, or counted under last."""
        return self.incarnations[-1]

    def _consumer(self, name: str) -> Consumer:
        plan = self._world.plan
        return Consumer(
            name=name,
            encode=str,
            call=self._run,
            is_async=True,
            executor="inline",
            concurrency=plan.room[name],
            timeout_s=plan.timeouts[name],
            places=self._world.guards.places(name, plan.room[name]),
        )

    @property
    def is_usable(self) -> bool:
        return self.is_up and not self.is_stopping and self.process.is_alive

    # --- living and stopping ------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            await self.engine.start()
        except StoreError:
            self._world.exited(self)
            return
        self.is_up = True

    def ask_to_stop(self, grace_s: float | None, *, patience_s: float | None = None) -> None:
        """From outside. After `patience_s` the stop itself is cancelled."""
        self._stopping = self.process.spawn(self._stop(grace_s))
        if patience_s is not None:
            self._loop.call_later(patience_s, self._stopping.cancel, context=self.process.context.copy())

    async def _stop(self, grace_s: float | None) -> None:
        self.is_stopping = True
        try:
            await self.engine.stop(grace_s)
        finally:
            self._world.exited(self)

    # --- what users do ------------------------------------------------------------------------------------------------

    async def submit(self, orders: Sequence[Order], dedupe: Dedupe, parent: Claim | None = None) -> bool:
        """Whether there is an answer, be it a refusal."""
        history = self._history
        records = [self._record(order) for order in orders]
        asked, now, batch = history.place(), self._loop.time(), self._world.number()
        by = None if parent is None else (parent.record.node or "", parent.token)
        for record in records:
            history.submitted[record.uuid] = Submitted(record, dedupe, batch, asked, now, by)
        ops = [history.ask(Op(kind=Kind.SUBMIT, task=record.uuid, asked=asked, asked_mono=now)) for record in records]
        try:
            added = await self.engine.submit(Add(records, dedupe, parent))
        except (OutcomeUnknown, NotOpen):
            return False
        except StoreError:
            self._never(ops)
            return False
        except (ClaimLost, DuplicateTask) as refusal:
            self._never(ops)
            if isinstance(refusal, DuplicateTask) and refusal.existing:
                self._pending(refusal.existing, asked)
            return True
        self._added(ops, added, asked)
        return True

    def _added(self, ops: list[Op], added: list[Added], asked: int) -> None:
        for op, one in zip(ops, added, strict=True):
            if one.is_new:
                self._history.answer(op, Fate.DONE)
                self._history.entries.append(Entry(what=What.ACKNOWLEDGED, task=one.uuid, at_mono=1.0))
            else:
                self._never([op])
                self._pending(one.uuid, asked)

    def _never(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self._history.answer(op, Fate.NEVER)

    def _pending(self, uuid: str, asked: int) -> None:
        op = Op(kind=Kind.PENDING, task=uuid, asked=asked)
        self._history.answer(self._history.ask(op), Fate.DONE)

    def _record(self, order: Order) -> TaskRecord:
        now = self.clock.now()
        return TaskRecord(
            uuid=f"t{self._world.number():04d}",
            consumer=order.source,
            due_at=now + timedelta(seconds=order.delay_s),
            created_at=now,
            updated_at=now,
            queue=order.queue,
            args=msgspec.json.encode(order.acts).decode(),
            priority=order.priority,
            key=order.key,
            dedupe_slot=order.slot,
            timeout_s=order.timeout_s,
            retry=order.retry,
        )

    async def command(self, kind: Kind, uuid: str, command: Command) -> None:
        history = self._history
        op = history.ask(Op(kind=kind, task=uuid, asked=history.place(), asked_mono=self._loop.time()))
        try:
            (applied,) = await self.engine.apply([uuid], command)
        except OutcomeUnknown:
            return
        except StoreError:
            self._never([op])
            return
        history.answer(op, *_answer(applied))

    async def drain(self, incarnation: str, *, on: bool) -> None:
        with contextlib.suppress(StoreError, UnknownNode):
            await self.remote.drain(incarnation, on=on)

    async def wait(self, uuid: str, timeout_s: float | None) -> None:
        history = self._history
        op = history.ask(Op(kind=Kind.ENDED, task=uuid, asked=history.place(), fate=Fate.NEVER))
        try:
            outcome = await self.engine.outcome(uuid, timeout_s)
        except ResultGone:
            history.answer(op, Fate.REFUSED)
        except (TimeoutError, NotOpen):
            pass
        else:
            history.answer(op, Fate.DONE, outcome.state)

    # --- what tasks do ------------------------------------------------------------------------------------------------

    async def _run(self, record: TaskRecord) -> int:
        run = current_run()
        acts = msgspec.json.decode(record.args, type=list[Act])
        act = acts[min(run.attempt, len(acts)) - 1]
        self._write(What.START, run)
        try:
            await self._act(act, run)
        finally:
            self._write(What.END, run)
        return run.token

    async def _act(self, act: Act, run: RunContext) -> None:
        if act.reports:
            run.progress(0.5, "half way")
            run.checkpoint(run.token)
        try:
            await asyncio.sleep(act.s)
        except asyncio.CancelledError:
            if act.how != "stubborn":
                raise
            await asyncio.sleep(0.1)
            return
        if act.submits:
            await self.submit([self._world.child_order()], Dedupe.ALLOW, CURRENT.get().claim)
        match act.how:
            case "raise":
                raise OSError("not this time")
            case "give_up":
                raise ValueError("not ever")
            case "later" if run.attempt < 4:
                raise RetryLater(0.3)
            case "cancel":
                raise Cancel("of no use")

    def _write(self, what: What, run: RunContext) -> None:
        """A run that begins when its node has been given up is stale from its first step: the ledger, which does not
        know of nodes, is not told of it. Only a process that was stopped meanwhile may begin one."""
        history, node = self._history, run.task.node or ""
        if history.is_closed:
            return
        now = self._loop.time()
        history.say(f"{now:.6f} {node}: {what} {run.uuid}/{run.token}")
        if what is What.START:
            history.starts[run.token] = Start(run.uuid, run.token, node, history.place(), now)
            if node in history.expired:
                if not self.process.was_frozen:
                    history.blame(f"task {run.uuid}: {node} began to run it when it had been given up")
                return
            self._told.add(run.token)
        else:
            history.ends[run.token] = history.place()
            if run.token not in self._told:
                return
        record = run.task
        is_alone = record.key is not None and self._world.queue(record.queue).per_key == 1
        entry = Entry(
            what=what,
            task=run.uuid,
            attempt=run.attempt,
            token=run.token,
            pid=pid_of(node),
            key=f"{record.queue}/{record.key}" if is_alone else None,
            at_mono=now,
        )
        history.entries.append(entry)


def _answer(applied: Applied) -> tuple[Fate, TaskState | None]:
    """What the answer to a command says."""
    match applied.refused:
        case None:
            return Fate.DONE, None if applied.record is None else _seen(applied.record.state)
        case UnknownTask():
            return Fate.REFUSED, None
        case SlotTaken() as refused:
            return Fate.TAKEN, _seen(TaskState(refused.state))
        case CommandRefused() as refused:
            return Fate.REFUSED, _seen(TaskState(refused.state))
    raise applied.refused


def _seen(state: TaskState) -> TaskState:
    """A node blocks and frees tasks by itself: for the order of what users ask, such a task is queued."""
    return TaskState.QUEUED if state is TaskState.BLOCKED else state
