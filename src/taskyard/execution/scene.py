"""What a worker must know of its host before user code feels at home in it: paths, folder, environment, the script.

A script's `__main__` is run again in the worker under another name, so that what stands behind
`if __name__ == "__main__"` does not run, and then answers to `__main__` there. The name is the one `multiprocessing`
uses: libraries know it.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
import types
from multiprocessing.process import current_process
from typing import Any

import msgspec

from taskyard.errors import UnguardedScript
from taskyard.execution.boot import search_path

MAIN_ALIAS = "__mp_main__"

_script_file: str | None = getattr(sys.modules["__main__"], "__file__", None)
"""Kept, because a script loses its `__file__` when its last line has run, and pools may still have work then."""

_script_path = _script_file and os.path.abspath(_script_file)
"""Of the folder that the script was started in, which it may leave."""


class Scene(msgspec.Struct, frozen=True):
    """`main_name` is that of a script started with `python -m`, `main_path` that of one started as a file, a folder or
    an archive; neither: an interactive session, `-c` or standard input, whose functions cannot be found by a worker."""

    sys_path: list[str]
    argv: list[str]
    environ: dict[str, str]
    folder: str | None
    main_name: str | None = None
    main_path: str | None = None
    log_level: int = logging.WARNING
    authkey: bytes = b""
    """The host's key of `multiprocessing`: objects of a `Manager` refuse a process that has another."""

    @property
    def has_script(self) -> bool:
        return not (self.main_name is self.main_path is None)


class WorkerSettings(msgspec.Struct, frozen=True):
    """What one worker is held to. `memory_limit`: bytes of private data (RLIMIT_DATA) beyond which allocations fail.
    `recycle_rss`: bytes in memory after a call beyond which the worker asks to be replaced. `shares`: it may use
    memfds. `preload`: modules it imports before it is ready. `environ` is set before any of the user's code runs."""

    memory_limit: int | None = None
    recycle_rss: int | None = None
    shares: bool = True
    preload: tuple[str, ...] = ()
    environ: dict[str, str] = {}


Setting = tuple[WorkerSettings, Scene, bytes | None]
"""What a worker is told first, in a SETUP frame. Last comes a pickled pair of function and arguments, to be called
before it is ready."""


def present_scene() -> Scene:
    """The host's, now."""
    # What a worker makes of the script's own classes names the alias: it must mean the script here as well.
    sys.modules.setdefault(MAIN_ALIAS, sys.modules["__main__"])
    main_name, main_path = _find_script()
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        folder = None
    return Scene(
        sys_path=[folder if not entry and folder else entry for entry in search_path()],
        argv=list(sys.argv),
        environ=dict(os.environ),
        folder=folder,
        main_name=main_name,
        main_path=main_path,
        log_level=logging.getLogger().getEffectiveLevel(),
        authkey=bytes(current_process().authkey),
    )


def _find_script() -> tuple[str | None, str | None]:
    """The script by its name, or by its path. In a worker it is that of the host, whether it was needed yet or not."""
    if _entered is not None:
        return _entered.main_name, _entered.main_path
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return spec.name, None
    file: str | None = getattr(main, "__file__", _script_file)
    path = _script_path if file is None or file == _script_file else os.path.abspath(file)
    if path is not None and spec is not None:
        path = os.path.dirname(path)  # of a folder or an archive, started as such
    return None, path if path is not None and os.path.exists(path) else None


def enter(scene: Scene, environ: dict[str, str]) -> None:
    """In the worker: make it the present one, except for the script; `environ` goes on top of the host's."""
    global _entered
    _entered = scene
    sys.path[:] = scene.sys_path
    sys.argv[:] = scene.argv
    current_process().authkey = scene.authkey
    wanted = {**scene.environ, **environ}
    if os.environ != wanted:
        os.environ.clear()
        os.environ.update(wanted)
    if scene.folder is not None and os.path.isdir(scene.folder):
        os.chdir(scene.folder)


def load_main(scene: Scene) -> None:
    """Run the host's script under its alias, once; raises whatever its body raises."""
    global _is_loading, _is_loaded
    # Not the alias: whoever imports `multiprocessing` sets it, to the `__main__` of the moment.
    if _is_loaded:
        return
    _is_loading = True
    try:
        content = _run_script(scene)
    finally:
        _is_loading = False
    _is_loaded = True
    if content is not None:
        module = types.ModuleType(MAIN_ALIAS)
        module.__dict__.update(content)
        sys.modules["__main__"] = sys.modules[MAIN_ALIAS] = module


def _run_script(scene: Scene) -> dict[str, Any] | None:
    if scene.main_name is not None:
        return runpy.run_module(scene.main_name, run_name=MAIN_ALIAS, alter_sys=True)
    elif scene.main_path is not None:
        return runpy.run_path(scene.main_path, run_name=MAIN_ALIAS)
    return None


_entered: Scene | None = None
_is_loading = _is_loaded = False


def refuse_while_loading() -> None:
    """`UnguardedScript` inside a script that is only being read by a worker: what it starts would start it again."""
    if _is_loading:
        raise UnguardedScript
