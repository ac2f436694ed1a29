"""What the page on PostgreSQL shows is run as it stands there, and says what is so."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from urllib.parse import urlsplit

import taskyard
from taskyard import errors
from taskyard.ports.store import BEATS_PER_LEASE
from taskyard.queueing.pending import PENDING_S
from taskyard.stores.postgres import connection, schema
from taskyard.stores.postgres.lease import LEASE_S
from tests.docs.blocks import TOP, blocks
from tests.scenario.processes import environment

PAGE = TOP / "docs" / "POSTGRES.md"


def test_the_programs_run(tmp_path, databases):
    """Each program runs as it is printed, one after the other, and says what it should."""
    url = databases.make()  # they leave a table there
    programs = [block for block in blocks(PAGE) if block.language == "python"]
    assert [block.file for block in programs] == ["shop.py", "session.py", "lease.py"]
    for number, block in enumerate(programs, 1):
        assert block.file is not None
        (tmp_path / block.file).write_text(block.text, "utf-8")
        done = subprocess.run(
            [sys.executable, block.file],
            cwd=tmp_path,
            env=environment(DATABASE_URL=url),
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == (f"receipt for order {number}\n" if block.file != "lease.py" else "")


def test_the_rights_are_enough(databases, postgres_url):
    """With the rights that the page gives him, a user who owns nothing runs tasks."""
    (rights,) = [block.text for block in blocks(PAGE) if "ON SCHEMA taskyard TO worker" in block.text]

    async def work(url: str) -> int:
        yard = taskyard.Yard(url)

        @yard.consumer
        async def add(a: int) -> int:
            return a + 1

        async with yard:
            return int(await (await add.submit(1)).result(timeout_s=50))

    with databases.guest(postgres_url) as url:
        databases.execute(rights.replace("worker", str(urlsplit(url).username)), postgres_url)
        assert asyncio.run(work(url)) == 2


def test_the_numbers_are_right():
    """The times on the page are those of the code."""
    text = " ".join(PAGE.read_text("utf-8").split())
    assert f"every {LEASE_S / BEATS_PER_LEASE:g} s that it lives" in text
    assert f"for the lease, {LEASE_S:g} s" in text
    assert f"{connection.CONNECT_S:g} s for a connection, {connection.COMMAND_S:g} s for an answer" in text
    assert (PENDING_S, schema.MIGRATE_S, schema.ALTER_S) == (5, 300, 1)
    assert f"PostgreSQL {connection.OLDEST_SERVER} to" in text


def test_other_documents_know_of_it():
    """The times that other documents name are those of the code as well."""
    for name, said in {
        "README.md": f"its lease of {LEASE_S:g} s",
        "docs/ARCHITECTURE.md": f"still for the lease ({LEASE_S:g} s)",
        "docs/adr/0011-postgresql.md": f"asks again for up to {PENDING_S:g} s",
    }.items():
        assert said in " ".join((TOP / name).read_text("utf-8").split()), name
    assert f"for {PENDING_S:g} s" in (errors.SubmitPending.__doc__ or "")


def test_every_error_is_in_the_table():
    """All that a connection can be refused with is on the page."""
    text = PAGE.read_text("utf-8")
    refusals: list[type] = [errors.UnusableConnection, *errors.UnusableConnection.__subclasses__()]
    assert [error.__name__ for error in refusals if f"| `{error.__name__}` |" not in text] == []
