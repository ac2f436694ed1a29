"""The kinds of devices by name, to make definitions of devices that are in a store."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from msgspec.structs import replace

from taskyard.devices.definitions import DeviceDefinition
from taskyard.errors import InvalidInput, quote
from taskyard.model.device import DeviceSpec

_KINDS = {
    "adb": ("taskyard.devices.adb", "AdbDevice"),
    "command": ("taskyard.devices.command", "CommandDevice"),
    "simulated": ("taskyard.devices.simulated", "SimulatedDevice"),
}
"""Module and class of each: imported where one is used."""

_TRUSTED_ONLY = ("command",)
"""Kinds whose settings are programs that run on the node. Otherwise, whatever may write a device into the store could
run any program on every node of a pool."""


def known_kinds(more: Iterable[type[DeviceDefinition]] = ()) -> list[str]:
    """The names that `make_definition` knows, with those of these classes."""
    return sorted({*_KINDS, *(kind.adapter for kind in more)})


def make_definition(spec: DeviceSpec, more: Iterable[type[DeviceDefinition]] = ()) -> DeviceDefinition:
    """The definition of a device that is in a store, by these classes or one of ours. `InvalidInput` if there is no
    such kind, or if its settings make no sense."""
    return _find_kind(spec.adapter, more).from_spec(spec)


def check_spec(spec: DeviceSpec, more: Iterable[type[DeviceDefinition]] = ()) -> DeviceSpec:
    """What a store is to keep of a device, with the address as its kind writes it. `InvalidInput` if there is no such
    kind, or if its settings or its address make no sense."""
    made = make_definition(spec, more)
    if spec.address and not made.address:
        raise InvalidInput(f"has no meaning for a device of the adapter {quote(spec.adapter)}", field="address")
    return replace(spec, address=made.address)


def check_served(adapter: str, kinds: Iterable[type[DeviceDefinition]]) -> None:
    """`InvalidInput` if only the program of a pool may say that it serves devices of this kind, and it does not: it was
    given the classes `kinds`, or has devices of them."""
    if adapter in _TRUSTED_ONLY and all(kind.adapter != adapter for kind in kinds):
        class_name = _KINDS[adapter][1]
        raise InvalidInput(
            f"the pool does not serve the adapter {quote(adapter)}: its settings are programs that nodes would run",
            hint=f"if all who may add devices may run programs there, give the pool adapters=[{class_name}]",
        )


def _find_kind(name: str, more: Iterable[type[DeviceDefinition]]) -> type[DeviceDefinition]:
    for kind in more:
        if kind.adapter == name:
            return kind
    if name not in _KINDS:
        known = ", ".join(known_kinds(more))
        hint = f"there are {known}; a pool is given others with adapters=[…]"
        raise InvalidInput(f"there is no adapter {quote(name)}", hint=hint)
    module, class_name = _KINDS[name]
    found: type[DeviceDefinition] = getattr(import_module(module), class_name)
    return found
