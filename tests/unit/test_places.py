"""Places made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.model.order import GAP
from taskyard.model.places import Put, place_beside
from taskyard.stores.memory.lines import HandPlaced


class Queue:
    """Tasks 0, 1, 2 … and their places; the first ones stand at multiples of the gap."""

    def __init__(self, natural: int) -> None:
        self.places = {n: (n - 1) * GAP for n in range(natural)}
        self.order = list(range(natural))
        self.puts = HandPlaced()
        self.moved = 0

    def insert(self, anchor: int, *, before: bool) -> None:
        placing = place_beside(self.places[anchor], self.puts, before=before)
        for _, task in placing.moved:
            self.puts.discard(Put(self.places[task], task))
        for position, task in placing.moved:
            self.places[task] = position
            self.puts.add(Put(position, task))
        self.moved += len(placing.moved)
        new = len(self.places)
        self.places[new] = placing.position
        self.puts.add(Put(placing.position, new))
        self.order.insert(self.order.index(anchor) + (not before), new)

    def check(self) -> None:
        assert sorted(self.places, key=lambda task: self.places[task]) == self.order
        assert len(set(self.places.values())) == len(self.places)
        assert all(place % GAP for task, place in self.places.items() if task > 2)


@pytest.mark.spec("QUE-07")
@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=400))
def test_whoever_is_put_beside_another_stands_there(moves):
    """Before or after any other, hand-made or not, before zero or after: nobody else changes his turn."""
    queue = Queue(3)
    for number, before in moves:
        queue.insert(number % len(queue.places), before=before)
    queue.check()


@pytest.mark.spec("QUE-07")
@pytest.mark.parametrize("spot", ["before", "after", "last", "zigzag"])
def test_many_at_one_spot_move_few_others(spot):
    """Thousands between the same two: each makes a few tens move on average, and the order is kept."""
    queue = Queue(3)
    for n in range(3000):
        last = len(queue.places) - 1
        match spot:
            case "before":
                queue.insert(2, before=True)
            case "after":
                queue.insert(1, before=False)
            case "last":
                queue.insert(last if n else 1, before=True)
            case _:
                queue.insert(last if n else 1, before=n % 2 == 0)
    queue.check()
    assert queue.moved <= 40 * 3000
