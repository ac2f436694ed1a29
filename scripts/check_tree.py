"""Refuses what must not be in the tree: the address of a package registry, a path of somebody's machine, a huge file.

Looks at the files git tracks, or would track, and prints `file:line: reason` for each finding; exits 1 if there is any.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 1_000_000  # a larger file is a build product or a data set, and belongs elsewhere

REGISTRY = re.compile(
    r"\b(?:pypi|pythonhosted|npmjs|yarnpkg)\.(?:org|com|io)\b"
    r"|--(?:extra-)?index-url[ =]+\S"
    r"|https?://[\w.:-]+/simple\b"
    r'|"?\b(?:registry|resolved)"? *[:=] *"http'
)
# A home or checkout folder at the root of a path; `(?<![\w.])` lets `src/root/` and `./home/` pass.
MACHINE = re.compile(r"(?<![\w.])/(?:root|work|workspace|home/[\w.-]+|Users/[\w.-]+)/")


def tracked(top: Path) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=top,
        check=True,
        capture_output=True,
    )
    names = sorted({name for name in listed.stdout.decode().split("\0") if name})
    return [path for path in (top / name for name in names) if path.is_file()]


def findings(path: Path, own_folder: re.Pattern[str]) -> Iterator[str]:
    if path.stat().st_size > MAX_BYTES:
        yield f"1: larger than {MAX_BYTES:,} bytes"
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return  # an image or another binary: nothing to read
    for number, line in enumerate(lines, start=1):
        if found := REGISTRY.search(line):
            yield f"{number}: names a package registry: {found[0]}"
        if found := MACHINE.search(line) or own_folder.search(line):
            yield f"{number}: names a path of one machine: {found[0]}"


def main() -> int:
    top = Path(__file__).resolve().parent.parent
    own_folder = re.compile(rf"{re.escape(str(top))}(?![\w.-])")
    found = [f"{path.relative_to(top)}:{text}" for path in tracked(top) for text in findings(path, own_folder)]
    print("\n".join(found) if found else "the tree is clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
