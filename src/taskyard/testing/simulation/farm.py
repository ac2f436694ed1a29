"""A simulated farm: some nodes with fifty phones, people who enqueue and give orders, and what goes wrong.

Engine, pool, actors, executor and simulated phones are the real ones, on the virtual loop and the network of the main
simulation. `simulate_farm(42)` replays exactly.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from taskyard.devices.simulated import Repair
from taskyard.model.device import DeviceState, DeviceStatus
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.stores.memory import MemoryCore
from taskyard.testing.simulation.clock import VirtualClock
from taskyard.testing.simulation.device_remote import CoreVerbs, run_now
from taskyard.testing.simulation.farm_history import FarmEnd, FarmHistory, FarmNetwork, Outage
from taskyard.testing.simulation.farm_judge import judge_farm
from taskyard.testing.simulation.farm_node import CONSUMERS, POOL, FarmNode, Phone
from taskyard.testing.simulation.farm_plan import FULL, ROLES, FarmPlan, FarmSize, draw_farm, draw_job
from taskyard.testing.simulation.loop import Process, VirtualLoop
from taskyard.testing.simulation.network import FAIR

PATIENCE_S = 900.0
"""How long after the last failure everything has to be over: the longest ladder takes some 400 s."""

STOP_S = 120.0
"""How long a node may take to stop when nothing is wrong: its tasks may go on for a while."""

LONGEST_S = 50_000.0
"""Of virtual time until the calm, whether all tasks were accepted by then or not."""

BAD_ACCOUNTS = 3
"""So many accounts always fail."""

REPAIRS: tuple[Repair | None, ...] = ("connect", "restart_app", "restart", None)


class SimulatedFarm(msgspec.Struct, frozen=True):
    """What became of a seed: what is wrong (nothing, if all is well), and one value for all that happened."""

    seed: int
    faults: list[str]
    trace: str
    history: FarmHistory
    end: FarmEnd
    plan: FarmPlan
    steps: int
    seconds: float


def simulate_farm(seed: int, size: FarmSize = FULL, *, tell: Callable[[str], None] | None = None) -> SimulatedFarm:
    with _quietly():
        rng = random.Random(f"farm {seed}")
        plan = draw_farm(rng, size)
        loop = VirtualLoop(rng, lateness_s=plan.lateness_s)
        try:
            farm = Farm(loop, plan, rng, FarmHistory(tell=tell))
            end = loop.run_until_complete(farm.run())
            farm.history.faults += loop.broken
            faults = [*farm.history.faults, *judge_farm(farm.history, end)]
            trace = farm.history.digest(loop.steps, loop.time(), rng.random())
            farm.history.is_closed = True
        finally:
            loop.close()
        return SimulatedFarm(seed, faults, trace, farm.history, end, plan, loop.steps, loop.time())


@contextmanager
def _quietly() -> Iterator[None]:
    log = logging.getLogger("taskyard")
    before, collects = log.level, gc.isenabled()
    log.setLevel(logging.CRITICAL + 1)
    gc.disable()
    try:
        yield
    finally:
        log.setLevel(before)
        if collects:
            gc.enable()


class Farm:
    def __init__(self, loop: VirtualLoop, plan: FarmPlan, rng: random.Random, history: FarmHistory) -> None:
        self.loop, self.plan, self.rng, self.history = loop, plan, rng, history
        self.clock = VirtualClock(loop)
        self.core = MemoryCore(self.clock)
        self.network = FarmNetwork(loop, self.core, history, rng, plan.weather)
        self.network.strike = self._strike
        self.is_calm = False
        self._numbers = itertools.count(1)
        self._asked = 0
        self._bad = {rng.randrange(plan.size.accounts) for _ in range(BAD_ACCOUNTS)}
        self.phones = [
            Phone(
                n,
                name=f"emu-{n:02}",
                labels={"role": ROLES[n % len(ROLES)]},
                clock=self.clock,
                latency_s=rng.choice((0.0, 0.01, 0.1)),
                boot_s=rng.choice((0.0, 2.0, 20.0)),
            )
            for n in range(1, plan.size.devices + 1)
        ]
        history.outages = {phone.name: [] for phone in self.phones}
        self.broken: set[str] = set()
        self.nodes: dict[str, FarmNode] = {}
        for n in range(plan.nodes):
            self._boot(f"node-{n}", serve=True)
        for n in range(plan.clients):
            self._boot(f"client-{n}", serve=False)

    def number(self) -> int:
        return next(self._numbers)

    # --- the course of things -----------------------------------------------------------------------------------------

    async def run(self) -> FarmEnd:
        plan = self.plan
        people = [
            self.loop.create_task(doing)
            for doing in (
                self._now_and_then(plan.death_pause_s, self._end_one),
                self._now_and_then(plan.failure_pause_s, self._fail_one),
                self._now_and_then(plan.order_pause_s, self._order),
                self._now_and_then(plan.cancel_pause_s, self._cancel),
            )
        ]
        await self._enqueue_all()
        for task in people:
            task.cancel()
        self._calm_down()
        if not await self._look_until(self._is_over, PATIENCE_S):
            self.history.blame(f"not over {PATIENCE_S:g} s after the calm: {self._tell_rest()}")
        end = self._end()
        await self._stop_all()
        return end

    async def _now_and_then(self, pause_s: float, do: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            do()

    async def _enqueue_all(self) -> None:
        """People keep some tasks waiting, and enqueue the same again and again."""
        rng, plan = self.rng, self.plan
        while (stored := self._count()) < plan.size.tasks and self.loop.time() < LONGEST_S:
            waiting = self._count(TaskState.QUEUED)
            client = self._pick(serve=False)
            if waiting < plan.waiting and client is not None:
                for _ in range(min(rng.randrange(1, 30), plan.size.tasks - stored)):
                    self._enqueue(client)
            await asyncio.sleep(rng.random() * 0.2)

    def _enqueue(self, client: FarmNode) -> None:
        rng, plan = self.rng, self.plan
        account, consumer = rng.randrange(plan.size.accounts), rng.choice(CONSUMERS)
        role = rng.choice(ROLES) if rng.random() < (0.9 if plan.is_bucketed else 0.1) else None
        by = [client]
        if rng.random() < 0.3:  # the same at the same time, perhaps elsewhere
            by.append(self._pick() or client)
        for node in by:
            self._asked += 1
            job = draw_job(rng, plan.mean_s)
            if account in self._bad:
                job = job._replace(how="raise")
            node.use(node.enqueue(f"e{self._asked}", account, consumer, role, job))

    def _count(self, *states: TaskState) -> int:
        counts = self.core.count()
        return sum(n for (_, state), n in counts.items() if not states or state in states)

    def _calm_down(self) -> None:
        """From here on nothing goes wrong any more, and people give back what they have."""
        self.is_calm = True
        self.network.weather = FAIR
        now = self.loop.time()
        for phone in self.phones[: self.plan.broken]:
            self._break(phone, now)
        for phone in self.phones:
            if phone.name not in self.broken:
                phone.repair()
                for outage in self.history.outages[phone.name]:
                    outage.until_mono = min(outage.until_mono, now)

    def _break(self, phone: Phone, now: float) -> None:
        self.broken.add(phone.name)
        self.history.outages[phone.name].append(Outage(what="broken", from_mono=now, until_mono=float("inf")))
        if self.rng.random() < 0.5:
            phone.disconnect()
        else:
            phone.hang(connects=self.rng.random() < 0.5)

    def _is_over(self) -> bool:
        self._give_all_back()
        if any(self._count(state) for state in TaskState if state not in ENDED):
            return False
        if not all(node.is_up for node in self.nodes.values()) or not self.network.is_quiet:
            return False
        return all(self._is_settled(status) for status in self._devices())

    def _is_settled(self, status: DeviceStatus) -> bool:
        state = status.state_at(self.clock.now())
        if status.name in self.broken:
            return state in (DeviceState.DOWN, DeviceState.QUARANTINED)
        return state is DeviceState.IDLE

    def _give_all_back(self) -> None:
        """A person looks at what is drained, taken or quarantined, and gives it back."""
        client = self._pick(serve=False)
        if client is None:
            return
        for status in self._devices():
            orders = status.orders
            if status.name not in self.broken and (orders.drained or orders.taken or orders.quarantined):
                client.use(client.order("give_back", status.name, 0.0))

    def _devices(self) -> list[DeviceStatus]:
        return run_now(CoreVerbs(self.core).list_devices(POOL))

    def _tell_rest(self) -> str:
        open_tasks = {
            str(state): self._count(state) for state in TaskState if state not in ENDED and self._count(state)
        }
        odd = {
            status.name: f"{status.state_at(self.clock.now())} ({status.health.reason}; {status.node})"
            for status in self._devices()
            if not self._is_settled(status)
        }
        return f"{open_tasks} {odd} up: {[name for name, node in self.nodes.items() if node.is_up]}"

    async def _stop_all(self) -> None:
        nodes = [node for node in self.nodes.values() if node.is_usable]
        for node in nodes:
            node.ask_to_stop(None, is_checked=True)
        await self._look_until(lambda: all(node.process.is_dead for node in nodes), STOP_S)
        for node in nodes:
            if not node.process.is_dead:
                self.history.blame(f"{node.name} did not stop")

    async def _look_until(self, is_over: Callable[[], bool], patience_s: float) -> bool:
        until = self.loop.time() + patience_s
        while not (over := is_over()) and self.loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        return over

    def _end(self) -> FarmEnd:
        self.network.note_events()
        records = {record.uuid: record for record in self.core.list_tasks(ALL_TASKS, None, 1_000_000)}
        return FarmEnd(
            records=records,
            attempts={uuid: self.core.list_attempts(uuid) for uuid in records},
            devices=self._devices(),
            now=self.clock.now(),
            broken=frozenset(self.broken),
            is_bucketed=self.plan.is_bucketed,
            auto_recover=self.plan.auto_recover,
        )

    # --- processes ----------------------------------------------------------------------------------------------------

    def _boot(self, name: str, *, serve: bool) -> None:
        """A phone is defined on two nodes: the other one takes it over when one is gone."""
        number, nodes = int(name.rpartition("-")[2]), self.plan.nodes
        mine = [
            phone for phone in self.phones if not serve or number in (phone.number % nodes, (phone.number + 1) % nodes)
        ]
        self.nodes[name] = FarmNode(self, name, mine, serve=serve)

    def exited(self, node: FarmNode) -> None:
        if node.process.is_dead:
            return
        for incarnation in node.incarnations:
            self.history.gone[incarnation] = self.history.place()
        self.network.drop(node.remote)
        node.process.kill()
        if not self.history.is_closed:
            self.network.at(self.rng.random() * 5, self._reboot, node)

    def _reboot(self, node: FarmNode) -> None:
        self._boot(node.name, serve=node.serve)

    def _strike(self, process: Process) -> None:
        for node in list(self.nodes.values()):
            if node.process is process and not self.is_calm:
                self.exited(node)

    def _pick(self, *, serve: bool | None = None) -> FarmNode | None:
        usable = [node for node in self.nodes.values() if node.is_usable and serve in (None, node.serve)]
        return self.rng.choice(usable) if usable else None

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def _end_one(self) -> None:
        node, lot = self._pick(), self.rng.random()
        if node is None:
            return
        if lot < 0.5:
            self.exited(node)
        elif lot < 0.9:
            node.ask_to_stop(self.rng.choice((None, 0.0, self.rng.random() * 10)))
        else:
            node.remote.is_cut_off = True
            self.network.at(self.rng.random() * 8, self._reconnect, node)

    def _reconnect(self, node: FarmNode) -> None:
        node.remote.is_cut_off = False

    def _fail_one(self) -> None:
        rng, phone, now = self.rng, self.rng.choice(self.phones), self.loop.time()
        for_s = rng.random() * rng.choice((1.0, 10.0, 10.0, 60.0))
        what = rng.choices(("disconnect", "hang", "stuck", "sick", "refuse"), (4, 4, 1, 0.5, 2))[0]
        until_mono = now + for_s
        match what:
            case "disconnect":
                phone.disconnect(for_s=for_s)
            case "hang":
                phone.hang(for_s=for_s, connects=rng.random() < 0.5)
            case "stuck":
                phone.hang(until=rng.choice(REPAIRS), connects=rng.random() < 0.5)
                until_mono = float("inf")
                if rng.random() < 0.8:
                    self.network.at(rng.random() * 100, phone.unhang)
            case "sick":
                phone.fail_until(rng.choice(("restart_app", "restart")))
                until_mono = float("inf")
            case "refuse":
                phone.fail_next(rng.randrange(1, 4), lost=rng.random() < 0.5)
                until_mono = float("inf")
        self.history.outages[phone.name].append(Outage(what=what, from_mono=now, until_mono=until_mono))

    def _order(self) -> None:
        rng, client = self.rng, self._pick()
        if client is None:
            return
        verb = rng.choice(("drain", "take", "quarantine", "label", "give_back", "give_back"))
        phone, for_s = rng.choice(self.phones), rng.random() * 20
        client.use(client.order(verb, phone.name, for_s))
        if verb in ("drain", "take", "quarantine"):
            self.network.at(for_s, self._give_back, phone.name)
        if self._bad and rng.random() < 0.1:
            client.use(client.release(rng.choice(sorted(self._bad))))

    def _give_back(self, name: str) -> None:
        client = self._pick()
        if client is not None and not self.is_calm:
            client.use(client.order("give_back", name, 0.0))

    def _cancel(self) -> None:
        client = self._pick()
        states = (TaskState.QUEUED,) if self.rng.random() < 0.5 else (TaskState.RUNNING,)
        found = self.core.list_ids(TaskFilter(states=states), None, 100)
        if client is not None and found:
            client.use(client.cancel(self.rng.choice(found)[1]))
