"""Code that leaves something behind and is killed. In a module of its own, so that a worker process can import it."""

import os
import signal

from taskyard import current_run
from taskyard.model.attempt import ARTIFACT_DATA_BYTES

LARGE = b"x" * (ARTIFACT_DATA_BYTES + 1)


def die() -> None:
    run = current_run()
    run.log("before %s", "the end")
    print("printed")
    run.artifact("small.txt", "kept")
    run.artifact("large.bin", LARGE)
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> int:
    """Leaves a line and both kinds of artifacts."""
    run = current_run()
    run.log("a line")
    run.artifact("small.txt", "kept")
    run.artifact("large.bin", LARGE)
    return os.getpid()
