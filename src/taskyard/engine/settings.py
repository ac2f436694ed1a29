"""What an engine is made of: how it is to behave, and what it stands on."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from taskyard.cluster.membership import LeaseSettings
from taskyard.execution.runner import RunnerSettings
from taskyard.model.queue import QueueSettings
from taskyard.ports.admission import Admission
from taskyard.ports.clock import Clock
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutorProtocol
from taskyard.ports.middleware import Middleware
from taskyard.ports.sink import Sinks
from taskyard.ports.store import Store
from taskyard.queueing.dispatcher import MANY, MANY_ENDS
from taskyard.scheduling.items import ItemFunction


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`serve=False` makes an engine that only submits and waits. `others` is the room for tasks of unknown sources,
    which are taken only to be reported (the standalone Scheduler does that). Of `many` claims at once, some begin while
    the next turn is on its way; `many_ends` at once go apart from the claims. `checks` decide whether a task may start
    here. `middleware` goes around submits; that of runs is a setting of the runner. `version` is that of the
    application. `item_functions` list the items of schedules, by the names of those; they may come while it runs."""

    serve: bool = True
    name: str = ""
    version: str = ""
    max_running: int = 100
    others: int = 0
    many: int = MANY
    many_ends: int = MANY_ENDS
    runner: RunnerSettings = field(default_factory=RunnerSettings)
    lease: LeaseSettings = field(default_factory=LeaseSettings)
    checks: Sequence[Admission] = ()
    middleware: tuple[Middleware, ...] = ()
    item_functions: Mapping[str, ItemFunction] = field(default_factory=dict)

    @property
    def node_name(self) -> str:
        """Under which people know this node; the same for as long as the process lives."""
        return self.name or f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Ground:
    """What the parts of an engine stand on. `consumers` may come and go while they run."""

    store: Store
    clock: Clock
    consumers: Mapping[str, Consumer]
    executors: Mapping[str, ExecutorProtocol]
    queues: Mapping[str, QueueSettings]
    settings: EngineSettings
    jitter: Callable[[], float]
    sinks: Sinks
