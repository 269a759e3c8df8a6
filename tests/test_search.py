"""The search, replayed from recorded tables, and its rules one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import arbitrary
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import make_facts, make_limits, make_outcome, make_record
from replays import FOLDER, Replayed, geometric_mean, replay, tables

from autobatch._gate import Need
from autobatch._record import Outcome, Record
from autobatch._search import Prior, Search, chunk_sizes, reopened
from autobatch._strategies import FAMILIES, MAP, UNROLLED, VMAP, Family, Strategy, chunked

GIB = 1024**3
TABLES = tables() if FOLDER.exists() else []  # outside the source tree there are none
replays = pytest.mark.source


def make_search(batch_size: int = 1000, **overrides: Any) -> Search:
    parts: dict[str, Any] = {"facts": make_facts(), "limits": make_limits(), **overrides}
    return Search(batch_size=batch_size, **parts)


def tried(search: Search, run_s: dict[str, float], compile_s: float = 0.1) -> list[str]:
    """Returns what a search tries if candidates run for these seconds, others for a second."""
    outcomes: list[Outcome] = []
    while (strategy := search.next(outcomes)) is not None:
        seconds = run_s.get(str(strategy), 1.0)
        outcomes.append(make_outcome(str(strategy), run_s=seconds, compile_s=compile_s))
        assert len(outcomes) < 40
    return [str(each.strategy) for each in outcomes]


# Replays


def replayed(calls: int, **options: Any) -> list[Replayed]:
    return [replay(each, calls, **options) for each in TABLES]


@replays
def test_there_are_tables_of_many_kinds() -> None:
    assert len(TABLES) >= 24
    sizes = [each.batch_size for each in TABLES]
    assert min(sizes) == 2
    assert max(sizes) == 1_000_000
    oracles = {each.oracle(100_000).family for each in TABLES}
    assert oracles == set(FAMILIES)


@replays
@pytest.mark.parametrize("calls", [1000, 100_000])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_searches_come_near_the_oracle(calls: int, noise: float) -> None:
    results = [each for seed in range(3) for each in replayed(calls, noise=noise, seed=seed)]
    assert geometric_mean(each.excess for each in results) <= 1.04
    assert max(each.excess for each in results) <= (1.25 if calls == 100_000 else 1.45)
    gains, possible = (
        sum(g) for g in zip(*((r.gain, r.possible_gain) for r in results), strict=True)
    )
    assert gains >= 0.95 * possible


@replays
def test_searches_compile_little_where_calls_are_many() -> None:
    counts = [len(each.tried) for each in replayed(100_000)]
    assert sum(counts) / len(counts) <= 4.7
    assert max(counts) <= 8


@replays
def test_searches_compile_less_where_calls_are_few() -> None:
    counts = {calls: sum(len(each.tried) for each in replayed(calls)) for calls in (1, 1000, 10**5)}
    assert counts[1] <= counts[1000] <= counts[10**5]
    assert counts[1] == len(TABLES)  # not a single compile would pay


@replays
def test_that_values_steer_spares_compiles() -> None:
    knowing, blind = Prior(), Prior()
    blind = replace(blind, branching=blind.row, branching_shift=blind.row_shift)
    steered = [each for each in TABLES if each.facts.depends_on_values]
    assert len(steered) >= 5

    def compiles(prior: Prior) -> int:
        return sum(len(replay(each, 100_000, prior=prior).tried) for each in steered)

    assert compiles(knowing) < compiles(blind)
    for table in steered:
        assert replay(table, 100_000).tried[1] == MAP


@replays
def test_that_small_chunks_are_slow_is_worth_believing() -> None:
    believing = geometric_mean(each.excess for each in replayed(100_000))
    naive = geometric_mean(each.excess for each in replayed(100_000, prior=Prior(small=0)))
    assert believing < naive


# Rules


@given(st.integers(2, 10**7) | st.integers(2, 40))
def test_chunks_are_powers_of_two_and_each_another_program(batch_size: int) -> None:
    sizes = chunk_sizes(batch_size)
    assert all(1 < each < batch_size and each & (each - 1) == 0 for each in sizes)
    steps = [-(-batch_size // each) for each in sizes]
    assert len(set(steps)) == len(steps)
    assert 1 not in steps


def test_the_default_is_first_and_no_candidate_twice() -> None:
    search = make_search(16, limits=make_limits(expected_calls=10**9))
    order = tried(search, {})
    assert order[0] == "vmap"
    assert len(set(order)) == len(order)


def test_what_cannot_pay_a_compile_is_not_tried() -> None:
    search = make_search()
    assert tried(search, {"vmap": 1e-6}) == ["vmap"]
    assert len(tried(search, {"vmap": 1.0})) > 1


def test_equal_candidates_end_the_search_early() -> None:
    equal = {str(each): 1e-2 for each in (VMAP, MAP, *map(chunked, chunk_sizes(1000)))}
    search = make_search(limits=make_limits(expected_calls=100_000))
    assert len(tried(search, equal)) <= 7


def test_a_few_calls_that_run_long_are_worth_a_search() -> None:
    search = make_search(limits=make_limits(expected_calls=500))
    outcomes = [make_outcome("vmap", compile_s=0.18, run_s=0.62)]
    assert search.next(outcomes) is not None
    few = make_search(limits=make_limits(expected_calls=100))
    assert few.next(outcomes) is None


def test_a_valley_is_followed_to_its_bottom() -> None:
    valley = {str(chunked(each)): abs(each - 32) ** 0.5 / 10 + 0.1 for each in chunk_sizes(1000)}
    search = make_search(limits=make_limits(expected_calls=100_000))
    order = tried(search, {**valley, "vmap": 3.0, "map": 1.0})
    assert "chunked:32" in order
    assert len(order) <= 8


def test_families_that_do_not_keep_the_meaning_are_left_alone() -> None:
    families: tuple[Family, ...] = ("map", "unrolled")
    order = tried(make_search(8, families=families, limits=make_limits(expected_calls=10**6)), {})
    assert order == ["map", "unrolled"]


def test_what_is_asked_for_besides_is_tried_last() -> None:
    order = tried(make_search(also=(chunked(3), UNROLLED)), {"vmap": 1e-6})
    assert order == ["vmap", "chunked:3", "unrolled"]


def test_unrolled_is_not_tried_where_its_compile_is_predicted_too_long() -> None:
    search = make_search(16, limits=make_limits(compile_s=0.5, expected_calls=10**6))
    outcomes = [make_outcome("vmap", compile_s=0.2, run_s=1.0), make_outcome("map", compile_s=0.2)]
    (unrolled,) = [each for each in search.left_out(outcomes) if each.strategy == UNROLLED]
    assert unrolled.status == "over-compile"
    assert "of 500 ms allowed" in str(unrolled.reason)
    assert (unrolled.compile_s, unrolled.run_s) == (None, None)


@pytest.mark.parametrize("batch_size", [64, 512])
def test_many_rows_unrolled_are_predicted_and_never_tried(batch_size: int) -> None:
    search = make_search(batch_size, limits=make_limits(compile_s=5.0, expected_calls=10**9))
    outcomes = [make_outcome("vmap", compile_s=0.3), make_outcome("map", compile_s=0.3)]
    assert "unrolled" not in tried(search, {}, compile_s=0.3)
    (unrolled,) = [each for each in search.left_out(outcomes) if each.strategy == UNROLLED]
    assert unrolled.status == "over-compile"


# Reasons


@given(
    st.integers(2, 10**6),
    st.lists(arbitrary.measured(), max_size=4, unique_by=lambda each: each.strategy),
    arbitrary.limits(),
    st.none() | st.just("the time for tuning was up"),
)
def test_every_family_has_an_outcome_and_a_reason(
    batch_size: int, outcomes: list[Outcome], limits: Any, cut_by: str | None
) -> None:
    search = make_search(batch_size, limits=limits)
    left_out = search.left_out(outcomes, cut_by=cut_by)
    families = {each.strategy.family for each in (*outcomes, *left_out)}
    assert families == set(FAMILIES)
    assert not {each.strategy for each in left_out} & {each.strategy for each in outcomes}
    assert all(each.reason and each.run_s is None for each in left_out)


def test_reasons_say_what_a_compile_would_cost_and_gain() -> None:
    outcomes = [make_outcome("vmap", compile_s=0.2, run_s=1e-5)]
    by_family = {each.strategy.family: each for each in make_search().left_out(outcomes)}
    assert by_family["map"].status == "not-worth"
    assert by_family["map"].reason == "not tried: compile predicted 245 ms for at most 10.0 ms"
    assert by_family["chunked"].status == "not-worth"


def test_two_rows_have_no_chunk() -> None:
    (chunk,) = [
        each
        for each in make_search(2).left_out([make_outcome("vmap")])
        if each.strategy.family == "chunked"
    ]
    assert chunk.reason == "no chunk between 1 and all of 2 rows"


# Memory


def make_bound_search(memory_bytes: int, **facts: int) -> Search:
    default = {"argument_bytes": 1000, "output_bytes": 0, "working_bytes": 1_000_000}
    limits = make_limits(memory_bytes=memory_bytes, expected_calls=10**6)
    return make_search(facts=make_facts(**{**default, **facts}), limits=limits)


def test_the_largest_chunk_whose_bound_fits_is_first_where_vmap_does_not() -> None:
    search = make_bound_search(100_000)
    assert search.next([]) == chunked(64)  # 1000 bytes a row


def test_what_was_measured_lets_larger_chunks_in_by_steps() -> None:
    search = make_bound_search(100_000)
    outcomes = [make_outcome("chunked:64", run_s=1.0, compile_s=0.1, peak_bytes=7_000)]
    assert all(
        each in (chunked(32), chunked(16), chunked(8), chunked(4), chunked(2), MAP)
        for each in [search.next(outcomes)]
    )
    needs = [Need(rows_at_once=63, bound_bytes=65_000, needed_bytes=6_000)]
    step = search.next(outcomes, needs)
    assert step in (chunked(128), chunked(256))


def test_nothing_that_fits_leaves_nothing_to_try() -> None:
    search = make_bound_search(500)
    assert search.next([]) is None
    assert {each.status for each in search.left_out([])} == {"over-memory"}


# Resuming


def cut(status: Any, **searched: Any) -> Record:
    """Returns a record of `vmap` alone, with a `map` that was left out for one reason."""
    return make_record(
        batch_size=1000,
        outcomes=(
            make_outcome("vmap", run_s=1.0, compile_s=0.1),
            make_outcome("map", status=status),
        ),
        searched=make_limits(**searched),
    )


@pytest.mark.parametrize(
    ("status", "wider"),
    [
        ("over-memory", {"memory_bytes": 3 * GIB}),
        ("over-memory", {"memory_bytes": 3 * GIB, "memory_is_explicit": False}),
        ("over-compile", {"compile_s": 61.0}),
        ("out-of-time", {"tuning_s": 61.0}),
        ("not-worth", {"expected_calls": 1001}),
    ],
)
def test_a_wider_limit_opens_what_it_barred(status: Any, wider: dict[str, Any]) -> None:
    record = cut(status)
    assert reopened(record, record.searched) is None
    kept = reopened(record, make_limits(**wider))
    assert kept is not None
    assert [str(each.strategy) for each in kept] == ["vmap"]


@pytest.mark.parametrize(
    ("status", "other"),
    [
        ("over-memory", {"memory_bytes": GIB}),
        ("over-memory", {"memory_bytes": None, "memory_is_explicit": False}),
        ("over-memory", {"tuning_s": 61.0}),
        ("out-of-time", {"compile_s": 61.0}),
        ("not-worth", {"expected_calls": 999}),
        ("failed", {"memory_bytes": 3 * GIB, "tuning_s": 61.0}),
    ],
)
def test_other_limits_open_nothing(status: Any, other: dict[str, Any]) -> None:
    assert reopened(cut(status), make_limits(**other)) is None


def test_of_two_default_limits_of_memory_neither_is_the_wider() -> None:
    record = cut("over-memory")
    record = replace(record, searched=replace(record.searched, memory_is_explicit=False))
    assert reopened(record, make_limits(memory_bytes=3 * GIB, memory_is_explicit=False)) is None
    assert reopened(record, make_limits(memory_bytes=3 * GIB)) is not None


def test_more_calls_open_the_search_only_if_a_candidate_pays() -> None:
    quick = replace(cut("not-worth"), outcomes=(make_outcome("vmap", run_s=1e-9, compile_s=0.1),))
    assert reopened(quick, make_limits(expected_calls=10**5)) is None
    assert reopened(quick, make_limits(expected_calls=10**12)) is not None


@given(arbitrary.records())
def test_same_limits_resume_nothing(record: Record) -> None:
    assert reopened(record, record.searched) is None


def test_order_of_outcomes_does_not_matter() -> None:
    search = make_search(limits=make_limits(expected_calls=10**6))
    outcomes = [
        make_outcome("vmap", run_s=1.0),
        make_outcome("map", run_s=0.7),
        make_outcome("chunked:64", run_s=0.5),
    ]
    assert search.next(outcomes) == search.next(outcomes[::-1])
    assert isinstance(search.next(outcomes), Strategy)


def test_where_nothing_measured_may_be_used_the_search_goes_on() -> None:
    # Its bound fitted, and what it was measured to need does not.
    limits = make_limits(memory_bytes=2**30, expected_calls=1)
    search = make_search(limits=limits)
    outcomes = [make_outcome("vmap", peak_bytes=2**31)]
    assert search.next(outcomes) == MAP
    fitting = [*outcomes, make_outcome("map", peak_bytes=2**20)]
    assert search.next(fitting) is None
