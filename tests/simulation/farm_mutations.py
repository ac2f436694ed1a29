"""The code of devices with one safeguard taken out, to show that the simulated farm would notice."""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any

import pytest

from taskyard.device_pool import DevicePool
from taskyard.devices.reach import Reach
from taskyard.devices.server import PoolServer
from taskyard.devices.work_item import WorkItem
from taskyard.engine.parts import Parts
from taskyard.model import settle
from taskyard.model.device import DeviceHealth
from taskyard.model.execution import ExecutionError
from taskyard.model.move import Move
from taskyard.model.order import tail_position
from taskyard.model.queue import QueueOrder
from taskyard.model.task import TaskRecord
from taskyard.queueing.capacity import Hold
from taskyard.stores.devices import Change, Known, plan_serving
from taskyard.stores.memory import core, devices, tasks
from taskyard.yard import Yard

Patch = pytest.MonkeyPatch


def nothing(*_: Any, **__: Any) -> None:
    """In the place of something."""


async def no_answer(*_: Any, **__: Any) -> None:
    """In the place of something that is awaited."""


def skip_the_head(patch: Patch) -> None:
    """The pool is no strict queue: a task whose account is busy lets the others pass."""
    inner = Yard.define_queue

    def define(self: Yard, name: str, **rules: Any) -> None:
        inner(self, name, **rules | {"order": QueueOrder.PRIORITY})

    patch.setattr(Yard, "define_queue", define)


def put_back_at_the_tail(patch: Patch) -> None:
    """A task whose device or node was lost goes to the tail."""
    patch.setattr(tasks, "head_position", tail_position)


def forget_running_accounts(patch: Patch) -> None:
    """A submit only looks for the same work, not for the account."""
    patch.setattr(
        core, "find_duplicate", lambda store, asked, *_: store.find_holder(asked.dedupe_slot or "", store.now())
    )


def refuse_without_reason(patch: Patch) -> None:
    """Some accounts are taken for quarantined."""
    patch.setattr(core.MemoryCore, "is_quarantined", lambda self, pool, account, consumer: account.endswith("7"))


def deny_what_was_stored(patch: Patch) -> None:
    """`enqueue` says False although it has stored the task."""
    inner = DevicePool.enqueue

    async def enqueue(self: DevicePool, task: Any, account: Any, **options: Any) -> bool:
        return await inner(self, task, account, **options) and not account.key.endswith("7")

    patch.setattr(DevicePool, "enqueue", enqueue)


def serve_a_device_twice(patch: Patch) -> None:
    """Presence is no lease: nodes ask for devices that others serve, and get each when they first ask for it."""
    asked: set[tuple[str, str]] = set()

    def plan_for_first_ask(
        node: str, names: Sequence[str], known: Known, *, nodes: Collection[str], now: datetime
    ) -> tuple[list[str], list[Change]]:
        first = [name for name in names if (node, name) not in asked]
        rest = [name for name in names if (node, name) in asked]
        asked.update((node, name) for name in names)
        served, taken = plan_serving(node, rest, known, nodes=nodes, now=now)
        also_served, also_taken = plan_serving(node, first, known, nodes=[node], now=now)
        return served + also_served, taken + also_taken

    patch.setattr(devices, "plan_serving", plan_for_first_ask)
    patch.setattr(Reach, "may_ask", lambda self, name, served_by, now: True)


def lose_the_task_with_the_device(patch: Patch) -> None:
    """Nobody hears of the end of a run whose device was lost."""
    inner = WorkItem.finish
    patch.setattr(WorkItem, "finish", lambda self: None if self.cause is not None else inner(self))


def answer_before_the_end(patch: Patch) -> None:
    """A run whose device was lost is over for the store while its code goes on."""
    inner = WorkItem.lose

    def lose(self: WorkItem, reason: str) -> None:
        inner(self, reason)
        self.finish()

    patch.setattr(WorkItem, "lose", lose)


def take_back_for_ever(patch: Patch) -> None:
    """A task goes back to the head however often its devices were lost."""
    inner = settle._settle_device_lost

    def settle_lost(record: TaskRecord, error: ExecutionError, *, auto_recover: int, now: datetime) -> Move:
        return inner(record, error, auto_recover=1_000_000, now=now)

    patch.setattr(settle, "_settle_device_lost", settle_lost)


def never_report(patch: Patch) -> None:
    """The store never hears that a device is up."""
    patch.setattr(PoolServer, "_report", no_answer)


def report_the_dead_as_up(patch: Patch) -> None:
    """A device is always said to be up."""
    patch.setattr(PoolServer, "_health", lambda self, name: DeviceHealth(is_up=True))


def keep_orders(patch: Patch) -> None:
    """Nodes do not hear that a device was given back."""
    patch.setattr(devices.DeviceVerbs, "device_stamp", _no_stamp)


async def _no_stamp(self: object) -> int:
    return 0


def run_on_without_a_lease(patch: Patch) -> None:
    """A node that may have been given up claims nothing more, and lets run what runs."""
    patch.setattr(Parts, "_fenced", lambda self, incarnation: self.slots.hold(Hold.FENCE))
    patch.setattr(PoolServer, "_lose_all", nothing)


MUTATIONS: dict[str, Callable[[Patch], None]] = {
    mutation.__name__.replace("_", "-"): mutation
    for mutation in (
        skip_the_head,
        put_back_at_the_tail,
        forget_running_accounts,
        refuse_without_reason,
        deny_what_was_stored,
        serve_a_device_twice,
        lose_the_task_with_the_device,
        answer_before_the_end,
        take_back_for_ever,
        never_report,
        report_the_dead_as_up,
        keep_orders,
        run_on_without_a_lease,
    )
}
