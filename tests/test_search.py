"""Few candidates, the default first, each in range and none twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch._search import UNROLLED_ROWS_MOST, candidates, chunk_sizes, left_out
from autobatch._strategies import FAMILIES, MAP, UNROLLED, VMAP, chunked

BATCH = st.integers(2, 10**7) | st.integers(2, 40)
ROW_BYTES = st.integers(0, 10**12) | st.integers(0, 10**5)


@given(BATCH, ROW_BYTES)
def test_candidates_are_few_and_different_with_the_default_first(
    batch_size: int, row_bytes: int
) -> None:
    tried = candidates(batch_size=batch_size, row_bytes=row_bytes)
    assert tried[0] == VMAP
    assert MAP in tried
    assert len(set(tried)) == len(tried) <= 5
    assert (UNROLLED in tried) == (batch_size <= UNROLLED_ROWS_MOST)


@given(BATCH, ROW_BYTES)
def test_chunks_are_true_parts_of_the_batch(batch_size: int, row_bytes: int) -> None:
    sizes = chunk_sizes(batch_size, row_bytes)
    assert len(sizes) <= 2
    assert list(sizes) == sorted(set(sizes), reverse=True)
    assert all(2 <= each <= batch_size // 2 for each in sizes)
    assert all(each & (each - 1) == 0 for each in sizes)
    assert bool(sizes) == (batch_size >= 4)


@given(BATCH, ROW_BYTES, st.integers(1, 1000))
def test_larger_rows_never_get_larger_chunks(batch_size: int, row_bytes: int, factor: int) -> None:
    small, large = chunk_sizes(batch_size, row_bytes), chunk_sizes(batch_size, factor * row_bytes)
    assert large[:1] <= small[:1]


@given(BATCH, ROW_BYTES)
def test_every_family_has_a_candidate_or_a_reason(batch_size: int, row_bytes: int) -> None:
    tried = candidates(batch_size=batch_size, row_bytes=row_bytes)
    outcomes = left_out(batch_size, tried)
    families = [*(each.family for each in tried), *(each.strategy.family for each in outcomes)]
    assert set(families) == set(FAMILIES)
    assert not {each.strategy for each in outcomes} & set(tried)
    assert all(each.status == "unmeasured" and each.reason for each in outcomes)


@pytest.mark.parametrize(
    ("batch_size", "row_bytes", "sizes"),
    [
        (2, 100, ()),
        (3, 100, ()),
        (4, 100, (2,)),
        (16, 0, (8, 2)),
        (1000, 16384, (256, 32)),
        (1000, 10**9, (16, 2)),
        (10**6, 64, (65536, 8192)),
    ],
)
def test_chunks_begin_where_a_step_stays_in_cache(
    batch_size: int, row_bytes: int, sizes: tuple[int, ...]
) -> None:
    assert chunk_sizes(batch_size, row_bytes) == sizes


def test_reasons_name_the_bounds() -> None:
    unrolled, chunk = left_out(17, (VMAP, MAP))
    assert unrolled.reason == "not tried beyond 16 rows"
    assert chunk.reason == "no chunk between 1 and all of 17 rows"
    assert left_out(17, (VMAP, UNROLLED, chunked(2))) == ()
