"""What only the SQLite store promises: plans, locks, hints and files."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from taskyard.errors import DuplicateTask, StoreBusy, StoreReplaced
from taskyard.model.command import Cancel, Retry, SetPriority
from taskyard.model.execution import ErrorKind, ExecutionError, Progress
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.node import Node
from taskyard.model.notes import Note
from taskyard.model.order import Priority
from taskyard.model.queue import QueueOrder, QueueSettings, SetConcurrency
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, Dedupe, DedupeScope, TaskRecord, new_uuid
from taskyard.model.why import Reason, explain_wait
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Add, Report
from taskyard.stores.sqlite import SqliteStore, place
from taskyard.stores.sqlite import store as store_module
from tests.scenario.processes import run_python

ROOM = Demand(10, {"work": 10})


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(folder / "work.db", clock=SystemClock())
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def a_node(name: str) -> Node:
    return Node(incarnation=name, name=name, pid=os.getpid(), host="here")


def a_record(**changes: Any) -> TaskRecord:
    now = datetime.now(UTC)
    fields = {"uuid": new_uuid(), "consumer": "work", "due_at": now, "created_at": now, "updated_at": now, **changes}
    return TaskRecord(**fields)


async def start(store: SqliteStore, node: str, *records: TaskRecord) -> list[Claim]:
    return (await store.turn(node, adds=[Add(records)], demand=ROOM)).claims


def looking(conn: apsw.Connection, statements: dict[str, Any]) -> None:
    def trace(_: Any, sql: str, bindings: Any) -> bool:
        statements[sql] = bindings or ()
        return True

    conn.exec_trace = trace


async def everything_once(store: SqliteStore) -> None:
    """Every write the store knows, once, with a key, a retry, a report and a cancel among them."""
    now = datetime.now(UTC)
    late = a_record(due_at=now + timedelta(hours=1))
    claims = await start(store, "n", a_record(key="k"), a_record(key="k"), a_record(), a_record(dedupe_slot="s"), late)
    error = ExecutionError(kind=ErrorKind.RUNTIME, message="no")
    ends = [Move.completed(at=now), Move.failed(at=now, error=error), Move.retrying(at=now, due_at=now, error=error)]
    settles = list(zip(claims, ends, strict=False))
    busy = a_record(key="k", dedupe_slot="t", dedupe_scope=DedupeScope.KEY_IDLE)
    (refused,) = (await store.turn("n", adds=[Add([busy], Dedupe.REFUSE)])).added
    assert isinstance(refused, DuplicateTask)
    await store.turn("n", settles=settles, reports=[Report(claims[0], Progress(0.5), Note.remark("half"))], demand=ROOM)
    await store.apply([claims[1].uuid], Retry())
    await store.apply([late.uuid], SetPriority(Priority.HIGH))
    await store.apply([late.uuid], Cancel("enough"))
    await store.set_queue(QueueSettings(name="default", per_key=2))
    await store.turn("n", demand=ROOM)
    await store.rescue("n")
    await store.prune(finished_before=now + timedelta(hours=1))


async def test_no_write_scans_the_table(tmp_path: Path) -> None:
    """Whatever a transaction does to tasks, it finds them by an index: its cost does not grow with the backlog."""
    statements: dict[str, Any] = {}
    async with opened(tmp_path) as store:
        looking(store._conn, statements)
        await store.join(a_node("n"))
        await everything_once(store)
        store._conn.exec_trace = None
    conn = place.connect(tmp_path / "work.db", synchronous="FULL", vfs=None, write=False)
    scans = [
        f"{step[3]}: {sql}"
        for sql, bindings in statements.items()
        if re.match(r"SELECT|UPDATE|DELETE", sql)
        for step in conn.execute(f"EXPLAIN QUERY PLAN {sql}", bindings)
        if re.match(r"SCAN task(?! USING)", str(step[3]))
    ]
    conn.close()
    assert len(statements) > 15
    assert scans == []


async def test_why_a_page_of_tasks_waits_takes_five_queries(tmp_path: Path) -> None:
    """To list a hundred tasks, of all kinds that wait, and say why each does, takes at most five queries; none of them
    walks the table."""
    asked: list[tuple[str, Any]] = []
    async with opened(tmp_path) as store:
        await store.join(msgspec.structs.replace(a_node("n"), consumers=("work",)))
        for order in QueueOrder:
            await store.set_queue(QueueSettings(name=order, order=order, concurrency=1))
        tasks = [
            a_record(
                queue=order,
                bucket=str(n % 3),
                key=str(n % 7) if n % 2 else None,
                consumer="work" if n else "unheard of",
            )
            for order in QueueOrder
            for n in range(30)
        ]
        late = [a_record(due_at=datetime.now(UTC) + timedelta(hours=1)) for _ in range(5)]
        after = [a_record() for _ in late]
        waits = {child.uuid: [parent.uuid] for child, parent in zip(after, late, strict=True)}
        await store.turn("n", adds=[Add([*tasks, *late, *after], after=waits)], demand=ROOM)
        await store.control("fifo", SetConcurrency(2), by="ann")
        store._lister.look(lambda conn: looking_at_each(conn, asked))
        page = await store.list_tasks(limit=100)
        found = [explain_wait(record, scene) for scene in [await store.scene(page)] for record in page]
        store._lister.look(lambda conn: setattr(conn, "exec_trace", None))
        await store.rescue("n")
    reasons = {why.reason for why in found if why is not None}
    assert len(page) == 100
    assert reasons >= {Reason.QUEUE_FULL, Reason.NO_NODE, Reason.KEY_BUSY, Reason.SCHEDULED}
    assert reasons >= {Reason.DEPENDENCY, Reason.HEAD_OF_LINE}
    assert 1 < len(asked) <= 5
    conn = place.connect(tmp_path / "work.db", synchronous="FULL", vfs=None, write=False)
    steps = [str(step[3]) for sql, values in asked for step in conn.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
    conn.close()
    walks = [step for step in steps[1:] if re.match(r"SCAN task(?! USING)", step)]
    assert walks == []


def looking_at_each(conn: apsw.Connection, asked: list[tuple[str, Any]]) -> None:
    def trace(_: Any, sql: str, bindings: Any) -> bool:
        asked.append((sql, bindings or ()))
        return True

    conn.exec_trace = trace


async def test_a_node_that_leaves_with_tasks_is_rescued(tmp_path: Path) -> None:
    """A node that goes while it holds tasks is found dead by the others, and its tasks run again."""
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        await one.join(a_node("one"))
        await two.join(a_node("two"))
        (held,) = await start(one, "one", a_record())
        await one.leave("one")
        assert await two.dead_nodes() == ["one"]
        assert await two.rescue("one") == [held.uuid]
        assert [again.uuid for again in (await two.turn("two", demand=ROOM)).claims] == [held.uuid]
        await two.rescue("two")


async def test_a_foreign_commit_is_heard_without_inotify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of another process right after one of ours is still heard of by the poll."""
    monkeypatch.setattr(store_module, "POLL_S", 0.05)
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        one._watch.close()
        heard = asyncio.Event()
        one.watch(lambda _: heard.set())
        await one.turn("", adds=[Add([a_record()])])
        await two.turn("", adds=[Add([a_record()])])
        async with asyncio.timeout(5):
            await heard.wait()
        heard.clear()
        await two.turn("", adds=[Add([a_record()])])
        async with asyncio.timeout(5):
            await heard.wait()
        assert heard.is_set()


