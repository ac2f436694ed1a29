"""Middleware: functions around every submit, every run and the code of every run. See docs/MIDDLEWARE.md."""

from taskyard.errors import MiddlewareFault
from taskyard.execution.context import RunContext
from taskyard.model.execution import ExecutionError, ExecutionResult
from taskyard.ports.middleware import AroundCode, AroundRun, AroundSubmit, Middleware, RunNext, SubmitNext
from taskyard.ports.store import Added
from taskyard.queueing.submit_middleware import Submission, TaskDraft

__all__ = [
    "Added",
    "AroundCode",
    "AroundRun",
    "AroundSubmit",
    "ExecutionError",
    "ExecutionResult",
    "Middleware",
    "MiddlewareFault",
    "RunContext",
    "RunNext",
    "Submission",
    "SubmitNext",
    "TaskDraft",
]
