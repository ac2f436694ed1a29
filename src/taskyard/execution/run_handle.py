"""One attempt on its node: as the runner and the dispatcher steer it, and as executors carry it out.

`RunHandle` has the engine's half of a run; user code sees the other one, `RunContext`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from taskyard.errors import NotJson
from taskyard.execution.context import BaseRun
from taskyard.execution.progress_values import PROGRESS_INTERVAL_S, clamp_fraction, clip_text, finite_number
from taskyard.execution.run_lines import HostLines, utc_now
from taskyard.model.attempt import Artifact, LogLine
from taskyard.model.execution import ExecutionResult, Fact, Progress
from taskyard.model.notes import Note, NoteCode
from taskyard.model.task import NO_EXTRA, Claim, TaskRecord, to_json
from taskyard.ports.clock import Clock
from taskyard.ports.consumer import Consumer
from taskyard.ports.store import Report

DEFAULT_CANCEL_GRACE_S = 5.0
"""Seconds: how long a run that is cancelled may clean up before it is warned of."""


class RunHost:
    """What all runs of a node share: the loop they belong to, where their reports go, where their large artifacts are
    written (None: the default folder of this user), and how long a cancelled one may clean up."""

    __slots__ = ("artifact_folder", "cancel_grace_s", "loop", "now", "report", "thread")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[Report], None],
        *,
        now: Callable[[], datetime] = utc_now,
        artifact_folder: Path | None = None,
        cancel_grace_s: float = DEFAULT_CANCEL_GRACE_S,
    ) -> None:
        self.loop, self.report, self.now = loop, report, now
        self.cancel_grace_s = cancel_grace_s
        self.artifact_folder = None if artifact_folder is None else str(artifact_folder)
        self.thread = threading.get_ident()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the loop: at once if we are on it, soon if this is another thread."""
        if threading.get_ident() == self.thread:
            function()
            return
        # A closed loop raises: a thread outlived its node, and nobody is left to report to.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)


