"""The items of schedules that make a task for each of many: listed by functions of users, encoded, made into tasks.

A function runs beside the loop that fires, and has a time limit: it may raise, hang, or return anything. A function
that is not asynchronous runs in a thread of its own, which is left alone if it does not return in time.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from taskyard.errors import ItemsFailed, PayloadTooLarge, TaskyardError, shorten
from taskyard.model.blocker import encode_requirements
from taskyard.model.dedupe import make_slot
from taskyard.model.device import set_account
from taskyard.model.each import Each, EncodedItem, ScheduleItem, WrongItems, check_items, decode_items
from taskyard.model.firing import Fire
from taskyard.model.schedule import Schedule
from taskyard.model.task import TaskRecord, new_uuid, to_json
from taskyard.ports.clock import Clock
from taskyard.ports.consumer import Consumer
from taskyard.ports.schedules import FireTasks

BREATHE_EVERY = 500
"""Items between two moments at which others run on the event loop: about 5 ms."""


@dataclass(frozen=True, slots=True)
class ItemFunction:
    """A function that lists the items of a schedule, and the name by which the stored schedule knows it."""

    name: str
    call: Callable[[], Any]


Items = Sequence[EncodedItem]


@dataclass(slots=True)
class _Listing:
    """A call that goes on, or has ended, and the version of the schedule that it is for."""

    version: str
    task: asyncio.Task[Items]


class ItemLister:
    """Lists the items of schedules. `functions` are those that this process has, by the name of their schedule."""

    def __init__(self, functions: Mapping[str, ItemFunction], *, clock: Clock, max_bytes: int) -> None:
        self._functions, self._clock, self._max_bytes = functions, clock, max_bytes
        self._listings: dict[str, _Listing] = {}
        self._hung: dict[str, Callable[[], bool]] = {}
        """Calls that did not return in time, and whether they still go on."""

    def has_items(self, schedule: Schedule) -> bool:
        """Whether the items of this schedule can be listed here."""
        if schedule.each is None or not schedule.each.function:
            return True
        function = self._functions.get(schedule.name)
        return function is not None and function.name == schedule.each.function

    def poll(self, schedule: Schedule, consumer: Consumer, version: str, done: Callable[[], None]) -> Items | None:
        """The items for a fire of this version of the schedule. None if they are still being listed; then `done` is
        called when there is an answer, which is given once. Raises `ItemsFailed`."""
        if schedule.each is not None and not schedule.each.function:
            return decode_items(schedule.each)
        listing = self._listings.get(schedule.name)
        if listing is None or listing.version != version:
            self.forget(schedule.name)
            task = asyncio.create_task(self.list_items(schedule, consumer), name="taskyard-schedule-items")
            task.add_done_callback(lambda _: done())
            self._listings[schedule.name] = _Listing(version, task)
            return None
        if not listing.task.done():
            return None
        del self._listings[schedule.name]
        return listing.task.result()

    def forget(self, name: str) -> None:
        """What is listed for this schedule is not needed any more."""
        listing = self._listings.pop(name, None)
        if listing is not None:
            _drop(listing.task)

    def retain(self, names: Collection[str]) -> None:
        """Only these schedules are left."""
        for name in self._listings.keys() - names:
            self.forget(name)

    def close(self) -> None:
        for name in list(self._listings):
            self.forget(name)

    async def list_items(self, schedule: Schedule, consumer: Consumer) -> Items:
        """Raises `ItemsFailed`, whatever is wrong."""
        each = schedule.each
        assert each is not None
        if not each.function:
            return decode_items(each)
        if not self.has_items(schedule):
            raise ItemsFailed(schedule.name, f"this process does not have the function {each.function!r}")
        try:
            listed = check_items(await self._call(schedule.name, self._functions[schedule.name].call, each))
            args = msgspec.json.decode(schedule.args)
            encoded: list[EncodedItem] = []
            for start in range(0, len(listed), BREATHE_EVERY):
                part = listed[start : start + BREATHE_EVERY]
                encoded += encode(consumer, args, part, first=start, max_bytes=self._max_bytes)
                await asyncio.sleep(0)
        except ItemsFailed:
            raise
        except Exception as error:
            raise ItemsFailed(schedule.name, describe(error)) from error
        return encoded

    async def _call(self, name: str, call: Callable[[], Any], each: Each) -> Any:
        """What the function returns, within its time."""
        is_running = self._hung.get(name)
        if is_running is not None and is_running():
            raise ItemsFailed(name, f"an earlier call of {each.function}() has not returned yet")
        if inspect.iscoroutinefunction(call):
            return await self._wait_for(name, _start(call), each)
        answer, thread = _start_thread(call)
        outcome = await self._wait_for(name, answer, each, thread.is_alive)
        if not inspect.isawaitable(outcome):
            return outcome
        return await self._wait_for(name, _start(lambda: outcome), each)

    async def _wait_for(
        self, name: str, answer: asyncio.Future[Any], each: Each, is_running: Callable[[], bool] | None = None
    ) -> Any:
        returned = asyncio.Event()
        answer.add_done_callback(lambda _: returned.set())
        try:
            await self._clock.wait(returned, self._clock.monotonic() + each.timeout_s)
        finally:
            is_late = not answer.done()
            if is_late:
                self._hung[name] = is_running or (lambda: not answer.done())
                _drop(answer)
        if is_late:
            raise ItemsFailed(name, f"{each.function}() has not returned within {each.timeout_s:g} s")
        outcome = answer.result()
        if isinstance(outcome, WrongItems):
            raise ItemsFailed(name, f"{each.function}() returned wrong items: {outcome}") from outcome
        if isinstance(outcome, BaseException):
            raise ItemsFailed(name, f"{each.function}() raised {describe(outcome)}") from outcome
        return outcome


def _start(call: Callable[[], Awaitable[Any]]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(_catch(call))


def _start_thread(call: Callable[[], Any]) -> tuple[asyncio.Future[Any], threading.Thread]:
    """Call it in a thread of its own; the future has what it returns or raises."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def tell(outcome: Any) -> None:
        if not answer.done():
            answer.set_result(outcome)

    def run() -> None:
        try:
            outcome = call()
        except BaseException as error:
            outcome = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, outcome)

    thread = threading.Thread(target=run, name="taskyard-schedule-items", daemon=True)
    thread.start()
    return answer, thread


