"""How near tunings come to the oracle, what they compile, and how long a first call takes.

Every workload of the suite is tuned afresh, for 1,000 and for 100,000 expected calls. What
was chosen, `vmap` and the best of the workload's recorded table (`record_tables.py`) are then run
again, interleaved; the oracle is the best of them. Compile times are medians of the tables.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import median_and_spread, print_header, print_table, verdict
from _timing import geometric_mean, interleaved
from record_tables import FOLDER, SUITE, load_suite

from autobatch import Budget, _measure, autobatch

NOISE_LEAST = 0.03
FINALISTS = 3
"""The oracle is one of so many that were best in the table, for run time and for the total."""
CONTEST_S = 1.5


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A tuning of one workload: the choice, compiled candidates, and the first call's seconds."""

    name: str
    choice: str
    compiles: int
    first_s: float


@dataclass(frozen=True, kw_only=True)
class Table:
    """Seconds to compile and to run of strategies, and the noise of `vmap` measured twice."""

    figures: dict[str, tuple[float, float]]
    noise: float

    def excess(self, choice: str, calls: int) -> float:
        """Returns the total of a choice over that of the oracle."""
        return self.total_s(choice, calls) / min(self.total_s(each, calls) for each in self.figures)

    def total_s(self, strategy: str, calls: int) -> float:
        compile_s, run_s = self.figures[strategy]
        return compile_s + calls * run_s

    def run_excess(self, choice: str) -> float:
        return self.figures[choice][1] / min(run_s for _, run_s in self.figures.values())


def load_figures(name: str) -> dict[str, tuple[float, float]]:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    measured = [each for each in data["outcomes"] if each["status"] == "measured"]
    return {each["strategy"]: (each["compile_s"], each["run_s"]) for each in measured}


def remeasured(name: str, made: Any, choices: Sequence[str]) -> Table:
    """Returns the table of `vmap`, of what was chosen, and of the best, run again interleaved."""
    fun, in_axes, args = made
    recorded = load_figures(name)
    names = {"vmap": None, **dict.fromkeys(choices)}
    for calls in (1000, 100_000):

        def total_s(each: str, calls: int = calls) -> float:
            compile_s, run_s = recorded[each]
            return compile_s + calls * run_s

        names |= dict.fromkeys(sorted(recorded, key=total_s)[:FINALISTS])
    calls_ = {each: partial(autobatch(fun, in_axes, strategy=each), *args) for each in names}
    for call in calls_.values():
        jax.block_until_ready(call())
    samples = interleaved([*calls_.values(), calls_["vmap"]], seconds=CONTEST_S)
    *runs, again = [median_and_spread(each)[0] for each in samples]
    figures = {each: (recorded[each][0], run) for each, run in zip(calls_, runs, strict=True)}
    first = figures["vmap"][1]
    noise = abs(first - again) / min(first, again)
    return Table(figures=figures, noise=max(NOISE_LEAST, noise))


