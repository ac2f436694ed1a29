"""The command line on a PostgreSQL server, and what it says when the server does not want."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest

from taskyard.cli import session
from taskyard.stores.migrations import list_migrations, newest
from taskyard.stores.postgres import connection, inspection, schema
from taskyard.testing.postgres import FAST, Databases, Server, at_database
from tests.cli.shell import Done, Shell

NEWEST = newest("postgres")

SECRET = "sesame"
CLERK = f"clerk:{SECRET}"
CROWD = f"crowd:{SECRET}"


@dataclass(frozen=True, slots=True)
class Place:
    """A server with a database of `app`'s, a user without rights, `clerk`, and one who may have no connection,
    `crowd`."""

    server: Server
    databases: Databases

    @property
    def port(self) -> int:
        return self.server.port

    def url(self, user: str = f"app:{SECRET}", database: str = "app") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    @property
    def superuser_url(self) -> str:
        return at_database(self.server.url, "app")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    server = Server(settings=FAST)
    try:
        server.start()
        databases = Databases(server.url)
        databases.execute(f"CREATE ROLE app LOGIN PASSWORD '{SECRET}'")
        databases.execute(f"CREATE ROLE clerk LOGIN PASSWORD '{SECRET}'")
        databases.execute(f"CREATE ROLE crowd LOGIN PASSWORD '{SECRET}' CONNECTION LIMIT 0")
        yield Place(server, databases)
    finally:
        server.stop()


@pytest.fixture
def url(place: Place) -> str:
    """The address of an empty database, with its password."""
    place.databases.execute("DROP DATABASE IF EXISTS app WITH (FORCE)")
    place.databases.execute("CREATE DATABASE app OWNER app")
    return place.url()


def test_a_day_at_the_shell(shell: Shell, url: str) -> None:
    """Every command works on PostgreSQL as on a file, and none of them ever prints the password."""
    said: list[Done] = []

    def do(*arguments: str) -> Done:
        said.append(shell.here(*arguments, TASKYARD_STORE=url))
        return said[-1]

    assert do("migrate", "--check").code == 1
    assert do("migrate").out == f"{url.replace(SECRET, '***')}  ✔ schema 0 → {NEWEST}  ({names()})\n"
    (first, failing, running) = [
        do("submit", *task, "--app", "app:yard", "--json").json["uuid"]
        for task in (("add", "a=1"), ("boom", "why=x"), ("hold",))
    ]
    worker = shell.start("worker", "app:yard", "-v", TASKYARD_STORE=url)
    worker.hear("hold has begun")
    worker.hear(f"failed    boom {failing}")
    assert do("submit", "add", "a=41", "--app", "app:yard", "--wait").out.endswith("42\n")
    assert json.loads(do("show", first, "--json").out)["result"] == 2
    assert f"{running}  ● running" in do("ls").out
    assert "half way" in do("watch", "--once").out
    (node,) = do("node", "ls", "--json").json
    assert (node["alive"], node["queues"], node["beat_at"] is None) == (True, ["cpu", "default"], False)
    assert f"{node['name']} ({node['incarnation'][:8]})" in do("doctor").out
    assert do("retry", failing).code == 0
    worker.hear(f"failed    boom {failing}")
    assert do("cancel", running, "--reason", "enough").code == 0
    worker.hear(f"canceled  hold {running}")
    assert do("node", "drain", node["name"]).code == 0
    assert worker.end() == 0
    assert do("watch", "--until-idle").code == 0
    assert do("node", "ls", "--json").json == []
    everything = "".join(done.out + done.err for done in said) + worker.said
    assert "is running" in everything
    assert "***" in everything
    assert SECRET not in everything


def test_devices_on_a_server(shell: Shell, url: str) -> None:
    """Devices are added, steered, watched and removed on PostgreSQL as on a file."""

    def do(*arguments: str) -> Done:
        return shell.here(*arguments, TASKYARD_STORE=url)

    assert do("migrate").code == 0
    watch = shell.start("device", "watch", TASKYARD_STORE=url)
    watch.hear("watching")
    for name in ("emu-1", "emu-2"):
        assert do("device", "add", name, "--pool", "phones", "--adapter", "simulated").code == 0
    assert "device emu-2" in watch.hear("emu-2")
    assert do("device", "label", "emu-1", "role=eu").code == 0
    assert do("device", "edit", "emu-1", "--setting", "seed=3").code == 0
    assert [one["changed"] for one in do("device", "drain", "--all", "--json").json] == [True, True]
    assert do("device", "take", "emu-2", "--for", "30m", "--reason", "a bug").code == 0
    assert "a bug" in watch.hear("taken")
    first, second = do("device", "ls", "--json").json
    assert (first["labels"], first["settings"], first["number"]) == ({"role": "eu"}, {"seed": 3}, 1)
    assert (second["state"], second["orders"]["drained"] is None) == ("taken", False)
    assert "no run on a device matches" in do("device", "history").out
    assert "2 devices" in do("device", "watch", "--once").out
    assert do("device", "rm", "emu-1", "emu-3").code == 1
    assert [one["name"] for one in do("device", "ls", "--json").json] == ["emu-2"]
    assert do("audit", "--device", "emu-2", "--json").json["entries"][0]["command"] == "take"
    watch.signal(signal.SIGTERM)
    assert watch.end() == 0


def test_steering_on_a_server(shell: Shell, url: str) -> None:
    """Tasks, all that match, and queues are steered on PostgreSQL as on a file."""

    def do(*arguments: str) -> Done:
        return shell.here(*arguments, TASKYARD_STORE=url)

    assert do("migrate").code == 0
    first, second = (do("submit", "boom", "--app", "app:yard", "--json").json["uuid"] for _ in range(2))
    assert "; place 1 of 2 in queue 'cpu', high priority" in do("start", second, "--raise").out
    assert "; place 2 of 2 in queue 'cpu', high priority" in do("priority", first, "high").out
    assert f"right before {second}; place 1 of 2 in queue 'cpu'" in do("move", first, "--before", second).out
    assert do("hold", "--all", "--queue", "cpu", "--json").json["moved"] == 2
    assert do("release", "--all").out == "2 tasks matched   ✔ 2 changed\n"
    assert do("reschedule", first, "2h", "--json").json[0]["task"]["state"] == "scheduled"
    assert do("skip", first).code == 0
    assert do("queue", "pause", "cpu", "--reason", "backup").code == 0
    assert do("queue", "set", "cpu", "--concurrency", "3", "--json").json["concurrency"] == 3
    (cpu,) = do("queue", "ls", "--json").json
    assert (cpu["state"], cpu["state_set"]["reason"], cpu["counts"]) == (
        "paused",
        "backup",
        {"queued": 1, "skipped": 1},
    )
    assert do("queue", "resume", "cpu").code == 0
    assert do("run-again", first, "--json").json[0]["task"]["origin"] == first
    assert do("prune", "--older", "0", "--json").json["pruned"] == 1


def names() -> str:
    return ", ".join([*(one.name for one in list_migrations("postgres")), schema.bundle().name])


def test_run_shows_no_password(shell: Shell, url: str) -> None:
    """What `run` says of the store has no password in it, be it the app's own or that of the environment."""
    (shell.folder / "other.py").write_text(f"from taskyard import Yard\nyard = Yard({url!r})\n")
    shell.ok("migrate", "--app", "other:yard")
    run = shell.start("run", "other:yard", "--store", url)
    run.hear("Ctrl-C")
    note = shell.here("submit", "nothing", "--app", "other:yard", TASKYARD_STORE="sqlite:///work.db")
    assert "app:***@127.0.0.1" in run.said
    assert "app:***@127.0.0.1" in note.err
    assert SECRET not in run.said + note.out + note.err


