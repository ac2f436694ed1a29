"""A node that must beat to count as alive: what it does when its beats are not heard, and when it was given up."""

import asyncio
import threading

import pytest

from taskyard.cluster.heartbeat import InTask
from taskyard.cluster.membership import LeaseSettings
from taskyard.errors import ClaimLost, OutcomeUnknown, StoreUnavailable
from taskyard.model.move import Move
from taskyard.model.task import Claim
from taskyard.ports.clock import NOISE_S, suspended_s
from taskyard.ports.store import Add
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import an_error, room
from tests.engine.leases import LeasedShakyStore
from tests.engine.support import Rig, Work, quiet

pytestmark = pytest.mark.spec("SCH-17")


@pytest.fixture
async def rig(start_rig):
    clock = ManualClock()
    return await start_rig(
        store=LeasedShakyStore(clock), clock=clock, lease=LeaseSettings(stall_s=120.0, beating=InTask)
    )


async def running(rig: Rig, work: Work, **fields: object) -> str:
    rig.consumer("work", work, concurrency=5, **fields)
    uuid = await rig.submit("work")
    await quiet()
    assert work.began == [uuid]
    return uuid


async def pass_time(rig: Rig, seconds: int) -> None:
    for _ in range(seconds):
        await rig.advance(1)


async def test_a_node_beats_every_fifth_of_its_lease(rig):
    """A node on a store with leases beats from the start, five times a lease, under its incarnation."""
    await quiet()
    assert rig.store.beats == [rig.engine.incarnation]
    await pass_time(rig, 15)
    assert rig.store.beats == [rig.engine.incarnation] * 6
    assert rig.store.opened == 1


async def test_missed_beats_that_are_followed_by_a_good_one_need_nothing(rig, caplog):
    """A store that is away for less than the lease costs nobody a run; it is said once, and that it is over."""
    work = Work()
    uuid = await running(rig, work)
    rig.store.beat_error = StoreUnavailable("gone")
    await pass_time(rig, 10)
    rig.store.beat_error = None
    await pass_time(rig, 20)
    assert rig.store.joined == [rig.engine.incarnation]
    assert work.cancelled == []
    assert caplog.text.count("was not heard") == 1
    assert caplog.text.count("is heard again") == 1
    assert rig.store.opened - rig.store.closed == 1
    work.let_go(uuid)
    await quiet()
    assert await rig.state(uuid) == "completed"


@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_what_runs_is_interrupted_before_the_lease_has_passed(rig, how):
    """When no beat is heard, be it refused or left unanswered, the node stops what it runs after 0.8 of the lease."""
    work = Work()
    uuid = await running(rig, work)
    await pass_time(rig, 3)  # the second beat
    if how == "refused":
        rig.store.beat_error = StoreUnavailable("gone")
    else:
        rig.store.beat_hangs = rig.store.close_hangs = True
    await pass_time(rig, 11)
    assert work.cancelled == []
    await pass_time(rig, 1)
    assert work.cancelled == [uuid]
    rig.store.close_hangs = False


async def test_a_lease_counts_from_when_the_beat_was_sent(rig):
    """A beat whose answer took its time is not trusted for longer: the others may have seen it at once."""
    work = Work()
    uuid = await running(rig, work)
    rig.store.beat_takes_s = 2.0
    await pass_time(rig, 5)  # sent at 3, answered at 5
    assert len(rig.store.beats) == 2
    rig.store.beat_error = StoreUnavailable("gone")
    await pass_time(rig, 9)
    assert work.cancelled == []
    await pass_time(rig, 1)
    assert work.cancelled == [uuid]


