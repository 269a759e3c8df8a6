"""How long calls take, beside each other: least of a glance, and samples of interleaved rounds."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

Call = Callable[[], Any]

SAMPLE_S = 4e-3
"""A timed sample repeats a call until it lasts at least this long."""
GLANCES, GLANCE_S = 5, 0.1
SLOW_S = 1.0
"""A call that takes longer is timed once."""
ROUNDS_LEAST, ROUNDS_MOST, CONTEST_S = 7, 201, 9.0


def timed(call: Call, repeats: int = 1) -> float:
    """Returns the seconds of one call."""
    start = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / repeats


def repeats_for(seconds: float) -> int:
    """Returns how often a sample repeats a call of so many seconds."""
    return max(1, round(SAMPLE_S / seconds))


def glance(call: Call) -> float:
    """Returns the least of a few samples; the first call, which compiles, is none of them."""
    timed(call)
    once = timed(call)
    if once > SLOW_S:
        return once
    repeats = repeats_for(once)
    samples = max(1, min(GLANCES, int(GLANCE_S / (once * repeats))))
    return min(timed(call, repeats) for _ in range(samples))


def interleaved(
    calls: Sequence[Call],
    *,
    seconds: float = CONTEST_S,
    least: int = ROUNDS_LEAST,
    most: int = ROUNDS_MOST,
) -> list[list[float]]:
    """Returns the samples of each call, taken in rounds of random order.

    After `least` rounds, no round begins beyond `seconds`.
    """
    # Equal programs must be repeated equally often: the first call of a sample is a cold one.
    repeats = [repeats_for(min(timed(call) for _ in range(3))) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    order, shuffle = list(range(len(calls))), random.Random(0).shuffle
    end = time.perf_counter() + seconds
    for done in range(most):
        if done >= least and time.perf_counter() > end:
            break
        shuffle(order)
        for number in order:
            samples[number].append(timed(calls[number], repeats[number]))
    return samples


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean."""
    return math.exp(statistics.mean(map(math.log, values)))
