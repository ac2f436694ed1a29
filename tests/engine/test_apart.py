"""Very many ends go apart from the claims of their turn, at the same time: a server has more than one processor."""

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest

from taskyard.cluster.heartbeat import InTask
from taskyard.cluster.membership import LeaseSettings
from taskyard.errors import InvalidInput, OutcomeUnknown, StoreUnavailable
from taskyard.model.queue import QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.ports.store import Turned
from taskyard.queueing.dispatcher import BEGIN_AT_ONCE
from taskyard.testing.clock import ManualClock
from tests.engine.leases import LeasedShakyStore
from tests.engine.support import Rig, Work, quiet

ENDS, CLAIMS, BOTH = "ends", "claims", "both"
LEASE = LeaseSettings(stall_s=120.0, beating=InTask)


class Server(LeasedShakyStore):
    """A turn takes it a while. It remembers what was asked at the same time; of two turns that were, each can be the
    later, can hang, and can fail once, before or after it was carried out."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.began: list[str] = []
        self.together: set[frozenset[str]] = set()
        self.slow: str | None = None
        self.gates: dict[str, asyncio.Event] = {}
        self.fails: dict[str, Exception] = {}
        self._asked: list[str] = []

    async def turn(self, node: str, **parts: Any) -> Turned:
        kind = (BOTH if parts.get("demand") else ENDS) if parts.get("settles") else CLAIMS
        self._asked.append(kind)
        try:
            await asyncio.sleep(0)
            self.together.add(frozenset(self._asked))
            if len(self._asked) == 1:
                return await super().turn(node, **parts)
            return await self._turn_beside(kind, node, parts)
        finally:
            self._asked.remove(kind)

    async def _turn_beside(self, kind: str, node: str, parts: dict[str, Any]) -> Turned:
        error, gate = self.fails.pop(kind, None), self.gates.get(kind)
        for _ in range(9 if kind == self.slow else 3):
            await asyncio.sleep(0)
        if gate is not None:
            await gate.wait()
        if error is not None and not isinstance(error, OutcomeUnknown):
            raise error
        turned = await super().turn(node, **parts)
        if error is not None:
            raise error
        return turned


@pytest.fixture
async def rig(start_rig):
    clock = ManualClock()
    rig = await start_rig(store=Server(clock), clock=clock, lease=LEASE, max_running=8, many=4, many_ends=4)

    async def run(record: TaskRecord) -> None:
        rig.store.began.append(record.uuid)

    rig.consumer("brief", run, concurrency=8)
    return rig


async def settled(rig: Rig) -> None:
    """All that goes on by itself has gone on, back-offs included."""
    for _ in range(10):
        await rig.advance(1)


async def test_ends_and_claims_are_sent_at_the_same_time(rig):
    """Each task runs once, in order, and has its end."""
    uuids = await rig.submit_many("brief", 40)
    await quiet()
    assert rig.store.began == uuids
    assert frozenset({ENDS, CLAIMS}) in rig.store.together
    assert await rig.store.count() == {("default", TaskState.COMPLETED): 40}


async def test_few_ends_go_with_the_claims(rig):
    """An end and what takes its place are one commit, as long as there are few."""
    for _ in range(3):
        await rig.submit_many("brief", 3)
        await quiet()
    assert frozenset({BOTH}) in rig.store.together
    assert not any(ENDS in kinds for kinds in rig.store.together)


async def test_ends_that_concern_who_is_next_go_with_the_claims(rig):
    """Those with a key, and those of runs that failed: they would only wait for each other."""

    async def fail(record: TaskRecord) -> None:
        raise ValueError(record.uuid)

    rig.consumer("fail", fail, concurrency=8)
    await rig.offer(*[rig.record("brief", key=str(n)) for n in range(20)])
    await rig.submit_many("fail", 20)
    await quiet()
    counts = await rig.store.count()
    assert counts == {("default", TaskState.COMPLETED): 20, ("default", TaskState.FAILED): 20}
    assert not any(ENDS in kinds for kinds in rig.store.together)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), OutcomeUnknown("cut off")], ids=["undone", "unknown"])
@pytest.mark.parametrize("kinds", [[ENDS], [CLAIMS], [ENDS, CLAIMS]], ids="-".join)
async def test_one_of_the_two_fails_or_both(rig, kinds, error, caplog):
    """What the other has done stands; nothing is lost, and nothing runs twice. It is one outage, told once."""
    rig.store.fails = dict.fromkeys(kinds, error)
    uuids = await rig.submit_many("brief", 40)
    await settled(rig)
    assert rig.store.fails == {}
    assert sorted(rig.store.began) == sorted(uuids)
    assert await rig.store.count() == {("default", TaskState.COMPLETED): 40}
    told = [record.message for record in caplog.records]
    assert told[-1] == "the store answers again, after 1 failed try"
    assert len([message for message in told if "trying again until it does" in message]) == 1
    assert rig.engine.refused == 0
    if ENDS in kinds:
        assert frozenset({BOTH}) in rig.store.together  # what was sent again went as one


async def test_ends_that_are_refused_are_looked_at_one_by_one(rig):
    """A store that does not take something of it is sent everything in parts, until it takes all of it."""
    rig.store.fails[ENDS] = InvalidInput("not this")
    uuids = await rig.submit_many("brief", 40)
    await settled(rig)
    assert sorted(rig.store.began) == sorted(uuids)
    assert await rig.store.count() == {("default", TaskState.COMPLETED): 40}


async def test_room_that_the_ends_make_is_used_at_once(rig):
    """Claims that were counted before the ends find a queue full: they are asked for again, with nothing else to do."""
    await rig.store.set_queue(QueueSettings(name="narrow", concurrency=4))
    rig.store.slow = ENDS
    uuids = await rig.submit_many("brief", 20, queue="narrow")
    await quiet()
    assert rig.store.began == uuids
    assert frozenset({ENDS, CLAIMS}) in rig.store.together


async def test_a_stop_with_both_on_their_way_loses_nothing(rig):
    """The end of `asyncio.run` cancels the turns as well: the stop writes what is left, and gives back what has not
    begun."""
    rig.store.gates = {ENDS: asyncio.Event(), CLAIMS: asyncio.Event()}
    await rig.submit_many("brief", 40)
    await quiet()
    rig.store.gates.clear()
    rig.engine._loops.get("dispatcher").cancel()
    await rig.engine.stop(grace_s=5.0)
    assert rig.engine.is_recorded
    counts = await rig.store.count()
    assert counts.pop(("default", TaskState.COMPLETED)) == len(rig.store.began)
    assert {state for _, state in counts} == {TaskState.QUEUED}


def test_the_end_of_the_loop_loses_nothing_whenever_it_comes():
    """`asyncio.run` cancels all tasks at once when its main one has ended, also those that have not begun: whoever
    stops the engine then records every run that has ended."""

    async def main(rig: Rig, passes: int) -> None:
        async def run(record: TaskRecord) -> None:
            ran.append(record.uuid)

        async def stop_at_the_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await rig.engine.stop(grace_s=5.0)

        def pass_time() -> None:
            rig.clock.advance(1)
            loop.call_later(0.001, pass_time)

        loop = asyncio.get_running_loop()
        pass_time()
        rig.consumer("brief", run, concurrency=8)
        await rig.engine.start()
        stopping.append(asyncio.create_task(stop_at_the_end()))
        await rig.submit_many("brief", 40)
        for _ in range(passes):
            await asyncio.sleep(0)

    for passes in range(60):
        ran: list[str] = []
        stopping: list[asyncio.Task[None]] = []
        rig = Rig(Server(clock := ManualClock()), clock, lease=LEASE, max_running=8, many=4, many_ends=4)
        asyncio.run(main(rig, passes))
        assert stopping[0].done()
        assert asyncio.run(rig.store.count()).get(("default", TaskState.COMPLETED), 0) == len(ran), passes


async def test_claims_do_not_wait_for_ends_that_hang(rig):
    """What was claimed begins, and who submitted is told; the next turn has to wait."""
    rig.store.gates[ENDS] = asyncio.Event()
    await rig.submit_many("brief", 40)
    await quiet()
    assert len(rig.store.began) == len(set(rig.store.began)) > 8
    assert not (await rig.store.count()).get(("default", TaskState.COMPLETED))
    rig.store.gates.pop(ENDS).set()
    await quiet()
    assert await rig.store.count() == {("default", TaskState.COMPLETED): 40}


@pytest.mark.spec("SCH-04")
async def test_what_is_due_next_is_known_though_one_of_the_two_has_not_seen_it(rig):
    """A node that is full when a task for later is added promotes it when its time comes."""
    work, later = Work(), rig.record("work", in_s=5)

    async def run(record: TaskRecord) -> None:
        rig.store.began.append(record.uuid)
        if len(rig.store.began) == 8:
            rig.offer(later)  # goes with the ends of four, and with claims for all that is left

    rig.consumer("brief", run, concurrency=8)
    rig.consumer("work", work, concurrency=8)
    rig.store.slow = CLAIMS
    await rig.offer(*[rig.record("brief") for _ in range(8)], *[rig.record("work") for _ in range(8)])
    await quiet()
    assert len(work.began) == rig.engine.running == 8
    assert await rig.state(later.uuid) is TaskState.SCHEDULED
    await rig.advance(6)
    assert await rig.state(later.uuid) is TaskState.QUEUED
    for uuid in [*work.began, later.uuid]:
        work.let_go(uuid)


@pytest.mark.parametrize("more", [20, 600])
async def test_very_many_claims_begin_some_at_a_time(start_rig, more):
    """In the order in which they were claimed: those that come meanwhile, be they few or many, stand behind them."""
    clock, count = ManualClock(), 4 * BEGIN_AT_ONCE
    rig = await start_rig(store=Server(clock), clock=clock, lease=LEASE, max_running=count)
    begun_at: Counter[int] = Counter()
    passes = itertools.count()

    async def run(record: TaskRecord) -> None:
        rig.store.began.append(record.uuid)
        begun_at[passed] += 1

    rig.consumer("brief", run, concurrency=count)
    answers = rig.offer(*[rig.record("brief") for _ in range(count + more)])
    for passed in itertools.islice(passes, 200):  # noqa: B007 -- the runs look at it
        await asyncio.sleep(0)
    assert rig.store.began == [added.uuid for added in await answers]
    first, *others = begun_at.values()
    assert first == count // 2
    assert set(others) == {BEGIN_AT_ONCE, more % BEGIN_AT_ONCE}
    assert await rig.store.count() == {("default", TaskState.COMPLETED): count + more}
