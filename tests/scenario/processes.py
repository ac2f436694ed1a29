"""Other processes, for tests in which another process is meant."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.scenario.gates import PATIENCE_S

TOP = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """This process's own, in which the package and the tests can be imported, and which names no store."""
    env = {name: value for name, value in os.environ.items() if name != "TASKYARD_STORE"}
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(TOP)]))} | more


def run_python(code: str, *args: str, timeout_s: float = 30, **env: str) -> str:
    """What a script prints. A script that fails, fails the test with what it said."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env=environment(**env),
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"the script ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Nodes:
    """Starts processes that run the yard of `tests.scenario.jobs`, and leaves none behind."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._started: list[asyncio.subprocess.Process] = []

    async def start(self, url: str, **settings: Any) -> Node:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.scenario.jobs",
            url,
            str(self._port),
            json.dumps(settings),
            env=environment(),
            cwd=TOP,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._started.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert await process.stdout.readline() == b"open\n"
        return Node(process)

    async def end(self) -> None:
        for process in self._started:
            if process.returncode is None:
                process.kill()
            await process.wait()


class Node:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def kill(self) -> None:
        """As by `kill -9`."""
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> int:
        """In good order; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            return await self._process.wait()
