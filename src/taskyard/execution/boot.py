"""Fresh interpreters, started by the host: the nursery, and workers without one. How they start, and what of the host's
signals they leave behind.

A service manager that stops the host may send SIGTERM to every process of it. What runs is the host's to end, so none
of ours may die of that signal, not even while its interpreter is starting.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence

_BOOT = (
    "import sys, json, importlib; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(*map(int, sys.argv[3:]))"
)

_PYTHONS_OWN = frozenset({signal.SIGPIPE, signal.SIGXFSZ})
"""What every interpreter ignores; `subprocess` does not pass that on."""


def search_path() -> list[str]:
    """Where the host finds modules. What is no text there, such as a `Path`, its interpreter passes over too."""
    entries: list[object] = list(sys.path)
    return [entry for entry in entries if isinstance(entry, str)]


def start_interpreter(module: str, fds: Sequence[int], *numbers: int) -> subprocess.Popen[bytes]:
    """One in a session of its own that calls the module's `main` with these descriptors, which it inherits, and
    numbers. It must call `take_signals` soon."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = json.dumps(search_path())
    command = [sys.executable, *flags, "-c", _BOOT, path, module, *map(str, (*fds, *numbers))]
    # It comes to the world with our mask: a SIGTERM waits there until the handler is set.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def take_signals() -> None:
    """Ctrl-C and SIGTERM are for the host, which knows what to do about us. The handlers do nothing; to ignore a signal
    is another thing, and would pass to whatever is started from here. So would all that the host ignores and blocks."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _do_nothing)
    for signum in signal.valid_signals() - _PYTHONS_OWN:
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _do_nothing(_: int, __: object) -> None: ...
