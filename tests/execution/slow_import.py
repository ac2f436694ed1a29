"""Takes its time to be imported, as large libraries do; quick to use afterwards."""

import os
import time

IMPORT_S = 0.8

if os.environ.get("TASKYARD_TESTS_SLOW_IMPORT"):
    time.sleep(IMPORT_S)


def quick() -> str:
    return "quick"
