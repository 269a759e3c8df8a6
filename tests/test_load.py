"""What others take of the cores, from the kernel's own counters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autobatch._load import Load, contention, read_load

EARLY = Load(clock_s=100.0, others_s=7.0, ran_s=3.0, waited_s=2.0)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_threads_are_added_up_and_own_time_is_not_others(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    write(tmp_path / "stat", f"cpu  {1000 * ticks} 0 0 7 7 0 0 0 0 0\ncpu0 1 2 3\n")
    write(tmp_path / "self/task/1/schedstat", "2000000000 500000000 9\n")
    write(tmp_path / "self/task/2/schedstat", "1000000000 250000000 9\n")
    load = read_load(tmp_path)
    assert load is not None
    expected = (1000 - time.process_time()) / (os.cpu_count() or 1)
    assert load.others_s == pytest.approx(expected, abs=0.1)
    assert (load.ran_s, load.waited_s) == (3.0, 0.75)


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu a b c d e f g h\n"])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    assert read_load(tmp_path / "missing") is None
    write(tmp_path / "stat", text)
    write(tmp_path / "self/task/1/schedstat", "1 1 1\n")
    assert read_load(tmp_path) is None


def test_without_counters_of_threads_nothing_is_known(tmp_path: Path) -> None:
    write(tmp_path / "stat", "cpu  1 0 0 7 7 0 0 0 0 0\n")
    assert read_load(tmp_path) is None
    assert contention(None, EARLY) is None
    assert contention(EARLY, None) is None
    assert contention(EARLY, EARLY) is None


@pytest.mark.parametrize(
    ("others", "ran", "waited", "expected"),
    [
        (5.0, 5.0, 5.0, 0.5),
        (9.0, 10.0, 0.0, 0.0),  # busy on cores that nobody else wants
        (0.0, 10.0, 10.0, 0.0),  # our own threads wait for each other
        (2.0, 1.0, 9.0, 0.2),
        (-1.0, 1.0, 9.0, 0.0),
        (50.0, 0.0, 9.0, 1.0),
    ],
)
def test_others_must_be_busy_and_our_threads_wait(
    others: float, ran: float, waited: float, expected: float
) -> None:
    late = replace(
        EARLY,
        clock_s=EARLY.clock_s + 10,
        others_s=EARLY.others_s + others,
        ran_s=EARLY.ran_s + ran,
        waited_s=EARLY.waited_s + waited,
    )
    assert contention(EARLY, late) == pytest.approx(expected)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the files")
def test_a_neighbour_is_noticed() -> None:
    before = read_load()
    subprocess.run([sys.executable, "-c", "sum(range(30_000_000))"], check=True)
    after = read_load()
    if before is None or after is None:
        pytest.skip("this kernel does not count for how long threads wait")
    assert after.others_s > before.others_s
