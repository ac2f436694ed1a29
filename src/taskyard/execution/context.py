"""One run, as seen by the code inside it (`current_run()`) and by the executor that carries it out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import msgspec

from taskyard.errors import NoCurrentRun, PayloadTooLarge, shorten
from taskyard.execution.explain import clean
from taskyard.execution.said import RunLogger
from taskyard.model.execution import Progress
from taskyard.model.task import Claim, to_json
from taskyard.ports.consumer import Consumer
from taskyard.ports.store import Report

run_log = logging.getLogger("taskyard.run")

PROGRESS_EVERY_S = 0.25
"""Progress is written to the store: a run that reports more often than this is thinned out, its last word kept."""

CHECKPOINT_BYTES = 1 << 20
"""Of JSON. A checkpoint says how far the work is; the work itself belongs into a file."""


SAID_CHARS = 500
"""How much of a progress message or a note is kept."""


class RunHost:
    """What all runs of a node share: the loop they belong to, and where their reports go."""

    __slots__ = ("loop", "report", "thread")

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[Report], None]) -> None:
        self.loop, self.report = loop, report
        self.thread = threading.get_ident()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the loop: at once if we are on it, soon if this is another thread."""
        if threading.get_ident() == self.thread:
            function()
            return
        # A closed loop raises: a thread outlived its node, and nobody is left to report to.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)


class RunContext:
    """What `current_run()` returns. Consumers use `uuid`, `attempt`, `token`, `source`, `cancelled`, `progress`, `log`,
    `checkpoint`, `checkpointed` and `note`; the rest belongs to the engine."""

    # Defaults of the class, not of each instance: one run of many needs more than the three values below.
    cancel_asked = stop_asked = expired = abandoned = ended = is_waiting = False
    stop_note = "its node was stopped"
    interrupt: Callable[[], object] | None = None
    kill: Callable[[], object] | None = None
    raised: BaseException | None = None
    task: asyncio.Task[None] | None = None
    consumer: Consumer | None = None
    grace: asyncio.TimerHandle | None = None
    _meter: _Meter | None = None
    _has_complained = False
    _saved_here: str | None = None

    def __init__(self, claim: Claim, host: RunHost) -> None:
        self.claim, self._host = claim, host

    # --- for the code inside ------------------------------------------------------------------------------------------

    @property
    def uuid(self) -> str:
        return self.claim.record.uuid

    @property
    def attempt(self) -> int:
        """1 for the first run of the task."""
        return self.claim.attempt

    @property
    def token(self) -> int:
        """Larger than that of every earlier run: hand it to the outside world to guard effects against a stale run."""
        return self.claim.token

    @property
    def source(self) -> str:
        return self.claim.record.source

    @property
    def cancelled(self) -> bool:
        """Whether the run should end: a cancel, a stop, or its deadline. Code that cannot be interrupted looks here."""
        return self.cancel_asked or self.stop_asked or self.expired

    def progress(self, fraction: float | None = None, message: str = "", rate: float | None = None) -> None:
        """Say how far the run is, from the loop or from any thread. Cheap: what comes too often is thinned out. It
        never fails a run: what makes no sense is brought inside its bounds, or left out, and logged once."""
        self._complain_of(fraction, rate)
        if self._meter is None:
            self._meter = _Meter(self, self._host)
        self._meter.offer(Progress(fraction_of(fraction), _said(message), number_of(rate)))

    def _complain_of(self, fraction: Any, rate: Any) -> None:
        """Say so, once in a run, if what was said of its progress cannot be kept as it is."""
        if (fraction is None and rate is None) or self._has_complained:
            return
        number = _to_float(fraction)
        is_fraction = fraction is None or (number is not None and 0 <= number <= 1)
        if not is_fraction or (rate is not None and number_of(rate) is None):
            self._has_complained = True
            text = "progress(%s, rate=%s) is not kept as it is: a fraction lies between 0 and 1, a rate is a number"
            self.log(text, shorten(repr_of(fraction)), shorten(repr_of(rate)), level=logging.WARNING)

    def log(self, text: str, *args: object, level: int = logging.INFO) -> None:
        """Log a line that says which run it is of; from a worker process it reaches the handlers of the host."""
        RunLogger(run_log, self.log_fields).log(level, text, *args, stacklevel=2)

    @property
    def log_fields(self) -> dict[str, Any]:
        return {"task": self.uuid, "source": self.source, "attempt": self.attempt}

    @property
    def checkpointed(self) -> Any:
        """What was saved last with `checkpoint`, by this run of the task or an earlier one; None if nothing was."""
        return None if self._saved is None else msgspec.json.decode(self._saved)

    @property
    def _saved(self) -> str | None:
        return self.claim.record.checkpoint if self._saved_here is None else self._saved_here

    def checkpoint(self, data: Any) -> None:
        """Save how far the work is, as JSON, for this task's next run; only the last one is kept. It is stored within
        milliseconds, also if the code or its worker process ends meanwhile; not if the whole node does at once."""
        text = to_json("a checkpoint", data)
        if len(text) * 4 > CHECKPOINT_BYTES and (size := len(text.encode())) > CHECKPOINT_BYTES:
            raise PayloadTooLarge("a checkpoint", size, CHECKPOINT_BYTES)
        self._saved_here = text
        self._save(text)

    def _save(self, text: str) -> None:
        report = Report(self.claim, checkpoint=text)
        self._host.call(lambda: self.say(report))

    def note(self, text: str) -> None:
        """Put a remark on the task's record, from the loop or from any thread."""
        report = Report(self.claim, note=_said(text))
        self._host.call(lambda: self.say(report))

    # --- for the engine -----------------------------------------------------------------------------------------------

    def saved(self, text: str) -> None:
        """The code, in a worker process, has saved a checkpoint: JSON that was checked there."""
        self._saved_here = text
        self._save(text)

    def say(self, report: Report) -> None:
        if not self.ended:
            self._host.report(report)

    def ask_cancel(self) -> None:
        """Somebody wants this run to end. Only the first ask interrupts: a consumer may be cleaning up."""
        if not self.cancel_asked:
            self.cancel_asked = True
            self._interrupt()

    def force_cancel(self) -> None:
        """Somebody wants this run to end without being asked. What cannot be killed is asked all the same."""
        if self.kill is not None:
            self.cancel_asked = True
            self.kill()

    def ask_stop(self, why: str | None = None) -> None:
        """The node is stopping and has waited long enough, or may not go on."""
        if not self.stop_asked:
            self.stop_asked, self.stop_note = True, why or self.stop_note
            self._interrupt()

    def _interrupt(self) -> None:
        if self.interrupt is not None:
            self.interrupt()

    def end(self) -> None:
        """The code has ended: its last word is passed on, what it still says is dropped."""
        if self._meter is not None:
            self._meter.finish()
        self.ended = True
        # A circle (run, asyncio task, its context variables, run) that would have to wait for the garbage collector.
        self.task = self.interrupt = self.kill = self.raised = None
        if self.grace is not None:
            self.grace.cancel()


