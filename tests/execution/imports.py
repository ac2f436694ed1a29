"""Watches what a worker process imports while a run is going on; imports nothing of ours itself."""

import sys
from types import CodeType

RUNNING = ("_run", "_return")
during_runs: list[str] = []


def watch_imports() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, args: tuple[object, ...]) -> None:
    if event == "import" and _is_in_run():
        during_runs.append(str(args[0]))


def _is_in_run() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if _is_of_run(frame.f_code):
            return True
    return False


def _is_of_run(code: CodeType) -> bool:
    return code.co_filename.endswith("worker_main.py") and code.co_name in RUNNING
