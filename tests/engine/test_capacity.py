"""Slots: counting what runs, and saying what there is room for."""

from dataclasses import replace
from typing import Any

import pytest

from taskyard.model.limits import Demand
from taskyard.ports.consumer import Consumer
from taskyard.ports.places import Place, Places
from taskyard.queueing.capacity import Slots


def consumers(**counts: Any) -> dict[str, Consumer]:
    return {name: consumer(name, count) for name, count in counts.items()}


def consumer(name: str, count: Any) -> Consumer:
    return Consumer(name=name, encode=str, call=str, is_async=False, executor="thread", concurrency=count)


def test_room_is_what_is_left():
    """The demand counts down with what is taken and up with what is freed."""
    slots = Slots(consumers(a=2, b=1), max_running=10)
    assert slots.demand() == Demand(10, {"a": 2, "b": 1})
    slots.take("a")
    slots.take("b")
    assert slots.demand() == Demand(8, {"a": 1})
    slots.free("b")
    assert slots.demand() == Demand(9, {"a": 1, "b": 1})


def test_without_room_there_is_no_demand():
    """When all sources, or all slots together, are taken, nothing is asked for."""
    by_source, in_total = Slots(consumers(a=1), max_running=10), Slots(consumers(a=5), max_running=1)
    by_source.take("a")
    in_total.take("a")
    assert by_source.demand() is None
    assert in_total.demand() is None


def test_no_source_is_asked_for_beyond_its_executor():
    """With two threads a source gets two, however many it may run; with none free it gets none, others get theirs."""
    known = consumers(a=6, b=1) | {"c": replace(consumer("c", 9), executor="inline")}
    slots = Slots(known, max_running=10, capacities={"thread": 2, "inline": None})
    assert slots.demand() == Demand(10, {"a": 2, "b": 1, "c": 9})
    slots.take("a")
    assert slots.demand() == Demand(9, {"a": 1, "b": 1, "c": 9})
    slots.take("a")
    slots.take("b")
    assert slots.demand() == Demand(7, {"c": 9})
    slots.free("a")
    assert slots.demand() == Demand(8, {"c": 9})
    slots.free("b")
    assert slots.demand() == Demand(9, {"a": 1, "b": 1, "c": 9})


def test_the_demand_is_kept_until_something_changes():
    """Asking again without a change costs nothing: it is the same value."""
    slots = Slots(consumers(a=2), max_running=10)
    assert slots.demand() is slots.demand()


def test_a_demand_given_out_does_not_change():
    """A store may read a demand in another thread while this node goes on counting."""
    slots = Slots(consumers(a=2), max_running=10, others=1)
    demand = slots.demand()
    slots.take("a")
    assert demand == Demand(10, {"a": 2}, 1)


def test_consumers_may_come_later():
    """A consumer that is added later gets its slots, and those that run keep theirs."""
    known = consumers(a=2)
    slots = Slots(known, max_running=10)
    slots.demand()
    slots.take("a")
    known["b"] = consumer("b", 3)
    slots.refresh()
    assert slots.demand() == Demand(9, {"a": 1, "b": 3})


@pytest.mark.spec("SCH-27")
def test_a_consumer_that_goes_is_not_asked_for():
    """One out and one in is noticed; what runs of the one that went still counts in total and for its executor."""
    known = consumers(a=2)
    slots = Slots(known, max_running=10, capacities={"thread": 4})
    slots.take("a")
    del known["a"]
    known["b"] = consumer("b", 5)
    slots.refresh()
    assert slots.demand() == Demand(9, {"b": 3})
    slots.free("a")
    assert slots.demand() == Demand(10, {"b": 4})
    assert (slots.limits(), slots.executors()) == ({"b": 5}, {"b": "thread"})


@pytest.mark.spec("SCH-27")
def test_what_runs_of_an_old_consumer_counts_for_the_new_one():
    """A consumer that comes back, with another limit and elsewhere, has the slots that its earlier runs leave."""
    known = consumers(a=3)
    slots = Slots(known, max_running=10, capacities={"thread": 3, "process": 4})
    slots.take("a")
    slots.take("a")
    del known["a"]
    slots.refresh()
    assert slots.demand() is None
    known |= {"a": replace(consumer("a", 5), executor="process"), "b": consumer("b", 9)}
    slots.refresh()
    assert slots.demand() == Demand(8, {"a": 2, "b": 3})
    slots.free("a")
    slots.free("a")
    assert slots.demand() == Demand(10, {"a": 4, "b": 3})


@pytest.mark.spec("SCH-27")
def test_a_consumer_that_goes_becomes_a_stranger():
    """Where unknown sources are taken, one that went is unknown, though one of its runs is still going on."""
    known = consumers(a=1)
    slots = Slots(known, max_running=10, others=2)
    slots.take("a")
    del known["a"]
    slots.refresh()
    assert slots.demand() == Demand(9, {}, 2)
    slots.take("a")
    assert slots.demand() == Demand(8, {}, 1)
    slots.free("a")
    slots.free("a")
    assert slots.demand() == Demand(10, {}, 2)


def test_full_sources_are_no_strangers():
    """With room for unknown sources, a known one that is full is listed with 0, or it would be taken for unknown."""
    slots = Slots(consumers(a=1), max_running=10, others=2)
    slots.demand()
    slots.take("a")
    assert slots.demand() == Demand(9, {"a": 0}, 2)


def test_a_stranger_that_becomes_known_goes_back_where_it_came_from():
    """A task taken as one of the others frees that room, though its consumer was registered meanwhile."""
    known = consumers()
    slots = Slots(known, max_running=10, others=2)
    slots.demand()
    slots.take("late")
    known["late"] = consumer("late", 1)
    slots.refresh()
    slots.free("late")
    assert slots.demand() == Demand(10, {"late": 1}, 2)


def test_stopped_slots_ask_for_nothing():
    """After stop there is no demand, whatever is freed or registered."""
    known = consumers(a=2)
    slots = Slots(known, max_running=10)
    slots.demand()
    slots.take("a")
    slots.stop()
    slots.free("a")
    known["b"] = consumer("b", 3)
    slots.refresh()
    assert slots.demand() is None


@pytest.mark.spec("SCH-08")
@pytest.mark.parametrize("count", [None, 0, -1, 1.5, "2"])
def test_a_count_that_makes_no_sense_is_one(count):
    """A missing or invalid count is 1."""
    assert Slots(consumers(a=count), max_running=10).demand() == Demand(10, {"a": 1})


def test_free_places_follow_every_change():
    """What is free is kept between two looks, and found anew after each start, end and change of the places."""
    places = Places(["p1", "p2"])
    slots = Slots({"a": replace(consumer("a", 1), places=places)}, max_running=10)

    def free() -> list[str]:
        return [place.name for place in slots.free_places("a")]

    assert free() == ["p1", "p2"]
    assert slots.free_places("a") is slots.free_places("a")
    places.set_ready("p1", False)
    assert free() == ["p2"]
    slots.take("a", "p2")
    assert free() == []
    places.set_ready("p1", True)
    assert free() == ["p1"]
    slots.free("a", "p2")
    assert free() == ["p1", "p2"]
    places.remove("p1")
    assert free() == ["p2"]
    places.add(Place("p2", {"role": "eu"}))
    assert [place.labels for place in slots.free_places("a")] == [{"role": "eu"}]
