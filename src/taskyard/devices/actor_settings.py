"""How an actor looks after its device."""

from __future__ import annotations

import msgspec

from taskyard.errors import InvalidInput
from taskyard.model.device_recovery import RecoverySettings
from taskyard.model.given import check_count, check_timeout

REPAIR_MARGIN_S = 10.0
"""Seconds beyond what a repair may take: its adapter gives up first, and says why."""


class ActorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, where it does not say otherwise. With these defaults a device that stops to answer is down after at most
    18 s, and one that is back is idle after at most 10 s."""

    heartbeat_s: float = 10.0
    """From one health check to the next. A device is asked while it is busy, too."""
    health_timeout_s: float | None = None
    """For one health check; by default 0.4 of a heartbeat."""
    misses: int = 2
    """How many health checks in a row fail before the device is down. One that says the device is lost is enough."""
    connect_timeout_s: float | None = None
    """For connecting; by default 0.6 of a heartbeat. With a longer one a device that is back may be found later."""
    restart_app_timeout_s: float = 60.0
    """For a restart of the app, or longer if the definition of the device says so."""
    restart_timeout_s: float = 300.0
    """For a restart of the device, or longer if the definition of the device says so."""
    cleanup_grace_s: float = 10.0
    """For code that was interrupted, because its device is lost or its time is up, to clean up. It is interrupted once
    more then."""
    recovery: RecoverySettings = RecoverySettings()

    def __post_init__(self) -> None:
        for field in ("heartbeat_s", "restart_app_timeout_s", "restart_timeout_s", "cleanup_grace_s"):
            check_timeout(getattr(self, field), field=field)
        for field in ("health_timeout_s", "connect_timeout_s"):
            if getattr(self, field) is not None:
                check_timeout(getattr(self, field), field=field)
        check_count("misses", self.misses, least=1)
        if self.check_s * self.misses > self.heartbeat_s:
            raise InvalidInput(
                f"{self.misses} health checks of {self.check_s:g} s do not fit into a heartbeat of "
                f"{self.heartbeat_s:g} s",
                field="health_timeout_s",
                hint="a device that does not answer has to be down within two heartbeats",
            )

    @property
    def check_s(self) -> float:
        """For one health check."""
        return 0.4 * self.heartbeat_s if self.health_timeout_s is None else self.health_timeout_s

    @property
    def connect_s(self) -> float:
        """For connecting."""
        return 0.6 * self.heartbeat_s if self.connect_timeout_s is None else self.connect_timeout_s

    def with_repairs(self, *, restart_app_s: float, restart_s: float) -> ActorSettings:
        """With time for a device whose repairs take so long."""
        return msgspec.structs.replace(
            self,
            restart_app_timeout_s=max(self.restart_app_timeout_s, restart_app_s + REPAIR_MARGIN_S),
            restart_timeout_s=max(self.restart_timeout_s, restart_s + REPAIR_MARGIN_S),
        )

    @property
    def ladder(self) -> RecoverySettings:
        """The recovery, with reconnects no farther apart than heartbeats."""
        most_s = min(self.recovery.most_s, self.heartbeat_s)
        return msgspec.structs.replace(self.recovery, most_s=most_s, first_s=min(self.recovery.first_s, most_s))
