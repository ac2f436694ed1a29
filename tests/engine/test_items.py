"""Schedules with items on one node or several, with functions that fail, hang or return nonsense."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from taskyard.errors import NotJson
from taskyard.model.each import MOST_ITEMS, Each, EncodedItem, ScheduleItem, encode_items
from taskyard.model.recurrence import Every
from taskyard.model.schedule import Overlap, Schedule
from taskyard.model.schedule_state import RETRY, ScheduleState
from taskyard.model.task import to_json
from taskyard.schedules import put
from taskyard.scheduling.items import ItemFunction
from taskyard.scheduling.recurring import DEPUTY_S
from taskyard.testing.clock import ManualClock
from tests.engine.support import Rig, ShakyStore, Work, quiet

PATIENCE_S = 10


def encode(args: Any) -> str:
    return to_json("args", args)


@pytest.fixture
async def make(start_rig):
    """Nodes that run `job`, all on one store and one clock; each has the functions it is given."""
    stores: list[ShakyStore] = []

    async def make(functions: dict[str, ItemFunction] | None = None, call=None) -> Rig:
        if not stores:
            stores.append(ShakyStore(ManualClock()))
        store = stores[0]
        rig: Rig = await start_rig(store=store, clock=store._core._clock, item_functions=functions or {})

        async def job(record) -> None: ...

        rig.consumer("job", call or job, concurrency=100)
        rig.consumers["job"] = replace(rig.consumers["job"], encode=encode)
        return rig

    yield make
    join_threads()


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "taskyard-schedule-items":
            thread.join(PATIENCE_S)


def given(call: Callable[[], Any], name: str = "s") -> dict[str, ItemFunction]:
    return {name: ItemFunction("accounts", call)}


def listed(*items: ScheduleItem) -> Each:
    encoded = [EncodedItem(msgspec.Raw(encode(item.args).encode()), item.key) for item in items]
    return Each(items=encode_items(encoded), count=len(encoded))


async def schedule(rig: Rig, each: Each | None = None, *, every: float = 60, **settings) -> Schedule:
    each = each or Each(function="accounts", timeout_s=5)
    made = Schedule(name="s", rule=Every(every), consumer="job", each=each, **settings)
    await put(rig.store, made, now=rig.clock.now(), by="test")
    await look(rig)
    return made


async def look(rig: Rig) -> None:
    rig.engine.look_at_schedules()
    await rig.advance(0)


async def pass_time(rig: Rig, total: float) -> None:
    for _ in range(round(total)):
        await rig.advance(1)


async def state_of(rig: Rig) -> ScheduleState:
    (status,) = await rig.store.schedules("s")
    return status.state


async def wait_until(rig: Rig, happened: Callable[[ScheduleState], bool]) -> ScheduleState:
    """For threads, whose answers come when they come."""
    async with asyncio.timeout(PATIENCE_S):
        while not happened(state := await state_of(rig)):
            await rig.advance(0)
            await asyncio.sleep(0.005)
    return state


async def tasks(rig: Rig) -> list[tuple[str, str | None]]:
    return sorted((record.args, record.key) for record in await rig.store.list_tasks(limit=100_000))


# --- firing -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
async def test_each_item_of_a_list_becomes_a_task(make, caplog):
    """With its arguments and its key, else with the key of the schedule; the row and the log have the counts."""
    rig = await make()
    each = listed(ScheduleItem({"a": 1}), ScheduleItem({"a": 2}, key="two"))
    with caplog.at_level(logging.INFO, "taskyard"):
        await schedule(rig, each, key="all", priority="high")
        await pass_time(rig, 60)
    assert await tasks(rig) == [('{"a":1}', "all"), ('{"a":2}', "two")]
    (row,) = await rig.store.list_fires("s")
    assert (row.made, row.skipped) == (2, 0)
    assert "schedule s fired" in caplog.text
    assert "tasks made: 2, items skipped: 0" in caplog.text
    assert (await state_of(rig)).fired == 1


@pytest.mark.spec("SCH-21")
async def test_what_runs_already_is_skipped_item_by_item(make):
    """A slow account does not hold up the others: of three items two are made again."""
    work = Work()
    rig = await make(call=work)
    await schedule(rig, listed(*[ScheduleItem({"n": n}) for n in range(3)]))
    await pass_time(rig, 60)
    for uuid in work.began[:2]:
        work.let_go(uuid)
    await pass_time(rig, 60)
    (row, _) = await rig.store.list_fires("s")
    assert (row.made, row.skipped) == (2, 1)
    assert len(work.began) == 5


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize("overlap", [Overlap.BUFFER, Overlap.CANCEL, Overlap.ALLOW])
async def test_overlap_of_a_fire_as_a_whole(make, overlap):
    """`buffer` waits until all items have ended, `cancel` cancels all that have not, `allow` makes all again."""
    work = Work()
    rig = await make(call=work)
    await schedule(rig, listed(*[ScheduleItem({"n": n}) for n in range(3)]), overlap=overlap)
    await pass_time(rig, 60)
    work.let_go(work.began[0])
    await pass_time(rig, 60)
    if overlap is Overlap.BUFFER:
        assert len(work.began) == 3
        for uuid in work.began[1:]:
            work.let_go(uuid)
        await pass_time(rig, 4)
    assert len(work.began) == 6
    assert len(work.cancelled) == (2 if overlap is Overlap.CANCEL else 0)


@pytest.mark.spec("SCH-21")
async def test_a_function_lists_the_items_at_each_fire_time(make):
    """It is asked once for each fire time, and what it returns then counts."""
    asked = Counter[str]()

    async def accounts() -> list[ScheduleItem]:
        asked["times"] += 1
        return [ScheduleItem({"n": n}) for n in range(asked["times"])]

    rig = await make(given(accounts))
    await schedule(rig)
    await pass_time(rig, 180)
    rows = await rig.store.list_fires("s")
    assert [(row.made, row.skipped) for row in rows] == [(3, 0), (2, 0), (1, 0)]
    assert asked["times"] == 3


@pytest.mark.spec("SCH-21")
async def test_a_plain_function_lists_the_items_in_a_thread(make):
    """It may block: the event loop goes on meanwhile."""
    threads: list[threading.Thread] = []

    def accounts() -> list[dict[str, int]]:
        threads.append(threading.current_thread())
        return [{"n": 1}]

    rig = await make(given(accounts))
    await schedule(rig)
    await rig.advance(60)
    await wait_until(rig, lambda state: state.fired == 1)
    assert threads[0] is not threading.main_thread()
    assert await tasks(rig) == [('{"n":1}', None)]


async def test_a_plain_function_that_returns_an_awaitable_is_awaited(make):
    """As `lambda: list_accounts(db)` does."""

    async def list_accounts(page: int) -> list[dict[str, int]]:
        return [{"n": 6 + page}]

    rig = await make(given(lambda: list_accounts(1)))
    await schedule(rig)
    await rig.advance(60)
    await wait_until(rig, lambda state: state.fired == 1)
    assert await tasks(rig) == [('{"n":7}', None)]


# --- functions that fail ----------------------------------------------------------------------------------------------


def raises(error: BaseException) -> Callable[[], Any]:
    def accounts() -> Any:
        raise error

    return accounts


class BadRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


NONSENSE = [
    pytest.param(raises(OSError("no database")), "OSError: no database", id="raises"),
    pytest.param(raises(SystemExit(3)), "SystemExit", id="exits"),
    pytest.param(raises(KeyboardInterrupt()), "KeyboardInterrupt", id="interrupts"),
    pytest.param(raises(StopIteration()), "StopIteration", id="stops"),
    pytest.param(raises(asyncio.CancelledError()), "CancelledError", id="cancels"),
    pytest.param(lambda: None, "must be a list of dicts", id="none"),
    pytest.param(lambda: "abc", "must be a list of dicts", id="text"),
    pytest.param(lambda: [{"a": 1}, 5], "item 1 must be a dict", id="number"),
    pytest.param(lambda: [{}] * 1_000_000, f"1,000,000 items are more than {MOST_ITEMS:,}", id="million"),
    pytest.param(lambda: [{"a": 1}, {"a": float("nan")}], "item 1", id="nan"),
    pytest.param(lambda: [{"a": object()}], "item 0", id="object"),
    pytest.param(lambda: [{"a": "x" * 2_000_000}], "item 0", id="large"),
    pytest.param(lambda: [BadRepr()], "RuntimeError: no text", id="repr"),
    pytest.param(lambda: [{1: 2}, {"a": "\ud800"}], "", id="surrogate"),
]


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "async"])
@pytest.mark.parametrize(("call", "why"), NONSENSE)
async def test_a_fire_whose_items_cannot_be_listed_fails_and_is_tried_again(make, caplog, call, why, is_async):
    """No task is made, the reason is in the state and in the log, and the next try fires if the function is well."""
    is_well = False

    def accounts() -> Any:
        return [{"n": 1}] if is_well else call()

    async def accounts_async() -> Any:
        return accounts()

    rig = await make(given(accounts_async if is_async else accounts))
    await schedule(rig)
    await rig.advance(60)
    state = await wait_until(rig, lambda state: state.failed == 1)
    assert why in state.problem
    assert state.problem in caplog.text
    assert (state.fired, state.retry_at) == (0, rig.clock.now() + RETRY)
    assert await tasks(rig) == []
    assert await rig.store.list_fires("s") == []
    is_well = True
    await rig.advance(RETRY.total_seconds() - 1)
    assert (await state_of(rig)).fired == 0
    await rig.advance(1)
    state = await wait_until(rig, lambda state: state.fired == 1)
    assert (state.failed, state.problem, state.retry_at) == (1, "", None)
    assert await tasks(rig) == [('{"n":1}', None)]


@pytest.mark.spec("SCH-21")
async def test_a_function_that_hangs_holds_nothing_up(make):
    """It fails after its time; meanwhile other schedules fire, and it is not called again while it hangs."""
    gate, calls = threading.Event(), Counter[str]()

    def accounts() -> list[dict[str, int]]:
        calls["n"] += 1
        gate.wait()
        return [{"n": 1}]

    rig = await make(given(accounts))
    try:
        await schedule(rig, Each(function="accounts", timeout_s=5))
        other = Schedule(name="other", rule=Every(60), consumer="job")
        await put(rig.store, other, now=rig.clock.now(), by="test")
        await rig.advance(60)
        assert len(await rig.store.list_fires("other")) == 1
        assert (await state_of(rig)).failed == 0
        await rig.advance(5)
        state = await wait_until(rig, lambda state: state.failed == 1)
        assert state.problem == "accounts() has not returned within 5 s"
        await rig.advance(RETRY.total_seconds())
        state = await wait_until(rig, lambda state: state.failed == 2)
        assert state.problem == "an earlier call of accounts() has not returned yet"
        assert calls["n"] == 1
    finally:
        gate.set()
        join_threads()
    await rig.advance(2 * RETRY.total_seconds())
    state = await wait_until(rig, lambda state: state.fired == 1)
    assert calls["n"] == 2


@pytest.mark.spec("SCH-21")
async def test_an_asynchronous_function_that_hangs_is_cancelled(make):
    """After its time it is cancelled, and the next try calls it again."""
    calls, cancelled = Counter[str](), Counter[str]()

    async def accounts() -> list[dict[str, int]]:
        calls["n"] += 1
        try:
            await asyncio.Event().wait()
        finally:
            cancelled["n"] += 1
        return []

    rig = await make(given(accounts))
    await schedule(rig)
    await rig.advance(60)
    await rig.advance(5)
    await wait_until(rig, lambda state: state.failed == 1)
    await quiet()
    assert (calls["n"], cancelled["n"]) == (1, 1)
    await rig.advance(RETRY.total_seconds())
    assert calls["n"] == 2


async def test_a_node_that_stops_cancels_its_function(make):
    """A call that goes on when the node stops is not waited for."""
    cancelled = asyncio.Event()

    async def accounts() -> list[dict[str, int]]:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    rig = await make(given(accounts))
    await schedule(rig)
    await rig.advance(60)
    await rig.engine.stop(grace_s=0)
    async with asyncio.timeout(PATIENCE_S):
        assert await cancelled.wait()


async def test_a_schedule_that_is_removed_forgets_its_function(make):
    """The call that goes on is cancelled."""
    cancelled = asyncio.Event()

    async def accounts() -> list[dict[str, int]]:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    rig = await make(given(accounts))
    await schedule(rig)
    await rig.advance(60)
    await rig.store.drop_schedule("s")
    await look(rig)
    async with asyncio.timeout(PATIENCE_S):
        assert await cancelled.wait()


@pytest.mark.spec("SCH-21")
async def test_a_consumer_that_refuses_an_item_fails_the_fire(make):
    """Nothing of the other items is made either."""

    def refuse(args: Any) -> str:
        if args["n"] == 2:
            raise NotJson("args", "it is a two")
        return encode(args)

    rig = await make(given(lambda: [{"n": n} for n in range(5)]))
    rig.consumers["job"] = replace(rig.consumers["job"], encode=refuse)
    await schedule(rig)
    await rig.advance(60)
    state = await wait_until(rig, lambda state: state.failed == 1)
    assert "item 2" in state.problem
    assert await tasks(rig) == []


# --- several nodes ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-17", "SCH-21")
async def test_a_node_without_the_function_leaves_it_to_one_that_has_it(make, caplog):
    """The leader does not know the function: it says so once, and the deputy fires a little later."""
    leader = await make()
    deputy = await make(given(lambda: [{"n": 1}]))
    other = await make(given(lambda: [{"n": 2}], name="another"))
    for rig in (leader, deputy, other):
        rig.engine._parts.recurring._look_for_leader = _leads(rig is leader)
    await schedule(leader)
    await look(deputy)
    await leader.advance(60)
    await look(deputy)
    await look(other)
    assert await tasks(leader) == []
    for _ in range(3):
        await leader.advance(DEPUTY_S)
        await look(deputy)
        await look(other)
    await wait_until(leader, lambda state: state.fired == 1)
    assert await tasks(leader) == [('{"n":1}', None)]
    assert caplog.text.count("does not have the function accounts of schedule s") == 2


@pytest.mark.spec("SCH-17", "SCH-21")
async def test_of_several_nodes_that_list_the_items_one_makes_the_tasks(make):
    """Each believes that it leads, and all list the same items at the same time: each item becomes one task."""
    gate = asyncio.Event()

    async def accounts() -> list[dict[str, int]]:
        await gate.wait()
        return [{"n": n} for n in range(20)]

    rigs = [await make(given(accounts)) for _ in range(3)]
    for rig in rigs:
        rig.engine._parts.recurring._look_for_leader = _leads(True)
    await schedule(rigs[0], overlap=Overlap.ALLOW)
    await rigs[0].advance(60)
    for rig in rigs:
        await look(rig)
    gate.set()
    await quiet()
    for rig in rigs:
        await look(rig)
    state = await wait_until(rigs[0], lambda state: state.fired == 1)
    assert state.failed == 0
    assert Counter(await tasks(rigs[0])) == Counter((f'{{"n":{n}}}', None) for n in range(20))


def _leads(does: bool):
    async def look():
        return lambda source: does

    return look


async def test_a_failure_is_waited_out_by_all_nodes(make):
    """What has failed on one node is not tried at once on another."""
    calls = Counter[str]()

    def fail(name: str) -> Callable[[], Any]:
        async def accounts() -> Any:
            calls[name] += 1
            raise OSError("no database")

        return accounts

    first, second = await make(given(fail("first"))), await make(given(fail("second")))
    await schedule(first)
    await first.advance(60)
    await wait_until(first, lambda state: state.failed == 1)
    for _ in range(4):
        await first.advance(2)
        await look(second)
    assert calls.total() == 1


@pytest.mark.spec("SCH-21")
async def test_items_that_are_listed_for_nothing_are_thrown_away(make):
    """While they were listed, a person has paused the schedule: nothing fires, and the list is not used later."""
    gate, calls = asyncio.Event(), Counter[str]()

    async def accounts() -> list[dict[str, int]]:
        calls["n"] += 1
        await gate.wait()
        return [{"n": calls["n"]}]

    rig = await make(given(accounts))
    made = await schedule(rig)
    await rig.advance(60)
    changed = msgspec.structs.replace(made, rule=Every(90))
    await put(rig.store, changed, now=rig.clock.now(), by="test")
    gate.set()
    await quiet()
    await look(rig)
    assert await tasks(rig) == []
    await pass_time(rig, 30)
    state = await wait_until(rig, lambda state: state.fired == 1)
    assert await tasks(rig) == [('{"n":2}', None)]
    assert state.skipped == 1
