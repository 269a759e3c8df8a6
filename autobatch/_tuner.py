"""One tuning: tries the candidates on the caller's arrays and returns the record.

Which candidates, is `_search`'s; how they are measured, `_measure`'s; which one wins, `_choose`'s.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from autobatch import _measure, _memory
from autobatch._bound import tree_bytes
from autobatch._choose import choose, total_s
from autobatch._eligibility import has_callback, may_not_end
from autobatch._errors import warn_once
from autobatch._gate import Need, predicted_bytes
from autobatch._instruments import Instruments
from autobatch._key import device_in_words
from autobatch._measure import Reference, Trial
from autobatch._nesting import busy
from autobatch._program import Program
from autobatch._record import Data, Limits, Outcome, PeakSource, Record, Status
from autobatch._search import candidates, left_out
from autobatch._strategies import VMAP, Strategy, rows_at_once
from autobatch._units import format_bytes, format_factor, format_seconds
from autobatch._workload import Workload, equations

LOGGER = logging.getLogger("autobatch")

LONG_S = 5.0
"""A tuning expected to take longer is announced."""
_EQUATION_S = 5e-4
"""Rough compile time of one equation, to tell a long tuning before it starts."""
# What XLA says where it planned the buffer, and where a library inside asked for it ("failed to
# allocate", "allocation failed").
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "llocat")

_DEVICE = threading.RLock()
"""Held while candidates run, so that two tunings of one process do not disturb each other."""


NewProgram = Callable[[], Program]
"""Returns a fresh program of the mapped function."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be tuned.

    Attributes:
        workload: the described call.
        arrays: those of the call, or stand-ins.
        device: the `jax.Device` they are worked on.
        limits: the budget on this device.
        key, parts, name: as the record holds them.
        new_program: returns a fresh program; candidates never compile on one in service.
        also: strategies to measure besides those that the search picks.
        data: whether `arrays` are the caller's arrays or stand-ins.
    """

    workload: Workload
    arrays: tuple[Any, ...]
    device: Any
    limits: Limits
    key: str
    parts: Mapping[str, Any]
    name: str
    new_program: NewProgram
    also: tuple[Strategy, ...] = ()
    data: Data = "real"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a tuning found, and the programs that it compiled."""

    record: Record
    programs: Mapping[Strategy, Program]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a tuning, with the record of what had been measured by then."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record


def tune(
    job: Job, instruments: Instruments, *, resume: tuple[Record, Iterable[Strategy]] | None = None
) -> Tuned:
    """Returns the record of a workload, measured on the caller's arrays, and the programs.

    Args:
        job: what is to be tuned.
        instruments: clock and memory, replaced in tests.
        resume: a record of this workload and those of its strategies to measure now, because the
            limits that kept them out are wider.

    Raises:
        ValueError, TypeError: what `jax.vmap` raises for this call.
        Interrupted: the user pressed Ctrl-C; it holds the record of what had been measured.
    """
    with _DEVICE, busy():
        return _Tuning(job, instruments).run(resume)


