"""The state of a device that follows from what a store knows of it."""

from datetime import UTC, datetime

import pytest

from taskyard.model.device import (
    CODE_GOES_ON,
    DeviceHealth,
    DeviceOrders,
    DeviceSpec,
    DeviceState,
    DeviceStatus,
)
from taskyard.model.notes import AuditStamp

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TAKEN = DeviceOrders(taken=AuditStamp("ana", NOON, "to look at it"))


@pytest.mark.spec("DEV-12")
@pytest.mark.parametrize(
    ("health", "task", "expected"),
    [
        pytest.param(DeviceHealth(is_up=True), "", DeviceState.TAKEN, id="free"),
        pytest.param(DeviceHealth(reason="unplugged"), "", DeviceState.TAKEN, id="down"),
        pytest.param(DeviceHealth(is_up=True), "a-task", DeviceState.DRAINING, id="busy"),
        pytest.param(DeviceHealth(reason=CODE_GOES_ON), "", DeviceState.DOWN, id="used-by-code-of-an-ended-run"),
    ],
)
def test_a_device_is_taken_when_nothing_else_uses_it(health: DeviceHealth, task: str, expected: DeviceState) -> None:
    """A person has a taken device to themselves: until code has left it, it is shown as draining or down."""
    spec = DeviceSpec(pool="phones", name="emu-1", number=1, adapter="simulated")
    status = DeviceStatus(spec=spec, orders=TAKEN, health=health, node="a-node", task=task)
    assert status.state_at(NOON) is expected
