"""`WorkerActor`: looks after one device, and runs its tasks one by one.

One loop, `run_forever`, decides everything in plain steps and awaits nothing but the clock and its own wake-up. Calls
that may hang run beside it with a time limit: those of the adapter in asyncio tasks, the code of a task in one of its
own or, if it is a plain function, in a thread of this device. An actor is never late, whatever its device does.

A device is up from the moment at which a health check passes until checks fail, a run finds it lost, or somebody takes
it. While it is down the recovery ladder (`model/device_recovery.py`) says what is tried. An actor has no store: it
calls `changed` after every change. Its pool then reports `health`, makes the place ready if `takes_tasks`, and writes
the order that `gave_up` asks for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from taskyard.devices.actor_settings import ActorSettings
from taskyard.devices.adapter_call import AdapterCall, AdapterCalls, CallFailed, check
from taskyard.devices.device import Device
from taskyard.devices.device_thread import DeviceThread
from taskyard.devices.work_item import Cause, WorkItem
from taskyard.model.device import DeviceHealth, DeviceOrders, DeviceSpec, DeviceState
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
from taskyard.ports.explain import rejected

log = logging.getLogger("taskyard.devices")

INBOX_AT_MOST = 1
"""Items that wait for this device: a pool hands over one when the last has ended, and more would only be stuck here."""

CLOSE_S = 5.0
"""Seconds: how long an adapter may take to let go of its device."""

AFTER_FAULT_S = 1.0
"""Seconds until an actor that has failed itself goes on: no busy loop."""

CONNECT, HEALTH, CLOSE = "connect", "health check", "close"


class WorkerActor:
    """Belongs to the event loop that runs `run_forever`. `jitter` gives numbers between 0 and 1. `changed` is called
    after every change of `state`, `health`, `takes_tasks` or `gave_up`, on the loop; it must not block or raise."""

    def __init__(
        self,
        spec: DeviceSpec,
        adapter: DeviceAdapter,
        *,
        clock: Clock,
        jitter: Callable[[], float],
        settings: ActorSettings | None = None,
        changed: Callable[[WorkerActor], None] = lambda actor: None,
        orders: DeviceOrders | None = None,
    ) -> None:
        self.spec, self.adapter = spec, adapter
        self.inbox: asyncio.Queue[WorkItem] = asyncio.Queue()
        self.current: WorkItem | None = None
        """What it is busy with, also if that goes on after its caller has left."""
        self.last_beat: datetime | None = None
        """When the device last answered a health check."""
        self.gave_up = ""
        """Why the ladder has ended, until an order says that the device is quarantined; then it is empty again. The
        pool writes that order, and hands it back with `set_orders`."""
        self._clock, self._jitter, self._changed = clock, jitter, changed
        self._settings = settings or ActorSettings()
        self._ladder = self._settings.ladder
        self._orders = orders or DeviceOrders()
        self._wake = asyncio.Event()
        self._calls = AdapterCalls(self._wake.set)
        self._thread = DeviceThread(spec.name)
        self._is_up = self._is_let_go = self._is_closing = self._has_ended = self._is_running = False
        self._is_adapter_open = False
        self._since: datetime = clock.now()
        self._reason = "not connected yet"
        self._recovery = Recovery.begin(clock.monotonic())
        self._plan: NextStep | None = None
        self._beat_mono = 0.0
        self._misses = 0
        self._interrupt_mono: float | None = None
        self._over = asyncio.Event()
        self._told = self._facts()

    def __repr__(self) -> str:
        return f"<WorkerActor {self.name!r} {self.state}>"

    @property
    def emulator_id(self) -> int:
        """Its number, as the source design calls it."""
        return self.spec.number

    @property
    def name(self) -> str:
        return self.spec.name

    # --- what it does now ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> DeviceState:
        orders = self._orders.at(self._clock.now())
        if orders.quarantined is not None or self.gave_up:
            return DeviceState.QUARANTINED
        if orders.taken is not None and self.current is None:
            return DeviceState.TAKEN
        if not self._is_up or self._is_closing:
            return DeviceState.DOWN
        if orders.drained is not None or orders.taken is not None:
            return DeviceState.DRAINING
        return DeviceState.BUSY if self.load else DeviceState.IDLE

    @property
    def health(self) -> DeviceHealth:
        """What a store keeps of it."""
        return DeviceHealth(
            is_up=self._is_up,
            since=self._since,
            reason=self._reason,
            step=self._step_name,
            beat_at=self.last_beat,
        )

    @property
    def _step_name(self) -> str:
        """Of the ladder; empty if the device is up, or let go."""
        if self.gave_up:
            return str(RecoveryStep.QUARANTINE)
        return "" if self._is_up or self._is_let_go else str(self._plan.step if self._plan else RecoveryStep.RECONNECT)

    @property
    def takes_tasks(self) -> bool:
        """Whether a task may be sent here: the place of the device is ready. It may be busy."""
        return self.state in (DeviceState.IDLE, DeviceState.BUSY) and not self._is_left_behind

    @property
    def _is_left_behind(self) -> bool:
        """Code goes on here whose caller has left: its task may be anywhere by now."""
        return self.current is not None and self.current.is_detached

    @property
    def load(self) -> int:
        """Items that it has: the current one, and those that wait."""
        return self.inbox.qsize() + (self.current is not None)

    def is_idle(self) -> bool:
        """Whether a task would begin at once. Never while it is down."""
        return self.state is DeviceState.IDLE

    # --- for the pool -------------------------------------------------------------------------------------------------

    def submit(self, item: WorkItem) -> bool:
        """Put it into the inbox; False, without a trace, if this device takes no task now."""
        if not self.takes_tasks or self.load > INBOX_AT_MOST:
            return False
        self.inbox.put_nowait(item)
        self._wake.set()
        return True

    def set_orders(self, orders: DeviceOrders) -> None:
        """What people have said of it now. Drained, it gets no new task, and is looked after. Taken or quarantined, it
        gets none, and is not touched at all once its run has ended. What was taken for a time comes back by itself."""
        if orders.quarantined is not None:
            self.gave_up = ""
        self._orders = orders
        self._wake.set()

    def replace_spec(self, spec: DeviceSpec) -> None:
        """New labels, for the next run. Another address or other settings need another actor."""
        self.spec = spec

    async def close(self, *, grace_s: float | None = None) -> None:
        """Take nothing more, and return when the run has ended and the adapter has let go. After `grace_s`, if it is
        given, the run is interrupted as if the device were lost; code that ignores that is left behind."""
        self._is_closing = True
        if grace_s is not None:
            self._interrupt_mono = self._clock.monotonic() + grace_s
        self._wake.set()
        if self._is_running:
            await self._over.wait()
        else:
            self._refuse_waiting()

    async def run_forever(self) -> None:
        """Until `close`, or until this asyncio task is cancelled."""
        if self._is_running:
            raise RuntimeError(f"the actor of the device {self.name!r} runs already")
        self._is_running, self._has_ended = True, False
        try:
            while not self._has_ended:
                # Race: a wake-up that comes after this line is seen by the wait; what it is about, by the next step.
                self._wake.clear()
                until_mono = self._step_safely()
                if not self._has_ended:
                    await self._clock.wait(self._wake, until_mono)
        finally:
            self._end()

    def _end(self) -> None:
        self._is_running = False
        self._is_closing = True
        self._refuse_waiting()
        self._calls.cancel_all()
        if self.current is not None:
            self.current.detach()
            self.current.interrupt()
        self._thread.close()
        self._over.set()

    # --- one step -----------------------------------------------------------------------------------------------------

    def _step_safely(self) -> float | None:
        try:
            until_mono = self._step()
        except Exception as exc:
            log.exception("device %s: its actor failed and goes on", self.name, extra={"device": self.name})
            self._is_up, self._reason = False, f"its actor failed: {type(exc).__name__}"
            self._plan = None
            self._calls.drop(self._clock.monotonic())
            until_mono = self._clock.monotonic() + AFTER_FAULT_S
        self._tell()
        return until_mono

    def _step(self) -> float | None:
        """Everything that is due; when to look again."""
        now = self._clock.monotonic()
        times: list[float | None] = [self._look_after_run(now)]
        if self._is_closing and self._may_end():
            times.append(self._step_closing(now))
        elif self._must_let_go():
            times.append(self._step_let_go(now))
        else:
            times.append(self._step_care(now))
        if self.takes_tasks:
            times.append(self._begin_next())
        else:
            self._refuse_waiting()
        return min((time for time in times if time is not None), default=None)

    # --- the run ------------------------------------------------------------------------------------------------------

    def _begin_next(self) -> float | None:
        while self.current is None and not self.inbox.empty():
            item = self.inbox.get_nowait()
            if item.is_over:
                continue  # cancelled while it waited
            self.current = item
            text = "device %s: task %s from %s begins"
            log.info(text, self.name, item.task_id, item.task_type, extra=self._about(item))
            item.begin(Device(self.spec, self.adapter), self._thread, self._wake.set)
            return item.due_mono
        return None

    def _refuse_waiting(self) -> None:
        while not self.inbox.empty():
            self.inbox.get_nowait().refuse(rejected(f"the device {self.name!r} takes no task now: {self.state}"))

    def _look_after_run(self, now: float) -> float | None:
        item = self.current
        if item is None:
            return None
        if item.is_over:
            self._end_run(item, now)
            return None
        if self._interrupt_mono is not None and now >= self._interrupt_mono and item.cause is None:
            self._lose_run(item, "the device is removed", now)
        if item.due_mono is not None and now >= item.due_mono:
            if item.cause is None:
                item.expire()
            else:
                item.interrupt()  # its cleanup has had its time
            item.graces += 1
            item.due_mono = now + self._settings.cleanup_grace_s if item.graces == 1 else None
        times = [time for time in (item.due_mono, self._interrupt_mono) if time is not None and time > now]
        return min(times, default=None)

    def _lose_run(self, item: WorkItem, reason: str, now: float) -> None:
        if item.cause is None:
            item.lose(reason)
            item.graces, item.due_mono = 1, now + self._settings.cleanup_grace_s

    def _end_run(self, item: WorkItem, now: float) -> None:
        self.current = None
        was_lost = item.found_device_lost and item.cause is None
        self._recovery = after_run(self._recovery, was_lost=was_lost)
        text = "device %s: task %s from %s has ended after %.3f s"
        log.info(text, self.name, item.task_id, item.task_type, now - item.began_mono, extra=self._about(item))
        if was_lost and self._is_up:
            self._go_down(item.lost_reason, now)
        # The place is not ready any more when the answer comes: the task must not come back to this device at once.
        self._tell()
        item.finish()

    def _about(self, item: WorkItem) -> dict[str, object]:
        run = item.request.run
        fields: dict[str, object] = {"device": self.name, "task": item.task_id, "consumer": item.task_type}
        if run is not None:
            fields["task_record"] = run.claim.record
        return fields

    # --- the device ---------------------------------------------------------------------------------------------------

    def _must_let_go(self) -> bool:
        if self.gave_up:
            return True
        orders = self._orders.at(self._clock.now())
        is_set_aside = orders.taken is not None or orders.quarantined is not None
        return is_set_aside and (self._is_let_go or self.current is None)

    def _step_let_go(self, now: float) -> float | None:
        """A person uses it, or it is quarantined."""
        self._is_let_go = True
        self._plan = None
        time = self._close_adapter(now)
        until = self._orders.taken_until
        if until is not None and self._orders.quarantined is None:
            left_s = (until - self._clock.now()).total_seconds()
            back_mono = now + max(left_s, 0.0)
            time = back_mono if time is None else min(time, back_mono)
        return time

    def _close_adapter(self, now: float) -> float | None:
        """Have the adapter let go once; until when to wait for that."""
        call = self._calls.current
        if call is not None and call.name != CLOSE:
            self._calls.drop(now)
            call = None
        if call is not None:
            self._calls.take_ended(now)
            return call.until_mono if self._calls.current is not None else None
        if not self._is_adapter_open:
            return None
        free_mono = self._calls.free_at(now)
        if free_mono is not None and free_mono > now:
            return free_mono
        self._is_adapter_open = False
        self._calls.start(CLOSE, self.adapter.close, now=now, timeout_s=CLOSE_S)
        return now + CLOSE_S

    def _may_end(self) -> bool:
        """Nothing runs, or it has been interrupted twice and ignores that."""
        item = self.current
        return item is None or (self._interrupt_mono is not None and item.graces >= 2)

    def _step_closing(self, now: float) -> float | None:
        time = self._close_adapter(now)
        self._has_ended = time is None
        return time

    def _step_care(self, now: float) -> float | None:
        if self._is_let_go:
            self._is_let_go = self._is_up = False
            self._reason, self._since = "not checked since it was given back", self._clock.now()
            self._recovery = Recovery.begin(now)
            self._calls.drop(now)
        call = self._calls.take_ended(now)
        if call is not None:
            self._note_answer(call, now)
        if self.gave_up:
            return now
        if self._calls.current is not None:
            return self._calls.current.until_mono
        return self._step_up(now) if self._is_up else self._step_down(now)

    def _step_up(self, now: float) -> float | None:
        at_mono = self._beat_mono
        if now < at_mono:
            return at_mono
        return self._call(HEALTH, now)

    def _step_down(self, now: float) -> float | None:
        item = self.current
        if item is not None and item.cause is Cause.LOST and item.graces == 1 and item.due_mono is not None:
            return item.due_mono  # its cleanup has the device until then
        if self._plan is None:
            self._plan = next_step(self._recovery, self._ladder, now_mono=now, jitter=self._jitter())
        if now < self._plan.at_mono:
            return self._plan.at_mono
        if self._plan.step is RecoveryStep.QUARANTINE:
            self.gave_up = self._reason or "it does not answer"
            log.warning("device %s: quarantined: %s", self.name, self.gave_up, extra={"device": self.name})
            return now
        return self._call(CONNECT if self._plan.step is RecoveryStep.RECONNECT else self._plan.step, now)

    def _call(self, name: str, now: float) -> float | None:
        """Ask the adapter for something, now or as soon as it is free."""
        free_mono = self._calls.free_at(now)
        if free_mono is None:
            return None  # the end of a stuck call wakes us
        if free_mono > now:
            return free_mono
        calls = {
            HEALTH: (self.adapter.health, self._settings.check_s),
            CONNECT: (self.adapter.connect, self._settings.connect_s),
            RecoveryStep.RESTART_APP: (self.adapter.restart_app, self._settings.restart_app_timeout_s),
            RecoveryStep.RESTART: (self.adapter.restart, self._settings.restart_timeout_s),
        }
        call, timeout_s = calls[name]
        self._is_adapter_open = True
        self._calls.start(name, call, now=now, timeout_s=timeout_s)
        return now + timeout_s

    def _note_answer(self, call: AdapterCall, now: float) -> None:
        try:
            check(call)
        except CallFailed as failed:
            self._note_failure(call, failed, now)
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
        if self._is_up:
            return
        self._is_up, self._reason, self._since, self._plan = True, "", self.last_beat, None
        self._recovery = after_up(self._recovery, now_mono=now)
        # Heartbeats of devices that came up together are spread from here on.
        self._beat_mono = now + self._settings.heartbeat_s * (1 - 0.9 * self._jitter())

    def _note_failure(self, call: AdapterCall, failed: CallFailed, now: float) -> None:
        if self._is_up:
            self._misses += 1
            self._beat_mono = now
            if failed.is_lost or self._misses >= self._settings.misses:
                self._go_down(failed.reason, now)
            return
        self._reason = failed.reason
        if call.name in (CONNECT, HEALTH):
            is_reachable = call.name == HEALTH and not failed.is_lost
            self._recovery = after_try(self._recovery, tried_mono=call.began_mono, is_reachable=is_reachable)
        else:
            self._recovery = after_restart(self._recovery, RecoveryStep(call.name), now_mono=now)
        self._plan = None

    def _go_down(self, reason: str, now: float) -> None:
        self._is_up, self._reason, self._since = False, reason, self._clock.now()
        self._misses, self._plan = 0, None
        self._recovery = after_down(self._recovery, self._ladder, now_mono=now)
        self._calls.drop(now)
        if self.current is not None:
            self._lose_run(self.current, reason, now)

    # --- telling ------------------------------------------------------------------------------------------------------

    def _facts(self) -> tuple[DeviceState, bool, str, str, bool, str]:
        """Everything that is told, but for the heartbeat."""
        return self.state, self._is_up, self._reason, self._step_name, self.takes_tasks, self.gave_up

    def _tell(self) -> None:
        told, facts = self._told, self._facts()
        if facts == told:
            return
        self._told = facts
        if facts[0] is not told[0]:
            text = "device %s: %s, was %s%s"
            reason = f" ({self._reason})" if self._reason else ""
            log.info(text, self.name, facts[0], told[0], reason, extra={"device": self.name})
        try:
            self._changed(self)
        except Exception:
            log.exception("device %s: the pool failed to take note of a change", self.name)
