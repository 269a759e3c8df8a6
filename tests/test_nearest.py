"""Records of another batch size: which one is near, and what it foretells."""

from __future__ import annotations

from typing import Any

import arbitrary
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import make_facts, make_outcome, make_record

from autobatch._nearest import family, nearest, resized
from autobatch._record import Record
from autobatch._strategies import UNROLLED, rows_at_once

MIB = 1024**2


def parts(rows: int, **overrides: Any) -> dict[str, Any]:
    default = {
        "program": "abc",
        "in_axes": [None, None, 0, 1],
        "arguments": ["float32[7]", f"float32[{rows}, 4]", f"int32[3, {rows}]"],
        "batch_size": rows,
        "jax": "0.12.0",
    }
    return {**default, **overrides}


def record(rows: int, **overrides: Any) -> Record:
    return make_record(key=f"{rows:064x}", parts=parts(rows), batch_size=rows, **overrides)


def test_only_the_batch_size_may_differ() -> None:
    assert family(parts(8)) == family(parts(9))
    for other in (
        {"program": "xyz"},
        {"jax": "0.11.0"},
        {"arguments": ["float32[9]", "float32[8, 4]", "int32[3, 8]"]},  # an unmapped size
        {"arguments": ["float32[7]", "float32[8, 5]", "int32[3, 8]"]},  # the size of a row
        {"arguments": ["float32[7]", "float16[8, 4]", "int32[3, 8]"]},
        {"in_axes": [None, None, 0, 0]},
    ):
        assert family(parts(8)) != family(parts(8, **other))


@pytest.mark.parametrize("strange", [None, 3, "float32", ["float32"], [None, 1], ["f[x]", "f[1]"]])
def test_strange_parts_have_a_family_too(strange: Any) -> None:
    assert family(parts(8, arguments=strange)) == family(parts(9, arguments=strange))


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 10), (11, 10), (90, 100), (200, 100), (400, 1000), (10**6, 1000)]
)
def test_the_nearest_size_is_that_of_the_nearest_octave(rows: int, expected: int) -> None:
    known = [record(each) for each in (1000, 10, 100)]
    found = nearest(known, parts(rows), rows)
    assert found is not None
    assert found.batch_size == expected


def test_stand_ins_and_other_programs_are_not_near() -> None:
    assert nearest([record(10, data="synthetic")], parts(11), 11) is None
    assert nearest([make_record()], parts(11), 11) is None
    assert nearest([], parts(11), 11) is None


def test_what_is_foretold_grows_with_the_rows() -> None:
    outcomes = (
        make_outcome("vmap", run_s=1.0, peak_bytes=10 * MIB),
        make_outcome("chunked:10", run_s=2.0, peak_bytes=4 * MIB),
        make_outcome("map", run_s=3.0, peak_bytes=None, peak_source=None, predicted_bytes=3 * MIB),
        make_outcome("unrolled", run_s=0.1),
        make_outcome("chunked:20", status="over-memory"),
    )
    facts = make_facts(argument_bytes=MIB, output_bytes=MIB, working_bytes=100 * MIB)
    known = record(100, outcomes=outcomes, facts=facts)
    found = resized(known, key="k", parts=parts(400), batch_size=400, argument_bytes=4 * MIB)
    assert (found.key, found.batch_size) == ("k", 400)
    by_name = {str(each.strategy): each for each in found.outcomes}
    assert UNROLLED not in [each.strategy for each in found.outcomes]
    assert [by_name[each].run_s for each in ("vmap", "chunked:10", "map")] == [4.0, 8.0, 12.0]
    assert by_name["vmap"].predicted_bytes == (4 + 1.25 * (4 + 8 * 4)) * MIB
    assert by_name["chunked:10"].predicted_bytes == (4 + 1.25 * (4 + 2)) * MIB
    assert by_name["map"].predicted_bytes == (4 + 1.25 * (4 + 1)) * MIB
    assert by_name["chunked:20"].status == "over-memory"


def test_results_of_fewer_rows_may_be_as_large() -> None:
    outcomes = (make_outcome("vmap", peak_bytes=60 * MIB),)
    facts = make_facts(argument_bytes=MIB, output_bytes=50 * MIB, working_bytes=9 * MIB)
    known = record(100, outcomes=outcomes, facts=facts)  # such as gradients that are added up
    found = resized(known, key="k", parts=parts(10), batch_size=10, argument_bytes=MIB)
    assert found.outcomes[0].predicted_bytes is not None
    assert found.outcomes[0].predicted_bytes > 51 * MIB


def test_a_small_batch_says_nothing_of_the_memory_of_a_large_one() -> None:
    outcomes = (
        make_outcome("vmap", peak_bytes=2 * MIB),  # as XLA plans what a library allocates: nothing
        make_outcome("map", peak_bytes=2 * MIB),
    )
    facts = make_facts(argument_bytes=MIB, output_bytes=MIB, working_bytes=100 * MIB)
    known = record(100, outcomes=outcomes, facts=facts)
    found = resized(known, key="k", parts=parts(1000), batch_size=1000, argument_bytes=10 * MIB)
    needs = {str(each.strategy): each.predicted_bytes for each in found.outcomes}
    assert needs == {"vmap": (10 + 10 + 1000) * MIB, "map": (10 + 1.25 * 10) * MIB}


@given(arbitrary.records(), st.integers(2, 10**7), st.integers(0, 10**12))
def test_nothing_that_is_foretold_counts_as_measured_memory(
    known: Record, rows: int, argument_bytes: int
) -> None:
    found = resized(known, key="k", parts={}, batch_size=rows, argument_bytes=argument_bytes)
    for outcome in found.outcomes:
        if outcome.run_s is not None:
            assert (outcome.peak_bytes, outcome.peak_source) == (None, None)
            assert outcome.predicted_bytes is None or outcome.predicted_bytes >= argument_bytes
        assert rows_at_once(outcome.strategy, rows) <= rows
