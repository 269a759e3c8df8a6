"""The table that explains a plan, as text. Nothing is measured, decided or printed here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autobatch._choose import Plan, total_s
from autobatch._record import Limits, Outcome, Record
from autobatch._strategies import VMAP, Strategy
from autobatch._units import format_bytes, format_factor, format_seconds

LOUD_NOISE = 0.10
"""Two measurements of the same program that differ by more than this share are worth a line."""

_UNMEASURED = {
    "estimate": "estimated, nothing was measured",
    "forced": "forced with strategy=",
    "off": "tuning is off",
    "sole": "nothing to choose",
}


def explain(record: Record, plan: Plan, limits: Limits) -> str:
    """Returns the table of a plan that rests on `record`: the plan first, then by total.

    Args:
        record: what was measured.
        plan: what was chosen from it, with a reason for every candidate.
        limits: the limits under which it was chosen; they give the calls of the total.
    """
    jax = record.parts.get("jax")
    title = _title(
        record.name,
        _rows(record.batch_size),
        record.device,
        f"jax {jax}" if isinstance(jax, str) else "",
        _origin(record, plan),
        f"key {plan.key[:8]}" if plan.key else "",
    )
    calls = limits.expected_calls

    def place(outcome: Outcome) -> tuple[bool, float]:
        return outcome.strategy != plan.strategy, total_s(outcome, calls)

    outcomes = sorted(plan.outcomes, key=place)
    medians = [format_seconds(each.run_s) for each in outcomes]
    width = max(map(len, medians), default=0)
    rows = [
        (
            _marked(outcome, plan),
            format_seconds(outcome.compile_s) + (" c" if outcome.compile_is_cached else ""),
            f"{median:{width}}{_spread(outcome)}",
            _peak(outcome),
            _total(outcome, calls),
            _note(outcome, plan),
        )
        for outcome, median in zip(outcomes, medians, strict=True)
    ]
    heading = ("  strategy", "compile", "run", "peak", f"total at {calls:,} calls", "")
    lines = [title, *_layout([heading, *rows])]
    if any(each.peak_source == "xla" for each in outcomes):
        lines.append("   * as XLA plans it, not measured")
    if any(each.compile_is_cached for each in outcomes):
        lines.append("   c out of JAX's compilation cache: the time that it had taken before")
    if record.facts.depends_on_values:
        lines.append(
            "   measured on these values, on which loops or branches depend; "
            "name= keeps records of other data apart"
        )
    if record.noise is not None and record.noise > LOUD_NOISE:
        lines.append(f"   noisy: two measurements of one program differ by {record.noise:.0%}")
    if record.load is not None and record.load > LOUD_NOISE:
        lines.append(f"   noisy: other processes took {record.load:.0%} of the cores")
    return "\n".join(lines)


def summary(record: Record, chosen: Strategy | None, limits: Limits) -> str:
    """Returns one line about a tuning, for the log.

    Args:
        record: what was measured.
        chosen: the strategy chosen from it, or None if none is viable.
        limits: the limits under which it was chosen.
    """
    totals = {each.strategy: total_s(each, limits.expected_calls) for each in record.outcomes}
    gain = ""
    if chosen not in (None, VMAP) and math.isfinite(totals.get(VMAP, math.inf)):
        gain = f", in all {format_factor(totals[VMAP] / totals[chosen])} faster than vmap"
    where = f"{record.batch_size} rows, {record.device}"
    took = format_seconds(record.tuned_in_s)
    verdict = f"{chosen or 'nothing viable'}{gain}"
    return f"autobatch: tuned `{record.name}` ({where}) in {took}: {verdict}"


def announcement(name: str, batch_size: int, seconds: float) -> str:
    """Returns what to say before a long tuning, for the log.

    Args:
        name: what is tuned.
        batch_size: rows of the batch.
        seconds: that it may take.
    """
    return (
        f"autobatch: tuning `{name}` ({_rows(batch_size)}) may take {format_seconds(seconds)} or "
        "more, once; tune ahead with `.tune(...)` or `autobatch tune`, or bound it with "
        "Budget(tuning_s=...)"
    )


def explain_unmeasured(
    plan: Plan, *, name: str, batch_size: int, device: str, versions: str
) -> str:
    """Returns the table of a plan that rests on no measurement.

    Args:
        plan: the plan, with a reason for every candidate.
        name: what the function is called.
        batch_size: rows of the batch.
        device: the device in words.
        versions: the software in words, as in "jax 0.12.0".
    """
    origin = _UNMEASURED.get(plan.source, plan.source)
    key = f"key {plan.key[:8]}" if plan.key else ""
    outcomes = sorted(plan.outcomes, key=lambda each: each.strategy != plan.strategy)
    rows = [(_marked(each, plan), _peak(each), _note(each, plan)) for each in outcomes]
    title = _title(name, _rows(batch_size), device, versions, origin, key)
    return "\n".join([title, *_layout([("  strategy", "peak", ""), *rows])])


def printable(text: str) -> str:
    r"""Returns `text` with what could steer a terminal replaced: a record may be anybody's.

    >>> printable("loss\x1b[2J")
    'loss?[2J'
    """
    return "".join(each if each.isprintable() else "?" for each in text)


def _title(*parts: str) -> str:
    return "   ".join(printable(each) for each in parts if each)


def _rows(batch_size: int) -> str:
    return "1 row" if batch_size == 1 else f"{batch_size} rows"


def _origin(record: Record, plan: Plan) -> str:
    match plan.source:
        case "tuned":
            return f"tuned in {format_seconds(record.tuned_in_s)}"
        case "synthetic":
            return f"tuned on made-up arrays in {format_seconds(record.tuned_in_s)}"
        case "nearest":
            return f"from the nearest record, of {record.created}"
        case _:
            return f"from the record of {record.created}"


def _marked(outcome: Outcome, plan: Plan) -> str:
    return f"{'>' if outcome.strategy == plan.strategy else ' '} {outcome.strategy}"


def _spread(outcome: Outcome) -> str:
    if not outcome.run_s or outcome.run_mad_s is None:
        return ""
    return f" +-{100 * outcome.run_mad_s / outcome.run_s:.0f} %"


def _peak(outcome: Outcome) -> str:
    if outcome.peak_bytes is None and outcome.predicted_bytes is not None:
        return f"<= {format_bytes(outcome.predicted_bytes)}"
    return format_bytes(outcome.peak_bytes) + ("*" if outcome.peak_source == "xla" else "")


def _total(outcome: Outcome, calls: int) -> str:
    known = outcome.compile_s is not None and outcome.run_s is not None
    return format_seconds(total_s(outcome, calls) if known else None)


def _note(outcome: Outcome, plan: Plan) -> str:
    """Returns the reason, and for chunks that count what JAX's own function calls their size."""
    reason = printable(outcome.reason or "")
    chunk_size = outcome.strategy.chunk_size
    if chunk_size is None or (outcome.run_s is None and outcome.strategy != plan.strategy):
        return reason
    return f"{reason}  (lax.map batch_size={chunk_size})".lstrip()


def _layout(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" " + "   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
