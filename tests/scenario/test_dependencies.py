"""Tasks after other tasks, groups with a summary, and the same work twice, as the submitter sees them."""

import asyncio
import re
from datetime import timedelta
from typing import Any

import pytest

from taskyard import (
    BaseTaskConsumer,
    GroupProgress,
    InvalidInput,
    RetryPolicy,
    TaskCanceled,
    TaskFailed,
    TaskSkipped,
    TaskState,
    Yard,
)
from taskyard.errors import DependencyCycle, DuplicateTask, SlotTaken, UnknownGroup, UnknownTask
from taskyard.model.task import OnFailure
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Store
from taskyard.queueing import summary as summaries
from taskyard.stores.memory import MemoryStore

ONCE = RetryPolicy(max_retries=0)


def total(results: list[int]) -> int:
    return sum(results)


class Shop:
    """A yard whose tasks fail as long as `broken` says so, and that notes what has run."""

    def __init__(self, url: str | Store) -> None:
        self.yard = yard = Yard(url)
        self.ran: list[object] = []
        self.broken: list[object] = []
        self.gate = asyncio.Event()
        self.at_gate = asyncio.Event()

        @yard.consumer(concurrency=8, retry=ONCE)
        async def work(name: object) -> object:
            self.ran.append(name)
            if name in self.broken:
                raise ValueError(f"{name} is broken")
            return name

        @yard.consumer(concurrency=8)
        async def wait(name: str = "") -> str:
            self.at_gate.set()
            await self.gate.wait()
            return name

        @yard.consumer(retry=ONCE)
        async def report(title: str, results: list[object]) -> str:
            return f"{title}: {results}"

        self.work, self.wait, self.report = work, wait, report


# --- after ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("QUE-27")
async def test_a_task_runs_after_others(url):
    """With `after` a task runs when the others have completed: handles and ids will do."""
    shop = Shop(url)
    async with shop.yard:
        one = await shop.wait.submit("one")
        two = await shop.work.options(after=[one]).submit(2)
        three = await shop.yard.submit("work", {"name": 3}, after=[two.uuid, one])
        assert (await two.state(), (await three.record()).open_dependencies) == (TaskState.BLOCKED, 2)
        assert shop.ran == []
        shop.gate.set()
        assert await three.result(timeout_s=10) == 3
        assert shop.ran == [2, 3]
        assert await (await shop.work.options(after=[three]).submit(4)).result(timeout_s=10) == 4


@pytest.mark.spec("QUE-27")
@pytest.mark.parametrize(("choice", "error"), [("fail", TaskFailed), ("skip", TaskSkipped)])
async def test_who_waits_for_a_task_that_cannot_run_hears_of_it(url, choice, error):
    """A task whose dependency fails ends unrun, and whoever waits for its result is told at once, however far down."""
    shop = Shop(url)
    shop.broken.append("bad")
    async with shop.yard:
        gate = await shop.wait.submit()
        bad = await shop.work.options(after=[gate]).submit("bad")
        last = await shop.work.options(after=[bad], on_failure=choice).submit("last")
        waiting = asyncio.create_task(last.result(timeout_s=10))
        await shop.at_gate.wait()
        shop.gate.set()
        with pytest.raises(error) as told:
            await waiting
        assert shop.ran == ["bad"]
    if isinstance(told.value, TaskFailed):
        assert told.value.error_type == "DependencyFailed"
        assert bad.uuid in str(told.value)


async def test_who_waits_hears_of_a_cancel_further_up(url):
    """A task that is canceled takes along those that wait for it; one that ignores that runs."""
    shop = Shop(url)
    async with shop.yard:
        first = await shop.work.options(delay_s=3600).submit(1)
        second = await shop.work.options(after=[first]).submit(2)
        third = await shop.work.options(after=[first], on_failure="ignore").submit(3)
        waiting = asyncio.create_task(second.result(timeout_s=10))
        await asyncio.sleep(0)
        await first.cancel()
        with pytest.raises(TaskFailed, match="was canceled"):
            await waiting
        assert await third.result(timeout_s=10) == 3
        with pytest.raises(TaskFailed, match="was canceled"):
            await (await shop.work.options(after=[first]).submit(4)).result(timeout_s=10)


