"""The mapped program with derivatives of its own: `jax.vmap`'s, whatever strategy was chosen.

Differentiating a loop over chunks would keep every step's intermediate values, and more. So the
mapped program is a `jax.custom_jvp`, whose rule differentiates another mapping of the same jaxpr.
It is reached through any number of `jax.jit`s, in every mode and order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal

from autobatch._eligibility import may_not_end
from autobatch._mapping import mapped
from autobatch._strategies import MAP, VMAP, Strategy
from autobatch._workload import RowProgram


def mapped_with_derivatives(
    strategy: Strategy, row: RowProgram, operands: Sequence[Any]
) -> list[Any]:
    """Returns the outputs of `mapped`, differentiable as `jax.vmap` is.

    Args:
        strategy: how to map where nothing is differentiated.
        row: the function of one example, and the axes.
        operands: the closed-over arrays, then those of the call, batch axes included.

    Raises:
        ValueError, TypeError: as `mapped`.
    """
    if strategy == VMAP:
        return mapped(strategy, row, operands)
    row, operands = _without_unused(row, operands)
    # Its derivative, vectorised, might run for ever as well.
    derivative = MAP if may_not_end(row) else VMAP

    @jax.custom_jvp
    def run(*values: Any) -> list[Any]:
        return mapped(strategy, row, values)

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        moving = [at for at, tangent in enumerate(tangents) if _is_moving(tangent)]

        def of_moving(*values: Any) -> list[Any]:
            changed = dict(zip(moving, values, strict=True))
            return mapped(
                derivative, row, [changed.get(at, each) for at, each in enumerate(primals)]
            )

        return jax.jvp(of_moving, [primals[at] for at in moving], [tangents[at] for at in moving])

    run.defjvp(rule, symbolic_zeros=True)
    return run(*operands)


def _without_unused(row: RowProgram, operands: Sequence[Any]) -> tuple[RowProgram, list[Any]]:
    """Returns the program and its operands without those that it does not use.

    jit drops unused arguments, but does not look for them behind a custom rule.
    """
    jaxpr = row.jaxpr
    used = {
        each
        for each in (*(var for eqn in jaxpr.eqns for var in eqn.invars), *jaxpr.outvars)
        if not isinstance(each, Literal)
    }
    kept = [at for at, var in enumerate(jaxpr.invars) if var in used]
    smaller = replace(
        row,
        jaxpr=jaxpr.replace(invars=[jaxpr.invars[at] for at in kept]),
        in_axes=tuple(row.in_axes[at] for at in kept),
    )
    return smaller, [operands[at] for at in kept]


def _is_moving(tangent: Any) -> bool:
    return not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0
