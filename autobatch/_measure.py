"""Compiling, running, timing and comparing candidates. What to try, and whether, is `_tuner`'s.

The clock and the memory that it measures with are `Instruments`.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

from autobatch._bound import live_bytes
from autobatch._instruments import Instruments
from autobatch._memory import FIRST_RUN_BYTES, LIBRARIES_BYTES, no_garbage_collection
from autobatch._program import Prepared
from autobatch._strategies import Strategy

SAMPLE_S = 1e-3
"""A timed sample repeats a call until it lasts at least this long."""
GLANCES, GLANCE_S = 4, 0.01
"""Samples of a candidate by itself, which tell the search where to go: so many, or so long."""
ROUNDS_LEAST, ROUNDS_MOST = 3, 30
"""Samples of a candidate among the others, which tell them apart."""
FAR_SLOWER = 1.5
"""A candidate whose best sample is this many times slower than the best gets no further sample."""
NO_SECOND_RUN_S, NO_SECOND_RUN = 0.25, 4.0
"""A first run, which also loads the executable, is the only one if it is slower than both."""
_SAVED = "/jax/compilation_cache/compile_time_saved_sec"

WHOLE_REFERENCE_BYTES = 64 * 1024 * 1024
"""Outputs up to this size are compared whole."""

_TOLERANCES = {"float64": 1e-7, "complex128": 1e-7, "float32": 2e-3, "complex64": 2e-3}
_SUM_SLACK = 25.0
"""Sums of terms that cancel differ by more, where strategies add in another order."""
_BLOCK = 1 << 20


@dataclass(kw_only=True)
class Trial:
    """A candidate under way: its program and what has been measured of it so far."""

    strategy: Strategy
    program: Prepared
    bound_bytes: int
    traced: Any = None
    compile_s: float | None = None
    compile_is_cached: bool = False
    planned_bytes: int | None = None
    growth_bytes: int | None = None
    first_run_s: float | None = None
    is_far_slower: bool = False
    repeats: int = 1
    glances: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)

    @property
    def run_s(self) -> float | None:
        """Median seconds of one call; the least that a glance saw if there are no samples."""
        if self.samples:
            return statistics.median(self.samples)
        if not self.glances:
            return None
        return min([*self.glances, self.first_run_s or self.glances[0]])

    @property
    def run_mad_s(self) -> float | None:
        """Median absolute deviation of the samples, in seconds."""
        samples = self.samples or self.glances
        if len(samples) < 2:
            return None
        middle = statistics.median(samples)
        return statistics.median(abs(each - middle) for each in samples)


def trace(strategy: Strategy, program: Prepared, args: Any, kwargs: Any) -> Trial:
    """Returns a trial of `program`, traced, with the upper bound of its memory."""
    traced = program.jitted.trace(*args, **kwargs)
    return Trial(
        strategy=strategy, program=program, bound_bytes=live_bytes(traced.jaxpr), traced=traced
    )


def compile_(trial: Trial, instruments: Instruments) -> None:
    """Lowers and compiles on the trial's own jit object, which then serves calls of it.

    What JAX's persistent cache spared is added: a cached executable is no cheap one.
    """
    start = instruments.clock()
    with _compile_time_saved() as saved:
        compiled = trial.traced.lower().compile()
    trial.compile_s = max(0.0, instruments.clock() - start + sum(saved))
    trial.compile_is_cached = bool(saved)
    trial.planned_bytes = instruments.planned(compiled)
    trial.traced = None


def first_run(
    trial: Trial,
    args: Any,
    kwargs: Any,
    device: Any,
    instruments: Instruments,
    may_repeat: Callable[[Trial], bool],
) -> Any:
    """Runs the trial, measures how far memory grows, and returns the outputs.

    The run is no sample: it also loads the code. It only counts, at a glance, where it was quick.
    If a process grew by more than is planned, a second run tells what libraries took once and for
    all: at most `LIBRARIES_BYTES`, since it may also use what the first has left.

    Args:
        trial: compiled.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        device: where it runs.
        instruments: the clock and the memory.
        may_repeat: is asked before a second run.
    """

    def run() -> Any:
        return jax.block_until_ready(trial.program.jitted(*args, **kwargs))

    start = instruments.clock()
    outputs, growth = instruments.growth(run, device)
    trial.first_run_s = instruments.clock() - start
    expected = (trial.planned_bytes or 0) + FIRST_RUN_BYTES
    is_cpu = device.platform == "cpu"
    if growth is not None and growth > expected and is_cpu and may_repeat(trial):
        del outputs
        outputs, again = instruments.growth(run, device)
        if again is not None:
            growth = min(growth, max(again, growth - LIBRARIES_BYTES))
    trial.growth_bytes = growth
    return outputs


def glance(
    trial: Trial,
    best_first_s: float | None,
    args: Any,
    kwargs: Any,
    instruments: Instruments,
    *,
    care: float = 1.0,
    once: bool = False,
) -> None:
    """Runs the trial a few times more: how fast is it, and how often must a sample repeat it?

    One whose first run was far slower than the best first run gets no second; the first is its
    sample. First runs are compared with first runs, because they all load code.

    Args:
        trial: compiled and run once.
        best_first_s: least seconds of a first run so far, or None.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        instruments: the clock.
        care: how many times as long as usual it may take.
        once: whether one more run must do, and no sample may repeat it.
    """
    assert trial.first_run_s is not None
    if best_first_s is not None and trial.first_run_s > max(
        NO_SECOND_RUN_S, NO_SECOND_RUN * best_first_s
    ):
        trial.is_far_slower, trial.glances = True, [trial.first_run_s]
        return
    start = instruments.clock()
    single_s = _sample(trial, args, kwargs, instruments)
    trial.glances = [single_s]
    if once:
        return
    trial.repeats = max(1, min(1000, round(SAMPLE_S / max(single_s, 1e-9))))
    for _ in range(round(care * GLANCES) - 1):
        if instruments.clock() - start > care * GLANCE_S:
            return
        trial.glances.append(_sample(trial, args, kwargs, instruments))


def time_rounds(
    trials: Sequence[Trial],
    args: Any,
    kwargs: Any,
    instruments: Instruments,
    *,
    seconds: float,
    deadline: float,
    most_rounds: int = ROUNDS_MOST,
) -> None:
    """Adds samples to every trial, interleaved in random order, so that drift hits all alike.

    Args:
        trials: compiled and run once.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        instruments: the clock.
        seconds: after the least number of rounds, no round begins beyond this.
        deadline: no sample begins beyond this reading of the clock.
        most_rounds: most samples of a trial.
    """
    order, shuffle = list(trials), random.Random(0).shuffle
    enough = instruments.clock() + seconds
    with no_garbage_collection():
        for done in range(most_rounds):
            if done >= ROUNDS_LEAST and instruments.clock() > enough:
                return
            shuffle(order)
            for trial in order:
                if instruments.clock() > deadline:
                    return
                trial.samples.append(_sample(trial, args, kwargs, instruments))
            best = min(min(trial.samples) for trial in order)
            if done:  # one sample may be a disturbance
                order = [each for each in order if min(each.samples) <= FAR_SLOWER * best]


def difference(once: Trial, again: Trial) -> float | None:
    """Returns by how much two measurements of one program differ, relative to the smaller.

    If their samples scatter, the two medians may be alike by luck; so it is at least three times
    the standard error of a difference. None if there are not two.
    """
    if len(once.samples) < 2 or len(again.samples) < 2:
        return None
    first, second = statistics.median(once.samples), statistics.median(again.samples)
    return max(abs(first - second) / min(first, second), scatter(once, again))


def scatter(one: Trial, other: Trial) -> float:
    """Returns three standard errors of the difference of two run times, relative to them."""
    errors = (
        _standard_error(each.samples) / statistics.median(each.samples)
        for each in (one, other)
        if each.samples
    )
    return 3 * math.hypot(*errors)


def is_beyond_doubt(slow: Trial, quick: Trial) -> bool:
    """Returns whether one is so much quicker than another that no disturbance explains it."""
    return (slow.run_s or 0.0) > NO_SECOND_RUN * (quick.run_s or 0.0)


def _standard_error(samples: Sequence[float]) -> float:
    """Returns the standard error of the median, as if what disturbs samples were normal."""
    middle = statistics.median(samples)
    deviation = 1.4826 * statistics.median(abs(each - middle) for each in samples)
    return 1.2533 * deviation / math.sqrt(len(samples))


def _sample(trial: Trial, args: Any, kwargs: Any, instruments: Instruments) -> float:
    """Returns the seconds of one call, each result held until all of it is ready."""
    jitted = trial.program.jitted
    outputs = None
    start = instruments.clock()
    for _ in range(trial.repeats):
        outputs = jax.block_until_ready(jitted(*args, **kwargs))
    elapsed = instruments.clock() - start
    del outputs
    instruments.relieve()
    return elapsed / trial.repeats


@contextmanager
def _compile_time_saved() -> Iterator[list[float]]:
    """Collects the seconds that JAX's persistent cache spares this thread; one for each hit."""
    saved: list[float] = []
    thread = threading.get_ident()

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _SAVED and threading.get_ident() == thread:
            saved.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield saved
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Reference:
    """Outputs that others are compared with: whole where they are small, else an even sample."""

    def __init__(self, outputs: Any, is_sum: Sequence[bool] = ()) -> None:
        """Keeps what is needed of the outputs.

        Args:
            outputs: results of the candidate that the others are compared with.
            is_sum: for each leaf, whether it is a sum or a mean over the rows, whose terms may
                cancel; none is if it is empty.
        """
        leaves = [_plain(leaf) for leaf in jax.tree.leaves(outputs)]
        total = sum(leaf.nbytes for leaf in leaves)
        self._stride = -(-total // WHOLE_REFERENCE_BYTES) or 1
        # A stride that divides the row length would look at the same columns of every row.
        self._stride += self._stride > 1 and self._stride % 2 == 0
        self._expected = [self._sampled(leaf) for leaf in leaves]
        self._slack = [_SUM_SLACK if each else 1.0 for each in is_sum or [False] * len(leaves)]

    def disagreement(self, outputs: Any) -> str | None:
        """Returns how the outputs disagree with the reference, or None where they agree.

        Floats agree within a tolerance of their dtype, relative to the largest value of the leaf,
        since strategies add in another order; NaN equals NaN. Everything else must be equal.
        """
        leaves = zip(jax.tree.leaves(outputs), self._expected, self._slack, strict=True)
        for number, (leaf, expected, slack) in enumerate(leaves):
            found = self._sampled(_plain(leaf))
            if found.shape != expected.shape or found.dtype != expected.dtype:
                return f"output {number} has another shape or dtype than the reference"
            if not _agree(found, expected, slack):
                return f"output {number} differs from the reference{_by_how_much(found, expected)}"
        return None

    def _sampled(self, leaf: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        flat = leaf.reshape(-1)
        return flat if self._stride == 1 else flat[:: self._stride].copy()


def _plain(leaf: Any) -> np.ndarray[Any, Any]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _agree(leaf: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], slack: float) -> bool:
    """Compares in blocks, so that the comparison itself needs little memory."""
    blocks = [slice(at, at + _BLOCK) for at in range(0, leaf.size, _BLOCK)]
    if not jnp.issubdtype(leaf.dtype, np.inexact):
        return all(np.array_equal(leaf[each], expected[each]) for each in blocks)
    tolerance = slack * _TOLERANCES.get(leaf.dtype.name, 5e-2)
    largest = max((_largest(expected[each]) for each in blocks), default=0.0)
    return all(
        np.allclose(
            _widened(leaf[each]),
            _widened(expected[each]),
            rtol=tolerance,
            atol=tolerance * largest,
            equal_nan=True,
        )
        for each in blocks
    )


def _by_how_much(leaf: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> str:
    if not jnp.issubdtype(leaf.dtype, np.inexact):
        return ""
    largest, difference = _largest(expected), _largest(_widened(leaf) - _widened(expected))
    return f" by {difference / largest:.1e} of its largest value" if largest else ""


def _largest(block: np.ndarray[Any, Any]) -> float:
    sizes = np.abs(_widened(block))
    return float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))


def _widened(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wide = np.complex128 if jnp.issubdtype(block.dtype, np.complexfloating) else np.float64
    return block.astype(wide)
