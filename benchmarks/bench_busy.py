"""Does a busy neighbour change what is chosen?

Workloads are tuned twenty times each while another process keeps one core busy. A choice is right
if it is the most frequent one, or if its run time, measured afterwards beside the same neighbour,
is within 5 % of that one's.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from functools import partial
from multiprocessing.synchronize import Event
from typing import Any

import jax
from _common import median_and_spread, print_header, print_table
from _timing import interleaved
from record_tables import SUITE, load_suite

from autobatch import Budget, autobatch

NAMES = ("attention", "scatter_shared", "switch_kinds")
TUNINGS, WITHIN, ENOUGH = 20, 1.05, 19


def burn(stop: Event) -> None:
    """Child: keeps one core busy until it is told to stop."""
    while not stop.is_set():
        sum(range(10_000))


def tunings(case: Any) -> list[str]:
    """Returns the columns of one workload's row."""
    fun, in_axes, args = case.make()
    budget = Budget(expected_calls=100_000)
    choices = Counter(
        str(autobatch(fun, in_axes, store=False, budget=budget).tune(*args).strategy)
        for _ in range(TUNINGS)
    )
    calls = [partial(autobatch(fun, in_axes, strategy=each), *args) for each in choices]
    for call in calls:
        jax.block_until_ready(call())
    samples = interleaved(calls, seconds=3.0)
    seconds = {
        each: median_and_spread(found)[0] for each, found in zip(choices, samples, strict=True)
    }
    usual, _ = choices.most_common(1)[0]
    right = sum(choices[each] for each in choices if seconds[each] <= WITHIN * seconds[usual])
    found = ", ".join(f"{count} {each}" for each, count in choices.most_common())
    return [
        case.name,
        found,
        f"{right} of {TUNINGS}",
        f">= {ENOUGH}" + " missed" * (right < ENOUGH),
    ]


def main() -> None:
    print_header(f"{TUNINGS} tunings beside a busy core (of {os.cpu_count()})")
    context = multiprocessing.get_context("spawn")
    rows = []
    for name in NAMES:
        stop = context.Event()
        neighbour = context.Process(target=burn, args=(stop,))
        neighbour.start()
        try:
            rows.append(tunings(load_suite(SUITE)[name]))
        finally:
            stop.set()
            neighbour.join()
    print_table(["workload", "chosen", "the usual, or within 5 %", "bar"], rows)


if __name__ == "__main__":
    main()
