"""Blocking calls to an adb server, over adbutils. Only `taskyard.devices.adb` imports this, where it needs adbutils.

Two things are done otherwise than in adbutils. A connection is closed at once, without its wait of 10 ms. And all
that is sent is sent whole: with a timeout, `socket.send` may send a part only, which would spoil a file.
"""

from __future__ import annotations

import shlex
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from typing import BinaryIO, cast

from adbutils import AdbClient, AdbConnection, AdbError, AdbTimeout, adb_path

from taskyard.devices.device_process import child_environment
from taskyard.devices.device_settings import LARGEST_OUTPUT, LARGEST_PULL, output_too_large
from taskyard.errors import DeviceError, DeviceLost

CONNECT_S = 3.0
"""Seconds: how long an adb server on another machine may take to accept a connection."""

START_S = 20.0
"""Seconds: what starting an adb server may take on a busy machine; it looks at the USB ports for three."""

READY_S = 3.0
"""Seconds: how long a device that adb has just connected may take to be ready."""

DROP_POLL_S = 0.02

CHUNK = 64 << 10
"""Bytes: the largest piece of a file that adb takes."""

READ_AHEAD = 4 * CHUNK

PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB\x60\x82"

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_STATUS = b"taskyard-status:"
_starting = threading.Lock()


class AdbCall(AdbClient):  # type: ignore[misc] # adbutils is not typed
    """One call to the adb server, in a thread. Another thread may end it with `abort`."""

    def __init__(self, host: str, port: int, *, serial: str, timeout_s: float) -> None:
        super().__init__(host or None, port or None, socket_timeout=timeout_s)
        self.serial, self._timeout_s = serial, timeout_s
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_aborted = False

    def abort(self) -> None:
        """Break its connections, and let it make no more: what it waits for ends at once."""
        with self._lock:
            self._is_aborted = True
            for connected in self._open:
                with suppress(OSError):  # It may have ended by itself.
                    connected.shutdown(socket.SHUT_RDWR)

    def make_connection(self, timeout: float | None = None) -> _Connection:
        """The method of adbutils that all of its others use."""
        connected = _connect(self.host, self.port)
        connected.settimeout(timeout or self._timeout_s)
        with self._lock:
            if self._is_aborted:
                connected.close()
                raise AdbError("the call was abandoned")
            self._open.add(connected)
        return _Connection(connected, self._forget)

    def _forget(self, connected: socket.socket) -> None:
        with self._lock:
            self._open.discard(connected)

    # --- the server and its connection to the device ------------------------------------------------------------------

    def connect_device(self, *, anew: bool) -> frozenset[str]:
        """Start the server if none runs, let it connect to a device at an address, and wait until the device is ready;
        the features of the device. With `anew` an existing connection is not trusted."""
        ensure_server(self.host, self.port)
        state, answer = self.find_state(), ""
        if is_address(self.serial):
            if anew or state != "device":
                answer = self._connect_address(has_old=state is not None)
        elif state == "offline":
            self._ask(f"host-serial:{self.serial}:reconnect")
        self._wait_until_ready(answer)
        return frozenset(self._ask(f"host-serial:{self.serial}:features").split(","))

    def _connect_address(self, *, has_old: bool) -> str:
        """Tell the server to connect, after it has dropped its old connection; what it answers."""
        if has_old:
            self.disconnect(self.serial)
        until = time.monotonic() + READY_S
        while True:
            answer = str(self.connect(self.serial)).strip()
            # Race: the server drops the old connection a moment after it has said so, and takes it for the new one.
            if not (has_old and answer.startswith("already connected")) or time.monotonic() > until:
                return answer
            time.sleep(DROP_POLL_S)

    def find_state(self) -> str | None:
        """What the server says of the device: "device" if it is ready; None if it knows of none."""
        return next((found.state for found in self.list() if found.serial == self.serial), None)

    def _wait_until_ready(self, answer: str) -> None:
        """`answer` is what the server said when it was told to connect. A device that it could not reach may be among
        its devices for a moment longer."""
        state = self.find_state()
        if state not in (None, "device"):
            with suppress(AdbTimeout):
                self.wait_for(self.serial, timeout=READY_S)
            state = self.find_state()
        if state is None and answer and not answer.startswith(("connected", "already connected")):
            raise DeviceLost(f"adb cannot reach it: {answer}; is it on, and is debugging allowed?")
        if state != "device":
            raise state_error(state)

    def _ask(self, request: str) -> str:
        with self.make_connection() as connection:
            connection.send_command(request)
            connection.check_okay()
            answer: str = connection.read_string_block()
            return answer

    # --- the device ---------------------------------------------------------------------------------------------------

    @contextmanager
    def open(self, service: str) -> Iterator[_Connection]:
        """A stream to a service of the device."""
        with self.make_connection() as connection:
            connection.request(f"host:transport:{self.serial}")
            connection.request(service)
            yield connection

    def run(self, command: str, *, has_shell_v2: bool) -> tuple[int, bytes]:
        """The exit status of a command, and what it wrote, errors too."""
        if not has_shell_v2:
            return self._run_old(command)
        output = bytearray()
        with self.open(f"shell,v2,raw:{command}") as stream:
            while True:
                kind, length = struct.unpack("<BI", stream.receive(5))
                _check_size(len(output) + length, LARGEST_OUTPUT)
                data = stream.receive(length)
                if kind == 3:
                    return data[0], bytes(output)
                output += data

    def _run_old(self, command: str) -> tuple[int, bytes]:
        """Before Android 7 a shell tells no exit status: it has to print it."""
        with self.open(f"shell:{command}; echo {_STATUS.decode()}$?") as stream:
            output, found, status = stream.receive_all().rpartition(_STATUS)
        if not found:
            raise DeviceLost("the connection broke before the command ended")
        return int(status), output

    def take_screenshot(self) -> bytes:
        with self.open("exec:screencap -p") as stream:
            image = stream.receive_all()
        if not image.startswith(PNG_START):
            raise DeviceError(f"screencap wrote no image: {image[:200].decode(errors='replace').strip() or 'nothing'}")
        if not image.endswith(PNG_END):
            raise DeviceLost("the connection broke in the middle of a screenshot")
        return image

    def push(self, source: BinaryIO, target: str) -> None:
        with self.open("sync:") as stream:
            path = f"{target},{0o100644}".encode()
            stream.conn.sendall(struct.pack("<4sI", b"SEND", len(path)) + path)
            while chunk := source.read(CHUNK):
                stream.conn.sendall(struct.pack("<4sI", b"DATA", len(chunk)) + chunk)
            stream.conn.sendall(struct.pack("<4sI", b"DONE", int(time.time())))
            stream.expect_sync(b"OKAY")

    def pull(self, source: str) -> bytes:
        content = bytearray()
        with self.open("sync:") as stream:
            path = source.encode()
            stream.conn.sendall(struct.pack("<4sI", b"RECV", len(path)) + path)
            while (length := stream.expect_sync(b"DATA", b"DONE")) is not None:
                _check_size(len(content) + length, LARGEST_PULL)
                content += stream.receive(length)
        return bytes(content)

    def reboot(self) -> None:
        with self.open("reboot:") as stream:
            stream.receive_all()


