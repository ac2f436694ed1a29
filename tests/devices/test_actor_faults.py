"""An actor under random faults of its device, its adapter and the code: nothing is stuck, and nothing overlaps."""

from __future__ import annotations

import asyncio
import random

import pytest

from taskyard.devices.actor import WorkerActor
from taskyard.devices.actor_settings import ActorSettings
from taskyard.errors import DeviceError, DeviceLost
from taskyard.model.device import DeviceOrders, DeviceState
from taskyard.model.device_recovery import RecoverySettings
from taskyard.model.execution import ErrorCode, ErrorKind
from taskyard.testing.clock import ManualClock
from tests.devices.test_actor import STAMP, Submitted, begin
from tests.devices.trivial import ScriptedAdapter, a_spec, pass_time, running, settled

HANGS = ("connect", "health", "restart", "restart_app", "close", "shell")
LADDER = RecoverySettings(reconnect_s=15, stable_s=60, give_up_s=200)


class Farm:
    """One device, whose runs and faults are drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random, self.clock, self.adapter = random.Random(seed), ManualClock(), ScriptedAdapter()
        self.actor = WorkerActor(
            a_spec(),
            self.adapter,
            clock=self.clock,
            jitter=self.random.random,
            settings=ActorSettings(recovery=LADDER),
        )
        self.submitted: list[Submitted] = []
        self.active = self.most_active = 0
        self.let_go = asyncio.Event()

    async def code(self, _: object) -> str:
        kind, is_deaf = self.random.choice(["short", "long", "lost", "error", "shell"]), self.random.random() < 0.1
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            match kind:
                case "lost":
                    raise DeviceLost("says the code")
                case "error":
                    raise DeviceError("cannot")
                case "shell":
                    await self.adapter.shell("true")
                case "long":
                    until_mono = self.clock.monotonic() + self.random.uniform(1, 60)
                    while self.clock.monotonic() < until_mono and not self.let_go.is_set():
                        try:
                            await self.clock.wait(self.let_go, until_mono)
                        except asyncio.CancelledError:
                            if not is_deaf:
                                raise
        finally:
            self.active -= 1
        return kind

    def disturb(self) -> None:
        """Something happens."""
        adapter, actor = self.adapter, self.actor
        match self.random.randrange(9):
            case 0:
                adapter.is_plugged_in = not adapter.is_plugged_in
            case 1:
                adapter.hangs.add(self.random.choice(HANGS))
            case 2:
                self.heal()
            case 3:
                adapter.swallows = self.random.random() < 0.3
            case 4:
                adapter.errors["health"] = self.random.choice([DeviceError("sick"), ValueError("a bug"), SystemExit(1)])
            case 5:
                actor.set_orders(
                    self.random.choice(
                        [DeviceOrders(drained=STAMP), DeviceOrders(taken=STAMP), DeviceOrders(quarantined=STAMP)]
                    )
                )
            case 6:
                actor.set_orders(DeviceOrders())
            case 7 if self.submitted:
                self.random.choice(self.submitted).run.request_cancel()
            case _:
                timeout_s = self.random.choice([None, 5.0])
                self.submitted.append(begin(actor, self.code, timeout_s=timeout_s))

    def heal(self) -> None:
        adapter = self.adapter
        adapter.is_plugged_in, adapter.swallows = True, False
        adapter.hangs.clear()
        adapter.errors.clear()
        adapter.let_go.set()
        adapter.let_go = asyncio.Event()


@pytest.mark.spec("DEV-07", "DEV-10", "DEV-11")
@pytest.mark.parametrize("seed", range(25))
async def test_nothing_is_stuck_whatever_happens(seed: int) -> None:
    """One task at a time, each is answered, and in the end the device is idle again, or quarantined until it is given
    back."""
    farm = Farm(seed)
    async with running(farm.actor):
        for _ in range(150):
            farm.disturb()
            await pass_time(farm.clock, farm.random.choice([0.5, 2.0, 10.0]), step_s=0.5)
            if farm.actor.gave_up and farm.random.random() < 0.5:
                farm.actor.set_orders(DeviceOrders(quarantined=STAMP))  # the pool has written what the actor asked for
        farm.let_go.set()
        farm.heal()
        farm.actor.set_orders(DeviceOrders(quarantined=STAMP))
        farm.actor.set_orders(DeviceOrders())
        await pass_time(farm.clock, 120.0, step_s=0.5)
        assert farm.actor.is_idle()
        assert farm.most_active == 1
        assert farm.active == farm.adapter.active == 0
        assert all(one.task.done() for one in farm.submitted)
    results = [one.task.result() for one in farm.submitted]
    assert results
    for result in results:
        error = result.error
        assert error is None or error.kind is not ErrorKind.SYSTEM or error.code is ErrorCode.DEVICE_LOST
    assert farm.actor.state is DeviceState.DOWN  # it has ended
    await settled()
