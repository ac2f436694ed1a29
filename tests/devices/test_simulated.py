"""The simulated phone: what it answers, how it fails, and its screen."""

import asyncio
import subprocess
import sys

import pytest

from taskyard.devices import SimulatedDevice
from taskyard.devices.kinds import make_definition
from taskyard.devices.simulated_screen import SCREENS
from taskyard.errors import DeviceError, DeviceLost, InvalidInput
from taskyard.ports.device import DeviceAdapter
from taskyard.testing.clock import ManualClock


async def connected(device: SimulatedDevice) -> DeviceAdapter:
    adapter = device.make_adapter()
    await adapter.connect()
    return adapter


@pytest.mark.spec("DEV-16")
async def test_its_shell_knows_what_consumers_use() -> None:
    """A command line ends with the status and the output that a phone would give."""
    phone = await connected(SimulatedDevice(1))
    assert await phone.shell("am start game && echo $?; pidof game || echo gone") == (
        "Starting: Intent { cmp=game }\n0\n4711"
    )
    assert await phone.shell("am force-stop game; pidof game || echo gone") == "gone"
    with pytest.raises(DeviceError, match="ended with status 127: sh: foo: not found"):
        await phone.shell("foo --bar")
    with pytest.raises(DeviceError, match=r"no '\|'"):
        await phone.shell("ls | wc")


async def test_a_tap_on_a_button_leads_to_another_screen() -> None:
    """Buttons react to taps, and the screenshot shows the change."""
    device = SimulatedDevice(1)
    phone = await connected(device)
    seen = [await phone.screenshot()]
    for label, leads_to in [("Start", "title"), ("Play", "news"), ("OK", "lobby"), ("Claim", "reward")]:
        (button,) = [button for button in SCREENS[device.phone.screen].buttons if button.label == label]
        await phone.tap(*button.center)
        assert device.phone.screen == leads_to
        seen.append(await phone.screenshot())
    assert len(set(seen)) == len(seen)
    await phone.tap(5, 300)
    assert device.phone.screen == "reward", "there is no button"


async def test_a_hang_ends_when_it_is_told_to() -> None:
    """A device that hangs answers what was asked meanwhile, once it no longer hangs."""
    device = SimulatedDevice(1)
    phone = await connected(device)
    device.hang()
    asked = asyncio.create_task(phone.health())
    await asyncio.sleep(0)
    assert not asked.done()
    device.unhang()
    await asked


async def test_a_broken_connection_has_to_be_made_anew() -> None:
    """A disconnect ends the calls that are under way, and only `connect` helps when the device is back."""
    clock = ManualClock()
    device = SimulatedDevice(1, latency_s=1.0, clock=clock)
    phone = device.make_adapter()
    connecting = asyncio.create_task(phone.connect())
    await asyncio.sleep(0)
    clock.advance(1.0)
    await connecting
    asked = asyncio.create_task(phone.shell("echo"))
    await asyncio.sleep(0)
    device.disconnect(for_s=10.0)
    with pytest.raises(DeviceLost):
        await asked
    with pytest.raises(DeviceLost):
        await phone.connect()
    clock.advance(10.0)
    with pytest.raises(DeviceLost, match="connect first"):
        await phone.health()
    connecting = asyncio.create_task(phone.connect())
    await asyncio.sleep(0)
    clock.advance(1.0)
    await connecting


@pytest.mark.parametrize("repair", ["connect", "restart_app", "restart"])
async def test_a_fault_ends_with_its_repair(repair: str) -> None:
    """A device that is broken until a repair fails at everything before it, and at nothing after it."""
    device = SimulatedDevice(1)
    phone = await connected(device)
    device.fail_until(repair, "the app is stuck")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="the app is stuck"):
        await phone.health()
    with pytest.raises(DeviceError, match="the app is stuck"):
        await phone.shell("echo")
    await getattr(phone, repair)()
    if repair == "restart":
        await phone.connect()
    await phone.health()
    await phone.shell("echo")


@pytest.mark.parametrize("repair", ["connect", "restart_app", "restart"])
async def test_a_hang_ends_with_its_repair(repair: str) -> None:
    """A device that hangs until a repair answers nothing but that repair, and everything after it."""
    device = SimulatedDevice(1)
    phone = await connected(device)
    device.hang(until=repair)  # type: ignore[arg-type]
    for other in {"health", "connect", "restart_app", "restart"} - {repair}:
        asked = asyncio.create_task(getattr(phone if other == "health" else device.make_adapter(), other)())
        done, _ = await asyncio.wait([asked], timeout=0.01)
        assert not done or other == "restart_app", "an adapter that is not connected restarts no app"
        asked.cancel()
        await asyncio.wait([asked])
    await getattr(phone, repair)()
    await phone.connect()
    await phone.health()


async def test_random_outages_end() -> None:
    """A device that hangs or vanishes at random works again after `outage_s`."""
    clock = ManualClock()
    kinds = set()
    for seed in range(20):
        device = SimulatedDevice(1, seed=seed, disconnect_rate=0.5, hang_rate=0.5, outage_s=3.0, clock=clock)
        phone = await connected(device)
        asked = asyncio.create_task(phone.tap(1, 1))
        await asyncio.sleep(0)
        clock.advance(3.0)
        (outcome,) = await asyncio.gather(asked, return_exceptions=True)
        kinds.add(type(outcome))
        await phone.connect()
        await phone.health()
    assert kinds == {DeviceLost, type(None)}, "some vanished, and some hung and then answered"


async def test_chance_is_drawn_from_the_seed() -> None:
    """Two devices of one seed fail at the same calls, one of another seed at others."""

    async def fates(seed: int) -> list[bool]:
        phone = await connected(SimulatedDevice(1, seed=seed, failure_rate=0.3))
        results = await asyncio.gather(*(phone.tap(1, 1) for _ in range(100)), return_exceptions=True)
        return [isinstance(result, DeviceError) for result in results]

    first = await fates(7)
    assert first == await fates(7) != await fates(8)
    assert 15 < sum(first) < 45


def test_a_stored_device_is_made_again() -> None:
    """The definition that is made of a spec has the same spec."""
    spec = SimulatedDevice(3, name="emu-3", latency_s=0.5, labels={"role": "eu"}, host="lab", boot_s=2.0).spec("phones")
    assert make_definition(spec).spec("phones") == spec


def test_settings_that_make_no_sense_are_told() -> None:
    """A stored device with an unknown setting, a bad one, or of an unknown kind is an `InvalidInput`."""
    spec = SimulatedDevice(3).spec("phones")
    spec.settings["latency"] = 1
    with pytest.raises(InvalidInput, match="latency_s"):
        make_definition(spec)
    with pytest.raises(InvalidInput, match="failure_rate"):
        SimulatedDevice(3, failure_rate=2)


def test_importing_devices_imports_no_heavy_library() -> None:
    """Programs without the extra can import everything that needs none of its libraries."""
    code = (
        "import sys, taskyard.devices; taskyard.devices.SimulatedDevice(1);"
        "print([name for name in ('adbutils', 'cv2', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


async def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A screenshot without OpenCV is an error that names the extra."""
    phone = await connected(SimulatedDevice(1))
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(InvalidInput, match=r"pip install taskyard\[devices\]"):
        await phone.screenshot()
