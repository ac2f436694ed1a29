"""The actor of a device: its states, its heartbeat, what it does about an outage, and how it runs tasks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from taskyard.devices.actor import WorkerActor
from taskyard.devices.actor_settings import ActorSettings
from taskyard.devices.device import current_device
from taskyard.devices.executor import DeviceExecutor
from taskyard.errors import DeviceError, DeviceLost, InvalidInput
from taskyard.execution.context import CURRENT
from taskyard.execution.run_handle import RunHandle, RunHost
from taskyard.model.device import DeviceOrders, DeviceState
from taskyard.model.device_recovery import RecoverySettings
from taskyard.model.execution import ErrorCode, ErrorKind, ExecutionResult
from taskyard.model.notes import AuditStamp
from taskyard.model.task import Claim
from taskyard.ports.clock import SystemClock
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutionRequest
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record
from tests.devices.trivial import ScriptedAdapter, a_spec, an_actor, pass_time, running, settled

HEARTBEAT_S = 10.0
STAMP = AuditStamp("ann", ManualClock().now(), "looks odd")


def begin(actor: WorkerActor, call: Callable[[Any], Any], *, is_async: bool = True, **fields: Any) -> Submitted:
    """Submit a run of this device's, as the runner does it."""
    return Submitted(actor, call, is_async, fields)


class Submitted:
    def __init__(self, actor: WorkerActor, call: Callable[[Any], Any], is_async: bool, fields: dict[str, Any]) -> None:
        record = a_record()
        record.device = actor.name
        self.run = RunHandle(Claim(record, 1, 1), RunHost(asyncio.get_running_loop(), lambda _: None))
        self._spec = Consumer(name="daily", encode=str, call=call, is_async=is_async, executor="any")
        self._fields = fields
        self.executor = DeviceExecutor({actor.name: actor}, clock=actor._clock)
        self.task = asyncio.get_running_loop().create_task(self._submit())

    async def _submit(self) -> ExecutionResult:
        self.run.belongs_to(asyncio.current_task())
        CURRENT.set(self.run)
        request = ExecutionRequest(spec=self._spec, payload=None, request_id="r", run=self.run, **self._fields)
        return await self.executor.submit(request)

    async def result(self) -> ExecutionResult:
        async with asyncio.timeout(10):
            return await self.task


class Code:
    """Code of a task that goes on until it is let go."""

    def __init__(self, *, cleanup_s: float = 0.0, clock: ManualClock | None = None, is_deaf: bool = False) -> None:
        self.began, self.gate, self.cleaned_up = asyncio.Event(), asyncio.Event(), False
        self.cancels = 0
        self._cleanup_s, self._clock, self._is_deaf = cleanup_s, clock, is_deaf

    async def __call__(self, _: object) -> str:
        self.began.set()
        try:
            while not self.gate.is_set():
                try:
                    await self.gate.wait()
                except asyncio.CancelledError:
                    self.cancels += 1
                    if not self._is_deaf:
                        raise
            return current_device().name
        finally:
            if self._clock is not None:
                await self._clock.wait(asyncio.Event(), self._clock.monotonic() + self._cleanup_s)
            self.cleaned_up = True


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def adapter() -> ScriptedAdapter:
    return ScriptedAdapter()


@pytest.fixture
def actor(adapter: ScriptedAdapter, clock: ManualClock) -> WorkerActor:
    return an_actor(adapter, clock)


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("DEV-07")
async def test_a_device_starts_down(actor: WorkerActor, adapter: ScriptedAdapter) -> None:
    """It is down, and takes nothing, until it is connected and a health check has passed."""
    adapter.hangs.add("health")
    async with running(actor):
        assert adapter.calls == ["connect", "health"]
        assert (actor.state, actor.is_idle(), actor.takes_tasks) == (DeviceState.DOWN, False, False)
        assert (actor.health.reason, actor.health.step) == ("not connected yet", "reconnect")
        result = await begin(actor, Code()).result()
        assert result.error is not None
        assert result.error.kind is ErrorKind.REJECTED
        adapter.let_go.set()
        await settled()
        assert (actor.state, actor.is_idle(), actor.takes_tasks) == (DeviceState.IDLE, True, True)
        assert (actor.health.reason, actor.health.step) == ("", "")