class RunHandle(BaseRun):
    """One attempt on its node. Executors see the part of it that `taskyard.ports.executor.RunHandle` promises. Its
    attributes are written here only."""

    # Defaults of the class, not of each instance: one run of many needs more than the two values below.
    cancel_requested = stop_requested = is_expired = is_detached = is_queued = False
    stop_code = NoteCode.NODE_STOPPED
    consumer: Consumer | None = None
    asyncio_task: asyncio.Task[Any] | None = None
    exception: BaseException | None = None
    """What the code raised, if it did so in this process."""
    result: ExecutionResult | None = None
    """How the attempt went, once that is known."""
    worker_pid: int | None = None
    _interrupt: Callable[[], object] | None = None
    _kill: Callable[[], object] | None = None
    _cancel_grace_timer: asyncio.TimerHandle | None = None
    _throttle: ProgressThrottle | None = None
    _reattached: asyncio.Future[None] | None = None

    def __init__(self, claim: Claim, host: RunHost) -> None:
        self.claim, self._host = claim, host

    @property
    def uuid(self) -> str:
        return self.claim.record.uuid

    # --- for the runner and the dispatcher ----------------------------------------------------------------------------

    def belongs_to(self, task: asyncio.Task[Any] | None) -> None:
        """The asyncio task in which the run goes on."""
        self.asyncio_task = task

    def set_consumer(self, consumer: Consumer) -> None:
        self.consumer = consumer

    def replace_record(self, record: TaskRecord) -> None:
        """The same attempt with a record that says more."""
        self.claim = Claim(record, self.claim.attempt, self.claim.token)

    def next_attempt(self, token: int) -> None:
        """The same request is tried again."""
        self.claim = Claim(self.claim.record, self.claim.attempt + 1, token)
        self.is_expired = False

    def request_cancel(self) -> None:
        """Somebody wants this run to end. Only the first request interrupts: a consumer may be cleaning up."""
        if not self.cancel_requested:
            self.cancel_requested = True
            self._call_interrupt()

    def kill(self) -> None:
        """Somebody wants this run to end without grace. A run that cannot be killed is not touched."""
        if self._kill is not None:
            self.cancel_requested = True
            self._kill()

    def request_stop(self, why: NoteCode | None = None, *, answer_canceled: bool = False) -> None:
        """The node is stopping and has waited long enough, or may not go on. `answer_canceled`: the caller of the run
        gets that as an answer, because there is no queue to which it goes back."""
        if not self.stop_requested:
            self.stop_requested, self.stop_code = True, why or self.stop_code
            self._call_interrupt()
        if answer_canceled:
            self.cancel_requested = True

    @property
    def must_end(self) -> bool:
        """Somebody wants this run to end, or the node stops."""
        return self.cancel_requested or self.stop_requested

    def _call_interrupt(self) -> None:
        if self._interrupt is not None:
            self._interrupt()

    @property
    def has_grace_timer(self) -> bool:
        return self._cancel_grace_timer is not None

    def set_grace_timer(self, timer: asyncio.TimerHandle) -> None:
        """Runs when the cancel is overdue; the end of the run stops it."""
        self._cancel_grace_timer = timer

    def end(self) -> None:
        """The code has ended: its last report is passed on, later ones are dropped."""
        if self._throttle is not None:
            self._throttle.finish()
        if self._lines is not None:
            self._lines.finish()
        self.has_ended = True
        # A circle (run, asyncio task, its context variables, run) that would have to wait for the garbage collector.
        self.asyncio_task = self._interrupt = self._kill = self.exception = None
        if self._cancel_grace_timer is not None:
            self._cancel_grace_timer.cancel()

    # --- for executors ------------------------------------------------------------------------------------------------

    def set_interrupt(self, interrupt: Callable[[], object], *, kill: Callable[[], object] | None = None) -> None:
        self._interrupt, self._kill = interrupt, kill

    def clear_interrupt(self) -> None:
        self._interrupt = self._kill = None

    def mark_queued(self) -> None:
        self.is_queued = True

    def mark_started(self, worker_pid: int | None = None) -> None:
        self.is_queued, self.worker_pid = False, worker_pid

    def mark_expired(self) -> None:
        self.is_expired = True

    def detach(self) -> None:
        self.is_detached = True

    def reattach(self) -> None:
        self.is_detached = False
        if self._reattached is not None and not self._reattached.done():
            self._reattached.set_result(None)

    async def wait_reattached(self) -> None:
        """Wait for the end of code that goes on by itself. Raises `CancelledError` if the node lets go of the run."""
        while self.is_detached:
            if self.has_ended:
                raise asyncio.CancelledError
            self._reattached = self._host.loop.create_future()
            await self._reattached

    def keep_exception(self, exc: BaseException) -> None:
        # Not a field of the result: its frames would close a cycle, and results are not seen by the garbage collector.
        self.exception = exc

    @property
    def remote_record(self) -> TaskRecord:
        record = self.claim.record
        if self._values is None or self._values == record.values:
            return record
        values = {name: value for name, value in self._values.items() if _is_json(value)}
        record = record.clone()
        record.extra = msgspec.structs.replace(record.extra or NO_EXTRA, values=values)
        return record

    def keep_result(self, result: ExecutionResult) -> None:
        self.result = result

    # --- reports ------------------------------------------------------------------------------------------------------

    @property
    def is_cancelled(self) -> bool:
        return self.must_end or self.is_expired

    @property
    def artifact_folder(self) -> str | None:
        return self._host.artifact_folder

    @property
    def cancel_grace_s(self) -> float:
        """How long the run may clean up after a cancel request."""
        return self._host.cancel_grace_s

    def now(self) -> datetime:
        return self._host.now()

    def make_report(self, **fields: Any) -> Report:
        return Report(self.claim, worker_pid=self.worker_pid, **fields)

    def send(self, report: Report) -> None:
        """On the loop."""
        if not self.has_ended:
            self._host.report(report)

    def _send_soon(self, report: Report) -> None:
        self._host.call(lambda: self.send(report))

    def report_progress(self, fraction: Any, message: Any, rate: Any, facts: dict[str, Fact]) -> None:
        if self._throttle is None:
            self._throttle = ProgressThrottle(self, self._host)
        self._throttle.update(Progress(clamp_fraction(fraction), clip_text(message), finite_number(rate), facts))

    def save_checkpoint(self, text: str) -> None:
        self._saved_here = text
        self._send_soon(Report(self.claim, checkpoint=text))

    def add_remark(self, text: object) -> None:
        self.set_note(Note.remark(clip_text(text)))

    def set_note(self, note: Note) -> None:
        self._send_soon(Report(self.claim, note=note))

    def keep_lines(self, lines: list[LogLine]) -> None:
        """Lines that were made in another process."""
        if not self.has_ended:
            self._get_lines().add_lines(lines)

    def keep_artifact(self, artifact: Artifact) -> None:
        self._send_soon(self.make_report(artifacts=(artifact,)))

    def _make_lines(self) -> HostLines:
        return HostLines(self, self._host)


