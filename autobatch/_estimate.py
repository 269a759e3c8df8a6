"""A strategy for a call that cannot be measured: from the upper bounds of memory alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autobatch._bound import live_bytes
from autobatch._choose import Decision
from autobatch._eligibility import may_not_end
from autobatch._mapping import mapped
from autobatch._pullback import value_and_pullback
from autobatch._record import Limits
from autobatch._search import chunk_sizes
from autobatch._strategies import MAP, VMAP, Strategy, chunked, rematerialised
from autobatch._units import format_bytes
from autobatch._workload import Workload


def estimated(workload: Workload, arrays: Sequence[Any], limits: Limits) -> Decision:
    """Returns `vmap` if its bound fits, else the strategy of most rows at once that does.

    Args:
        workload: the described call.
        arrays: its arrays, concrete or traced; only shapes are looked at.
        limits: the budget on this device.

    Raises:
        ValueError, TypeError: what `jax.vmap` raises for this program.
    """
    row = workload.row
    if row is None:
        return Decision(strategy=VMAP)
    if may_not_end(row):
        return Decision(strategy=MAP)
    if limits.memory_bytes is None:
        return Decision(strategy=VMAP)
    operands = [*workload.consts, *arrays]
    whole = bound(VMAP, workload, operands)
    if whole <= limits.memory_bytes:
        return Decision(strategy=VMAP)
    bounds: dict[Strategy, int] = {}
    loops = [*map(chunked, chunk_sizes(row.batch_size)), MAP]
    for strategy in loops if workload.moving is None else map(rematerialised, loops):
        bounds[strategy] = bound(strategy, workload, operands)
        if bounds[strategy] <= limits.memory_bytes:
            return Decision(strategy=strategy)
    least = min(bounds, key=bounds.__getitem__)
    return Decision(
        strategy=least,
        warning=f"no strategy is sure to fit {format_bytes(limits.memory_bytes)} without being "
        f"measured; {least} may need up to {format_bytes(bounds[least])} and is used",
    )


def bound(strategy: Strategy, workload: Workload, operands: Sequence[Any]) -> int:
    """Returns an upper bound of the bytes that a strategy needs, arguments included."""
    row = workload.row
    assert row is not None
    moving = workload.moving

    def program(*each: Any) -> list[Any]:
        if moving is None:
            return mapped(strategy, row, each)
        return value_and_pullback(strategy, row, each, moving)

    return live_bytes(jax.make_jaxpr(program)(*operands))
