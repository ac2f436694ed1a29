"""Real work with progress: hash and compress the files of a folder, one compression at a time, urgent ones first.

    python examples/files.py [folder]

While it runs, or afterwards: `taskyard watch --store sqlite:///files.db`.
"""

import asyncio
import sys
import zlib
from hashlib import sha256
from pathlib import Path

from taskyard import Yard, current_run

CHUNK = 1 << 16

yard = Yard("sqlite:///files.db")
yard.define_queue("zip", concurrency=1)  # over every process that opens this store


@yard.consumer(concurrency=4)
def digest(path: str) -> str:
    """A plain function runs in a thread. FileNotFoundError is not worth a retry; a busy disk is."""
    return sha256(Path(path).read_bytes()).hexdigest()


@yard.consumer(queue="zip", timeout_s=60)
def compress(path: str, level: int = 9) -> dict[str, int]:
    """Counts what comes out; writes nothing."""
    run, packer = current_run(), zlib.compressobj(level)
    data = Path(path).read_bytes()
    size = 0
    for start in range(0, len(data), CHUNK):
        size += len(packer.compress(data[start : start + CHUNK]))
        run.progress((start + CHUNK) / len(data), Path(path).name)
    return {"before": len(data), "after": size + len(packer.flush())}


async def main(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())[:10]
    async with yard:
        digests = await digest.submit_many([{"path": str(path)} for path in files])
        small_first = sorted(files, key=lambda path: path.stat().st_size)
        zipped = [
            await compress.options(priority="high" if path is small_first[0] else "normal").submit(str(path))
            for path in files
        ]
        for path, one, other in zip(files, digests, zipped, strict=True):
            sizes = await other.result(timeout_s=60)
            print(f"{path.name}: {sizes['before']} -> {sizes['after']} bytes, {(await one.result())[:12]}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