async def test_a_lost_node_goes_on_under_another_incarnation(rig, caplog):
    """When the store is back the node joins anew by itself, what it could not finish was given back without using up an
    attempt, and it runs it again."""
    work = Work()
    uuid = await running(rig, work)
    old = rig.engine.incarnation
    rig.store.beat_error = rig.store.away = StoreUnavailable("gone")
    rig.store.refuses_nodes = True
    await pass_time(rig, 30)
    assert await rig.probes.fenced.next() == old
    assert rig.engine.incarnation == old
    rig.store.beat_error = rig.store.away = None
    rig.store.refuses_nodes = False
    await pass_time(rig, 5)
    new = await rig.probes.rejoined.next()
    assert rig.store.joined == [old, new]
    assert rig.engine.incarnation == new != old
    assert work.began == [uuid, uuid]
    found = await rig.found(uuid)
    assert (found.node, found.attempt, found.recoveries) == (new, 1, 0)
    assert [status.node.incarnation for status in await rig.store.nodes()] == [new]
    assert caplog.text.count("cannot join the store anew") == 1
    work.let_go(uuid)
    await quiet()
    assert await rig.state(uuid) == "completed"
    assert rig.engine.refused == 0


async def test_a_join_that_took_as_long_as_a_lease_does_not_count(rig):
    """A node that hears so late that it has joined may be given up by then: it claims nothing, and joins anew."""
    old = rig.engine.incarnation
    rig.store.beat_error = StoreUnavailable("gone")
    rig.store.join_takes_s = 13.0
    await pass_time(rig, 13)
    assert rig.engine.incarnation == old
    rig.store.beat_error, rig.store.join_takes_s = None, 0.0
    await pass_time(rig, 3)
    assert rig.engine.incarnation == rig.store.joined[-1] != rig.store.joined[1]


async def test_no_incarnation_joins_twice(rig):
    """After a join whose answer was lost, which the others may have heard and given up, another name is tried; when one
    counts, the others are forgotten."""
    rig.store.beat_error = StoreUnavailable("gone")
    rig.store.join_unanswered = OutcomeUnknown("connection lost")
    await pass_time(rig, 30)
    rig.store.beat_error = rig.store.join_unanswered = None
    await pass_time(rig, 5)
    assert len(rig.store.joined) > 2
    assert len(set(rig.store.joined)) == len(rig.store.joined)
    assert rig.engine.incarnation == rig.store.joined[-1]
    known = {status.node.incarnation for status in await rig.store.nodes()}
    assert known & set(rig.store.joined[1:]) == {rig.engine.incarnation}


async def test_a_lease_that_is_lost_while_others_are_forgotten_heals_too(rig):
    """A store that does not answer when a join of doubtful outcome is taken back keeps no later loss from being
    noticed."""
    rig.store.beat_error = StoreUnavailable("gone")
    rig.store.join_unanswered = OutcomeUnknown("connection lost")
    await pass_time(rig, 15)
    rig.store.leave_waits_for = asyncio.Event()
    rig.store.beat_error = rig.store.join_unanswered = None
    await pass_time(rig, 3)
    second = rig.engine.incarnation
    await rig.store.give_up(second)
    await pass_time(rig, 3)
    rig.store.leave_waits_for.set()
    await pass_time(rig, 3)
    assert rig.engine.incarnation == rig.store.joined[-1] != second


async def test_a_node_that_was_given_up_writes_nothing(rig, caplog):
    """A node that hears that it was given up stops what it runs; what it would have written is refused and counted, and
    the task is as the others left it."""
    work = Work()
    uuid = await running(rig, work)
    old = rig.engine.incarnation
    assert await rig.store.give_up(old) == [uuid]
    (taken,) = (await rig.store.turn("other", demand=room(1))).claims
    await pass_time(rig, 3)
    assert work.cancelled == [uuid]
    assert rig.engine.refused == 1
    assert caplog.text.count("would have become") == 1
    found = await rig.found(uuid)
    assert (found.state, found.node, found.token) == ("running", "other", taken.token)
    await pass_time(rig, 3)
    await rig.store.turn("other", settles=[(taken, Move.completed(at=rig.clock.now()))])
    assert rig.engine.incarnation != old


