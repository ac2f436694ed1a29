"""The port of executors: places to run things, built in or made by others.

An executor gets an `ExecutionRequest`: what to call (`spec`, a `Runnable`), with what (`payload`), for how long, and
the run that it is part of (`run`, a `RunHandle`). It answers with an `ExecutionResult`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from taskyard.model.attempt import Artifact, LogLine
from taskyard.model.execution import ExecutionResult, Fact
from taskyard.model.task import Claim, TaskRecord


class Runnable(Protocol):
    """What an executor runs: a consumer, or an installed algorithm."""

    @property
    def name(self) -> str: ...

    @property
    def is_async(self) -> bool:
        """Whether `call` returns an awaitable."""
        ...

    @property
    def call(self) -> Callable[[Any], Any]:
        """Call it with the payload of the request."""
        ...

    @property
    def remote(self) -> Callable[[Any], Any] | None:
        """`call` in a form that can be pickled, for other processes; None if `call` itself can be."""
        ...


class RunHandle(Protocol):
    """The run that a request is part of, for the executor that carries it out.

    The engine tells the executor through it when the run is to end: it calls what `set_interrupt` was given. The
    executor tells the engine through it what it cannot see: that the code has started, that its time is up, that it
    goes on although `submit` was cancelled. Code that runs elsewhere, in another process, has its reports relayed with
    `report_progress`, `save_checkpoint`, `add_remark`, `keep_lines` and `keep_artifact`; these may be called from any
    thread, everything else on the event loop only."""

    @property
    def claim(self) -> Claim:
        """The task, its attempt and the token of this attempt."""
        ...

    @property
    def remote_record(self) -> TaskRecord:
        """The task as code in another process gets it: with what middleware has added, as far as JSON can hold it."""
        ...

    @property
    def artifact_folder(self) -> str | None:
        """Where code in another process writes its large artifacts; None means the default folder of this user."""
        ...

    @property
    def asyncio_task(self) -> asyncio.Task[Any] | None:
        """The asyncio task in which `submit` is awaited, if the run has one of its own."""
        ...

    @property
    def cancel_requested(self) -> bool:
        """Somebody wants this run to end. A run that ends for that reason is answered `canceled`."""
        ...

    @property
    def stop_requested(self) -> bool:
        """The node stops, and the grace for what runs is over."""
        ...

    def set_interrupt(self, interrupt: Callable[[], object], *, kill: Callable[[], object] | None = None) -> None:
        """From now on `interrupt` is called, at most once for a cancel and once for a stop, when the run is to end;
        `kill` when it is to end without grace. Neither may raise."""
        ...

    def clear_interrupt(self) -> None:
        """The code has ended: there is nothing to interrupt."""
        ...

    def mark_queued(self) -> None:
        """The executor has accepted the run and waits for a free worker. A node that stops gives it back."""
        ...

    def mark_started(self, worker_pid: int | None = None) -> None:
        """The code begins; in this process, if it is another one."""
        ...

    def mark_expired(self) -> None:
        """The run is past its timeout, and its code may look at `current_run().cancelled`."""
        ...

    def detach(self) -> None:
        """`submit` was cancelled, and the code goes on: nobody may take the run for ended."""
        ...

    def reattach(self) -> None:
        """Detached code has ended after all. Call it always: until then the task may keep its slot and its key."""
        ...

    def keep_exception(self, exc: BaseException) -> None:
        """What the code raised, for the log; it is not part of the answer."""
        ...

    def report_progress(self, fraction: Any, message: Any, rate: Any, facts: dict[str, Fact]) -> None: ...

    def save_checkpoint(self, text: str) -> None: ...

    def add_remark(self, text: object) -> None: ...

    def keep_lines(self, lines: list[LogLine]) -> None: ...

    def keep_artifact(self, artifact: Artifact) -> None: ...


class ExecutionRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One run, as handed to an executor. `spec` says what to call: a `Runnable` for an executor; a caller of
    `ExecutionDispatcher` names an algorithm. `context` is what such a caller says of itself; an executor never gets
    one. `run` is the run that it is part of, None for a bare call. `timeout_s` is for the run, `wait_s` for waiting
    until a worker is free."""

    spec: Any
    payload: Any
    request_id: str
    trace_id: str | None = None
    context: Any = None
    timeout_s: float | None = None
    wait_s: float | None = None
    run: RunHandle | None = None


class Abilities(msgspec.Struct, frozen=True):
    """What an executor can do to a run. `kills`: a timeout or cancel really ends it. `isolates`: a crash touches that
    run only. Where it cannot kill, its slot stays taken until the code ends by itself, and the record says so.
    `capacity`: how much runs at once; None has no limit of its own. `runs_code`: it runs what it is asked to; one that
    does not only answers, and asks for nothing of a request's spec but its name. `has_own_limits`: it limits and queues
    the requests of each spec by itself, and `stats(name)` tells them apart."""

    kills: bool = False
    isolates: bool = False
    capacity: int | None = None
    runs_code: bool = True
    has_own_limits: bool = False


class ExecutorStats(msgspec.Struct, frozen=True):
    """An executor at one moment: `active` requests run, `queued` ones wait for a worker, `done` ones have ended since
    it was made. `max_workers` is how many can run at once; None is without a limit."""

    max_workers: int | None = None
    active: int = 0
    queued: int = 0
    done: int = 0


class ExecutorHealth(msgspec.Struct, frozen=True):
    """Whether an executor can run requests now, and if not, why."""

    is_healthy: bool = True
    problem: str = ""


class RequestServer(Protocol):
    """Answers requests: an executor, or a dispatcher in front of several. Whatever user code does (raise, return
    nonsense, time out), `submit` answers with a result; it raises only `asyncio.CancelledError`, and only when its own
    caller is cancelled and no cancel was requested."""

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


class ExecutorProtocol(RequestServer, Protocol):
    """Runs requests, of plain functions and of async ones (`spec.is_async`) alike."""

    def stats(self, name: str | None = None) -> ExecutorStats:
        """Its numbers now; those of one spec's requests where it `has_own_limits` and a name is given."""
        ...

    def health(self) -> ExecutorHealth:
        """Whether a request that comes now would be run. A closed executor is not healthy."""
        ...


ExecutorFactory = Callable[[], ExecutorProtocol]
"""Makes an executor, on the event loop that it will belong to: a class that needs no arguments, or a function."""
