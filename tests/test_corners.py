"""Corners where `autobatch(fun)` once was not, or might not be, `jax.jit(jax.vmap(fun))`."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autobatch import SUM, _measure, autobatch

# The automatic choice, where it is tested, tries every family.
pytestmark = pytest.mark.usefixtures("exhaustive")

EVERY = [None, "vmap", "map", "chunked:2", "unrolled"]


def rows(count: int = 4, width: int = 3) -> np.ndarray[Any, Any]:
    return np.arange(count * width, dtype=np.float32).reshape(count, width)


def on_four_devices(code: str) -> Any:
    """Returns the JSON that a program printed in a process with four CPU devices."""
    start = """
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
        import json, jax, jax.numpy as jnp, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from autobatch import autobatch
        x = np.arange(32, dtype=np.float32).reshape(8, 4)
        branchy = lambda x: jax.lax.cond(
            x[0] > 30, lambda x: jax.lax.fori_loop(0, 3000, lambda _, y: jnp.sin(y), x),
            lambda x: x, x)
        def mesh(kind):
            return jax.make_mesh((4,), ("d",), axis_types=(kind,))
        def choose_map():  # whatever the clock says
            from autobatch import _choose, _planner, _strategies
            _planner.decide = lambda *_: _choose.Decision(strategy=_strategies.MAP)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Several devices.


def test_a_plan_made_without_a_mesh_does_not_break_calls_under_an_explicit_one() -> None:
    assert on_four_devices("""
        choose_map()
        batched = autobatch(branchy)
        plan = str(batched.plan(x).strategy)
        want = jax.jit(jax.vmap(branchy))(x)
        with jax.set_mesh(mesh(AxisType.Explicit)):
            got, again = batched(x), autobatch(branchy)(x)
        print(json.dumps([plan != "vmap", np.allclose(got, want), np.allclose(again, want)]))
    """) == [True, True, True]


def test_shardings_that_only_an_outer_jit_knows_gather_nothing() -> None:
    assert on_four_devices("""
        rows = NamedSharding(mesh(AxisType.Auto), P("d"))
        choose_map()
        batched = autobatch(branchy)
        plan = str(batched.plan(x).strategy)
        count = lambda f: (
            jax.jit(f, in_shardings=rows).lower(x).compile().as_text().count("all-gather"))
        plain = jax.vmap(branchy)
        print(json.dumps([plan != "vmap", count(lambda x: batched(x)), count(lambda x: plain(x))]))
    """) == [True, 0, 0]


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_sharded_rows_stay_where_they_are(kind: str) -> None:
    assert on_four_devices(f"""
        y = jax.device_put(x, NamedSharding(mesh(AxisType.{kind}), P("d")))
        batched, plain = autobatch(branchy), jax.jit(jax.vmap(branchy))
        batched(x)
        got, want = batched(y), plain(y)
        gathers = batched.lower(y).compile().as_text().count("all-gather")
        print(json.dumps([np.allclose(got, want), str(got.sharding) == str(want.sharding),
                          gathers, str(batched(x).sharding) == str(plain(x).sharding)]))
    """) == [True, True, 0, True]


def test_calls_go_to_the_device_of_their_arrays() -> None:
    assert (
        on_four_devices("""
        batched, devices = autobatch(lambda x: x * 2), jax.devices()
        places = []
        for _ in range(2):
            for device in devices[:0:-1]:
                places.append(next(iter(batched(jax.device_put(x, device)).devices())).id)
            with jax.default_device(devices[1]):
                places.append(next(iter(batched(x).devices())).id)
            places.append(next(iter(batched(x).devices())).id)
        print(json.dumps(places))
    """)
        == [3, 2, 1, 1, 0] * 2
    )


@pytest.mark.parametrize("replicated", [False, True])
def test_the_axis_of_a_shard_map_around_a_call_may_be_used(replicated: bool) -> None:
    assert (
        on_four_devices(f"""
        replicated, outcomes = {replicated}, []
        fun = lambda x: x + jax.lax.axis_index("d")
        place = P() if replicated else P("d")
        for check in (True, False):
            for strategy in (None, "map", "chunked:1", "unrolled"):
                inside = lambda f: jax.jit(jax.shard_map(
                    f, mesh=mesh(AxisType.Auto), in_specs=(place,), out_specs=P("d"),
                    check_vma=check))(x.astype(int))
                try:
                    got = inside(lambda x: autobatch(fun, strategy=strategy)(x))
                    outcomes.append(np.array_equal(got, inside(jax.vmap(fun))))
                except Exception as error:
                    outcomes.append(repr(error))
        print(json.dumps(outcomes))
    """)
        == [True] * 8
    )


