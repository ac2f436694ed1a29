"""Devices: phones, emulators, lab machines. One actor each runs their tasks one by one."""

from taskyard.devices.definitions import DeviceDefinition, GameAccount
from taskyard.devices.device import Device, current_device
from taskyard.ports.device import DeviceAdapter, EmulatorAdapter

__all__ = ["Device", "DeviceAdapter", "DeviceDefinition", "EmulatorAdapter", "GameAccount", "current_device"]
