"""`Scheduler` alone, as its design writes it: consumers from a registry, tasks in memory, nothing else to set up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping

from taskyard.consumers import INLINE, THREAD, class_consumer
from taskyard.engine import Engine, EngineSettings
from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.thread import ThreadExecutor
from taskyard.model.limits import QueueSettings
from taskyard.model.retry import NO_RETRY
from taskyard.model.task import DEFAULT_QUEUE, Task, TaskRecord, to_json
from taskyard.ports.clock import Clock
from taskyard.ports.consumer import Consumer, TaskConsumerRegistry
from taskyard.ports.store import Add, Added, Store
from taskyard.scheduling.clock import SystemClock
from taskyard.stores.memory import MemoryStore

log = logging.getLogger("taskyard")


class _Registered(Mapping[str, Consumer]):
    """The registry's consumers as the engine wants them, made when they are first asked for."""

    def __init__(self, registry: TaskConsumerRegistry) -> None:
        self._registry = registry
        self._made: dict[str, Consumer] = {}

    def __getitem__(self, name: str) -> Consumer:
        if name not in self._made:
            source = self._registry.find(name)
            if source is None:
                raise KeyError(name)
            self._made[name] = class_consumer(source)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry.sources)

    def __len__(self) -> int:
        return len(self._registry.sources)


class Scheduler:
    """Fires tasks when they are due, earliest first, at most `concurrent_count` of a source at once. A failed task is
    logged and not tried again; a task of an unknown source is logged and ends as failed when it is due.

    `add_task` is synchronous and may be called from any thread, also before `start`. `store` holds every record."""

    def __init__(
        self,
        registry: TaskConsumerRegistry | None = None,
        *,
        max_running: int = 1000,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._registry = registry or TaskConsumerRegistry.default()
        self._max_running = max_running
        self._early: deque[Task] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: Engine | None = None
        self.store: Store = MemoryStore(self._clock)

    def add_task(self, task: Task) -> None:
        """Hand in a task. It is copied, never changed. O(log n); an earlier task overtakes those that wait."""
        to_json(f"the arguments of task {task.uuid}", task.args)
        with self._lock:
            loop = self._loop
            if loop is None:
                self._early.append(task)
                return
        if _running_loop() is loop:
            self._add(task)
        else:
            loop.call_soon_threadsafe(self._add, task)

    def _add(self, task: Task) -> None:
        now = self._clock.now()
        args = to_json(f"the arguments of task {task.uuid}", task.args)
        record = TaskRecord(task.uuid, task.source, task.schedule_at, now, now, args=args)
        if self._engine is None:
            self._early.append(task)
            return
        self._engine.add(Add((record,))).add_done_callback(_report_refusal)

    async def start(self) -> None:
        """Start firing. Calling it again while it runs does nothing."""
        if self._engine is not None:
            return
        engine = Engine(
            self.store,
            clock=self._clock,
            consumers=_Registered(self._registry),
            executors={INLINE: InProcessExecutor(), THREAD: ThreadExecutor()},
            queues={DEFAULT_QUEUE: QueueSettings(name=DEFAULT_QUEUE, retry=NO_RETRY)},
            settings=EngineSettings(max_running=self._max_running, others=self._max_running),
        )
        self._engine = engine
        await engine.start()
        with self._lock:
            self._loop = asyncio.get_running_loop()
            early, self._early = self._early, deque()
        for task in early:
            self._add(task)
        log.info("Scheduler started")

    async def stop(self, grace: float | None = None) -> None:
        """Fire nothing new at once, and let what runs finish; after `grace` seconds interrupt it (None: never)."""
        engine, self._engine = self._engine, None
        with self._lock:
            self._loop = None
        if engine is None:
            return
        try:
            await engine.stop(grace)
        finally:
            log.info("Scheduler stopped")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _report_refusal(future: asyncio.Future[list[Added]]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("a task was not taken: %s", error)
