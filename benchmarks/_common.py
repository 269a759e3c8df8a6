"""What the benchmarks share: medians with their spread, and a plain table under a header.

The spread is the median absolute deviation (MAD) of the repetitions. A ratio or a difference is
taken within each repetition, so that what disturbs both sides of it cancels.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax

from autobatch._key import device_in_words


def by_hand(fun: Callable[..., Any], in_axes: Any, strategy: str) -> Callable[..., Any]:
    """Returns what a user who knew the winner would have written."""
    if strategy == "vmap":
        return jax.jit(jax.vmap(fun, in_axes))
    chunk = None if strategy == "map" else int(strategy.removeprefix("chunked:"))

    def mapped(*args: Any) -> Any:
        def one(rows: Any) -> Any:
            remaining = iter(rows)
            return fun(
                *(
                    arg if axis is None else next(remaining)
                    for arg, axis in zip(args, in_axes, strict=True)
                )
            )

        rows = [arg for arg, axis in zip(args, in_axes, strict=True) if axis is not None]
        return jax.lax.map(one, rows, batch_size=chunk)

    return jax.jit(mapped)


def median_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the median absolute deviation."""
    middle = statistics.median(samples)
    return middle, statistics.median(abs(each - middle) for each in samples)


def uncertainty(samples: Sequence[float]) -> float:
    """Returns the standard error of the median, as if the samples were normal."""
    if len(samples) < 2:
        return math.inf
    return 1.2533 * 1.4826 * median_and_spread(samples)[1] / math.sqrt(len(samples))


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Returns the ratio within each repetition."""
    return [above / below for above, below in zip(over, under, strict=True)]


def with_spread(samples: Sequence[float], digits: int = 2, factor: float = 1.0) -> str:
    """Returns the median and its spread as text, both in the unit that `factor` converts to."""
    middle, spread = median_and_spread(samples)
    return f"{factor * middle:.{digits}f} +-{factor * spread:.{digits}f}"


def verdict(value: float, bar: float, unit: str = "") -> str:
    """Returns the bar, and whether `value` misses it as it is printed."""
    return f"<= {bar:.2f}{unit}" + (" missed" if round(value, 2) > bar else "")


def print_header(question: str) -> None:
    """Prints what is asked, of which versions, and on which machine."""
    print(question)
    versions = f"python {platform.python_version()}   jax {jax.__version__}"
    versions += f"   jaxlib {version('jaxlib')}   {device_in_words(jax.devices()[0])}"
    print(f"{versions}   +- is the median absolute deviation")
    print(flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under columns as wide as their content, the first one aligned to the left."""
    widths = [max(len(row[place]) for row in [columns, *rows]) for place in range(len(columns))]
    for row in [columns, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("   ".join(cells).rstrip(), flush=True)


def in_new_process(*command: str) -> Any:
    """Runs this Python with `command` and returns the JSON of the last line that it printed."""
    # Python keeps bytecode unless told not to; without it importing would time the compiler.
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a child failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