class _Connection(AdbConnection):  # type: ignore[misc] # adbutils is not typed
    """A connection to the server, with what adbutils reads and writes on it."""

    def __init__(self, connected: socket.socket, on_close: Callable[[socket.socket], None]) -> None:
        self._socket, self._on_close = connected, on_close
        self._reader: BufferedReader | None = None

    @property
    def conn(self) -> socket.socket:
        return self._socket

    def close(self) -> None:
        self._on_close(self._socket)
        if self._reader is not None:
            self._reader.close()
        self._socket.close()

    def request(self, service: str) -> None:
        """Ask for a service; an `AdbError` if it is refused."""
        encoded = service.encode()
        if len(encoded) > 0xFFFF:
            raise DeviceError("a command for adb may have at most 65,535 bytes; push a script and run that")
        self._socket.sendall(b"%04x" % len(encoded) + encoded)
        self.check_okay()

    def receive(self, size: int) -> bytes:
        """So many bytes. The connection breaks if it ends before. Once this is used, nothing else reads."""
        if self._reader is None:
            self._reader = cast("BufferedReader", self._socket.makefile("rb", READ_AHEAD))
        content = self._reader.read(size)
        if len(content) < size:
            raise DeviceLost("the connection broke in the middle of an answer")
        return content

    def receive_all(self) -> bytes:
        """All that comes until the other side closes."""
        content = bytearray()
        while part := self._socket.recv(CHUNK):
            content += part
            _check_size(len(content), LARGEST_OUTPUT)
        return bytes(content)

    def expect_sync(self, *names: bytes) -> int | None:
        """The length in an answer of the file service that has one of these names; None if that ends it."""
        name, length = struct.unpack("<4sI", self.receive(8))
        if name == b"FAIL":
            raise DeviceError(self.receive(min(length, CHUNK)).decode(errors="replace"))
        if name not in names:
            raise DeviceLost(f"the device broke the protocol of files with {name!r}")
        return int(length) if name == b"DATA" else None


