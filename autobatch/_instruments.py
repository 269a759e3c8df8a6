"""What measuring needs of the world, which tests replace by fakes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autobatch import _load, _memory
from autobatch._load import Load
from autobatch._memory import DeviceMemory


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """A clock and the memory of a device.

    Attributes:
        clock: seconds, monotonic.
        device_memory: free and total bytes of a device.
        growth: runs a function, returns its result and the bytes that memory grew by meanwhile,
            None where the platform has no such figure.
        load: what the kernel counts of this process and of others, or None.
        relieve: called between timed runs; each tuning sets it to keep to its own limit.
        planned: bytes of outputs and temporaries of an executable as XLA plans them, or None.
    """

    clock: Callable[[], float] = time.perf_counter
    device_memory: Callable[[Any], DeviceMemory] = _memory.device_memory
    growth: Callable[[Callable[[], Any], Any], tuple[Any, int | None]] = _memory.measured_growth
    load: Callable[[], Load | None] = _load.read_load
    planned: Callable[[Any], int | None] = _memory.planned_bytes
    relieve: Callable[[], None] = lambda: None
