"""`Scheduler` and a queue alone, as their designs write them: consumers from a registry, tasks in memory, nothing else
to set up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from taskyard.consumers import class_consumer
from taskyard.engine import Engine, EngineSettings
from taskyard.errors import InvalidConsumer, InvalidInput, NotOpen, UnknownConsumer, UnknownTask, quote
from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.thread import ThreadExecutor
from taskyard.handle import value_of
from taskyard.model.execution import INLINE, THREAD
from taskyard.model.given import (
    LARGEST_COUNT,
    LARGEST_PAYLOAD,
    AnyTask,
    check_count,
    check_order,
    check_retry,
    check_uuid,
)
from taskyard.model.kinds import checked, checked_verbs
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.retry import NO_RETRY, RetryPolicy
from taskyard.model.task import DEFAULT_QUEUE, Task, TaskRecord, new_uuid, to_json
from taskyard.model.why import Why
from taskyard.options import TaskOptions, make_record
from taskyard.ports.clock import Clock, SystemClock
from taskyard.ports.consumer import BaseTaskConsumer, Consumer, ConsumerChange, TaskConsumerRegistry
from taskyard.ports.sink import Sink, Sinks
from taskyard.ports.store import Add, Added, Store
from taskyard.queueing.controller import QueueController
from taskyard.queueing.waiting import explain_waits
from taskyard.settings import check_store, make_store
from taskyard.stores.memory import MemoryStore
from taskyard.telemetry.logs import FailureLog

log = logging.getLogger("taskyard")

ELSEWHERE = frozenset({"queue", "delay_s", "schedule_at", "connection"})
"""Options that a queue alone has no use for."""

THREADS = 32
"""For plain functions, where a queue alone lets fewer run at once: its concurrency may be raised."""

KEEP_ENDED = 10_000
"""Enough to look at what went wrong. A number and not a time: memory must stay bounded however much is fired."""

_HandedIn = tuple[Task, str]
"""A task, and its arguments as JSON at the time it was handed in."""


class _Registered(dict[str, Consumer]):
    """The registry's consumers as an engine wants them. They are changed by `update_from_registry` alone, on the
    engine's loop: the registry may change on any thread, at any time."""

    def __init__(
        self, registry: TaskConsumerRegistry, adapt: Callable[[str, BaseTaskConsumer], Consumer] | None = None
    ) -> None:
        self._registry, self._adapt = registry, adapt or _adapt
        self._made_of: dict[str, BaseTaskConsumer] = {}
        self.update_from_registry()

    def update_from_registry(self) -> None:
        sources = dict(self._registry.sources)
        for name in self.keys() - sources.keys():
            del self[name], self._made_of[name]
        for name, source in sources.items():
            if self._made_of.get(name) is not source:
                self[name], self._made_of[name] = self._adapt(name, source), source

    def follow(self, engine: Engine) -> Callable[[], None]:
        """Let the engine, which runs on this loop, hear of every change from now on, until the function that is
        returned is called."""
        loop = asyncio.get_running_loop()

        def change() -> None:
            self.update_from_registry()
            engine.consumers_changed()

        def hear(name: str, what: ConsumerChange) -> None:
            if _running_loop() is loop:
                change()
            else:
                loop.call_soon_threadsafe(change)

        unsubscribe = self._registry.subscribe(hear)
        change()  # what has happened since it was made
        return unsubscribe


def _adapt(name: str, source: BaseTaskConsumer) -> Consumer:
    try:
        return class_consumer(source)
    except InvalidConsumer as unfit:
        # Raised here it would stop the loop that asked, and with it everybody else's tasks.
        return _refusing(name, unfit)


def _adapt_as_given(name: str, source: BaseTaskConsumer) -> Consumer:
    """A consumer that gets each task with the uuid it was added with. One that was added again has another uuid in the
    store, and the given one as its origin."""
    consumer = _adapt(name, source)
    inner = consumer.call

    def call(record: TaskRecord) -> Any:
        if record.origin is not None:
            record = record.clone()
            record.uuid = record.origin or record.uuid
        return inner(record)

    return replace(consumer, call=call)


def _refusing(name: str, unfit: InvalidConsumer) -> Consumer:
    """Fails every task it is given with what is wrong with the consumer."""

    def call(record: TaskRecord) -> None:
        raise unfit

    return Consumer(
        name=name, encode=lambda args: to_json("arguments", args), call=call, is_async=False, executor=THREAD
    )


