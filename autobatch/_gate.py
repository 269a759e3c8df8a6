"""How much memory a candidate may need, before it runs: a pure function of what is known by then.

The bound itself is in `_bound`; what is measured, and what becomes of what does not fit, in
`_tuner`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

TRUSTED_STEP = 4
"""Memory measured at some rows at once speaks for up to this many times as many."""
RESERVE = 1.25
"""What is foretold from fewer rows is taken this many times."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a candidate was measured to need.

    Attributes:
        rows_at_once: rows that it works on together.
        bound_bytes: what it had been bounded by, arguments included.
        needed_bytes: results and temporaries that it needed.
    """

    rows_at_once: int
    bound_bytes: int
    needed_bytes: int


def predicted_bytes(
    *, bound_bytes: int, rows_at_once: int, argument_bytes: int, known: Iterable[Need]
) -> int:
    """Returns the bytes that a candidate may need: its bound, corrected by fewer rows at once.

    The bound knows nothing of fusion, so it may be far too high; and nothing of what libraries
    keep, so it may be too low. What the next smaller candidate was measured to need corrects it
    both ways: temporaries grow with the rows worked on at once, with some reserve.

    Args:
        bound_bytes: the candidate's bound, arguments included.
        rows_at_once: rows that it works on together.
        argument_bytes: bytes of the arguments.
        known: what other candidates were measured to need.

    >>> small = Need(rows_at_once=4, bound_bytes=8000, needed_bytes=400)
    >>> predicted_bytes(bound_bytes=32000, rows_at_once=16, argument_bytes=100, known=[small])
    2100
    """
    smaller = [each for each in known if each.rows_at_once <= rows_at_once]
    if not smaller:
        return bound_bytes
    nearest = max(smaller, key=lambda each: each.rows_at_once)
    excess = (argument_bytes + nearest.needed_bytes) / max(1, nearest.bound_bytes)
    if excess > 1:
        return int(excess * bound_bytes)
    factor = rows_at_once / max(1, nearest.rows_at_once)
    if factor > TRUSTED_STEP:
        return bound_bytes
    return min(bound_bytes, int(argument_bytes + RESERVE * factor * nearest.needed_bytes))
