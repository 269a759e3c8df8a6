"""Where a tuning starts: at nothing, at a record that goes on, or at what a crash has left.

Pure functions. What is tried from there on is in `_search`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autobatch._bound import tree_bytes
from autobatch._choose import choose, total_s
from autobatch._eligibility import depends_on_values
from autobatch._record import Facts, Limits, Outcome, Record, Status
from autobatch._search import reopened
from autobatch._strategies import FAMILIES, MAP, UNROLLED, VMAP, Family, Strategy, chunked
from autobatch._workload import Workload, equations

CONTENDER = 1.25
"""A candidate whose total at a glance is this many times the least will not win."""
_SETTLED: tuple[Status, ...] = (
    "measured",
    "over-compile",
    "out-of-memory",
    "failed",
    "wrong-result",
)
"""What became of a candidate that the crash of another leaves as it is."""
_MAY_HANG = (
    "may not end: vectorised, a loop inside a branch runs on rows not meant for it; "
    "`autobatch tune` tries it"
)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a tuning starts.

    Attributes:
        families: those that may be tried.
        first: what is measured before the search picks, with what is known of it by now.
        kept: the outcomes that stand.
    """

    families: tuple[Family, ...]
    first: Mapping[Strategy, Outcome | None]
    kept: tuple[Outcome, ...]


def start(
    limits: Limits,
    *,
    may_hang: bool,
    is_derivative: bool = False,
    is_supervised: bool = False,
    resume: Record | None = None,
    left: Record | None = None,
) -> Start:
    """Returns where a tuning under `limits` starts.

    Args:
        limits: the budget.
        may_hang: whether the program may not end when it is vectorised.
        is_derivative: whether it is the value and the pullback of a call.
        is_supervised: whether another process would then end it.
        resume: a record whose search these limits let go on. Its plan is measured again, since the
            others must agree with it.
        left: what was known when a candidate ended the process that had measured. Times of two
            processes do not compare well, so what may win is measured again.
    """
    barred = may_hang and not is_supervised
    ineligible = [_may_hang(VMAP), _may_hang(chunked(2))] if barred else []
    if is_derivative:
        ineligible.append(_UNROLLED)
    without = {each.strategy.family for each in ineligible}
    begun = Start(
        families=tuple(each for each in FAMILIES if each not in without),
        first={MAP: None} if may_hang and is_supervised else {},  # it ends, so something is known
        kept=tuple(ineligible),
    )
    again: set[Strategy | None]
    if left is not None:
        kept = tuple(each for each in left.outcomes if each.status in _SETTLED)
        totals = {each.strategy: total_s(each, limits.expected_calls) for each in kept}
        most_s = CONTENDER * min(totals.values(), default=math.inf)
        again = {each for each in totals if totals[each] <= most_s and math.isfinite(totals[each])}
    elif resume is not None:
        kept = reopened(resume, limits)
        kept = resume.outcomes if kept is None else kept
        again = {choose(resume, limits)}
    else:
        return begun
    known = {each.strategy for each in kept}
    return replace(
        begun,
        first={each.strategy: each for each in kept if each.strategy in again},
        kept=(
            *(each for each in kept if each.strategy not in again),
            *(each for each in begun.kept if each.strategy not in known),
        ),
    )


def known_facts(workload: Workload, arrays: Any, *, bound_bytes: int, output_bytes: int) -> Facts:
    """Returns what is known of a workload before anything is measured.

    Args:
        workload: what is mapped.
        arrays: the arrays of the call.
        bound_bytes: the bound of `vmap`'s memory.
        output_bytes: of its outputs.
    """
    pairs = zip(workload.arguments, workload.in_axes, strict=True)
    argument_bytes, row = tree_bytes(arrays), workload.row
    return Facts(
        argument_bytes=argument_bytes,
        mapped_bytes=tree_bytes([argument for argument, axis in pairs if axis is not None]),
        output_bytes=output_bytes,
        working_bytes=max(0, bound_bytes - argument_bytes - output_bytes),
        equations=0 if row is None else sum(1 for _ in equations(row.jaxpr)),
        depends_on_values=row is not None and depends_on_values(row),
    )


_UNROLLED = Outcome(
    strategy=UNROLLED, status="ineligible", reason="keeps the values of all rows, as vmap does"
)


def _may_hang(strategy: Strategy) -> Outcome:
    return Outcome(strategy=strategy, status="ineligible", reason=_MAY_HANG)
