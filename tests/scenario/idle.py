"""An idle node, measured: `python -m tests.scenario.idle URL SECONDS` prints wake-ups a second and seconds of CPU."""

from __future__ import annotations

import asyncio
import json
import selectors
import sys
import time

from tests.scenario.jobs import build

# What the start and the first tasks have set off is over by then, and a database's connections know what they are
# asked: each prepares a statement when it first meets it, which takes half a dozen more answers.
SETTLE_S = 4.0


class CountingSelector(selectors.DefaultSelector):
    """Counts how often the loop went to sleep, and so was woken."""

    sleeps = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            CountingSelector.sleeps += 1
        return super().select(timeout)


async def main(url: str, seconds: float) -> None:
    async with build(url) as yard:
        assert await (await yard.submit("add", {"a": 1})).result(timeout_s=10) == 2
        await yard.submit("echo", delay_s=3600)
        await asyncio.sleep(SETTLE_S)
        sleeps, cpu = CountingSelector.sleeps, time.process_time()
        await asyncio.sleep(seconds)
        # One of them is that of this very sleep.
        print(json.dumps([(CountingSelector.sleeps - sleeps - 1) / seconds, time.process_time() - cpu]))


if __name__ == "__main__":
    loop = asyncio.SelectorEventLoop(CountingSelector())
    loop.run_until_complete(main(sys.argv[1], float(sys.argv[2])))
