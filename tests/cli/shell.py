"""A user at a shell: runs `taskyard` in a folder of its own, to the end or in the background."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from taskyard import TaskRecord
from taskyard.cli.app import run
from taskyard.errors import TaskEnded
from tests.cli.sample_app import yard

LONG_S = 30.0
"""Nothing takes that long, even on a busy machine: a test that waits so long has failed."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Background:
    """A command that goes on. What it prints, on either stream, is heard line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.heard: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read, args=(stream,)) for stream in (process.stdout, process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str] | None) -> None:
        assert stream is not None
        with stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def hear(self, text: str) -> str:
        """Wait for a line with `text` in it."""
        ended = 0
        while ended < 2:
            line = self._lines.get(timeout=LONG_S)
            if line is None:
                ended += 1
                continue
            self.heard.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} was never said; this was: {''.join(self.heard)}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the end; what was still said is heard."""
        code = self.process.wait(timeout=LONG_S)
        for reader in self._readers:
            reader.join()
        while not self._lines.empty():
            line = self._lines.get()
            if line is not None:
                self.heard.append(line)
        return code

    @property
    def said(self) -> str:
        return "".join(self.heard)


class Shell:
    """A folder with `app.py` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = "sqlite:///work.db"
        self.path = folder / "work.db"
        self._background: list[Background] = []
        shutil.copy(Path(__file__).with_name("sample_app.py"), folder / "app.py")

    def _environment(self, given: dict[str, str]) -> dict[str, str]:
        ours = ("TASKYARD_STORE", "TASKYARD_APP", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
        return {name: value for name, value in os.environ.items() if name not in ours} | given

    def run(self, *arguments: str, **variables: str) -> Done:
        """Run one command to its end."""
        done = subprocess.run(
            [sys.executable, "-m", "taskyard.cli", *arguments],
            cwd=self.folder,
            env=self._environment(variables),
            capture_output=True,
            text=True,
            timeout=LONG_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def ok(self, *arguments: str, **variables: str) -> Done:
        """The same for a command that must succeed."""
        done = self.run(*arguments, **variables)
        assert done.code == 0, done
        return done

    def here(self, *arguments: str, **variables: str) -> Done:
        """The same in this process, which is quicker: the same function, with its output caught."""
        out, err = io.StringIO(), io.StringIO()
        before = dict(os.environ)
        try:
            os.environ.clear()
            os.environ.update(self._environment(variables))
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run(arguments)
        finally:
            os.environ.clear()
            os.environ.update(before)
        return Done(code, out.getvalue(), err.getvalue())

    def on_a_terminal(self, *arguments: str, typed: str = "", **variables: str) -> Done:
        """The same on a terminal: what it shows, with all that moves the cursor. What is `typed` waits to be read."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "taskyard.cli", *arguments],
            cwd=self.folder,
            env=self._environment({"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"} | variables),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        os.write(ours, typed.encode())
        screen = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while block := os.read(ours, 65536):
                screen += block
        os.close(ours)
        return Done(process.wait(timeout=LONG_S), screen.decode(), "")

    def start(self, *arguments: str, **variables: str) -> Background:
        process = subprocess.Popen(
            [sys.executable, "-m", "taskyard.cli", *arguments],
            cwd=self.folder,
            env=self._environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        background = Background(process)
        self._background.append(background)
        return background

    def start_worker(self, *options: str) -> Background:
        """A worker that has joined the store."""
        worker = self.start("worker", "app:yard", *options)
        worker.hear("is running")
        return worker

    def close(self) -> None:
        for background in self._background:
            if background.process.poll() is None:
                background.process.kill()
            background.end()

    # --- without the command line, which takes longer -----------------------------------------------------------------

    def seed(self, *tasks: tuple[str, dict[str, Any]], work: bool = False, **options: Any) -> list[str]:
        """Submit tasks to the store, and with `work` run them to their ends; their ids."""
        return asyncio.run(self._seed(tasks, work, options))

    async def _seed(
        self, tasks: Sequence[tuple[str, dict[str, Any]]], work: bool, options: dict[str, Any]
    ) -> list[str]:
        yard.use_store(f"sqlite:///{self.path}")
        async with yard if work else yard.client():
            handles = [await yard.submit(name, arguments, **options) for name, arguments in tasks]
            for handle in handles if work else ():
                with contextlib.suppress(TaskEnded):
                    await handle.result(timeout_s=LONG_S)
        return [handle.uuid for handle in handles]

    def record(self, uuid: str) -> TaskRecord:
        """What the store holds of a task."""

        async def look() -> TaskRecord:
            yard.use_store(f"sqlite:///{self.path}")
            async with yard.client():
                return await yard.handle(uuid).record()

        return asyncio.run(look())
