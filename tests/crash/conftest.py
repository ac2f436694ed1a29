import logging
from collections.abc import Iterator

import pytest

from tests.torture.zygote import Zygote


@pytest.fixture(scope="session", autouse=True)
def the_zygote_ends() -> Iterator[None]:
    yield
    Zygote.end()


@pytest.fixture(autouse=True)
def deaths_are_not_logged() -> Iterator[None]:
    log = logging.getLogger("taskyard")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)
