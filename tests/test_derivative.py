"""Plans for calls that are differentiated: a workload of its own, whose memory is a chunk's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same import assert_same

from autobatch import (
    MEAN,
    SUM,
    Budget,
    IneligibleStrategyError,
    NoViableStrategyError,
    RecordMissError,
    _derivative,
    _recall,
    _tuner,
    autobatch,
)
from autobatch._derivative import is_differentiated
from autobatch._reversible import reversible
from autobatch._strategies import Strategy

ROWS = 13
EVERY = ["vmap", "map", *(f"chunked:{size}" for size in (1, 2, 5, 12, 13, 26))]
every = pytest.mark.parametrize("strategy", [*EVERY, *(f"{each}+remat" for each in EVERY)])


def rows(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def loss(weights: Any, x: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(weight @ x)
    return jnp.sum(x**2)


WEIGHTS = [rows(4, 4, seed=each) for each in range(3)]
XS = rows(ROWS, 4)


def summed(fun: Any) -> Any:
    return lambda *args: fun(*args).sum()


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The strategies of the derivatives that were traced, in order."""
    found: list[str] = []

    def noting(strategy: Strategy, *rest: Any) -> Any:
        found.append(str(strategy))
        return reversible(strategy, *rest)

    monkeypatch.setattr(_derivative, "reversible", noting)
    return found


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was tuned, by name, in order."""
    found: list[str] = []
    tune = _tuner.tune

    def noting(job: Any, *rest: Any, **options: Any) -> Any:
        found.append(job.name)
        return tune(job, *rest, **options)

    monkeypatch.setattr(_tuner, "tune", noting)
    return found


# Every way to differentiate gives vmap's derivative.


@every
def test_gradients_of_mapped_and_unmapped_arguments(strategy: str) -> None:
    def fun(w: Any, x: Any, scale: Any) -> Any:
        return loss([w], x) * scale, w.sum() * jnp.ones(2)

    args, axes = (WEIGHTS[0], XS.T, rows(ROWS)), (None, 1, 0)
    for argnums in (0, 1, (0, 1, 2)):

        def gradient(map_: Any, argnums: Any = argnums) -> Any:
            mapped = map_(fun, axes, (0, 1))
            return jax.grad(lambda *args: sum(map(jnp.sum, mapped(*args))), argnums)(*args)

        ours = gradient(lambda *args: autobatch(*args, strategy=strategy))
        assert_same(ours, gradient(jax.vmap))


@every
@pytest.mark.parametrize("reduction", [SUM, MEAN])
def test_gradients_through_reductions(strategy: str, reduction: Any) -> None:
    def fun(w: Any, x: Any) -> Any:
        return loss([w], x), x

    batched = autobatch(fun, (None, 0), (reduction, 1), strategy=strategy)
    reduce = jnp.sum if reduction is SUM else jnp.mean

    def ours(w: Any, x: Any) -> Any:
        value, moved = batched(w, x)
        return value + moved[:, 3].sum()

    def plain(w: Any, x: Any) -> Any:
        value, moved = jax.vmap(fun, (None, 0), (0, 1))(w, x)
        return reduce(value) + moved[:, 3].sum()

    got, wanted = (jax.value_and_grad(each, (0, 1))(WEIGHTS[0], XS) for each in (ours, plain))
    assert_same(got, wanted)


@every
def test_gradients_are_exact_in_double_precision(strategy: str) -> None:
    with jax.enable_x64(True):
        weights, xs = [each.astype(np.float64) for each in WEIGHTS], XS.astype(np.float64)
        batched = autobatch(loss, (None, 0), strategy=strategy)
        ours = jax.grad(summed(batched))(weights, xs)
        plain = jax.grad(summed(jax.vmap(loss, (None, 0))))(weights, xs)
        for one, other in zip(ours, plain, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-14)


@every
def test_keys_and_integers_come_along(strategy: str) -> None:
    def fun(table: Any, index: Any, key: Any) -> Any:
        return table[index] * jax.random.normal(key), index

    index, keys = np.arange(ROWS, dtype=np.int32) % 4, jax.random.split(jax.random.key(0), ROWS)

    def gradient(map_: Any) -> Any:
        mapped = map_(fun, (None, 0, 0))
        return jax.grad(lambda table: mapped(table, index, keys)[0].sum())(jnp.ones(4))

    ours = gradient(lambda *args: autobatch(*args, strategy=strategy))
    assert_same(ours, gradient(jax.vmap))


def test_gradients_inside_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def gradient(mapped: Any) -> Any:
        return jax.shard_map(
            jax.grad(summed(mapped), argnums=1),
            mesh=mesh,
            in_specs=(spec(), spec("d")),
            out_specs=spec("d"),
        )(WEIGHTS, XS)

    batched = autobatch(loss, (None, 0), strategy="chunked:4+remat")
    assert_same(gradient(batched), gradient(jax.vmap(loss, (None, 0))))


# Memory is bounded by a chunk.


def needed(strategy: str, size: int) -> int:
    """Returns the bytes of temporaries that XLA plans for a gradient."""
    weights = [jnp.ones((16, 16))] * 8
    batched = autobatch(loss, (None, 0), strategy=strategy)
    gradient = jax.jit(jax.grad(summed(batched)))
    compiled = gradient.lower(weights, jnp.ones((size, 16))).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_follows_the_chunk_and_not_the_batch() -> None:
    assert needed("vmap", 4096) > 2_000_000
    assert needed("chunked:64+remat", 4096) < needed("vmap", 4096) / 10
    assert needed("chunked:64+remat", 4097) < needed("vmap", 4096) / 10
    assert needed("chunked:64+remat", 8192) < 1.5 * needed("chunked:64+remat", 4096)


def test_a_budget_bounds_the_derivative(used: list[str]) -> None:
    weights, xs = [rows(16, 16)] * 8, rows(2048, 16)
    free = autobatch(loss, (None, 0), store=False).for_gradient.plan(weights, xs)
    whole = next(each for each in free.outcomes if str(each.strategy) == "vmap")
    assert whole.peak_bytes is not None
    limit = whole.peak_bytes // 4
    batched = autobatch(loss, (None, 0), budget=Budget(memory=limit))
    plan = batched.for_gradient.plan(weights, xs)
    chosen = next(each for each in plan.outcomes if each.strategy == plan.strategy)
    assert plan.strategy.remat
    assert plan.strategy.family in ("chunked", "map")
    assert chosen.peak_bytes is not None
    assert chosen.peak_bytes <= limit
    jax.jit(jax.grad(summed(batched)))(weights, xs)
    assert used == [str(plan.strategy)]


def test_nothing_fits() -> None:
    batched = autobatch(loss, (None, 0), budget=Budget(memory=100))
    with pytest.raises(NoViableStrategyError, match="`grad of loss`"):
        batched.for_gradient.plan(WEIGHTS, XS)


# Plans for differentiation.


def test_its_plan_is_its_own_and_is_remembered(tunings: list[str], used: list[str]) -> None:
    batched = autobatch(loss, (None, 0))
    plan = batched.for_gradient.plan(WEIGHTS, XS)
    assert (plan.source, tunings) == ("tuned", ["grad of loss"])
    assert plan.key != batched.plan(WEIGHTS, XS).key
    assert {each.strategy.family for each in plan.outcomes} == {
        "vmap",
        "map",
        "chunked",
        "unrolled",
    }
    _recall._KNOWN.clear()  # as in another process
    again = autobatch(loss, (None, 0))
    jax.grad(summed(again))(WEIGHTS, XS)
    assert again.for_gradient.plan(WEIGHTS, XS).source == "record"
    assert tunings == ["grad of loss", "loss"]
    assert used == [str(plan.strategy)]


@pytest.mark.usefixtures("exhaustive")
def test_the_table_shows_value_and_pullback() -> None:
    table = autobatch(loss, (None, 0)).for_gradient.explain(WEIGHTS, XS)
    assert table.startswith("grad of loss   13 rows")
    for text in ("vmap ", "map+remat ", "chunked:8+remat ", "unrolled ", "chosen: "):
        assert text in table
    assert "keeps the values of all rows" in table


def test_tune_measures_again(tunings: list[str]) -> None:
    batched = autobatch(loss, (None, 0))
    batched.for_gradient.plan(WEIGHTS, XS)
    batched.for_gradient.plan(WEIGHTS, XS)
    assert batched.for_gradient.tune(WEIGHTS, XS).source == "tuned"
    assert len(tunings) == 2


def test_what_is_differentiated_is_part_of_the_workload() -> None:
    batched = autobatch(loss, (None, 0), strategy="map").for_gradient
    measured = autobatch(loss, (None, 0)).for_gradient
    keys = [measured.plan(WEIGHTS, XS).key]
    keys += [measured(argnums=each).plan(WEIGHTS, XS).key for each in (0, 1, (0, 1), (1, 0), -1)]
    assert keys[0] == keys[1]
    assert keys[2] == keys[5]
    assert keys[3] == keys[4]
    assert len(set(keys)) == 3
    assert batched.plan(WEIGHTS, XS).key == ""


def test_closed_over_arrays_are_differentiated_without_argnums(
    tunings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(weights: Any) -> Any:
        return autobatch(lambda x: loss(weights, x))

    model([jnp.asarray(each) for each in WEIGHTS]).for_gradient(()).plan(XS)
    assert tunings == ["grad of <lambda>"]
    monkeypatch.setenv("AUTOBATCH_TUNE", "require")  # of what runs, which the call itself does not
    ours = jax.grad(lambda weights: model(weights)(XS).sum())(WEIGHTS)
    assert_same(jax.jit(jax.grad(lambda weights: model(weights)(XS).sum()))(WEIGHTS), ours)
    assert tunings == ["grad of <lambda>"]
    plain = jax.grad(lambda weights: jax.vmap(lambda x: loss(weights, x))(XS).sum())(WEIGHTS)
    assert_same(ours, plain)


def test_methods_count_the_arguments_after_the_object() -> None:
    class Model:
        def __init__(self) -> None:
            self.scale = 2.0

        @autobatch(in_axes=(None, None, 0))
        def loss(self, weights: Any, x: Any) -> Any:
            return self.scale * loss(weights, x)

    model = Model()
    plan = model.loss.for_gradient.plan(WEIGHTS, XS)
    assert plan == model.loss.for_gradient(argnums=0).plan(WEIGHTS, XS)
    assert plan.key != model.loss.for_gradient(argnums=1).plan(WEIGHTS, XS).key


def test_misuse_is_said() -> None:
    batched = autobatch(loss, (None, 0))
    with pytest.raises(ValueError, match="argnums has 2, and the call has 2 arguments"):
        batched.for_gradient(argnums=2).plan(WEIGHTS, XS)
    with pytest.raises(TypeError, match="must be real or complex, and argument 1 holds int32"):
        autobatch(lambda w, i: w[i], (None, 0)).for_gradient(argnums=1).plan(
            WEIGHTS[0], np.zeros(ROWS, np.int32)
        )
    with pytest.raises(TypeError, match=r"for_gradient\.tune.*concrete arrays"):
        jax.jit(lambda w: batched.for_gradient.tune(w, XS) and w)(WEIGHTS)
    with pytest.raises(ValueError, match="inconsistent sizes"):
        autobatch(loss).for_gradient.plan(WEIGHTS, XS)
    with pytest.raises(ValueError, match="strategy must be"):
        autobatch(loss, strategy="chunked+remat")


def test_what_has_no_reverse_derivative_is_jaxs_error() -> None:
    def fun(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * x, c[1] + 1), (x, 0))[0]

    with pytest.raises(ValueError, match="Reverse-mode"):
        autobatch(fun).for_gradient.plan(rows(ROWS))


def test_what_does_not_depend_on_it_has_nothing_to_choose() -> None:
    plan = autobatch(lambda w, x: x.sum(), (None, 0)).for_gradient.plan(jnp.ones(3), XS)
    assert (str(plan.strategy), plan.source) == ("vmap", "sole")


@pytest.mark.parametrize(
    ("strategy", "forward"),
    [("chunked:4+remat", "chunked:4"), ("map+remat", "map"), ("vmap+remat", "vmap")],
)
def test_a_forced_strategy_is_used(
    strategy: str, forward: str, tunings: list[str], used: list[str]
) -> None:
    batched = autobatch(loss, (None, 0), strategy=strategy)
    jax.grad(summed(batched))(WEIGHTS, XS)
    assert used == [strategy]
    plan = batched.for_gradient.plan(WEIGHTS, XS)
    assert (str(plan.strategy), plan.source) == (strategy, "forced")
    assert str(batched.plan(WEIGHTS, XS).strategy) == forward
    assert not tunings


def test_a_forced_strategy_that_would_not_keep_the_meaning_is_refused() -> None:
    def fun(x: Any) -> Any:
        return x / jax.lax.psum(x, "rows")

    batched = autobatch(fun, axis_name="rows", strategy="chunked:4+remat")
    with pytest.raises(IneligibleStrategyError, match="psum"):
        batched.for_gradient.plan(rows(ROWS))


def test_effects_are_vmaps_under_derivatives_too() -> None:
    seen: list[int] = []

    def fun(x: Any) -> Any:
        jax.debug.callback(lambda _: seen.append(1), x)
        return jnp.sin(x)

    batched = autobatch(fun)
    assert batched.for_gradient.plan(rows(ROWS)).source == "estimate"
    jax.grad(summed(batched))(rows(ROWS))
    jax.effects_barrier()
    assert len(seen) == ROWS


def test_switched_off_it_is_plain_vmap(tunings: list[str], used: list[str]) -> None:
    batched = autobatch(loss, (None, 0), tune="off")
    assert batched.for_gradient.plan(WEIGHTS, XS).source == "off"
    jax.grad(summed(batched))(WEIGHTS, XS)
    assert (tunings, used) == ([], [])


# Inside a trace.


def test_a_call_knows_whether_it_is_being_differentiated() -> None:
    seen: list[bool] = []

    def fun(w: Any, x: Any) -> Any:
        seen.append(is_differentiated([w, x]))
        return (w * x).sum()

    w, x = jnp.ones(3), jnp.arange(3.0)
    jax.grad(fun)(w, x)
    jax.jit(jax.grad(fun))(w, x)
    jax.vmap(jax.grad(fun))(w[None], x[None])
    jax.jvp(fun, (w, x), (w, x))
    assert seen == [True] * 4
    fun(w, x)
    jax.grad(jax.jit(fun))(w, x)
    assert seen[4:] == [False] * 2


def test_a_gradient_tunes_its_derivative_and_nothing_else(tunings: list[str]) -> None:
    batched = autobatch(loss, (None, 0))
    jax.jit(jax.grad(summed(batched)))(WEIGHTS, XS)
    assert tunings == ["grad of loss"]


def test_it_is_said_once_how_to_do_better(caplog: pytest.LogCaptureFixture) -> None:
    def said(method: str) -> list[str]:
        texts = [each.getMessage() for each in caplog.records]
        return [each for each in texts if f"call `{method}(...)` on real arrays before" in each]

    batched = autobatch(lambda w, x: loss(w, x), (None, 0), name="step")
    with caplog.at_level(logging.INFO, "autobatch"):
        for _ in range(2):
            jax.jit(lambda w: batched(w, XS))(WEIGHTS)
            jax.jit(jax.grad(lambda w: batched(w, XS).sum()))(WEIGHTS)
    assert len(said("step.plan")) == 1
    assert len(said("step.for_gradient.plan")) == 1


def test_an_estimate_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    def fun(x: Any) -> Any:
        return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x).sum()

    with caplog.at_level(logging.INFO, "autobatch"):
        jax.jit(autobatch(fun))(XS)
    assert "estimated; call `fun.plan(...)` on real arrays before" in caplog.text


def test_an_estimate_under_a_budget_is_a_chunk(tunings: list[str], used: list[str]) -> None:
    weights, xs = [rows(16, 16)] * 8, rows(2048, 16)
    batched = autobatch(loss, (None, 0), tune="cached", budget=Budget(memory="600kB"))
    jax.grad(summed(batched))(weights, xs)
    assert not tunings
    (strategy,) = used
    assert Strategy.parse(strategy).remat
    assert Strategy.parse(strategy).family == "chunked"


def test_a_record_replaces_what_a_trace_had_estimated(used: list[str]) -> None:
    weights, xs = [rows(16, 16)] * 8, rows(256, 16)
    batched = autobatch(loss, (None, 0), tune="cached")
    jax.grad(summed(batched))(weights, xs)
    autobatch(loss, (None, 0), budget=Budget(memory="150kB")).for_gradient.plan(weights, xs)
    narrow = autobatch(loss, (None, 0), budget=Budget(memory="150kB"), tune="cached")
    plan = narrow.for_gradient.plan(weights, xs)
    assert plan.strategy.remat
    jax.grad(summed(narrow))(weights, xs)
    assert used == ["vmap", str(plan.strategy)]


def test_a_plan_made_after_a_gradient_serves_the_next(used: list[str], tunings: list[str]) -> None:
    batched = autobatch(loss, (None, 0))
    jax.grad(summed(batched))(WEIGHTS, XS)
    jax.grad(summed(batched))(WEIGHTS, XS)
    assert len(used) == 1
    plan = batched.for_gradient.tune(WEIGHTS, XS)
    jax.grad(summed(batched))(WEIGHTS, XS)
    assert used[-1] == str(plan.strategy)
    assert tunings == ["grad of loss"] * 2


def test_require_wants_a_record_of_the_derivative(
    tunings: list[str], count_compiles: Callable[[], int]
) -> None:
    step = jax.jit(jax.grad(summed(autobatch(loss, (None, 0), tune="require"))))
    with pytest.raises(RecordMissError, match=r"`grad of loss`.*\.for_gradient\.tune"):
        step(WEIGHTS, XS)
    autobatch(loss, (None, 0)).for_gradient.plan(WEIGHTS, XS)
    assert tunings == ["grad of loss"]
    _recall._KNOWN.clear()
    before = count_compiles()
    step(WEIGHTS, XS)
    assert count_compiles() - before == 1
    assert tunings == ["grad of loss"]


def test_batches_of_other_sizes_take_the_nearest_plan(tunings: list[str], used: list[str]) -> None:
    batched = autobatch(loss, (None, 0))
    for size in (8, 16, 32, 64):
        batched.for_gradient.plan(WEIGHTS, rows(size, 4))
    assert len(tunings) == 4
    jax.grad(summed(batched))(WEIGHTS, rows(50, 4))
    assert batched.for_gradient.plan(WEIGHTS, rows(50, 4)).source == "nearest"
    assert len(tunings) == 4
    assert len(used) == 1


# What a user's own rules make of it.


@jax.custom_vjp
def pulled(x: Any) -> Any:
    return x


pulled.defvjp(lambda x: (x, x), lambda x, cotangent: (cotangent + 0.1 * x,))


@jax.custom_vjp
def normalised(x: Any) -> Any:
    return x


normalised.defvjp(
    lambda x: (x, None), lambda _, cotangent: (cotangent / jnp.linalg.norm(cotangent),)
)


@every
@pytest.mark.parametrize("rule", [pulled, normalised, jnp.sqrt], ids=["pulled", "normed", "sqrt"])
def test_a_rule_is_applied_once_to_each_row(rule: Any, strategy: str) -> None:
    def fun(w: Any, x: Any) -> Any:
        return jnp.sum(rule(w * x))

    xs = np.abs(XS)
    xs[-2] = 0  # where the square root's derivative is infinite

    def gradient(mapped: Any) -> Any:
        return jax.grad(summed(mapped), (0, 1))(jnp.ones(4), xs)

    batched = autobatch(fun, (None, 0), strategy=strategy)
    assert_same(gradient(batched), gradient(jax.vmap(fun, (None, 0))))


def test_other_rules_are_other_workloads() -> None:
    def keyed(rule: Any) -> list[str]:
        batched = autobatch(lambda w, x: jnp.sum(rule(w * x)), (None, 0), tune="cached")
        plans = batched.for_gradient.plan(jnp.ones(4), XS), batched.plan(jnp.ones(4), XS)
        return [each.key for each in plans]

    assert keyed(pulled)[0] != keyed(normalised)[0]
    assert keyed(pulled)[1] == keyed(normalised)[1]


def test_forward_mode_of_what_has_no_reverse_derivative_without_tuning() -> None:
    def fun(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * x, c[1] + 1), (x, 0))[0]

    x = jnp.asarray(rows(ROWS))
    batched = autobatch(fun, tune="cached")
    assert_same(jax.jvp(batched, (x,), (x,)), jax.jvp(jax.vmap(fun), (x,), (x,)))


def test_a_plan_made_after_a_call_and_a_gradient_serves_the_next(used: list[str]) -> None:
    weights, xs = [rows(16, 16)] * 8, rows(256, 16)
    batched = autobatch(loss, (None, 0), budget=Budget(memory="10MB"))
    expected = batched(weights, xs)
    jax.grad(summed(batched))(weights, xs)
    batched._planner.budget = Budget(memory="150kB")
    batched._planner._plans.clear()
    plan = batched.for_gradient.tune(weights, xs)
    assert plan.strategy.remat
    jax.grad(summed(batched))(weights, xs)
    assert used[-1] == str(plan.strategy) != used[0]
    assert_same(batched(weights, xs), expected)


def test_integers_among_the_parameters_are_left_out() -> None:
    def fun(params: Any, x: Any) -> Any:
        return loss([params["w"]], x) * jnp.float32(params["n"])

    params = {"w": WEIGHTS[0], "n": np.int32(2)}
    plan = autobatch(fun, (None, 0)).for_gradient.plan(params, XS)
    assert plan.source == "tuned"


def test_the_users_program_is_left_without_a_trace_of_ours() -> None:
    batched = autobatch(loss, (None, 0), strategy="vmap")
    jaxpr = jax.make_jaxpr(lambda w, x: batched(w, x))(WEIGHTS, XS)
    assert [each.primitive.name for each in jaxpr.eqns] == ["jit"]


def test_vmap_alone_is_not_rematerialised() -> None:
    def fun(x: Any) -> Any:
        return jnp.sin(x) * jax.lax.psum(x, "rows")

    batched = autobatch(fun, axis_name="rows", strategy="vmap+remat")
    assert str(batched.for_gradient.plan(rows(ROWS)).strategy) == "vmap"
