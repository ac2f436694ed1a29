"""The code that does a task: as users write it, and as the engine sees it."""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from taskyard.errors import (
    DuplicateConsumer,
    InvalidArguments,
    InvalidConsumer,
    InvalidInput,
    TaskyardError,
    UnknownConsumer,
    quote,
)
from taskyard.model.catalogue import ConsumerSpec
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import DEFAULT_QUEUE, Task, TaskRecord
from taskyard.ports.middleware import Middleware
from taskyard.ports.places import Places

log = logging.getLogger("taskyard")


class Schemas(NamedTuple):
    """The JSON schemas of a consumer's arguments and result; None if one is not known."""

    args: dict[str, Any] | None = None
    result: dict[str, Any] | None = None


NO_SCHEMAS = Schemas()


@dataclass(frozen=True, slots=True)
class Consumer:
    """What the engine knows of a consumer, be it a decorated function or an instance of a class.

    `encode` checks arguments and turns them into the JSON that is stored, or raises `InvalidInput`; `encode_many`, if
    there is one, does so for several in less time. `call` runs one record and returns its result, or an awaitable of it
    when `is_async`. `produce`, where there is one, makes the task of the arguments first; `warm_up` does what would
    otherwise hold up the first run, `close` lets go of what runs here have left loaded. `remote` is `call` in a form
    that can be pickled, for executors in other processes. `takes_results` says that it has an argument `results`, which
    is filled when it is a group's summary. `places` are where its tasks run, one at a time each; without any, as many
    run at once as `concurrency` says. `version` is that of its code or of its algorithm. `middleware` goes around its
    submits and runs, inside that of the yard. `schemas` makes the JSON schemas of its arguments and its result.
    `function` is the user's own code that `call` calls, for a debugger to find. `account` names the argument that is
    the account of a task on a device: the task has its key, and is refused while the account is queued or busy.
    `bucket_by` names the requirement that is the bucket of a task."""

    name: str
    encode: Callable[[Mapping[str, Any]], str]
    call: Callable[[TaskRecord], Any]
    is_async: bool
    executor: str
    queue: str = DEFAULT_QUEUE
    concurrency: int = 1
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    produce: Callable[[dict[str, Any]], Task] | None = None
    warm_up: Callable[[], None] | None = None
    close: Callable[[], Awaitable[None]] | None = None
    remote: Callable[[TaskRecord], Any] | None = None
    takes_results: bool = False
    encode_many: Callable[[Iterable[Mapping[str, Any]]], list[str]] | None = None
    places: Places | None = None
    version: str | None = None
    middleware: tuple[Middleware, ...] = ()
    schemas: Callable[[], Schemas] | None = None
    function: Callable[..., Any] | None = None
    account: str = ""
    bucket_by: str = ""

    @property
    def slots(self) -> int:
        """How many of its tasks run at once on one node."""
        return self.concurrency if self.places is None else len(self.places)

    def make_task(self, args: dict[str, Any]) -> Task | None:
        """The task that `produce` makes of the arguments; None without it. An exception of its code is
        `InvalidArguments`."""
        if self.produce is None:
            return None
        try:
            task = self.produce(args)
        except TaskyardError:
            raise
        except Exception as exc:
            why = traceback.format_exception_only(exc)[0].strip()
            raise InvalidArguments(self.name, [f"produce of {self.name!r} failed: {why}"]) from exc
        if not isinstance(task, Task):
            raise InvalidInput(f"produce of {self.name!r} returned {quote(task)}; return a Task")
        if task.source != self.name:
            raise InvalidInput(f"produce of {self.name!r} made a task for {quote(task.source)}; set source=self.name")
        return task

    def spec(self, version: str = "") -> ConsumerSpec:
        """What the catalogue of a store has of it. `version` is that of the application."""
        schemas = NO_SCHEMAS if self.schemas is None else self.schemas()
        produce = getattr(self.produce, "__func__", self.produce)
        return ConsumerSpec(
            name=self.name,
            queue=self.queue,
            executor=self.executor,
            version=self.version or version,
            args=schemas.args,
            result=schemas.result,
            timeout_s=self.timeout_s,
            has_produce=produce is not None and produce is not BaseTaskConsumer.produce,
            account=self.account,
            bucket_by=self.bucket_by,
        )


class BaseTaskConsumer(ABC):
    """Subclass it, give it a unique `name`, and write `produce` and `consume`. An attribute `concurrency` may stand for
    `concurrent_count`."""

    name: str = ""
    concurrent_count: int = 1

    def produce(self, args: dict[str, Any]) -> Task:
        """Make a task of `args`; override it to check them or to choose when it is due."""
        return Task(source=self.name, args=args)

    @abstractmethod
    async def consume(self, task: Task) -> Any:
        """Do the work. What it returns is kept as the result (JSON)."""


class ConsumerChange(StrEnum):
    """What a subscriber is told of a consumer."""

    REGISTERED = "registered"
    UNREGISTERED = "unregistered"


ConsumerListener = Callable[[str, ConsumerChange], None]
"""Called with the consumer's name and what became of it, when it is so, by whoever did it and on that one's thread."""


class ConsumerListeners:
    """Those who are told of consumers that come and go. One that raises is logged, and harms nobody else."""

    def __init__(self) -> None:
        self._listeners: dict[object, ConsumerListener] = {}

    def subscribe(self, listener: ConsumerListener) -> Callable[[], None]:
        """From now on, until the function that is returned is called."""
        key = object()
        self._listeners[key] = listener

        def unsubscribe() -> None:
            self._listeners.pop(key, None)

        return unsubscribe

    def tell(self, name: str, change: ConsumerChange) -> None:
        for listener in list(self._listeners.values()):
            try:
                listener(name, change)
            except Exception:
                log.exception("a subscriber failed when consumer %s was %s", name, change)


class TaskConsumerRegistry:
    """Consumers by name. `TaskConsumerRegistry.default()` is the one instance that is shared by all who ask for it.

    They may come and go while schedulers run on it: one that is registered is served from then on, one that is
    unregistered gets nothing more. Runs of it that are going on come to their end."""

    _default: TaskConsumerRegistry | None = None

    def __init__(self) -> None:
        self.sources: dict[str, BaseTaskConsumer] = {}
        self._listeners = ConsumerListeners()

    @classmethod
    def default(cls) -> TaskConsumerRegistry:
        if cls._default is None:
            cls._default = cls()
        return cls._default

    def register(self, source: BaseTaskConsumer) -> None:
        if not source.name:
            raise InvalidConsumer(f"{type(source).__name__} has no name; set the class attribute `name`")
        if source.name in self.sources:
            raise DuplicateConsumer(source.name)
        self.sources[source.name] = source
        self._listeners.tell(source.name, ConsumerChange.REGISTERED)

    def unregister(self, name: str) -> None:
        """Take a consumer out; its name may be used again. `UnknownConsumer` if there is none."""
        if self.sources.pop(name, None) is None:
            raise UnknownConsumer(name, self.sources)
        self._listeners.tell(name, ConsumerChange.UNREGISTERED)

    def subscribe(self, listener: ConsumerListener) -> Callable[[], None]:
        """Call `listener(name, change)` whenever a consumer was registered or unregistered, on the thread where that
        was done, until the function that is returned is called."""
        return self._listeners.subscribe(listener)

    def find(self, name: str) -> BaseTaskConsumer | None:
        return self.sources.get(name)
