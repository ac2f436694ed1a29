"""Child processes: started, killed and buried by this module and nobody else, each by its own id."""

import os
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from taskyard.testing import faults
from taskyard.testing.faults import Board, phase_of
from taskyard.testing.ledger import Ledger
from tests.torture import mutations
from tests.torture.victim import board_of
from tests.torture.zygote import Zygote

PATIENCE_S = 30.0


class Child:
    """One victim. What it writes to stderr is kept beside the store; its stdout and stdin are ours to talk over."""

    def __init__(self, folder: Path, role: str, name: str, *, fault: str = "", mutation: str = "", **options: object):
        self.folder, self.role, self.name, self.fault = folder, role, name, fault
        self.is_condemned = False
        self.code: int | None = None
        self.born_mono = time.monotonic()
        self.ready_mono: float | None = None
        self._errors = folder / f"stderr-{name}"
        words = [role, str(folder), name, *(f"{key}={value}" for key, value in options.items())]
        their_in, self._in = os.pipe()
        self._out, their_out = os.pipe()
        their_err = os.open(self._errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        theirs = [their_in, their_out, their_err]
        try:
            environ = {faults.VARIABLE: fault, mutations.VARIABLE: mutation}
            self.pid = Zygote.get().fork(words, environ, theirs)
        finally:
            for file in theirs:
                os.close(file)
        # Nobody but us makes the zygote reap it: until then the pid is its own, and this its handle.
        self._handle = os.pidfd_open(self.pid)
        self._said = b""

    # --- talking ------------------------------------------------------------------------------------------------------

    def read(self, timeout_s: float = PATIENCE_S) -> str:
        """The next line it says; empty if it has died."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._said:
            ready, _, _ = select.select([self._out], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{self.name} said nothing for {timeout_s:g} s: {self.errors()}")
            data = os.read(self._out, 65536)
            if not data:
                return ""
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def write(self, text: str) -> None:
        """Tell it something; a child that has died does not mind."""
        with suppress(BrokenPipeError):
            os.write(self._in, f"{text}\n".encode())

    def await_ready(self) -> None:
        said = self.read()
        if said != "ready":
            raise RuntimeError(f"{self.name} did not get ready, it said {said!r}: {self.errors()}")
        self.ready_mono = time.monotonic()

    def is_ready(self) -> bool:
        if self.ready_mono is None and select.select([self._out], [], [], 0)[0] and self.read() == "ready":
            self.ready_mono = time.monotonic()
        return self.ready_mono is not None

    def errors(self) -> str:
        """The end of what it wrote to stderr."""
        return self._errors.read_text(errors="replace")[-10_000:]

    def count(self, text: str) -> int:
        """How often that stands in what it wrote to stderr."""
        return self._errors.read_text(errors="replace").count(text)

    # --- ending -------------------------------------------------------------------------------------------------------

    def kill(self, ledger: Ledger | None = None) -> None:
        self.is_condemned = not self.has_ended()
        if self.is_condemned and ledger is not None:
            ledger.kill(self.pid)
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        if self.code is None:
            signal.pidfd_send_signal(self._handle, number)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        return bool(select.select([self._handle], [], [], timeout_s)[0])

    def bury(self, ledger: Ledger | None = None, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end; the exit code."""
        if not self.has_ended(timeout_s):
            raise TimeoutError(f"{self.name} has not ended within {timeout_s:g} s: {self.errors()}")
        # A traced child is its tracer's first, and for a moment dead to everybody but its parent.
        while (code := Zygote.get().wait(self.pid)) is None:
            time.sleep(0.001)
        self.code = code
        if ledger is not None:
            ledger.dead(self.pid)
        for file in (self._in, self._out, self._handle):
            os.close(file)
        return self.code

    def phase(self) -> str:
        """Where it was when it died: as its fault point says, or its board."""
        if self.fault and not self.is_condemned:
            return phase_of(self.fault)
        return Board.read(board_of(self.folder, self.name))


class Troop:
    """The living children of one trial. Leaving the block kills whoever is left."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder, self.ledger = folder, ledger
        self.living: list[Child] = []
        self.failures: list[str] = []
        self.phases: Counter[str] = Counter()
        self.kills = 0
        self._started = 0

    @contextmanager
    def gathered(self) -> Iterator["Troop"]:
        try:
            yield self
        finally:
            for child in self.living:
                child.kill(self.ledger)
            while self.living:
                self.living.pop().bury(self.ledger)

    def start(self, role: str, *, ready: bool = False, **options: object) -> Child:
        """A new child; with `ready`, one that has said so."""
        self._started += 1
        child = Child(self.folder, role, f"{role}-{self._started}", **options)  # type: ignore[arg-type]
        self.living.append(child)
        if ready:
            child.await_ready()
        return child

    def reap(self) -> list[Child]:
        """Bury those that have died since the last call; whoever was neither killed nor asked to go is a failure."""
        dead = [child for child in self.living if child.has_ended()]
        for child in dead:
            self.end(child)
        return dead

    def end(self, child: Child) -> int:
        self.living.remove(child)
        code = child.bury(self.ledger)
        if code == -signal.SIGKILL:
            self.kills += 1
            self.phases[child.phase()] += 1
        elif code != 0:
            self.failures.append(f"{child.name} ended with {code}: {child.errors()}")
        return code

    def kill(self, child: Child) -> None:
        child.kill(self.ledger)
        self.end(child)
