"""`DeviceCare`: keeps one device up. Heartbeats while it is up, the recovery ladder while it is down.

It awaits nothing: an actor asks it for a `step` whenever something may be due, and is woken when a call has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from datetime import datetime

from taskyard.devices.actor_settings import ActorSettings
from taskyard.devices.adapter_call import SETTLE_S, STUCK_AT_MOST, AdapterCall, AdapterCalls, CallFailed, check
from taskyard.model.device_recovery import (
    NextStep,
    Recovery,
    RecoveryStep,
    after_down,
    after_restart,
    after_run,
    after_try,
    after_up,
    next_step,
)
from taskyard.ports.clock import Clock
from taskyard.ports.device import DeviceAdapter
from taskyard.ports.explain import in_words

log = logging.getLogger("taskyard.devices")

CLOSE_S = 5.0
"""Seconds: how long an adapter may take to let go of its device."""

CONNECT, HEALTH, CLOSE = "connect", "health check", "close"


class DeviceCare:
    """`woken` is called when there is something to do. `lost` is called when the device goes down, with the reason."""

    def __init__(
        self,
        name: str,
        adapter: DeviceAdapter,
        *,
        clock: Clock,
        jitter: Callable[[], float],
        settings: ActorSettings,
        woken: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self.is_up = self.is_let_go = False
        self.since: datetime = clock.now()
        """Since when it is up, or down."""
        self.reason = "not connected yet"
        """Why it is down."""
        self.last_beat: datetime | None = None
        self.gave_up = ""
        """Why the ladder has ended, until that is acknowledged."""
        self._name, self._adapter, self._clock, self._jitter = name, adapter, clock, jitter
        self._settings, self._ladder, self._lost = settings, settings.ladder, lost
        self._calls = AdapterCalls(woken)
        self._is_adapter_open = False
        self._recovery = Recovery.begin(clock.monotonic())
        self._plan: NextStep | None = None
        self._beat_mono = self._tried_mono = self._checked_mono = 0.0
        self._misses = 0

    @property
    def step_name(self) -> str:
        """Of the ladder; empty if the device is up, or let go."""
        if self.gave_up:
            return str(RecoveryStep.QUARANTINE)
        return "" if self.is_up or self.is_let_go else str(self._plan.step if self._plan else RecoveryStep.RECONNECT)

    @property
    def is_reachable(self) -> bool:
        """Whether the last try could connect, and only the health check failed."""
        return self.is_up or self._recovery.is_reachable

    # --- for the actor ------------------------------------------------------------------------------------------------

    def step(self, now: float, *, cleanup_mono: float | None = None) -> float | None:
        """Everything that is due; when to look again. Until `cleanup_mono` code cleans up after an outage, and the
        ladder waits for it."""
        if self.is_let_go:
            self._take_back(now)
        call = self._calls.take_ended(now)
        if call is not None:
            self._note_answer(call, now)
        if self._calls.current is not None:
            return self._calls.current.until_mono
        if self.is_up:
            return self._beat_mono if now < self._beat_mono else self._call(HEALTH, now)
        return self._recover(now) if cleanup_mono is None else cleanup_mono

    def let_go(self, now: float) -> float | None:
        """Do not touch the device, and have the adapter close its connection, once; until when to wait for that."""
        self.is_let_go, self._plan = True, None
        call = self._calls.current
        if call is not None and call.name == CLOSE and not call.task.done() and now < call.until_mono:
            return call.until_mono
        self._calls.drop(now)
        if not self._is_adapter_open:
            return None
        free_mono = self._calls.free_at(now)
        if free_mono is not None and free_mono > now:
            return free_mono
        self._is_adapter_open = False
        self._calls.start(CLOSE, self._adapter.close, now=now, timeout_s=CLOSE_S)
        return now + CLOSE_S

    def note_run(self, now: float, *, lost: str = "", is_suspect: bool = False) -> None:
        """A run has ended. `lost` says that it found the device lost; after one that is suspect the device is checked
        at once."""
        self._recovery = after_run(self._recovery, was_lost=bool(lost))
        if lost and self.is_up:
            self._go_down(lost, now)
        elif is_suspect:
            self._beat_mono = min(self._beat_mono, now)

    def fail(self, reason: str) -> None:
        """The actor failed: start over."""
        self.is_up, self.reason, self.since, self._plan = False, reason, self._clock.now(), None
        self._calls.drop(self._clock.monotonic())

    def cancel(self) -> asyncio.Task[None] | None:
        """The end of the actor: nothing is waited for. Whatever goes on cannot use the adapter any more when this task
        has ended; None if it is closed already."""
        call = self._calls.current
        is_open = self._is_adapter_open or (call is not None and call.name == CLOSE and not call.task.done())
        self._is_adapter_open = False
        left = self._calls.cancel_all()
        return asyncio.get_running_loop().create_task(self._close_adapter(left)) if is_open else None

    async def _close_adapter(self, left: Collection[asyncio.Task[None]]) -> None:
        if left:
            await asyncio.wait(left, timeout=SETTLE_S)
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._adapter.close()
        except Exception as exc:
            text = "device %s: its adapter was not closed: %s"
            log.warning(text, self._name, in_words(exc), extra={"device": self._name})

    # --- the device ---------------------------------------------------------------------------------------------------

    def _take_back(self, now: float) -> None:
        self.is_let_go = self.is_up = False
        self.reason, self.since = "not checked since it was given back", self._clock.now()
        self._recovery = Recovery.begin(now)
        self._calls.drop(now)

    def _recover(self, now: float) -> float | None:
        if self._plan is None:
            self._plan = next_step(self._recovery, self._ladder, now_mono=now, jitter=self._jitter())
        if now < self._plan.at_mono:
            return self._plan.at_mono
        if self._plan.step is RecoveryStep.QUARANTINE:
            self.gave_up = self.reason or "it does not answer"
            log.warning("device %s: quarantined: %s", self._name, self.gave_up, extra={"device": self._name})
            return now
        return self._call(CONNECT if self._plan.step is RecoveryStep.RECONNECT else self._plan.step, now)

    def _call(self, name: str, now: float) -> float | None:
        """Ask the adapter for something, now or as soon as it is free; when to look again."""
        free_mono = self._calls.free_at(now)
        if free_mono is None:
            # Counts as an attempt, so that the ladder has an end for such an adapter, too.
            self._note_failure(name, CallFailed(f"{STUCK_AT_MOST} calls of its adapter do not end", is_stuck=True), now)
            return now
        if free_mono > now:
            return free_mono
        if name == CONNECT:
            self._tried_mono = now
        elif name == HEALTH:
            self._checked_mono = now
        calls = {
            HEALTH: (self._adapter.health, self._settings.check_s),
            CONNECT: (self._adapter.connect, self._settings.connect_s),
            RecoveryStep.RESTART_APP: (self._adapter.restart_app, self._settings.restart_app_timeout_s),
            RecoveryStep.RESTART: (self._adapter.restart, self._settings.restart_timeout_s),
        }
        call, timeout_s = calls[name]
        self._is_adapter_open = True
        self._calls.start(name, call, now=now, timeout_s=timeout_s)
        return now + timeout_s

    def _note_answer(self, call: AdapterCall, now: float) -> None:
        try:
            check(call)
        except CallFailed as failed:
            self._note_failure(call.name, failed, now)
            return
        if call.name == CONNECT:
            self._call(HEALTH, now)
        elif call.name == HEALTH:
            self._note_beat(call, now)
        else:
            self._recovery = after_restart(self._recovery, RecoveryStep(call.name), now_mono=now)
            self._plan = None

    def _note_beat(self, call: AdapterCall, now: float) -> None:
        self.last_beat = self._clock.now()
        self._misses = 0
        self._beat_mono = call.began_mono + self._settings.heartbeat_s
        if self.is_up:
            return
        self.is_up, self.reason, self.since, self._plan = True, "", self.last_beat, None
        self._recovery = after_up(self._recovery, now_mono=now)
        # Heartbeats of devices that came up together are spread from here on.
        self._beat_mono = now + self._settings.heartbeat_s * (1 - 0.9 * self._jitter())

    def _note_failure(self, name: str, failed: CallFailed, now: float) -> None:
        if self.is_up:
            self._misses += 1
            # An answer that is an error comes fast, and may be a glitch: the next check is not made sooner for it.
            self._beat_mono = max(now, self._checked_mono + self._settings.check_s)
            if failed.is_lost or self._misses >= self._settings.misses:
                self._go_down(failed.reason, now)
            return
        self.reason = failed.reason
        if name in (CONNECT, HEALTH):
            is_reachable = failed.is_stuck or (name == HEALTH and not failed.is_lost)
            tried_mono = now if failed.is_stuck else self._tried_mono
            self._recovery = after_try(self._recovery, tried_mono=tried_mono, is_reachable=is_reachable)
        else:
            self._recovery = after_restart(self._recovery, RecoveryStep(name), now_mono=now)
        self._plan = None

    def _go_down(self, reason: str, now: float) -> None:
        self.is_up, self.reason, self.since = False, reason, self._clock.now()
        self._misses, self._plan = 0, None
        self._recovery = after_down(self._recovery, self._ladder, now_mono=now)
        self._calls.drop(now)
        self._lost(reason)
