"""A pool of devices: what users put into it, submit to it and ask of it.

A pool is a queue of the same name whose places are its devices. It decides nothing itself: the store refuses
duplicates, the engine hands the head of the queue to a device that is free, an actor runs it there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import msgspec

from taskyard.device_consumers import PoolPart, check_device_settings, device_class, device_function, plain_class
from taskyard.device_schedules import ListsAccounts, choose_rule, list_for
from taskyard.devices.consumer import DeviceConsumer
from taskyard.devices.definitions import AccountId, DeviceDefinition, GameAccount
from taskyard.devices.pool_settings import PoolSettings, check_devices, check_kinds
from taskyard.devices.quarantine import AccountWatch
from taskyard.devices.roster import Roster
from taskyard.devices.server import PoolServer
from taskyard.errors import (
    AccountQuarantined,
    DuplicateTask,
    InvalidArguments,
    InvalidConsumer,
    InvalidInput,
    UnknownConsumer,
    quote,
)
from taskyard.handle import ConsumerFunction
from taskyard.model.device import RunFilter, read_account
from taskyard.model.given import check_count, check_name
from taskyard.model.order import Priority
from taskyard.model.queue import QueueOrder
from taskyard.model.retry import RetryPolicy
from taskyard.model.schedule import Schedule
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task import Dedupe, DedupeScope, Task, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.options import DEFAULTS, TaskOptions, make_record
from taskyard.ports.consumer import BaseTaskConsumer, Consumer
from taskyard.ports.device import DeviceStore
from taskyard.ports.middleware import Middleware, SubmitNext
from taskyard.ports.paging import task_pages
from taskyard.ports.places import Places
from taskyard.ports.store import Add

if TYPE_CHECKING:
    from taskyard.yard import Yard

log = logging.getLogger("taskyard.devices")

P = ParamSpec("P")
R = TypeVar("R")

NO_RETRIES = RetryPolicy(max_retries=0)
"""A wait before the next attempt would hold up the queue. The program that enqueued the task decides."""

WARNINGS_KEPT = 100
"""Sets of labels: a program may ask for any number of different ones that no device has."""

WAITING = tuple(state for state in TaskState if state not in ENDED and state is not TaskState.RUNNING)


class QueueItem(msgspec.Struct, frozen=True, kw_only=True):
    """A task that waits for a device. Its priority is kept and has no effect on the order."""

    task_id: str
    account_id: int | str | None
    task_type: str
    priority: str
    enqueue_ts: datetime


class RunningItem(msgspec.Struct, frozen=True, kw_only=True):
    """A task that runs on a device. `emulator_id` is None if the device was removed meanwhile."""

    account_id: int | str | None
    task_type: str
    emulator_id: int | None
    device: str | None
    task_id: str
    started_at: datetime | None
    node: str | None


@dataclass(frozen=True, kw_only=True)
class TaskRun:
    """One run of a task on a device. `worker_id` is the name of the device, `artifacts` are those of this run. It is a
    dataclass, so that a route of FastAPI may return it."""

    task_id: str
    account_id: int | str | None
    task_type: str
    worker_id: str
    emulator_id: int | None
    start: datetime
    finished_at: datetime | None
    status: str
    error: str = ""
    artifacts: tuple[str, ...] = ()


class DevicePool:
    """Devices that run the tasks of their consumers in strict order, one at a time each. `yard.device_pool` makes it.

    A task is enqueued for an account: of each account one task runs at a time, and one task of each consumer waits."""

    def __init__(
        self,
        yard: Yard,
        name: str,
        settings: PoolSettings,
        *,
        devices: Iterable[DeviceDefinition] = (),
        adapters: Iterable[type[DeviceDefinition]] = (),
    ) -> None:
        self._yard, self.name = yard, check_name("the name of a pool", name)
        self.definitions = check_devices(devices)
        self.kinds = check_kinds(adapters, self.definitions.values())
        self.bucket_by = settings.bucket_by
        self.places = Places()
        self.executor = f"devices:{self.name}"
        self._part = PoolPart(self.name, self.executor, self.places, Middleware(around_submit=self._around_submit))
        self._warned: dict[str, None] = {}
        self._store: object = None
        self.roster = Roster(self.name, self._find_store)
        order = QueueOrder.FIFO if self.bucket_by is None else QueueOrder.BUCKETS
        yard.define_queue(self.name, order=order, per_key=1, auto_recover=settings.auto_recover, retry=NO_RETRIES)
        self.server = PoolServer(
            self.name,
            definitions=self.definitions,
            adapters=self.kinds,
            places=self.places,
            roster=self.roster,
            accounts=AccountWatch(self.name, settings.quarantine_account_after, yard._clock),
            clock=yard._clock,
            settings=settings.for_actor(),
        )
        yard._own_executors[self.executor] = self.server.make_executor
        self._forget_sink: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<device pool {self.name!r}>"

    # --- of its yard --------------------------------------------------------------------------------------------------

    async def define(self, store: object) -> None:
        """Put the devices of the program into a store that is being opened."""
        await self.server.define(device_store(store))

    def begin(self) -> None:
        """The node has joined: serve devices."""
        yard = self._yard
        if (most := yard._settings.max_running) < len(self.definitions):
            text = "the pool %s has %d devices, but this node runs %d tasks at once: give the yard a larger max_running"
            log.warning(text, self.name, len(self.definitions), most)
        self._forget_sink = yard.add_sink(self.server)
        self.server.begin(yard.store, lambda: yard._engine.incarnation, yard._engine.name)

    async def pause(self) -> None:
        """The node is about to stop."""
        if self._forget_sink is not None:
            self._forget_sink()
            self._forget_sink = None
        await self.server.pause()

    def look(self) -> None:
        """Somebody has changed something in this process."""
        self.server.look()

    # --- consumers ----------------------------------------------------------------------------------------------------

    @overload
    def consumer(self, function: Callable[P, R], /) -> ConsumerFunction[P, R]: ...

    @overload
    def consumer(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        middleware: Iterable[Middleware] = (),
        version: str = "",
    ) -> Callable[[Callable[P, R]], ConsumerFunction[P, R]]: ...

    def consumer(self, function: Callable[..., Any] | None = None, /, **settings: Any) -> Any:
        """Make an async function a consumer that runs on the devices of this pool. A parameter with the annotation
        `Device` gets the device, one with `GameAccount` the account; the rest are arguments of the task."""
        check_device_settings(settings)
        if function is None:
            return lambda given: self._decorate(given, settings)
        return self._decorate(function, settings)

    def _decorate(self, function: Callable[..., Any], settings: dict[str, Any]) -> ConsumerFunction[..., Any]:
        consumer, signature = device_function(self._part, function, **settings)
        consumer = self._add(consumer)
        return ConsumerFunction(self._yard, function, consumer, signature)

    def register(self, consumer: DeviceConsumer | BaseTaskConsumer) -> None:
        """Add a consumer in its class form: with `prepare`, `ensure_ui`, `execute` and `cleanup`, or with `consume`."""
        match consumer:
            case DeviceConsumer():
                self._add(device_class(self._part, consumer))
            case BaseTaskConsumer():
                self._add(plain_class(self._part, consumer))
            case _:
                raise InvalidConsumer(f"{quote(consumer)} is no instance of DeviceConsumer")

    def _add(self, consumer: Consumer) -> Consumer:
        if self.bucket_by is not None:
            consumer = replace(consumer, bucket_by=self.bucket_by)
        self._yard._register(consumer)
        return consumer

    @property
    def consumers(self) -> dict[str, Consumer]:
        """The consumers of this pool by name."""
        return {name: one for name, one in self._yard.consumers.items() if one.places is self.places}

    def _get_consumer(self, name: str) -> Consumer:
        found = self._yard.consumers.get(name)
        if found is None or found.places is not self.places:
            raise UnknownConsumer(name, self.consumers, hint=f"register it in the pool {quote(self.name)} first")
        return found

    # --- submitting ---------------------------------------------------------------------------------------------------

    async def enqueue(
        self,
        task: Task,
        account: AccountId,
        *,
        requires: Mapping[str, str] | None = None,
        priority: Priority | str | int | None = None,
        title: str = "",
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        submitted_by: str = "",
    ) -> bool:
        """Put the task at the tail of the queue. False if a task of this account and consumer waits already, if any
        task of the account runs, or if this account and consumer are quarantined; the log says which.

        One `Task` may be enqueued again and again: each time makes a stored task whose `origin` is its `uuid`. A
        `schedule_at` in the future is waited for. The priority is kept and has no effect on the order."""
        record = self._make_record(
            task,
            account,
            requires=requires or {},
            title=title,
            labels=labels or {},
            timeout_s=timeout_s,
            submitted_by=submitted_by,
            **({} if priority is None else {"priority": priority}),
        )
        extra = {"queue": self.name, "consumer": record.consumer, "account": record.key}
        try:
            add = Add((record,), Dedupe.REFUSE, self._yard._find_parent((record,)))
            await self._yard._engine.submit(add)
        except (DuplicateTask, AccountQuarantined) as refused:
            text = "%s for account %s was not enqueued: %s"
            log.info(text, record.consumer, record.key, _why_refused(refused), extra=extra)
            return False
        extra["task"] = record.uuid
        log.info("task %s enqueued: %s for account %s", record.uuid, record.consumer, record.key, extra=extra)
        return True

    def _make_record(self, task: Task, account: AccountId, **given: Any) -> TaskRecord:
        if not isinstance(task, Task):
            raise InvalidInput(f"enqueue takes a Task, not {quote(task)}")
        account = GameAccount.of(account)
        consumer, args, now = self._get_consumer(task.source), dict(task.args), self._yard.now()
        if consumer.account:
            if consumer.account in args:
                raise InvalidArguments(consumer.name, [f"{consumer.account}: is the account that is enqueued"])
            args[consumer.account] = account
        if task.schedule_at > now:
            given["schedule_at"] = task.schedule_at
        asked = {name: value for name, value in given.items() if value not in (None, "", {})}
        if not consumer.account:
            # Otherwise these follow from its argument.
            asked |= {"key": account.key, "dedupe_key": account.key, "dedupe": "refuse", "dedupe_scope": "key_idle"}
        options = TaskOptions.of(**asked) if asked else DEFAULTS
        record = make_record(consumer, args, options, now=now, max_bytes=self._yard._max_payload_bytes)
        record.origin = task.uuid
        self._yard._note_unserved((record,))
        return record

    def schedule(
        self,
        consumer: str | ConsumerFunction[..., Any],
        *,
        accounts: ListsAccounts,
        cron: str | None = None,
        every_s: float | None = None,
        zone: str | None = None,
        name: str | None = None,
        args: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Schedule:
        """Make a task of this consumer for each account, at the times of `cron` or every `every_s` seconds; before the
        yard is opened. `accounts` are ids or `GameAccount`s, or a function that returns a list of them. An account that
        is queued or runs anything, and one that is quarantined with this consumer, is skipped and counted. The schedule
        is called as the consumer, unless it has a `name`; `settings` as for `yard.schedules.define`."""
        found = self._get_consumer(consumer.consumer.name if isinstance(consumer, ConsumerFunction) else consumer)
        each, rule = list_for(found, accounts), choose_rule(cron, every_s)
        settings = {"zone": zone, "each": each, "dedupe_scope": DedupeScope.KEY_IDLE} | settings
        return self._yard.schedules.define(name or found.name, rule, found.name, args, **settings)

    async def _around_submit(self, submission: Any, call_next: SubmitNext) -> None:
        """Around every submit to a consumer of this pool, in whatever way it is made."""
        for draft in submission.tasks:
            await self._warn_of_labels(draft.requires)
        await call_next()
        self.server.note_length()

    async def _warn_of_labels(self, requires: dict[str, str]) -> None:
        """Say so once if no device fits. It is no error: one may be added."""
        wanted = ", ".join(f"{name}={value}" for name, value in sorted(requires.items()))
        if self.roster.has_device_for(requires):
            self._warned.pop(wanted, None)
        elif wanted not in self._warned:
            await self.roster.look()  # what was read last may be old
            if self.roster.has_device_for(requires):
                return
            if len(self._warned) >= WARNINGS_KEPT:
                del self._warned[next(iter(self._warned))]
            self._warned[wanted] = None
            missing = f"device with {wanted}" if wanted else "device"
            log.warning("the pool %s has no %s: tasks that need one wait until it is added", self.name, missing)

    # --- looking ------------------------------------------------------------------------------------------------------

    async def is_queued(self, account_id: int | str, task_type: str) -> bool:
        """Whether a task of this account and consumer waits, here or on another node."""
        return await self._has(WAITING, account_id, task_type)

    async def is_running(self, account_id: int | str) -> bool:
        """Whether a task of this account runs, here or on another node."""
        return await self._has((TaskState.RUNNING,), account_id)

    async def _has(self, states: Sequence[TaskState], account_id: int | str, task_type: str | None = None) -> bool:
        key = GameAccount(account_id).key
        where = TaskFilter(states=tuple(states), queue=self.name, key=key, consumer=task_type)
        return bool(await self._yard.store.list_ids(where, limit=1))

    async def queue_info(self, *, limit: int = 100) -> list[dict[str, Any]]:
        """The tasks that wait, first to start first, then those that are held, blocked or wait for their time: the
        fields of `QueueItem`."""
        order = await self._yard.queue(self.name).order(limit=limit)
        items = [
            QueueItem(
                task_id=entry.uuid,
                account_id=_account(entry.key),
                task_type=entry.consumer,
                priority=Priority(entry.priority).name.lower(),
                enqueue_ts=entry.created_at,
            )
            for entry in [*order.waiting, *order.apart][:limit]
        ]
        return [msgspec.structs.asdict(item) for item in items]

    async def running_info(self) -> list[dict[str, Any]]:
        """The tasks that run on devices, here or on other nodes, the longest first: the fields of `RunningItem`."""
        where = TaskFilter(states=(TaskState.RUNNING,), queue=self.name)
        records = [record async for page in task_pages(self._yard.store.list_tasks, where) for record in page]
        await self.roster.look()
        numbers = self.roster.numbers()
        items = [
            RunningItem(
                account_id=_account(record.key),
                task_type=record.consumer,
                emulator_id=numbers.get(record.device or ""),
                device=record.device,
                task_id=record.uuid,
                started_at=record.started_at,
                node=record.node,
            )
            for record in sorted(records, key=lambda record: record.started_at or record.created_at)
        ]
        return [msgspec.structs.asdict(item) for item in items]

    async def task_runs(
        self,
        *,
        account_id: int | str | None = None,
        task_type: str | None = None,
        device: str | None = None,
        limit: int = 100,
    ) -> list[TaskRun]:
        """The runs on the devices of this pool, the newest first, with the names of what they have left behind."""
        store = self._find_store()
        account = None if account_id is None else GameAccount(account_id).key
        where = RunFilter(pool=self.name, device=device, account=account, consumer=task_type)
        found = await store.list_device_runs(where, limit=check_count("limit", limit, least=1))
        await self.roster.look()
        numbers, kept = (
            self.roster.numbers(),
            {task: await self._artifacts(task) for task in {run.task for _, run in found}},
        )
        return [
            TaskRun(
                task_id=run.task,
                account_id=_account(run.account),
                task_type=run.consumer,
                worker_id=run.device,
                emulator_id=numbers.get(run.device),
                start=run.started_at,
                finished_at=run.finished_at,
                status=run.outcome,
                error=run.error,
                artifacts=kept[run.task].get(run.attempt, ()),
            )
            for _, run in found
        ]

    async def _artifacts(self, task: str) -> dict[int, tuple[str, ...]]:
        """The names of what each attempt of a task has left behind."""
        store, names = self._yard.store, dict[int, tuple[str, ...]]()
        artifacts = await store.list_artifacts(task)
        if artifacts:
            numbers = {attempt.token: attempt.attempt for attempt in await store.list_attempts(task)}
            for token, artifact in artifacts:
                number = numbers.get(token, 0)
                names[number] = (*names.get(number, ()), artifact.name)
        return names

    def _find_store(self) -> DeviceStore:
        store = self._yard.store
        if store is not self._store:  # to check a store takes longer than to ask one in memory
            self._store = device_store(store)
        return self._store  # type: ignore[return-value]


def _why_refused(refused: DuplicateTask | AccountQuarantined) -> str:
    """Why `enqueue` answers False, in the words of its caller, who gives no `dedupe`."""
    if isinstance(refused, AccountQuarantined):
        return "this account and consumer are quarantined; `release` takes tasks again"
    if refused.state == "running":
        return f"task {refused.existing} of this account runs"
    return f"task {refused.existing} of this account and consumer has not ended"


def _account(key: str | None) -> int | str | None:
    return None if not key else read_account(key)


def device_store(store: object) -> DeviceStore:
    """The store as one of devices; `InvalidInput` if it keeps none."""
    if not isinstance(store, DeviceStore):
        raise InvalidInput(f"a {type(store).__name__} keeps no devices; use a store of Taskyard")
    return store
