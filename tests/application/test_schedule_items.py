"""What the document of a schedule with items says: its counts, why it failed, and that no process has its function."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from taskyard import Yard
from taskyard.application.local import LocalApplication
from taskyard.model.firing import OVERDUE
from taskyard.model.schedule_state import RETRY, fail
from taskyard.model.task import DedupeScope
from taskyard.schedules import keeper
from taskyard.testing.clock import ManualClock

HOUR_S = 3600


def build(clock: ManualClock) -> Yard:
    yard = Yard("memory://", clock=clock)

    @yard.consumer
    async def visit(account: int) -> int:
        return account

    return yard


async def list_accounts() -> list[dict[str, int]]:
    return [{"account": n} for n in range(3)]


async def add(yard: Yard, each: Any = list_accounts) -> LocalApplication:
    await yard.schedules.add("daily", HOUR_S, "visit", each=each)
    return LocalApplication(yard, actor="ana")


async def document(application: LocalApplication) -> Any:
    (found,) = await application.schedules.list()
    shown = await application.schedules.get("daily")
    assert (found.problem, found.each, found.last, found.retry_at) == (
        shown.problem,
        shown.each,
        shown.last,
        shown.retry_at,
    )
    return found


async def test_the_counts_of_the_last_fire_are_in_the_document() -> None:
    """None before the first; then how many tasks it made and how many items it skipped."""
    async with build(ManualClock()).client() as yard:
        application = await add(yard)
        assert (await document(application)).last is None
        made = await application.schedules.run_now("daily")
        assert (len(made.tasks), made.skipped) == (3, 0)
        made = await application.schedules.run_now("daily")
        assert (len(made.tasks), made.skipped) == (0, 3)
        found = await document(application)
        assert (found.last.made, found.last.skipped) == (0, 3)
        assert (found.each.function, found.each.count) == ("list_accounts", 0)
        assert found.each.dedupe_scope is DedupeScope.PENDING


async def test_a_schedule_that_nobody_fires_says_which_function_is_missing() -> None:
    """When it is due for a while; one with a list, which any worker fires, does not say so."""
    clock = ManualClock()
    async with build(clock).client() as yard:
        application = await add(yard)
        clock.step(HOUR_S + OVERDUE.total_seconds() - 1)
        assert (await document(application)).problem == ""
        clock.step(1)
        problem = (await document(application)).problem
        assert problem == (
            "due since 2026-01-01 13:00:00 UTC, and no process fires it: run a worker that defines list_accounts"
        )
        await application.schedules.pause("daily")
        assert (await document(application)).problem == ""


async def test_a_failed_fire_says_why_and_when_it_is_tried_again() -> None:
    """Until one fires; the number of failures stays."""
    clock = ManualClock()
    async with build(clock).client() as yard:
        application = await add(yard)
        (status,) = await keeper(yard.store).schedules("daily")
        state = fail(status.state, now=clock.now(), problem="no database")
        await keeper(yard.store).fire("daily", version=status.version, state=state)
        found = await document(application)
        assert (found.problem, found.retry_at, found.counts.failed) == ("no database", clock.now() + RETRY, 1)
        assert found.state == "active"


@pytest.mark.parametrize("each", [list_accounts, [{"account": 1}]])
async def test_the_document_of_a_schedule_goes_through_json(each: list[Any] | Callable[[], Any]) -> None:
    """With its items, from a list or from a function."""
    async with build(ManualClock()).client() as yard:
        application = await add(yard, each)
        await application.schedules.run_now("daily")
        found = await application.schedules.get("daily")
        assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