def test_looking_makes_nothing(shell: Shell, place: Place, url: str) -> None:
    """A command that only looks makes no tables in a database that has none; it says what does."""
    for command in ("ls", "show 01a1", "cancel 01a1", "watch --once", "node ls", "submit add"):
        done = shell.here(*command.split(), "--store", url)
        assert done.code == 3, done
        assert "there is no store at" in done.err
    done = shell.here("doctor", "--store", url)
    assert (done.code, "✘  schema" in done.out, "none yet" in done.out) == (1, True, True)

    async def look(conn: asyncpg.Connection) -> object:
        return await conn.fetchval("SELECT to_regnamespace('taskyard')")

    assert place.databases.run(look, place.superuser_url) is None


BAD = [
    pytest.param("app:wrong1", "app", "password authentication failed", "correct the user and the pass", id="password"),
    pytest.param(f"app:{SECRET}", "nowhere", '"nowhere" does not exist', "createdb nowhere", id="database"),
    pytest.param(f"app:{SECRET}@127.0.0.1:1#", "app", "cannot be reached", "check that the server runs", id="away"),
    pytest.param(CLERK, "app", "permission denied", "GRANT CREATE ON DATABASE", id="rights"),
    pytest.param(CROWD, "app", "too many connections for role", "no connection left for us: raise max_", id="crowded"),
]