@pytest.mark.spec("DEV-07")
async def test_the_names_of_the_source_design(actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock) -> None:
    """An actor has the attributes that its source design names, and they tell what it does."""
    code = Code()
    assert (actor.emulator_id, actor.name, actor.adapter, actor.last_beat) == (1, "emu-1", adapter, None)
    async with running(actor):
        assert (actor.state, actor.current, actor.inbox.empty(), actor.is_idle()) == ("idle", None, True, True)
        assert actor.last_beat == clock.now()
        submitted = begin(actor, code)
        await settled()
        assert actor.current is not None
        assert (actor.state, actor.current.task_id, actor.is_idle()) == ("busy", submitted.run.uuid, False)
        code.gate.set()
        assert (await submitted.result()).data == "emu-1"
        assert str(actor.state) == "idle"
        assert actor.current is None
        adapter.is_plugged_in = False
        await pass_time(clock, HEARTBEAT_S)
        assert (actor.state, actor.is_idle()) == ("down", False)


@pytest.mark.spec("DEV-04")
async def test_tasks_of_a_device_run_one_by_one(actor: WorkerActor) -> None:
    """A second task waits in the inbox until the first has ended; a third is refused, because others may be free."""
    first, second = Code(), Code()
    async with running(actor):
        one, two = begin(actor, first), begin(actor, second)
        await settled()
        assert (first.began.is_set(), second.began.is_set(), actor.inbox.qsize()) == (True, False, 1)
        error = (await begin(actor, Code()).result()).error
        assert error is not None
        assert error.kind is ErrorKind.REJECTED
        first.gate.set()
        await one.result()
        await settled()
        assert second.began.is_set()
        second.gate.set()
        assert (await two.result()).success


@pytest.mark.spec("DEV-04", "DEV-08")
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_slow_device_holds_up_no_other(is_async: bool) -> None:
    """While the code and the adapter of one device hang, another runs one task after the other."""
    clock = SystemClock()
    slow, quick = an_actor(ScriptedAdapter(), clock, 1), an_actor(ScriptedAdapter(), clock, 2)
    release, hanging = threading.Event(), Code()
    async with running(slow, quick):
        stuck = begin(slow, hanging if is_async else lambda _: release.wait(10), is_async=is_async)
        await settled()
        for _ in range(20):
            result = await begin(quick, lambda _: threading.current_thread().name, is_async=False).result()
            assert result.data == "taskyard-device-emu-2"
        assert not stuck.task.done()
        release.set()
        hanging.gate.set()
        assert (await stuck.result()).success


@pytest.mark.spec("DEV-07")
@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("is_async", [True, False])
async def test_an_error_in_a_task_never_kills_the_actor(
    actor: WorkerActor, error: BaseException, is_async: bool
) -> None:
    """Whatever a task raises, it is answered, and the next task runs on the same device."""

    async def fail(_: object) -> None:
        raise error

    def fail_plainly(_: object) -> None:
        raise error

    async with running(actor):
        result = await begin(actor, fail if is_async else fail_plainly, is_async=is_async).result()
        assert result.error is not None
        assert result.error.type == type(error).__name__
        assert actor.is_idle()
        code = Code()
        code.gate.set()
        assert (await begin(actor, code).result()).success


