"""P1 and P12 at the level of system calls: a process is killed at each write and sync of submit, claim and finish, or
the call fails there as on a full or broken disk."""

import random
import re
import subprocess
from collections import Counter
from pathlib import Path

from tests.torture.figures import Figures
from tests.torture.procs import Troop
from tests.torture.verdict import drain_and_judge
from tests.torture.work import ledger_of

CHANGING = "pwrite64,pwritev,write,fdatasync,fsync,ftruncate,fallocate,rename,renameat,renameat2,unlink,unlinkat,flock"
"""Every call by which the writer can change what others see."""

FAILING = {"pwrite64": "ENOSPC", "fdatasync": "EIO", "fsync": "EIO", "ftruncate": "EIO"}
"""What the calls that reach for the disk fail with."""

NEVER = 1_000_000


class Strace:
    """strace on one thread of a running process, or on all that it will have."""

    def __init__(self, thread: int, *options: str, follow: bool = False) -> None:
        words = ["strace", *(["-f"] if follow else []), "-p", str(thread), *options]
        self._process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = self._process.stderr.readline()
        if "attached" not in said:
            self.end()
            raise RuntimeError(f"strace cannot trace this process, so this promise cannot be tested here: {said}")

    def end(self) -> None:
        """It ends with what it traces; if that lives on, let go of it."""
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def survey(folder: Path, role: str) -> Counter[str]:
    """Which of the changing calls the role makes, and how often at most in one thread."""
    trace = folder / "trace"
    is_whole = role == "open"
    _play(folder, role, "-o", str(trace), "-e", f"trace={CHANGING}", follow=is_whole)
    threads: Counter[tuple[str, str]] = Counter()
    for line in trace.read_text().splitlines():
        found = re.match(r"(?:(\d+) +)?(\w+)\(", line)
        if found:
            threads[found[1] or "", found[2]] += 1
    calls: Counter[str] = Counter()
    for (_, call), count in threads.items():
        calls[call] = max(calls[call], count)
    return calls


def _play(folder: Path, role: str, *options: str, follow: bool = False) -> tuple[list[str], list[str]]:
    """Let the role run under strace; what it said, and what the trial itself found wrong."""
    ledger = ledger_of(folder)
    troop = Troop(folder, ledger)
    said: list[str] = []
    with troop.gathered():
        child = troop.start(role)
        word, _, thread = child.read().partition(" ")
        if word != "ready":
            raise RuntimeError(f"{role} did not get ready: {child.errors()}")
        strace = Strace(int(thread), *options, follow=follow)
        try:
            child.write("go")
            while line := child.read():
                said.append(line)
        finally:
            strace.end()
        troop.end(child)
    if troop.kills:
        said.append("killed")
    ledger.close()
    return said, troop.failures


def run_kills(where: Path, *, trials: int, seed: int) -> Figures:
    """A kill at each changing call of the opening of a new store, and of submit, claim and finish."""
    figures = Figures("P1 kill at each write and sync", 0)
    struck: Counter[str] = Counter()
    for role, call, number in _plan(where, ("open", "sequence"), trials, seed):
        folder = _fresh(where, f"{role}-{call}-{number}")
        inject = f"inject={call}:signal=KILL:when={number}"
        said, failures = _play(
            folder, role, "-o", "/dev/null", "-e", f"trace={call}", "-e", inject, follow=role == "open"
        )
        figures.trials += 1
        struck[call] += "killed" in said
        figures.failures += [f"{folder.name}: {fault}" for fault in failures + drain_and_judge(folder)[0]]
    figures.note = ", ".join(f"{call} {count}" for call, count in struck.most_common())
    return figures


def run_errors(where: Path, *, trials: int, seed: int) -> Figures:
    """An error at each call that reaches for the disk: submits are refused or in doubt, and nothing else is noticed."""
    figures = Figures("P12 ENOSPC and EIO at each write and sync", 0)
    told: Counter[str] = Counter()
    for role, call, number in _plan(where, ("sequence",), trials, seed, tuple(FAILING)):
        folder = _fresh(where, f"{role}-{call}-{number}")
        inject = f"inject={call}:error={FAILING[call]}:when={number}"
        said, failures = _play(folder, role, "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)
        figures.trials += 1
        told.update(said)
        if "done" not in said:
            failures.append(f"did not finish its tasks, it said {said}")
        figures.failures += [f"{folder.name}: {fault}" for fault in failures + drain_and_judge(folder)[0]]
    refused = ", ".join(f"{word.split()[1]} {count}" for word, count in sorted(told.items()) if word[:7] == "refused")
    figures.note = f"submits told {refused or 'nothing'}; all finished"
    return figures


def _plan(
    where: Path, roles: tuple[str, ...], trials: int, seed: int, calls: tuple[str, ...] = ()
) -> list[tuple[str, str, int]]:
    """Every call of the roles, or as many of them as there are trials, drawn by lot."""
    plan = []
    for role in roles:
        counts = survey(_fresh(where, f"survey-{role}"), role)
        plan += [
            (role, call, number)
            for call, count in sorted(counts.items())
            if not calls or call in calls
            for number in range(1, count + 1)
        ]
    return plan if len(plan) <= trials else random.Random(seed).sample(plan, trials)


def _fresh(where: Path, name: str) -> Path:
    folder = where / name
    folder.mkdir()
    return folder
