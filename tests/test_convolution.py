"""Convolutions in one form, and their sums over rows: the values of the others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import Function, program
from jax.extend.core.primitives import conv_general_dilated_p

from autobatch import SUM
from autobatch._convolution import canonical, convolved
from autobatch._workload import equations

ROWS = 5
CANONICAL = {
    "1d": "dim_labels=b0f_0io->b0f",
    "2d": "dim_labels=b01f_01io->b01f",
    "3d": "dim_labels=b012f_012io->b012f",
}


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape)


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def assert_close(ours: Any, bare: Any) -> None:
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(bare), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-11)


def orders(space: str) -> list[tuple[str, str, str]]:
    """Returns orders of the dimensions: each of image, kernel and result at least once."""
    images = ["".join(each) for each in itertools.permutations("NC" + space)]
    kernels = ["".join(each) for each in itertools.permutations("OI" + space)]
    return list(zip(images, kernels, images[7:] + images[:7], strict=True))


@pytest.mark.parametrize("space", ["", "W", "HW"])
def test_every_order_of_dimensions(space: str) -> None:
    sizes = {"N": 2, "C": 3, "H": 5, "W": 4}
    kernel_sizes = {"O": 4, "I": 3, "H": 3, "W": 2}

    def both(pairs: Any) -> Any:
        params = {
            "window_strides": (1, 2)[: len(space)],
            "padding": ((1, 0), (2, 1))[: len(space)],
            "rhs_dilation": (2, 1)[: len(space)],
        }
        results = []
        for (image, kernel), numbers in zip(pairs, orders(space), strict=True):
            run = lambda x, k, numbers=numbers: jax.lax.conv_general_dilated(  # noqa: E731
                x, k, dimension_numbers=numbers, **params
            )
            (equation,) = jax.make_jaxpr(run)(image, kernel).eqns
            result = convolved(image, kernel, **equation.params)
            results.append((result, run(image, kernel)))
        return results

    pairs = [
        (floats(*map(sizes.get, image)), floats(*map(kernel_sizes.get, kernel)))
        for image, kernel, _ in orders(space)
    ]
    for ours, bare in jax.jit(both)(pairs):
        assert_close(ours, bare)


def conv(strides: int = 1, padding: Any = "SAME", rank: int = 2, **params: Any) -> Function:
    def run(kernel: Any, x: Any) -> Any:
        return jax.lax.conv_general_dilated(x, kernel, (strides,) * rank, padding, **params)

    return run


def transposed(kernel: Any, x: Any) -> Any:
    return jax.lax.conv_transpose(x, kernel, (2, 2), "SAME")


NHWC = ("NHWC", "HWIO", "NHWC")
# A convolution, its kernel, and a row: a batch of two images, channels first but in the last few.
CONVOLUTIONS: dict[str, tuple[Function, Any, Any]] = {
    "1d": (conv(rank=1), floats(4, 3, 3), floats(2, 3, 6)),
    "2d": (conv(), floats(4, 3, 3, 2), floats(2, 3, 5, 6)),
    "3d": (conv(rank=3), floats(2, 3, 2, 2, 2), floats(1, 3, 3, 4, 3)),
    "no space": (conv(rank=0, padding=()), floats(4, 3), floats(2, 3)),
    "valid": (conv(padding="VALID"), floats(4, 3, 3, 2), floats(2, 3, 5, 6)),
    "strided": (conv(2), floats(4, 3, 3, 3), floats(2, 3, 6, 5)),
    "strided with a remainder": (conv(3, "VALID"), floats(4, 3, 2, 2), floats(2, 3, 7, 7)),
    "dilated": (conv(rhs_dilation=(2, 1)), floats(4, 3, 3, 2), floats(2, 3, 6, 5)),
    "dilated image": (
        conv(padding=((1, 2), (0, 1)), lhs_dilation=(2, 3)), floats(4, 3, 3, 2),
        floats(2, 3, 3, 3),
    ),
    "cropped": (conv(padding=((-1, 2), (0, -1))), floats(4, 3, 2, 2), floats(2, 3, 5, 5)),
    "grouped": (conv(feature_group_count=2), floats(4, 2, 3, 2), floats(2, 4, 5, 5)),
    "depthwise": (conv(feature_group_count=3), floats(6, 1, 3, 3), floats(2, 3, 5, 5)),
    "batches in groups": (conv(batch_group_count=2), floats(4, 3, 3, 2), floats(2, 3, 5, 5)),
    "channels last": (conv(dimension_numbers=NHWC), floats(3, 2, 3, 4), floats(2, 5, 6, 3)),
    "transposed": (transposed, floats(3, 3, 3, 4), floats(2, 4, 5, 3)),
    "no images": (conv(), floats(4, 3, 3, 2), floats(0, 3, 5, 6)),
}  # fmt: skip


def loss(run: Function) -> Function:
    return lambda kernel, x: jnp.tanh(run(kernel, x)).sum()


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_sums_of_gradients(name: str) -> None:
    run, kernel, row = CONVOLUTIONS[name]
    fun, xs = jax.value_and_grad(loss(run)), floats(ROWS, *row.shape)

    def both(kernel: Any, xs: Any) -> Any:
        bare = jax.tree.map(lambda each: each.sum(0), jax.vmap(fun, (None, 0))(kernel, xs))
        strategies = ("vmap", "map", "chunked:2")
        options = {"in_axes": (None, 0), "out_axes": SUM}
        return [(program(each, fun, **options)(kernel, xs), bare) for each in strategies]

    for ours, bare in jax.jit(both)(kernel, xs):
        assert_close(ours, bare)


@pytest.mark.parametrize("name", ["1d", "2d", "grouped", "transposed"])
def test_rows_that_are_not_summed(name: str) -> None:
    run, kernel, row = CONVOLUTIONS[name]
    fun, xs = jax.grad(loss(run), argnums=(0, 1)), floats(*row.shape, ROWS)

    def both(kernel: Any, xs: Any) -> Any:
        bare = jax.vmap(fun, (None, -1))(kernel, xs)
        return [
            (program(each, fun, in_axes=(None, -1))(kernel, xs), bare)
            for each in ("map", "chunked:2")
        ]

    for ours, bare in jax.jit(both)(kernel, xs):
        assert_close(ours, bare)


def test_both_operands_are_rows() -> None:
    kernels, xs = floats(4, ROWS, 3, 3, 2), floats(ROWS, 2, 3, 5, 6)

    def both(kernels: Any, xs: Any) -> Any:
        bare = jax.vmap(conv(), (1, 0))(kernels, xs).sum(0)
        options = {"in_axes": (1, 0), "out_axes": SUM}
        strategies = ("vmap", "map", "chunked:2")
        return [(program(each, conv(), **options)(kernels, xs), bare) for each in strategies]

    for ours, bare in jax.jit(both)(kernels, xs):
        assert_close(ours, bare)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_other_dtypes(dtype: Any) -> None:
    run, kernel, row = CONVOLUTIONS["2d"]
    kernel, xs = (jnp.asarray(each, dtype) for each in (kernel, floats(ROWS, *row.shape)))
    fun = lambda k, x: jax.grad(lambda k: (run(k, x) ** 2).real.sum())(k)  # noqa: E731
    expected = jax.vmap(fun, (None, 0))(kernel, xs).sum(0)
    for strategy in ("vmap", "chunked:2"):
        got = program(strategy, fun, in_axes=(None, 0), out_axes=SUM)(kernel, xs)
        assert got.dtype == dtype
        one, other = (np.asarray(each, np.complex128) for each in (got, expected))
        rounding = 20 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding * np.abs(other).max())


def labels(strategy: str, name: str, **options: Any) -> set[str]:
    run, kernel, row = CONVOLUTIONS[name]
    fun = jax.jit(jax.grad(loss(run)))
    batched = program(strategy, fun, in_axes=(None, 0), **options)
    lowered = batched.lower(kernel, floats(ROWS, *row.shape))
    return set(re.findall(r"dim_labels=[^, \n]+", lowered.as_text(dialect="hlo")))


@pytest.mark.parametrize("name", ["1d", "2d", "3d", "strided", "channels last"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    # What jax.vmap makes of the gradients of chunks that are not summed has groups.
    [("map", {}), ("map", {"out_axes": SUM}), ("chunked:2", {"out_axes": SUM})],
    ids=["map", "sum of map", "sum of chunks"],
)
def test_loops_hold_one_form(name: str, strategy: str, options: Any) -> None:
    assert labels(strategy, name, **options) == {CANONICAL.get(name, CANONICAL["2d"])}


def test_gradients_of_kernels_are_never_made_for_every_row() -> None:
    run, kernel, row = CONVOLUTIONS["2d"]
    batched = program("chunked:2", jax.grad(loss(run)), in_axes=(None, 0), out_axes=SUM)
    jaxpr = batched.trace(kernel, floats(ROWS, *row.shape)).jaxpr
    found = [each for each in equations(jaxpr) if each.primitive is conv_general_dilated_p]
    assert len(found) == 2
    gradients = [each.outvars[0].aval for each in found if each.outvars[0].aval.shape[0] == 3]
    assert [each.size for each in gradients] == [kernel.size]
    assert all(each.params["batch_group_count"] == 1 for each in found)


def test_what_is_canonical_is_left_as_it_is() -> None:
    run, kernel, row = CONVOLUTIONS["channels last"]
    jaxpr = jax.make_jaxpr(jax.jit(run))(kernel, row).jaxpr
    for each in (jaxpr, jax.make_jaxpr(jnp.sin)(1.0).jaxpr):
        before = [equation.primitive.name for equation in equations(each)]
        after = [equation.primitive.name for equation in equations(canonical(each))]
        assert [name for name in after if name != "jit"] == [
            name for name in before if name != "jit"
        ]


def test_nothing_is_rewritten_for_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    run, kernel, row = CONVOLUTIONS["2d"]
    jaxpr = jax.make_jaxpr(run)(kernel, row).jaxpr
    assert canonical(jaxpr) is jaxpr
    (equation,) = jaxpr.eqns
    again = jax.make_jaxpr(lambda x, k: convolved(x, k, **equation.params))(row, kernel)
    assert [each.primitive for each in again.eqns] == [conv_general_dilated_p]