async def test_a_batch_may_come_after_others(url):
    """All tasks of a `submit_many` wait for the same others."""
    shop = Shop(url)
    async with shop.yard:
        gate = await shop.wait.submit()
        handles = await shop.yard.submit_many("work", [{"name": n} for n in range(5)], after=[gate])
        assert {await handle.state() for handle in handles} == {TaskState.BLOCKED}
        shop.gate.set()
        assert [await handle.result(timeout_s=10) for handle in handles] == list(range(5))


WRONG = [
    ("after-text", {"after": "0190"}, "after must be a list of handles or ids"),
    ("after-number", {"after": 7}, "after must be a list of handles or ids"),
    ("after-of-numbers", {"after": [7]}, "uuid must be a string"),
    ("on-failure", {"on_failure": "retry"}, "'retry' is not one of fail, skip, ignore"),
    ("on-failure-of-nobody", {"on_failure": "skip"}, r"it waits for none; name them with after,"),
    ("scope", {"dedupe": "merge", "dedupe_scope": "ever"}, "'ever' is not one of queued, pending, window, key_idle"),
    ("scope-alone", {"dedupe_scope": "queued"}, "has no effect without dedupe="),
    ("window-alone", {"dedupe_window_s": 5}, "has no effect without dedupe="),
    ("window-without-seconds", {"dedupe": "merge", "dedupe_scope": "window"}, "go together"),
    ("seconds-without-window", {"dedupe": "merge", "dedupe_window_s": 5}, "go together"),
    ("no-window", {"dedupe": "merge", "dedupe_scope": "window", "dedupe_window_s": 0}, "more than 0"),
    ("idle-without-key", {"dedupe": "merge", "dedupe_scope": "key_idle"}, "dedupe_scope 'key_idle' needs a key"),
    ("idle-alone", {"dedupe_scope": "key_idle", "key": "7"}, "has no effect without dedupe="),
    (
        "idle-in-a-transaction",
        {"dedupe": "merge", "dedupe_scope": "key_idle", "key": "7", "connection": object()},
        "leave connection out",
    ),
    ("after-in-a-transaction", {"after": [], "dedupe": "replace", "connection": object()}, "leave connection out"),
]


@pytest.mark.parametrize(("options", "advice"), [pytest.param(*row[1:], id=row[0]) for row in WRONG])
async def test_what_makes_no_sense_is_refused(url, options, advice):
    """Options that cannot be meant are refused when they are given, and nothing is stored."""
    shop = Shop(url)
    async with shop.yard:
        with pytest.raises(InvalidInput, match=advice):
            await shop.yard.submit("work", {"name": 1}, **options)
        assert await shop.yard.store.count() == {}


async def test_what_is_to_happen_on_failure_needs_others_to_wait_for(url):
    """A list of others may be empty, and a summary waits for its group; what waits for nobody is refused, also in a
    batch and in a group."""
    shop = Shop(url)
    skipping = shop.work.options(on_failure="skip")
    async with shop.yard:
        assert await (await skipping.options(after=[]).submit(1)).result(timeout_s=10) == 1
        group = await shop.yard.submit_group([shop.work.bind(1)], summary=skipping.bind(2))
        assert (await group.summary.record()).on_failure is OnFailure.SKIP
        with pytest.raises(InvalidInput, match="it waits for none"):
            await skipping.submit_many([{"name": 3}])
        with pytest.raises(InvalidInput, match="it waits for none"):
            await shop.yard.submit_group([skipping.bind(4)])


async def test_an_unknown_task_cannot_be_waited_for(url):
    """After a task that the store does not know nothing is submitted."""
    shop = Shop(url)
    async with shop.yard:
        with pytest.raises(UnknownTask, match="no task nobody"):
            await shop.work.options(after=["nobody"]).submit(1)


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("QUE-27")
async def test_a_summary_gets_the_results(url):
    """The summary of a group runs after all of them, and gets what they returned in the order they were given."""
    shop = Shop(url)
    async with shop.yard:
        tasks = [shop.work.bind(name) for name in ("a", None, {"b": [1.5]})]
        group = await shop.yard.submit_group(tasks, summary=shop.report.bind("all"))
        assert await group.summary.result(timeout_s=10) == "all: ['a', None, {'b': [1.5]}]"
        assert group.id == group.summary.uuid
        assert [await task.result(timeout_s=10) for task in group.tasks] == ["a", None, {"b": [1.5]}]
        assert await shop.yard.group(group.id).progress() == GroupProgress({TaskState.COMPLETED: 3})


