"""What the worker processes are asked to do. In a module of its own, which all sides import alike."""

import os
import signal
import time
from typing import Any


def noop() -> None:
    pass


def echo(value: Any) -> Any:
    return value


def ends(array: Any) -> float:
    """A number of an array, so that all of it has to be there and nearly nothing is computed."""
    return float(array[0] + array[-1])


def hang() -> None:
    """Until it is killed: SIGTERM does not end it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def crash_sometimes(number: int, every: int) -> int:
    if number % every == 0:
        os._exit(1)
    return number


def burn(seconds: float) -> int:
    """Pure Python that keeps one core busy, and the GIL of whoever runs it."""
    until, turns = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        turns += 1
    return turns
