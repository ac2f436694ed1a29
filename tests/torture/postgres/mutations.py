"""The database's part of our code with one safeguard taken out, to show that the torture would notice."""

import re
from pathlib import Path

import asyncpg

from taskyard.stores.postgres.constants import Lock
from taskyard.stores.postgres.schema import migrate
from tests.torture.postgres.site import Site
from tests.torture.work import address_of

MUTATIONS: dict[str, list[tuple[str, str]]] = {
    # Whoever ever held a claim may settle, report and submit.
    "drop-the-token-check": [
        (
            r"(\w+)\.token = (\w+)\.token AND \1\.attempt = (?:\2\.attempt|coalesce\(\2\.attempt, c\.attempt\[1\]\))",
            r"\1.state = 'running'",
        )
    ],
    # A node that has beaten since it was looked at is taken for dead all the same.
    "rescue-without-looking": [
        (r"AND \(p_beats IS NULL OR beats = p_beats\)", ""),
        (r"incarnation = p_node AND beats = p_beats", "incarnation = p_node"),
    ],
    # A queue's room is looked for without counting what runs.
    "forget-what-runs": [(r"p_concurrency - coalesce\(sum\(t\.n\), 0\)", "p_concurrency + 0 * count(*)")],
    # Turns do not wait for each other, and take their time between looking for room and filling it.
    "drop-the-queue-lock": [
        (rf"PERFORM pg_advisory_xact_lock\((?:{Lock.QUEUE}|{Lock.COMPLETIONS}), h\)\s+FROM", "PERFORM FROM"),
        (rf"pg_advisory_xact_lock\((?:{Lock.QUEUE}|{Lock.COMPLETIONS}), hashtext\(v_queues\[1\]\)\)", "NULL"),
        (r"(v_ids := taskyard\.pick\([^;]*\);)", r"\1 PERFORM pg_sleep(0.5);"),
    ],
    # Neither the version of a schedule nor the row of a fire time keeps a second task out.
    "fire-without-looking": [
        (r"name = p_name AND version = p_version", "name = p_name"),
        (r"INTO v_new FROM noted", "INTO v_new FROM json_to_recordset(p_fires) AS j(id integer, fire_at timestamptz)"),
    ],
}
"""What to look for in the functions of our schema, and what to put in its place."""


def mutate(site: Site, folder: Path, name: str) -> None:
    """In the database of that folder, before anybody uses it."""

    async def change(conn: asyncpg.Connection) -> None:
        await migrate(conn)
        for pattern, instead in MUTATIONS[name]:
            found = await conn.fetch(
                "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'taskyard'::regnamespace"
            )
            changed = [re.sub(pattern, instead, source) for (source,) in found if re.search(pattern, source)]
            if not changed:
                raise ValueError(f"{name} has nothing to change: {pattern} is written in another way now")
            for source in changed:
                await conn.execute(source)

    site.databases.run(change, address_of(folder).read_text())
