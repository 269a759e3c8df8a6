"""One tuning: tries the candidates on the caller's arrays and returns the record.

Which candidates, is `_search`'s; how they are measured, `_measure`'s; which one wins, `_choose`'s.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

import jax

from autobatch import _measure, _memory
from autobatch._bound import tree_bytes
from autobatch._choose import LEAST_GAIN, choose, total_s
from autobatch._eligibility import has_callback, may_not_end
from autobatch._errors import is_out_of_memory, warn_once
from autobatch._gate import Need, predicted_bytes
from autobatch._instruments import Instruments
from autobatch._job import Interrupted, Job, Phase, Tuned
from autobatch._key import device_in_words
from autobatch._load import contention
from autobatch._measure import Reference, Trial
from autobatch._nesting import busy
from autobatch._record import Outcome, PeakSource, Record, Status
from autobatch._report import announcement, summary
from autobatch._search import Search, over_memory
from autobatch._start import CONTENDER, known_facts, start
from autobatch._strategies import VMAP, Strategy, rows_at_once

LOGGER = logging.getLogger("autobatch")

LONG_S = 5.0
"""A tuning expected to take longer is announced."""
_EQUATION_S = 5e-4
"""Rough compile time of one equation, to tell a long tuning before it starts."""
_USUAL_CANDIDATES = 4
"""Candidates that a search usually tries."""
MOST_CARE = 10.0
"""Timing takes so many times as long, at most, where calls are many."""
QUIET, REPETITIONS = 0.05, 3
"""Rounds are repeated, so often at most, while two measurements of one program differ by more."""

_DEVICE = threading.RLock()
"""Held while candidates run, so that two tunings of one process do not disturb each other."""


def tune(job: Job, instruments: Instruments, *, resume: Record | None = None) -> Tuned:
    """Returns the record of a workload, measured on the caller's arrays, and the programs.

    Args:
        job: what is to be tuned.
        instruments: clock and memory, replaced in tests.
        resume: a record of this workload whose search these limits let go on.

    Raises:
        ValueError, TypeError: what `jax.vmap` raises for this call.
        Interrupted: the user pressed Ctrl-C; it holds the record of what had been measured.
    """
    jax.block_until_ready(job.arrays)  # what computes them is nobody's time or memory
    with _DEVICE, busy():
        relief = _memory.Relief(job.device, job.limits.memory_bytes)
        return _Tuning(job, replace(instruments, relieve=relief), resume).run()


class _Tuning:
    def __init__(self, job: Job, instruments: Instruments, resume: Record | None) -> None:
        self._job, self._instruments = job, instruments
        self._start, self._load_before = instruments.clock(), instruments.load()
        left = None if job.supervision is None else job.supervision.known
        self._spent_s = 0.0 if left is None else left.tuned_in_s
        self._deadline = self._start + job.limits.tuning_s - self._spent_s
        self._trials: list[Trial] = []
        self._refused: list[Outcome] = []  # for a bound that the next measurement may correct
        self._reference: Reference | None = None
        self._args, self._kwargs = job.workload.statics.rebuilt(job.arrays)
        self._announced = False
        self._under_way: Strategy | None = None
        self._noise: float | None = None
        # What is called more often is worth a closer look.
        self._care = min(MOST_CARE, max(1.0, math.sqrt(job.limits.expected_calls / 1000)))
        row = job.workload.row
        # Each call of a `pure_callback` runs a user's code: as few as will do.
        self._is_called_back = row is not None and has_callback(row)
        # Before anything is compiled: misuse is the user's error.
        self._default: Trial | None = self._trace(VMAP)
        self._facts = known_facts(
            job.workload,
            job.arrays,
            bound_bytes=self._default.bound_bytes,
            output_bytes=tree_bytes(self._default.traced.jaxpr.out_avals),
        )
        begun = start(
            job.limits,
            may_hang=row is not None and may_not_end(row),
            is_derivative=job.workload.moving is not None,
            is_supervised=job.supervision is not None,
            resume=resume,
            left=left,
        )
        self._first = dict(begun.first)
        self._others = list(begun.kept)  # what was not measured, and what was in earlier tunings
        self._search = Search(
            batch_size=job.workload.batch_size,
            facts=self._facts,
            limits=job.limits,
            families=begun.families,
            remat=job.workload.moving is not None,
            also=job.also,
        )

    def run(self) -> Tuned:
        self._announce(_EQUATION_S * _USUAL_CANDIDATES * self._facts.equations)
        cut_by: str | None = None
        try:
            self._tell()
            cut_by = self._try_all()
            with self._job.alone(self._deadline - self._instruments.clock()):
                self._time()
        except KeyboardInterrupt:
            cut_by = "interrupted"
            if self._under_way is not None:
                self._fail(self._under_way, "out-of-time", cut_by)
        self._reference = self._default = None
        record = self._so_far(cut_by)
        if cut_by == "interrupted":
            raise Interrupted(record)
        LOGGER.info(summary(record, choose(record, self._job.limits), self._job.limits))
        return Tuned(record=record, programs={each.strategy: each.program for each in self._trials})

    def _try_all(self) -> str | None:
        """Tries candidates while one is worth it; returns what cut that short, if anything did."""
        strategy = self._next()
        while strategy is not None:
            if self._instruments.clock() > self._deadline:
                return "the time for tuning was up"
            self._try(strategy)
            self._tell()
            self._announce(_USUAL_CANDIDATES * self._slowest())
            strategy = self._next()
        return None

    def _next(self) -> Strategy | None:
        return next(iter(self._first), None) or self._search.next(self._outcomes(), self._needs())

    def _tell(self) -> None:
        """Tells the supervising process what is known by now: this one may not live."""
        if self._job.supervision is not None:
            self._job.supervision.learnt(self._so_far("interrupted"))

    def _trying(self, phase: Phase, *strategies: Strategy) -> None:
        if self._job.supervision is not None:
            self._job.supervision.trying(strategies, phase)

    def _trace(self, strategy: Strategy) -> Trial:
        job, program = self._job, self._job.new_program()
        with program.prepared(job.workload, strategy):
            return _measure.trace(strategy, program, self._args, self._kwargs)

    def _try(self, strategy: Strategy) -> None:
        """Takes one candidate through the gates; it ends among the trials or the others."""
        self._under_way = strategy
        self._first.pop(strategy, None)
        self._trying("compile", strategy)
        trial, self._default = self._default if strategy == VMAP else None, None
        limit = self._job.limits.memory_bytes
        try:
            trial = trial or self._trace(strategy)
            predicted = self._predicted(trial)
            if limit is not None and predicted > limit:
                self._refused.append(over_memory(strategy, predicted, limit, "may need"))
            else:
                self._compile_and_run(trial, limit)
        except Exception as error:
            message = str(error).strip().splitlines()[0] if str(error).strip() else ""
            status: Status = "out-of-memory" if is_out_of_memory(error) else "failed"
            self._fail(strategy, status, f"{type(error).__name__}: {message:.200}", trial)
        self._under_way = None

    def _compile_and_run(self, trial: Trial, limit: int | None) -> None:
        _measure.compile_(trial, self._instruments)
        planned = self._facts.argument_bytes + (trial.planned_bytes or 0)
        if limit is not None and planned > limit:
            self._others.append(over_memory(trial.strategy, planned, limit, "would need"))
        elif self._instruments.clock() > self._deadline:
            self._fail(trial.strategy, "out-of-time", "compiled, but then the time was up", trial)
        else:
            self._trying("wait", trial.strategy)
            with self._job.alone(self._deadline - self._instruments.clock()):
                self._run(trial)

    def _run(self, trial: Trial) -> None:
        job, instruments = self._job, self._instruments
        self._trying("run", trial.strategy)
        call = (self._args, self._kwargs, job.device, instruments)
        outputs = _measure.first_run(trial, *call, self._may_repeat)
        if self._reference is None:
            self._reference = Reference(outputs, job.workload.sums)
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
        self._refused.clear()
        if instruments.clock() > self._deadline:
            trial.is_far_slower, trial.glances = True, [trial.first_run_s or 0.0]
            return
        self._trying("run", trial.strategy)
        _measure.glance(
            trial,
            min(firsts, default=None),
            self._args,
            self._kwargs,
            instruments,
            care=self._care,
            once=self._is_called_back,
        )

    def _may_repeat(self, trial: Trial) -> bool:
        """Returns whether a first run may be repeated; if so, says that another begins."""
        ends = self._instruments.clock() + (trial.first_run_s or 0.0)
        if self._trials or self._is_called_back or ends > self._deadline:
            return False
        self._trying("run", trial.strategy)
        return True

    def _time(self) -> None:
        """Tells apart those of the trials that may win, and how far two measurements differ."""
        calls = self._job.limits.expected_calls
        totals = {each.strategy: total_s(each, calls) for each in self._measured()}
        best_s = min(totals.values(), default=0.0)
        if len(totals) < 2:
            return
        most_s = CONTENDER * (1 + (self._load() or 0.0)) * best_s  # a glance may be disturbed
        timed = [each for each in self._trials if totals[each.strategy] <= most_s]
        if VMAP in totals and (1 - LEAST_GAIN / 2) * totals[VMAP] <= best_s:
            timed = [each for each in timed if each.strategy == VMAP]  # nothing replaces it
        once = next((each for each in timed if each.strategy == VMAP), timed[0])
        again = replace(once, samples=[])
        most = REPETITIONS if len(timed) > 1 and not self._is_called_back else 1
        enough = self._instruments.clock() + most * self._rounds_s()
        for _ in range(most):
            self._rounds([*timed, again])
            self._noise = _measure.difference(once, again)
            is_quiet = self._noise is None or self._noise <= QUIET
            if is_quiet or self._instruments.clock() > enough:
                break
        self._confirm()

    def _confirm(self) -> None:
        """Measures a winner against `vmap` once more by themselves: the best of many is lucky."""
        trials, confirmed = {each.strategy: each for each in self._trials}, {VMAP}
        while VMAP in trials:
            winner = choose(self._record(tuple(self._measured()), False), self._job.limits)
            if winner in confirmed or winner not in trials:
                return
            confirmed.add(winner)
            pair = [trials[VMAP], trials[winner]]
            if _measure.is_beyond_doubt(*pair):
                return
            for each in pair:
                each.samples = []
            self._rounds(pair)
            self._noise = max(self._noise or 0.0, _measure.scatter(*pair))

    def _rounds_s(self) -> float:
        """Returns the seconds that rounds may take, beyond the least number of them."""
        compiling = sum(each.compile_s or 0.0 for each in self._trials)
        return self._care * min(1.0, max(0.03, 0.1 * compiling))

    def _rounds(self, trials: list[Trial]) -> None:
        self._trying("time", *(each.strategy for each in trials))
        _measure.time_rounds(
            trials,
            self._args,
            self._kwargs,
            self._instruments,
            seconds=self._rounds_s(),
            deadline=self._deadline,
            most_rounds=_measure.ROUNDS_LEAST if self._is_called_back else _measure.ROUNDS_MOST,
        )

    def _predicted(self, trial: Trial) -> int:
        """Returns the bytes that a candidate may need, by its bound and what others needed."""
        return predicted_bytes(
            bound_bytes=trial.bound_bytes,
            rows_at_once=rows_at_once(trial.strategy, self._job.workload.batch_size),
            argument_bytes=self._facts.argument_bytes,
            known=self._needs(),
        )

    def _needs(self) -> list[Need]:
        return [
            Need(
                rows_at_once=rows_at_once(each.strategy, self._job.workload.batch_size),
                bound_bytes=each.bound_bytes,
                needed_bytes=self._peak(each, 0)[0] or 0,
            )
            for each in self._trials
            if self._is_known(each)
        ]

    def _is_known(self, trial: Trial) -> bool:
        """Returns whether what a candidate needed is known, and not only what XLA planned.

        On a CPU libraries allocate beside the plan. On other devices they do not, and there the
        allocator's peak, which cannot be reset, seldom says anything.
        """
        is_planned = trial.planned_bytes is not None and self._job.device.platform != "cpu"
        return is_planned or trial.growth_bytes is not None

    def _fail(
        self, strategy: Strategy, status: Status, reason: str, trial: Trial | None = None
    ) -> None:
        compile_s = None if trial is None else trial.compile_s
        self._others.append(
            Outcome(strategy=strategy, status=status, compile_s=compile_s, reason=reason)
        )

    def _outcomes(self) -> list[Outcome]:
        earlier = [each for each in self._first.values() if each is not None]
        return [*self._measured(), *self._others, *self._refused, *earlier]

    def _so_far(self, cut_by: str | None) -> Record:
        """Returns the record of what is known by now."""
        outcomes = self._outcomes()
        outcomes += self._search.left_out(outcomes, self._needs(), cut_by=cut_by)
        return self._record(tuple(outcomes), cut_by == "interrupted")

    def _measured(self) -> Iterable[Outcome]:
        for trial in self._trials:
            peak, source = self._peak(trial, self._facts.argument_bytes)
            yield Outcome(
                strategy=trial.strategy,
                status="measured",
                compile_s=trial.compile_s,
                compile_is_cached=trial.compile_is_cached,
                run_s=trial.run_s,
                run_mad_s=trial.run_mad_s,
                samples=len(trial.samples or trial.glances),
                peak_bytes=peak,
                peak_source=source,
                predicted_bytes=trial.bound_bytes,
            )

    def _record(self, outcomes: tuple[Outcome, ...], interrupted: bool) -> Record:
        job = self._job
        tuned_in_s = self._spent_s + self._instruments.clock() - self._start
        # What Ctrl-C kept out is measured by the next tuning with the same budget.
        tuning_s = min(tuned_in_s, job.limits.tuning_s) if interrupted else job.limits.tuning_s
        return Record(
            key=job.key,
            parts=job.parts,
            name=job.name,
            batch_size=job.workload.batch_size,
            device=device_in_words(job.device),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            facts=self._facts,
            outcomes=outcomes,
            searched=replace(job.limits, tuning_s=tuning_s),
            noise=self._noise,
            tuned_in_s=tuned_in_s,
            load=self._load() if job.device.platform == "cpu" else None,
            data=job.data,
        )

    def _load(self) -> float | None:
        return contention(self._load_before, self._instruments.load())

    def _peak(self, trial: Trial, argument_bytes: int) -> tuple[int | None, PeakSource | None]:
        return _memory.peak_bytes(
            argument_bytes, trial.planned_bytes, trial.growth_bytes, self._job.device.platform
        )

    def _slowest(self) -> float:
        """Returns the seconds that the slowest candidate so far took to compile and run twice."""
        return max(
            ((each.compile_s or 0.0) + 2 * (each.first_run_s or 0.0) for each in self._trials),
            default=0.0,
        )

    def _announce(self, seconds: float) -> None:
        if seconds > LONG_S and not self._announced:
            self._announced = True
            LOGGER.warning(announcement(self._job.name, self._job.workload.batch_size, seconds))
