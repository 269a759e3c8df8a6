"""Which candidate is tried next, given the outcomes so far: a pure function.

`vmap` first. Then whatever is expected to gain most over its cost, as long as that is more than
nothing and more than the noise: on a curve over the octaves of rows at once (`_surrogate`), with
`map` and `unrolled` beside it, since they compile the program of one row. One fact of the jaxpr
steers: where a loop or branch depends on values a row by itself may be far cheaper, so `map` comes
first. Another bars: the bound of memory. Cache sizes were tried, and helped no replay. The compile
time of `unrolled` is predicted from those measured, since it grows faster than its rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autobatch._choose import objection, total_s, widened
from autobatch._gate import Need, predicted_bytes
from autobatch._record import Facts, Limits, Outcome, Record, Status
from autobatch._strategies import (
    FAMILIES,
    MAP,
    UNROLLED,
    VMAP,
    Family,
    Strategy,
    chunked,
    rematerialised,
    rows_at_once,
)
from autobatch._surrogate import Curve, Point, expected_gain
from autobatch._units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is believed before anything is measured. Run times are in powers of e.

    Attributes:
        curve: how the run time of chunks wanders over their size.
        small: a chunk of K rows takes 1 + small / K times as long as a large one.
        default: standard deviation of `vmap` beside the curve.
        chunk: standard deviation of one chunk size beside the curve, which is not smooth.
        row, row_shift: standard deviation and mean of `map` beside the curve.
        branching, branching_shift: the same where loops or branches depend on values.
        unrolled, unrolled_shift: standard deviation and mean of `unrolled` beside `map`'s place.
        remat: what computing a step again adds: a third, if all of it is computed twice.
    """

    curve: Curve = field(default_factory=lambda: Curve(spread=0.8, reach=4.0, trust=2.0))
    small: float = 2.5
    default: float = 0.3
    chunk: float = 0.1
    row: float = 0.7
    row_shift: float = 0.4
    branching: float = 2.0
    branching_shift: float = -0.5
    unrolled: float = 0.6
    unrolled_shift: float = 0.2
    remat: float = math.log(4 / 3)


