"""Replacing `jax.jit(jax.vmap(fun))` by `autobatch(fun)` changes no result and no error."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same import assert_same

from autobatch import IneligibleStrategyError, autobatch

# The automatic choice, where it is tested, tries every family.
pytestmark = pytest.mark.usefixtures("exhaustive")

ROWS = 5
STRATEGIES = ["vmap", "map", "chunked:1", "chunked:2", "chunked:3", "chunked:4", "chunked:10"]
FORCED = [*STRATEGIES, "unrolled"]
EVERY = [*FORCED, None]

Wrap = Callable[..., Any]


def plainly(fun: Callable[..., Any], *axes: Any, **options: Any) -> Any:
    return jax.jit(jax.vmap(fun, *axes, **options))


@pytest.fixture(params=EVERY, ids=str)
def wrap(request: pytest.FixtureRequest) -> Wrap:
    """`autobatch` with every forced strategy and with the automatic choice."""
    return functools.partial(autobatch, strategy=request.param)


def rows(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Objects and static arguments.


def by_name(x: Any, how: str) -> Any:
    return {"sin": jnp.sin, "cos": jnp.cos}[how](x).sum()


def test_unmapped_arguments_may_be_any_object(wrap: Wrap) -> None:
    x = rows(ROWS, 3)
    batched = wrap(by_name, (0, None))
    for how in ("sin", "cos", "sin"):
        assert_same(batched(x, how), jax.vmap(by_name, (0, None))(x, how))
    apply = lambda x, f: f(x)  # noqa: E731
    assert_same(wrap(apply, (0, None))(x, jnp.tanh), jax.vmap(apply, (0, None))(x, jnp.tanh))


def test_objects_may_lie_inside_trees_of_arrays(wrap: Wrap) -> None:
    def layer(layer: Any, x: Any) -> Any:
        return layer["activation"](layer["weight"] @ x) * layer["scale"]

    batched, plain = wrap(layer, (None, 0)), jax.vmap(layer, (None, 0))
    for activation in (jnp.tanh, jnp.sin, jnp.tanh):
        tree = {"weight": rows(4, 3), "activation": activation, "scale": 2.0}
        assert_same(batched(tree, rows(ROWS, 3)), plain(tree, rows(ROWS, 3)))


def test_one_argument_may_be_an_object_now_and_an_array_then(wrap: Wrap) -> None:
    def fun(x: Any, shift: Any) -> Any:
        return x + (len(shift) if isinstance(shift, str) else shift)

    batched, x = wrap(fun, (0, None)), rows(ROWS)
    for shift in ("abc", np.float32(1), "abcd", np.float32(2), "abc"):
        expected = x + np.float32(len(shift) if isinstance(shift, str) else shift)
        with jax.numpy_dtype_promotion("standard"):
            np.testing.assert_allclose(batched(x, shift), expected)


def test_an_object_that_is_not_hashable_is_named() -> None:
    class Unhashable:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

    with pytest.raises(ValueError, match=r"argument \[1\].*Unhashable is not hashable"):
        autobatch(lambda x, o: x, (0, None))(rows(ROWS), Unhashable())


def power(x: Any, exponent: int, *, shift: int = 0) -> Any:
    return x**exponent + shift if isinstance(exponent, int) else None


@pytest.mark.parametrize(
    "options",
    [{"static_argnums": 1}, {"static_argnums": (-1,)}, {"static_argnames": "exponent"}],
)
def test_static_arguments_are_python_values(options: dict[str, Any], wrap: Wrap) -> None:
    if options == {"static_argnums": (-1,)}:
        options = {"static_argnums": (1,)}
    batched = wrap(power, (0, None), **options)
    for exponent in (2, 3, 2):
        np.testing.assert_allclose(batched(rows(ROWS), exponent), rows(ROWS) ** exponent, rtol=1e-5)


def test_static_keywords_and_key_parts(wrap: Wrap) -> None:
    batched = wrap(lambda x, *, times: jnp.tile(x, times), static_argnames=("times",))
    assert batched(rows(ROWS, 2), times=3).shape == (ROWS, 6)
    assert batched(rows(ROWS, 2), times=2).shape == (ROWS, 4)


def test_static_arguments_that_fun_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="static_argnums has 3"):
        autobatch(lambda x, y: x, static_argnums=3)
    with pytest.raises(ValueError, match="static_argnames has 'z'"):
        autobatch(lambda x, y: x, static_argnames="z")


def test_donated_arguments_survive_tuning_and_not_the_call(wrap: Wrap) -> None:
    batched, x = wrap(lambda x: x + 1, donate_argnums=0), jnp.asarray(rows(ROWS, 3))
    expected = np.asarray(x) + 1
    batched.plan(x)
    assert not x.is_deleted()
    np.testing.assert_array_equal(batched(x), expected)
    assert x.is_deleted()
    y = jnp.asarray(rows(ROWS, 3))
    np.testing.assert_array_equal(batched(y), expected)
    assert y.is_deleted()


# Objects that carry the function.


class Model:
    scale = 3.0

    @autobatch(in_axes=(None, 0))
    def apply(self, x: Any) -> Any:
        """Scales."""
        return self.scale * x

    @staticmethod
    @autobatch
    def double(x: Any) -> Any:
        return 2 * x

    @classmethod
    @autobatch(in_axes=(None, 0))
    def of_class(cls, x: Any) -> Any:
        return cls.scale * x


def test_methods_are_bound() -> None:
    model, x = Model(), rows(ROWS, 2)
    np.testing.assert_allclose(model.apply(x), 3 * x)
    np.testing.assert_allclose(Model.apply(model, x), 3 * x)
    np.testing.assert_allclose(Model.double(x), 2 * x)
    np.testing.assert_allclose(model.double(x), 2 * x)
    np.testing.assert_allclose(Model.of_class(x), 3 * x)
    assert model.apply.plan(x).source == "tuned"
    assert "apply" in model.apply.explain(x)
    assert model.apply == model.apply
    assert model.apply.__doc__ == "Scales."
    assert list(inspect.signature(model.apply).parameters) == ["x"]


class Affine(NamedTuple):
    weight: Any
    bias: Any

    def __call__(self, x: Any) -> Any:
        return self.weight @ x + self.bias


def test_partials_lambdas_bound_methods_and_callable_trees(wrap: Wrap) -> None:
    x, affine = rows(ROWS, 3), Affine(rows(3, 3), rows(3))
    for fun in (
        functools.partial(jnp.dot, rows(3)),
        lambda x: x @ x,
        affine,
        affine.__call__,
        functools.partial(lambda w, x, *, b: w @ x + b, rows(3, 3), b=rows(3)),
    ):
        assert_same(wrap(fun)(x), plainly(fun)(x))


def test_copies_work_and_have_plans_of_their_own() -> None:
    batched = autobatch(lambda x: x + 1)
    batched(rows(ROWS))
    for other in (copy.copy(batched), copy.deepcopy(batched)):
        np.testing.assert_array_equal(other(rows(ROWS)), rows(ROWS) + 1)
        assert other.__name__ == batched.__name__


# Derivatives.


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(w @ x) ** 2)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: jax.grad(lambda w, x: f(w, x).sum(), argnums=(0, 1)),
    "grad of jit of jit": lambda f: jax.grad(jax.jit(lambda w, x: jax.jit(f)(w, x).sum())),
    "value_and_grad": lambda f: jax.value_and_grad(lambda w, x: f(w, x).sum()),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (jnp.ones_like(w), jnp.cos(x))),
    "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](jnp.arange(ROWS, dtype=jnp.float32)),
    "linearize": lambda f: lambda w, x: jax.linearize(lambda w: f(w, x), w)[1](jnp.cos(w)),
    "hessian": lambda f: jax.hessian(lambda w, x: f(w, x).sum()),
    "jacfwd of jacrev": lambda f: jax.jacfwd(jax.jacrev(f)),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f)),
    "checkpoint": lambda f: jax.grad(lambda w, x: jax.checkpoint(f)(w, x).sum()),
    "vmap": lambda f: lambda w, x: jax.vmap(f, (0, None))(jnp.stack([w, 2 * w]), x),
    "vmap of grad": lambda f: (
        lambda w, x: jax.vmap(jax.grad(lambda w: f(w, x).sum()))(jnp.stack([w, 2 * w]))
    ),
    "grad in scan": lambda f: (
        lambda w, x: jax.lax.scan(
            lambda w, _: (w - 0.1 * jax.grad(lambda w: f(w, x).sum())(w), None), w, length=3
        )[0]
    ),
    "cond": lambda f: jax.jit(
        lambda w, x: jax.lax.cond(x[0, 0] > 0, f, lambda w, x: x[:, 0], w, x)
    ),
    "while": lambda f: jax.jit(
        lambda w, x: jax.lax.fori_loop(0, x.shape[1], lambda _, w: w + f(w, x).sum(), w)
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "strategy", ["map", "chunked:2", "unrolled", "chunked:2+remat", "vmap+remat", None], ids=str
)
def test_every_transformation_sees_vmap(transform: str, strategy: Any) -> None:
    batched, plain = autobatch(loss, (None, 0), strategy=strategy), jax.vmap(loss, (None, 0))
    w, x = jnp.asarray(rows(2, 3)), jnp.asarray(rows(ROWS, 3, seed=1))
    batched(w, x)
    assert_same(TRANSFORMS[transform](batched)(w, x), TRANSFORMS[transform](plain)(w, x))


def test_derivatives_of_closed_over_values(wrap: Wrap) -> None:
    x = jnp.asarray(rows(ROWS, 3))

    def through(wrap: Any) -> Any:
        return jax.grad(lambda w: wrap(lambda x: loss(w, x))(x).sum())(jnp.asarray(rows(2, 3)))

    assert_same(through(wrap), through(jax.vmap))


def test_integer_and_key_inputs_have_float0_tangents(wrap: Wrap) -> None:
    def fun(w: Any, i: Any, key: Any) -> Any:
        return w[i] * jax.random.normal(key)

    w, i = jnp.asarray(rows(4)), jnp.arange(ROWS, dtype=jnp.int32) % 4
    keys = jax.random.split(jax.random.key(0), ROWS)

    def total(f: Any) -> Any:
        return jax.grad(lambda w, i: f(w, i, keys).sum(), argnums=(0, 1), allow_int=True)(w, i)

    assert_same(total(wrap(fun, (None, 0, 0))), total(jax.vmap(fun, (None, 0, 0))))


def test_functions_with_only_a_forward_derivative(wrap: Wrap) -> None:
    def fun(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * x, c[1] + 1), (x, 0))[0]

    batched, x = wrap(fun), jnp.asarray(rows(ROWS))
    assert_same(jax.jvp(batched, (x,), (x,)), jax.jvp(jax.vmap(fun), (x,), (x,)))
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.grad(lambda x: batched(x).sum())(x)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x * 2


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(g, -1, 1) * x,))


@jax.custom_jvp
def odd(x: Any) -> Any:
    return jnp.sin(x)


@odd.defjvp
def _odd_rule(primals: Any, tangents: Any) -> Any:
    return odd(*primals), 7 * tangents[0]


@pytest.mark.parametrize("inner", [clipped, odd])
def test_custom_rules_inside_are_kept(inner: Any, wrap: Wrap) -> None:
    x = jnp.asarray(rows(ROWS, 3))
    grad = lambda f: jax.grad(lambda x: f(x).sum())(x)  # noqa: E731
    fun = lambda x: inner(x).sum() * 3  # noqa: E731
    assert_same(grad(wrap(fun)), grad(jax.vmap(fun)))


def test_a_dropped_function_dies_also_after_a_gradient(wrap: Wrap) -> None:
    def make() -> Any:
        scale = jnp.float32(2)
        return lambda x: jnp.sum(x * scale)

    fun = make()
    batched, alive = wrap(fun), weakref.ref(fun)
    x = jnp.asarray(rows(ROWS, 3))
    jax.grad(lambda x: batched(x).sum())(x)
    jax.jit(lambda x: batched(x) + 1)(x)
    batched(x)
    jax.grad(lambda x: batched(x).sum())(x)
    batched = fun = None
    gc.collect()
    jax.clear_caches()  # what plain jit keeps of a trace that used the function
    gc.collect()
    assert alive() is None


def test_tracers_do_not_leak() -> None:
    with jax.checking_leaks():
        batched, x = autobatch(lambda x: jnp.sin(x).sum()), jnp.asarray(rows(ROWS, 3))
        jax.jit(lambda x: batched(x) + 1)(x)
        batched(x)
        jax.grad(lambda x: batched(x).sum())(x)
        jax.vmap(batched)(x[None])


# What only vmap can do.


def only_vmap(fun: Any, *args: Any, axes: Any = 0, options: Any = None) -> str:
    """Checks that vmap alone serves the call, that others are refused; returns the reason."""
    options = options or {}
    plan = autobatch(fun, axes, **options).plan(*args)
    assert (str(plan.strategy), plan.source) == ("vmap", "sole")
    assert_same(
        autobatch(fun, axes, **options)(*args), jax.jit(jax.vmap(fun, axes, **options))(*args)
    )
    with pytest.raises(IneligibleStrategyError) as error:
        autobatch(fun, axes, strategy="map", **options)(*args)
    reason = str(plan.outcomes[0].reason)
    assert reason.removeprefix("vmap alone: ") in str(error.value)
    return reason


def test_collectives_over_the_axis_are_vmaps_alone() -> None:
    named: dict[str, Any] = {"options": {"axis_name": "i"}}
    x = rows(ROWS, 2)
    assert "axis 'i'" in only_vmap(lambda x: jax.lax.psum(x, "i"), x, **named)
    assert "axis 'i'" in only_vmap(lambda x: x - jax.lax.pmean(x, ("i",)), x, **named)
    assert "axis 'i'" in only_vmap(lambda x: x + jax.lax.axis_index("i"), x.astype(int), **named)
    shifted = lambda x: jax.lax.ppermute(x, "i", [(0, 1), (1, 0)])  # noqa: E731
    assert "axis 'i'" in only_vmap(jax.jit(shifted), rows(2, 2), **named)
    assert autobatch(lambda x: x.sum(), axis_name="i").plan(x).source == "tuned"


def test_rbg_keys_are_vmaps_alone() -> None:
    keys = jax.random.split(jax.random.key(0, impl="rbg"), ROWS)
    assert "rbg" in only_vmap(lambda k: jax.random.normal(k, (3,)), keys)


def test_custom_vmap_rules_are_vmaps_alone() -> None:
    @jax.custom_batching.custom_vmap
    def fun(x: Any) -> Any:
        return jnp.sin(x)

    @fun.def_vmap
    def _rule(axis_size: int, in_batched: Any, x: Any) -> Any:
        return 7 * jnp.sin(x), True

    assert "custom_vmap" in only_vmap(lambda x: fun(x).sum(), rows(ROWS, 3))


def test_sparse_arrays_are_vmaps_alone() -> None:
    from jax.experimental import sparse

    matrices = sparse.BCOO.fromdense(jnp.asarray(rows(ROWS, 3, 4)), n_batch=1)
    assert "sparse" in only_vmap(lambda m, v: m @ v, matrices, rows(4), axes=(0, None))
    to_sparse = lambda x: sparse.BCOO.fromdense(x, nse=3)  # noqa: E731
    got = autobatch(to_sparse)(rows(ROWS, 3))
    assert_same(got.todense(), jax.vmap(to_sparse)(rows(ROWS, 3)).todense())


# Effects, and functions that may not end.


def test_debug_prints_happen_as_often_as_under_vmap(capsys: pytest.CaptureFixture[str]) -> None:
    batched = autobatch(lambda x: (jax.debug.print("row {x}", x=x), x + 1)[1])
    jax.block_until_ready(batched(rows(ROWS)))
    jax.effects_barrier()
    assert capsys.readouterr().out.count("row") == ROWS


def test_unordered_io_callbacks_happen_once_per_row() -> None:
    calls: list[int] = []

    def fun(x: Any) -> Any:
        return jax.experimental.io_callback(
            lambda x: calls.append(1) or x, jax.ShapeDtypeStruct((), x.dtype), x, ordered=False
        )

    jax.block_until_ready(autobatch(fun)(rows(ROWS)))
    assert len(calls) == ROWS


def test_what_vmap_refuses_stays_refused(wrap: Wrap) -> None:
    shape = jax.ShapeDtypeStruct((), jnp.float32)

    def ordered(x: Any) -> Any:
        return jax.experimental.io_callback(lambda x: x, shape, x, ordered=True)

    def sequentless(x: Any) -> Any:
        return jax.pure_callback(lambda x: x, shape, x)

    for fun in (ordered, sequentless):
        with pytest.raises(Exception) as expected:  # noqa: PT011
            jax.vmap(fun)(rows(ROWS))
        with pytest.raises((expected.type, IneligibleStrategyError)):
            wrap(fun)(rows(ROWS))


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_pure_callbacks_of_every_method(method: Any, wrap: Wrap) -> None:
    def fun(x: Any) -> Any:
        return jax.pure_callback(
            np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method=method
        )

    assert_same(wrap(fun)(rows(ROWS, 2)), jax.vmap(fun)(rows(ROWS, 2)))


def endless(x: Any) -> Any:
    """Ends row by row; vectorised, rows enter a loop that never ends for them."""
    up = lambda x: jax.lax.while_loop(lambda x: x < 10, lambda x: x + 1, x)  # noqa: E731
    down = lambda x: jax.lax.while_loop(lambda x: x != 0, lambda x: x - 1, x)  # noqa: E731
    return jax.lax.cond(x > 0, down, up, x)


def test_a_function_that_may_not_end_under_vmap_is_not_vectorised() -> None:
    x = np.float32([3, -2.5, 4, -1.5, 2])  # down from -2.5 never meets 0
    batched = autobatch(endless)
    np.testing.assert_allclose(batched(x), [0, 10.5, 0, 10.5, 0])
    outcomes = {each.strategy.family: each for each in batched.plan(x).outcomes}
    for family in ("vmap", "chunked"):
        assert outcomes[family].status == "ineligible"
        assert "may not end" in str(outcomes[family].reason)
    np.testing.assert_allclose(jax.jit(autobatch(endless))(x), [0, 10.5, 0, 10.5, 0])


def doubling(x: Any) -> Any:
    """Counts below a bound, but 0 doubled stays 0."""
    loop = lambda x: jax.lax.while_loop(lambda v: v < 100, lambda v: v * 2, x)  # noqa: E731
    return jax.lax.cond(x > 0, loop, lambda x: x, x)


def in_a_carry(x: Any) -> Any:
    """The carry of the scan starts the same for all rows, and varies from the second step on."""
    step = lambda c, _: (c * 0 + endless(c) * 0 + x, None)  # noqa: E731
    return jax.lax.scan(step, jnp.float32(1), None, length=2)[0]


@pytest.mark.parametrize(
    ("fun", "x"),
    [
        (doubling, np.arange(8, dtype=np.int32)),
        (in_a_carry, np.float32([3, -2.5, 4])),
        (lambda x: jax.jit(endless)(x), np.float32([3, -2.5, 4])),
    ],
)
def test_loops_that_may_not_end_are_seen_wherever_they_are(fun: Any, x: Any) -> None:
    outcomes = {each.strategy.family: each for each in autobatch(fun).plan(x).outcomes}
    assert outcomes["vmap"].status == "ineligible"


def test_loops_that_end_are_vectorised() -> None:
    counting = lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: x + 1, x)  # noqa: E731
    branch = lambda x, n: jax.lax.cond(n > 2, counting, lambda x, n: x, x, n)  # noqa: E731
    plan = autobatch(branch).plan(rows(ROWS), np.arange(ROWS, dtype=np.int32))
    assert {each.status for each in plan.outcomes} == {"measured"}


# Nested, and inside other programs.


def test_nested_functions_are_tuned_as_one(wrap: Wrap) -> None:
    def distances(wrap: Any, x: Any, y: Any) -> Any:
        inner = lambda a: wrap(lambda b: jnp.sum((a - b) ** 2))(y)  # noqa: E731
        return wrap(inner)(x)

    assert_same(
        distances(wrap, rows(ROWS, 3), rows(7, 3)),
        distances(jax.vmap, jnp.asarray(rows(ROWS, 3)), jnp.asarray(rows(7, 3))),
    )


def test_all_axes_of_an_outer_vmap(wrap: Wrap) -> None:
    batched, plain = wrap(lambda x: x @ x), jax.vmap(lambda x: x @ x)
    x = jnp.asarray(rows(4, ROWS, 3))
    for axis in (0, -3):
        assert_same(jax.vmap(batched, axis)(x), jax.vmap(plain, axis)(x))
    x = jnp.asarray(rows(ROWS, 3, 4))
    assert_same(jax.vmap(batched, 2, 1)(x), jax.vmap(plain, 2, 1)(x))


def test_without_jit_the_values_are_the_same(wrap: Wrap) -> None:
    with jax.disable_jit():
        assert_same(wrap(lambda x: jnp.sin(x).sum())(rows(ROWS, 3)), np.sin(rows(ROWS, 3)).sum(1))


def test_shapes_and_jaxprs_can_be_asked_for(wrap: Wrap) -> None:
    batched = wrap(lambda x: jnp.sin(x).sum())
    assert jax.eval_shape(batched, rows(ROWS, 3)).shape == (ROWS,)
    assert jax.make_jaxpr(batched)(rows(ROWS, 3)).out_avals[0].shape == (ROWS,)


def test_changed_closed_over_values_are_seen_where_jit_would_trace_again() -> None:
    class Holder:
        value = 1.0

    batched = autobatch(lambda x: x * Holder.value)
    batched(rows(ROWS))
    Holder.value = 2.0
    np.testing.assert_allclose(batched(rows(ROWS + 1)), 2 * rows(ROWS + 1))
