"""Running the code of a stored task in this terminal, for `taskyard debug`. It is beside the interface: it makes sense
in this process only. Nothing is written to the store, and nothing is hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from taskyard.application.documents import Document
from taskyard.application.opening import FoundYard, open_application
from taskyard.application.refs import resolve_task
from taskyard.debugging import debug_task, load_task
from taskyard.errors import UnknownTask
from taskyard.model.execution import ErrorKind
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord, to_json
from taskyard.yard import Yard


class DebugError(Document, frozen=True, kw_only=True):
    """The error that the code has raised."""

    kind: ErrorKind
    message: str
    traceback: str | None


class DebugResult(Document, frozen=True, kw_only=True):
    """How a run in this terminal ended: with a result, as JSON text, or with an error. `retry_in_s` is the wait that
    the code has asked for with `RetryLater`; an error of the kind `canceled` is its `Cancel`."""

    duration_s: float
    result: str | None = None
    error: DebugError | None = None
    retry_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class DebugRun:
    """A stored task and the code that runs it."""

    yard: Yard
    record: TaskRecord

    @property
    def running_on(self) -> str | None:
        """The node that runs the task now, if one does."""
        return self.record.node if self.record.state is TaskState.RUNNING else None

    def run(
        self, say: Callable[[str], None], *, break_at_start: bool = False, post_mortem: bool = False
    ) -> DebugResult:
        """Run the code here, on the main thread. `say` gets a line for everything that it reports."""
        ended = debug_task(self.yard, self.record, say=say, break_at_start=break_at_start, post_mortem=post_mortem)
        duration_s = ended.ended_at - ended.started_at
        if ended.error is None:
            return DebugResult(duration_s=duration_s, result=to_json("the result", ended.data))
        error = DebugError(kind=ended.error.kind, message=ended.error.text, traceback=ended.error.traceback)
        return DebugResult(duration_s=duration_s, error=error, retry_in_s=ended.error.details.get("delay_s"))


async def load_debug_run(code: FoundYard, store: FoundYard, ref: str, *, actor: str) -> DebugRun:
    """The task that the ref names in the store, to be run by the code of another yard."""
    async with open_application(store.yard, actor=actor):
        record = await load_task(store.yard.store, await resolve_task(store.yard, ref))
    if record is None:
        raise UnknownTask(ref)
    return DebugRun(code.yard, record)
