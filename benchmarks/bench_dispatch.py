"""What does a later call cost over `jax.jit(jax.vmap(fun))`?"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from _common import median_and_spread, print_header, print_table, verdict

from autobatch import Budget, autobatch

ROUNDS = 4000
# A third of a millisecond, so that most samples fall between the disturbances of a shared machine.
SMALL_CALLS, LEAVES_CALLS = 50, 4
# So few that vmap runs on one thread and is the fastest form: both sides run the same program.
ROWS = (24, 32, 40, 48, 56)


@dataclass
class Contest:
    """The same calls of a reference and of a contender, timed in turn."""

    name: str
    reference: Callable[..., Any]
    contender: Callable[..., Any]
    calls: list[tuple[Any, Any]]
    more_us: float | None = None
    ratio: float | None = None
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def time_once(self, shuffle: Callable[[list[Any]], None]) -> None:
        sides = list(zip((self.reference, self.contender), self.seconds, strict=True))
        shuffle(sides)
        for function, seconds in sides:
            seconds.append(_seconds_per_call(function, self.calls))

    def row(self) -> list[str]:
        """Returns the figures as text.

        What is more is the difference of two medians: where many samples are disturbed, that of
        the differences is far less stable.
        """
        reference, reference_spread = median_and_spread(self.seconds[0])
        contender, contender_spread = median_and_spread(self.seconds[1])
        more_us, ratio = 1e6 * (contender - reference), contender / reference
        bar = ""
        if self.more_us is not None:
            bar = verdict(more_us, self.more_us, unit=" us")
        if self.ratio is not None:
            bar = verdict(ratio, self.ratio)
        plan = getattr(self.contender, "plan", None)
        chosen = {str(plan(*call).strategy) for call in self.calls[: len(ROWS)]} if plan else {"-"}
        return [
            self.name,
            ", ".join(sorted(chosen)),
            f"{1e6 * reference:.2f} +-{1e6 * reference_spread:.2f}",
            f"{1e6 * contender:.2f} +-{1e6 * contender_spread:.2f}",
            f"{more_us:.2f}",
            f"{ratio:.2f}",
            bar,
        ]


def _seconds_per_call(function: Callable[..., Any], calls: list[tuple[Any, Any]]) -> float:
    result = None
    start = time.perf_counter()
    for first, second in calls:
        result = function(first, second)
    elapsed = time.perf_counter() - start
    jax.block_until_ready(result)
    return elapsed / len(calls)


def _contests() -> list[Contest]:
    def dot(x: Any, y: Any) -> Any:
        return (x * y).sum()

    def use_one(leaves: Any, y: Any) -> Any:
        return (leaves["leaf 7"] * y).sum()

    def reference(fun: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(jax.vmap(fun, (None, 0)))

    x, batches = jnp.ones(8), [jnp.ones((rows, 8)) for rows in ROWS]
    leaves = {f"leaf {number}": jnp.ones(8) for number in range(300)}
    one = [(x, batches[0])] * SMALL_CALLS
    several = [(x, each) for each in batches] * (SMALL_CALLS // len(batches))
    many = [(leaves, batches[0])] * LEAVES_CALLS

    contests = [
        Contest("two arguments, jit(vmap) against itself", reference(dot), reference(dot), one),
        Contest("two arguments, one known signature", reference(dot), _tuned(dot), one, 0.8),
        Contest("two arguments, five known signatures", reference(dot), _tuned(dot), several, 1.2),
        Contest("300 leaves, one used", reference(use_one), _tuned(use_one), many, ratio=1.05),
    ]
    for contest in contests:
        for first, second in contest.calls[: len(ROWS)]:
            contest.reference(first, second)
            contest.contender(first, second)
    return contests


def _tuned(fun: Callable[..., Any]) -> Callable[..., Any]:
    # So many calls that no form is chosen because it compiles faster.
    return autobatch(fun, (None, 0), store=False, budget=Budget(expected_calls=10**9))


def main() -> None:
    print_header("A later call over jax.jit(jax.vmap(fun)), in microseconds")
    contests, shuffle = _contests(), random.Random(0).shuffle
    gc.disable()
    for _ in range(ROUNDS):
        for contest in contests:
            contest.time_once(shuffle)
    columns = ["calls", "strategy", "jit(vmap)", "autobatch", "more", "ratio", "bar"]
    print_table(columns, [contest.row() for contest in contests])


if __name__ == "__main__":
    main()
