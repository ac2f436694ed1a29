"""What the nursery does about the children of a keeper that was killed, and with the descriptors it gets."""

import os
import socket
from typing import Any

import pytest

from taskyard.execution import nursery_main
from taskyard.execution.keeper import GONE, GONE_FORMAT
from taskyard.execution.nursery_main import Nursery
from taskyard.execution.starting import LOST

STRAY = 4_000_000
"""No process has this number."""


@pytest.fixture
def nursery(monkeypatch) -> Nursery:
    """Without its loop and its signal handlers, which would become this process's."""
    made = Nursery.__new__(Nursery)
    made._keepers, made._lost, made._fds, made._buffer = {}, [], [], bytearray()
    monkeypatch.setattr(os, "waitpid", _no_children)
    return made


def _no_children(*_: Any) -> tuple[int, int]:
    raise ChildProcessError


def test_what_cannot_be_killed_holds_up_its_own_slot_only(nursery, monkeypatch):
    """The nursery goes on, kills it again at the next opportunity, and tells of the end when it has come."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    nursery._lost.append((1, theirs.detach()))
    killed: list[int] = []
    monkeypatch.setattr(nursery_main, "children", lambda: [STRAY])
    monkeypatch.setattr(nursery_main, "kill_hard", killed.append)
    nursery._reap()
    nursery._reap()
    assert killed == [STRAY, STRAY]
    with pytest.raises(BlockingIOError):
        ours.recv(64)
    monkeypatch.setattr(nursery_main, "children", list)
    nursery._reap()
    assert ours.recv(64) == GONE_FORMAT.pack(GONE, LOST)
    assert nursery._lost == []
    ours.close()


def test_one_look_does_not_prove_that_nothing_is_left(nursery, monkeypatch):
    """Who is missing in the list of children because another one ended is found by the next look, before the host hears
    that nothing is left."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    nursery._lost.append((1, theirs.detach()))
    looks = iter([[], [STRAY]])
    ended = iter([(0, 0), (STRAY + 1, 9)])
    killed: list[int] = []
    monkeypatch.setattr(nursery_main, "children", lambda: next(looks))
    monkeypatch.setattr(os, "waitpid", lambda *_: next(ended, (0, 0)))
    monkeypatch.setattr(nursery_main, "kill_hard", killed.append)
    nursery._reap()
    assert killed == [STRAY]
    with ours, pytest.raises(BlockingIOError):
        ours.recv(64)
    os.close(nursery._lost[0][1])


def test_a_keeper_holds_nothing_of_those_that_were_lost(nursery):
    """In the fork for a new keeper the controls of killed ones are closed, or the host would not see them end."""
    host, wakeup = socket.socketpair()
    kept, lost = (os.open(os.devnull, os.O_RDONLY) for _ in range(2))
    nursery._host, nursery._host_pidfd, nursery._wakeups = host, None, wakeup
    nursery._keepers, nursery._lost = {STRAY: (1, kept)}, [(2, lost)]
    nursery._let_go(-1)
    for fd in (kept, lost):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_descriptors_stay_in_the_family(nursery):
    """What the nursery gets for its workers is not inherited by programs that preloaded code may start."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        nursery._host = theirs
        socket.send_fds(ours, [b"\0"], [ours.fileno()])
        assert nursery._read()
    assert [os.get_inheritable(fd) for fd in nursery._fds] == [False]
    os.close(nursery._fds[0])
