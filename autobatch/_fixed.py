"""Plans of calls of which nothing is measured: forced, with nothing to choose, or not to be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autobatch._choose import Plan, Source, blank
from autobatch._eligibility import (
    effect_of,
    may_not_end,
    must_not_run,
    nothing_to_choose,
    only_vmap,
    why_only_vmap,
)
from autobatch._errors import IneligibleStrategyError
from autobatch._mapping import check
from autobatch._strategies import MAP, VMAP, Strategy
from autobatch._workload import Workload


def fixed_plan(
    workload: Workload, arrays: Sequence[Any], *, strategy: Strategy | None, name: str
) -> Plan | None:
    """Returns the plan of a workload of which nothing is to be measured, or None.

    Args:
        workload: the described call.
        arrays: its arrays, concrete or traced.
        strategy: the forced strategy, or None.
        name: what the function is called.

    Raises:
        IneligibleStrategyError: the forced strategy would not keep the meaning.
    """
    if strategy is not None:
        if workload.moving is None:  # what is not differentiated has nothing to compute again
            strategy = replace(strategy, remat=False)
        return _forced(workload, arrays, strategy, name)
    reason = nothing_to_choose(workload) or only_vmap(workload, arrays)
    if reason is not None:
        return unmeasured("sole", f"vmap alone: {reason}")
    reason = must_not_run(workload)
    if reason is not None:
        return unmeasured("estimate", f"not measured: {reason}")
    if workload.moving is not None and workload.row is not None and may_not_end(workload.row):
        reason = "not measured: vectorised, its derivative might run for ever as well"
        return unmeasured("estimate", reason, strategy=MAP)
    return None


def alone_inside() -> Plan:
    """Returns the plan of calls inside a trace where there are several devices."""
    return unmeasured("sole", "vmap alone: a trace does not say what is sharded")


def unmeasured(source: Source, reason: str, key: str = "", strategy: Strategy = VMAP) -> Plan:
    """Returns a plan without figures.

    Args:
        source: how it was come to.
        reason: why nothing was measured.
        key: of the workload; "" where none was built.
        strategy: what is used.
    """
    return Plan(strategy=strategy, source=source, outcomes=blank(reason, strategy), key=key)


def _forced(workload: Workload, arrays: Sequence[Any], strategy: Strategy, name: str) -> Plan:
    at_once, size = strategy.chunk_size, workload.batch_size
    if strategy.family == "vmap" and why_only_vmap(workload, arrays) is not None:
        strategy = VMAP  # to do its steps again could change it, too
    is_whole = not isinstance(size, int) or (at_once is not None and at_once >= size)
    if strategy.family != "vmap" and not is_whole:
        reason = None if nothing_to_choose(workload) else only_vmap(workload, arrays)
        effect = None if workload.row is None else effect_of(workload.row)
        if reason is None and effect is not None:
            reason = f"its effects ({effect}) would happen another number of times"
        if reason is not None:
            raise IneligibleStrategyError(
                f"strategy={str(strategy)!r} would not keep the meaning of jax.vmap for "
                f"`{name}`: {reason}. Use strategy='vmap', or none."
            )
    if strategy.family != "vmap" and workload.row is not None:
        check(workload.row, [*workload.consts, *arrays])
    return unmeasured("forced", f"not measured: strategy={str(strategy)!r}", strategy=strategy)
