"""A PostgreSQL server of the torture's own, folders whose yards stand on it, and what may happen to a server."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from taskyard.testing.postgres import Databases, Server
from tests.torture.work import address_of

END_S = 30.0


class Site:
    def __init__(self, where: Path, databases: Databases, server: Server | None = None) -> None:
        """`server` is None for one that must not be touched."""
        self.where, self.databases, self._server = where, databases, server
        self._count = 0

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    def make_folder(self) -> Path:
        """A folder whose store is a new database."""
        self._count += 1
        folder = self.where / f"site-{self._count}"
        folder.mkdir()
        address_of(folder).write_text(self.databases.make())
        return folder


@contextmanager
def open_site(where: Path, *, databases: Databases | None = None, settings: tuple[str, ...] = ()) -> Iterator[Site]:
    """On a server of its own, as durable as PostgreSQL is by default; or on somebody else's, which is left alone."""
    if databases is not None:
        yield Site(where, databases)
        return
    server = Server(settings=settings)
    try:
        server.start()
        yield Site(where, Databases(server.url), server)
    finally:
        thaw(server)
        server.stop()


# --- what may happen to a server --------------------------------------------------------------------------------------


def freeze(server: Server) -> None:
    """Every process of it stands still."""
    os.kill(server.pid, signal.SIGSTOP)  # first: from here on it has no new children
    _send(children(server), signal.SIGSTOP)


def thaw(server: Server) -> None:
    if server.is_running:
        _send(children(server), signal.SIGCONT)
        os.kill(server.pid, signal.SIGCONT)


def crash(server: Server) -> None:
    """Every process of it dies at once."""
    os.kill(server.pid, signal.SIGSTOP)
    pids = children(server)
    _send(pids, signal.SIGKILL)
    server.halt(signal.SIGKILL)
    for pid in pids:
        _await_end(pid)


def children(server: Server) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _await_end(pid: int) -> None:
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if not select.select([handle], [], [], END_S)[0]:
                raise TimeoutError(f"process {pid} of the server has not ended")
        finally:
            os.close(handle)