async def _catch(call: Callable[[], Awaitable[Any]]) -> Any:
    """What the call returns, or the exception that it raises: `SystemExit` would end the event loop."""
    try:
        return await call()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return error
    except BaseException as error:
        return error


def _drop(future: asyncio.Future[Any]) -> None:
    """Nobody asks for its outcome any more."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    future.cancel()


def describe(error: BaseException) -> str:
    """The exception in one line."""
    text = str(error) if isinstance(error, TaskyardError) else traceback.format_exception_only(error)[-1]
    return shorten(" ".join(text.split()))


def encode(
    consumer: Consumer, args: Mapping[str, Any], items: Sequence[ScheduleItem], *, first: int = 0, max_bytes: int
) -> list[EncodedItem]:
    """The items with their arguments beside those of the schedule. An error names the number of its item, counted from
    `first`."""
    encoded = []
    for number, item in enumerate(items, first):
        merged = {**args, **item.args}
        try:
            text = to_json("args", merged) if consumer.produce is not None else consumer.encode(merged)
            if len(text) * 4 > max_bytes and (size := len(text.encode())) > max_bytes:
                raise PayloadTooLarge(f"the arguments of {consumer.name!r}", size, max_bytes)
        except TaskyardError as error:
            error.args = (f"item {number}: {error}",)
            raise
        encoded.append(EncodedItem(msgspec.Raw(text.encode()), item.key))
    return encoded


# --- tasks ------------------------------------------------------------------------------------------------------------


async def make_tasks(
    schedule: Schedule, consumer: Consumer, fires: Sequence[Fire], items: Items | None, *, now: datetime
) -> list[FireTasks]:
    """The tasks of these fires; `items` are those of a schedule that has some. Raises `ItemsFailed`."""
    if items is None:
        return [FireTasks(fire, [make_record(schedule, consumer, fire, now=now)]) for fire in fires]
    made = []
    try:
        for fire in fires:
            records = []
            for number, item in enumerate(items, 1):
                records.append(_make_item(schedule, consumer, fire, item, now=now))
                if number % BREATHE_EVERY == 0:
                    await asyncio.sleep(0)
            made.append(FireTasks(fire, records))
        return made
    except Exception as error:
        raise ItemsFailed(schedule.name, describe(error)) from error


def _make_item(schedule: Schedule, consumer: Consumer, fire: Fire, item: EncodedItem, *, now: datetime) -> TaskRecord:
    assert schedule.each is not None
    record = make_record(schedule, consumer, fire, args=bytes(item.args).decode(), now=now)
    if record.key is None or not consumer.account:
        record.key = item.key or schedule.key
    if schedule.skips_items and record.dedupe_slot is None:
        record.dedupe_slot = make_slot(schedule.consumer, record.args, item.key)
        record.dedupe_scope = schedule.each.dedupe_scope
    return record


def make_record(
    schedule: Schedule, consumer: Consumer, fire: Fire, *, now: datetime, args: str | None = None
) -> TaskRecord:
    """The task of one fire, with these arguments or those of the schedule."""
    args = schedule.args if args is None else args
    if consumer.produce is not None and (task := consumer.make_task(msgspec.json.decode(args))) is not None:
        args = consumer.encode(task.args)
    limits = [limit for limit in (schedule.timeout_s, consumer.timeout_s) if limit is not None]
    record = TaskRecord(
        uuid=new_uuid(),
        consumer=schedule.consumer,
        due_at=fire.due_at,
        created_at=now,
        updated_at=now,
        queue=schedule.queue or consumer.queue,
        args=args,
        priority=schedule.priority.value,
        key=schedule.key,
        timeout_s=min(limits) if schedule.timeout_s is not None else None,
        retry=schedule.retry,
        bucket=schedule.requires.get(consumer.bucket_by),
        requires=encode_requirements(schedule.requires),
    )
    if consumer.account:
        set_account(record, consumer.account)
    return record
