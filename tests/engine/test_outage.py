"""A store that fails: nothing that ended is lost, submitters are told, work goes on by itself."""

import asyncio
import logging

import pytest

from taskyard.errors import IllegalMove, OutcomeUnknown, StoreFull, StoreUnavailable
from taskyard.execution.context import current_run
from taskyard.model.command import Cancel
from taskyard.model.notes import Note
from taskyard.ports.store import Add
from taskyard.stores.memory import MemoryStore
from tests.engine.support import Rig, Work, quiet


async def test_submitters_are_told_and_can_ask_again(rig, caplog):
    """A submit that the store refused raises the store's own error, and works once the store is back. Where there is
    nothing else to be tried again, nothing is logged."""
    rig.store.away = StoreFull("work.db")
    with pytest.raises(StoreFull):
        await rig.submit("work")
    rig.store.away = None
    await rig.advance(2)
    assert await rig.state(await rig.submit("work")) == "queued"
    assert "the store" not in caplog.text


async def test_what_ended_during_an_outage_is_recorded_after_it(rig):
    """Runs that end while the store is away are settled when it is back, once each."""
    work = Work()
    rig.consumer("work", work, concurrency=5)
    uuids = await rig.submit_many("work", 5)
    await quiet()
    rig.store.away = StoreUnavailable("gone")
    for uuid in uuids:
        work.let_go(uuid)
    for _ in range(10):
        await rig.advance(1)
    rig.store.away = None
    await rig.advance(2)
    for uuid in uuids:
        assert (await rig.state(uuid), len(await rig.store.list_attempts(uuid))) == ("completed", 1)


async def test_claims_resume_by_themselves(rig):
    """What another process queued during an outage is started after it, though nothing more is handed in here."""
    work = Work()
    rig.consumer("work", work)
    record = rig.record("work")
    await MemoryStore.turn(rig.store, "elsewhere", adds=[Add([record])])
    rig.store.away = StoreUnavailable("gone")
    rig.store.hint()
    for _ in range(30):
        await rig.advance(1)
    assert work.began == []
    rig.store.away = None
    await rig.advance(2)
    assert work.began == [record.uuid]


async def test_an_outage_in_the_due_moment_only_delays(rig):
    """A task that becomes due while the store is away is started when it is back."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work", in_s=5)
    rig.store.away = StoreUnavailable("gone")
    for _ in range(10):
        await rig.advance(1)
    assert work.began == []
    rig.store.away = None
    await rig.advance(2)
    assert work.began == [uuid]


async def test_what_is_due_joins_its_queue_after_an_outage_also_on_a_full_node(rig):
    """The turn that was to promote it is tried again, though the node has no room to claim anything."""
    work = Work()
    rig.consumer("work", work, concurrency=1)
    first = await rig.submit("work")
    await quiet()
    later = await rig.submit("work", in_s=5)
    rig.store.away = StoreUnavailable("gone")
    await rig.advance(6)
    rig.store.away = None
    await rig.advance(2)
    assert (await rig.state(first), await rig.state(later)) == ("running", "queued")
    work.let_go(first)


async def test_an_outage_is_logged_once(rig, caplog):
    """However many tries an outage takes, the log has one line when it begins and one when it is over."""
    rig.consumer("work", Work())
    rig.store.away = StoreUnavailable("the disk is gone")
    rig.store.hint()
    for _ in range(60):
        await rig.advance(1)
    tries = rig.probes.outage.count
    rig.store.away = None
    await rig.advance(2)
    turned = [entry.getMessage() for entry in caplog.records if "dead nodes" not in entry.getMessage()]
    assert 20 < tries <= 120
    assert len(turned) == 2
    assert "the disk is gone" in turned[0]


async def test_tries_are_spaced_out(rig):
    """While the store is away it is tried at most about twice a second once the first tries have failed."""
    rig.consumer("work", Work())
    rig.store.away = StoreUnavailable("gone")
    rig.store.hint()
    for _ in range(200):
        await rig.advance(0.05)
    assert rig.probes.outage.count <= 20


async def test_a_commit_with_unknown_outcome_is_sent_again(rig, caplog):
    """When the answer to a settle is lost, it is sent again; that it had been written after all is no alarm."""
    caplog.set_level(logging.INFO)
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    rig.store.unanswered = OutcomeUnknown("power")
    work.let_go(uuid)
    await quiet()
    await rig.advance(2)
    lost = [entry for entry in caplog.records if "no longer valid" in entry.getMessage()]
    assert [entry.levelno for entry in lost] == [logging.INFO]
    assert (await rig.outcome(uuid)).state == "completed"


async def test_what_was_claimed_without_our_hearing_is_run(rig):
    """When the answer to a turn is lost that had claimed a task, this node finds the task and runs it, once."""
    work = Work()
    rig.consumer("work", work, concurrency=3)
    before = await rig.submit("work")
    rig.store.unanswered = OutcomeUnknown("power")
    record = rig.record("work")
    with pytest.raises(OutcomeUnknown):
        await rig.offer(record)
    assert (await rig.state(record.uuid), work.began) == ("running", [before])
    await rig.advance(1)
    assert work.began == [before, record.uuid]
    work.let_go(before)
    work.let_go(record.uuid)
    assert (await rig.outcome(record.uuid)).state == "completed"


async def test_a_lost_claim_is_a_warning(rig, caplog):
    """A run whose task was taken over meanwhile settles nothing, and says so."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    rig.store.dead.append(rig.engine.incarnation)
    await rig.store.rescue(rig.engine.incarnation)
    work.let_go(uuid)
    await quiet()
    lost = [entry for entry in caplog.records if "no longer valid" in entry.getMessage()]
    assert [entry.levelno for entry in lost] == [logging.WARNING]


