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
import contextvars
import logging
from collections.abc import Callable
from datetime import datetime

from taskyard.devices.actor_settings import ActorSettings
from taskyard.devices.care import DeviceCare
from taskyard.devices.device import RESTART_LIMIT_S, Device
from taskyard.devices.device_thread import DeviceThread
from taskyard.devices.work_item import Cause, WorkItem
from taskyard.model.device import CODE_GOES_ON, DeviceHealth, DeviceOrders, DeviceSpec, DeviceState
from taskyard.model.notes import AuditStamp
from taskyard.ports.clock import Clock
from taskyard.ports.device import DeviceAdapter
from taskyard.ports.explain import internal_fault, rejected

log = logging.getLogger("taskyard.devices")

INBOX_AT_MOST = 1
"""Items that wait for this device: a pool hands over one when the last has ended, and more would only be stuck here."""

REREAD_S = 5.0
"""Seconds between two looks at the wall clock while a device is taken for a time: somebody may set that clock."""

REVOKED_CLEANUP_S = 2.0
"""Seconds: how long the code of a run may use a device that another node may serve soon. A node that has lost its lease
of 15 s has 3 s until others take over."""

AFTER_FAULT_S = 1.0
"""Seconds until an actor that has failed itself goes on: no busy loop."""


class WorkerActor:
    """Belongs to the event loop that runs `run_forever`. `jitter` gives numbers between 0 and 1. `changed` is called on
    the loop after every change of `health`, `takes_tasks` or `gave_up`, but not for a heartbeat, nor when the device
    becomes busy or idle again, which would be for each task; it must not block or raise."""

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
        self._clock, self._changed = clock, changed
        self._settings = settings or ActorSettings()
        self._orders = orders or DeviceOrders()
        self._wake, self._over = asyncio.Event(), asyncio.Event()
        self._care = DeviceCare(
            spec.name,
            adapter,
            clock=clock,
            jitter=jitter,
            settings=self._settings,
            woken=self._wake.set,
            lost=self._lose_run,
        )
        self._thread = DeviceThread(spec.name)
        self._is_running = self._is_closing = self._has_ended = self._is_stepping = False
        self._context: contextvars.Context | None = None
        self._interrupt_mono: float | None = None
        self._cut_mono: float | None = None
        """When code and actor stop to use the device, because another node may serve it."""
        self.closing_adapter: asyncio.Task[None] | None = None
        """Ends when the adapter has let go, or cannot, after an actor that was cancelled."""
        self._told, self._logged = self._facts(), self.state

    def __repr__(self) -> str:
        return f"<WorkerActor {self.name!r} {self.state}>"

    @property
    def emulator_id(self) -> int:
        """Its number, as the source design calls it."""
        return self.spec.number

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def last_beat(self) -> datetime | None:
        """When the device last answered a health check."""
        return self._care.last_beat

    @property
    def gave_up(self) -> str:
        """Why the ladder has ended, until an order says that the device is quarantined; then it is empty again. The
        pool writes that order, and hands it back with `set_orders`."""
        return self._care.gave_up

    # --- what it does now ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> DeviceState:
        orders = self._orders_now
        if orders.quarantined is not None or self.gave_up:
            return DeviceState.QUARANTINED
        if orders.taken is not None and self.current is None:
            return DeviceState.TAKEN
        if not self._care.is_up or self._care.is_let_go or self._is_closing or self.is_left_behind:
            return DeviceState.DOWN
        if orders.drained is not None or orders.taken is not None:
            return DeviceState.DRAINING
        return DeviceState.BUSY if self.load else DeviceState.IDLE

    @property
    def _orders_now(self) -> DeviceOrders:
        """Without what has run out."""
        orders = self._orders
        return orders if orders.taken_until is None else orders.at(self._clock.now())

    @property
    def health(self) -> DeviceHealth:
        """What a store keeps of it."""
        care = self._care
        if self.current is not None and self.is_left_behind:
            return DeviceHealth(since=self.current.detached_at, reason=CODE_GOES_ON, beat_at=care.last_beat)
        return DeviceHealth(
            is_up=care.is_up, since=care.since, reason=care.reason, step=care.step_name, beat_at=care.last_beat
        )

    @property
    def takes_tasks(self) -> bool:
        """Whether a task may be sent here: the place of the device is ready. It may be busy."""
        return self.state in (DeviceState.IDLE, DeviceState.BUSY)

    @property
    def is_left_behind(self) -> bool:
        """Code goes on here whose caller has left: its task may be anywhere by now."""
        return self.has_code and self.current is not None and self.current.is_detached

    @property
    def has_code(self) -> bool:
        """Whether code of a run goes on here, also after the end of the actor."""
        return self.current is not None and not self.current.is_over

    @property
    def is_reachable(self) -> bool:
        """Whether it could be connected to at the last try."""
        return self._care.is_reachable

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
        if self.current is None and self._context is not None and not self._is_stepping:
            # At once, without a turn of the loop. In the context of the actor: its log lines are none of the run.
            self._context.run(self._begin_now)
        else:
            self._wake.set()
        return True

    @property
    def to_hand_over(self) -> AuditStamp | None:
        """The order of the person whose time begins now: nothing runs here any more."""
        is_due = self._orders.taken_for_s is not None and self.state is DeviceState.TAKEN and not self.load
        return self._orders.taken if is_due else None

    def set_orders(self, orders: DeviceOrders) -> None:
        """What people have said of it now. Drained, it gets no new task, and is looked after. Taken or quarantined, it
        gets none, and is not touched at all once its run has ended. What was taken for a time comes back by itself."""
        if orders.quarantined is not None:
            self._care.gave_up = ""
        self._orders = orders
        self._wake.set()

    def look(self) -> None:
        """Something has changed: the caller of the current item has left."""
        self._wake.set()

    def replace_spec(self, spec: DeviceSpec) -> None:
        """New labels, for the next run. Another address or other settings need another actor."""
        self.spec = spec

    def revoke(self, reason: str) -> None:
        """Another node may serve the device soon, so close this actor. What runs is interrupted; 2 s later neither its
        cleanup nor the actor can use the device any more."""
        self._is_closing = True
        if self._cut_mono is None:
            self._cut_mono = self._clock.monotonic() + REVOKED_CLEANUP_S
            self._lose_run(reason)
        self._wake.set()

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
        self._context = contextvars.copy_context()
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
        self._is_running, self._context = False, None
        self._is_closing = True
        self._refuse_waiting()
        self.closing_adapter = self._care.cancel()
        if self.current is not None:
            self._shut_out(self.current)
            self.current.leave_alone()
        self._thread.close()
        self._over.set()

    def _shut_out(self, item: WorkItem) -> None:
        """Code that is left behind cannot use the device any more."""
        if item.device is not None:
            item.device.close()

    # --- one step -----------------------------------------------------------------------------------------------------

    def _step_safely(self) -> float | None:
        self._is_stepping = True
        try:
            until_mono = self._step()
        except Exception as exc:
            self._note_fault(exc)
            until_mono = self._clock.monotonic() + AFTER_FAULT_S
        self._is_stepping = False
        self._tell()
        return until_mono

    def _note_fault(self, exc: Exception) -> None:
        text = "device %s: its actor failed and goes on"
        log.error(text, self.name, extra={"device": self.name}, exc_info=exc)
        self._care.fail(f"its actor failed: {type(exc).__name__}")

    def _step(self) -> float | None:
        """Everything that is due; when to look again."""
        now = self._clock.monotonic()
        times: list[float | None] = [self._look_after_run(now)]
        if self._is_closing and self._may_end():
            if self.current is not None:
                self._shut_out(self.current)
            times.append(self._care.let_go(now))
            self._has_ended = times[-1] is None
        elif self._must_let_go(now):
            times.append(self._care.let_go(now))
            times.append(self._back_mono(now))
        else:
            times.append(self._care.step(now, cleanup_mono=self._cleanup_mono))
        if self.takes_tasks:
            times.append(self._begin_next())
        else:
            self._refuse_waiting()
        return min((time for time in times if time is not None), default=None)

    # --- the run ------------------------------------------------------------------------------------------------------

    def _begin_now(self) -> None:
        if self._begin_next() is not None:
            self._wake.set()
        self._tell()

    def _begin_next(self) -> float | None:
        while self.current is None and not self.inbox.empty():
            item = self.inbox.get_nowait()
            if item.is_over:
                continue  # cancelled while it waited
            self.current = item
            text = "device %s: task %s from %s begins"
            log.info(text, self.name, item.task_id, item.task_type, extra=self._about(item))
            try:
                limit_s = max(RESTART_LIMIT_S, self._settings.restart_app_timeout_s)
                device = Device(self.spec, self.adapter, restart_app_limit_s=limit_s)
                item.begin(device, self._thread, self._on_over)
            except Exception as exc:
                log.exception("device %s: a task could not begin", self.name, extra=self._about(item))
                item.break_off(internal_fault(exc))
            return item.due_mono
        return None

    def _on_over(self) -> None:
        """The code of the current item has ended. Its caller is answered first, then the rest is looked after."""
        item = self.current
        try:
            if item is not None and not self._is_stepping:
                self._end_run(item, self._clock.monotonic())
        except Exception as exc:
            self._note_fault(exc)
        finally:
            self._wake.set()

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
        if self._interrupt_mono is not None and now >= self._interrupt_mono:
            self._interrupt_run(item, "the device is closed")
        if self._is_cut(now) and item.device is not None:
            item.device.cut_off()
        if item.due_mono is not None and now >= item.due_mono:
            if item.cause is None:
                item.expire()
            else:
                item.interrupt()  # its cleanup has had its time
            item.graces += 1
            item.due_mono = now + self._settings.cleanup_grace_s if item.graces == 1 else None
        times = [time for time in (item.due_mono, self._interrupt_mono, self._cut_mono) if time and time > now]
        return min(times, default=None)

    def _lose_run(self, reason: str) -> None:
        item = self.current
        if item is not None:
            if item.device is not None:
                item.device.lose(reason)
            self._interrupt_run(item, reason)

    def _interrupt_run(self, item: WorkItem, reason: str) -> None:
        if item.cause is None:
            item.lose(reason)
            item.graces, item.due_mono = 1, self._clock.monotonic() + self._settings.cleanup_grace_s

    @property
    def _cleanup_mono(self) -> float | None:
        """Until when the code of a run that was lost has the device for its cleanup."""
        item = self.current
        return item.due_mono if item is not None and item.cause is Cause.LOST and item.graces == 1 else None

    def _end_run(self, item: WorkItem, now: float) -> None:
        self.current = None
        if item.is_detached:
            self._care.since = self._clock.now()  # until now it was reported down
        text = "device %s: task %s from %s has ended after %.3f s"
        log.info(text, self.name, item.task_id, item.task_type, now - item.began_mono, extra=self._about(item))
        try:
            self._care.note_run(now, lost=item.lost_reason if item.cause is None else "", is_suspect=item.is_suspect)
            # The place is not ready any more when the answer comes: the task must not come back to this device at once.
            self._tell()
        finally:
            item.finish()

    def _about(self, item: WorkItem) -> dict[str, object]:
        run = item.request.run
        fields: dict[str, object] = {"device": self.name, "task": item.task_id, "consumer": item.task_type}
        if run is not None:
            fields["task_record"] = run.claim.record
        return fields

    # --- the device ---------------------------------------------------------------------------------------------------

    def _may_end(self) -> bool:
        """Nothing runs, or it has been interrupted twice and ignores that."""
        item = self.current
        return item is None or (self._interrupt_mono is not None and item.graces >= 2)

    def _is_cut(self, now: float) -> bool:
        return self._cut_mono is not None and now >= self._cut_mono

    def _must_let_go(self, now: float) -> bool:
        if self.gave_up or self._is_cut(now):
            return True
        orders = self._orders_now
        is_set_aside = orders.taken is not None or orders.quarantined is not None
        return is_set_aside and (self._care.is_let_go or self.current is None)

    def _back_mono(self, now: float) -> float | None:
        """When to look whether a device that was taken for a time is back."""
        until = self._orders.taken_until
        if until is None or self._orders.quarantined is not None or self.gave_up:
            return None
        left_s = (until - self._clock.now()).total_seconds()
        return now + min(max(left_s, 0.0), REREAD_S)

    # --- telling ------------------------------------------------------------------------------------------------------

    def _facts(self) -> tuple[bool, str, str, bool, str]:
        """What the pool is told."""
        health = self.health
        return health.is_up, health.reason, health.step, self.takes_tasks, self.gave_up

    def _tell(self) -> None:
        state, facts = self.state, self._facts()
        if state is not self._logged:
            text = "device %s: %s, was %s%s"
            reason = f" ({self._care.reason})" if self._care.reason else ""
            log.info(text, self.name, state, self._logged, reason, extra={"device": self.name})
            self._logged = state
        if facts == self._told:
            return
        self._told = facts
        try:
            self._changed(self)
        except Exception:
            log.exception("device %s: the pool failed to take note of a change", self.name)