@pytest.mark.parametrize("strategy", ["map", "chunked:1", "unrolled"])
def test_a_sum_over_a_shard_map_axis_does_not_vary_afterwards(strategy: str) -> None:
    assert on_four_devices(f"""
        inside = lambda f: jax.jit(jax.shard_map(
            f, mesh=mesh(AxisType.Auto), in_specs=(P("d"),), out_specs=P()))(x)
        fun = lambda x: jax.lax.psum(x, "d")
        got = inside(lambda x: autobatch(fun, strategy="{strategy}")(x))
        print(json.dumps(np.array_equal(got, inside(jax.vmap(fun)))))
    """)


# Calls and arguments.


@pytest.mark.parametrize("strategy", EVERY)
def test_an_argument_may_be_called_self(strategy: str | None) -> None:
    batched = autobatch(lambda self, args: self - 2 * args, strategy=strategy)
    for call in (batched, batched.lower, batched.plan, batched.explain):
        call(args=rows(), self=rows())
    np.testing.assert_array_equal(batched(args=rows(), self=rows()), -rows())


@jax.tree_util.register_pytree_node_class
class Checked:
    """A node that only arrays may be put into, as far as `jax.vmap` itself puts any."""

    def __init__(self, value: Any) -> None:
        assert hasattr(value, "astype"), value
        self.value = value

    def tree_flatten(self) -> Any:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Checked:
        return cls(*children)


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("side", ["argument", "result"])
def test_nodes_that_check_what_they_hold_hold_only_arrays(side: str, strategy: Any) -> None:
    fun: Callable[[Any], Any] = {
        "argument": lambda node: node.value * 2,
        "result": lambda x: Checked(x * 2),
    }[side]
    argument = Checked(rows()) if side == "argument" else rows()
    jax.jit(jax.vmap(fun))(argument)
    result = autobatch(fun, strategy=strategy)(argument)
    np.testing.assert_array_equal(getattr(result, "value", result), 2 * rows())


def test_references_with_a_row_for_every_example_are_written() -> None:
    def add(reference: Any, x: Any) -> Any:
        reference[...] = reference[...] + x
        return 2 * x

    got, want = jax.new_ref(jnp.asarray(rows())), jax.new_ref(jnp.asarray(rows()))
    np.testing.assert_array_equal(autobatch(add)(got, rows()), jax.jit(jax.vmap(add))(want, rows()))
    np.testing.assert_array_equal(got[...], want[...])


def test_a_program_is_lowered_for_shapes_alone() -> None:
    batched = autobatch(lambda x: x * 2)
    batched(rows())
    compiled = batched.lower(jax.ShapeDtypeStruct((4, 3), jnp.float32)).compile()
    np.testing.assert_array_equal(compiled(rows()), 2 * rows())


