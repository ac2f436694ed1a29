"""Steering from inside: wait for something outside without holding a slot, and give up with a reason.

python examples/patient.py
"""

import asyncio
import tempfile
from pathlib import Path

from taskyard import Cancel, RetryLater, TaskCanceled, Yard, current_run

yard = Yard("memory://")


@yard.consumer
def fetch_when_there(path: str, tries: int = 5) -> str:
    file = Path(path)
    if not file.exists():
        if current_run().attempt >= tries:
            raise Cancel(f"{file.name} did not appear")  # ends as canceled, not as failed
        raise RetryLater(0.1, "not there yet")  # uses up no retry, and frees the slot meanwhile
    return file.read_text()


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with yard:
            late = await fetch_when_there.submit(f"{folder}/late.txt", tries=100)
            never = await fetch_when_there.submit(f"{folder}/never.txt")
            await asyncio.sleep(0.25)
            Path(folder, "late.txt").write_text("here I am")
            print(await late.result(timeout_s=10), "after", (await late.record()).attempt, "attempts")
            try:
                await never.result(timeout_s=10)
            except TaskCanceled as canceled:
                print(canceled.reason)


if __name__ == "__main__":
    asyncio.run(main())