@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_the_results_reach_a_summary_wherever_it_runs(url, executor):
    """In a thread and in a worker process alike."""
    shop = Shop(url)
    shop.yard.consumer(executor=executor)(total)
    async with shop.yard:
        group = await shop.yard.submit_group([shop.work.bind(n) for n in range(20)], summary=shop.yard.bind("total"))
        assert await group.summary.result(timeout_s=30) == sum(range(20))


async def test_a_summary_may_be_a_class_or_do_without_results(url):
    """The class form finds the results among its arguments; a consumer without such an argument just runs last."""
    shop = Shop(url)

    class Count(BaseTaskConsumer):
        name = "count"

        async def consume(self, task):
            return [len(task.args["results"]), task.args["extra"]]

    shop.yard.register(Count())
    async with shop.yard:
        tasks = [shop.work.bind(n) for n in range(3)]
        group = await shop.yard.submit_group(tasks, summary=shop.yard.bind("count", {"extra": 1}))
        assert await group.summary.result(timeout_s=10) == [3, 1]
        plain = await shop.yard.submit_group([shop.work.bind("x")], summary=shop.work.bind("last"))
        assert await plain.summary.result(timeout_s=10) == "last"
        assert shop.ran[-2:] == ["x", "last"]


async def test_a_summary_that_ignores_failures_gets_none_for_them(url):
    """With on_failure=ignore the summary runs when all have ended, and finds None where one has not completed."""
    shop = Shop(url)
    shop.broken.append("bad")
    async with shop.yard:
        tasks = [shop.work.bind(name) for name in ("a", "bad", "c")]
        summary = shop.report.options(on_failure="ignore").bind("some")
        group = await shop.yard.submit_group(tasks, summary=summary)
        assert await group.summary.result(timeout_s=10) == "some: ['a', None, 'c']"


@pytest.mark.spec("QUE-27")
async def test_a_group_is_sent_again(url):
    """A group whose task failed fails its summary; sent again, what failed runs once more, and the summary after it."""
    shop = Shop(url)
    shop.broken.append("bad")
    async with shop.yard:
        bad = shop.work.bind("bad")
        after_bad = shop.work.options(after=[bad]).bind("then")
        # The one that waits is given first: it is also sent again before what it waits for.
        group = await shop.yard.submit_group([after_bad, bad, shop.work.bind("a")], summary=shop.report.bind("all"))
        with pytest.raises(TaskFailed, match="its dependency"):
            await group.summary.result(timeout_s=10)
        progress = await group.progress()
        assert (progress.total, progress.completed, progress.ended, progress.fraction) == (3, 1, 3, 1.0)
        shop.broken.clear()
        assert await shop.yard.group(group.id).retry() == 3
        assert await group.summary.result(timeout_s=10) == "all: ['then', 'bad', 'a']"
        assert sorted(map(str, shop.ran)) == ["a", "bad", "bad", "then"]
        assert await group.retry() == 0


async def test_a_group_that_can_never_complete_says_why(url):
    """When nothing of a group can be sent again, the reason is raised: what was canceled is final."""
    shop = Shop(url)
    async with shop.yard:
        group = await shop.yard.submit_group([shop.wait.bind()], summary=shop.report.bind("all"))
        await group.tasks[0].cancel()
        with pytest.raises(TaskFailed):
            await group.summary.result(timeout_s=10)
        with pytest.raises(Exception, match=f"its dependency {group.tasks[0].uuid} was canceled"):
            await group.retry()


