"""The audit record: what people asked for, apart from the events, and kept for longer.

One entry per call of a person, however many tasks it changes. A call that names no actor, or that the engine makes by
itself, leaves no entry.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from taskyard.errors import InvalidInput
from taskyard.model.command import Command
from taskyard.model.device import DeviceCommand
from taskyard.model.queue import QueueCommand
from taskyard.model.task import new_uuid
from taskyard.model.task_filter import TaskFilter

CODE = "code"
"""The actor of a call in a program that names nobody."""

PYTHON = "python"

WAYS = ("cli", "http")
"""Prefixes of an actor that say how the person asked: `cli:ana`. Without one it was Python code."""


SHELL_WORDS = {
    "start": ("start_now",),
    "move": ("move_before", "move_after"),
    "priority": ("set_priority",),
    "run-again": ("run_again",),
    "stop-after-current": ("stop_after_current",),
    "give-back": ("give_back",),
    "set": ("set_concurrency",),
    "add": ("add_device", "put_schedule"),
    "rm": ("remove_device", "remove_schedule"),
    "release": ("release", "release_account"),
}
"""The commands of the shell whose names in the record are others."""


class TargetKind(StrEnum):
    """What a command is about."""

    TASK = "task"
    TASKS = "tasks"
    """All tasks that match a filter."""
    QUEUE = "queue"
    SCHEDULE = "schedule"
    NODE = "node"
    DEVICE = "device"
    ACCOUNT = "account"
    """An account of a device pool, whose tasks are taken or not."""


_KINDS_OF: dict[str, tuple[TargetKind, ...]] = {
    "task": (TargetKind.TASK,),
    "queue": (TargetKind.QUEUE, TargetKind.TASKS),
    "device": (TargetKind.DEVICE,),
}


class AuditEntry(msgspec.Struct, frozen=True):
    """One call of a person. `target` is the id of a task, or the name of a queue, schedule, node or device, or the key
    of an account; for a filter it is the queue that the filter names, if any, and the filter is in `details` with the
    other parameters of the command. `matched` tasks were looked at, `changed` of them were changed. While a command for
    many tasks runs, the counts grow; one that was interrupted is never finished."""

    id: int
    uuid: str
    at: datetime
    actor: str
    via: str
    command: str
    kind: TargetKind
    target: str
    reason: str
    details: dict[str, Any]
    matched: int
    changed: int
    is_finished: bool


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which entries to list; None means any. `actor` is a person, with or without the way: `ana` or `cli:ana`. `task`
    is the id of a task that was named; commands for all that match a filter do not name their tasks. A queue may be
    named by a filter. Without `commands` or `kinds`, any are listed."""

    actor: str | None = None
    commands: tuple[str, ...] = ()
    kinds: tuple[TargetKind, ...] = ()
    target: str | None = None
    since: datetime | None = None

    @classmethod
    def of(
        cls,
        *,
        by: str | None = None,
        command: str | None = None,
        task: str | None = None,
        queue: str | None = None,
        device: str | None = None,
        since: datetime | None = None,
    ) -> AuditFilter:
        targets = {"task": task, "queue": queue, "device": device}
        named = [name for name, target in targets.items() if target is not None]
        if len(named) > 1:
            one, other, *_ = named
            raise InvalidInput(f"{{{one}}} and {{{other}}} are two targets; an entry has one", fields=(one, other))
        kinds, target = (_KINDS_OF[named[0]], targets[named[0]]) if named else ((), None)
        commands = () if command is None else SHELL_WORDS.get(command, (command,))
        return cls(actor=by, commands=commands, kinds=kinds, target=target, since=since)

    def matches(self, entry: AuditEntry) -> bool:
        via, actor = (None, None) if self.actor is None else split_actor(self.actor)
        return (
            (actor is None or entry.actor == actor)
            and (via in (None, PYTHON) or entry.via == via)
            and (not self.commands or entry.command in self.commands)
            and (not self.kinds or entry.kind in self.kinds)
            and (self.target is None or entry.target == self.target)
            and (self.since is None or entry.at >= self.since)
        )


ALL_ENTRIES = AuditFilter()


def split_actor(by: str) -> tuple[str, str]:
    """How a person asked, and who it was."""
    way, colon, name = by.partition(":")
    return (way, name) if colon and name and way in WAYS else (PYTHON, by)


def make_entry(
    by: str,
    command: str,
    kind: TargetKind,
    target: str = "",
    *,
    now: datetime,
    reason: str = "",
    details: dict[str, Any] | None = None,
    is_finished: bool = True,
) -> AuditEntry | None:
    """A new entry with no counts; None if no person asks. The store gives it its number."""
    if by in ("", CODE):
        return None
    via, actor = split_actor(by)
    return AuditEntry(
        0, new_uuid(), now, actor, via, command, kind, target, reason, details or {}, 0, 0, is_finished=is_finished
    )


def command_entry(
    by: str, command: Command | QueueCommand | DeviceCommand, kind: TargetKind, target: str = "", *, now: datetime
) -> AuditEntry | None:
    """The entry of a command on one task, one queue or one device."""
    name, reason, details = _describe(command)
    return make_entry(by, name, kind, target, now=now, reason=reason, details=details)


def bulk_entry(by: str, command: Command, where: TaskFilter, *, now: datetime) -> AuditEntry | None:
    """The entry of a command for all tasks that match. It is finished when the last of them was looked at."""
    name, reason, details = _describe(command)
    details["where"] = filter_document(where)
    return make_entry(
        by, name, TargetKind.TASKS, where.queue or "", now=now, reason=reason, details=details, is_finished=False
    )


def _describe(command: Command | QueueCommand | DeviceCommand) -> tuple[str, str, dict[str, Any]]:
    """The name of a command, its reason, and its parameters without those that have their default."""
    fields: dict[str, Any] = msgspec.to_builtins(command)
    name = to_snake(fields.pop("type"))
    reason = fields.pop("reason", "")
    defaults = {field.name: field.default for field in msgspec.structs.fields(command)}
    return name, reason, {key: value for key, value in fields.items() if value != defaults[key]}


def filter_document(where: TaskFilter) -> dict[str, Any]:
    """A filter as it is kept: what it asks, and nothing that is left open."""
    return {name: value for name, value in msgspec.to_builtins(where).items() if value not in (None, {})}


def to_snake(name: str) -> str:
    """`SetPriority` is `set_priority`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def counted(entry: AuditEntry, matched: int, changed: int) -> AuditEntry:
    """The entry after some tasks more."""
    return msgspec.structs.replace(entry, matched=entry.matched + matched, changed=entry.changed + changed)


def is_worth_keeping(entry: AuditEntry | None, changed: int) -> bool:
    """A command for one thing that changed nothing leaves no entry; one for many leaves one from the start."""
    return entry is not None and (changed > 0 or not entry.is_finished)