async def test_what_ended_before_the_lease_was_lost_is_recorded(rig):
    """A run that ended while the store was away is written under the old claim when it is back, if nobody took it."""
    work = Work()
    uuid = await running(rig, work)
    rig.store.beat_error = rig.store.away = StoreUnavailable("gone")
    await quiet()
    work.let_go(uuid)
    await pass_time(rig, 30)
    rig.store.beat_error = rig.store.away = None
    await pass_time(rig, 5)
    assert await rig.state(uuid) == "completed"
    assert work.began == [uuid]
    assert rig.engine.refused == 0


async def test_a_fenced_node_claims_nothing(rig):
    """From losing the lease to joining anew nothing is started, although the store answers turns."""
    work = Work()
    uuid = await running(rig, work)
    rig.store.beat_error = StoreUnavailable("gone")
    rig.store.refuses_nodes = True
    await pass_time(rig, 13)
    later = await rig.submit("work")
    await pass_time(rig, 5)
    assert work.began == [uuid]
    assert [await rig.state(one) for one in (uuid, later)] == ["queued", "queued"]
    rig.store.beat_error, rig.store.refuses_nodes = None, False
    await pass_time(rig, 3)
    assert sorted(work.began[1:]) == sorted([uuid, later])


async def test_a_claim_that_arrives_after_the_loss_is_not_begun(rig):
    """Race: a turn is under way when the lease is lost; what it claimed goes back as it came, and runs later."""
    work = Work()
    rig.consumer("work", work)
    await quiet()
    old = rig.engine.incarnation
    rig.store.answers_held = asyncio.Event()
    offered = rig.offer(rig.record("work"))
    await quiet()
    rig.store.beat_error = StoreUnavailable("gone")
    await pass_time(rig, 14)
    assert await rig.probes.fenced.next() == old
    assert await rig.probes.rejoined.next() == rig.engine.incarnation
    rig.store.beat_error = None
    rig.store.answers_held.set()
    [added] = await offered
    await pass_time(rig, 3)
    assert work.began == [added.uuid]
    assert [run.node for run in await rig.store.list_attempts(added.uuid) if run.finished_at] == [old]
    assert (await rig.found(added.uuid)).node == rig.engine.incarnation


async def test_a_claim_nobody_heard_of_is_found_after_the_loss(rig):
    """What a turn without an answer had claimed before the lease was lost is given back, not left to a rescue."""
    work = Work()
    rig.consumer("work", work)
    await quiet()
    rig.store.unanswered = OutcomeUnknown("the answer was lost")
    offered = rig.offer(rig.record("work"))
    await quiet()
    with pytest.raises(OutcomeUnknown):
        await offered
    (task,) = await rig.store.list_tasks()
    rig.store.lists_away = StoreUnavailable("gone")  # nobody can look what was claimed
    rig.store.beat_error = StoreUnavailable("gone")
    await pass_time(rig, 14)
    assert await rig.probes.rejoined.next() == rig.engine.incarnation
    assert work.began == []
    rig.store.beat_error = rig.store.lists_away = None
    await pass_time(rig, 5)
    assert work.began == [task.uuid]
    found = await rig.found(task.uuid)
    assert (found.node, found.attempt, found.recoveries) == (rig.engine.incarnation, 1, 0)


async def test_a_thread_that_goes_on_is_fenced_by_its_token(rig):
    """What cannot be interrupted keeps its slot; its result counts if nobody took the task over, and not otherwise."""
    gate, began = threading.Event(), threading.Semaphore(0)

    def stubborn(record: object) -> str:
        began.release()
        gate.wait(10)
        return "done"

    rig.consumer("work", stubborn, concurrency=2)
    kept, taken = await rig.submit_many("work", 2)
    for _ in range(2):
        await asyncio.to_thread(began.acquire)
    old = rig.engine.incarnation
    rig.store.beat_error = StoreUnavailable("gone")
    await pass_time(rig, 13)
    rig.store.beat_error = None
    await pass_time(rig, 3)
    assert rig.engine.incarnation != old
    # Somebody else gives one of them back, as if it had been rescued alone.
    record = await rig.found(taken)
    assert record.token is not None
    stolen = Claim(record, record.attempt, record.token)
    await rig.store.turn("other", settles=[(stolen, Move.failed(at=rig.clock.now(), error=an_error()))])
    gate.set()
    settled: set[object] = set()
    while settled != {kept, taken}:
        settled.update(await rig.probes.settled.next())
    assert [await rig.state(uuid) for uuid in (kept, taken)] == ["completed", "failed"]
    assert rig.engine.refused == 1


