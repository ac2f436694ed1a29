"""The kinds of devices by name, to make definitions of devices that are in a store."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from taskyard.devices.definitions import DeviceDefinition
from taskyard.errors import InvalidInput
from taskyard.model.device import DeviceSpec

_KINDS = {
    "adb": ("taskyard.devices.adb", "AdbDevice"),
    "command": ("taskyard.devices.command", "CommandDevice"),
    "simulated": ("taskyard.devices.simulated", "SimulatedDevice"),
}
"""Module and class of each: imported where one is used."""


def known_kinds(more: Iterable[type[DeviceDefinition]] = ()) -> list[str]:
    """The names that `make_definition` knows, with those of these classes."""
    return sorted({*_KINDS, *(kind.adapter for kind in more)})


def make_definition(spec: DeviceSpec, more: Iterable[type[DeviceDefinition]] = ()) -> DeviceDefinition:
    """The definition of a device that is in a store, by these classes or one of ours. `InvalidInput` if there is no
    such kind, or if its settings make no sense."""
    return _find_kind(spec.adapter, more).from_spec(spec)


def _find_kind(name: str, more: Iterable[type[DeviceDefinition]]) -> type[DeviceDefinition]:
    for kind in more:
        if kind.adapter == name:
            return kind
    if name not in _KINDS:
        known = ", ".join(known_kinds(more))
        raise InvalidInput(
            "names no kind of device",
            field="adapter",
            given=name,
            hint=f"there are {known}; a pool is given others with adapters=[…]",
        )
    module, class_name = _KINDS[name]
    found: type[DeviceDefinition] = getattr(import_module(module), class_name)
    return found
