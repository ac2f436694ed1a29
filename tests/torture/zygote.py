"""A process with everything imported, which forks the victims: a start takes milliseconds, not a third of a second.

It has no threads, no event loop and no open store, so its children are as clean as processes that were started afresh.
Requests come over a socket, one at a time, each with its answer; the child's stdin, stdout and stderr travel with it.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
AT_MOST = 65536


class Zygote:
    """The parent's side. One for all children; it ends with its parent, and they with it."""

    _one: "Zygote | None" = None

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.torture.zygote", str(theirs.fileno()), str(os.getpid())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    @classmethod
    def get(cls) -> "Zygote":
        # It ends with the thread that started it, which may be one of many.
        if cls._one is None or cls._one._process.poll() is not None:
            cls.end()
            cls._one = cls()
        return cls._one

    @classmethod
    def end(cls) -> None:
        """Close the socket, which ends it."""
        if cls._one is not None:
            cls._one._socket.close()
            cls._one._process.wait()
            cls._one = None

    def fork(self, words: list[str], environ: dict[str, str], files: list[int]) -> int:
        """The pid of a new victim, called with `words`; `files` become its stdin, stdout and stderr."""
        return int(self._ask({"words": words, "environ": environ}, files))

    def wait(self, pid: int) -> int | None:
        """The exit code of a child that has ended (negative: by that signal), once; None while it lives."""
        code = self._ask({"wait": pid})
        return None if code is None else int(code)

    def _ask(self, request: dict[str, Any], files: list[int] | None = None) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], files or [])
        answer = self._socket.recv(AT_MOST)
        if not answer:
            raise RuntimeError("the zygote has died; what it wrote to stderr says why")
        return json.loads(answer)


def serve(sock: socket.socket) -> None:
    """Answer requests until the parent hangs up."""
    while True:
        data, files, _, _ = socket.recv_fds(sock, AT_MOST, 3)
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            sock.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        pid = os.fork()
        if pid == 0:
            sock.close()
            become(request, files)
        for file in files:
            os.close(file)
        sock.send(json.dumps(pid).encode())


def become(request: dict[str, Any], files: list[int]) -> None:
    """In the child: never returns."""
    from tests.torture import victim

    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        # The zygote's own know of other files, which may have been ones that can seek.
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
        os.environ.update(request["environ"])
        code = victim.main(request["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    from tests.torture.victim import die_with_parent

    importlib.import_module("taskyard.cli.worker")  # what a worker needs of the command line
    die_with_parent(int(sys.argv[2]))
    serve(socket.socket(fileno=int(sys.argv[1])))
