"""Every strategy is `jax.jit(jax.vmap(fun))`: values, dtypes, weak types and trees.

Where a test of meaning does not compare with `jax.jit(jax.vmap(fun))`, that itself, here called
"jax.vmap", must pass it too.
"""

from __future__ import annotations

import functools
import itertools
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import Function, program
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch._strategies import balanced_chunk
from autobatch._workload import equations

Pair = namedtuple("Pair", ["one", "other"])


def strategies(rows: int) -> list[str]:
    """Returns every strategy for a batch, with all chunk sizes that are special."""
    sizes = {1, 2, 3, rows - 1, rows, rows + 1, 2 * rows}
    return [
        *("vmap", "map", "unrolled"),
        *(f"chunked:{each}" for each in sorted(sizes) if each >= 1),
    ]


def assert_same(ours: Any, bare: Any) -> None:
    """Trees, shapes, dtypes and weak types are equal; values too, floats within rounding."""
    assert jax.tree.structure(ours) == jax.tree.structure(bare)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(bare), strict=True):
        assert jax.typeof(one) == jax.typeof(other)
        assert jax.typeof(one).weak_type == jax.typeof(other).weak_type
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if jnp.issubdtype(one.dtype, np.inexact):
            rounding = 64 * float(jnp.finfo(one.dtype).eps)
            one, other = (
                np.asarray(each.astype(jnp.float32) if each.dtype == jnp.bfloat16 else each)
                for each in (one, other)
            )
            np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)
        else:
            np.testing.assert_array_equal(one, other)


def check(strategy: str, fun: Function, *args: Any, **options: Any) -> None:
    kwargs = options.pop("kwargs", {})
    bare = jax.jit(jax.vmap(fun, **options))(*args, **kwargs)
    assert_same(program(strategy, fun, **options)(*args, **kwargs), bare)


