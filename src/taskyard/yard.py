"""`Yard`: consumers, a store and the engine between them."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload
from uuid import UUID

from taskyard.artifact_files import ArtifactFolder, choose_folder
from taskyard.blocking import OwnLoop
from taskyard.catalogue import UnservedNotice
from taskyard.cluster.membership import LeaseSettings
from taskyard.consumers import (
    PLACES,
    check_executors,
    check_settings,
    check_version,
    class_consumer,
    function_consumer,
)
from taskyard.device_yard import YardDevices
from taskyard.engine import Engine, EngineSettings
from taskyard.errors import (
    BatchTooLarge,
    InvalidConsumer,
    InvalidInput,
    quote,
)
from taskyard.execution.context import find_run
from taskyard.execution.runner import RunnerSettings
from taskyard.execution.warming import warm_up_all
from taskyard.group import Group, refuse_connection, submit_group
from taskyard.handle import BoundTask, ConsumerFunction, TaskHandle
from taskyard.model.given import (
    LARGEST_PAYLOAD,
    AnyTask,
    check_count,
    check_keep,
    check_name,
    check_order,
    check_rate,
    check_retry,
    check_timeout,
    check_uuid,
    check_wait,
)
from taskyard.model.kinds import checked
from taskyard.model.queue import RETRIES_PER_S, QueueOrder, QueueSettings
from taskyard.model.recurrence import Rule
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import DEFAULT_QUEUE, Claim, Dedupe, TaskRecord, to_json
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.model.trace import inherit_trace
from taskyard.options import DEFAULTS, MAX_BATCH, TaskOptions, check_size, dedupe_of, make_record, make_records, named
from taskyard.ports.admission import Admission, check_admission
from taskyard.ports.clock import Clock, SystemClock
from taskyard.ports.consumer import (
    BaseTaskConsumer,
    Consumer,
)
from taskyard.ports.executor import ExecutorFactory, ExecutorProtocol
from taskyard.ports.middleware import Middleware, check_middleware
from taskyard.ports.places import Place, Places
from taskyard.ports.sink import Sink, Sinks
from taskyard.ports.store import Add, Store
from taskyard.queueing.matching import RerunReport
from taskyard.registering import Registering, warm_up_steps
from taskyard.rerunning import run_again, run_all_again
from taskyard.retention import KEEP_AUDIT_S, KEEP_S, Keep, Retention
from taskyard.schedules import Schedules
from taskyard.settings import check_store, find_stall_s, find_store_url, is_private, make_store
from taskyard.steering import YardSteering
from taskyard.telemetry.logs import FailureLog

if TYPE_CHECKING:
    from taskyard.blocking_yard import BlockingYard
    from taskyard.execution.algorithm import Algorithm
    from taskyard.executors import PoolRules
    from taskyard.model.algorithm import AlgorithmSpec

log = logging.getLogger("taskyard")

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Callable[..., Any])

MAX_PAYLOAD_BYTES = 1 << 20

BREATHE_EVERY = 1000
"""Arguments of a batch that are checked before other code gets a turn: about 10 ms."""


class Yard(Registering, YardDevices, YardSteering):
    """Runs tasks on a store: `memory://`, `sqlite:///work.db` or a `Path`, `postgresql://user:password@host/database`
    for several machines, or what `TASKYARD_STORE` says.

    `async with yard:` opens the store and runs what is due; `async with yard.client():` only submits and waits. At most
    `max_running` tasks run here at once (`threads` of them in threads); leaving the block waits `grace_s` seconds for
    what runs, then interrupts it and gives it back to the store (None: waits for as long as it takes). While it is open
    with its workers, it forgets what ended more than `keep_s` seconds ago, a week (None: keeps everything);
    `keep_latest` limits that by number as well, `keep_failed` sets what failed apart. The record of what people asked
    for (`audit`) is kept for `keep_audit_s` seconds, a year.

    `artifacts` is the folder for artifacts that are too large for the store; each store has one of its own in it. By
    default that is beside a SQLite file or among the data of this user for PostgreSQL; for `memory://` it is temporary.

    `version` is that of the application: the catalogue of consumers shows it.

    `admission` are checks that decide whether a task may start here now, such as whether a disk has room
    (`taskyard.ports.admission`). `sinks` are told what happens in this process (`taskyard.ports.sink`).

    `executors` are more places to run tasks, by the names that consumers ask for: `executors={"ray": RayExecutor}` for
    `@yard.consumer(executor="ray")`. Each is a class or function that makes an executor
    (`taskyard.ports.executor.ExecutorProtocol`), called whenever the yard is opened.

    `middleware` are functions around every submit, every run and the code of every run (`taskyard.middleware`)."""

    def __init__(  # noqa: PLR0913 - the settings of a yard, each with a name and a default
        self,
        store: str | Path | Store | None = None,
        *,
        max_running: int = 100,
        threads: int = 32,
        grace_s: float | None = 30.0,
        keep_s: float | None = KEEP_S,
        keep_audit_s: float | None = KEEP_AUDIT_S,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        name: str = "",
        version: str = "",
        artifacts: str | os.PathLike[str] | None = None,
        admission: Iterable[Admission] = (),
        sinks: Iterable[Sink] = (),
        executors: Mapping[str, ExecutorFactory] | None = None,
        middleware: Iterable[Middleware] = (),
        clock: Clock | None = None,
    ) -> None:
        super().__init__()
        self._own_executors = check_executors(executors)
        self._middleware = list(check_middleware(middleware))
        self._checks = check_admission(admission)
        self._sinks = Sinks([FailureLog(), *sinks])
        if artifacts is not None and not isinstance(artifacts, str | os.PathLike):
            raise InvalidInput("must be the path of a folder", field="artifacts", given=artifacts)
        self._artifacts, self._artifact_folder = artifacts, ArtifactFolder(None)
        check_count("max_running", max_running, least=1)
        check_count("threads", threads, least=1)
        check_count("max_payload_bytes", max_payload_bytes, least=1, most=LARGEST_PAYLOAD)
        self._clock = clock or SystemClock()
        self._where = check_store(store)
        self._grace_s, self._keep_s = check_wait("grace_s", grace_s), check_keep(keep_s)
        self._keep_audit_s = check_keep(keep_audit_s, field="keep_audit_s")
        self._keep_ended: int | None = None
        self._keep_failed: Keep | None = None
        self._retention: asyncio.Task[None] | None = None
        self._threads = threads
        self._pools: PoolRules | None = None
        self._settings = EngineSettings(
            name=name if name == "" else check_name("the name of a yard", name),
            version=check_version(version),
            max_running=max_running,
            runner=RunnerSettings(max_payload_bytes=max_payload_bytes),
        )
        self._max_payload_bytes = max_payload_bytes
        self._lease: LeaseSettings | None = None
        self._jitter: Callable[[], float] = random.random
        self._queues: dict[str, QueueSettings] = {}
        self._unbucketed: set[str] = set()
        self._placeless: set[str] = set()
        self._is_opening = self._is_serving = False
        self._stopping: asyncio.Future[None] | None = None
        self._own_loop = OwnLoop()
        self.schedules = Schedules(self)
        self._unserved = UnservedNotice(self.catalogue)

    # --- consumers and queues -----------------------------------------------------------------------------------------

    @overload
    def consumer(self, function: Callable[P, R], /) -> ConsumerFunction[P, R]: ...

    @overload
    def consumer(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        queue: str = DEFAULT_QUEUE,
        concurrency: int = 1,
        concurrent_count: int = ...,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        executor: str | None = None,
        places: Places | Iterable[Place | str] | None = None,
        middleware: Iterable[Middleware] = (),
        version: str = "",
    ) -> Callable[[Callable[P, R]], ConsumerFunction[P, R]]: ...

    def consumer(self, function: Callable[..., Any] | None = None, /, **settings: Any) -> Any:
        """Make a function a consumer: `@yard.consumer`, or `@yard.consumer(concurrency=8, timeout_s=30)`. With
        `places` its tasks run there, one at a time each: `places=[Place("gpu-0", {"model": "a100"})]`. A task may name
        labels that its place must have: `requires={"model": "a100"}`."""
        check_settings(settings)
        if function is None:
            return lambda given: self._decorate(given, settings)
        return self._decorate(function, settings)

    def _decorate(self, function: Callable[..., Any], settings: dict[str, Any]) -> ConsumerFunction[..., Any]:
        consumer, signature = function_consumer(function, (*PLACES, *self._own_executors), **settings)
        self._register(consumer)
        return ConsumerFunction(self, function, consumer, signature)

    @checked
    def register(self, consumer: BaseTaskConsumer) -> None:
        """Add a consumer in its class form."""
        if not consumer.name:
            raise InvalidConsumer(f"{type(consumer).__name__} has no name; set the class attribute `name`")
        self._register(class_consumer(consumer, (*PLACES, *self._own_executors)))

    def install(
        self,
        algorithm: type[Algorithm] | Callable[..., Any],
        *,
        spec: AlgorithmSpec | None = None,
        queue: str = DEFAULT_QUEUE,
        concurrency: int | None = None,
        retry: RetryPolicy | None = None,
        places: Places | Iterable[Place | str] | None = None,
        middleware: Iterable[Middleware] = (),
    ) -> None:
        """Add an algorithm as a consumer, as `ExecutionDispatcher.install` adds it for direct calls: a task has the
        fields of its `Input` as arguments and its `Output` as result, and runs where and as its hints say. At most
        `concurrency` run at once, by default the hints' `max_workers`, or 1; with `places`, one at each."""
        from taskyard.algorithm_consumers import algorithm_consumer

        consumer, pool = algorithm_consumer(
            algorithm,
            spec,
            queue=queue,
            concurrency=concurrency,
            retry=retry,
            places=places,
            middleware=middleware,
        )
        self._register(consumer)
        if pool is not None:
            self._pool_rules.suggest(consumer.name, pool)

    def around_submit(self, function: S) -> S:
        """Have a function go around every submit of this yard: `@yard.around_submit` above
        `async def f(submission, call_next)`. See `taskyard.middleware`."""
        self._add_middleware(Middleware(around_submit=function))
        return function

    def around_run(self, function: S) -> S:
        """Have a function go around every run on this node: `@yard.around_run` above `async def f(run, call_next)`."""
        self._add_middleware(Middleware(around_run=function))
        return function

    def around_code(self, function: S) -> S:
        """Have a function go around the code of every run, where the code runs: `@yard.around_code` above
        `def f(run): … yield …`."""
        self._add_middleware(Middleware(around_code=function))
        return function

    @property
    def middleware(self) -> tuple[Middleware, ...]:
        """The middleware of this yard, in order."""
        return tuple(self._middleware)

    def _add_middleware(self, middleware: Middleware) -> None:
        if self._open_engine is not None:
            raise InvalidInput("add middleware before the yard is opened")
        self._middleware.append(middleware)

    def define_queue(  # noqa: PLR0913 - the rules of a queue, each with a name and a default
        self,
        name: str,
        *,
        concurrency: int | None = None,
        per_key: int = 1,
        auto_recover: int = 1,
        retry: RetryPolicy | None = None,
        order: QueueOrder | str = QueueOrder.PRIORITY,
        starve_after: int | None = 8,
        starve_wait_s: float | None = 600.0,
        retries_per_s: float | None = RETRIES_PER_S,
    ) -> None:
        """Set the rules of a queue, before the yard is opened. They hold across every process on the store, save
        `retry`, of which each process uses its own. So define the queue alike wherever it is served: whoever opened his
        yard last has set the rules. `concurrency` is how many of its tasks run at once, `per_key` how many of those
        that were submitted with the same `key`.

        `order` is "priority", "fifo" (strictly in order of arrival: what is due and cannot start holds up all behind
        it) or "buckets" (the same in each bucket of tasks, and the buckets take turns). By priority, a lower one is let
        in after `starve_after` starts of higher ones, or when it has waited for `starve_wait_s` seconds (None: never).
        That is within the queue: of several queues on a node that is full, the one with the higher priority at its head
        goes first, without end. A `concurrency` for a queue that is never without high ones leaves room for the others.

        Of what fails here and is tried again, at most `retries_per_s` come back in a second (None: all when their
        policy says): fifty thousand that fail together are not sent together at whoever was down."""
        if self._open_engine is not None:
            raise InvalidInput(f"define the queue {quote(name)} before the yard is opened")
        if concurrency is not None:
            check_count("concurrency", concurrency, least=1, hint=", or None for no limit")
        self._queues[name] = QueueSettings(
            name=check_name("the name of a queue", name),
            concurrency=concurrency,
            per_key=check_count("per_key", per_key, least=1),
            auto_recover=check_count("auto_recover", auto_recover, least=0),
            retry=check_retry(RetryPolicy() if retry is None else retry),
            order=check_order(order),
            starve_after=None if starve_after is None else check_count("starve_after", starve_after, least=1),
            starve_wait_s=None if starve_wait_s is None else check_timeout(starve_wait_s, field="starve_wait_s"),
            retries_per_s=None if retries_per_s is None else check_rate("retries_per_s", retries_per_s),
        )

    def keep_latest(self, count: int | None) -> None:
        """Of the tasks that have ended, keep only so many, the latest (None: however many), and forget the others while
        the yard is open with its workers, as `keep_s` does; before it is opened. At any time there may be more, by what
        ends within a minute."""
        if self._open_engine is not None:
            raise InvalidInput("say how many ended tasks to keep before the yard is opened")
        self._keep_ended = _check_latest("count", count)

    def keep_failed(self, *, age_s: float | None = KEEP_S, latest: int | None = None) -> None:
        """Keep the tasks that failed for `age_s` seconds, and the `latest` of them (None: however long, however many),
        whatever becomes of the others: without it `keep_s` and `keep_latest` are for all. Before the yard is opened."""
        if self._open_engine is not None:
            raise InvalidInput("say how long to keep failed tasks before the yard is opened")
        self._keep_failed = Keep(check_keep(age_s, field="age_s"), _check_latest("latest", latest))

    def schedule(
        self,
        rule: Rule | str | float | timedelta,
        *,
        args: Mapping[str, Any] | None = None,
        name: str | None = None,
        zone: str | None = None,
        **settings: Any,
    ) -> Callable[[ConsumerFunction[P, R]], ConsumerFunction[P, R]]:
        """Run a consumer again and again: `@yard.schedule("0 4 * * *", zone="Europe/Berlin")` above `@yard.consumer`.
        `rule` is a cron expression or an interval in seconds, `settings` as for `schedules.define`; `each` makes a
        task for each of many items. The schedule is called as the consumer, unless it has a `name`."""

        def decorate(consumer: ConsumerFunction[P, R]) -> ConsumerFunction[P, R]:
            if not isinstance(consumer, ConsumerFunction):
                raise InvalidInput(f"{quote(consumer)} is no consumer; put @yard.schedule above @yard.consumer")
            self.schedules.define(name or consumer.consumer.name, rule, consumer, args, zone=zone, **settings)
            return consumer

        return decorate

    def define_pool(self, consumer: str | None = None, **settings: Any) -> None:
        """Set the rules of the shared process pool, or of the pool of one consumer with `executor="isolated"`; before
        the yard is opened. `settings` as in `PoolSettings`: max_workers, memory_limit, recycle_after, preload, … What
        is not named stays as the hints of an algorithm say, or the default: a pool of its own has as many workers as
        the consumer's `concurrency`, the shared one the usable cores less one."""
        if self._open_engine is not None:
            raise InvalidInput("define process pools before the yard is opened")
        self._pool_rules.ask(consumer, settings)

    @property
    def _pool_rules(self) -> PoolRules:
        from taskyard.executors import PoolRules

        if self._pools is None:
            self._pools = PoolRules()
        return self._pools

    def add_sink(self, sink: Sink) -> Callable[[], None]:
        """Tell `sink` what happens in this process (`taskyard.ports.sink`), until the function that is returned is
        called. At any time."""
        return self._sinks.add(sink)

    # --- opening and closing ------------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """The time by the clock of this yard, in UTC."""
        return self._clock.now()

    @property
    def where(self) -> str | Store | None:
        """The store as it was given: an address, a store, or None for what `TASKYARD_STORE` says."""
        return self._where

    def use_store(self, store: str | Path | Store) -> None:
        """Another store than the one given first; before the yard is opened."""
        if self._open_engine is not None:
            raise InvalidInput("choose the store before the yard is opened")
        self._where = check_store(store)

    async def __aenter__(self) -> Yard:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Yard]:
        """The yard without its workers: submits, waits and looks; other processes run the tasks."""
        await self.start(serve=False)
        try:
            yield self
        finally:
            await self.stop()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """For FastAPI and Starlette: `FastAPI(lifespan=yard.lifespan)`. The web process submits tasks, and workers run
        them: `taskyard worker app:yard`. A memory store is in this process only, so its tasks run here."""
        await self.start(serve=is_private(self._where))
        try:
            yield
        finally:
            await self.stop()

    @asynccontextmanager
    async def worker_lifespan(self, app: object) -> AsyncIterator[None]:
        """The same, with a worker in each web process: `FastAPI(lifespan=yard.worker_lifespan)`."""
        async with self:
            yield

    def blocking(self, *, serve: bool = True) -> BlockingYard:
        """The same yard for code without a loop, and for threads beside one: `with yard.blocking() as sync: …`. If that
        opens it, `serve=False` leaves the workers out: other processes run the tasks."""
        from taskyard.blocking_yard import BlockingYard

        return BlockingYard(self, serve=serve)

    async def start(self, *, serve: bool = True) -> None:
        """Open the store and run tasks; with `serve=False` only submit and wait. `async with yard:` does it for you."""
        if self._open_engine is not None or self._is_opening or self._stopping is not None:
            self._refuse_fork()
            raise InvalidInput(f"this {self._called} is open already")
        self._is_opening = True
        try:
            await self._open(serve)
        finally:
            self._is_opening = False

    async def _open(self, serve: bool) -> None:
        from taskyard.execution.scene import refuse_while_loading

        refuse_while_loading()
        store = (
            make_store(self._where, self._clock) if self._where is None or isinstance(self._where, str) else self._where
        )
        consumers = list(self._consumers.values())
        await warm_up_all([step for consumer in consumers for step in warm_up_steps(consumer, serve=serve)])
        url = find_store_url(self._where) if self._where is None or isinstance(self._where, str) else None
        self._artifact_folder = choose_folder(self._artifacts, store, url) if serve else ArtifactFolder(None)
        engine, known = self._make_engine(store, serve), dict(self._consumers)
        await store.open()
        try:
            # Who only submits leaves the rules to those who run.
            for settings in self._queues.values() if serve else ():
                await store.set_queue(settings)
            if serve:
                await self.schedules.register(store, self._clock.now())
                await self._define_devices(store)
            await engine.start()
        except BaseException:
            await store.close()
            raise
        loop, self._is_serving = self._opened(store, engine), serve
        if self._consumers != known:
            engine.consumers_changed()  # they came or went meanwhile, when there was nobody to tell
        keep, failed = Keep(self._keep_s, self._keep_ended), self._keep_failed
        if serve:
            self._serve_devices()
            # Also if everything is kept: another process may prune, and leaves the files of this machine to us.
            retention = Retention(
                store,
                self._clock,
                keep,
                failed=failed,
                artifacts=self._artifact_folder.path,
                keep_audit_s=self._keep_audit_s,
            )
            self._retention = loop.create_task(retention.run(), name="taskyard-retention")

    def _make_engine(self, store: Store, serve: bool) -> Engine:
        from taskyard.executors import make_executors

        return Engine(
            store,
            clock=self._clock,
            consumers=self._consumers,
            executors=make_executors(
                self._pool_rules, self._consumers, threads=self._threads, serve=serve, others=self._own_executors
            ),
            queues=self._queues,
            settings=replace(
                self._settings,
                serve=serve,
                lease=self._lease or LeaseSettings(stall_s=find_stall_s()),
                checks=self._checks,
                middleware=tuple(self._middleware),
                item_functions=self.schedules.functions,
                runner=replace(
                    self._settings.runner,
                    artifact_folder=self._artifact_folder.path,
                    middleware=tuple(self._middleware),
                ),
            ),
            jitter=self._jitter,
            sinks=self._sinks,
        )

    @property
    def executors(self) -> Mapping[str, ExecutorProtocol]:
        """The executors of the open yard by name, for their `stats()` and `health()`."""
        return self._engine.executors

    async def stop(self, *, grace_s: float | EllipsisType | None = ...) -> None:
        """Start nothing new at once; wait `grace_s` for what runs (None: for ever; left out: the yard's own), then
        interrupt it. A second call waits for the first."""
        if self._stopping is not None:
            await asyncio.shield(self._stopping)
            return
        if self._open_engine is None or self._open_store is None:
            return
        self._refuse_elsewhere()
        grace_s = self._grace_s if grace_s is ... else check_wait("grace_s", grace_s)
        engine, store = self._open_engine, self._open_store
        stopping = self._stopping = asyncio.get_running_loop().create_future()
        if self._retention is not None:
            self._retention.cancel()
        try:
            await self._unserved.close()
            await self._pause_devices()
            await engine.stop(grace_s)
            await self._close_consumers()
        finally:
            try:
                await self._close_tail()
            finally:
                self._closed()
            try:
                await store.close()
                if self._artifact_folder.is_temporary and self._artifact_folder.exists():
                    await asyncio.to_thread(self._artifact_folder.remove)
            finally:
                self._stopping = None
                stopping.set_result(None)

    # --- submitting ---------------------------------------------------------------------------------------------------

    async def submit(self, name: str, args: Mapping[str, Any] | None = None, **options: Any) -> TaskHandle:
        """Store one task for the consumer `name` and return its handle once it is safe. `options` as in `TaskOptions`:
        priority, delay_s, schedule_at, queue, key, bucket, timeout_s, retry, after, on_failure, dedupe and its kin; on
        PostgreSQL `connection` as well, which makes the task part of the transaction that is open there."""
        return await self._submit_to(
            self._get_consumer(name), args or {}, TaskOptions.of(**options) if options else DEFAULTS
        )

    async def submit_to(self, consumer: Consumer, args: Mapping[str, Any] | None = None, **options: Any) -> TaskHandle:
        """Store one task for this consumer, which may be a stand-in from the catalogue. `options` as for `submit`."""
        return await self._submit_to(consumer, args or {}, TaskOptions.of(**options) if options else DEFAULTS)

    async def _submit_to(self, consumer: Consumer, args: Mapping[str, Any], options: TaskOptions) -> TaskHandle:
        add = self._prepare(consumer, named(consumer.name, args), options)
        connection, engine = options.connection, self._engine
        (added,) = await (engine.submit(add) if connection is None else engine.submit_within(connection, add))
        return TaskHandle(self, added.uuid, added.is_new, added.until)

    async def submit_many(self, name: str, arguments: Iterable[Mapping[str, Any]], **options: Any) -> list[TaskHandle]:
        """Store one task per dict of arguments, in that order, all or nothing; at most 100,000 at once."""
        consumer = self._get_consumer(name)
        return await self._submit_many_to(consumer, arguments, TaskOptions.of(**options) if options else DEFAULTS)

    def _prepare(self, consumer: Consumer, args: dict[str, Any], options: TaskOptions) -> Add:
        """One task as the engine takes it; what is wrong with it is raised here."""
        record = make_record(consumer, args, options, now=self._clock.now(), max_bytes=self._max_payload_bytes)
        self._note_unserved((record,))
        if options is DEFAULTS:
            return Add((record,), dedupe_of(consumer, options), self._find_parent((record,)))
        return self._add([record], options, dedupe_of(consumer, options))

    def _encode(self, consumer: Consumer, given: Mapping[str, Any]) -> str:
        """Arguments as a schedule keeps them. What `produce` makes of them is asked for each time it fires."""
        args = named(consumer.name, given)
        text = to_json("args", args) if consumer.produce is not None else consumer.encode(args)
        check_size(consumer.name, text, self._max_payload_bytes)
        return text

    def _note_unserved(self, records: Sequence[TaskRecord]) -> None:
        """In a process without workers, say so later if no node serves the consumers of these."""
        if not self._is_serving and self._loop is not None and asyncio._get_running_loop() is self._loop:
            self._unserved.note(records)

    def _check_buckets(self, queue: str) -> None:
        """Say so once if this queue has none. It is no error: another process may define it, and do so later."""
        rules = self._queues.get(queue, QueueSettings(name=queue) if self._is_serving else None)
        if rules is not None and rules.order is not QueueOrder.BUCKETS and queue not in self._unbucketed:
            self._unbucketed.add(queue)
            log.warning(
                "a bucket has no effect in queue %s, which goes by %s here; define_queue it with order='buckets'",
                queue,
                rules.order,
            )

    def _check_places(self, consumer: str, requires: Iterable[str]) -> None:
        """Say so once if no place here can fit. It is no error: another process may have such a place."""
        known = self._consumers.get(consumer)
        if known is None or known.places is not None or not self._is_serving or consumer in self._placeless:
            return
        unchecked = set(requires) - {kind for check in self._checks for kind in check.kinds}
        if unchecked:
            self._placeless.add(consumer)
            text = "no place fits requires=%s here: the consumer %s has no places in this process"
            log.warning(text, ", ".join(sorted(unchecked)), consumer)

    def _add(self, records: Sequence[TaskRecord], options: TaskOptions, dedupe: Dedupe) -> Add:
        if options.requires:
            for consumer in {record.consumer for record in records}:
                self._check_places(consumer, options.requires)
        if options.bucket is not None:
            for queue in {record.queue for record in records}:
                self._check_buckets(queue)
        after = {record.uuid: options.after for record in records} if options.after else {}
        return Add(records, dedupe, self._find_parent(records), after, options.dedupe_window_s)

    async def _submit_many_to(
        self, consumer: Consumer, arguments: Iterable[Mapping[str, Any]], options: TaskOptions
    ) -> list[TaskHandle]:
        given: Any = arguments
        if not isinstance(given, Iterable) or isinstance(given, Mapping | str | bytes):
            raise InvalidInput(f"submit_many takes a list of dicts of arguments, not {quote(given)}")
        now, limit = self._clock.now(), self._max_payload_bytes
        records: list[TaskRecord] = []
        given = iter(given)
        try:
            while part := make_records(consumer, islice(given, BREATHE_EVERY), options, now=now, max_bytes=limit):
                records += part
                if len(records) > MAX_BATCH:
                    raise BatchTooLarge(MAX_BATCH)
                if len(part) == BREATHE_EVERY:
                    await asyncio.sleep(0)
        except InvalidInput as error:
            if error.item is not None:
                error.item += len(records)
                error.args = (f"item {error.item}: {error}",)
            raise
        if not records:
            return []
        self._note_unserved(records)
        add, connection = self._add(records, options, dedupe_of(consumer, options)), options.connection
        if connection is None:
            added = await self._engine.submit(add, prompt=False)
        else:
            added = await self._engine.submit_within(connection, add)
        return [TaskHandle(self, one.uuid, one.is_new, one.until) for one in added]

    def bind(self, name: str, args: Mapping[str, Any] | None = None, **options: Any) -> BoundTask:
        """A task for the consumer `name` that is to be submitted in a group: arguments and options as for `submit`."""
        checked = TaskOptions.of(**options) if options else DEFAULTS
        return BoundTask(self._get_consumer(name), named(name, args or {}), checked)

    @checked
    async def submit_group(
        self, tasks: Iterable[BoundTask], *, summary: BoundTask | None = None, connection: object = None
    ) -> Group:
        """Store tasks that belong together, all or nothing, and `summary` to run after all of them. If its consumer has
        an argument `results`, it gets what they returned, in their order; None for one that did not complete, where the
        summary's `on_failure` ignores that. Tasks of the group may wait for each other, by `after=[bound]`. It does not
        go into a transaction of your own: any `connection` is refused."""
        refuse_connection(connection)
        return await submit_group(self, tasks, summary)

    def group(self, uuid: str | UUID) -> Group:
        """A group that was submitted elsewhere, or earlier, by its id."""
        return Group(self, check_uuid(uuid))

    def _make_bound(self, bound: BoundTask, args: dict[str, Any]) -> TaskRecord:
        """The record of a bound task."""
        consumer, limit = bound.consumer, self._max_payload_bytes
        if self._get_consumer(consumer.name) is not consumer:
            raise InvalidInput(f"the consumer {quote(consumer.name)} of a bound task is that of another yard")
        record = make_record(consumer, args, bound.options, now=self._clock.now(), max_bytes=limit)
        record.uuid = bound.uuid
        record.dedupe_slot = record.dedupe_scope = None  # one of an account only waits for the others of its key
        if record.bucket is not None:
            self._check_buckets(record.queue)
        return record

    def _find_parent(self, records: Iterable[TaskRecord] = ()) -> Claim | None:
        """The run that submits, if it is one of this yard: when it is stale, it submits nothing. The tasks that it
        submits, `records`, become part of its trace."""
        run = find_run()
        if run is None or self._open_engine is None or not self._open_engine.is_ours(run.claim):
            return None
        # Code that a run has left behind submits on its own account.
        if run.has_ended:
            return None
        inherit_trace(run.claim, records)
        return run.claim

    # --- looking and steering -----------------------------------------------------------------------------------------

    def handle(self, uuid: AnyTask) -> TaskHandle:
        """The handle of a task that was submitted elsewhere, or earlier."""
        return TaskHandle(self, check_uuid(uuid))

    @checked
    async def run_again(
        self,
        uuid: AnyTask,
        args: Mapping[str, Any] | None = None,
        *,
        changes: Mapping[str, Any] | None = None,
        by: str = "",
    ) -> TaskHandle:
        """Make a new task of one that has ended, which names the old one as its `origin`: with its arguments; with
        other `args`, as `submit` takes them; or with `changes` to those that it had. A summary gets the results that
        the tasks of its group have now. `by` is who asks: it is kept in the note of the new task, until that starts."""
        return await run_again(self, check_uuid(uuid), args, changes, by=by)

    @checked
    async def run_all_again(
        self,
        where: TaskFilter = ALL_TASKS,
        *,
        changes: Mapping[str, Any] | None = None,
        repeat: bool = False,
        dry_run: bool = False,
        so_far: Callable[[RerunReport], None] | None = None,
        by: str = "",
    ) -> RerunReport:
        """The same for all that have ended and match, the oldest first; those in quarantine only if the filter names
        them, and those of which a new task was made before only to `repeat` that. So the same call again, or by two at
        once, does not run anything twice, and goes on where it was interrupted. The report names the new tasks;
        `so_far` gets it after every hundred, so that it is known what was done if this is interrupted."""
        return await run_all_again(self, where, changes, repeat=repeat, dry_run=dry_run, so_far=so_far, by=by)


def _check_latest(name: str, count: int | None) -> int | None:
    """A number of tasks to keep; None is however many."""
    if count is not None:
        check_count(name, count, least=1, most=sys.maxsize, hint=", or None to keep however many")
    return count
