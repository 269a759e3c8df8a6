"""What the examples share: the time of a mapped function beside that of plain `jax.vmap`."""

import statistics
import time

import jax

LEAST_ROUNDS, SECONDS = 5, 1.0


def compared(plain, mapped, *args):
    """Returns the median times of both functions, called in turns, and their ratio, in words."""
    for function in (plain, mapped):  # compiles
        jax.block_until_ready(function(*args))
    samples = [], []
    end = time.perf_counter() + SECONDS
    while len(samples[0]) < LEAST_ROUNDS or time.perf_counter() < end:
        for function, times in zip((plain, mapped), samples, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            times.append(1000 * (time.perf_counter() - start))
    before, after = map(statistics.median, samples)
    return f"plain vmap: {before:.1f} ms, autobatch: {after:.1f} ms ({before / after:.1f}x)"
