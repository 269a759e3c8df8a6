"""What does one short look at a device say: dispatch, memory, strategies, plan against oracle?

    python benchmarks/device_check.py

For an accelerator that is at hand for a few minutes only; without one it runs on the CPU. It
watches the clock, and says what it left out for want of time and which strategies it skipped
because they would be slow.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import median_and_spread, print_header, print_table, ratios, with_spread
from _timing import Call, geometric_mean, glance, interleaved
from _workloads import SUITE
from bench_dispatch import ROWS, SMALL_CALLS, Contest

from autobatch import Budget, autobatch
from autobatch._units import format_bytes, format_seconds

START = time.perf_counter()
DEADLINE_S = 340.0
EXPECTED_CALLS, TUNING_S = 100_000, 20.0

DISPATCH_ROUNDS = 1000

OVER_LIMIT = 1.5
"""What `vmap` needs in the memory case, in limits."""
CPU_LIMIT_BYTES = 64 * 1024 * 1024
"""The limit where the device states none of its own."""
CHECKED_ROWS, PLANNED_ROWS = 8, 16

SEEDS = (
    "perceptron_points",
    "random_features",
    "gather_embeddings",
    "solve_positive",
    "while_few_long",
)
SEED_STRATEGIES = ("vmap", "map", "chunked:64", "chunked:1024")

# The one with the most rows last, since a tuning that tries them one by one could overrun.
ORACLE_CASES = (
    "attention",
    "gradient_norms",
    "kernel_row_sums",
    "sorted_rows",
    "recurrent_network",
    "matrix_products",
    "switch_kinds",
    "elementwise_chain",
    "rare_decomposition",
    "interpolation",
)
MAP_ROWS_MOST = 5000
"""Row by row, more rows than these take too long on an accelerator."""
SLOW_S, SLOWER = 1.0, 1.5
"""No smaller chunk is tried after one that was this slow and this many times slower than the best:
a quarter of the rows at once take up to four times as long."""
FINALISTS, CONTEST_S = 2, 4.0
SEED_NEEDS_S, ORACLE_NEEDS_S = 20.0, 30.0
"""Seconds left without which no further function is begun."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A case of the suite with its arguments on the device."""

    name: str
    fun: Callable[..., Any]
    in_axes: Any
    args: tuple[Any, ...]
    rows: int

    @classmethod
    def of(cls, name: str) -> Workload:
        """Returns the case of this name; its axes are whole arguments'."""
        fun, in_axes, args = next(each for each in SUITE if each.name == name).make()
        args = jax.device_put(args)
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        mapped, axis = next(
            (arg, axis) for arg, axis in zip(args, axes, strict=True) if axis is not None
        )
        rows = jax.tree.leaves(mapped)[0].shape[axis]
        return cls(name=name, fun=fun, in_axes=in_axes, args=args, rows=rows)

    def forced(self, strategy: str) -> Any:
        """Returns the function mapped with this strategy."""
        return autobatch(self.fun, self.in_axes, strategy=strategy, store=False)


@dataclass
class Watch:
    """How much time is left, and what was left out for want of it."""

    left_out: list[str] = field(default_factory=list)

    def allows(self, seconds: float, what: str) -> bool:
        """Returns whether so many seconds are left; else notes what is left out."""
        if time.perf_counter() - START + seconds <= DEADLINE_S:
            return True
        self.left_out.append(what)
        return False


