"""Algorithms as users write them, and what one sees of the request that it serves."""

from __future__ import annotations

import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from taskyard.execution.context import RunContext
from taskyard.execution.said import RunLogger
from taskyard.model.algorithm import AlgorithmSpec


class AlgorithmContext:
    """For whom a request is served. Make one to say so (`tenant`, `user`, `values`); the algorithm gets it with the
    rest filled in, in whatever process it runs. `request_id` and `trace_id` are those of the request."""

    def __init__(
        self,
        *,
        tenant: str | None = None,
        user: str | None = None,
        values: Mapping[str, Any] | None = None,
        request_id: str = "",
        trace_id: str | None = None,
    ) -> None:
        self.request_id, self.trace_id = request_id, trace_id
        self.tenant, self.user = tenant, user
        self.values: Mapping[str, Any] = dict(values or {})
        self._spec: AlgorithmSpec | None = None
        self._run: RunContext | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Only what was said crosses to another process; the run there is another object.
        return _remake, (self.request_id, self.trace_id, self.tenant, self.user, self.values)

    def of_request(self, request_id: str, trace_id: str | None) -> AlgorithmContext:
        """The same for one request."""
        return _remake(request_id, trace_id or self.trace_id, self.tenant, self.user, self.values)

    def bind(self, spec: AlgorithmSpec, run: RunContext | None) -> AlgorithmContext:
        """The same inside a run."""
        bound = self.of_request(self.request_id, self.trace_id)
        bound._spec, bound._run = spec, run
        return bound

    # --- for the code inside ------------------------------------------------------------------------------------------

    @property
    def algorithm(self) -> str | None:
        return None if self._spec is None else self._spec.name

    @property
    def version(self) -> str | None:
        return None if self._spec is None else self._spec.version

    @property
    def attempt(self) -> int:
        """1 for the first run of the request."""
        return 1 if self._run is None else self._run.attempt

    @property
    def worker_pid(self) -> int:
        """The process that this is."""
        return os.getpid()

    @property
    def cancelled(self) -> bool:
        """Whether the run should end: a cancel, a stop, or its deadline."""
        return self._run is not None and self._run.cancelled

    def progress(self, fraction: float | None = None, message: str = "", rate: float | None = None) -> None:
        """Say how far the run is. Cheap: what comes too often is thinned out."""
        if self._run is not None:
            self._run.progress(fraction, message, rate)

    @property
    def checkpointed(self) -> Any:
        """What was saved last with `checkpoint`, by this try or an earlier one; None if nothing was."""
        return None if self._run is None else self._run.checkpointed

    def checkpoint(self, data: Any) -> None:
        """Save how far the work is, as JSON, for the next try."""
        if self._run is not None:
            self._run.checkpoint(data)

    @property
    def fields(self) -> dict[str, Any]:
        """What every log line of the run carries."""
        said = {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "tenant": self.tenant,
            "user": self.user,
            "algorithm": self.algorithm,
            "version": self.version,
            "worker_pid": self.worker_pid,
        }
        return {name: value for name, value in said.items() if value is not None}

    @cached_property
    def logger(self) -> RunLogger:
        """Its lines carry the ids above, and reach the handlers of the host."""
        name = "taskyard.algorithm" if self.algorithm is None else f"taskyard.algorithm.{self.algorithm}"
        return RunLogger(logging.getLogger(name), self.fields)


def _remake(
    request_id: str, trace_id: str | None, tenant: str | None, user: str | None, values: Mapping[str, Any]
) -> AlgorithmContext:
    return AlgorithmContext(tenant=tenant, user=user, values=values, request_id=request_id, trace_id=trace_id)


class Algorithm(ABC):
    """Subclass it, name it with a `spec`, say what it takes and gives (Pydantic models, or any types Pydantic knows),
    and write `run`. One instance serves one run after the other and stays loaded as long as its worker lives. With an
    async `run` all four may be async."""

    spec: AlgorithmSpec
    Input: Any = Any
    Output: Any = Any

    def initialize(self) -> Any:  # noqa: B027 -- optional, as the two below
        """Once per worker, before its first run: load what is needed for all of them."""

    @abstractmethod
    def run(self, given: Any, context: AlgorithmContext, /) -> Any:
        """The work: from an `Input` to an `Output`."""

    def after_run(self, context: AlgorithmContext, error: BaseException | None, /) -> Any:  # noqa: B027
        """After each run, also one that failed: `error` is what it raised. Not after one that was killed."""

    def shutdown(self) -> Any:  # noqa: B027
        """When the worker retires; not when it is killed. It has about a second."""


_TAKES = {"initialize": "", "run": "given, context", "after_run": "context, error", "shutdown": ""}


def find_fault(algorithm: type[Algorithm]) -> str | None:
    """What would keep instances of it from being made or called, in words; None if nothing would."""
    if inspect.isabstract(algorithm):
        return "it has no `run`; write `def run(self, given, context)`"
    if not _takes(algorithm, ()):
        return "its constructor must need no arguments, because workers make their own instances"
    for hook, names in _TAKES.items():
        method = getattr(algorithm, hook)
        given = tuple(names.split(", ")) if names else ()
        if not isinstance(inspect.getattr_static(algorithm, hook), staticmethod | classmethod):
            given = ("self", *given)
        if not _takes(method, given):
            return f"its `{hook}` cannot be called as {hook}({names}); write `def {hook}({', '.join(given)})`"
        if inspect.iscoroutinefunction(method) and not inspect.iscoroutinefunction(algorithm.run):
            return f"its `{hook}` is async and its `run` is not, so nobody would await it; write both the same way"
    return None


def _takes(function: Callable[..., Any], given: tuple[str, ...]) -> bool:
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        return False
    except ValueError:  # it has no signature that Python could tell
        pass
    return True
