"""The decorator as a user meets it: what is traced, compiled and run, and when."""

from __future__ import annotations

import gc
import inspect
import json
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autobatch import (
    AutobatchWarning,
    Budget,
    NoViableStrategyError,
    RecordMissError,
    _planner,
    _recall,
    _tuner,
    autobatch,
)
from autobatch._instruments import Instruments
from autobatch._memory import DeviceMemory
from autobatch._program import Program
from autobatch._strategies import VMAP

ROWS = 6


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """Returns the function and a list that grows by one with every trace of it."""
    traces: list[int] = []

    def fun(*args: Any, **kwargs: Any) -> Any:
        traces.append(1)
        return function(*args, **kwargs)

    return fun, traces


def rows(count: int = ROWS, width: int = 3, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(count * width, dtype=dtype).reshape(count, width)


def row_sum(x: Any) -> Any:
    return jnp.sin(x).sum()


@pytest.fixture
def no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("tuned where a plan was known")

    monkeypatch.setattr(_tuner, "tune", fail)


def in_new_process(code: str) -> Any:
    """Returns the JSON that a program printed in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


# What happens how often.


def test_the_first_call_traces_once_and_later_ones_never() -> None:
    fun, traces = counted(row_sum)
    batched = autobatch(fun)
    for _ in range(3):
        np.testing.assert_allclose(batched(rows()), np.sin(rows()).sum(1), rtol=1e-6)
    assert len(traces) == 1


def test_every_signature_is_traced_once() -> None:
    fun, traces = counted(row_sum)
    batched = autobatch(fun)
    for _ in range(2):
        for count in (4, 5, 6):
            batched(rows(count))
    assert len(traces) == 3


def test_signatures_that_share_a_shape_are_traced_once_each_while_tuned() -> None:
    fun, traces = counted(lambda x, y: (x * y).sum())
    batched = autobatch(fun)
    for dtype in (np.float32, np.int32):
        batched(rows(dtype=dtype), rows(dtype=dtype))
    assert len(traces) == 2


@pytest.mark.usefixtures("exhaustive")
def test_tuning_compiles_each_candidate_once_and_the_winner_never_again(
    count_compiles: Callable[[], int],
) -> None:
    batched, x = autobatch(row_sum), rows()
    before = count_compiles()
    batched(x)
    measured = [each for each in batched.plan(x).outcomes if each.status == "measured"]
    assert count_compiles() - before == len(measured) == 5
    batched(x)
    assert count_compiles() - before == len(measured)


def test_a_second_process_traces_and_compiles_once_and_times_nothing() -> None:
    program = """
        import json, jax, numpy as np
        from autobatch import autobatch
        compiles, traces, runs = [], [], []
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: compiles.append(1)
            if event == "/jax/core/compile/backend_compile_duration" else None)

        def count(x):
            runs.append(1)
            return x

        @autobatch
        def fun(x):
            traces.append(1)
            y = jax.pure_callback(count, jax.ShapeDtypeStruct((), x.dtype), x.sum(),
                                  vmap_method="sequential")
            return y + 1

        x = np.ones((5, 3), np.float32)
        jax.block_until_ready(fun(x))
        counts = [len(traces), len(compiles), len(runs)]
        print(json.dumps({"counts": counts, "source": fun.plan(x).source}))
    """
    first, second = in_new_process(program), in_new_process(program)
    assert (first["source"], second["source"]) == ("tuned", "record")
    assert first["counts"][2] > 5
    assert second["counts"] == [1, 1, 5]


def test_a_plan_asked_for_first_costs_the_call_nothing(count_compiles: Callable[[], int]) -> None:
    fun, traces = counted(row_sum)
    batched, x = autobatch(fun), rows()
    batched.plan(x)
    before = count_compiles()
    batched(x)
    assert (len(traces), count_compiles() - before) == (1, 0)


def test_plan_does_not_run_a_function_whose_plan_is_known(no_tuning: None) -> None:
    runs: list[int] = []

    def count(x: Any) -> Any:
        runs.append(1)
        return x

    def fun(x: Any) -> Any:
        return jax.pure_callback(
            count, jax.ShapeDtypeStruct((), x.dtype), x, vmap_method="sequential"
        )

    assert autobatch(fun, strategy="map").plan(rows()[:, 0]).source == "forced"
    assert runs == []


def test_two_functions_of_the_same_program_tune_once() -> None:
    first, second = autobatch(lambda x: jnp.cos(x).sum()), autobatch(lambda y: jnp.cos(y).sum())
    first(rows())
    assert first.plan(rows()).key == second.plan(rows()).key
    assert [each(rows()).shape for each in (first, second)] == [(ROWS,)] * 2


def test_weak_strong_numpy_and_jax_arguments_share_one_tuning(monkeypatch: Any) -> None:
    tunings: list[int] = []
    tune = _tuner.tune

    def counting(*args: Any, **kwargs: Any) -> Any:
        tunings.append(1)
        return tune(*args, **kwargs)

    monkeypatch.setattr(_tuner, "tune", counting)
    batched = autobatch(lambda s, x: s * x, in_axes=(None, 0))
    for scalar in (2.0, np.float32(2), jnp.float32(2)):
        for x in (rows(), jnp.asarray(rows())):
            np.testing.assert_array_equal(batched(scalar, x), 2 * rows())
    assert len(tunings) == 1


def test_eight_threads_that_make_the_first_call_trace_once() -> None:
    fun, traces = counted(row_sum)
    batched, results = autobatch(fun), []
    barrier = threading.Barrier(8)

    def call() -> None:
        barrier.wait()
        results.append(np.asarray(batched(rows())))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(traces) == 1
    np.testing.assert_array_equal(np.stack(results), np.stack([results[0]] * 8))


# What is kept alive.


def test_no_argument_is_kept_alive() -> None:
    batched, x = autobatch(row_sum), jnp.asarray(rows())
    jax.block_until_ready(batched(x))
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


@pytest.mark.usefixtures("exhaustive")
def test_losers_die_and_the_function_with_its_last_reference(monkeypatch: Any) -> None:
    programs: list[weakref.ref[Program]] = []
    init = Program.__init__

    def remembering(self: Program, *args: Any, **kwargs: Any) -> None:
        programs.append(weakref.ref(self))
        init(self, *args, **kwargs)

    monkeypatch.setattr(Program, "__init__", remembering)
    fun = counted(row_sum)[0]
    batched, alive = autobatch(fun), weakref.ref(fun)
    jax.block_until_ready(batched(rows()))
    gc.collect()
    assert len(programs) >= 4
    assert sum(each() is not None for each in programs) == 1
    del batched, fun
    gc.collect()
    assert alive() is None
    assert all(each() is None for each in programs)


# What was chosen, and where it came from.


def test_plans_say_how_this_process_came_to_them(tmp_path: Path) -> None:
    x = rows()
    assert autobatch(row_sum, strategy="map").plan(x).source == "forced"
    assert autobatch(row_sum, tune="off").plan(x).source == "off"
    assert autobatch(row_sum, tune="cached", store=False).plan(x).source == "estimate"
    assert autobatch(row_sum).plan(rows(1)).source == "sole"
    assert autobatch(row_sum).plan(rows(0)).source == "sole"
    assert autobatch(row_sum, store=tmp_path).plan(x).source == "tuned"
    assert autobatch(row_sum, tune="cached", store=tmp_path).plan(x).source == "tuned"
    _recall._KNOWN.clear()
    assert autobatch(row_sum, tune="require", store=tmp_path).plan(x).source == "record"


@pytest.mark.parametrize("options", [{}, {"strategy": "chunked:4"}, {"tune": "off"}])
def test_every_plan_has_every_family(options: dict[str, Any]) -> None:
    outcomes = autobatch(row_sum, **options).plan(rows()).outcomes
    assert {each.strategy.family for each in outcomes} == {"vmap", "map", "chunked", "unrolled"}
    assert all(each.reason for each in outcomes)


def test_force_measures_once_per_signature_and_object() -> None:
    autobatch(row_sum)(rows())
    forced = autobatch(row_sum, tune="force")
    created = {forced.plan(rows()).key}
    assert forced.plan(rows()).source == "tuned"
    assert created == {forced.plan(rows()).key}


def test_tune_replaces_the_record(monkeypatch: Any) -> None:
    batched = autobatch(row_sum)
    assert batched.tune(rows()).source == "tuned"
    before = _recall._KNOWN[next(reversed(_recall._KNOWN))][0]
    batched.tune(rows())
    after = _recall._KNOWN[next(reversed(_recall._KNOWN))][0]
    assert before.key == after.key
    assert before is not after
    np.testing.assert_allclose(batched(rows()), np.sin(rows()).sum(1), rtol=1e-6)


def test_require_names_the_parts_that_differ() -> None:
    autobatch(row_sum)(rows(4))
    with pytest.raises(RecordMissError, match=r"arguments, batch_size.*tune='first-call'"):
        autobatch(row_sum, tune="require")(rows(5))


def test_another_budget_chooses_again_without_measuring(
    count_compiles: Callable[[], int], monkeypatch: Any
) -> None:
    x = rows()
    autobatch(row_sum, budget=Budget(expected_calls=1000))(x)
    monkeypatch.setattr(_tuner, "tune", None)
    before = count_compiles()
    autobatch(row_sum, budget=Budget(expected_calls=1))(x)
    assert count_compiles() - before == 1


def test_the_explained_table_has_a_row_for_every_outcome() -> None:
    batched = autobatch(row_sum, name="sums")
    lines = batched.explain(rows()).splitlines()
    assert lines[0].startswith("sums   6 rows")
    assert "total at 1,000 calls" in lines[1]
    assert sum(line.startswith(" > ") for line in lines) == 1
    for outcome in batched.plan(rows()).outcomes:
        assert any(str(outcome.strategy) in line for line in lines[2:])


def test_lower_returns_the_chosen_program() -> None:
    batched = autobatch(row_sum, strategy="map")
    assert "while" in batched.lower(rows()).as_text()
    assert "while" not in autobatch(row_sum, strategy="vmap").lower(rows()).as_text()


# Memory.


def fake_memory(monkeypatch: Any, free: int | None, *, growth: Any = None) -> None:
    def run(call: Callable[[], Any], device: Any) -> tuple[Any, int | None]:
        return call(), growth

    instruments = Instruments(
        device_memory=lambda device: DeviceMemory(free_bytes=free, total_bytes=free), growth=run
    )
    monkeypatch.setattr(_planner, "INSTRUMENTS", instruments)


def outer_sum(x: Any) -> Any:
    return jax.lax.sort(x[:, None] * x[None, :], dimension=0).sum()


def test_what_does_not_fit_is_never_compiled(monkeypatch: Any) -> None:
    x = rows(64, 64)
    batched = autobatch(outer_sum, budget=Budget(memory="200kB"))
    outcomes = {str(each.strategy): each for each in batched.plan(x).outcomes}
    assert outcomes["vmap"].status == "over-memory"
    assert outcomes["vmap"].compile_s is None
    assert str(batched.plan(x).strategy) != "vmap"
    expected = jax.jit(jax.vmap(outer_sum))(x)
    np.testing.assert_allclose(batched(x), expected, rtol=1e-4)


def test_nothing_fits_an_explicit_limit() -> None:
    with pytest.raises(
        NoViableStrategyError, match=r"`outer_sum` \(64 rows\) fits memory=977 KiB"
    ) as e:
        autobatch(outer_sum, budget=Budget(memory=1_000_000))(rows(64, 1024))
    assert ", map)" in str(e.value)


def test_nothing_fits_the_default_limit_and_the_smallest_is_used(monkeypatch: Any) -> None:
    fake_memory(monkeypatch, free=1000)
    batched = autobatch(outer_sum)
    with pytest.warns(AutobatchWarning, match="free memory"):
        result = batched(rows(20, 64))
    assert str(batched.plan(rows(20, 64)).strategy) == "map"
    np.testing.assert_allclose(result, jax.jit(jax.vmap(outer_sum))(rows(20, 64)), rtol=1e-4)


def test_a_device_that_says_nothing_of_its_memory_is_no_limit(monkeypatch: Any) -> None:
    fake_memory(monkeypatch, free=None)
    batched = autobatch(row_sum)
    assert batched.plan(rows()).source == "tuned"
    assert _recall._KNOWN
    with pytest.raises(ValueError, match="does not say how much memory it has"):
        autobatch(row_sum, budget=Budget(memory="50%"), store=False)(rows(7))


@pytest.mark.usefixtures("exhaustive")
def test_a_wider_limit_measures_only_what_was_barred(count_compiles: Callable[[], int]) -> None:
    x = rows(64, 64)
    narrow = autobatch(outer_sum, budget=Budget(memory="200kB"))
    barred = [each.strategy for each in narrow.plan(x).outcomes if each.status == "over-memory"]
    before = count_compiles()
    wide = autobatch(outer_sum, budget=Budget(memory="1GB"))
    outcomes = {each.strategy: each for each in wide.plan(x).outcomes}
    assert VMAP in barred
    assert outcomes[VMAP].status == "measured"
    assert not [each for each in outcomes.values() if each.status == "over-memory"]
    known = {each.strategy for each in narrow.plan(x).outcomes if each.status == "measured"}
    added = [each for each in outcomes if outcomes[each].status == "measured" and each not in known]
    assert count_compiles() - before == len(added) + 1  # and the reference they must agree with
    again = autobatch(outer_sum, budget=Budget(memory="1GB"))
    assert again.plan(x).outcomes == wide.plan(x).outcomes


# Inside other transformations.


@pytest.mark.parametrize("tuned_before", [False, True])
def test_calls_inside_transformations_keep_vmaps_meaning(tuned_before: bool) -> None:
    batched, plain = autobatch(row_sum), jax.vmap(row_sum)
    x = jnp.asarray(rows())
    if tuned_before:
        batched(x)
    for transformed in (
        lambda f: jax.jit(lambda x: f(x) + 1),
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: jax.jit(jax.value_and_grad(lambda x: f(x).sum())),
        lambda f: jax.vmap(lambda y: f(x + y[None])),
        lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(c)), x, None, length=2),
        lambda f: lambda x: jax.eval_shape(f, x).shape,
    ):
        got, expected = transformed(batched)(x), transformed(plain)(x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)


def test_an_estimate_made_inside_a_trace_serves_no_concrete_call() -> None:
    batched, x = autobatch(row_sum), jnp.asarray(rows())
    jax.jit(batched)(x)
    sources: list[str] = []
    jax.jit(lambda x: sources.append(batched.plan(x).source))(x)
    assert sources == ["synthetic"]
    batched(x)
    assert batched.plan(x).source == "tuned"


def test_stand_ins_are_not_measured_where_values_decide(no_tuning: None) -> None:
    def fun(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x + 1, x)

    jax.jit(autobatch(fun))(rows())


def test_tune_inside_a_trace_is_an_error() -> None:
    batched = autobatch(row_sum)
    with pytest.raises(TypeError, match="concrete arrays"):
        jax.jit(lambda x: batched.tune(x) and x)(rows())


def test_a_loop_of_eager_gradients_does_not_trace_again() -> None:
    fun, traces = counted(row_sum)
    batched, x = autobatch(fun), jnp.asarray(rows())
    for _ in range(3):
        jax.grad(lambda x: batched(x).sum())(x)
    assert len(traces) == 1


# Contexts, names, misuse.


def test_x64_has_plans_of_its_own() -> None:
    fun, traces = counted(row_sum)
    batched, x = autobatch(fun), rows(dtype=np.float64)
    for _ in range(2):
        assert batched(x).dtype == jnp.float32
        with jax.enable_x64(True):
            assert batched(x).dtype == jnp.float64
    assert len(traces) <= 3


def test_effects_happen_only_as_often_as_called() -> None:
    seen: list[int] = []

    def fun(x: Any) -> Any:
        jax.debug.callback(lambda _: seen.append(1), x)
        return x + 1

    batched = autobatch(fun)
    jax.block_until_ready(batched(rows()[:, 0]))
    jax.effects_barrier()
    assert len(seen) == ROWS
    assert batched.plan(rows()[:, 0]).source == "estimate"


def test_name_signature_and_documentation_are_the_functions() -> None:
    @autobatch
    def documented(x: float, *, scale: float = 1.0) -> float:
        """Says what it does."""
        return x * scale

    assert documented.__name__ == "documented"
    assert documented.__doc__ == "Says what it does."
    assert list(inspect.signature(documented).parameters) == ["x", "scale"]
    assert repr(documented) == "<autobatch of documented>"
    assert callable(documented.__wrapped__)


def test_a_name_keeps_records_apart() -> None:
    keys = {autobatch(row_sum, name=name).plan(rows()).key for name in (None, "day", "night")}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "vmapped"}, "'chunked:K'"),
        ({"strategy": "chunked:0"}, "at least 1 row"),
        ({"tune": "always"}, "first-call, cached, require, force, off"),
        ({"budget": 3}, r"autobatch\.Budget"),
    ],
)
def test_bad_options_are_value_errors_that_name_what_is_allowed(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        autobatch(row_sum, **options)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("AUTOBATCH_TUNE", "sometimes", "AUTOBATCH_TUNE.*first-call"),
        ("AUTOBATCH_MEMORY", "plenty", "AUTOBATCH_MEMORY.*'2GiB'"),
    ],
)
def test_bad_environment_values_are_value_errors(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    batched = autobatch(row_sum)
    with pytest.raises(ValueError, match=message):
        batched(rows())


def test_the_environment_gives_way_to_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBATCH_TUNE", "off")
    monkeypatch.setenv("AUTOBATCH_MEMORY", "1kB")
    assert autobatch(row_sum).plan(rows()).source == "off"
    batched = autobatch(row_sum, tune="first-call", budget=Budget(memory="1GB"))
    assert batched.plan(rows()).source == "tuned"


def test_the_environments_memory_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBATCH_MEMORY", "100")
    with pytest.raises(NoViableStrategyError):
        autobatch(row_sum)(rows(30))


@pytest.mark.parametrize(
    "call",
    [
        lambda wrap: wrap(row_sum)(),
        lambda wrap: wrap(row_sum)(1.0),
        lambda wrap: wrap(row_sum, (0, 0))(rows()),
        lambda wrap: wrap(lambda x, y: x, 0)(rows(3), rows(4)),
        lambda wrap: wrap(row_sum, in_axes=None)(rows()),
        lambda wrap: wrap(row_sum, in_axes={"a": 0}),
        lambda wrap: wrap(row_sum, 0, 5)(rows()),
        lambda wrap: wrap(lambda x: x, 0, None)(rows()),
        lambda wrap: wrap(row_sum, 7)(rows()),
    ],
)
def test_misuse_raises_what_vmap_raises_before_any_tuning(
    call: Callable[[Any], Any], count_compiles: Callable[[], int]
) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whichever vmap has
        call(jax.vmap)
    before = count_compiles()
    with pytest.raises(expected.type):
        call(autobatch)
    assert count_compiles() == before


def test_axes_of_kwargs_trees_and_outputs_are_vmaps() -> None:
    def fun(tree: Any, y: Any, *, z: Any) -> Any:
        return {"a": tree["w"] * y, "b": (z, tree["b"])}

    tree, y, z = {"w": rows(3, 2), "b": rows(ROWS, 2)}, rows(2, ROWS), rows(ROWS, 4)
    axes = (({"w": None, "b": 0}, 1), {"a": 1, "b": (0, -1)})
    got = autobatch(lambda t, y, *, z: {**fun(t, y[:, None].T[0], z=z)}, *axes)
    want = jax.vmap(lambda t, y, *, z: {**fun(t, y[:, None].T[0], z=z)}, *axes)
    with jax.numpy_rank_promotion("allow"):
        jax.tree.map(np.testing.assert_array_equal, got(tree, y, z=z), want(tree, y, z=z))


# Batches of changing size


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that are tuned."""
    sizes: list[int] = []
    tune = _tuner.tune

    def counting(job: Any, *rest: Any, **options: Any) -> Any:
        sizes.append(job.workload.batch_size)
        return tune(job, *rest, **options)

    monkeypatch.setattr(_tuner, "tune", counting)
    return sizes


