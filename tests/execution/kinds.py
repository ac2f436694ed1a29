"""The executors of the standard library and ours, by name: what holds for one is tested on all."""

import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest

from taskyard.execution.io_pool import ThreadPool
from taskyard.futures import ProcessPool

PATIENCE_S = 30

Maker = Callable[..., Any]

PROCESSES: dict[str, Maker] = {
    "stdlib": functools.partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("spawn")),
    "ours": ProcessPool,
    "portable": functools.partial(ProcessPool, portable=True),
}
THREADS: dict[str, Maker] = {"stdlib-threads": ThreadPoolExecutor, "our-threads": ThreadPool}

EVERY = pytest.mark.parametrize("kind", [*PROCESSES, *THREADS], scope="module")
PROCESS = pytest.mark.parametrize("kind", PROCESSES, scope="module")
