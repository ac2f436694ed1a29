"""How often a process tries to connect, noted by itself: a try that the server never hears of counts as well."""

import functools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import asyncpg

WINDOW_S = 10.0
"""The rate is that of the busiest so many seconds."""


class Connects:
    def __init__(self, folder: Path, name: str) -> None:
        self._path = path_of(folder, name)

    def install(self) -> None:
        """For the rest of this process's life."""
        inner = asyncpg.connect

        @functools.wraps(inner)
        async def connect(*args: Any, **options: Any) -> Any:
            with self._path.open("a") as file:  # a line, in a test
                file.write(f"{time.monotonic()}\n")
            return await inner(*args, **options)

        asyncpg.connect = connect


def path_of(folder: Path, name: str) -> Path:
    return folder / f"connects-{name}"


def read_connects(folder: Path, name: str, *, since_mono: float) -> list[float]:
    lines = path_of(folder, name).read_text().splitlines()
    return [at for at in map(float, lines) if at >= since_mono]


def busiest(times: Iterable[float], window_s: float = WINDOW_S) -> float:
    """The most tries a second in any window, the first of the times in it."""
    ordered = sorted(times)
    most, first = 0, 0
    for last, at in enumerate(ordered):
        while ordered[first] <= at - window_s:
            first += 1
        most = max(most, last - first + 1)
    return most / window_s