class ProgressThrottle:
    """Thins out progress: the first at once, then one every `PROGRESS_INTERVAL_S`, each the latest at that time."""

    def __init__(self, run: RunHandle, host: RunHost) -> None:
        self._run, self._host = run, host
        self._latest: Progress | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_calling = False

    def update(self, progress: Progress) -> None:
        self._latest = progress
        # Race: the loop may send between these two lines. Then one call finds nothing to send, which does no harm; the
        # flag only keeps a thread in a tight loop from filling the event loop with calls.
        if not self._is_calling:
            self._is_calling = True
            self._host.call(self._on_loop)

    def _on_loop(self) -> None:
        self._is_calling = False
        if self._timer is None:
            self._send()

    def _send(self) -> None:
        self._timer = None
        progress, self._latest = self._latest, None
        if progress is not None and not self._run.has_ended:
            self._run.send(self._run.make_report(progress=progress))
            self._timer = self._host.loop.call_later(PROGRESS_INTERVAL_S, self._send)

    def finish(self) -> None:
        """Send what is left, whatever the time."""
        if self._timer is not None:
            self._timer.cancel()
        progress, self._latest = self._latest, None
        if progress is not None:
            self._run.send(self._run.make_report(progress=progress))


class LiveRuns(dict[int, RunHandle]):
    """The runs that go on, by the token they began with, in the order in which they began."""

    def list_all(self) -> list[RunHandle]:
        """Those of this moment: runs may end meanwhile."""
        return list(self.values())

    def find(self, uuid: str) -> RunHandle | None:
        """The run of this task. Of two the later counts: the other one is stale."""
        return next((run for run in reversed(self.values()) if run.claim.record.uuid == uuid), None)

    def request_stop(self, why: NoteCode | None = None, *, answer_canceled: bool = False) -> None:
        """Ask everything that runs to end."""
        for run in self.list_all():
            run.request_stop(why, answer_canceled=answer_canceled)


def _is_json(value: Any) -> bool:
    try:
        to_json("a value", value)
    except NotJson:
        return False
    return True


async def pause(run: RunHandle, clock: Clock, delay_s: float) -> None:
    """Wait, unless somebody wants the run to end."""
    wake = asyncio.Event()
    run.set_interrupt(wake.set)
    if not run.must_end:
        await clock.wait(wake, clock.monotonic() + delay_s)
    run.clear_interrupt()


class TaskInterrupt:
    """Cancels the caller's asyncio task, in which the code runs. The caller itself is not meant: once the code has
    ended, whatever it made of the cancellation, `undo` takes that back."""

    __slots__ = ("_is_over", "_task", "_times")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._times = 0
        self._is_over = False

    def __call__(self) -> None:
        if asyncio.current_task() is self._task:
            # The code itself asks. If it awaits nothing more, the caller's next await must not be hit instead.
            self._task.get_loop().call_soon(self._cancel)
        else:
            self._cancel()

    def _cancel(self) -> None:
        if not self._is_over:
            self._times += 1
            self._task.cancel()

    def undo(self) -> None:
        self._is_over = True
        while self._times:
            self._times -= 1
            self._task.uncancel()
