"""The recovery ladder: what is done about a device that is down. Pure.

The rungs, from the bottom: reconnect, restart the app, restart the device, quarantine. A device comes back at any of
them: if it can be connected to and a health check passes, it is up. Going up is a matter of time: a rung that has not
helped for `reconnect_s` is left for the next one.

Two kinds of outages differ. A device that *can be connected to*, and then is not healthy, is sick: its app is
restarted, then the device, and if that does not help it is quarantined. A device that *cannot be reached* may just be
unplugged: restarting the app is pointless and left out. The device is restarted as often as is allowed, because an
emulator may have died, and an adapter may be able to switch a device off and on. From then on only reconnecting goes
on, about once a heartbeat, so that the device is up soon after somebody plugs it in. Either kind is quarantined after
an outage of `give_up_s`.

Restarts are counted until the device has been up for `stable_s`: one that comes back from a restart for a moment only
is not restarted for ever.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from taskyard.errors import InvalidInput
from taskyard.model.given import check_count, check_timeout


class RecoveryStep(StrEnum):
    """A rung of the ladder."""

    RECONNECT = "reconnect"
    RESTART_APP = "restart app"
    RESTART = "restart"
    QUARANTINE = "quarantine"


class RecoverySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the ladder is climbed."""

    first_s: float = 0.5
    """Seconds after a failed reconnect until the next one; it doubles with each, up to `most_s`, less some jitter."""
    most_s: float = 10.0
    """Seconds between the starts of two reconnects, at most. An actor never waits longer than its heartbeat."""
    reconnect_s: float = 60.0
    """Seconds on a rung before the next one: a shorter outage of the network needs no restart, and a phone boots in
    less."""
    app_restarts: int = 1
    """How often the app is restarted, until the device has been stable."""
    restarts: int = 2
    """How often the device is restarted, until it has been stable."""
    stable_s: float = 600.0
    """Seconds that a device has to be up before an outage counts as a new one."""
    lost_runs: int = 3
    """Runs in a row that found the device lost, though it was healthy just before and just after: then it is sick."""
    give_up_s: float | None = 86_400.0
    """Seconds that an outage lasts before the device is quarantined whatever the cause; None means that one that cannot
    be reached never is."""

    def __post_init__(self) -> None:
        for field in ("first_s", "most_s", "reconnect_s", "stable_s"):
            check_timeout(getattr(self, field), field=field)
        if self.give_up_s is not None:
            check_timeout(self.give_up_s, field="give_up_s")
        if self.first_s > self.most_s:
            raise InvalidInput("must not be more than most_s", field="first_s", given=self.first_s)
        check_count("app_restarts", self.app_restarts, least=0)
        check_count("restarts", self.restarts, least=0)
        check_count("lost_runs", self.lost_runs, least=1)


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an outage, and of those shortly before it. Times are those of a monotonic clock."""

    down_mono: float
    """Since when it is down."""
    rung_mono: float
    """Since when it is on this rung: the start of the outage, or the last restart."""
    tries: int = 0
    """Reconnects that have failed on this rung."""
    tried_mono: float = 0.0
    """When the last of them began."""
    is_reachable: bool = False
    """Whether the last try could connect, and only the health check failed."""
    app_restarts: int = 0
    restarts: int = 0
    lost_runs: int = 0
    up_mono: float | None = None
    """Since when it is up again; None while it is down."""

    @classmethod
    def begin(cls, now_mono: float) -> Recovery:
        """The device has never been up, or has been stable."""
        return cls(down_mono=now_mono, rung_mono=now_mono)


class NextStep(msgspec.Struct, frozen=True):
    """What is to be done, and when."""

    step: RecoveryStep
    at_mono: float


def next_step(outage: Recovery, settings: RecoverySettings, *, now_mono: float, jitter: float) -> NextStep:
    """What to do about a device that is down. `jitter` lies between 0 and 1."""
    if outage.tries > 0:
        if settings.give_up_s is not None and now_mono - outage.down_mono >= settings.give_up_s:
            return NextStep(RecoveryStep.QUARANTINE, now_mono)
        if now_mono - outage.rung_mono >= settings.reconnect_s:
            if outage.is_reachable and outage.app_restarts < settings.app_restarts:
                return NextStep(RecoveryStep.RESTART_APP, now_mono)
            if outage.restarts < settings.restarts:
                return NextStep(RecoveryStep.RESTART, now_mono)
            if outage.is_reachable:
                return NextStep(RecoveryStep.QUARANTINE, now_mono)
    return NextStep(RecoveryStep.RECONNECT, outage.tried_mono + _pause(outage.tries, settings, jitter))


def _pause(tries: int, settings: RecoverySettings, jitter: float) -> float:
    """Between the starts of two tries. Jitter takes off up to a quarter: many devices that were lost together, with
    their hub or their host, must not come back in step."""
    if tries == 0:
        return 0.0
    pause_s = min(settings.first_s * 2.0 ** min(tries - 1, 60), settings.most_s)
    return pause_s * (1 - jitter / 4)


def after_try(outage: Recovery, *, tried_mono: float, is_reachable: bool) -> Recovery:
    """A reconnect that began at `tried_mono` has failed. A device that could not be reached so far, and now can, may
    just be booting: it gets the time of a rung before anything is restarted."""
    was_plugged_in = is_reachable and not outage.is_reachable and outage.tries > 0
    return _with(
        outage,
        tries=outage.tries + 1,
        tried_mono=tried_mono,
        is_reachable=is_reachable,
        rung_mono=tried_mono if was_plugged_in else outage.rung_mono,
    )


def after_restart(outage: Recovery, step: RecoveryStep, *, now_mono: float) -> Recovery:
    """A restart has ended, well or not. The device gets a while to be reconnected, at once at first."""
    is_app = step is RecoveryStep.RESTART_APP
    return _with(
        outage,
        rung_mono=now_mono,
        tries=0,
        tried_mono=now_mono,
        app_restarts=outage.app_restarts + is_app,
        restarts=outage.restarts + (not is_app),
    )


def after_up(outage: Recovery, *, now_mono: float) -> Recovery:
    """A health check has passed."""
    return _with(outage, up_mono=now_mono)


def after_run(recovery: Recovery, *, was_lost: bool) -> Recovery:
    """A run has ended on the device, and it may have found the device lost."""
    return _with(recovery, lost_runs=recovery.lost_runs + 1 if was_lost else 0)


def after_down(recovery: Recovery, settings: RecoverySettings, *, now_mono: float) -> Recovery:
    """The device has gone down again. One that health checks call healthy, and runs find lost, starts as a sick one."""
    is_stable = recovery.up_mono is not None and now_mono - recovery.up_mono >= settings.stable_s
    is_sick = recovery.lost_runs >= settings.lost_runs
    fresh = Recovery.begin(now_mono)
    if is_stable and not is_sick:
        return _with(fresh, lost_runs=recovery.lost_runs)
    return _with(
        fresh,
        app_restarts=recovery.app_restarts,
        restarts=recovery.restarts,
        lost_runs=0 if is_sick else recovery.lost_runs,
        rung_mono=now_mono - settings.reconnect_s if is_sick else now_mono,
        tries=1 if is_sick else 0,
        tried_mono=now_mono,
        is_reachable=is_sick,
    )


def _with(recovery: Recovery, **fields: Any) -> Recovery:
    return msgspec.structs.replace(recovery, **fields)
