"""Hypothesis generators of what a tuning may have learnt: outcomes, limits and records."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st
from records import make_record

from autobatch._record import Limits, Outcome, PeakSource, Record, Status
from autobatch._strategies import MAP, UNROLLED, VMAP, Strategy, chunked

STRATEGIES: st.SearchStrategy[Strategy] = st.one_of(
    st.sampled_from([VMAP, MAP, UNROLLED]), st.integers(1, 10**6).map(chunked)
)
# A few values come again and again, so that ties and exact limits happen.
SECONDS = st.sampled_from([0.0, 0.001, 0.00102, 0.1, 1.0]) | st.floats(0, 1e6)
BYTES = st.sampled_from([0, 1000, 2000]) | st.integers(0, 10**15)
CALLS = st.integers(1, 10**9)


@st.composite
def measured(draw: st.DrawFn, strategy: Strategy | None = None) -> Outcome:
    """Draws an outcome with both times; its memory may be unknown."""
    peak = draw(st.none() | BYTES)
    return Outcome(
        strategy=draw(STRATEGIES) if strategy is None else strategy,
        status="measured",
        compile_s=draw(SECONDS),
        run_s=draw(SECONDS),
        run_mad_s=draw(st.none() | SECONDS),
        samples=draw(st.integers(1, 1000)),
        peak_bytes=peak,
        peak_source=None if peak is None else draw(st.sampled_from(get_args(PeakSource))),
        predicted_bytes=draw(st.none() | BYTES),
    )


@st.composite
def unmeasured(draw: st.DrawFn) -> Outcome:
    """Draws an outcome of a candidate that has no run time."""
    return Outcome(
        strategy=draw(STRATEGIES),
        status=draw(st.sampled_from([each for each in get_args(Status) if each != "measured"])),
        compile_s=draw(st.none() | SECONDS),
        predicted_bytes=draw(st.none() | BYTES),
        reason=draw(st.none() | st.text(min_size=1, max_size=20)),
    )


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    """Draws a budget resolved on some device."""
    memory = draw(st.none() | BYTES)
    return Limits(
        memory_bytes=memory,
        memory_is_explicit=memory is not None and draw(st.booleans()),
        compile_s=draw(SECONDS),
        tuning_s=draw(SECONDS),
        expected_calls=draw(CALLS),
    )


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Draws a record of up to six different candidates; `vmap` need not be among them."""
    outcomes = st.lists(
        measured() | measured(VMAP) | unmeasured(),
        unique_by=lambda each: each.strategy,
        min_size=1,
        max_size=6,
    )
    parts = st.dictionaries(
        st.text(max_size=8),
        st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just([0, None, 1]),
        max_size=4,
    )
    return make_record(
        key=draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
        parts=draw(parts),
        name=draw(st.text(max_size=12)),
        batch_size=draw(st.integers(2, 10**9)),
        outcomes=tuple(draw(outcomes)),
        searched=draw(limits()),
        noise=draw(st.none() | st.floats(0, 2)),
        load=draw(st.none() | st.floats(0, 2)),
        tuned_in_s=draw(SECONDS),
    )
