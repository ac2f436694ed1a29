"""Failed tasks, grouped, found and forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.model.command import Retry
from taskyard.model.execution import ErrorKind
from taskyard.model.move import Move
from taskyard.model.settle import QUARANTINE_AFTER
from taskyard.model.state import TaskState
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_error, room
from taskyard.testing.store_contract.desk import Desk, claim, get, settle, start, tick, uuids


async def fail(store: Store, clock: ManualClock, *types: str, **fields: Any) -> str:
    """Run one task, a second after the last, that ends with this error; its uuid."""
    at = tick(clock, 1)
    (held,) = await start(store, a_record(**fields))
    await settle(store, held, Move.failed(at=at, error=an_error(ErrorKind.RUNTIME, f"at {at:%S}", *types)))
    return held.uuid


async def crash(store: Store, clock: ManualClock) -> str:
    """Run one task that takes down workers until it is failed for good; its uuid."""
    at, error = tick(clock, 1), an_error(ErrorKind.SYSTEM, "gone", "WorkerCrashed")
    (held,) = await start(store, a_record())
    for _ in range(QUARANTINE_AFTER - 1):
        moved = Move.retrying(at=at, due_at=at, error=error, crashed=True)
        await settle(store, held, moved)
        (held,) = (await store.turn(held.record.node or "", demand=room(1))).claims
    await settle(store, held, Move.failed(at=at, error=error, crashed=True))
    return held.uuid


class FailureContract(Desk):
    @pytest.mark.spec("SCH-13")
    async def test_failures_are_grouped(self, store: Store, clock: ManualClock) -> None:
        """By class of error and by source, the largest first, each with the one that failed last."""
        await fail(store, clock, "TimeoutError", "OSError")
        alone = await fail(store, clock, "TimeoutError", "OSError", consumer="shrink")
        newest = await fail(store, clock, "TimeoutError", "OSError")
        at = clock.now()
        other = await fail(store, clock, "KeyError")
        (completed,) = await start(store, a_record())
        await settle(store, completed, Move.completed(at=clock.now()))
        groups = await store.failures()
        assert [(group.error, group.consumer, group.count, group.uuid) for group in groups] == [
            ("TimeoutError", "fetch", 2, newest),
            ("KeyError", "fetch", 1, other),
            ("TimeoutError", "shrink", 1, alone),
        ]
        assert (groups[0].newest_at, groups[0].message, groups[0].is_quarantined) == (at, f"at {at:%S}", False)
        assert await store.failures(limit=1) == groups[:1]

    @pytest.mark.spec("SCH-13")
    async def test_failures_are_filtered(self, store: Store, clock: ManualClock) -> None:
        """By whatever tasks are filtered by; states other than failed have none."""
        await fail(store, clock, "TimeoutError", "OSError")
        shrunk = await fail(store, clock, "KeyError", consumer="shrink")
        (group,) = await store.failures(TaskFilter(consumer="shrink"))
        assert (group.error, group.uuid) == ("KeyError", shrunk)
        assert [group.error for group in await store.failures(TaskFilter(error="OSError"))] == ["TimeoutError"]
        (group,) = await store.failures(TaskFilter(finished_after=clock.now()))
        assert group.uuid == shrunk
        assert await store.failures(TaskFilter(states=(TaskState.COMPLETED,))) == []
        assert len(await store.failures(TaskFilter(states=(TaskState.COMPLETED, TaskState.FAILED)))) == 2

    async def test_an_error_without_a_class_goes_by_its_kind(self, store: Store, clock: ManualClock) -> None:
        """What was raised by nobody, such as a timeout, is grouped by its kind, and found by that name; what was raised
        is not."""
        await fail(store, clock, "OSError")
        (held,) = await start(store, a_record())
        error = an_error(ErrorKind.TIMEOUT, "too slow")
        await settle(store, held, Move.failed(at=clock.now(), error=type(error)(kind=error.kind, message="too slow")))
        groups = {group.error: group.message for group in await store.failures()}
        assert (set(groups), groups["timeout"]) == ({"OSError", "timeout"}, "too slow")
        for name in groups:
            (found,) = await store.failures(TaskFilter(error=name))
            assert found.error == name
            assert uuids(await store.list_tasks(TaskFilter(error=name))) == [found.uuid]
        assert await store.failures(TaskFilter(error="runtime")) == []

    async def test_quarantine_stands_apart(self, store: Store, clock: ManualClock) -> None:
        """What was failed because it took its workers down is a group of its own, and can be asked for; sent again by a
        person, it is no longer there."""
        crashed = await crash(store, clock)
        failed = await fail(store, clock, "WorkerCrashed")
        found = {(group.is_quarantined, group.uuid, group.count) for group in await store.failures()}
        assert found == {(True, crashed, 1), (False, failed, 1)}
        assert uuids(await store.list_tasks(TaskFilter(quarantined=True))) == [crashed]
        assert uuids(await store.list_tasks(TaskFilter(quarantined=False))) == [failed]
        await store.apply([crashed], Retry())
        assert await store.list_tasks(TaskFilter(quarantined=True)) == []

    async def test_what_failed_is_pruned_apart(self, store: Store, clock: ManualClock) -> None:
        """The failed can be counted and forgotten without the others, and the others without them."""
        failed, others = [], []
        for _ in range(3):
            failed.append(await fail(store, clock))
            (held,) = await start(store, a_record())
            others.append(held.uuid)
            await settle(store, held, Move.completed(at=tick(clock, 1)))
        ends = {uuid: (await get(store, a_record(uuid=uuid))).finished_at for uuid in [*failed, *others]}
        assert await store.find_end(2, failed=True) == ends[failed[1]]
        assert await store.find_end(3, failed=False) == ends[others[0]]
        assert await store.find_end(4, failed=False) is None
        assert await store.prune(finished_before=clock.now(), failed=True, limit=2) == 2
        assert await store.prune(finished_before=tick(clock, 1), failed=False) == 3
        assert uuids(await store.list_tasks()) == failed[2:]
        await store.apply([failed[2]], Retry())
        assert await store.prune(finished_before=tick(clock, 1), failed=True) == 0

    async def test_what_was_mended_at_once_has_not_failed(self, store: Store, clock: ManualClock) -> None:
        """A task that fails, is sent again and completes within one tick of the clock is forgotten with the others."""
        failed = await fail(store, clock)
        await store.apply([failed], Retry())
        (held,) = await claim(store)
        await settle(store, held, Move.completed(at=clock.now()))
        assert await store.prune(finished_before=tick(clock, 1), failed=True) == 0
        assert uuids(await store.list_tasks()) == [failed]
        assert await store.prune(finished_before=clock.now(), failed=False) == 1

    async def test_the_nth_end_is_known(self, store: Store, clock: ManualClock) -> None:
        """When the nth task ended, counted from the last: what to prune to keep so many."""
        assert await store.find_end(1) is None
        failed = [await fail(store, clock) for _ in range(3)]
        ends = [(await get(store, a_record(uuid=uuid))).finished_at for uuid in failed]
        assert [await store.find_end(n) for n in (1, 2, 3, 4)] == [*reversed(ends), None]
        assert await store.prune(finished_before=ends[1] or clock.now()) == 1
        assert uuids(reversed(await store.list_tasks())) == failed[1:]
