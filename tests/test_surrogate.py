"""The expected run times, against what the definition says and against sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch._surrogate import Curve, Point, expected_gain

CURVE = Curve(spread=0.8, reach=4.0)


def point(octave: float, shift: float = 0.0, own: float = 0.0) -> Point:
    return Point(octave=octave, shift=shift, own=own)


def test_a_measured_point_is_known_but_for_what_is_its_own() -> None:
    known = [(point(10, own=0.01), math.log(2.0)), (point(4, own=0.01), math.log(3.0))]
    mean, deviation = CURVE.expected(known, point(10))
    assert mean == pytest.approx(math.log(2.0), abs=0.01)
    assert deviation < 0.02


def test_doubt_grows_with_the_distance_from_what_was_measured() -> None:
    known = [(point(10), 0.0)]
    doubts = [CURVE.expected(known, point(octave))[1] for octave in (9, 7, 4, 0)]
    assert doubts == sorted(doubts)
    assert doubts[-1] < math.sqrt(2) * CURVE.spread * 1.01


@given(st.floats(-20, 10), st.floats(0, 12))
def test_the_level_is_that_of_the_first_measurement(level: float, octave: float) -> None:
    mean, _ = CURVE.expected([(point(6, shift=0.5), level + 0.5)], point(octave, shift=-1.0))
    assert mean == pytest.approx(level - 1.0, abs=0.1)


def test_alike_measurements_leave_less_doubt_than_different_ones() -> None:
    def doubt(*logs: float) -> float:
        known = [(point(octave), log) for octave, log in zip((10, 6, 2), logs, strict=True)]
        return CURVE.expected(known, point(8))[1]

    assert doubt(0, 0, 0) < doubt(0, 1, 0) < doubt(0, 2, -2)


@pytest.mark.parametrize("bar_s", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("deviation", [0.1, 1.0])
def test_expected_gain_is_the_mean_of_what_lies_below(bar_s: float, deviation: float) -> None:
    drawn = np.exp(np.random.default_rng(0).normal(0.0, deviation, 400_000))
    sampled = np.maximum(0, bar_s - drawn).mean()
    assert expected_gain(bar_s, 0.0, deviation) == pytest.approx(sampled, rel=0.02, abs=1e-4)


def test_no_run_is_shorter_than_nothing() -> None:
    assert expected_gain(0.0, 0.0, 1.0) == 0.0
    assert expected_gain(-1.0, 0.0, 1.0) == 0.0