async def test_a_write_turn_that_is_not_given_up_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When another process keeps the write turn, callers hear `StoreBusy` in time, nothing is written, closing ends."""
    monkeypatch.setattr(store_module, "BUSY_MS", 200)
    monkeypatch.setattr(store_module, "POLL_S", 0.05)
    monkeypatch.setattr(store_module, "CLOSE_S", 0.2)
    async with opened(tmp_path) as store:
        store.watch(lambda _: None)
        with open(tmp_path / "work.db-yard" / "turn", "r+") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            record = a_record()
            with pytest.raises(StoreBusy):
                await store.turn("", adds=[Add([record])])
            assert await store.find(record.uuid) is None
        await store.turn("", adds=[Add([record])])
        assert await store.find(record.uuid) is not None
        with open(tmp_path / "work.db-yard" / "turn", "r+") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            waiting = asyncio.ensure_future(store.turn("", adds=[Add([a_record()])]))
            await asyncio.sleep(0)
            await store.close()
            with pytest.raises(StoreBusy):
                await waiting


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    path.rename(path.with_name("kept.db"))
    path.touch()


def remove_log(path: Path) -> None:
    path.with_name(f"{path.name}-wal").unlink()


async def add_for_ever(store: SqliteStore) -> None:
    while True:
        await store.turn("", adds=[Add([a_record()])])


@pytest.mark.parametrize("spoil", [remove, replace, remove_log])
async def test_a_file_that_is_gone_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    """A database that is removed or replaced under an open store is noticed, told once, and takes nothing more."""
    monkeypatch.setattr(store_module, "POLL_S", 0.02)
    kept = a_record()
    async with opened(tmp_path) as store:
        store.watch(lambda _: None)
        await store.turn("", adds=[Add([kept])])
        spoil(tmp_path / "work.db")
        with pytest.raises(StoreReplaced, match="restart everything that uses the store"):
            await asyncio.wait_for(add_for_ever(store), 10)
        assert await store.find(kept.uuid) is not None
    assert [record.levelname for record in caplog.records if "was removed or replaced" in record.message] == ["ERROR"]


async def test_a_log_that_was_removed_is_explained(tmp_path: Path) -> None:
    """Whoever opens a store whose log was removed under another process is told what to do about it."""
    async with opened(tmp_path) as store:
        await store.turn("", adds=[Add([a_record()])])
        remove_log(tmp_path / "work.db")
        said = run_python(OPEN, str(tmp_path / "work.db"))
    assert "restart everything that uses the store" in said


OPEN = """
import asyncio, sys
from taskyard import StoreError
from taskyard.ports.clock import SystemClock
from taskyard.stores.sqlite import SqliteStore

