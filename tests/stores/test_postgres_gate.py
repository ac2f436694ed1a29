"""Connecting in times of trouble, and how far apart hints are: on a loop whose time is a number."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from taskyard.errors import StoreUnreachable
from taskyard.stores.postgres.gate import APART_S, CALM_AFTER_S, MOST, WINDOW_S, Gate, Rank
from taskyard.stores.postgres.hints import APART_CAP_S, MUCH, pause_after
from taskyard.stores.postgres.hints import APART_S as HINTS_APART_S
from taskyard.testing.simulation.loop import VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(random.Random(1))
    yield loop
    loop.close()


class Server:
    """Answers who connects after `takes_s`, if it is there by then."""

    def __init__(self, loop: VirtualLoop, *, takes_s: float = 0.0) -> None:
        self.is_away = True
        self.tries: list[float] = []
        self._loop, self._takes_s = loop, takes_s

    async def connect(self) -> float:
        self.tries.append(self._loop.time())
        await asyncio.sleep(self._takes_s)
        if self.is_away:
            raise StoreUnreachable("here", "away")
        return self._loop.time()


async def gather(*asked: Coroutine[Any, Any, float]) -> list[float | BaseException]:
    return await asyncio.gather(*asked, return_exceptions=True)


def busiest(tries: list[float]) -> int:
    """The most tries in any window."""
    return max(sum(at <= other < at + WINDOW_S for other in tries) for at in tries)


def test_without_trouble_nobody_waits(loop: VirtualLoop) -> None:
    """Many who connect at once while nothing is wrong are all let through at once, also when trouble is long past."""

    async def run() -> None:
        server, gate = Server(loop), Gate()
        server.is_away = False
        gate.trouble()
        await asyncio.sleep(CALM_AFTER_S)
        began = loop.time()
        assert await gather(*(gate.connect(server.connect, Rank.WORK) for _ in range(50))) == [began] * 50

    loop.run_until_complete(run())


def test_one_failure_is_told_to_all_who_wait(loop: VirtualLoop) -> None:
    """While the server is away one at a time asks, and all who wait meanwhile fail with it."""

    async def run() -> None:
        server, gate = Server(loop, takes_s=0.1), Gate()
        gate.trouble()
        answers = await gather(*(gate.connect(server.connect, Rank.WORK) for _ in range(20)))
        assert {type(answer) for answer in answers} == {StoreUnreachable}
        assert server.tries == [0.0]
        assert loop.time() == pytest.approx(0.1)

    loop.run_until_complete(run())


@pytest.mark.parametrize("takes_s", [0.0, 3.9], ids=["refuses", "silent"])
def test_tries_are_kept_apart_while_the_server_is_away(loop: VirtualLoop, takes_s: float) -> None:
    """However many want to connect, and for however long, tries are about a second apart: a server that is silent does
    not make them fewer."""

    async def run() -> None:
        server, gate = Server(loop, takes_s=takes_s), Gate()
        gate.trouble()

        async def insist() -> None:
            while loop.time() < 60.0:
                await gather(gate.connect(server.connect, Rank.WORK))

        await asyncio.gather(*(insist() for _ in range(7)))
        gaps = [later - sooner for sooner, later in zip(server.tries, server.tries[1:], strict=False)]
        assert min(gaps) >= APART_S
        assert max(gaps[:-7]) <= APART_S * 4 / 3 + 1e-9
        assert busiest(server.tries) <= MOST

    loop.run_until_complete(run())


def test_when_one_has_got_through_the_others_follow(loop: VirtualLoop) -> None:
    """When the server is back, the first to find out is followed at once by all who work, then by those who give
    hints; and never are there more in ten seconds than may be."""

    async def run() -> None:
        server, gate = Server(loop, takes_s=0.01), Gate()
        gate.trouble()
        for _ in range(10):
            await gather(gate.connect(server.connect, Rank.HINTS))
        server.is_away = False
        back = loop.time()
        came: list[tuple[Rank, float]] = []

        async def come(rank: Rank) -> float:
            came.append((rank, at := await gate.connect(server.connect, rank)))
            return at

        await gather(*(come(rank) for rank in (*[Rank.HINTS] * 3, *[Rank.WORK] * 3)))
        assert Counter(rank for rank, at in came if at < back + 2 * APART_S)[Rank.WORK] == 3
        assert max(at for rank, at in came if rank is Rank.WORK) <= min(at for rank, at in came[1:] if rank > 0)
        assert busiest(server.tries) <= MOST

    loop.run_until_complete(run())


def test_who_waits_no_more_is_not_let_through(loop: VirtualLoop) -> None:
    """The place of one that was cancelled while it waited goes to the next."""

    async def run() -> None:
        server, gate = Server(loop), Gate()
        gate.trouble()
        await gather(gate.connect(server.connect, Rank.WORK))
        server.is_away = False
        first, second = (asyncio.ensure_future(gate.connect(server.connect, Rank.WORK)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first, second])
        assert second.result() <= APART_S * 4 / 3
        assert len(server.tries) == 2

    loop.run_until_complete(run())


# --- hints ------------------------------------------------------------------------------------------------------------


def test_hints_are_kept_apart_only_while_there_is_much_to_tell() -> None:
    """Who tells of turn after turn is slowed down, up to a point; as soon as he is not, what he tells goes out at once,
    also if a little was always waiting."""
    pause_s = HINTS_APART_S
    for _ in range(10):
        pause_s = pause_after(pause_s, told=1 + int(2 * MUCH * pause_s), in_s=pause_s)
    assert pause_s == APART_CAP_S
    for told in (3, 2, 1, 1, 1):
        pause_s = pause_after(pause_s, told=told, in_s=pause_s)
    assert pause_s == HINTS_APART_S
