"""What a run needs is there before its time begins."""

import pytest

from tests.execution.cold import yard


@pytest.mark.parametrize("name", ["function_process", "function_isolated", "class_process", "algorithm_isolated"])
async def test_nothing_is_imported_on_the_time_of_a_run(name):
    """A worker that has said a function is loaded imports nothing more for it, except what its code does itself."""
    async with yard:
        handles = [await yard.submit(name, {"text": "x"}) for _ in range(2)]
        # The second run tells of the end of the first as well.
        assert [await handle.result(timeout_s=20) for handle in handles] == [["colorsys"]] * 2


@pytest.mark.spec("EXE-05")
@pytest.mark.parametrize("name", ["quick_process", "quick_isolated"])
async def test_a_short_timeout_suits_a_cold_worker(name):
    """A timeout far shorter than the start of a worker holds for the code alone: the first run ends well."""
    async with yard:
        assert await (await yard.submit(name, {"text": "x"})).result(timeout_s=20) == "x"
