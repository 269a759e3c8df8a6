"""What does a training loop pay whose batches have a thousand different sizes?

Tunings and compiles are counted, in a process of its own. A size costs its own compile; those that
were tuned, one for each candidate, and those served before plans differed, one more, since they are
then served from a table.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from itertools import takewhile
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from _common import in_new_process, print_header, print_table

from autobatch import autobatch
from autobatch._units import format_seconds

SIZES, SIZES_MOST = 1000, 5000
BAR_TUNINGS = 6
BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


def called(folder: str) -> dict[str, Any]:
    """Child: calls one function with many batch sizes, and returns what was tuned and compiled."""
    compiles: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        if event == BACKEND_COMPILE:
            compiles.append(event)

    weights, x = np.ones(32, np.float32) / 32, np.ones((SIZES_MOST, 32), np.float32)
    function = autobatch(lambda weights, x: jnp.tanh(weights * x).sum(), (None, 0), store=folder)
    sizes = random.Random(0).sample(range(2, SIZES_MOST + 1), SIZES)
    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.perf_counter()
    for size in sizes:
        jax.block_until_ready(function(weights, x[:size]))
    seconds, compiled = time.perf_counter() - start, len(compiles)
    plans = [function.plan(weights, x[:size]) for size in sizes]
    tuned = [plan for plan in plans if plan.source == "tuned"]
    strategies = [plan.strategy for plan in plans]
    alike = sum(1 for _ in takewhile(lambda each: each == strategies[0], strategies))
    return {
        "seconds": seconds,
        "compiles": compiled,
        "tunings": len(tuned),
        "candidates": sum(each.compile_s is not None for plan in tuned for each in plan.outcomes),
        # Where plans never differ, one object serves all.
        "alike": alike if alike < len(plans) else 0,
        "strategies": sorted({str(each) for each in strategies}),
    }


def main() -> None:
    print_header(f"{SIZES:,} batch sizes from 2 to {SIZES_MOST:,} of one function, in one process")
    with tempfile.TemporaryDirectory() as folder:
        found = in_new_process(__file__, "called", folder)
    allowed = SIZES + found["candidates"] + found["alike"]
    row = [
        ", ".join(found["strategies"]),
        str(found["tunings"]),
        f"<= {BAR_TUNINGS}" + (" missed" if found["tunings"] > BAR_TUNINGS else ""),
        str(found["candidates"]),
        str(found["alike"]),
        str(found["compiles"]),
        f"<= {allowed}" + (" missed" if found["compiles"] > allowed else ""),
        format_seconds(found["seconds"]),
    ]
    columns = ["plans", "tunings", "bar", "candidates", "sizes before plans differ", "compiles"]
    print_table([*columns, "bar", "all"], [row])


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(called(*sys.argv[2:])))
    else:
        main()
