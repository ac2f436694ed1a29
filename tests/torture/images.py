"""P2: a power cut at any moment. What was acknowledged before it is there afterwards, and the store works."""

import asyncio
import itertools
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from taskyard import TaskRecord, TaskState, Yard, current_run
from taskyard.ports.clock import SystemClock
from taskyard.stores.sqlite import SqliteStore
from taskyard.testing.crashvfs import Mark, Op, RecordingVFS, crash_image
from tests.torture.figures import Figures
from tests.torture.verdict import check_file, finish_all

_names = itertools.count(1)

IMAGES_A_RECORDING = 50


class Told:
    """What the world had been told before the cut."""

    def __init__(self, log: Sequence[Op]) -> None:
        marks = [op for op in log if isinstance(op, Mark)]
        self.acknowledged = {mark.value for mark in marks if mark.what == "acknowledged"}
        self.results: dict[str, int] = dict(mark.value for mark in marks if mark.what == "result")
        self.last_token = max((mark.value for mark in marks if mark.what == "token"), default=0)


# --- before the cut ---------------------------------------------------------------------------------------------------


def record(folder: Path, rng: random.Random, *, synchronous: str) -> list[Op]:
    """The log of a yard at work: opened, used and closed twice, with a log that is folded back often or seldom."""
    vfs = RecordingVFS(f"recording-{next(_names)}")
    try:
        # After a power cut the machine has another boot id: that is how the dead are told from the living.
        with patch("taskyard.stores.sqlite.store.boot_id", lambda: "before the cut"):
            checkpoint = rng.choice((5, 20, 100, 4000))
            for _ in range(2):
                asyncio.run(_work(folder / "work.db", vfs, rng, synchronous, checkpoint))
    finally:
        vfs.unregister()
    return vfs.log


async def _work(path: Path, vfs: RecordingVFS, rng: random.Random, synchronous: str, checkpoint: int) -> None:
    yard = _yard(SqliteStore(path, clock=SystemClock(), synchronous=synchronous, vfs=vfs.name), vfs)
    async with yard:
        store: Any = yard.store
        store._conn.execute(f"PRAGMA wal_autocheckpoint = {checkpoint}")
        await asyncio.gather(*(_submit(yard, vfs, random.Random(rng.random())) for _ in range(3)))


async def _submit(yard: Yard, vfs: RecordingVFS, rng: random.Random) -> None:
    for _ in range(8):
        text = "x" * rng.choice((10, 100, 5000))
        many = [{"text": text}] * rng.choice((1, 1, 1, 5))
        handles = await yard.submit_many("note", many, delay_s=rng.choice((0, 0, 0.02, 3600)))
        for handle in handles:
            vfs.mark("acknowledged", handle.uuid)
        if rng.random() < 0.5:
            try:
                vfs.mark("result", (handles[0].uuid, await handles[0].result(timeout_s=0.05)))
            except TimeoutError:
                continue


def _yard(store: SqliteStore, vfs: RecordingVFS | None = None) -> Yard:
    yard = Yard(store, max_running=8)
    yard.define_queue("default", auto_recover=1_000_000)

    @yard.consumer(concurrency=4)
    async def note(text: str) -> int:
        token = current_run().token
        if vfs is not None:
            vfs.mark("token", token)
            await asyncio.sleep(0.001)
        return token

    return yard


# --- after it ---------------------------------------------------------------------------------------------------------


def check(folder: Path, image: dict[str, bytes], told: Told) -> list[str]:
    """Everything that is wrong with an image, given what was told before the cut."""
    for name, content in image.items():
        (folder / name).write_bytes(content)
    path = folder / "work.db"
    if not path.exists():
        return [f"{len(told.acknowledged)} acknowledged, and no file"] if told.acknowledged else []
    faults = check_file(path)
    if faults:
        return faults
    return asyncio.run(_use(path, told))


async def _use(path: Path, told: Told) -> list[str]:
    # A day on: what was put off is due as well, and everything must end.
    yard = _yard(SqliteStore(path, clock=_Tomorrow()))
    async with yard:
        handle = await yard.submit("note", {"text": "after the cut"})
        await finish_all(yard, drain_s=20)
        stored = {record.uuid: record for record in await yard.store.list_tasks(limit=10_000)}
        faults = [f"{await handle.result()} is an old token"] if await handle.result() <= told.last_token else []
    return [*faults, *_compare(stored, told)]


class _Tomorrow(SystemClock):
    def now(self) -> datetime:
        return super().now() + timedelta(days=1)


def _compare(stored: dict[str, TaskRecord], told: Told) -> Iterator[str]:
    for uuid in told.acknowledged - stored.keys():
        yield f"task {uuid}: acknowledged, and lost"
    for uuid, result in told.results.items():
        kept = stored[uuid].result if uuid in stored else None
        if kept != str(result):
            yield f"task {uuid}: its result {result} was seen, and now is {kept}"
    for uuid, record in stored.items():
        if record.state is not TaskState.COMPLETED:
            yield f"task {uuid}: has not ended: {record.state}"


# --- many cuts --------------------------------------------------------------------------------------------------------


class Cuts(NamedTuple):
    images: int
    recordings: int
    acknowledged: int
    faults: list[str]


def make_cuts(where: Path, *, trials: int, seed: int, synchronous: str) -> Cuts:
    rng = random.Random(f"{seed} {synchronous}")
    faults: list[str] = []
    images = recordings = acknowledged = 0
    while images < trials:
        with _scratch(where) as folder:
            log = record(folder, rng, synchronous=synchronous)
        recordings += 1
        for _ in range(min(IMAGES_A_RECORDING, trials - images)):
            cut = _draw_cut(log, rng)
            told = Told(log[:cut])
            with _scratch(where) as folder:
                found = check(folder, crash_image(log, cut, rng), told)
            faults += [f"image {images}, cut at {cut} of {len(log)}: {fault}" for fault in found[:3]]
            images += 1
            acknowledged += len(told.acknowledged)
    return Cuts(images, recordings, acknowledged, faults)


@contextmanager
def _scratch(where: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: what a real disk would do is what the images are for."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else where) as folder:
        yield Path(folder)


def _draw_cut(log: list[Op], rng: random.Random) -> int:
    """Half of the cuts come right after an acknowledgement, when there was the least time to make it true."""
    acks = [at for at, op in enumerate(log, 1) if isinstance(op, Mark) and op.what == "acknowledged"]
    return rng.choice(acks) if rng.random() < 0.5 else rng.randint(0, len(log))


def run(where: Path, *, trials: int, seed: int) -> Figures:
    cuts = make_cuts(where, trials=trials, seed=seed, synchronous="FULL")
    note = f"{cuts.recordings} recordings, {cuts.acknowledged:,} acknowledgements before the cuts"
    return Figures("P2 power cut, synchronous=FULL", cuts.images, cuts.faults, note)


def run_control(where: Path, *, trials: int, seed: int) -> Figures:
    """The same at NORMAL, which must fail: else the images prove nothing."""
    cuts = make_cuts(where, trials=trials, seed=seed, synchronous="NORMAL")
    lost = {fault.partition(",")[0] for fault in cuts.faults if "acknowledged, and" in fault}
    failures = [fault for fault in cuts.faults if "integrity_check" in fault]
    if not lost:
        failures.append("NORMAL lost nothing: these images would not notice a missing sync")
    note = f"as it must, lost acknowledged tasks in {len(lost)} images"
    return Figures("P2 control, synchronous=NORMAL", cuts.images, failures, note)
