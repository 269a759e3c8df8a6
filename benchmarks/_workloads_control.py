"""The programs of the suite that branch or loop, each with its batch.

Here: one function a program, which makes the function of one row, the mapped axes and NumPy
arguments of a fixed seed; `CONTROL` lists them. Also what both modules of the suite draw their
arguments from. Not here: the suite itself and its other programs, in `_workloads`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Made = tuple[Callable[..., Any], Any, tuple[Any, ...]]


def rng(seed: int) -> np.random.Generator:
    """The generator of `seed`."""
    return np.random.default_rng(seed)


def normal(seed: int, *shape: int) -> Any:
    """Normal numbers of single precision, always the same for one seed."""
    return rng(seed).standard_normal(shape, np.float32)


# Loops whose length depends on the row.


def while_few_long() -> Made:
    """4,096 rows, 8 of which iterate two hundred times as long as the others."""
    steps = np.full(4096, 5, np.int32)
    steps[::512] = 1000
    return _relax, (0, 0), (steps, normal(0, 4096, 8))


def while_equal() -> Made:
    """1,024 rows that all iterate equally long."""
    return _relax, (0, 0), (np.full(1024, 100, np.int32), normal(0, 1024, 16))


def collatz() -> Made:
    """A prime number of rows of integer arithmetic, with loops of 1 to 350 steps."""

    def fun(start: Any) -> Any:
        def step(state: Any) -> Any:
            value, count = state
            return jnp.where(value % 2 == 0, value // 2, 3 * value + 1), count + 1

        return jax.lax.while_loop(lambda state: state[0] > 1, step, (start, jnp.int32(0)))[1]

    return fun, 0, (rng(0).integers(1, 100_000, 10_007, np.int32),)


def adaptive_ode() -> Made:
    """256 Van der Pol oscillators, ever stiffer, by steps that halve and double with the error."""

    def fun(stiffness: Any, start: Any) -> Any:
        def slope(y: Any) -> Any:
            return jnp.stack([y[1], stiffness * (1 - y[0] ** 2) * y[1] - y[0]])

        def step(state: Any) -> Any:
            time, size, y = state
            first = slope(y)
            second = slope(y + size / 2 * first)
            third = slope(y + 3 * size / 4 * second)
            new = y + size / 9 * (2 * first + 3 * second + 4 * third)
            difference = -5 * first / 72 + second / 12 + third / 9 - slope(new) / 8
            error = size * jnp.abs(difference).max() / 1e-4
            accepted = error <= 1
            factor = jnp.where(accepted, jnp.where(error < 0.1, 2.0, 1.0), 0.5)
            time = jnp.where(accepted, time + size, time)
            return time, size * factor, jnp.where(accepted, new, y)

        initial = (jnp.float32(0), jnp.float32(1 / 64), start)
        return jax.lax.while_loop(lambda state: state[0] < 8, step, initial)[2]

    stiffness = np.geomspace(0.1, 100, 256, dtype=np.float32)
    return fun, (0, 0), (stiffness, 1 + normal(0, 256, 2) / 8)


# Branches.


def rare_decomposition() -> Made:
    """512 rows, of which two take the branch with an eigenvalue decomposition."""

    def heavy(x: Any) -> Any:
        values, vectors = jnp.linalg.eigh(jnp.outer(x, x) + jnp.diag(x))
        return vectors @ (jnp.tanh(values) * (vectors.T @ x))

    def fun(x: Any) -> Any:
        return jax.lax.cond(x[0] > 2.8, heavy, lambda x: 2 * x, x)

    return fun, 0, (normal(0, 512, 24),)


def ring_buffer() -> Made:
    """128 rows of a scan with a buffer of 1,024 numbers that a rare event is written to."""

    def fun(events: Any) -> Any:
        def step(carry: Any, event: Any) -> Any:
            def push(carry: Any) -> Any:
                buffer, place = carry
                return buffer.at[place].set(event), (place + 1) % buffer.size

            carry = jax.lax.cond(event > 2, push, lambda carry: carry, carry)
            return carry, carry[1]

        (buffer, _), places = jax.lax.scan(step, (jnp.zeros(1024), jnp.int32(0)), events)
        return {"total": buffer.sum(), "places": places}

    return fun, 0, (normal(0, 128, 200),)


def switch_kinds() -> Made:
    """600 rows, each of one of five kinds that cost differently."""
    branches = (
        lambda x: x,
        lambda x: jnp.sort(x),
        lambda x: jnp.cumsum(jnp.exp(-(x**2))),
        lambda x: jnp.tanh(jnp.outer(x, x)) @ x,
        lambda x: jax.lax.fori_loop(0, 50, lambda _, x: jnp.sin(x) + jnp.roll(x, 1) / 2, x),
    )

    def fun(kind: Any, x: Any) -> Any:
        return jax.lax.switch(kind, branches, x)

    return fun, (0, 0), (rng(0).integers(0, 5, 600, np.int32), normal(1, 600, 64))


# Scans and loops of a fixed length.


def recurrent_network() -> Made:
    """128 sequences of 100 steps through a recurrent network with shared weights."""

    def fun(weights: Any, sequence: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            state = jnp.tanh(weights["state"] @ state + weights["input"] @ x)
            return state, state.mean()

        return jax.lax.scan(step, jnp.zeros(64), sequence)[1]

    weights = {"state": normal(0, 64, 64) / 8, "input": normal(1, 64, 16) / 4}
    return fun, (None, 0), (weights, normal(2, 128, 100, 16))


def heat_equations() -> Made:
    """Sixteen plates of 128 by 128 cells over 100 steps."""

    def fun(plate: Any, rate: Any) -> Any:
        def step(plate: Any, _: Any) -> Any:
            around = sum(jnp.roll(plate, way, axis) for way in (-1, 1) for axis in (0, 1))
            return plate + rate * (around - 4 * plate), None

        return jax.lax.scan(step, plate, None, length=100)[0]

    return fun, (0, 0), (normal(0, 16, 128, 128), np.linspace(0, 0.2, 16, dtype=np.float32))


def two_matrix_chains() -> Made:
    """Two rows of six products of matrices of 320 rows."""

    def fun(matrix: Any) -> Any:
        return jax.lax.fori_loop(0, 6, lambda _, x: jnp.tanh(x @ matrix), matrix)

    return fun, 0, (normal(0, 2, 320, 320) / 18,)


def _relax(steps: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, steps, lambda _, x: jnp.cos(x) + 0.1 * jnp.roll(x, 1), x)


CONTROL: tuple[Callable[[], Made], ...] = (
    while_few_long,
    while_equal,
    collatz,
    adaptive_ode,
    rare_decomposition,
    ring_buffer,
    switch_kinds,
    recurrent_network,
    heat_equations,
    two_matrix_chains,
)
