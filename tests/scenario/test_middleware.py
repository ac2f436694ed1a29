"""Middleware: functions around every submit, every run and the code of every run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import asyncpg
import pytest

from taskyard import (
    Algorithm,
    AlgorithmSpec,
    BaseTaskConsumer,
    ExecutionDispatcher,
    ExecutionHints,
    InvalidInput,
    Priority,
    RetryPolicy,
    Task,
    TaskCanceled,
    TaskFailed,
    Yard,
    current_run,
)
from taskyard.errors import (
    InvalidConsumer,
    MiddlewareFault,
    NotJson,
    OutcomeUnknown,
    StoreUnavailable,
    TaskEnded,
)
from taskyard.middleware import ExecutionResult, Middleware, RunContext, RunNext, Submission, SubmitNext
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import ALL_TASKS
from taskyard.queueing.submit_middleware import SubmitChain
from tests.scenario import middled

EVERYWHERE = pytest.mark.parametrize("executor", ["inline", "thread", "process", "isolated"])
PATIENCE_S = 30


async def result_of(handle: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await handle.result()


# --- around submits ---------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-29")
async def test_values_are_stored_and_reach_the_run(url):
    """What submit middleware adds is stored with the task, and its run sees it."""
    yard = Yard(url)

    @yard.around_submit
    async def add_tenant(submission: Submission, call_next: SubmitNext) -> None:
        for task in submission.tasks:
            task.values["tenant"] = f"acme {task.args['x']}"
        await call_next()

    @yard.consumer
    async def see(x: int) -> dict[str, Any]:
        return current_run().values

    async with yard:
        handle = await see.submit(1)
        assert await result_of(handle) == {"tenant": "acme 1"}
        assert (await handle.record()).values == {"tenant": "acme 1"}


async def test_a_submit_can_be_changed(url):
    """Queue, priority, key, title and labels of a task can be set, and are checked."""
    yard = Yard(url)

    async def change(submission: Submission, call_next: SubmitNext) -> None:
        (task,) = submission.tasks
        task.queue, task.priority, task.key, task.title = "slow", "high", "k", "Changed"
        task.labels = {**task.labels, "by": "middleware"}
        with pytest.raises(InvalidInput, match="queue must be"):
            task.queue = ""
        await call_next()

    @yard.consumer(middleware=[Middleware(around_submit=change)])
    async def work() -> None: ...

    async with yard.client():
        record = await (await work.options(labels={"a": "b"}).submit()).record()
    assert (record.queue, record.priority, record.key, record.title) == ("slow", Priority.HIGH.value, "k", "Changed")
    assert record.labels == {"a": "b", "by": "middleware"}


async def test_a_submit_can_be_refused(url):
    """What submit middleware raises reaches the submitter as it is, and nothing is stored."""
    yard = Yard(url)

    @yard.around_submit
    async def refuse(submission: Submission, call_next: SubmitNext) -> None:
        if any(task.args["x"] > 1 for task in submission.tasks):
            raise InvalidInput("x is too large today")
        await call_next()

    @yard.consumer
    async def work(x: int) -> None: ...

    async with yard.client():
        for submit in (
            lambda: work.submit(2),
            lambda: yard.submit("work", {"x": 2}),
            lambda: work.submit_many([{"x": 1}, {"x": 2}]),
            lambda: yard.submit_group([work.bind(1), work.bind(2)]),
        ):
            with pytest.raises(InvalidInput, match="too large today"):
                await submit()
        assert await list_tasks(yard) == []
        await work.submit(1)
        assert len(await list_tasks(yard)) == 1


async def test_middleware_is_called_in_order(tmp_path):
    """That of the yard goes first, then that of the consumer, each in the order in which it was added; back the other
    way round."""
    seen: list[str] = []

    def named(name: str) -> Middleware:
        async def around_submit(submission: Submission, call_next: SubmitNext) -> None:
            seen.append(f"submit {name}")
            (added,) = await call_next()
            assert added.is_new
            seen.append(f"submitted {name}")

        async def around_run(run: RunContext, call_next: RunNext) -> ExecutionResult:
            seen.append(f"run {name}")
            result = await call_next()
            seen.append(f"ran {name} {result.success}")
            return result

        return Middleware(around_submit=around_submit, around_run=around_run)

    yard = Yard(tmp_path / "work.db", middleware=[named("a"), named("b")])

    @yard.consumer(middleware=[named("c")])
    async def work() -> None:
        seen.append("code")

    async with yard.client():
        await work.submit()
    assert seen == ["submit a", "submit b", "submit c", "submitted c", "submitted b", "submitted a"]
    seen.clear()
    async with yard:
        await wait_for_all(yard)
    assert seen == ["run a", "run b", "run c", "code", "ran c True", "ran b True", "ran a True"]


async def list_tasks(yard: Yard) -> list[TaskRecord]:
    return await yard.store.list_tasks(ALL_TASKS, before_id=None, limit=100)


async def wait_for_all(yard: Yard) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for record in await list_tasks(yard):
            with contextlib.suppress(TaskEnded):
                await yard.handle(record.uuid).result()


async def test_a_batch_is_one_submission(url):
    """`submit_many` and groups call the middleware once, with all tasks; that of a consumer sees those of its own."""
    seen: list[tuple[str, list[str]]] = []

    def note(name: str) -> Middleware:
        async def around_submit(submission: Submission, call_next: SubmitNext) -> None:
            seen.append((name, [task.consumer for task in submission.tasks]))
            assert len(await call_next()) >= len(submission.tasks)

        return Middleware(around_submit=around_submit)

    yard = Yard(url, middleware=[note("yard")])

    @yard.consumer(middleware=[note("own")])
    async def first(x: int) -> int:
        return x

    @yard.consumer
    async def total(results: list[int]) -> int:
        return sum(results)

    async with yard:
        await first.submit_many([{"x": 1}, {"x": 2}])
        group = await yard.submit_group([first.bind(1), first.bind(2)], summary=total.bind())
        assert await result_of(group.summary) == 3
    two = ["first", "first"]
    assert seen == [("yard", two), ("own", two), ("yard", [*two, "total"]), ("own", two)]


async def test_a_schedule_submits_through_it(url):
    """Tasks that a schedule makes go through submit middleware as well, which is told the schedule."""
    yard = Yard(url)
    seen: list[str | None] = []

    @yard.around_submit
    async def note(submission: Submission, call_next: SubmitNext) -> None:
        seen.append(submission.schedule)
        submission.tasks[0].values["from"] = submission.schedule
        await call_next()

    @yard.schedule(3600, name="hourly")
    @yard.consumer
    async def see() -> dict[str, Any]:
        return current_run().values

    async with yard:
        handle = await yard.schedules.run_now("hourly")
        assert await result_of(handle) == {"from": "hourly"}
    assert seen == ["hourly"]


async def test_a_transaction_submits_through_it(postgres_url):
    """A task that is submitted in a transaction of the user's own goes through submit middleware as well."""
    yard = Yard(postgres_url)

    @yard.around_submit
    async def add(submission: Submission, call_next: SubmitNext) -> None:
        submission.tasks[0].values["tenant"] = "acme"
        await call_next()

    @yard.consumer
    async def see() -> dict[str, Any]:
        return current_run().values

    connection = await asyncpg.connect(postgres_url)
    try:
        async with yard:
            async with connection.transaction():
                handle = await yard.submit("see", connection=connection)
            assert await result_of(handle) == {"tenant": "acme"}
    finally:
        await connection.close()


