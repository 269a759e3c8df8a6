"""Budget, and the choice of a plan from a record: pure functions over frozen data.

The same record under the same limits gives the same plan in every process. Nothing here
measures, reads the disk or asks the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from autobatch._errors import NoViableStrategyError
from autobatch._record import Limits, Outcome, Record, Status
from autobatch._strategies import FAMILIES, MAP, VMAP, Strategy
from autobatch._units import format_bytes, format_factor, format_seconds

Source = Literal["tuned", "record", "nearest", "synthetic", "estimate", "forced", "off", "sole"]

_USABLE: tuple[Status, ...] = (
    "measured",
    "over-memory",
    "over-compile",
    "out-of-time",
    "not-worth",
)
"""What became of a strategy that may serve, if its memory fits."""

LEAST_GAIN = 0.03
"""A strategy replaces `vmap` only where it gains more than this share, or more than the noise."""

DEFAULT_MEMORY_SHARE = 0.9
"""Share of the free memory (and of this call's arguments) that the default limit allows."""

_UNITS = {"B": 1, "": 1}
for _power, _letter in enumerate("kMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter.upper()}iB"] = 1024**_power
_MOST_BYTES = 2**63
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits on what a plan may need and on what tuning may cost.

    Args:
        memory: most memory one call may need, arguments and results included: bytes, `"2GiB"`,
            `"80%"` of the device, or None for 90 % of what is free when the call is tuned.
        compile_s: most seconds one compile may take.
        tuning_s: most seconds one tuning may take; at most one compile or run overruns it.
        expected_calls: calls that share the cost of one compile. A large number favours run
            time, a small one compile time.

    Raises:
        ValueError: a field is out of its range; the message names what is allowed.

    >>> Budget(memory="1.5GiB").memory
    '1.5GiB'
    """

    memory: int | str | None = None
    compile_s: float = 60.0
    tuning_s: float = 60.0
    expected_calls: int = 1000

    def __post_init__(self) -> None:
        parse_memory(self.memory)
        for name, least, most in (
            ("compile_s", 0, 1e9),
            ("tuning_s", 0, 1e9),
            ("expected_calls", 1, 1e15),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and least <= value <= most):
                allowed = f"a number from {least} to {most:g}"
                raise ValueError(f"Budget.{name} must be {allowed}; got {value!r:.80}")
        if int(self.expected_calls) != self.expected_calls:
            raise ValueError(f"Budget.expected_calls must be whole; got {self.expected_calls!r}")


def parse_memory(memory: int | str | None) -> int | float | None:
    """Returns bytes as `int`, a share of the device as `float` in (0, 1], or None.

    Raises:
        ValueError: `memory` is none of the forms that `Budget` takes.

    >>> parse_memory("2GiB"), parse_memory("80%"), parse_memory(None)
    (2147483648, 0.8, None)
    """
    allowed = "memory must be a positive number of bytes, '2GiB', '500MB', '80%' or None"
    if memory is None:
        return None
    if isinstance(memory, int) and not isinstance(memory, bool) and 0 < memory < _MOST_BYTES:
        return memory
    match = _MEMORY.fullmatch(memory) if isinstance(memory, str) else None
    if match:
        number, unit = float(match[1]), match[2]
        if unit == "%" and 0 < number <= 100:
            return number / 100
        if unit in _UNITS and 1 <= number * _UNITS[unit] < _MOST_BYTES:
            return int(number * _UNITS[unit])
    raise ValueError(f"{allowed}; got {memory!r:.80}")


def resolve(
    budget: Budget, *, free_bytes: int | None, total_bytes: int | None, argument_bytes: int
) -> Limits:
    """Returns the limits that `budget` means on a device with this much memory.

    Args:
        budget: the user's limits.
        free_bytes: bytes free on the device now; None if it gives no figure.
        total_bytes: bytes of the device; None if it gives no figure.
        argument_bytes: bytes of this call's arguments, which already lie on the device.

    Raises:
        ValueError: the budget is a share of a device that does not say how much it has.
    """
    memory = parse_memory(budget.memory)
    limit: int | None
    if memory is None:
        known = free_bytes is not None
        limit = int(DEFAULT_MEMORY_SHARE * (free_bytes + argument_bytes)) if known else None
    elif isinstance(memory, int):
        limit = memory
    elif total_bytes is None:
        raise ValueError(
            f"memory={budget.memory!r} is a share of the device, and this device does not say "
            "how much memory it has; give bytes, as in memory='2GiB'"
        )
    else:
        limit = int(memory * total_bytes)
    return Limits(
        memory_bytes=limit,
        memory_is_explicit=memory is not None,
        compile_s=float(budget.compile_s),
        tuning_s=float(budget.tuning_s),
        expected_calls=int(budget.expected_calls),
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The strategy chosen for one workload, and why.

    Attributes:
        strategy: the chosen strategy; `str(plan.strategy)` is what `strategy=` takes.
        source: how this process first came to it.
        outcomes: every candidate, at least one of each family; what is unknown is None.
        key: full hex digest of the workload; "" where none was built.
    """

    strategy: Strategy
    source: Source
    outcomes: tuple[Outcome, ...]
    key: str


def total_s(outcome: Outcome, expected_calls: int) -> float:
    """Returns `compile_s + expected_calls * run_s`, in seconds; infinite where unknown."""
    if outcome.compile_s is None or outcome.run_s is None:
        return math.inf
    return outcome.compile_s + expected_calls * outcome.run_s


def choose(record: Record, limits: Limits) -> Strategy | None:
    """Returns the strategy with the least total within `limits`, or None if nothing is viable.

    `vmap` stays unless another gains more than the noise. Among those that do, whoever is within
    3 % of the least total is its equal, and equals are told apart by memory, then compile
    time, then a fixed order.
    """
    viable = [each for each in record.outcomes if objection(each, limits) is None]
    if not viable:
        return None
    calls, keep = limits.expected_calls, 1 - margin(record)
    default = next((each for each in viable if each.strategy == VMAP), None)
    bar = math.inf if default is None else keep * total_s(default, calls)
    better = [each for each in viable if each is not default and total_s(each, calls) < bar]
    if not better:
        return VMAP if default is not None else None
    least = min(total_s(each, calls) for each in better)
    equals = [each for each in better if (1 - LEAST_GAIN) * total_s(each, calls) <= least]
    return min(equals, key=_preference).strategy


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The strategy to use, and what the user should be told if it is not a good one."""

    strategy: Strategy
    warning: str | None = None


def decide(record: Record, limits: Limits) -> Decision:
    """Returns the strategy for `limits`, falling back where nothing is viable.

    Raises:
        NoViableStrategyError: nothing fits the memory that the user allows.
    """
    strategy = choose(record, limits)
    if strategy is not None:
        return Decision(strategy=strategy)
    strategy = choose(record, replace(limits, compile_s=math.inf))
    if strategy is not None:
        return Decision(strategy=strategy)
    fallback, least = _fallback(record), smallest(record)
    if least is None or limits.memory_bytes is None:
        return Decision(strategy=fallback)
    if (_need(least) or 0) <= limits.memory_bytes:  # not measured, but it should fit
        own = next((each for each in record.outcomes if each.strategy == fallback), None)
        is_open = own is not None and own.status in ("out-of-time", "measured")
        fits = own is None or (_need(own) or 0) <= limits.memory_bytes
        return Decision(strategy=fallback if is_open and fits else least.strategy)
    count, what = len(record.outcomes), f"`{record.name}` ({record.batch_size} rows)"
    found = "planned" if least.peak_source == "xla" else "measured"
    found = "predicted" if least.peak_bytes is None else found
    message = (
        f"none of {count} candidates for {what} fits memory={format_bytes(limits.memory_bytes)}. "
        f"The smallest {found} peak, arguments included, is {_need(least):,} bytes "
        f"({format_bytes(_need(least))}, {least.strategy})."
    )
    if limits.memory_is_explicit:
        raise NoViableStrategyError(
            f"{message} Raise Budget.memory (or AUTOBATCH_MEMORY), make the function hold "
            "less, or add its results up with out_axes=autobatch.SUM."
        )
    return Decision(
        strategy=least.strategy,
        warning=f"{message} It is used all the same; free memory, or pass fewer rows.",
    )


def margin(record: Record) -> float:
    """Returns the share by which a strategy must beat `vmap`: its noise, at least 3 %.

    Noise is relative to the smaller of two measurements, so one may be `1 + noise` times another.
    Cores that others took are cores that `vmap`, which runs on all of them, had not for itself.
    """
    noise = record.noise or 0.0
    return max(LEAST_GAIN, noise / (1 + noise), min(0.9, record.load or 0.0))


def is_measured(record: Record) -> bool:
    """Returns whether anything was measured at all."""
    return any(each.status == "measured" for each in record.outcomes)


def smallest(record: Record) -> Outcome | None:
    """Returns the outcome with the least known or predicted need, for when nothing fits.

    Strategies that failed are left out, but for the one that is used where nothing else is known.
    """
    fallback = _fallback(record)
    needs = [
        each
        for each in record.outcomes
        if _need(each) is not None and (each.status in _USABLE or each.strategy == fallback)
    ]
    return min(needs, key=lambda each: (_need(each), _preference(each)), default=None)


def _fallback(record: Record) -> Strategy:
    """Returns `vmap`, or `map` where `vmap` might not end."""
    barred = {each.strategy for each in record.outcomes if each.status == "ineligible"}
    return MAP if VMAP in barred else VMAP


def explained(record: Record, limits: Limits, chosen: Strategy) -> tuple[Outcome, ...]:
    """Returns the outcomes of `record`, each with the reason why it is or is not the plan."""
    calls = limits.expected_calls
    winner = next((each for each in record.outcomes if each.strategy == chosen), None)
    best = math.inf if winner is None else total_s(winner, calls)

    def reason(outcome: Outcome) -> str | None:
        why_not = objection(outcome, limits)
        if outcome.strategy == chosen:
            if why_not is not None:
                return f"chosen although {why_not}"
            if limits.memory_bytes is None:
                return "chosen: least total"
            return f"chosen: least total within {format_bytes(limits.memory_bytes)}"
        if why_not is not None:
            return why_not
        total = total_s(outcome, calls)
        if not best or not math.isfinite(best) or not math.isfinite(total):
            return "its total says nothing"
        factor = total / best
        if factor < 1 + margin(record):
            what = "load" if (record.load or 0.0) >= margin(record) else "noise"
            return f"{format_factor(factor)}, within the {what} of {margin(record):.0%}"
        return format_factor(factor)

    return tuple(replace(each, reason=reason(each)) for each in record.outcomes)


def widened(record: Record, limits: Limits) -> frozenset[Status]:
    """Returns what barred candidates of a record, and would not under these limits.

    Of two default limits of memory neither is the wider: they follow what happens to be free. More
    expected calls may make a candidate worth it of which the record says nothing.

    Args:
        record: what was measured, and under which limits.
        limits: the budget now.
    """
    then, memory = record.searched, limits.memory_bytes or 0
    is_explicit = limits.memory_is_explicit or then.memory_is_explicit
    is_wider: dict[Status, bool] = {
        "over-memory": is_explicit and memory > (then.memory_bytes or math.inf),
        "over-compile": limits.compile_s > then.compile_s,
        "out-of-time": limits.tuning_s > then.tuning_s,
        "not-worth": limits.expected_calls > then.expected_calls,
    }
    barred = {each.status for each in record.outcomes} | {"not-worth"}
    return frozenset(each for each in is_wider if is_wider[each] and each in barred)


def without_larger(record: Record, strategy: Strategy) -> Record | None:
    """Returns `record` with a strategy, and those that need as much, marked as out of memory.

    Args:
        record: what was measured.
        strategy: the one that ran out of memory.

    Returns:
        The record, or None if no candidate that needs less was measured.
    """
    needs = {each.strategy: _need(each) or 0 for each in record.outcomes}
    most = needs.get(strategy, 0)
    reason = "ran out of memory when it was called"
    outcomes = tuple(
        replace(each, status="out-of-memory", reason=reason)
        if each.status == "measured" and needs[each.strategy] >= most
        else each
        for each in record.outcomes
    )
    relieved = replace(record, outcomes=outcomes)
    return relieved if is_measured(relieved) else None


def blank(reason: str, strategy: Strategy | None = None) -> tuple[Outcome, ...]:
    """Returns outcomes without figures, for a plan that rests on no measurement."""
    from_families = [
        Strategy(family=each, chunk_size=1 if each == "chunked" else None) for each in FAMILIES
    ]
    strategies: Iterable[Strategy] = from_families
    if strategy is not None:
        strategies = [strategy if each.family == strategy.family else each for each in strategies]
    return tuple(Outcome(strategy=each, status="unmeasured", reason=reason) for each in strategies)


def objection(outcome: Outcome, limits: Limits) -> str | None:
    """Returns why an outcome cannot be the plan under these limits, or None.

    Args:
        outcome: of one candidate.
        limits: the budget.
    """
    if outcome.status == "over-memory" and outcome.predicted_bytes is not None:
        return _not_run(outcome, outcome.predicted_bytes, limits)
    if outcome.status != "measured":
        return outcome.reason or outcome.status
    if outcome.compile_s is None or outcome.run_s is None:
        return "incomplete measurement"
    need = _need(outcome)
    if limits.memory_bytes is not None and need is not None and need > limits.memory_bytes:
        verb = "needs" if outcome.peak_bytes is not None else "may need"
        return f"{verb} {format_bytes(need)} of {format_bytes(limits.memory_bytes)}"
    if outcome.compile_s > limits.compile_s:
        allowed = format_seconds(limits.compile_s)
        return f"compiles for {format_seconds(outcome.compile_s)} of {allowed} allowed"
    return None


def _not_run(outcome: Outcome, need: int, limits: Limits) -> str:
    """Returns why an outcome has no figures; its own words tell of the limit that it met."""
    is_planned = (outcome.reason or "").startswith("would need")
    needs = f"{'would need' if is_planned else 'may need'} {format_bytes(need)}"
    if limits.memory_bytes is None or need <= limits.memory_bytes:
        return f"not run; {needs}, which fits by now"
    return f"{needs} of {format_bytes(limits.memory_bytes)}; not run"


def _need(outcome: Outcome) -> int | None:
    return outcome.predicted_bytes if outcome.peak_bytes is None else outcome.peak_bytes


def _preference(outcome: Outcome) -> tuple[float, float, int, int]:
    return (
        math.inf if outcome.peak_bytes is None else outcome.peak_bytes,
        math.inf if outcome.compile_s is None else outcome.compile_s,
        FAMILIES.index(outcome.strategy.family),
        outcome.strategy.chunk_size or 0,
    )
