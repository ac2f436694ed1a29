"""The yard itself, for the commands that do not go through the application yet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from taskyard.application.calls import YardContext, check_filter_names, check_queue_known, explain_no_match
from taskyard.application.errors import AmbiguousTask
from taskyard.application.opening import FoundYard, describe_store, is_shared, open_application, store_path
from taskyard.application.opening import check_write_lock as refuse_held
from taskyard.cli.asking import asker
from taskyard.cli.errors import UsageError, typed_on_the_command_line
from taskyard.cli.session import Target, note_if_slow
from taskyard.errors import UnknownTask, quote
from taskyard.model.given import check_text
from taskyard.model.task_filter import TaskFilter
from taskyard.yard import Yard

__all__ = ["Target", "describe_store", "is_shared", "patiently", "refuse_held", "store_path"]

SHORTEST = 4

T = TypeVar("T")


async def patiently(yard: Yard, opening: Awaitable[T]) -> T:
    return await note_if_slow(FoundYard(yard), opening)


@asynccontextmanager
async def opened(yard: Yard, *, makes: bool = False) -> AsyncIterator[Yard]:
    opening = open_application(yard, actor=asker(), create=makes)
    await note_if_slow(FoundYard(yard), opening.__aenter__())
    try:
        yield yard
    finally:
        await opening.__aexit__(None, None, None)


async def resolve(yard: Yard, fragment: str) -> str:
    with typed_on_the_command_line():
        check_text("an id", fragment)
    if await yard.store.find(fragment) is not None:
        return fragment
    wanted = fragment.strip().lower()
    if len(wanted) < SHORTEST:
        raise UsageError(f"{quote(fragment)} is too little of an id; give at least {SHORTEST} characters of its end")
    found = await yard.store.list_uuids(wanted, limit=4)
    if len(found) > 1:
        raise AmbiguousTask(wanted, found)
    if not found:
        raise UnknownTask(fragment)
    return found[0]


async def resolve_all(yard: Yard, fragments: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([await resolve(yard, fragment) for fragment in fragments]))


async def refuse_unknown_queue(yard: Yard, name: str) -> None:
    await check_queue_known(YardContext(yard, ""), name)


async def refuse_unknown(yard: Yard, target: Target, where: TaskFilter) -> None:
    await check_filter_names(YardContext(yard, "", target.app_name), where)


async def why_nothing(yard: Yard, target: Target, where: TaskFilter) -> str:
    return await explain_no_match(YardContext(yard, "", target.app_name), where)
