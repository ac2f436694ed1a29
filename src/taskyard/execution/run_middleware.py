"""Middleware around runs and around their code: how one function leads to the next, here and in worker processes."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from taskyard.errors import InvalidInput, MiddlewareFault, quote
from taskyard.execution.context import RunContext, current_run
from taskyard.model.execution import ExecutionResult
from taskyard.ports.middleware import AroundCode, AroundRun, Middleware, name_of

_NOTHING = object()


async def run_around(
    around: Sequence[AroundRun],
    run: RunContext,
    submit: Callable[[], Awaitable[ExecutionResult]],
    passed: Callable[[AroundRun, ExecutionResult], None],
) -> ExecutionResult:
    """Call the middleware, and `submit` inside of it. Raises what the middleware raises. `passed` is told of each
    function that gets the result of its `call_next()`."""
    if not around:
        return await submit()
    function, *rest = around
    has_called = False

    async def call_next() -> ExecutionResult:
        nonlocal has_called
        if has_called:
            raise MiddlewareFault(name_of(function), "called call_next() twice, but an attempt runs once")
        has_called = True
        result = await run_around(rest, run, submit, passed)
        passed(function, result)
        return result

    result: Any = await function(run, call_next)
    if not isinstance(result, ExecutionResult):
        raise MiddlewareFault(name_of(function), f"returned {quote(result)}; return the result of call_next()")
    return result


def list_around_code(middleware: Sequence[Middleware]) -> tuple[AroundCode, ...]:
    return tuple(one.around_code for one in middleware if one.around_code is not None)


class CodeInside:
    """A `Runnable` with middleware around its code, also in worker processes. Raises `InvalidInput` for async
    middleware around code that is not async."""

    def __init__(self, spec: Any, around: tuple[AroundCode, ...]) -> None:
        if not spec.is_async:
            for one in around:
                if inspect.isasyncgenfunction(one):
                    raise InvalidInput(
                        f"middleware {name_of(one)} is async, but the consumer {quote(spec.name)} is a plain function",
                        hint="write it as a plain generator, or use around_run",
                    )
        self._spec, self._around = spec, around
        self.name: str = spec.name
        self.is_async: bool = spec.is_async
        self.call: Callable[[Any], Any] = CodeCall(spec.call, around, spec.is_async)

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of the consumer or the algorithm."""
        return getattr(self._spec, name)

    @property
    def remote(self) -> Callable[[Any], Any] | None:
        code = self._spec.remote
        if code is None:
            return None
        kind = NamedRemoteCode if getattr(type(code), "crosses_by_name", False) else RemoteCode
        return kind(code, self._around, self.is_async)


@dataclass(frozen=True)
class CodeCall:
    """Calls code with middleware around it, in the process where the code runs."""

    code: Callable[[Any], Any]
    around: tuple[AroundCode, ...]
    is_async: bool

    def __call__(self, payload: Any) -> Any:
        return self._call_async(payload) if self.is_async else self._call_plain(payload)

    def _call_plain(self, payload: Any) -> Any:
        run, value = current_run(), _NOTHING
        with ExitStack() as stack:
            for one in self.around:
                stack.enter_context(_open(one, run))
            value = self.code(payload)
        return self._check(value)

    async def _call_async(self, payload: Any) -> Any:
        run, value = current_run(), _NOTHING
        async with AsyncExitStack() as stack:
            for one in self.around:
                manager = _open(one, run)
                if hasattr(manager, "__aenter__"):
                    await stack.enter_async_context(manager)
                else:
                    stack.enter_context(manager)
            value = await self.code(payload)
        return self._check(value)

    def _check(self, value: Any) -> Any:
        if value is _NOTHING:
            names = ", ".join(map(name_of, self.around))
            raise MiddlewareFault(names, "swallowed what the code raised; let exceptions pass through `yield`")
        return value


class RemoteCode(CodeCall):
    """The same on its way to a worker process. The middleware crosses by its name, so it must stand at the top level of
    a module."""

    crosses_by_name: ClassVar = False

    @property
    def wire_key(self) -> tuple[str, str]:
        """What a worker has to load for it."""
        key: tuple[str, str] | None = getattr(self.code, "wire_key", None)
        module, path = key or (type(self.code).__module__, type(self.code).__qualname__)
        names = [f"{getattr(one, '__module__', '')}.{name_of(one)}" for one in self.around]
        return module, f"{path} inside {', '.join(names)}"

    @property
    def load_s(self) -> float | None:
        return getattr(self.code, "load_s", None)

    @property
    def loading(self) -> str:
        return getattr(self.code, "loading", "its code could not be imported")


class NamedRemoteCode(RemoteCode):
    """The same of code that is always found under one name, so that a worker loads it once."""

    crosses_by_name: ClassVar = True


def _open(function: AroundCode, run: RunContext) -> Any:
    """The context manager that a middleware function stands for."""
    if inspect.isgeneratorfunction(function):
        return contextmanager(function)(run)
    if inspect.isasyncgenfunction(function):
        return asynccontextmanager(function)(run)
    return function(run)
