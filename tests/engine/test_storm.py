"""Many runs that fail at one instant, and when they are tried again."""

import asyncio
from collections import Counter

import pytest

from taskyard.model.queue import QueueSettings
from taskyard.model.retry import RetryPolicy
from tests.engine.support import Rig

TASKS, PER_S = 2_000, 200


async def storm(rig: Rig, tasks: int = TASKS) -> list[float]:
    """Let all of them fail once at one instant; when each began again, in seconds from then."""
    began: list[float] = []
    failed: set[str] = set()
    all_failed = asyncio.Event()

    async def run(record) -> None:
        if record.attempt == 1:
            failed.add(record.uuid)
            if len(failed) == tasks:
                all_failed.set()
            raise ConnectionError("down")
        began.append(rig.clock.monotonic() - start)

    start = rig.clock.monotonic()
    rig.consumer("run", run, concurrency=100, retry=RetryPolicy(jitter=0))
    await rig.submit_many("run", tasks)
    await all_failed.wait()
    while len(began) < tasks:
        rig.clock.advance(0.05)
        for _ in range(30):
            await asyncio.sleep(0)
    return began


@pytest.mark.spec("QUE-13")
async def test_what_fails_together_is_not_tried_together(start_rig):
    """Retries of many that fail at once come back at the steady rate of their queue's budget, and none is lost."""
    rig = await start_rig()
    rig.queues["default"] = QueueSettings(name="default", retries_per_s=PER_S)
    began = await storm(rig)
    each = Counter(int(at) for at in began)
    steady = TASKS / (max(began) - min(began))
    assert min(began) >= 1.0
    assert max(each.values()) <= 1.5 * steady
    assert max(each.values()) <= 1.5 * PER_S


@pytest.mark.spec("QUE-13")
async def test_without_a_budget_they_come_as_their_policy_says(start_rig):
    """A queue without a budget spreads nothing: the control of the test above."""
    rig = await start_rig()
    rig.queues["default"] = QueueSettings(name="default", retries_per_s=None)
    began = await storm(rig)
    assert max(Counter(int(at) for at in began).values()) == TASKS
