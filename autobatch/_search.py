"""Which candidates are tried, and in which order: a pure function of the workload's sizes."""

from __future__ import annotations

from autobatch._record import Outcome
from autobatch._strategies import MAP, UNROLLED, VMAP, Strategy, chunked

UNROLLED_ROWS_MOST = 16
"""Compile time of an unrolled loop grows faster than its rows; beyond these it is not tried."""

_STEP_BYTES = 512 * 1024
"""Values alive in one step that stay in a core's own cache: where the smaller chunk begins."""
_SPREAD = 8
"""The larger chunk has this many times the rows, which the memory of the smaller one foretells."""


def candidates(*, batch_size: int, row_bytes: int) -> tuple[Strategy, ...]:
    """Returns the strategies to try, `vmap` first.

    Args:
        batch_size: rows of the batch, at least 2.
        row_bytes: bytes of the values alive while one row is worked on.

    >>> [str(each) for each in candidates(batch_size=1000, row_bytes=16384)]
    ['vmap', 'chunked:256', 'chunked:32', 'map']
    """
    strategies = [VMAP, *(chunked(size) for size in chunk_sizes(batch_size, row_bytes)), MAP]
    if batch_size <= UNROLLED_ROWS_MOST:
        strategies.append(UNROLLED)
    return tuple(strategies)


def chunk_sizes(batch_size: int, row_bytes: int) -> tuple[int, ...]:
    """Returns up to two chunk sizes, the larger first: powers of two of at most half the batch."""
    most = _power_of_two(batch_size // 2)
    if most < 2:
        return ()
    small = min(most, max(2, _power_of_two(_STEP_BYTES // max(row_bytes, 1))))
    if small * _SPREAD > most:
        small = max(2, most // _SPREAD)
    large = min(most, small * _SPREAD)
    return (large, small) if small < large else (large,)


def left_out(batch_size: int, tried: tuple[Strategy, ...]) -> tuple[Outcome, ...]:
    """Returns outcomes for the families of which no strategy is tried, with the reason."""
    outcomes = []
    if UNROLLED not in tried:
        reason = f"not tried beyond {UNROLLED_ROWS_MOST} rows"
        outcomes.append(Outcome(strategy=UNROLLED, status="unmeasured", reason=reason))
    if not any(each.family == "chunked" for each in tried):
        reason = f"no chunk between 1 and all of {batch_size} rows"
        outcomes.append(Outcome(strategy=chunked(1), status="unmeasured", reason=reason))
    return tuple(outcomes)


def _power_of_two(number: int) -> int:
    """Returns the largest power of two that is not above `number`; 0 below 1."""
    return 1 << (number.bit_length() - 1) if number >= 1 else 0
