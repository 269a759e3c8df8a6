"""What others use of the cores, from the kernel's own statistics."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autobatch._load import others_s


def test_own_time_is_not_others(tmp_path: Path) -> None:
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    stat.write_text(f"cpu  {1000 * ticks} 0 0 7 7 0 0 0 0 0\ncpu0 1 2 3\n")
    expected = (1000 - time.process_time()) / (os.cpu_count() or 1)
    assert others_s(stat) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu a b c d e f g h\n"])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    assert others_s(tmp_path / "missing") is None
    (tmp_path / "stat").write_text(text)
    assert others_s(tmp_path / "stat") is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the file")
def test_a_neighbour_is_noticed() -> None:
    before = others_s()
    subprocess.run([sys.executable, "-c", "sum(range(30_000_000))"], check=True)
    after = others_s()
    assert before is not None
    assert after is not None
    assert after > before
