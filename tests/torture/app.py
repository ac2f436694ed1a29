"""The tortured yard as an app for `taskyard worker`, in the folder that the environment names."""

import os
from pathlib import Path

from tests.torture.victim import FOLDER
from tests.torture.work import ledger_of, make_yard

folder = Path(os.environ[FOLDER])
yard = make_yard(folder, ledger_of(folder))