@pytest.mark.parametrize(("user", "database", "why", "advice"), BAD)
@pytest.mark.parametrize("command", ["ls", "migrate", "worker", "submit", "node ls", "doctor"])
def test_what_is_wrong_is_said(shell: Shell, place: Place, url: str, user, database, why, advice, command) -> None:
    """Each command says in one line why the database cannot be used and what to do, and never the password."""
    bad = place.url(user, database).replace(f"#@127.0.0.1:{place.port}", "")
    words = {"worker": ["worker", "app:yard"], "submit": ["submit", "add", "a=1", "--app", "app:yard"]}
    arguments = [*words.get(command, command.split()), "--store", bad]
    done = (shell.run if command == "worker" else shell.here)(*arguments)
    text = " ".join((done.out + done.err).split())
    if user == CLERK and command in ("ls", "node ls", "doctor"):
        assert "there is no store at" in text or "none yet" in text  # to look, he needs no right to make it
        return
    assert done.code == (1 if command == "doctor" else 3), done
    assert why in text
    assert advice in text
    assert ("check that the server runs" in text) == ("check that the server runs" in advice)
    assert SECRET not in text
    assert "wrong1" not in text
    if command != "worker":
        assert "wrong1" not in (in_json := shell.here(*arguments, "--json").out)
        assert SECRET not in in_json


def test_a_user_without_rights_on_the_schema(shell: Shell, place: Place, url: str) -> None:
    """Where the schema is somebody else's, whoever may not use it is told which right he needs."""
    shell.here("migrate", "--store", url)
    for command in (["ls"], ["worker", "app:yard"], ["doctor"]):
        done = shell.run(*command, "--store", place.url(CLERK))
        assert done.code == (1 if command == ["doctor"] else 3), done
        assert "give this user all rights on the schema taskyard" in " ".join((done.out + done.err).split())


@pytest.mark.parametrize("command", ["ls", "node ls", "worker app:yard"])
def test_an_older_schema_of_somebody_elses(shell: Shell, place: Place, url: str, command: str) -> None:
    """Who may use a schema that is older than the program, but not change it, is told so, and who has to."""
    shell.here("migrate", "--store", url)
    asyncio.run(_grow_older(url))
    done = shell.run(*command.split(), "--store", place.url(CLERK))
    said = " ".join((done.out + done.err).split())
    assert done.code == 3, done
    assert f"schema has version {NEWEST} and lacks {schema.bundle().name} of this Taskyard" in said
    assert "let app, who owns the schema, run `taskyard migrate`" in said
    assert "GRANT CREATE" not in said


