"""Frames: what goes in comes out, in pieces of any size; what is no frame is refused and harms nobody."""

import array
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.execution import wire
from taskyard.execution.wire import HEAD, IS_SHARED, Bulk, Kind, Reader, WireError, encode
from tests.execution.census import open_fds
from tests.execution.grids import Grid


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        yield one, other


def cross(pair, out, reader):
    """Send and receive in turn until the frame is there."""
    one, other = pair
    is_sent = False
    while True:
        with contextlib.suppress(BlockingIOError):
            is_sent = is_sent or out.send(one)
        try:
            reader.receive(other)
        except BlockingIOError:
            assert not is_sent, "all was sent, and no frame came of it"
        if (frame := reader.next()) is not None:
            return frame


SIZES = [0, 1, wire.APART_FROM - 1, wire.APART_FROM, wire.SCRATCH, wire.SHARED_FROM - 100, wire.SHARED_FROM, 30_000_000]


@pytest.mark.spec("EXE-18")
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_values_cross_whatever_their_size(pair, size, shares):
    """Plain bytes and buffers of every size arrive as they were sent, and leave no descriptor open."""
    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]
    fds = open_fds()
    reader = Reader(shares=shares)
    value = (content, Bulk.of(content), Grid(bytearray(content)), "text")
    frame = cross(pair, encode(Kind.CALL, 7, value, marks=1, shares=shares), reader)
    assert (frame.kind, frame.call, frame.marks & ~IS_SHARED) == (Kind.CALL, 7, 1)
    plain, bulk, grid, text = frame.load()
    assert (plain, bulk, bytes(grid.content), text) == (content, content, content, "text")
    assert type(bulk) is bytes
    del frame, plain, bulk, grid  # a mapping keeps its descriptor, up to Python 3.12
    assert open_fds() == fds


@pytest.mark.parametrize("size", [wire.APART_FROM, wire.SHARED_FROM])
def test_buffers_arrive_writable(pair, size):
    """What was writable can be written to on the other side, without touching the sender's."""
    ours = bytearray(size)
    grid = cross(pair, encode(Kind.CALL, 1, Grid(ours)), Reader()).load()
    memoryview(grid.content)[0] = 1
    assert ours[0] == 0


def test_large_buffers_are_mapped_not_copied(pair):
    """A large buffer lies in shared memory, each one where vector instructions like it."""
    grids = cross(
        pair, encode(Kind.CALL, 1, [Grid(bytearray(wire.SHARED_FROM + 1)) for _ in range(3)]), Reader()
    ).load()
    assert len({id(grid.content.obj) for grid in grids}) == 1
    assert "memfd:taskyard" in Path("/proc/self/maps").read_text()


def test_many_small_frames_in_one_read(pair):
    """Frames that arrive together come out one by one, in order, also around the end of the reader's memory."""
    one, other = pair
    reader, sent = Reader(), 0
    seen: list[int] = []
    while len(seen) < 3000:
        for _ in range(7):
            try:
                assert encode(Kind.CALL, sent, b"x" * 5000).send(one)
                sent += 1
            except BlockingIOError:
                break
        reader.receive(other)
        while (frame := reader.next()) is not None:
            assert frame.load() == b"x" * 5000
            seen.append(frame.call)
    assert seen == list(range(len(seen)))


def test_a_frame_byte_by_byte(pair):
    """A frame that comes in single bytes is a frame all the same."""
    one, other = pair
    (data,) = encode(Kind.CALL, 3, {"a": [1, 2]}).parts
    reader = Reader()
    for place in range(len(data)):
        assert reader.next() is None
        one.send(data[place : place + 1])
        reader.receive(other)
    frame = reader.next()
    assert frame is not None
    assert frame.load() == {"a": [1, 2]}


