"""Work for executors of every kind: what is called in workers is found here by its import path."""

import asyncio
import os
import threading
import time
from typing import Any, NoReturn


class Stage:
    """A call that has begun, and is held until the test lets it go on. Both sides wait on pipes: nobody polls."""

    def __init__(self, folder: Any) -> None:
        self.began, self.gate = f"{folder}/began", f"{folder}/gate"
        os.mkfifo(self.began)
        os.mkfifo(self.gate)

    def wait_until_begun(self) -> str:
        with open(self.began) as pipe:
            return pipe.read()

    def let_go(self) -> None:
        with open(self.gate, "w") as pipe:
            pipe.write("!")


def hold(stage: tuple[str, str], value: Any = None) -> Any:
    began, gate = stage
    with open(began, "w") as pipe:
        pipe.write(str(os.getpid()))
    with open(gate) as pipe:
        pipe.read(1)
    return value


def show(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def touch(path: str) -> None:
    with open(path, "w"):
        pass


def echo(value: Any = None) -> Any:
    return value


async def echo_later(value: Any = None) -> Any:
    await asyncio.sleep(0)
    return value


class Custom(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class OneWay(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Stuck(Exception):
    """Does not pickle."""

    def __init__(self) -> None:
        super().__init__("stuck", threading.Lock())


def fail(kind: type[BaseException], *args: Any) -> NoReturn:
    raise kind(*args)


def type_error() -> Any:
    return len(3)  # type: ignore[arg-type]


def lock() -> object:
    return threading.Lock()


class Thing:
    """Can be watched by a weak reference."""

    def touch(self) -> None: ...


def make_thing(_: int) -> Thing:
    return Thing()


_mark: str = "unset"


def set_mark(value: str) -> None:
    global _mark
    _mark = value


def get_mark() -> tuple[str, int]:
    return _mark, os.getpid()


def die() -> NoReturn:
    os._exit(9)


def die_once(path: str) -> str:
    """The second time it lives."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "alive"
    die()


def work_for(seconds: float) -> int:
    """Busy in Python code, holding the interpreter as much as it can."""
    count, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        count += 1
    return count


class Parser:
    base = 10

    @classmethod
    def of_class(cls, n: int, *, plus: int = 0) -> int:
        return cls.base + n + plus

    @staticmethod
    def static(n: int) -> int:
        return n + 1
