"""Plans of calls inside a trace (`jit`, `grad`, `scan`), of whose arrays only shapes are known.

Nothing concrete of the caller's is touched. Calls outside are `_planner`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from autobatch._devices import is_inside_shard_map, several_local_devices
from autobatch._errors import AutobatchError, RecordMissError
from autobatch._estimate import bound
from autobatch._fixed import alone_inside, unmeasured
from autobatch._job import NewProgram
from autobatch._planned import Planned
from autobatch._planner import LOGGER, Planner
from autobatch._strategies import VMAP
from autobatch._synthetic import stand_ins, why_no_stand_ins
from autobatch._workload import Workload

_ADVISED: set[str] = set()


def planned_inside(
    planner: Planner,
    workload: Workload,
    arrays: Sequence[Any],
    device: Any,
    new_program: NewProgram,
) -> Planned:
    """Returns the plan for a call inside a trace.

    That is the record's, else the outcome of a tuning on stand-ins if that says anything, else
    an estimate from the bounds of memory.

    Args:
        planner: of the mapped function.
        workload: the described call.
        arrays: its traced arrays.
        device: the device that it runs on.
        new_program: returns a fresh program of the workload.

    Raises:
        IneligibleStrategyError, NoViableStrategyError, RecordMissError: as `Planner.known`.
    """
    if planner.strategy is None and several_local_devices() and not is_inside_shard_map():
        return Planned(plan=alone_inside())
    try:
        planned = planner.known(workload, arrays, device, may_tune=False)
        return planned or _found_inside(planner, workload, arrays, device, new_program)
    except AutobatchError:
        raise
    except Exception as error:
        if workload.moving is None:
            raise
        # Such as a `while` without a reverse derivative, where only the forward one is asked for.
        return Planned(plan=unmeasured("estimate", f"not measured: {error!r:.120}"))


def replaced_inside(
    planner: Planner, workload: Workload, arrays: Sequence[Any], device: Any
) -> Planned:
    """Returns the plan for a call that is being differentiated, so that its derivative is run.

    It is traced all the same, but nothing is measured for it, and no record is required.

    Args:
        planner: of the mapped function.
        workload: the described call.
        arrays: its traced arrays.
        device: the device that it runs on.

    Raises:
        IneligibleStrategyError, NoViableStrategyError: as `Planner.known`.
    """
    try:
        planned = planner.known(workload, arrays, device, may_tune=False)
    except RecordMissError:
        planned = None
    how = "its derivative is run"
    return planned or planner.estimated(workload, arrays, device, "", how, is_run=False)


def _found_inside(
    planner: Planner,
    workload: Workload,
    arrays: Sequence[Any],
    device: Any,
    new_program: NewProgram,
) -> Planned:
    job = planner.job(workload, arrays, device, new_program)
    reason = why_no_stand_ins(workload)
    if reason is None and is_inside_shard_map():
        reason = "it is called inside shard_map"
    limit, operands = job.limits.memory_bytes, [*workload.consts, *arrays]
    if reason is None and limit is not None and bound(VMAP, workload, operands) > limit:
        reason = "vmap may not fit"
    verb = "estimated" if reason is not None else "tuned on stand-ins"
    _advise(planner, workload, verb)
    if reason is None:
        try:
            # NaNs of invented values are nobody's.
            with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
                job = replace(job, arrays=tuple(stand_ins(workload.arguments)), data="synthetic")
                return planner.in_turn(job)
        except Exception as error:  # such as collectives over an axis of the outer program
            reason = f"stand-ins fail: {error!r:.80}"
    how = f"called inside another transformation, and {reason}"
    return planner.estimated(workload, arrays, device, job.key, how)


def _advise(planner: Planner, workload: Workload, verb: str) -> None:
    """Says once how this call could be planned on real arrays."""
    title, method = (
        planner.title(workload),
        "plan" if workload.moving is None else "for_gradient.plan",
    )
    text = (
        f"autobatch: `{title}` ({workload.batch_size} rows) is called inside another "
        f"transformation and {verb}; call `{planner.name}.{method}(...)` on real arrays before, or "
        "run `autobatch tune`"
    )
    if text not in _ADVISED:
        _ADVISED.add(text)
        LOGGER.info(text)
