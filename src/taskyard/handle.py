"""What `submit` returns, and the function a decorator turns into a consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import msgspec

from taskyard.consumers import Signature
from taskyard.errors import ResultGone, TaskCanceled, TaskFailed, TaskSkipped, UnknownTask
from taskyard.model.given import check_wait
from taskyard.model.state import COMPLETED, TaskState
from taskyard.model.task import Outcome, TaskRecord, new_uuid
from taskyard.options import DEFAULTS, TaskOptions
from taskyard.ports.consumer import Consumer

if TYPE_CHECKING:
    from taskyard.yard import Yard

P = ParamSpec("P")
R = TypeVar("R")


class TaskHandle(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One task of a yard, known by its `uuid`. A handle can be made of an id alone: `yard.handle(uuid)`. `is_new` is
    false if `submit` found the same work and merged into it; if that stands for a window, `until` is when it ends."""

    _yard: Yard
    uuid: str
    is_new: bool = True
    until: datetime | None = None

    def __repr__(self) -> str:
        return f"TaskHandle({self.uuid!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskHandle) and other.uuid == self.uuid

    def __hash__(self) -> int:
        return hash(self.uuid)

    async def result(self, *, timeout_s: float | None = None) -> Any:
        """What the task returned, when it has ended, wherever it ran. Raises `TaskFailed`, `TaskCanceled`,
        `TaskSkipped` or `ResultGone`; `TimeoutError` when `timeout_s` passes first (the task goes on)."""
        if timeout_s is not None:
            timeout_s = check_wait("timeout_s", timeout_s)
        engine = self._yard._engine
        if (known := engine.find_outcome(self.uuid)) is not None:
            return value_of(known)
        waiter = engine.outcome(self.uuid, timeout_s)
        try:
            return value_of(await waiter)
        except asyncio.CancelledError:
            engine.forget_outcome(self.uuid, waiter)
            raise

    async def record(self) -> TaskRecord:
        """Everything that is stored of the task now."""
        record = await self._yard.store.find(self.uuid)
        if record is None:
            raise UnknownTask(self.uuid)
        return record

    async def state(self) -> TaskState:
        return (await self.record()).state

    async def is_served(self) -> bool:
        """Whether a live node has the consumer of this task now. If none has, the task waits until a worker is started
        that has it. This reads the store; a submit does not."""
        record = await self.record()
        return (await self._yard.catalogue()).is_served(record.consumer)

    async def cancel(self, *, reason: str = "") -> TaskRecord:
        """Ask for it to end; see `Yard.cancel`."""
        return await self._yard.cancel(self.uuid, reason=reason)


class BoundTask(msgspec.Struct, frozen=True, eq=False):
    """A task that is not submitted yet: a consumer, arguments and options, and the uuid that it will have. Others of
    its group may wait for it: `fetched = fetch.bind(url)`, then `shrink.options(after=[fetched]).bind(path)`."""

    consumer: Consumer
    args: dict[str, Any]
    options: TaskOptions
    uuid: str = msgspec.field(default_factory=new_uuid)


def value_of(outcome: Outcome) -> Any:
    """The result, or the error that says how the task ended instead."""
    if outcome.state is COMPLETED:
        return None if outcome.result is None else msgspec.json.decode(outcome.result)
    error = outcome.error
    match outcome.state:
        case TaskState.FAILED if error is not None:
            raise TaskFailed(
                outcome.uuid,
                kind=error.kind,
                message=error.text,
                error_type=error.type,
                traceback=error.traceback,
            )
        case TaskState.CANCELED:
            raise TaskCanceled(outcome.uuid, outcome.cancel_text)
        case TaskState.SKIPPED:
            raise TaskSkipped(outcome.uuid)
        case _:
            raise ResultGone(outcome.uuid)


class ConsumerFunction(Generic[P, R]):
    """A function that was made a consumer. Calling it runs it here and now, as if it had not been decorated."""

    def __init__(
        self,
        yard: Yard,
        function: Callable[P, R],
        consumer: Consumer,
        signature: Signature,
        options: TaskOptions = DEFAULTS,
    ) -> None:
        self._yard = yard
        self._function = function
        self._signature = signature
        self._options = options
        self.consumer = consumer
        self.__name__ = consumer.name
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<consumer {self.consumer.name!r}>"

    def options(self, **options: Any) -> ConsumerFunction[P, R]:
        """The same consumer with other options for the next submits: `fetch.options(priority="high", delay_s=5)`."""
        given = {name: getattr(self._options, name) for name in TaskOptions.__struct_fields__} | options
        checked = TaskOptions.of(**given)
        return ConsumerFunction(self._yard, self._function, self.consumer, self._signature, checked)

    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle:
        """Store the task and return its handle once it is safe."""
        yard = self._yard
        yard._check_served(self.consumer)
        add = yard._prepare(self.consumer, self._signature.bind(args, kwargs), self._options)
        connection, engine = self._options.connection, yard._engine
        if connection is not None:
            (added,) = await engine.submit_within(connection, add)
        else:
            (added,) = engine.submit_now(add) or await engine.submit(add, prompt=False)
        return TaskHandle(yard, added.uuid, added.is_new, added.until)

    def bind(self, *args: Any, **kwargs: Any) -> BoundTask:
        """The consumer with these arguments and options, to be submitted in a group (see `Yard.submit_group`), which
        may add an argument: what the others return."""
        return BoundTask(self.consumer, self._signature.bind(args, kwargs), self._options)

    async def submit_many(self, arguments: Iterable[Mapping[str, Any]]) -> list[TaskHandle]:
        """Store one task per dict of arguments, in that order, all or nothing; at most 100,000 at once."""
        self._yard._check_served(self.consumer)
        return await self._yard._submit_many_to(self.consumer, arguments, self._options)
