"""Numbers are printed short, with their unit, and close to what they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch._units import format_bytes, format_factor, format_seconds

BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@given(st.integers(0, 999 * 1024**4) | st.floats(0, 1e15))
def test_bytes_are_near_and_short(count: float) -> None:
    number, unit = format_bytes(count).split()
    assert float(number) * BYTES[unit] == pytest.approx(count, rel=0.06, abs=0.5)
    assert len(number) <= 4


@given(st.floats(1e-7, 9999))
def test_seconds_are_near_and_short(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    assert float(number) * SECONDS[unit] == pytest.approx(seconds, rel=0.06, abs=0.6e-7)
    assert len(number) <= 4


@given(st.floats(0.01, 9999))
def test_factors_are_near_and_short(factor: float) -> None:
    text = format_factor(factor)
    assert text.endswith("x")
    assert float(text[:-1]) == pytest.approx(factor, rel=0.05, abs=0.006)
    assert len(text) <= 5


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (999.4 * 1024, "999 KiB"),
        (999.6 * 1024, "1.0 MiB"),
        (2 * 1024**3, "2.0 GiB"),
        (5 * 1024**4, "5.0 TiB"),
        (5000 * 1024**4, "5000 TiB"),
    ],
)
def test_bytes_change_their_unit_before_four_digits(count: float | None, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0.0 us"),
        (99.94e-6, "99.9 us"),
        (99.96e-6, "100 us"),
        (0.9994e-3, "999 us"),
        (0.9996e-3, "1.0 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (75.04, "75.0 s"),
        (3600.0, "3600 s"),
    ],
)
def test_seconds_change_their_unit_before_four_digits(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("factor", "text"), [(1.0, "1.00x"), (1.09, "1.09x"), (1.1, "1.1x"), (99.96, "100x")]
)
def test_small_factors_have_two_decimals(factor: float, text: str) -> None:
    assert format_factor(factor) == text
