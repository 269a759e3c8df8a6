"""Sums that are taken before their terms are made: what `jax.vmap` and a sum return."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import Function, program
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.api_util import flatten_axes

from autobatch import MEAN, SUM, autobatch
from autobatch._bound import live_bytes
from autobatch._workload import equations

ROWS = 7
# The last of three chunks of three overlaps by two rows; other sizes are below.
EVERY = ("vmap", "map", "unrolled", "chunked:3")
every = pytest.mark.parametrize("strategy", EVERY)


def floats(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def by_hand(fun: Function, in_axes: Any = 0, out_axes: Any = SUM) -> Function:
    """Returns what every strategy is to equal: `jax.vmap`, then a sum."""

    def placed(rows: Any, axis: Any) -> Any:
        if axis is SUM:
            return rows.sum(0, dtype=rows.dtype)
        return rows.mean(0) if axis is MEAN else jnp.moveaxis(rows, 0, axis)

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(jax.vmap(fun, in_axes)(*args))
        return jax.tree.unflatten(
            tree, map(placed, leaves, flatten_axes("out_axes", tree, out_axes))
        )

    return call


def assert_close(ours: Any, bare: Any, strategy: str, rounding: float = 1e-12) -> None:
    """Trees, shapes and dtypes are equal; values within rounding of the largest."""
    assert jax.tree.structure(ours) == jax.tree.structure(bare)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(bare), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), strategy
        one, other = (np.asarray(each, np.complex128) for each in (one, other))
        finite = np.abs(other[np.isfinite(other)])
        slack = rounding * max(1.0, finite.max(initial=0))
        np.testing.assert_allclose(one, other, rtol=rounding, atol=slack, err_msg=strategy)


def check(
    fun: Function,
    *args: Any,
    in_axes: Any = 0,
    out_axes: Any = SUM,
    every: tuple[str, ...] = EVERY,
) -> None:
    """Every strategy is what one writes by hand; all of them are one program, to save compiles."""
    options = {"in_axes": in_axes, "out_axes": out_axes}

    def both(*args: Any) -> Any:
        return by_hand(fun, **options)(*args), [
            program(each, fun, **options)(*args) for each in every
        ]

    bare, ours = jax.jit(both)(*args)
    for strategy, each in zip(every, ours, strict=True):
        assert_close(each, bare, strategy)


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# Products


def dot(contracting: Any = ((), ()), batch: Any = ((), ()), **params: Any) -> Function:
    return functools.partial(jax.lax.dot_general, dimension_numbers=(contracting, batch), **params)


HIGHEST = jax.lax.Precision.HIGHEST
TO_DOUBLE = dot(((0,), (0,)), preferred_element_type=np.float64)
DOTS = {
    "outer": (dot(), (3,), (4,)),
    "inner": (dot(((0,), (0,))), (3,), (3,)),
    "first with first": (dot(((0,), (0,))), (4, 3), (4, 5)),
    "several first": (dot(((0, 1), (0, 1))), (2, 4, 3), (2, 4, 5)),
    "first with last": (dot(((0,), (1,))), (4, 13), (15, 4)),
    "several contracted": (dot(((2, 0), (0, 1))), (3, 20, 2), (2, 3, 25)),
    "matrices": (dot(((1,), (0,))), (13, 4), (4, 15)),
    "small": (dot(((1,), (0,))), (3, 4), (4, 5)),
    "batch": (dot(((2,), (0,)), ((0,), (2,))), (2, 8, 4), (4, 10, 2)),
    "small batch": (dot(((2,), (0,)), ((0,), (2,))), (2, 3, 4), (4, 5, 2)),
    "batch only": (dot(batch=((1,), (0,))), (3, 2), (2, 4)),
    "all batch": (dot(batch=((1, 0), (0, 1))), (3, 2), (2, 3)),
    "numbers": (dot(), (), ()),
    "precise": (dot(((0,), (0,)), precision=HIGHEST), (4, 3), (4, 5)),
    "of floats in doubles": (
        lambda x, y: TO_DOUBLE(x.astype(np.float32), y.astype(np.float32)),
        (3,),
        (3, 2),
    ),
    "nothing to contract": (dot(((1,), (0,))), (3, 0), (0, 5)),
    "no elements": (dot(((1,), (0,))), (0, 4), (4, 5)),
}


@pytest.mark.parametrize("name", DOTS)
def test_products_of_rows(name: str) -> None:
    product, left, right = DOTS[name]
    check(product, floats(ROWS, *left), floats(*right, ROWS), in_axes=(0, -1))


@pytest.mark.parametrize("name", ["matrices", "batch"])
def test_products_with_what_is_not_mapped(name: str) -> None:
    product, left, right = DOTS[name]
    check(product, floats(ROWS, *left), floats(*right), in_axes=(0, None))
    check(product, floats(*left), floats(ROWS, *right), in_axes=(None, 0))


def test_products_of_a_value_with_itself() -> None:
    check(
        lambda x: (dot(((0,), (0,)))(x, x), dot()(x[0], x[0]), dot(((0, 1), (0, 1)))(x, x)),
        floats(ROWS, 3, 4),
    )


def test_products_of_products() -> None:
    def fun(x: Any, y: Any) -> Any:
        xy = x @ y
        return xy @ x, (xy.T @ xy).sum(), xy

    check(fun, floats(ROWS, 3, 4), floats(ROWS, 4, 3), out_axes=(SUM, MEAN, SUM))


def test_what_is_linear_in_a_product() -> None:
    def fun(w: Any, x: Any, y: Any) -> Any:
        xy = x[:, None] * w[0, 0] @ y[None]
        again = jnp.concatenate([xy.T, 2.0 * y[:, None] @ x[None]], 1)
        moved = jnp.pad(again[::-1, 1:] @ w / w[:4], ((1, 2), (0, 1)))
        return jnp.broadcast_to(moved.reshape(-1)[None], (2, moved.size)).sum(1) - xy[0, 0]

    check(fun, floats(5, 2), floats(ROWS, 3), floats(ROWS, 4), in_axes=(None, 0, 0))


def test_what_else_is_made_of_a_product() -> None:
    def fun(w: Any, x: Any) -> Any:
        square = dot()(x, x)
        return (
            jnp.pad(square, 1, constant_values=3.0),
            square * square + square,
            square * x[0],
            square + w,
            w - square,
            w / square,
            jnp.concatenate([square, w]),
            jnp.where(square > 0, square, w),
            square > 0.5,
            square.astype(np.int32),
        )

    axes = (*[SUM] * 8, 0, SUM)
    check(fun, floats(3, 3), floats(ROWS, 3), in_axes=(None, 0), out_axes=axes)


@pytest.mark.parametrize("mode", ["promise_in_bounds", "drop", "clip"])
def test_values_added_into_zeros(mode: str) -> None:
    def fun(w: Any, x: Any, i: Any) -> Any:
        zeros = jnp.zeros((4, 3))
        return (
            zeros.at[i].add(x[0], mode=mode),
            zeros.at[:, i].add(x[::-1, :2], mode=mode),
            zeros.at[i, i[::-1]].add(x[0, 0], mode=mode),
            zeros.at[1:3].add(x[:2]),
            zeros.at[i].add(w, mode=mode),
            zeros.at[0].add(x[0]) * 2,
            (zeros + 1).at[i].add(x[0], mode=mode),
            zeros.at[i].set(x[0], mode=mode),
        )

    i = np.arange(2 * ROWS).reshape(ROWS, 2) % 3
    i = i if mode == "promise_in_bounds" else 3 * i - 2
    check(fun, floats(3), floats(ROWS, 4, 3), i, in_axes=(None, 0, 0))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_slices_written_into_zeros(dtype: Any) -> None:
    def fun(w: Any, x: Any, i: Any) -> Any:
        zeros, zero = jnp.zeros((4, 3)), jnp.zeros((), dtype)
        return (
            jax.lax.dynamic_update_slice(zeros, x, (i, zero)),
            jax.lax.dynamic_update_slice(zeros, x, (zero, i)),
            jax.lax.dynamic_update_slice(zeros, w, (i, i)),
            jax.lax.dynamic_update_slice(zeros, x, (zero, zero)),
            jax.lax.dynamic_update_slice(zeros + w[0, 0], x, (i, zero)),
            jax.lax.dynamic_update_slice(jnp.zeros(()), x[0, 0], ()),
        )

    # Some of which would reach over the end, or begin before the beginning.
    i = np.arange(ROWS) if dtype is np.uint8 else 2 * np.arange(ROWS) - 4
    check(fun, floats(2, 2), floats(ROWS, 2, 2), i.astype(dtype), in_axes=(None, 0, 0))


# Outputs


def test_a_value_both_summed_and_stacked() -> None:
    def fun(x: Any) -> Any:
        outer = dot()(x, x)
        return outer, outer, outer, outer.T, outer + 1

    check(fun, floats(3, ROWS), in_axes=-1, out_axes=(SUM, 0, MEAN, -1, SUM))


def test_a_sum_that_another_output_is_made_of() -> None:
    def fun(x: Any) -> Any:
        outer = dot()(x, x)
        other = 2 * outer.T - outer
        return outer, other, jnp.tanh(other), other.sum(), x

    check(fun, floats(ROWS, 3), out_axes=(SUM, SUM, 1, SUM, SUM))


def test_outputs_that_are_inputs_or_do_not_vary() -> None:
    def fun(w: Any, x: Any) -> Any:
        return x, x, w, w.sum(), 2.0, jnp.ones(2), x @ w, jnp.zeros((0, 2))

    args = floats(3), floats(ROWS, 3)
    check(fun, *args, in_axes=(None, 0), out_axes=(SUM, 0, SUM, MEAN, SUM, SUM, SUM, MEAN))
    check(fun, *args, in_axes=(None, 0), out_axes=SUM)


@pytest.mark.parametrize("out_axes", [SUM, (SUM, 0, 0, 0), (0, SUM, MEAN, SUM)])
def test_calls_of_which_some_results_do_not_vary(out_axes: Any) -> None:
    inner = jax.jit(lambda x: (dot()(x, x), 1.5, jnp.ones(3), x))
    check(lambda x: jax.jit(inner)(x), floats(ROWS, 3), out_axes=out_axes)


def test_nothing_varies() -> None:
    check(lambda w, x: (w, 1.0), floats(3), floats(ROWS), in_axes=(None, 0))


def test_integers_and_booleans() -> None:
    def fun(x: Any) -> Any:
        return dot()(x, x), x.sum(), (x > 3).astype(np.int32), x.astype(np.int8)

    check(fun, np.arange(3 * ROWS, dtype=np.int32).reshape(ROWS, 3), out_axes=(SUM, SUM, SUM, SUM))


def test_complex_numbers() -> None:
    x = floats(ROWS, 3) + 1j * floats(ROWS, 3, seed=1)
    check(lambda x: (dot()(x, x.conj()), dot(((0,), (0,)))(x, x) * 2j), x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("strategy", ["vmap", "map", "chunked:7", "chunked:100"])
def test_low_precision_is_added_in_float32(dtype: Any, strategy: str) -> None:
    def fun(x: Any) -> Any:
        return dot()(x, x), dot()(x, x).sum(), 2 * dot(((0,), (0,)))(x, x)

    # Of which float16 and bfloat16 lose count; the sums are halved, so that float16 holds them.
    x = jnp.full((3000, 2), 1, dtype)
    got = program(strategy, fun, out_axes=(SUM, SUM, MEAN))(x)
    for each, expected in zip(got, (3000, 12000, 4), strict=True):
        assert each.dtype == dtype
        np.testing.assert_array_equal(np.asarray(each, np.float64), float(dtype(expected)))


@every
def test_weak_types_stay(strategy: str) -> None:
    weak = jnp.broadcast_to(jnp.asarray(2.5), (ROWS,))
    fun = lambda x: (x * 2, dot()(x, x), dot()(x, x) * np.float64(2), 1.0)  # noqa: E731
    got = program(strategy, fun, out_axes=(SUM, SUM, MEAN, SUM))(weak)
    for total, row in zip(got, jax.eval_shape(fun, weak[0]), strict=True):
        assert total.dtype == row.dtype
        assert jax.typeof(total).weak_type == row.weak_type


@pytest.mark.parametrize("rows", [0, 1, 2, 6])
def test_batches_of_other_sizes(rows: int) -> None:
    def fun(w: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jnp.tanh(x @ w).sum())(w)
        return value, gradient, x

    sizes = ("vmap", "map", "unrolled", *(f"chunked:{each}" for each in (1, 2, 3, 6, 9)))
    args = floats(3, 2), floats(rows, 3)
    check(fun, *args, every=sizes, in_axes=(None, 0), out_axes=(SUM, SUM, 0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", range(ROWS))
def test_what_is_not_finite_stays_where_it_is(value: float, row: int) -> None:
    x = np.abs(floats(ROWS, 3)) + 1
    x[row, 1] = value
    run = _of_one_row_that_is_not_finite()
    bare, ours = run(x, np.arange(ROWS) % 4)
    for strategy, each in zip(EVERY, ours, strict=True):
        assert_close(each, bare, strategy)


@functools.cache
def _of_one_row_that_is_not_finite() -> Function:
    def fun(x: Any, i: Any) -> Any:
        table = jax.grad(lambda table: table[i] @ x)(jnp.ones((4, 3)))
        kernel = jnp.ones((1, 1, 2))
        conv = jax.grad(lambda k: jax.lax.conv(x[None, None], k, (1,), "VALID").sum())(kernel)
        return dot()(x, x), dot()(x, x) * 2, x, table, conv

    def both(x: Any, i: Any) -> Any:
        ours = [program(each, fun, out_axes=SUM)(x, i) for each in EVERY]
        return by_hand(fun)(x, i), ours

    return jax.jit(both)


def test_axes_of_inputs() -> None:
    def fun(w: Any, tree: Any, x: Any) -> Any:
        return {"a": dot()(tree["a"], x * w), "b": [tree["b"], 1.0]}

    tree = {"a": floats(3, ROWS), "b": floats(2, ROWS, 4)}
    axes = (None, {"a": 1, "b": -2}, -1)
    check(fun, 2.0, tree, floats(4, ROWS), in_axes=axes, out_axes={"a": SUM, "b": [-1, SUM]})


def test_closed_over_arrays() -> None:
    table = jnp.asarray(floats(3, 4))
    inner = jax.jit(lambda x: dot()(table @ x, x) + table[0, 0] * dot()(x[:3], x))
    check(lambda x: (inner(x), table @ x), floats(ROWS, 4))


@every
def test_an_axis_name_that_nobody_uses(strategy: str) -> None:
    fun, x = lambda x: dot()(x, x), floats(ROWS, 3)
    got = program(strategy, fun, out_axes=SUM, axis_name="batch", axis_size=ROWS)(x)
    np.testing.assert_allclose(got, x.T @ x, rtol=1e-12)


def test_an_axis_name_that_is_used() -> None:
    def fun(w: Any, x: Any) -> Any:
        centred = x - jax.lax.pmean(x, "batch")
        return dot()(centred, x), jax.lax.psum(w, "batch") * x

    args = floats(3), floats(ROWS, 3)
    got = program("vmap", fun, in_axes=(None, 0), out_axes=SUM, axis_name="batch")(*args)
    stacked = jax.vmap(fun, (None, 0), axis_name="batch")(*args)
    assert_close(got, jax.tree.map(lambda each: each.sum(0), stacked), "vmap")


# Gradients


def mlp(params: Any, x: Any) -> Any:
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return ((x @ w + b) ** 2).mean()


MLP = [(floats(4, 6), floats(6)), (floats(6, 5), floats(5)), (floats(5, 3), floats(3))]


def attention(params: Any, x: Any) -> Any:
    query, key, value, out = params
    heads = lambda w: jnp.einsum("td,dhk->thk", x, w)  # noqa: E731
    scores = jnp.einsum("thk,shk->hts", heads(query), heads(key)) / 2
    mixed = jnp.einsum("hts,shk->thk", jax.nn.softmax(scores), heads(value))
    y = x + jnp.einsum("thk,hkd->td", mixed, out)
    return jnp.tanh(y).sum()


ATTENTION = [floats(4, 2, 3, seed=each) for each in range(3)] + [floats(2, 3, 4)]


def layer_norm(params: Any, x: Any) -> Any:
    scale, shift, w = params
    x = (x - x.mean()) / jnp.sqrt(x.var() + 1e-6)
    return jnp.sin((x * scale + shift) @ w).sum()


def lookup(table: Any, indices: Any) -> Any:
    return jnp.tanh(table[indices]).sum(0) @ table.mean(0)  # gathered, and used as a whole


def tied(table: Any, indices: Any) -> Any:
    return jax.nn.logsumexp(jnp.tanh(table[indices]) @ table.T)


def layers(params: Any, x: Any) -> Any:
    step = lambda x, w: (jnp.tanh(x @ w), x.sum())  # noqa: E731
    x, sums = jax.lax.scan(step, x, params)
    return x.sum() + (sums**2).sum()


def checkpointed(params: Any, x: Any) -> Any:
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
    return layer(params[1], layer(params[0], x)).sum()


def decayed(params: Any, x: Any) -> Any:
    return mlp(params, x) + 0.5 * sum((w**2).sum() for w, _ in params)


def called(params: Any, x: Any) -> Any:
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))  # one trace, called twice
    return jax.jit(lambda params: layer(params[1], layer(params[0], x)))(params).sum()


@jax.custom_vjp
def clipped(x: Any, y: Any) -> Any:
    return jnp.outer(x, y)


clipped.defvjp(
    lambda x, y: (jnp.outer(x, y), (x, y)),
    lambda kept, g: (jnp.clip(g @ kept[1], -1, 1), jnp.clip(kept[0] @ g, -1, 1)),
)


def while_inside(params: Any, x: Any) -> Any:
    double = lambda state: (2 * state[0], state[1] + 1)  # noqa: E731
    scale, _ = jax.lax.while_loop(
        lambda state: state[0] < 10, double, (1 + jax.lax.stop_gradient(x[0]) ** 2, 0)
    )
    return jnp.tanh(x @ params / scale).sum()


def cond_inside(params: Any, x: Any) -> Any:
    return jax.lax.cond(x[0] > 0, lambda: jnp.tanh(x @ params), lambda: x @ params * 2).sum()


GRADIENTS: dict[str, tuple[Function, Any, Any]] = {
    "mlp": (mlp, MLP, floats(ROWS, 4)),
    "decayed mlp": (decayed, MLP, floats(ROWS, 4)),
    "attention": (attention, ATTENTION, floats(ROWS, 5, 4)),
    "layer norm": (layer_norm, [floats(4), floats(4), floats(4, 3)], floats(ROWS, 4)),
    "lookup": (lookup, floats(5, 3), np.arange(2 * ROWS).reshape(ROWS, 2) % 5),
    "one looked up": (lambda t, i: jnp.tanh(t[i]).sum(), floats(5, 3), np.arange(ROWS) % 5),
    "looked up outside": (lookup, floats(5, 3), np.arange(-5, 2 * ROWS - 5).reshape(ROWS, 2)),
    "tied": (tied, floats(5, 3), np.arange(2 * ROWS).reshape(ROWS, 2) % 5),
    "scan over layers": (layers, floats(3, 4, 4), floats(ROWS, 4)),
    "checkpoint": (checkpointed, floats(2, 4, 4), floats(ROWS, 4)),
    "calls": (called, floats(2, 4, 4), floats(ROWS, 4)),
    "custom_vjp": (lambda w, x: clipped(w @ x, x).sum(), floats(3, 4), floats(ROWS, 4)),
    "while": (while_inside, floats(4, 3), floats(ROWS, 4)),
    "cond": (cond_inside, floats(4, 3), floats(ROWS, 4)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    loss, params, x = GRADIENTS[name]
    check(
        jax.value_and_grad(loss), params, x, in_axes=(None, 0), out_axes=(SUM, MEAN),
        every=("vmap", "map", "chunked:3"),
    )  # fmt: skip


def test_gradients_with_auxiliary_values() -> None:
    def loss(params: Any, x: Any, y: Any) -> Any:
        guess = jnp.tanh(x @ params["w"]) + params["b"]
        return ((guess - y) ** 2).sum(), {"guess": guess, "hits": (guess > y).astype(np.int32)}

    fun = jax.value_and_grad(loss, has_aux=True)
    params = {"w": floats(4, 3), "b": floats(3)}
    axes = ((SUM, {"guess": 1, "hits": SUM}), MEAN)
    check(fun, params, floats(ROWS, 4), floats(3, ROWS), in_axes=(None, 0, 1), out_axes=axes)


def test_gradients_of_operands_that_are_mapped() -> None:
    fun = jax.grad(mlp, argnums=(0, 1))
    check(fun, MLP, floats(ROWS, 4), in_axes=(None, 0), out_axes=(SUM, 0))


# Inside transformations


def loss(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w).sum() ** 2


TRANSFORMATIONS: dict[str, Callable[[Function], Function]] = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda w, x: (f(w, x) ** 3).sum(), (0, 1)),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": lambda f: jax.hessian(lambda w, x: f(w, x).sum()),
    "vmap": lambda f: lambda w, x: jax.vmap(f, (0, None))(jnp.stack([w, 2 * w]), x),
    "vmap of rows": lambda f: lambda w, x: jax.vmap(f, (None, 2))(w, jnp.stack([x, x + 1], 2)),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (2 * w, x)),
    "scan": lambda f: lambda w, x: jax.lax.scan(lambda w, _: (w - f(w, x), w), w, length=3),
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["vmap", "chunked:3"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_inside_transformations(name: str, strategy: str) -> None:
    fun = jax.grad(loss)
    batched = autobatch(fun, (None, 0), SUM, strategy=strategy)
    transform, args = TRANSFORMATIONS[name], (floats(3, 2), floats(ROWS, 3))
    got = jax.jit(transform(batched))(*args)
    assert_close(got, jax.jit(transform(by_hand(fun, (None, 0))))(*args), strategy, 1e-10)


@pytest.mark.parametrize("strategy", ["vmap", "map", "chunked:3"])
def test_inside_shard_map(strategy: str) -> None:
    def fun(w: Any, table: Any, x: Any, i: Any) -> Any:
        of = lambda w, table: jnp.tanh(x @ w) @ table[i] + (w**2).sum()  # noqa: E731
        return jax.grad(of, (0, 1))(w, table)

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, whole = jax.P("d"), jax.P()
    batched = program(strategy, fun, in_axes=(None, None, 0, 0), out_axes=SUM)
    args = floats(3, 2), floats(4, 2), floats(ROWS, 3), np.arange(ROWS) % 4
    for per_device in (True, False):

        def shard(w: Any, table: Any, x: Any, i: Any, per_device: bool = per_device) -> Any:
            if per_device:
                w, table = jax.lax.pcast((w, table), ("d",), to="varying")
            return jax.lax.psum(batched(w, table, x, i), "d")

        specs = (whole, whole, spec, spec)
        got = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=whole))(*args)
        assert_close(got, by_hand(fun, (None, None, 0, 0))(*args), strategy)


# Anything


@dataclass(frozen=True)
class Step:
    """One equation of a random program: its operands are earlier values, by position."""

    name: str
    operands: tuple[int, ...]
    data: Any = None

    def __call__(self, values: list[Any], scale: Any) -> Any:
        first, *others = (values[at] for at in self.operands)
        match self.name:
            case "dot":
                return jax.lax.dot_general(first, others[0], self.data)
            case "transpose":
                return jnp.transpose(first, self.data)
            case "reshape":
                return first.reshape(self.data)
            case "scaled":
                return first * (scale if self.data else 2.5)
            case "divided":
                return first / scale
            case "shifted":
                return first + scale
            case "negative":
                return -first
            case "squashed":
                return jnp.tanh(first)
            case "add":
                return first + others[0]
            case "sub":
                return first - others[0]
            case "mul":
                return first * others[0]
            case "concatenate":
                return jnp.concatenate([first, *others], self.data)
            case "slice":
                return first[::-1] if self.data else first[1:]
            case "pad":
                return jnp.pad(first, (1, 0), constant_values=self.data)
            case "sum":
                return first.sum(self.data)
            case _:
                return jnp.broadcast_to(first, (2, *first.shape))


OF_ONE = ["transpose", "reshape", "scaled", "divided", "negative", "slice", "pad", "sum"]
OF_ONE += ["broadcast", "shifted", "squashed"]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Step], tuple[int, ...]]:
    """Draws a program whose inputs are the rows (2,), (3,) and (2, 3), and what it returns."""
    shapes: list[tuple[int, ...]] = [(2,), (3,), (2, 3)]
    found: list[Step] = []
    for _ in range(draw(st.integers(1, 7))):
        at = draw(st.integers(0, len(shapes) - 1) | st.just(len(shapes) - 1))
        shape = shapes[at]
        name = draw(
            st.sampled_from(["dot", "dot", "dot", "add", "sub", "mul", "concatenate", *OF_ONE])
        )
        operands, data = (at,), None
        if name == "dot":
            other = draw(st.integers(0, len(shapes) - 1))
            pairs = [
                (one, two)
                for one, size in enumerate(shape)
                for two, same in enumerate(shapes[other])
                if size == same
            ]
            pair = draw(st.sampled_from(pairs)) if pairs else None
            is_batch = draw(st.booleans())
            sides = ((pair[0],), (pair[1],)) if pair and draw(st.booleans()) else ((), ())
            operands, data = (at, other), (((), ()), sides) if is_batch else (sides, ((), ()))
        elif name in ("add", "sub", "mul", "concatenate"):
            same = [each for each, other in enumerate(shapes) if other == shape]
            operands = (at, draw(st.sampled_from(same)))
            if name == "concatenate" and not shape:
                continue
            data = draw(st.integers(0, len(shape) - 1)) if name == "concatenate" else None
        elif name == "transpose":
            data = tuple(draw(st.permutations(range(len(shape)))))
        elif name == "reshape":
            data = draw(st.sampled_from([(-1,), (*shape, 1), shape[::-1]]))
        elif name in ("slice", "sum"):
            if not shape:
                continue
            data = draw(st.booleans()) if name == "slice" else draw(st.integers(0, len(shape) - 1))
        else:
            data = draw(st.sampled_from([0, 0, 1]))
        step = Step(name, operands, data)
        examples = [jax.ShapeDtypeStruct(each, np.float64) for each in shapes]
        result = jax.eval_shape(step, examples, jax.ShapeDtypeStruct((), np.float64)).shape
        if len(result) <= 4 and math.prod(result) <= 400:
            found.append(step)
            shapes.append(result)
    last = len(shapes) - 1
    outputs = draw(st.lists(st.integers(0, last), max_size=2))
    return found, (last, *outputs)


@settings(max_examples=40)
@given(
    steps(),
    st.lists(st.sampled_from([SUM, SUM, MEAN, 0]), min_size=3, max_size=3),
    st.sampled_from(["vmap", "map", "chunked:2", "chunked:3"]),
)
def test_any_program(made: Any, axes: list[Any], strategy: str) -> None:
    with jax.enable_x64(True):
        found, outputs = made

        def fun(scale: Any, *inputs: Any) -> Any:
            values = list(inputs)
            for step in found:
                values.append(step(values, scale))
            return [values[at] for at in outputs]

        options = {"in_axes": (None, 0, 1, 0), "out_axes": [SUM, *axes][: len(outputs)]}
        args = 1.5, floats(5, 2), floats(3, 5), floats(5, 2, 3)
        check(fun, *args, every=(strategy,), **options)


# What it is for


def elements(lowered: Any) -> int:
    """Returns how many the largest array of a lowered program has."""
    shapes = re.findall(r"tensor<((?:\d+x)+)", lowered.as_text())
    return max(math.prod(map(int, each.split("x")[:-1])) for each in shapes)


def dense(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w).sum()


@pytest.mark.parametrize("strategy", ["vmap", "chunked:5", "chunked:4", "chunked:7"])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, lambda f: jax.jit(jax.jit(f))])
def test_gradients_of_matrices_are_never_made_for_every_row(around: Any, strategy: str) -> None:
    fun = jax.grad(around(dense))
    args = floats(32, 16), floats(10, 32)
    batched = autobatch(fun, (None, 0), SUM, strategy=strategy)
    assert elements(batched.lower(*args)) == 32 * 16


def shapes(jaxpr: Any) -> set[tuple[int, ...]]:
    return {var.aval.shape for each in equations(jaxpr) for var in each.outvars}


@pytest.mark.parametrize(
    ("name", "is_made"),
    # What is larger than its operands, or contracted along the first axes, is made of all rows.
    [
        ("outer", False),
        ("first with first", False),
        ("batch", False),
        ("matrices", False),
        ("small", True),
        ("small batch", True),
    ],
)
def test_products_are_made_for_every_row_only_where_it_costs_less(name: str, is_made: bool) -> None:
    product, left, right = DOTS[name]
    args = floats(ROWS, *left), floats(ROWS, *right)
    result = jax.eval_shape(product, *(each[0] for each in args)).shape
    traced = program("vmap", product, out_axes=SUM).trace(*args)
    assert ((ROWS, *result) in shapes(traced.jaxpr)) == is_made


@pytest.mark.parametrize("name", ["mlp", "decayed mlp", "attention", "tied", "calls", "checkpoint"])
def test_gradients_of_models_are_never_made_for_every_row(name: str) -> None:
    loss, params, x = GRADIENTS[name]
    widened = jax.tree.map(lambda each: np.zeros([8 * size for size in each.shape]), params)
    x = x if name == "tied" else np.zeros([*x.shape[:-1], 8 * x.shape[-1]])
    batched = program("chunked:4", jax.grad(loss), in_axes=(None, 0), out_axes=SUM)
    made = shapes(batched.trace(widened, x).jaxpr)
    for matrix in (each for each in jax.tree.leaves(widened) if each.ndim > 1):
        # Two layers of these models lie in one array.
        shape = matrix.shape[-2:] if name in ("calls", "checkpoint") else matrix.shape
        assert not {(4, *order) for order in (shape, shape[::-1])} & made


def test_memory_of_all_rows_at_once_is_bounded_without_their_gradients() -> None:
    args = floats(64, 64), floats(100, 64)
    traced = program("vmap", jax.grad(dense), in_axes=(None, 0), out_axes=SUM).trace(*args)
    assert live_bytes(traced.jaxpr) < 100 * 64 * 64 * 8 / 5


def test_gradient_of_a_lookup_is_one_scatter() -> None:
    loss, table, indices = GRADIENTS["one looked up"]
    for strategy in ("vmap", "chunked:3"):
        batched = program(strategy, jax.grad(loss), in_axes=(None, 0), out_axes=SUM)
        jaxpr = batched.trace(table, indices).jaxpr
        (scatter,) = [each for each in equations(jaxpr) if each.primitive.name == "scatter-add"]
        assert scatter.outvars[0].aval.shape == table.shape
