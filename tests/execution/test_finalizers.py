"""Finalizers that log or print in awkward places: while a run makes its lines, and in the middle of a frame."""

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from taskyard.execution.channel import Channel
from taskyard.execution.run_handle import RunHandle, RunHost
from taskyard.execution.run_lines import HostLines
from taskyard.execution.wire import Kind, Outgoing, Reader, encode
from taskyard.execution.worker_lines import BURST_LINES, WorkerLines
from taskyard.execution.worker_main import _Forward
from taskyard.model.attempt import LogLine
from taskyard.model.task import Claim
from taskyard.ports.store import Report
from taskyard.testing.samples import a_record

PATIENCE_S = 10
CALL = 7


class Wire:
    """Both ends of a worker's wire."""

    def __init__(self) -> None:
        self.host, worker = socket.socketpair()
        self.host.settimeout(PATIENCE_S)
        self.channel = Channel(worker.detach())
        self._reader = Reader()

    def next(self) -> tuple[Kind, Any]:
        """The next frame at the host."""
        while (frame := self._reader.next()) is None:
            assert self._reader.receive(self.host)
        return frame.kind, frame.load()

    def next_lines(self, count: int) -> list[LogLine]:
        """So many lines, in one frame or in several."""
        lines: list[LogLine] = []
        while len(lines) < count:
            kind, body = self.next()
            assert kind is Kind.LINES
            lines += msgspec.msgpack.decode(body, type=list[LogLine])
        return lines


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.host.close()
    wire.channel.close()


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


class MidFrame(Outgoing):
    """A frame in the middle of which something else happens."""

    def __init__(self, out: Outgoing, between) -> None:
        super().__init__(out.parts)
        self.between = between

    def send(self, sock: socket.socket) -> bool:
        if self.between is not None:
            sock.sendall(self.parts[0][:5])
            self.parts[0] = self.parts[0][5:]
            between, self.between = self.between, None
            between()
            return False
        return super().send(sock)


async def test_a_finalizer_logs_while_a_run_makes_its_lines():
    """The line of a finalizer that runs while the first line of a run is written is kept, and nothing hangs."""
    reports: list[Report] = []
    run = RunHandle(Claim(a_record(), 1, 1), RunHost(asyncio.get_running_loop(), reports.append))

    def make() -> HostLines:
        if run._lines is None:
            run._make_lines = lambda: HostLines(run, run._host)  # type: ignore[method-assign]
            run.log_line(logging.ERROR, "from the finalizer", "logging")
        return HostLines(run, run._host)

    run._make_lines = make  # type: ignore[method-assign]
    join(in_thread(lambda: run.log_line(logging.INFO, "first", "run")))
    await asyncio.sleep(0)
    run.end()
    assert sorted(line.text for report in reports for line in report.lines) == ["first", "from the finalizer"]


def test_a_finalizer_prints_in_the_middle_of_a_frame(wire):
    """The line goes right after the frame."""
    lines = WorkerLines(CALL, wire.channel)
    out = MidFrame(encode(Kind.NOTE, CALL, "a note"), lambda: lines.add("info", "from the finalizer", "stdout"))
    join(in_thread(lambda: wire.channel.write(out)))
    assert wire.next() == (Kind.NOTE, "a note")
    assert texts(wire.next_lines(1)) == ["from the finalizer"]


def test_a_finalizer_prints_while_another_thread_sends_lines(wire):
    """A thread that waits to send lines never keeps a finalizer in the middle of a frame from writing its own."""
    lines = WorkerLines(CALL, wire.channel)
    others: list[threading.Thread] = []

    def between() -> None:
        others.append(in_thread(lambda: lines.add("info", "from another thread", "stdout")))
        while not lines._sending.locked():
            pass
        lines.add("info", "from the finalizer", "stdout")

    join(in_thread(lambda: wire.channel.write(MidFrame(encode(Kind.NOTE, CALL, "a note"), between))))
    join(*others)
    assert wire.next() == (Kind.NOTE, "a note")
    assert texts(wire.next_lines(2)) == ["from another thread", "from the finalizer"]


def test_a_finalizer_logs_while_another_thread_logs(wire):
    """A thread that waits to send a log record never keeps a finalizer in the middle of a frame from sending one."""
    forward = _Forward(wire.channel)
    others: list[threading.Thread] = []

    is_there = threading.Event()

    class Telling(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            is_there.set()
            return super().format(record)

    forward.setFormatter(Telling())

    def log(text: str) -> None:
        forward.handle(logging.LogRecord("app", logging.INFO, "", 0, text, None, None))

    def between() -> None:
        others.append(in_thread(lambda: log("from another thread")))
        assert is_there.wait(PATIENCE_S)
        log("from the finalizer")

    join(in_thread(lambda: wire.channel.write(MidFrame(encode(Kind.NOTE, CALL, "a note"), between))))
    join(*others)
    said = [wire.next() for _ in range(3)]
    assert said[0] == (Kind.NOTE, "a note")
    assert {body[2] for kind, body in said[1:] if kind is Kind.LOG} == {"from another thread", "from the finalizer"}


def test_lines_of_many_threads_arrive_in_order(wire):
    """Lines that threads write at once all arrive before the end, in the order of their times."""
    lines = WorkerLines(CALL, wire.channel)
    count, threads = 2 * BURST_LINES, 4

    def write() -> None:
        for n in range(count):
            lines.add("info", str(n), "stdout")

    arrived: list[LogLine] = []
    reader = in_thread(lambda: arrived.extend(wire.next_lines(count * threads)))
    join(*[in_thread(write) for _ in range(threads)])
    lines.finish()
    join(reader)
    assert [line.at for line in arrived] == sorted(line.at for line in arrived)
    lines.add("info", "too late", "stdout")
    wire.channel.send(Kind.NOTE, CALL, "last")
    assert wire.next() == (Kind.NOTE, "last")