async def _grow_older(url: str) -> None:
    conn = await asyncpg.connect(url)
    await conn.execute("UPDATE taskyard.bundle SET version = 0")
    await conn.execute("GRANT USAGE ON SCHEMA taskyard TO clerk; GRANT ALL ON ALL TABLES IN SCHEMA taskyard TO clerk")
    await conn.close()


@pytest.mark.parametrize(
    "address",
    [
        *(f"postgresql://app:{rest}" for rest in ("ses@me@host:port/app", "sesame@host:x/app", "ses/ame@host")),
        "postgresql+asyncpg://app:sesame@host/app",
        "postgresql:app:sesame@host/app",
        "postgresql//app:sesame@host/app",
        "app:sesame@host/app",
        "host=localhost user=app password=sesame dbname=app",
        "postgresql://app:sesame@host/app?sslmode=bogus",
        "postgresql://app:sesame@host/\udcff\udcfe",  # as a shell hands on bytes that are not UTF-8
        "postgresql://app:sesame\udcff@host/app",
    ],
)
def test_an_address_that_makes_no_sense(shell: Shell, address: str) -> None:
    """An address that cannot be understood is a slip at the command line; it is repeated without its password."""
    for options in ([], ["--json"]):
        done = shell.here("ls", "--store", address, *options)
        assert done.code == 2
        assert "is not a store" in done.out + done.err
        assert "ses" not in done.out + done.err


def test_a_newer_schema_is_left_alone(shell: Shell, place: Place, url: str) -> None:
    """A database that a newer version has migrated is refused with 3 and advice by whatever command."""
    shell.here("migrate", "--store", url)
    place.databases.execute("INSERT INTO taskyard.migration VALUES (99, '0099_later', '')", place.superuser_url)
    for command in (["ls"], ["migrate"], ["migrate", "--check"], ["worker", "app:yard"]):
        done = shell.run(*command, "--store", url)
        assert done.code == 3, done
        assert "has schema version 99" in done.err
    done = shell.here("doctor", "--store", url)
    assert done.code == 1
    assert "upgrade Taskyard" in done.out


def test_a_schema_of_somebody_elses(shell: Shell, place: Place, url: str) -> None:
    """Tables of somebody else's in a schema of our name are left alone, and it is said that they are in the way."""
    for table in ("task (a int)", "migration (a int)"):
        place.databases.execute("DROP SCHEMA IF EXISTS taskyard CASCADE; CREATE SCHEMA taskyard AUTHORIZATION app", url)
        place.databases.execute(f"CREATE TABLE taskyard.{table}", url)
        done = shell.here("migrate", "--store", url)
        assert done.code == 3
        assert "the schema 'taskyard' of this database is something else's, and nothing was changed in it" in done.err
        assert "use another database" in done.err
        for command in (["migrate", "--check"], ["ls"]):
            assert shell.here(*command, "--store", url).err == done.err
        examined = shell.here("doctor", "--store", url)
        said = " ".join(examined.out.split())
        assert (examined.code, "something else's" in said, "taskyard migrate" in said) == (1, True, False)


LOST = [
    pytest.param("DELETE FROM taskyard.migration", "'migration' is missing or empty", id="rows"),
    pytest.param("DROP TABLE taskyard.migration", "'migration' is missing or empty", id="table"),
    pytest.param("UPDATE taskyard.migration SET number = number + 1", f"lacks 1 below {NEWEST + 1}", id="hole"),
]


@pytest.mark.parametrize(("sql", "why"), LOST)
def test_a_store_that_was_restored_in_part(shell: Shell, place: Place, url: str, sql: str, why: str) -> None:
    """Our own tables without what says which migrations were applied are not called somebody else's: every command says
    what is missing, and not to drop them."""
    shell.here("migrate", "--store", url)
    place.databases.execute(sql, url)
    for command in (["migrate"], ["migrate", "--check"], ["ls"], ["doctor"]):
        done = shell.here(*command, "--store", url)
        said = " ".join((done.out + done.err).split())
        assert done.code == (1 if command == ["doctor"] else 3), done
        assert why in said
        assert "do not drop it: restore what is missing" in said
        assert "something else's" not in said


