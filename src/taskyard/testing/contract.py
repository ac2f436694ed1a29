"""The suites an adapter must pass: subclass one in a test module and say how to make the adapter.

    from taskyard.testing.contract import StoreContract

    class TestMyStore(StoreContract):
        def make_store(self, clock, folder):
            return MyStore(folder / "work.db", clock=clock)

They are written for pytest with the anyio plugin. Tests name the rows of the specification they prove with a mark
called `spec`; register it (`markers = ["spec(*ids): rows proved"]`) where marks are strict.
"""

import pytest

# Before they are imported: a failing assert in a suite should show its values as one in a test module does.
pytest.register_assert_rewrite(
    "taskyard.testing.store_contract",
    "taskyard.testing.executor_contract",
    "taskyard.testing.code_contract",
    "taskyard.testing.answer_contract",
)

from taskyard.testing.answer_contract import AnswerContract  # noqa: E402
from taskyard.testing.code_contract import CodeContract  # noqa: E402
from taskyard.testing.executor_contract import ExecutorContract  # noqa: E402
from taskyard.testing.store_contract import (  # noqa: E402
    DeviceContract,
    DurableDeviceContract,
    DurableStoreContract,
    PromptStoreContract,
    ScheduleContract,
    StoreContract,
    TiesContract,
)

__all__ = [
    "AnswerContract",
    "CodeContract",
    "DeviceContract",
    "DurableDeviceContract",
    "DurableStoreContract",
    "ExecutorContract",
    "PromptStoreContract",
    "ScheduleContract",
    "StoreContract",
    "TiesContract",
]
