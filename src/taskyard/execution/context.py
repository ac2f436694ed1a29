"""One run, as seen by the code inside it (`current_run()`) and by the executor that carries it out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from taskyard.errors import InvalidInput, NoCurrentRun, PayloadTooLarge, quote, shorten
from taskyard.execution.explain import clean
from taskyard.execution.run_lines import AttemptLines, HostLines, level_name, utc_now
from taskyard.execution.said import RunLogger
from taskyard.model.attempt import ARTIFACTS_KEPT, Artifact, LineOrigin, LogLine
from taskyard.model.execution import ExecutionResult, Fact, Progress
from taskyard.model.notes import Note, NoteCode
from taskyard.model.task import Claim, to_json
from taskyard.model.trace import attempt_trace
from taskyard.ports.consumer import Consumer
from taskyard.ports.store import Report

if TYPE_CHECKING:
    from taskyard.execution.artifacts import ArtifactTarget

run_log = logging.getLogger("taskyard.run")

PROGRESS_EVERY_S = 0.25
"""Progress is written to the store: a run that reports more often than this is thinned out, its last word kept."""

CHECKPOINT_BYTES = 1 << 20
"""Of JSON. A checkpoint says how far the work is; the work itself belongs into a file."""


SAID_CHARS = 500
"""How much of a progress message or a note is kept."""

FACTS_KEPT = 16
"""Facts that one progress may carry."""

FACT_NAME_CHARS = 40
"""Characters in the name of a fact."""

FACT_CHARS = 200
"""Characters kept of a fact that is a text."""

LARGEST_FACT = 2**63 - 1
"""What every store can hold."""


class RunHost:
    """What all runs of a node share: the loop they belong to, where their reports go, and where their large artifacts
    are written (None: the default folder of this user)."""

    __slots__ = ("artifact_folder", "loop", "now", "report", "thread")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[Report], None],
        *,
        now: Callable[[], datetime] = utc_now,
        artifact_folder: Path | None = None,
    ) -> None:
        self.loop, self.report, self.now = loop, report, now
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


class RunContext:
    """What `current_run()` returns. Consumers use `uuid`, `attempt`, `token`, `source`, `device`, `trace`, `cancelled`,
    `progress`, `log`, `checkpoint`, `checkpointed`, `note` and `artifact`; the rest belongs to the engine.

    An attempt leaves behind its log lines and its artifacts. Lines are what it logs with `log` or through `logging`
    (from INFO on), and what it prints to standard output and standard error. The latest 1,000 are kept, with at most
    4,000 characters each; a line says how many were dropped. Lines of a worker process that is killed are kept, up to
    what it wrote in its last 0.25 s beyond 50 lines. What child processes print is not captured. Nor is what threads
    print that the code starts itself, except in a worker process."""

    # Defaults of the class, not of each instance: one run of many needs more than the three values below.
    cancel_asked = stop_asked = expired = abandoned = ended = is_waiting = False
    stop_code = NoteCode.NODE_STOPPED
    interrupt: Callable[[], object] | None = None
    kill: Callable[[], object] | None = None
    raised: BaseException | None = None
    result: ExecutionResult | None = None
    task: asyncio.Task[None] | None = None
    consumer: Consumer | None = None
    grace: asyncio.TimerHandle | None = None
    _meter: _Meter | None = None
    worker_pid: int | None = None
    _has_complained = False
    _saved_here: str | None = None
    _lines: AttemptLines | None = None
    _artifacts: dict[str, Artifact] | None = None

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
        return self.claim.record.consumer

    @property
    def device(self) -> str | None:
        """The name of the place where it runs, if its consumer has places: a GPU, a licence, a phone."""
        return self.claim.record.device

    @property
    def trace(self) -> str:
        """The trace context of this attempt, as a W3C traceparent: the parent for spans that the code starts. The trace
        id is that of the submit, if it had one; each attempt has a span id of its own."""
        return attempt_trace(self.claim)

    @property
    def cancelled(self) -> bool:
        """Whether the run should end: a cancel, a stop, or its deadline. Code that cannot be interrupted looks here."""
        return self.cancel_asked or self.stop_asked or self.expired

    def progress(
        self, fraction: float | None = None, message: str = "", rate: float | None = None, **facts: Fact
    ) -> None:
        """Say how far the run is, from the loop or from any thread. `facts` are other numbers and short texts by name,
        such as `saved_bytes=512`, at most 16. Cheap: what comes too often is thinned out. It never fails a run: what
        makes no sense is brought inside its bounds, or left out, and logged once."""
        kept = self._check_progress(fraction, rate, facts)
        if self._meter is None:
            self._meter = _Meter(self, self._host)
        self._meter.offer(Progress(fraction_of(fraction), _said(message), number_of(rate), kept))

    def _check_progress(self, fraction: Any, rate: Any, facts: dict[str, Any]) -> dict[str, Fact]:
        """The facts that can be kept. Say so, once in a run, if anything cannot be kept as it is."""
        kept = facts_of(facts) if facts else {}
        if (fraction is None and rate is None and not facts) or self._has_complained:
            return kept
        number = _to_float(fraction)
        is_fraction = fraction is None or (number is not None and 0 <= number <= 1)
        if not is_fraction or (rate is not None and number_of(rate) is None):
            self._has_complained = True
            text = "progress(%s, rate=%s) is not kept as it is: a fraction lies between 0 and 1, a rate is a number"
            self.log(text, shorten(repr_of(fraction)), shorten(repr_of(rate)), level=logging.WARNING)
        elif len(kept) < len(facts):
            self._has_complained = True
            text = (
                "progress() does not keep %s: a fact is an int, a float, a bool or a text under a name of at most "
                "%d characters, and there are at most %d"
            )
            left_out = shorten(", ".join(name for name in facts if name not in kept))
            self.log(text, left_out, FACT_NAME_CHARS, FACTS_KEPT, level=logging.WARNING)
        return kept

    def log(self, text: str, *args: object, level: int = logging.INFO) -> None:
        """Write a line of the attempt, at any level. It also goes to `logging`, with the fields of the run; from a
        worker process it reaches the handlers of the host."""
        if not isinstance(level, int):
            raise InvalidInput(f"level must be a number, such as logging.WARNING, not {quote(level)}")
        self.log_line(level, _merge(text, args), "run")
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
        self.set_note(Note.remark(_said(text)))

    def artifact(
        self,
        name: str,
        data: Any = None,
        *,
        path: str | os.PathLike[str] | None = None,
        media_type: str | None = None,
    ) -> Artifact:
        """Keep a named result beside the return value: bytes, a text or what JSON can hold as `data`, or a copy of the
        file at `path`. An artifact of the same name is replaced; an attempt can have 50.

        Up to 256 kB it is kept in the store; a larger one is written to a file on this machine. That takes a while: on
        an event loop, call it with `asyncio.to_thread`. Raises `InvalidInput` for a bad name, data that is none of
        these, a file that cannot be read, or one artifact too many."""
        from taskyard.execution.artifacts import make_artifact

        self._reserve_artifact(name)
        artifact = make_artifact(name, data, path, media_type, target=self._artifact_target(), now=self._now())
        earlier = self._note_artifact(artifact)
        if earlier is not None and earlier.path is not None and earlier.path != artifact.path:
            with contextlib.suppress(OSError):
                os.unlink(earlier.path)
        self.keep_artifact(artifact)
        return artifact

    def _reserve_artifact(self, name: str) -> None:
        """Raises `InvalidInput` if there is no room for this one. Only names count, so a check is enough: two threads
        that pass it at the same moment may keep one artifact too many."""
        if self.ended:
            raise InvalidInput(f"artifact {quote(name)} comes too late: the attempt has ended")
        known = self._artifacts
        if known is not None and len(known) >= ARTIFACTS_KEPT and name not in known:
            raise InvalidInput(f"artifact {quote(name)} is one too many: an attempt can have {ARTIFACTS_KEPT}")

    def _note_artifact(self, artifact: Artifact) -> Artifact | None:
        """Remember it, without its data; the one that it replaces. If two threads keep the same name at the same
        moment, both may replace the same one: then a file may stay until the task is pruned."""
        known: dict[str, Artifact] = self.__dict__.setdefault("_artifacts", {})
        earlier = known.get(artifact.name)
        known[artifact.name] = msgspec.structs.replace(artifact, data=None)
        return earlier

    def _artifact_target(self) -> ArtifactTarget:
        from taskyard.execution.artifacts import ArtifactTarget

        return ArtifactTarget(self.artifact_folder, self.uuid, self.token)

    def _now(self) -> datetime:
        return self._host.now()

    # --- for the engine -----------------------------------------------------------------------------------------------

    @property
    def artifact_folder(self) -> str | None:
        """Where large artifacts are written; None means the default folder of this user."""
        return self._host.artifact_folder

    def make_report(self, **fields: Any) -> Report:
        return Report(self.claim, worker_pid=self.worker_pid, **fields)

    def log_line(self, level: int, text: str, origin: LineOrigin) -> None:
        """A line of the attempt, from any thread. Dropped if the attempt has ended."""
        if not self.ended:
            self._get_lines().add(level_name(level), text, origin)

    def print_text(self, origin: LineOrigin, text: str) -> None:
        """Something was printed, from any thread."""
        if not self.ended:
            self._get_lines().write(origin, text)

    def keep_lines(self, lines: list[LogLine]) -> None:
        """The code, in a worker process, has written these."""
        if not self.ended:
            self._get_lines().add_lines(lines)

    def keep_artifact(self, artifact: Artifact) -> None:
        """Report an artifact that is made."""
        report = self.make_report(artifacts=(artifact,))
        self._host.call(lambda: self.say(report))

    def _get_lines(self) -> AttemptLines:
        # Without a lock: the garbage collector may run a finalizer that logs while the lines are made, and it comes
        # here as well. `setdefault` keeps the first that were made.
        lines: AttemptLines = self._lines or self.__dict__.setdefault("_lines", self._make_lines())
        return lines

    def _make_lines(self) -> AttemptLines:
        return HostLines(self, self._host)

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

    def set_note(self, note: Note) -> None:
        report = Report(self.claim, note=note)
        self._host.call(lambda: self.say(report))

    def ask_stop(self, why: NoteCode | None = None) -> None:
        """The node is stopping and has waited long enough, or may not go on."""
        if not self.stop_asked:
            self.stop_asked, self.stop_code = True, why or self.stop_code
            self._interrupt()

    def _interrupt(self) -> None:
        if self.interrupt is not None:
            self.interrupt()

    def end(self) -> None:
        """The code has ended: its last word is passed on, what it still says is dropped."""
        if self._meter is not None:
            self._meter.finish()
        if self._lines is not None:
            self._lines.finish()
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


def _merge(text: object, args: tuple[object, ...]) -> str:
    """A message and its arguments in one, as `logging` does it; side by side if they do not fit."""
    try:
        return str(text) % args if args else str(text)
    except Exception:
        return " ".join([_said(text), *map(repr_of, args)])


def facts_of(given: Mapping[str, Any]) -> dict[str, Fact]:
    """Those that can be kept: at most `FACTS_KEPT`, each a number or a text under a short name."""
    kept: dict[str, Fact] = {}
    for name, value in given.items():
        fact = _fact_of(value)
        if fact is not None and len(name) <= FACT_NAME_CHARS and name.isidentifier() and len(kept) < FACTS_KEPT:
            kept[name] = fact
    return kept


def _fact_of(value: Any) -> Fact | None:
    """As one of the plain types: a number of NumPy's, or an enum's member, may be a subclass of them."""
    try:
        if isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if -LARGEST_FACT <= value <= LARGEST_FACT else None
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else None
        return clean(str(value)[:FACT_CHARS])[:FACT_CHARS] if isinstance(value, str) else None
    except Exception:
        return None


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
            self._run.say(self._run.make_report(progress=progress))
            self._timer = self._host.loop.call_later(PROGRESS_EVERY_S, self._send)

    def finish(self) -> None:
        """Send what is left, whatever the time."""
        if self._timer is not None:
            self._timer.cancel()
        progress, self._latest = self._latest, None
        if progress is not None:
            self._run.say(self._run.make_report(progress=progress))


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
