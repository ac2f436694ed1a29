"""The end of the interpreter with work in a pool: the standard library's and ours do the same."""

import subprocess
import sys

import pytest

from tests.scenario.processes import environment

STDLIB = "from concurrent.futures import ProcessPoolExecutor as Pool"
OURS = "from taskyard.futures import ProcessPool as Pool"
BOTH = pytest.mark.parametrize("source", [STDLIB, OURS], ids=["stdlib", "ours"])


def run(folder, source, text, *, code=0):
    """What a script prints, which must say nothing else, and end by itself."""
    script = folder / "script.py"
    script.write_text(f"{source}\nimport time\n{text}")
    done = subprocess.run(
        [sys.executable, script], env=environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == code, done.stderr
    return done


WORK = """
def work(seconds, what):
    time.sleep(seconds)
    print(what, flush=True)
"""


@BOTH
def test_what_was_submitted_is_done(tmp_path, source):
    """At the interpreter's end what runs and what waits is done first."""
    text = WORK + 'if __name__ == "__main__":\n    pool = Pool(1)\n    [pool.submit(work, 0.1, n) for n in range(3)]\n'
    done = run(tmp_path, source, text)
    assert done.stdout.split() == ["0", "1", "2"]
    assert done.stderr == ""


def test_also_after_a_shutdown_that_did_not_wait(tmp_path):
    """`shutdown(wait=False)` before the end loses nothing, where the standard library hangs or loses it."""
    text = WORK + (
        'if __name__ == "__main__":\n    pool = Pool(1)\n    [pool.submit(work, 0.1, n) for n in range(3)]\n'
        "    pool.shutdown(wait=False)\n"
    )
    assert run(tmp_path, OURS, text).stdout.split() == ["0", "1", "2"]


@BOTH
def test_nothing_can_be_submitted_after_the_end(tmp_path, source):
    """A submit when the interpreter has begun to end is a RuntimeError."""
    text = (
        "import atexit\n"
        "def last():\n"
        "    try:\n        pool.submit(id, 1)\n"
        "    except RuntimeError as exc:\n        print(exc, flush=True)\n"
        'if __name__ == "__main__":\n    pool = Pool(1)\n    print(pool.submit(abs, -1).result())\n'
    )
    # Registered first, so called last.
    said = run(tmp_path, "import atexit\natexit.register(lambda: last())\n" + source, text).stdout.split("\n")
    assert said[0] == "1"
    assert said[1].startswith("cannot schedule new futures after")


@BOTH
def test_a_script_that_fails_ends(tmp_path, source):
    """An exception in the script ends it, with a pool open and idle."""
    text = 'if __name__ == "__main__":\n    pool = Pool(1)\n    pool.submit(abs, -1).result()\n    1 / 0\n'
    assert "ZeroDivisionError" in run(tmp_path, source, text, code=1).stderr


def test_functions_of_a_script_after_an_import_of_multiprocessing(tmp_path):
    """A script's function is found by a worker that has imported `multiprocessing` before, which sets the alias."""
    text = (
        "import importlib\n"
        "def work():\n    return 'found'\n"
        'if __name__ == "__main__":\n    with Pool(1) as pool:\n'
        "        pool.submit(importlib.import_module, 'multiprocessing').exception()\n"
        "        print(pool.submit(work).result())\n"
    )
    assert run(tmp_path, OURS, text).stdout == "found\n"


def test_an_unguarded_script_is_told_so(tmp_path):
    """A script that starts a pool whenever it is read gets an error that says what to do."""
    text = "def work():\n    pass\npool = Pool(1)\npool.submit(work).result()\n"
    done = run(tmp_path, OURS, text, code=1)
    assert 'if __name__ == "__main__":' in done.stderr
