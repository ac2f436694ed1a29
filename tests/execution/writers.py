"""Consumers that write lines and keep artifacts. Workers import this module."""

import asyncio
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from taskyard import InvalidInput, current_run

log = logging.getLogger("app.part")

FEW_MEET = threading.Barrier(2)


def write_all() -> None:
    """One line in each way."""
    current_run().log("by %s", "the run")
    log.warning("by %s", "logging")
    print("by", "print")
    print("by stderr", file=sys.stderr)


async def write_all_async() -> None:
    await asyncio.sleep(0)
    write_all()


def write_levels() -> None:
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        current_run().log("text", level=level)


def write_oddly() -> None:
    """Unfinished lines, a progress bar, empty lines, a NUL, half a surrogate pair, and arguments that do not fit."""
    print("10%", end="\r")
    print("20%", end="\r")
    print("30%\r\n\n  ")
    print("a\0b")
    current_run().log("half \ud800")
    current_run().log("%d", "no number")
    print("the", end=" ")
    print("end", end="")


def write_many(count: int, text: str = "line") -> None:
    for n in range(count):
        print(text, n)


def write_at_once(count: int) -> None:
    print("\n".join(f"line {n}" for n in range(count)))


def write_in_pieces(count: int) -> None:
    for n in range(count):
        print(f"<{n}>", end="")


def write_a_long_traceback() -> None:
    try:
        raise ValueError("x" * 10_000)
    except ValueError:
        try:
            raise KeyError("the end")
        except KeyError:
            log.exception("it went wrong")


def write_for(seconds: float) -> int:
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        print("again")
        count += 1
    return count


def write_and_die(count: int) -> None:
    write_many(count)
    log.warning("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def write_and_raise() -> None:
    try:
        raise KeyError("inner")
    except KeyError:
        log.exception("it went wrong")
    raise ValueError("outer")


def write_through_own_handler() -> None:
    """A handler that writes to the standard error of this moment."""
    own = logging.getLogger("app.own")
    own.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    own.addHandler(handler)
    try:
        own.warning("once")
    finally:
        own.removeHandler(handler)


def write_in_turn(name: str) -> None:
    """Two of these write at the same time."""
    for n in range(20):
        FEW_MEET.wait(10)
        print(name, n)
        log.warning("%s %d", name, n)
        current_run().log("%s %d", name, n)


class Redact(logging.Filter):
    """Hides a secret, and drops what is dull."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage().replace("secret", "***"), ()
        return "dull" not in record.msg


def write_through_filters() -> None:
    by_logger, by_handler, without = (logging.getLogger(f"app.filtered.{name}") for name in ("logger", "handler", "no"))
    by_logger.propagate = by_handler.propagate = without.propagate = False
    by_logger.filters, handler = [Redact()], logging.StreamHandler(io.StringIO())
    handler.addFilter(Redact())
    by_handler.handlers = [handler]
    by_logger.warning("logger: %s", "secret")
    by_logger.warning("dull")
    by_handler.warning("handler: %s", "secret")
    without.warning("no handler")


def write_from_a_thread() -> None:
    thread = threading.Thread(target=print, args=("from a thread",))
    thread.start()
    thread.join()


def write_from_a_fork() -> None:
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    pid = os.fork()
    if pid == 0:
        print("from a fork", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print("from the worker")


def write_nothing() -> None: ...


# --- artifacts --------------------------------------------------------------------------------------------------------


def keep(name: str, data: Any = None, path: str | None = None, media_type: str | None = None) -> str | None:
    return current_run().artifact(name, data, path=path, media_type=media_type).path


def keep_bytes(name: str, size: int) -> str | None:
    return keep(name, b"\x01" * size)


def keep_all_kinds() -> None:
    keep("bytes.bin", b"\x00\xff")
    keep("page.html", "<p>é</p>")
    keep("table", {"rows": [1, 2]})
    keep("table", {"rows": [3]})
    keep("other", b"x", media_type="image/x-own")


def keep_too_many() -> str:
    for n in range(50):
        keep(f"n{n}", "x")
    keep("n0", "again")
    try:
        keep("one more", "x")
    except InvalidInput as exc:
        return str(exc)
    return "kept"


def keep_then_small() -> str | None:
    path = keep_bytes("same", 300_000)
    keep_bytes("same", 3)
    return path


async def keep_bytes_async(name: str, size: int) -> str | None:
    return await asyncio.to_thread(keep_bytes, name, size)


# --- facts ------------------------------------------------------------------------------------------------------------


def tell_facts() -> None:
    current_run().progress(0.5, "second pass", rate=51, saved_bytes=7, is_last=False, share=0.25, name="é" * 300)


def tell_bad_facts() -> None:
    bad: dict[str, Any] = {"good": 1, "no name": 1, "n" * 41: 1, "none": None, "nan": float("nan"), "big": 2**64}
    current_run().progress(0.5, "half", **bad)
    current_run().progress(0.6, "more", **{f"n{n}": n for n in range(20)})
