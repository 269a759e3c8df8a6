"""The bound of a candidate's memory, corrected by what fewer rows were measured to need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch._gate import RESERVE, TRUSTED_STEP, Need, predicted_bytes

SIZES = st.integers(0, 10**12)


def predicted(bound: int, rows: int, *known: Need, arguments: int = 0) -> int:
    return predicted_bytes(
        bound_bytes=bound, rows_at_once=rows, argument_bytes=arguments, known=known
    )


def test_with_nothing_known_the_bound_counts() -> None:
    assert predicted(1000, 8) == 1000
    assert predicted(1000, 8, Need(rows_at_once=9, bound_bytes=1, needed_bytes=1)) == 1000


def test_a_bound_that_is_too_high_is_lowered() -> None:
    small = Need(rows_at_once=2, bound_bytes=10_000, needed_bytes=100)
    assert predicted(40_000, 8, small, arguments=50) == 50 + RESERVE * 4 * 100


def test_a_bound_that_was_exceeded_is_raised() -> None:
    small = Need(rows_at_once=2, bound_bytes=1000, needed_bytes=3000)
    assert predicted(8000, 16, small) == 24_000


def test_the_next_smaller_candidate_speaks() -> None:
    far = Need(rows_at_once=1, bound_bytes=1000, needed_bytes=1)
    near = Need(rows_at_once=8, bound_bytes=8000, needed_bytes=4000)
    assert predicted(16_000, 16, far, near) == RESERVE * 2 * 4000


@pytest.mark.parametrize(("rows", "is_trusted"), [(TRUSTED_STEP, True), (TRUSTED_STEP + 1, False)])
def test_one_row_does_not_speak_for_a_thousand(rows: int, is_trusted: bool) -> None:
    one = Need(rows_at_once=1, bound_bytes=1000, needed_bytes=10)
    assert (predicted(10**6, rows, one) < 10**6) == is_trusted


@given(SIZES, st.integers(1, 10**6), st.integers(1, 10**6), SIZES, SIZES)
def test_within_its_bound_nothing_is_predicted_beyond_the_bound(
    bound: int, rows: int, fewer: int, small_bound: int, needed: int
) -> None:
    small = Need(rows_at_once=fewer, bound_bytes=small_bound, needed_bytes=min(needed, small_bound))
    assert predicted(bound, rows, small) <= bound