def _said(text: object) -> str:
    try:
        said = str(text)
    except Exception as broken:
        said = f"{type(text).__name__}, whose text could not be read: {type(broken).__name__}"
    return clean(said[:SAID_CHARS])[:SAID_CHARS]


def repr_of(given: object) -> str:
    try:
        return repr(given)
    except Exception:
        return type(given).__name__


def fraction_of(given: object) -> float | None:
    number = _to_float(given)
    if number is None:
        return None
    # `not (x > 0)` is true of NaN as well.
    return 0.0 if not number > 0 else min(number, 1.0)


def number_of(given: object) -> float | None:
    """A number that JSON has, or None."""
    number = _to_float(given)
    return number if number is not None and math.isfinite(number) else None


def _to_float(given: Any) -> float | None:
    try:
        return None if given is None else float(given)
    except Exception:
        return None


class _Meter:
    """Thins out progress: the first at once, then one every `PROGRESS_EVERY_S`, each the latest at that time."""

    def __init__(self, run: RunContext, host: RunHost) -> None:
        self._run, self._host = run, host
        self._latest: Progress | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_calling = False

    def offer(self, progress: Progress) -> None:
        self._latest = progress
        # Race: the loop may send between these two lines. Then one call finds nothing to send, which does no harm; the
        # flag only keeps a thread in a tight loop from filling the event loop with calls.
        if not self._is_calling:
            self._is_calling = True
            self._host.call(self._take)

    def _take(self) -> None:
        self._is_calling = False
        if self._timer is None:
            self._send()

    def _send(self) -> None:
        self._timer = None
        progress, self._latest = self._latest, None
        if progress is not None and not self._run.ended:
            self._run.say(Report(self._run.claim, progress=progress))
            self._timer = self._host.loop.call_later(PROGRESS_EVERY_S, self._send)

    def finish(self) -> None:
        """Send what is left, whatever the time."""
        if self._timer is not None:
            self._timer.cancel()
        progress, self._latest = self._latest, None
        if progress is not None:
            self._run.say(Report(self._run.claim, progress=progress))


CURRENT: ContextVar[RunContext] = ContextVar("taskyard_run")


def find_current_run() -> RunContext | None:
    """The same, or None outside a run."""
    return CURRENT.get(None)


def current_run() -> RunContext:
    """The run that this code is part of, on the loop or in a worker thread; `NoCurrentRun` outside."""
    try:
        return CURRENT.get()
    except LookupError:
        raise NoCurrentRun() from None