def floats(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Returns values that differ in every element, of both signs and moderate."""
    count = int(np.prod(shape))
    return (np.sin(1 + 7 * np.arange(count)).reshape(shape) + 0.1).astype(dtype)


def integers(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    return ((7 * np.arange(int(np.prod(shape)))) % 11).reshape(shape).astype(dtype)


# Functions of many kinds


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function, its axes, and its arguments for a batch of any size."""

    fun: Function
    args: Callable[[int], tuple[Any, ...]]
    options: dict[str, Any]


def case(fun: Function, args: Callable[[int], tuple[Any, ...]], **options: Any) -> Case:
    return Case(fun=fun, args=args, options=options)


@jax.custom_jvp
def clipped(x: jax.Array) -> jax.Array:
    return jnp.clip(x, 0, 1)


clipped.defjvps(lambda tangent, _, x: tangent)


def collatz(n: jax.Array) -> jax.Array:
    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        value, steps = state
        return jnp.where(value % 2 == 0, value // 2, 3 * value + 1), steps + 1

    return jax.lax.while_loop(lambda state: state[0] > 1, step, (n + 1, jnp.zeros_like(n)))[1]


def recurrence(weights: jax.Array, xs: jax.Array) -> Any:
    step = lambda h, x: ((h @ weights + x) * 0.5, h.sum())  # noqa: E731
    return jax.lax.scan(step, jnp.zeros(3, jnp.float32), xs)


def cond_of_weak(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x > 0, lambda: 1.0, lambda: 2.0)


def shared_in_a_call(a: jax.Array, x: jax.Array) -> Any:
    return jax.jit(lambda a, x: (jnp.linalg.inv(a) @ x, a.sum()))(a, x)


TABLE = jnp.arange(12.0).reshape(4, 3)
SPD = 4 * np.eye(3, dtype=np.float32) + 0.5
KEYS = jax.random.split(jax.random.key(1), 100)
LEGACY = np.asarray(jax.random.split(jax.random.PRNGKey(1), 100))

CASES = {
    "floats": case(lambda x: jnp.sin(x) * 2, lambda n: (floats(n, 3),)),
    "identity": case(lambda x: x, lambda n: (floats(n, 3),)),
    "same twice": case(lambda x: (x, x, {"again": x}), lambda n: (integers(n),)),
    "integers": case(lambda x: x * x - 3, lambda n: (integers(n, 2),)),
    "booleans": case(lambda x: ~x, lambda n: (integers(n) > 4,)),
    "small integers": case(lambda x: x << 1, lambda n: (integers(n, dtype=np.int8),)),
    "bfloat16": case(lambda x: x @ x, lambda n: (jnp.asarray(floats(n, 4), jnp.bfloat16),)),
    "complex64": case(
        lambda x: (x * x.conj(), x.real), lambda n: (floats(n, 2) + 1j * floats(n, 2, dtype="f4"),)
    ),
    "unmapped": case(
        lambda p, x: p["w"] @ x + p["b"],
        lambda n: ({"w": floats(2, 3), "b": floats(2)}, floats(n, 3)),
        in_axes=(None, 0),
    ),
    "unmapped numbers": case(
        lambda a, x, k: (a * x, k, a), lambda n: (2.5, floats(n), 3), in_axes=(None, 0, None)
    ),
    "unmapped output": case(
        lambda p, x: (p * 2, p, x), lambda n: (floats(3), floats(n)), in_axes=(None, 0)
    ),
    "output without axis": case(
        lambda p, x: {"shared": p.sum(), "row": x},
        lambda n: (floats(3), floats(n)),
        in_axes=(None, 0),
        out_axes={"shared": None, "row": 0},
    ),
    "output without axis from a call": case(
        lambda p, x: jax.jit(lambda p, x: (p * 2, x + 1))(p, x),
        lambda n: (floats(3), floats(n)),
        in_axes=(None, 0),
        out_axes=(None, 0),
    ),
    "constants only": case(lambda x: (1, 2.5, True, jnp.arange(3)), lambda n: (floats(n),)),
    "constant among outputs": case(
        lambda x: (np.float32(7), x, np.arange(2)), lambda n: (floats(n, 2),), out_axes=(0, 1, -1)
    ),
    "zeros like": case(lambda x: jnp.zeros_like(x), lambda n: (floats(n, 2),)),
    "weak": case(lambda x: (2.0, jnp.where(x > 0, 1, 2), x), lambda n: (floats(n),)),
    "weak from a branch": case(cond_of_weak, lambda n: (floats(n),)),
    "none": case(lambda x: (None, x, {"a": None}), lambda n: (floats(n),)),
    "nothing": case(lambda x: (), lambda n: (floats(n),)),
    "trees": case(
        lambda t, u: Pair([t["b"], (t["a"].one,)], {"z": u, "y": t["a"].other}),
        lambda n: ({"a": Pair(floats(n), integers(2, n)), "b": floats(3)}, [integers(n, 1)]),
        in_axes=({"a": Pair(0, 1), "b": None}, 0),
        out_axes=Pair(0, {"z": -1, "y": -1}),
    ),
    "no elements": case(
        lambda x, y: (x, x.sum(), y * 2, jnp.zeros((0, 3), x.dtype)),
        lambda n: (floats(n, 0), floats(2, n, 0)),
        in_axes=(0, 1),
        out_axes=(1, 0, 0, 2),
    ),
    "nested jit": case(
        lambda w, x: jax.jit(lambda w, x: jax.jit(jnp.tanh)(w @ x))(w, x),
        lambda n: (floats(3, 3), floats(n, 3)),
        in_axes=(None, 0),
    ),
    "nested vmap": case(
        lambda x: jax.vmap(lambda y: y @ x, in_axes=1)(TABLE[:3]), lambda n: (floats(n, 3),)
    ),
    "gradient": case(
        lambda w, x: jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(w @ x) ** 2))(w),
        lambda n: (floats(2, 3), floats(n, 3)),
        in_axes=(None, 0),
    ),
    "jacobian": case(jax.jacfwd(lambda x: jnp.sin(x) * x.sum()), lambda n: (floats(n, 3),)),
    "custom_jvp": case(lambda x: (clipped(x), jax.nn.relu(x)), lambda n: (floats(n, 3),)),
    "closed over": case(lambda i: TABLE[i % 4], lambda n: (integers(n),)),
    "gather and scatter": case(
        lambda v, i, x: v.at[i % 5].add(x), lambda n: (floats(5), integers(n), floats(n)),
        in_axes=(None, 0, 0),
    ),
    "sort": case(lambda x: (jnp.sort(x), jnp.argmax(x)), lambda n: (floats(n, 5),)),
    "while": case(collatz, lambda n: (integers(n),)),
    "scan": case(recurrence, lambda n: (floats(3, 3), floats(n, 4, 3)), in_axes=(None, 0)),
    "cond": case(
        lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, lambda y: y - 1, x), lambda n: (floats(n, 3),)
    ),
    "switch": case(
        lambda i, x: jax.lax.switch(i % 3, [jnp.sin, jnp.cos, lambda y: y], x),
        lambda n: (integers(n), floats(n)),
    ),
    "solve": case(
        lambda a, b: jnp.linalg.solve(a, b), lambda n: (SPD, floats(n, 3)), in_axes=(None, 0)
    ),
    "cholesky": case(
        lambda d, b: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(jnp.diag(d)), True), b),
        lambda n: (np.abs(floats(n, 3)) + 1, floats(n, 3)),
    ),
    "shared work in a call": case(
        shared_in_a_call, lambda n: (SPD, floats(n, 3)), in_axes=(None, 0)
    ),
    "convolution": case(
        lambda x, k: jnp.convolve(x, k), lambda n: (floats(n, 6), floats(3)), in_axes=(0, None)
    ),
    "fft": case(lambda x: jnp.fft.rfft(x), lambda n: (floats(n, 8),)),
    "keys": case(
        lambda key, x: (jax.random.fold_in(key, 3), jax.random.bits(key) + x),
        lambda n: (KEYS[:n], integers(n, dtype=np.uint32)),
    ),
    "keys on another axis": case(
        lambda keys: keys[1],
        lambda n: (KEYS[: 2 * n].reshape(2, n),),
        in_axes=1,
    ),
    "shared key": case(
        lambda key, i: jax.random.fold_in(key, i), lambda n: (KEYS[0], integers(n)),
        in_axes=(None, 0),
    ),
    "legacy keys": case(
        lambda key: (jax.random.bits(key, (2,)), key), lambda n: (LEGACY[:n],)
    ),
    "legacy keys on axis 1": case(
        lambda key: jax.random.bits(key), lambda n: (LEGACY[:n].T,), in_axes=1
    ),
    "dot with a library call": case(lambda x: (x @ x.T).sum(), lambda n: (floats(n, 40, 4),)),
}  # fmt: skip


