"""A random walk over one PostgreSQL store: whatever can make a task startable, or take it away, in any order.

Nothing is compared with another store, as `tests.stateful` does; that makes a step ten times as fast. After each it is
asked whether a claim would come across all that may start, and whether limits are kept.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta

from taskyard.errors import InvalidInput
from taskyard.model.blocker import encode_requirements, lane_of
from taskyard.model.command import (
    Block,
    Cancel,
    Command,
    Hold,
    MoveAfter,
    MoveBefore,
    Release,
    Reschedule,
    Retry,
    SetPriority,
    Skip,
    StartNow,
    Unblock,
)
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.order import Priority
from taskyard.model.queue import Pause, QueueOrder, QueueSettings, Resume
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Add
from taskyard.stores.postgres import PostgresStore
from taskyard.testing.clock import ManualClock
from taskyard.testing.postgres import UNSEEN, Databases
from taskyard.testing.samples import a_node, a_record, an_error
from tests.stateful.histories import crowded

QUEUES = ("default", "cpu", "disk")
SOURCES = ("fetch", "shrink")
EU = encode_requirements({"role": "eu"})
LANES = tuple(lane_of(source, requires) for source in SOURCES for requires in (None, EU))
BLOCKERS = ("/", "/data")
REMEMBERED = 40
"""Tasks and claims that something is still done to: of more, each would be met too seldom."""


STEPS = 400


def walk(databases: Databases, seed: int, kind: str = "crowded") -> None:
    """The walk of this seed, the same each time; in a database of another kind if its schema is another."""
    with crowded():
        asyncio.run(_walk(databases.empty(kind), seed))


async def _walk(url: str, seed: int) -> None:
    clock = ManualClock()
    store = PostgresStore(url, clock=clock)
    await store.open()
    try:
        await Walk(store, clock, seed).go(STEPS)
    finally:
        await store.close()


class Walk:
    def __init__(self, store: PostgresStore, clock: ManualClock, seed: int) -> None:
        self._store, self._clock, self._random = store, clock, random.Random(seed)
        self._uuids: list[str] = []
        self._claims: list[Claim] = []
        self._nodes: list[str] = []
        self._limits: dict[str, int | None] = {}
        self._joined = 0
        self._steps: dict[Callable[[], Awaitable[None]], int] = {
            self._add: 8,
            self._claim: 12,
            self._settle: 8,
            self._command: 10,
            self._block: 1,
            self._unblock: 1,
            self._crowd: 4,
            self._set_queue: 2,
            self._go_on: 4,
            self._steer_queue: 1,
            self._die: 1,
            self._forget: 2,
            self._wait: 2,
        }

    async def go(self, steps: int) -> None:
        """So many steps; afterwards all that was asked for is worked off, and nothing may be left."""
        self._nodes = [await self._join(), await self._join()]
        for _ in range(steps):
            (step,) = self._random.choices([*self._steps], [*self._steps.values()])
            await step()
            unseen = await self._store._db.ask(lambda conn: conn.fetch(UNSEEN))
            assert unseen == [], f"after {step.__name__}"
        await self._finish()

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _join(self) -> str:
        self._joined += 1
        node = a_node(f"walk-{self._joined}")
        await self._store.join(node)
        return node.incarnation

    async def _add(self) -> None:
        draw = self._random
        queue = draw.choice(QUEUES)
        records = [self._record(queue) for _ in range(draw.choice((1, 1, 2, 4)))]
        after = {records[0].uuid: [draw.choice(self._uuids)]} if self._uuids and draw.random() < 0.1 else {}
        demand = self._demand() if draw.random() < 0.3 else None
        turned = await self._store.turn(draw.choice(self._nodes), adds=[Add(records, after=after)], demand=demand)
        if isinstance(turned.added[0], list):  # it may have been told to wait for a task that is gone
            self._uuids = [*self._uuids, *(record.uuid for record in records)][-REMEMBERED:]
        await self._keep(turned.claims)

    def _record(self, queue: str) -> TaskRecord:
        draw, now = self._random, self._clock.now()
        return a_record(
            now,
            queue=queue,
            consumer=draw.choice(SOURCES),
            priority=draw.choice((Priority.NORMAL, Priority.NORMAL, Priority.HIGH, Priority.LOW)),
            key=draw.choice((None, None, "k", "m")),
            bucket=draw.choice((None, "x", "y")),
            requires=draw.choice((None, None, None, None, EU)),
            due_at=now + timedelta(seconds=draw.choice((0, 0, 0, 2))),
        )

    def _demand(self) -> Demand:
        total = self._random.choice((1, 2, 3, 9))
        if self._random.random() < 0.3:
            return Demand(total, {lane: self._random.choice((0, 1, total)) for lane in LANES})
        return Demand(total, {}, total)

    async def _keep(self, claims: list[Claim]) -> None:
        self._claims = [*self._claims, *claims][-REMEMBERED:]
        running = await self._store.count() if claims else {}
        for queue in {claim.record.queue for claim in claims}:
            limit = self._limits.get(queue)
            assert limit is None or running[queue, TaskState.RUNNING] <= limit

    async def _claim(self) -> None:
        demand = self._demand()
        if self._random.random() < 0.3:
            picked = [record.id for record in await self._store.preview(demand)]
            only = dict.fromkeys(picked[: self._random.randint(0, len(picked))], "emu-1")
            demand = Demand(demand.total, demand.per_lane, demand.others, only=only)
        await self._keep((await self._store.turn(self._random.choice(self._nodes), demand=demand)).claims)

    async def _settle(self) -> None:
        if not self._claims:
            return
        draw, now = self._random, self._clock.now()
        ended = draw.sample(self._claims, min(len(self._claims), draw.choice((1, 2, 4))))
        self._claims = [claim for claim in self._claims if claim not in ended]
        moves = [
            draw.choice(
                (
                    Move.completed(at=now),
                    Move.completed(at=now),
                    Move.failed(at=now, error=an_error()),
                    Move.retrying(at=now, due_at=now + timedelta(seconds=draw.choice((0, 2))), error=an_error()),
                    Move.given_back(at=now),
                )
            )
            for _ in ended
        ]
        demand = self._demand() if draw.random() < 0.3 else None
        settles = list(zip(ended, moves, strict=True))
        await self._keep((await self._store.turn(draw.choice(self._nodes), settles=settles, demand=demand)).claims)

    async def _command(self) -> None:
        if not self._uuids:
            return
        draw = self._random
        uuids = draw.sample(self._uuids, min(len(self._uuids), draw.choice((1, 1, 3))))
        anchor = draw.choice(self._uuids)
        commands: list[Command] = [
            MoveBefore(anchor),
            MoveBefore(anchor),
            MoveAfter(anchor),
            MoveAfter(anchor),
            Hold(),
            Release(),
            Release(),
            Retry(to_head=draw.random() < 0.5),
            SetPriority(draw.choice((*Priority,))),
            StartNow(draw.random() < 0.5),
            Reschedule(self._clock.now() + timedelta(seconds=draw.choice((-1, 2)))),
            Skip(),
            Cancel(),
        ]
        await self._store.apply(uuids, draw.choice(commands))

    async def _block(self) -> None:
        """What an admission check does: of those that would start next."""
        draw = self._random
        looked = await self._store.preview(self._demand())
        if looked:
            await self._store.apply([draw.choice(looked).uuid], Block("disk", draw.choice(BLOCKERS)))

    async def _unblock(self) -> None:
        for detail in self._random.sample(BLOCKERS, self._random.choice((1, 2))):
            await self._free(detail)

    async def _free(self, detail: str) -> None:
        blocked = await self._store.list_ids(TaskFilter(blocker=f"disk:{detail}"))
        await self._store.apply([uuid for _, uuid in blocked], Unblock("disk", detail))

    async def _crowd(self) -> None:
        """Several of a priority to a spot near its head, where there is not room for many; and then some start."""
        draw = self._random
        where = TaskFilter(states=(TaskState.QUEUED,), queue=draw.choice(QUEUES))
        priority = draw.choice((*Priority,))
        queued = sorted(await self._store.list_tasks(where), key=lambda record: record.position)
        peers = [record.uuid for record in queued if record.priority == priority]
        if peers:
            anchor = draw.choice(peers[:3])
            movers = draw.sample(peers, min(len(peers), 8))
            with contextlib.suppress(InvalidInput):  # the gaps are small here, and this one may be full
                await self._store.apply(movers, draw.choice((MoveBefore(anchor), MoveAfter(anchor))))
            await self._claim()

    async def _set_queue(self) -> None:
        draw = self._random
        queue = draw.choice(QUEUES)
        # Where the order changes, marks begin anew: one queue keeps its own.
        orders = (QueueOrder.PRIORITY,) if queue == QUEUES[0] else (*QueueOrder, QueueOrder.BUCKETS)
        self._limits[queue] = draw.choice((None, None, 1, 5))
        settings = QueueSettings(
            name=queue,
            concurrency=self._limits[queue],
            per_key=draw.choice((1, 2)),
            order=draw.choice(orders),
            starve_after=draw.choice((None, 1)),
            starve_wait_s=draw.choice((None, 1.0)),
        )
        if draw.random() < 0.5:
            await self._store.set_queue(settings)
        else:
            await self._store._rules.declare(settings)  # and dies before it is done

    async def _go_on(self) -> None:
        """What upkeep does with rules that are not there yet."""
        await self._store._rules.go_on()

    async def _steer_queue(self) -> None:
        command = self._random.choice((Pause(), Resume(), Resume()))
        await self._store.control(self._random.choice(QUEUES), command, by="ann")

    async def _die(self) -> None:
        n = self._random.randrange(len(self._nodes))
        await self._store.rescue(self._nodes[n])
        self._nodes[n] = await self._join()

    async def _forget(self) -> None:
        """What upkeep does now and then."""
        for routine in ("drop_empty_lanes_1", "drop_spent_lanes_1"):
            await self._store._db.write(f"SELECT taskyard.{routine}('')")

    async def _wait(self) -> None:
        self._clock.advance(self._random.choice((0.5, 2.0)))

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        for queue in QUEUES:
            await self._store.set_queue(QueueSettings(name=queue, order=self._random.choice([*QueueOrder])))
            await self._store.control(queue, Resume(), by="ann")
        held = [r.uuid for r in await self._store.list_tasks(TaskFilter(states=(TaskState.PAUSED,)), limit=10_000)]
        await self._store.apply(held, Release())
        for detail in BLOCKERS:
            await self._free(detail)
        for node in self._nodes:
            await self._store.rescue(node)
        node, claims = await self._join(), list[Claim]()
        self._clock.advance(3600)
        for _ in range(10_000):
            settles = [(claim, Move.completed(at=self._clock.now())) for claim in claims]
            claims = (await self._store.turn(node, settles=settles, demand=Demand(9, {}, 9))).claims
            if not claims and not settles:
                break
        counts = await self._store.count()
        left = {state: n for (_, state), n in counts.items() if state in (TaskState.QUEUED, TaskState.BLOCKED) and n}
        assert not left
