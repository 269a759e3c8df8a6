"""How busy other processes keep the cores: what runs on many threads is slowed by them."""

from __future__ import annotations

import os
import time
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of `/proc/stat` (`man 5 proc_stat`): user, nice, system, irq, softirq, steal."""


def others_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Returns the seconds that other processes have run, per core; None where nobody knows.

    The difference of two readings over the seconds between them is their share of the cores.

    Args:
        stat: the kernel's statistics.
    """
    try:
        columns = stat.read_text().partition("\n")[0].split()[1:]
        ticks = sum(int(columns[place]) for place in _BUSY)
        busy_s = ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return (busy_s - time.process_time()) / (os.cpu_count() or 1)
