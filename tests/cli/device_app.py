"""An app with a pool of simulated devices; a test of devices has a copy of it in its folder."""

import asyncio
import threading
from pathlib import Path

from taskyard import Yard, current_run
from taskyard.devices import Device, GameAccount, SimulatedDevice

yard = Yard("sqlite:///work.db")
pool = yard.device_pool(
    "phones",
    devices=[SimulatedDevice(n, name=f"emu-{n}", labels={"role": role}) for n, role in ((1, "eu"), (2, "us"))],
    heartbeat_s=1.0,
    quarantine_account_after=2,
)


def wait_for(path: Path) -> None:
    nothing = threading.Event()
    while not path.exists():
        nothing.wait(0.01)


@pool.consumer(name="daily")
async def daily(device: Device, account: GameAccount, path: str = "") -> int | str:
    """Runs until the file is there."""
    current_run().progress(0.5, "half way")
    print("daily has begun", flush=True)
    if path:
        await asyncio.to_thread(wait_for, Path(path))
    return account.account_id


@pool.consumer(name="broken")
async def broken(device: Device, account: GameAccount) -> None:
    raise RuntimeError("the game refused the login")
