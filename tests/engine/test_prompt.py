"""A store that never waits answers submits on the spot; everything else stays as it is."""

import asyncio
import itertools

import pytest

from taskyard.errors import DuplicateTask
from taskyard.model.task import Dedupe, TaskRecord
from taskyard.ports.store import Add, Added
from taskyard.queueing.inbox import PROMPT_AT_MOST
from tests.engine.support import PromptStore, Rig, Work, quiet


@pytest.fixture
async def prompt(start_rig) -> Rig:
    rig: Rig = await start_rig(prompt=True)
    assert isinstance(rig.store, PromptStore)
    return rig


async def submit(rig: Rig, record: TaskRecord) -> bool:
    """Whether it was answered on the spot, without a pass of the event loop."""
    passed: list[bool] = []
    asyncio.get_running_loop().call_soon(passed.append, True)
    assert await rig.engine.submit(Add([record])) == [Added(record.uuid)]
    return not passed


async def test_a_submit_is_answered_on_the_spot(prompt):
    """The answer is there without a turn of the event loop, and the task starts in the next one."""
    work = Work()
    prompt.consumer("work", work)
    await quiet()
    record = prompt.record("work")
    assert await submit(prompt, record)
    await quiet()
    assert work.began == [record.uuid]


async def test_a_refusal_is_answered_the_same_way(prompt):
    """What keeps a task out is raised to its submitter."""
    first, second = prompt.record("work", dedupe_slot="s"), prompt.record("work", dedupe_slot="s")
    await prompt.engine.submit(Add([first], Dedupe.REFUSE))
    with pytest.raises(DuplicateTask):
        await prompt.engine.submit(Add([second], Dedupe.REFUSE))


async def test_a_loop_of_submits_gives_way(prompt):
    """A coroutine that does nothing but submit lets others run, at the latest after a fixed number of submits."""
    prompt.consumer("work", Work())
    await quiet()
    submitted_then: list[int] = []
    count = 0

    async def other() -> None:
        while count < 1000:
            submitted_then.append(count)
            await asyncio.sleep(0)

    watching = asyncio.create_task(other())
    for _ in range(1000):
        await prompt.engine.submit(Add([prompt.record("work")]))
        count += 1
    await watching
    steps = [after - before for before, after in itertools.pairwise(submitted_then)]
    assert max(steps) <= PROMPT_AT_MOST + 2


async def test_order_is_kept_across_both_ways(prompt):
    """Tasks run in the order they were submitted, whether they were answered on the spot or by a turn."""
    ran: list[str] = []

    async def note(record) -> None:
        ran.append(record.uuid)

    prompt.consumer("note", note)
    records = [prompt.record("note") for _ in range(5 * PROMPT_AT_MOST)]
    assert {await submit(prompt, record) for record in records} == {True, False}
    await quiet()
    assert ran == [record.uuid for record in records]


@pytest.mark.spec("SCH-04")
async def test_an_earlier_task_overtakes_though_there_is_no_room(prompt):
    """With every slot taken, a task added on the spot still wakes the due-time loop: it is queued at its time."""
    prompt.consumer("work", Work())
    await prompt.engine.submit(Add([prompt.record("work")]))
    await quiet()
    await prompt.engine.submit(Add([later := prompt.record("work", in_s=1)]))
    await quiet()
    await prompt.advance(1)
    assert await prompt.state(later.uuid) == "queued"
