"""A place to run things."""

from __future__ import annotations

from typing import Protocol

import msgspec

from taskyard.model.execution import ExecutionRequest, ExecutionResult


class Abilities(msgspec.Struct, frozen=True):
    """What an executor can do to a run. `kills`: a timeout or cancel really ends it. `isolates`: a crash touches that
    run only. Where it cannot kill, its slot stays taken until the code ends by itself, and the record says so.
    `capacity`: how much runs at once; None has no limit of its own. `runs_code`: it runs what it is asked to; one that
    does not only answers, and asks for nothing of a request's spec but its name."""

    kills: bool = False
    isolates: bool = False
    capacity: int | None = None
    runs_code: bool = True


class ExecutorProtocol(Protocol):
    """Runs requests, of plain functions and of async ones (`spec.is_async`) alike. Whatever user code does (raise,
    return nonsense, time out), `submit` answers with a result; it raises only `asyncio.CancelledError`, and only when
    its own caller is cancelled and no cancel was asked."""

    @property
    def abilities(self) -> Abilities: ...

    async def start(self) -> None:
        """Optional: warm up. Idempotent. After a shutdown it opens the executor again, whatever still runs."""
        ...

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        """Run the request. A request beyond the executor's capacity is answered `rejected` without having run."""
        ...

    async def shutdown(self, *, wait: bool = True) -> None:
        """Take nothing new; with `wait`, return when what runs has ended, to everyone who waits."""
        ...