class _Tuning:
    def __init__(self, job: Job, instruments: Instruments) -> None:
        self._job, self._instruments = job, instruments
        self._start = instruments.clock()
        self._deadline = self._start + job.limits.tuning_s
        self._trials: list[Trial] = []
        self._failures: list[Outcome] = []
        self._reference: Reference | None = None
        self._args, self._kwargs = job.workload.statics.rebuilt(job.arrays)
        self._argument_bytes = tree_bytes(job.arrays)
        self._announced = False
        self._noise: float | None = None
        row = job.workload.row
        # Each call of a `pure_callback` runs a user's code: as few as will do.
        self._is_called_back = row is not None and has_callback(row)

    def run(self, resume: tuple[Record, Iterable[Strategy]] | None) -> Tuned:
        default = self._trace(VMAP)  # before anything is compiled: misuse is the user's error
        kept: tuple[Outcome, ...] = ()
        if resume is None:
            strategies = self._candidates(default)
            kept = left_out(self._job.workload.batch_size, strategies)
            strategies, barred = self._ending(strategies)
            kept += barred
        else:
            record, wanted = resume
            rows, strategies = self._job.workload.batch_size, tuple(wanted)
            chosen = choose(record, self._job.limits)
            if chosen is not None:  # what the others must agree with
                strategies = (chosen, *strategies)
            strategies = tuple(sorted(strategies, key=lambda each: rows_at_once(each, rows)))
            kept = tuple(each for each in record.outcomes if each.strategy not in strategies)
        traced = {VMAP: default}
        self._announce(
            len(strategies) * _EQUATION_S * sum(1 for _ in equations(default.traced.jaxpr))
        )
        del default
        interrupted = False
        try:
            for number, strategy in enumerate(strategies):
                self._try(strategy, traced.pop(strategy, None))
                self._announce((len(strategies) - number - 1) * self._slowest())
            traced.clear()
            self._time()
        except KeyboardInterrupt:
            interrupted = True
        self._reference = None
        reason = "interrupted" if interrupted else "the time for tuning was up"
        outcomes = {
            each: Outcome(strategy=each, status="out-of-time", reason=reason) for each in strategies
        }
        outcomes |= {each.strategy: each for each in (*self._measured(), *self._failures)}
        outcomes |= {each.strategy: each for each in kept}
        record = self._record(tuple(outcomes.values()), interrupted)
        if interrupted:
            raise Interrupted(record)
        self._report(record)
        return Tuned(record=record, programs={each.strategy: each.program for each in self._trials})

    def _candidates(self, default: Trial) -> tuple[Strategy, ...]:
        rows = self._job.workload.batch_size
        outputs = tree_bytes(default.traced.jaxpr.out_avals)
        working = max(0, default.bound_bytes - self._argument_bytes - outputs)
        strategies = candidates(
            batch_size=rows, row_bytes=(working + self._mapped_bytes() + outputs) // rows
        )
        strategies += tuple(each for each in self._job.also if each not in strategies)
        if self._fits(default.bound_bytes):
            return strategies
        return tuple(sorted(strategies, key=lambda each: rows_at_once(each, rows)))

    def _ending(
        self, strategies: tuple[Strategy, ...]
    ) -> tuple[tuple[Strategy, ...], tuple[Outcome, ...]]:
        """Returns the strategies that will end, and outcomes of those that may not."""
        row = self._job.workload.row
        if row is None or not may_not_end(row):
            return strategies, ()
        reason = "may not end: vectorised, a loop inside a branch runs on rows not meant for it"
        return tuple(each for each in strategies if each.family in ("map", "unrolled")), tuple(
            Outcome(strategy=each, status="ineligible", reason=reason)
            for each in strategies
            if each.family in ("vmap", "chunked")
        )

    def _trace(self, strategy: Strategy) -> Trial:
        job, program = self._job, self._job.new_program()
        with program.prepared(job.workload, strategy):
            return _measure.trace(strategy, program, self._args, self._kwargs)

    def _try(self, strategy: Strategy, trial: Trial | None) -> None:
        """Takes one candidate through the gates; it ends among the trials or the failures."""
        if self._instruments.clock() > self._deadline:
            return
        try:
            trial = trial or self._trace(strategy)
            predicted = self._predicted(trial)
            if not self._fits(predicted):
                self._fail_memory(strategy, predicted, "may need")
                return
            _measure.compile_(trial, self._instruments)
            planned = self._argument_bytes + (trial.planned_bytes or 0)
            if not self._fits(planned):
                self._fail_memory(strategy, planned, "would need")
                return
            if self._instruments.clock() > self._deadline:
                return
            self._run(trial)
        except Exception as error:
            message = str(error).strip().splitlines()[0] if str(error).strip() else ""
            exhausted = isinstance(error, MemoryError) or any(
                each in str(error) for each in _OUT_OF_MEMORY
            )
            status: Status = "out-of-memory" if exhausted else "failed"
            self._fail(strategy, status, f"{type(error).__name__}: {message:.200}", trial)

    def _run(self, trial: Trial) -> None:
        job, instruments = self._job, self._instruments
        outputs = _measure.first_run(trial, self._args, self._kwargs, job.device, instruments)
        if self._reference is None:
            self._reference = Reference(outputs)
        else:
            disagreement = self._reference.disagreement(outputs)
            if disagreement is not None:
                self._fail(trial.strategy, "wrong-result", f"wrong result: {disagreement}", trial)
                warn_once(
                    f"`{job.name}` mapped with {trial.strategy} gives a wrong result on "
                    f"{device_in_words(job.device)}: {disagreement}. It is not used."
                )
                return
        del outputs
        firsts = [each.first_run_s for each in self._trials if each.first_run_s is not None]
        self._trials.append(trial)
        if instruments.clock() > self._deadline:
            trial.is_far_slower, trial.rough_s = True, trial.first_run_s
            return
        _measure.calibrate(
            trial,
            min(firsts, default=None),
            self._args,
            self._kwargs,
            instruments,
            most_repeats=1 if self._is_called_back else 1000,
        )

    def _time(self) -> None:
        instruments = self._instruments
        timed = [each for each in self._trials if not each.is_far_slower]
        if not timed:
            return
        once = next((each for each in timed if each.strategy == VMAP), timed[0])
        again = replace(once, samples=[])
        compiling = sum(each.compile_s or 0.0 for each in timed)
        _measure.time_rounds(
            [*timed, again],
            self._args,
            self._kwargs,
            instruments,
            seconds=min(2.0, max(0.1, 0.25 * compiling)),
            deadline=self._deadline,
            most_rounds=_measure.ROUNDS_LEAST if self._is_called_back else _measure.ROUNDS_MOST,
        )
        first, second = once.run_s, again.run_s if again.samples else None
        if first and second:
            self._noise = abs(first - second) / min(first, second)

    def _fits(self, count: int) -> bool:
        limit = self._job.limits.memory_bytes
        return limit is None or count <= limit

    def _predicted(self, trial: Trial) -> int:
        """Returns the bytes that a candidate may need, by its bound and what others needed."""
        rows = self._job.workload.batch_size
        return predicted_bytes(
            bound_bytes=trial.bound_bytes,
            rows_at_once=rows_at_once(trial.strategy, rows),
            argument_bytes=self._argument_bytes,
            known=[
                Need(
                    rows_at_once=rows_at_once(each.strategy, rows),
                    bound_bytes=each.bound_bytes,
                    needed_bytes=self._peak(each, argument_bytes=0)[0] or 0,
                )
                for each in self._trials
                if each.growth_bytes is not None
            ],
        )

    def _fail_memory(self, strategy: Strategy, count: int, verb: str) -> None:
        limit = format_bytes(self._job.limits.memory_bytes)
        reason = f"{verb} {format_bytes(count)} of {limit}; not run"
        self._failures.append(
            Outcome(strategy=strategy, status="over-memory", predicted_bytes=count, reason=reason)
        )

    def _fail(
        self, strategy: Strategy, status: Status, reason: str, trial: Trial | None = None
    ) -> None:
        compile_s = None if trial is None else trial.compile_s
        self._failures.append(
            Outcome(strategy=strategy, status=status, compile_s=compile_s, reason=reason)
        )

    def _measured(self) -> Iterable[Outcome]:
        for trial in self._trials:
            peak, source = self._peak(trial, self._argument_bytes)
            yield Outcome(
                strategy=trial.strategy,
                status="measured",
                compile_s=trial.compile_s,
                run_s=trial.run_s,
                run_mad_s=trial.run_mad_s,
                samples=max(1, len(trial.samples)),
                peak_bytes=peak,
                peak_source=source,
                predicted_bytes=trial.bound_bytes,
            )

    def _record(self, outcomes: tuple[Outcome, ...], interrupted: bool) -> Record:
        job, elapsed = self._job, self._instruments.clock() - self._start
        # What Ctrl-C kept out is measured by the next tuning with the same budget.
        tuning_s = min(elapsed, job.limits.tuning_s) if interrupted else job.limits.tuning_s
        return Record(
            key=job.key,
            parts=job.parts,
            name=job.name,
            batch_size=job.workload.batch_size,
            device=device_in_words(job.device),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            outcomes=outcomes,
            searched=replace(job.limits, tuning_s=tuning_s),
            noise=self._noise,
            tuned_in_s=elapsed,
            data=job.data,
        )

    def _peak(self, trial: Trial, argument_bytes: int) -> tuple[int | None, PeakSource | None]:
        return _memory.peak_bytes(
            argument_bytes, trial.planned_bytes, trial.growth_bytes, self._job.device.platform
        )

    def _mapped_bytes(self) -> int:
        workload = self._job.workload
        pairs = zip(workload.arguments, workload.in_axes, strict=True)
        return tree_bytes([argument for argument, axis in pairs if axis is not None])

    def _slowest(self) -> float:
        """Returns the seconds that the slowest candidate so far took to compile and run twice."""
        return max(
            ((each.compile_s or 0.0) + 2 * (each.first_run_s or 0.0) for each in self._trials),
            default=0.0,
        )

    def _announce(self, seconds: float) -> None:
        if seconds > LONG_S and not self._announced:
            self._announced = True
            LOGGER.warning(
                "autobatch: tuning `%s` (%d rows) may take %s or more, once; tune ahead with "
                "`.tune(...)`, or bound it with Budget(tuning_s=...)",
                self._job.name,
                self._job.workload.batch_size,
                format_seconds(seconds),
            )

    def _report(self, record: Record) -> None:
        limits = self._job.limits
        chosen, text = choose(record, limits), ""
        totals = {each.strategy: total_s(each, limits.expected_calls) for each in record.outcomes}
        if chosen not in (None, VMAP) and math.isfinite(totals.get(VMAP, math.inf)):
            text = f", in all {format_factor(totals[VMAP] / totals[chosen])} faster than vmap"
        LOGGER.info(
            "autobatch: tuned `%s` (%d rows, %s) in %s: %s%s",
            record.name,
            record.batch_size,
            record.device,
            format_seconds(record.tuned_in_s),
            chosen or "nothing viable",
            text,
        )