def test_a_worker_under_which_the_schema_was_dropped(shell: Shell, place: Place, url: str) -> None:
    """A worker whose tables are gone says what makes them anew."""
    worker = shell.start("worker", "app:yard", TASKYARD_STORE=url)
    worker.hear("is running")
    for _ in range(10):
        try:
            place.databases.execute("DROP SCHEMA taskyard CASCADE", place.superuser_url)
            break
        except asyncpg.DeadlockDetectedError:
            continue  # the worker reads several tables at a time, in another order
    assert "restore it from a backup, or make it anew and empty: `taskyard migrate`" in worker.hear("does not exist")


# --- a stop during the start ------------------------------------------------------------------------------------------

SLOW = """
import asyncio
from contextlib import suppress
from taskyard import Yard
from taskyard.ports.clock import SystemClock
from taskyard.stores.postgres import PostgresStore

class Slow(PostgresStore):
    async def join(self, node, specs=()):
        await super().join(node, specs)
        print("has joined", flush=True)
        while True:
            with suppress(asyncio.CancelledError if {is_deaf} else ()):
                await asyncio.Event().wait()

yard = Yard(Slow({url!r}, clock=SystemClock()))
"""
"""A worker that has joined the store, and whose start does not come to its end by itself."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_the_start_leaves_no_node_behind(shell: Shell, url: str, number: signal.Signals) -> None:
    """A signal between a worker's joining and the end of its start ends it with 0, and its node is gone."""
    (shell.folder / "slow.py").write_text(SLOW.format(url=url, is_deaf=False))
    worker = shell.start("worker", "slow:yard")
    worker.hear("has joined")
    assert len(shell.here("node", "ls", "--store", url, "--json").json) == 1
    worker.signal(number)
    assert worker.end() == 0
    assert worker.said == "has joined\nstopped: before it had started\n"
    assert shell.here("node", "ls", "--store", url, "--json").json == []


def test_a_start_that_cannot_be_given_up_does_not_keep_the_process(shell: Shell, url: str) -> None:
    """A start that does not hear that it is given up is left behind: exit code 1, and why."""
    (shell.folder / "slow.py").write_text(SLOW.format(url=url, is_deaf=True))
    worker = shell.start("worker", "slow:yard")
    worker.hear("has joined")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 1
    assert "stopped: before it had started, while the store does not answer" in worker.said


# --- the doctor -------------------------------------------------------------------------------------------------------


def test_a_schedule_that_cannot_be_read_is_named(shell: Shell, place: Place, url: str) -> None:
    """The doctor says of a schedule that it cannot be read, and so does not fire."""
    shell.here("migrate", "--store", url)
    odd = "INSERT INTO taskyard.schedule (name, definition, state, version, actor, from_code) "
    place.databases.execute(odd + "VALUES ('odd', '{}', '{}', 1, 'me', false)", url)
    done = shell.here("doctor", "--store", url)
    assert (done.code, "'odd' cannot be read here" in " ".join(done.out.split())) == (1, True)


@pytest.fixture
def frozen(place: Place, url: str) -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    os.kill(place.server.pid, signal.SIGSTOP)
    yield url
    os.kill(place.server.pid, signal.SIGCONT)


