"""A host to be killed: runs a call that has hidden a grandchild, says who is there, and waits, or just ends.

python -m tests.execution.host FOLDER nursery|portable|forks|ends
"""

import asyncio
import ctypes
import json
import os
import sys
from pathlib import Path

from taskyard.execution.calls import PendingCall
from taskyard.execution.nursery import NURSERY
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import make_pool
from taskyard.testing.pipe import Pipe
from tests.execution import misdeeds


async def main(folder: Path, way: str) -> None:
    pool = make_pool(PoolSettings(max_workers=1), portable=way == "portable")
    worker = (await pool.submit(PendingCall(misdeeds.pid))).data
    keeper = (await pool.submit(PendingCall(misdeeds.keeper))).data
    began = Pipe(str(folder / "began"))
    call = PendingCall(misdeeds.act_hidden, (str(folder / "hidden"), misdeeds.say_and_hang, (began.path,)))
    running = pool.submit(call)
    await began.wait()
    everybody = {"host": os.getpid(), "worker": worker, "hidden": int((folder / "hidden").read_text())}
    if way != "portable":
        everybody |= {"nursery": NURSERY.find_pid() or 0, "keeper": keeper}
    # A child of the host's own that holds copies of all our sockets: C code forks without telling Python.
    if way == "forks" and (child := ctypes.PyDLL(None).fork()) == 0:
        misdeeds.hang()
    elif way == "forks":
        everybody["child"] = child
    print(json.dumps(everybody), flush=True)
    if way != "ends":
        await running


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
