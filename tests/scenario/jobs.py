"""The yard of the scenarios; every process of a test builds the same one.

`python -m tests.scenario.jobs URL PORT SETTINGS` is a node of its own: it prints `open`, runs what is due, and stops
when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from taskyard import RetryPolicy, Yard
from taskyard.ports.store import Store
from tests.scenario.gates import attend, attend_in_thread

QUICK = RetryPolicy(max_retries=3, first_s=0.01, factor=1, jitter=0)


def build(url: str | Store, port: int = 0, *, queues: dict[str, dict[str, Any]] | None = None, **settings: Any) -> Yard:
    """`queues` maps names to what `define_queue` takes; `each` is how many of one source a process runs at once."""
    each = settings.pop("each", 50)
    yard = Yard(url, **settings)
    for name, rules in (queues or {}).items():
        yard.define_queue(name, **rules)

    @yard.consumer(concurrency=each)
    async def gate(name: str) -> Any:
        return await attend(port, name)

    @yard.consumer(concurrency=each)
    async def other_gate(name: str) -> Any:
        return await attend(port, name)

    @yard.consumer(concurrency=1)
    async def narrow_gate(name: str) -> Any:
        return await attend(port, name)

    @yard.consumer(concurrency=each)
    def thread_gate(name: str) -> Any:
        return attend_in_thread(port, name)

    @yard.consumer(concurrency=each)
    async def echo(value: Any = None) -> Any:
        return value

    @yard.consumer
    async def add(a: int, b: int = 1) -> int:
        return a + b

    return yard


async def main(url: str, port: str, settings: str) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with build(url, int(port), **json.loads(settings)):
        print("open", flush=True)
        await reader.read()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
