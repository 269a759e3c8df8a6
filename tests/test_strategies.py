"""Strategies are data: their text round-trips, and chunks share the rows evenly."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from arbitrary import STRATEGIES
from hypothesis import given
from hypothesis import strategies as st

from autobatch._strategies import (
    FAMILIES,
    MAP,
    UNROLLED,
    VMAP,
    Strategy,
    balanced_chunk,
    chunked,
    rows_at_once,
)

ROWS = st.integers(1, 10**6)


@given(STRATEGIES)
def test_text_round_trips(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy


@given(st.text(max_size=12) | st.from_regex(r"(vmap|map|unrolled|chunked):?-?\d*", fullmatch=True))
def test_text_is_parsed_or_refused(text: str) -> None:
    try:
        strategy = Strategy.parse(text)
    except ValueError:
        return
    assert strategy.family in FAMILIES
    assert strategy == Strategy.parse(str(strategy))


@pytest.mark.parametrize(
    "text",
    [
        *("", "VMAP", " vmap", "vmap ", "vmap\n", "loop", "chunked", "chunked:", "chunked:x"),
        *("chunked:1.5", "chunked: 3", "vmap:3", "map:1", "chunked:1:2", "chunked:+3"),
        *(None, 3, b"vmap", ["vmap"], VMAP),
    ],
)
def test_what_is_no_strategy_names_those_that_are(text: Any) -> None:
    with pytest.raises(ValueError, match=r"'vmap', 'map', 'unrolled' or 'chunked:K'.*; got"):
        Strategy.parse(text)


@pytest.mark.parametrize("text", ["chunked:0", "chunked:-1", "chunked:-0"])
def test_chunk_holds_a_row_at_least(text: str) -> None:
    with pytest.raises(ValueError, match="a chunk holds at least 1 row; got chunked:"):
        Strategy.parse(text)


def test_only_chunks_have_a_size() -> None:
    with pytest.raises(ValueError, match="only 'chunked' has a chunk size"):
        Strategy(family="vmap", chunk_size=3)
    with pytest.raises(ValueError, match="and it needs one"):
        Strategy(family="chunked")


def test_strategies_are_frozen_keys() -> None:
    assert {chunked(3): 1}[Strategy.parse("chunked:3")] == 1
    assert len({VMAP, MAP, UNROLLED, chunked(3), chunked(4)}) == 5
    with pytest.raises(FrozenInstanceError):
        VMAP.family = "map"  # pyright: ignore[reportAttributeAccessIssue]


@given(ROWS, ROWS)
def test_balanced_chunks_cover_all_rows_in_as_few_steps(batch_size: int, chunk_size: int) -> None:
    size = balanced_chunk(batch_size, chunk_size)
    steps = -(-batch_size // chunk_size)
    assert 1 <= size <= chunk_size
    assert steps * size >= batch_size
    assert -(-batch_size // size) == steps
    assert steps * size - batch_size < steps  # less than one row a step is computed twice


@given(ROWS, ROWS)
def test_chunk_that_divides_the_batch_stays(steps: int, chunk_size: int) -> None:
    assert balanced_chunk(steps * chunk_size, chunk_size) == chunk_size


@pytest.mark.parametrize("chunk_size", [1, 7])
def test_empty_batch_has_no_chunk(chunk_size: int) -> None:
    assert balanced_chunk(0, chunk_size) == 0


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [("vmap", 100), ("unrolled", 100), ("map", 1), ("chunked:64", 50), ("chunked:1000", 100)],
)
def test_rows_worked_on_together(strategy: str, rows: int) -> None:
    assert rows_at_once(Strategy.parse(strategy), 100) == rows
    assert rows_at_once(Strategy.parse(strategy), 0) == 0


@given(STRATEGIES, st.integers(0, 10**6))
def test_no_more_rows_at_once_than_there_are(strategy: Strategy, batch_size: int) -> None:
    assert 0 <= rows_at_once(strategy, batch_size) <= batch_size