async def test_a_summary_says_what_keeps_it_from_running(url):
    """When a group is sent again, and its summary cannot be because another task was canceled, it names that one: the
    one that it failed with completes."""
    shop = Shop(url)
    shop.broken.append("bad")
    async with shop.yard:
        group = await shop.yard.submit_group([shop.work.bind("bad"), shop.wait.bind()], summary=shop.report.bind("all"))
        bad, slow = group.tasks
        with pytest.raises(TaskFailed, match=f"its dependency {bad.uuid} failed"):
            await group.summary.result(timeout_s=10)
        await slow.cancel()
        with pytest.raises(TaskCanceled):
            await slow.result(timeout_s=10)
        shop.broken.clear()
        assert await group.retry() == 1
        assert await bad.result(timeout_s=10) == "bad"
        with pytest.raises(TaskFailed, match=f"its dependency {slow.uuid} was canceled"):
            await group.summary.result(timeout_s=10)


@pytest.mark.spec("QUE-27")
async def test_a_group_is_canceled(url):
    """All that has not ended is canceled, also what waits for others of the group; what has ended is left alone."""
    shop = Shop(url)
    async with shop.yard:
        done, held = shop.work.bind("a"), shop.wait.bind()
        later = shop.work.options(delay_s=3600).bind("later")
        tasks = [done, held, later, shop.work.options(after=[held]).bind("then")]
        group = await shop.yard.submit_group(tasks, summary=shop.report.bind("all"))
        await shop.at_gate.wait()
        assert await group.tasks[0].result(timeout_s=10) == "a"
        waiting = asyncio.create_task(group.summary.result(timeout_s=10))
        await asyncio.sleep(0)
        assert await group.cancel(reason="not needed") == 4
        with pytest.raises(TaskCanceled, match="not needed"):
            await waiting
        for handle in group.tasks[1:]:
            with pytest.raises(TaskCanceled):
                await handle.result(timeout_s=10)
        assert await group.progress() == GroupProgress({TaskState.COMPLETED: 1, TaskState.CANCELED: 3})


async def test_what_is_no_group_is_refused(url):
    """A group without tasks, with a task twice, with strangers in it or going in circles is refused, and named."""
    shop, other = Shop(url), Shop("memory://")
    async with shop.yard:
        submit_group, bound = shop.yard.submit_group, shop.work.bind(1)
        merged = shop.work.options(dedupe="merge").bind(1)
        inside = shop.work.options(connection=object()).bind(1)
        filled = shop.report.bind("all", results=[1])
        wrong: list[tuple[list[Any], Any, str]] = [
            ([], None, "at least one task"),
            ([bound, bound], None, "twice"),
            ([bound], bound, "twice"),
            (["work"], None, "made of bound tasks"),
            ([merged], None, "leave dedupe out"),
            ([inside], None, "leave connection out"),
            ([bound], filled, "leave it out"),
            ([other.work.bind(1)], None, "that of another yard"),
        ]
        for tasks, summary, advice in wrong:
            with pytest.raises(InvalidInput, match=advice):
                await submit_group(tasks, summary=summary)
        late = shop.report.bind("late")
        with pytest.raises(DependencyCycle):
            await submit_group([shop.work.options(after=[late]).bind(1)], summary=late)
        assert await shop.yard.store.count() == {}
        alone = await submit_group([shop.work.bind(1)])
        with pytest.raises(InvalidInput, match="without a summary"):
            _ = alone.summary
        with pytest.raises(UnknownGroup, match="no task of a group nothing"):
            await shop.yard.group("nothing").progress()


async def test_results_too_large_together_fail_the_summary(url, monkeypatch):
    """A summary whose results do not fit is failed with words, and not tried again."""
    monkeypatch.setattr(summaries, "RESULTS_BYTES", 1000)
    shop = Shop(url)
    async with shop.yard:
        group = await shop.yard.submit_group(
            [shop.work.bind("x" * 600), shop.work.bind("y" * 600)], summary=shop.report.bind("all")
        )
        with pytest.raises(TaskFailed, match="the results of the group"):
            await group.summary.result(timeout_s=10)
        assert (await group.summary.record()).attempt == 1


