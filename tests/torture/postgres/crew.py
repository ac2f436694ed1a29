"""Several nodes on one database, the client that gives them work, and what the ledger has shown of them so far."""

import asyncio
import random
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import asyncpg

from taskyard import StoreError, Yard
from taskyard.model.state import ENDED
from taskyard.testing.ledger import Entry, Ledger, What
from tests.torture.procs import Child, Troop
from tests.torture.work import address_of, ledger_of, make_yard

T = TypeVar("T")

NODES = 3
PATIENCE_S = 30.0


class Follower:
    """Reads the ledger as it grows."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._seen = ledger, 0
        self._open: dict[tuple[str, int], Entry] = {}
        self._left: dict[int, list[Entry]] = {}
        self.entries: list[Entry] = []

    def read(self) -> list[Entry]:
        """What is new."""
        new = self._ledger.entries(after=self._seen)
        self._seen += len(new)
        self.entries += new
        for entry in new:
            if entry.what is What.START:
                self._open[entry.task, entry.token] = entry
            elif entry.what is What.END:
                self._open.pop((entry.task, entry.token), None)
            elif entry.what is What.DEAD:
                self._left[entry.pid] = [run for run in self._open.values() if run.pid == entry.pid]
                self._open = {at: run for at, run in self._open.items() if run.pid != entry.pid}
        return new

    def held_by(self, pid: int) -> list[Entry]:
        """The runs that have started there and not ended."""
        self.read()
        return [run for run in self._open.values() if run.pid == pid]

    def left_by(self, pid: int) -> list[Entry]:
        """The runs in which it died."""
        self.read()
        return self._left[pid]

    def has_ended(self, run: Entry) -> bool:
        self.read()
        return (run.task, run.token) not in self._open

    def find_next(self, run: Entry) -> Entry | None:
        """The next run of the same task."""
        self.read()
        later = (entry for entry in self.entries if entry.what is What.START and entry.task == run.task)
        return next((entry for entry in later if entry.token > run.token), None)

    def find_start(self, pid: int, *, since_mono: float) -> Entry | None:
        self.read()
        for entry in reversed(self.entries):
            if entry.what is What.START and entry.pid == pid and entry.at_mono >= since_mono:
                return entry
        return None


def await_(look: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S) -> T:
    """What `look` finds, as soon as it does."""
    until = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > until:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.005)
    return found


class Crew:
    """`yard` is a client of this process. Leaving the block kills whoever is left."""

    def __init__(self, folder: Path, rng: random.Random, *, nodes: int = NODES, **options: Any) -> None:
        """`options` are those of the nodes."""
        self.folder, self.rng, self._options = folder, rng, options
        self.ledger: Ledger = ledger_of(folder)
        self.troop = Troop(folder, self.ledger)
        self.seen = Follower(self.ledger)
        self.yard: Yard = make_yard(folder, self.ledger)
        self._wanted = nodes
        # A client that lives while nobody asks it anything: it has hints to send.
        self._loop = asyncio.new_event_loop()

    @contextmanager
    def gathered(self) -> Iterator["Crew"]:
        thread = threading.Thread(target=self._loop.run_forever, name="client")
        thread.start()
        try:
            with self.troop.gathered():
                self._run(self.yard.start(serve=False))
                try:
                    self.fill()
                    yield self
                    self._dismiss()
                finally:
                    self._run(self.yard.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()
        self.ledger.close()

    def _dismiss(self) -> None:
        """Nodes that leave, having nothing to do any more, need not be given up for dead by whoever comes next."""
        for child in [child for child in self.troop.living if child.role == "submit"]:
            child.signal(signal.SIGTERM)
            self.troop.end(child)
        await_(lambda: self.unfinished() == 0, "that all tasks end")
        for child in self.nodes():
            child.signal(signal.SIGTERM)
        for child in self.nodes():
            self.troop.end(child)
        self.seen.read()

    def _run(self, doing: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(2 * PATIENCE_S)

    def nodes(self) -> list[Child]:
        return [child for child in self.troop.living if child.role == "work"]

    def fill(self) -> None:
        """As many nodes as there should be."""
        new = [self.troop.start("work", **self._options) for _ in range(self._wanted - len(self.nodes()))]
        for child in new:
            child.await_ready()

    def submit(self, name: str, args: dict[str, object], **options: object) -> str:
        async def submit() -> str:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with suppress(StoreError):  # it was away; if it took the task all the same, there are two
                        return (await self.yard.submit(name, args, **options)).uuid
                    await asyncio.sleep(0.05)

        uuid = self._run(submit())
        self.ledger.acknowledged(uuid)
        return uuid

    def submit_many(self, name: str, batch: list[dict[str, object]], **options: object) -> list[str]:
        async def submit() -> list[str]:
            return [handle.uuid for handle in await self.yard.submit_many(name, batch, **options)]

        uuids = self._run(submit())
        for uuid in uuids:
            self.ledger.acknowledged(uuid)
        return uuids

    @contextmanager
    def holding(self, sql: str) -> Iterator[None]:
        """A connection of somebody else's, which has done that and stays as it is."""
        conn: asyncpg.Connection = self._run(asyncpg.connect(address_of(self.folder).read_text()))
        try:
            self._run(conn.execute(sql))
            yield
        finally:
            self._run(conn.close())

    def execute(self, sql: str) -> int:
        """How many rows that is."""

        async def execute() -> int:
            conn = await asyncpg.connect(address_of(self.folder).read_text())
            try:
                return len(await conn.fetch(sql))
            finally:
                await conn.close()

        return self._run(execute())

    def cancel(self, uuid: str) -> None:
        async def cancel() -> None:
            await self.yard.handle(uuid).cancel()

        self._run(cancel())

    def await_all(self, uuids: list[str]) -> None:
        """Until all of them have ended, as somebody who waits for the results hears."""

        async def wait() -> None:
            for uuid in uuids:
                await self.yard.handle(uuid).result(timeout_s=PATIENCE_S)

        self._run(wait())

    def unfinished(self) -> int:
        async def count() -> int:
            counts = await self.yard.store.count()
            return sum(n for (_, state), n in counts.items() if state not in ENDED)

        return self._run(count())

    def top_up(self, wanted: int) -> None:
        """Tasks of all lengths, in the loop and in threads."""
        for _ in range(wanted - self.unfinished()):
            name = self.rng.choice(("breathe", "breathe", "chew"))
            self.submit(name, {"ms": self.rng.choice((self.rng.random() * 10, self.rng.random() * 300, 600.0))})
