"""What run times to expect of candidates that were not measured, from those that were. Pure.

The logarithm of the run time is taken for a random function of the octave of rows at once, with
the covariance of an Ornstein-Uhlenbeck process: near sizes are alike, far ones are not. What a
candidate may gain is its expected improvement over the best. Source: H. J. Kushner, A new method of
locating the maximum point of an arbitrary multipeak curve in the presence of noise, 1964; J. Mockus
on expected improvement, 1975.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST_DOUBT = 5.0
"""Standard deviation beyond which a run time is simply unknown."""
_FREE = 25.0
"""Variance of the level of the curve: whatever is measured first sets it."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A candidate on the curve.

    Attributes:
        octave: logarithm to base 2 of the rows at once.
        shift: what is believed of its log run time beside the level and the curve.
        own: standard deviation of what is its own, and tells nothing about its neighbours.
    """

    octave: float
    shift: float
    own: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How far the curve strays, in powers of e.

    Attributes:
        spread: standard deviation between far points.
        reach: octaves over which the correlation falls to 1/e.
        trust: measured points that `spread` is worth, against what they themselves say of it.
    """

    spread: float
    reach: float
    trust: float = 3.0

    def expected(self, known: Sequence[tuple[Point, float]], asked: Point) -> tuple[float, float]:
        """Returns the mean and the standard deviation of the log run time of `asked`.

        Args:
            known: points that were measured, with the logarithm of their run time; at least one.
            asked: a point that was not.
        """
        points = [point for point, _ in known]
        level = known[0][1] - known[0][0].shift
        found = np.array([log_s - point.shift - level for point, log_s in known])
        covariance = np.array([[self._covariance(a, b) for b in points] for a in points])
        covariance += np.diag([point.own**2 for point in points])
        across = np.array([self._covariance(asked, each) for each in points])
        weights = np.linalg.solve(covariance, across)
        variance = self._covariance(asked, asked) + asked.own**2 - float(across @ weights)
        mean = level + asked.shift + float(weights @ found)
        # How far the measured points stray says how far the others may: the variance of a scale
        # with an inverse gamma distribution.
        strayed = float(found @ np.linalg.solve(covariance, found))
        scale = (self.trust + strayed) / (self.trust + len(known) - 1)
        return mean, min(math.sqrt(max(scale * variance, 1e-9)), _MOST_DOUBT)

    def _covariance(self, one: Point, other: Point) -> float:
        distance = abs(one.octave - other.octave)
        return _FREE + self.spread**2 * math.exp(-distance / self.reach)


def expected_gain(bar_s: float, mean: float, deviation: float) -> float:
    """Returns by how many seconds a log-normal run time is below `bar_s`, in expectation.

    What is above the bar counts as no gain, because the best so far is kept.

    Args:
        bar_s: seconds to fall below.
        mean: expected logarithm of the run time.
        deviation: its standard deviation.

    >>> round(expected_gain(1.0, math.log(0.5), 1e-6), 6)
    0.5
    """
    if bar_s <= 0:
        return 0.0
    place = (math.log(bar_s) - mean) / deviation
    return bar_s * _below(place) - math.exp(mean + deviation**2 / 2) * _below(place - deviation)


def _below(place: float) -> float:
    """Returns the share of a standard normal distribution below `place`."""
    return 0.5 * math.erfc(-place / math.sqrt(2))
