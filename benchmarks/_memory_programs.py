"""The programs of the memory benchmark: with large results or rows, and with large batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Made = tuple[Callable[..., Any], tuple[int | None, ...], tuple[Any, ...]]
"""The function of one row, the mapped axes and the arguments."""


# Programs of which every strategy needs much, for its results or for one row.


def outer_products() -> Made:
    """8,000 products of a vector of 64 numbers with itself."""
    return lambda x: jnp.outer(x, jnp.tanh(x)), (0,), (_normal(0, 8000, 64),)


def spectra() -> Made:
    """The power and the phase of 6,000 windowed signals."""

    def fun(signal: Any) -> Any:
        transformed = jnp.fft.rfft(signal * jnp.hanning(signal.size))
        return jnp.log1p(jnp.abs(transformed)), jnp.angle(transformed)

    return fun, (0,), (_normal(0, 6000, 2048),)


def inverses() -> Made:
    """12,000 inverses of a positive matrix, by Cholesky's factors."""

    def fun(matrix: Any) -> Any:
        one = jnp.eye(matrix.shape[0])
        factor = jnp.linalg.cholesky(matrix @ matrix.T / matrix.shape[0] + one)
        return jax.scipy.linalg.cho_solve((factor, True), one)

    return fun, (0,), (_normal(0, 12_000, 32, 32),)


def feature_maps() -> Made:
    """Two convolutions over 256 images, which return all they found."""

    def fun(kernels: Any, image: Any) -> Any:
        for kernel in kernels:
            image = jax.nn.relu(_convolved(image, kernel))
        return image

    kernels = (_normal(0, 3, 3, 3, 8) / 5, _normal(1, 3, 3, 8, 16) / 8)
    return fun, (None, 0), (kernels, _normal(2, 256, 64, 64, 3))


def affinities() -> Made:
    """6 large products, normalised by a library that under vmap keeps them all meanwhile."""

    def fun(matrix: Any, x: Any) -> Any:
        return jax.nn.softmax((matrix + x) @ matrix.T)

    return fun, (None, 0), (_normal(0, 1600, 256) / 16, _normal(1, 6))


def deep_gradient() -> Made:
    """The gradient of 3,000 steps of a recurrence, whose states are kept for the way back."""

    def loss(weights: Any, state: Any) -> Any:
        def step(state: Any, _: None) -> tuple[Any, None]:
            return jnp.tanh(state @ weights), None

        return (jax.lax.scan(step, state, length=3000)[0] ** 2).sum()

    return jax.grad(loss), (None, 0), (_normal(0, 64, 64) / 8, _normal(1, 4, 64, 64))


# Programs of which vmap needs many times the budget, and a few rows need little.


def gram() -> Made:
    """3,072 products of a matrix with itself, which a library computes and sums."""

    def fun(matrix: Any, x: Any) -> Any:
        return jnp.tanh((matrix + x) @ (matrix + x).T).sum()

    return fun, (None, 0), (_normal(0, 256, 64) / 8, _normal(1, 3072))


def radial_kernel() -> Made:
    """1,536 kernels of the distances between 256 points, which a library computes and sums."""

    def fun(centres: Any, x: Any) -> Any:
        points = jnp.outer(x, centres[0])
        squares = (points**2).sum(1)[:, None] + (centres**2).sum(1)
        return jnp.exp(2 * points @ centres.T - squares).sum()

    return fun, (None, 0), (_normal(0, 256, 64) / 16, _normal(1, 1536, 256))


def power_spectrum() -> Made:
    """Two-dimensional transforms of 3,072 images of 128 x 128."""

    def fun(x: Any) -> Any:
        return jnp.log1p(jnp.abs(jnp.fft.fft2(jnp.outer(x, jnp.sin(x))))).mean()

    return fun, (0,), (_normal(0, 3072, 128),)


def log_determinant() -> Made:
    """The factors of 24,576 matrices of 96 x 96, by LAPACK."""

    def fun(x: Any) -> Any:
        matrix = jnp.outer(x, x) + x.size * jnp.eye(x.size)
        return jnp.log(jnp.diagonal(jnp.linalg.cholesky(matrix))).sum()

    return fun, (0,), (_normal(0, 24_576, 96),)


def convolution() -> Made:
    """Two convolutions over 1,024 images that are made of two vectors each."""

    def fun(kernels: Any, x: Any, y: Any) -> Any:
        image = jnp.outer(x, y)[..., None]
        for kernel in kernels:
            image = jax.nn.relu(_convolved(image, kernel))
        return image.mean((0, 1))

    kernels = (_normal(0, 3, 3, 1, 16) / 3, _normal(1, 3, 3, 16, 16) / 12)
    return fun, (None, 0, 0), (kernels, _normal(2, 1024, 64), _normal(3, 1024, 64))


def recurrent_gradient() -> Made:
    """The gradient of 200 steps of 4,096 recurrences by their first states."""

    def loss(weights: Any, state: Any) -> Any:
        def step(state: Any, _: None) -> tuple[Any, Any]:
            state = jnp.tanh(weights @ state) + 0.1 * jnp.sin(state)
            return state, (state**2).sum()

        return jax.lax.scan(step, state, length=200)[1].sum()

    return jax.grad(loss, argnums=1), (None, 0), (_normal(0, 64, 64) / 8, _normal(1, 4096, 64))


LARGE = (outer_products, spectra, inverses, feature_maps, affinities, deep_gradient)
BUDGETS_MIB = {
    gram: 32,
    radial_kernel: 32,
    power_spectrum: 32,
    log_determinant: 64,
    convolution: 64,
    recurrent_gradient: 48,
}
MAKE: dict[str, Callable[[], Made]] = {each.__name__: each for each in (*LARGE, *BUDGETS_MIB)}


def _normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _convolved(image: Any, kernel: Any) -> Any:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        image[None], kernel, (1, 1), "SAME", dimension_numbers=dimensions
    )[0]
