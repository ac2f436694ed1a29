"""A host to be killed: runs a call that has hidden a grandchild, says who is there, and waits.

python -m tests.execution.host FOLDER nursery|portable|forks
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from taskyard.execution.calls import PendingCall
from taskyard.execution.nursery import NURSERY
from taskyard.execution.pool import PoolSettings
from taskyard.execution.process import make_pool
from tests.execution import misdeeds


async def main(folder: Path, way: str) -> None:
    pool = make_pool(PoolSettings(max_workers=1), portable=way == "portable")
    worker = (await pool.submit(PendingCall(misdeeds.pid))).data
    keeper = (await pool.submit(PendingCall(misdeeds.keeper))).data
    call = PendingCall(misdeeds.act_hidden, (str(folder / "hidden"), misdeeds.say_and_hang, (str(folder / "began"),)))
    running = pool.submit(call)
    while not (folder / "began").exists():  # noqa: ASYNC110 -- another process writes it
        await asyncio.sleep(0.005)
    everybody = {"host": os.getpid(), "worker": worker, "hidden": int((folder / "hidden").read_text())}
    if way != "portable":
        everybody |= {"nursery": NURSERY.pid or 0, "keeper": keeper}
    if way == "forks" and (child := os.fork()) == 0:
        # A child of the host's own, which holds copies of all our sockets, as `multiprocessing` makes them.
        misdeeds.hang()
    elif way == "forks":
        everybody["child"] = child
    print(json.dumps(everybody), flush=True)
    await running


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
