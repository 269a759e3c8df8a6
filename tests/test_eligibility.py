"""A strategy that would not keep vmap's meaning is not offered, and the reason is a sentence."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import Function, described
from jax.experimental import io_callback

from autobatch import IneligibleStrategyError, autobatch
from autobatch._eligibility import (
    depends_on_values,
    may_not_end,
    must_not_run,
    nothing_to_choose,
    only_vmap,
)

XS = np.arange(5, dtype=np.float32)


def barred(fun: Function, *args: Any, **options: Any) -> str | None:
    args = args or (XS,)
    return only_vmap(described(fun, *args, **options), jax.tree.leaves(args))


def not_run(fun: Function, *args: Any, **options: Any) -> str | None:
    return must_not_run(described(fun, *(args or (XS,)), **options))


# Collectives over the batch axis

COLLECTIVES: dict[str, Function] = {
    "psum": lambda x: jax.lax.psum(x, "batch"),
    "psum over two": lambda x: jax.lax.psum(x, ("batch",)),
    "psum of a tree": lambda x: jax.lax.psum({"a": x, "b": 2 * x}, "batch"),
    "pmean": lambda x: jax.lax.pmean(x, "batch"),
    "pmax": lambda x: jax.lax.pmax(x, "batch"),
    "axis_index": lambda x: x + jax.lax.axis_index("batch"),
    "ppermute": lambda x: jax.lax.ppermute(x, "batch", [(i, (i + 1) % 5) for i in range(5)]),
    "pshuffle": lambda x: jax.lax.pshuffle(x, "batch", [1, 0, 3, 2, 4]),
    "all_gather": lambda x: jax.lax.all_gather(x, "batch"),
    "all_to_all": lambda x: jax.lax.all_to_all(x * jnp.ones(5), "batch", 0, 0),
    "psum_scatter": lambda x: jax.lax.psum_scatter(x * jnp.ones(5), "batch"),
}
NESTS: dict[str, Callable[[Function], Function]] = {
    "itself": lambda fun: fun,
    "jit": lambda fun: jax.jit(fun),
    "checkpoint": lambda fun: jax.checkpoint(fun),
    "scan": lambda fun: lambda x: jax.lax.scan(lambda c, _: (c, fun(x)), 0.0, None, length=2)[1],
    "cond": lambda fun: lambda x: jax.lax.cond(x > 0, lambda: fun(x) * 2, lambda: fun(x)),
    "vmap": lambda fun: lambda x: jax.vmap(lambda y: fun(x) + y)(jnp.ones((2, 1))),
    "two deep": lambda fun: jax.jit(lambda x: jax.lax.map(lambda _: fun(x), jnp.arange(2))),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_over_the_axis_bars_all_but_vmap(name: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        reason = barred(COLLECTIVES[name], axis_name="batch")
    assert reason is not None
    assert reason.endswith("uses the axis 'batch'")


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("name", ["psum", "axis_index", "ppermute"])
def test_collective_is_found_however_deep(name: str, nest: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        reason = barred(NESTS[nest](COLLECTIVES[name]), axis_name="batch")
    assert reason is not None
    assert "uses the axis 'batch'" in reason


@jax.jit
def batch(x: jax.Array) -> jax.Array:
    """A function that is called like the axis."""
    return x * 2


@pytest.mark.parametrize(
    "fun",
    [
        pytest.param(lambda x: x + 1, id="plain"),
        pytest.param(lambda x: batch(x), id="a function of that name"),
        pytest.param(
            lambda x: jax.vmap(lambda y: jax.lax.psum(y, "other"), axis_name="other")(x[None]),
            id="another axis",
        ),
        pytest.param(
            lambda x: jax.vmap(lambda y: jax.lax.psum(y, "batch"), axis_name="batch")(x[None]),
            id="an inner axis of that name",
        ),
        pytest.param(lambda x: x * jax.lax.axis_size("batch"), id="its size, which is a number"),
    ],
)
def test_name_that_is_not_used_bars_nothing(fun: Function) -> None:
    with jax.numpy_dtype_promotion("standard"):
        assert barred(fun, axis_name="batch") is None


class Axis(enum.Enum):
    BATCH = 0


def test_axis_name_may_be_any_object() -> None:
    assert barred(lambda x: jnp.sort(x[None]).sum(), axis_name=Axis.BATCH) is None
    assert barred(lambda x: jax.lax.psum(x, Axis.BATCH), axis_name=Axis.BATCH) is not None


def test_spmd_axis_name_is_vmaps() -> None:
    assert barred(lambda x: x, spmd_axis_name="devices") == "spmd_axis_name is given"


# Rules, keys and references


@jax.custom_batching.custom_vmap
def doubled(x: jax.Array) -> jax.Array:
    return x * 2


@doubled.def_vmap
def _(axis_size: int, in_batched: Any, x: jax.Array) -> Any:
    return x * 2 + 1, in_batched[0]


def add_through_a_reference(x: jax.Array) -> jax.Array:
    reference = jax.new_ref(x)
    reference[...] = reference[...] + 1
    return reference[...]


def rbg(name: str) -> Any:
    return jax.random.split(jax.random.key(0, impl=name), 5)


BARRED: dict[str, tuple[Function, tuple[Any, ...], str]] = {
    "custom_vmap": (doubled, (XS,), "it has a custom_vmap rule"),
    "rbg": (jax.random.bits, (rbg("rbg"),), "rbg keys draw other numbers"),
    "unsafe_rbg": (jax.random.bits, (rbg("unsafe_rbg"),), "rbg keys draw other numbers"),
    "rbg inside": (
        lambda x: x + jax.random.uniform(jax.random.key(x.astype(int), impl="rbg")),
        (XS,),
        "rbg keys draw other numbers",
    ),
    "rng_bit_generator": (
        lambda key: jax.lax.rng_bit_generator(key, (2,))[1],
        (np.ones((5, 4), np.uint32),),
        "rbg keys draw other numbers",
    ),
    "reference": (add_through_a_reference, (XS,), "it works on mutable references"),
}


@pytest.mark.parametrize("nest", ["itself", "jit", "scan", "cond"])
@pytest.mark.parametrize("name", BARRED)
def test_what_only_vmap_keeps_is_barred(name: str, nest: str) -> None:
    fun, args, reason = BARRED[name]
    if nest == "cond" and name != "reference":
        fun, inner = (lambda x: jax.lax.cond(True, lambda: inner(x), lambda: inner(x))), fun
    elif nest == "scan":
        fun, inner = (lambda x: jax.lax.map(lambda _: inner(x), jnp.arange(2))), fun
    elif nest == "jit":
        fun = jax.jit(fun)
    with jax.numpy_dtype_promotion("standard"):
        found = barred(fun, *args)
    assert found is not None
    assert found.startswith(reason)


def test_closed_over_reference_is_barred() -> None:
    counter = jax.new_ref(jnp.zeros(()))

    def fun(x: jax.Array) -> jax.Array:
        return x + counter[...]

    assert barred(fun) == "it works on mutable references"


@pytest.mark.parametrize("impl", ["threefry2x32"])
def test_threefry_keys_bar_nothing(impl: str) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), 5)
    assert barred(lambda key: jax.random.normal(key), keys) is None
    assert barred(lambda key: jax.random.normal(key), jax.random.key_data(keys)) is None


@pytest.mark.parametrize(
    "fun",
    [
        pytest.param(jax.nn.relu, id="custom_jvp"),
        pytest.param(lambda x: jnp.linalg.inv(x * jnp.eye(2)), id="library call"),
        pytest.param(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), id="cond"),
        pytest.param(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2, x), id="loop"),
        pytest.param(jax.grad(jnp.sin), id="gradient"),
    ],
)
def test_ordinary_functions_are_barred_from_nothing(fun: Function) -> None:
    assert barred(fun) is None
    assert not_run(fun) is None


def test_several_processes_have_vmap_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert barred(lambda x: x) == "several processes run this program"


def test_arguments_on_a_mesh_have_vmap_only() -> None:
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        xs = jax.device_put(XS, jax.NamedSharding(mesh, jax.P("devices")))
        assert barred(lambda x: x, xs) is not None


# Effects

SHAPE = jax.ShapeDtypeStruct((), np.float32)


def look(x: Any) -> Any:
    return x


EFFECTS: dict[str, Function] = {
    "debug.print": lambda x: (jax.debug.print("{}", x), x)[1],
    "debug.callback": lambda x: (jax.debug.callback(look, x), x)[1],
    "io_callback": lambda x: io_callback(look, SHAPE, x),
    "io_callback in jit": jax.jit(lambda x: io_callback(look, SHAPE, x)),
    "io_callback in scan": lambda x: jax.lax.map(
        lambda _: io_callback(look, SHAPE, x), jnp.arange(2)
    ),
    "print in one branch": lambda x: jax.lax.cond(
        x > 0, lambda: jax.debug.print("{}", x), lambda: None
    ),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_function_with_effects_is_not_run_for_timing(name: str) -> None:
    reason = not_run(EFFECTS[name])
    assert reason is not None
    assert "must not happen for timing" in reason


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_pure_callback_may_run(method: Any) -> None:
    def fun(x: jax.Array) -> jax.Array:
        return jax.pure_callback(look, SHAPE, x, vmap_method=method)

    assert not_run(fun) is None
    assert barred(fun) is None


def test_collective_is_no_effect() -> None:
    assert not_run(lambda x: jax.lax.psum(x, "batch"), axis_name="batch") is None


def test_ordered_callback_is_refused_as_vmap_refuses_it() -> None:
    def fun(x: jax.Array) -> jax.Array:
        return io_callback(look, SHAPE, x, ordered=True)

    with pytest.raises(Exception) as bare:  # noqa: PT011  whatever it is
        jax.jit(jax.vmap(fun))(XS)
    for strategy in (None, "vmap", "map", "chunked:2", "unrolled"):
        with pytest.raises((bare.type, IneligibleStrategyError)):
            autobatch(fun, strategy=strategy, store=False)(XS)


@pytest.mark.parametrize("strategy", [None, "vmap", "map", "chunked:2", "chunked:3", "unrolled"])
@pytest.mark.parametrize("of_row", [True, False])
def test_effects_happen_as_often_as_under_vmap(strategy: str | None, of_row: bool) -> None:
    seen: list[float] = []

    def fun(x: jax.Array) -> jax.Array:
        io_callback(lambda value: seen.append(float(value)), None, x if of_row else 1.0)
        return x

    jax.block_until_ready(jax.jit(jax.vmap(fun))(XS))
    jax.effects_barrier()
    expected = sorted(seen)
    seen.clear()
    try:
        jax.block_until_ready(autobatch(fun, strategy=strategy, store=False)(XS))
    except IneligibleStrategyError:
        assert strategy not in (None, "vmap")
        expected = []
    jax.effects_barrier()
    assert sorted(seen) == expected


@pytest.mark.parametrize("strategy", ["map", "chunked:2", "unrolled"])
@pytest.mark.parametrize("name", BARRED)
def test_forced_strategy_that_changes_the_meaning_is_refused(name: str, strategy: str) -> None:
    fun, args, reason = BARRED[name]
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(IneligibleStrategyError, match=f"strategy='{strategy}' .*{reason}"),
    ):
        autobatch(fun, strategy=strategy, store=False)(*args)


@pytest.mark.parametrize("strategy", ["vmap", "chunked:5", "chunked:9"])
def test_forced_vmap_is_always_allowed(strategy: str) -> None:
    mapped = autobatch(doubled, strategy=strategy, store=False)
    np.testing.assert_array_equal(mapped(XS), jax.vmap(doubled)(XS))


# A strategy that may never end


def is_even(n: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda m: m > 1, lambda m: m - 2, n) == 0


LANE_LOOPS: dict[str, tuple[Function, bool]] = {
    "while in a branch of a lane": (
        lambda n: jax.lax.cond(n > 3, is_even, lambda m: m == 0, n), True
    ),
    "both branches, in jit": (
        jax.jit(lambda n: jax.lax.cond(n > 3, is_even, lambda m: ~is_even(m + 1), n)), True
    ),
    "deep in a branch": (
        lambda n: jax.lax.cond(
            n > 3, lambda m: jax.lax.scan(lambda c, _: (c, is_even(m)), 0, None, 2)[1].any(),
            lambda m: m == 0, n
        ), True
    ),
    "branch inside scan": (
        lambda n: jax.lax.map(
            lambda k: jax.lax.cond(n > k, is_even, lambda m: m == 0, n), jnp.arange(2)
        ), True
    ),
    "while without a branch": (is_even, False),
    "branch that all lanes share": (
        lambda n: jax.lax.cond(jnp.sum(jnp.arange(3)) > 2, is_even, lambda m: m == 0, n), False
    ),
    "counted loop in a branch": (
        lambda n: jax.lax.cond(
            n > 3, lambda m: jax.lax.fori_loop(0, 5, lambda _, k: k + 1, m), lambda m: m, n
        ), False
    ),
    "branch without a loop": (lambda n: jax.lax.cond(n > 3, lambda m: m, lambda m: -m, n), False),
}  # fmt: skip


@pytest.mark.parametrize("name", LANE_LOOPS)
def test_loop_that_only_some_rows_should_enter_may_not_end(name: str) -> None:
    fun, may = LANE_LOOPS[name]
    row = described(fun, np.arange(5, dtype=np.int32)).row
    assert row is not None
    assert may_not_end(row) == may


# Nothing to choose


@pytest.mark.parametrize("rows", [0, 1])
def test_batch_that_cannot_be_divided(rows: int) -> None:
    workload = described(lambda x: x, np.ones(rows, np.float32))
    assert nothing_to_choose(workload) == f"a batch of {rows} cannot be divided"


def test_nothing_mapped() -> None:
    workload = described(lambda x: x, XS, in_axes=None, axis_size=5)
    assert nothing_to_choose(workload) == "no argument is mapped"


def test_two_rows_are_a_choice() -> None:
    workload = described(lambda x: x, np.ones(2, np.float32))
    assert nothing_to_choose(workload) is None


# Control flow that depends on values

STEPS: dict[str, tuple[Function, bool]] = {
    "no loop": (lambda x: x + 1, False),
    "select": (lambda x: jnp.where(x > 0, x, -x), False),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (c * x, None), x, None, length=3)[0], False),
    "counted": (lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c * x, x), False),
    "counted to a value": (
        lambda x: jax.lax.fori_loop(0, x.astype(int), lambda _, c: c * x, x),
        True,
    ),
    "while": (lambda x: jax.lax.while_loop(lambda c: c < x, lambda c: c + 1, x - 3), True),
    "cond": (lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), True),
    "switch in jit": (
        jax.jit(lambda x: jax.lax.switch(x.astype(int), [jnp.sin, jnp.cos, jnp.tan], x)),
        True,
    ),
    "while in scan": (
        lambda x: jax.lax.scan(
            lambda c, _: (jax.lax.while_loop(lambda c: c < x, lambda c: c + 1, c), None),
            x - 3,
            None,
            length=2,
        )[0],
        True,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_loops_and_branches_on_values_are_noticed(name: str) -> None:
    fun, depends = STEPS[name]
    row = described(fun, XS).row
    assert row is not None
    assert depends_on_values(row) == depends


def test_explain_says_that_the_plan_holds_for_these_values() -> None:
    note = "measured on these values, on which loops or branches depend"
    assert note in autobatch(STEPS["cond"][0]).explain(XS)
    assert note not in autobatch(STEPS["scan"][0]).explain(XS)
