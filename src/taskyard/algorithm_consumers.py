"""Algorithms as consumers of a yard: stored as tasks, and run when it is their turn, by the code that also runs direct
calls. The arguments of such a task are the fields of the `Input`, its result is the `Output` as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import cached_property
from typing import Any

from taskyard.consumers import Signature, check_consumer, check_executor, check_places, fitting, make_schema
from taskyard.errors import InvalidAlgorithm, NotJson
from taskyard.execution.algorithm import Algorithm, AlgorithmContext
from taskyard.execution.context import find_values
from taskyard.execution.installed import AsyncResident, Installed, Payload, RemoteAlgorithm, Resident, settle_in
from taskyard.execution.isolated import settings_for
from taskyard.execution.pool_settings import PoolSettings
from taskyard.model.algorithm import AlgorithmSpec, choose_place
from taskyard.model.execution import ISOLATED, PROCESS
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import DEFAULT_QUEUE, TaskRecord
from taskyard.ports.consumer import Consumer, Schemas
from taskyard.ports.middleware import Middleware, check_middleware
from taskyard.ports.places import Place, Places


def algorithm_consumer(
    algorithm: type[Algorithm] | Callable[..., Any],
    spec: AlgorithmSpec | None = None,
    *,
    queue: str = DEFAULT_QUEUE,
    concurrency: int | None = None,
    retry: RetryPolicy | None = None,
    places: Places | Iterable[Place | str] | None = None,
    middleware: Iterable[Middleware] = (),
) -> tuple[Consumer, PoolSettings | None]:
    """A consumer of an algorithm, and the pool it wants for itself. `concurrency` is by default the `max_workers`
    of its hints, or else 1."""
    installed = Installed(algorithm, spec)
    name, hints = installed.name, installed.spec.execution
    form = TaskForm(name, installed.takes, installed.gives)
    place = check_executor(name, choose_place(hints, is_async=installed.is_async), installed.is_async)
    count = concurrency if concurrency is not None else hints.max_workers or 1

    def call(record: TaskRecord) -> Any:
        return form.result(installed.call(form.payload(record)))

    async def call_async(record: TaskRecord) -> Any:
        return form.result(await installed.call(form.payload(record)))

    consumer = Consumer(
        name=name,
        encode=form.encode,
        call=call_async if installed.is_async else call,
        is_async=installed.is_async,
        executor=place,
        **check_consumer(name, queue=queue, concurrency=count, timeout_s=hints.timeout_s, retry=retry),
        warm_up=form.warm_up,
        close=installed.close,
        remote=RemoteTask(installed.spec, algorithm) if place in (PROCESS, ISOLATED) else None,
        takes_results="results" in getattr(form.takes, "model_fields", ()),
        places=check_places(name, places, 1 if concurrency is None else concurrency),
        version=installed.spec.version,
        schemas=lambda: form.schemas,
        middleware=check_middleware(middleware),
        function=getattr(algorithm, "run", algorithm) if isinstance(algorithm, type) else algorithm,
    )
    return consumer, settings_for(hints, workers=consumer.slots) if place == ISOLATED else None


class TaskForm(Signature):
    """From a task's arguments to the input of an algorithm, and from its output to a task's result."""

    def __init__(self, name: str, takes: Any, gives: Any) -> None:
        self.name, self.takes, self._gives = name, takes, gives

    @cached_property
    def adapter(self) -> Any:
        return _adapter(self.name, self.takes)

    @cached_property
    def is_plain(self) -> bool:
        return False  # nearly always a model

    @cached_property
    def is_json(self) -> bool:
        return False

    @cached_property
    def schemas(self) -> Schemas:
        return Schemas(
            make_schema(self.adapter, mode="validation"),
            make_schema(_adapter(self.name, self._gives), mode="serialization"),
        )

    @cached_property
    def _dump(self) -> Callable[..., Any]:
        dump: Callable[..., Any] = _adapter(self.name, self._gives).dump_python
        return dump

    def warm_up(self) -> None:
        _ = self.adapter, self._dump

    def payload(self, record: TaskRecord) -> Payload:
        return Payload(
            fitting(self.name, self.decode, record.args), AlgorithmContext(request_id=record.uuid, values=find_values())
        )

    def result(self, value: Any) -> Any:
        try:
            return self._dump(value, mode="json", by_alias=True)
        except ValueError as exc:
            raise NotJson(f"the output of {self.name!r}", str(exc)) from None


def _adapter(name: str, hint: Any) -> Any:
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

    try:
        return TypeAdapter(hint)
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation) as exc:
        raise InvalidAlgorithm(name, f"JSON cannot carry its input or output: {exc}") from None


class RemoteTask(RemoteAlgorithm):
    """The algorithm on its way to a worker process that runs its tasks."""

    def __reduce__(self) -> tuple[Any, ...]:
        return settle_in_task, (self.spec, *self._where)


class ResidentTask:
    """The instance of a worker process, as its tasks call it."""

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        self._form = TaskForm(resident.spec.name, resident.algorithm.Input, resident.algorithm.Output)
        self._form.warm_up()

    def __call__(self, record: TaskRecord) -> Any:
        outcome = self._resident(self._form.payload(record))
        return self._finish(outcome) if isinstance(self._resident, AsyncResident) else self._form.result(outcome)

    async def _finish(self, outcome: Awaitable[Any]) -> Any:
        return self._form.result(await outcome)


def settle_in_task(spec: AlgorithmSpec, module: str, path: str) -> ResidentTask:
    return ResidentTask(settle_in(spec, module, path))
