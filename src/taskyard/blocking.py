"""The one blocking face of a yard, for code without an event loop and for threads beside one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from taskyard.errors import BlockingOnLoop, TaskyardError
from taskyard.handle import TaskHandle
from taskyard.model.order import Priority
from taskyard.model.task import TaskRecord

if TYPE_CHECKING:
    from taskyard.yard import Yard

T = TypeVar("T")


class BlockingYard:
    """`with yard.blocking() as sync:` — if the yard is open on a loop in another thread, calls go there; if it is not
    open, it is opened on a loop in a thread of its own until the block ends, with its workers unless `serve=False`."""

    def __init__(self, yard: Yard, *, serve: bool = True) -> None:
        self._yard, self._serve = yard, serve
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> BlockingYard:
        self._loop = self._yard.loop
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="taskyard-loop", daemon=True)
            self._thread.start()
            try:
                self._call("yard.blocking()", self._yard.start(serve=self._serve))
            except BaseException:
                self._end_thread()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            try:
                self._call("leaving yard.blocking()", self._yard.stop())
            finally:
                self._end_thread()

    def _end_thread(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._thread = None

    def _call(self, what: str, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None, "use it inside `with yard.blocking():`"
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        try:
            self._yard.refuse_fork()
            if running is self._loop:
                raise BlockingOnLoop(what)
        except TaskyardError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def submit(self, name: str, args: Mapping[str, Any] | None = None, **options: Any) -> TaskHandle:
        return self._call("submit", self._yard.submit(name, args, **options))

    def submit_many(self, name: str, arguments: Iterable[Mapping[str, Any]], **options: Any) -> list[TaskHandle]:
        return self._call("submit_many", self._yard.submit_many(name, arguments, **options))

    def result(self, task: TaskHandle | str, *, timeout_s: float | None = None) -> Any:
        handle = task if isinstance(task, TaskHandle) else self._yard.handle(task)
        return self._call("result", handle.result(timeout_s=timeout_s))

    def record(self, task: TaskHandle | str) -> TaskRecord:
        handle = task if isinstance(task, TaskHandle) else self._yard.handle(task)
        return self._call("record", handle.record())

    def cancel(self, task: TaskHandle | str, *, reason: str = "") -> TaskRecord:
        uuid = task.uuid if isinstance(task, TaskHandle) else task
        return self._call("cancel", self._yard.cancel(uuid, reason=reason))

    def retry(self, task: TaskHandle | str, *, to_head: bool = True) -> TaskRecord:
        uuid = task.uuid if isinstance(task, TaskHandle) else task
        return self._call("retry", self._yard.retry(uuid, to_head=to_head))

    def set_priority(self, task: TaskHandle | str, priority: Priority | str) -> TaskRecord:
        uuid = task.uuid if isinstance(task, TaskHandle) else task
        return self._call("set_priority", self._yard.set_priority(uuid, priority))
