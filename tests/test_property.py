"""Generated programs, trees, axes, dtypes and sizes: every strategy is `jax.jit(jax.vmap(fun))`.

Exactly for integers, booleans and keys; for floats within a tolerance, since strategies add in
another order. The same examples run with `jax.jit(jax.vmap(fun))` in autobatch's place, which shows
that they test the meaning and not the implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same import assert_same

from autobatch import autobatch

# The automatic choice, where it is tested, tries every family.
pytestmark = pytest.mark.usefixtures("exhaustive")

SIZES = [0, 1, 2, 3, 5, 7, 13]
FLOATS = ["float32", "bfloat16", "complex64"]
OTHERS = ["int32", "uint8", "bool", "key", "legacy key"]


@dataclass(frozen=True)
class Leaf:
    dtype: str
    shape: tuple[int, ...]
    in_axis: int | None
    out_axis: int
    is_reduced: bool


@dataclass(frozen=True)
class Call:
    size: int
    leaves: tuple[Leaf, ...]
    container: str
    strategy: str
    seed: int


def placed(draw: Any, shape: tuple[int, ...]) -> int:
    """Returns an axis of an array with one more dimension than `shape`, counted either way."""
    rank = len(shape) + 1
    return draw(st.integers(-rank, rank - 1))


@st.composite
def leaves(draw: Any, dtypes: list[str], is_mapped: bool | None = None) -> Leaf:
    dtype = draw(st.sampled_from(dtypes))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    shape = () if dtype == "key" else (2,) if dtype == "legacy key" else shape
    is_reduced = bool(shape) and dtype in FLOATS and draw(st.booleans())
    out_shape = shape[1:] if is_reduced else shape
    is_mapped = draw(st.booleans()) if is_mapped is None else is_mapped
    in_axis = placed(draw, shape) if is_mapped else None
    return Leaf(dtype, shape, in_axis, placed(draw, out_shape), is_reduced)


@st.composite
def calls(draw: Any, dtypes: list[str], sizes: list[int]) -> Call:
    size = draw(st.sampled_from(sizes))
    first = draw(leaves(dtypes, is_mapped=True))
    others = tuple(draw(st.lists(leaves(dtypes), max_size=2)))
    chunk = draw(st.sampled_from([1, 2, 3, max(1, size - 1), size, size + 1, 2 * size]))
    strategy = draw(st.sampled_from(["vmap", "map", f"chunked:{chunk}", "unrolled"]))
    container = draw(st.sampled_from(["arguments", "dict", "tuple"]))
    return Call(size, (first, *others), container, strategy, draw(st.integers(0, 9)))


def value(leaf: Leaf, size: int, rng: np.random.Generator) -> Any:
    shape = leaf.shape
    if leaf.in_axis is not None:
        at = leaf.in_axis % (len(shape) + 1)
        shape = (*shape[:at], size, *shape[at:])
    if leaf.dtype == "key":
        return jax.random.split(jax.random.key(3), shape) if shape else jax.random.key(3)
    if leaf.dtype == "legacy key":
        return jnp.asarray(rng.integers(0, 2**31, shape), jnp.uint32)
    if leaf.dtype == "bool":
        return jnp.asarray(rng.random(shape) < 0.5)
    if leaf.dtype in ("int32", "uint8"):
        return jnp.asarray(rng.integers(0, 100, shape), leaf.dtype)
    values = rng.standard_normal(shape)
    if leaf.dtype == "complex64":
        values = values + 1j * rng.standard_normal(shape)
    return jnp.asarray(values).astype(leaf.dtype)


def row_result(leaf: Leaf, x: Any) -> Any:
    """Returns what the generated function makes of one leaf of one row."""
    if leaf.dtype == "key":
        return jax.random.fold_in(x, 7)
    if leaf.dtype == "legacy key":
        return jax.random.fold_in(x, 7)
    if leaf.dtype == "bool":
        return ~x
    if leaf.dtype in ("int32", "uint8"):
        return x * x + jnp.asarray(1, x.dtype)
    y = jnp.tanh(x) * x
    return y.sum(0) if leaf.is_reduced else y


def made(call: Call) -> tuple[Callable[..., Any], tuple[Any, ...], Any, Any]:
    """Returns the generated function, its arguments, and its axes in and out."""
    rng = np.random.default_rng(call.seed)
    values = [value(leaf, call.size, rng) for leaf in call.leaves]
    axes = [leaf.in_axis for leaf in call.leaves]
    out_axes = {str(at): leaf.out_axis for at, leaf in enumerate(call.leaves)} | {"one": 0}

    def results(xs: Any) -> Any:
        rows = {
            str(at): row_result(leaf, x)
            for at, (leaf, x) in enumerate(zip(call.leaves, xs, strict=True))
        }
        return rows | {"one": 1.0}

    match call.container:
        case "dict":
            names = [f"k{at}" for at in range(len(values))]
            args, in_axes = (
                (dict(zip(names, values, strict=True)),),
                (dict(zip(names, axes, strict=True)),),
            )
            return lambda tree: results([tree[name] for name in names]), args, in_axes, out_axes
        case "tuple":
            return results, (tuple(values),), (tuple(axes),), out_axes
    return lambda *xs: results(xs), tuple(values), tuple(axes), out_axes


def wrapped(call: Call, is_ours: bool) -> tuple[Any, Any, tuple[Any, ...]]:
    """Returns the function under test, the reference, and the arguments."""
    fun, args, in_axes, out_axes = made(call)
    plain = jax.jit(jax.vmap(fun, in_axes, out_axes))
    if not is_ours:
        return jax.jit(jax.vmap(lambda *xs: fun(*xs), in_axes, out_axes)), plain, args
    return autobatch(fun, in_axes, out_axes, strategy=call.strategy), plain, args


few = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ours = pytest.mark.parametrize("is_ours", [True, False], ids=["autobatch", "jit of vmap"])


@ours
@few
@given(call=calls(FLOATS + OTHERS, SIZES))
def test_every_strategy_is_vmap(call: Call, is_ours: bool) -> None:
    got, want, args = wrapped(call, is_ours)
    assert_same(got(*args), want(*args))
    assert_same(jax.jit(lambda *xs: got(*xs))(*args), want(*args))


@ours
@settings(few, max_examples=10)
@given(call=calls(["float32"], [2, 5, 7]))
def test_every_strategy_is_vmap_under_derivatives(call: Call, is_ours: bool) -> None:
    got, want, args = wrapped(call, is_ours)

    def total(f: Any) -> Any:
        return lambda *xs: sum(jnp.sum(each) for each in jax.tree.leaves(f(*xs)))

    places = tuple(range(len(args)))
    tangents = jax.tree.map(jnp.cos, args)
    assert_same(jax.grad(total(got), places)(*args), jax.grad(total(want), places)(*args))
    assert_same(jax.jvp(got, args, tangents), jax.jvp(want, args, tangents))


@ours
@settings(few, max_examples=10)
@given(call=calls(FLOATS + OTHERS, [2, 5]), at=st.sampled_from([0, -1]))
def test_every_strategy_is_vmap_inside_another_vmap(call: Call, at: int, is_ours: bool) -> None:
    got, want, args = wrapped(call, is_ours)
    keyless = all(leaf.dtype != "key" for leaf in call.leaves)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x], at if keyless else 0), args)
    axes = at if keyless else 0
    assert_same(jax.vmap(got, axes)(*stacked), jax.vmap(want, axes)(*stacked))


@settings(few, max_examples=5)
@given(call=calls(FLOATS + OTHERS, [1, 5, 13]))
def test_the_automatic_choice_is_vmap(call: Call) -> None:
    fun, args, in_axes, out_axes = made(call)
    batched, plain = autobatch(fun, in_axes, out_axes), jax.jit(jax.vmap(fun, in_axes, out_axes))
    first, second = batched(*args), batched(*args)
    assert_same(first, plain(*args))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(raw(a), raw(b)), first, second)


def raw(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def test_sixty_four_rows_unrolled() -> None:
    leaf = Leaf("float32", (3,), 0, -1, is_reduced=False)
    got, want, args = wrapped(Call(64, (leaf,), "arguments", "unrolled", 0), is_ours=True)
    assert_same(got(*args), want(*args))
