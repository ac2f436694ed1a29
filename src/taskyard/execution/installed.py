"""An algorithm made ready to run: its input checked in the host, its instances kept in the workers.

In a worker process there is one instance, made when the first call that names the algorithm is unpickled: that is part
of loading, like the import, so a slow `initialize` is not held against the first request's timeout. In this process
(threads, the loop) there are as many as ever ran at once, because an instance never serves two runs at a time; one
whose `run` is async stays with the event loop it was initialized on.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import inspect
import logging
from collections import deque
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, get_type_hints

from taskyard.errors import InvalidAlgorithm, InvalidArguments, InvalidOutput, quote, shorten
from taskyard.execution.algorithm import Algorithm, AlgorithmContext, find_fault
from taskyard.execution.code_loop import find_loop_here, loop_here
from taskyard.execution.context import find_context
from taskyard.execution.said import LOG_FIELDS
from taskyard.execution.wire import Bulk
from taskyard.model.algorithm import AlgorithmSpec
from taskyard.model.execution import ISOLATED, PROCESS

log = logging.getLogger("taskyard")


class Payload(NamedTuple):
    """What executors carry to an algorithm: its input, checked, and for whom."""

    given: Any
    context: AlgorithmContext

    def __reduce__(self) -> tuple[Any, ...]:
        return Payload, (Bulk.of(self.given), self.context)  # an input that is bytes is not copied into the pickle


class FunctionAlgorithm(Algorithm):
    """A function of the input, or of the input and the context."""

    def __init__(self, spec: AlgorithmSpec, function: Callable[..., Any]) -> None:
        self.spec = spec
        self.function = function
        parameters = list(inspect.signature(function).parameters.values())
        if not 1 <= len(parameters) <= 2:
            raise InvalidAlgorithm(spec.name, "its function must take the input, and the context if it wants it")
        try:
            hints = get_type_hints(function)
        except NameError as exc:
            raise InvalidAlgorithm(spec.name, f"{exc}; import that type where the function is defined") from None
        self.Input, self.Output = hints.get(parameters[0].name, Any), hints.get("return", Any)
        self._takes_context = len(parameters) == 2

    def run(self, given: Any, context: AlgorithmContext, /) -> Any:
        return self.function(given, context) if self._takes_context else self.function(given)


class Resident:
    """One instance, and how one run goes."""

    def __init__(self, spec: AlgorithmSpec, algorithm: Algorithm) -> None:
        self.spec, self.algorithm = spec, algorithm
        self._fit = fitter(algorithm.Output)

    def settle(self) -> None:
        """In a worker process, before its first call."""
        self.open()
        atexit.register(self.close)

    def open(self) -> None:
        self.algorithm.initialize()

    def close(self) -> None:
        try:
            self.algorithm.shutdown()
        except Exception:
            log.exception("algorithm %s: shutdown failed", self.spec.name)

    def __call__(self, payload: Payload) -> Any:
        given, context = payload.given, payload.context.bind(self.spec, find_context())
        mark = LOG_FIELDS.set(context.fields)
        try:
            return self._run(given, context)
        finally:
            LOG_FIELDS.reset(mark)

    def _run(self, given: Any, context: AlgorithmContext) -> Any:
        try:
            value = self._check(self.algorithm.run(given, context))
        except BaseException as exc:
            try:
                self.algorithm.after_run(context, exc)
            except Exception:
                context.logger.exception("after_run failed too")
            raise
        self.algorithm.after_run(context, None)
        return value

    def _check(self, value: Any) -> Any:
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError(f"algorithm {quote(self.spec.name)} returned a coroutine; write it as `async def run`")
        try:
            return self._fit(value)
        except ValueError as exc:
            raise InvalidOutput(self.spec.name, problems(exc)) from None


class AsyncResident(Resident):
    """The same for one whose `run` is async: a call is a coroutine."""

    def settle(self) -> None:
        loop_here().run(self.open_async())
        loop_here().at_close(self.close_async)

    def __call__(self, payload: Payload) -> Any:
        return self.call_async(payload)

    async def open_async(self) -> None:
        await _awaited(self.algorithm.initialize())

    async def close_async(self) -> None:
        try:
            await _awaited(self.algorithm.shutdown())
        except Exception:
            log.exception("algorithm %s: shutdown failed", self.spec.name)

    async def call_async(self, payload: Payload) -> Any:
        given, context = payload.given, payload.context.bind(self.spec, find_context())
        mark = LOG_FIELDS.set(context.fields)
        try:
            value = self._check(await self.algorithm.run(given, context))
        except BaseException as exc:
            try:
                await _awaited(self.algorithm.after_run(context, exc))
            except Exception:
                context.logger.exception("after_run failed too")
            raise
        else:
            await _awaited(self.algorithm.after_run(context, None))
        finally:
            LOG_FIELDS.reset(mark)
        return value


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class Installed:
    """What executors see of an algorithm: `name`, `is_async`, `call`, and `remote` for other processes."""

    def __init__(self, target: type[Algorithm] | Callable[..., Any], spec: AlgorithmSpec | None = None) -> None:
        self.spec = spec_of(target) if spec is None else spec
        self.name, self._target = self.spec.name, target
        if isinstance(target, type):
            if not issubclass(target, Algorithm):
                raise InvalidAlgorithm(self.name, f"{target.__name__} is a class, and must be a subclass of Algorithm")
            if (fault := find_fault(target)) is not None:
                raise InvalidAlgorithm(self.name, fault)
            run, self.takes, self.gives = target.run, target.Input, target.Output
        else:
            algorithm = FunctionAlgorithm(self.spec, target)
            run, self.takes, self.gives = target, algorithm.Input, algorithm.Output
        self.is_async = inspect.iscoroutinefunction(run)
        self.call: Callable[[Payload], Any] = self._call_async if self.is_async else self._call
        self._idle: deque[Any] = deque()

    @cached_property
    def remote(self) -> RemoteAlgorithm:
        return RemoteAlgorithm(self.spec, self._target)

    @cached_property
    def _fit(self) -> Callable[[Any], Any]:
        return fitter(self.takes)

    def check_place(self, place: str) -> None:
        """`InvalidAlgorithm` if it cannot run there as it is written."""
        if place in (PROCESS, ISOLATED):
            _ = self.remote

    def warm_up(self) -> None:
        """Import Pydantic and read the types now, not while the first request waits."""
        _ = self._fit
        fitter(self.gives)

    def check(self, payload: Any) -> Any:
        """The payload as an `Input`, or `InvalidArguments`. One that is an `Input` already passes as it is."""
        try:
            return self._fit(payload)
        except ValueError as exc:
            raise InvalidArguments(self.name, problems(exc)) from None

    def _call(self, payload: Payload) -> Any:
        try:
            resident = self._idle.pop()
        except IndexError:
            resident = make_resident(self.spec, self._target)
            resident.open()
        try:
            return resident(payload)
        finally:
            self._idle.append(resident)

    async def _call_async(self, payload: Payload) -> Any:
        here = find_loop_here()
        idle = self._idle if here is None else here.kept.setdefault(self, deque())
        try:
            resident = idle.pop()
        except IndexError:
            resident = AsyncResident(self.spec, make_algorithm(self.spec, self._target))
            await resident.open_async()
            if here is not None:
                here.at_close(resident.close_async)
        try:
            return await resident.call_async(payload)
        finally:
            idle.append(resident)

    async def close(self) -> None:
        """Shut down the instances of this process; nothing runs any more."""
        while self._idle:
            resident = self._idle.pop()
            if self.is_async:
                await resident.close_async()
            else:
                await asyncio.to_thread(resident.close)


class RemoteAlgorithm:
    """An algorithm on its way to a worker process, by name; there it becomes the `Resident` of that worker."""

    crosses_by_name = True

    def __init__(self, spec: AlgorithmSpec, target: Callable[..., Any]) -> None:
        module, path = getattr(target, "__module__", None), getattr(target, "__qualname__", "<")
        if module is None or "<" in path:
            raise InvalidAlgorithm(
                spec.name, "it cannot be found by a worker process; define it at the top level of a module"
            )
        self.spec, self._where = spec, (module, path)
        self.load_s = spec.execution.load_s
        self.loading = "its code could not be imported"
        if getattr(target, "initialize", Algorithm.initialize) is not Algorithm.initialize:
            self.loading = "its code could not be imported and its `initialize` be done"
        # A worker that knows the class under another name has yet to load this one.
        self.wire_key = (module, f"{path} as {spec.name} {spec.version}")

    def __reduce__(self) -> tuple[Any, ...]:
        return settle_in, (self.spec, *self._where)

    def __call__(self, given: Any) -> Any:
        raise NotImplementedError("it runs in a worker process only")


_residents: dict[tuple[AlgorithmSpec, str, str], Resident] = {}


def settle_in(spec: AlgorithmSpec, module: str, path: str) -> Resident:
    """In a worker process: its instance, made and initialized by the first call that names it."""
    key = spec, module, path
    resident = _residents.get(key)
    if resident is None:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        resident = make_resident(spec, found)
        resident.settle()
        _residents[key] = resident
    return resident


def make_algorithm(spec: AlgorithmSpec, target: Any) -> Algorithm:
    if isinstance(target, type):
        algorithm: Algorithm = target()
        return algorithm
    return FunctionAlgorithm(spec, target)


def make_resident(spec: AlgorithmSpec, target: Any) -> Resident:
    kind = AsyncResident if inspect.iscoroutinefunction(getattr(target, "run", target)) else Resident
    return kind(spec, make_algorithm(spec, target))


def spec_of(target: Any) -> AlgorithmSpec:
    spec = getattr(target, "spec", None)
    if not isinstance(spec, AlgorithmSpec):
        name = getattr(target, "__name__", type(target).__name__)
        raise InvalidAlgorithm(name, "it has no spec; give it one, such as AlgorithmSpec('name', '1.0')")
    return spec


@lru_cache(maxsize=256)
def _adapter(hint: Any) -> Callable[[Any], Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(hint).validate_python


def fitter(hint: Any) -> Callable[[Any], Any]:
    """What brings a value into the form of `hint`, or raises a `ValueError`."""
    return (lambda value: value) if hint is Any else _adapter(hint)


def problems(exc: ValueError) -> list[str]:
    from pydantic import ValidationError

    if not isinstance(exc, ValidationError):
        return [shorten(str(exc))]
    errors = exc.errors(include_url=False, include_input=False, include_context=False)
    return [f"{shorten('.'.join(map(str, e['loc']))) or 'input'}: {e['msg']}" for e in errors]