async def test_a_due_schedule_submits_through_it():
    """So do tasks that a schedule makes when it is due."""
    yard = Yard("memory://")
    done = asyncio.Event()

    @yard.around_submit
    async def note(submission: Submission, call_next: SubmitNext) -> None:
        submission.tasks[0].values["from"] = submission.schedule
        await call_next()

    @yard.schedule(1, name="often")
    @yard.consumer
    async def see() -> None:
        assert current_run().values == {"from": "often"}
        done.set()

    async with asyncio.timeout(PATIENCE_S), yard:
        await done.wait()


async def test_a_task_that_runs_again_keeps_its_values(url):
    """`run_again` goes through submit middleware, and starts with the values of the task before."""
    yard = Yard(url)
    origins: list[str | None] = []

    @yard.around_submit
    async def count(submission: Submission, call_next: SubmitNext) -> None:
        (task,) = submission.tasks
        origins.append(task.origin)
        task.values["times"] = task.values.get("times", 0) + 1
        await call_next()

    @yard.consumer
    async def see() -> dict[str, Any]:
        return current_run().values

    async with yard:
        handle = await see.submit()
        assert await result_of(handle) == {"times": 1}
        again = await yard.run_again(handle.uuid)
        assert await result_of(again) == {"times": 2}
    assert origins == [None, handle.uuid]


