"""A schedule that makes a task for each of many items: what an item is, and where the items come from.

Nothing here calls the function of a schedule, and nothing encodes arguments for a consumer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from taskyard.errors import InvalidInput, quote
from taskyard.model.given import check_count, check_name, check_timeout
from taskyard.model.task import DedupeScope

MOST_ITEMS = 10_000
"""Items of one schedule: all tasks of a fire time are stored in one transaction."""

LARGEST_LIST = 1_000_000
"""Bytes of JSON: every look at the schedules reads the list."""

FUNCTION_S = 30.0
"""Seconds that a function of items has by default: it looks something up, and other fire times wait for it."""

SCOPES = tuple(scope for scope in DedupeScope if scope is not DedupeScope.WINDOW)
"""A window would be a second interval beside that of the rule."""


class ScheduleItem(msgspec.Struct, frozen=True):
    """One of the items of a schedule: `args` are added to the arguments of the schedule. Tasks of one `key` run one
    after the other, and an item with a key is the same work as every task of this consumer and key."""

    args: dict[str, Any] = {}
    key: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.args, dict):
            raise InvalidInput(f"must be a dict of arguments, not {quote(self.args)}", field="args")
        if self.key is not None:
            check_name("key", self.key)


class WrongItems(InvalidInput):
    """The function of a schedule has returned what are no items. Correct what it returns."""


class EncodedItem(msgspec.Struct, frozen=True):
    """An item as it is stored: `args` are all arguments of its task, encoded for the consumer."""

    args: msgspec.Raw
    key: str | None = None


_encoded_items = msgspec.json.Decoder(list[EncodedItem])


class Each(msgspec.Struct, frozen=True, kw_only=True):
    """Where the items of a schedule come from: a list that is stored with it, or a function that programs define.

    `items` is JSON text, a list of `EncodedItem`; `count` is their number.
    `function` is the name of a function; only a process whose code defines it fires the schedule. It has `timeout_s`
    seconds. With `overlap="skip"` an item is skipped while the same work is there already, as `dedupe_scope` says."""

    items: str = ""
    count: int = 0
    function: str = ""
    timeout_s: float = FUNCTION_S
    dedupe_scope: DedupeScope = DedupeScope.PENDING

    def __post_init__(self) -> None:
        if bool(self.items) == bool(self.function):
            raise InvalidInput("give either a list of items or a function that returns one", field="each")
        if self.function:
            check_name("the name of the function", self.function)
        check_count("count", self.count, least=0, most=MOST_ITEMS)
        check_timeout(self.timeout_s, field="each_timeout_s")
        check_scope(self.dedupe_scope)
        if len(self.items) > LARGEST_LIST:
            raise InvalidInput(
                f"the list has {len(self.items):,} bytes of JSON, with the arguments of the schedule in each item; "
                f"{LARGEST_LIST:,} are allowed",
                field="each",
                hint="give a function that returns the list",
            )


def encode_items(items: list[EncodedItem]) -> str:
    return msgspec.json.encode(items).decode()


def decode_items(each: Each) -> list[EncodedItem]:
    return _encoded_items.decode(each.items)


def name_of(function: Any) -> str:
    """By which a stored schedule knows the function that lists its items: without its module, which has another name
    where the program is run as a script."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def check_scope(given: Any) -> DedupeScope:
    try:
        scope = DedupeScope(given)
    except ValueError:
        scope = DedupeScope.WINDOW
    if scope not in SCOPES:
        raise InvalidInput(f"{quote(given)} is not one of {', '.join(SCOPES)}", field="dedupe_scope")
    return scope


def check_items(given: Any) -> list[ScheduleItem]:
    """The items that a user's list or function gives: dicts of arguments, or `ScheduleItem`."""
    if not isinstance(given, list | tuple):
        raise InvalidInput(f"must be a list of dicts of arguments, not {quote(given)}", field="each")
    if len(given) > MOST_ITEMS:
        raise InvalidInput(
            f"{len(given):,} items are more than {MOST_ITEMS:,}", field="each", hint="make several schedules"
        )
    return [_check_item(n, item) for n, item in enumerate(given)]


def _check_item(n: int, item: Any) -> ScheduleItem:
    if isinstance(item, ScheduleItem):
        return item
    if not isinstance(item, dict):
        raise InvalidInput(f"item {n} must be a dict of arguments or a ScheduleItem, not {quote(item)}", field="each")
    return ScheduleItem(item)
