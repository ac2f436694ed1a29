"""What happens in a node, for people and their tools: the events, and the sinks that log them.

`Yard(sinks=[…])` and `yard.add_sink` take a sink; `docs/TELEMETRY.md` shows how to write one.
"""

from taskyard.ports.sink import (
    BlockerFreed,
    CallFinished,
    LeaseLost,
    LeaseRegained,
    LoopRestarted,
    NodeEvent,
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
from taskyard.telemetry.logs import FailureLog, RunLog

__all__ = [
    "BlockerFreed",
    "CallFinished",
    "FailureLog",
    "LeaseLost",
    "LeaseRegained",
    "LoopRestarted",
    "NodeEvent",
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
