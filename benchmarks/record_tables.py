"""Records what every strategy costs on every workload, for replays of the search without a device.

    python benchmarks/record_tables.py [--suite FILE] [--folder FOLDER] [NAME ...]

A table holds the facts of a workload and, for `vmap`, `map`, every power-of-two chunk and (up to 16
rows) `unrolled`, what three whole tunings measured. Each workload is measured in a process of its
own. The best of a table is the oracle that searches are compared with.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _common import in_new_process

from autobatch import Budget, autobatch
from autobatch._record import Outcome, Record
from autobatch._store import open_store
from autobatch._strategies import MAP, UNROLLED, Strategy, chunked

FOLDER = Path(__file__).parent / "tables"
SUITE = Path(__file__).parent / "_workloads.py"
TUNINGS = 3
UNROLLED_ROWS_MOST = 16


def oracle_candidates(batch_size: int) -> tuple[Strategy, ...]:
    """Returns every strategy that the oracle chooses from, besides `vmap`."""
    sizes = [2**power for power in range(1, math.ceil(math.log2(batch_size)))]
    unrolled = [UNROLLED] if batch_size <= UNROLLED_ROWS_MOST else []
    return (*map(chunked, sizes), MAP, *unrolled)


def load_suite(path: Path) -> dict[str, Any]:
    """Returns the cases of a file that defines `SUITE`, by name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return {each.name: each for each in module.SUITE}


def measured(case: Any, tunings: int = TUNINGS) -> list[Record]:
    """Returns the records of whole tunings, in which every strategy of the oracle is tried."""
    fun, in_axes, args = case.make()
    records: list[Record] = []
    for _ in range(tunings):
        with tempfile.TemporaryDirectory() as folder:
            budget = Budget(tuning_s=600, compile_s=600, expected_calls=100_000)
            batched = autobatch(fun, in_axes, store=folder, budget=budget, name=case.name)
            batched._planner.also = oracle_candidates(_batch_size(in_axes, args))  # pyright: ignore[reportPrivateUsage]
            key = batched.tune(*args).key
            store = open_store(folder)
            record = None if store is None else store.get(key)
            assert record is not None
            records.append(record)
    return records


def table(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Returns medians of the tunings as plain data."""
    first = records[0]
    return {
        "name": name,
        "batch_size": first.batch_size,
        "device": first.device,
        "jax": first.parts["jax"],
        "noise": [each.noise for each in records],
        "facts": asdict(first.facts),
        "outcomes": [_row([_of(each, outcome) for each in records]) for outcome in first.outcomes],
    }


def to_text(found: dict[str, Any]) -> str:
    """Returns a table as JSON text, a line for each strategy."""
    head = json.dumps({key: found[key] for key in found if key != "outcomes"})
    lines = ",\n  ".join(map(json.dumps, found["outcomes"]))
    return f'{head[:-1]}, "outcomes": [\n  {lines}\n]}}\n'


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _row(same: Sequence[Outcome]) -> dict[str, Any]:
    compiles = [each.compile_s for each in same if each.compile_s is not None]
    runs = [each.run_s for each in same if each.run_s is not None]
    first = same[0]
    return {
        "strategy": str(first.strategy),
        "status": first.status,
        "reason": first.reason,
        "compile_s": _rounded(statistics.median(compiles)) if compiles else None,
        "run_s": _rounded(statistics.median(runs)) if runs else None,
        "runs_s": [*map(_rounded, runs)],
        "peak_bytes": first.peak_bytes,
        "predicted_bytes": first.predicted_bytes,
    }


def _of(record: Record, outcome: Outcome) -> Outcome:
    return next(each for each in record.outcomes if each.strategy == outcome.strategy)


def _batch_size(in_axes: Any, args: Any) -> int:
    import jax

    sizes: list[int] = []
    jax.vmap(lambda *_: sizes.append(jax.lax.axis_size("rows")) or 0, in_axes, axis_name="rows")(
        *args
    )
    return sizes[0]


def main() -> None:
    """Records the tables of the named cases, or of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--suite", type=Path, default=SUITE)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = load_suite(options.suite)
    if options.child:
        (name,) = options.names
        print(json.dumps(table(name, measured(cases[name]))))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or cases:
        found = in_new_process(__file__, "--child", "--suite", str(options.suite), name)
        (options.folder / f"{name}.json").write_text(to_text(found))
        runs = [(each["run_s"], each["strategy"]) for each in found["outcomes"] if each["run_s"]]
        print(f"{name}: {len(runs)} strategies, best {min(runs)[1]}", flush=True)


if __name__ == "__main__":
    main()
