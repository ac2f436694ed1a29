"""P3: a node is stopped past the moment at which its tasks are taken from it, then goes on. It can commit nothing.

On one host nothing takes a live node for dead, so the verdict is forced here: `Store.rescue` while the process is
stopped, as an expired lease would do elsewhere.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from taskyard import TaskState, Yard
from taskyard.model.notes import Note
from taskyard.testing.ledger import Entry, Ledger, Stored, What, judge, read_store
from tests.torture.figures import Figures
from tests.torture.procs import Child, Troop
from tests.torture.verdict import finish_all
from tests.torture.work import ledger_of, make_yard

KINDS = ("guard", "guard_in_thread")
"""One task an executor, each trial."""

PATIENCE_S = 20.0
REFUSED_S = 3.0


class Fence:
    def __init__(self, folder: Path, mutation: str) -> None:
        self.folder, self.mutation = folder, mutation
        self.ledger: Ledger = ledger_of(folder)
        self.troop = Troop(folder, self.ledger)
        self.yard: Yard = make_yard(folder, self.ledger)
        self.refused = 0
        self._seen = 0

    async def trial(self, number: int) -> None:
        gate = f"gate-{number}"
        self._seen = len(self.ledger.entries())
        stale = self.troop.start("work", ready=True, mutation=self.mutation)
        for kind in KINDS:
            self.ledger.acknowledged((await self.yard.submit(kind, {"gate": gate})).uuid)
        self._await_lines(What.START, stale, len(KINDS))
        time.sleep(0.01)  # its writer is idle by now: a process stopped inside a transaction would hold up all
        stale.signal(signal.SIGSTOP)
        self.ledger.expired(stale.pid)
        await self._take_from(stale)
        heir = self.troop.start("work", ready=True, mutation=self.mutation, dying_s=0.01)
        self._await_lines(What.START, heir, len(KINDS))
        (self.folder / gate).touch()
        self._await_lines(What.END, heir, len(KINDS))
        await finish_all(self.yard, PATIENCE_S)
        stale.signal(signal.SIGCONT)
        self._await_lines(What.END, stale, len(KINDS))
        # It says so of each settle that was refused; the refused submits are seen by what is stored.
        self.refused += _until(lambda: stale.errors().count("would have become"), len(KINDS), REFUSED_S)
        for child in (stale, heir):
            self.troop.kill(child)

    async def _take_from(self, child: Child) -> None:
        nodes = [status.node for status in await self.yard.store.nodes()]
        (incarnation,) = [node.incarnation for node in nodes if node.pid == child.pid]
        async with asyncio.timeout(PATIENCE_S):
            await self.yard.store.rescue(incarnation)

    def _await_lines(self, what: What, child: Child, count: int) -> None:
        def lines() -> int:
            entries = self.ledger.entries(after=self._seen)
            return sum(entry.what is what and entry.pid == child.pid for entry in entries)

        if _until(lines, count, PATIENCE_S) < count:
            raise TimeoutError(f"{child.name} did not {what} its tasks: {child.errors()}")


def _until(measure: Callable[[], int], wanted: int, timeout_s: float) -> int:
    """What `measure` says when it has reached `wanted`, or when time is up."""
    until = time.monotonic() + timeout_s
    while (value := measure()) < wanted and time.monotonic() < until:
        time.sleep(0.002)
    return value


def run(where: Path, *, trials: int, seed: int, mutation: str = "") -> Figures:
    del seed  # nothing is drawn by lot here
    fence = Fence(where, mutation)
    figures = Figures("P3 a stale run commits nothing", 0)
    with asyncio.Runner() as runner, fence.troop.gathered():
        runner.run(fence.yard.start(serve=False))
        try:
            for number in range(trials):
                runner.run(fence.trial(number))
                figures.trials += len(KINDS)
            stored = runner.run(read_store(fence.yard.store))
        finally:
            runner.run(fence.yard.stop())
    entries = fence.ledger.entries()
    fence.ledger.close()
    figures.failures = fence.troop.failures + judge(entries, stored) + check(_stale_tokens(entries), stored)
    figures.note = f"half of them in threads; {fence.refused} stale settles refused"
    if fence.refused < figures.trials:
        figures.failures.append(f"{figures.trials} stale runs, and only {fence.refused} of their settles were refused")
    return figures


def check(stale: set[int], stored: dict[str, Stored]) -> list[str]:
    """Whatever is stored was written by the run that was not stale."""
    faults = []
    for uuid, one in stored.items():
        parent = one.record.task.args.get("parent")
        if parent in stale:
            faults.append(f"task {uuid}: submitted by the stale run {parent}")
        if one.record.consumer in KINDS:
            is_own = one.record.result not in {str(token) for token in stale}
            said = one.record.progress.message if one.record.progress is not None else None
            told = (one.record.state, is_own, one.record.note, said)
            by = f"by {one.record.result}"
            if told != (TaskState.COMPLETED, True, Note.remark(by), by):
                faults.append(f"task {uuid}: is {told}, result {one.record.result}")
    return faults


def _stale_tokens(entries: Sequence[Entry]) -> set[int]:
    expired = {entry.pid for entry in entries if entry.what is What.EXPIRED}
    return {entry.token for entry in entries if entry.what is What.START and entry.pid in expired}