@pytest.mark.spec("DEV-07")
async def test_a_bug_of_the_actor_marks_the_device_down(
    actor: WorkerActor, clock: ManualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a step of the actor itself fails, it is logged, the device is down, and the actor goes on."""
    async with running(actor):
        with monkeypatch.context() as patched:
            patched.setattr(actor._care, "step", lambda *args, **kwargs: 1 / 0)
            actor.set_orders(DeviceOrders())
            await settled()
            assert (actor.state, actor.health.reason) == (DeviceState.DOWN, "its actor failed: ZeroDivisionError")
        assert "its actor failed and goes on" in caplog.text
        await pass_time(clock, 1.0)
        assert actor.is_idle()


async def test_a_task_that_cannot_begin_is_answered(actor: WorkerActor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has no thread left, or a step towards the code fails: the task is answered, and the next one runs."""

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    async with running(actor):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            error = (await begin(actor, lambda _: 1, is_async=False).result()).error
        assert error is not None
        assert (error.kind, error.message) == (
            ErrorKind.REJECTED,
            "no thread could be started: can't start new thread",
        )
        submitted = begin(actor, Code())
        submitted.run.mark_started = lambda worker_pid=None: refuse(worker_pid)  # type: ignore[method-assign]
        error = (await submitted.result()).error
        assert error is not None
        assert (error.kind, error.details) == (ErrorKind.SYSTEM, {"internal_fault": True})
        assert actor.is_idle()
        assert (await begin(actor, lambda _: 1, is_async=False).result()).data == 1


async def test_lines_of_the_actor_are_none_of_the_run(
    actor: WorkerActor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What an actor logs when a task begins and ends is logged outside of the run, whose lines it would become."""
    caplog.set_level(logging.INFO, "taskyard.devices")
    seen: list[object] = []
    monkeypatch.setattr("taskyard.devices.actor.log.info", lambda *args, **kwargs: seen.append(CURRENT.get(None)))
    async with running(actor):
        seen.clear()
        code = Code()
        code.gate.set()
        await begin(actor, code).result()
        await begin(actor, lambda _: 1, is_async=False).result()
        await settled()
    assert len(seen) >= 8
    assert set(seen) == {None}


async def test_the_pool_may_fail_to_take_note(adapter: ScriptedAdapter, clock: ManualClock) -> None:
    """An error of `changed` does not end the actor."""

    def changed(_: WorkerActor) -> None:
        raise RuntimeError("the pool is broken")

    actor = an_actor(adapter, clock, changed=changed)
    async with running(actor):
        assert actor.is_idle()


async def test_the_pool_hears_of_changes_only(adapter: ScriptedAdapter, clock: ManualClock) -> None:
    """`changed` is called when the device comes up or goes down, not for heartbeats and not for tasks."""
    told: list[tuple[DeviceState, bool]] = []
    actor = an_actor(adapter, clock, changed=lambda actor: told.append((actor.state, actor.takes_tasks)))
    async with running(actor):
        assert told == [(DeviceState.IDLE, True)]
        code = Code()
        code.gate.set()
        await begin(actor, code).result()
        await pass_time(clock, 5 * HEARTBEAT_S)
        assert len(told) == 1
        adapter.is_plugged_in = False
        await pass_time(clock, HEARTBEAT_S)
        assert told[1] == (DeviceState.DOWN, False)


# --- the heartbeat ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("DEV-11")
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("swallows", [False, True], ids=["cancellable", "deaf"])
async def test_a_device_that_never_answers_is_down_within_two_heartbeats(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock, is_busy: bool, swallows: bool
) -> None:
    """Connected and silent, also to cancellations: it is down, whatever it was doing, and its run is interrupted."""
    code = Code()
    async with running(actor):
        submitted = begin(actor, code) if is_busy else None
        await pass_time(clock, 3.0)
        adapter.hangs.update(["health", "connect", "restart", "restart_app", "close"])
        adapter.swallows = swallows
        await pass_time(clock, 2 * HEARTBEAT_S)
        assert actor.state is DeviceState.DOWN
        assert not actor.takes_tasks
        if submitted is not None:
            assert code.cleaned_up
            result = await submitted.result()
            assert result.error is not None
            assert (result.error.kind, result.error.code) == (ErrorKind.SYSTEM, ErrorCode.DEVICE_LOST)
            assert result.error.details == {"device": "emu-1"}
        adapter.let_go.set()
        adapter.hangs.clear()
        await settled()


async def test_one_check_that_fails_is_no_outage(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """A device that is slow to answer once, while it installs an app say, is asked again before its run is lost."""
    code = Code()
    async with running(actor):
        submitted = begin(actor, code)
        adapter.hangs.add("health")
        await pass_time(clock, HEARTBEAT_S + 5)
        adapter.hangs.clear()
        adapter.let_go.set()
        await pass_time(clock, 3 * HEARTBEAT_S)
        assert actor.state is DeviceState.BUSY
        code.gate.set()
        assert (await submitted.result()).success


@pytest.mark.parametrize("outage_s", [0.4, 7.0, 33.0, 500.0, 20_000.0])
@pytest.mark.spec("DEV-11")
async def test_a_device_that_is_back_is_idle_within_a_heartbeat(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock, outage_s: float
) -> None:
    """However long it was unplugged, it is idle at most one heartbeat and a second after it is back."""
    async with running(actor):
        adapter.is_plugged_in = False
        await pass_time(clock, HEARTBEAT_S)
        assert actor.state is DeviceState.DOWN
        await pass_time(clock, outage_s, step_s=0.1 if outage_s < 10 else 1.0 if outage_s < 1000 else 5.0)
        adapter.is_plugged_in = True
        await pass_time(clock, HEARTBEAT_S + 1)
        assert actor.is_idle()
        assert adapter.count("restart_app") == 0
        assert adapter.count("restart") <= 2


async def test_a_device_that_is_back_while_connecting_hangs_is_idle_within_a_heartbeat(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """The same if each attempt to connect hangs until its time is up."""
    async with running(actor):
        adapter.is_plugged_in = False
        adapter.hangs.add("connect")
        await pass_time(clock, 42.0)
        assert actor.state is DeviceState.DOWN
        adapter.is_plugged_in = True
        adapter.hangs.clear()
        await pass_time(clock, HEARTBEAT_S + 1)
        assert actor.is_idle()


async def test_heartbeats_are_spread(clock: ManualClock) -> None:
    """Devices that came up together are not asked all at once."""
    actors = [
        WorkerActor(a_spec(n), ScriptedAdapter(), clock=clock, jitter=lambda n=n: n / 10)  # type: ignore[misc]
        for n in range(10)
    ]
    beats = []
    async with running(*actors):
        await settled()
        for _ in range(40):
            before = [actor.last_beat for actor in actors]
            await pass_time(clock, 0.25)
            beats.append(sum(actor.last_beat != beat for actor, beat in zip(actors, before, strict=True)))
    assert sum(beats) == 10
    assert max(beats) == 1


# --- the ladder -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("DEV-11")
async def test_the_ladder_of_a_sick_device(
    adapter: ScriptedAdapter, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Connected and not healthy: its app is restarted, then the device, then it is quarantined and left alone until an
    order is taken back; then it is checked, and up."""
    told: list[str] = []
    actor = an_actor(adapter, clock, changed=lambda actor: told.append(f"{actor.health.step}|{actor.gave_up}"))
    async with running(actor):
        adapter.errors["health"] = DeviceError("the app does not start")
        await pass_time(clock, 400.0)
        restarts = [call for call in adapter.calls if "restart" in call]
        assert restarts == ["restart_app", "restart", "restart"]
        assert (actor.state, actor.gave_up) == (DeviceState.QUARANTINED, "the app does not start")
        steps = list(dict.fromkeys(step.split("|")[0] for step in told))
        assert steps == ["", "reconnect", "restart app", "restart", "quarantine"]
        assert "quarantined: the app does not start" in caplog.text
        assert adapter.calls[-1] == "close"
        calls = len(adapter.calls)
        # The pool reads orders from before its own has been written: that is no return.
        actor.set_orders(DeviceOrders())
        await pass_time(clock, 1000.0, step_s=5)
        assert actor.state is DeviceState.QUARANTINED
        actor.set_orders(DeviceOrders(quarantined=STAMP))
        await pass_time(clock, 1000.0, step_s=5)
        assert (len(adapter.calls), actor.gave_up) == (calls, "")
        adapter.errors.clear()
        actor.set_orders(DeviceOrders())
        await settled()
        assert actor.is_idle()


async def test_a_device_that_is_unplugged_is_not_restarted_for_ever(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """It is restarted as often as is allowed, then tried about once a heartbeat, and quarantined after a day."""
    async with running(actor):
        adapter.is_plugged_in = False
        await pass_time(clock, 3 * 3600.0, step_s=5)
        assert (adapter.count("restart"), adapter.count("restart_app")) == (2, 0)
        assert actor.state is DeviceState.DOWN
        assert 900 <= adapter.count("connect") <= 2200
        await pass_time(clock, 21.5 * 3600.0, step_s=10)
        assert (actor.state, actor.gave_up) == (DeviceState.QUARANTINED, "it is unplugged")


async def test_an_adapter_that_hangs_for_ever_ends_in_quarantine(adapter: ScriptedAdapter, clock: ManualClock) -> None:
    """Calls that ignore their cancellation are left alone, at most three at a time, and the ladder has an end."""
    adapter.hangs.update(["connect", "health", "restart", "restart_app", "close"])
    adapter.swallows = True
    actor = an_actor(adapter, clock)
    async with running(actor):
        await pass_time(clock, 3600.0, step_s=1)
        assert actor.state is DeviceState.QUARANTINED
        assert adapter.active <= 4
        adapter.let_go.set()
        await settled()
        assert adapter.active == 0


async def test_a_device_that_only_tasks_find_lost_is_restarted(adapter: ScriptedAdapter, clock: ManualClock) -> None:
    """Health checks pass and every task loses the device: after three its app is restarted, and in the end it is
    quarantined. It must not fail the whole queue."""
    actor = an_actor(adapter, clock)

    async def lose(_: object) -> None:
        raise DeviceLost("no picture")

    async with running(actor):
        lost = 0
        for _ in range(100):
            await settled()
            if actor.is_idle():
                lost += 1
                await begin(actor, lose).result()
        await settled()
        assert (actor.state, actor.gave_up) == (DeviceState.QUARANTINED, "no picture")
        assert [call for call in adapter.calls if "restart" in call] == ["restart_app", "restart", "restart"]
        assert lost == 12


# --- runs and outages -------------------------------------------------------------------------------------------------


@pytest.mark.spec("DEV-10", "DEV-11")
async def test_a_run_that_finds_its_device_lost_sends_it_to_a_check(
    actor: WorkerActor, adapter: ScriptedAdapter
) -> None:
    """`DeviceLost` of the code means the same as a lost heartbeat: another device gets the task. This one takes none
    until it has been connected to anew and a check has passed."""

    async def lose(_: object) -> None:
        adapter.hangs.add("connect")
        raise DeviceLost("the cable")

    async with running(actor):
        result = await begin(actor, lose).result()
        assert result.error is not None
        assert (result.error.code, result.error.kind) == (ErrorCode.DEVICE_LOST, ErrorKind.SYSTEM)
        assert (actor.state, actor.health.reason, actor.takes_tasks) == (DeviceState.DOWN, "the cable", False)
        await settled()
        assert adapter.calls[-1] == "connect"
        adapter.hangs.clear()
        adapter.let_go.set()
        await settled()
        assert actor.is_idle()


async def test_a_plain_device_error_is_a_failure_of_the_task(actor: WorkerActor, adapter: ScriptedAdapter) -> None:
    """The device answered that it cannot do this: the task failed, the device is checked and stays up."""

    async def fail(_: object) -> None:
        await current_device().shell("false")

    async with running(actor):
        checks = adapter.count("health")
        result = await begin(actor, fail).result()
        assert result.error is not None
        assert (result.error.kind, result.error.type) == (ErrorKind.RUNTIME, "DeviceError")
        await settled()
        assert actor.is_idle()
        assert adapter.count("health") == checks + 1


@pytest.mark.spec("DEV-11")
async def test_cleanup_has_its_time_and_no_more(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """The code of a lost run may clean up for the grace, during which the device is left to it; then it is interrupted
    once more."""
    code = Code(cleanup_s=1000.0, clock=clock)
    async with running(actor):
        submitted = begin(actor, code)
        await settled()
        adapter.is_plugged_in = False
        await pass_time(clock, HEARTBEAT_S)
        connects = adapter.count("connect")
        assert (actor.state, submitted.task.done()) == (DeviceState.DOWN, False)
        await pass_time(clock, 9.0)
        assert (adapter.count("connect"), submitted.task.done()) == (connects, False)
        await pass_time(clock, 1.25)
        result = await submitted.result()
        assert result.error is not None
        assert result.error.code is ErrorCode.DEVICE_LOST
        assert adapter.count("connect") > connects


async def test_code_that_ignores_its_cancellation_keeps_its_device(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """It has been interrupted twice and goes on: the device may be up again, and is busy until the code ends. Only then
    is the run answered."""
    code = Code(is_deaf=True)
    async with running(actor):
        submitted = begin(actor, code)
        await settled()
        adapter.is_plugged_in = False
        await pass_time(clock, HEARTBEAT_S)
        adapter.is_plugged_in = True
        await pass_time(clock, 3 * HEARTBEAT_S)
        assert (actor.state, code.cancels, submitted.task.done()) == (DeviceState.BUSY, 2, False)
        code.gate.set()
        result = await submitted.result()
        assert result.error is not None
        assert result.error.code is ErrorCode.DEVICE_LOST
        assert actor.is_idle()


async def test_a_cancel_goes_before_a_lost_device(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """A person has cancelled the task, and its device is lost during the cleanup: the cleanup goes on, the task is
    canceled."""
    code = Code(cleanup_s=12.0, clock=clock)
    async with running(actor):
        submitted = begin(actor, code)
        await settled()
        submitted.run.request_cancel()
        await settled()
        adapter.is_plugged_in = False
        await pass_time(clock, 13.0)
        result = await submitted.result()
        assert code.cleaned_up
        assert result.error is not None
        assert result.error.kind is ErrorKind.CANCELED


async def test_a_timeout_is_one_of_the_clock(actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock) -> None:
    """A run is interrupted at its timeout, and its device, which may be why, is checked at once."""
    code = Code()
    async with running(actor):
        submitted = begin(actor, code, timeout_s=3.0)
        await pass_time(clock, 2.75)
        assert not submitted.task.done()
        checks = adapter.count("health")
        await pass_time(clock, 0.25)
        result = await submitted.result()
        assert result.error is not None
        assert result.error.kind is ErrorKind.TIMEOUT
        await settled()
        assert adapter.count("health") == checks + 1


@pytest.mark.spec("DEV-10")
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_caller_that_leaves_keeps_the_device_from_new_tasks(clock: ManualClock, is_async: bool) -> None:
    """The caller is cancelled, and the code goes on: the run is detached, the device takes nothing, until the code has
    ended."""
    actor = an_actor(ScriptedAdapter(), clock)
    code, release, began = Code(is_deaf=True), threading.Event(), threading.Event()

    def wait(_: object) -> None:
        began.set()
        release.wait(10)

    async with running(actor):
        submitted = begin(actor, code if is_async else wait, is_async=is_async)
        await settled()
        if not is_async:
            await asyncio.to_thread(began.wait, 10)
        submitted.task.cancel()
        await settled()
        assert submitted.run.is_detached
        assert (actor.state, actor.takes_tasks, actor.health.is_up) == (DeviceState.DOWN, False, False)
        assert actor.health.reason == "code of an ended run still uses it"
        await pass_time(clock, 11.0)
        assert submitted.task.cancelled()
        code.gate.set()
        release.set()
        async with asyncio.timeout(10):
            await submitted.run.wait_reattached()
        await settled()
        assert (actor.is_idle(), actor.takes_tasks) == (True, True)


# --- orders -----------------------------------------------------------------------------------------------------------


async def test_a_drained_device_is_looked_after(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """It takes no new task; the one that runs goes on, and so does the heartbeat."""
    code = Code()
    async with running(actor):
        submitted = begin(actor, code)
        await settled()
        actor.set_orders(DeviceOrders(drained=STAMP))
        await settled()
        assert (actor.state, actor.takes_tasks) == (DeviceState.DRAINING, False)
        checks = adapter.count("health")
        await pass_time(clock, 3 * HEARTBEAT_S)
        assert adapter.count("health") == checks + 3
        code.gate.set()
        assert (await submitted.result()).success
        error = (await begin(actor, Code()).result()).error
        assert error is not None
        assert error.kind is ErrorKind.REJECTED
        actor.set_orders(DeviceOrders())
        await settled()
        assert actor.is_idle()


async def test_a_task_that_waits_for_a_drained_device_goes_back(actor: WorkerActor) -> None:
    """What was handed over and has not begun is refused, so that another device gets it."""
    code = Code()
    async with running(actor):
        one, two = begin(actor, code), begin(actor, Code())
        await settled()
        actor.set_orders(DeviceOrders(drained=STAMP))
        error = (await two.result()).error
        assert error is not None
        assert error.kind is ErrorKind.REJECTED
        code.gate.set()
        assert (await one.result()).success


@pytest.mark.parametrize("order", ["taken", "quarantined"])
async def test_a_device_that_is_set_aside_is_not_touched(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock, order: str
) -> None:
    """When its run has ended, the adapter lets go, and nothing is asked of it until it is given back."""
    code = Code()
    async with running(actor):
        submitted = begin(actor, code)
        await settled()
        actor.set_orders(DeviceOrders(taken=STAMP) if order == "taken" else DeviceOrders(quarantined=STAMP))
        await pass_time(clock, HEARTBEAT_S)
        assert adapter.calls[-1] == "health"
        code.gate.set()
        assert (await submitted.result()).success
        await settled()
        assert (actor.state, adapter.calls[-1]) == (order, "close")
        calls = len(adapter.calls)
        await pass_time(clock, 1000.0, step_s=5)
        assert len(adapter.calls) == calls
        actor.set_orders(DeviceOrders())
        await settled()
        assert adapter.calls[calls:] == ["connect", "health"]
        assert actor.is_idle()


async def test_a_device_that_is_taken_for_a_time_comes_back(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """When the time is over it is connected to by itself."""
    async with running(actor):
        actor.set_orders(DeviceOrders(taken=STAMP, taken_until=clock.now() + timedelta(seconds=60)))
        await pass_time(clock, 59.0)
        assert actor.state is DeviceState.TAKEN
        await pass_time(clock, 1.25)
        assert actor.is_idle()


async def test_new_labels_are_those_of_the_next_run(actor: WorkerActor) -> None:
    """`replace_spec` changes what code sees of its device, from the next task on."""

    async def see(_: object) -> dict[str, str]:
        return current_device().labels

    async with running(actor):
        actor.replace_spec(a_spec(labels={"role": "eu"}))
        assert (await begin(actor, see).result()).data == {"role": "eu"}


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("DEV-06")
async def test_an_actor_that_closes_takes_nothing(actor: WorkerActor, adapter: ScriptedAdapter) -> None:
    """It finishes its run, refuses what comes and what waits, and has its adapter let go before it ends."""
    code = Code()
    loop = asyncio.create_task(actor.run_forever())
    await settled()
    one, two = begin(actor, code), begin(actor, Code())
    await settled()
    closing = asyncio.create_task(actor.close())
    await settled()
    for refused in (two, begin(actor, Code())):
        error = (await refused.result()).error
        assert error is not None
        assert error.kind is ErrorKind.REJECTED
    assert not closing.done()
    code.gate.set()
    assert (await one.result()).success
    async with asyncio.timeout(10):
        await asyncio.gather(closing, loop)
    assert adapter.calls[-1] == "close"
    assert actor.state is DeviceState.DOWN


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_an_actor_may_be_closed_by_force(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock, is_deaf: bool
) -> None:
    """After the grace the run is interrupted as if the device were lost. Code that ignores that does not hold up the
    end, and is answered when it ends."""
    code = Code(is_deaf=is_deaf)
    loop = asyncio.create_task(actor.run_forever())
    await settled()
    submitted = begin(actor, code)
    await settled()
    closing = asyncio.create_task(actor.close(grace_s=2.0))
    await pass_time(clock, 1.75)
    assert code.cancels == 0
    await pass_time(clock, 0.5)
    assert code.cancels == 1
    await pass_time(clock, 10.0)
    async with asyncio.timeout(10):
        await asyncio.gather(closing, loop)
    assert submitted.task.done() is not is_deaf
    code.gate.set()
    result = await submitted.result()
    assert result.error is not None
    assert result.error.code is ErrorCode.DEVICE_LOST


async def test_an_actor_that_is_cancelled_takes_the_device_from_its_code(
    actor: WorkerActor, adapter: ScriptedAdapter
) -> None:
    """The adapter is closed, and code that ignores its cancellation cannot use the device any more."""
    go, began, refused = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def code(_: object) -> None:
        device = current_device()
        began.set()
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()
        try:
            await device.shell("true")
        except DeviceError:
            refused.set()
            raise

    loop = asyncio.create_task(actor.run_forever())
    await settled()
    submitted = begin(actor, code)
    async with asyncio.timeout(10):
        await began.wait()
    loop.cancel()
    await settled()
    assert loop.cancelled()
    assert adapter.calls[-1] == "close"
    assert actor.closing_adapter is not None
    assert actor.closing_adapter.done()
    go.set()
    await submitted.result()
    assert refused.is_set()
    assert adapter.count("shell") == 0


async def test_an_adapter_that_hangs_when_its_actor_is_cancelled_is_left(
    actor: WorkerActor, adapter: ScriptedAdapter
) -> None:
    """A call that is under way is cancelled before the adapter is closed, and a failure to close is logged only."""
    adapter.hangs.add("health")
    adapter.errors["close"] = OSError("no such port")
    loop = asyncio.create_task(actor.run_forever())
    await settled()
    assert adapter.active == 1
    loop.cancel()
    await settled()
    assert actor.closing_adapter is not None
    async with asyncio.timeout(10):
        await actor.closing_adapter
    assert (adapter.active, adapter.calls) == (0, ["connect", "health", "close"])


async def test_an_adapter_that_does_not_let_go_does_not_hold_up_the_end(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """`close` of the adapter hangs, and ignores its cancellation: the actor ends after 5 s."""
    loop = asyncio.create_task(actor.run_forever())
    await settled()
    adapter.hangs.add("close")
    adapter.swallows = True
    closing = asyncio.create_task(actor.close())
    await pass_time(clock, 5.25)
    async with asyncio.timeout(10):
        await asyncio.gather(closing, loop)
    assert adapter.calls[-1] == "close"
    adapter.let_go.set()
    await settled()


async def test_an_actor_that_never_ran_closes(actor: WorkerActor) -> None:
    """Closing it before its loop has begun ends the loop as soon as it begins."""
    async with asyncio.timeout(10):
        await actor.close()
        await actor.run_forever()
    assert actor.state is DeviceState.DOWN


# --- logs and settings ------------------------------------------------------------------------------------------------


@pytest.mark.spec("DEV-14")
async def test_what_is_logged(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """At INFO: each state with what it was before and the reason, and begin and end of each task with its duration."""
    caplog.set_level(logging.INFO, "taskyard.devices")
    code = Code()
    async with running(actor):
        submitted = begin(actor, code)
        await pass_time(clock, 2.0)
        code.gate.set()
        await submitted.result()
        adapter.is_plugged_in = False
        await pass_time(clock, HEARTBEAT_S)
    uuid = submitted.run.uuid
    assert [record.getMessage() for record in caplog.records] == [
        "device emu-1: idle, was down",
        f"device emu-1: task {uuid} from daily begins",
        "device emu-1: busy, was idle",
        f"device emu-1: task {uuid} from daily has ended after 2.000 s",
        "device emu-1: idle, was busy",
        "device emu-1: down, was idle (it is unplugged)",
    ]
    assert {record.device for record in caplog.records} == {"emu-1"}  # type: ignore[attr-defined]


def test_settings_are_checked() -> None:
    """Health checks have to fit into a heartbeat, and a time that is none is refused by name."""
    assert ActorSettings(heartbeat_s=1.0).ladder.most_s == 1.0
    with pytest.raises(InvalidInput, match="do not fit into a heartbeat"):
        ActorSettings(heartbeat_s=10, health_timeout_s=6)
    for field in ("heartbeat_s", "health_timeout_s", "connect_timeout_s", "cleanup_grace_s", "restart_timeout_s"):
        with pytest.raises(InvalidInput, match=field):
            ActorSettings(**{field: 0})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="misses"):
        ActorSettings(misses=0)
    assert ActorSettings(recovery=RecoverySettings(most_s=3.0)).ladder.most_s == 3.0
