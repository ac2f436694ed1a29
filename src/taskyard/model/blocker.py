"""Why a task may not start although its turn has come, as a value; and what a task needs of the place where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

import msgspec

from taskyard.errors import InvalidInput, quote

Labels = Mapping[str, str]

DETAIL_BYTES = 1_000
"""Bytes of the detail of a blocker: every store has an index of it."""


class BlockerKind(StrEnum):
    """The kinds that Taskyard knows. A plug-in may use others: a lower-case word."""

    DEPENDENCY = "dependency"
    """The number of tasks that it still waits for is the detail."""
    DISK = "disk"
    OUTPUT = "output"
    FILE_LOCK = "file_lock"
    DEVICE = "device"
    CHECK = "check"
    """An admission check failed or took too long; its name is the detail."""


class Blocker(msgspec.Struct, frozen=True, gc=False):
    """What a task waits for before it may start. `kind` and `detail` identify it: all tasks with the same two are freed
    together. A kind is a lower-case word, a detail says which one of its kind: a mount point, a path."""

    kind: str
    detail: str
    since: datetime | None = None
    """From when on the task was blocked. The store sets it."""

    @property
    def key(self) -> str:
        return blocker_key(self.kind, self.detail)

    @property
    def label(self) -> str:
        """`disk /data`, for people."""
        return f"{self.kind.replace('_', ' ')} {self.detail}".strip()


def blocker_key(kind: str, detail: str) -> str:
    """What is stored and looked up. A kind has no colon."""
    return f"{kind}:{detail}"


def stored_detail(detail: object) -> str:
    """The detail of a blocker as every store takes it: the name of a file need not be text."""
    if not isinstance(detail, str) or not detail:
        raise InvalidInput(f"the detail of a blocker must be a text, not {quote(detail)}")
    text = detail.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
    if len(text.encode()) > DETAIL_BYTES:
        raise InvalidInput(f"the detail of a blocker is longer than {DETAIL_BYTES} bytes: {quote(text)}")
    return text


def split_key(key: str) -> tuple[str, str]:
    """The kind and the detail of a key."""
    kind, _, detail = key.partition(":")
    return kind, detail


_REMEDIES: dict[str, str] = {
    BlockerKind.DISK: "free some space; it goes on by itself",
    BlockerKind.OUTPUT: "wait for the task that writes it, or cancel this one",
    BlockerKind.FILE_LOCK: "close the program that holds the file; it goes on by itself",
    BlockerKind.DEVICE: "make a device ready that fits",
    BlockerKind.CHECK: "look at the log of the node; it is checked again every half minute",
}


def remedy_of(kind: str) -> str:
    """What a person may do about a blocker of this kind."""
    return _REMEDIES.get(kind, "wait; it goes on by itself when that is free")


# --- requirements -----------------------------------------------------------------------------------------------------


def encode_requirements(requires: Labels) -> str | None:
    """Canonical JSON, so that equal requirements are equal texts; None if there are none."""
    return msgspec.json.encode(dict(requires), order="sorted").decode() if requires else None


def decode_requirements(text: str | None) -> dict[str, str]:
    return {} if text is None else msgspec.json.decode(text, type=dict[str, str])


def lane_of(consumer: str, requires: str | None) -> str:
    """The lane that a task waits in: its consumer, and what it requires."""
    return consumer if requires is None else f"{consumer}{SEPARATOR}{requires}"


SEPARATOR = "\x1f"
"""Between the two parts of a lane. No consumer has it in its name."""


def split_lane(lane: str) -> tuple[str, dict[str, str]]:
    """The consumer of a lane, and what its tasks require."""
    consumer, _, requires = lane.partition(SEPARATOR)
    return consumer, decode_requirements(requires or None)


def satisfies(labels: Labels, requires: Labels) -> bool:
    """Whether a place with these labels has all that is required."""
    return requires.items() <= labels.items()
