"""The world of one seed: nodes and clients on one store, what is asked of them, and what goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from taskyard.model.command import Cancel, Command, Retry, SetPriority
from taskyard.model.order import Priority
from taskyard.model.queue import QueueSettings
from taskyard.model.state import ENDED, WAITING_FOR_TIME, TaskState
from taskyard.model.task_filter import ALL_TASKS
from taskyard.stores.memory import MemoryCore
from taskyard.testing.ledger import Entry, Stored, What
from taskyard.testing.simulation.clock import VirtualClock
from taskyard.testing.simulation.guards import Closing, Gates, Guards
from taskyard.testing.simulation.history import End, History, Kind
from taskyard.testing.simulation.loop import Process, VirtualLoop
from taskyard.testing.simulation.network import FAIR, Network
from taskyard.testing.simulation.node import SimulatedNode
from taskyard.testing.simulation.plan import QUICK, Order, Plan, Step, draw_order
from taskyard.testing.simulation.remote import pid_of

S = TaskState

PATIENCE_S = 60.0
"""How long after the last fault everything has to be over."""

STOP_S = 30.0
"""How long a node may take to stop when nothing is wrong."""

LONG_S = 30.0
"""What waits longer than this for its time, because a clock was wrong when that time was set, is not waited for: the
clocks are set forward."""


class World:
    def __init__(self, loop: VirtualLoop, plan: Plan, rng: random.Random, guards: Guards) -> None:
        self.loop, self.plan, self.rng, self.guards = loop, plan, rng, guards
        self.gates = Gates()
        self.history = History()
        names = [f"node-{n}" for n in range(plan.nodes)] + [f"client-{n}" for n in range(plan.clients)]
        self.clocks = {name: VirtualClock(loop) for name in (*names, "store")}
        self._skews = dict(zip(self.clocks, itertools.cycle(plan.skews), strict=False))
        self.core = MemoryCore(self.clocks["store"])
        self.network = Network(loop, self.core, self.history, rng, plan.weather)
        self.network.strike = self._strike
        for queue in plan.queues:
            self.core.set_queue(queue)
        self._numbers = itertools.count(1)
        self.history.entries.append(Entry(what=What.STOP, at_mono=1.0))  # a lost lease gives runs back as a stop does
        self._is_calm = False
        self._users: list[tuple[str, SimulatedNode, asyncio.Task[None]]] = []
        self._nodes: dict[str, SimulatedNode] = {}
        self._set_clocks_right()
        for name in names:
            self._boot(name)

    def number(self) -> int:
        """Another one each time, for ids."""
        return next(self._numbers)

    def queue(self, name: str) -> QueueSettings:
        return next(queue for queue in self.plan.queues if queue.name == name)

    def child_order(self) -> Order:
        """A task that a run submits: it has no children of its own."""
        order = draw_order(self.rng)
        return order._replace(acts=order.acts[:1], slot=None)

    # --- the course of things -----------------------------------------------------------------------------------------

    async def run(self) -> End:
        for closing in self.guards.closings:
            self.network.at(closing.at_s, self._close_gate, closing)
        for step in self.plan.steps:
            await asyncio.sleep(max(0.0, step.at_s - self.loop.time()))
            self.say(f"{step.what} {step.value:g}")
            getattr(self, f"_{step.what}")(step)
        self._calm_down()
        await self._look_until(self._is_over, PATIENCE_S)
        self._check_users()
        await self._stop_all()
        return self._end()

    def say(self, line: str) -> None:
        self.history.say(f"{self.loop.time():.6f} world: {line}")

    def _close_gate(self, closing: Closing) -> None:
        if self._is_calm:
            return
        self.say(f"the gate of {closing.consumer} is closed")
        self.gates.closed[closing.consumer] = self.gates.closed.get(closing.consumer, 0) + 1
        self.network.at(closing.seconds, self._open_gate, closing)

    def _open_gate(self, closing: Closing) -> None:
        """It is open when all that had closed it have opened it."""
        if self._is_calm:
            return
        self.gates.closed[closing.consumer] -= 1
        if not self.gates.closed[closing.consumer] and not closing.is_signal_lost:
            self.say(f"the gate of {closing.consumer} is open")
            self.gates.signal(closing.consumer)

    def _calm_down(self) -> None:
        """From here on nothing goes wrong any more."""
        self.say("calm")
        self._is_calm = True
        self.gates.closed.clear()  # without a signal: each node finds out
        self.network.weather, self.network.is_away = FAIR, False
        self._set_clocks_right()
        for node in self._nodes.values():
            node.remote.is_cut_off = False
            node.process.thaw()

    def _is_over(self) -> bool:
        self._end_drains()
        left = [record for record in self._records() if record.state not in ENDED]
        later = [record.due_at for record in left if record.state in WAITING_FOR_TIME]
        if later and all(record.is_parked or record.state in WAITING_FOR_TIME for record in left):
            wait_s = (min(later) - self.clocks["store"].now()).total_seconds()
            if wait_s > LONG_S:
                self._set_all_clocks(self.clocks["store"].ahead_s + wait_s)
        is_answered = all(task.done() or not node.process.is_alive for _, node, task in self._users)
        # What is on its way may add a task, also when its sender is dead by now.
        return not left and is_answered and self.network.is_quiet

    def _records(self) -> Sequence[Any]:
        return self.core.list_tasks(ALL_TASKS, None, 100_000)

    def _check_users(self) -> None:
        for what, node, task in self._users:
            if node.process.is_alive and not task.done():
                self.history.blame(f"{what}: never answered by {node.incarnation}")

    async def _stop_all(self) -> None:
        nodes = [node for node in self._nodes.values() if node.is_up and node.process.is_alive]
        undisturbed = [node for node in nodes if not node.is_stopping]
        for node in undisturbed:
            node.ask_to_stop(None)
        await self._look_until(lambda: all(node.process.is_dead for node in nodes), STOP_S)
        for node in nodes:
            if not node.process.is_dead:
                self.history.blame(f"{node.incarnation} did not stop")
        for node in undisturbed:
            if not node.engine.is_recorded:
                self.history.blame(f"{node.incarnation} stopped and left something unrecorded")

    async def _look_until(self, is_over: Callable[[], bool], patience_s: float) -> None:
        """From outside: nobody in there could tell us."""
        until = self.loop.time() + patience_s
        while not is_over() and self.loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    def _end(self) -> End:
        stored = {record.uuid: Stored(record, self.core.list_attempts(record.uuid)) for record in self._records()}
        self.history.faults += self.loop.broken
        return End(
            stored=stored,
            events=self.core.events(0, 100_000).events,
            counts=self.core.count(),
            queues={queue.name: queue for queue in self.plan.queues},
            room=self.plan.room,
            max_retries=QUICK.max_retries,
        )

    # --- processes ----------------------------------------------------------------------------------------------------

    def _boot(self, name: str) -> None:
        self._nodes[name] = SimulatedNode(self, name, serve=name.startswith("node"))

    def exited(self, node: SimulatedNode) -> None:
        """The process is gone, whichever way. Another takes its place after a while."""
        if node.process.is_dead:
            return
        self.say(f"{node.incarnation} is gone")
        for incarnation in node.incarnations:
            for what in (What.KILL, What.DEAD):
                self.history.entries.append(Entry(what=what, pid=pid_of(incarnation), at_mono=self.loop.time()))
            self.history.gone[incarnation] = self.history.place()
        node.process.kill()
        if not self.history.is_closed:
            self.network.at(self.rng.random() * 2, self._boot, node.name)

    def _strike(self, process: Process) -> None:
        """The process is killed or frozen, now."""
        if self._is_calm or process.is_dead:
            return
        node = next(node for node in self._nodes.values() if node.process is process)
        if self.rng.random() < 0.5:
            self.exited(node)
        else:
            self._freeze_node(node, self.rng.random() * 6)

    def _freeze_node(self, node: SimulatedNode, seconds: float) -> None:
        self.say(f"{node.incarnation} is frozen for {seconds:g} s")
        node.process.freeze()
        self.network.at(seconds, node.process.thaw)

    def _pick(self, which: float, *, serving: bool = False) -> SimulatedNode | None:
        usable = [node for node in self._nodes.values() if node.is_usable and (node.serve or not serving)]
        return usable[int(which * len(usable))] if usable else None

    # --- what is asked ------------------------------------------------------------------------------------------------

    def _submit(self, step: Step) -> None:
        if self._is_calm:
            return  # it has waited for a node for too long
        node = self._pick(step.which)
        if node is None:
            self.network.at(0.2, self._submit, step)
        else:
            self._use(node, "a submit", self._insist(partial(node.submit, step.orders, step.dedupe)))

    def _use(self, node: SimulatedNode, what: str, doing: Coroutine[Any, Any, None]) -> None:
        self._users.append((what, node, node.process.spawn(doing)))

    async def _insist(self, submit: Callable[[], Awaitable[bool]]) -> None:
        """As users do: what was not acknowledged is submitted again."""
        for _ in range(3):
            if await submit():
                return
            await asyncio.sleep(0.5)

    def _task(self, which: float, *states: TaskState) -> str | None:
        """A task in one of these states, if there is one and in two cases of three; else any, be it stored or not."""
        known = list(self.history.submitted)
        fitting = [record.uuid for record in self._records() if record.state in states]
        if fitting and self.rng.random() < 0.67:
            known = fitting
        return known[int(which * len(known))] if known else None

    def _wait(self, step: Step) -> None:
        node, uuid = self._pick(step.which), self._task(step.value)
        if node is not None and uuid is not None:
            timeout_s = 1.0 if step.value < 0.2 else None
            self._use(node, f"a wait for task {uuid}", node.wait(uuid, timeout_s))

    def _cancel(self, step: Step) -> None:
        self._command(step, Kind.CANCEL, Cancel("no longer wanted"), S.RUNNING, S.QUEUED, S.RETRYING, S.SCHEDULED)

    def _retry(self, step: Step) -> None:
        self._command(step, Kind.RETRY, Retry(to_head=step.which < 0.5), S.FAILED)

    def _prioritize(self, step: Step) -> None:
        priority = Priority.HIGH if step.which < 0.5 else Priority.LOW
        self._command(step, Kind.PRIORITY, SetPriority(priority), S.QUEUED, S.SCHEDULED)

    def _command(self, step: Step, kind: Kind, command: Command, *states: TaskState) -> None:
        node, uuid = self._pick(step.which), self._task(step.value, *states)
        if node is not None and uuid is not None:
            self._use(node, f"a {kind} of task {uuid}", node.command(kind, uuid, command))

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def _kill(self, step: Step) -> None:
        if (node := self._pick(step.which)) is not None:
            self.exited(node)

    def _freeze(self, step: Step) -> None:
        if (node := self._pick(step.which)) is not None:
            self._freeze_node(node, step.value)

    def _stop(self, step: Step) -> None:
        if (node := self._pick(step.which)) is not None:
            node.ask_to_stop(None if step.value > 4 else step.value)

    def _break_off(self, step: Step) -> None:
        """A stop that is cancelled itself, as by a second Ctrl-C."""
        if (node := self._pick(step.which)) is not None:
            node.ask_to_stop(None, patience_s=step.value)

    def _end_loop(self, step: Step) -> None:
        """The end of `asyncio.run`: everything is cancelled, in any order, and whoever has the engine stops it."""
        if (node := self._pick(step.which)) is not None:
            for task in node.process.tasks:
                if task is not node.living:
                    task.cancel()
            node.ask_to_stop(step.value)

    def _drain(self, step: Step) -> None:
        """Somebody drains a node, or lets it take tasks again."""
        node, by = self._pick(step.which, serving=True), self._pick(step.value % 1)
        if node is not None and by is not None:
            self._use(by, f"a drain of {node.incarnation}", by.drain(node.incarnation, on=step.value > 1))

    def _end_drains(self) -> None:
        """A node that was drained and joins anew stays so, until somebody says otherwise."""
        for status in self.core.list_nodes():
            if status.is_draining:
                self.core.drain(status.node.incarnation, on=False)
                self.network.tell_all()

    def _cut_off(self, step: Step) -> None:
        if (node := self._pick(step.which)) is not None:
            node.remote.is_cut_off = True
            self.network.at(step.value, self._reconnect, node)

    def _reconnect(self, node: SimulatedNode) -> None:
        node.remote.is_cut_off = False

    def _outage(self, step: Step) -> None:
        self.network.is_away = True
        self.network.at(step.value, self._outage_over)

    def _outage_over(self) -> None:
        self.network.is_away = False

    def _set_clock(self, step: Step) -> None:
        names = list(self.clocks)
        self._set(names[int(step.which * len(names))], step.value)

    def _set_clocks(self, step: Step) -> None:
        self._set_all_clocks(step.value)

    def _set_all_clocks(self, ahead_s: float) -> None:
        for name in self.clocks:
            self._set(name, ahead_s + self._skews[name])

    def _set_clocks_right(self) -> None:
        self._set_all_clocks(0.0)

    def _set(self, name: str, ahead_s: float) -> None:
        self.clocks[name].ahead_s = ahead_s
        if name == "store":
            self.history.steps.append((self.loop.time(), ahead_s))
