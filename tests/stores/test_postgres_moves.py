"""Moves beside another task for which PostgreSQL finds no position, and moves that fail for another reason."""

from collections.abc import Iterator

import pytest

from taskyard.errors import InvalidInput, StoreUnavailable
from taskyard.model.command import MoveBefore
from taskyard.testing.postgres import Databases
from taskyard.testing.samples import a_node, a_record, an_add
from tests.stateful.histories import GAP, crowded

A = a_node("a")

FAILING = """
CREATE OR REPLACE FUNCTION taskyard.place(p_id bigint, p_queue text, p_anchor bigint, p_before boolean) RETURNS void
LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'too much of something' USING ERRCODE = 'program_limit_exceeded'; END $$
"""


@pytest.fixture
def postgres_url(databases: Databases) -> Iterator[str]:
    """Of a database with room for few tasks between two."""
    with crowded():
        yield databases.make()


async def test_a_full_place_between_two_tasks_is_told(store):
    """If no position is left before a task, the move is refused and the error says what to do."""
    first, *others = [a_record() for _ in range(2 * GAP)]
    await store.turn(A.incarnation, adds=[an_add(first, *others)])
    with pytest.raises(
        InvalidInput, match=r"^a million tasks were put between the same two already; move it elsewhere$"
    ):
        await store.apply([task.uuid for task in others], MoveBefore(first.uuid))


async def test_another_limit_of_the_server_is_not_taken_for_a_full_place(store, conn):
    """If the server refuses a move because of a limit of its own, the error does not say to move it elsewhere."""
    first, second = a_record(), a_record()
    await store.turn(A.incarnation, adds=[an_add(first, second)])
    await conn.execute(FAILING)
    with pytest.raises(StoreUnavailable, match=r"too much of something$"):
        await store.apply([second.uuid], MoveBefore(first.uuid))
