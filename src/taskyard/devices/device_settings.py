"""What all adapters do alike: checks of what users give them, and the words of errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from taskyard.errors import DeviceError, InvalidInput, quote
from taskyard.model.given import LONGEST_S

LONGEST_LINE = 400
"""Characters of what a failed command wrote last: paths are long."""

LARGEST_OUTPUT = 64 << 20
"""Bytes that a command or a screenshot may write: all of it is in memory."""

LARGEST_PULL = 512 << 20
"""Bytes of a file that is pulled: videos and logs are larger than outputs."""


def check_seconds(field: str, value: Any) -> float:
    """`value` if it is a time that something may take, 0 included."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LONGEST_S:
        raise InvalidInput("must be a number of seconds, from 0 on", field=field, given=value)
    return float(value)


def check_share(field: str, value: Any) -> float:
    """`value` if it is a share of calls, from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidInput("must be a number from 0 to 1", field=field, given=value)
    return float(value)


def check_settings(adapter: str, settings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The settings of a device that is in a store, if this kind of device has all of them."""
    unknown = sorted(set(settings) - set(known))
    if unknown:
        have = ", ".join(sorted(known))
        raise InvalidInput(f"a device of the adapter {adapter!r} has no setting {quote(unknown[0])}; it has {have}")
    return dict(settings)


def open_source(source: Path) -> BinaryIO:
    """A file that is to be pushed."""
    try:
        return source.open("rb")
    except OSError as error:
        raise DeviceError(f"cannot read what is to be pushed: {error}") from None


def read_source(source: Path) -> bytes:
    """All that is to be pushed."""
    with open_source(source) as content:
        return content.read()


def command_failed(device: str, command: str, status: int, output: str, *, hint: str = "") -> DeviceError:
    """The error of a command whose exit status is not 0."""
    last = output.strip().rsplit("\n", 1)[-1][:LONGEST_LINE]
    said = last and f": {last}"
    return DeviceError(f"{device}: {quote(command)} ended with status {status}{said}{hint and f' ({hint})'}")


def command_timed_out(device: str, command: str, timeout_s: float) -> DeviceError:
    """The error of a command that takes too long; whether the device answers at all is for `health` to tell."""
    return DeviceError(f"{device}: {quote(command)} did not end within {timeout_s:g} s; give it a longer timeout_s")


def output_too_large(most: int) -> DeviceError:
    """The error of output that is not read to its end; the program that writes it has been ended."""
    return DeviceError(
        f"it wrote more than {most >> 20} MB; let a command write to a file and pull that; pull a larger file in parts"
    )
