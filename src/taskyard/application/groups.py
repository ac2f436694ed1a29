"""Groups of tasks: finding one by a ref, and its members."""

from __future__ import annotations

from taskyard.application.errors import NoGroup
from taskyard.application.refs import resolve_task
from taskyard.errors import UnknownGroup, UnknownTask
from taskyard.group import Group
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.yard import Yard


async def find_group(yard: Yard, ref: str) -> Group:
    """The group with this id, or the group of the task that the ref names."""
    try:
        uuid = await resolve_task(yard, ref)
    except UnknownTask:
        # A group without a summary has no task with the id of the group.
        if not await yard.store.count_group(ref):
            raise UnknownGroup(ref) from None
        return yard.group(ref)
    record = await yard.handle(uuid).record()
    if record.group_id is None:
        raise NoGroup(uuid)
    return yard.group(record.group_id)


async def list_members(yard: Yard, group: str, limit: int) -> list[TaskRecord]:
    """The tasks of a group without its summary, at most `limit`: those that have not completed first, each kind as
    submitted."""
    rest = tuple(state for state in TaskState if state is not TaskState.COMPLETED)
    found: list[TaskRecord] = []
    for states in (rest, (TaskState.COMPLETED,)):
        # One more than the limit, because the summary may be among them.
        page = await yard.store.list_tasks(TaskFilter(group=group, states=states), limit=limit + 1)
        found += sorted((record for record in page if record.uuid != group), key=lambda record: record.id)
    return found[:limit]
