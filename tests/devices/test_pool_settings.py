"""The settings of a pool: how they reach the actors of its devices, and which are refused."""

import pytest

from taskyard import ExecutorService, Yard
from taskyard.devices import ActorSettings, RecoverySettings
from taskyard.errors import InvalidInput
from tests.devices.farm import eventually, phones
from tests.devices.test_pool import become


async def test_a_pool_gives_a_slow_device_its_time():
    """A device that answers a health check in 0.5 s of a heartbeat of 1 s is up if the pool grants checks that long."""
    slow = phones(1, latency_s=0.5)
    actor = ActorSettings(heartbeat_s=1.0, health_timeout_s=0.95, connect_timeout_s=0.95, misses=1)
    async with ExecutorService(slow, actor=actor) as service:
        await become(service.yard, emu_1="idle")
    async with ExecutorService(slow, heartbeat_s=1.0) as service:
        server = service.pool.server
        await eventually(
            service.yard, lambda: any("within 0.4 s" in one.health.reason for one in server.actors.values())
        )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ActorSettings()),
        ({"heartbeat_s": 3}, ActorSettings(heartbeat_s=3)),
        ({"actor": ActorSettings(misses=1)}, ActorSettings(misses=1)),
        (
            {"actor": ActorSettings(recovery=RecoverySettings(restarts=0))},
            ActorSettings(recovery=RecoverySettings(restarts=0)),
        ),
    ],
    ids=["default", "short", "long", "recovery"],
)
def test_the_settings_of_actors(settings, expected):
    """`heartbeat_s` is short for the settings of an actor that differ in that alone."""
    pool = Yard("memory://").device_pool("phones", devices=phones(1), **settings)
    assert pool.server._settings == expected


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"heartbeat_s": 0}, "heartbeat_s"),
        ({"heartbeat_s": "10"}, "heartbeat_s"),
        ({"heartbeat_s": 10, "actor": ActorSettings()}, "heartbeat_s"),
        ({"actor": RecoverySettings()}, "actor"),
        ({"bucket_by": ""}, "bucket_by"),
        ({"auto_recover": -1}, "auto_recover"),
        ({"quarantine_account_after": 0}, "quarantine_account_after"),
    ],
    ids=lambda given: "" if isinstance(given, str) else "-".join(given),
)
def test_settings_that_make_no_sense(settings, field):
    """Each is refused by its name when the pool is made, and the name of the pool stays free."""
    yard = Yard("memory://")
    with pytest.raises(InvalidInput, match=field):
        yard.device_pool("phones", **settings)
    assert yard.device_pool("phones", devices=phones(1)).name == "phones"
