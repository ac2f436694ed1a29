"""Finding the last events of a store."""

from pathlib import Path

import pytest

from taskyard.application.rates import recent_cursor
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Store
from taskyard.settings import make_store
from taskyard.testing.samples import a_record, an_add


@pytest.fixture(params=["sqlite", "postgres", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    urls = {"sqlite": f"sqlite:///{tmp_path / 'work.db'}", "memory": "memory://"}
    url = urls.get(request.param) or request.getfixturevalue("postgres_url")
    return make_store(url, SystemClock())


@pytest.mark.parametrize("there_are", [0, 3, 7, 40])
async def test_the_last_events_are_found(store: Store, there_are: int) -> None:
    """However a store numbers its events, the last seven are found, or all there are."""
    await store.open()
    uuids = []
    for _ in range(there_are):
        record = a_record()
        uuids.append(record.uuid)
        await store.turn("node", adds=[an_add(record)])
    page = await store.events(after=await recent_cursor(store, 7))
    assert [event.uuid for event in page.events][-there_are:] == uuids[-7:]
    await store.close()
