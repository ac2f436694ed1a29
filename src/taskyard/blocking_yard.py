"""The blocking face of a yard, and of what it hands out: queues, all tasks that match, groups, schedules.

Every verb is that of the async face, with its arguments and its docstring: it runs on the yard's loop, and is waited
for.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar
from uuid import UUID

from taskyard.blocking import run_on
from taskyard.errors import NotOpen, UnusableConnection
from taskyard.execution.context import find_run
from taskyard.group import Group
from taskyard.handle import BoundTask, TaskHandle
from taskyard.model.audit import CODE
from taskyard.model.given import AnyTask
from taskyard.model.task import DEFAULT_QUEUE, TaskRecord
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.queueing.controller import QueueController, TaskSteering
from taskyard.queueing.matching import BulkReport, Matching
from taskyard.schedules import Schedules
from taskyard.yard import Yard

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class Face(ABC, Generic[S_co]):
    """The verbs of `target`, for a thread that waits for what they give or raise."""

    def __init__(self, target: S_co) -> None:
        self._target = target

    @abstractmethod
    def _call(self, what: str, coroutine: Coroutine[Any, Any, T]) -> T: ...


def verb(of: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Face[S], P], T]:
    """The blocking form of an async method."""

    @wraps(of)
    def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(of.__name__, of(self._target, *args, **kwargs))

    return call


async def _do(make: Callable[[], T]) -> T:
    """What has to be made on the loop."""
    return make()


class TaskFace(Face[S_co]):
    """The verbs for one task, of a yard and of a queue."""

    cancel = verb(TaskSteering.cancel)
    retry = verb(TaskSteering.retry)
    set_priority = verb(TaskSteering.set_priority)
    hold = verb(TaskSteering.hold)
    release = verb(TaskSteering.release)
    skip = verb(TaskSteering.skip)
    start_now = verb(TaskSteering.start_now)
    move = verb(TaskSteering.move)
    reschedule = verb(TaskSteering.reschedule)


class BlockingYard(TaskFace[Yard]):
    """`with yard.blocking() as sync:` — if the yard is open on a loop in another thread, calls go there; if it is not
    open, it is opened on a loop in a thread of its own until the block ends, with its workers unless `serve=False`.
    Threads that are in such blocks at once share that loop, and the last one to leave closes the yard.

    Its verbs are those of `Yard`, save `events`, which is for a loop; what `queue`, `matching`, `group`,
    `submit_group` and `schedules` give blocks as well."""

    def __init__(self, yard: Yard, *, serve: bool = True) -> None:
        super().__init__(yard)
        self._yard, self._serve = yard, serve
        self._entered: list[tuple[asyncio.AbstractEventLoop, bool]] = []
        self.schedules = BlockingSchedules(yard.schedules, self)

    def __enter__(self) -> BlockingYard:
        own, loop = self._yard._own_loop, self._yard._loop
        # A task of the yard only borrows its loop: the last to leave waits for the task, so it must not wait for him.
        if loop is not None and (loop is not own.loop or find_run() is not None):
            self._entered.append((loop, False))
        else:
            self._entered.append((own.enter(self._yard, serve=self._serve), True))
        return self

    def __exit__(self, *exc: object) -> None:
        _, shares = self._entered.pop()
        if shares:
            self._yard._own_loop.leave(self._yard)

    def _call(self, what: str, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self._entered:
            coroutine.close()
            raise NotOpen(f"{what} was called outside of the block; use it inside `with yard.blocking() as sync:`")
        return run_on(self._entered[-1][0], self._yard, what, coroutine)

    # --- submitting ---------------------------------------------------------------------------------------------------

    def submit(self, name: str, args: Mapping[str, Any] | None = None, **options: Any) -> TaskHandle:
        _refuse_connection(options)
        return self._call("submit", self._yard.submit(name, args, **options))

    def submit_many(self, name: str, arguments: Iterable[Mapping[str, Any]], **options: Any) -> list[TaskHandle]:
        _refuse_connection(options)
        return self._call("submit_many", self._yard.submit_many(name, arguments, **options))

    def submit_group(
        self, tasks: Iterable[BoundTask], *, summary: BoundTask | None = None, connection: object = None
    ) -> BlockingGroup:
        submitting = self._yard.submit_group(tasks, summary=summary, connection=connection)
        return BlockingGroup(self._call("submit_group", submitting), self)

    # --- looking and steering -----------------------------------------------------------------------------------------

    why = verb(Yard.why)
    why_many = verb(Yard.why_many)
    why_all = verb(Yard.why_all)
    attempts = verb(Yard.attempts)
    log_lines = verb(Yard.log_lines)
    artifacts = verb(Yard.artifacts)
    read_artifact = verb(Yard.read_artifact)
    run_again = verb(Yard.run_again)
    run_all_again = verb(Yard.run_all_again)
    failures = verb(Yard.failures)
    queues = verb(Yard.queues)
    catalogue = verb(Yard.catalogue)
    audit = verb(Yard.audit)
    drain = verb(Yard.drain)
    prune = verb(Yard.prune)

    def result(self, task: AnyTask, *, timeout_s: float | None = None) -> Any:
        """What the task returned, when it has ended; see `TaskHandle.result`."""
        return self._call("result", self._yard.handle(task).result(timeout_s=timeout_s))

    def record(self, task: AnyTask) -> TaskRecord:
        """Everything that is stored of the task now."""
        return self._call("record", self._yard.handle(task).record())

    def queue(self, name: str = DEFAULT_QUEUE, *, by: str = CODE) -> BlockingQueue:
        """Everything a person can do to a queue; see `QueueController`."""
        return BlockingQueue(self._call("queue", _do(lambda: self._yard.queue(name, by=by))), self)

    def matching(self, where: TaskFilter = ALL_TASKS, *, by: str = "") -> BlockingMatching:
        """All tasks that match, to do something with; see `Matching`."""
        return BlockingMatching(self._call("matching", _do(lambda: self._yard.matching(where, by=by))), self)

    @property
    def devices(self) -> BlockingDevices:
        """The devices of the store; see `Yard.devices`."""
        return BlockingDevices(self._yard.devices, self)

    def group(self, uuid: str | UUID) -> BlockingGroup:
        """A group that was submitted elsewhere, or earlier, by its id."""
        return BlockingGroup(self._yard.group(uuid), self)


class _Part(Face[S_co]):
    """The face of something that a yard has handed out."""

    def __init__(self, target: S_co, sync: BlockingYard) -> None:
        super().__init__(target)
        self._sync = sync

    def _call(self, what: str, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._sync._call(what, coroutine)


class BlockingQueue(_Part[QueueController], TaskFace[QueueController]):
    status = verb(QueueController.status)
    order = verb(QueueController.order)
    pause = verb(QueueController.pause)
    resume = verb(QueueController.resume)
    stop_after_current = verb(QueueController.stop_after_current)
    set_concurrency = verb(QueueController.set_concurrency)

    def matching(self, where: TaskFilter | None = None) -> BlockingMatching:
        """All tasks of this queue that match, to do something with."""
        return BlockingMatching(self._target.matching(where), self._sync)


class BlockingMatching(_Part[Matching]):
    @property
    def report(self) -> BulkReport:
        """What the last command has done so far; see `Matching.report`."""
        return self._target.report

    count = verb(Matching.count)
    cancel = verb(Matching.cancel)
    retry = verb(Matching.retry)
    skip = verb(Matching.skip)
    hold = verb(Matching.hold)
    release = verb(Matching.release)
    set_priority = verb(Matching.set_priority)
    reschedule = verb(Matching.reschedule)
    start_now = verb(Matching.start_now)
    apply = verb(Matching.apply)


class BlockingGroup(_Part[Group]):
    def __init__(self, target: Group, sync: BlockingYard) -> None:
        super().__init__(target, sync)
        self.id, self.tasks = target.id, target.tasks

    @property
    def summary(self) -> TaskHandle:
        return self._target.summary

    progress = verb(Group.progress)
    cancel = verb(Group.cancel)
    retry = verb(Group.retry)


class BlockingDevices(_Part[Any]):
    """The verbs of `Devices`, found by their names: a yard without devices does not import that class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        async_verb = getattr(self._target, name)

        @wraps(async_verb)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, async_verb(*args, **kwargs))

        return call


class BlockingSchedules(_Part[Schedules]):
    add = verb(Schedules.add)
    put = verb(Schedules.put)
    remove = verb(Schedules.remove)
    pause = verb(Schedules.pause)
    resume = verb(Schedules.resume)
    run_now = verb(Schedules.run_now)
    run_each = verb(Schedules.run_each)
    backfill = verb(Schedules.backfill)
    get = verb(Schedules.get)
    list_all = verb(Schedules.list_all)
    list_fires = verb(Schedules.list_fires)
    next_fires = verb(Schedules.next_fires)


def _refuse_connection(options: Mapping[str, Any]) -> None:
    if options.get("connection") is not None:
        raise UnusableConnection(
            "a connection belongs to the event loop it was made on, and yard.blocking() runs on another; await "
            "yard.submit(…, connection=…) on the connection's own"
        )
