"""What is asked of an executor, and what it answers. User code never makes an executor raise: it makes it answer.

`gc=False`, here and on the other values of the hot path: they never form cycles, and with a hundred thousand tasks in
memory the collector would otherwise take half of the time.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from taskyard.model.notes import DEPENDENCY_ENDED, Note

INLINE, THREAD, PROCESS, ISOLATED, MOCK, NOOP = "inline", "thread", "process", "isolated", "mock", "noop"
"""Places to run, by the names that consumers and algorithms ask for them."""

INTERNAL_FAULT = "internal_fault"
"""In an error's details: true if Taskyard or an executor failed, and no worker died. Such an error is `system`. It does
not count towards quarantine, because the task did nothing wrong."""


class ErrorKind(StrEnum):
    VALIDATION = "validation"
    TIMEOUT = "timeout"
    REJECTED = "rejected"
    RUNTIME = "runtime"
    SYSTEM = "system"
    CANCELED = "canceled"


class ErrorCode(StrEnum):
    """Errors that the engine itself gives a task. They have no message: their `details` are facts."""

    DEPENDENCY = "dependency"
    """A dependency, `task`, finished as `state` instead of completed."""
    NODE_DIED = "node_died"
    """The node that ran the task, `node`, died."""
    DEVICE_LOST = "device_lost"
    """The device that the task ran on, `device`, is gone or does not answer."""


class ExecutionError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a run failed. `message` comes from the code that ran or from its executor; an error of the engine has a
    `code` instead, and `text` is what people read of either. `types` names the exception's class and its bases,
    nearest first, so that policies can match it without unpickling anything."""

    kind: ErrorKind
    message: str = ""
    code: ErrorCode | None = None
    types: tuple[str, ...] = ()
    details: dict[str, Any] = {}
    traceback: str | None = None

    @property
    def text(self) -> str:
        """What people read: the message, or the sentence of the code."""
        match self.code:
            case ErrorCode.DEPENDENCY:
                how = DEPENDENCY_ENDED.get(str(self.details.get("state")), "did not complete")
                return f"its dependency {self.details.get('task')} {how}"
            case ErrorCode.NODE_DIED:
                return f"its node {self.details.get('node')} died"
            case ErrorCode.DEVICE_LOST:
                return f"its device {self.details.get('device')} was lost"
            case _:
                return self.message

    @property
    def names(self) -> tuple[str, ...]:
        """What it can be found by: its classes, or its kind where nothing was raised."""
        return self.types or (str(self.kind),)

    @property
    def type(self) -> str:
        return self.names[0]


class ExecutionResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How one run went. `started_at` and `ended_at` are POSIX seconds."""

    success: bool
    data: Any = None
    error: ExecutionError | None = None
    started_at: float = 0.0
    ended_at: float = 0.0
    worker_pid: int | None = None
    note: Note | None = None


Fact = int | float | str | bool
"""A value that progress may carry under a name."""


class Progress(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How far a run has come: a fraction between 0 and 1, a message, a rate in whatever the message counts, and other
    facts by name."""

    fraction: float | None = None
    message: str = ""
    rate: float | None = None
    facts: dict[str, Fact] = {}