@functools.cache
def expected(name: str) -> Any:
    return jax.jit(jax.vmap(CASES[name].fun, **CASES[name].options))(*CASES[name].args(5))


@pytest.mark.parametrize("strategy", ["vmap", "map", "unrolled", "chunked:3"])
@pytest.mark.parametrize("name", CASES)
def test_mapping_is_vmap(name: str, strategy: str) -> None:
    mapped = program(strategy, CASES[name].fun, **CASES[name].options)
    assert_same(mapped(*CASES[name].args(5)), expected(name))


VARIED = Case(
    fun=lambda key, i, x, w: {
        "key": key,
        "sum": (x * w).sum(),
        "row": x[::-1],
        "constant": 2.0,
        "shared": w * 2,
        "flag": i > 3,
    },
    args=lambda n: (KEYS[:n], integers(n), floats(3, n), floats(3)),
    options={
        "in_axes": (0, 0, -1, None),
        "out_axes": {"key": 0, "sum": 0, "row": 1, "constant": 0, "shared": -1, "flag": 0},
    },
)


@functools.cache
def expected_of_varied(rows: int) -> Any:
    return jax.jit(jax.vmap(VARIED.fun, **VARIED.options))(*VARIED.args(rows))


@pytest.mark.parametrize(
    ("rows", "strategy"),
    [(rows, each) for rows in (0, 1, 2, 6, 7) for each in strategies(rows)],
)
def test_every_size_and_chunk_size_is_vmap(rows: int, strategy: str) -> None:
    mapped = program(strategy, VARIED.fun, **VARIED.options)
    assert_same(mapped(*VARIED.args(rows)), expected_of_varied(rows))


