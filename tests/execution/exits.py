"""Values that call `sys.exit` while they are pickled or unpickled. Workers import this module."""

import sys
from typing import Any


class ExitsWhenReduced:
    def __reduce__(self) -> Any:
        sys.exit(7)


class ExitsWhenStored:
    def __getstate__(self) -> Any:
        sys.exit(7)


class ExitsWhenLoaded:
    def __reduce__(self) -> Any:
        return sys.exit, (7,)


def make(kind: type) -> object:
    return kind()


def leave(code: int) -> None:
    sys.exit(code)
