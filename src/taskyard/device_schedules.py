"""Schedules of a pool of devices: the same work for each of many accounts."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import update_wrapper
from typing import Any

from taskyard.devices.definitions import AccountId, GameAccount
from taskyard.errors import InvalidInput, quote
from taskyard.model.each import MOST_ITEMS, ScheduleItem, WrongItems
from taskyard.model.recurrence import Rule
from taskyard.ports.consumer import Consumer

ListsAccounts = Sequence[AccountId] | Callable[[], Sequence[AccountId] | Awaitable[Sequence[AccountId]]]


def choose_rule(cron: str | None, every_s: float | None) -> Rule | str | float:
    """Exactly one of them."""
    if (cron is None) == (every_s is None):
        raise InvalidInput("give either {cron} or {every_s}: when, or how often", fields=("cron", "every_s"))
    return cron if cron is not None else every_s or 0.0


def list_for(consumer: Consumer, accounts: Any) -> list[ScheduleItem] | Callable[[], Any]:
    """The items of a schedule for these accounts, or for those that a function returns."""
    if not callable(accounts):
        items = _to_items(consumer, accounts)
        if not items:
            raise InvalidInput("has no account; a list that changes is given as a function", field="accounts")
        return items
    if inspect.iscoroutinefunction(accounts):

        async def list_items() -> list[ScheduleItem]:
            return _returned(consumer, await accounts())

        return update_wrapper(list_items, accounts)

    def list_in_thread() -> Any:
        given = accounts()
        return _finish(consumer, given) if inspect.isawaitable(given) else _returned(consumer, given)

    return update_wrapper(list_in_thread, accounts)


async def _finish(consumer: Consumer, given: Awaitable[Any]) -> list[ScheduleItem]:
    return _returned(consumer, await given)


def _returned(consumer: Consumer, given: Any) -> list[ScheduleItem]:
    """The items for the accounts that a function has returned."""
    try:
        return _to_items(consumer, given)
    except InvalidInput as wrong:
        raise WrongItems(str(wrong)) from None


def _to_items(consumer: Consumer, accounts: Any) -> list[ScheduleItem]:
    if not isinstance(accounts, list | tuple | range):
        raise InvalidInput(f"must be a list of accounts, not {quote(accounts)}", field="accounts")
    if len(accounts) > MOST_ITEMS:
        raise InvalidInput(
            f"{len(accounts):,} accounts are more than {MOST_ITEMS:,}", field="accounts", hint="make several schedules"
        )
    return [_to_item(consumer, account) for account in accounts]


def _to_item(consumer: Consumer, given: Any) -> ScheduleItem:
    account = GameAccount.of(given)
    return ScheduleItem({consumer.account: account} if consumer.account else {}, key=account.key)
