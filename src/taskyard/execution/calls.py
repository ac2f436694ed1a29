"""One call on its way through a pool: waiting, running, being ended, answered. Belongs to the event loop."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from taskyard.execution.progress_values import keep_facts
from taskyard.execution.wire import Bulk, Kind, WireError
from taskyard.execution.worker_run import Call, card_of
from taskyard.model.attempt import Artifact, LogLine
from taskyard.model.execution import ErrorKind, ExecutionError, ExecutionResult
from taskyard.ports.executor import RunHandle
from taskyard.ports.explain import canceled, timed_out

if TYPE_CHECKING:
    from taskyard.execution.hosted import HostedWorker


_decode_lines = msgspec.msgpack.Decoder(list[LogLine]).decode
_decode_artifact = msgspec.msgpack.Decoder(Artifact).decode

_PLAIN = frozenset({int, float, str, bool, type(None)})


class PendingCall:
    """`verdict` is how it will be answered when its worker is gone, once that is decided."""

    worker: HostedWorker | None = None
    verdict: ExecutionError | None = None
    waiting: asyncio.TimerHandle | None = None
    wait_until_mono: float | None = None
    """Until when it may wait for a worker, by its loop's clock; also when it has to wait again."""
    ending: asyncio.TimerHandle | None = None
    is_new = is_over = is_asked = is_undelivered = False
    returns = 0
    """How often a worker died before it had all of it."""
    number = 0
    marks = 0
    """Added to those of its frame."""
    started_at = 0.0
    _buried: asyncio.Future[None] | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        wait_s: float | None = None,
        run: RunHandle | None = None,
        record_first: bool = False,
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs or {}
        self.timeout_s, self.wait_s, self.run, self.record_first = timeout_s, wait_s, run, record_first
        self.future: asyncio.Future[ExecutionResult] = asyncio.get_running_loop().create_future()

    @property
    def key(self) -> tuple[str, str]:
        """What a worker has to import for it."""
        return key_of(self.function)

    @property
    def is_by_name(self) -> bool:
        """Whether its function crosses as a name. A copy may change between two calls, what a name means does not."""
        function = self.function
        kind = type(function)
        if kind is FunctionType:
            return True
        if kind is BuiltinFunctionType:
            return isinstance(function.__self__, ModuleType)  # type: ignore[attr-defined]
        return getattr(kind, "crosses_by_name", False)

    def body(self, number: int | None) -> Call:
        """What its worker gets, with the function by the number it has there, if any."""
        args, kwargs = self.args, self.kwargs
        if args and not _PLAIN.issuperset(map(type, args)):
            args = tuple([Bulk.of(arg) for arg in args])
        if kwargs:
            kwargs = {name: Bulk.of(arg) for name, arg in kwargs.items()}
        card = None if self.run is None else card_of(self.run)
        return self.function if number is None else number, args, kwargs, card, self.record_first

    def load_s(self, default_s: float) -> float:
        """How long a worker may take to load its function, which may ask for another time than the pool's."""
        asked_s: float | None = getattr(self.function, "load_s", None)
        return default_s if asked_s is None else asked_s

    def begin(self) -> None:
        self.started_at = time.time()
        if self.run is not None:
            self.run.mark_started(None if self.worker is None else self.worker.pid)

    def hear(self, kind: Kind, said: Any) -> None:
        """What its code says of itself."""
        run = self.run
        if run is None:
            return
        if kind is Kind.NOTE:
            run.add_remark(said)
        elif kind is Kind.CHECKPOINT:
            if not isinstance(said, str):
                raise WireError("a checkpoint that is none")
            run.save_checkpoint(said)
        elif kind is Kind.PROGRESS:
            try:
                fraction, message, rate, facts = said
                run.report_progress(fraction, message, rate, keep_facts(dict(**facts)))
            except (TypeError, ValueError) as exc:
                raise WireError(f"PROGRESS frame: {exc}") from None
        else:
            _hear_kept(run, kind, said)

    def expire(self, default_load_s: float) -> None:
        """Its time is up, to load or to run: its worker is killed."""
        error = timed_out(self.timeout_s or 0.0)
        if self.is_new:
            why = getattr(self.function, "loading", "its code could not be imported")
            message = f"{why} within {self.load_s(default_load_s):g} s"
            error = ExecutionError(kind=ErrorKind.TIMEOUT, message=message, types=error.types)
        self.verdict = error

    def answer(self, result: ExecutionResult) -> None:
        self.is_over = True
        for timer in (self.waiting, self.ending):
            if timer is not None:
                timer.cancel()
        self.worker = self.waiting = self.ending = None
        if not self.future.done():  # its caller may have gone
            self.future.set_result(result)
        if self._buried is not None and not self._buried.done():
            self._buried.set_result(None)

    def fail(self, error: ExecutionError, *, worker_pid: int | None = None) -> None:
        now = time.time()
        self.answer(
            ExecutionResult(
                success=False, error=error, started_at=self.started_at or now, ended_at=now, worker_pid=worker_pid
            )
        )

    def give_up(self) -> None:
        """It never began, and will not."""
        if self.run is not None and self.run.cancel_requested:
            self.fail(canceled("canceled while it waited for a worker"))
        else:
            message = "it was interrupted while it waited for a worker"
            self.fail(ExecutionError(kind=ErrorKind.REJECTED, message=message))

    async def buried(self, told: Callable[[], object]) -> None:
        """Wait until it is over, whoever else has stopped waiting for it. `told` is called then, also if this wait is
        cancelled before."""
        if self.is_over:
            told()
            return
        self._buried = asyncio.get_running_loop().create_future()
        self._buried.add_done_callback(lambda _: told())
        await asyncio.shield(self._buried)


def _hear_kept(run: RunHandle, kind: Kind, said: Any) -> None:
    """Lines and artifacts of a run, as msgpack."""
    try:
        if kind is Kind.LINES:
            run.keep_lines(_decode_lines(said))
        elif kind is Kind.ARTIFACT:
            run.keep_artifact(_decode_artifact(said))
    except (TypeError, msgspec.DecodeError) as exc:
        raise WireError(f"{kind.name} frame: {exc}") from None


def key_of(function: Any) -> tuple[str, str]:
    """What a worker has to import for it."""
    try:
        return function.__module__, function.__qualname__
    except AttributeError:
        pass
    if isinstance(function, functools.partial):
        return key_of(function.func)
    key: tuple[str, str] | None = getattr(function, "wire_key", None)
    return key or (type(function).__module__, type(function).__qualname__)
