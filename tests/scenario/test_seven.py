"""The seven typical scenarios of the queue's design (`典型场景处理`), as written, on a queue alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taskyard import (
    BaseTaskConsumer,
    RetryPolicy,
    StandaloneQueue,
    Task,
    TaskConsumerRegistry,
    TaskFailed,
    TaskState,
)
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Store
from taskyard.stores.memory import MemoryStore
from taskyard.stores.postgres import PostgresStore
from taskyard.stores.sqlite import SqliteStore
from tests.scenario.gates import Gates, attend
from tests.scenario.jobs import build

pytestmark = pytest.mark.spec("QUE-28")

S = TaskState
OpenQueue = Callable[..., StandaloneQueue]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def make(request: pytest.FixtureRequest, gates: Gates, tmp_path: Path) -> OpenQueue:
    """Make the queue of the application, which compresses one file at a time; each on the same store."""
    clock = SystemClock()
    memory = MemoryStore(clock)
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""

    class Compress(BaseTaskConsumer):
        name = "compress"
        concurrent_count = 9

        def produce(self, args: dict[str, Any]) -> Task:
            return Task(source=self.name, args=args)

        async def consume(self, task: Task) -> None:
            await attend(gates.port, task.args["name"])

    registry = TaskConsumerRegistry()
    registry.register(Compress())

    def make(**rules: Any) -> StandaloneQueue:
        store: Store = memory
        if request.param == "sqlite":
            store = SqliteStore(tmp_path / "work.db", clock=clock)
        elif request.param == "postgres":
            store = PostgresStore(url, clock=clock)
        return StandaloneQueue(registry, store=store, **rules)

    return make


def file(name: str) -> Task:
    return Task("compress", {"name": name})


async def states(queue: StandaloneQueue, *uuids: str) -> list[TaskState]:
    return [(await queue.get(uuid)).state for uuid in uuids]


async def test_1_an_idle_queue_runs_a_new_task_at_once(make, gates):
    """当前空闲，新增任务A → A 立即 Running。"""
    async with make() as queue:
        (a,) = await queue.add(file("a"))
        await gates.begun("a")
        assert await states(queue, a) == [S.RUNNING]


async def test_2_others_are_queued_while_it_runs(make, gates):
    """A Running 中，新增 B、C → B、C 入队（Queued）。"""
    async with make() as queue:
        (a,) = await queue.add(file("a"))
        await gates.begun("a")
        b, c = await queue.add(file("b"), file("c"))
        assert await states(queue, a, b, c) == [S.RUNNING, S.QUEUED, S.QUEUED]


async def test_3_and_4_a_pause_lets_it_finish_and_a_resume_starts_the_next(make, gates):
    """用户“暂停队列” → A 继续至完成；完成后不启动 B。用户“恢复队列” → 启动 B。"""
    async with make() as queue:
        a, b = await queue.add(file("a"), file("b"))
        run = await gates.begun("a")
        await queue.pause()
        assert await states(queue, a, b) == [S.RUNNING, S.QUEUED]
        run.finish()
        await queue.outcome(a)
        assert await states(queue, a, b) == [S.COMPLETED, S.QUEUED]
        assert gates.going_on == []
        await queue.resume()
        await gates.begun("b")
        assert await states(queue, b) == [S.RUNNING]


async def test_5_a_failure_is_tried_once_more_then_by_hand_from_the_head(make, gates):
    """A 失败 → 自动重试 1 次（退避），仍失败 → Failed；用户可手动 Retry（入队到队首）。"""
    async with make(retry=RetryPolicy(max_retries=1, first_s=0.01, jitter=0)) as queue:
        (a,) = await queue.add(file("a"))
        (await gates.begun("a")).fail("OSError")
        (again := await gates.begun("a")).fail("OSError")
        assert again.attempt == 2
        with pytest.raises(TaskFailed):
            await queue.outcome(a)
        assert await states(queue, a) == [S.FAILED]
        b, _ = await queue.add(file("b"), file("c"))
        run = await gates.begun("b")
        await queue.retry(a)
        assert await states(queue, a, b) == [S.QUEUED, S.RUNNING]
        run.finish()
        (await gates.begun("a")).finish()
        await gates.begun("c")


@pytest.mark.parametrize("urgent", [False, True])
async def test_6_a_task_is_put_on_top(make, gates, urgent):
    """用户“置顶”任务 C → C 成为队首（若启用优先级，同优先级内置顶，或将 C 调到 High）。"""
    async with make() as queue:
        await queue.add(file("a"))
        run = await gates.begun("a")
        await queue.add(file("b"))
        (c,) = await queue.add(file("c"))
        await queue.add(file("h"), priority="high")
        record = await queue.start_now(c, urgent=urgent)
        assert record.priority == (0 if urgent else 1)
        order = []
        for _ in range(3):
            run.finish()
            run = await gates.next()
            order.append(run.name)
        assert order == (["c", "h", "b"] if urgent else ["h", "c", "b"])


@pytest.mark.parametrize("auto_recover", [1, 0])
async def test_7_what_ran_when_the_application_died_is_tried_again_or_failed(file_url, gates, nodes, auto_recover):
    """关闭应用重开：上次 Running 标记 Interrupted → 根据配置自动重试或标记 Failed。"""
    rules = {"zip": {"concurrency": 1, "auto_recover": auto_recover}}
    application = await nodes.start(file_url, queues=rules)
    async with build(file_url, queues=rules).client() as yard:
        handle = await yard.submit("gate", {"name": "a"}, queue="zip")
        await yard.submit("gate", {"name": "b"}, queue="zip")
        await gates.begun("a")
        await application.kill()
        await nodes.start(file_url, queues=rules)
        run = await gates.begun("a" if auto_recover else "b")
        assert S.INTERRUPTED in [past.state for past in await yard.store.list_attempts(handle.uuid)]
        assert await handle.state() is (S.RUNNING if auto_recover else S.FAILED)
        run.finish()
