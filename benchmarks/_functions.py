"""Functions of different shape that take a while to compile, with arguments for a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def gradient_norm() -> tuple[Any, Any, Any]:
    """The norm of the gradient of a perceptron of 30 layers by its weights."""

    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(weight @ x)
        return (x**2).sum()

    def fun(weights: Any, x: Any) -> Any:
        return sum((each**2).sum() for each in jax.grad(loss)(weights, x))

    return fun, (None, 0), (list(_normal(0, 30, 32, 32) / 6), _normal(1, 1024, 32))


def recurrent_gradient() -> tuple[Any, Any, Any]:
    """The gradient of a gated recurrent network over 50 steps by its weights."""

    def loss(weights: Any, sequence: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            gate = jax.nn.sigmoid(weights["gate"] @ jnp.concatenate([state, x]))
            new = jnp.tanh(weights["new"] @ jnp.concatenate([gate * state, x]))
            state = (1 - gate) * state + gate * new
            return state, state.sum()

        return (jax.lax.scan(step, jnp.zeros(32), sequence)[1] ** 2).sum()

    weights = {"gate": _normal(0, 32, 40) / 6, "new": _normal(1, 32, 40) / 6}
    return jax.grad(loss), (None, 0), (weights, _normal(3, 64, 50, 8))


def hessian() -> tuple[Any, Any, Any]:
    """The hessian of a perceptron of 10 layers by its input."""

    def potential(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(weight @ x)
        return x.sum()

    return (
        jax.hessian(potential, argnums=1),
        (None, 0),
        (list(_normal(0, 10, 12, 12) / 3), _normal(1, 128, 12)),
    )


def many_equations() -> tuple[Any, Any, Any]:
    """A hundred and sixty equations on vectors, every fourth of them a matrix product."""

    def fun(matrix: Any, x: Any) -> Any:
        y = x
        for number in range(40):
            y = jnp.sin(matrix @ y) + x * (number / 40)
        return y

    return fun, (None, 0), (_normal(0, 16, 16) / 4, _normal(1, 64, 16))


def rare_branch() -> tuple[Any, Any, Any]:
    """A cheap branch for nearly every row, eigenvalue decompositions for the others."""

    def heavy(x: Any) -> Any:
        matrix = jnp.outer(x, x) + 16 * jnp.eye(x.size)
        for _ in range(3):
            values, vectors = jnp.linalg.eigh(matrix)
            matrix = (vectors * jnp.sqrt(jnp.abs(values) + 1)) @ vectors.T + jnp.outer(x, x)
        return jnp.linalg.solve(matrix, x)

    def fun(x: Any) -> Any:
        return jax.lax.cond(x[0] > 3, heavy, lambda x: x, x)

    return fun, (0,), (_normal(0, 512, 32),)


def linear_algebra() -> tuple[Any, Any, Any]:
    """Four decompositions and two solves of a small matrix."""

    def fun(matrix: Any, vector: Any) -> Any:
        positive = matrix @ matrix.T + jnp.eye(vector.size)
        root = jnp.linalg.cholesky(positive)
        solution = jnp.linalg.solve(positive, vector)
        triangle = jnp.linalg.qr(matrix)[1]
        values = jnp.linalg.svd(matrix)[1]
        volume = jnp.linalg.slogdet(positive)[1]
        return solution @ vector + jnp.log(values).sum() + volume + jnp.trace(root + triangle)

    return fun, (0, 0), (_normal(0, 64, 12, 12), _normal(1, 64, 12))


FUNCTIONS = {
    each.__name__: each
    for each in (
        gradient_norm,
        recurrent_gradient,
        hessian,
        many_equations,
        rare_branch,
        linear_algebra,
    )
}


def _normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))
