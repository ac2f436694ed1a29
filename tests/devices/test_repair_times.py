"""How long a device has for a repair: what its definition says, and at least what its actor grants any device."""

from __future__ import annotations

import pytest

from taskyard import ExecutorService
from taskyard.devices import AdbDevice, CommandDevice, SimulatedDevice
from taskyard.devices.actor_settings import ActorSettings
from taskyard.devices.definitions import DeviceDefinition
from taskyard.devices.device import Device, current_device
from taskyard.errors import DeviceLost
from taskyard.model.device_recovery import RecoverySettings
from taskyard.testing.clock import ManualClock
from tests.devices.test_actor import begin
from tests.devices.test_pool import become
from tests.devices.trivial import ScriptedAdapter, a_spec, an_actor, pass_time, running


@pytest.mark.spec("DEV-11")
@pytest.mark.parametrize("repair", ["restart_app", "restart"])
async def test_a_restart_has_the_time_that_its_device_needs(repair: str) -> None:
    """A machine that may need half an hour is waited for, and not much longer than that."""
    clock, adapter = ManualClock(), ScriptedAdapter()
    recovery = RecoverySettings(reconnect_s=5, restarts=1, app_restarts=int(repair == "restart_app"))
    settings = ActorSettings(recovery=recovery).with_repairs(restart_app_s=1800, restart_s=1800)
    actor = an_actor(adapter, clock, settings=settings)
    adapter.hangs.update(["health", repair])
    async with running(actor):
        await pass_time(clock, 30.0)
        assert (adapter.calls[-1], adapter.active) == (repair, 1)
        began = clock.monotonic()
        await pass_time(clock, 1770.0, step_s=5)
        assert (adapter.calls[-1], adapter.active) == (repair, 1)
        await pass_time(clock, 60.0)
        assert adapter.calls[-1] != repair
        assert clock.monotonic() - began <= 1830


@pytest.mark.parametrize(
    ("device", "restart_app_s", "restart_s"),
    [
        (CommandDevice(1, health="true", restart_timeout_s=1800), 1800, 1800),
        (AdbDevice(1, serial="a", timeout_s=90, boot_timeout_s=600), 90, 780),
        (SimulatedDevice(1, latency_s=100, boot_s=1000), 100, 1100),
    ],
    ids=lambda one: getattr(one, "adapter", ""),
)
def test_a_definition_says_how_long_repairs_take(
    device: DeviceDefinition, restart_app_s: float, restart_s: float
) -> None:
    """Each kind of device names the times of its own settings, also when it is made from what a store keeps."""
    for one in (device, type(device).from_spec(device.spec("phones"))):
        assert (one.restart_app_s, one.restart_s) == (restart_app_s, restart_s)


def test_a_short_repair_has_the_usual_time() -> None:
    """A definition that needs less, or says nothing, takes nothing away from the settings of the pool."""
    settings = ActorSettings(restart_app_timeout_s=60, restart_timeout_s=300)
    assert settings.with_repairs(restart_app_s=0, restart_s=20) == settings


async def test_a_pool_asks_the_definition() -> None:
    """The actor that a pool makes grants what the definition of the device says."""
    async with ExecutorService([CommandDevice(1, name="lab-1", health="true", restart_timeout_s=1800)]) as service:
        await become(service.yard, lab_1="idle")
        settings = service.workers[1]._settings
        assert settings.restart_timeout_s >= 1800
        assert settings.restart_app_timeout_s >= 1800


async def test_code_may_restart_an_app_that_takes_long() -> None:
    """`device.restart_app()` in a run has the time of the actor, and not the usual three minutes."""
    device = Device(a_spec(), ScriptedAdapter(), restart_app_limit_s=0.01)
    assert isinstance(device.adapter, ScriptedAdapter)
    device.adapter.hangs.add("restart_app")
    with pytest.raises(DeviceLost, match=r"did not answer within 0\.01 s"):
        await device.restart_app()
    limits: list[float] = []

    async def look(_: object) -> None:
        limits.append(current_device()._restart_app_limit_s)

    for restart_app_s in (0.0, 1800.0):
        settings = ActorSettings().with_repairs(restart_app_s=restart_app_s, restart_s=0)
        actor = an_actor(ScriptedAdapter(), ManualClock(), settings=settings)
        async with running(actor):
            assert (await begin(actor, look).result()).success
    assert limits == [180, 1810]
