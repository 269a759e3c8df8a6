"""Where a tuning starts: at nothing, at a record that goes on, or at what a crash has left."""

from __future__ import annotations

import pytest
from records import make_limits, make_outcome, make_record

from autobatch._start import CONTENDER, Start, start
from autobatch._strategies import FAMILIES, MAP, VMAP, chunked

LIMITS = make_limits()


def test_nothing_known() -> None:
    assert start(LIMITS, may_hang=False) == Start(families=FAMILIES, first={}, kept=())


def test_what_may_not_end_is_barred_unless_somebody_would_end_it() -> None:
    alone = start(LIMITS, may_hang=True)
    assert alone.families == ("map", "unrolled")
    assert {each.strategy for each in alone.kept} == {VMAP, chunked(2)}
    assert {each.status for each in alone.kept} == {"ineligible"}
    watched = start(LIMITS, may_hang=True, is_supervised=True)
    assert watched == Start(families=FAMILIES, first={MAP: None}, kept=())


def test_a_record_goes_on_from_its_plan() -> None:
    record = make_record()
    begun = start(LIMITS, may_hang=False, resume=record)
    assert list(begun.first) == [VMAP]
    assert begun.kept == record.outcomes[1:]


def test_wider_limits_reopen_what_they_barred() -> None:
    wider = make_limits(expected_calls=10**9)
    begun = start(wider, may_hang=False, resume=make_record())
    assert {each.status for each in (*begun.first.values(), *begun.kept) if each} == {"measured"}


def test_after_a_crash_what_may_win_is_measured_again() -> None:
    best = make_outcome("map", compile_s=0.0, run_s=1e-3)
    near = make_outcome("chunked:50", compile_s=0.0, run_s=0.99e-3 * CONTENDER)
    far = make_outcome("chunked:25", compile_s=0.0, run_s=1.01e-3 * CONTENDER)
    dead = make_outcome("vmap", status="failed", run_s=None, reason="crashed: SIGSEGV")
    left = make_record(outcomes=(best, near, far, dead))
    begun = start(LIMITS, may_hang=False, is_supervised=True, left=left)
    assert begun.first == {MAP: best, chunked(50): near}
    assert begun.kept == (far, dead)


@pytest.mark.parametrize("status", ["over-memory", "out-of-time", "not-worth", "unmeasured"])
def test_after_a_crash_what_was_not_tried_is_weighed_again(status: str) -> None:
    left = make_record(outcomes=(make_outcome("map", status=status, run_s=None),))
    begun = start(LIMITS, may_hang=False, is_supervised=True, left=left)
    assert (begun.first, begun.kept) == ({}, ())


def test_what_a_crash_left_counts_more_than_an_older_record() -> None:
    left = make_record(outcomes=(make_outcome("map"),))
    begun = start(LIMITS, may_hang=False, is_supervised=True, resume=make_record(), left=left)
    assert list(begun.first) == [MAP]
