"""Code that a worker may meet: it crashes, hangs, hides, makes noise. Found by workers by its import path."""

import ctypes
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from taskyard import current_run

FOREVER_S = 600


def add(one: int, other: int) -> int:
    return one + other


def pid() -> int:
    return os.getpid()


def keeper() -> int:
    return os.getppid()


# --- ways to die ------------------------------------------------------------------------------------------------------


def segfault() -> None:
    ctypes.string_at(0)


def leave(code: int = 3) -> NoReturn:
    os._exit(code)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def take_memory(size: int) -> int:
    return len(bytearray(size))


def write_garbage_on_every_socket() -> None:
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"\xff" * 100)
        except OSError:
            continue


def close_everything() -> None:
    os.closerange(3, 1000)
    hang()


def kill_keeper() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    hang()


def stop_keeper() -> None:
    os.kill(os.getppid(), signal.SIGSTOP)
    hang()


# --- ways to hang -----------------------------------------------------------------------------------------------------


def hang() -> None:
    time.sleep(FOREVER_S)


def say(path: str) -> None:
    """To a test that waits at the other end of a pipe, or looks for a file."""
    with open(path, "w") as file:
        file.write("!")


def say_and_hang(path: str) -> None:
    say(path)
    hang()


def spin() -> None:
    while True:
        pass


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(FOREVER_S)


def ignore_sigterm(began: str | None = None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if began is not None:
        say(began)
    while True:
        time.sleep(FOREVER_S)


# --- ways to hide -----------------------------------------------------------------------------------------------------


def act_hidden(path: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Leave a grandchild that hides as well as it can, its number in `path`, then do something else."""
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            _hide(path, write_fd)
        os._exit(0)
    os.close(write_fd)
    os.read(read_fd, 1)  # it is in hiding
    os.close(read_fd)
    os.wait()
    return function(*args)


def _hide(path: str, write_fd: int) -> NoReturn:
    os.setsid()
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    os.write(write_fd, b"!")
    os.closerange(0, 1000)
    os.execve("/bin/sleep", ["sleep", str(FOREVER_S)], {})


def fork_many(path: str, began: str, count: int) -> None:
    """A crowd in which every second one has a session of its own, their numbers in `path`."""
    with open(path, "w") as file:
        for place in range(count):
            child = os.fork()
            if child == 0:
                if place % 2:
                    os.setsid()
                hang()
            file.write(f"{child}\n")
    say_and_hang(began)


def run_from_killers(path: str) -> None:
    """A process that is never there for long: it forks, and its parent ends."""
    if os.fork() == 0:
        os.setsid()
        say(path)
        while True:
            if os.fork() != 0:
                os._exit(0)
            os.setsid()
    hang()


# --- what cannot cross ------------------------------------------------------------------------------------------------


def return_lock() -> object:
    return threading.Lock()


class OneWay(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def raise_one_way() -> None:
    raise OneWay("gone", "bad")


def return_one_way() -> object:
    return OneWay("gone", "bad")


def fork_and_return() -> str:
    """Both come back from the call."""
    return "child" if os.fork() == 0 else "parent"


def make_noise() -> str:
    print("noise", flush=True)
    print("noise", file=sys.stderr, flush=True)
    for fd in (1, 2):
        os.write(fd, bytes(range(256)) * 10)
    os.system("echo more noise; echo and more >&2")
    return "quiet again"


# --- runs -------------------------------------------------------------------------------------------------------------


def report_in_a_tight_loop(count: int) -> tuple[float, float]:
    """The time it took, and that of the processor."""
    run = current_run()
    started, worked = time.perf_counter(), time.process_time()
    for number in range(count):
        run.progress(number / count, f"step {number}", 1.0)
    run.progress(1.0, "done")
    return time.perf_counter() - started, time.process_time() - worked


def report_then_wait(folder: str) -> None:
    """Two reports at once, then silence."""
    run = current_run()
    run.progress(0.1, "first")
    run.progress(0.2, "second")
    with open(f"{folder}/gate") as gate:
        gate.read(1)


def wait_until_cancelled(began: str) -> str:
    say(began)
    while not current_run().cancelled:
        time.sleep(0.001)
    return "cleaned up"


def clean_up_on_sigterm(began: str, cleaned: str) -> None:
    try:
        say_and_hang(began)
    finally:
        say(cleaned)


def append(path: str, text: str) -> str:
    with open(path, "a") as file:
        file.write(text)
    return text


def look_at_run() -> tuple[str, int, int, str]:
    run = current_run()
    run.note("hello")
    run.log("from inside", level=logging.WARNING)
    return run.uuid, run.attempt, run.token, run.source


def write_many_logs(count: int) -> None:
    for number in range(count):
        logging.getLogger(f"made.up.{number}").warning("said")


def write_log(text: str) -> None:
    logging.getLogger("misdeeds").warning(text)
    logging.getLogger("misdeeds").debug("too fine to be sent")


# --- plain work -------------------------------------------------------------------------------------------------------


def keyword(*, value: Any) -> Any:
    return value


_kept: list[bytes | bytearray] = []


def keep_memory(size: int) -> None:
    _kept.append(bytearray(b"x") * size)


def say_pid(path: str) -> None:
    with open(path, "w") as pipe:
        pipe.write(f"{os.getpid()}\n")


def keep(content: bytes) -> None:
    _kept.append(content)


def kept() -> int:
    return sum(map(len, _kept))


def signals_of_child() -> tuple[int, int]:
    """Which signals a program that this code starts has blocked, and which it ignores. Numbers 32 and 33 are the C
    library's own: once it has used them, programs start with them ignored, and nobody can change that."""
    its_own = 0b11 << 31
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Sig"))
    return int(masks["SigBlk"], 16) & ~its_own, int(masks["SigIgn"], 16) & ~its_own


def sockets_of_child() -> int:
    """How many sockets a program that is careless about descriptors gets from this process."""
    shown = subprocess.run(
        ["ls", "-l", "/proc/self/fd"], close_fds=False, stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    return shown.stdout.count(b"socket:")


def surroundings(variable: str) -> tuple[list[str], str | None]:
    return sys.argv, os.environ.get(variable)


class Tool:
    def __init__(self, base: int) -> None:
        self.base = base

    @staticmethod
    def static(n: int) -> int:
        return n + 1

    @classmethod
    def of_class(cls, n: int) -> tuple[str, int]:
        return cls.__name__, n

    def bound(self, n: int) -> int:
        return self.base + n

    class Inner:
        @staticmethod
        def static(n: int) -> int:
            return n + 2


class Unfindable:
    """Names a module that is nowhere."""

    def __call__(self) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, ("no_such_module_anywhere",)
