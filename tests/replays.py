"""Searches replayed from tables of measured strategies, without a device.

The tables are those of `benchmarks/tables`; what recorded them is `benchmarks/record_tables.py`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from records import make_limits

from autobatch._choose import LEAST_GAIN
from autobatch._record import Facts, Outcome
from autobatch._search import Prior, Search
from autobatch._strategies import VMAP, Strategy

FOLDER = Path(__file__).parent.parent / "benchmarks" / "tables"


@dataclass(frozen=True, kw_only=True)
class Table:
    """What every strategy costs on one workload: seconds to compile and to run."""

    name: str
    batch_size: int
    facts: Facts
    figures: dict[Strategy, tuple[float, float]]

    def total_s(self, strategy: Strategy, calls: int) -> float:
        compile_s, run_s = self.figures[strategy]
        return compile_s + calls * run_s

    def oracle(self, calls: int) -> Strategy:
        return min(self.figures, key=lambda each: self.total_s(each, calls))


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a search tried, and what became of it."""

    table: Table
    calls: int
    tried: tuple[Strategy, ...]
    choice: Strategy

    @property
    def excess(self) -> float:
        """Total of the choice over that of the oracle."""
        table, calls = self.table, self.calls
        return table.total_s(self.choice, calls) / table.total_s(table.oracle(calls), calls)

    @property
    def gain(self) -> float:
        """Logarithm of what the choice gains over `vmap`."""
        return math.log(self._over_vmap(self.choice))

    @property
    def possible_gain(self) -> float:
        """Logarithm of what the oracle gains over `vmap`."""
        return math.log(self._over_vmap(self.table.oracle(self.calls)))

    def _over_vmap(self, strategy: Strategy) -> float:
        return self.table.total_s(VMAP, self.calls) / self.table.total_s(strategy, self.calls)


def tables() -> list[Table]:
    return [load(path) for path in sorted(FOLDER.glob("*.json"))]


def load(path: Path) -> Table:
    data = json.loads(path.read_text())
    return Table(
        name=data["name"],
        batch_size=data["batch_size"],
        facts=Facts(**data["facts"]),
        figures={
            Strategy.parse(each["strategy"]): (each["compile_s"], each["run_s"])
            for each in data["outcomes"]
            if each["status"] == "measured"
        },
    )


def replay(
    table: Table, calls: int, *, prior: Prior | None = None, noise: float = 0.0, seed: int = 0
) -> Replayed:
    """Searches on a table and chooses among what was tried.

    Args:
        table: what every strategy costs.
        calls: expected calls.
        prior: what the search believes; None for what it ships with.
        noise: standard deviation of what a glance adds to a run time, in powers of e. The choice
            itself is made on the table's figures, as a tuning makes it on interleaved rounds.
        seed: of the noise.
    """
    rng = random.Random(f"{seed} {table.name}")
    search = Search(
        batch_size=table.batch_size,
        facts=table.facts,
        limits=make_limits(memory_bytes=None, memory_is_explicit=False, expected_calls=calls),
        prior=prior or Prior(),
    )
    outcomes: list[Outcome] = []
    while (strategy := search.next(outcomes)) is not None:
        outcome = Outcome(strategy=strategy, status="failed")
        if strategy in table.figures:
            compile_s, run_s = table.figures[strategy]
            run_s *= math.exp(abs(rng.gauss(0, noise)))
            outcome = replace(outcome, status="measured", compile_s=compile_s, run_s=run_s)
        outcomes.append(outcome)
    tried = tuple(each.strategy for each in outcomes if each.status == "measured")
    best = min(tried, key=lambda each: table.total_s(each, calls))
    is_better = table.total_s(best, calls) < (1 - LEAST_GAIN) * table.total_s(VMAP, calls)
    return Replayed(table=table, calls=calls, tried=tried, choice=best if is_better else VMAP)


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(each) for each in values]
    return math.exp(sum(logs) / len(logs))
