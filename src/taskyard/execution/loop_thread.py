"""An event loop in a thread of its own: what the blocking faces and the futures stand on."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from taskyard.execution.forks import Home


class LoopThread:
    """`main` is all of its life: when it has ended, what else is on the loop is cancelled, the loop is closed, and
    `on_end` is called, in the thread. The thread is a daemon, and has nothing of the context of whoever starts it."""

    def __init__(
        self,
        main: Callable[[], Coroutine[Any, Any, object]],
        *,
        name: str,
        make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = asyncio.Runner(loop_factory=make_loop)
        self.loop = contextvars.Context().run(self._runner.get_loop)
        self._main, self._on_end = main, on_end
        self.home = Home()
        self.home.claim()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    def _run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._main())
        finally:
            self._on_end()

    def join(self) -> None:
        self._thread.join()


class ServingThread(LoopThread):
    """A loop for whoever asks, until it is ended."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        super().__init__(self._stop.wait, name="taskyard-loop")

    def end(self) -> None:
        if not self.home.is_elsewhere:
            self.loop.call_soon_threadsafe(self._stop.set)
            self.join()