@pytest.mark.parametrize("strategy", ["vmap", "map", "unrolled", "chunked:3"])
def test_all_pairs_of_axes_are_vmap(strategy: str) -> None:
    places = [0, 1, 2, -1, -3]
    shapes = [[2, 3, 4] for _ in places]
    for shape, axis in zip(shapes, places, strict=True):
        shape[axis] = 5
    check(
        strategy,
        lambda *rows: [[2 * row for _ in places] for row in rows],
        *(integers(*each) for each in shapes),
        in_axes=tuple(places),
        out_axes=[list(places) for _ in places],
    )


@pytest.mark.parametrize("strategy", strategies(5))
def test_keywords_are_mapped_on_axis_0(strategy: str) -> None:
    check(
        strategy,
        lambda x, *, scale, shift: x * scale + shift["a"],
        floats(3, 5),
        in_axes=(1,),
        kwargs={"scale": floats(5), "shift": {"a": floats(5, 3)}},
    )


@pytest.mark.parametrize("strategy", strategies(5))
@pytest.mark.parametrize("out_axes", [0, None])
def test_nothing_mapped_is_vmap(strategy: str, out_axes: int | None) -> None:
    check(strategy, lambda x: x * 2, floats(3), in_axes=None, axis_size=5, out_axes=out_axes)


@pytest.mark.parametrize("strategy", ["vmap", "map", "unrolled", "chunked:2"])
def test_axis_name_that_nobody_uses_changes_nothing(strategy: str) -> None:
    check(strategy, lambda x: x + 1, floats(5), axis_name="batch", axis_size=5)


@pytest.mark.parametrize("strategy", ["vmap", "map", "unrolled", "chunked:3"])
def test_weak_arguments_stay_weak(strategy: str) -> None:
    weak = jnp.broadcast_to(jnp.asarray(2.5), (7,))
    assert weak.weak_type
    check(strategy, lambda x, y: (x, x * 2, x * y), weak, floats(7))
    check(strategy, lambda x, y: (x * 2, x, x * y), 2.5, floats(7), in_axes=(None, 0))


@pytest.mark.parametrize("strategy", ["vmap", "map", "unrolled", "chunked:3"])
def test_doubles_stay_double(strategy: str) -> None:
    with jax.enable_x64(True):
        xs, count = floats(5, 3, dtype=np.float64), np.arange(5)
        check(strategy, lambda x, i: (x * 2, i + 1, 1, 1.0, x.sum() > 0), xs, count)


@pytest.mark.parametrize("strategy", ["jax.vmap", "vmap", "map", "unrolled", "chunked:3"])
def test_output_fed_back_does_not_retrace(strategy: str) -> None:
    traces: list[None] = []

    def fun(x: jax.Array) -> jax.Array:
        traces.append(None)
        return x * 2 + 1

    step, value = program(strategy, fun), floats(7, 2)
    for _ in range(4):
        value = step(value)
    assert len(traces) == 1


@pytest.mark.parametrize("strategy", ["jax.vmap", "vmap", "map", "unrolled", "chunked:3"])
def test_nan_and_infinities_stay(strategy: str) -> None:
    xs = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, 1.0], np.float32)
    mapped = program(strategy, lambda x: (x, 1 / x, x * 10))(xs)
    np.testing.assert_array_equal(mapped, jax.jit(jax.vmap(lambda x: (x, 1 / x, x * 10)))(xs))


