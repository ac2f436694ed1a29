"""A real adb server of its own: on a free port, with a home of its own, so that it touches nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START_S = 20.0
"""Seconds: what `adb` may take on a busy machine; mostly it takes a tenth of one."""


class AdbServer:
    """The server of the adb binary inside adbutils. Without that binary `start` fails: tests are never left out."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="taskyard-adb-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self.environment = {
            "HOME": self._home.name,
            "TMPDIR": self._home.name,  # A server that was not started here writes its log there.
            # It looks for nothing by itself: no phones at USB ports, in the network, and no emulators.
            "ADB_USB": "0",
            "ADB_MDNS": "0",
            "ADB_LOCAL_TRANSPORT_MAX_PORT": "5553",
        }

    def start(self) -> None:
        # It ends with us, also if we are killed.
        die_with_us = ["setpriv", "--pdeathsig", "TERM"] if sys.platform == "linux" else []
        with (Path(self._home.name) / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*die_with_us, *self._command("nodaemon", "server")],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + START_S
        while not _answers(self.port):
            if self._process.poll() is not None or time.monotonic() > until:
                log_text = (Path(self._home.name) / "log").read_text(errors="replace")
                raise RuntimeError(f"the adb server does not start: {log_text}")
            time.sleep(0.01)

    def stop(self) -> None:
        self.adb("kill-server")
        if self._process is not None:
            self._process.wait(START_S)
        self._home.cleanup()

    def adb(self, *arguments: str) -> str:
        """Run `adb` with this server; its output. Some commands start the server if none runs."""
        # A server that is started would keep a pipe open, so output goes to a file.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                self._command(*arguments),
                check=False,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=START_S,
            )
            output.seek(0)
            text = output.read().decode(errors="replace")
        if done.returncode:
            raise RuntimeError(f"adb {' '.join(arguments)} ended with status {done.returncode}: {text}")
        return text

    def _command(self, *arguments: str) -> list[str]:
        return [str(find_adb()), "-P", str(self.port), *arguments]


def find_adb() -> Path:
    """The binary inside adbutils, whatever else is installed."""
    import adbutils

    binary = Path(adbutils.__file__).parent / "binaries" / "adb"
    if not binary.exists():
        raise RuntimeError(f"there is no adb binary at {binary}; `pip install taskyard[devices]` brings one for Linux")
    return binary


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
