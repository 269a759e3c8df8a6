"""What JAX's own tests of `vmap` are about, asked of every strategy.

A table of small programs, by the kind of batching rule that `jax.vmap` needs for them, and a table
of misuses. Both are compared with `jax.vmap` itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from same import assert_same

from autobatch import autobatch

# The automatic choice, where it is tested, tries every family.
pytestmark = pytest.mark.usefixtures("exhaustive")

ROWS = 5
FORCED = ["vmap", "map", "chunked:2", "unrolled"]


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def integers(*shape: int, below: int = 7) -> np.ndarray:
    return np.random.default_rng(3).integers(0, below, shape).astype(np.int32)


def definite(*shape: int) -> np.ndarray:
    """Returns symmetric matrices whose eigenvalues are apart from each other and from zero."""
    *batch, size, _ = shape
    noise = 0.1 * floats(*batch, size, size)
    return noise + np.swapaxes(noise, -1, -2) + np.diag(2 * np.arange(1, size + 1)).astype("f4")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of a mapped function."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    axes: tuple[Any, ...]
    options: dict[str, Any]
    kwargs: dict[str, Any]

    def __call__(self, vmap: Callable[..., Any]) -> Any:
        return vmap(self.fun, *self.axes, **self.options)(*self.args, **self.kwargs)


def case(
    fun: Callable[..., Any],
    *args: Any,
    axes: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """Returns a case; `axes` are `in_axes` and `out_axes`, as far as they are not 0."""
    return Case(fun=fun, args=args, axes=axes, options=options, kwargs=kwargs or {})


# Products and convolutions

contract_both = functools.partial(lax.dot_general, dimension_numbers=(((2, 0), (0, 2)), ((), ())))
contract_batched = functools.partial(
    lax.dot_general, dimension_numbers=(((3,), (2,)), ((0, 1), (0, 1)))
)
batch_not_leading = functools.partial(
    lax.dot_general, dimension_numbers=(((0,), (2,)), ((2,), (0,)))
)
convolve = functools.partial(
    lax.conv_general_dilated,
    window_strides=(2, 1),
    padding=((1, 0), (0, 2)),
    rhs_dilation=(1, 2),
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
)
convolve_groups = functools.partial(
    lax.conv_general_dilated,
    window_strides=(1,),
    padding=((2, 1),),
    lhs_dilation=(2,),
    feature_group_count=2,
)
convolve_batch_groups = functools.partial(
    lax.conv_general_dilated, window_strides=(1,), padding="VALID", batch_group_count=2
)

PRODUCTS = {
    "two axes contracted": case(contract_both, floats(ROWS, 2, 3, 4), floats(ROWS, 4, 5, 2)),
    "batched products on other axes": case(
        contract_batched, floats(2, 3, 4, ROWS, 6), floats(2, 3, 6, 2, ROWS), axes=((3, -1), 2)
    ),
    "batch axis not leading, one side shared": case(
        batch_not_leading, floats(4, 3, 2), floats(2, ROWS, 3, 4), axes=((None, 1),)
    ),
    "left side shared": case(jnp.dot, floats(3), floats(3, ROWS), axes=((None, 1),)),
    "integers multiplied": case(jnp.dot, integers(ROWS, 2, 3), integers(3, 2), axes=((0, None),)),
    "wider result": case(
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32),
        floats(ROWS, 3, 3).astype(jnp.bfloat16),
        floats(ROWS, 3, 3).astype(jnp.bfloat16),
    ),
    "einsum with a trace": case(
        lambda a, x: jnp.einsum("iij,j->j", a, x),
        floats(3, 3, ROWS, 2),
        floats(2),
        axes=((2, None),),
    ),
    "outer of outer": case(
        lambda x, y: jnp.kron(jnp.outer(x, y), jnp.ones((1, 2), x.dtype)),
        floats(ROWS, 2),
        floats(3, ROWS),
        axes=((0, 1), -1),
    ),
    "convolution of rows": case(
        convolve, floats(ROWS, 1, 6, 6, 2), floats(3, 2, 2, 3), axes=((0, None),)
    ),
    "convolution with a kernel per row": case(
        convolve, floats(1, 6, 6, ROWS, 2), floats(3, 2, 2, 3, ROWS), axes=((3, 4), -1)
    ),
    "convolution of shared input": case(
        convolve, floats(1, 6, 6, 2), floats(ROWS, 3, 2, 2, 3), axes=((None, 0),)
    ),
    "convolution in feature groups": case(
        convolve_groups, floats(2, ROWS, 4, 5), floats(ROWS, 6, 2, 3), axes=((1, 0),)
    ),
    "convolution in batch groups": case(
        convolve_batch_groups, floats(ROWS, 4, 2, 5), floats(4, 2, 3), axes=((0, None),)
    ),
    "gradient of a convolution": case(
        jax.grad(lambda k, x: jnp.sum(convolve(x, k) ** 2)),
        floats(3, 2, 2, 1),
        floats(ROWS, 1, 6, 6, 2),
        axes=((None, 0),),
    ),
}

# Indexing

columns = lax.GatherDimensionNumbers(
    offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
)
gather_columns = functools.partial(lax.gather, dimension_numbers=columns, slice_sizes=(1, 2))
scatter_rows = functools.partial(
    lax.scatter_add,
    dimension_numbers=lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    ),
)

INDEXING = {
    "gather with operand and indices mapped": case(
        gather_columns, floats(4, ROWS, 3), integers(ROWS, 3, 2, below=2), axes=((1, 0),)
    ),
    "gather with indices mapped": case(
        gather_columns, floats(4, 3), integers(3, 2, ROWS, below=2), axes=((None, 2), 1)
    ),
    "gather out of bounds": case(
        lambda x, i: (x.at[i].get(mode="fill", fill_value=-1), x.at[i].get(mode="clip"), x[i]),
        floats(ROWS, 3),
        np.array([0, 2, 3, 9, -9], np.int32),
    ),
    "gradient of a gather": case(
        jax.grad(lambda x, i: jnp.sum(jnp.sin(gather_columns(x, i)))),
        floats(ROWS, 4, 3),
        integers(ROWS, 3, 2, below=2),
    ),
    "scatter with all mapped": case(
        scatter_rows,
        floats(ROWS, 4, 3),
        integers(3, 1, ROWS, below=4),
        floats(ROWS, 3, 3),
        axes=((0, 2, 0),),
    ),
    "scatter into shared": case(
        scatter_rows,
        floats(4, 3),
        integers(ROWS, 3, 1, below=4),
        floats(3, 3),
        axes=((None, 0, None),),
    ),
    "scatter out of bounds": case(
        lambda x, i: x.at[i].set(7, mode="drop"), floats(ROWS, 3), integers(ROWS, 2, below=9)
    ),
    "scatter of maxima and products": case(
        lambda x, i, y: (x.at[i].max(y), x.at[i].min(y), x.at[i].multiply(y)),
        floats(ROWS, 4),
        np.tile(np.array([1, 3], np.int32), (ROWS, 1)),
        floats(ROWS, 2, seed=1),
    ),
    "rows by a mask": case(
        lambda x, keep: jnp.where(keep[:, None], x, 0)[jnp.nonzero(keep, size=2, fill_value=0)],
        floats(ROWS, 4, 2),
        integers(ROWS, 4) > 2,
    ),
    "dynamic_slice at mapped places": case(
        lambda x, i, j: lax.dynamic_slice(x, (i, j), (2, 2)),
        floats(4, 5),
        integers(ROWS),
        np.int32(1),
        axes=((None, 0, None),),
    ),
    "dynamic_slice of mapped arrays": case(
        lambda x, i: lax.dynamic_index_in_dim(x, i, axis=1),
        floats(4, 5, ROWS),
        2,
        axes=((2, None), -1),
    ),
    "dynamic_update_slice at mapped places": case(
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i,)),
        floats(6),
        floats(ROWS, 2),
        integers(ROWS, below=9),
        axes=((None, 0, 0),),
    ),
    "dynamic_update_slice of mapped arrays": case(
        lambda x, i: lax.dynamic_update_index_in_dim(x, jnp.float32(1), i, axis=0),
        floats(ROWS, 3),
        np.int32(1),
        axes=((0, None),),
    ),
    "slices with steps": case(
        lambda x: x[-1:0:-2, None, ..., 1:3], floats(6, ROWS, 4), axes=(1, 2)
    ),
}

# Shapes

SHAPES = {
    "pad inside, outside and away": case(
        lambda x, fill: lax.pad(x, fill, ((1, -1, 2), (-1, 2, 0))),
        floats(ROWS, 3, 4),
        floats(ROWS),
    ),
    "concatenate mapped and shared": case(
        lambda *parts: lax.concatenate(parts, 1),
        floats(ROWS, 2, 1),
        floats(2, 3),
        floats(2, 4, ROWS),
        axes=((0, None, 2),),
    ),
    "iota and eye": case(
        lambda x: (
            jnp.arange(3) + x,
            jnp.eye(2, dtype=x.dtype),
            lax.broadcasted_iota(x.dtype, (2, 3), 1),
        ),
        integers(ROWS, 3),
    ),
    "transpose, reverse, squeeze, reshape": case(
        lambda x: (x.transpose(2, 0, 1), lax.rev(x, (0, 2)), x[:, :1].squeeze(1), x.reshape(-1, 2)),
        floats(2, 3, ROWS, 4),
        axes=(2, (1, -1, 0, 2)),
    ),
    "broadcast": case(
        lambda x: (lax.broadcast(x, (2,)), lax.broadcast_in_dim(x, (2, 3, 4), (1,))),
        floats(ROWS, 3),
    ),
    "tile, repeat, roll, stack, split": case(
        lambda x, y: (
            jnp.tile(x, 2),
            jnp.repeat(x, 2),
            jnp.roll(x, 1),
            jnp.stack([x, y], 1),
            jnp.split(x, 2),
        ),
        floats(ROWS, 4),
        floats(4),
        axes=((0, None),),
    ),
    "types and bits": case(
        lambda x: (
            x.astype(jnp.int8),
            lax.bitcast_convert_type(x, jnp.uint32),
            x.astype(bool),
            jnp.finfo(x).bits,
        ),
        floats(ROWS, 2),
    ),
    "triangles and diagonals": case(
        lambda x: (jnp.tril(x, 1), jnp.diagonal(x), jnp.diag(x[0]), jnp.trace(x)),
        floats(ROWS, 3, 3),
    ),
}

# Reductions, orders, choices


def general_reduce(x: Any, y: Any) -> Any:
    """Returns the largest value with its place, by a reduction that is none of the named ones."""
    return lax.reduce(
        (x, y),
        (jnp.float32(-jnp.inf), jnp.int32(-1)),
        lambda a, b: jax.tree.map(functools.partial(jnp.where, a[0] > b[0]), a, b),
        (1,),
    )


REDUCTIONS = {
    "reductions over axes": case(
        lambda x: (x.sum(0), x.prod((0, -1)), x.max(1), x.min(), x.var(), jnp.linalg.norm(x)),
        floats(3, ROWS, 4),
        axes=(1,),
    ),
    "logic": case(
        lambda x: (x.any(), x.all(0), x ^ x.T, ~x, jnp.count_nonzero(x)), integers(ROWS, 2, 2) > 3
    ),
    "general reduction": case(general_reduce, floats(ROWS, 2, 3), integers(ROWS, 2, 3)),
    "argmax and argmin with equals": case(
        lambda x: (jnp.argmax(x, 0), jnp.argmin(x), lax.argmax(x, 1, jnp.uint8)),
        integers(3, 4, ROWS, below=3),
        axes=(-1,),
    ),
    "cumulative": case(
        lambda x: (
            lax.cumsum(x, 1),
            lax.cumprod(x, 0, reverse=True),
            lax.cummax(x),
            lax.cumlogsumexp(x),
        ),
        floats(ROWS, 3, 4),
    ),
    "associative_scan": case(
        lambda x: lax.associative_scan(lambda a, b: 2 * b + a, x), floats(ROWS, 7)
    ),
    "windows": case(
        lambda x: (
            lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 2), "SAME"),
            lax.reduce_window(x, jnp.float32(0), lax.add, (2, 1), (1, 1), "VALID"),
        ),
        floats(4, ROWS, 6),
        axes=(1,),
    ),
    "gradient of windows": case(
        jax.grad(
            lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "SAME") ** 2)
        ),
        floats(ROWS, 6),
    ),
    "sort": case(
        lambda x: (jnp.sort(x, 0), jnp.sort(x, 1, descending=True)),
        floats(3, ROWS, 4),
        axes=(1, (1, 2)),
    ),
    "sort with two keys and a value": case(
        lambda a, b, c: lax.sort((a, b, c), num_keys=2, dimension=0),
        integers(ROWS, 6, below=3),
        integers(6),
        floats(6, ROWS),
        axes=((0, None, 1),),
    ),
    "argsort, search and quantiles": case(
        lambda x, y: (jnp.argsort(x), jnp.searchsorted(jnp.sort(x), y), jnp.median(x)),
        floats(ROWS, 5),
        floats(ROWS, 2),
    ),
    "top_k": case(lambda x: lax.top_k(x, 2), floats(ROWS, 3, 5)),
    "select with a mapped scalar": case(
        lax.select, integers(ROWS) > 3, floats(2, 3), floats(2, 3, seed=1), axes=((0, None, None),)
    ),
    "select of many": case(
        lax.select_n,
        integers(ROWS, 3, below=3),
        *(floats(3, ROWS, seed=each) for each in range(3)),
        axes=((0, 1, 1, 1),),
    ),
    "clamp to mapped bounds": case(
        lax.clamp, floats(ROWS), floats(3, ROWS), floats(ROWS) + 1, axes=((0, 1, 0), 1)
    ),
    "clamp to one shared bound": case(
        lambda low, x, high: lax.clamp(low, x, high),
        np.float32(0),
        floats(ROWS, 3),
        floats(ROWS),
        axes=((None, 0, 0),),
    ),
    "histogram and unique": case(
        lambda x: (jnp.bincount(x, length=7), jnp.unique(x, size=4, fill_value=-1)),
        integers(ROWS, 6),
    ),
    "segments": case(
        lambda x, i: jax.ops.segment_sum(x, i, num_segments=3),
        floats(ROWS, 6),
        integers(6, below=3),
        axes=((0, None),),
    ),
}

# Linear algebra and transforms


def signless(vectors: Any) -> Any:
    """Returns eigenvectors with the freedom of their sign taken away."""
    return jnp.abs(vectors)


ALGEBRA = {
    "cholesky": case(jnp.linalg.cholesky, definite(ROWS, 3, 3)),
    "triangular solve": case(
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        np.moveaxis(definite(ROWS, 3, 3), 0, 1),
        floats(3, 2, ROWS),
        axes=((1, 2),),
    ),
    "triangular solve of a shared matrix": case(
        lambda a, b: jax.scipy.linalg.solve_triangular(a, b, trans=1),
        definite(3, 3),
        floats(ROWS, 3),
        axes=((None, 0), -1),
    ),
    "lu, determinant, inverse": case(
        lambda a: (*jax.scipy.linalg.lu_factor(a), jnp.linalg.slogdet(a), jnp.linalg.inv(a)),
        definite(ROWS, 3, 3),
    ),
    "symmetric eigenvalues": case(
        lambda a: (jnp.linalg.eigvalsh(a), signless(jnp.linalg.eigh(a)[1])), definite(ROWS, 3, 3)
    ),
    "qr and svd": case(
        lambda a: (jnp.abs(jnp.linalg.qr(a)[1]), jnp.linalg.svd(a, compute_uv=False)),
        floats(ROWS, 4, 3),
    ),
    "gradient of solve": case(
        jax.grad(lambda a, b: jnp.sum(jnp.linalg.solve(a, b) ** 2), argnums=(0, 1)),
        definite(3, 3),
        floats(ROWS, 3),
        axes=((None, 0),),
    ),
    "exponential of a matrix": case(jax.scipy.linalg.expm, 0.1 * floats(ROWS, 3, 3)),
    "conjugate gradients": case(
        lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, maxiter=5)[0],
        definite(3, 3),
        floats(ROWS, 3),
        axes=((None, 0),),
    ),
    "fourier transforms": case(
        lambda x: (jnp.fft.fft2(x), jnp.fft.irfft(jnp.fft.rfft(x), 5)),
        floats(3, ROWS, 4),
        axes=(1, (0, -1)),
    ),
    "complex numbers": case(
        lambda z: (z.conj() * 1j, jnp.angle(z), lax.complex(z.real, z.imag)),
        (floats(ROWS, 2) + 1j * floats(ROWS, 2)).astype(np.complex64),
    ),
}

# Control flow


def bounded(body: Callable[..., Any], x: Any, steps: Any) -> Any:
    return lax.fori_loop(0, steps, lambda _, x: body(x), x)


CONTROL = {
    "while with a mapped predicate": case(
        lambda x, limit: lax.while_loop(lambda x: x.sum() < limit, lambda x: 2 * x + 1, x),
        integers(ROWS, 2),
        integers(ROWS) * 9,
    ),
    "while with a shared predicate": case(
        lambda x, n: lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 0.5), (0, x)),
        floats(ROWS),
        np.int32(3),
        axes=((0, None),),
    ),
    "while whose carry becomes mapped": case(
        lambda x: bounded(lambda c: (c[1], c[1] + x), (jnp.float32(0), jnp.float32(1)), 3),
        floats(ROWS),
    ),
    "fori_loop to a mapped bound": case(
        lambda n, x: bounded(jnp.sin, x, n), integers(ROWS), floats(3), axes=((0, None),)
    ),
    "scan backwards": case(
        lambda c, xs: lax.scan(lambda c, x: (c + x, c * x), c, xs, reverse=True),
        np.float32(1),
        floats(4, ROWS),
        axes=((None, 1), (0, 1)),
    ),
    "scan of shared with unmapped results": case(
        lambda x, ys: lax.scan(lambda c, y: (c + x, y * 2), 0 * x, ys),
        floats(ROWS),
        floats(4),
        axes=((0, None),),
    ),
    "scan of nothing": case(
        lambda x: lax.scan(lambda c, _: (c + 1, c), x, None, length=0), floats(ROWS)
    ),
    "gradient of a scan": case(
        jax.grad(lambda x: lax.scan(lambda c, y: (jnp.sin(c * y), c), x[0], x)[0]), floats(ROWS, 4)
    ),
    "cond inside scan": case(
        lambda x: lax.scan(lambda c, y: (lax.cond(y > 0, jnp.sin, jnp.cos, c), y), x[0], x)[0],
        floats(ROWS, 4),
    ),
    "cond with a shared predicate": case(
        lambda p, x: lax.cond(p, lambda x: (x, 1), lambda x: (-x, 2), x),
        np.bool_(True),
        floats(ROWS),
        axes=((None, 0),),
    ),
    "cond with one mapped branch": case(
        lambda p, x: lax.cond(p, lambda: x, lambda: jnp.zeros_like(x)),
        integers(ROWS) > 3,
        floats(2),
        axes=((0, None),),
    ),
    "switch beyond its branches": case(
        lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.negative], x),
        np.arange(-1, ROWS - 1, dtype=np.int32),
        floats(ROWS),
    ),
    "lax.map inside": case(lambda x: lax.map(lambda y: y * x[0], x), floats(ROWS, 3)),
    "custom_root": case(
        lambda a: lax.custom_root(
            lambda x: x**2 - a,
            a,
            lambda f, x: bounded(lambda x: 0.5 * (x + a / x), x, 8),
            lambda g, y: y / g(jnp.float32(1)),
        ),
        np.abs(floats(ROWS)) + 1,
    ),
    "custom_linear_solve": case(
        lambda a, b: lax.custom_linear_solve(lambda x: a * x, b, lambda _, b: b / a),
        np.float32(2),
        floats(ROWS, 2),
        axes=((None, 0),),
    ),
}


# Functions with rules of their own, and functions of functions


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 5 * tangents[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def applied(fun: Callable[..., Any], x: Any) -> Any:
    return fun(x)


applied.defvjp(lambda fun, x: (fun(x), x), lambda fun, x, tangent: (3 * tangent * x,))


@jax.jit
def powers(x: Any, y: Any = 2.0) -> Any:
    return {"x": x**2, "y": y}


def layers(params: Any, x: Any) -> Any:
    for weight, bias in params:
        x = jnp.tanh(weight @ x + bias)
    return x


PARAMS = [(floats(4, 3), floats(4)), (floats(2, 4), floats(2))]

TRANSFORMED = {
    "custom_jvp, its derivative": case(jax.vmap(jax.grad(doubled)), floats(ROWS, 3)),
    "custom_vjp, its derivative": case(
        jax.grad(lambda x: applied(jnp.sin, x).sum()), floats(3, ROWS), axes=(1, -1)
    ),
    "jit inside": case(powers, floats(ROWS), axes=((0,), {"x": 0, "y": None})),
    "remat inside": case(
        jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)).sum())(x)), floats(ROWS, 3)
    ),
    "gradients of a network": case(
        jax.value_and_grad(lambda p, x: layers(p, x).sum()),
        PARAMS,
        floats(ROWS, 3),
        axes=((None, 0),),
    ),
    "jacobians": case(
        lambda x: (
            jax.jacfwd(functools.partial(layers, PARAMS))(x),
            jax.jacrev(functools.partial(layers, PARAMS))(x),
        ),
        floats(ROWS, 3),
    ),
    "hessian": case(jax.hessian(lambda x: layers(PARAMS, x).sum()), floats(ROWS, 3)),
    "products with tangents": case(
        lambda x, t: jax.jvp(jnp.sin, (x,), (t,)), floats(3), floats(ROWS, 3), axes=((None, 0),)
    ),
    "pullback of shared input": case(
        lambda ct: jax.vjp(functools.partial(layers, PARAMS), jnp.ones(3))[1](ct),
        np.eye(2, dtype="f4"),
    ),
    "nested vmap, both ways": case(
        lambda a, b: jax.vmap(jnp.dot, (None, 1), 0)(a, b),
        floats(ROWS, 3),
        floats(3, 4),
        axes=((0, None), 1),
    ),
    "twice nested vmap": case(
        jax.vmap(jax.vmap(jnp.subtract, (0, None)), (None, 0), 1),
        floats(2, ROWS),
        floats(ROWS, 3),
        axes=((1, 0), -1),
    ),
    "collective of an inner vmap": case(
        jax.vmap(lambda x: x / lax.psum(x, "inner"), axis_name="inner"), np.abs(floats(ROWS, 3)) + 1
    ),
    "jnp.vectorize": case(
        jnp.vectorize(jnp.dot, signature="(n),(n)->()"),
        floats(ROWS, 2, 3),
        floats(2, 3),
        axes=((0, None),),
    ),
    "optimization_barrier": case(lambda x: lax.optimization_barrier((x, 2 * x)), floats(ROWS, 2)),
    "linear_transpose": case(
        lambda y: jax.linear_transpose(lambda x: 3 * x[::2], jax.ShapeDtypeStruct((4,), "float32"))(
            y
        ),
        floats(ROWS, 2),
    ),
}

# Random numbers

KEYS = jax.random.split(jax.random.key(2), ROWS)

RANDOM = {
    "draws from many distributions": case(
        lambda k: (
            jax.random.normal(k, (2,)),
            jax.random.randint(k, (3,), 0, 9),
            jax.random.bernoulli(k),
            jax.random.permutation(k, 5),
        ),
        KEYS,
    ),
    "draws by rejection": case(
        lambda k, a: (
            jax.random.gamma(k, a),
            jax.random.truncated_normal(k, -1.0, a),
        ),
        KEYS,
        np.abs(floats(ROWS)) + 1,
    ),
    "keys made from seeds": case(
        lambda seed: (jax.random.key(seed), jax.random.split(jax.random.PRNGKey(seed))),
        integers(ROWS),
    ),
    "keys made and used": case(
        lambda key, i: jax.random.uniform(jax.random.split(jax.random.fold_in(key, i), 2)[1], (2,)),
        KEYS[0],
        integers(ROWS),
        axes=((None, 0), 1),
    ),
    "keys in and out of data": case(
        lambda k: (
            jax.random.key_data(k),
            jax.random.wrap_key_data(jax.random.key_data(k)),
            jnp.stack([k, k]),
        ),
        KEYS,
    ),
    "keys chosen": case(
        lambda p, k: jnp.where(p, k, jax.random.fold_in(k, 1)), integers(ROWS) > 3, KEYS
    ),
}

# Axes and trees


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclass
class Registered:
    """A node that JAX was told of."""

    array: Any
    inner: Any


@jax.tree_util.register_static
@dataclass(frozen=True)
class Named:
    """A node without leaves."""

    name: str


@jax.tree_util.register_pytree_with_keys_class
class Reluctant:
    """A node whose leaf stands under a name that is no plain attribute."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden

    @property
    def value(self) -> Any:
        raise RuntimeError("not to be looked at by those who were only given it")

    def tree_flatten_with_keys(self) -> Any:
        return ((jax.tree_util.GetAttrKey("value"), self.hidden),), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)