UNROLLED_ROWS_MOST = 16
"""Beyond so many rows an unrolled loop compiles for minutes and spares a loop's overhead."""
LEAST_SHARE = 0.012
"""Share of the best total that a candidate must be expected to gain, for every one measured before:
what is left to find grows less, and what differs by less than the noise is no gain."""
PATIENCE = 2.5
"""A candidate may cost so many times what it is expected to gain, divided by the number of those
measured before: tuning is paid for once, and the record serves every later process."""
LEISURE = 9.0
"""For every thousand expected calls a tuning may take so many times what the first candidate takes
to compile and run: who calls a function rarely does not want to wait for the best way to do so."""
WAIT_SHARE = 0.02
"""So much of the total may be waited for in any case: of long runs even a few take long."""
USUAL_OCTAVES = 10
"""The curve's reach is that for batches of so many octaves, or fewer."""
SHORTEST_S = 1e-9
"""No clock tells a shorter run from none."""
RUNS = 4
"""A candidate that is tried runs about so often."""
LOOP_COMPILE_S = 0.045
"""A loop compiles so many seconds longer than `vmap`, which may be nothing but a library call."""
UNROLLED_COMPILE, UNROLLED_GROWTH = 0.36, 1.05
"""N rows unrolled compile 1 + 0.36 N ** 1.05 times as long as the quickest of the others."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search for the best strategy of one workload.

    Attributes:
        batch_size: rows of the batch, at least 2.
        facts: what is known of the workload.
        limits: the budget on its device.
        families: those that keep the meaning.
        remat: whether the workload is a derivative, where loops compute their steps again.
        also: strategies to try besides those that are worth it.
        prior: what is believed before anything is measured.
    """

    batch_size: int
    facts: Facts
    limits: Limits
    families: tuple[Family, ...] = FAMILIES
    remat: bool = False
    also: tuple[Strategy, ...] = ()
    prior: Prior = field(default_factory=Prior)

    def next(self, outcomes: Sequence[Outcome], needs: Sequence[Need] = ()) -> Strategy | None:
        """Returns the candidate to try next, or None if none is worth it.

        Args:
            outcomes: those of the candidates that were tried, in any order.
            needs: what those that ran needed.
        """
        tried = {each.strategy for each in outcomes}
        left = [
            each
            for each in self._candidates()
            if each not in tried and self._bar(each, outcomes, needs) is None
        ]
        if VMAP in left:
            return VMAP
        measured = [each for each in outcomes if each.run_s is not None]
        if not measured:
            return max(left, key=lambda each: (each != UNROLLED, self._rows(each)), default=None)
        if not any(map(self._is_viable, measured)):
            # Nothing measured may be used, so what might be is worth a try: fewest rows first.
            return min(left, key=lambda each: (each == UNROLLED, self._rows(each)), default=None)
        left = [each for each in left if self._is_affordable(each, measured)]
        worth = {each: self._weigh(each, measured).worth_s for each in left}
        best = max(worth, key=worth.__getitem__, default=None)
        if best is not None and worth[best] > 0:
            return best
        return next((each for each in self.also if each not in tried), None)

    def left_out(
        self,
        outcomes: Sequence[Outcome],
        needs: Sequence[Need] = (),
        *,
        cut_by: str | None = None,
    ) -> tuple[Outcome, ...]:
        """Returns an outcome for each family of which nothing was tried, with the reason.

        Args:
            outcomes: those of the candidates that were tried.
            needs: what those that ran needed.
            cut_by: what ended the search before its time, if anything did.
        """
        families = {each.strategy.family for each in outcomes}
        return tuple(
            self._left_out(each, outcomes, needs, cut_by)
            for each in self.families
            if each not in families
        )

    def _left_out(
        self,
        family: Family,
        outcomes: Sequence[Outcome],
        needs: Sequence[Need],
        cut_by: str | None,
    ) -> Outcome:
        candidates = [each for each in self._candidates() if each.family == family]
        if family == "unrolled":
            candidates = [UNROLLED]
        if not candidates:
            reason = f"no chunk between 1 and all of {self.batch_size} rows"
            return Outcome(strategy=chunked(1), status="unmeasured", reason=reason)
        bars = {each: self._bar(each, outcomes, needs) for each in candidates}
        barred = [outcome for outcome in bars.values() if outcome is not None]
        if len(barred) == len(candidates):
            return min(barred, key=lambda each: each.predicted_bytes or 0)
        measured = [each for each in outcomes if each.run_s is not None]
        open_ = [each for each in candidates if bars[each] is None]
        if not measured:
            reason = cut_by or "nothing was measured that it could be compared with"
            status: Status = "unmeasured" if cut_by is None else "out-of-time"
            return Outcome(strategy=open_[0], status=status, reason=reason)
        weighed = {each: self._weigh(each, measured) for each in open_}
        best = max(weighed, key=lambda each: weighed[each].worth_s)
        if cut_by is not None and weighed[best].worth_s > 0:
            return Outcome(strategy=best, status="out-of-time", reason=cut_by)
        reason = weighed[best].reason()
        if family == "unrolled" and self.batch_size > UNROLLED_ROWS_MOST:
            predicted = format_seconds(weighed[best].compile_s)
            reason = f"not tried beyond {UNROLLED_ROWS_MOST} rows (compile predicted {predicted})"
        elif weighed[best].worth_s > 0:
            reason += ": too long a wait for so few calls"
        return Outcome(strategy=best, status="not-worth", reason=reason)

    def _candidates(self) -> list[Strategy]:
        """Returns the candidates that may be tried, no two of which are the same program."""
        loops = [*map(chunked, chunk_sizes(self.batch_size)), MAP]
        if self.remat:
            candidates = [VMAP, *map(rematerialised, [VMAP, *loops])]
        elif self.batch_size <= UNROLLED_ROWS_MOST:
            candidates = [VMAP, *loops, UNROLLED]
        else:
            candidates = [VMAP, *loops]
        return [each for each in candidates if each.family in self.families]

    def _rows(self, strategy: Strategy) -> int:
        return rows_at_once(strategy, self.batch_size)

    def _bar(
        self, strategy: Strategy, outcomes: Sequence[Outcome], needs: Sequence[Need]
    ) -> Outcome | None:
        """Returns the outcome of a candidate that must not be tried, or None if it may be."""
        limit, facts = self.limits.memory_bytes, self.facts
        if limit is not None:
            working = facts.working_bytes * self._rows(strategy) // self.batch_size
            need = predicted_bytes(
                bound_bytes=facts.argument_bytes + facts.output_bytes + working,
                rows_at_once=self._rows(strategy),
                argument_bytes=facts.argument_bytes,
                known=needs,
            )
            if need > limit:
                return over_memory(strategy, need, limit, "may need")
        compile_s = self._compile_s(strategy, outcomes)
        if compile_s is not None and compile_s > self.limits.compile_s:
            reason = f"compile predicted {format_seconds(compile_s)}"
            reason += f" of {format_seconds(self.limits.compile_s)} allowed"
            return Outcome(strategy=strategy, status="over-compile", reason=reason)
        return None

    def _is_viable(self, outcome: Outcome) -> bool:
        """Returns whether a measured candidate could be the plan."""
        return objection(outcome, self.limits) is None

    def _compile_s(self, strategy: Strategy, outcomes: Sequence[Outcome]) -> float | None:
        """Returns the predicted seconds of a compile, or None before the first one."""
        seconds = {each.strategy: each.compile_s for each in outcomes if each.compile_s is not None}
        if not seconds:
            return None
        if strategy == UNROLLED:
            growth = UNROLLED_COMPILE * self.batch_size**UNROLLED_GROWTH
            return min(seconds.values()) * (1 + growth)
        loops = [seconds[each] for each in seconds if each.family == strategy.family]
        loops = loops or [seconds[each] for each in seconds if each.family in ("map", "chunked")]
        if loops:
            return statistics.mean(loops)
        return LOOP_COMPILE_S + min(seconds.values())

    def _is_affordable(self, strategy: Strategy, measured: Sequence[Outcome]) -> bool:
        """Returns whether trying one more keeps the tuning in proportion to its first candidate."""
        spent_s = sum((each.compile_s or 0.0) + RUNS * (each.run_s or 0.0) for each in measured)
        first = next((each for each in measured if each.strategy == VMAP), measured[0])
        first_s = (first.compile_s or 0.0) + (first.run_s or 0.0)
        calls = self.limits.expected_calls
        least_s = min(total_s(each, calls) for each in measured)
        allowed_s = max(LEISURE * first_s * calls / 1000, WAIT_SHARE * least_s)
        return spent_s + self._weigh(strategy, measured).cost_s <= allowed_s

    def _weigh(self, strategy: Strategy, measured: Sequence[Outcome]) -> _Weight:
        """Returns what a candidate is expected to gain and to cost."""
        calls = self.limits.expected_calls
        viable = [each for each in measured if self._is_viable(each)] or measured
        best = min(viable, key=lambda each: total_s(each, calls))
        compile_s = self._compile_s(strategy, measured)
        assert compile_s is not None
        assert best.compile_s is not None
        assert best.run_s is not None
        known = [
            (self._point(each.strategy), math.log(max(each.run_s or 0.0, SHORTEST_S)))
            for each in measured
        ]
        mean, deviation = self._curve().expected(known, self._point(strategy))
        bar_s = best.run_s + (best.compile_s - compile_s) / calls
        return _Weight(
            gain_s=calls * expected_gain(bar_s, mean, deviation),
            cost_s=compile_s + RUNS * math.exp(mean),
            compile_s=compile_s,
            place=len(measured),
            best_s=total_s(best, calls),
            least_s=LEAST_SHARE * len(measured) * total_s(best, calls),
            most_s=calls * best.run_s,
        )

    def _curve(self) -> Curve:
        """Returns the curve; a thousand times the rows has more octaves, but no more turns."""
        curve, octaves = self.prior.curve, math.log2(self.batch_size)
        return replace(curve, reach=curve.reach * max(1.0, octaves / USUAL_OCTAVES))

    def _point(self, strategy: Strategy) -> Point:
        """Returns where a candidate lies beside the others."""
        point = self._forward_point(strategy)
        return replace(point, shift=point.shift + self.prior.remat) if strategy.remat else point

    def _forward_point(self, strategy: Strategy) -> Point:
        prior, octave = self.prior, math.log2(self._rows(strategy))
        match strategy.family:
            case "vmap":
                return Point(octave=octave, shift=0, own=prior.default)
            case "chunked":
                shift = math.log1p(prior.small / self._rows(strategy))
                return Point(octave=octave, shift=shift, own=prior.chunk)
            case "map" if self.facts.depends_on_values:
                return Point(octave=0, shift=prior.branching_shift, own=prior.branching)
            case "map":
                return Point(octave=0, shift=prior.row_shift, own=prior.row)
            case "unrolled":
                return Point(octave=0, shift=prior.unrolled_shift, own=prior.unrolled)


