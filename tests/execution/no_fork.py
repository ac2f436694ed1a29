"""Preloaded into a nursery of a test's own: its keepers get no process for their worker while a file exists, whose path
is in the environment."""

import errno
import os
from types import SimpleNamespace

from taskyard.execution import keeper

PATH = "TASKYARD_TESTS_NO_FORK"


def _fork() -> int:
    if os.path.exists(os.environ[PATH]):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return os.fork()


if PATH in os.environ:
    vars(keeper)["os"] = SimpleNamespace(**{**vars(os), "fork": _fork})
