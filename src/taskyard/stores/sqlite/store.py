"""The port over one SQLite file. Writes go to the writer thread, reads to a reader thread; nothing blocks the loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import apsw

from taskyard.errors import ForkedStore, NotOpen
from taskyard.model.command import Command
from taskyard.model.event import EventPage
from taskyard.model.limits import Demand, QueueSettings
from taskyard.model.move import Move
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, Outcome, Run, TaskRecord
from taskyard.ports.clock import Clock
from taskyard.ports.store import ANY, Add, Applied, Node, Report, TaskFilter, Turned
from taskyard.stores.sqlite.core import SqliteCore
from taskyard.stores.sqlite.place import Guarded, connect, migrate, prepare_folder, typed_errors
from taskyard.stores.sqlite.reader import SqliteReader
from taskyard.stores.sqlite.sidecar import Sidecar, Watch, WriteTurn
from taskyard.stores.sqlite.writer import Writer

T = TypeVar("T")

APPLY_AT_MOST = 500
NODE = "n-"
POLL_S = 1.0
"""How often a quiet process looks whether others have written, should a hint have been lost."""


def boot_id() -> str:
    """What changes with every start of the machine; empty where that cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class SqliteStore:
    def __init__(self, path: str | Path, *, clock: Clock, synchronous: str = "FULL", vfs: str | None = None) -> None:
        """`synchronous="NORMAL"` is faster and may lose the last commits in a power cut; `vfs` is for tests."""
        self.path = Path(path).absolute()
        self._clock = clock
        self._synchronous = synchronous
        self._vfs = vfs
        self._pid = os.getpid()
        self._writer: Writer | None = None
        self._changed: Callable[[], None] | None = None
        self._nodes_changed: Callable[[], None] | None = None
        self._poll: asyncio.TimerHandle | None = None
        self._joined: set[str] = set()
        self._commits = 0

    # --- opening and closing ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._threads = ThreadPoolExecutor(1, "taskyard-reader")
        self._loop = asyncio.get_running_loop()
        try:
            await self._loop.run_in_executor(self._threads, self._open)
        except BaseException:
            self._threads.shutdown(wait=False)
            raise

    def _open(self) -> None:
        folder = prepare_folder(self.path)
        with typed_errors(self.path), ExitStack() as undo:
            turn = WriteTurn(folder)
            undo.callback(turn.close)
            with turn.taken():
                conn = connect(self.path, synchronous=self._synchronous, vfs=self._vfs, write=True)
                undo.callback(conn.close)
                migrate(conn, self.path)
                self._reader = self._read_only()
                undo.callback(self._reader.close)
                self._poller = self._read_only()
                undo.callback(self._poller.close)
                self._version = self._poller.data_version()
            self._sidecar = Sidecar(folder)
            undo.pop_all()
        self._conn, self._turn = conn, turn
        self._guard = Guarded(self.path)
        self._watch = Watch(folder)
        self._core = SqliteCore(conn, self._clock)
        self._writer = Writer(self._core, conn, turn, committed=self._on_commit)

    def _read_only(self) -> SqliteReader:
        return SqliteReader(connect(self.path, synchronous=self._synchronous, vfs=self._vfs, write=False))

    async def close(self) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        if self._poll is not None:
            self._poll.cancel()
            if self._watch.fd >= 0:
                self._loop.remove_reader(self._watch.fd)
        await self._loop.run_in_executor(self._threads, self._close, writer)
        self._threads.shutdown(wait=True)

    def _close(self, writer: Writer) -> None:
        writer.stop()
        self._watch.close()
        self._sidecar.close(keep={_file_of(incarnation) for incarnation in self._joined})
        self._reader.close()
        self._poller.close()
        self._conn.close()
        self._turn.close()

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self, run: Callable[[], T], peek: Callable[[], T | None] | None = None) -> asyncio.Future[T]:
        if os.getpid() != self._pid:
            raise ForkedStore
        if self._writer is None:
            raise NotOpen("the store is not open; use it inside `async with yard`")
        return self._writer.submit(run, peek)

    async def turn(
        self,
        node: str,
        *,
        settles: Sequence[tuple[Claim, Move]] = (),
        adds: Sequence[Add] = (),
        reports: Sequence[Report] = (),
        demand: Demand | None = None,
    ) -> Turned:
        only_asks = not (settles or adds or reports)
        return await self._write(
            partial(self._core.turn, node, settles, adds, reports, demand),
            partial(self._core.peek, demand) if only_asks else None,
        )

    async def apply(self, uuids: Sequence[str], command: Command) -> list[Applied]:
        applied: list[Applied] = []
        for start in range(0, len(uuids), APPLY_AT_MOST):
            chunk = uuids[start : start + APPLY_AT_MOST]
            applied += await self._write(partial(self._core.apply, chunk, command))
        return applied

    async def set_queue(self, settings: QueueSettings) -> None:
        await self._write(partial(self._core.set_queue, settings))

    async def join(self, node: Node) -> None:
        # The lock first: from the moment the others can see the node, they can also see that it lives.
        self._sidecar.appear(_file_of(node.incarnation))
        self._joined.add(node.incarnation)
        await self._write(partial(self._core.join, node, boot_id()))

    async def leave(self, incarnation: str) -> None:
        await self._write(partial(self._core.leave, incarnation))
        self._joined.discard(incarnation)
        self._sidecar.vanish(_file_of(incarnation))

    async def rescue(self, incarnation: str) -> list[str]:
        rescued = await self._write(partial(self._core.rescue, incarnation))
        self._sidecar.bury(_file_of(incarnation))
        return rescued

    async def prune(self, *, finished_before: datetime, limit: int = 500) -> int:
        return await self._write(partial(self._core.prune, finished_before, limit))

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self, run: Callable[[], T]) -> T:
        if os.getpid() != self._pid:
            raise ForkedStore
        if self._writer is None:
            raise NotOpen("the store is not open; use it inside `async with yard`")
        with typed_errors(self.path):
            return await self._loop.run_in_executor(self._threads, run)

    async def signals(self, node: str) -> list[str]:
        return await self._read(partial(self._reader.signals, node))

    async def outcomes(self, uuids: Sequence[str]) -> list[Outcome | None]:
        return await self._read(partial(self._reader.outcomes, uuids))

    async def events(self, *, after: int, limit: int = 1000) -> EventPage:
        return await self._read(partial(self._reader.events, after, limit))

    async def find(self, uuid: str) -> TaskRecord | None:
        return await self._read(partial(self._reader.find, uuid))

    async def list_uuids(self, fragment: str, *, limit: int = 10) -> list[str]:
        return await self._read(partial(self._reader.list_uuids, fragment, limit))

    async def list_tasks(
        self, where: TaskFilter = ANY, *, before_id: int | None = None, limit: int = 100
    ) -> list[TaskRecord]:
        return await self._read(partial(self._reader.list_tasks, where, before_id, limit))

    async def list_runs(self, uuid: str) -> list[Run]:
        return await self._read(partial(self._reader.list_runs, uuid))

    async def count(self) -> dict[tuple[str, TaskState], int]:
        return await self._read(self._reader.count)

    async def nodes(self) -> list[Node]:
        return [node for node, _ in await self._read(self._reader.nodes)]

    async def dead_nodes(self) -> list[str]:
        dead = await self._read(self._find_dead)
        if self._poll is not None and self._writer is not None:
            # A node asks this once a second. Looking for foreign writes on the same occasion saves it a wake-up of its
            # own, so the timer is put off until after the next time.
            self._poll.cancel()
            self._poll = self._loop.call_later(POLL_S * 1.5, self._on_poll)
            self._find_foreign_writes()
        return dead

    def _find_dead(self) -> list[str]:
        self._sidecar.look_around()
        return [node.incarnation for node, boot in self._reader.nodes() if self._is_dead(node, boot)]

    def _is_dead(self, node: Node, boot: str) -> bool:
        dead = self._sidecar.is_dead(_file_of(node.incarnation))
        if dead is not None:
            return dead
        # Its file was removed by hand. After a restart of the machine it is dead for certain; before that, ask for its
        # process, and rather leave a dead node unrescued (doctor names it) than take a live one for dead.
        return boot != boot_id() or not os.path.exists(f"/proc/{node.pid}")

    # --- hearing of others --------------------------------------------------------------------------------------------

    def watch(self, changed: Callable[[], None], nodes_changed: Callable[[], None]) -> None:
        self._changed, self._nodes_changed = changed, nodes_changed
        self._seen_commits = self._commits
        if self._watch.fd >= 0:
            self._loop.add_reader(self._watch.fd, self._on_hint)
        self._poll = self._loop.call_later(POLL_S, self._on_poll)

    def _on_hint(self) -> None:
        others = {name for name in self._watch.read() if not self._sidecar.is_mine(name)}
        if not others:
            return
        self._sidecar.look_around()
        if self._changed is not None:
            self._changed()
        # A commit is told through a process's own file; that of a node is only made, removed, or closed by its death.
        if self._nodes_changed is not None and any(name.startswith(NODE) for name in others):
            self._nodes_changed()

    def _on_poll(self) -> None:
        self._poll = self._loop.call_later(POLL_S, self._on_poll)
        self._find_foreign_writes()

    def _find_foreign_writes(self) -> None:
        try:
            version = self._poller.data_version()
        except apsw.Error:
            return  # busy or failing: the next call of any verb says so to whoever made it
        # The poller's version moves with our own writer as well, which tells of foreign writes by itself.
        if version != self._version and self._commits == self._seen_commits and self._changed is not None:
            self._changed()
        self._version, self._seen_commits = version, self._commits

    def _on_commit(self, foreign: bool) -> None:
        """On the writer's thread, after each commit."""
        self._commits += 1
        if not self._sidecar.is_alone():
            self._sidecar.touch()
        if foreign and self._changed is not None:
            with suppress(RuntimeError):  # the loop was closed under us
                self._loop.call_soon_threadsafe(self._changed)


def _file_of(incarnation: str) -> str:
    return NODE + incarnation