@dataclass(frozen=True, kw_only=True)
class _Weight:
    gain_s: float
    cost_s: float
    compile_s: float
    place: int
    best_s: float
    least_s: float
    most_s: float

    @property
    def worth_s(self) -> float:
        """Seconds by which the expected gain exceeds its cost and the least that counts as one."""
        return self.gain_s - max(self.place * self.cost_s / PATIENCE, self.least_s)

    def reason(self) -> str:
        """Returns why the candidate was not worth a compile."""
        seconds = f"not tried: compile predicted {format_seconds(self.compile_s)}"
        if self.most_s < self.compile_s:
            return f"{seconds} for at most {format_seconds(self.most_s)}"
        gain = f"{seconds} for an expected gain of {format_seconds(max(0.0, self.gain_s))}"
        return f"{gain} ({self.gain_s / self.best_s:.1%})" if self.best_s else gain


def chunk_sizes(batch_size: int) -> list[int]:
    """Returns the chunk sizes that are tried, the largest first.

    >>> chunk_sizes(12)
    [8, 4, 2]
    """
    powers = range((batch_size - 1).bit_length() - 1, 0, -1)
    return [2**each for each in powers]


def reopened(record: Record, limits: Limits) -> tuple[Outcome, ...] | None:
    """Returns the outcomes to go on from, if these limits let the search of a record go on.

    Args:
        record: what was measured, and under which limits.
        limits: the budget now.

    Returns:
        The outcomes that still hold, or None if wider limits would not add a candidate to them.
    """
    opened = widened(record, limits)
    if not opened:
        return None
    # Whether a candidate is worth it is asked again by a search that goes on.
    kept = tuple(each for each in record.outcomes if each.status not in {"not-worth", *opened})
    excluded = {each.strategy.family for each in kept if each.status == "ineligible"}
    search = Search(
        batch_size=record.batch_size,
        facts=record.facts,
        limits=limits,
        families=tuple(each for each in FAMILIES if each not in excluded),
        remat=record.is_derivative,
    )
    return None if search.next(kept) is None else kept


def over_memory(strategy: Strategy, count: int, limit: int, verb: str) -> Outcome:
    """Returns the outcome of a candidate that was not run because of its memory."""
    reason = f"{verb} {format_bytes(count)} of {format_bytes(limit)}; not run"
    return Outcome(strategy=strategy, status="over-memory", predicted_bytes=count, reason=reason)