async def test_a_settle_the_store_chokes_on_holds_up_nobody_else(rig, caplog):
    """When one settle makes the store raise what it should not, the others are written all the same."""
    work = Work()
    rig.consumer("work", work, concurrency=5)
    uuids = await rig.submit_many("work", 5)
    await quiet()
    poison, turn = uuids[2], rig.store.turn

    async def choke(node, *, settles=(), **parts):
        if any(claim.uuid == poison for claim, _ in settles):
            raise IllegalMove("running", "nowhere")
        return await turn(node, settles=settles, **parts)

    rig.store.turn = choke
    for uuid in uuids:
        work.let_go(uuid)
    for _ in range(10):
        await rig.advance(2)
    states = [await rig.state(uuid) for uuid in uuids]
    assert states == ["completed", "completed", "running", "completed", "completed"]
    assert f"task {poison} cannot be settled" in caplog.text
    assert await rig.state(await rig.submit("work")) in ("queued", "running")


@pytest.mark.parametrize("bad", ["reports", "demand", "everything"])
async def test_what_is_no_settle_loses_no_settle(rig, bad):
    """When the store chokes on a report, on what it should claim, or on everything for a while, every run that has
    ended is recorded all the same."""
    work = Work()

    async def talk(record) -> str:
        current_run().note("bad")
        return await work(record)

    turn = rig.store.turn
    fails = [5]

    async def choke(node, **parts):
        if parts.get(bad) or (bad == "everything" and fails[0]):
            fails[0] -= 1
            raise OSError(37, "No locks available")
        return await turn(node, **parts)

    rig.consumer("work", work, concurrency=3)
    rig.consumer("talk", talk)
    uuids = await rig.submit_many("work", 3)
    await quiet()
    rig.store.turn = choke
    talking = rig.offer(rig.record("talk"))
    for uuid in uuids:
        await quiet()
        work.let_go(uuid)
    await passing(rig, 20)
    assert [await rig.state(uuid) for uuid in uuids] == ["completed"] * 3
    assert talking.exception() is None or bad != "reports"
    rig.store.turn = turn
    await passing(rig, 5)
    assert len(await rig.submit_many("work", 1)) == 1


async def test_a_checkpoint_that_chokes_the_store_once_is_not_lost(rig):
    """When what is handed in has to be sent in parts, what a run saved still goes ahead of its end."""

    async def save(record) -> object:
        run = current_run()
        if run.checkpointed is None:
            run.checkpoint([1])
            raise OSError("again")
        return run.checkpointed

    turn, chokes = rig.store.turn, [True]

    async def choke(node, *, reports=(), **parts):
        if reports and chokes:
            chokes.clear()
            raise OSError(37, "No locks available")
        return await turn(node, reports=reports, **parts)

    rig.store.turn = choke
    rig.consumer("save", save)
    uuid = await rig.submit("save")
    await passing(rig, 20)
    assert not chokes
    found = await rig.found(uuid)
    assert (found.attempt, found.result) == (2, "[1]")


