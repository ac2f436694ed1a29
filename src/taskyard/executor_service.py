"""`ExecutorService`: a pool of devices that stands alone, with the interface of the source design.

It is a yard with one pool: the same queue, store, claims and attempts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

from taskyard.device_admin import Devices
from taskyard.device_pool import DevicePool, TaskRun
from taskyard.devices.actor import WorkerActor
from taskyard.devices.actor_settings import ActorSettings
from taskyard.devices.consumer import DeviceConsumer
from taskyard.devices.definitions import AccountId, DeviceDefinition
from taskyard.errors import InvalidInput, quote
from taskyard.model.task import Task
from taskyard.ports.clock import Clock, SystemClock
from taskyard.ports.consumer import BaseTaskConsumer, ConsumerChange, TaskConsumerRegistry
from taskyard.ports.store import Store
from taskyard.stores.memory import MemoryStore
from taskyard.yard import Yard

AnyConsumer = DeviceConsumer | BaseTaskConsumer


class ExecutorService:
    """Runs tasks on devices: `async with service:` starts and stops it, and so do `start()` and `stop()`.

    `registry` has the consumers, as a list or as a `TaskConsumerRegistry`; `@service.consumer` adds functions. Without
    `store` the queue is in memory, and is kept between a stop and the next start; an address, such as
    `sqlite:///farm.db` or `postgresql://…`, keeps it for good and lets several nodes serve the pool, each with its own
    devices. The other settings are those of `Yard.device_pool` and of `Yard`."""

    def __init__(  # noqa: PLR0913 - the settings of a service, each with a name and a default
        self,
        devices: Iterable[DeviceDefinition] = (),
        *,
        registry: TaskConsumerRegistry | Iterable[AnyConsumer] | None = None,
        store: str | Path | Store | None = None,
        pool: str = "devices",
        bucket_by: str | None = None,
        heartbeat_s: float | None = None,
        actor: ActorSettings | None = None,
        auto_recover: int = 1,
        quarantine_account_after: int | None = 5,
        adapters: Iterable[type[DeviceDefinition]] = (),
        grace_s: float | None = 30.0,
        name: str = "",
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        clock = clock or SystemClock()
        self.yard = Yard(
            MemoryStore(clock) if store in (None, "memory://") else store,
            grace_s=grace_s,
            name=name,
            clock=clock,
            **{"max_running": 10_000} | settings,
        )
        self.yard._called = "service"
        self.pool: DevicePool = self.yard.device_pool(
            pool,
            devices=devices,
            bucket_by=bucket_by,
            heartbeat_s=heartbeat_s,
            actor=actor,
            auto_recover=auto_recover,
            quarantine_account_after=quarantine_account_after,
            adapters=adapters,
        )
        self.consumer, self.register, self.schedule = self.pool.consumer, self.pool.register, self.pool.schedule
        self._turn = asyncio.Lock()
        self._registry = _check_registry(registry)
        if isinstance(self._registry, TaskConsumerRegistry):
            self._registry.subscribe(self._registered)
            registered: Iterable[Any] = list(self._registry.sources.values())
        else:
            registered = self._registry
        for consumer in registered:
            self.register(consumer)

    def _registered(self, name: str, change: ConsumerChange) -> None:
        assert isinstance(self._registry, TaskConsumerRegistry)
        if change is ConsumerChange.UNREGISTERED:
            self.yard.unregister(name)
        else:
            self.register(self._registry.sources[name])

    # --- starting and stopping ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the store, serve the devices and run what waits."""
        async with self._turn:
            await self.yard.start()

    async def stop(self, *, grace_s: float | EllipsisType | None = ...) -> None:
        """Start nothing new, let what runs end, and interrupt it after the grace: it goes back to the head of the
        queue. What waits stays in the store."""
        async with self._turn:
            await self.yard.stop(grace_s=grace_s)

    async def __aenter__(self) -> ExecutorService:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """For FastAPI and Starlette: `FastAPI(lifespan=service.lifespan)` runs the farm in the web process."""
        async with self:
            yield

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        """With the store open, also while the service is stopped: what waits is there all the same."""
        if self.yard.is_open:
            yield
            return
        async with self._turn:
            if self.yard.is_open:
                yield
                return
            async with self.yard.client():
                yield

    # --- the interface of the design ----------------------------------------------------------------------------------

    async def enqueue(self, task: Task, account: AccountId, **options: Any) -> bool:
        """Put the task at the tail of the queue, also while the service is stopped; see `DevicePool.enqueue`."""
        async with self._open():
            return await self.pool.enqueue(task, account, **options)

    async def is_queued(self, account_id: int | str, task_type: str) -> bool:
        """Whether a task of this account and consumer waits."""
        async with self._open():
            return await self.pool.is_queued(account_id, task_type)

    async def is_running(self, account_id: int | str) -> bool:
        """Whether a task of this account runs."""
        async with self._open():
            return await self.pool.is_running(account_id)

    async def queue_info(self, *, limit: int = 100) -> list[dict[str, Any]]:
        """The tasks that wait, first to start first."""
        async with self._open():
            return await self.pool.queue_info(limit=limit)

    async def running_info(self) -> list[dict[str, Any]]:
        """The tasks that run, and on which devices."""
        async with self._open():
            return await self.pool.running_info()

    async def task_runs(
        self,
        *,
        account_id: int | str | None = None,
        task_type: str | None = None,
        device: str | None = None,
        limit: int = 100,
    ) -> list[TaskRun]:
        """The runs so far, the newest first."""
        async with self._open():
            return await self.pool.task_runs(account_id=account_id, task_type=task_type, device=device, limit=limit)

    @property
    def workers(self) -> Mapping[int, WorkerActor]:
        """The actors of the devices that this node serves, by `emulator_id`."""
        return {actor.emulator_id: actor for actor in self.pool.server.actors.values()}

    @property
    def devices(self) -> Devices:
        """The devices of the store: list, add, label, take and drain them."""
        return self.yard.devices


def _check_registry(given: Any) -> TaskConsumerRegistry | list[AnyConsumer]:
    if given is None:
        return []
    if isinstance(given, TaskConsumerRegistry):
        return given
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise InvalidInput(f"a registry is a list of consumers or a TaskConsumerRegistry, not {quote(given)}")
    return list(given)
