"""Devices: phones, emulators, lab machines. One actor each runs their tasks one by one."""

from taskyard.devices.definitions import DeviceDefinition, GameAccount
from taskyard.ports.device import DeviceAdapter, EmulatorAdapter

__all__ = ["DeviceAdapter", "DeviceDefinition", "EmulatorAdapter", "GameAccount"]
