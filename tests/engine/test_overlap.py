"""Of many claims, some begin while the next turn is on its way: a store that is a server has its own processor."""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from taskyard.cluster.heartbeat import InTask
from taskyard.cluster.membership import LeaseSettings
from taskyard.errors import OutcomeUnknown
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, TaskRecord
from taskyard.ports.store import Turned
from taskyard.testing.clock import ManualClock
from tests.engine.leases import LeasedShakyStore
from tests.engine.support import Rig, Work, quiet


class Server(LeasedShakyStore):
    """It takes its time for a turn, in which the node can do something else."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.began: list[str] = []
        self.seen: list[tuple[int, int, int]] = []

    async def turn(self, node: str, **parts: Any) -> Turned:
        before = len(self.began)
        for _ in range(3):
            await asyncio.sleep(0)
        self.seen.append((len(parts.get("settles", ())), before, len(self.began)))
        return await super().turn(node, **parts)


@pytest.fixture
async def rig(start_rig):
    clock = ManualClock()
    lease = LeaseSettings(stall_s=120.0, beating=InTask)
    return await start_rig(store=Server(clock), clock=clock, lease=lease, max_running=8, many=4)


def brief(rig: Rig) -> None:
    """A consumer whose runs end at once."""
    store = rig.store
    assert isinstance(store, Server)

    async def run(record: TaskRecord) -> None:
        store.began.append(record.uuid)

    rig.consumer("brief", run, concurrency=8)


async def test_the_rest_of_many_claims_begins_while_the_next_turn_is_on_its_way(rig):
    """The first half has ended and is being settled while the second half begins; from then on both take turns."""
    brief(rig)
    uuids = await rig.submit_many("brief", 24)
    await quiet()
    assert rig.store.began == uuids
    busy = [seen for seen in rig.store.seen if seen[0]]
    assert busy[0] == (4, 4, 8)
    assert all(after - before == settles == 4 for settles, before, after in busy[:4])
    assert await rig.store.count() == {("default", TaskState.COMPLETED): 24}


async def test_runs_that_do_not_end_hold_up_nobody(rig):
    """Without anything to settle there is no turn to wait for: all claims begin at once."""
    work = Work()
    rig.consumer("work", work, concurrency=8)
    uuids = await rig.submit_many("work", 8)
    await quiet()
    assert work.began == uuids
    for uuid in uuids:
        work.let_go(uuid)


async def test_claims_that_have_not_begun_when_the_node_stops_go_back(rig):
    """They use up no attempt, and their tasks can be claimed again."""
    stopping: list[asyncio.Task[None]] = []

    async def run(record: TaskRecord) -> None:
        rig.store.began.append(record.uuid)
        if not stopping:
            stopping.append(asyncio.create_task(rig.engine.stop(grace_s=5.0)))

    rig.consumer("brief", run, concurrency=8)
    uuids = await rig.submit_many("brief", 8)
    await quiet()
    await stopping[0]
    assert rig.store.began == uuids[:4]
    assert {await rig.state(uuid) for uuid in uuids[:4]} == {TaskState.COMPLETED}
    given_back = [await rig.found(uuid) for uuid in uuids[4:]]
    assert [(task.state, task.attempt) for task in given_back] == [(TaskState.QUEUED, 0)] * 4
    assert rig.engine.is_recorded


async def test_claims_that_were_put_off_begin_though_the_turn_fails(rig):
    """A turn whose outcome is unknown makes no claim begin twice, and none never."""
    brief(rig)
    answers = [rig.offer(rig.record("brief")) for _ in range(8)]
    rig.store.unanswered = OutcomeUnknown("cut off")
    await asyncio.gather(*answers, return_exceptions=True)
    for _ in range(20):
        await rig.advance(1)
    assert len(rig.store.began) == len(set(rig.store.began)) == 8
    assert await rig.store.count() == {("default", TaskState.COMPLETED): 8}


async def test_a_start_that_fails_among_those_put_off_costs_its_own_task_alone(rig):
    """A bug between claim and run: the others run, each once, and no slot is lost."""
    brief(rig)
    await quiet()
    start, starts = rig.engine._runner.start, itertools.count(1)

    def stumble(claim: Claim) -> None:
        if next(starts) == 6:
            raise RuntimeError("stumbled")
        start(claim)

    dispatcher = rig.engine._dispatcher
    dispatcher.connect(replace(dispatcher._hooks, start=stumble))
    uuids = await rig.submit_many("brief", 8)
    await quiet()
    assert rig.store.began == uuids[:5] + uuids[6:]
    assert (await rig.outcome(uuids[5])).state is TaskState.FAILED
    again = await rig.submit_many("brief", 8)
    await quiet()
    assert rig.store.began[7:] == again


async def test_claims_that_are_found_only_when_the_node_stops_go_back(start_rig):
    """All of them, also those that are put off, though nothing is left that would take another turn."""
    clock = ManualClock()
    store, lease = LeasedShakyStore(clock), LeaseSettings(stall_s=120.0, beating=InTask)
    rig = await start_rig(store=store, clock=clock, lease=lease, max_running=8, many=4)
    brief_runs: list[str] = []

    async def run(record: TaskRecord) -> None:
        brief_runs.append(record.uuid)

    rig.consumer("brief", run, concurrency=8)
    store.unanswered = OutcomeUnknown("cut off")
    answers = rig.offer(*[rig.record("brief") for _ in range(8)])
    await asyncio.gather(answers, return_exceptions=True)
    rig.engine._loops.get("dispatcher").cancel()
    await rig.engine.stop(grace_s=5.0)
    assert brief_runs == []
    assert await store.count() == {("default", TaskState.QUEUED): 8}
