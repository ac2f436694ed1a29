"""An Android device through the real adb server: each operation of our adapter beside the same of adbutils alone."""

from benchmarks.contest import Contest, Settings
from benchmarks.finding import Finding
from benchmarks.reading import Unit
from benchmarks.sides import Side

MEASURE = "benchmarks.adb.measure"

TITLES = {
    "shell": "ADB: a command with its exit status, p50",
    "tap": "ADB: a tap, p50",
    "screenshot": "ADB: a screenshot of 1 MB, p50",
    "push": "ADB: a file of 5 MB to the device, p50",
    "pull": "ADB: a file of 5 MB from the device, p50",
}


def run(settings: Settings) -> list[Finding]:
    return [finding for operation in TITLES for finding in _contest(operation, settings).hold(settings)]


def _contest(operation: str, settings: Settings) -> Contest:
    work: dict[str, object] = {"operation": operation, "count": settings.pick(full=200, quick=30)}
    return Contest(
        "adb",
        TITLES[operation],
        Unit.SECONDS,
        ours=Side("taskyard", f"{MEASURE}:ours", work),
        others=[
            Side("adbutils", f"{MEASURE}:bare", work),
            Side("adbutils, without its waits", f"{MEASURE}:bare", {**work, "without_waits": True}),
        ],
    )
