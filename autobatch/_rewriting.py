"""Jaxprs taken apart and put together: parts of one evaluated, equations replaced, calls inlined.

What is done with the parts is in `_hoisting` and `_summation`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.core
from jax.extend.core import DropVar, Literal, gensym

_CHECKPOINTS = ("checkpoint", "remat2")


def inlined(jaxpr: Any, inner_of: Callable[[Any], Any]) -> Any:
    """Returns the jaxpr with some equations replaced by those of jaxprs that do the same.

    Args:
        jaxpr: an open jaxpr without constants.
        inner_of: returns such a jaxpr for an equation, or None to leave it. If it leaves all, the
            jaxpr itself is returned.
    """
    new = gensym()
    renamed: dict[Any, Any] = {}
    equations: list[Any] = []
    is_changed = False
    for equation in jaxpr.eqns:
        inner = inner_of(equation)
        equation = equation.replace(invars=[_renamed(each, renamed) for each in equation.invars])
        if inner is None:
            equations.append(equation)
            continue
        is_changed = True
        names = dict(zip(inner.invars, equation.invars, strict=True))
        for each in inner.eqns:
            outvars = [
                var if isinstance(var, DropVar) else names.setdefault(var, new(var.aval))
                for var in each.outvars
            ]
            invars = [_renamed(var, names) for var in each.invars]
            equations.append(each.replace(invars=invars, outvars=outvars))
        for outer, atom in zip(equation.outvars, inner.outvars, strict=True):
            renamed[outer] = _renamed(atom, names)
    if not is_changed:
        return jaxpr
    outvars = [_renamed(each, renamed) for each in jaxpr.outvars]
    return jaxpr.replace(eqns=equations, outvars=outvars)


def replaced(jaxpr: Any, inner_of: Callable[[Any], Any]) -> Any:
    """Returns the jaxpr with some equations replaced, in `jit` and `checkpoint` bodies too.

    Args:
        jaxpr: an open jaxpr without constants.
        inner_of: as `inlined` takes it.
    """

    def inner(equation: Any) -> Any:
        found = inner_of(equation)
        if found is not None:
            return found
        inside = called(equation)
        if inside is not None:
            smaller = replaced(inside, inner_of)
            return None if smaller is inside else smaller
        if equation.primitive.name not in _CHECKPOINTS or equation.effects:
            return None
        body = replaced(equation.params["jaxpr"], inner_of)
        if body is equation.params["jaxpr"]:
            return None
        bind = functools.partial(equation.primitive.bind, **{**equation.params, "jaxpr": body})
        return jax.make_jaxpr(bind)(*(each.aval for each in equation.invars)).jaxpr

    return inlined(jaxpr, inner)


def varying_variables(jaxpr: Any, mapped: Sequence[bool]) -> set[Any]:
    """Returns the variables that a mapped operand, or an effect, reaches."""
    varying = {var for var, is_mapped in zip(jaxpr.invars, mapped, strict=True) if is_mapped}
    for equation in jaxpr.eqns:
        if equation.effects or not varying.isdisjoint(variables(equation.invars)):
            varying.update(equation.outvars)
    return varying


def called(equation: Any) -> Any:
    """Returns the jaxpr that a `jit` equation calls, or None for other equations."""
    if equation.primitive.name not in ("jit", "pjit") or equation.effects:
        return None
    closed = equation.params["jaxpr"]
    return None if closed.consts else closed.jaxpr


def evaluated_again(equation: Any, varying: set[Any]) -> Any:
    """Returns the jaxpr of what a derivative of `jax.checkpoint` does, or None for other equations.

    A barrier keeps XLA from finding that some of it was done before. It is only around what varies,
    so that the rest can still be told from it.
    """
    params = equation.params
    if equation.primitive.name not in _CHECKPOINTS or equation.effects:
        return None
    if not params["differentiated"]:
        return None
    atoms = equation.invars
    varies = [not isinstance(each, Literal) and each in varying for each in atoms]

    def run(*values: Any) -> list[Any]:
        pairs = list(zip(values, varies, strict=True))
        if params["prevent_cse"]:
            behind = iter(
                jax.lax.optimization_barrier([value for value, is_own in pairs if is_own])
            )
            pairs = [(next(behind) if is_own else value, is_own) for value, is_own in pairs]
        return jax.core.eval_jaxpr(params["jaxpr"], (), *(value for value, _ in pairs))

    return jax.make_jaxpr(run)(*(each.aval for each in atoms)).jaxpr


def without_calls(jaxpr: Any, mapped: Sequence[bool]) -> Any:
    """Returns the jaxpr with all equations inlined that only hold others and are evaluated once."""
    varying = varying_variables(jaxpr, mapped)
    smaller = inlined(jaxpr, lambda each: called(each) or evaluated_again(each, varying))
    return jaxpr if smaller is jaxpr else without_calls(smaller, mapped)


def _renamed(atom: Any, names: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def needed(equations: Sequence[Any], roots: Iterable[Any]) -> list[Any]:
    """Returns those equations that `roots` depend on, and those with effects, in order."""
    wanted, kept = set(variables(roots)), []
    for equation in reversed(equations):
        if equation.effects or not wanted.isdisjoint(equation.outvars):
            wanted.update(variables(equation.invars))
            kept.append(equation)
    return kept[::-1]


def read_by(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Returns the variables that equations and outputs read and that no equation makes."""
    made = {var for each in equations for var in each.outvars}
    read = variables([*(var for each in equations for var in each.invars), *outputs])
    return list(dict.fromkeys(var for var in read if var not in made))


def part(jaxpr: Any, equations: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Returns the jaxpr of some of a jaxpr's equations; its inputs are what they do not make."""
    inputs = read_by(equations, outputs)
    return jaxpr.replace(constvars=[], invars=inputs, outvars=list(outputs), eqns=list(equations))


def evaluated(jaxpr: Any, values: dict[Any, Any]) -> list[Any]:
    """Returns the outputs of a jaxpr without constants, given the values of its inputs."""
    return jax.core.eval_jaxpr(jaxpr, (), *(values[var] for var in jaxpr.invars))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns those atoms that are no literals."""
    return [each for each in atoms if not isinstance(each, Literal)]
