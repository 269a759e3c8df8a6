"""The choice is the least total within the limits, and the same one every time."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import arbitrary
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from records import make_limits, make_outcome, make_record

from autobatch import AutobatchError, Budget, NoViableStrategyError
from autobatch._choose import (
    LEAST_GAIN,
    blank,
    choose,
    decide,
    explained,
    margin,
    parse_memory,
    resolve,
    smallest,
    total_s,
    without_larger,
)
from autobatch._record import Limits, Outcome, Record
from autobatch._search import over_memory
from autobatch._strategies import FAMILIES, MAP, VMAP, Strategy

MIB, GIB = 1024**2, 1024**3


def chosen(outcomes: list[Outcome], *, noise: float | None = None, **limits: Any) -> str | None:
    record = make_record(outcomes=tuple(outcomes), noise=noise)
    strategy = choose(record, make_limits(**limits))
    return None if strategy is None else str(strategy)


# The rule, against one that tries everything


def need(outcome: Outcome) -> int | None:
    return outcome.predicted_bytes if outcome.peak_bytes is None else outcome.peak_bytes


def is_viable(outcome: Outcome, limits: Limits) -> bool:
    known = outcome.compile_s is not None and outcome.run_s is not None
    within = limits.memory_bytes is None or (need(outcome) or 0) <= limits.memory_bytes
    return (
        outcome.status == "measured"
        and known
        and within
        and (outcome.compile_s or 0) <= limits.compile_s
    )


def brute_force(record: Record, limits: Limits) -> Strategy | None:
    """Returns the choice, by comparing every candidate with every other."""
    kept = min(1 - LEAST_GAIN, 1 / (1 + (record.noise or 0)), 1 - min(0.9, record.load or 0))
    viable = [each for each in record.outcomes if is_viable(each, limits)]
    totals = {each.strategy: total_s(each, limits.expected_calls) for each in viable}
    contenders = [
        each
        for each in viable
        if each.strategy != VMAP
        and (VMAP not in totals or totals[each.strategy] < kept * totals[VMAP])
    ]
    contenders.sort(
        key=lambda each: (
            each.peak_bytes is None,
            each.peak_bytes,
            each.compile_s,
            ["vmap", "map", "chunked", "unrolled"].index(each.strategy.family),
            each.strategy.chunk_size,
        )
    )
    for each in contenders:
        tied = (1 - LEAST_GAIN) * totals[each.strategy]
        if all(tied <= totals[other.strategy] for other in contenders):
            return each.strategy
    return VMAP if VMAP in totals else None


@given(arbitrary.records(), arbitrary.limits())
def test_choice_is_that_of_brute_force(record: Record, limits: Limits) -> None:
    assert choose(record, limits) == brute_force(record, limits)


@given(arbitrary.records(), arbitrary.limits(), st.randoms())
def test_order_of_outcomes_does_not_matter(
    record: Record, limits: Limits, shuffler: random.Random
) -> None:
    shuffled = list(record.outcomes)
    shuffler.shuffle(shuffled)
    other = replace(record, outcomes=tuple(shuffled))
    assert choose(other, limits) == choose(record, limits)
    assert smallest(other) == smallest(record)


@given(arbitrary.records(), arbitrary.measured(VMAP), arbitrary.limits())
def test_vmap_stays_unless_beaten_beyond_the_margin(
    record: Record, default: Outcome, limits: Limits
) -> None:
    others = tuple(each for each in record.outcomes if each.strategy != VMAP)
    record = replace(record, outcomes=(default, *others))
    assert default.compile_s is not None
    limits = replace(
        limits,
        compile_s=max(limits.compile_s, default.compile_s),
        memory_bytes=max(limits.memory_bytes or 0, need(default) or 0),
    )
    assert is_viable(default, limits)
    strategy = choose(record, limits)
    if strategy != VMAP:
        winner = next(each for each in record.outcomes if each.strategy == strategy)
        calls = limits.expected_calls
        assert total_s(winner, calls) < (1 - LEAST_GAIN) * total_s(default, calls)


@given(
    st.lists(arbitrary.measured(), min_size=2, max_size=2, unique_by=lambda each: each.strategy),
    st.lists(arbitrary.CALLS, min_size=3, max_size=20),
    st.none() | st.floats(0, 2),
)
def test_more_calls_switch_between_two_candidates_once_at_most(
    outcomes: list[Outcome], calls: list[int], noise: float | None
) -> None:
    record = make_record(outcomes=tuple(outcomes), noise=noise)
    unlimited = make_limits(memory_bytes=None, memory_is_explicit=False, compile_s=1e9)
    choices = [choose(record, replace(unlimited, expected_calls=each)) for each in sorted(calls)]
    assert sum(before != after for before, after in pairwise(choices)) <= 1


def test_more_calls_favour_the_quicker_run_over_the_quicker_compile() -> None:
    outcomes = [
        make_outcome("vmap", compile_s=0.1, run_s=2e-3),
        make_outcome("map", compile_s=1.0, run_s=1e-3),
    ]
    assert chosen(outcomes, expected_calls=10) == "vmap"
    assert chosen(outcomes, expected_calls=10_000) == "map"


@pytest.mark.parametrize(
    ("share", "noise", "winner"),
    [
        (0.98, None, "vmap"),
        (0.96, None, "map"),
        (0.98, 0.0, "vmap"),
        (0.96, 0.10, "vmap"),
        (0.89, 0.10, "map"),
        (0.5, 5.0, "vmap"),  # two measurements that differ by 500 % say nothing
        (0.001, 5.0, "map"),
    ],
)
def test_gain_must_exceed_the_noise(share: float, noise: float | None, winner: str) -> None:
    outcomes = [
        make_outcome("vmap", compile_s=0.0, run_s=1e-3),
        make_outcome("map", compile_s=0.0, run_s=share * 1e-3),
    ]
    assert chosen(outcomes, noise=noise) == winner


def test_equal_candidates_keep_the_default_100_times_of_100() -> None:
    outcomes = [make_outcome(each) for each in ("vmap", "map", "chunked:4", "unrolled")]
    shuffler = random.Random(0)
    for _ in range(100):
        shuffler.shuffle(outcomes)
        assert chosen(outcomes) == "vmap"


SLOW = make_outcome("vmap", run_s=1.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(
            make_outcome("chunked:8", peak_bytes=10),
            make_outcome("map", peak_bytes=11, compile_s=0.0295),
            id="less memory, although more compile",
        ),
        pytest.param(
            make_outcome("unrolled", compile_s=0.030),
            make_outcome("map", compile_s=0.031),
            id="less compile, although later in order",
        ),
        pytest.param(make_outcome("map"), make_outcome("chunked:8"), id="map before chunked"),
        pytest.param(make_outcome("chunked:8"), make_outcome("unrolled"), id="then unrolled"),
        pytest.param(make_outcome("chunked:8"), make_outcome("chunked:9"), id="smaller chunk"),
        pytest.param(
            make_outcome("unrolled", peak_bytes=10**9),
            make_outcome("map", peak_bytes=None, peak_source=None),
            id="known memory before unknown",
        ),
    ],
)
def test_ties_have_a_fixed_winner(one: Outcome, other: Outcome) -> None:
    assert chosen([SLOW, one, other]) == str(one.strategy)
    assert chosen([other, one, SLOW]) == str(one.strategy)


# Limits


@given(arbitrary.records(), arbitrary.limits(), arbitrary.BYTES)
def test_no_choice_is_over_an_explicit_memory_limit(
    record: Record, limits: Limits, memory_bytes: int
) -> None:
    explicit = replace(limits, memory_bytes=memory_bytes, memory_is_explicit=True)
    try:
        strategy = decide(record, explicit).strategy
    except NoViableStrategyError:
        return
    needs = [need(each) for each in record.outcomes if each.strategy == strategy]
    assert all(each is None or each <= memory_bytes for each in needs)


@given(arbitrary.records(), arbitrary.limits())
def test_error_means_that_nothing_fits(record: Record, limits: Limits) -> None:
    try:
        decision = decide(record, limits)
    except NoViableStrategyError:
        assert limits.memory_is_explicit
        assert choose(record, limits) is None
        least = smallest(record)
        assert least is not None
        assert (need(least) or 0) > (limits.memory_bytes or 0)
    else:
        if decision.warning is not None:
            assert not limits.memory_is_explicit


def crowded() -> Record:
    """Four candidates of 4, 3, 2 and at most 2.5 GiB."""
    return make_record(
        outcomes=(
            make_outcome("vmap", peak_bytes=4 * GIB),
            make_outcome("chunked:64", peak_bytes=2 * GIB),
            make_outcome("map", peak_bytes=3 * GIB),
            make_outcome("unrolled", status="over-memory", predicted_bytes=5 * GIB // 2),
        )
    )


def test_error_names_the_smallest_need() -> None:
    with pytest.raises(NoViableStrategyError) as caught:
        decide(crowded(), make_limits(memory_bytes=GIB))
    text = str(caught.value)
    assert "none of 4 candidates for `vector_dot` (200 rows) fits memory=1.0 GiB" in text
    assert "The smallest measured peak, arguments included, is 2,147,483,648 bytes (2.0 GiB" in text
    assert isinstance(caught.value, AutobatchError)
    assert isinstance(caught.value, ValueError)


def test_error_says_when_the_smallest_need_is_predicted() -> None:
    record = make_record(
        outcomes=(make_outcome("vmap", status="over-memory", predicted_bytes=3 * GIB),)
    )
    with pytest.raises(
        NoViableStrategyError, match=r"smallest predicted peak, .*\(3.0 GiB, vmap\)"
    ):
        decide(record, make_limits(memory_bytes=GIB))


def test_nothing_within_the_default_limit_gives_the_smallest_and_a_warning() -> None:
    decision = decide(crowded(), make_limits(memory_bytes=GIB, memory_is_explicit=False))
    assert str(decision.strategy) == "chunked:64"
    assert decision.warning is not None
    assert "(2.0 GiB, chunked:64)" in decision.warning


@pytest.mark.parametrize("explicit", [True, False])
def test_what_was_predicted_to_fit_more_room_serves_before_what_does_not(explicit: bool) -> None:
    record = make_record(
        outcomes=(
            make_outcome("vmap", status="over-memory", predicted_bytes=5 * GIB),
            make_outcome("map", status="over-memory", predicted_bytes=2 * GIB),
        )
    )
    decision = decide(record, make_limits(memory_bytes=3 * GIB, memory_is_explicit=explicit))
    assert str(decision.strategy) == "map"


def test_exactly_the_limit_fits() -> None:
    outcomes = [make_outcome("vmap", peak_bytes=GIB, compile_s=2.0)]
    assert chosen(outcomes, memory_bytes=GIB, compile_s=2.0) == "vmap"
    assert chosen(outcomes, memory_bytes=GIB - 1, compile_s=2.0) is None
    assert chosen(outcomes, memory_bytes=GIB, compile_s=1.9) is None


def test_compile_limit_bars_the_quickest() -> None:
    outcomes = [
        make_outcome("vmap", run_s=1e-3, compile_s=1.0),
        make_outcome("unrolled", run_s=1e-6, compile_s=9.0),
    ]
    assert chosen(outcomes, expected_calls=10**6, compile_s=8.0) == "vmap"
    assert chosen(outcomes, expected_calls=10**6, compile_s=10.0) == "unrolled"


def test_compile_limit_that_bars_everything_is_no_error() -> None:
    decision = decide(make_record(), make_limits(compile_s=0.0))
    assert str(decision.strategy) == "vmap"


def test_unknown_peak_is_not_zero() -> None:
    unknown = make_outcome("map", peak_bytes=None, peak_source=None, predicted_bytes=5 * GIB)
    known = make_outcome("vmap", peak_bytes=MIB, run_s=1.0)
    assert chosen([known, unknown], memory_bytes=GIB) == "vmap"
    assert chosen([known, unknown], memory_bytes=6 * GIB) == "map"


def test_smallest_passes_over_what_is_unknown() -> None:
    unknown = make_outcome("map", peak_bytes=None, peak_source=None, predicted_bytes=None)
    record = make_record(outcomes=(unknown, make_outcome("vmap")))
    least = smallest(record)
    assert least is not None
    assert least.strategy == VMAP
    assert smallest(replace(record, outcomes=(unknown,))) is None


@pytest.mark.parametrize("status", ["ineligible", "failed", "wrong-result", "out-of-memory"])
def test_smallest_is_one_that_works(status: str) -> None:
    broken = make_outcome("map", status=status, predicted_bytes=1)
    least = smallest(make_record(outcomes=(broken, make_outcome("vmap"))))
    assert least is not None
    assert least.strategy == VMAP


@pytest.mark.parametrize("field", ["compile_s", "run_s"])
def test_incomplete_measurement_is_never_chosen(field: str) -> None:
    outcomes = [make_outcome("vmap", run_s=1.0), make_outcome("map", **{field: None})]
    assert chosen(outcomes) == "vmap"
    assert chosen(outcomes[1:]) is None


@pytest.mark.parametrize("status", ["failed", "out-of-memory", "wrong-result", "out-of-time"])
def test_where_nothing_ran_vmap_serves(status: str) -> None:
    outcomes = tuple(make_outcome(each, status=status) for each in ("vmap", "map"))
    assert decide(make_record(outcomes=outcomes), make_limits()).strategy == VMAP


# Reasons


@given(arbitrary.records(), arbitrary.limits())
def test_every_outcome_has_a_reason_and_keeps_its_figures(record: Record, limits: Limits) -> None:
    strategy = choose(record, limits) or VMAP
    told = explained(record, limits, strategy)
    for before, after in zip(record.outcomes, told, strict=True):
        assert after.reason
        assert replace(after, reason=before.reason) == before
        assert after.reason.startswith("chosen") == (after.strategy == strategy) or (
            after.reason == before.reason  # a candidate's own words may begin so too
        )


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (make_outcome("map", run_s=141e-6, compile_s=0.078), "2.9x"),
        (make_outcome("map", run_s=45e-6), "1.00x, within the noise of 3%"),
        (make_outcome("map", peak_bytes=3 * GIB), "needs 3.0 GiB of 2.0 GiB"),
        (make_outcome("map", compile_s=90.0), "compiles for 90.0 s of 60.0 s allowed"),
        (make_outcome("map", run_s=None), "incomplete measurement"),
        (make_outcome("map", status="failed", reason="XlaRuntimeError: no"), "XlaRuntimeError: no"),
        (make_outcome("map", status="wrong-result", reason=None), "wrong-result"),
    ],
)
def test_loser_says_why(outcome: Outcome, reason: str) -> None:
    record = make_record(outcomes=(make_outcome("vmap"), outcome))
    told = explained(record, make_limits(), VMAP)
    assert [each.reason for each in told] == ["chosen: least total within 2.0 GiB", reason]


@pytest.mark.parametrize(
    ("verb", "memory_bytes", "reason"),
    [
        ("may need", 2 * MIB, "may need 15.4 MiB of 2.0 MiB; not run"),
        ("would need", 2 * MIB, "would need 15.4 MiB of 2.0 MiB; not run"),
        ("may need", 8 * MIB, "may need 15.4 MiB of 8.0 MiB; not run"),
        ("may need", 16 * MIB, "not run; may need 15.4 MiB, which fits by now"),
        ("would need", None, "not run; would need 15.4 MiB, which fits by now"),
    ],
)
def test_what_did_not_fit_is_told_by_the_limit_at_hand(
    verb: Any, memory_bytes: int | None, reason: str
) -> None:
    barred = over_memory(Strategy.parse("chunked:64"), int(15.4 * MIB), 8 * MIB, verb)
    record = make_record(outcomes=(make_outcome("vmap"), barred))
    limits = make_limits(memory_bytes=memory_bytes)
    assert explained(record, limits, VMAP)[1].reason == reason
    assert explained(record, limits, barred.strategy)[1].reason == f"chosen although {reason}"


@pytest.mark.parametrize("reason", ["too much", None])
def test_what_did_not_fit_keeps_its_words_where_its_need_is_unknown(reason: str | None) -> None:
    barred = make_outcome("map", status="over-memory", predicted_bytes=None, reason=reason)
    record = make_record(outcomes=(make_outcome("vmap"), barred))
    assert explained(record, make_limits(), VMAP)[1].reason == (reason or "over-memory")


def test_plan_that_breaks_a_limit_says_so() -> None:
    record = make_record(outcomes=(make_outcome("vmap", peak_bytes=3 * GIB),))
    (told,) = explained(record, make_limits(), VMAP)
    assert told.reason == "chosen although needs 3.0 GiB of 2.0 GiB"


def test_unlimited_memory_is_not_printed() -> None:
    unlimited = make_limits(memory_bytes=None, memory_is_explicit=False)
    assert explained(make_record(), unlimited, VMAP)[0].reason == "chosen: least total"


def test_clock_too_coarse_to_see_a_call_does_not_break_the_table() -> None:
    none_seen = {"compile_s": 0.0, "run_s": 0.0}
    outcomes = (make_outcome("vmap", **none_seen), make_outcome("map", **none_seen))
    record = make_record(outcomes=outcomes)
    assert all(each.reason for each in explained(record, make_limits(), VMAP))


@pytest.mark.parametrize("strategy", [None, "vmap", "chunked:64", "unrolled"])
def test_blank_has_each_family_once_and_no_figure(strategy: str | None) -> None:
    forced = None if strategy is None else Strategy.parse(strategy)
    outcomes = blank("not measured", forced)
    assert [each.strategy.family for each in outcomes] == list(FAMILIES)
    assert forced is None or forced in [each.strategy for each in outcomes]
    assert {(each.run_s, each.compile_s, each.peak_bytes) for each in outcomes} == {(None,) * 3}
    assert {each.reason for each in outcomes} == {"not measured"}


# Out of memory at a call


def test_what_ran_out_of_memory_bars_all_that_need_as_much() -> None:
    record = make_record(
        outcomes=(
            make_outcome("vmap", peak_bytes=4000),
            make_outcome("chunked:64", peak_bytes=3000),
            make_outcome("chunked:8", peak_bytes=2000),
            make_outcome("map", peak_bytes=1000),
            make_outcome("unrolled", status="failed"),
        )
    )
    relieved = without_larger(record, Strategy.parse("chunked:64"))
    assert relieved is not None
    assert [each.status for each in relieved.outcomes] == [
        "out-of-memory",
        "out-of-memory",
        "measured",
        "measured",
        "failed",
    ]
    assert without_larger(record, MAP) is None


@pytest.mark.parametrize(("noise", "share"), [(None, 0.03), (0.0, 0.03), (0.25, 0.2), (9.0, 0.9)])
def test_margin_is_the_noise_but_three_percent_at_least(noise: float | None, share: float) -> None:
    assert margin(make_record(noise=noise)) == pytest.approx(share)


@pytest.mark.parametrize(("load", "share"), [(0.01, 0.03), (0.5, 0.5), (1.0, 0.9)])
def test_margin_is_what_others_used_of_the_cores(load: float, share: float) -> None:
    assert margin(make_record(noise=0.01, load=load)) == pytest.approx(share)


@pytest.mark.parametrize("field", ["compile_s", "run_s"])
def test_total_of_the_unknown_is_infinite(field: str) -> None:
    assert total_s(make_outcome("vmap", **{field: None}), 1) == math.inf
    assert total_s(make_outcome("vmap", compile_s=2.0, run_s=0.5), 10) == 7.0


# Budget


@pytest.mark.parametrize(
    ("memory", "amount"),
    [
        (None, None),
        (1, 1),
        (12345, 12345),
        ("12345", 12345),
        ("2GiB", 2 * GIB),
        (" 1.5 MiB ", 3 * MIB // 2),
        ("500MB", 500_000_000),
        ("3kB", 3000),
        ("3KiB", 3072),
        ("1TB", 10**12),
        ("7B", 7),
        ("80%", 0.8),
        ("100%", 1.0),
        ("0.5%", 0.005),
    ],
)
def test_memory_is_bytes_units_or_a_share(memory: Any, amount: Any) -> None:
    assert parse_memory(memory) == amount
    assert type(parse_memory(memory)) is type(amount)


BAD_MEMORY = [
    *(0, -1, 1.5, True, False, math.nan, math.inf, b"2GiB", [], object()),
    *("", "GiB", "2 bananas", "-1", "0", "0%", "101%", "1e9", "2GiB free", "inf", "nan", "1.GiB"),
    *("0.5B", "%", "2Gib", "9" * 400, "0x10"),
]


@pytest.mark.parametrize("memory", BAD_MEMORY, ids=lambda value: repr(value)[:20])
def test_bad_memory_says_what_is_allowed(memory: Any) -> None:
    with pytest.raises(ValueError, match=r"memory must be .*'2GiB', '500MB', '80%' or None; got"):
        Budget(memory=memory)


@given(st.text(max_size=8) | st.from_regex(r"\d{1,4}(\.\d{1,3})? ?[kKMGT]?i?B?%?", fullmatch=True))
@example("1.5 GiB")
def test_memory_is_parsed_or_refused(text: str) -> None:
    try:
        amount = parse_memory(text)
    except ValueError:
        return
    assert amount is not None
    assert amount > 0


HUGE = pytest.param(10**400, id="huge")  # an integer beyond every float


@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf, True, None, "60", [], HUGE])
@pytest.mark.parametrize("field", ["compile_s", "tuning_s", "expected_calls"])
def test_bad_number_says_what_is_allowed(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Budget.{field} must be a number from [01] to 1e"):
        Budget(**{field: value})


def test_calls_are_whole_and_one_at_least() -> None:
    with pytest.raises(ValueError, match="expected_calls must be a number from 1 to"):
        Budget(expected_calls=0)
    with pytest.raises(ValueError, match=r"expected_calls must be whole; got 1.5"):
        Budget(expected_calls=1.5)  # pyright: ignore[reportArgumentType]


def test_budget_takes_keywords_only_and_is_frozen() -> None:
    with pytest.raises(TypeError):
        Budget("2GiB")  # pyright: ignore[reportCallIssue]
    with pytest.raises(AttributeError):
        Budget().memory = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("memory", "free", "total", "limit", "explicit"),
    [
        (None, 900, 5000, 900, False),  # 90 % of what is free and of the arguments there already
        (None, 0, 5000, 90, False),
        (None, None, None, None, False),
        (700, None, None, 700, True),
        ("1kB", 1, 1, 1000, True),
        ("50%", 1, 5000, 2500, True),
        ("100%", None, 5000, 5000, True),
    ],
)
def test_budget_means_bytes_on_a_device(
    memory: Any, free: int | None, total: int | None, limit: int | None, explicit: bool
) -> None:
    budget = Budget(memory=memory, compile_s=3, tuning_s=4, expected_calls=5)
    limits = resolve(budget, free_bytes=free, total_bytes=total, argument_bytes=100)
    assert limits == Limits(
        memory_bytes=limit,
        memory_is_explicit=explicit,
        compile_s=3.0,
        tuning_s=4.0,
        expected_calls=5,
    )


def test_share_of_an_unknown_device_says_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"memory='80%' .* give bytes, as in memory='2GiB'"):
        resolve(Budget(memory="80%"), free_bytes=5, total_bytes=None, argument_bytes=0)
