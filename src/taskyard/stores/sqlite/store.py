"""The port over one SQLite file. Writes go to the writer thread, reads to a reader thread; nothing blocks the loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import apsw
import msgspec

from taskyard.errors import ForkedStore, InvalidInput, NotOpen, StoreReplaced
from taskyard.model.attempt import Artifact, AttemptArtifact, AttemptLine
from taskyard.model.audit import ALL_ENTRIES, AuditEntry, AuditFilter
from taskyard.model.catalogue import ConsumerSpec, StoredSpec
from taskyard.model.command import Command
from taskyard.model.event import EventPage
from taskyard.model.failures import FailureGroup
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.node import Node, NodeStatus
from taskyard.model.queue import QueueCommand, QueueSettings, QueueStatus
from taskyard.model.queue_order import QueueSnapshot
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, Claim, Outcome, TaskRecord
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.model.why import Scene
from taskyard.ports.clock import Clock
from taskyard.ports.store import Add, Applied, BlockedGroup, News, Report, Schema, Signals, Turned
from taskyard.stores.sqlite.audit import list_audit
from taskyard.stores.sqlite.catalogue import list_specs
from taskyard.stores.sqlite.core import SqliteCore
from taskyard.stores.sqlite.devices import DeviceVerbs
from taskyard.stores.sqlite.place import (
    BUSY_MS,
    Guarded,
    OpenFiles,
    check_place,
    connect,
    find_schema,
    migrate,
    prepare_folder,
    typed_errors,
)
from taskyard.stores.sqlite.reader import SqliteReader
from taskyard.stores.sqlite.scene import find_scene
from taskyard.stores.sqlite.schedules import ScheduleVerbs
from taskyard.stores.sqlite.sidecar import NODE, Sidecar, Watch, WriteTurn, node_file_name
from taskyard.stores.sqlite.snapshot import find_medians, find_snapshot
from taskyard.stores.sqlite.writer import Writer

log = logging.getLogger("taskyard")

T = TypeVar("T")

APPLY_AT_MOST = 500

CLOSE_S = 5.0
"""How long closing waits for the write turn of a process that does not give it up."""

POLL_S = 1.0
"""How often a quiet process looks whether others have written, should a hint have been lost."""


_told: set[Path] = set()
"""Files whose loss was told: a process may have several stores on one."""


def boot_id() -> str:
    """What changes with every start of the machine; empty where that cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class SqliteStore(ScheduleVerbs, DeviceVerbs):
    def __init__(self, path: str | Path, *, clock: Clock, synchronous: str = "FULL", vfs: str | None = None) -> None:
        """`synchronous="NORMAL"` is faster and may lose the last commits in a power cut; `vfs` is for tests."""
        # As the kernel knows it: by two names, a file would have two folders beside it, and two writers at once.
        self.path = Path(os.path.realpath(path))
        self._clock = clock
        self._synchronous = synchronous
        self._vfs = vfs
        self._pid = 0
        self._writer: Writer | None = None
        self._heard: Callable[[News], None] | None = None
        self._poll: asyncio.TimerHandle | None = None
        self._joined: set[str] = set()
        self._lost: str | None = None

    # --- opening and closing ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._writer is not None:
            raise InvalidInput(f"the store {self.path} is open already; make another for another yard")
        self._pid = os.getpid()
        self._threads = ThreadPoolExecutor(1, "taskyard-reader")
        self._people = ThreadPoolExecutor(1, "taskyard-lists")
        self._loop = asyncio.get_running_loop()
        opening = self._loop.run_in_executor(self._threads, self._open)
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            with suppress(Exception):
                await opening
                await self.close()
            raise
        except BaseException:
            self._shut_threads()
            raise

    def _shut_threads(self, *, wait: bool = False) -> None:
        self._threads.shutdown(wait=wait)
        self._people.shutdown(wait=wait)

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
                self._lister = self._read_only()
                undo.callback(self._lister.close)
                self._poller = self._read_only(busy_ms=0)
                undo.callback(self._poller.close)
                self._version = self._poller.data_version()
                self._files, self._lost = OpenFiles(self.path), None
            self._sidecar = Sidecar(folder)
            undo.pop_all()
        self._conn, self._turn = conn, turn
        _told.discard(self.path)
        self._guard = Guarded(self.path)
        self._watch = Watch(folder)
        self._core = SqliteCore(conn, self._clock)
        self._writer = Writer(self._core, conn, turn, committed=self._on_commit, heard_others=self._on_heard)

    async def schema(self) -> Schema:
        return await asyncio.to_thread(self._find_schema)

    def _find_schema(self) -> Schema:
        with typed_errors(self.path):
            check_place(self.path)
            return find_schema(self.path)

    async def migrate(self) -> Schema:
        return await asyncio.to_thread(self._migrate)

    def _migrate(self) -> Schema:
        folder = prepare_folder(self.path)
        with (
            typed_errors(self.path),
            closing(WriteTurn(folder)) as turn,
            turn.taken(),
            closing(connect(self.path, synchronous=self._synchronous, vfs=self._vfs, write=True)) as conn,
        ):
            return migrate(conn, self.path)

    def _read_only(self, busy_ms: int = BUSY_MS) -> SqliteReader:
        conn = connect(self.path, synchronous=self._synchronous, vfs=self._vfs, write=False)
        conn.set_busy_timeout(busy_ms)
        return SqliteReader(conn)

    async def close(self) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        if self._poll is not None:
            self._poll.cancel()
            if self._watch.fd >= 0:
                self._loop.remove_reader(self._watch.fd)
        self._look_for_files()
        await self._loop.run_in_executor(self._threads, self._close, writer)
        self._shut_threads(wait=True)

    def _close(self, writer: Writer) -> None:
        is_stopped = writer.stop(CLOSE_S)
        self._watch.close()
        self._sidecar.close(keep={node_file_name(incarnation) for incarnation in self._joined})
        self._people.submit(self._lister.close).result()
        self._reader.close()
        self._poller.close()
        if is_stopped:
            self._conn.close()
            self._turn.close()
        else:
            log.error("another process keeps the write turn of %s; see `taskyard doctor`", self.path)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self, run: Callable[[], T], peek: Callable[[], T | None] | None = None) -> asyncio.Future[T]:
        if os.getpid() != self._pid:
            raise ForkedStore
        if self._writer is None:
            raise NotOpen("the store is not open; use it inside `async with yard`")
        if self._lost is not None:
            raise StoreReplaced(str(self.path), self._lost)
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

    async def preview(self, demand: Demand) -> list[TaskRecord]:
        look = partial(self._core.preview, demand)
        return await self._write(look, look)  # between two transactions, where what the writer knows may be read

    async def list_lanes(self) -> list[str]:
        return await self._write(self._core.list_lanes, self._core.list_lanes)

    async def list_blockers(self) -> list[BlockedGroup]:
        return await self._read(self._lister.list_blockers, people=True)

    async def apply(
        self,
        uuids: Sequence[str],
        command: Command,
        *,
        by: str = "",
        where: TaskFilter = ALL_TASKS,
        audit: AuditEntry | None = None,
    ) -> list[Applied]:
        applied: list[Applied] = []
        for start in range(0, len(uuids), APPLY_AT_MOST):
            chunk = uuids[start : start + APPLY_AT_MOST]
            applied += await self._write(partial(self._core.apply, chunk, command, by, where, audit))
        return applied

    async def set_queue(self, settings: QueueSettings) -> None:
        await self._write(partial(self._core.set_queue, settings))

    async def control(
        self, queue: str, command: QueueCommand, *, by: str, audit: AuditEntry | None = None
    ) -> QueueStatus:
        said = await self._write(partial(self._core.control, queue, command, by, audit))
        (status,) = await self._read(partial(self._lister.queues, queue), people=True)
        return msgspec.structs.replace(status, control=said)

    async def join(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        # The lock first: from the moment the others can see the node, they can also see that it lives.
        await self._read(partial(self._sidecar.appear, node_file_name(node.incarnation)))
        self._joined.add(node.incarnation)
        await self._write(partial(self._core.join, node, specs, boot_id()))

    async def describe(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        await self._write(partial(self._core.describe, node, specs))

    async def list_audit(
        self, where: AuditFilter = ALL_ENTRIES, *, before_id: int | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        read = partial(list_audit, where=where, before_id=before_id, limit=limit)
        return await self._read(partial(self._lister.look, read), people=True)

    async def list_specs(self) -> list[StoredSpec]:
        return await self._read(partial(self._lister.look, list_specs), people=True)

    async def leave(self, incarnation: str) -> None:
        has_left = await self._write(partial(self._core.leave, incarnation))
        self._joined.discard(incarnation)
        if has_left:
            self._sidecar.vanish(node_file_name(incarnation))
        else:
            log.warning("node %s leaves while it holds tasks; the others will take them back", incarnation[:8])
            self._sidecar.release(node_file_name(incarnation))

    async def drain(self, incarnation: str, *, on: bool = True, audit: AuditEntry | None = None) -> None:
        await self._write(partial(self._core.drain, incarnation, on, audit))

    async def rescue(self, incarnation: str) -> list[str]:
        rescued = await self._write(partial(self._core.rescue, incarnation))
        self._sidecar.bury(node_file_name(incarnation))
        return rescued

    async def find_end(self, n: int, *, failed: bool | None = None) -> datetime | None:
        return await self._read(partial(self._lister.find_end, n, failed), people=True)

    async def prune(
        self,
        *,
        finished_before: datetime,
        limit: int = 500,
        failed: bool | None = None,
        audit: AuditEntry | None = None,
    ) -> int:
        return await self._write(partial(self._core.prune, finished_before, limit, failed, audit))

    async def put_audit(self, entry: AuditEntry) -> None:
        await self._write(partial(self._core.put_audit, entry))

    async def prune_audit(self, before: datetime, *, limit: int = 500) -> int:
        return await self._write(partial(self._core.prune_audit, before, limit))

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self, run: Callable[[], T], *, people: bool = False) -> T:
        """On the reader's thread; what people ask, which may take long, on one of its own."""
        if os.getpid() != self._pid:
            raise ForkedStore
        if self._writer is None:
            raise NotOpen("the store is not open; use it inside `async with yard`")
        with typed_errors(self.path):
            return await self._loop.run_in_executor(self._people if people else self._threads, run)

    async def _look(self, run: Callable[[apsw.Connection], T]) -> T:
        return await self._read(partial(self._reader.look, run))

    async def signals(self, node: str) -> Signals:
        return await self._read(partial(self._reader.signals, node))

    async def outcomes(self, uuids: Sequence[str]) -> list[Outcome | None]:
        return await self._read(partial(self._reader.outcomes, uuids))

    async def events(self, *, after: int, limit: int = 1000) -> EventPage:
        return await self._read(partial(self._reader.events, after, limit))

    async def find(self, uuid: str) -> TaskRecord | None:
        return await self._read(partial(self._lister.find, uuid), people=True)

    async def find_tasks(self, uuids: Sequence[str]) -> dict[str, TaskRecord]:
        return await self._read(partial(self._lister.find_tasks, uuids), people=True)

    async def list_uuids(self, fragment: str, *, limit: int = 10) -> list[str]:
        return await self._read(partial(self._lister.list_uuids, fragment, limit), people=True)

    async def list_tasks(
        self, where: TaskFilter = ALL_TASKS, *, before_id: int | None = None, limit: int = 100
    ) -> list[TaskRecord]:
        return await self._read(partial(self._lister.list_tasks, where, before_id, limit), people=True)

    async def list_ids(
        self, where: TaskFilter = ALL_TASKS, *, before_id: int | None = None, limit: int = 500
    ) -> list[tuple[int, str]]:
        return await self._read(partial(self._lister.list_ids, where, before_id, limit), people=True)

    async def list_origins(self, uuids: Sequence[str]) -> set[str]:
        return await self._read(partial(self._lister.list_origins, uuids), people=True)

    async def list_known(self, uuids: Sequence[str]) -> set[str]:
        return await self._read(partial(self._lister.list_known, uuids), people=True)

    async def list_attempts(self, uuid: str) -> list[Attempt]:
        return await self._read(partial(self._lister.list_attempts, uuid), people=True)

    async def list_lines(self, uuid: str, *, token: int | None = None, limit: int = 1000) -> list[AttemptLine]:
        return await self._read(partial(self._lister.list_lines, uuid, token, limit), people=True)

    async def list_artifacts(self, uuid: str) -> list[AttemptArtifact]:
        return await self._read(partial(self._lister.list_artifacts, uuid), people=True)

    async def find_artifact(self, uuid: str, token: int, name: str) -> Artifact | None:
        return await self._read(partial(self._lister.find_artifact, uuid, token, name), people=True)

    async def scene(self, records: Sequence[TaskRecord]) -> Scene:
        return await self._read(partial(self._find_scene, records), people=True)

    def _find_scene(self, records: Sequence[TaskRecord]) -> Scene:
        self._sidecar.look_around()
        return self._lister.look(partial(find_scene, records, now=self._clock.now(), is_dead=self._is_dead))

    async def queue_snapshot(self, queue: str, *, limit: int) -> QueueSnapshot:
        return await self._read(partial(self._find_snapshot, queue, limit), people=True)

    def _find_snapshot(self, queue: str, limit: int) -> QueueSnapshot:
        self._sidecar.look_around()
        return self._lister.look(partial(find_snapshot, queue, limit, now=self._clock.now(), is_dead=self._is_dead))

    async def median_run_s(self, consumers: Sequence[str]) -> dict[str, float]:
        return await self._read(partial(self._lister.look, partial(find_medians, consumers)), people=True)

    async def failures(self, where: TaskFilter = ALL_TASKS, *, limit: int = 100) -> list[FailureGroup]:
        return await self._read(partial(self._lister.failures, where, limit), people=True)

    async def count(self) -> dict[tuple[str, TaskState], int]:
        return await self._read(self._lister.count, people=True)

    async def queues(self) -> list[QueueStatus]:
        return await self._read(self._lister.queues, people=True)

    async def count_group(self, group: str) -> dict[TaskState, int]:
        return await self._read(partial(self._lister.count_group, group), people=True)

    async def nodes(self) -> list[NodeStatus]:
        return [status for status, _ in await self._read(self._reader.nodes)]

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
        nodes = self._reader.nodes()
        self._sidecar.bury_strangers({node_file_name(status.node.incarnation) for status, _ in nodes})
        return [status.node.incarnation for status, boot in nodes if self._is_dead(status.node, boot)]

    def _is_dead(self, node: Node, boot: str) -> bool:
        dead = self._sidecar.is_dead(node_file_name(node.incarnation))
        if dead is not None:
            return dead
        # Its file was removed by hand. After a restart of the machine it is dead for certain; before that, ask for its
        # process, and rather leave a dead node unrescued (doctor names it) than take a live one for dead.
        return boot != boot_id() or not os.path.exists(f"/proc/{node.pid}")

    # --- hearing of others --------------------------------------------------------------------------------------------

    def watch(self, heard: Callable[[News], None]) -> None:
        self._heard = heard
        if self._watch.fd >= 0:
            self._loop.add_reader(self._watch.fd, self._on_hint)
        self._poll = self._loop.call_later(POLL_S, self._on_poll)

    def _on_hint(self) -> None:
        others = {name for name in self._watch.read() if not self._sidecar.is_mine(name)}
        if not others:
            return
        with suppress(OSError):  # said by whoever next asks for dead nodes
            self._sidecar.look_around()
        # A commit is told through a process's own file; that of a node is only made, removed, or closed by its death.
        if self._heard is not None:
            self._heard(News.NODES if any(name.startswith(NODE) for name in others) else News.CHANGED)

    def _on_poll(self) -> None:
        self._poll = self._loop.call_later(POLL_S, self._on_poll)
        self._find_foreign_writes()

    def _look_for_files(self) -> None:
        """Notice, and say once, that the file was removed or replaced; from then on nothing is acknowledged."""
        if self._lost is not None or (lost := self._files.find_lost()) is None:
            return
        self._lost = lost
        if self.path not in _told:
            _told.add(self.path)
            log.error("%s", StoreReplaced(str(self.path), lost))

    def _find_foreign_writes(self) -> None:
        self._look_for_files()
        if self._writer is not None:
            self._writer.give_up(BUSY_MS / 1000)
        try:
            version = self._poller.data_version()
        except apsw.Error:
            return  # busy or failing: the next call of any verb says so to whoever made it
        # The version moves with our own writer as well. A look too many each second costs little; telling the two apart
        # would miss a foreign commit right after one of ours. Only who is alone, and would have been told of a visitor,
        # knows that it was its own.
        is_own = self._watch.fd >= 0 and self._sidecar.is_alone()
        if version != self._version and not is_own and self._heard is not None:
            self._heard(News.CHANGED)
        self._version = version

    def _on_commit(self) -> None:
        """On the writer's thread, after each commit."""
        if not self._sidecar.is_alone():
            self._sidecar.touch()

    def _on_heard(self) -> None:
        """On the writer's thread, when another process is found to have written."""
        if self._heard is not None:
            with suppress(RuntimeError):  # the loop was closed under us
                self._loop.call_soon_threadsafe(self._heard, News.CHANGED)
