"""What the suites share: an open store with two nodes on it, and the short verbs the tests are written in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

import pytest

from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.node import NodeStatus
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, Dedupe, TaskRecord
from taskyard.ports.clock import Clock
from taskyard.ports.store import Added, Store, Turned
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_node, an_add, room

NODE_A, NODE_B = a_node("a"), a_node("b")
A, B = NODE_A.incarnation, NODE_B.incarnation


class Desk:
    """The fixtures. `store` is open, and the nodes A and B have joined it."""

    pytestmark = pytest.mark.anyio

    ring = 10_000
    """Events the store keeps at least; readers that fall further behind may miss some."""

    def make_store(self, clock: Clock, folder: Path) -> Store:
        """A store that is not open yet. `folder` is empty the first time, and the same within one test."""
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    async def store(self, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
        store = self.make_store(clock, tmp_path)
        await store.open()
        await store.join(NODE_A)
        await store.join(NODE_B)
        yield store
        await store.leave(A)
        await store.leave(B)
        await store.close()


def tick(clock: ManualClock, seconds: float) -> datetime:
    """Time passes; the new wall time."""
    clock.advance(seconds)
    return clock.now()


async def add(
    store: Store, *records: TaskRecord, dedupe: Dedupe = Dedupe.ALLOW, parent: Claim | None = None
) -> list[Added]:
    """Add these and nothing else; the add must succeed."""
    (added,) = (await store.turn(A, adds=[an_add(*records, dedupe=dedupe, parent=parent)])).added
    assert isinstance(added, list), added
    return added


async def try_add(
    store: Store, *records: TaskRecord, dedupe: Dedupe = Dedupe.ALLOW, parent: Claim | None = None
) -> list[Added] | Exception:
    """Add these and nothing else; what the store answers."""
    (added,) = (await store.turn(A, adds=[an_add(*records, dedupe=dedupe, parent=parent)])).added
    return added


async def claim(store: Store, demand: Demand | int = 1, *, node: str = A) -> list[Claim]:
    """Claim for this demand, or for so many tasks of any source."""
    asked = room(demand) if isinstance(demand, int) else demand
    return (await store.turn(node, demand=asked)).claims


async def start(store: Store, *records: TaskRecord, node: str = A) -> list[Claim]:
    """Add these and claim them at once; nothing else may be waiting."""
    turned = await store.turn(node, adds=[an_add(*records)], demand=room(len(records)))
    assert uuids(turned.claims) == uuids(records)
    return turned.claims


async def settle(store: Store, claim: Claim, move: Move, *, node: str = A) -> Turned:
    """Settle this and nothing else; the claim must still be valid."""
    turned = await store.turn(node, settles=[(claim, move)])
    assert turned.settled == [None]
    return turned


async def nodes_of(store: Store) -> dict[str, NodeStatus]:
    """All nodes by incarnation."""
    return {status.node.incarnation: status for status in await store.nodes()}


async def get(store: Store, task: TaskRecord | Claim) -> TaskRecord:
    record = await store.find(task.uuid)
    assert record is not None
    return record


async def state_of(store: Store, task: TaskRecord | Claim) -> TaskState:
    return (await get(store, task)).state


async def everything(store: Store) -> dict[str, TaskRecord]:
    """All records by uuid."""
    return {record.uuid: record for record in await store.list_tasks(limit=100_000)}


def uuids(tasks: object) -> list[str]:
    """The uuids of records, claims or answers, in order."""
    assert hasattr(tasks, "__iter__")
    return [task.uuid for task in tasks]
