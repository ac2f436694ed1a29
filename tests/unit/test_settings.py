"""What the environment says."""

import math

import pytest

from taskyard.errors import InvalidInput
from taskyard.settings import find_stall_s


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 120.0), ("", 120.0), (" 30 ", 30.0), ("0.5", 0.5), ("0", math.inf), ("inf", math.inf)]
)
def test_how_long_a_loop_may_stand_still(text, seconds):
    """Two minutes, unless the environment says otherwise; 0 is for ever."""
    assert find_stall_s({} if text is None else {"TASKYARD_STALL_S": text}) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "1 min"])
def test_what_is_no_time_is_refused(text):
    """An error names the variable and says what to write."""
    with pytest.raises(InvalidInput, match="TASKYARD_STALL_S must be a number of seconds"):
        find_stall_s({"TASKYARD_STALL_S": text})
