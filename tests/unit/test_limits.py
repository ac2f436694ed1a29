"""How much may start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.model.limits import Demand, Quota
from taskyard.model.queue import QueueSettings

QUEUES = ("default", "cpu", "free")  # nothing limits the last one
SOURCES = ("fetch", "shrink", "stranger")  # the last one is in no demand

small = st.integers(0, 6)
demands = st.builds(
    Demand,
    total=small,
    per_lane=st.fixed_dictionaries({"fetch": small, "shrink": small}),
    others=small,
)
queue_rooms = st.fixed_dictionaries({"default": st.integers(-2, 6), "cpu": small})
lanes = st.tuples(st.sampled_from(QUEUES), st.sampled_from(SOURCES))


def admit_all(quota: Quota, wanted: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One by one, what fits."""
    admitted = []
    for lane in wanted:
        if quota.room(*lane) > 0:
            quota.admit(*lane)
            admitted.append(lane)
    return admitted


@pytest.mark.spec("SCH-08", "SCH-15", "QUE-02")
@given(demands, queue_rooms, st.lists(lanes, max_size=40))
def test_no_limit_is_ever_passed(demand: Demand, queues: dict[str, int], wanted: list[tuple[str, str]]):
    """What is admitted one by one stays within the total, within each source and within each queue."""
    admitted = admit_all(Quota(demand, queues), wanted)
    assert len(admitted) <= demand.total
    for source, limit in demand.per_lane.items():
        assert sum(lane[1] == source for lane in admitted) <= limit
    assert sum(lane[1] not in demand.per_lane for lane in admitted) <= demand.others
    for queue, free in queues.items():
        assert sum(lane[0] == queue for lane in admitted) <= max(0, free)


@given(demands, queue_rooms, st.lists(lanes, max_size=40), lanes)
def test_the_tightest_limit_wins(
    demand: Demand, queues: dict[str, int], wanted: list[tuple[str, str]], lane: tuple[str, str]
):
    """The room of a lane is the smallest of what total, source and queue have left."""
    quota = Quota(demand, queues)
    admitted = admit_all(quota, wanted)
    queue, source = lane
    listed = source in demand.per_lane
    lefts = [
        demand.total - len(admitted),
        (demand.per_lane[source] if listed else demand.others)
        - sum((other == source) if listed else (other not in demand.per_lane) for _, other in admitted),
    ]
    if queue in queues:
        lefts.append(queues[queue] - sum(other == queue for other, _ in admitted))
    assert quota.room(*lane) == min(lefts)


@given(demands, queue_rooms, lanes)
def test_single_admits_make_a_batch(demand: Demand, queues: dict[str, int], lane: tuple[str, str]):
    """As many tasks of a lane are admitted one by one as its room said at first, and a batch of them counts alike."""
    quota, batch = Quota(demand, queues), Quota(demand, queues)
    room = max(0, quota.room(*lane))
    assert len(admit_all(quota, [lane] * 50)) == room
    batch.admit(*lane, room)
    assert all(batch.room(queue, source) == quota.room(queue, source) for queue in QUEUES for source in SOURCES)


@given(demands, queue_rooms, st.lists(lanes, max_size=40))
def test_a_demand_is_not_used_up(demand: Demand, queues: dict[str, int], wanted: list[tuple[str, str]]):
    """Counting down leaves the demand and the queues' room as they were, so that a demand can stand."""
    before = (demand.total, dict(demand.per_lane), demand.others, dict(queues))
    admit_all(Quota(demand, queues), wanted)
    assert (demand.total, dict(demand.per_lane), demand.others, dict(queues)) == before


@pytest.mark.parametrize(
    "wrong", [{"concurrency": 0}, {"concurrency": -1}, {"per_key": 0}, {"auto_recover": -1}], ids=str
)
def test_a_queue_that_could_never_start_anything_is_refused(wrong: dict[str, int]):
    """A queue with no room for anything is refused when it is made, and named."""
    with pytest.raises(ValueError, match="'cpu'"):
        QueueSettings(name="cpu", **wrong)  # type: ignore[arg-type]
