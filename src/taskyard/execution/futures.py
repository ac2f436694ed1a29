"""`ProcessPool`: the process pool as a `concurrent.futures` executor, for whoever takes one.

What code relies on with the standard library's `ProcessPoolExecutor` holds here; what is better: a worker that dies
fails one call and not the pool, and a call can have a time limit that really ends it.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Executor, Future
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

from taskyard.errors import quote
from taskyard.execution.checks import check_flag, check_function, check_seconds, check_whole
from taskyard.execution.chunk import Chunk
from taskyard.execution.pool import PoolNumbers
from taskyard.execution.pool_loop import CallFuture, PoolLoop, Work
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import HAS_NURSERY
from taskyard.execution.raising import CannotCross, name_of

P = ParamSpec("P")
T = TypeVar("T")

Async = Callable[P, Coroutine[Any, Any, T]]
"""An async function; what it returns is what its caller gets."""


class PoolOptions(TypedDict, total=False):
    """What else a pool may be told, each as in `PoolSettings`; `recycle_after` has the name it has in the standard
    library."""

    max_tasks_per_child: int | None
    recycle_rss: int | None
    memory_limit: int | None
    load_s: float
    pipeline: int
    spare: bool
    preload: tuple[str, ...]


class ProcessPool(Executor):
    """`max_workers`: by default the usable cores less one. `initializer(*initargs)` is called in every worker before
    its first call. `mp_context`: "spawn" is `portable`, "forkserver" is what is done on Linux anyway, "fork" is
    refused. `timeout_s`: the longest a call may run; then it and everything it started is ended. `portable` uses
    nothing that only Linux has: each worker is a fresh interpreter, and what its code puts into a session of its own is
    out of reach. Its thread and workers start with the first submit."""

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: BaseContext | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        timeout_s: float | None = None,
        portable: bool = not HAS_NURSERY,
        **options: Unpack[PoolOptions],
    ) -> None:
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        check_flag("portable", portable)
        settings = _settings(max_workers, _setup(initializer, initargs), options)
        self.max_workers, self._timeout_s = settings.max_workers, timeout_s
        self._loop = PoolLoop(settings, portable=_is_portable(mp_context, portable))
        weakref.finalize(self, self._loop.abandon).atexit = False

    @property
    def numbers(self) -> PoolNumbers:
        """Of this moment."""
        return self._loop.numbers

    @property
    def _max_workers(self) -> int:
        """Where other libraries look for it."""
        return self.max_workers

    @overload
    def submit(self, fn: Async[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...

    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...

    def submit(self, fn: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[Any]:
        """Call `fn` in a worker process. Functions of a script's `__main__` work; lambdas and nested ones do not. An
        async one is run to its end there."""
        return self._submit(self._timeout_s, fn, args, kwargs)

    @overload
    def submit_within(
        self, timeout_s: float | None, fn: Async[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallFuture[T]: ...

    @overload
    def submit_within(
        self, timeout_s: float | None, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallFuture[T]: ...

    def submit_within(
        self, timeout_s: float | None, fn: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallFuture[Any]:
        """As `submit`, with a time limit of its own."""
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        return self._submit(timeout_s, fn, args, kwargs)

    def _submit(
        self, timeout_s: float | None, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallFuture[T]:
        check_function(fn)
        future: CallFuture[T] = CallFuture()
        self._loop.submit(Work(future, fn, args, kwargs, timeout_s))
        return future

    @overload
    def map(
        self, fn: Async[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]: ...

    @overload
    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]: ...

    def map(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Any]:
        """As the standard library's: all is submitted now, results come in order, and giving up the iterator cancels
        what has not begun. A chunk is one call: `timeout_s` is for all of it."""
        try:
            chunksize = operator.index(chunksize)
        except TypeError:
            raise TypeError(f"chunksize must be a whole number, not {quote(chunksize)}") from None
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        check_function(fn)
        rows = zip(*iterables, strict=False)
        chunks = iter(lambda: tuple(itertools.islice(rows, chunksize)), ())
        return _unchunk(super().map(Chunk(fn), chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing new; what was submitted is still done, unless `cancel_futures`: then only what runs is."""
        self._loop.shutdown(wait=wait, cancel=cancel_futures)

    def kill_workers(self, *, wait: bool = True, why: str = "its pool was told to kill its workers") -> None:
        """End now: what waits is cancelled, what runs is killed with everything it started, and raises `CallKilled`,
        which says `why`."""
        self._loop.shutdown(wait=wait, kill=why)

    @property
    def ended(self) -> Future[None]:
        """Done when, after a shutdown, the last worker is gone."""
        return self._loop.ended

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        # Ctrl-C reaches the standard library's workers by itself. Ours are in sessions of their own.
        self._loop.shutdown(wait=True, kill="its host was interrupted" if isinstance(exc, KeyboardInterrupt) else "")
        return None


def _unchunk(results: Iterator[list[T]]) -> Iterator[T]:
    """One by one, keeping none of those given out."""
    for result in results:
        result.reverse()
        while result:
            yield result.pop()


def _settings(max_workers: int | None, setup: bytes | None, options: PoolOptions) -> PoolSettings:
    for name in options.keys() - PoolOptions.__annotations__:
        raise TypeError(f"ProcessPool() got an unexpected keyword argument {name!r}")
    given: dict[str, Any] = {**options, "setup": setup}
    most = given.pop("max_tasks_per_child", None)
    if most is not None:
        check_whole("max_tasks_per_child", most, most=None)
        given["recycle_after"] = most
    if max_workers is not None:
        given["max_workers"] = max_workers
    return PoolSettings(**given)


def _setup(initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> bytes | None:
    if initializer is None:
        return None
    if not callable(initializer):
        raise TypeError("initializer must be a callable")
    if not isinstance(initargs, Iterable):
        raise TypeError(f"initargs must be a tuple of arguments for the initializer, not {quote(initargs)}")
    try:
        return pickle.dumps((initializer, tuple(initargs)), 5)
    except Exception as exc:
        raise CannotCross(name_of(initializer), f"{type(exc).__name__}: {exc}") from exc


def _is_portable(context: BaseContext | None, portable: bool) -> bool:
    if not isinstance(context, BaseContext | None):
        raise TypeError(
            f"mp_context must be a context, such as multiprocessing.get_context('spawn'), not {quote(context)}"
        )
    method = "forkserver" if context is None else context.get_start_method()
    if method == "fork":
        raise ValueError(
            "a ProcessPool never forks the process it serves, which has threads; leave mp_context out, and hand over "
            "what workers need as arguments or with an initializer"
        )
    return portable or method == "spawn"