async def test_a_stale_run_submits_nothing(rig):
    """A run whose lease was lost and whose task was taken over cannot submit in its name, also when its node has joined
    anew."""
    work = Work()
    uuid = await running(rig, work)
    record = await rig.found(uuid)
    assert record.token is not None
    claim = Claim(record, record.attempt, record.token)
    await rig.store.give_up(rig.engine.incarnation)
    await pass_time(rig, 3)
    assert rig.engine.is_ours(claim)
    with pytest.raises(ClaimLost):
        await rig.engine.add(Add([rig.record("work")], parent=claim))


async def test_a_drained_node_stays_drained_under_its_new_name(rig):
    """Losing the lease does not undo a drain."""
    work = Work()
    uuid = await running(rig, work)
    await rig.store.drain(rig.engine.incarnation)
    rig.store.hint()
    await quiet()
    await rig.store.give_up(rig.engine.incarnation)
    await pass_time(rig, 5)
    assert work.began == [uuid]
    (status,) = await rig.store.nodes()
    assert (status.node.incarnation, status.is_draining) == (rig.engine.incarnation, True)


async def test_a_drain_that_was_not_heard_follows_the_node_under_its_new_name(rig):
    """A node that was drained while it could not hear it, and was not given up yet, goes on drained."""
    work = Work()
    uuid = await running(rig, work)
    old = rig.engine.incarnation
    await rig.store.drain(old)
    assert not rig.engine.is_draining
    rig.store.beat_error = StoreUnavailable("gone")
    await pass_time(rig, 14)
    rig.store.beat_error = None
    await pass_time(rig, 5)
    assert (rig.engine.is_draining, rig.engine.incarnation != old, work.began) == (True, True, [uuid])
    (status,) = await rig.store.nodes()
    assert (status.node.incarnation, status.is_draining) == (rig.engine.incarnation, True)


async def test_a_lease_that_is_lost_again_and_again_heals_each_time(rig):
    """However often it is given up, the node joins anew, and leaves nothing behind."""
    rig.consumer("work", Work())
    for _ in range(5):
        await quiet()
        await rig.store.give_up(rig.engine.incarnation)
        await pass_time(rig, 4)
    assert len(set(rig.store.joined)) == 6
    assert [status.node.incarnation for status in await rig.store.nodes()] == [rig.engine.incarnation]


async def test_a_stop_ends_the_beat(rig):
    """A node that has left does not beat, and has let go of its connection."""
    rig.consumer("work", Work())
    await quiet()
    await rig.engine.stop()
    before = len(rig.store.beats)
    await pass_time(rig, 20)
    assert len(rig.store.beats) == before
    assert rig.store.opened == rig.store.closed == 1
    assert await rig.store.nodes() == []


async def test_a_lease_lost_during_a_stop_ends_what_still_runs(rig):
    """A stop that waits for a run does not let it go on without a lease, and joins nothing anew."""
    work = Work()
    uuid = await running(rig, work)
    stopping = asyncio.create_task(rig.engine.stop())
    await quiet()
    rig.store.beat_error = StoreUnavailable("gone")
    rig.store.held = asyncio.Event()  # the store takes its time, and would have time for a node that joins
    await pass_time(rig, 15)
    assert not stopping.done()
    rig.store.held.set()
    await stopping
    assert work.cancelled == [uuid]
    assert await rig.state(uuid) == "queued"
    assert len(rig.store.joined) == 1