def test_the_doctor_before_a_frozen_server(shell: Shell, frozen: str, monkeypatch) -> None:
    """A server that does not answer is a problem, with what to do, and is not waited for for ever."""
    monkeypatch.setattr(connection, "CONNECT_S", 0.2)
    done = shell.here("doctor", "--store", frozen)
    text = " ".join(done.out.split())
    assert done.code == 1
    assert "cannot be reached (no answer in time); check that the server runs" in text
    assert "no problems found" not in text


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Somebody who has locked the list of migrations, so that nobody else can read it."""
    with asyncio.Runner() as runner:
        conn = runner.run(asyncpg.connect(url))
        runner.run(conn.execute("BEGIN; LOCK taskyard.migration"))
        yield
        runner.run(conn.close())


def test_the_doctor_before_a_server_that_stops_answering(shell: Shell, url: str, monkeypatch) -> None:
    """What a server says before it stops answering is shown, and that it has stopped is a problem."""
    shell.here("migrate", "--store", url)
    monkeypatch.setattr(connection, "LIMITS", connection.LIMITS | {"statement_timeout": "200ms"})
    with busy(url):
        done = shell.here("doctor", "--store", url, "--json")
    found = {finding["topic"]: finding for finding in done.json["findings"]}
    assert (done.code, found["store"]["level"], "schema" in found) == (1, "problem", False)
    assert found["server"]["data"]["postgres"].startswith("1")
    assert "did not answer" in found["store"]["text"]


def test_a_server_that_is_slow_is_not_said_to_be_written_to(shell: Shell, url: str, monkeypatch) -> None:
    """Who waits for a server is told that it has not answered; who is in the way there, nobody knows here."""
    shell.here("migrate", "--store", url)
    monkeypatch.setattr(connection, "LIMITS", connection.LIMITS | {"lock_timeout": "1s"})
    monkeypatch.setattr(session, "SLOW_OPEN_S", 0.1)
    with busy(url):
        done = shell.here("ls", "--store", url)
    assert done.code == 3
    assert "still waiting for the store: no answer yet" in done.err


@pytest.mark.spec("MGR-11")
def test_the_doctor_tells_the_size_of_the_pool(shell: Shell, url: str) -> None:
    """The size of the pool is shown with where it comes from; a variable that makes no sense is a warning."""
    found = findings(shell, url, DB_POOL_SIZE="7", DB_MAX_OVERFLOW="many", ENVIRONMENT="")
    pool, complaint = found["database pool"]
    assert (pool["pool_size"], pool["pool_size_source"]) == (7, "DB_POOL_SIZE")
    assert (pool["pool_overflow"], pool["pool_overflow_source"]) == (10, "development")
    assert (complaint["level"], "DB_MAX_OVERFLOW" in complaint["text"]) == ("warning", True)
    (production,) = findings(shell, url, ENVIRONMENT="production")["database pool"]
    assert "production: cores * 10" in production["text"]


def findings(shell: Shell, url: str, **variables: str) -> dict[str, list[dict[str, Any]]]:
    """What the doctor finds, by topic."""
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in shell.here("doctor", "--store", url, "--json", **variables).json["findings"]:
        found.setdefault(finding["topic"], []).append(finding.pop("data") | finding)
    return found


@contextmanager
def forgotten(url: str) -> Iterator[None]:
    """Somebody's transaction, left open."""
    with asyncio.Runner() as runner:
        conn = runner.run(asyncpg.connect(url))
        runner.run(conn.execute("SET application_name = 'forgetful'"))
        runner.run(conn.execute("BEGIN"))
        yield
        runner.run(conn.close())


KILLED = """INSERT INTO taskyard.node (incarnation, beat_at, lease_s, info)
    VALUES ('feedbeef', now() - interval '1 hour', 15,
    '{"incarnation":"feedbeef","name":"lost","pid":1,"host":"far"}')"""
"""What a worker leaves behind that was killed an hour ago, when nobody else is there."""


def test_a_killed_worker_is_not_shown_as_alive(shell: Shell, place: Place, url: str) -> None:
    """A node that has said nothing for longer than the lease is shown as silent, though nobody has watched it."""
    shell.here("migrate", "--store", url)
    place.databases.execute(KILLED, place.superuser_url)
    assert "✘ silent" in shell.here("node", "ls", "--store", url).out
    (node,) = shell.here("node", "ls", "--store", url, "--json").json
    assert node["alive"] is False
    place.databases.execute("UPDATE taskyard.node SET beat_at = now()", place.superuser_url)
    assert "● alive" in shell.here("node", "ls", "--store", url).out