async def test_a_summary_whose_results_were_pruned_fails(url):
    """A summary that is sent again after the others were forgotten is failed with words, instead of getting fewer."""
    shop = Shop(url)

    @shop.yard.consumer(retry=ONCE)
    async def picky(results: list[object]) -> None:
        raise ValueError(f"{len(results)} are too many")

    async with shop.yard:
        group = await shop.yard.submit_group([shop.work.bind(1), shop.work.bind(2)], summary=picky.bind())
        with pytest.raises(TaskFailed, match="2 are too many"):
            await group.summary.result(timeout_s=10)
        last = (await group.summary.record()).finished_at
        assert last is not None
        assert await shop.yard.store.prune(finished_before=last, limit=1) == 1
        await shop.yard.retry(group.id)
        with pytest.raises(TaskFailed, match=r"of the 2 results of group .* 1 are left in the store"):
            await group.summary.result(timeout_s=10)


async def test_few_kept_in_memory_are_enough_for_a_group():
    """A store in memory that keeps but the latest task to end keeps what a summary still needs beside it."""
    store = MemoryStore(SystemClock(), keep_ended=1)
    shop = Shop(store)
    async with shop.yard:
        group = await shop.yard.submit_group([shop.work.bind(n) for n in range(20)], summary=shop.report.bind("all"))
        assert await group.summary.result(timeout_s=10) == f"all: {list(range(20))}"
        assert await store.count() == {("default", TaskState.COMPLETED): 1}


async def test_a_group_without_an_event_loop(file_url):
    """The blocking face submits groups as well."""
    shop = Shop(file_url)

    def use() -> None:
        with shop.yard.blocking() as sync:
            group = sync.submit_group([shop.work.bind(1), shop.work.bind(2)], summary=shop.report.bind("all"))
            assert sync.result(group.summary, timeout_s=10) == "all: [1, 2]"

    await asyncio.to_thread(use)


# --- the same work ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("QUE-19")
async def test_the_same_work_is_replaced(url):
    """With dedupe=replace the newcomer takes the place of what waits, and who waited for that hears of it."""
    shop = Shop(url)
    async with shop.yard:
        options: dict[str, Any] = {"dedupe": "replace", "dedupe_key": "save"}
        old = await shop.yard.submit("work", {"name": "old"}, delay_s=3600, **options)
        waiting = asyncio.create_task(old.result(timeout_s=10))
        await asyncio.sleep(0)
        new = await shop.yard.submit("work", {"name": "new"}, **options)
        with pytest.raises(TaskCanceled, match=f"replaced by task {new.uuid}"):
            await waiting
        assert await new.result(timeout_s=10) == "new"
        held = await shop.yard.submit("wait", **options)
        await shop.at_gate.wait()
        with pytest.raises(DuplicateTask) as refused:
            await shop.yard.submit("wait", {"name": "again"}, **options)
        assert refused.value.existing == held.uuid
        shop.gate.set()


@pytest.mark.spec("QUE-19")
async def test_who_is_refused_hears_where_the_other_is(url):
    """Work that waits, runs, is done or has failed: the refusal says which, and what helps then."""
    shop = Shop(url)
    options: dict[str, Any] = {"dedupe": "refuse", "dedupe_scope": "window", "dedupe_window_s": 60}

    async def refusal(key: str) -> DuplicateTask:
        with pytest.raises(DuplicateTask) as refused:
            await shop.yard.submit("wait" if key == "held" else "work", {"name": "again"}, dedupe_key=key, **options)
        return refused.value

    async with shop.yard:
        await shop.yard.submit("work", {"name": "later"}, dedupe_key="later", delay_s=3600, **options)
        held = await shop.yard.submit("wait", dedupe_key="held", **options)
        done = await shop.yard.submit("work", {"name": "done"}, dedupe_key="done", **options)
        shop.broken.append("bad")
        bad = await shop.yard.submit("work", {"name": "bad"}, dedupe_key="bad", **options)
        await done.result(timeout_s=10)
        with pytest.raises(TaskFailed):
            await bad.result(timeout_s=10)
        await shop.at_gate.wait()
        said = {key: str(await refusal(key)) for key in ("later", "held", "done", "bad")}
        refused = await refusal("held")
        assert (refused.existing, refused.state) == (held.uuid, TaskState.RUNNING)
        assert refused.until is not None
        assert timedelta(0) < refused.until - (await held.record()).created_at <= timedelta(seconds=61)
        shop.gate.set()
    ends = r"its window ends at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\. "
    assert re.search(rf"it is scheduled, and {ends}Wait", said["later"])
    assert "dedupe='replace'" in said["later"]
    assert re.search(rf"it is running, and {ends}Wait", said["held"])
    assert "dedupe='replace'" not in said["held"]
    assert re.search(rf"it is completed, and {ends}Take its result", said["done"])
    assert re.search(rf"it has failed, and {ends}Retry that one", said["bad"])


