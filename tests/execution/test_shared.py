"""Memory that is used again for the next large value: only when nothing looks at it any more, and not kept for long."""

import asyncio
import contextlib
import errno
import os
import resource
from typing import NoReturn

import pytest

from taskyard.execution import shared, wire
from taskyard.model.execution import ErrorKind
from tests.execution import deeds, grids
from tests.execution.asking import PATIENCE_S
from tests.execution.census import open_fds


def memfds() -> int:
    """How many this process holds."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            count += "memfd:taskyard" in os.readlink(f"/proc/self/fd/{name}")
    return count


async def test_memory_is_used_again(desk):
    """Large values of one worker's calls lie in the same memory, one after the other, and arrive whole."""
    first = await desk.value(grids.memory, grids.filled(1))
    assert await desk.value(grids.ends, grids.filled(2)) == (2, 2)
    assert await desk.value(grids.memory, grids.filled(3)) == first
    assert await desk.value(grids.memory, grids.filled(3, wire.SHARED_FROM * 2)) != first


async def test_what_code_keeps_never_changes(desk):
    """Values that code has kept look as they did, whatever is sent after them."""
    for number in range(1, 5):
        await desk.value(grids.keep, grids.filled(number))
        assert await desk.value(grids.ends, grids.filled(100)) == (100, 100)
    assert await desk.value(grids.kept) == [(number, number) for number in range(1, 5)]


async def test_what_a_forked_process_sees_never_changes(desk, tmp_path):
    """A process that code has forked, and that lives on after the call, sees the value as it was."""
    gate, seen = str(tmp_path / "gate"), str(tmp_path / "seen")
    os.mkfifo(gate)
    os.mkfifo(seen)
    assert await desk.value(grids.fork, grids.filled(1), gate, seen) == (1, 1)
    assert await desk.value(grids.ends, grids.filled(2)) == (2, 2)

    def look() -> str:
        with open(gate, "w") as pipe:
            pipe.write("!")
        with open(seen) as pipe:
            return pipe.read()

    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.to_thread(look) == "(1, 1)"


async def test_values_that_come_back_are_whole(desk):
    """A large value that is returned, or in an error that is raised, is not disturbed by the next one."""
    for number in range(1, 4):
        answer = await desk.value(deeds.echo, grids.filled(number))
        assert answer.ends == (number, number)
        assert not (await desk.ask(grids.fail, grids.filled(number))).success


async def test_large_values_sent_ahead_are_whole(open_desk):
    """Large values that wait for their turn in one worker do not disturb each other."""
    desk = open_desk(max_workers=1, pipeline=4)
    calls = [desk.begin(grids.ends, grids.filled(number)) for number in range(1, 9)]
    results = await asyncio.gather(*[call.future for call in calls])
    assert [result.data for result in results] == [(number, number) for number in range(1, 9)]


async def test_memory_is_not_kept_for_long(desk, monkeypatch):
    """When no call needs it, the memory is given back within seconds."""
    monkeypatch.setattr(shared, "KEPT_S", 0.05)
    closes: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    close = shared.Lender.close

    def note_close(lender: shared.Lender) -> None:
        before = memfds()
        close(lender)
        closes.put_nowait((before, memfds()))

    monkeypatch.setattr(shared.Lender, "close", note_close)
    await desk.value(grids.ends, grids.filled(1))
    async with asyncio.timeout(PATIENCE_S):
        while (seen := await closes.get())[0] == 0:  # of a worker that was lent nothing
            pass
    assert seen == (1, 0)


async def test_results_that_are_kept_hold_no_descriptors(desk):
    """However many large results a program keeps, and whatever it sends, they cost memory alone; each is whole."""
    await desk.value(deeds.echo, grids.filled(0))
    fds = open_fds()
    kept = [await desk.value(deeds.echo, grids.filled(number)) for number in range(1, 6)]
    assert open_fds() == fds
    assert [grid.ends for grid in kept] == [(number, number) for number in range(1, 6)]


async def test_a_result_for_which_no_descriptor_is_left(open_desk, make_pipe):
    """It is the host that has none: the call is answered so, and the worker is not accused of writing nonsense."""
    desk = open_desk(max_workers=1, spare=False)
    began, gate = make_pipe("began"), make_pipe("gate")
    call = desk.begin(deeds.hold, (began.path, gate.path), grids.filled(1))
    await began.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        gate.write()
        error = (await call.future).error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert error is not None
    assert error.kind is ErrorKind.SYSTEM
    assert error.message == "what its worker process said could not be received here: Too many open files"
    assert (await desk.value(deeds.echo, grids.filled(2))).ends == (2, 2)


async def test_memory_that_could_not_be_lent_is_not_borrowed(monkeypatch):
    """When there is no descriptor to send along, the next call may borrow the memory."""
    lender = shared.Lender(asyncio.get_running_loop())
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", _fail)
        with pytest.raises(OSError, match="Too many"):
            lender.share([b"a"], 1)
    assert lender.borrower is None
    os.close(lender.share([b"b"], 2))
    assert lender.borrower == 2
    lender.close()


def _fail(_: int) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_huge_memory_is_not_kept(desk, monkeypatch):
    """Memory beyond the limit for one worker is given back at once."""
    monkeypatch.setattr(shared, "MOST_KEPT", wire.SHARED_FROM)
    assert await desk.value(grids.ends, grids.filled(1)) == (1, 1)
    assert memfds() == 0


async def test_the_memory_of_a_worker_ends_with_it(desk):
    """A pool that is shut down has no memory left."""
    await desk.value(grids.ends, grids.filled(1))
    assert memfds() == 1
    await desk.pool.shutdown()
    assert memfds() == 0
