"""The end of a trial: a fresh node finishes what is left, and the store is held against the ledger."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import apsw

from taskyard import Yard
from taskyard.model.state import ENDED
from taskyard.testing.ledger import Stored, judge, read_store
from tests.torture.work import address_of, ledger_of, make_yard

DRAIN_S = 30.0
"""A store that is not empty by then has a task that never ends."""


def drain_and_judge(folder: Path, *, drain_s: float = DRAIN_S) -> tuple[list[str], dict[str, Stored]]:
    """Everything that is wrong with the store in `folder`, and what it holds, after a fresh node has run it empty."""
    ledger = ledger_of(folder)
    try:
        faults, stored = asyncio.run(drain(make_yard(folder, ledger), drain_s))
        faults += judge(ledger.entries(), stored)
    finally:
        ledger.close()
    return faults if address_of(folder).exists() else faults + check_file(folder / "work.db"), stored


async def drain(yard: Yard, drain_s: float = DRAIN_S) -> tuple[list[str], dict[str, Stored]]:
    """What is wrong with the counts, and what the store holds, when the yard has run it empty."""
    async with yard:
        await finish_all(yard, drain_s)
        stored = await read_store(yard.store)
        return await check_tally(yard, stored), stored


async def finish_all(yard: Yard, drain_s: float = DRAIN_S) -> None:
    """Wait until nothing is left to do, or `drain_s` has passed."""
    engine: Any = yard._engine
    engine._parts.rescuer.poke()  # a node looks for dead ones once a second; here everybody else is dead
    until = time.monotonic() + drain_s
    while time.monotonic() < until:
        if not any(count for (_, state), count in (await yard.store.count()).items() if state not in ENDED):
            return
        await asyncio.sleep(0.005)


async def check_tally(yard: Yard, stored: dict[str, Stored]) -> list[str]:
    """The counts that are kept beside the tasks are what counting them gives."""
    kept = {key: n for key, n in (await yard.store.count()).items() if n}
    counted = Counter((one.record.queue, one.record.state) for one in stored.values())
    return [] if kept == dict(counted) else [f"the tally says {kept}, the tasks are {dict(counted)}"]


def check_file(path: Path) -> list[str]:
    """SQLite's own opinion of the file. Only when no store has it open here."""
    conn = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        said = [str(line) for (line,) in conn.execute("PRAGMA integrity_check")]
    finally:
        conn.close()
    return [] if said == ["ok"] else [f"integrity_check: {line}" for line in said]