@pytest.mark.parametrize("strategy", ["vmap", "map", "unrolled", "chunked:3"])
@pytest.mark.parametrize("around", ["jit", "vmap", "grad", "jvp"])
def test_mapping_inside_a_transformation(strategy: str, around: str) -> None:
    mapped = program(strategy, lambda x, w: jnp.tanh(x * w).sum(), in_axes=(0, None))
    bare = jax.vmap(lambda x, w: jnp.tanh(x * w).sum(), in_axes=(0, None))
    xs, w = floats(7, 3), floats(3)

    def both(transform: Callable[[Function], Any]) -> None:
        ours, theirs = jax.jit(lambda *args: (transform(mapped)(*args), transform(bare)(*args)))(
            xs, w
        )
        assert_same(ours, theirs)

    match around:
        case "jit":
            both(lambda fun: lambda xs, w: fun(xs, w) + 1)
        case "vmap":
            both(lambda fun: lambda xs, w: jax.vmap(fun, (None, 0))(xs, jnp.stack([w, 2 * w])))
        case "grad":
            both(lambda fun: jax.grad(lambda xs, w: fun(xs, w).sum(), argnums=(0, 1)))
        case "jvp":
            both(lambda fun: lambda xs, w: jax.jvp(fun, (xs, w), (xs * 2, w + 1)))


# Anything at all


def weigh(x: jax.Array) -> jax.Array:
    """Returns a scalar int32 that depends on every element and its place."""
    whole = jnp.abs(x).astype(jnp.int32) if x.dtype != bool else x.astype(jnp.int32)
    return (whole.reshape(-1) * (1 + jnp.arange(whole.size, dtype=jnp.int32))).sum()


DTYPES = ["int32", "uint8", "bool", "float32", "bfloat16", "complex64"]


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, Function, list[Any], dict[str, Any]]:
    """Draws a strategy, a function of several leaves, its arguments and its axes."""
    rows = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 7]))
    size = draw(st.integers(1, 2 * rows + 1))
    strategy = draw(st.sampled_from(["vmap", "map", "unrolled"]) | st.just(None))
    count = draw(st.integers(1, 2))
    mapped = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    args, in_axes, places = [], [], []
    for is_mapped in mapped:
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        rank = len(shape) + 1
        places.append([draw(st.integers(-rank, rank - 1)), draw(st.integers(-rank, rank - 1))])
        if is_mapped:
            shape.insert(draw(st.integers(0, rank - 1)), rows)
            axis = draw(st.sampled_from([each for each in range(rank) if shape[each] == rows]))
            in_axes.append(draw(st.sampled_from([axis, axis - rank])))
        else:
            in_axes.append(None)
        args.append(jnp.asarray(integers(*shape), draw(st.sampled_from(DTYPES))))
    nested = draw(st.booleans())

    def fun(*leaves: Any) -> Any:
        leaves = tuple(leaves[0]) if nested else leaves
        total = sum(map(weigh, leaves), jnp.int32(0))
        return {"leaves": [[leaf, jnp.square(leaf)] for leaf in leaves], "total": (total, 1)}

    options = {
        "in_axes": (in_axes,) if nested else tuple(in_axes),
        "out_axes": {"leaves": places, "total": draw(st.sampled_from([0, -1]))},
    }
    return strategy or f"chunked:{size}", fun, [args] if nested else args, options


@settings(max_examples=25)
@given(calls())
def test_any_call_is_vmap(call: tuple[str, Function, list[Any], dict[str, Any]]) -> None:
    strategy, fun, args, options = call
    check(strategy, fun, *args, **options)


