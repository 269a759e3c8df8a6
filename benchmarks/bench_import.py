"""What does importing autobatch cost over importing jax, and does `cache list` do without it?"""

from __future__ import annotations

import random

from _common import (
    in_new_process,
    median_and_spread,
    print_header,
    print_table,
    ratios,
    verdict,
    with_spread,
)

REPETITIONS = 21

# What the child does, between two readings of its clock; it also says whether jax is loaded then.
_TIMED = """
import json, sys, time
start = time.perf_counter()
{}
print()
print(json.dumps([time.perf_counter() - start, "jax" in sys.modules]))
"""
JAX = "import jax"
AUTOBATCH = "from autobatch import autobatch"
COMMAND = """
from autobatch._cli import main
main(["cache", "list"], standalone_mode=False)
"""


def main() -> None:
    print_header("Importing autobatch over importing jax, and the command without it, in ms")
    seconds: dict[str, list[float]] = {JAX: [], AUTOBATCH: [], COMMAND: []}
    loaded: dict[str, bool] = {}
    order = list(seconds)
    for repetition in range(REPETITIONS + 1):
        random.Random(repetition).shuffle(order)
        for each in order:
            elapsed, loaded[each] = in_new_process("-c", _TIMED.format(each))
            if repetition:  # the first one may compile to bytecode
                seconds[each].append(elapsed)

    rows = []
    for name, code, bar in (
        ("import jax", JAX, ""),
        ("from autobatch import autobatch", AUTOBATCH, "ratio"),
        ("autobatch cache list", COMMAND, "jax"),
    ):
        over = ratios(seconds[code], seconds[JAX])
        if bar == "ratio":
            bar = verdict(median_and_spread(over)[0], 1.1)
        elif bar == "jax":
            bar = "no jax" + (" missed" if loaded[code] else "")
        rows.append(
            [
                name,
                with_spread(seconds[code], 0, 1e3),
                with_spread(over),
                "yes" if loaded[code] else "no",
                bar,
            ]
        )
    print_table(["in a new process", "time", "ratio", "jax loaded", "bar"], rows)


if __name__ == "__main__":
    main()
