"""Strategies as data: what they are called and how many rows they take at once.

How a strategy is run is in `_mapping`, which may serve a function in `_eligibility`, which one is
tried in `_search`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

Family = Literal["vmap", "map", "chunked", "unrolled"]
FAMILIES: tuple[Family, ...] = get_args(Family)

_PATTERN = re.compile(r"(vmap|map|unrolled|chunked:(-?\d+))(\+remat)?")
ALLOWED = (
    "'vmap', 'map', 'unrolled' or 'chunked:K' with K >= 1 rows, "
    "with '+remat' for derivatives that compute again instead of keeping"
)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to map a function over a batch axis.

    Attributes:
        family: which of the four ways.
        chunk_size: rows per vectorised step (`lax.map` calls it `batch_size`); only for `chunked`.
        remat: whether a derivative computes the values inside a step again, from its inputs,
            instead of keeping those of all steps (`jax.checkpoint`); says nothing elsewhere.

    >>> str(Strategy.parse("chunked:64+remat"))
    'chunked:64+remat'
    """

    family: Family
    chunk_size: int | None = None
    remat: bool = False

    def __post_init__(self) -> None:
        if (self.chunk_size is not None) != (self.family == "chunked"):
            raise ValueError(f"only 'chunked' has a chunk size, and it needs one; got {self!r}")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(f"a chunk holds at least 1 row; got chunked:{self.chunk_size}")

    def __str__(self) -> str:
        name = self.family if self.chunk_size is None else f"chunked:{self.chunk_size}"
        return f"{name}+remat" if self.remat else name

    @classmethod
    def parse(cls, text: object) -> Strategy:
        """Returns the strategy that `str` wrote as `text`.

        Raises:
            ValueError: `text` is no strategy; the message names those that are.
        """
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"strategy must be {ALLOWED}; got {text!r}")
        chunk_size = None if match[2] is None else int(match[2])
        family = cast(Family, match[1] if chunk_size is None else "chunked")
        return cls(family=family, chunk_size=chunk_size, remat=match[3] is not None)


VMAP = Strategy(family="vmap")
MAP = Strategy(family="map")
UNROLLED = Strategy(family="unrolled")


def rematerialised(strategy: Strategy) -> Strategy:
    """Returns the strategy whose derivative computes again what a step had computed."""
    return replace(strategy, remat=True)


def chunked(chunk_size: int) -> Strategy:
    """Returns the strategy of vectorised steps of `chunk_size` rows."""
    return Strategy(family="chunked", chunk_size=chunk_size)


def rows_at_once(strategy: Strategy, batch_size: int) -> int:
    """Returns how many rows are worked on together, which is what memory follows.

    >>> rows_at_once(chunked(64), 100)
    50
    """
    match strategy.family:
        case "vmap" | "unrolled":
            return batch_size
        case "map":
            return min(1, batch_size)
        case "chunked":
            assert strategy.chunk_size is not None
            return balanced_chunk(batch_size, strategy.chunk_size)


def balanced_chunk(batch_size: int, chunk_size: int) -> int:
    """Returns the rows per step when the same number of steps shares the rows evenly.

    The last step overlaps the one before it, so evening the steps out is what keeps the
    rows computed twice few: 7 rows in chunks of 4 are 4 + 4 with one row in common.

    >>> balanced_chunk(1009, 100)
    92
    """
    steps = -(-batch_size // chunk_size)
    return -(-batch_size // steps) if steps else 0
