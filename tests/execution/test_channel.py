"""The worker's end of the wire."""

import socket
from collections.abc import Iterator

import pytest

from taskyard.execution.channel import Channel
from taskyard.execution.wire import Kind, encode, widen


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    host, worker = socket.socketpair()
    widen(host)  # the test speaks before the channel listens
    channel = Channel(worker.detach(), shares=True)
    with host:
        yield host, channel
    channel.close()


def say(host, *frames):
    """All in one piece."""
    host.sendall(b"".join(bytes(part) for frame in frames for part in frame.parts))


def test_a_cancel_in_one_piece_with_its_call(ends):
    """A cancel that was read together with the call it names is seen by that call."""
    host, channel = ends
    say(host, encode(Kind.CALL, 1, "first"), encode(Kind.CANCEL, 1))
    assert channel.receive().load() == "first"
    assert channel.is_canceled(1)


def test_looking_for_a_cancel_loses_no_call(ends):
    """Calls that were sent ahead are kept, in order, whatever is read in the search for a cancel."""
    host, channel = ends
    say(host, encode(Kind.CALL, 1, "first"), encode(Kind.CALL, 2, "second"))
    assert channel.receive().load() == "first"
    say(host, encode(Kind.CALL, 3, "third"))
    assert not channel.is_canceled(1)
    say(host, encode(Kind.CANCEL, 1), encode(Kind.CALL, 4, b"x" * 300_000))
    assert channel.is_canceled(1)
    assert channel.is_canceled(1)
    assert not channel.is_canceled(2)
    assert [channel.receive().load() for _ in range(2)] == ["second", "third"]
    assert len(channel.receive().load()) == 300_000


def test_a_late_cancel_is_dropped(ends):
    """A cancel of a call that is over does not reach the next one."""
    host, channel = ends
    say(host, encode(Kind.CALL, 1, "first"))
    channel.receive()
    say(host, encode(Kind.CANCEL, 1), encode(Kind.CALL, 2, "second"))
    assert channel.receive().load() == "second"
    assert not channel.is_canceled(2)


def test_cancels_do_not_pile_up(ends):
    """Of all the calls that were ever canceled, those of long ago are forgotten."""
    host, channel = ends
    for number in range(1, 300):
        say(host, encode(Kind.CALL, number), encode(Kind.CANCEL, number))
        channel.receive()
        assert channel.is_canceled(number)
    assert channel.is_canceled(298)
    assert len(channel._canceled) < 200


def test_the_end_of_the_host(ends):
    """When the host has closed there is nothing more to do, and looking for a cancel harms nobody."""
    host, channel = ends
    host.close()
    assert not channel.is_canceled(1)
    assert channel.receive() is None