@contextmanager
def open_transaction(url: str, *statements: str) -> Iterator[int]:
    """Somebody's transaction in which that was said, the last of it perhaps without an answer yet; his session."""
    with asyncio.Runner() as runner:
        conn = runner.run(asyncpg.connect(url))
        runner.run(conn.execute("BEGIN"))
        for statement in statements[:-1]:
            runner.run(conn.execute(statement))
        last = runner.get_loop().create_task(conn.execute(statements[-1]))
        runner.run(asyncio.wait({last}, timeout=0.1))
        try:
            yield conn.get_server_pid()
        finally:
            conn.terminate()
            runner.run(asyncio.wait({last}))
            last.exception()


@pytest.mark.parametrize("blocks_s", [0.0, 0.4])
def test_the_doctor_names_who_has_locked_the_tables(shell: Shell, url: str, monkeypatch, blocks_s: float) -> None:
    """Who has locked a table is named, with his session, user, program and what he asked for; once, also when the
    doctor comes into his way only after having looked."""
    shell.here("migrate", "--store", url)
    monkeypatch.setattr(connection, "LIMITS", connection.LIMITS | {"lock_timeout": "500ms"})
    monkeypatch.setattr(inspection, "MIN_BLOCK_S", blocks_s)
    with open_transaction(url, "SET application_name = 'nightly'", "LOCK taskyard.migration") as pid:
        found = findings(shell, url)
    (lock,), (*_, store) = found["lock"], found["store"]
    assert (lock["level"], lock["pid"], lock["user"], lock["application"]) == ("problem", pid, "app", "nightly")
    assert f"session {pid} of app (nightly) has locked Taskyard's tables, in a transaction" in lock["text"]
    assert "its last query: LOCK taskyard.migration" in lock["text"]
    assert f"pg_terminate_backend({pid})" in lock["hint"]
    assert (store["level"], "taskyard doctor" in store["text"]) == ("problem", False)


def test_the_doctor_names_whom_a_node_waits_for(shell: Shell, url: str, monkeypatch) -> None:
    """A young transaction that something of ours waits for is named; one that is in nobody's way is not."""
    shell.here("submit", "add", "a=1", "--app", "app:yard", "--store", url)
    monkeypatch.setattr(inspection, "MIN_BLOCK_S", 0.0)
    touch = "UPDATE taskyard.task SET priority = priority"
    with open_transaction(url, touch) as pid:
        assert "lock" not in findings(shell, url)
        with open_transaction(url, "SET application_name = 'taskyard'", touch):
            (lock,) = findings(shell, url)["lock"]
    assert (lock["pid"], lock["holds_up"]) == (pid, 1)
    assert "holds up 1 session, in a transaction" in lock["text"]


def test_the_doctor_sees_what_is_in_the_way(shell: Shell, place: Place, url: str, monkeypatch) -> None:
    """Settings that break a promise, a transaction that somebody keeps open, work for nobody and a silent node."""
    monkeypatch.setattr(inspection, "OPEN_S", 0.0)
    shell.here("submit", "add", "a=1", "--app", "app:yard", "--store", url)
    place.databases.execute(KILLED, place.superuser_url)

    with forgotten(url):
        found = findings(shell, url)
    assert "forgetful" in found["open transaction"][0]["text"]
    assert {one["setting"] for one in found["settings"]} >= {"fsync", "synchronous_commit"}
    assert "'add' wait" in found["no consumer"][0]["text"]
    assert "said nothing for 1 h" in found["silent worker"][0]["text"]
    assert (found["schema"][0]["schema"], found["tasks"][0]["counts"]) == (NEWEST, {"queued": 1})