async def test_values_must_be_json(url):
    """Values that JSON cannot hold refuse the submit."""
    yard = Yard(url)

    @yard.around_submit
    async def bad(submission: Submission, call_next: SubmitNext) -> None:
        submission.tasks[0].values["session"] = object()
        await call_next()

    @yard.consumer
    async def work() -> None: ...

    async with yard.client():
        with pytest.raises(NotJson, match="values that middleware adds"):
            await work.submit()


async def test_submit_middleware_that_forgets_call_next():
    """A submit that was neither passed on nor refused is an error, and nothing is stored."""
    yard = Yard("memory://")

    @yard.around_submit
    async def forget(submission: Submission, call_next: SubmitNext) -> None: ...

    @yard.consumer
    async def work() -> None: ...

    async with yard.client():
        with pytest.raises(MiddlewareFault, match=r"forget did not await call_next\(\)"):
            await work.submit()
        assert await list_tasks(yard) == []


@pytest.mark.parametrize("error", [StoreUnavailable("away"), OutcomeUnknown("the answer was lost")])
async def test_submit_middleware_cannot_hide_that_nothing_was_stored(monkeypatch, error):
    """What `call_next()` raises reaches the submitter, also if the middleware catches it."""
    yard = Yard("memory://")
    caught: list[Exception] = []

    @yard.around_submit
    async def catch(submission: Submission, call_next: SubmitNext) -> None:
        try:
            await call_next()
        except Exception as exc:
            caught.append(exc)

    @yard.consumer
    async def work() -> None: ...

    async def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    async with yard.client():
        engine = SubmitChain.submit
        monkeypatch.setattr(SubmitChain, "submit", lambda self, records, send: engine(self, records, refuse))
        with pytest.raises(type(error)) as raised:
            await work.submit()
    assert caught == [error]
    assert raised.value is error


async def test_submit_middleware_awaits_call_next():
    """Middleware that returns while its `call_next()` goes on is told so."""
    yard = Yard("memory://")
    calls: list[asyncio.Task[Any]] = []

    @yard.around_submit
    async def leave(submission: Submission, call_next: SubmitNext) -> None:
        calls.append(asyncio.ensure_future(call_next()))
        await asyncio.sleep(0)

    @yard.around_submit
    async def wait(submission: Submission, call_next: SubmitNext) -> None:
        await asyncio.sleep(0)
        await call_next()

    @yard.consumer
    async def work() -> None: ...

    async with yard.client():
        with pytest.raises(MiddlewareFault, match="leave returned before its call_next"):
            await work.submit()
        await calls[0]


# --- around runs ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-29")
@EVERYWHERE
async def test_each_kind_runs_where_it_says(tmp_path, executor):
    """Run middleware goes around on the node, code middleware where the code runs; both add values, in every executor,
    and what run middleware opens is open as long as the code runs."""
    yard = Yard(tmp_path / "work.db")
    open_now: list[str] = []

    @yard.around_run
    async def open_on_node(run: RunContext, call_next: RunNext) -> ExecutionResult:
        open_now.append(run.uuid)
        run.values.update(opened_on=os.getpid(), connection=object())
        try:
            result = await call_next()
            assert open_now == [run.uuid]
            return result
        finally:
            open_now.remove(run.uuid)

    yard.around_code(middled.open_here)
    consumers = [yard.consumer(executor=executor)(code) for code in (middled.see_values, middled.see_values_async)]
    async with yard:
        for consumer in consumers:
            handle = await consumer.submit(3)
            values = await result_of(handle)
            assert values["opened_on"] == os.getpid()
            assert values["opened_in"] == values["pid"]
            assert (values["pid"] == os.getpid()) is (executor in ("inline", "thread"))
            if executor != "inline":
                lines = [one.line.text for one in await yard.store.list_lines(handle.uuid)]
                assert lines == ["opened", "code 3", "closed"]
    assert open_now == []


async def test_run_middleware_sees_how_a_run_ends():
    """It gets the result, or the error with its kind, of every attempt, and may answer in its place."""
    yard = Yard("memory://")
    seen: list[tuple[int, bool, str]] = []

    @yard.around_run
    async def note(run: RunContext, call_next: RunNext) -> ExecutionResult:
        result = await call_next()
        seen.append((run.attempt, result.success, "" if result.error is None else result.error.message))
        return ExecutionResult(success=True, data="repaired") if run.attempt == 2 else result

    @yard.consumer(retry=RetryPolicy(max_retries=3, first_s=0.001))
    async def work() -> None:
        raise OSError("no luck")

    async with yard:
        assert await result_of(await work.submit()) == "repaired"
    assert seen == [(1, False, "no luck"), (2, False, "no luck")]


