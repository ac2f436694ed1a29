"""A store by itself, without the yard around it: for what is measured at its port."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.node import Node
from taskyard.model.order import Priority
from taskyard.model.queue import QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, TaskRecord, new_uuid
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Add, Store
from taskyard.settings import make_store

PENDING = (TaskState.QUEUED, TaskState.RUNNING)


@asynccontextmanager
async def joined(dsn: str) -> AsyncIterator[tuple[Store, str]]:
    """The store at that address, and the node that works on it here."""
    store = make_store(dsn, SystemClock())
    await store.open()
    node = Node(incarnation=new_uuid(), name="benchmark", pid=os.getpid(), host="localhost")
    await store.join(node)
    await store.set_queue(QueueSettings(name="default", per_key=1))
    yield store, node.incarnation
    await store.close()


def a_record(source: str, *, priority: Priority = Priority.NORMAL, key: str | None = None) -> TaskRecord:
    now = datetime.now(UTC)
    return TaskRecord(
        uuid=new_uuid(),
        consumer=source,
        due_at=now,
        created_at=now,
        updated_at=now,
        priority=priority,
        key=key,
        args='{"number": 1}',
    )


def completion(claim: Claim) -> tuple[Claim, Move]:
    return claim, Move.completed(at=datetime.now(UTC))


async def pending_in(store: Store) -> int:
    counts = await store.count()
    return sum(number for (_, state), number in counts.items() if state in PENDING)


async def timed_claim(store: Store, node: str, source: str, demand: Demand) -> float:
    """One task is added, one claimed, which is timed, and that one completed: what else waits stays as it was."""
    await store.turn(node, adds=[Add([a_record(source)])])
    began = time.perf_counter()
    turned = await store.turn(node, demand=demand)
    elapsed = time.perf_counter() - began
    (claim,) = turned.claims
    await store.turn(node, settles=[completion(claim)])
    return elapsed
