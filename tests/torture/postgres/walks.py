"""P4, where it can go wrong in silence: a task that may start and that no claim comes across. Random walks over all
that moves tasks and marks; a seed replays exactly."""

import traceback
from pathlib import Path

from taskyard.testing.postgres import FAST, Databases, Server
from tests.stores.walk import STEPS, walk
from tests.torture.figures import Figures


def run(_folder: Path, *, trials: int, seed: int) -> Figures:
    figures = Figures(f"P4 postgres: walks of {STEPS} steps, nothing lost sight of", trials)
    server = Server(settings=FAST)
    server.start()
    try:
        databases = Databases(server.url)
        for number in range(seed, seed + trials):
            try:
                walk(databases, number)
            except Exception as exc:
                replay = f"python -m tests.torture pg-walks SEED={number} TRIALS=1"
                figures.failures.append(f"{''.join(traceback.format_exception(exc))}(replay: {replay})")
    finally:
        server.stop()
    return figures
