"""What users hand in, checked before a store sees it: one value that cannot be kept would fail a whole turn, and with
it what others have in there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol, TypeVar
from uuid import UUID

import msgspec

from taskyard.errors import InvalidInput, quote
from taskyard.model.order import Priority
from taskyard.model.queue import QueueOrder
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import aware

T = TypeVar("T")
R = TypeVar("R")

LONGEST_NAME = 200

LONGEST_REASON = 500
"""Characters of what people say with a command: a few sentences."""

LARGEST_COUNT = 1_000_000
"""More than any machine runs at once: a larger limit is a mistake, and None is what means no limit."""

LARGEST_PAYLOAD = 1_000_000_000
"""Bytes: what SQLite lets one value have."""

LEAST_MEMORY = 32 << 20
"""Bytes: what an idle worker process has, and a little to work with."""

LONGEST_S = 1e9
"""30 years. Timers and databases take no endless number; None is what means no limit."""


def check_name(field: str, value: Any) -> str:
    """`value` if it is a short text that every store takes."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
        raise InvalidInput(f"must be a string of 1 to {LONGEST_NAME} characters", field=field, given=value)
    return check_text(field, value)


def check_by(value: Any) -> str:
    """Who asks, as it is kept in a note; nobody is named by an empty text."""
    return value if value == "" else check_name("by", value)


