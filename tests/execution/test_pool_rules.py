"""The rules of a yard's process pools."""

import logging

import pytest

from taskyard import InvalidInput, Yard
from taskyard.executors import PoolRules
from tests.execution import algorithms
from tests.execution.asking import spec
from tests.execution.deeds import echo


def make_yard(**settings):
    yard = Yard("memory://")
    yard.consumer(name="echo", executor="isolated", concurrency=3, **settings)(echo)
    return yard


def test_a_pool_of_its_own_is_as_large_as_the_consumer():
    """What nobody has named is as the consumer needs it; what is named counts."""
    yard = make_yard()
    consumer = yard._get_consumer("echo")
    rules = PoolRules()
    assert rules.of(consumer).max_workers == 3
    rules.ask("echo", {"memory_limit": 1 << 30, "preload": ("json",)})
    found = rules.of(consumer)
    assert (found.max_workers, found.memory_limit, found.preload) == (3, 1 << 30, ("json",))
    rules.ask("echo", {"max_workers": 2})
    assert rules.of(consumer).max_workers == 2


@pytest.mark.parametrize("is_defined_first", [True, False])
def test_the_hints_of_an_algorithm_stay_where_nothing_else_is_said(is_defined_first):
    """A rule for its pool changes what it names, whichever comes first, and leaves the other hints alone."""
    yard = Yard("memory://")
    hints = spec("double", memory_limit=1 << 30, max_workers=2)
    if is_defined_first:
        yard.define_pool("double", recycle_after=5)
    yard.install(algorithms.double, spec=hints)
    if not is_defined_first:
        yard.define_pool("double", recycle_after=5)
    found = yard._pool_rules.of(yard._get_consumer("double"))
    assert (found.recycle_after, found.memory_limit, found.max_workers) == (5, 1 << 30, 2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"max_worker": 2}, "a pool has no 'max_worker'; known are max_workers"), ({"max_workers": 0}, "max_workers")],
)
def test_what_no_pool_knows_is_refused(settings, says):
    """A setting that does not exist, or has no such value, is named at once."""
    with pytest.raises(InvalidInput, match=says):
        make_yard().define_pool(**settings)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nobody", "there is no such consumer"),
        ("here", "it has executor='thread'"),
        ("shared", r"define_pool\(…\)"),
    ],
)
async def test_rules_for_a_pool_that_will_never_be_made_are_refused(name, says):
    """They are refused when the yard is opened to run tasks; who runs none needs no pool."""
    yard = make_yard()
    yard.consumer(name="here", executor="thread")(echo)
    yard.consumer(name="shared", executor="process")(echo)
    yard.define_pool(name, recycle_after=5)
    with pytest.raises(InvalidInput, match=says):
        await yard.start()
    async with yard.client():
        pass


async def test_a_consumer_with_more_slots_than_room_is_told(caplog):
    """Why fewer run at once than the consumer allows is said when the yard is opened, with what to do about it."""
    yard = make_yard()
    yard.define_pool("echo", max_workers=1)
    yard.consumer(name="shared", executor="process", concurrency=2)(echo)
    yard.define_pool(max_workers=1)
    with caplog.at_level(logging.WARNING):
        async with yard:
            pass
    assert [record.args for record in caplog.records] == [
        ("echo", 3, "isolated", 1, "yard.define_pool('echo', max_workers=3)"),
        ("shared", 2, "process", 1, "yard.define_pool(max_workers=2), or CPU_EXECUTOR_WORKERS"),
    ]
