"""The upper bound: what counts, for how long, and that it holds over what XLA plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autobatch._bound import aval_bytes, live_bytes, tree_bytes

KIB = 1024


def bound(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    return live_bytes(
        jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(each, jnp.float32) for each in shapes))
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(jnp.float32, 24), (jnp.bfloat16, 12), (jnp.bool_, 6), (jnp.int4, 6), (jax.dtypes.float0, 0)],
)
def test_bytes_of_a_dtype(dtype: Any, expected: int) -> None:
    assert aval_bytes(jax.ShapeDtypeStruct((2, 3), dtype)) == expected


@pytest.mark.parametrize(("impl", "expected"), [("threefry2x32", 5 * 8), ("rbg", 5 * 16)])
def test_a_key_counts_all_its_words(impl: str, expected: int) -> None:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl=impl), 5))
    assert aval_bytes(keys) == expected


def test_a_scalar_an_empty_array_and_a_token() -> None:
    assert aval_bytes(np.float32(0)) == 4
    assert aval_bytes(np.zeros((0, 7))) == 0
    (token,) = jax.make_jaxpr(lax.create_token)().out_avals
    assert aval_bytes(token) == 0


def test_a_reference_counts_what_it_refers_to() -> None:
    assert aval_bytes(jax.typeof(jax.new_ref(np.zeros(3, np.float32)))) == 12


def test_bytes_of_leaves() -> None:
    assert tree_bytes([np.zeros(3, np.float32), jax.ShapeDtypeStruct((2,), jnp.int8)]) == 14
    assert tree_bytes([]) == 0


def test_arguments_count_even_if_unused() -> None:
    assert bound(lambda x, y: x + 1, (256,), (512,)) == (256 + 512 + 256) * 4


def test_a_constant_counts_throughout() -> None:
    table = np.ones(256, np.float32)
    assert bound(lambda x: jnp.sin(jnp.sin(x + table)), (256,)) >= 4 * KIB


def test_temporaries_end_with_their_last_use() -> None:
    def chain(length: int) -> Callable[[Any], Any]:
        def fun(x: Any) -> Any:
            for _ in range(length):
                x = jnp.sin(x)
            return x

        return fun

    assert bound(chain(1), (256,)) == 2 * KIB
    assert bound(chain(20), (256,)) == bound(chain(40), (256,)) == 4 * KIB


def test_a_value_used_late_stays() -> None:
    def late(x: Any) -> Any:
        early = jnp.sin(x)
        return jnp.cos(jnp.cos(jnp.cos(x))) + early

    def early(x: Any) -> Any:
        return jnp.cos(jnp.cos(jnp.cos(x)))

    assert bound(late, (256,)) == bound(early, (256,)) + KIB


def test_results_are_there_from_the_start() -> None:
    def fun(x: Any) -> Any:
        wide = jnp.broadcast_to(x[:, None], (256, 4))
        return wide.sum(), jnp.ones((256, 2))

    assert bound(fun, (256,)) >= (1 + 4 + 2) * KIB


def test_a_result_returned_twice_has_two_buffers() -> None:
    assert bound(lambda x: [jnp.sin(x)] * 2, (256,)) == 3 * KIB


def test_a_call_adds_nothing_of_its_own() -> None:
    def fun(x: Any) -> Any:
        return jnp.sin(jnp.cos(jnp.sin(x)))

    # The body makes the results that are counted already: one temporary less, never one more.
    plain = bound(fun, (256,))
    assert plain - KIB <= bound(jax.jit(fun), (256,)) <= plain
    assert plain - KIB <= bound(lambda x: jax.checkpoint(fun)(x), (256,)) <= plain


def test_a_branch_counts_by_the_larger() -> None:
    def fun(x: Any, p: Any) -> Any:
        return lax.cond(p > 0, lambda: (x[:, None] + x[None]).sum(), lambda: x.sum())

    assert bound(fun, (256,), ()) >= 256 * KIB


def test_a_scan_holds_one_step_at_a_time() -> None:
    def fun(xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            return carry + (x[:, None] + x[None]).sum(), x

        return lax.scan(step, jnp.float32(0), xs)

    one, many = bound(fun, (1, 64)), bound(fun, (101, 64))
    assert many - one == 100 * 64 * 4 * 2  # arguments and stacked results, no temporaries


def test_a_loop_has_two_carries() -> None:
    def fun(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 1, jnp.sin, x)

    # argument, result, and the new carry beside the old
    assert bound(fun, (256,)) >= 3 * KIB


def test_a_custom_rule_counts_by_what_it_computes() -> None:
    @jax.custom_jvp
    def fun(x: Any) -> Any:
        return (x[:, None] + x[None]).sum(0)

    fun.defjvp(lambda primals, tangents: (fun(*primals), tangents[0]))
    assert bound(fun, (256,)) >= 256 * KIB


def test_a_library_call_has_a_workspace() -> None:
    assert bound(lambda x: x @ x, (16, 16)) == KIB * (1 + 1) + KIB * 3


def test_a_loop_over_a_library_call_counts_twice() -> None:
    def fun(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: lax.fori_loop(0, 3, lambda _, c: step(c), x)

    plain, library = bound(fun(jnp.sin), (16, 16)), bound(fun(lambda x: x @ x), (16, 16))
    assert library >= plain + (3 + 4) * KIB


def test_half_precision_is_computed_in_single() -> None:
    half = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda x: x @ x)(half)
    assert live_bytes(jaxpr) == KIB // 2 * (1 + 1) + KIB * 3


def test_open_and_closed_jaxprs_are_the_same() -> None:
    jaxpr = jax.make_jaxpr(jnp.sin)(np.ones(3, np.float32))
    assert live_bytes(jaxpr) == live_bytes(jaxpr.jaxpr)


def _recurrent(xs: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        state = jnp.tanh(state * 2 + x)
        return state, state

    return lax.scan(step, jnp.zeros(64), xs)[1]


def _convolution(x: Any) -> Any:
    return lax.conv_general_dilated(
        x.reshape(1, 32, 32, 4), jnp.ones((3, 3, 4, 8)), (1, 1), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


def _solve(x: Any) -> Any:
    matrix = x.reshape(64, 64) + 10 * jnp.eye(64)
    return jnp.linalg.solve(matrix, matrix[0])


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "chain": lambda x: jnp.tanh(jnp.sin(jnp.tanh(x))),
    "cumulative": jnp.cumsum,
    "sort": jnp.sort,
    "argsort": jnp.argsort,
    "search": lambda x: jnp.searchsorted(x, x),
    "fft": jnp.fft.fft,
    "matmul": lambda x: x.reshape(64, 64) @ x.reshape(64, 64) @ x.reshape(64, 64),
    "half": lambda x: x.reshape(64, 64).astype(jnp.bfloat16) @ jnp.ones((64, 64), jnp.bfloat16),
    "solve": _solve,
    "svd": lambda x: jnp.linalg.svd(x.reshape(64, 64)),
    "eig": lambda x: jnp.linalg.eig(x.reshape(64, 64)),
    "recurrent": lambda x: _recurrent(x.reshape(64, 64)),
    "recurrent gradient": jax.grad(lambda x: _recurrent(x.reshape(64, 64)).sum()),
    "convolution": _convolution,
    "convolution gradient": jax.grad(lambda x: _convolution(x).sum()),
    "pooling gradient": jax.grad(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (4,), (4,), "VALID").sum()
    ),
    "pairwise": lambda x: ((x[:64, None] - x[None, :64]) ** 2).sum(-1),
    "scatter": lambda x: jnp.zeros(64).at[(x * 10).astype(jnp.int32)].add(1.0),
    "bits": lambda x: jax.random.normal(jax.random.key(x[0].astype(jnp.int32)), (4096,)),
    "gamma": lambda x: jax.random.gamma(jax.random.key(x[0].astype(jnp.int32)), x + 1.0),
    "special": lambda x: jax.scipy.special.gammainc(x + 1.0, x),
    "hessian": lambda x: jax.hessian(lambda x: jnp.tanh(x * x.sum()).sum())(x[:64]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bound_holds_over_what_xla_plans(name: str) -> None:
    rows = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
    traced = jax.jit(jax.vmap(PROGRAMS[name])).trace(rows)
    plan = traced.lower().compile().memory_analysis()
    assert plan is not None
    planned = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    assert live_bytes(traced.jaxpr) >= planned
