"""Other nodes: a dead one's tasks run here."""

import pytest

from taskyard.errors import OutcomeUnknown, StoreUnavailable
from taskyard.model.limits import Demand
from taskyard.ports.store import Add
from tests.engine.support import Rig, Work


async def claimed_elsewhere(rig: Rig) -> str:
    record = rig.record("work")
    await rig.store.turn("dead", adds=[Add([record])], demand=Demand(1, {"work": 1}))
    return record.uuid


@pytest.mark.spec("QUE-23")
async def test_a_dead_node_s_task_runs_here(rig):
    """Within a second of the store's verdict a dead node's task is taken back and run here."""
    work = Work()
    rig.consumer("work", work)
    uuid = await claimed_elsewhere(rig)
    await rig.advance(1)
    assert work.began == []
    rig.store.dead.append("dead")
    await rig.advance(1)
    assert await rig.probes.rescued.next() == [uuid]
    assert work.began == [uuid]
    assert [run.state for run in await rig.store.list_attempts(uuid)] == ["interrupted", "running"]


async def test_a_rescue_whose_answer_was_lost(rig):
    """What a rescue has brought back is run here, also when nobody heard that it was carried out."""
    work = Work()
    rig.consumer("work", work)
    uuid = await claimed_elsewhere(rig)
    rig.store.rescue_unanswered = OutcomeUnknown("connection lost")
    rig.store.dead.append("dead")
    await rig.advance(1)
    assert work.began == [uuid]


async def test_one_that_cannot_be_taken_back_keeps_nobody_waiting(rig, caplog, monkeypatch):
    """When the store fails at one dead node, the others are taken back all the same, and it is told."""
    work = Work()
    rig.consumer("work", work)
    uuid = await claimed_elsewhere(rig)
    rescue = rig.store.rescue

    async def fail_at_one(incarnation: str) -> list[str]:
        if incarnation == "stuck":
            raise StoreUnavailable("too much to take back")
        uuids: list[str] = await rescue(incarnation)
        return uuids

    monkeypatch.setattr(rig.store, "rescue", fail_at_one)
    rig.store.dead += ["stuck", "dead"]
    await rig.advance(1)
    assert work.began == [uuid]
    assert "too much to take back" in caplog.text


async def test_the_rescuer_survives_an_outage(rig, caplog):
    """While the store is away the rescuer says so once, and goes on when it is back."""
    work = Work()
    rig.consumer("work", work)
    uuid = await claimed_elsewhere(rig)
    rig.store.dead.append("dead")
    rig.store.away = StoreUnavailable("gone")
    for _ in range(5):
        await rig.advance(1)
    rig.store.away = None
    for _ in range(3):
        await rig.advance(1)
    assert work.began == [uuid]
    assert caplog.text.count("cannot look for dead nodes") == 1


async def test_a_dead_node_is_named_as_in_lists(rig, caplog):
    """The log names a dead node by the beginning of its incarnation, as `taskyard node ls` does."""
    rig.consumer("work", Work())
    rig.store.dead.append("61c60d69337c47548d3f9f8f870164f2")
    await rig.advance(1)
    assert "node 61c60d69 died; took back 0 of its tasks" in caplog.messages
