"""A document gives back its records or is refused whole, and of two records one stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import arbitrary
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import make_limits, make_outcome, make_record

from autobatch import _exchange
from autobatch._digest import digest
from autobatch._exchange import from_document, supersedes, to_document
from autobatch._record import SCHEMA, Record


def keyed(record: Record) -> Record:
    """Returns `record` under the key that its parts have."""
    return replace(record, key=digest(record.parts))


ONE, OTHER = (keyed(make_record(parts={"jax": each, "jaxlib": each})) for each in ("1", "2"))
GOOD = to_document([ONE, OTHER])

# The document


@given(st.lists(arbitrary.records().map(keyed), unique_by=lambda each: each.key, max_size=3))
def test_records_come_back_equal(records: list[Record]) -> None:
    document = to_document(records)
    assert from_document(document.encode()) == sorted(records, key=lambda each: each.key)
    assert to_document(reversed(records)) == document


def test_document_is_plain_json_with_a_line_for_each_record() -> None:
    data = json.loads(GOOD, parse_constant=pytest.fail)
    assert set(data) == {"autobatch-records", "records"}
    assert data["autobatch-records"] == SCHEMA
    assert GOOD.isascii()
    assert len(GOOD.splitlines()) == 4


@pytest.mark.parametrize(
    "overrides", [{"key": "0" * 64}, {"created": "yesterday"}, {"parts": {"x": float("inf")}}]
)
def test_what_would_be_refused_is_not_written(overrides: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"digest of its parts|the time of|not JSON"):
        to_document([OTHER, replace(ONE, **overrides)])


def test_large_document_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_exchange, "MOST_BYTES", len(GOOD))
    assert to_document([ONE, OTHER]) == GOOD
    assert from_document(GOOD.encode())
    monkeypatch.setattr(_exchange, "MOST_BYTES", len(GOOD) - 1)
    with pytest.raises(ValueError, match=r"the records together are more than .* KiB"):
        to_document([ONE, OTHER])
    with pytest.raises(ValueError, match=r"^more than .* KiB"):
        from_document(GOOD.encode())


def changed(change: Callable[[Any], Any]) -> bytes:
    """Returns the good document after `change` was made to its data, or to a copy it returns."""
    data = json.loads(GOOD)
    return json.dumps(change(data) or data).encode()


def other_schema(data: Any) -> Any:
    # What stands in a document of another schema may look like anything.
    return {"autobatch-records": SCHEMA + 1, "records": 3, "more": None}


def set_record(**values: Any) -> Callable[[Any], Any]:
    return lambda data: data["records"][1].update(values)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        pytest.param(b"", "Expecting value", id="empty"),
        pytest.param(GOOD[:-4].encode(), "Expecting", id="cut off"),
        pytest.param(GOOD.encode() * 2, "Extra data", id="twice"),
        pytest.param(b"\x80\x04K\x01.", "can't decode", id="pickle"),
        pytest.param(GOOD.encode("utf-16"), "can't decode", id="other encoding"),
        pytest.param(b"[]", "not an export", id="list"),
        pytest.param(b'{"records": []}', "not an export", id="no schema"),
        pytest.param(
            changed(other_schema), f"schema {SCHEMA + 1}, where {SCHEMA} is", id="other schema"
        ),
        pytest.param(
            changed(lambda data: {**data, "autobatch-records": True}), "schema True", id="true"
        ),
        pytest.param(changed(lambda data: {**data, "more": 1}), "not an export", id="more"),
        pytest.param(changed(lambda data: {**data, "records": {}}), "not an export", id="no list"),
        pytest.param(changed(lambda data: {**data, "records": [[]]}), "record 1: not", id="row"),
        pytest.param(changed(set_record(schema=SCHEMA)), "record 2: .*unknown", id="schema inside"),
        pytest.param(changed(set_record(batch_size=-1)), "record 2: .*batch_size", id="field"),
        pytest.param(changed(set_record(created="now")), "record 2: the time of", id="time"),
        pytest.param(changed(set_record(key="0" * 64)), "record 2: the key .*digest", id="key"),
        pytest.param(changed(set_record(parts={"jax": "9"})), "record 2: the key", id="parts"),
        pytest.param(changed(set_record(parts={"x": {}})), "record 2: not a record", id="nested"),
        pytest.param(
            GOOD.replace('"jax": "1"', '"jax": 1e999').encode(), "not a record: part", id="infinite"
        ),
        pytest.param(
            GOOD.replace('"jax": "1"', '"jax": NaN').encode(), "not a record: part", id="NaN"
        ),
        pytest.param(GOOD.replace("200", "9" * 5000).encode(), "digits", id="digits"),
    ],
)
def test_damaged_or_foreign_document_is_refused_whole(document: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        from_document(document)


@pytest.mark.parametrize(
    "place", ["", '{"autobatch-records": ', f'{{"autobatch-records": {SCHEMA}, "x":']
)
@pytest.mark.parametrize("depth", [*range(900, 1000, 7), 100_000])
def test_deep_nesting_is_refused(place: str, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for text in (f"{place}{nested}{'}' if place else ''}", GOOD.replace('"1"', nested, 1)):
        with pytest.raises(ValueError, match=r"deep|not a|schema|export|record"):
            from_document(text.encode())


def test_reason_is_short() -> None:
    for name in ("x" * 10_000, "\x1b" * 10_000):
        for values in ({name: 1}, {"parts": {name: {}}}, {"created": name}, {"key": name}):
            with pytest.raises(ValueError, match="record 2") as caught:
                from_document(changed(set_record(**values)))
            assert len(str(caught.value)) < 300
            assert str(caught.value).isprintable()


@given(st.integers(0, len(GOOD)), st.integers(0, 12), st.text(max_size=4))
def test_any_damage_is_accepted_whole_or_refused(start: int, length: int, inserted: str) -> None:
    text = GOOD[:start] + inserted + GOOD[start + length :]
    try:
        records = from_document(text.encode())
    except ValueError:
        return
    assert all(each == keyed(each) for each in records)


# Which one stays

NOW, LATER = "2026-07-01T12:00:00+00:00", "2026-07-01T14:00:00+02:00"
LATEST = "2026-07-01T14:00:01+02:00"
WIDEST = {"expected_calls": 2000, "tuning_s": 70.0, "memory_bytes": None, "compile_s": 70.0}
FEW, MANY = (make_outcome("vmap"),), (make_outcome("vmap"), make_outcome("map"))
FAILED = (make_outcome("vmap"), make_outcome("map", status="failed"))


def made(created: str = NOW, **overrides: Any) -> Record:
    return make_record(created=created, **overrides)


@pytest.mark.parametrize(
    ("more", "less"),
    [
        pytest.param(
            made(outcomes=FEW),
            made(LATEST, data="synthetic", searched=make_limits(**WIDEST)),
            id="real arrays before all else",
        ),
        *(
            pytest.param(
                made(outcomes=FEW, searched=make_limits(**{name: value})),
                made(LATEST, outcomes=MANY),
                id=f"wider {name} before more candidates",
            )
            for name, value in WIDEST.items()
        ),
        pytest.param(
            made(outcomes=MANY, searched=make_limits(tuning_s=70.0, compile_s=50.0)),
            made(LATEST, outcomes=FEW),
            id="neither wider: more candidates",
        ),
        pytest.param(made(outcomes=MANY), made(LATEST, outcomes=FAILED), id="measured count"),
        pytest.param(made(LATEST), made(NOW), id="newer"),
        pytest.param(made("2026-07-01T12:00:01"), made(NOW), id="newer, in UTC unless it says"),
        pytest.param(made(NOW), made("yesterday"), id="no time is the oldest"),
    ],
)
def test_order_of_reasons(more: Record, less: Record) -> None:
    assert supersedes(more, less)
    assert not supersedes(less, more)


def test_of_equals_the_one_that_is_there_stays() -> None:
    assert not supersedes(made(NOW), made(LATER))
    assert not supersedes(made(LATER), made(NOW))
    assert not supersedes(made(), made(name="other", tuned_in_s=9.0))


@given(arbitrary.records(), arbitrary.records())
def test_never_both(one: Record, other: Record) -> None:
    assert not (supersedes(one, other) and supersedes(other, one))
    assert not supersedes(one, one)