# Chunks are `lax.map(batch_size=K)`, in a better form


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 8])
@pytest.mark.parametrize("name", ["while", "complex64", "constants only"])
def test_chunks_are_lax_map_with_that_batch_size(name: str, size: int) -> None:
    fun, args = CASES[name].fun, CASES[name].args(7)
    theirs = jax.jit(lambda *args: jax.lax.map(lambda row: fun(*row), args, batch_size=size))
    ours = program(f"chunked:{size}", fun)(*args)
    # lax.map does not keep weak types.
    assert jax.tree.structure(ours) == jax.tree.structure(theirs(*args))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs(*args)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=1e-6)


def loops(jaxpr: Any) -> list[Any]:
    return [each for each in equations(jaxpr) if each.primitive.name in ("scan", "while")]


def primitives(jaxpr: Any) -> list[str]:
    return [each.primitive.name for each in equations(jaxpr)]


def traced(strategy: str, fun: Function, *args: Any, **options: Any) -> Any:
    return program(strategy, fun, **options).trace(*args).jaxpr


@pytest.mark.parametrize("strategy", ["map", "chunked:3", "chunked:5"])
def test_one_loop_holds_one_body(strategy: str) -> None:
    jaxpr = traced(strategy, lambda x: jnp.sin(x).sum(), floats(11, 3))
    (loop,) = loops(jaxpr)
    assert primitives(jaxpr).count("sin") == 1
    assert "sin" in primitives(loop.params["jaxpr"])


@pytest.mark.parametrize("strategy", ["vmap", "chunked:11", "chunked:12", "unrolled"])
def test_one_chunk_is_no_loop(strategy: str) -> None:
    assert loops(traced(strategy, lambda x: jnp.sin(x).sum(), floats(11, 3))) == []


@pytest.mark.parametrize("strategy", ["map", "chunked:3", "chunked:5"])
def test_nothing_is_put_together_or_filled_up(strategy: str) -> None:
    names = primitives(traced(strategy, lambda x, y: (x + 1, y), floats(11, 3), integers(11)))
    assert not {"concatenate", "pad", "gather", "transpose", "scatter"} & set(names)


@pytest.mark.parametrize("size", [64, 100])
@pytest.mark.parametrize("in_axes", [0, 1])
def test_inputs_are_not_copied(size: int, in_axes: int) -> None:
    rows = 1009
    xs = np.ones((rows, 512) if in_axes == 0 else (512, rows), np.float32)
    step = program(f"chunked:{size}", lambda x: jnp.sin(x).sum(), in_axes=in_axes)
    needed = step.lower(xs).compile().memory_analysis().temp_size_in_bytes
    assert needed < xs.nbytes / 4


def test_outputs_are_not_copied() -> None:
    xs = np.ones((1009, 512), np.float32)
    plan = program("chunked:64", lambda x: x + 1).lower(xs).compile().memory_analysis()
    assert plan.temp_size_in_bytes < xs.nbytes / 4
    assert plan.output_size_in_bytes < xs.nbytes + 4096


def test_argument_that_nobody_uses_is_not_passed_on() -> None:
    (loop,) = loops(traced("chunked:3", lambda x, y: x * 2, floats(11), floats(11, 50)))
    assert all(atom.aval.shape != (11, 50) for atom in loop.invars)


# Rows as a callback sees them


