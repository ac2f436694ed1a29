"""Algorithms as values: what one is called, how it wants to be run, and what is told when it goes wrong."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from taskyard.errors import InvalidInput, quote
from taskyard.model.execution import INLINE, ISOLATED, PROCESS, THREAD
from taskyard.model.given import check_count, check_gpu, check_memory, check_name, check_rate, check_timeout

SHARED = (INLINE, THREAD, PROCESS)


class ExecutionHints(msgspec.Struct, frozen=True, kw_only=True):
    """How an algorithm wants to be run. What is left out is for the place it runs in to decide.

    `executor` names the place; left out, async code runs on the loop, what needs workers of its own in an isolated
    pool, and everything else in the shared process pool. `max_workers` run at once, `queue_limit` more may wait, each
    at most `wait_s`; `rate_limit` requests a second may come, `burst` of them at once (by default as many as come in
    one second). A run may take `timeout_s`; to import and initialize the algorithm a worker process may take `load_s`
    (on the loop and in threads that is part of the first run).

    `isolated_pool`, `gpu`, `memory_limit` and `recycle_after` ask for workers of its own: `gpu` is what
    CUDA_VISIBLE_DEVICES says there (0, "0,1", "" for none), `memory_limit` the bytes a worker can allocate, and after
    `recycle_after` runs a worker is replaced."""

    executor: str | None = None
    isolated_pool: bool = False
    max_workers: int | None = None
    queue_limit: int | None = None
    wait_s: float | None = None
    timeout_s: float | None = None
    load_s: float | None = None
    rate_limit: float | None = None
    burst: int | None = None
    gpu: int | str | None = None
    memory_limit: int | None = None
    recycle_after: int | None = None

    def __post_init__(self) -> None:
        for field, value, least in (
            ("max_workers", self.max_workers, 1),
            ("queue_limit", self.queue_limit, 0),
            ("burst", self.burst, 1),
            ("recycle_after", self.recycle_after, 1),
        ):
            if value is not None:
                check_count(field, value, least=least)
        for field, seconds in (("wait_s", self.wait_s), ("timeout_s", self.timeout_s), ("load_s", self.load_s)):
            if seconds is not None:
                check_timeout(seconds, field=field)
        if not isinstance(self.isolated_pool, bool):
            raise InvalidInput(f"isolated_pool must be True or False, not {quote(self.isolated_pool)}")
        if self.rate_limit is not None:
            check_rate("rate_limit", self.rate_limit)
        if self.memory_limit is not None:
            check_memory("memory_limit", self.memory_limit)
        if self.gpu is not None:
            check_gpu(self.gpu)
        if self.executor in SHARED and self.wants_own_workers:
            raise InvalidInput(
                f"executor={self.executor!r} shares its workers; isolated_pool, gpu, memory_limit and recycle_after "
                f"need executor={ISOLATED!r}, or none named"
            )

        if self.executor in (INLINE, THREAD) and self.load_s is not None:
            why = "there the algorithm is loaded by its first run, within timeout_s"
            raise InvalidInput(f"load_s is for worker processes, not for executor={self.executor!r}: {why}")

    @property
    def wants_own_workers(self) -> bool:
        return self.isolated_pool or not (self.gpu is self.memory_limit is self.recycle_after is None)


class AlgorithmSpec(msgspec.Struct, frozen=True):
    """What an algorithm is called, and how it wants to be run. `fallback` names the algorithm that answers in its place
    while its circuit is open; without one such requests are rejected."""

    name: str
    version: str = "1"
    execution: ExecutionHints = ExecutionHints()
    description: str = ""
    fallback: str | None = None

    def __post_init__(self) -> None:
        check_name("the name of an algorithm", self.name)
        check_name(f"the version of {self.name!r}", self.version)
        if not isinstance(self.execution, ExecutionHints):
            raise InvalidInput(
                f"the execution of {self.name!r} must be ExecutionHints, such as ExecutionHints(timeout_s=5), "
                f"not {quote(self.execution)}"
            )


def choose_place(hints: ExecutionHints, *, is_async: bool) -> str:
    """Where an algorithm with these hints runs."""
    if hints.executor is not None:
        return hints.executor
    if hints.wants_own_workers:
        return ISOLATED
    return INLINE if is_async else PROCESS


class IncidentKind(StrEnum):
    TIMEOUT = "timeout"
    CRASH = "crash"
    CIRCUIT_OPENED = "circuit_opened"
    CIRCUIT_CLOSED = "circuit_closed"


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Something went wrong with an algorithm, or is right again; `at` is in POSIX seconds."""

    kind: IncidentKind
    algorithm: str
    version: str
    message: str
    at: float
    request_id: str
    trace_id: str | None = None
    worker_pid: int | None = None