async def test_what_cannot_be_stopped_keeps_its_node_beating(start_rig):
    """A thread that outlives the stop of its node keeps its claim: the node beats on, and its loop is not missed."""
    clock = ManualClock()
    rig = await start_rig(store=LeasedShakyStore(clock), clock=clock, lease=LeaseSettings(stall_s=20.0, beating=InTask))
    gate, began = threading.Event(), threading.Event()

    def stubborn(record: object) -> None:
        began.set()
        gate.wait(10)

    rig.consumer("work", stubborn)
    await rig.submit("work")
    await asyncio.to_thread(began.wait)
    stopping = asyncio.create_task(rig.engine.stop(grace_s=0.0))
    while not stopping.done():
        await rig.advance(1)
    await pass_time(rig, 60)
    before = len(rig.store.beats)
    await pass_time(rig, 15)
    assert len(rig.store.beats) == before + 5
    gate.set()
    await rig.engine._membership.stop_beating()


async def test_a_loop_that_hangs_gives_its_tasks_up_and_shows_why(rig, caplog, monkeypatch):
    """A loop without a tick for `stall_s` stops the beat, and says once what every thread is doing; when it ticks again
    the node asks, hears that it was given up, and heals."""
    work = Work()
    uuid = await running(rig, work)
    old = rig.engine.incarnation
    monkeypatch.setattr(rig.engine._membership, "tick", lambda: None)
    await pass_time(rig, 130)
    before = len(rig.store.beats)
    await pass_time(rig, 60)
    assert len(rig.store.beats) == before
    assert caplog.text.count("has not run for") == 1
    assert "test_a_loop_that_hangs" in caplog.text
    await rig.store.give_up(old)
    monkeypatch.undo()
    await pass_time(rig, 6)
    assert "runs again" in caplog.text
    assert rig.engine.incarnation != old
    assert work.began == [uuid, uuid]


async def test_a_machine_that_was_suspended_does_not_trust_its_lease(start_rig):
    """After a suspend that was longer than the lease, on whose clock nothing has passed, a node asks at once whether it
    was given up, and stops what it runs."""
    clock, asleep_s = ManualClock(), [3600.0]
    store = LeasedShakyStore(clock)
    lease = LeaseSettings(stall_s=120.0, beating=InTask, suspended_s=lambda: asleep_s[0])
    rig = await start_rig(store=store, clock=clock, lease=lease)
    work = Work()
    uuid = await running(rig, work)
    old = rig.engine.incarnation
    await pass_time(rig, 3)
    assert store.beats == [old] * 2
    asleep_s[0] += 3600.0
    assert await store.give_up(old) == [uuid]
    await pass_time(rig, 1)
    assert store.beats[:3] == [old] * 3
    assert rig.engine.incarnation != old
    assert rig.engine.incarnation in store.joined


async def test_a_short_suspend_counts_against_the_lease(start_rig):
    """The lease is over when its time has passed, be it awake or asleep."""
    clock, asleep_s = ManualClock(), [0.0]
    store = LeasedShakyStore(clock)
    lease = LeaseSettings(stall_s=120.0, beating=InTask, suspended_s=lambda: asleep_s[0])
    rig = await start_rig(store=store, clock=clock, lease=lease)
    await quiet()
    old = rig.engine.incarnation
    store.beat_error = StoreUnavailable("gone")
    asleep_s[0] = 8.0
    await pass_time(rig, 3)
    assert rig.engine.incarnation == old
    await pass_time(rig, 2)
    assert rig.engine.incarnation != old


def test_the_time_of_a_suspend_can_be_told():
    """The machine's two clocks run alike while it is awake."""
    before = suspended_s()
    assert before >= -NOISE_S
    assert suspended_s() == pytest.approx(before, abs=NOISE_S)
