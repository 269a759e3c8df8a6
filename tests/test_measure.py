"""Timing and comparing, with a clock that tests turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autobatch import _measure
from autobatch._instruments import Instruments
from autobatch._measure import Reference, Trial
from autobatch._strategies import MAP, VMAP, Strategy

CPU = SimpleNamespace(platform="cpu")


class Clock:
    """Seconds that pass only when something is run."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeProgram:
    """A program whose calls take the given seconds each, the last of them for ever after."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        self._clock, self._seconds, self.calls = clock, list(seconds), 0

    def jitted(self, *_: Any) -> np.ndarray[Any, Any]:
        self._clock.now += self._seconds[min(self.calls, len(self._seconds) - 1)]
        self.calls += 1
        return np.zeros(1)


def fake_trial(clock: Clock, *seconds: float, strategy: Strategy = VMAP, **facts: Any) -> Trial:
    program: Any = FakeProgram(clock, *seconds)
    return Trial(strategy=strategy, program=program, bound_bytes=0, **facts)


def instruments(clock: Callable[[], float]) -> Instruments:
    return Instruments(clock=clock, growth=lambda run, _: (run(), None))


def test_the_first_run_is_no_sample() -> None:
    clock = Clock()
    trial = fake_trial(clock, 5.0, 2.0)
    _measure.first_run(trial, (), {}, CPU, instruments(clock), lambda _: True)
    _measure.glance(trial, None, (), {}, instruments(clock))
    assert (trial.first_run_s, trial.run_s) == (5.0, 2.0)


@pytest.mark.parametrize(
    ("grown", "platform", "may_repeat", "runs", "growth"),
    [
        ([30, 5], "cpu", True, 2, 22),  # what libraries keep for ever is 8 MiB at most
        ([12, 5], "cpu", True, 2, 5),
        ([12, 15], "cpu", True, 2, 12),
        ([12, None], "cpu", True, 2, 12),
        ([12, 5], "cpu", False, 1, 12),
        ([12, 5], "gpu", True, 1, 12),
        ([3, 0], "cpu", True, 1, 3),  # as planned, but for a mebibyte
        ([None, 0], "cpu", True, 1, None),
    ],
)
def test_a_second_run_tells_what_the_first_took_once_and_for_all(
    grown: list[int | None], platform: str, may_repeat: bool, runs: int, growth: int | None
) -> None:
    clock, left = Clock(), [each and each << 20 for each in grown]
    trial = fake_trial(clock, 5.0, 2.0, planned_bytes=2 << 20)
    measure = Instruments(clock=clock, growth=lambda run, _: (run(), left.pop(0)))
    device = SimpleNamespace(platform=platform)
    outputs = _measure.first_run(trial, (), {}, device, measure, lambda _: may_repeat)
    assert outputs.shape == (1,)
    assert trial.growth_bytes == (growth and growth << 20)
    assert trial.program.calls == runs  # pyright: ignore[reportAttributeAccessIssue]
    assert trial.first_run_s == 5.0


def test_short_calls_are_repeated_until_a_sample_is_long_enough() -> None:
    clock = Clock()
    trial = fake_trial(clock, 1e-5, first_run_s=1e-5)
    _measure.glance(trial, None, (), {}, instruments(clock))
    assert trial.repeats * 1e-5 == pytest.approx(_measure.SAMPLE_S)
    assert trial.samples == []
    _measure.time_rounds([trial], (), {}, instruments(clock), seconds=0.0, deadline=1e9)
    assert trial.run_s == pytest.approx(1e-5)


def test_between_samples_there_is_relief() -> None:
    clock, reliefs = Clock(), list[float]()
    trials = [fake_trial(clock, 1.0, first_run_s=1.0) for _ in range(2)]
    measure = replace(instruments(clock), relieve=lambda: reliefs.append(clock.now))
    _measure.time_rounds(trials, (), {}, measure, seconds=0.0, deadline=1e9)
    assert len(reliefs) == clock.now >= 2 * _measure.ROUNDS_LEAST
    assert reliefs == sorted(set(reliefs))


def test_far_slower_than_the_best_gets_no_second_run() -> None:
    clock = Clock()
    trial = fake_trial(clock, 10.0, first_run_s=10.0)
    _measure.glance(trial, 1.0, (), {}, instruments(clock))
    assert (trial.is_far_slower, trial.run_s) == (True, 10.0)
    assert trial.program.calls == 0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_slow_start_of_a_short_call_is_forgiven() -> None:
    clock = Clock()
    trial = fake_trial(clock, 1e-4, first_run_s=0.1)
    _measure.glance(trial, 1e-4, (), {}, instruments(clock))
    assert trial.samples == []
    assert trial.repeats == 10


def test_a_glance_takes_the_least_disturbed_of_a_few_runs() -> None:
    clock = Clock()
    trial = fake_trial(clock, 4e-3, 3e-3, 9e-3, 9e-3, first_run_s=1e-2)
    _measure.glance(trial, None, (), {}, instruments(clock))
    assert trial.run_s == pytest.approx(3e-3)
    assert trial.samples == []
    once = fake_trial(clock, 4e-3, 3e-3, first_run_s=1e-2)
    _measure.glance(once, None, (), {}, instruments(clock), once=True)
    assert (once.run_s, once.repeats) == (pytest.approx(4e-3), 1)


def test_what_two_measurements_differ_by_is_their_noise() -> None:
    once, again = fake_trial(Clock(), 1.0), fake_trial(Clock(), 1.0)
    assert _measure.difference(once, again) is None
    once.samples, again.samples = [1.0] * 5, [1.1] * 5
    assert _measure.difference(once, again) == pytest.approx(0.1)
    assert _measure.difference(again, once) == pytest.approx(0.1)


def test_samples_that_scatter_are_noise_though_their_medians_agree() -> None:
    once, again = fake_trial(Clock(), 1.0), fake_trial(Clock(), 1.0)
    few, many = [0.8, 0.9, 1.0, 1.1, 1.2], [0.8, 0.9, 1.0, 1.1, 1.2] * 20
    once.samples, again.samples = few, few
    noise = _measure.difference(once, again)
    assert noise is not None
    assert noise > 0.2
    once.samples, again.samples = many, many
    assert (_measure.difference(once, again) or 1) < noise / 4


def test_candidates_take_turns_and_the_slow_leave_early() -> None:
    clock = Clock()
    fast, slow = fake_trial(clock, 1.0), fake_trial(clock, 9.0, strategy=MAP)
    _measure.time_rounds([fast, slow], (), {}, instruments(clock), seconds=1e9, deadline=1e9)
    assert (len(fast.samples), len(slow.samples)) == (_measure.ROUNDS_MOST, 2)


def test_one_disturbed_sample_throws_nobody_out() -> None:
    clock = Clock()
    steady, disturbed = fake_trial(clock, 1.0), fake_trial(clock, 100.0, 1.0)
    _measure.time_rounds([steady, disturbed], (), {}, instruments(clock), seconds=1e9, deadline=1e9)
    assert len(disturbed.samples) == _measure.ROUNDS_MOST
    assert disturbed.run_s == 1.0
    assert disturbed.run_mad_s == 0.0


@pytest.mark.parametrize(
    ("seconds", "deadline", "rounds"),
    [(0.0, 1e9, _measure.ROUNDS_LEAST), (1e9, 1.5, 2), (0, -1, 0)],
)
def test_rounds_end_when_enough_or_when_time_is_up(
    seconds: float, deadline: float, rounds: int
) -> None:
    clock = Clock()
    trial = fake_trial(clock, 1.0)
    _measure.time_rounds([trial], (), {}, instruments(clock), seconds=seconds, deadline=deadline)
    assert len(trial.samples) == rounds


def test_no_figure_is_no_zero() -> None:
    trial = fake_trial(Clock(), 1.0)
    assert (trial.run_s, trial.run_mad_s) == (None, None)
    trial.samples.append(1.0)
    assert (trial.run_s, trial.run_mad_s) == (1.0, None)


# Agreement with the reference.

AGREE = [
    (np.float32([1, 2]), np.float32([1, 2.0005])),
    (np.float32([np.nan, np.inf, 1]), np.float32([np.nan, np.inf, 1])),
    (np.float64([1, 2]), np.float64([1, 2 + 1e-9])),
    (np.complex64([1 + 1j]), np.complex64([1 + 1.0005j])),
    (jnp.bfloat16([1, 2]), jnp.bfloat16([1, 2.01])),
    (np.float32([1e6, 1e-3]), np.float32([1e6, 0])),  # relative to the largest value
    (np.int32([1, 2]), np.int32([1, 2])),
    (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)),
]
DIFFER = [
    (np.float32([1, 2]), np.float32([1, 2.1])),
    (np.float32([np.nan, 1]), np.float32([1, 1])),
    (np.float32([np.inf, 1]), np.float32([-np.inf, 1])),
    (np.float64([1, 2]), np.float64([1, 2.0001])),
    (np.int32([1, 2]), np.int32([1, 3])),
    (np.array([True]), np.array([False])),
    (np.float32([1]), np.float64([1])),
    (np.float32([1]), np.float32([1, 1])),
]


@pytest.mark.parametrize(("expected", "found"), AGREE)
def test_rounding_agrees(expected: Any, found: Any) -> None:
    assert Reference({"a": expected}).disagreement({"a": found}) is None


@pytest.mark.parametrize(("expected", "found"), DIFFER)
def test_anything_more_disagrees(expected: Any, found: Any) -> None:
    assert "output 0" in str(Reference({"a": expected}).disagreement({"a": found}))


def test_keys_are_compared_exactly() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    assert Reference(keys).disagreement(keys) is None
    assert Reference(keys).disagreement(keys[::-1]) is not None


def test_large_outputs_are_compared_by_an_even_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_measure, "WHOLE_REFERENCE_BYTES", 1000)
    expected = np.ones((100, 100), np.float32)
    reference = Reference(expected)
    assert reference.disagreement(expected) is None
    assert sum(each.size for each in reference._expected) <= 1000 / 4
    for column in range(100):  # whole wrong columns are seen, as whole wrong rows are
        wrong = expected.copy()
        wrong[:, column] = 0
        assert (reference.disagreement(wrong) is None) == (
            column not in {index % 100 for index in range(0, 10_000, reference._stride)}
        )
    assert reference.disagreement(expected * 2) is not None
