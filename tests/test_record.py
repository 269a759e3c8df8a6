"""A record survives JSON, and text that is no record is a ValueError, whatever is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import arbitrary
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import make_outcome, make_record

from autobatch._record import SCHEMA, Record, created_at, from_json, to_json

GOOD = to_json(make_record())


def changed(path: tuple[Any, ...], value: Any) -> str:
    """Returns a good record's JSON with another value at a path."""
    data = json.loads(GOOD)
    node = data
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return json.dumps(data)


@given(arbitrary.records())
def test_record_comes_back_equal(record: Record) -> None:
    text = to_json(record)
    assert from_json(text) == record
    assert to_json(from_json(text)) == text


def test_text_is_plain_json_of_this_schema() -> None:
    data = json.loads(GOOD, parse_constant=pytest.fail)
    assert data["schema"] == SCHEMA
    assert [each["strategy"] for each in data["outcomes"]] == [
        *("vmap", "map", "chunked:50", "unrolled")
    ]
    assert GOOD.isascii()


def test_unknown_stays_none() -> None:
    outcome = make_outcome("map", status="failed", reason=None)
    (back,) = from_json(to_json(make_record(outcomes=(outcome,)))).outcomes
    assert (back.compile_s, back.run_s, back.peak_bytes, back.reason) == (None,) * 4


