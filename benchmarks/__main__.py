"""`python -m benchmarks [scenario …] [--quick] [--write FILE]`: exit code 1 if a bar is missed or a side fails."""

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.contest import Settings
from benchmarks.finding import Finding
from benchmarks.report import as_document, as_section, as_table
from benchmarks.scenarios import SCENARIOS
from benchmarks.sides import SideFailed


def main() -> int:
    options = _options()
    settings = Settings(quick=options.quick, without_ours=options.without_ours)
    findings: list[Finding] = []
    failures: list[str] = []
    for name in options.scenarios or list(SCENARIOS):
        found, failed = _run(name, settings)
        findings += found
        failures += failed
        if options.write:
            # After each: a run of an hour may be cut short.
            _write(options.write, name, as_section(found, failed, quick=settings.quick))
    print(as_table(findings))
    for failure in failures:
        print(f"\nFAILED {failure}")
    missed = any(finding.is_met is False for finding in findings)
    return 1 if missed or failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Taskyard, its peers and its limits.")
    parser.add_argument("scenarios", nargs="*", metavar="scenario", help=", ".join(SCENARIOS))
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds: does it work, roughly how fast")
    parser.add_argument("--without-ours", action="store_true", help="peers and limits only")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write what was found there, as Markdown")
    options = parser.parse_args()
    unknown = sorted(set(options.scenarios) - set(SCENARIOS))
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    return options


def _run(name: str, settings: Settings) -> tuple[list[Finding], list[str]]:
    """What was found, and why it failed if it did: the others are run all the same."""
    findings: list[Finding] = []
    failures: list[str] = []
    began = time.perf_counter()
    print(f"{name} (load {os.getloadavg()[0]:.1f})", file=sys.stderr, flush=True)
    try:
        findings = SCENARIOS[name](settings)
    except SideFailed as failure:
        failures = [f"{name}: {failure}"]
        print(f"    {failure}", file=sys.stderr, flush=True)
    print(f"    {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return findings, failures


def _write(path: Path, name: str, section: str) -> None:
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(as_document(earlier, {name: section}, list(SCENARIOS)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
