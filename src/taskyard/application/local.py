"""`LocalApplication`: the application on a yard of this process."""

from __future__ import annotations

from taskyard.application.audit import LocalAudit
from taskyard.application.calls import YardContext
from taskyard.application.consumers import LocalConsumers
from taskyard.application.devices import LocalDevices
from taskyard.application.events import LocalEvents
from taskyard.application.nodes import LocalNodes
from taskyard.application.overview import LocalOverview
from taskyard.application.queues import LocalQueues
from taskyard.application.schedules import LocalSchedules
from taskyard.application.tasks import LocalTasks
from taskyard.yard import Yard


class LocalApplication:
    """All calls of `taskyard.application.interface.Application` on an open yard. Make it with `open_application`."""

    def __init__(self, yard: Yard, *, actor: str, app: str | None = None) -> None:
        self._yard = yard
        context = YardContext(yard, actor, app)
        self.tasks = LocalTasks(context)
        self.queues = LocalQueues(context)
        self.schedules = LocalSchedules(context)
        self.nodes = LocalNodes(context)
        self.devices = LocalDevices(context)
        self.events = LocalEvents(context)
        self.overview = LocalOverview(context)
        self.consumers = LocalConsumers(context)
        self.audit = LocalAudit(context)

    @property
    def store(self) -> str:
        from taskyard.application.opening import describe_store  # which makes this class

        return describe_store(self._yard)