@given(st.binary(max_size=2000))
def test_garbage_is_refused(data):
    """Whatever bytes come: frames, nothing yet, or `WireError`; never another error."""
    reader = Reader()
    one, other = socket.socketpair()
    with one, other:
        other.setblocking(False)
        one.send(data or b"\0")
        frames = []
        with contextlib.suppress(WireError):
            reader.receive(other)
            while (frame := reader.next()) is not None:
                frames.append(frame)
        assert sum(HEAD.size + sum(map(len, frame.parts)) for frame in frames) <= max(1, len(data))


def head(*, kind: int = Kind.CALL, marks: int = 0, parts: int = 0, size: int = 0) -> bytes:
    return HEAD.pack(kind, marks, parts, 1, size, 0.0, 0.0)


def sizes(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


BAD_FRAMES = [
    pytest.param(head(kind=99, size=3) + b"abc", id="unknown-kind"),
    pytest.param(head(parts=1, size=3) + b"abc", id="shorter-than-its-sizes"),
    pytest.param(head(parts=1, size=11) + sizes(4) + b"abc", id="sizes-do-not-fit"),
    pytest.param(head(parts=2, size=19) + sizes(2**64 - 1, 4) + b"abc", id="sizes-beyond-all-memory"),
    pytest.param(head(parts=wire.MOST_APART + 2, size=3), id="too-many-parts"),
    pytest.param(head(marks=IS_SHARED, parts=1, size=8) + sizes(3), id="no-descriptor"),
    pytest.param(head(size=1 << 62), id="a-huge-body"),
]


@pytest.mark.parametrize("data", BAD_FRAMES)
def test_a_bad_head_is_refused(pair, data):
    """A head that does not fit its body, or says what no head says, is refused before memory is set aside for it."""
    one, other = pair
    one.send(data)
    reader = Reader()
    reader.receive(other)
    with pytest.raises(WireError):
        reader.next()


def _memfd(size, seals):
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


DESCRIPTORS = [
    pytest.param(lambda: _memfd(1000, 0), id="may-shrink"),
    pytest.param(lambda: _memfd(10, fcntl.F_SEAL_SHRINK), id="too-short"),
    pytest.param(lambda: os.open("/dev/null", os.O_RDWR), id="no-memfd"),
    pytest.param(lambda: os.open("/proc/self/stat", os.O_RDONLY), id="a-file"),
]


@pytest.mark.parametrize("make", DESCRIPTORS)
def test_a_descriptor_that_could_hurt_is_refused(pair, make):
    """Memory that its sender could take away again, which would kill the reader, is not touched; nothing stays open."""
    one, other = pair
    fd = make()
    fds = open_fds()
    one.sendmsg(
        [head(kind=Kind.RESULT, marks=IS_SHARED, parts=1, size=8) + sizes(1000)],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))],
    )
    reader = Reader()
    reader.receive(other)
    with pytest.raises(WireError):
        reader.next()
    assert open_fds() == fds
    os.close(fd)


def test_descriptors_nobody_asked_for_are_closed(pair):
    """Descriptors that come without a frame are refused when there are many, and closed with the reader."""
    one, other = pair
    fds = open_fds()
    reader = Reader()

    def flood() -> None:
        for _ in range(10):
            one.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))])
            reader.receive(other)

    with pytest.raises(WireError):
        flood()
    reader.close()
    assert open_fds() == fds


def test_what_does_not_pickle_sends_nothing():
    """A value that cannot be pickled raises, and leaves no descriptor."""
    fds = open_fds()
    with pytest.raises(TypeError):
        encode(Kind.CALL, 1, (Grid(bytearray(wire.SHARED_FROM)), (n for n in range(3))))
    assert open_fds() == fds


def test_thousands_of_buffers_fit_one_frame(pair):
    """More buffers than fit one head go into the pickle."""
    grids = [Grid(bytearray([n % 256]) * wire.APART_FROM) for n in range(wire.MOST_APART + 10)]
    got = cross(pair, encode(Kind.CALL, 1, grids, shares=False), Reader(shares=False)).load()
    assert [grid.content[0] for grid in got] == [n % 256 for n in range(len(grids))]