def _check_size(size: int, most: int) -> None:
    """Closing the connection then ends the command on the device."""
    if size > most:
        raise output_too_large(most)


# --- the server -------------------------------------------------------------------------------------------------------


def ensure_server(host: str, port: int) -> None:
    """Start the adb server of this machine if none runs. It listens on loopback only. An installed adb is preferred to
    that of adbutils: two versions on one machine would end each other's server."""
    if _is_running(host, port):
        return
    if host not in _LOOPBACK:
        raise DeviceLost(f"no adb server runs at {host}:{port}; start it there with `adb -a -P {port} start-server`")
    with _starting:
        if _is_running(host, port):
            return
        try:
            binary = adb_path()
            done = subprocess.run(
                [binary, "-P", str(port), "start-server"],
                check=False,
                # Without this it listens to the network as well, for phones that announce themselves.
                # It outlives this program.
                env={"ADB_MDNS": "0", **child_environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=START_S,
            )
        except (AdbError, OSError, subprocess.TimeoutExpired) as error:
            raise DeviceLost(f"no adb server runs at {host}:{port}, and starting one failed: {error}") from None
    if done.returncode:
        command = shlex.join([binary, "-P", str(port), "nodaemon", "server"])
        raise DeviceLost(f"no adb server runs at {host}:{port}, and none starts; `{command}` shows why")


def _is_running(host: str, port: int) -> bool:
    try:
        _connect(host, port).close()
    except AdbError:
        return False
    return True


def _connect(host: str, port: int) -> socket.socket:
    try:
        connected = socket.create_connection((host, port), timeout=CONNECT_S)
    except OSError as error:
        raise NoAdbServer(f"no adb server answers at {host}:{port} ({error}); connecting again starts one") from None
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


class NoAdbServer(AdbError):  # type: ignore[misc] # adbutils is not typed
    """The adb server does not answer."""


FAILURES = (DeviceError, AdbError, OSError, EOFError, ValueError, struct.error)
"""What may go wrong in a call, as far as it is not a mistake of ours."""

# --- errors -----------------------------------------------------------------------------------------------------------


def is_address(serial: str) -> bool:
    """Whether adb reaches this device over the network, so that it has to be told to connect."""
    host, colon, port = serial.rpartition(":")
    return bool(colon and host and port.isdecimal())


def state_error(state: str | None) -> DeviceLost:
    """The error of a device that is not ready."""
    if state is None:
        return DeviceLost("adb knows no device of this serial; plug it in or start the emulator; see `adb devices`")
    if state == "offline":
        return DeviceLost("it is offline: adb sees it, but it does not answer; plug it in again, or restart it")
    if state in ("unauthorized", "authorizing"):
        return DeviceLost("it is unauthorized; unlock it, and allow debugging by this computer in the dialog it shows")
    if state.startswith("no permissions"):
        return DeviceLost("adb may not open its USB port; see https://developer.android.com/tools/device.html")
    return DeviceLost(f"it is not ready: its state is {state!r}")


def as_device_error(error: Exception, serial: str) -> DeviceError:
    """The error of a call, as an error of the device."""
    if isinstance(error, DeviceError):
        return type(error)(f"{serial}: {error}")
    text = str(error)
    if isinstance(error, NoAdbServer):
        lost = DeviceLost(text)
    elif isinstance(error, TimeoutError | AdbTimeout):
        lost = DeviceLost("it does not answer")
    elif not isinstance(error, AdbError):
        lost = DeviceLost(f"the connection to the adb server broke: {text or type(error).__name__}")
    elif "not found" in text:
        lost = state_error(None)
    elif "offline" in text:
        lost = state_error("offline")
    elif "unauthorized" in text or "authorizing" in text:
        lost = state_error("unauthorized")
    else:
        lost = DeviceLost(f"adb says: {text}")
    return DeviceLost(f"{serial}: {lost}")