async def main():
    try:
        await SqliteStore(sys.argv[1], clock=SystemClock()).open()
    except StoreError as error:
        print(error)

asyncio.run(main())
"""


async def test_what_a_dead_joiner_left_is_removed(tmp_path: Path) -> None:
    """The file of a node that died before it had joined does not stay for ever."""
    async with opened(tmp_path) as store:
        orphan = tmp_path / "work.db-yard" / "n-dead"
        orphan.touch()
        await store.dead_nodes()
        assert not orphan.exists()


async def test_one_bad_cell_does_not_stop_a_lane(tmp_path: Path) -> None:
    """A cell that cannot be read is left out; its task and those behind it are still started."""
    first, second = a_record(), a_record()
    async with opened(tmp_path) as store:
        await store.turn("", adds=[Add([first, second])])
        await store._write(
            lambda: store._conn.execute(
                "UPDATE task SET progress = '{\"message\": 42}', timeout_s = 9e999 WHERE id = 1"
            )
        )
        await store.join(a_node("n"))
        claims = (await store.turn("n", demand=ROOM)).claims
        assert [claim.uuid for claim in claims] == [first.uuid, second.uuid]
        assert claims[0].record.progress is None
        await store.rescue("n")


async def test_arguments_too_large_for_one_value_are_still_started(tmp_path: Path) -> None:
    """Tasks whose arguments together exceed what SQLite lets one value hold are started all the same."""
    records = [a_record(args='"' + "x" * 2000 + '"') for _ in range(5)]
    async with opened(tmp_path) as store:
        await store.join(a_node("n"))
        await store.turn("", adds=[Add(records)])
        store._conn.limit(apsw.SQLITE_LIMIT_LENGTH, 6000)
        claims = (await store.turn("n", demand=ROOM)).claims
        store._conn.limit(apsw.SQLITE_LIMIT_LENGTH, 1_000_000_000)
        assert [claim.uuid for claim in claims] == [record.uuid for record in records]
        assert {(await store.find(record.uuid)).state for record in records} == {TaskState.RUNNING}  # type: ignore[union-attr]
        await store.rescue("n")


async def test_one_bad_add_fails_alone(tmp_path: Path) -> None:
    """A record that cannot be written as UTF-8 is refused, and those submitted with it are stored."""
    good, bad = a_record(), a_record(key="\udc80")
    async with opened(tmp_path) as store:
        turned = await store.turn("", adds=[Add([bad]), Add([good])])
        assert isinstance(turned.added[0], Exception)
        assert await store.find(good.uuid) is not None
        assert sum((await store.count()).values()) == 1


@pytest.mark.parametrize("write", [True, False])
def test_every_setting_of_a_connection_takes_effect(tmp_path: Path, write: bool):
    """Also those that are written behind a setting which answers with a row."""
    place.connect(tmp_path / "work.db", synchronous="FULL", vfs=None, write=True).close()
    conn = place.connect(tmp_path / "work.db", synchronous="FULL", vfs=None, write=write)
    wanted = {"mmap_size": 0, "temp_store": 2, "trusted_schema": 0, "query_only": int(not write)}
    if write:
        wanted |= {"synchronous": 2, "journal_size_limit": place.WAL_KEPT_BYTES, "wal_autocheckpoint": 0}
    found = {name: conn.execute(f"PRAGMA {name}").get for name in wanted}
    conn.close()
    assert found == wanted