def seconds_of_first_call(function: Any, args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - start


def tuned(case: Any, made: Any, calls: int) -> Tuned:
    fun, in_axes, args = made
    budget, name = Budget(expected_calls=calls), f"{case.name} {calls}"  # no record but its own
    batched = autobatch(fun, in_axes, store=False, budget=budget, name=name)
    first_s = seconds_of_first_call(batched, args)
    plan = batched.plan(*args)
    compiles = sum(each.compile_s is not None for each in plan.outcomes)
    return Tuned(name=case.name, choice=str(plan.strategy), compiles=compiles, first_s=first_s)


def share_of_gain(results: Sequence[Tuned], tables: dict[str, Table], calls: int) -> float:
    """Returns the logarithm of what was gained over `vmap`, over that of what the oracle gains."""
    got = possible = 0.0
    for each in results:
        table = tables[each.name]
        total = table.total_s(each.choice, calls)
        got += math.log(table.total_s("vmap", calls) / total)
        possible += math.log(
            table.total_s("vmap", calls) / total * table.excess(each.choice, calls)
        )
    return got / possible


def compare() -> None:
    cases = load_suite(SUITE)
    tables: dict[str, Table] = {}
    many: list[Tuned] = []
    few: list[Tuned] = []
    longer: list[float] = []
    rows = []
    for name, case in cases.items():
        made = case.make()
        fun, in_axes, args = made
        first_s = seconds_of_first_call(jax.jit(jax.vmap(fun, in_axes)), args)
        few.append(tuned(case, made, 1000))
        many.append(tuned(case, made, 100_000))
        longer.append(few[-1].first_s / first_s)
        table = tables[name] = remeasured(name, made, (few[-1].choice, many[-1].choice))
        best = min(table.figures, key=lambda each: table.figures[each][1])
        rows.append(
            [
                name,
                best,
                many[-1].choice,
                f"{table.run_excess(many[-1].choice):.3f}",
                str(many[-1].compiles),
                few[-1].choice,
                f"{table.excess(few[-1].choice, 1000):.3f}",
                str(few[-1].compiles),
                f"{1e3 * first_s:.0f} ms",
                f"{longer[-1]:.1f}x",
            ]
        )
    heads = ["run best", "at 100,000", "run/best", "compiles", "at 1,000", "total/best", "compiles"]
    print_table(["workload", *heads, "jit(vmap)", "first call"], rows)

    runs = [tables[each.name].run_excess(each.choice) for each in many]
    totals = [tables[each.name].excess(each.choice, 1000) for each in few]
    share = share_of_gain(many, tables, 100_000)
    slower = sum(
        tables[each.name].figures[each.choice][1]
        > (1 + tables[each.name].noise) * tables[each.name].figures["vmap"][1]
        for each in many
    )
    compiles = [each.compiles for each in many]
    print()
    print_table(
        ["over the suite", "measured", "bar"],
        [
            _row(
                "run time at 100,000 calls over the best, geometric mean",
                geometric_mean(runs),
                1.04,
            ),
            _row("    the worst", max(runs), 1.25),
            _row(
                "total at 1,000 calls over the least, geometric mean", geometric_mean(totals), 1.05
            ),
            _row("    the worst", max(totals), 1.3),
            ["gain over vmap, share of the oracle's", f"{share:.3f}", ">= 0.95"],
            ["slower than vmap beyond the noise", str(slower), "0"],
            _row("candidates compiled at 100,000 calls, mean", statistics.mean(compiles), 4.7),
            _row("    the most", max(compiles), 8),
            _row("first call over that of jit(vmap), median", statistics.median(longer), 4.5),
            _row("    the worst", max(longer), 12),
        ],
    )


def _row(what: str, value: float, bar: float) -> list[str]:
    return [what, f"{value:.3f}", verdict(value, bar)]


def compare_sizes() -> None:
    """Prints what tuning a cheap function of a thousand times the rows costs more."""
    print("\nA cheap function of 1,000 and of 1,000,000 rows")
    rows = []
    for calls in (1000, 100_000):
        for size in (1000, 1_000_000):
            name, budget = f"cheap {calls}", Budget(expected_calls=calls)
            batched = autobatch(lambda x: jnp.sin(x) * x + 1, store=False, budget=budget, name=name)
            x = np.linspace(0, 1, size, dtype=np.float32)
            with timed_runs() as runs:
                first_s = seconds_of_first_call(batched, (x,))
            tried = sum(each.run_s is not None for each in batched.plan(x).outcomes)
            rows.append([f"{calls:,}", f"{size:,}", str(tried), f"{first_s - sum(runs):.3f} s"])
    print_table(["calls", "rows", "candidates", "first call less its runs"], rows)


@contextmanager
def timed_runs() -> Iterator[list[float]]:
    """Collects the seconds that candidates run while a tuning measures them."""
    seconds: list[float] = []

    def noted(function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                seconds.append(time.perf_counter() - start)

        return run

    names = ("first_run", "glance", "time_rounds")
    plain = {name: getattr(_measure, name) for name in names}
    for name in names:
        setattr(_measure, name, noted(plain[name]))
    try:
        yield seconds
    finally:
        for name in names:
            setattr(_measure, name, plain[name])


if __name__ == "__main__":
    print_header("Tuned choices against the oracle of recorded tables")
    compare()
    compare_sizes()
