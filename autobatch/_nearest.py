"""Records of the same program and row shapes, with another batch size: what they say of this one.

Pure. Nothing that was measured at another batch size counts as measured at this one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from autobatch._digest import digest
from autobatch._gate import RESERVE, TRUSTED_STEP
from autobatch._record import Outcome, Record
from autobatch._strategies import UNROLLED, rows_at_once

_SHAPE = re.compile(r"(.*)\[([\d, ]*)\]")


def family(parts: Mapping[str, Any]) -> str:
    """Returns a digest that only the batch size has no part in.

    >>> one = {"in_axes": [None, 0], "arguments": ["float32[7]", "int32[9, 4]"], "batch_size": 9}
    >>> other = {**one, "arguments": ["float32[7]", "int32[8, 4]"], "batch_size": 8}
    >>> family(one) == family(other)
    True
    """
    arguments, axes = _texts(parts.get("arguments")), _texts(parts.get("in_axes"))
    axes = axes[max(0, len(axes) - len(arguments)) :]  # closed-over arrays come first
    rows = [_row(text, axis) for text, axis in zip(arguments, axes, strict=False)]
    return digest({**parts, "batch_size": None, "arguments": rows})


def nearest(records: Iterable[Record], parts: Mapping[str, Any], batch_size: int) -> Record | None:
    """Returns the record of the same family whose batch size is nearest, or None.

    Args:
        records: those that may do; only measured on real arrays they count.
        parts: the key's parts of the call.
        batch_size: rows of the call.
    """
    own = family(parts)
    alike = [each for each in records if each.data == "real" and family(each.parts) == own]

    def distance(record: Record) -> tuple[float, int]:
        octaves = math.log2(max(1, record.batch_size) / max(1, batch_size))
        return abs(octaves), record.batch_size

    return min(alike, key=distance, default=None)


def resized(
    record: Record, *, key: str, parts: Mapping[str, Any], batch_size: int, argument_bytes: int
) -> Record:
    """Returns what a record foretells for another batch size, to choose a strategy from.

    Run times grow with the rows. Memory is that of the new arguments, of results that grow with the
    rows, and of temporaries that grow with the rows worked on at once, with some reserve; where
    those are many times as many, the bound counts, since a small batch says nothing of a large one.

    Args:
        record: what was measured at another batch size.
        key: the key of the call.
        parts: its parts.
        batch_size: rows of the call, at least 2.
        argument_bytes: bytes of its arguments.
    """
    factor = batch_size / record.batch_size
    facts = replace(
        record.facts,
        argument_bytes=argument_bytes,
        mapped_bytes=int(factor * record.facts.mapped_bytes),
        output_bytes=int(max(1.0, factor) * record.facts.output_bytes),  # sums do not shrink
        working_bytes=int(factor * record.facts.working_bytes),
    )

    def grown(outcome: Outcome, known: int | None) -> int:
        old_rows = max(1, rows_at_once(outcome.strategy, record.batch_size))
        rows = rows_at_once(outcome.strategy, batch_size)
        working = facts.working_bytes * rows // batch_size
        bound = argument_bytes + facts.output_bytes + working
        if known is None or rows > TRUSTED_STEP * old_rows:
            return bound
        held = record.facts.argument_bytes + record.facts.output_bytes
        temporary = max(0, known - held) * rows / old_rows
        return argument_bytes + int(RESERVE * (facts.output_bytes + temporary))

    def foretold(outcome: Outcome) -> Outcome:
        if outcome.run_s is None:
            return outcome
        known = outcome.predicted_bytes if outcome.peak_bytes is None else outcome.peak_bytes
        return replace(
            outcome,
            run_s=factor * outcome.run_s,
            run_mad_s=None,
            peak_bytes=None,
            peak_source=None,
            predicted_bytes=grown(outcome, known),
        )

    # To unroll other rows is another program: its compile time is not known.
    outcomes = [foretold(each) for each in record.outcomes if each.strategy != UNROLLED]
    return replace(
        record,
        key=key,
        parts=parts,
        batch_size=batch_size,
        facts=facts,
        outcomes=tuple(outcomes),
    )


def _texts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _row(text: Any, axis: Any) -> Any:
    """Returns the dtype and shape of one row, where the text is one and the axis is in it."""
    match = _SHAPE.fullmatch(text) if isinstance(text, str) else None
    if match is None or not isinstance(axis, int):
        return text
    sizes = [each for each in match[2].replace(" ", "").split(",") if each]
    return f"{match[1]}{[*sizes[:axis], 'rows', *sizes[axis + 1 :]]}"