TREES = {
    "in_axes in a list": case(lambda x, y: x + y, floats(ROWS, 2), floats(2), axes=([0, None],)),
    "prefix of a tree": case(
        lambda p: (p["a"][0] * p["b"].x, p["c"]),
        {"a": [floats(2, ROWS), None], "b": Point(floats(2), floats(2)), "c": floats(3)},
        axes=(({"a": 1, "b": None, "c": None},), (-1, None)),
    ),
    "None among axes and leaves": case(
        lambda p, none: (p.x, p.y, none, None),
        Point(floats(ROWS), None),
        None,
        axes=((Point(0, None), None),),
    ),
    "registered nodes": case(
        lambda node, name: Registered(node.inner.x * len(name.name), (node.array, name)),
        Registered(floats(ROWS), Point(floats(2, ROWS), None)),
        Named("four"),
        axes=((Registered(0, 1), None), Registered(1, 0)),
    ),
    "nodes that are not reached into": case(
        lambda node: Reluctant(node.hidden * 2), Reluctant(floats(ROWS, 2))
    ),
    "empty containers": case(lambda x, empty: (x + 1, (), {}, empty), integers(ROWS), ()),
    "keywords on axis 0": case(
        lambda x, *, y, tree=None: (x @ y, tree),
        floats(3, ROWS),
        axes=((1,),),
        kwargs={"y": floats(ROWS, 3), "tree": {"z": integers(ROWS)}},
    ),
    "more places for the output axis": case(
        lambda x: (x, [x.sum(0), x.sum()], {"k": x[0, 0]}),
        floats(2, 3, ROWS),
        axes=(-1, (-2, [1, 0], {"k": -1})),
    ),
    "out_axes None for what is shared": case(
        lambda p, x: {"p": jnp.sin(p), "x": p + x},
        floats(2),
        floats(ROWS, 2),
        axes=((None, 0), {"p": None, "x": 1}),
    ),
    "constants as outputs": case(
        lambda x: (3, 2.5, True, 1j, np.int8(3), np.ones(2, np.float16)), floats(ROWS)
    ),
    "size given and mapped": case(lambda x: x + 1, floats(ROWS, 2), axis_size=ROWS),
    "size given, nothing mapped": case(
        lambda x: (x, 1), floats(2), axes=(None, (0, None)), axis_size=ROWS
    ),
    "size given, no arguments": case(lambda: jnp.arange(3), axis_size=ROWS),
    "size 1 beside others": case(lambda x, y: x + y, floats(1, 2), floats(2), axes=((0, None),)),
    "no rows": case(
        lambda x, y: {"s": jnp.sin(x) @ y, "i": 3},
        floats(3, 0),
        floats(3, 2),
        axes=((1, None), {"s": 1, "i": 0}),
    ),
    "no elements": case(lambda x: (x, x.sum(), jnp.zeros((0, 2), x.dtype)), floats(ROWS, 0)),
    "unused argument and repeated output": case(lambda x, y: (x, x), floats(ROWS), floats(ROWS, 2)),
    "Python and numpy scalars": case(
        lambda x, i, f, b, h: x * f + i + jnp.float32(b) * h,
        floats(ROWS),
        2,
        0.5,
        True,
        np.float32(3),
        axes=((0, None, None, None, None),),
    ),
    "named axis that nobody uses": case(lambda x: x + 1, floats(ROWS), axis_name="rows"),
}

