"""What a tuning learnt, as data: outcomes and the record of one workload, to and from JSON.

Nothing here decides, measures or touches the disk.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal, cast, get_args

from autobatch._strategies import Strategy

SCHEMA = 2
"""Version of the stored form. Another version is a miss, never an error."""

Status = Literal[
    "measured",  # it ran, and its figures are known
    "ineligible",  # it would not keep vmap's meaning
    "over-memory",  # predicted not to fit, so never run
    "over-compile",  # predicted to compile for longer than allowed, so never compiled
    "out-of-time",  # the tuning's time was up
    "not-worth",  # it could not win at the number of expected calls
    "out-of-memory",  # it ran, and memory did not suffice
    "failed",  # it raised, crashed or did not end while compiling or running
    "wrong-result",  # its output disagrees with the reference
    "unmeasured",  # nothing was tried: forced, estimated, switched off
]
_LARGEST = sys.float_info.max
PeakSource = Literal["measured", "xla", "device"]
Data = Literal["real", "synthetic"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A candidate's measurement, or the reason why it has none. Unknown is None, never 0.

    Attributes:
        strategy: the candidate.
        status: what became of it.
        compile_s: seconds of lowering and compiling, without tracing.
        compile_is_cached: whether the executable came out of JAX's persistent compilation cache;
            `compile_s` is then what compiling had taken when it was put there.
        run_s: median seconds of one call.
        run_mad_s: median absolute deviation of `run_s`, in seconds.
        samples: how many timed samples stand behind `run_s`.
        peak_bytes: memory of one call, arguments included.
        peak_source: where `peak_bytes` is from.
        predicted_bytes: upper bound of `peak_bytes` when it was weighed.
        reason: why it was not measured, or, in a plan, why it was or was not chosen.
    """

    strategy: Strategy
    status: Status
    compile_s: float | None = None
    compile_is_cached: bool = False
    run_s: float | None = None
    run_mad_s: float | None = None
    samples: int | None = None
    peak_bytes: int | None = None
    peak_source: PeakSource | None = None
    predicted_bytes: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A budget resolved on one device: what a search was, or a choice is, bounded by.

    Attributes:
        memory_bytes: most bytes one call may need, arguments included; None where no figure exists.
        memory_is_explicit: whether the user set it (then exceeding it is an error).
        compile_s: most seconds one compile may take.
        tuning_s: most seconds one tuning may take.
        expected_calls: calls over which a compile is amortised.
    """

    memory_bytes: int | None
    memory_is_explicit: bool
    compile_s: float
    tuning_s: float
    expected_calls: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a workload before anything is compiled.

    Attributes:
        argument_bytes: bytes of the arguments.
        mapped_bytes: bytes of those arguments that are mapped.
        output_bytes: bytes of the results.
        working_bytes: most bytes of temporaries alive at once under `vmap`, as bounded.
        equations: of the program of one row, those inside loops and branches counted once.
        depends_on_values: whether a loop or a branch depends on values, so that run time does.
    """

    argument_bytes: int
    mapped_bytes: int
    output_bytes: int
    working_bytes: int
    equations: int
    depends_on_values: bool


@dataclass(frozen=True, kw_only=True)
class Record:
    """Every outcome of one workload, as stored.

    Attributes:
        key: full hex digest of `parts`.
        parts: the named parts of the key, so that a miss can say which one differs.
        name: what the function is called; for people only.
        batch_size: rows of the batch.
        device: the device in words, for people only.
        created: UTC time in ISO 8601.
        facts: what was known before anything was compiled.
        outcomes: one or more for each family of strategies.
        searched: the limits under which the search ran.
        noise: relative difference of two measurements of one program; None if there is only one.
        load: share of the cores that other processes took from it; None where nobody knows.
        tuned_in_s: wall seconds that the tuning took.
        data: whether it was measured on the caller's arrays or on stand-ins.
    """

    key: str
    parts: Mapping[str, Any] = field(hash=False)
    name: str
    batch_size: int
    device: str
    created: str
    facts: Facts
    outcomes: tuple[Outcome, ...]
    searched: Limits
    noise: float | None
    tuned_in_s: float
    load: float | None = None
    data: Data = "real"

    @property
    def is_derivative(self) -> bool:
        """Whether it is about the value and the pullback of a call, and not the call itself."""
        return self.parts.get("derivative", "none") != "none"


def to_json(record: Record) -> str:
    """Returns `record` as JSON text of schema `SCHEMA`."""
    return json.dumps({"schema": SCHEMA, **to_data(record)}, sort_keys=True, allow_nan=False)


def to_data(record: Record) -> dict[str, Any]:
    """Returns `record` as plain JSON data; strategies stand as text."""
    data = asdict(record)
    for outcome in data["outcomes"]:
        outcome["strategy"] = str(Strategy(**outcome["strategy"]))
    return data


def from_json(text: str) -> Record:
    """Returns the record that `to_json` wrote.

    Raises:
        ValueError: the text is damaged, foreign or of another schema. Every field is checked,
            since the text may be anybody's.
    """
    try:
        data = _checked("record", json.loads(text, parse_constant=_refused), dict)
        schema = data.pop("schema", None)
        if type(schema) is not int or schema != SCHEMA:
            raise ValueError(f"not a record of schema {SCHEMA}")
        return from_data(data)
    except RecursionError:
        raise ValueError("not a record: nested too deeply") from None


