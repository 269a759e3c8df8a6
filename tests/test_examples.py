"""Every example runs, and says something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))
ANNOUNCEMENT = "autobatch: tuning `"
"""How a line begins that says that a tuning may take long. On a busy machine any may."""


@pytest.mark.parametrize("path", EXAMPLES, ids=[each.stem for each in EXAMPLES])
def test_it_runs(path: Path, store_folder: Path) -> None:
    # The strict rules of the tests are not everybody's.
    environment = {each: os.environ[each] for each in os.environ if "PROMOTION" not in each}
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [each for each in done.stderr.splitlines() if not each.startswith(ANNOUNCEMENT)]
    assert (done.returncode, complaints) == (0, [])
    assert " rows" in done.stdout
    assert store_folder.exists()


def test_there_are_examples() -> None:
    assert EXAMPLES
