"""What happens in a node, for people and their tools: the events, the sinks that log them, and log lines as JSON.

`Yard(sinks=[…])` and `yard.add_sink` take a sink; `docs/TELEMETRY.md` shows how to write one.
"""

from taskyard.ports.sink import (
    BlockerFreed,
    CallFinished,
    LeaseLost,
    LeaseRegained,
    LoopRestarted,
    NodeEvent,
    NodeSampled,
    ReportsStored,
    RunCanceled,
    RunCompleted,
    RunFailed,
    RunFinished,
    RunReturned,
    RunStarted,
    ScheduleFired,
    SchedulesChecked,
    Sink,
    Sinks,
    StoreCalled,
    StoreFailed,
    TasksClaimed,
    TasksRescued,
    TasksSettled,
)
from taskyard.telemetry.json_lines import JsonFormatter
from taskyard.telemetry.logs import LOG_FIELDS, FailureLog, RunLog

__all__ = [
    "LOG_FIELDS",
    "BlockerFreed",
    "CallFinished",
    "FailureLog",
    "JsonFormatter",
    "LeaseLost",
    "LeaseRegained",
    "LoopRestarted",
    "NodeEvent",
    "NodeSampled",
    "ReportsStored",
    "RunCanceled",
    "RunCompleted",
    "RunFailed",
    "RunFinished",
    "RunLog",
    "RunReturned",
    "RunStarted",
    "ScheduleFired",
    "SchedulesChecked",
    "Sink",
    "Sinks",
    "StoreCalled",
    "StoreFailed",
    "TasksClaimed",
    "TasksRescued",
    "TasksSettled",
]