class Scheduler:
    """Fires tasks when they are due, earliest first, at most `concurrent_count` of a source at once. A failed task is
    logged and not tried again; a task of an unknown source is logged and ends as failed when it is due. Consumers may
    be registered and unregistered meanwhile: what runs of one that has gone goes on to its end, what waits for it has
    an unknown source when it is due, unless another of that name is there by then.

    `add_task` is synchronous and may be called from any thread, also before `start`. `store` holds the record of every
    task that has not ended, and of the last 10,000 that have. `sinks` are told what happens (`taskyard.telemetry`)."""

    @checked
    def __init__(
        self,
        registry: TaskConsumerRegistry | None = None,
        *,
        max_running: int = 1000,
        sinks: Iterable[Sink] = (),
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._sinks = Sinks([FailureLog(is_plain=True), *sinks])
        self._registry = registry or TaskConsumerRegistry.default()
        self._max_running = check_count("max_running", max_running, least=1)
        self._handed_in: list[_HandedIn] = []
        self._stored: set[str] = set()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: Engine | None = None
        self._unfollow: Callable[[], None] | None = None
        self.store: Store = MemoryStore(self._clock, keep_ended=KEEP_ENDED)

    def add_task(self, task: Task) -> None:
        """Hand in a task. It is copied, never changed. O(log n); an earlier task overtakes those that wait.

        Every call runs the task once: one that is added twice runs twice. The first is stored under the task's uuid,
        every other one under a new uuid, with the task's uuid as its `origin`. `consume` gets the same task each
        time."""
        if not isinstance(task, Task):
            raise InvalidInput(f"task must be a Task, not {quote(task)}")
        self._hand_in((task, to_json(f"the arguments of task {task.uuid}", task.args)))

    def _hand_in(self, item: _HandedIn) -> None:
        with self._lock:
            self._handed_in.append(item)
            loop = self._loop
            if loop is None or len(self._handed_in) > 1:
                return  # `start` takes it, or the call that the first of them has asked for
        if _running_loop() is loop:
            loop.call_soon(self._take)
        else:
            loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        """Give the engine what was handed in since the last time, by time: what is overdue fires in that order too."""
        engine = self._engine
        if engine is None:
            return
        with self._lock:
            handed_in, self._handed_in = self._handed_in, []
        now = self._clock.now()
        for item in sorted(handed_in, key=lambda item: item[0].schedule_at):
            task, args = item
            is_again = task.uuid in self._stored
            record = TaskRecord(task.uuid, task.source, task.schedule_at, now, now, args=args)
            if is_again:
                record.uuid, record.origin = new_uuid(), task.uuid
            else:
                self._note_stored(task.uuid)
            engine.add(Add((record,))).add_done_callback(partial(self._answered, item, is_again))

    def _note_stored(self, uuid: str) -> None:
        """Remember that the uuid is taken. Only lately added ones are remembered, so that memory stays bounded. The
        store refuses an older one, which is then remembered again."""
        if len(self._stored) > KEEP_ENDED:
            self._stored.clear()
        self._stored.add(uuid)

    def _answered(self, item: _HandedIn, is_again: bool, future: asyncio.Future[list[Added]]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is None:
            return
        uuid = item[0].uuid
        if isinstance(error, NotOpen):
            # stop() came before the store was asked: the next start takes it.
            if not is_again:
                self._stored.discard(uuid)
            self._hand_in(item)
        elif isinstance(error, InvalidInput) and not is_again:
            # Its uuid is in the store already. If the reason is another one, the next try says so.
            self._note_stored(uuid)
            self._hand_in(item)
        else:
            log.error("task %s from %s was not taken: %s", uuid, item[0].source, error)

    async def start(self) -> None:
        """Start firing. Calling it again while it runs does nothing."""
        if self._engine is not None:
            return
        registered = _Registered(self._registry, _adapt_as_given)
        engine = Engine(
            self.store,
            clock=self._clock,
            consumers=registered,
            executors={INLINE: InProcessExecutor(), THREAD: ThreadExecutor()},
            queues={DEFAULT_QUEUE: QueueSettings(name=DEFAULT_QUEUE, retry=NO_RETRY)},
            settings=EngineSettings(max_running=self._max_running, others=self._max_running),
            sinks=self._sinks,
        )
        self._engine = engine
        try:
            await _start(self.store, engine)
        except BaseException:
            self._engine = None
            raise
        self._unfollow = registered.follow(engine)
        with self._lock:
            self._loop = asyncio.get_running_loop()
        self._take()
        log.info("Scheduler started")

    async def stop(self, grace: float | None = None) -> None:
        """Fire nothing new at once, and let what runs finish; after `grace` seconds interrupt it (None: never)."""
        engine, self._engine = self._engine, None
        with self._lock:
            self._loop = None
        if self._unfollow is not None:
            self._unfollow()
        if engine is None:
            return
        try:
            await engine.stop(grace)
        finally:
            await self.store.close()
            log.info("Scheduler stopped")


@checked_verbs
class StandaloneQueue(QueueController):
    """One queue alone: at most `concurrency` tasks at a time, the others wait in order, and people steer them with the
    verbs of `QueueController`. `async with queue:` runs it; what it is when that ends stays in `store`, an address or a
    store, by default one in memory. A consumer runs no more at once than its `concurrent_count` either, which is 1
    unless it says so.

    `retry` is how often a task that fails is tried again; `auto_recover` how often one whose process died is."""

    @checked
    def __init__(
        self,
        registry: TaskConsumerRegistry,
        *,
        concurrency: int = 1,
        order: QueueOrder | str = QueueOrder.PRIORITY,
        retry: RetryPolicy | None = None,
        auto_recover: int = 1,
        store: str | Path | Store | None = None,
        sinks: Iterable[Sink] = (),
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        check_count("concurrency", concurrency, least=1)
        self.store = _find_store(store, clock)
        self._rules = QueueSettings(
            name=DEFAULT_QUEUE,
            concurrency=concurrency,
            order=check_order(order),
            retry=check_retry(RetryPolicy() if retry is None else retry),
            auto_recover=check_count("auto_recover", auto_recover, least=0),
        )
        self._registered = _Registered(registry)
        self._engine = Engine(
            self.store,
            clock=clock,
            consumers=self._registered,
            executors={INLINE: InProcessExecutor(), THREAD: ThreadExecutor(max_workers=max(THREADS, concurrency))},
            queues={DEFAULT_QUEUE: self._rules},
            # The queue's own limit, which may be raised while it runs, is the only one.
            settings=EngineSettings(max_running=LARGEST_COUNT),
            sinks=Sinks([FailureLog(), *sinks]),
        )
        super().__init__(DEFAULT_QUEUE, self._engine)

    async def __aenter__(self) -> Self:
        await _start(self.store, self._engine, self._rules)
        self._unfollow = self._registered.follow(self._engine)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """What runs is interrupted and goes back to the store."""
        self._unfollow()
        try:
            await self._engine.stop(0.0)
        finally:
            await self.store.close()

    async def add(self, *tasks: Task, **options: Any) -> list[str]:
        """Put them in line, in this order; their uuids, once they are stored, or those of the tasks that they were
        merged into. With a slot free the first starts. `options` as in `TaskOptions`, for each of them: priority, key,
        bucket, timeout_s, retry, after, on_failure, dedupe and its kin."""
        if unfit := options.keys() & ELSEWHERE:
            raise InvalidInput(f"{', '.join(sorted(unfit))}: this is one queue alone, and the task says when it is due")
        checked = TaskOptions.of(**options)
        if checked.bucket is not None and self._rules.order is not QueueOrder.BUCKETS:
            raise InvalidInput(
                f"bucket has no effect in a queue that goes by {self._rules.order}; make it with order='buckets'"
            )
        records = [self._make_record(task, checked) for task in tasks]
        after = {record.uuid: checked.after for record in records} if checked.after else {}
        add = Add(records, checked.dedupe, None, after, checked.dedupe_window_s)
        return [added.uuid for added in await self._engine.submit(add)]

    def _make_record(self, task: Task, options: TaskOptions) -> TaskRecord:
        if task.source not in self._registered:
            raise UnknownConsumer(task.source, self._registered)
        # `produce` is how the task came about.
        consumer = replace(self._registered[task.source], queue=DEFAULT_QUEUE, produce=None)
        timed = msgspec.structs.replace(options, schedule_at=task.schedule_at)
        now = self._engine.clock.now()
        record = make_record(consumer, task.args, timed, now=now, max_bytes=LARGEST_PAYLOAD)
        record.uuid = task.uuid
        return record

    async def why(self, uuid: AnyTask) -> Why | None:
        """What holds a task that waits; None if it runs or has ended."""
        return (await explain_waits(self.store, [await self.get(uuid)]))[0]

    async def outcome(self, uuid: AnyTask) -> Any:
        """What the task returned, when it has ended; raises as `TaskHandle.result` does."""
        return value_of(await self._engine.outcome(check_uuid(uuid)))

    async def get(self, uuid: AnyTask) -> TaskRecord:
        """All that is known of a task."""
        asked = check_uuid(uuid)
        record = await self.store.find(asked)
        if record is None:
            raise UnknownTask(asked)
        return record


def _find_store(given: object, clock: Clock) -> Store:
    store = check_store(given)
    if store is None:
        return MemoryStore(clock, keep_ended=KEEP_ENDED)
    return make_store(store, clock) if isinstance(store, str) else store


async def _start(store: Store, engine: Engine, *queues: QueueSettings) -> None:
    """Open the store and start the engine on it; what fails leaves nothing open."""
    await store.open()
    try:
        for settings in queues:
            await store.set_queue(settings)
        await engine.start()
    except BaseException:
        await store.close()
        raise


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
