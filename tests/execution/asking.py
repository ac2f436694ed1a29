"""Short ways to ask a dispatcher, and runs that last until a test lets them go."""

import asyncio
from typing import Any

from taskyard import AlgorithmSpec, ErrorKind, ExecutionDispatcher, ExecutionError, ExecutionHints, ExecutionResult
from taskyard.testing.pipe import Pipe

PATIENCE_S = 20

SYSTEM = ExecutionError(kind=ErrorKind.SYSTEM, message="its worker died")


def spec(name: str, *, fallback: str | None = None, **hints: Any) -> AlgorithmSpec:
    return AlgorithmSpec(name, "1.0", execution=ExecutionHints(**hints), fallback=fallback)


class Held:
    """A run of `wait` that is let go when the test says so."""

    def __init__(self, folder: Any) -> None:
        folder.mkdir()
        self.folder = str(folder)
        self.pipes = [Pipe(f"{folder}/began"), Pipe(f"{folder}/gate")]

    async def began(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.pipes[0].wait()

    def let_go(self) -> None:
        self.pipes[1].write()


def begin(dispatcher: ExecutionDispatcher, *args: Any, **fields: Any) -> asyncio.Task[ExecutionResult]:
    return asyncio.get_running_loop().create_task(dispatcher.run(*args, **fields))