@pytest.mark.parametrize("figure", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_written(figure: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(make_record(tuned_in_s=figure))


@pytest.mark.parametrize(
    ("text", "hour"),
    [
        ("2026-07-01T12:00:00+00:00", 12),
        ("2026-07-01T12:00:00+02:00", 10),
        ("2026-07-01T12:00:00", 12),
        ("2026-07-01", 0),
        ("", None),
        ("yesterday", None),
        ("2026-07-32", None),
        ("\ud800", None),
    ],
)
def test_time_of_a_record(text: str, hour: int | None) -> None:
    expected = None if hour is None else datetime(2026, 7, 1, hour, tzinfo=UTC)
    assert created_at(make_record(created=text)) == expected


# Damage

WRONG = [None, True, -1, 1.5, "text", [], {}, [1], {"a": 1}, float("nan"), float("inf"), -0.5]
ALLOWED: dict[str, set[str]] = {
    "key": {"text"},
    "parts": {"dict"},
    "name": {"text"},
    "device": {"text"},
    "created": {"text"},
    "noise": {"nothing", "number"},
    "tuned_in_s": {"number"},
    "batch_size": set(),
    "schema": set(),
    "outcomes": {"list"},
    "searched": set(),
    "searched memory_bytes": {"nothing"},
    "searched memory_is_explicit": {"flag"},
    "searched compile_s": {"number"},
    "searched tuning_s": {"number"},
    "searched expected_calls": set(),
    "outcomes 0": set(),
    "outcomes 0 strategy": set(),
    "outcomes 0 status": set(),
    "outcomes 0 compile_s": {"nothing", "number"},
    "outcomes 0 run_s": {"nothing", "number"},
    "outcomes 0 run_mad_s": {"nothing", "number"},
    "outcomes 0 samples": {"nothing"},
    "outcomes 0 peak_bytes": {"nothing"},
    "outcomes 0 peak_source": {"nothing"},
    "outcomes 0 predicted_bytes": {"nothing"},
    "outcomes 0 reason": {"nothing", "text"},
}


def kind(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "flag"
        case 1.5:
            return "number"
        case str():
            return "text"
        case []:
            return "list"
        case dict():
            return "dict"
    return "never allowed"


@pytest.mark.parametrize("place", ALLOWED)
def test_each_field_takes_its_kind_only(place: str) -> None:
    path = tuple(int(each) if each.isdigit() else each for each in place.split())
    refused = [each for each in WRONG if kind(each) not in ALLOWED[place]]
    assert refused
    for value in refused:
        with pytest.raises(ValueError):  # noqa: PT011  the text is JSON's own for some values
            from_json(changed(path, value))


@pytest.mark.parametrize("place", ["", "searched", "outcomes 0"])
@pytest.mark.parametrize("value", [None, 1, "x"])
def test_field_of_another_version_is_refused(place: str, value: Any) -> None:
    path = tuple(int(each) if each.isdigit() else each for each in place.split())
    with pytest.raises(ValueError, match="unknown field"):
        from_json(changed((*path, "invented"), value))


OPTIONAL = {
    *("noise", "load", "compile_s", "run_s", "run_mad_s", "samples"),
    *("peak_bytes", "peak_source", "predicted_bytes", "reason", "memory_bytes"),
}


def fields() -> Iterator[tuple[Any, ...]]:
    data = json.loads(GOOD)
    yield from ((each,) for each in data)
    yield from (("searched", each) for each in data["searched"])
    yield from (("facts", each) for each in data["facts"])
    yield from (("outcomes", 0, each) for each in data["outcomes"][0])


@pytest.mark.parametrize("path", [each for each in fields() if each[-1] not in OPTIONAL])
def test_missing_field_is_refused(path: tuple[Any, ...]) -> None:
    data = json.loads(GOOD)
    node = data
    for step in path[:-1]:
        node = node[step]
    del node[path[-1]]
    with pytest.raises(ValueError, match="not a record"):
        from_json(json.dumps(data))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param(GOOD[:-1], id="cut off"),
        pytest.param(GOOD + GOOD, id="twice"),
        pytest.param("null", id="null"),
        pytest.param("[]", id="list"),
        pytest.param('"record"', id="text"),
        pytest.param("\x00\x01", id="binary"),
        pytest.param(changed(("schema",), SCHEMA + 1), id="next schema"),
        pytest.param(changed(("schema",), True), id="true schema"),
        pytest.param(changed(("outcomes", 0, "strategy"), "chunked:0"), id="empty chunk"),
        pytest.param(changed(("outcomes", 0, "strategy"), "chunked:" + "9" * 5000), id="long"),
        pytest.param(changed(("batch_size",), 10**400), id="integer beyond floats"),
        pytest.param(changed(("noise",), 10**400), id="float beyond floats"),
        pytest.param(GOOD.replace('"batch_size": 200', '"batch_size": 1e999'), id="infinite"),
        pytest.param(GOOD.replace('"batch_size": 200', '"batch_size": ' + "9" * 5000), id="digits"),
        pytest.param(changed(("parts", "x"), float("nan")), id="NaN among the parts"),
        pytest.param(changed(("parts", "x"), [float("inf")]), id="infinity among the parts"),
        pytest.param(GOOD.replace('"jax": "0.12.0"', '"jax": 1e999'), id="1e999 among the parts"),
    ],
)
def test_damaged_or_foreign_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the text is JSON's own for some of these
        from_json(text)


def parsed_or_refused(text: str) -> None:
    """What is accepted is a record in every respect; anything else is a ValueError."""
    try:
        record = from_json(text)
    except ValueError:
        return
    assert from_json(to_json(record)) == record


# Around these depths first the JSON parser, then the printing of what it gave, fail: in Python's
# own recursion limit until 3.11, in that of C from 3.12.
DEPTHS = [*range(900, 1000), *range(1000, 12000, 250), 100_000]


@pytest.mark.parametrize("place", ["", "key", "noise", "parts", "outcomes", "searched"])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_deep_nesting_is_refused(place: str, brackets: str) -> None:
    opening, closing = ("[", "]") if brackets == "[]" else ('{"x":', "}")
    for depth in DEPTHS:
        nested = opening * depth + "0" + closing * depth
        text = changed((place,), "HERE").replace('"HERE"', nested) if place else nested
        parsed_or_refused(text)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**63, 10**400])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["vmap", "map", "chunked:-1", "chunked:1e3", "measured", "failed"])
)
TREES = st.recursive(
    LEAVES,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each),
    max_leaves=6,
)


@st.composite
def mutated_data(draw: st.DrawFn) -> str:
    """Draws a record's JSON in which any node at all is replaced."""
    data = json.loads(to_json(draw(st.just(make_record()) | arbitrary.records())))
    node, path = data, ()
    while isinstance(node, dict | list) and node and (not path or draw(st.booleans())):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        path = (*path, draw(st.sampled_from(keys)))
        parent, node = node, node[path[-1]]
    parent[path[-1]] = draw(TREES)  # pyright: ignore[reportPossiblyUnbound]
    return json.dumps(data)


@given(mutated_data())
def test_any_value_in_any_place_is_accepted_whole_or_refused(text: str) -> None:
    parsed_or_refused(text)


@given(st.integers(0, len(GOOD)), st.integers(0, 12), st.text(max_size=4))
def test_any_damage_of_the_text_is_accepted_whole_or_refused(
    start: int, length: int, inserted: str
) -> None:
    parsed_or_refused(GOOD[:start] + inserted + GOOD[start + length :])


@given(st.text() | TREES.map(json.dumps))
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the text is JSON's own for some of these
        from_json(text)