@pytest.mark.parametrize("rows", [1, 6, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7, 12])
def test_chunks_are_balanced_and_hold_real_rows_only(rows: int, size: int) -> None:
    steps: list[list[int]] = []

    def look(x: np.ndarray) -> np.ndarray:
        steps.append(np.atleast_1d(np.asarray(x)).tolist())
        return np.asarray(x)

    def fun(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((), np.int32)
        return jax.pure_callback(look, shape, x, vmap_method="expand_dims")

    xs = np.arange(rows, dtype=np.int32)
    np.testing.assert_array_equal(program(f"chunked:{size}", fun)(xs), xs)
    assert [len(each) for each in steps] == [balanced_chunk(rows, size)] * -(-rows // size)
    assert all(np.diff(each).tolist() == [1] * (len(each) - 1) for each in steps)
    assert {row for each in steps for row in each} == set(range(rows))
    if rows % size == 0:
        assert list(itertools.chain(*steps)) == list(range(rows))


@pytest.mark.parametrize("strategy", ["jax.vmap", "map", "unrolled", "chunked:1", "chunked:2"])
def test_each_row_is_worked_on_once_and_in_order(strategy: str) -> None:
    seen: list[int] = []

    def look(x: np.ndarray) -> np.ndarray:
        seen.extend(np.atleast_1d(np.asarray(x)).tolist())
        return np.asarray(x)

    def fun(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((), np.int32)
        return jax.pure_callback(look, shape, x, vmap_method="expand_dims")

    jax.block_until_ready(program(strategy, fun)(np.arange(6, dtype=np.int32)))
    assert seen == list(range(6))


# What no mapped input reaches stands before the loop


def bodies(jaxpr: Any) -> Iterator[str]:
    for loop in loops(jaxpr):
        for key in ("jaxpr", "body_jaxpr"):
            yield from primitives(loop.params[key]) if key in loop.params else ()


FACTORISATIONS = {
    "cholesky": (lambda a, x: jnp.linalg.cholesky(a) @ x, "cholesky"),
    "cholesky of a result": (lambda a, x: jnp.linalg.cholesky(a @ a.T) @ x, "cholesky"),
    "eigh": (lambda a, x: jnp.linalg.eigh(a)[1] @ x, "eigh"),
    "solve, whose jit holds both": (lambda a, x: jnp.linalg.solve(a, x), "lu"),
    "jit of the user's": (jax.jit(lambda a, x: jnp.linalg.cholesky(a) @ x), "cholesky"),
    "of a constant": (lambda a, x: jnp.linalg.cholesky(jnp.asarray(SPD)) @ x, "cholesky"),
}


@pytest.mark.parametrize("strategy", ["map", "chunked:2", "unrolled"])
@pytest.mark.parametrize("name", FACTORISATIONS)
def test_shared_work_is_done_once(name: str, strategy: str) -> None:
    fun, primitive = FACTORISATIONS[name]
    jaxpr = traced(strategy, fun, SPD, floats(5, 3), in_axes=(None, 0))
    assert primitive not in list(bodies(jaxpr))
    assert primitives(jaxpr).count(primitive) == 1


@pytest.mark.parametrize("strategy", ["map", "chunked:2"])
def test_large_constants_are_not_carried_into_the_loop(strategy: str) -> None:
    def fun(x: jax.Array) -> jax.Array:
        return (jnp.zeros((300, 300), jnp.float32) + x).sum()

    jaxpr = traced(strategy, fun, floats(5))
    (loop,) = loops(jaxpr)
    assert all(atom.aval.shape != (300, 300) for atom in loop.invars)
    assert "broadcast_in_dim" in list(bodies(jaxpr))


@pytest.mark.parametrize("strategy", ["map", "chunked:2"])
def test_shared_outputs_are_not_carried_by_the_loop(strategy: str) -> None:
    jaxpr = traced(strategy, lambda a, x: (a @ a, x + 1), SPD, floats(5), in_axes=(None, 0))
    (loop,) = loops(jaxpr)
    assert "dot_general" not in list(bodies(jaxpr))
    assert all(atom.aval.shape != (5, 3, 3) for atom in loop.outvars)


@pytest.mark.parametrize("strategy", ["map", "chunked:2", "unrolled"])
def test_work_that_nobody_needs_is_left_out(strategy: str) -> None:
    def fun(a: jax.Array, x: jax.Array) -> jax.Array:
        jnp.linalg.cholesky(a)
        jnp.cos(x)
        return x + 1

    names = primitives(traced(strategy, fun, SPD, floats(5), in_axes=(None, 0)))
    assert "cos" not in names
    assert "add" in names
