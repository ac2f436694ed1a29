"""Facts that a run reports with its progress."""

import pytest

from taskyard.model.execution import Fact, Progress
from tests.execution import writers
from tests.execution.recording import EXECUTORS, open_site

EVERY = pytest.mark.parametrize("executor", EXECUTORS)


@pytest.fixture
async def site():
    async with open_site() as site:
        yield site


@EVERY
async def test_facts_are_kept(site, executor):
    """Numbers, texts and truths are kept under their names; a long text is cut."""
    record = await site.store.find(await site.run(writers.tell_facts, executor=executor))
    facts: dict[str, Fact] = {"saved_bytes": 7, "is_last": False, "share": 0.25, "name": "é" * 200}
    assert record.progress == Progress(0.5, "second pass", 51, facts)


@EVERY
async def test_what_is_no_fact_is_left_out(site, executor, caplog):
    """What cannot be kept is left out, is complained of once, and fails nothing."""
    uuid = await site.run(writers.tell_bad_facts, executor=executor)
    record = await site.store.find(uuid)
    assert record.state == "completed"
    assert record.progress == Progress(0.6, "more", None, {f"n{n}": n for n in range(16)})
    [said] = [one.getMessage() for one in caplog.records if one.name == "taskyard.run"]
    assert said.startswith("progress() does not keep no name, nnnn")
    [line] = site.store.lines(uuid)
    assert line.level == "warning"
