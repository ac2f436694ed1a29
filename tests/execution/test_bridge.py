"""The way from futures of threads to an event loop: nothing is lost on it, and nothing stays behind."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future

import pytest

from taskyard.execution.bridge import bridge_here, outcome


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_closed_loop_is_let_go(when):
    """An answer that comes as its loop is closed, or after that, does not keep the loop alive."""
    loop = asyncio.SelectorEventLoop()
    future: Future[None] = Future()

    async def watch(future: Future[None]) -> None:
        _ = bridge_here().watch(future)

    loop.run_until_complete(watch(future))
    if when == "before":
        future.set_result(None)  # on its way, and never told
    loop.close()
    if when == "after":
        future.set_result(None)
    seen = weakref.ref(loop)
    del loop, future
    gc.collect()
    assert seen() is None


async def test_many_answers_from_threads_all_arrive():
    """Whatever threads complete at the same time, each waiter is told of its own."""
    futures: list[Future[int]] = [Future() for _ in range(1000)]

    def complete(place: int) -> None:
        for number in range(place, len(futures), 4):
            futures[number].set_result(number)

    waiting = [asyncio.ensure_future(outcome(future)) for future in futures]
    await asyncio.sleep(0)
    threads = [threading.Thread(target=complete, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    assert await asyncio.gather(*waiting) == list(range(1000))
    for thread in threads:
        thread.join()
