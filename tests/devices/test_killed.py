"""A farm whose process is killed loses nothing, and what it leaves can be looked at and steered."""

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from taskyard import TaskFilter, TaskState
from taskyard.devices import GameAccount
from tests.devices.farm import PATIENCE_S, Work, eventually, phones, serving
from tests.devices.test_pool import become
from tests.scenario.processes import TOP, environment


@asynccontextmanager
async def node(url: str, first: int, count: int, accounts: int):
    """A process with so many devices, when so many of its tasks run."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.devices.farm_worker", url, str(first), str(count), str(accounts)),
        env=environment(),
        cwd=TOP,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            lines = [(await process.stdout.readline()).decode().split() for _ in range(min(count, accounts))]
        yield process, lines
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.communicate()


async def cli(url: str, *words: str) -> str:
    """What a command prints, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "taskyard.cli", *words),
        env=environment(TASKYARD_STORE=url),
        cwd=TOP,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, (words, out, err)
    return out.decode()


@pytest.mark.spec("DEV-01", "DEV-02", "DEV-13")
async def test_a_kill_loses_nothing(tmp_path):
    """Of 20 tasks that wait and 2 that run none is lost by kill -9: `ls`, `why` and `cancel` know them, and the next
    process runs them, the interrupted ones first."""
    url = f"sqlite:///{tmp_path}/farm.db"
    async with node(url, 1, 2, 22) as (_, lines):
        assert sorted(account for account, _ in lines) == ["0", "1"]
    tasks = json.loads(await cli(url, "ls", "--json", "--limit", "100"))["tasks"]
    assert len(tasks) == 22
    uuid = next(task["uuid"] for task in tasks if task["key"] == "21")
    assert "no node that serves 'daily' is alive" in await cli(url, "why", uuid)
    await cli(url, "cancel", uuid)
    work = Work()
    work.let_go()
    async with serving(url, work) as service:
        store = service.yard.store

        async def all_ended():
            counts = await store.count()
            return counts.get(("devices", TaskState.COMPLETED)) == 21

        await eventually(service.yard, all_ended)
        assert sorted(account for _, account, _ in work.order) == list(range(21))
        assert {account for _, account, _ in work.order[:2]} == {0, 1}
        assert await store.count() == {("devices", TaskState.COMPLETED): 21, ("devices", TaskState.CANCELED): 1}


@pytest.mark.spec("DEV-12")
async def test_another_node_takes_over_what_a_dead_one_had(tmp_path):
    """When a node is killed, its tasks go to the head of the line of the node that lives, and its devices are down
    until a node that may serve them comes."""
    url, work = f"sqlite:///{tmp_path}/farm.db", Work()
    work.let_go()
    async with node(url, 11, 2, 2) as (process, _), serving(url, work, devices=phones(1)) as service:
        await become(service.yard, emu_11="busy", emu_12="busy", emu_1="idle")
        assert await service.is_running(0)
        process.send_signal(signal.SIGKILL)
        assert {(await work.next())[1:], (await work.next())[1:]} == {(0, "emu-1"), (1, "emu-1")}
        await become(service.yard, emu_11="down", emu_12="down", emu_1="idle")
        found = await service.yard.store.list_tasks(TaskFilter(queue="devices"))
        assert {record.recoveries for record in found} == {1}
        assert GameAccount(0).key in {record.key for record in found}
