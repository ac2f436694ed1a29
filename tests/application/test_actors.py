"""Commands of the application are kept with the actor that it was opened for."""

import inspect
import typing
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from taskyard import Yard
from taskyard.application.command_requests import Cancel, Hold, Pause
from taskyard.application.device_documents import (
    DeviceChange,
    DeviceRequest,
    DrainDevice,
    GiveBackDevice,
    QuarantineDevice,
    TakeDevice,
)
from taskyard.application.interface import Application
from taskyard.application.local import LocalApplication
from taskyard.application.opening import open_application
from taskyard.application.schedule_documents import ScheduleRequest
from taskyard.application.task_requests import SubmitRequest
from taskyard.errors import TaskFailed
from taskyard.model.task_filter import TaskFilter

ANA = "cli:ana"
NOW = datetime.now(UTC)

QUERIES = {
    "tasks": {"list", "get", "get_many", "resolve", "count", "get_log", "read_artifact", "explain", "explain_all",
              "failures", "wait", "get_group"},
    "queues": {"list", "order"},
    "schedules": {"list", "get"},
    "nodes": {"list"},
    "devices": {"list", "get", "history", "overview", "watch", "accounts"},
    "events": {"read", "subscribe"},
    "overview": {"get", "watch"},
    "consumers": {"list"},
    "audit": {"list"},
}  # fmt: skip
COMMANDS = {
    f"{noun}.{name}"
    for noun, value in vars(Application).items()
    if isinstance(value, property) and noun != "store"
    for name, call in vars(typing.get_type_hints(value.fget)["return"]).items()
    if inspect.isfunction(call) and not name.startswith("_") and name not in QUERIES.get(noun, ())
}


@pytest.fixture
async def application(tmp_path: Path) -> AsyncIterator[LocalApplication]:
    yard = Yard(tmp_path / "work.db", name="here")

    @yard.consumer
    async def add(a: int = 1) -> int:
        return a

    @yard.consumer
    async def fail() -> None:
        raise ValueError("bad luck")

    async with yard, open_application(yard, actor=ANA) as opened:
        yield opened


async def submit(application: LocalApplication, consumer: str = "add", *, is_later: bool = False) -> str:
    delay_s = 3600.0 if is_later else None
    return (await application.tasks.submit(SubmitRequest(consumer=consumer, delay_s=delay_s))).uuid


async def finish(application: LocalApplication) -> str:
    uuid = await submit(application)
    await application.tasks.wait(uuid, timeout_s=30)
    return uuid


async def make_group(application: LocalApplication, consumer: str, **options: Any) -> str:
    yard = application.tasks._context.yard
    return (await yard.submit_group([yard.bind(consumer, **options)])).id


async def put_schedule(application: LocalApplication) -> None:
    await application.schedules.put(ScheduleRequest(name="nightly", rule="0 4 * * *", consumer="add"))


async def apply(application: LocalApplication) -> None:
    await application.tasks.apply([await submit(application, is_later=True)], Hold())


async def apply_matching(application: LocalApplication) -> None:
    await submit(application, is_later=True)
    async for _ in application.tasks.apply_matching(TaskFilter(consumer="add"), Cancel()):
        pass


async def rerun(application: LocalApplication) -> None:
    await application.tasks.rerun([await finish(application)])


async def rerun_matching(application: LocalApplication) -> None:
    await finish(application)
    async for _ in application.tasks.rerun_matching(TaskFilter(consumer="add")):
        pass


async def prune(application: LocalApplication) -> None:
    await finish(application)
    await application.tasks.prune(finished_before=NOW + timedelta(days=1))


async def cancel_group(application: LocalApplication) -> None:
    await application.tasks.cancel_group(await make_group(application, "add", delay_s=3600.0))


async def retry_group(application: LocalApplication) -> None:
    group = await make_group(application, "fail")
    (task,) = (await application.tasks.get_group(group)).tasks
    with pytest.raises(TaskFailed):
        await application.tasks.wait(task.uuid, timeout_s=30)
    await application.tasks.retry_group(group)


async def drain(application: LocalApplication) -> None:
    await application.nodes.drain("here")


async def pause_queue(application: LocalApplication) -> None:
    await application.queues.apply("default", Pause())


async def pause(application: LocalApplication) -> None:
    await put_schedule(application)
    await application.schedules.pause("nightly")


