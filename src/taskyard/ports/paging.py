"""All that match, a page at a time: newest first, each page behind the last of the one before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter

T = TypeVar("T")


class Read(Protocol[T]):
    """`list_tasks` or `list_ids` of a store."""

    def __call__(self, where: TaskFilter, *, before_id: int | None, limit: int) -> Awaitable[list[T]]: ...


def task_pages(read: Read[TaskRecord], where: TaskFilter, *, size: int = 100) -> AsyncIterator[list[TaskRecord]]:
    """Whoever comes after the first page was read is in none."""
    return _pages(read, where, size, lambda record: record.id)


def id_pages(
    read: Read[tuple[int, str]], where: TaskFilter, *, size: int = 500
) -> AsyncIterator[list[tuple[int, str]]]:
    """The same, of nothing but ids."""
    return _pages(read, where, size, lambda pair: pair[0])


async def _pages(read: Read[T], where: TaskFilter, size: int, id_of: Callable[[T], int]) -> AsyncIterator[list[T]]:
    before_id: int | None = None
    while page := await read(where, before_id=before_id, limit=size):
        yield page
        if len(page) < size:
            break
        before_id = id_of(page[-1])