async def test_what_a_run_says_meanwhile_does_not_replace_its_checkpoint(rig):
    """A turn with a checkpoint fails while the run goes on to report: both are stored by the next."""
    saving, going_on = asyncio.Event(), asyncio.Event()

    async def save(record) -> None:
        await saving.wait()
        current_run().checkpoint([1])
        await going_on.wait()
        current_run().note("went on")
        await asyncio.Event().wait()

    rig.consumer("save", save)
    uuid = await rig.submit("save")
    await quiet()
    rig.store.held = asyncio.Event()
    saving.set()
    await quiet()
    going_on.set()
    await quiet()
    rig.store.away = StoreUnavailable("gone")
    rig.store.held.set()
    rig.store.held = None
    await quiet()
    rig.store.away = None
    await rig.advance(2)
    record = await rig.found(uuid)
    assert (record.checkpoint, record.note) == ("[1]", Note.remark("went on"))


async def test_a_node_that_gave_up_a_settle_stays_joined(rig):
    """A settle that was given up leaves its task claimed: stop() does not leave, so that it is rescued later, and it is
    not run again here meanwhile."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    turn = rig.store.turn

    async def choke(node, *, settles=(), **parts):
        if settles:
            raise IllegalMove("running", "nowhere")
        return await turn(node, **parts)

    rig.store.turn = choke
    work.let_go(uuid)
    await passing(rig, 20)
    rig.store.unanswered = OutcomeUnknown("power")
    rig.store.hint()
    await passing(rig, 5)
    await rig.engine.stop()
    assert (await rig.state(uuid), work.began) == ("running", [uuid])
    assert len(await rig.store.nodes()) == 1


async def test_a_claim_in_doubt_is_given_back_by_a_stop(rig):
    """A turn whose answer is lost may have claimed something: stop() finds it and gives it back before it leaves."""
    work = Work()
    rig.consumer("work", work)
    await quiet()
    rig.store.unanswered = OutcomeUnknown("power")
    record = rig.record("work")
    with pytest.raises(OutcomeUnknown):
        await rig.offer(record)
    stopping = asyncio.create_task(rig.engine.stop())
    await passing(rig, 3)
    await stopping
    assert (await rig.state(record.uuid), work.began) == ("queued", [])
    assert await rig.store.nodes() == []


@pytest.mark.spec("SCH-10")
@pytest.mark.parametrize("name", ["dispatcher", "due", "outcomes", "rescuer", "signals", "tick"])
async def test_a_loop_that_fails_is_started_again(start_rig, caplog, name):
    """An internal error ends no loop for good: it is logged, and the loop is started again."""
    rig = await start_rig()
    work = Work()
    rig.consumer("work", work)
    broken = {"dispatcher": "inbox.take", "due": "due._sleep", "outcomes": "watcher._look"}
    broken |= {"rescuer": "rescuer.step", "signals": "runner.cancel", "tick": "due.look"}
    part, method = broken[name].split(".")
    owner = getattr(rig.engine._parts, part)
    original = getattr(owner, method)

    def fail_once(*args, **kwargs):
        setattr(owner, method, original)
        raise ZeroDivisionError("a bug")

    setattr(owner, method, fail_once)
    soon, later = rig.record("work"), rig.record("work", in_s=2)
    await asyncio.gather(rig.offer(soon), rig.offer(later), passing(rig, 3))
    waiting = asyncio.create_task(rig.outcome(soon.uuid))
    await rig.store.apply([soon.uuid], Cancel())
    rig.store.hint()
    await passing(rig, 10)
    assert (await waiting).state == "canceled"
    assert work.began == [soon.uuid, later.uuid]
    assert await rig.probes.restarted.next() == name
    assert f"the {name} loop failed" in caplog.text


async def passing(rig: Rig, seconds: int) -> None:
    for _ in range(seconds):
        await rig.advance(1)