def from_data(data: Mapping[str, Any]) -> Record:
    """Returns the record that `to_data` gave.

    Raises:
        ValueError: it is no record. Every field is checked, since the data may be anybody's.
    """
    _known(data, Record)
    outcomes = _checked("outcomes", data.get("outcomes"), list)
    return Record(
        key=_checked("key", data.get("key"), str),
        parts=_parts(_checked("parts", data.get("parts"), dict)),
        name=_checked("name", data.get("name"), str),
        batch_size=_number("batch_size", data.get("batch_size"), int),
        device=_checked("device", data.get("device"), str),
        created=_checked("created", data.get("created"), str),
        facts=_facts(_checked("facts", data.get("facts"), dict)),
        outcomes=tuple(_outcome(_checked("outcome", each, dict)) for each in outcomes),
        searched=_limits(_checked("searched", data.get("searched"), dict)),
        noise=_number("noise", data.get("noise"), float, optional=True),
        tuned_in_s=_number("tuned_in_s", data.get("tuned_in_s"), float),
        load=_number("load", data.get("load"), float, optional=True),
        data=_one_of("data", data.get("data"), Data),
    )


def created_at(record: Record) -> datetime | None:
    """Returns when `record` was made, or None where `created` is no time: nothing checks it."""
    try:
        created = datetime.fromisoformat(record.created)
    except ValueError:
        return None
    return created if created.tzinfo is not None else created.replace(tzinfo=UTC)


def _refused(constant: str) -> None:
    raise ValueError(f"not a record: {constant} is no number")


def _parts(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts of a key: numbers, texts, and lists of them."""
    for name, value in data.items():
        values = cast(list[Any], value) if isinstance(value, list) else [value]
        if not all(_is_plain(each) for each in values):
            raise ValueError(f"not a record: part {name!r:.80} is {value!r:.80}")
    return data


def _is_plain(value: Any) -> bool:
    """Returns whether `value` is one that JSON holds; 1e999 is read as infinity."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


def _outcome(data: dict[str, Any]) -> Outcome:
    _known(data, Outcome)
    reason, source = data.get("reason"), data.get("peak_source")
    return Outcome(
        strategy=Strategy.parse(_checked("strategy", data.get("strategy"), str)),
        status=_one_of("status", data.get("status"), Status),
        compile_s=_number("compile_s", data.get("compile_s"), float, optional=True),
        compile_is_cached=_checked("compile_is_cached", data.get("compile_is_cached"), bool),
        run_s=_number("run_s", data.get("run_s"), float, optional=True),
        run_mad_s=_number("run_mad_s", data.get("run_mad_s"), float, optional=True),
        samples=_number("samples", data.get("samples"), int, optional=True),
        peak_bytes=_number("peak_bytes", data.get("peak_bytes"), int, optional=True),
        peak_source=None if source is None else _one_of("peak_source", source, PeakSource),
        predicted_bytes=_number("predicted_bytes", data.get("predicted_bytes"), int, optional=True),
        reason=None if reason is None else _checked("reason", reason, str),
    )


def _facts(data: dict[str, Any]) -> Facts:
    _known(data, Facts)
    counts = {
        each.name: _number(each.name, data.get(each.name), int)
        for each in fields(Facts)
        if each.name != "depends_on_values"
    }
    depends = _checked("depends_on_values", data.get("depends_on_values"), bool)
    return Facts(**counts, depends_on_values=depends)


def _limits(data: dict[str, Any]) -> Limits:
    _known(data, Limits)
    return Limits(
        memory_bytes=_number("memory_bytes", data.get("memory_bytes"), int, optional=True),
        memory_is_explicit=_checked("memory_is_explicit", data.get("memory_is_explicit"), bool),
        compile_s=_number("compile_s", data.get("compile_s"), float),
        tuning_s=_number("tuning_s", data.get("tuning_s"), float),
        expected_calls=_number("expected_calls", data.get("expected_calls"), int),
    )


def _known(data: Mapping[str, Any], cls: type) -> None:
    unknown = set(data) - {each.name for each in fields(cls)}
    if unknown:
        raise ValueError(f"not a record: unknown fields {sorted(unknown)!s:.80}")


def _checked(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"not a record: {name} must be {kind.__name__}, got {value!r:.80}")
    return value


def _number(name: str, value: Any, kind: type, *, optional: bool = False) -> Any:
    if value is None:
        if optional:
            return None
        raise ValueError(f"not a record: {name} is missing")
    accepted = isinstance(value, int) if kind is int else isinstance(value, int | float)
    if isinstance(value, bool) or not accepted or not 0 <= value <= _LARGEST:
        raise ValueError(
            f"not a record: {name} must be a {kind.__name__} >= 0 and finite, got {value!r:.80}"
        )
    return kind(value)


def _one_of(name: str, value: Any, choices: Any) -> Any:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"not a record: {name} must be one of {allowed}, got {value!r:.80}")
    return value