async def test_what_run_middleware_raises_is_the_failure():
    """Its exception fails the attempt, is tried again by the policy, and the code does not run."""
    yard = Yard("memory://")
    tries: list[int] = []
    runs: list[int] = []

    @yard.around_run
    async def fail_once(run: RunContext, call_next: RunNext) -> ExecutionResult:
        tries.append(run.attempt)
        if run.attempt == 1:
            raise ConnectionError("no database")
        return await call_next()

    @yard.consumer(retry=RetryPolicy(max_retries=1, first_s=0.001))
    async def work() -> str:
        runs.append(current_run().attempt)
        return "done"

    async with yard:
        handle = await work.submit()
        assert await result_of(handle) == "done"
        assert (await handle.record()).retries == 1
    assert (tries, runs) == ([1, 2], [2])


@pytest.mark.parametrize("kind", ["cleanup", "no result", "twice"])
async def test_run_middleware_that_is_wrong(kind):
    """An exception after the code, a missing result and a second call fail the run, and say which middleware."""
    yard = Yard("memory://")

    @yard.around_run
    async def wrong(run: RunContext, call_next: RunNext) -> Any:
        await call_next()
        if kind == "cleanup":
            raise OSError("cannot close")
        return await call_next() if kind == "twice" else None

    @yard.consumer(retry=RetryPolicy(max_retries=0))
    async def work() -> str:
        return "done"

    async with yard:
        with pytest.raises(TaskFailed) as failed:
            await result_of(await work.submit())
    said = {"cleanup": "cannot close", "no result": "wrong returned None; return the result", "twice": "wrong called"}
    assert said[kind] in str(failed.value)


async def test_a_cancel_interrupts_what_is_opened():
    """A cancel ends run middleware that waits before the code begins, and the task is canceled; its cleanup runs."""
    yard = Yard("memory://")
    waits, cleaned, ran = asyncio.Event(), [], []

    @yard.around_run
    async def open_slowly(run: RunContext, call_next: RunNext) -> ExecutionResult:
        try:
            waits.set()
            await asyncio.Event().wait()
            return await call_next()
        finally:
            cleaned.append(run.uuid)

    @yard.consumer
    async def work() -> None:
        ran.append(1)

    async with asyncio.timeout(PATIENCE_S), yard:
        handle = await work.submit()
        await waits.wait()
        await handle.cancel()
        with pytest.raises(TaskCanceled):
            await handle.result()
    assert (cleaned, ran) == ([handle.uuid], [])


async def test_a_stop_gives_back_what_is_opened():
    """A node that stops interrupts run middleware, and the task goes back to its queue without an attempt used up."""
    yard = Yard("memory://")
    waits = asyncio.Event()

    @yard.around_run
    async def open_slowly(run: RunContext, call_next: RunNext) -> ExecutionResult:
        waits.set()
        await asyncio.Event().wait()
        return await call_next()

    @yard.consumer
    async def work() -> None: ...

    async with asyncio.timeout(PATIENCE_S):
        async with yard:
            handle = await work.submit()
            await waits.wait()
            await yard.stop(grace_s=0)
    assert handle.uuid


@pytest.mark.parametrize("code", [middled.fail, middled.fail_async])
@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_code_middleware_lets_exceptions_pass(code, executor):
    """What the code raises passes through code middleware and is the failure; one that swallows it is told so."""
    yard = Yard("memory://")
    yard.consumer(executor=executor, retry=RetryPolicy(max_retries=0))(code)
    swallows = Yard("memory://", middleware=[Middleware(around_code=middled.swallow)])
    swallows.consumer(executor=executor, retry=RetryPolicy(max_retries=0))(code)
    yard.around_code(middled.open_here)
    async with yard:
        with pytest.raises(TaskFailed, match="from the code"):
            await result_of(await yard.submit(code.__name__))
    async with swallows:
        with pytest.raises(TaskFailed, match="swallow swallowed what the code raised"):
            await result_of(await swallows.submit(code.__name__))