def check_text(field: str, value: Any) -> str:
    """`value` if it is text that every store takes."""
    if not isinstance(value, str):
        raise InvalidInput("must be a string", field=field, given=value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(
            "must be text without lone surrogates, which no store takes", field=field, given=value
        ) from None
    if "\0" in value:
        raise InvalidInput("must be text without NUL characters", field=field, given=value)
    return value


def check_reason(value: Any, *, field: str = "reason") -> str:
    """Why somebody asks for something, in his words: it is kept, repeated in events and lists, and read by people."""
    text = check_text(field, value)
    if len(text) > LONGEST_REASON:
        raise InvalidInput(
            f"must be a text of at most {LONGEST_REASON:,} characters, not of {len(text):,}: {quote(text)}", field=field
        )
    return text


LABELS_AT_MOST = 16
LONGEST_TITLE = 200
_LABEL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


def check_title(value: Any) -> str:
    """One line of at most `LONGEST_TITLE` characters."""
    text = check_text("title", value)
    if len(text) > LONGEST_TITLE or not text.isprintable():
        raise InvalidInput(f"must be one line of at most {LONGEST_TITLE} characters", field="title", given=text)
    return text


def check_labels(value: Any, *, field: str = "labels") -> dict[str, str]:
    """Names and values of labels: `{"customer": "42"}`."""
    if not isinstance(value, Mapping):
        raise InvalidInput("must be a dict of names and texts, such as {'customer': '42'}", field=field, given=value)
    if len(value) > LABELS_AT_MOST:
        raise InvalidInput(f"has at most {LABELS_AT_MOST} names, not {len(value)}", field=field)
    for name, text in value.items():
        if not isinstance(name, str) or _LABEL_NAME.fullmatch(name) is None:
            raise InvalidInput(
                "must have names of 1 to 40 letters, digits, dots, dashes and underscores", field=field, given=name
            )
        check_name(f"label {name}", text)
    return dict(value)


class HasUuid(Protocol):
    """A handle or a record of a task."""

    @property
    def uuid(self) -> str: ...


AnyTask = str | UUID | HasUuid
"""Which task is meant: by its id, or by what has one."""


def check_uuid(value: Any) -> str:
    """The id of a task, which may also be given as a `uuid.UUID`, or by what has one."""
    if isinstance(value, UUID):
        return str(value)
    return check_name("uuid", value if isinstance(value, str) else getattr(value, "uuid", value))


def check_count(field: str, value: Any, *, least: int, most: int = LARGEST_COUNT, hint: str = "") -> int:
    """`value` if it is a number that a limit can be."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidInput(f"must be a whole number from {least} to {most:,}{hint}", field=field, given=value)
    return value


def check_rate(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise InvalidInput("must be a positive number a second", field=field, given=value)
    return float(value)


def check_memory(field: str, value: Any) -> int:
    """`value` if it is a number of bytes that a worker process can live with."""
    if isinstance(value, bool) or not isinstance(value, int) or value < LEAST_MEMORY:
        raise InvalidInput(f"must be a number of bytes, at least {LEAST_MEMORY:,}", field=field, given=value)
    return value


def check_gpu(value: Any) -> int | str:
    """`value` if CUDA_VISIBLE_DEVICES can say it."""
    if isinstance(value, bool) or not isinstance(value, int | str) or (isinstance(value, int) and value < 0):
        raise InvalidInput('must be a number from 0 on, or text such as "0,1" ("" for none)', field="gpu", given=value)
    return check_text("gpu", value) if isinstance(value, str) else value


def check_keep(value: Any, *, field: str = "keep_s") -> float | None:
    """How long what ended is kept; None is for ever."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LONGEST_S:
        raise InvalidInput("must be between 0 and 1e9 seconds, or None to keep everything", field=field, given=value)
    return float(value)


def check_priority(value: Any) -> Priority:
    try:
        return Priority.of(value)
    except ValueError:
        raise InvalidInput(
            f"{quote(value)} is not one of {', '.join(one.label for one in Priority)}", field="priority"
        ) from None


def check_order(value: Any) -> QueueOrder:
    try:
        return QueueOrder(value)
    except ValueError:
        raise InvalidInput(f"{quote(value)} is not one of {', '.join(QueueOrder)}", field="order") from None


def check_time(field: str, value: Any) -> datetime:
    """`value` in UTC, if it is a time in some zone."""
    if not isinstance(value, datetime):
        raise InvalidInput("must be a datetime with a time zone", field=field, given=value)
    return aware(field, value)


def check_delay(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidInput("must be a number of seconds", field="delay_s", given=value)
    if not 0 <= value < LONGEST_S:
        raise InvalidInput("must be between 0 and 1e9 seconds", field="delay_s", given=value)
    return float(value)


def check_window(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LONGEST_S:
        raise InvalidInput(
            "must be a number of seconds, more than 0 and less than 1e9", field="dedupe_window_s", given=value
        )
    return float(value)


def check_timeout(value: Any, *, field: str = "timeout_s") -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidInput("must be a number of seconds", field=field, given=value)
    if not 0 < value < LONGEST_S:
        raise InvalidInput(
            "must be more than 0 and less than 1e9", field=field, given=value, hint="leave it out for no limit"
        )
    return float(value)


def check_wait(field: str, value: Any) -> float | None:
    """How long a caller is willing to wait: None, or longer than anybody lives, is for ever. NaN must not reach a loop:
    it would leave the order of all timers undefined."""
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise InvalidInput(
            "must be a number of seconds, or None to wait for as long as it takes", field=field, given=value
        )
    if value < 0:
        raise InvalidInput("must not be negative", field=field, given=value, hint="None waits for as long as it takes")
    return float(value) if value < LONGEST_S else None


def check_retry(value: Any) -> RetryPolicy:
    """`value` if it is a policy that comes out of a store as it went in."""
    if not isinstance(value, RetryPolicy):
        raise InvalidInput("must be a RetryPolicy, such as RetryPolicy(max_retries=3)", field="retry", given=value)
    try:
        return msgspec.json.decode(msgspec.json.encode(value), type=RetryPolicy)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidInput(f"{value!r} cannot be stored: {exc}", field="retry") from None


def convert_each(convert: Callable[[T], R], many: Iterable[T]) -> list[R]:
    """What `convert` makes of each, in order. If it refuses one, the error says which."""
    converted: list[R] = []
    try:
        converted.extend(map(convert, many))
    except InvalidInput as error:
        error.item = len(converted)
        raise
    return converted