def test_from_the_fifth_size_on_the_nearest_plan_serves(
    tunings: list[int], count_compiles: Callable[[], int]
) -> None:
    batched = autobatch(row_sum)
    for size in (2, 3, 8, 64):
        batched(rows(size))
    assert tunings == [2, 3, 8, 64]
    expected = {size: jax.vmap(row_sum)(rows(size)) for size in (4, 30, 100)}
    before = count_compiles()
    for size in (4, 30, 100, 30, 100):
        np.testing.assert_allclose(batched(rows(size)), expected[size], rtol=1e-5)
    assert tunings == [2, 3, 8, 64]
    assert count_compiles() - before == 3
    plan = batched.plan(rows(30))
    assert (plan.source, str(plan.strategy)) == ("nearest", str(batched.plan(rows(64)).strategy))
    assert {each.run_s for each in plan.outcomes} == {None}
    assert "as with 64 rows" in batched.explain(rows(30))


def test_other_functions_and_rows_have_four_sizes_of_their_own(tunings: list[int]) -> None:
    for size in (2, 3, 8, 64):
        autobatch(row_sum)(rows(size))
    autobatch(row_sum)(rows(5, 7))
    autobatch(outer_sum)(rows(5))
    assert tunings == [2, 3, 8, 64, 5, 5]
    autobatch(lambda x: row_sum(x))(rows(5))  # the same program
    assert tunings == [2, 3, 8, 64, 5, 5]


