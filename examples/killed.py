"""Kill -9 in the middle of a task: the process is gone, the task is not.

    python examples/killed.py

Starts itself twice as a worker, kills the first one while it works, and shows what the store has to say about it.
"""

import asyncio
import os
import signal
import subprocess
import sys

from taskyard import EventKind, Yard, current_run

yard = Yard("sqlite:///killed.db")


@yard.consumer
async def dig(metres: int) -> str:
    run = current_run()
    if run.attempt == 1:
        await asyncio.sleep(3600)  # the first run never gets to the end of this
    return f"{metres} m, at attempt {run.attempt}"


async def work() -> None:
    async with yard:
        await asyncio.Event().wait()


async def watch() -> None:
    first = subprocess.Popen([sys.executable, __file__, "worker"])
    second = None
    async with yard.client():
        start = (await yard.store.events(after=-1)).last
        handle = await dig.submit(12)
        async for event in yard.events(after=start):
            if event.uuid != handle.uuid:
                continue
            print(event.kind)
            if event.kind is EventKind.STARTED and second is None:
                os.kill(first.pid, signal.SIGKILL)
                print("(killed -9)")
                second = subprocess.Popen([sys.executable, __file__, "worker"])
            if event.kind is EventKind.COMPLETED:
                break
        print(await handle.result())
    for worker in (first, second):
        if worker is not None:
            worker.terminate()
            worker.wait()


if __name__ == "__main__":
    asyncio.run(work() if sys.argv[1:] == ["worker"] else watch())
