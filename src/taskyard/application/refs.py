"""Refs: how a person names a task, by a whole id or by at least 4 characters of its beginning or end."""

from __future__ import annotations

from collections.abc import Iterable

from taskyard.application.errors import AmbiguousTask, InvalidRef
from taskyard.errors import InvalidInput, UnknownTask, quote
from taskyard.model.given import check_text
from taskyard.yard import Yard

MIN_REF_CHARS = 4
"""Characters: a slip of the finger must not find a task to cancel."""


async def resolve_task(yard: Yard, ref: str) -> str:
    """The id of the one task that `ref` names."""
    try:
        check_text("an id", ref)
    except InvalidInput as wrong:
        raise InvalidRef(str(wrong)) from None
    if await yard.store.find(ref) is not None:
        return ref
    wanted = ref.strip().lower()
    if len(wanted) < MIN_REF_CHARS:
        raise InvalidRef(
            f"{quote(ref)} is too short: give at least {MIN_REF_CHARS} characters of the end of the task id"
        )
    found = await yard.store.list_uuids(wanted, limit=4)
    if len(found) > 1:
        raise AmbiguousTask(wanted, found)
    if not found:
        raise UnknownTask(ref)
    return found[0]


async def resolve_tasks(yard: Yard, refs: Iterable[str]) -> list[str]:
    """The ids, each once, in the order of the refs."""
    return list(dict.fromkeys([await resolve_task(yard, ref) for ref in refs]))