CASES: dict[str, Case] = {
    **PRODUCTS,
    **INDEXING,
    **SHAPES,
    **REDUCTIONS,
    **ALGEBRA,
    **CONTROL,
    **TRANSFORMED,
    **RANDOM,
    **TREES,
}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """What is asked here is whether values are right, not how fast."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def plainly(fun: Callable[..., Any], *axes: Any, **options: Any) -> Any:
    return jax.jit(jax.vmap(fun, *axes, **options))


@functools.cache
def expected(name: str) -> Any:
    return CASES[name](plainly)


@pytest.mark.parametrize("strategy", FORCED)
@pytest.mark.parametrize("name", CASES)
def test_forced_strategies_are_vmap(name: str, strategy: str) -> None:
    assert_same(CASES[name](functools.partial(autobatch, strategy=strategy)), expected(name))


@pytest.mark.parametrize(
    "name",
    [
        "batched products on other axes",
        "scatter out of bounds",
        "general reduction",
        "sort with two keys and a value",
        "symmetric eigenvalues",
        "while with a mapped predicate",
        "nested vmap, both ways",
        "draws from many distributions",
        "registered nodes",
        "out_axes None for what is shared",
        "no rows",
    ],
)
def test_the_automatic_choice_is_vmap(name: str) -> None:
    batched = functools.partial(autobatch, tune="first-call")
    assert_same(CASES[name](batched), expected(name))


# Misuse


def pair(x: Any, y: Any) -> Any:
    return x, y


ONES = np.ones((ROWS, 2), np.float32)

MISUSES = {
    "fun not callable": case(3, ONES),  # pyright: ignore[reportArgumentType]
    "tree of axes of another kind": case(pair, (ONES, ONES), ONES, axes=(({"a": 0}, 0),)),
    "axes for a leaf that is no tree": case(pair, ONES, ONES, axes=((Point(0, 0), 0),)),
    "axis of a tree beyond one leaf": case(pair, {"a": ONES, "b": ONES[0]}, ONES, axes=((1, 0),)),
    "in_axes an array": case(pair, ONES, ONES, axes=(np.array([0, 0]),)),
    "in_axes an object inside a tree": case(pair, ONES, ONES, axes=((0, {"a": "b"}),)),
    "all arguments None in axes": case(pair, ONES, ONES, axes=((None, None),)),
    "keyword of another size": case(pair, ONES, kwargs={"y": np.ones(ROWS + 1)}),
    "keyword that fun has not": case(lambda x: x, ONES, kwargs={"z": ONES}),
    "keyword given twice": case(pair, ONES, ONES, kwargs={"x": ONES}),
    "argument missing": case(pair, ONES),
    "sizes that differ over trees": case(pair, [ONES, [ONES.T]], ONES),
    "size given that no leaf has": case(pair, ONES, ONES[0], axes=((0, None),), axis_size=3),
    "axis_size a text": case(lambda: 1.0, axis_size="5"),
    "scalar of a tree mapped": case(pair, {"a": 1.0, "b": ONES}, ONES),
    "text in a mapped tree": case(pair, {"a": "text", "b": ONES}, ONES),
    "object on a mapped axis": case(pair, ONES, Named),
    "unhashable object on a mapped axis": case(pair, ONES, {1, 2}),
    "unhashable object in a mapped tree": case(pair, ONES, [ONES, {1, 2}]),
    "array of objects on a mapped axis": case(lambda x: x, np.array([1, None])),
    "array of texts on a mapped axis": case(lambda x: x, np.array(["a", "b"])),
    "key mapped beyond its rank": case(lambda k: k, KEYS, axes=(1,)),
    "out_axes too many": case(pair, ONES, ONES, axes=(0, (0, 0, 0))),
    "out_axes for a None": case(lambda x: None, ONES, axes=(0, (0,))),
    "out_axes beyond a scalar": case(lambda x: x.sum(), ONES, axes=(0, 1)),
    "out_axes a tree too deep": case(lambda x: {"a": x}, ONES, axes=(0, {"a": {"b": 0}})),
    "out_axes None for a mapped leaf": case(
        lambda x: {"a": x, "b": 1}, ONES, axes=(0, {"a": None, "b": 0})
    ),
    "output a text": case(lambda x: {"a": "text"}, ONES),
    "output a type": case(lambda x: (x, int), ONES),
    "branch on a row": case(lambda x: 1 if x.sum() > 0 else 2, ONES),
    "row as an index of a list": case(lambda i: [1, 2, 3][i], integers(ROWS)),
    "row as a shape": case(lambda n: jnp.zeros(n), integers(ROWS)),
    "shapes that do not fit": case(jnp.matmul, ONES, np.ones((ROWS, 3), np.float32)),
    "branches of other types": case(lambda x: lax.cond(x[0] > 0, lambda: 1, lambda: 2.0), ONES),
    "carry of another type": case(lambda x: lax.scan(lambda c, _: (1, c), x, None, length=2), ONES),
    "name of no axis": case(lambda x: lax.psum(x, "nowhere"), ONES),
    "error of the user's": case(lambda x: (_ for _ in ()).throw(LookupError("mine")), ONES),
    "boolean mask of a row": case(lambda x: x[x > 0], ONES),
}


@pytest.mark.parametrize("strategy", ["map", None], ids=str)
@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_what_vmap_raises(
    name: str, strategy: str | None, count_compiles: Callable[[], int]
) -> None:
    with pytest.raises(Exception) as bare:  # noqa: PT011 - whichever vmap has
        MISUSES[name](jax.vmap)
    before = count_compiles()
    with pytest.raises(bare.type) as ours:
        MISUSES[name](functools.partial(autobatch, strategy=strategy))
    assert ours.type is bare.type
    assert count_compiles() == before, "misuse is found before anything is compiled"
