"""Trials that mostly wait, made side by side: each part in a process, with a server and a zygote of its own."""

import logging
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.torture.figures import Figures
from tests.torture.zygote import Zygote

ALONE_UP_TO = 10
"""Trials that are made right here."""

Part = Callable[..., Figures]


def spread(part: Part, where: Path, *, trials: int, seed: int, ways: int = 4) -> Figures:
    """What `part(where, trials=…, seed=…)` makes of its share, put together."""
    if trials <= ALONE_UP_TO:
        return part(where, trials=trials, seed=seed)
    shares = [trials // ways + (number < trials % ways) for number in range(ways)]
    folders = [where / f"part-{number}" for number in range(ways)]
    for folder in folders:
        folder.mkdir()
    with ProcessPoolExecutor(ways, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = [
            pool.submit(partial(_apart, part, folder, trials=share, seed=seed + number))
            for number, (folder, share) in enumerate(zip(folders, shares, strict=True))
        ]
        parts = [one.result() for one in made]
    figures = Figures(parts[0].promise, 0)
    figures.add(parts)
    return figures


def _apart(part: Part, where: Path, *, trials: int, seed: int) -> Figures:
    logging.getLogger("taskyard").setLevel(logging.CRITICAL)
    try:
        return part(where, trials=trials, seed=seed)
    finally:
        Zygote.end()
