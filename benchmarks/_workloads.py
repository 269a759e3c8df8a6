"""The programs on which the search for the best strategy is judged, each with its batch.

Here: one function a program, which makes the function of one row, the mapped axes and NumPy
arguments of a fixed seed; `SUITE` lists them all. Shapes and sizes vary, so that different
strategies win. Not here: the programs that branch or loop, in `_workloads_control`; timing and
strategies, which the benchmarks that use the suite add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _workloads_control import CONTROL, Made, normal, rng


@dataclass(frozen=True, kw_only=True)
class Case:
    """A named program; `make` returns the function of one row, `in_axes` and the arguments."""

    name: str
    make: Callable[[], Made]


# Indexing and order.


def scatter_shared() -> Made:
    """1,000 rows that each change one of 20,000 shared numbers and sum the result."""

    def fun(table: Any, place: Any, value: Any) -> Any:
        return table.at[place].set(value).sum()

    places = rng(0).integers(0, 20_000, 1000, np.int32)
    return fun, (None, 0, 0), (normal(1, 20_000), places, normal(2, 1000))


def histogram() -> Made:
    """1,000 histograms of 500 samples."""

    def fun(samples: Any) -> Any:
        places = jnp.clip(jnp.int32(8 * samples) + 32, 0, 63)
        return jnp.zeros(64, jnp.int32).at[places].add(1)

    return fun, 0, (normal(0, 1000, 500),)


def gather_embeddings() -> Made:
    """5,003 rows that each average 32 of 5,000 shared embeddings."""

    def fun(table: Any, places: Any) -> Any:
        return table[places].mean(axis=0)

    places = rng(0).integers(0, 5000, (5003, 32), np.int32)
    return fun, (None, 0), (normal(1, 5000, 64), places)


def interpolation() -> Made:
    """100,000 points looked up in a shared table."""
    knots = np.linspace(-4, 4, 512, dtype=np.float32)
    return jnp.interp, (0, None, None), (normal(0, 100_000), knots, np.tanh(knots))


def sorted_rows() -> Made:
    """512 rows of 1,000 numbers, of which a robust mean is taken after sorting."""

    def fun(x: Any) -> Any:
        return jnp.sort(x)[100:-100].mean()

    return fun, 0, (normal(0, 512, 1000),)


# Sums over pairs.


def kernel_row_sums() -> Made:
    """2,000 row sums of a Gaussian kernel between points."""

    def fun(point: Any, points: Any) -> Any:
        return jnp.exp(-((points - point[None]) ** 2).sum(axis=1)).sum()

    points = normal(0, 2000, 3)
    return fun, (0, None), (points, points)


# Derivatives.


def gradients_whole() -> Made:
    """The gradients of a small perceptron for each of 500 examples."""
    weights = list(normal(0, 3, 48, 48) / 7)
    return jax.grad(_loss), (None, 0), (weights, normal(1, 500, 48))


def gradient_norms() -> Made:
    """The norms of the gradients of a perceptron of 24 layers for each of 1,000 examples."""

    def fun(weights: Any, x: Any) -> Any:
        return jnp.sqrt(sum((each**2).sum() for each in jax.grad(_loss)(weights, x)))

    return fun, (None, 0), (list(normal(0, 24, 64, 64) / 6), normal(1, 1000, 64))


def hessians() -> Made:
    """The hessians of a perceptron of 4 layers by its input, for each of 128 points."""
    weights = list(normal(0, 4, 16, 16) / 4)
    return jax.hessian(_loss, argnums=1), (None, 0), (weights, normal(1, 128, 16))


def few_deep_hessians() -> Made:
    """Four hessians of a perceptron of 12 layers by its input."""
    weights = list(normal(0, 12, 96, 96) / 10)
    return jax.hessian(_loss, argnums=1), (None, 0), (weights, normal(1, 4, 96))


# Networks, convolutions and transforms.


def attention() -> Made:
    """2,000 queries that attend to 4,096 shared keys."""

    def fun(query: Any, keys: Any, values: Any) -> Any:
        return jax.nn.softmax(keys @ query) @ values

    keys, values = normal(0, 2, 4096, 32) / 3
    return fun, (0, None, None), (normal(1, 2000, 32), keys, values)


def random_features() -> Made:
    """2,000 points through 4,096 shared random Fourier features."""

    def fun(frequencies: Any, weights: Any, x: Any) -> Any:
        angles = frequencies @ x
        features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)])
        return weights @ features

    frequencies, weights = normal(0, 2048, 96) / 10, normal(1, 4096) / 64
    return fun, (None, None, 0), (frequencies, weights, normal(2, 2000, 96))


def perceptron_points() -> Made:
    """5,000 points through a perceptron of 3 layers with shared weights."""
    return _loss, (None, 0), (list(normal(0, 3, 128, 128) / 11), normal(1, 5000, 128))


def convolution_shared() -> Made:
    """64 images under one kernel."""
    return _convolve, (0, None), (normal(0, 64, 4, 48, 48), normal(1, 8, 4, 3, 3))


def convolution_own() -> Made:
    """Seven images, each under a kernel of its own."""
    return _convolve, (0, 0), (normal(0, 7, 4, 96, 96), normal(1, 7, 8, 4, 3, 3))


def power_spectra() -> Made:
    """The power spectra of 500 columns of 1,024 samples, mapped along the second axis."""

    def fun(samples: Any) -> Any:
        return jnp.abs(jnp.fft.rfft(samples)) ** 2

    return fun, 1, (normal(0, 1024, 500),)


# Linear algebra.


def solve_shared() -> Made:
    """200 right-hand sides of one system of 96 equations."""
    matrix = normal(0, 96, 96) + 20 * np.eye(96, dtype=np.float32)
    return jnp.linalg.solve, (None, 0), (matrix, normal(1, 200, 96))


def solve_positive() -> Made:
    """3,000 symmetric positive definite systems of 6 equations."""

    def fun(matrix: Any, vector: Any) -> Any:
        factor = jax.scipy.linalg.cho_factor(matrix @ matrix.T + jnp.eye(6))
        return jax.scipy.linalg.cho_solve(factor, vector)

    return fun, (0, 0), (normal(0, 3000, 6, 6), normal(1, 3000, 6))


def least_squares() -> Made:
    """307 least squares problems of 16 equations by QR."""

    def fun(matrix: Any, vector: Any) -> Any:
        q, r = jnp.linalg.qr(matrix)
        return jax.scipy.linalg.solve_triangular(r, q.T @ vector)

    return fun, (0, 0), (normal(0, 307, 16, 8), normal(1, 307, 16))


def matrix_products() -> Made:
    """200 products of a shared matrix, moved by one number a row, with its transpose."""

    def fun(matrix: Any, x: Any) -> Any:
        return jnp.tanh((matrix + x) @ (matrix + x).T).sum()

    return fun, (None, 0), (normal(0, 64, 64) / 8, normal(1, 200))


# Draws and elementwise rows.


def random_walks() -> Made:
    """The highest points of 1,000 random walks of 500 steps, with one raw key a row."""

    def fun(key: Any) -> Any:
        return jnp.cumsum(jax.random.normal(key, (500,))).max()

    return fun, 0, (rng(0).integers(0, 2**32, (1000, 2), np.uint32),)


def elementwise_chain() -> Made:
    """200 rows of 20,000 numbers through a chain with a mean in the middle."""

    def fun(x: Any) -> Any:
        y = jnp.exp(-(x**2)) * jnp.sin(3 * x)
        return jnp.tanh(y - y.mean()) / (1 + jnp.abs(x))

    return fun, 0, (normal(0, 200, 20_000),)


def million_cheap() -> Made:
    """1,000,000 rows of one number each."""

    def fun(x: Any) -> Any:
        return ((0.3 * x - 0.5) * x + 0.2) * x + 1

    return fun, 0, (normal(0, 1_000_000),)


def thousand_cheap() -> Made:
    """1,000 rows of thirty-two numbers each."""

    def fun(x: Any) -> Any:
        return jnp.log1p(jnp.exp(x)).sum()

    return fun, 0, (normal(0, 1000, 32),)


def _loss(weights: Any, x: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(weight @ x)
    return (x**2).sum()


def _convolve(image: Any, kernel: Any) -> Any:
    return jax.nn.relu(jax.lax.conv(image[None], kernel, (1, 1), "SAME")[0])


SUITE: tuple[Case, ...] = tuple(
    Case(name=make.__name__, make=make)
    for make in (
        *CONTROL,
        scatter_shared,
        histogram,
        gather_embeddings,
        interpolation,
        sorted_rows,
        kernel_row_sums,
        gradients_whole,
        gradient_norms,
        hessians,
        few_deep_hessians,
        attention,
        random_features,
        perceptron_points,
        convolution_shared,
        convolution_own,
        power_spectra,
        solve_shared,
        solve_positive,
        least_squares,
        matrix_products,
        random_walks,
        elementwise_chain,
        million_cheap,
        thousand_cheap,
    )
)