@pytest.mark.spec("QUE-19")
async def test_the_same_work_while_it_waits_or_within_a_time(url):
    """While queued: what runs may be asked for again. Within a window: what is done may not, until it is over."""
    shop = Shop(url)
    async with shop.yard:
        first = await shop.yard.submit("wait", dedupe="merge", dedupe_scope="queued")
        await shop.at_gate.wait()
        second = await shop.yard.submit("wait", dedupe="merge", dedupe_scope="queued")
        assert second.is_new
        shop.gate.set()
        await asyncio.gather(first.result(timeout_s=10), second.result(timeout_s=10))
        window: dict[str, Any] = {"dedupe": "merge", "dedupe_scope": "window"}
        done = await shop.yard.submit("work", {"name": 1}, dedupe_window_s=3600, **window)
        assert await done.result(timeout_s=10) == 1
        again = await shop.yard.submit("work", {"name": 1}, dedupe_window_s=3600, **window)
        assert (again, again.is_new) == (done, False)
        assert again.until is not None
        assert timedelta(minutes=59) < again.until - (await done.record()).created_at <= timedelta(minutes=61)
        assert (await shop.yard.submit("work", {"name": 2}, dedupe_window_s=0.001, **window)).is_new


@pytest.mark.spec("QUE-19")
async def test_nothing_of_an_account_is_accepted_while_it_runs(url):
    """While one task of an account runs, work of another consumer for it is merged into that one or refused, with an
    error that says so; work of another account is accepted."""
    shop = Shop(url)
    async with shop.yard:
        running = await shop.yard.submit("wait", key="7")
        await shop.at_gate.wait()
        options: dict[str, Any] = {"dedupe": "refuse", "dedupe_scope": "key_idle"}
        with pytest.raises(DuplicateTask, match=rf"task {running.uuid} runs with the same key, '7'") as refused:
            await shop.yard.submit("work", {"name": 1}, key="7", **options)
        assert (refused.value.state, refused.value.key) == (TaskState.RUNNING, "7")
        merged = await shop.yard.submit("work", {"name": 1}, key="7", **options | {"dedupe": "merge"})
        assert (merged, merged.is_new) == (running, False)
        other = await shop.yard.submit("work", {"name": 1}, key="8", **options)
        assert await other.result(timeout_s=10) == 1
        shop.gate.set()
        await running.result(timeout_s=10)
        after = await shop.yard.submit("work", {"name": 1}, key="7", **options)
        assert await after.result(timeout_s=10) == 1


@pytest.mark.spec("QUE-19")
async def test_a_retry_whose_work_is_pending_is_refused(url):
    """A failed task is not sent again while another stands for the same work, and the error says which."""
    shop = Shop(url)
    shop.broken.append("x")
    async with shop.yard:
        options: dict[str, Any] = {"dedupe": "refuse", "dedupe_key": "k"}
        first = await shop.yard.submit("work", {"name": "x"}, **options)
        with pytest.raises(TaskFailed):
            await first.result(timeout_s=10)
        second = await shop.yard.submit("work", {"name": "x"}, delay_s=3600, **options)
        with pytest.raises(SlotTaken) as refused:
            await shop.yard.retry(first.uuid)
        assert refused.value.holder == second.uuid
        assert str(refused.value).startswith(f"cannot retry task {first.uuid}: task {second.uuid} stands for the same")
        assert refused.value.state == "failed"
        await second.cancel()
        shop.broken.clear()
        await shop.yard.retry(first.uuid)
        assert await first.result(timeout_s=10) == "x"