async def test_async_code_middleware():
    """An async generator goes around async code; around a plain function it fails the run with what to do."""
    yard = Yard("memory://")
    seen: list[str] = []

    async def around(run: RunContext) -> Any:
        seen.append("before")
        await asyncio.sleep(0)
        yield
        seen.append("after")

    @yard.consumer(middleware=[Middleware(around_code=around)])
    async def work() -> None:
        seen.append("code")

    @yard.consumer(middleware=[Middleware(around_code=around)], retry=RetryPolicy(max_retries=0))
    def plain() -> None: ...

    async with yard:
        await result_of(await work.submit())
        with pytest.raises(TaskFailed, match="is async, but the consumer 'plain' is a plain function"):
            await result_of(await plain.submit())
    assert seen == ["before", "code", "after"]


async def test_class_consumers_and_algorithms():
    """The class form has middleware as an attribute, an installed algorithm as an argument; values reach the context of
    the algorithm."""
    yard = Yard("memory://")

    async def add(run: RunContext, call_next: RunNext) -> ExecutionResult:
        run.values["n"] = 7
        return await call_next()

    class Own(BaseTaskConsumer):
        name, middleware = "own", [Middleware(around_run=add)]

        async def consume(self, task: Task) -> Any:
            return current_run().values

    class Alg(Algorithm):
        spec = AlgorithmSpec("alg")

        async def run(self, data: Any, context: Any, /) -> Any:
            return dict(context.values)

    yard.register(Own())
    yard.install(Alg, middleware=[Middleware(around_run=add)])
    async with yard:
        assert await result_of(await yard.submit("own")) == {"n": 7}
        assert await result_of(await yard.submit("alg")) == {"n": 7}


@EVERYWHERE
async def test_direct_calls(executor):
    """A dispatcher takes middleware for its direct calls: it goes around every try, wherever the algorithm runs."""
    seen: list[int] = []

    async def note(run: RunContext, call_next: RunNext) -> ExecutionResult:
        seen.append(run.attempt)
        return await call_next()

    middleware = [Middleware(around_run=note, around_code=middled.open_here)]
    async with ExecutionDispatcher(middleware=middleware, place=executor) as dispatcher:
        dispatcher.install(middled.see_opened, spec=AlgorithmSpec("see"))
        for n in range(2):
            opened_in, pid, data = (await dispatcher.run("see", n)).data
            assert (opened_in, data) == (pid, n)
            assert (pid == os.getpid()) is (executor in ("inline", "thread"))
    assert seen == [1, 1]


async def test_a_cancel_that_is_swallowed_leaves_nothing_behind():
    """Middleware that answers a cancel by itself leaves the task of the caller uncancelled."""
    waits = asyncio.Event()

    async def answer(run: RunContext, call_next: RunNext) -> ExecutionResult:
        try:
            waits.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return ExecutionResult(success=True, data="answered")
        return await call_next()

    async with ExecutionDispatcher(middleware=[Middleware(around_run=answer)]) as dispatcher:
        hints = ExecutionHints(executor="inline")
        dispatcher.install(lambda data: data, spec=AlgorithmSpec("echo", execution=hints))

        async def call() -> tuple[Any, int]:
            result = await dispatcher.run("echo", 1, request_id="r")
            task = asyncio.current_task()
            assert task is not None
            return result.data, task.cancelling()

        calling = asyncio.get_running_loop().create_task(call())
        await waits.wait()
        assert dispatcher.cancel("r")
        assert await calling == ("answered", 0)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([lambda: None], "must be a list of Middleware, not of"),
        (Middleware(around_code=middled.open_here), "must be a list, such as"),
        (7, "must be a list, such as"),
    ],
)
def test_bad_lists(given, match):
    """What is no list of `Middleware` is refused with what to write."""
    with pytest.raises(InvalidInput, match=match):
        Yard("memory://", middleware=given)
    with pytest.raises((InvalidInput, InvalidConsumer), match=match):
        Yard("memory://").consumer(middleware=given)(middled.see_values)


def test_bad_middleware():
    """A `Middleware` without a function, or with something else, is refused."""
    with pytest.raises(InvalidInput, match="without any function"):
        Middleware()
    with pytest.raises(InvalidInput, match="must be a function, not 7"):
        Middleware(around_run=7)  # type: ignore[arg-type]


async def test_it_is_added_before_the_yard_is_opened():
    """Middleware that comes too late is refused."""
    yard = Yard("memory://")
    async with yard:
        with pytest.raises(InvalidInput, match="before the yard is opened"):
            yard.around_run(lambda run, call_next: call_next())
