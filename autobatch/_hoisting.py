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
from jax.extend.core import DropVar, Literal, gensym

from autobatch._reductions import Axis
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
        rest: what is left of the function; takes `inputs`' rows, returns the varying outputs.
        inputs: operands and shared values that `rest` needs, with their mapped axes.
        out_avals: of one row of the varying outputs.
        out_axes: of the varying outputs.
        shared: by position, the outputs that are the same for every row, with aval and axis.
    """

    rest: Callable[..., list[Any]]
    inputs: list[tuple[Any, int | None]]
    out_avals: list[Any]
    out_axes: list[Axis]
    shared: dict[int, tuple[Any, Any, Axis]]

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
    varying = _varying(jaxpr, [axis is not None for axis in row.in_axes])
    shared, left = _cut(jaxpr, varying)

    values = dict(zip(jaxpr.invars, operands, strict=True))
    results = [var for each in shared for var in each.outvars if not isinstance(var, DropVar)]
    values |= zip(results, _evaluated(jaxpr, shared, results, values), strict=True)

    def varies(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in varying

    outputs = [var for var in jaxpr.outvars if varies(var)]
    used = _read_by(left, outputs)

    def rest(*inputs: Any) -> list[Any]:
        return _evaluated(jaxpr, left, outputs, dict(zip(used, inputs, strict=True)))

    places = list(zip(jaxpr.outvars, row.out_axes, strict=True))
    return Split(
        rest=rest,
        inputs=[(values[var], axes.get(var)) for var in used],
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
    outputs = _variables(jaxpr.outvars)
    shared = _needed(candidates, [*(var for var in outputs if var not in varying), *made])
    others = [each for each in jaxpr.eqns if made.isdisjoint(each.outvars)]
    return shared, _needed(others, [var for var in outputs if var in varying])


def _varying(jaxpr: Any, mapped: Sequence[bool]) -> set[Any]:
    """Returns the variables that a mapped operand, or an effect, reaches."""
    varying = {var for var, is_mapped in zip(jaxpr.invars, mapped, strict=True) if is_mapped}
    for equation in jaxpr.eqns:
        if equation.effects or not varying.isdisjoint(_variables(equation.invars)):
            varying.update(equation.outvars)
    return varying


def _is_shared(equation: Any, varying: set[Any]) -> bool:
    return not equation.effects and varying.isdisjoint(equation.outvars)


def _without_calls(jaxpr: Any, mapped: Sequence[bool]) -> Any:
    """Returns the jaxpr with those `jit` calls inlined that hide work no mapped operand reaches."""
    varying, new = _varying(jaxpr, mapped), gensym()
    renamed: dict[Any, Any] = {}
    equations: list[Any] = []
    for equation in jaxpr.eqns:
        equation = equation.replace(invars=[_renamed(each, renamed) for each in equation.invars])
        inner = _called(equation)
        reached = [each in varying for each in equation.invars if not isinstance(each, Literal)]
        if inner is None or not any(reached) or all(reached):
            equations.append(equation)
            continue
        inner = _without_calls(
            inner, [not isinstance(each, Literal) and each in varying for each in equation.invars]
        )
        names = dict(zip(inner.invars, equation.invars, strict=True))
        for each in inner.eqns:
            outvars = [
                var if isinstance(var, DropVar) else names.setdefault(var, new(var.aval))
                for var in each.outvars
            ]
            invars = [_renamed(var, names) for var in each.invars]
            equations.append(each.replace(invars=invars, outvars=outvars))
            if each.effects or not varying.isdisjoint(_variables(invars)):
                varying.update(outvars)
        for outer, atom in zip(equation.outvars, inner.outvars, strict=True):
            renamed[outer] = _renamed(atom, names)
    outvars = [_renamed(each, renamed) for each in jaxpr.outvars]
    return jaxpr.replace(eqns=equations, outvars=outvars)


def _called(equation: Any) -> Any:
    """Returns the jaxpr that a `jit` equation calls, or None for other equations."""
    if equation.primitive.name not in ("jit", "pjit") or equation.effects:
        return None
    closed = equation.params["jaxpr"]
    return None if closed.consts else closed.jaxpr


def _renamed(atom: Any, names: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _needed(equations: Sequence[Any], roots: Iterable[Any]) -> list[Any]:
    """Returns those equations that `roots` depend on, and those with effects, in order."""
    wanted, kept = set(roots), []
    for equation in reversed(equations):
        if equation.effects or not wanted.isdisjoint(equation.outvars):
            wanted.update(_variables(equation.invars))
            kept.append(equation)
    return kept[::-1]


def _read_by(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Returns the variables that equations and outputs read and that no equation makes."""
    made = {var for each in equations for var in each.outvars}
    read = _variables([*(var for each in equations for var in each.invars), *outputs])
    return list(dict.fromkeys(var for var in read if var not in made))


def _evaluated(
    jaxpr: Any, equations: Sequence[Any], outputs: Sequence[Any], values: dict[Any, Any]
) -> list[Any]:
    """Returns the values of `outputs` after some of a jaxpr's equations, from known values."""
    inputs = _read_by(equations, outputs)
    part = jaxpr.replace(constvars=[], invars=inputs, outvars=list(outputs), eqns=list(equations))
    return jax.core.eval_jaxpr(part, (), *(values[var] for var in inputs))


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [each for each in atoms if not isinstance(each, Literal)]
