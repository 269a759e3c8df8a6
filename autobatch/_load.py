"""How far other processes keep this one from the cores: what runs on many threads is slowed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of `/proc/stat` (`man 5 proc_stat`): user, nice, system, irq, softirq, steal."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A reading of the kernel's counters; two of them say what happened between.

    Attributes:
        clock_s: when it was taken, monotonic.
        others_s: seconds that other processes have run, per core of the machine.
        ran_s: seconds that the threads of this process have run.
        waited_s: seconds that they have waited for a core.
    """

    clock_s: float
    others_s: float
    ran_s: float
    waited_s: float


def read_load(proc: Path = Path("/proc")) -> Load | None:
    """Returns the counters now; None where the kernel does not keep them.

    Args:
        proc: where the kernel's files are.
    """
    try:
        columns = (proc / "stat").read_text().partition("\n")[0].split()[1:]
        busy_s = sum(int(columns[place]) for place in _BUSY) / os.sysconf("SC_CLK_TCK")
        threads = [
            each.read_text().split() for each in (proc / "self" / "task").glob("*/schedstat")
        ]
        ran, waited = (sum(int(each[place]) for each in threads) for place in (0, 1))
    except (OSError, ValueError, IndexError):  # a thread may end while it is looked at
        return None
    if not threads:
        return None
    return Load(
        clock_s=time.monotonic(),
        others_s=(busy_s - time.process_time()) / (os.cpu_count() or 1),
        ran_s=ran / 1e9,
        waited_s=waited / 1e9,
    )


def contention(before: Load | None, after: Load | None) -> float | None:
    """Returns the share of the cores that others took from this process; None where unknown.

    Others may be busy on cores that nobody else wants, and threads of one process may wait for each
    other; so it is the lesser of what others used and of the time that threads waited.

    >>> early = Load(clock_s=0.0, others_s=0.0, ran_s=0.0, waited_s=0.0)
    >>> contention(early, Load(clock_s=10.0, others_s=5.0, ran_s=9.0, waited_s=1.0))
    0.1
    """
    if before is None or after is None or after.clock_s <= before.clock_s:
        return None
    ran, waited = max(0.0, after.ran_s - before.ran_s), max(0.0, after.waited_s - before.waited_s)
    others = max(0.0, after.others_s - before.others_s) / (after.clock_s - before.clock_s)
    return min(1.0, others, waited / (ran + waited) if waited else 0.0)