def test_calls_are_exported_with_a_batch_of_unknown_size() -> None:
    batched = autobatch(lambda x: jnp.sin(x).sum())
    shape = jax.export.symbolic_shape("rows, 3")
    exported = jax.export.export(jax.jit(lambda x: batched(x)))(
        jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    np.testing.assert_allclose(exported.call(rows()), np.sin(rows()).sum(1), rtol=1e-5)


@pytest.mark.parametrize("reduction", [None, SUM])
@pytest.mark.parametrize("suffix", ["", "+remat"])
@pytest.mark.parametrize("family", ["vmap", "map", "chunked:2", "chunked:99", "unrolled"])
def test_a_batch_of_unknown_size_is_vectorised_under_every_forced_strategy(
    family: str, suffix: str, reduction: Any
) -> None:
    out_axes = 0 if reduction is None else reduction
    batched = autobatch(lambda x: jnp.sin(x).sum(), 0, out_axes, strategy=f"{family}{suffix}")
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 3"), jnp.float32)
    forward, gradient = (
        jax.export.export(jax.jit(fun))(shape)
        for fun in (lambda x: batched(x).sum(), jax.grad(lambda x: batched(x).sum()))
    )
    np.testing.assert_allclose(forward.call(rows()), np.sin(rows()).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient.call(rows()), np.cos(rows()), rtol=1e-5)
    assert "stablehlo.while" not in forward.mlir_module() + gradient.mlir_module()


# Transformations, contexts and threads.


def test_the_axis_of_a_vmap_around_a_call_is_no_failure_of_every_candidate() -> None:
    batched = autobatch(lambda x: x - jax.lax.pmean(x, "outer"))
    sources: list[str] = []

    def call(x: Any) -> Any:
        sources.append(batched.plan(x).source)
        return batched(x)

    x = jnp.asarray(rows(8).reshape(2, 4, 3))
    np.testing.assert_allclose(jax.vmap(call, axis_name="outer")(x), x - x.mean(0, keepdims=True))
    assert sources == ["estimate"]


def test_x64_may_be_toggled_between_calls() -> None:
    batched, plain = autobatch(lambda x, s: x * s, (0, None)), jax.jit(lambda x, s: x * s)
    for enabled in (False, True, False, True):
        with jax.enable_x64(enabled):
            x = np.ones((4, 3))
            assert batched(x, 2.0).dtype == plain(x, 2.0).dtype


def test_nan_is_found_in_calls_under_debug_nans() -> None:
    batched = autobatch(lambda x: jnp.log(x - 100))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        batched(rows())
    assert np.isnan(batched(rows())).all()
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        batched(rows())


def test_a_callback_may_call_another_mapped_function() -> None:
    inner = autobatch(lambda x: x * 2)

    def fun(x: Any) -> Any:
        called = lambda v: np.asarray(inner(np.asarray(v)))  # noqa: E731
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(called, shape, x, vmap_method="sequential")

    np.testing.assert_array_equal(autobatch(fun)(rows()), 2 * rows())


def test_threads_with_different_first_calls_do_not_wait_for_ever() -> None:
    batched, results = autobatch(lambda x: jnp.sin(x).sum()), {}
    barrier = threading.Barrier(8)

    def call(count: int) -> None:
        barrier.wait()
        results[count] = batched(rows(count)).shape

    threads = [threading.Thread(target=call, args=(2 + at % 4,), daemon=True) for at in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert results == {count: (count,) for count in range(2, 6)}


def test_after_an_interrupted_first_call_the_next_one_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    batched = autobatch(lambda x: jnp.sinh(x).sum())
    with monkeypatch.context() as patch:
        patch.setattr(_measure, "first_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batched(rows())
    np.testing.assert_allclose(batched(rows()), np.sinh(rows()).sum(1), rtol=1e-5)
    assert {each.status for each in batched.plan(rows()).outcomes} == {"measured"}


# What is kept, and what settles.


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("fails", [False, True])
def test_no_argument_outlives_a_call_that_was_made_or_failed(fails: bool, strategy: Any) -> None:
    def fun(*, x: Any) -> Any:
        return x.reshape(7) if fails else x * 2

    batched, x = autobatch(fun, strategy=strategy), jnp.asarray(rows())
    alive = weakref.ref(x)
    if fails:
        with pytest.raises(TypeError):
            batched(x=x)
    else:
        jax.block_until_ready(batched(x=x))
    del x
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "calls",
    [
        [((rows(), rows(4, width)), {}) for width in (1, 2, 3, 4)],
        [((rows(), rows().astype(kind)), {}) for kind in (np.float32, np.int32, np.uint8)],
        [((rows(), rows()), {}), ((rows(),), {"y": rows()}), ((), {"y": rows(), "x": rows()})],
        [((rows(count), rows(count)), {}) for count in range(2, 6)],
    ],
    ids=["shapes of the second", "dtypes of the second", "keywords", "batch sizes"],
)
def test_calls_in_turns_soon_compile_nothing(
    calls: list[Any], count_compiles: Callable[[], int]
) -> None:
    batched = autobatch(lambda x, y: x.sum() + y.astype(np.float32).sum())
    for _ in range(3):
        for args, kwargs in calls:
            batched(*args, **kwargs)
    before = count_compiles()
    for _ in range(25):
        for args, kwargs in calls:
            batched(*args, **kwargs)
    assert count_compiles() == before
