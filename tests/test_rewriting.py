"""Jaxprs taken apart and put together: what comes out computes what went in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autobatch._rewriting import (
    called,
    evaluated,
    inlined,
    needed,
    part,
    variables,
    varying_variables,
    without_calls,
)

X, Y = np.arange(3, dtype=np.float32), np.float32([2, 3, 5])

double = jax.jit(lambda x: x * 2)
swapped = jax.jit(lambda x, y: (y, x))
mixed = jax.jit(lambda x: (x, 2.0, jnp.ones(3, x.dtype), x + 1, x))
nested = jax.jit(lambda x, y: swapped(double(x), double(double(y))))
unused = jax.jit(lambda x, y: (jnp.sin(y), x - 1))
constant = jax.jit(lambda: (jnp.ones(3, np.float32), 1.5))

PROGRAMS: dict[str, Callable[..., Any]] = {
    "no call": lambda x, y: x + y,
    "one call": lambda x, y: double(x) + y,
    "the same call twice": lambda x, y: (double(x), double(double(y)), double(x)),
    "nested": lambda x, y: nested(*nested(x, y)),
    "inputs handed on": lambda x, y: swapped(*swapped(x, y)),
    "literals handed on": lambda x, y: (mixed(x), mixed(mixed(y)[3])),
    "literals handed over": lambda x, y: (double(3.0) * x, nested(1.0, y)),
    "dropped outputs": lambda x, y: unused(x, y)[1] + nested(x, y)[0],
    "without arguments": lambda x, y: (constant(), x),
    "in a loop": lambda x, y: jax.lax.fori_loop(0, 3, lambda _, x: double(x) + y, x),
    "the same argument twice": lambda x, y: nested(x, x)[0] + swapped(y, y)[1],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_calls(name: str) -> None:
    fun = PROGRAMS[name]
    jaxpr = jax.make_jaxpr(fun)(X, Y).jaxpr
    smaller = without_calls(jaxpr, [True, False])
    assert all(called(each) is None for each in smaller.eqns)
    assert [each.aval for each in smaller.outvars] == [each.aval for each in jaxpr.outvars]
    made = [var for each in smaller.eqns for var in each.outvars]
    assert len({*made, *smaller.invars}) == len(made) + len(smaller.invars)
    got = evaluated(smaller, dict(zip(smaller.invars, (X, Y), strict=True)))
    for one, other in zip(got, jax.tree.leaves(fun(X, Y)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_has_no_call_is_the_jaxpr_itself() -> None:
    jaxpr = jax.make_jaxpr(PROGRAMS["no call"])(X, Y).jaxpr
    assert inlined(jaxpr, called) is jaxpr
    assert without_calls(jaxpr, [True] * len(jaxpr.invars)) is jaxpr


def test_equations_are_replaced_by_those_of_another_jaxpr() -> None:
    jaxpr = jax.make_jaxpr(lambda x, y: (jnp.sin(x * y) + 2.0, jnp.sin(1.0)))(X, Y).jaxpr

    def cosine(equation: Any) -> Any:
        if equation.primitive.name != "sin":
            return None
        return jax.make_jaxpr(lambda x: jnp.cos(x) * 3)(equation.invars[0].aval).jaxpr

    other = inlined(jaxpr, cosine)
    got = evaluated(other, dict(zip(other.invars, (X, Y), strict=True)))
    np.testing.assert_allclose(got[0], 3 * np.cos(X * Y) + 2, rtol=1e-6)
    np.testing.assert_allclose(got[1], 3 * np.cos(1.0), rtol=1e-6)


def test_calls_with_effects_stay() -> None:
    def fun(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x * 2

    jaxpr = jax.make_jaxpr(lambda x: jax.jit(fun)(x) + 1)(X).jaxpr
    assert without_calls(jaxpr, [True] * len(jaxpr.invars)) is jaxpr
    assert varying_variables(jaxpr, [False]) == {var for each in jaxpr.eqns for var in each.outvars}
    assert needed(jaxpr.eqns, []) == jaxpr.eqns[:1]


def test_parts_take_what_they_do_not_make() -> None:
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.sin(x) + jnp.cos(y) * 2.0)(X, Y).jaxpr
    sin, cos, mul, add = jaxpr.eqns
    product = mul.outvars[0]
    assert needed(jaxpr.eqns, [product]) == [cos, mul]
    assert needed(jaxpr.eqns, [mul.invars[1]]) == []  # a literal
    assert varying_variables(jaxpr, [True, False]) == {
        jaxpr.invars[0], sin.outvars[0], add.outvars[0]
    }  # fmt: skip
    last = part(jaxpr, [add], [*add.outvars, *sin.outvars])
    assert last.invars == variables([*add.invars])
    values = dict(zip(last.invars, (X, Y), strict=True))
    np.testing.assert_array_equal(evaluated(last, values)[0], X + Y)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(jax.jit(jnp.multiply)(w, x)) * w


@pytest.mark.parametrize("options", [{}, {"prevent_cse": False}])
def test_what_a_checkpoint_evaluates_again_is_opened(options: Any) -> None:
    def loss(w: Any, x: Any) -> Any:
        inner = jax.checkpoint(layer, **options)
        block = jax.checkpoint(lambda w, x: inner(w, x) + x, **options)
        return block(w, block(w, x)).sum()

    fun = jax.grad(loss, argnums=(0, 1))
    jaxpr = jax.make_jaxpr(fun)(X, Y).jaxpr
    smaller = without_calls(jaxpr, [False, True])
    assert all(called(each) is None for each in smaller.eqns)
    assert not any(each.params.get("differentiated") for each in smaller.eqns)
    barriers = [each for each in smaller.eqns if each.primitive.name == "optimization_barrier"]
    assert bool(barriers) == options.get("prevent_cse", True)
    assert all(smaller.invars[0] not in each.invars for each in barriers)
    got = jax.jit(lambda *args: jax.core.eval_jaxpr(smaller, (), *args))(X, Y)
    for one, other in zip(got, fun(X, Y), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_checkpoint_that_is_still_to_be_differentiated_stays() -> None:
    jaxpr = jax.make_jaxpr(jax.checkpoint(jnp.sin))(X).jaxpr
    assert without_calls(jaxpr, [True]) is jaxpr
