"""The thread in which the plain functions of one device run, so that one that blocks holds up no other device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class DeviceThread:
    """Started by the first job, and kept: libraries may tie a connection to a thread. It is a daemon: a job that never
    ends must not hold up the end of the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], None]) -> None:
        """Run it when the one before has ended. It must not raise. RuntimeError if the system has no thread left."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=f"taskyard-device-{self._name}", daemon=True)
            thread.start()
            self._thread = thread
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread when its jobs have ended; a later job starts a new one."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread, self._jobs = None, queue.SimpleQueue()

    def _work(self) -> None:
        jobs = self._jobs
        while (job := jobs.get()) is not None:
            job()
            del job  # an idle thread must not keep the last arguments alive
