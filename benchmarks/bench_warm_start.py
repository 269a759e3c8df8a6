"""What does the first call of a new process cost with a record, over the winner written by hand?

Both sides run in new processes, in turn, forked from one that has imported jax and autobatch and
done nothing else. Making the arguments is not timed, and neither is a first small compilation,
which most programs have behind them; decorating and the call, until its result is there, are.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _common import (
    by_hand,
    median_and_spread,
    print_header,
    print_table,
    ratios,
    uncertainty,
    verdict,
    with_spread,
)
from _functions import FUNCTIONS

from autobatch import autobatch

REPETITIONS_LEAST, REPETITIONS_MOST = 5, 25
SECONDS = 150.0
"""For the repetitions of all functions together; the least number is done in any case."""
PRECISE = 0.01
"""A function whose ratio is known this well gets no further repetition."""
PARTS = {
    "describe": ("describe",),
    "eligible": ("nothing_to_choose", "only_vmap", "must_not_run"),
    "key": ("key_parts", "digest"),
    "store": ("_store", "open_store", "get"),
    "limits": ("_limits",),
    "choose": ("decide", "explained", "to_resume"),
    "map": ("mapped",),
}
"""The functions and methods of autobatch that each part of a first call consists of."""


def tune(name: str, store: str) -> str:
    """Child: makes the record and returns the winner."""
    fun, in_axes, args = FUNCTIONS[name]()
    return str(autobatch(fun, in_axes, store=store).plan(*args).strategy)


def _warm(name: str) -> tuple[Any, Any, Any]:
    """Returns a function and its arguments, in a process that has compiled something before."""
    fun, in_axes, args = FUNCTIONS[name]()
    jax.block_until_ready(jax.jit(lambda args: jax.tree.map(jnp.sum, args))(args))
    return fun, in_axes, args


def first_call(name: str, store: str, strategy: str) -> float:
    """Child: returns the seconds of a first call, from the record if no strategy is given."""
    fun, in_axes, args = _warm(name)
    start = time.perf_counter()
    recorded = not strategy
    function = autobatch(fun, in_axes, store=store) if recorded else by_hand(fun, in_axes, strategy)
    jax.block_until_ready(function(*args))
    elapsed = time.perf_counter() - start
    assert not recorded or function.plan(*args).source == "record"
    return elapsed


def parts(name: str, store: str, strategy: str) -> dict[str, float]:
    """Child: returns the seconds of the parts of a first call, or of tracing by hand."""
    fun, in_axes, args = _warm(name)
    if strategy:
        function = by_hand(fun, in_axes, strategy)
        start = time.perf_counter()
        function.trace(*args)
        return {"by hand": time.perf_counter() - start}

    from autobatch import _planner, _store

    spent = dict.fromkeys(PARTS, 0.0)
    modules = [each for name, each in sys.modules.items() if name.startswith("autobatch._")]
    for part, names in PARTS.items():
        for name in names:
            for place in (*modules, _planner.Planner, _store.Store):
                if callable(getattr(place, name, None)):
                    setattr(place, name, _timed(getattr(place, name), spent, part))
    jax.block_until_ready(autobatch(fun, in_axes, store=store)(*args))
    return spent


def _timed(function: Callable[..., Any], spent: dict[str, float], part: str) -> Callable[..., Any]:
    """Returns the function, which adds its time to its part unless another part of it does."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        before = sum(spent.values())
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            inside = sum(spent.values()) - before
            spent[part] += time.perf_counter() - start - inside

    return timed


def compare(new_process: Callable[..., Any], store: str) -> None:
    """Prints the table of ratios, and that of the parts."""
    winners = {name: new_process(tune, (name, store)) for name in FUNCTIONS}
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in FUNCTIONS}
    deadline = time.perf_counter() + SECONDS
    for repetition in range(REPETITIONS_MOST):
        for name, (hand, record) in seconds.items():
            enough = repetition >= REPETITIONS_LEAST
            if enough and (
                time.perf_counter() > deadline or uncertainty(ratios(record, hand)) < PRECISE
            ):
                continue
            sides = [(hand, winners[name]), (record, "")]
            for samples, strategy in sides if repetition % 2 else sides[::-1]:
                samples.append(new_process(first_call, (name, store, strategy)))

    rows = []
    for name, (hand, record) in seconds.items():
        both = ratios(record, hand)
        middle, _ = median_and_spread(both)
        slow_enough = median_and_spread(hand)[0] >= 0.3
        rows.append(
            [
                name,
                winners[name],
                with_spread(hand, 0, 1e3),
                with_spread(record, 0, 1e3),
                with_spread(both),
                f"{uncertainty(both):.3f}",
                str(len(both)),
                verdict(middle, 1.15) if slow_enough else "by hand < 0.3 s",
            ]
        )
    columns = ["function", "winner", "by hand", "record", "ratio", "std. error", "pairs", "bar"]
    print_table(columns, rows)

    print("\nWhere it goes, in milliseconds (medians of 3); by hand there is the tracing alone")
    rows = []
    for name, winner in winners.items():
        hand = [new_process(parts, (name, store, winner)) for _ in range(3)]
        ours = [new_process(parts, (name, store, "")) for _ in range(3)]
        middles = [median_and_spread([each[part] for each in ours])[0] for part in PARTS]
        tracing = median_and_spread([each["by hand"] for each in hand])[0]
        rows.append(
            [name]
            + [f"{1e3 * each:.1f}" for each in (*middles, sum(middles), tracing)]
            + [f"{1e3 * (sum(middles) - tracing):.1f}"]
        )
    print_table(["function", *PARTS, "together", "by hand", "more"], rows)


def main() -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # importing would time the compiler
    processes = multiprocessing.get_context("forkserver")  # it imports this module, and then forks
    with processes.Pool(1, maxtasksperchild=1) as pool, tempfile.TemporaryDirectory() as store:
        print_header(
            "The first call of a new process with a record, over the winner by hand, in ms"
        )
        compare(pool.apply, store)


if __name__ == "__main__":
    main()