def test_tuning_is_still_to_be_had_for_every_size(tunings: list[int]) -> None:
    batched = autobatch(row_sum)
    for size in (2, 3, 8, 64):
        batched(rows(size))
    assert batched.plan(rows(5)).source == "nearest"
    assert batched.tune(rows(5)).source == "tuned"
    assert batched.plan(rows(5)).source == "tuned"
    assert autobatch(row_sum, tune="force").plan(rows(6)).source == "tuned"


def test_a_stored_record_of_another_size_serves_where_nothing_is_measured() -> None:
    autobatch(row_sum)(rows(64))
    _recall._KNOWN.clear()
    cached = autobatch(row_sum, tune="cached")
    assert cached.plan(rows(50)).source == "nearest"
    assert cached.plan(rows(50, 9)).source == "estimate"
    with pytest.raises(RecordMissError, match="differs in arguments, batch_size"):
        autobatch(row_sum, tune="require").plan(rows(50))


def test_inside_a_trace_the_nearest_record_comes_before_stand_ins(tunings: list[int]) -> None:
    batched, sources = autobatch(row_sum), list[str]()
    batched(rows(64))
    jax.jit(lambda x: sources.append(batched.plan(x).source))(rows(50))
    assert sources == ["nearest"]
    assert batched.plan(rows(50)).source == "tuned"  # which keeps nothing from being measured
    assert tunings == [64, 50]


