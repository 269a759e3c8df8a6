"""The mapped program with derivatives of its own: `jax.vmap`'s, whatever strategy was chosen.

How a batch is best mapped is another question where it is differentiated. So the mapped program is
a `jax.custom_jvp`, whose rule differentiates the same jaxpr mapped in a way of its own. The rule is
reached through any number of `jax.jit`s, in every mode and order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.custom_derivatives import SymbolicZero

from autobatch._mapping import mapped
from autobatch._pullback import differentiated, replaced
from autobatch._reversible import reversible
from autobatch._strategies import Strategy
from autobatch._workload import RowProgram, Workload, shape_of, without_unused

Resolve = Callable[[Workload, list[Any]], Strategy]
"""Returns the strategy for a workload and its traced arrays."""


def mapped_with_derivatives(
    strategy: Strategy, row: RowProgram, operands: Sequence[Any], derive: Resolve
) -> list[Any]:
    """Returns the outputs of `mapped`, differentiable as `jax.vmap` is.

    Args:
        strategy: how to map where nothing is differentiated.
        row: the function of one example, and the axes.
        operands: the closed-over arrays, then those of the call, batch axes included.
        derive: returns the strategy where something is. The program's jaxpr keeps it, so it must
            not lead to the user's function, whose life ends the program's.

    Raises:
        ValueError, TypeError: as `mapped`.
    """
    row, kept = without_unused(row)

    @jax.custom_jvp
    def run(*values: Any) -> list[Any]:
        return mapped(strategy, row, values)

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        moving = [at for at, tangent in enumerate(tangents) if _is_moving(tangent)]
        workload = differentiated(row, [shape_of(each) for each in primals], moving)
        chosen = derive(workload, list(primals))

        def of_moving(*values: Any) -> list[Any]:
            return reversible(chosen, row, replaced(primals, moving, values), moving)

        return jax.jvp(of_moving, [primals[at] for at in moving], [tangents[at] for at in moving])

    run.defjvp(rule, symbolic_zeros=True)
    return run(*(operands[at] for at in kept))


def is_differentiated(values: Sequence[Any]) -> bool:
    """Returns whether values are being differentiated here and now.

    If they are only traced, to be differentiated later, nobody knows it yet. JAX's tracers of the
    forward and of the linearised derivative hold a tangent; those of `jax.vmap` a value, which may
    be such a tracer. (A custom rule would tell as well, and be left in the user's program.)
    """
    return any(isinstance(each, jax.core.Tracer) and _holds_tangent(each) for each in values)


def _holds_tangent(tracer: Any) -> bool:
    inner = getattr(tracer, "val", None)
    return hasattr(tracer, "tangent") or (inner is not None and _holds_tangent(inner))


def _is_moving(tangent: Any) -> bool:
    return not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0