async def resume(application: LocalApplication) -> None:
    await pause(application)
    await application.schedules.resume("nightly")


async def remove(application: LocalApplication) -> None:
    await put_schedule(application)
    await application.schedules.remove("nightly")


async def run_now(application: LocalApplication) -> None:
    await put_schedule(application)
    await application.schedules.run_now("nightly")


async def backfill(application: LocalApplication) -> None:
    await put_schedule(application)
    start, end = NOW - timedelta(days=2), NOW
    await application.schedules.backfill("nightly", start=start, end=end, again=True)


async def add_device(application: LocalApplication) -> None:
    await application.devices.add(DeviceRequest(name="emu-1", pool="phones", adapter="simulated"))


async def edit_device(application: LocalApplication) -> None:
    await add_device(application)
    await application.devices.edit("emu-1", DeviceChange(settings={"seed": 3}))


async def label_device(application: LocalApplication) -> None:
    await add_device(application)
    await application.devices.label(["emu-1"], {"role": "eu"})


async def order_device(application: LocalApplication) -> None:
    await add_device(application)
    for command in (DrainDevice(), TakeDevice(for_s=60.0), QuarantineDevice(), GiveBackDevice(), GiveBackDevice()):
        await application.devices.apply(["emu-1", "emu-2"], command)


async def remove_device(application: LocalApplication) -> None:
    await add_device(application)
    await application.devices.remove(["emu-1"])


async def release_account(application: LocalApplication) -> None:
    yard = application.devices._context.yard
    await yard.devices.quarantine_account("phones", 7, "daily", by=ANA)
    await application.devices.release(7)


CALLS: dict[str, tuple[Callable[[LocalApplication], Awaitable[None]], list[str]]] = {
    "tasks.apply": (apply, ["hold"]),
    "tasks.apply_matching": (apply_matching, ["cancel"]),
    "tasks.rerun": (rerun, ["run_again"]),
    "tasks.rerun_matching": (rerun_matching, ["run_again"]),
    "tasks.prune": (prune, ["prune"]),
    "tasks.cancel_group": (cancel_group, ["cancel"]),
    "tasks.retry_group": (retry_group, ["retry"]),
    "queues.apply": (pause_queue, ["pause"]),
    "nodes.drain": (drain, ["drain"]),
    "devices.add": (add_device, ["add_device"]),
    "devices.edit": (edit_device, ["add_device", "edit"]),
    "devices.label": (label_device, ["add_device", "label"]),
    "devices.apply": (order_device, ["add_device", "drain", "take", "quarantine", "give_back"]),
    "devices.remove": (remove_device, ["add_device", "remove_device"]),
    "devices.release": (release_account, ["quarantine_account", "release_account"]),
    "schedules.put": (put_schedule, ["put_schedule"]),
    "schedules.pause": (pause, ["put_schedule", "pause_schedule"]),
    "schedules.resume": (resume, ["put_schedule", "pause_schedule", "resume_schedule"]),
    "schedules.remove": (remove, ["put_schedule", "remove_schedule"]),
    "schedules.run_now": (run_now, ["put_schedule", "run_schedule"]),
    "schedules.backfill": (backfill, ["put_schedule", "backfill_schedule"]),
}
"""Each command, with the entries that it and what prepares it leave."""


def test_every_command_is_tested() -> None:
    """A new call of the interface is a query, or a command that leaves an audit entry; a submit is kept in its task."""
    assert CALLS.keys() | {"tasks.submit"} == COMMANDS


@pytest.mark.parametrize("name", CALLS)
async def test_a_command_leaves_one_audit_entry(application: LocalApplication, name: str) -> None:
    """Each command of the interface leaves one finished entry that names who asked, and by which way."""
    call, expected = CALLS[name]
    await call(application)
    entries = (await application.audit.list()).entries
    assert [entry.command for entry in reversed(entries)] == expected
    assert {(entry.via, entry.actor, entry.finished) for entry in entries} == {("cli", "ana", True)}


async def test_a_submit_is_kept_in_its_task(application: LocalApplication) -> None:
    """A submit leaves no entry: the task names the actor."""
    uuid = await submit(application)
    assert (await application.audit.list()).entries == ()
    assert (await application.tasks.get(uuid)).submitted_by == ANA
