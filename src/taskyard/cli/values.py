"""What people type, as values: arguments, durations, moments, states."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import msgspec

from taskyard.application.task_documents import PRIORITIES, PriorityName
from taskyard.cli.errors import UsageError, typed_on_the_command_line
from taskyard.errors import quote
from taskyard.model.given import LARGEST_COUNT, check_labels
from taskyard.model.state import ENDED, TaskState

T = TypeVar("T")

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|sec|m|min|h|d|w)?")
_SECONDS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}

STATE_GROUPS = {
    "waiting": tuple(s for s in TaskState if s not in ENDED and s is not TaskState.RUNNING),
    "ended": tuple(s for s in TaskState if s in ENDED),
}
"""Names for several states at once, for filters."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a task. `typed` has the text of those that were written as `key=value` and are JSON: where a
    consumer wants a text, `path=2030` is one."""

    values: dict[str, Any]
    typed: dict[str, str]

    def as_text(self, names: Collection[str]) -> dict[str, Any]:
        """The values, with those of `names` as they were typed."""
        return self.values | {name: text for name, text in self.typed.items() if name in names}


def parse_arguments(pairs: Sequence[str], whole: str | None) -> Arguments:
    """From `key=value` pairs and from one JSON object; `-` reads that from standard input."""
    values = _parse_object(sys.stdin.read() if whole == "-" else whole) if whole is not None else {}
    typed: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"{quote(pair)} is no argument; write key=value")
        if name in values:
            raise UsageError(f"the argument {quote(name)} is given twice")
        values[name] = parse_value(text)
        if not isinstance(values[name], str):
            typed[name] = text
    return Arguments(values, typed)


def _parse_object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as exc:
        if _holds_lone_surrogate(text):
            raise UsageError("--args holds a lone surrogate, half of a character, which no store takes") from None
        raise UsageError(f'--args is not JSON ({exc}); write --args \'{{"url": "https://example.org"}}\'') from None
    if not isinstance(value, dict):
        raise UsageError(f"--args must be a JSON object, not {type(value).__name__}")
    return value


def _holds_lone_surrogate(text: str) -> bool:
    """Whether that is all that is wrong with it: Python's own JSON takes them."""
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def parse_value(text: str) -> Any:
    """JSON if it is JSON, else the text itself: `3`, `true` and `[1,2]` are what they look like, `a.png` is a text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text


def parse_option(field: str, parse: Callable[[str], T], text: str) -> T:
    """The value of an option; an error in it names the field that the option is for."""
    try:
        return parse(text)
    except UsageError as exc:
        raise UsageError(str(exc), field=field) from None


def parse_pairs(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """Names and texts as they are typed: `customer=42`."""
    named: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{option} {quote(pair)} has no value; write {option} name=text")
        if named.setdefault(name, value) != value:
            raise UsageError(f"{option} {quote(name)} is given twice, as {quote(named[name])} and {quote(value)}")
    with typed_on_the_command_line():
        return check_labels(named, field=option)


def parse_duration(text: str) -> float:
    """Seconds: `90`, `1.5s`, `250ms`, `5m`, `2h`, `1d`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{quote(text)} is no duration; write seconds (90) or a unit: 250ms, 90s, 5m, 2h, 1d")
    seconds = float(found["number"]) * _SECONDS[found["unit"] or "s"]
    if not math.isfinite(seconds):
        raise UsageError(f"{quote(text)} is too long")
    return seconds


def parse_moment(text: str) -> datetime:
    """A date and time with its zone."""
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        example = datetime.now(UTC).replace(microsecond=0).isoformat()
        raise UsageError(f"{quote(text)} is no date and time; write it as {example}") from None
    if at.tzinfo is None:
        whole = at.isoformat()  # a day alone is taken for its beginning, and takes no zone
        raise UsageError(f"{text} has no time zone; write {whole}Z for UTC, or its offset, as in {whole}+02:00")
    return at


def parse_when(text: str) -> datetime:
    """A moment, or how long from now."""
    if _DURATION.fullmatch(text.strip()) is None:
        try:
            return parse_moment(text)
        except UsageError as exc:
            raise UsageError(f"{exc}; or how long from now, as in 90, 5m, 2h, 1d") from None
    try:
        return datetime.now(UTC) + timedelta(seconds=parse_duration(text))
    except OverflowError:
        raise UsageError(f"{quote(text)} is too long") from None


def parse_priority(text: str) -> PriorityName:
    word = text.strip().lower()
    for name in PRIORITIES:
        if word == name:
            return name
    raise UsageError(f"priority {quote(text)} is not one of {', '.join(PRIORITIES)}")


def parse_limit(text: str) -> int | None:
    """A number of tasks at once; `none` is None."""
    word = text.strip().lower()
    if word == "none":
        return None
    if not word.isdecimal() or not 1 <= int(word) <= LARGEST_COUNT:
        raise UsageError(f"{quote(text)} is no limit; write a whole number from 1 to {LARGEST_COUNT:,}, or none")
    return int(word)


def parse_states(names: Sequence[str]) -> tuple[TaskState, ...] | None:
    """States by name, several in one separated by commas; None if none is given."""
    states: list[TaskState] = []
    for name in ",".join(names).lower().split(","):
        word = name.strip()
        if word in STATE_GROUPS:
            states.extend(STATE_GROUPS[word])
        elif word:
            try:
                states.append(TaskState(word))
            except ValueError:
                known = ", ".join([*TaskState, *STATE_GROUPS])
                raise UsageError(f"there is no state {quote(word)}; states are {known}") from None
    return tuple(dict.fromkeys(states)) or None
