"""One run as the code inside it sees it: `current_run()`.

`RunContext` is the part of a run that belongs to user code. It stands on a `BaseRun`, which belongs to the engine: a
`RunHandle` on the node, a `WorkerRun` in a worker process. The context variable holds the `BaseRun`; its `RunContext`
is made when code first asks for it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from taskyard.errors import InvalidInput, NoCurrentRun, PayloadTooLarge, quote, shorten
from taskyard.execution.progress_values import (
    FACT_NAME_CHARS,
    FACTS_KEPT,
    finite_number,
    keep_facts,
    merge_text,
    safe_repr,
    to_float,
)
from taskyard.execution.run_lines import AttemptLines, level_name
from taskyard.execution.said import RunLogger
from taskyard.model.attempt import ARTIFACTS_KEPT, Artifact, LineOrigin
from taskyard.model.execution import Fact
from taskyard.model.task import Claim, TaskRecord, to_json
from taskyard.model.trace import attempt_trace

if TYPE_CHECKING:
    from taskyard.execution.artifacts import ArtifactTarget

run_log = logging.getLogger("taskyard.run")

CHECKPOINT_BYTES = 1 << 20
"""Of JSON. A checkpoint says how far the work is; the work itself belongs into a file."""


class RunContext:
    """What `current_run()` returns. Consumers use `task`, `uuid`, `attempt`, `token`, `consumer`, `device`, `trace`,
    `values`, `cancelled`, `progress`, `log`, `checkpoint`, `checkpointed`, `note` and `artifact`. `source` is another
    name for `consumer`.

    An attempt leaves behind its log lines and its artifacts. Lines are what it logs with `log` or through `logging`
    (from INFO on), and what it prints to standard output and standard error. The latest 1,000 are kept, with at most
    4,000 characters each; a line says how many were dropped. Lines of a worker process that is killed are kept, up to
    what it wrote in its last 0.25 s beyond 50 lines. What child processes print is not captured. Nor is what threads
    print that the code starts itself, except in a worker process."""

    __slots__ = ("_has_warned", "_run")

    def __init__(self, run: BaseRun) -> None:
        self._run = run
        self._has_warned = False

    def __dir__(self) -> list[str]:
        """The names that user code may use."""
        return sorted(name for name in vars(RunContext) if not name.startswith("_"))

    @property
    def task(self) -> TaskRecord:
        """The task that runs, as it was when this attempt started: a copy, with its arguments, queue, labels and so
        on."""
        return copy.copy(self._run.claim.record)

    @property
    def uuid(self) -> str:
        return self._run.claim.record.uuid

    @property
    def attempt(self) -> int:
        """1 for the first run of the task."""
        return self._run.claim.attempt

    @property
    def token(self) -> int:
        """Larger than that of every earlier run: hand it to the outside world to guard effects against a stale run."""
        return self._run.claim.token

    @property
    def consumer(self) -> str:
        """The name of the task's consumer."""
        return self._run.claim.record.consumer

    @property
    def source(self) -> str:
        """Another name for `consumer`."""
        return self._run.claim.record.consumer

    @property
    def device(self) -> str | None:
        """The name of the place where it runs, if its consumer has places: a GPU, a licence, a phone."""
        return self._run.claim.record.device

    @property
    def trace(self) -> str:
        """The trace context of this attempt, as a W3C traceparent: the parent for spans that the code starts. The trace
        id is that of the submit, if it had one; each attempt has a span id of its own."""
        return attempt_trace(self._run.claim)

    @property
    def values(self) -> dict[str, Any]:
        """What middleware has added: when the task was submitted, and around this run. Middleware on the node changes
        it in place. Of that, a worker process gets what JSON can hold."""
        return self._run.values

    @property
    def cancelled(self) -> bool:
        """Whether the run should end: a cancel, a stop, or its deadline. Code that cannot be interrupted looks here."""
        return self._run.is_cancelled

    def progress(
        self, fraction: float | None = None, message: str = "", rate: float | None = None, **facts: Fact
    ) -> None:
        """Say how far the run is, from the loop or from any thread. `facts` are other numbers and short texts by name,
        such as `saved_bytes=512`, at most 16. Cheap: what comes too often is thinned out. It never fails a run: what
        makes no sense is brought inside its bounds, or left out, and logged once."""
        self._run.report_progress(fraction, message, rate, self._check_progress(fraction, rate, facts))

    def _check_progress(self, fraction: Any, rate: Any, facts: dict[str, Any]) -> dict[str, Fact]:
        """The facts that can be kept. Say so, once in a run, if anything cannot be kept as it is."""
        kept = keep_facts(facts) if facts else {}
        if (fraction is None and rate is None and not facts) or self._has_warned:
            return kept
        number = to_float(fraction)
        is_fraction = fraction is None or (number is not None and 0 <= number <= 1)
        if not is_fraction or (rate is not None and finite_number(rate) is None):
            self._has_warned = True
            text = "progress(%s, rate=%s) is not kept as it is: a fraction lies between 0 and 1, a rate is a number"
            self.log(text, shorten(safe_repr(fraction)), shorten(safe_repr(rate)), level=logging.WARNING)
        elif len(kept) < len(facts):
            self._has_warned = True
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
        self._run.log_line(level, merge_text(text, args), "run")
        RunLogger(run_log, self._run.log_fields).log(level, text, *args, stacklevel=2)

    @property
    def checkpointed(self) -> Any:
        """What was saved last with `checkpoint`, by this run of the task or an earlier one; None if nothing was."""
        saved = self._run.saved_checkpoint
        return None if saved is None else msgspec.json.decode(saved)

    def checkpoint(self, data: Any) -> None:
        """Save how far the work is, as JSON, for this task's next run; only the last one is kept. It is stored within
        milliseconds, also if the code or its worker process ends meanwhile; not if the whole node does at once."""
        text = to_json("a checkpoint", data)
        if len(text) * 4 > CHECKPOINT_BYTES and (size := len(text.encode())) > CHECKPOINT_BYTES:
            raise PayloadTooLarge("a checkpoint", size, CHECKPOINT_BYTES)
        self._run.save_checkpoint(text)

    def note(self, text: str) -> None:
        """Put a remark on the task's record, from the loop or from any thread."""
        self._run.add_remark(text)

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

        run = self._run
        run.reserve_artifact(name)
        artifact = make_artifact(name, data, path, media_type, target=run.artifact_target(), now=run.now())
        earlier = run.remember_artifact(artifact)
        if earlier is not None and earlier.path is not None and earlier.path != artifact.path:
            with contextlib.suppress(OSError):
                os.unlink(earlier.path)
        run.keep_artifact(artifact)
        return artifact


