"""A program of one row, cut in two: what no mapped operand reaches, and the rest.

The first part is evaluated once, before the loop over rows. XLA moves such work out of its loops
too, but not the expensive kind: calls into libraries, loops, whatever it cannot see through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
from jax.extend.core import DropVar, Literal

from autobatch._reductions import Axis
from autobatch._rewriting import (
    called,
    evaluated,
    inlined,
    needed,
    part,
    variables,
    varying_variables,
)
from autobatch._workload import RowProgram

# Evaluated again in every step, these cost next to nothing and fuse into what uses them; kept
# from outside the loop, they would be read from memory instead.
_CHEAP = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "empty",
    "expand_dims",
    "iota",
    "reshape",
    "squeeze",
    "stop_gradient",
}


@dataclass(frozen=True, kw_only=True)
class Split:
    """A program cut in two.

    Attributes:
        jaxpr: what is left of the program; takes `inputs`' rows, returns the varying outputs.
        inputs: operands and shared values that `rest` needs, with their mapped axes.
        out_avals: of one row of the varying outputs.
        out_axes: of the varying outputs.
        shared: by position, the outputs that are the same for every row, with aval and axis.
    """

    jaxpr: Any
    inputs: list[tuple[Any, int | None]]
    out_avals: list[Any]
    out_axes: list[Axis]
    shared: dict[int, tuple[Any, Any, Axis]]

    def rest(self, *inputs: Any) -> list[Any]:
        """Returns the varying outputs of one row."""
        return jax.core.eval_jaxpr(self.jaxpr, (), *inputs)

    def merged(self, varying: Iterable[Any], repeat: Callable[..., Any]) -> list[Any]:
        """Returns all outputs: the varying ones, and the shared ones repeated for every row."""
        remaining = iter(varying)
        return [
            repeat(*self.shared[at]) if at in self.shared else next(remaining)
            for at in range(len(self.shared) + len(self.out_axes))
        ]


def split(row: RowProgram, operands: Sequence[Any]) -> Split:
    """Evaluates what no mapped operand reaches, and returns the rest as a function of one row.

    Args:
        row: the program and its axes.
        operands: its operands, batch axes included.
    """
    jaxpr = _without_calls(row.jaxpr, [axis is not None for axis in row.in_axes])
    axes = dict(zip(jaxpr.invars, row.in_axes, strict=True))
    varying = varying_variables(jaxpr, [axis is not None for axis in row.in_axes])
    shared, left = _cut(jaxpr, varying)

    values = dict(zip(jaxpr.invars, operands, strict=True))
    results = [var for each in shared for var in each.outvars if not isinstance(var, DropVar)]
    values |= zip(results, evaluated(part(jaxpr, shared, results), values), strict=True)

    def varies(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in varying

    outputs = [var for var in jaxpr.outvars if varies(var)]
    rest = part(jaxpr, left, outputs)
    places = list(zip(jaxpr.outvars, row.out_axes, strict=True))
    return Split(
        jaxpr=rest,
        inputs=[(values[var], axes.get(var)) for var in rest.invars],
        out_avals=[var.aval for var in outputs],
        out_axes=[axis for atom, axis in places if varies(atom)],
        shared={
            at: (atom.val if isinstance(atom, Literal) else values[atom], atom.aval, axis)
            for at, (atom, axis) in enumerate(places)
            if not varies(atom)
        },
    )


def _cut(jaxpr: Any, varying: set[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the equations to evaluate once, and those to evaluate for every row.

    Cheap ones are evaluated wherever they are needed, on both sides if need be.
    """
    candidates = [each for each in jaxpr.eqns if _is_shared(each, varying)]
    worth = [each for each in candidates if each.primitive.name not in _CHEAP]
    made = {var for each in worth for var in each.outvars}
    outputs = variables(jaxpr.outvars)
    shared = needed(candidates, [*(var for var in outputs if var not in varying), *made])
    others = [each for each in jaxpr.eqns if made.isdisjoint(each.outvars)]
    return shared, needed(others, [var for var in outputs if var in varying])


def _is_shared(equation: Any, varying: set[Any]) -> bool:
    return not equation.effects and varying.isdisjoint(equation.outvars)


def _without_calls(jaxpr: Any, mapped: Sequence[bool]) -> Any:
    """Returns the jaxpr with those `jit` calls inlined that hide work no mapped operand reaches."""
    varying = varying_variables(jaxpr, mapped)

    def inner(equation: Any) -> Any:
        reached = [each in varying for each in equation.invars if not isinstance(each, Literal)]
        return called(equation) if any(reached) and not all(reached) else None

    smaller = inlined(jaxpr, inner)
    return jaxpr if smaller is jaxpr else _without_calls(smaller, mapped)