@pytest.mark.usefixtures("exhaustive")
def test_a_plan_of_the_nearest_size_must_fit_in_memory(tunings: list[int]) -> None:
    batched = autobatch(outer_sum, budget=Budget(memory="32MB"))
    for size in (2, 3, 4, 8):
        batched(rows(size, 64))
    assert len(tunings) == 4
    x = rows(4000, 64)  # of which vmap needs 64 MB
    plan = batched.plan(x)
    assert plan.source == "nearest"
    assert plan.strategy.family in ("map", "chunked")
    memory = batched.lower(x).compile().memory_analysis()
    needs = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert needs <= 32_000_000


@pytest.mark.usefixtures("exhaustive")
def test_a_record_that_comes_after_an_estimate_serves_too() -> None:
    cached = autobatch(row_sum, tune="cached")
    x = rows(8)
    cached(x)
    assert cached.plan(x).source == "estimate"
    record = autobatch(row_sum)
    record.tune(x)
    ((folder, key), (found, _)) = next(iter(_recall._KNOWN.items()))
    slow_vmap = tuple(
        replace(each, run_s=1e3 if each.strategy == VMAP else 1e-9, compile_s=0.0)
        for each in found.outcomes
        if str(each.strategy) in ("vmap", "map")
    )
    _recall._KNOWN[folder, key] = (replace(found, outcomes=slow_vmap), "record")
    assert cached.plan(x).source == "record"
    assert str(cached.plan(x).strategy) == "map"
    assert "while" in cached.lower(x).as_text()
    np.testing.assert_allclose(cached(x), jax.vmap(row_sum)(x), rtol=1e-5)


def test_twenty_fresh_functions_of_one_program_are_tuned_once(tunings: list[int]) -> None:
    alive: list[weakref.ref[Any]] = []
    for _ in range(20):
        fun = lambda x: jnp.cos(x).sum()  # noqa: E731
        batched = autobatch(fun)
        jax.block_until_ready(batched(rows()))
        alive.append(weakref.ref(fun))
        del fun, batched
    assert tunings == [len(rows())]
    gc.collect()
    assert [each() for each in alive] == [None] * 20
