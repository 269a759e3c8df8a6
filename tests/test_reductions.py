"""`SUM` and `MEAN` in `out_axes`: the sum and the mean of what `jax.vmap` stacks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autobatch as package
from autobatch import MEAN, SUM, Budget, NoViableStrategyError, autobatch
from autobatch._measure import Reference

ROWS = 13
EVERY = [None, "vmap", "map", "unrolled", *(f"chunked:{size}" for size in (1, 2, 4, 7, 12, 13, 26))]
every = pytest.mark.parametrize("strategy", EVERY, ids=str)

# The automatic choice, where it is tested, tries every family.
pytestmark = pytest.mark.usefixtures("exhaustive")


def rows(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return (4 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def loss(weights: Any, x: Any) -> Any:
    return jnp.tanh(x @ weights) ** 2


WEIGHTS, XS = rows(5), rows(ROWS, 5, seed=1)


@every
@pytest.mark.parametrize(("reduction", "by_hand"), [(SUM, jnp.sum), (MEAN, jnp.mean)])
def test_values_and_gradients_are_those_of_what_vmap_stacks(
    reduction: Any, by_hand: Any, strategy: str | None
) -> None:
    fun = jax.value_and_grad(loss)
    batched = autobatch(fun, (None, 0), reduction, strategy=strategy)
    stacked = jax.vmap(fun, (None, 0))(WEIGHTS, XS)
    expected = jax.tree.map(lambda each: by_hand(each, 0), stacked)
    for got, wanted in zip(batched(WEIGHTS, XS), expected, strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@every
def test_reductions_mix_with_axes(strategy: str | None) -> None:
    def fun(x: Any) -> Any:
        return x.sum(), (x, {"outer": jnp.outer(x, x), "same": jnp.ones(2)})

    axes = (MEAN, (1, {"outer": SUM, "same": SUM}))
    mean, (moved, sums) = autobatch(fun, out_axes=axes, strategy=strategy)(XS)
    np.testing.assert_allclose(mean, XS.sum(1).mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(moved, XS.T)
    np.testing.assert_allclose(sums["outer"], XS.T @ XS, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(sums["same"], np.full(2, ROWS, np.float32))


@every
def test_rows_of_overlapping_chunks_count_once_even_if_they_are_nan(strategy: str | None) -> None:
    ones = autobatch(lambda x: jnp.ones((), jnp.int32) + 0 * x, out_axes=SUM, strategy=strategy)
    assert int(ones(np.zeros(ROWS, np.int32))) == ROWS
    spiked = np.ones(ROWS, np.float32)
    spiked[ROWS // 2] = np.inf
    total = autobatch(lambda x: x, out_axes=SUM, strategy=strategy)
    assert float(total(spiked)) == np.inf  # and not the NaN of infinity times zero


@every
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.complex64, np.float32])
def test_sums_keep_their_dtype(dtype: Any, strategy: str | None) -> None:
    x = np.arange(ROWS).astype(dtype)
    total = autobatch(lambda x: x, out_axes=SUM, strategy=strategy)(x)
    assert total.dtype == dtype
    np.testing.assert_allclose(total, x.sum(dtype=dtype), rtol=1e-6)


@every
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_low_precision_is_added_in_float32(dtype: Any, strategy: str | None) -> None:
    x = jnp.full(4000, 1.0, dtype)  # of which float16 and bfloat16 lose count
    if strategy == "unrolled":
        x = x[:300]  # bfloat16 loses count at 256
    total = autobatch(lambda x: x, out_axes=SUM, strategy=strategy)(x)
    assert total.dtype == dtype
    assert float(total) == float(jnp.asarray(len(x), dtype))


@every
def test_derivatives_go_through_reductions(strategy: str | None) -> None:
    with jax.enable_x64(True):
        weights, xs = WEIGHTS.astype(np.float64), XS.astype(np.float64)
        batched = autobatch(loss, (None, 0), MEAN, strategy=strategy)
        plain = lambda w, x: jax.vmap(loss, (None, 0))(w, x).mean()  # noqa: E731
        for transform in (jax.grad, jax.jacfwd, jax.hessian):
            got, expected = transform(batched)(weights, xs), transform(plain)(weights, xs)
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-14)
        _, pull = jax.vjp(batched, weights, xs)
        _, pull_plain = jax.vjp(plain, weights, xs)
        for got, expected in zip(pull(1.0), pull_plain(1.0), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("strategy", ["vmap", "map", "chunked:4"])
def test_nested_in_other_transformations(strategy: str) -> None:
    total = autobatch(lambda x, y: x * y, (0, None), SUM, strategy=strategy)
    ys = rows(3)
    for transformed in (
        lambda f: jax.jit(lambda y: f(XS[:, 0], y[0])),
        lambda f: jax.vmap(lambda y: f(XS[:, 0], y)),
        lambda f: jax.jit(jax.vmap(jax.grad(lambda y: f(XS[:, 0], y)))),
    ):
        got = transformed(total)(ys)
        expected = transformed(lambda x, y: (x * y).sum())(ys)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_no_rows_have_a_sum_but_no_mean() -> None:
    total = autobatch(lambda x: (x, 2 * x), out_axes=(SUM, 0))
    none, empty = total(np.zeros((0, 3), np.float32))
    np.testing.assert_array_equal(none, np.zeros(3, np.float32))
    assert empty.shape == (0, 3)
    with pytest.raises(ValueError, match="a batch of 0 rows has no mean"):
        autobatch(lambda x: x, out_axes=MEAN)(np.zeros((0, 3), np.float32))


@pytest.mark.parametrize(
    ("x", "reduction"),
    [(np.arange(3), MEAN), (np.ones(3, bool), SUM), (np.ones(3, bool), MEAN)],
)
@pytest.mark.parametrize("options", [{}, {"strategy": "map"}, {"tune": "off"}])
def test_what_has_no_mean_or_sum_is_a_type_error(
    x: Any, reduction: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match="which has no"):
        autobatch(lambda x: x, out_axes=reduction, **options)(x)


def test_one_row_and_nothing_mapped() -> None:
    np.testing.assert_array_equal(autobatch(jnp.sin, out_axes=MEAN)(XS[:1]), jnp.sin(XS[0]))
    four = autobatch(lambda x: x, None, SUM, axis_size=4)
    np.testing.assert_array_equal(four(np.ones(2, np.float32)), np.full(2, 4.0, np.float32))


@pytest.mark.parametrize("options", [{}, {"strategy": "vmap"}, {"tune": "off"}])
def test_without_jit_too(options: dict[str, Any]) -> None:
    with jax.disable_jit():
        total, kept = autobatch(lambda x: (x, x), out_axes=(SUM, 0), **options)(XS)
    np.testing.assert_allclose(total, XS.sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(kept, XS)


def test_a_sum_is_another_workload_than_what_is_stacked() -> None:
    keys = {autobatch(jnp.sin, out_axes=each).plan(XS).key for each in (0, SUM, MEAN)}
    assert len(keys) == 3


def test_a_sum_is_never_held_once_per_row() -> None:
    def outer(x: Any) -> Any:
        return jnp.outer(x, x)  # 1 MiB a row

    x, budget = rows(64, 512), Budget(memory="16MiB")
    plan = autobatch(outer, out_axes=SUM, budget=budget).plan(x)
    assert str(plan.strategy) != "vmap"
    assert all((each.peak_bytes or 0) <= 16 * 2**20 for each in plan.outcomes if each.run_s)
    with pytest.raises(NoViableStrategyError, match=r"out_axes=autobatch\.SUM"):
        autobatch(outer, budget=budget).plan(x)


def test_terms_that_cancel_are_no_wrong_result() -> None:
    terms = np.float32([1e4, -1e4, 1.0])
    expected, found = np.float32(terms.sum()), np.float32(1.01)
    assert Reference([expected], [True]).disagreement([found]) is None
    assert Reference([expected]).disagreement([found]) is not None
    assert Reference([expected], [True]).disagreement([np.float32(2.0)]) is not None


def test_they_are_public_and_print_as_they_are_written() -> None:
    assert {"SUM", "MEAN"} <= set(package.__all__)
    assert (repr(SUM), repr(MEAN)) == ("autobatch.SUM", "autobatch.MEAN")


@every
def test_complex_means_keep_infinities(strategy: str | None) -> None:
    xs = np.array([complex(np.inf, 1)] + [complex(1, 2)] * (ROWS - 1), np.complex64)
    mean = np.asarray(autobatch(jnp.negative, out_axes=MEAN, strategy=strategy)(xs))
    assert (mean.dtype, mean.real) == (np.complex64, -np.inf)
    np.testing.assert_allclose(mean.imag, -(1 + 2 * (ROWS - 1)) / ROWS, rtol=1e-6)


@every
def test_small_integers_tell_where_a_slice_goes(strategy: str | None) -> None:
    def fun(x: Any, start: Any) -> Any:
        return jax.lax.dynamic_update_slice(jnp.zeros(300), x, (start,))

    starts = np.arange(ROWS, dtype=np.int8) * 9
    batched = autobatch(fun, out_axes=SUM, strategy=strategy)
    np.testing.assert_allclose(
        batched(XS, starts), jax.vmap(fun)(XS, starts).sum(0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("where", ["mapped", "unmapped", "nowhere"])
def test_effects_happen_as_often_as_under_vmap(where: str) -> None:
    seen: list[int] = []
    read = {"mapped": lambda w, x: (x,), "unmapped": lambda w, x: (w,), "nowhere": lambda w, x: ()}

    def fun(w: Any, x: Any) -> Any:
        jax.debug.callback(lambda *_: seen.append(1), *read[where](w, x))
        return loss(w, x)

    def count(mapped: Any) -> int:
        seen.clear()
        jax.block_until_ready(mapped(WEIGHTS, XS))
        jax.effects_barrier()
        return len(seen)

    gradient = jax.grad(fun)
    plain = count(jax.jit(lambda w, x: jax.vmap(gradient, (None, 0))(w, x).sum(0)))
    assert count(autobatch(gradient, (None, 0), SUM)) == plain
    np.testing.assert_allclose(
        autobatch(gradient, (None, 0), SUM)(WEIGHTS, XS),
        jax.vmap(jax.grad(loss), (None, 0))(WEIGHTS, XS).sum(0),
        rtol=1e-5,
    )


def test_weak_types_are_those_of_a_row_whatever_is_chosen() -> None:
    def fun(x: Any) -> Any:
        return jnp.where(x > 0, 1.0, 2.0)

    xs = XS[:, 0]
    ways: list[dict[str, Any]] = [{"strategy": each} for each in EVERY if each]
    for options in [*ways, {"tune": "off"}]:
        assert autobatch(fun, out_axes=SUM, **options)(xs).weak_type
        assert not autobatch(lambda x: 2 * x, out_axes=SUM, **options)(xs).weak_type


@every
def test_products_of_low_precision_are_added_in_float32(strategy: str | None) -> None:
    def fun(w: Any, x: Any) -> Any:
        return jnp.tanh(w.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).sum().astype(jnp.float32)

    w, xs = rows(6, 5), rows(ROWS, 5)
    gradient = jax.grad(fun)
    batched = autobatch(gradient, (None, 0), SUM, strategy=strategy)
    got, wanted = batched(w, xs), jax.vmap(gradient, (None, 0))(w, xs).sum(0)
    assert got.dtype == wanted.dtype
    np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2)
    one = jax.grad(lambda w, x: fun(w, x).astype(jnp.bfloat16))
    lowest = autobatch(one, (None, 0), SUM, strategy=strategy)(w.astype(jnp.bfloat16), xs)
    assert lowest.dtype == jnp.bfloat16
    np.testing.assert_allclose(lowest.astype(np.float32), wanted, rtol=5e-2, atol=5e-2)


def test_no_terms_of_low_precision_are_made() -> None:
    def fun(w: Any, x: Any) -> Any:
        return jnp.tanh(w.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).sum().astype(jnp.float32)

    batched = autobatch(jax.grad(fun), (None, 0), SUM, strategy="chunked:5")
    jaxpr = jax.make_jaxpr(lambda w, x: batched(w, x))(rows(64, 48), rows(ROWS, 48))
    assert "64,48" in str(jaxpr)
    assert "5,64,48" not in str(jaxpr)
    assert "5,48,64" not in str(jaxpr)


def test_rows_spread_over_devices_are_summed_where_they_lie() -> None:
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from autobatch import SUM, autobatch
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
w = jnp.arange(6.0).reshape(2, 3)
xs = jnp.arange(24.0).reshape(8, 3)
fun = lambda w, x: jnp.einsum("i,j->ij", w @ x, x)
wanted = jax.vmap(fun, (None, 0))(w, xs).sum(0)
with jax.set_mesh(mesh):
    spread = jax.device_put(xs, NamedSharding(mesh, P("d")))
    got = autobatch(fun, (None, 0), SUM, store=False)(w, spread)
np.testing.assert_allclose(got, wanted)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **flags}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
