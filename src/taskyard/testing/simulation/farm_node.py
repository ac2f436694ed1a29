"""One process of a simulated farm: the real service on a remote store, the phones it reaches, the code of its tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from taskyard.cluster.heartbeat import InTask
from taskyard.cluster.membership import LeaseSettings
from taskyard.devices import Device, DeviceConsumer, GameAccount, SimulatedDevice
from taskyard.errors import DeviceError, DeviceLost, NotOpen, OutcomeUnknown, StoreError, TaskyardError, UnknownDevice
from taskyard.execution.context import current_run
from taskyard.executor_service import ExecutorService
from taskyard.model.command import Cancel
from taskyard.model.task import Task
from taskyard.testing.simulation.device_remote import DeviceRemote
from taskyard.testing.simulation.farm_history import PERSON, Enqueued, Execution, Outage
from taskyard.testing.simulation.farm_plan import Job
from taskyard.testing.simulation.loop import Process

if TYPE_CHECKING:
    from taskyard.testing.simulation.farm import Farm

POOL = "farm"

CONSUMERS = ("daily", "weekly", "event")

TIMEOUT_S = 30.0
"""For the code of one consumer."""

PNG = b"\x89PNG\r\n\x1a\n"
"""A screenshot: to draw one takes milliseconds, and nobody looks at it."""


class Phone(SimulatedDevice):
    def repair(self) -> None:
        """End everything that is wrong with it."""
        self.unhang()
        self.reconnect()
        self.fail_until("restart")
        self._end_faults("restart")
        self.fail_next(0)

    def draw(self) -> bytes:
        return PNG


class FarmRemote(DeviceRemote):
    """Notes when a node has left."""

    async def leave(self, incarnation: str) -> None:
        def effect() -> None:
            self.network.beats.pop(incarnation, None)
            self._core.leave(incarnation)
            self._history.left[incarnation] = self._history.place()  # type: ignore[attr-defined]

        await self.ask("leave", effect)


class FarmNode:
    """`serve=False` makes a client, which enqueues and gives orders."""

    def __init__(self, farm: Farm, name: str, phones: Sequence[Phone], *, serve: bool) -> None:
        self._farm, self._loop, self._history = farm, farm.loop, farm.history
        self.name, self.serve = name, serve
        self.incarnations: list[str] = []
        self.process = Process(farm.loop, name)
        self.clock = farm.clock
        self.is_up = self.is_stopping = False
        self.stopping: asyncio.Task[None] | None = None
        self._users: set[asyncio.Task[None]] = set()
        self.live: dict[int, Execution] = {}
        self.remote = FarmRemote(farm.network, name)
        self.service = self.process.context.copy().run(self._make_service, phones)
        self.living = self.process.spawn(self._live())

    def _make_service(self, phones: Sequence[Phone]) -> ExecutorService:
        farm, plan = self._farm, self._farm.plan
        service = ExecutorService(
            phones,
            store=self.remote,
            pool=POOL,
            bucket_by="role" if plan.is_bucketed else None,
            heartbeat_s=plan.heartbeat_s,
            auto_recover=plan.auto_recover,
            quarantine_account_after=plan.quarantine_after,
            name=self.name,
            clock=self.clock,
        )
        service.yard._lease = LeaseSettings(
            beating=InTask, new_incarnation=self._new_incarnation, suspended_s=lambda: 0.0
        )
        service.yard._jitter = service.pool.server._jitter = farm.rng.random

        @service.consumer(name="daily")
        async def daily(device: Device, account: GameAccount, how: str, s: float, stubborn_s: float) -> int:
            return await self._run(device, account, Job(how, s, stubborn_s))

        @service.consumer(name="weekly", timeout_s=TIMEOUT_S)
        async def weekly(device: Device, account: GameAccount, how: str, s: float, stubborn_s: float) -> int:
            return await self._run(device, account, Job(how, s, stubborn_s))

        service.register(_Event(self))
        return service

    def _new_incarnation(self) -> str:
        self.incarnations.append(f"{self.name}/{self._farm.number()}")
        return self.incarnations[-1]

    @property
    def is_usable(self) -> bool:
        return self.is_up and not self.is_stopping and self.process.is_alive

    async def _live(self) -> None:
        try:
            await self.service.yard.start(serve=self.serve)
        except StoreError:
            self._farm.exited(self)
            return
        self.is_up = True

    def ask_to_stop(self, grace_s: float | None, *, is_checked: bool = False) -> None:
        """`is_checked`: nothing may be left then."""
        self.is_stopping = True
        self.stopping = self.process.spawn(self._stop(grace_s, is_checked=is_checked))

    async def _stop(self, grace_s: float | None, *, is_checked: bool) -> None:
        try:
            await self.service.stop(grace_s=grace_s)
            if is_checked:
                self._check_empty()
        finally:
            self._farm.exited(self)

    def _check_empty(self) -> None:
        me = asyncio.current_task()
        tasks = (task for task in self.process.tasks if task is not me and task not in self._users)
        left = [str(task.get_coro()) for task in tasks if not task.done()]
        if left or self.service.workers:
            self._history.blame(f"{self.name} stopped and left {left} and {list(self.service.workers.values())}")

    def use(self, doing: Coroutine[Any, Any, None]) -> None:
        """Somebody does something in this process."""
        task = self.process.spawn(doing)
        self._users.add(task)
        task.add_done_callback(self._users.discard)

    # --- what users do ------------------------------------------------------------------------------------------------

    async def enqueue(self, uuid: str, account: int, consumer: str, role: str | None, job: Job) -> None:
        task = Task(consumer, job._asdict(), self.clock.now(), uuid)
        one = Enqueued(uuid=uuid, account=str(account), consumer=consumer, asked=self._history.place())
        self._history.enqueued.append(one)
        requires = None if role is None else {"role": role}
        try:
            answer = await self.service.enqueue(task, GameAccount(account), requires=requires)
        except (OutcomeUnknown, NotOpen):
            return
        except StoreError:
            one.is_never, one.answered = True, self._history.place()
        else:
            one.answer, one.answered = answer, self._history.place()

    async def order(self, verb: str, device: str, for_s: float) -> None:
        """What a person does to a device, and takes back after a while. The calm takes back the rest."""
        devices = self.service.devices
        with contextlib.suppress(StoreError, NotOpen, UnknownDevice):
            if verb == "take":
                await devices.take(device, for_s=for_s, by=PERSON)
            elif verb == "label":
                await devices.label(device, {"rack": str(int(for_s))}, by=PERSON)
            else:
                await getattr(devices, verb)(device, by=PERSON)

    async def cancel(self, uuid: str) -> None:
        with contextlib.suppress(TaskyardError):
            await self.service.yard._engine.apply([uuid], Cancel("no longer wanted"))

    async def release(self, account: int) -> None:
        with contextlib.suppress(StoreError, NotOpen):
            await self.service.devices.release(POOL, account, by=PERSON)

    # --- what tasks do ------------------------------------------------------------------------------------------------

    async def _run(self, device: Device, account: GameAccount, job: Job) -> int:
        one = self.begin(device, account)
        try:
            await self.work(device, job, one)
            return one.token
        finally:
            self.end(one.token)

    async def work(self, device: Device, job: Job, one: Execution) -> None:
        try:
            await device.shell("am start game")
            await asyncio.sleep(job.s)
            if job.how != "ok":
                self._fail(device, job)
        except asyncio.CancelledError:
            one.told = one.told or self.place()
            if job.stubborn_s:
                await self._ignore(job.stubborn_s)
            raise

    def _fail(self, device: Device, job: Job) -> None:
        now = self._loop.time()
        match job.how:
            case "raise":
                raise ValueError("it does not work")
            case "lost":
                outage = Outage(what="a task found it lost", from_mono=now, until_mono=now)
                self._history.outages[device.name].append(outage)
                raise DeviceLost("the app does not answer")

    async def _ignore(self, stubborn_s: float) -> None:
        until = self._loop.time() + stubborn_s
        while (left_s := until - self._loop.time()) > 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(left_s)

    def place(self) -> int:
        return self._history.place()

    def begin(self, device: Device, account: GameAccount) -> Execution:
        run = current_run()
        one = Execution(
            task=run.uuid,
            token=run.token,
            node=run.task.node or "",
            device=device.name,
            account=account.key,
            began=self._history.place(),
            began_mono=self._loop.time(),
        )
        if not self._history.is_closed:
            self._history.executions.append(one)
            self.live[one.token] = one
        return one

    def end(self, token: int) -> None:
        one = self.live.pop(token, None)
        if one is not None and not self._history.is_closed:
            one.ended = self._history.place()


class _Event(DeviceConsumer):
    """The class form: its cleanup uses the device as well, and takes a while."""

    name = "event"

    def __init__(self, node: FarmNode) -> None:
        self._node = node

    async def prepare(self, device: Device, account: GameAccount) -> None:
        one = self._node.begin(device, account)
        try:
            await device.shell("am start game")
        except asyncio.CancelledError:
            one.told = one.told or self._node.place()
            raise

    async def execute(self, device: Device, account: GameAccount, how: str, s: float, stubborn_s: float) -> int:
        token = current_run().token
        await self._node.work(device, Job(how, s, stubborn_s), self._node.live[token])
        return token

    async def cleanup(self, device: Device, account: GameAccount) -> None:
        """Nothing interrupts it within its time limit: it goes on when its node has lost its lease."""
        one = self._node.live.get(current_run().token)
        if one is not None:
            one.told = one.told or self._node.place()
        try:
            await asyncio.sleep(0.05)
            with contextlib.suppress(DeviceError):
                await device.shell("am force-stop game")
        finally:
            self._node.end(current_run().token)
