"""What is `chunked:K` like beside `jax.lax.map(batch_size=K)`, where K does not divide the rows?

NetKet's `vmap_chunked` stands beside both. Compiling is all that a first call does before it runs:
tracing, lowering and compiling, with JAX's caches empty.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import (
    by_hand,
    median_and_spread,
    print_header,
    print_table,
    ratios,
    verdict,
    with_spread,
)

from autobatch import autobatch

COMPILES, ROUNDS = 9, 60
SAMPLE_S = 2e-3
"""A timed run is repeated until it lasts at least this long."""


@dataclass
class Contender:
    """One of the three forms for one function, and what was measured of it."""

    make: Callable[[], Any]
    compiled: Any = None
    compile_s: list[float] = field(default_factory=list)
    run_s: list[float] = field(default_factory=list)

    def compile_once(self, args: tuple[Any, ...]) -> None:
        jax.clear_caches()
        start = time.perf_counter()
        self.compiled = self.make().lower(*args).compile()
        self.compile_s.append(time.perf_counter() - start)

    def run(self, args: tuple[Any, ...], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            jax.block_until_ready(self.compiled(*args))
        return (time.perf_counter() - start) / repeats

    @property
    def temporary_bytes(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes


def attention(memory: Any, query: Any) -> Any:
    """Reads a shared memory; two outputs, one of them large."""
    keys, values = memory
    weights = jax.nn.softmax(keys @ query / math.sqrt(query.size))
    return weights @ values, weights


def recurrence(weights: Any, sequence: Any) -> Any:
    """A gated recurrent network over 40 steps."""

    def step(state: Any, x: Any) -> Any:
        gate = jax.nn.sigmoid(weights["gate"] @ jnp.concatenate([state, x]))
        new = jnp.tanh(weights["new"] @ jnp.concatenate([gate * state, x]))
        state = (1 - gate) * state + gate * new
        return state, state[0]

    return jax.lax.scan(step, jnp.zeros(24), sequence)


def spectrum(signal: Any) -> Any:
    """A windowed power spectrum, smoothed."""
    power = jnp.abs(jnp.fft.rfft(signal * jnp.hanning(signal.size))) ** 2
    return jnp.log1p(jnp.convolve(power, jnp.ones(9) / 9, mode="same"))


def log_density(mean: Any, root: Any, x: Any) -> Any:
    """A Gaussian with a covariance for every row, and its gradient."""

    def value(x: Any) -> Any:
        factor = jnp.linalg.cholesky(root @ root.T + jnp.eye(x.size))
        scaled = jax.scipy.linalg.solve_triangular(factor, x - mean, lower=True)
        return -(scaled @ scaled) / 2 - jnp.log(jnp.diagonal(factor)).sum()

    return jax.value_and_grad(value)(x)


def curvature(weights: Any, x: Any) -> Any:
    """The hessian of a small network by its input."""

    def potential(x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(weight @ x)
        return x.sum()

    return {"hessian": jax.hessian(potential)(x), "gradient": jax.grad(potential)(x)}


def fixed_point(parameter: Any) -> Any:
    """Newton's method until it converges, as many steps as a row needs."""

    def step(state: Any) -> Any:
        x, _ = state
        change = (x - parameter * jnp.cos(x)) / (1 + parameter * jnp.sin(x))
        return x - change, jnp.abs(change).max()

    start = (jnp.zeros_like(parameter), jnp.array(jnp.inf, parameter.dtype))
    return jax.lax.while_loop(lambda state: state[1] > 1e-4, step, start)[0]


def ranks(scores: Any, labels: Any) -> Any:
    """Sorting and counting: the area under a curve and the ten best."""
    order = jnp.argsort(-scores)
    hits = jnp.cumsum(labels[order])
    return (hits * (1 - labels[order])).sum() / scores.size, order[:10]