def dispatch(folder: str) -> None:
    """Prints what a later call costs over that of `jax.jit(jax.vmap(fun))`."""

    def dot(x: Any, y: Any) -> Any:
        return (x * y).sum()

    def reference() -> Any:
        return jax.jit(jax.vmap(dot, (None, 0)))

    def tuned() -> Any:
        return autobatch(dot, (None, 0), store=folder, budget=Budget(expected_calls=10**9))

    x, batches = jnp.ones(8), [jnp.ones((rows, 8)) for rows in ROWS]
    one = [(x, batches[0])] * SMALL_CALLS
    several = [(x, each) for each in batches] * (SMALL_CALLS // len(batches))
    contests = [
        Contest("jit(vmap) against itself", reference(), reference(), one),
        Contest("one known signature", reference(), tuned(), one),
        Contest("five known signatures", reference(), tuned(), several),
    ]
    for contest in contests:
        for call in contest.calls[: len(ROWS)]:
            contest.reference(*call)
            contest.contender(*call)
    shuffle = random.Random(0).shuffle
    gc.disable()
    for _ in range(DISPATCH_ROUNDS):
        for contest in contests:
            contest.time_once(shuffle)
    gc.enable()
    columns = ["later call, us", "strategy", "jit(vmap)", "autobatch", "more", "ratio"]
    print_table(columns, [contest.row()[:-1] for contest in contests])


def memory(folder: str) -> None:
    """Prints what is chosen where `vmap` needs more memory than there is, and how it ends."""
    device = jax.devices()[0]
    stated = _stats(device).get("bytes_limit") if device.platform != "cpu" else None
    limit, size = (stated, 1024) if stated else (CPU_LIMIT_BYTES, 256)

    def fun(x: Any) -> Any:
        # What a loop carries is in memory, whatever is fused, and `roll` keeps it from being
        # overwritten in place.
        def step(_: Any, matrix: Any) -> Any:
            return jnp.tanh(matrix + jnp.roll(matrix, 1, axis=0) / 2)

        return jax.lax.fori_loop(0, 8, step, x[:, None] * x).mean()

    row_bytes = _planned_row_bytes(fun, size)
    rows = int(OVER_LIMIT * limit / row_bytes)
    x = jax.random.normal(jax.random.key(0), (rows, size))
    budget = Budget(
        memory=None if stated else limit, expected_calls=EXPECTED_CALLS, tuning_s=TUNING_S
    )
    batched = autobatch(fun, store=folder, budget=budget, name="memory")
    start = time.perf_counter()
    plan = batched.tune(x)
    tuned_s = time.perf_counter() - start
    start = time.perf_counter()
    found = np.asarray(batched(x))
    called_s = time.perf_counter() - start
    checked = np.linspace(0, rows - 1, CHECKED_ROWS, dtype=int)
    expected = np.array([jax.jit(fun)(x[row]) for row in checked])
    error = np.abs(found[checked] - expected).max() / np.abs(expected).max()
    is_right = bool(np.isfinite(found).all()) and error < 1e-2
    outcomes = {str(each.strategy): each for each in plan.outcomes}
    chosen = outcomes[str(plan.strategy)]
    rows_of_table = [
        ["rows", str(rows)],
        ["limit", format_bytes(limit) + (" of the device" if stated else " of the budget")],
        ["vmap as XLA plans it", format_bytes(rows * row_bytes)],
        ["vmap in autobatch", f"{outcomes['vmap'].status}: {outcomes['vmap'].reason}"],
        ["chosen", f"{plan.strategy}, tuned in {tuned_s:.1f} s, a call {called_s:.3f} s"],
        ["its peak", f"{format_bytes(chosen.peak_bytes)} ({chosen.peak_source})"],
        ["peak of the device", format_bytes(_stats(device).get("peak_bytes_in_use"))],
        ["result", f"{'right' if is_right else 'WRONG'}: differs by {error:.1e}"],
    ]
    print_table(["memory case", ""], rows_of_table)
    print(batched.explain(x), flush=True)


def _planned_row_bytes(fun: Callable[..., Any], size: int) -> float:
    """Returns the bytes that XLA plans for one row under `vmap`, as planned for a few of them."""
    few = jnp.ones((PLANNED_ROWS, size))
    plan = jax.jit(jax.vmap(fun)).lower(few).compile().memory_analysis()
    assert plan is not None, "this backend does not say what it plans"
    return (plan.temp_size_in_bytes + plan.output_size_in_bytes) / PLANNED_ROWS


def _stats(device: Any) -> dict[str, int]:
    return dict(device.memory_stats() or {})


def seeds(watch: Watch) -> None:
    """Prints run and compile time of fixed strategies."""
    columns, table = ["run / compile", "rows", *SEED_STRATEGIES], []
    for name in SEEDS:
        if not watch.allows(SEED_NEEDS_S, f"seed table: {name}"):
            continue
        workload = Workload.of(name)
        cells = [_run_and_compile(workload, each) for each in SEED_STRATEGIES]
        table.append([name, str(workload.rows), *cells])
    print_table(columns, table)


def _run_and_compile(workload: Workload, strategy: str) -> str:
    jax.clear_caches()
    start = time.perf_counter()
    try:
        batched = workload.forced(strategy)
        batched.lower(*workload.args).compile()
        compile_s = time.perf_counter() - start
        run_s = glance(partial(batched, *workload.args))
    except Exception as error:  # one strategy that fails says something of the device, too
        return _first_line(error)
    return f"{format_seconds(run_s)} / {format_seconds(compile_s)}"


def oracle(watch: Watch, folder: str) -> None:
    """Prints autobatch's plan beside the best of `vmap`, `map` and every power-of-four chunk."""
    columns = ["workload", "rows", "plan", "tuning", "run", "oracle", "run", "ratio", "not tried"]
    table: list[list[str]] = []
    found: list[float] = []
    for name in ORACLE_CASES:
        if not watch.allows(ORACLE_NEEDS_S, f"oracle: {name}"):
            continue
        workload = Workload.of(name)
        try:
            row, ratio = _against_oracle(workload, watch, folder)
        except Exception as error:  # the other workloads are still worth their time
            table.append([name, str(workload.rows), _first_line(error), *[""] * 6])
            continue
        table.append(row)
        found.append(ratio)
    if found:
        mean, worst = geometric_mean(found), max(found)
        table.append(["geometric mean", *[""] * 6, f"{mean:.2f}", ""])
        table.append(["worst", *[""] * 6, f"{worst:.2f}", ""])
    print_table(columns, table)


def _against_oracle(workload: Workload, watch: Watch, folder: str) -> tuple[list[str], float]:
    budget = Budget(expected_calls=EXPECTED_CALLS, tuning_s=TUNING_S)
    ours = autobatch(
        workload.fun, workload.in_axes, store=folder, budget=budget, name=workload.name
    )
    start = time.perf_counter()
    plan = ours.tune(*workload.args)
    tuned_s = time.perf_counter() - start
    glanced, skipped = _glances(workload, watch)
    finalists = sorted(glanced, key=lambda each: glanced[each][1])[:FINALISTS]
    calls = [partial(ours, *workload.args), *(glanced[each][0] for each in finalists)]
    for call in calls:
        call()
    mine, *theirs = interleaved(calls, seconds=CONTEST_S)
    medians = [median_and_spread(each)[0] for each in theirs]
    best = medians.index(min(medians))
    over = ratios(mine, theirs[best])
    row = [
        workload.name,
        str(workload.rows),
        str(plan.strategy),
        format_seconds(tuned_s),
        format_seconds(median_and_spread(mine)[0]),
        finalists[best],
        format_seconds(medians[best]),
        with_spread(over),
        ", ".join(skipped),
    ]
    return row, median_and_spread(over)[0]


def _glances(
    workload: Workload, watch: Watch
) -> tuple[dict[str, tuple[Call, float]], Sequence[str]]:
    """Returns each strategy's call and seconds, and the strategies that were not tried or failed.

    They go from the most rows at once to the fewest, so that the first slow one ends the descent.
    """
    sizes = [4**power for power in range(10, 0, -1) if 4**power < workload.rows]
    strategies = ["vmap", *(f"chunked:{size}" for size in sizes), "map"]
    glanced: dict[str, tuple[Call, float]] = {}
    skipped: list[str] = []
    best, last = float("inf"), 0.0
    for strategy in strategies:
        is_slow = last > max(SLOW_S, SLOWER * best)
        is_long = strategy == "map" and workload.rows > MAP_ROWS_MOST
        what = f"oracle: {workload.name} {strategy}"
        if is_slow or is_long or not watch.allows(5.0 + 4 * last, what):
            skipped.append(strategy)
            continue
        call = partial(workload.forced(strategy), *workload.args)
        try:
            last = glance(call)
        except Exception as error:
            skipped.append(f"{strategy} ({_first_line(error)})")
            continue
        best = min(best, last)
        glanced[strategy] = call, last
    return glanced, skipped


def _first_line(error: Exception) -> str:
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first:.60}"


def main() -> None:
    print_header("Dispatch, memory, strategies and plan against oracle on this device")
    watch, failures = Watch(), 0
    with tempfile.TemporaryDirectory() as folder:
        # The oracle last: it takes the time that is left.
        sections = (
            partial(dispatch, folder),
            partial(memory, folder),
            partial(seeds, watch),
            partial(oracle, watch, folder),
        )
        for section in sections:
            try:
                section()
            except Exception:  # the other tables are still worth their time
                traceback.print_exc()
                failures += 1
            print(f"   at {time.perf_counter() - START:.0f} s\n", flush=True)
    print(f"left out for want of time: {', '.join(watch.left_out) or 'nothing'}", flush=True)
    sys.exit(failures)


if __name__ == "__main__":
    main()
