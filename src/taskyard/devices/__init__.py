"""Devices: phones, emulators, lab machines. One actor each runs their tasks one by one.

Nothing here imports the libraries of the extra `devices`: each is imported where it is first needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from taskyard.devices.actor_settings import ActorSettings
from taskyard.devices.consumer import BaseExecutor, DeviceConsumer, run_on_device
from taskyard.devices.definitions import DeviceDefinition, GameAccount
from taskyard.devices.device import Device, current_device
from taskyard.devices.steps import DeviceStep, Screenshot, Shell, Tap, WaitFor, WaitGone
from taskyard.devices.templates import Match, Template, cut_image, load_templates
from taskyard.model.device_recovery import RecoverySettings
from taskyard.ports.device import DeviceAdapter, EmulatorAdapter

if TYPE_CHECKING:
    from taskyard.devices.adb import AdbDevice as AdbDevice
    from taskyard.devices.command import CommandDevice as CommandDevice
    from taskyard.devices.simulated import SimulatedDevice as SimulatedDevice

_LAZY = {
    "AdbDevice": "taskyard.devices.adb",
    "CommandDevice": "taskyard.devices.command",
    "SimulatedDevice": "taskyard.devices.simulated",
}
"""Names that are imported at their first use, with their module."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


__all__ = [
    "ActorSettings",
    "AdbDevice",
    "BaseExecutor",
    "CommandDevice",
    "Device",
    "DeviceAdapter",
    "DeviceConsumer",
    "DeviceDefinition",
    "DeviceStep",
    "EmulatorAdapter",
    "GameAccount",
    "Match",
    "RecoverySettings",
    "Screenshot",
    "Shell",
    "SimulatedDevice",
    "Tap",
    "Template",
    "WaitFor",
    "WaitGone",
    "current_device",
    "cut_image",
    "load_templates",
    "run_on_device",
]