class BaseRun:
    """One attempt in the process where its code runs, as the engine sees it."""

    # Defaults of the class, not of each instance: most runs need none of them.
    has_ended = False
    _context: RunContext | None = None
    _lines: AttemptLines | None = None
    _artifacts: dict[str, Artifact] | None = None
    _saved_here: str | None = None
    _values: dict[str, Any] | None = None

    claim: Claim

    @property
    def context(self) -> RunContext:
        """The part of it that user code sees."""
        context = self._context
        if context is None:
            context = self._context = RunContext(self)
        return context

    @property
    def log_fields(self) -> dict[str, Any]:
        record = self.claim.record
        return {"task": record.uuid, "consumer": record.consumer, "attempt": self.claim.attempt}

    @property
    def values(self) -> dict[str, Any]:
        """What middleware has added to the task and to this run."""
        values = self._values
        if values is None:
            values = self._values = dict(self.claim.record.values)
        return values

    @property
    def saved_checkpoint(self) -> str | None:
        """The last checkpoint as JSON, of this run or an earlier one."""
        return self.claim.record.checkpoint if self._saved_here is None else self._saved_here

    # --- what the two kinds do in their own ways ----------------------------------------------------------------------

    @property
    def is_cancelled(self) -> bool:
        raise NotImplementedError

    @property
    def artifact_folder(self) -> str | None:
        """Where large artifacts are written; None means the default folder of this user."""
        raise NotImplementedError

    def now(self) -> datetime:
        raise NotImplementedError

    def report_progress(self, fraction: Any, message: Any, rate: Any, facts: dict[str, Fact]) -> None:
        """Any fraction, message and rate; `facts` that can be kept. Thinned out. From any thread."""
        raise NotImplementedError

    def save_checkpoint(self, text: str) -> None:
        """Keep this checkpoint: JSON that was checked."""
        raise NotImplementedError

    def add_remark(self, text: object) -> None:
        """Put a remark on the task's record."""
        raise NotImplementedError

    def keep_artifact(self, artifact: Artifact) -> None:
        """Report an artifact that is made."""
        raise NotImplementedError

    def _make_lines(self) -> AttemptLines:
        raise NotImplementedError

    # --- lines and artifacts ------------------------------------------------------------------------------------------

    def log_line(self, level: int, text: str, origin: LineOrigin) -> None:
        """A line of the attempt, from any thread. Dropped if the attempt has ended."""
        if not self.has_ended:
            self._get_lines().add(level_name(level), text, origin)

    def print_text(self, origin: LineOrigin, text: str) -> None:
        """Something was printed, from any thread."""
        if not self.has_ended:
            self._get_lines().write(origin, text)

    def _get_lines(self) -> AttemptLines:
        # Without a lock: the garbage collector may run a finalizer that logs while the lines are made, and it comes
        # here as well. `setdefault` keeps the first that were made.
        lines: AttemptLines = self._lines or self.__dict__.setdefault("_lines", self._make_lines())
        return lines

    def artifact_target(self) -> ArtifactTarget:
        from taskyard.execution.artifacts import ArtifactTarget

        return ArtifactTarget(self.artifact_folder, self.claim.record.uuid, self.claim.token)

    def reserve_artifact(self, name: str) -> None:
        """Raises `InvalidInput` if there is no room for this one. Only names count, so a check is enough: two threads
        that pass it at the same moment may keep one artifact too many."""
        if self.has_ended:
            raise InvalidInput(f"artifact {quote(name)} comes too late: the attempt has ended")
        known = self._artifacts
        if known is not None and len(known) >= ARTIFACTS_KEPT and name not in known:
            raise InvalidInput(f"artifact {quote(name)} is one too many: an attempt can have {ARTIFACTS_KEPT}")

    def remember_artifact(self, artifact: Artifact) -> Artifact | None:
        """Remember it, without its data; the one that it replaces. If two threads keep the same name at the same
        moment, both may replace the same one: then a file may stay until the task is pruned."""
        known: dict[str, Artifact] = self.__dict__.setdefault("_artifacts", {})
        earlier = known.get(artifact.name)
        known[artifact.name] = msgspec.structs.replace(artifact, data=None)
        return earlier


CURRENT: ContextVar[BaseRun] = ContextVar("taskyard_run")


def find_run() -> BaseRun | None:
    """The run that this code is part of, as the engine sees it; None outside a run."""
    return CURRENT.get(None)


def find_context() -> RunContext | None:
    """The same as user code sees it."""
    run = CURRENT.get(None)
    return None if run is None else run.context


def find_values() -> dict[str, Any]:
    """What middleware has added to the run that this code is part of."""
    run = CURRENT.get(None)
    return {} if run is None else dict(run.values)


def current_run() -> RunContext:
    """The run that this code is part of, on the loop or in a worker thread; `NoCurrentRun` outside."""
    try:
        return CURRENT.get().context
    except LookupError:
        raise NoCurrentRun() from None
