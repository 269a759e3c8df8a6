"""From a described call to its plan: what this process knows, the store, or a new tuning.

One planner belongs to one mapped function. Which jit object then serves the call is in `_dispatch`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autobatch._bound import tree_bytes
from autobatch._choose import (
    Budget,
    Plan,
    Source,
    choose,
    decide,
    explained,
    is_measured,
    resolve,
    widened,
    without_larger,
)
from autobatch._digest import digest
from autobatch._errors import RecordMissError, warn_once
from autobatch._estimate import estimated
from autobatch._fixed import fixed_plan, unmeasured
from autobatch._instruments import Instruments
from autobatch._job import Interrupted, Job, NewProgram, Supervision
from autobatch._key import device_parts, key_parts
from autobatch._nearest import resized
from autobatch._planned import Planned
from autobatch._recall import Recall
from autobatch._record import Limits, Record
from autobatch._settings import Mode, budget_in_force, mode_in_force
from autobatch._strategies import Strategy
from autobatch._workload import Workload

LOGGER = logging.getLogger("autobatch")

INSTRUMENTS = Instruments()
"""The clock and the memory that tunings measure with; tests put others in its place."""

SIZES_TUNED = 4
"""So many batch sizes of one workload are tuned in a process; others take the nearest's plan."""


@dataclass(kw_only=True)
class Planner:
    """Decides how the calls of one mapped function are mapped.

    Attributes:
        name: what the function is called, for people.
        key_name: the user's `name=`, which keeps records apart; else None.
        budget: the user's budget.
        strategy: the forced strategy, or None.
        mode: the user's `tune=`; None means the environment's.
        store: the user's `store=`.
        also: strategies to measure besides those that the search picks.
        supervision: of tunings by another process, if there is one.
    """

    name: str
    key_name: str | None
    budget: Budget
    strategy: Strategy | None
    mode: Mode | None
    store: str | os.PathLike[str] | bool | None
    also: tuple[Strategy, ...] = ()
    supervision: Supervision | None = None
    _recall: Recall = field(init=False)
    _plans: dict[str, Planned] = field(default_factory=dict)
    _measured: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._recall = Recall(store=self.store)

    def known(
        self, workload: Workload, arrays: Sequence[Any], device: Any, *, may_tune: bool
    ) -> Planned | None:
        """Returns the plan of a workload without measuring anything; None if there is none.

        Args:
            workload: the described call.
            arrays: its arrays, concrete or traced.
            device: the device that it runs on.
            may_tune: whether a tuning on the caller's arrays could follow; if not, a record will
                do that was cut short or measured on stand-ins.

        Raises:
            IneligibleStrategyError: the forced strategy would not keep the meaning.
            NoViableStrategyError: the record says that nothing fits the budget.
            RecordMissError: `tune="require"`, and there is no record.
        """
        fixed = self.fixed(workload, arrays)
        if fixed is not None:
            return fixed
        parts = key_parts(workload, device, name=self.key_name)
        key = digest(parts)
        if key in self._plans:
            return self._plans[key]
        mode = self.tuning_mode()
        could_tune = mode in ("first-call", "force")
        may_tune = may_tune and could_tune
        if may_tune and mode == "force" and key not in self._measured:
            return None
        record, source = self._recall.find(key)
        if record is not None:
            limits = self._limits(arrays, device)
            if may_tune and (record.data == "synthetic" or _is_open(record, limits)):
                return None
            if record.data == "synthetic":
                return self._planned(record, limits, "synthetic", keep=False)
            # What a trace is content with must not keep the next call from measuring.
            is_open = could_tune and (mode == "force" or _is_open(record, limits))
            return self._planned(record, limits, source, keep=may_tune or not is_open)
        if mode == "require":
            raise RecordMissError(self._recall.miss(self.title(workload), parts))
        if not may_tune or self._recall.sizes_tuned(parts) >= SIZES_TUNED:
            planned = self._nearest(workload, arrays, device, parts, may_tune=may_tune)
            if planned is not None:
                return planned
        if mode == "cached":
            return self.estimated(workload, arrays, device, key, "tune='cached'")
        return None

    def fixed(self, workload: Workload, arrays: Sequence[Any]) -> Planned | None:
        """Returns the plan of a workload of which nothing is to be measured, or None.

        Args:
            workload: the described call.
            arrays: its arrays, concrete or traced.

        Raises:
            IneligibleStrategyError: the forced strategy would not keep the meaning.
        """
        plan = fixed_plan(workload, arrays, strategy=self.strategy, name=self.title(workload))
        return None if plan is None else Planned(plan=plan)

    def planned(
        self,
        workload: Workload,
        arrays: Sequence[Any],
        device: Any,
        new_program: NewProgram,
        *,
        anew: bool = False,
    ) -> Planned:
        """Returns the plan of a call on concrete arrays; tunes if there is none.

        Args:
            workload: the described call.
            arrays: its arrays.
            device: the device that it runs on.
            new_program: returns a fresh program of the workload.
            anew: whether to measure again although there is a plan.

        Raises:
            IneligibleStrategyError, NoViableStrategyError, RecordMissError: as `known`.
            ValueError, TypeError: what `jax.vmap` raises for this call.
        """
        if anew:
            fixed = self.fixed(workload, arrays)
            return fixed or self.tuned_anew(workload, arrays, device, new_program)
        known = self.known(workload, arrays, device, may_tune=True)
        return known or self.tuned(workload, arrays, device, new_program)

    def tuned(
        self, workload: Workload, arrays: Sequence[Any], device: Any, new_program: NewProgram
    ) -> Planned:
        """Returns the plan after a tuning on the caller's arrays, and stores the record.

        What a record left out and this budget allows is all that is measured, if there is one.

        Args:
            workload: the described call.
            arrays: its arrays.
            device: the device that it runs on.
            new_program: returns a fresh program of the mapped function.

        Raises:
            NoViableStrategyError: nothing fits the memory that the user allows.
            ValueError, TypeError: what `jax.vmap` raises for this call.
        """
        job = self.job(workload, arrays, device, new_program)
        if self.tuning_mode() == "force" and job.key not in self._measured:
            return self.tuned_anew(workload, arrays, device, new_program)
        return self.in_turn(job)

    def tuned_anew(
        self, workload: Workload, arrays: Sequence[Any], device: Any, new_program: NewProgram
    ) -> Planned:
        """Returns the plan after a tuning that replaces what was known; see `tuned`.

        Raises:
            NoViableStrategyError, ValueError, TypeError: as `tuned`.
        """
        job = self.job(workload, arrays, device, new_program)
        with self._recall.lease(job.key) as lease:
            lease.awaited()
            return self._measure(job, None)

    def relieve(self, workload: Workload, arrays: Sequence[Any], device: Any) -> str | None:
        """Bars, for this process, the plan of a call that ran out of memory, and larger ones.

        Args:
            workload: the described call.
            arrays: its arrays.
            device: the device that it ran on.

        Returns:
            The key of the workload, or None if its plan does not rest on a record or nothing
            smaller was measured.
        """
        if self.fixed(workload, arrays) is not None:
            return None
        key = digest(key_parts(workload, device, name=self.key_name))
        planned = self._plans.get(key)
        if planned is None or planned.record is None:
            return None
        relieved = without_larger(planned.record, planned.plan.strategy)
        if relieved is None:
            return None
        self._recall.replace(relieved, planned.plan.source)
        del self._plans[key]
        warn_once(
            f"`{self.name}` ({workload.batch_size} rows) ran out of memory mapped with "
            f"{planned.plan.strategy}; this process goes on with a smaller plan. Free memory, or "
            "set Budget(memory=...) to what there is."
        )
        return key

    def job(
        self, workload: Workload, arrays: Sequence[Any], device: Any, new_program: NewProgram
    ) -> Job:
        """Returns what a tuning of a workload is given; see `tuned`."""
        parts = key_parts(workload, device, name=self.key_name)
        return Job(
            workload=workload,
            arrays=tuple(arrays),
            device=device,
            limits=self._limits(arrays, device),
            key=digest(parts),
            parts=parts,
            name=self.title(workload),
            new_program=new_program,
            also=self.also,
            supervision=self.supervision,
            alone=self._recall.alone(device_parts(device)),
        )

    def title(self, workload: Workload) -> str:
        """Returns what a workload is called, for people."""
        return self.name if workload.moving is None else f"grad of {self.name}"

    def in_turn(self, job: Job) -> Planned:
        """Returns the plan after a tuning, or after that of another process under way."""
        is_news = self._recall.news(job.key)

        def look() -> Planned | None:
            if not is_news():
                return None
            return self.known(job.workload, job.arrays, job.device, may_tune=job.data == "real")

        with self._recall.lease(job.key) as lease:
            planned = lease.awaited(job.limits.tuning_s, look)
            if planned is not None:
                return planned
            if lease.is_ours:
                return self._measure(job, self._recall.resumable(job.key))
        how = "another process is still tuning it"
        LOGGER.info("autobatch: `%s` goes on with an estimate: %s", job.name, how)
        return self.estimated(job.workload, job.arrays, job.device, job.key, how)

    def _measure(self, job: Job, resume: Record | None) -> Planned:
        from autobatch import _tuner  # not loaded where a record is found

        source: Source = "tuned" if job.data == "real" else "synthetic"
        try:
            result = _tuner.tune(job, INSTRUMENTS, resume=resume)
        except Interrupted as interrupted:
            self._recall.keep(interrupted.record, source)
            raise
        if job.data == "synthetic" and not is_measured(result.record):
            raise ValueError(result.record.outcomes[0].reason)
        self._recall.keep(result.record, source)
        self._measured.add(job.key)
        planned = self._planned(result.record, job.limits, source, keep=job.data == "real")
        return replace(planned, program=result.programs.get(planned.plan.strategy))

    def estimated(
        self,
        workload: Workload,
        arrays: Sequence[Any],
        device: Any,
        key: str,
        how: str,
        *,
        is_run: bool = True,
    ) -> Planned:
        """Returns a plan from the bounds of memory alone.

        Args:
            workload: the described call.
            arrays: its arrays, concrete or traced.
            device: the device that it runs on.
            key: of the workload.
            how: why nothing is measured.
            is_run: whether the call will run, so that a need which may not fit is worth a warning.
        """
        decision = estimated(workload, arrays, self._limits(arrays, device))
        if is_run and decision.warning is not None:
            warn_once(f"`{self.title(workload)}`: {decision.warning}")
        reason = f"not measured: {how}"
        return Planned(plan=unmeasured("estimate", reason, key, decision.strategy))

    def _nearest(
        self,
        workload: Workload,
        arrays: Sequence[Any],
        device: Any,
        parts: Mapping[str, Any],
        *,
        may_tune: bool,
    ) -> Planned | None:
        """Returns the plan that the record of another batch size leads to, if there is one."""
        rows, key = workload.batch_size, digest(parts)
        record = self._recall.nearest(parts, rows, is_stored=not may_tune)
        if record is None:
            return None
        limits = self._limits(arrays, device)
        foretold = resized(
            record, key=key, parts=parts, batch_size=rows, argument_bytes=tree_bytes(arrays)
        )
        strategy = choose(foretold, limits)
        if strategy is None:
            return None
        reason = f"as with {record.batch_size} rows; not measured, which `.tune(...)` does"
        planned = Planned(plan=unmeasured("nearest", reason, key, strategy))
        if may_tune:
            self._plans[key] = planned
        return planned

    def tuning_mode(self) -> Mode:
        """Returns the mode in force: the argument, else the environment's, else `first-call`.

        Raises:
            ValueError: `AUTOBATCH_TUNE` holds no mode.
        """
        return mode_in_force(self.mode)

    def _planned(
        self, record: Record, limits: Limits, source: Source, *, keep: bool = True
    ) -> Planned:
        decision = decide(record, limits)
        if decision.warning is not None:
            warn_once(decision.warning)
        plan = Plan(
            strategy=decision.strategy,
            source=source,
            outcomes=explained(record, limits, decision.strategy),
            key=record.key,
        )
        planned = Planned(plan=plan, record=record, limits=limits)
        if keep:
            self._plans[record.key] = planned
        return planned

    def _limits(self, arrays: Sequence[Any], device: Any) -> Limits:
        memory = INSTRUMENTS.device_memory(device)
        return resolve(
            budget_in_force(self.budget),
            free_bytes=memory.free_bytes,
            total_bytes=memory.total_bytes,
            argument_bytes=tree_bytes(arrays),
        )


def _is_open(record: Record, limits: Limits) -> bool:
    if not widened(record, limits):
        return False
    from autobatch._search import reopened  # not loaded where a record is found

    return reopened(record, limits) is not None