def _normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def functions() -> dict[str, tuple[Any, tuple[int | None, ...], tuple[Any, ...], int]]:
    """Returns each function with its axes, its arguments and K. The numbers of rows are prime."""
    network = list(_normal(0, 4, 16, 16) / 3)
    gates = {"gate": _normal(1, 24, 32) / 6, "new": _normal(2, 24, 32) / 6}
    return {
        "attention": (
            attention,
            (None, 0),
            ((_normal(3, 500, 32), _normal(4, 500, 64)), _normal(5, 2003, 32)),
            100,
        ),
        "recurrence": (recurrence, (None, 0), (gates, _normal(6, 1021, 40, 8)), 64),
        "spectrum": (spectrum, (0,), (_normal(7, 1511, 1024),), 50),
        "log_density": (
            log_density,
            (None, 0, 0),
            (_normal(8, 12), _normal(9, 997, 12, 12), _normal(10, 997, 12)),
            48,
        ),
        "curvature": (curvature, (None, 0), (network, _normal(11, 1999, 16)), 32),
        "fixed_point": (
            fixed_point,
            (0,),
            (jax.random.uniform(jax.random.key(12), (4001, 64)),),
            500,
        ),
        "ranks": (
            ranks,
            (0, 0),
            (_normal(13, 509, 800), (_normal(14, 509, 800) > 0).astype(jnp.float32)),
            24,
        ),
    }


def measured(
    fun: Any, in_axes: Any, args: tuple[Any, ...], chunk: int
) -> tuple[Contender, Contender, Contender]:
    """Returns autobatch's form, `lax.map`'s and NetKet's, compiled and run in turn."""
    strategy = f"chunked:{chunk}"
    ours = Contender(lambda: autobatch(fun, in_axes, strategy=strategy, store=False))
    reference = Contender(lambda: by_hand(fun, in_axes, strategy))
    netket = Contender(lambda: jax.jit(_netket(fun, in_axes, chunk)))
    contenders, shuffle = [ours, reference, netket], random.Random(0).shuffle
    for _ in range(COMPILES):
        for each in shuffled(contenders, shuffle):
            each.compile_once(args)
    for each in contenders:
        jax.tree.map(
            lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-4),
            each.compiled(*args),
            reference.compiled(*args),
        )
    repeats = max(1, round(SAMPLE_S / reference.run(args, 3)))
    for _ in range(ROUNDS):
        for each in shuffled(contenders, shuffle):
            each.run_s.append(each.run(args, repeats))
    return ours, reference, netket


def _netket(fun: Any, in_axes: Any, chunk: int) -> Any:
    # It would otherwise set 64 bits and a mesh for the whole process.
    os.environ |= {"NETKET_ENABLE_X64": "0", "NETKET_SHARDING": "0"}
    from netket.jax import vmap_chunked

    return vmap_chunked(fun, in_axes, chunk_size=chunk)


def shuffled(items: list[Any], shuffle: Callable[[list[Any]], None]) -> list[Any]:
    """Returns the items in another order."""
    items = list(items)
    shuffle(items)
    return items


def main() -> None:
    print_header("chunked:K over lax.map(batch_size=K): compile, temporaries, run; rows are prime")
    rows, runs = [], []
    for name, (fun, in_axes, args, chunk) in functions().items():
        ours, reference, netket = measured(fun, in_axes, args, chunk)
        compiles = ratios(ours.compile_s, reference.compile_s)
        runs.append(ratios(ours.run_s, reference.run_s))
        temporaries = ours.temporary_bytes / max(1, reference.temporary_bytes)
        rows.append(
            [
                name,
                f"{len(jax.tree.leaves(args[-1])[0])}/{chunk}",
                with_spread(compiles),
                verdict(median_and_spread(compiles)[0], 0.8),
                f"{temporaries:.2f}",
                verdict(temporaries, 1.0),
                with_spread(runs[-1]),
                verdict(median_and_spread(runs[-1])[0], 1.1),
                f"{median_and_spread(ratios(netket.compile_s, reference.compile_s))[0]:.2f}",
                f"{netket.temporary_bytes / max(1, reference.temporary_bytes):.2f}",
                f"{median_and_spread(ratios(netket.run_s, reference.run_s))[0]:.2f}",
            ]
        )
    mean = math.exp(np.mean([math.log(median_and_spread(each)[0]) for each in runs]))
    rows.append(["geometric mean", *[""] * 5, f"{mean:.2f}", verdict(mean, 1.0), *[""] * 3])
    columns = ["function", "rows/K", "compile", "bar", "temp.", "bar", "run", "bar"]
    print_table([*columns, "NetKet: compile", "temp.", "run"], rows)


if __name__ == "__main__":
    main()
