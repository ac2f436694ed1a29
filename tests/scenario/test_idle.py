"""A node with nothing to do does nothing."""

from __future__ import annotations

import json

import pytest

from tests.scenario.processes import run_python

MEASURE = "import runpy, sys; runpy.run_module('tests.scenario.idle', run_name='__main__', alter_sys=True)"
SECONDS = 4


@pytest.mark.slow
@pytest.mark.spec("SCH-07")
def test_an_idle_node_hardly_wakes(url):
    """With one task an hour away, a node wakes at most twice a second and uses next to no CPU."""
    wakes_a_second, cpu_s = json.loads(run_python(MEASURE, url, str(SECONDS)))
    assert wakes_a_second <= 2.25  # a wake-up on either edge of the time measured
    assert cpu_s < 0.01 * SECONDS
