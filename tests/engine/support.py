"""An engine to test with: a memory store that can fail and hint, a clock and probes under the test's control."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from taskyard.engine import Engine, EngineSettings
from taskyard.errors import StoreError, StoreUnavailable
from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.runner import RunnerSettings
from taskyard.execution.thread import ThreadExecutor
from taskyard.model.catalogue import ConsumerSpec
from taskyard.model.node import Node
from taskyard.model.queue import QueueSettings
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState
from taskyard.model.task import Outcome, TaskRecord, new_uuid
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutorProtocol
from taskyard.ports.store import Add, Added, News, Turned
from taskyard.stores.memory import MemoryStore
from taskyard.telemetry.logs import FailureLog
from taskyard.testing.clock import ManualClock
from taskyard.testing.probes import Probes


class ShakyStore(MemoryStore):
    """A memory store whose turns can be held up, can fail, and can be carried out without an answer."""

    add_now = None  # type: ignore[assignment]  # every add goes through a turn, as with a store that has to wait

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.turns = 0
        self.away: Exception | None = None
        self.unanswered: StoreError | None = None
        self.held: asyncio.Event | None = None
        self.answers_held: asyncio.Event | None = None
        self.outcomes_held: asyncio.Event | None = None
        self.refuses_nodes = False
        self.dead: list[str] = []
        self.rescue_unanswered: StoreError | None = None
        self.asked: list[int] = []
        self._watchers: list[Callable[[News], None]] = []

    async def turn(self, node: str, **parts: Any) -> Turned:
        self.turns += 1
        if self.held is not None:
            await self.held.wait()
        if self.away is not None:
            raise self.away
        turned = await super().turn(node, **parts)
        if self.answers_held is not None:
            await self.answers_held.wait()
        if self.unanswered is not None:
            error, self.unanswered = self.unanswered, None
            raise error
        return turned

    async def join(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        if self.refuses_nodes:
            raise StoreUnavailable("not yet")
        await super().join(node, specs)

    async def dead_nodes(self) -> list[str]:
        if self.away is not None:
            raise self.away
        return self.dead

    async def rescue(self, incarnation: str) -> list[str]:
        self.dead.remove(incarnation)
        uuids = await super().rescue(incarnation)
        if self.rescue_unanswered is not None:
            raise self.rescue_unanswered
        return uuids

    async def outcomes(self, uuids: Any) -> list[Outcome | None]:
        if self.away is not None:
            raise self.away
        self.asked.append(len(uuids))
        found = await super().outcomes(uuids)
        if self.outcomes_held is not None:
            await self.outcomes_held.wait()
        return found

    def watch(self, heard: Callable[[News], None]) -> None:
        self._watchers.append(heard)

    def hint(self, news: News = News.CHANGED) -> None:
        """As if another process had committed."""
        for heard in self._watchers:
            heard(news)


class PromptStore(ShakyStore):
    """The same, answering submits on the spot as a plain memory store does."""

    add_now = MemoryStore.add_now  # type: ignore[assignment]


class Rig:
    """One node on a store, and what a test needs to talk to it."""

    def __init__(self, store: ShakyStore | None = None, clock: ManualClock | None = None, **settings: Any) -> None:
        self.clock = clock or ManualClock()
        self.store = store or (PromptStore if settings.pop("prompt", False) else ShakyStore)(self.clock)
        self.probes = Probes()
        self.sinks = self.probes.sinks
        self.sinks.add(FailureLog())
        self.consumers: dict[str, Consumer] = {}
        self.queues: dict[str, QueueSettings] = {}
        threads = ThreadExecutor(max_workers=settings.pop("threads", 32))
        self.executors: dict[str, ExecutorProtocol] = {"inline": InProcessExecutor(), "thread": threads}
        runner = RunnerSettings(
            retry=settings.pop("retry", RetryPolicy(jitter=0)),
            cancel_grace_s=settings.pop("cancel_grace_s", 5.0),
            max_payload_bytes=settings.pop("max_payload_bytes", 1 << 20),
        )
        self.engine = Engine(
            self.store,
            clock=self.clock,
            consumers=self.consumers,
            executors=self.executors,
            queues=self.queues,
            settings=EngineSettings(runner=runner, **settings),
            jitter=lambda: 0.0,
            sinks=self.sinks,
        )

    def consumer(self, name: str, call: Callable[[TaskRecord], Any], **fields: Any) -> None:
        is_async = asyncio.iscoroutinefunction(call) or isinstance(call, Work)
        fields.setdefault("executor", "inline" if is_async else "thread")
        self.consumers[name] = Consumer(name=name, encode=str, call=call, is_async=is_async, **fields)
        self.engine.consumers_changed()

    def record(self, source: str, *, in_s: float = 0.0, at: datetime | None = None, **fields: Any) -> TaskRecord:
        now = self.clock.now()
        due = at or now + timedelta(seconds=in_s)
        return TaskRecord(uuid=new_uuid(), consumer=source, due_at=due, created_at=now, updated_at=now, **fields)

    def offer(self, *records: TaskRecord) -> "asyncio.Future[list[Added]]":
        return self.engine.add(Add(records))

    async def submit(self, source: str, **fields: Any) -> str:
        [added] = await self.offer(self.record(source, **fields))
        return added.uuid

    async def submit_many(self, source: str, count: int, **fields: Any) -> list[str]:
        return [added.uuid for added in await self.offer(*[self.record(source, **fields) for _ in range(count)])]

    async def state(self, uuid: str) -> TaskState:
        return (await self.found(uuid)).state

    async def found(self, uuid: str) -> TaskRecord:
        record = await self.store.find(uuid)
        assert record is not None
        return record

    async def outcome(self, uuid: str) -> Outcome:
        waiter = self.engine.outcome(uuid)
        try:
            async with asyncio.timeout(10):
                return await waiter
        except asyncio.CancelledError:
            self.engine.forget_outcome(uuid, waiter)
            raise

    async def advance(self, seconds: float) -> None:
        """Time passes, and everything that it wakes has had its say."""
        self.clock.advance(seconds)
        await quiet()


class Work:
    """A consumer whose runs begin when they are started and end when the test lets them."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self.most_at_once = 0
        self._at_once = 0
        self._gates: dict[str, asyncio.Event] = {}

    async def __call__(self, record: TaskRecord) -> str:
        self.began.append(record.uuid)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await self._gate(record.uuid).wait()
        except asyncio.CancelledError:
            self.cancelled.append(record.uuid)
            raise
        finally:
            self._at_once -= 1
            self.ended.append(record.uuid)
        return record.uuid

    def _gate(self, uuid: str) -> asyncio.Event:
        return self._gates.setdefault(uuid, asyncio.Event())

    def let_go(self, uuid: str) -> None:
        self._gate(uuid).set()


async def quiet() -> None:
    """Return when no callback is ready on the event loop but this one: nothing happens until a timer or a thread."""
    ready: Any = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(0)
        if not ready._ready:
            return
