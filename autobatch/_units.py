"""Numbers with their units, as people read them: bytes, seconds, factors."""

from __future__ import annotations


def format_bytes(count: float | None) -> str:
    """Returns bytes in the unit that leaves one to three digits before the point.

    >>> format_bytes(812_000), format_bytes(2 * 1024**3), format_bytes(None)
    ('793 KiB', '2.0 GiB', '-')
    """
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{_three_digits(count)} {unit}"
        count /= 1024
    return f"{_three_digits(count)} TiB"


def format_seconds(seconds: float | None) -> str:
    """Returns seconds in s, ms or us.

    >>> format_seconds(0.0302), format_seconds(4.52e-5), format_seconds(75)
    ('30.2 ms', '45.2 us', '75.0 s')
    """
    if seconds is None:
        return "-"
    if seconds >= 0.9995:
        return f"{_three_digits(seconds)} s"
    if seconds >= 0.9995e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} us"


def format_factor(factor: float) -> str:
    """Returns a ratio.

    >>> format_factor(2.91), format_factor(345.6)
    ('2.9x', '346x')
    """
    return f"{factor:.2f}x" if factor < 1.1 else f"{_three_digits(factor, 1)}x"


def _three_digits(value: float, decimals: int | None = None) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if decimals is None else f"{value:.{decimals}f}"
