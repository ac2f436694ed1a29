"""The keeper: a process between the nursery and one worker, which sees to it that nothing of that worker lives on.

It is the worker's parent and the subreaper of everything below it. So whatever a worker's code starts, however it hides
(double fork, setsid, closed descriptors, an empty environment), becomes the keeper's child at the latest when its own
parent is gone, and belongs to that worker beyond doubt. When a subreaper has no children left, it has no descendants:
that the whole tree is gone is known from `waitpid`, not from a search.

It talks to the host over a socket of its own: TERM and KILL come in, GONE goes out, last of all. When its nursery ends
it gets SIGCONT, which reaches it also when somebody has stopped it, and sees that it has another parent.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from taskyard.execution.linux import (
    adopt_orphans,
    children,
    close_all,
    die_with_parent,
    kill_hard,
    set_name,
    signal_at_end_of_parent,
)
from taskyard.execution.starting import LOST

TERM, KILL, GONE, HEARD = b"T", b"K", b"G", b"H"
"""HEARD comes from the nursery, which has been asked to put the keeper down."""

GONE_FORMAT = struct.Struct("<ci")
"""GONE and the worker's wait status."""

END = signal.SIGRTMIN + 5
"""Between nursery and keepers: everything must end. Not SIGTERM: a service manager sends that to every process of a
service it stops, and what runs is then the host's to end, when its grace is over."""


class Wakeups:
    """Signals as something that can be polled. The process that makes one has handlers of its own from then on."""

    def __init__(self, *signals: int) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.seen: set[int] = set()
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in signals:
            signal.signal(signum, self._note)

    def _note(self, signum: int, _: object) -> None:
        self.seen.add(signum)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 512):
                pass

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        close_all((self.fd, self._write_fd))


def keep(control_fd: int, wire_fd: int, nursery: int, work: Callable[[int], None]) -> NoReturn:
    """Run `work` on the wire in a worker, and keep it until its tree is gone. Called in a fresh fork of the nursery,
    which is single-threaded; it never returns."""
    os.setsid()
    set_name("taskyard-keeper")
    wakeups = Wakeups(signal.SIGCHLD, signal.SIGCONT, END)
    signal_at_end_of_parent(signal.SIGCONT)
    adopt_orphans()
    keeper = os.getpid()
    try:
        worker = os.fork()
    except OSError:  # no process is to be had
        _say_gone(control_fd, LOST)
    if worker == 0:
        wakeups.close()
        for signum in (signal.SIGCONT, END):
            signal.signal(signum, signal.SIG_DFL)
        os.close(control_fd)
        _be_worker(keeper, partial(work, wire_fd))
    os.close(wire_fd)  # so that the host sees it end with the worker's
    _say_gone(control_fd, _watch(control_fd, worker, wakeups, nursery))


def _say_gone(control_fd: int, status: int) -> NoReturn:
    with contextlib.suppress(OSError):  # the host is gone
        os.write(control_fd, GONE_FORMAT.pack(GONE, status))
    os._exit(0)


def _be_worker(keeper: int, work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        set_name("taskyard-worker")
        die_with_parent(keeper)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _watch(control_fd: int, worker: int, wakeups: Wakeups, nursery: int) -> int:
    """The worker's status, once nothing is left of its tree."""
    poll = select.poll()
    poll.register(control_fd, select.POLLIN)
    poll.register(wakeups.fd, select.POLLIN)
    ready: set[int] = set()
    while True:
        wakeups.drain()
        must_end = END in wakeups.seen or os.getppid() != nursery  # which ends everything, or is gone
        if control_fd in ready:
            asked = _read(control_fd)
            must_end = must_end or not asked or KILL in asked
            if TERM in asked and not must_end:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker, signal.SIGTERM)  # not reaped yet, so the number is still its own
        status = None if must_end else _reap(worker)
        if must_end or status is not None:
            return sweep(worker, status)
        ready = {fd for fd, _ in poll.poll()}


def _read(control_fd: int) -> bytes:
    try:
        return os.read(control_fd, 64)
    except ConnectionResetError:
        return b""


def _reap(worker: int) -> int | None:
    """Bury who ended; the worker's status if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == worker:
                found = status
    return found


def sweep(worker: int, status: int | None) -> int:
    """Kill every child until there is none, which proves that there is no descendant either; the worker's status.

    Race: what we kill may have forked a moment ago. Its child becomes ours when it dies, and is met in a later round.
    """
    while True:
        try:
            pid, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return LOST if status is None else status
        if pid == worker:
            status = found
        if pid != 0:
            continue
        alive = children()
        for child in alive:
            kill_hard(child)
        if alive:
            pid, found = os.waitpid(-1, 0)
            status = found if pid == worker else status
        else:
            time.sleep(0.001)  # the list may leave out a child while another one ends
