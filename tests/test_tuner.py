"""Whole tunings: what is tried, what is left out and why, and what is never run."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autobatch import (
    AutobatchWarning,
    Budget,
    Plan,
    _api,
    _derivative,
    _dispatch,
    _measure,
    _memory,
    _planner,
    _recall,
    _tuner,
    autobatch,
)
from autobatch._choose import Decision
from autobatch._instruments import Instruments
from autobatch._mapping import mapped
from autobatch._measure import Trial
from autobatch._memory import DeviceMemory
from autobatch._record import Outcome
from autobatch._strategies import MAP, VMAP, rows_at_once
from autobatch._units import format_bytes


def rows(count: int = 8, width: int = 4) -> np.ndarray[Any, Any]:
    return np.arange(count * width, dtype=np.float32).reshape(count, width)


def fun(x: Any) -> Any:
    return jnp.sin(x).sum()


def outcomes(plan: Plan) -> dict[str, Outcome]:
    return {str(each.strategy): each for each in plan.outcomes}


def use(monkeypatch: pytest.MonkeyPatch, **instruments: Any) -> None:
    monkeypatch.setattr(_planner, "INSTRUMENTS", Instruments(**instruments))


def failing(error: BaseException, *strategies: Any) -> Callable[..., Any]:
    """Returns a compile step that raises for these strategies."""
    compile_ = _measure.compile_

    def compile_or_fail(trial: Trial, instruments: Instruments) -> None:
        if trial.strategy in strategies:
            raise error
        compile_(trial, instruments)

    return compile_or_fail


@pytest.mark.usefixtures("exhaustive")
def test_vmap_is_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    compile_ = _measure.compile_

    def noting(trial: Trial, instruments: Instruments) -> None:
        order.append(str(trial.strategy))
        compile_(trial, instruments)

    monkeypatch.setattr(_measure, "compile_", noting)
    autobatch(fun)(rows())
    assert order == ["vmap", "chunked:4", "chunked:2", "map", "unrolled"]


@pytest.mark.usefixtures("exhaustive")
def test_every_measured_outcome_is_whole() -> None:
    plan = autobatch(fun).plan(rows())
    for outcome in plan.outcomes:
        assert outcome.status == "measured"
        assert outcome.compile_s is not None
        assert outcome.run_s is not None
        assert outcome.run_mad_s is not None
        assert outcome.samples is not None
        assert outcome.samples >= 2
        assert outcome.peak_bytes is not None
        assert outcome.peak_bytes >= rows().nbytes
        assert outcome.peak_source in ("measured", "xla")


@pytest.mark.usefixtures("exhaustive")
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("no such instruction"), "failed"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"), "out-of-memory"),
        (RuntimeError("INTERNAL: buffer allocation failed"), "out-of-memory"),
        (MemoryError(), "out-of-memory"),
    ],
)
def test_a_failing_candidate_stops_nobody(
    error: Exception, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_measure, "compile_", failing(error, VMAP))
    batched = autobatch(fun)
    np.testing.assert_allclose(batched(rows()), np.sin(rows()).sum(1), rtol=1e-5)
    vmap = outcomes(batched.plan(rows()))["vmap"]
    assert vmap.status == status
    assert type(error).__name__ in str(vmap.reason)
    assert (vmap.run_s, vmap.peak_bytes) == (None, None)
    assert str(batched.plan(rows()).strategy) != "vmap"


def test_if_all_fail_the_user_gets_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(_measure, "compile_", fail)
    batched = autobatch(fun)
    np.testing.assert_allclose(batched(rows()), np.sin(rows()).sum(1), rtol=1e-5)
    assert str(batched.plan(rows()).strategy) == "vmap"


@pytest.mark.usefixtures("exhaustive")
def test_a_wrong_result_never_wins_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_map(strategy: Any, workload: Any, leaves: Any) -> Any:
        right = mapped(strategy, workload, leaves)
        return [each + 1 for each in right] if strategy == MAP else right

    monkeypatch.setattr(_derivative, "mapped", wrong_map)
    batched = autobatch(fun)
    with pytest.warns(UserWarning, match="autobatch: .*map gives a wrong result"):
        batched(rows())
    assert outcomes(batched.plan(rows()))["map"].status == "wrong-result"


@pytest.mark.usefixtures("exhaustive")
def test_no_time_leaves_the_rest_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def growth(run: Callable[[], Any], device: Any) -> tuple[Any, None]:
        now[0] += 100.0
        return run(), None

    use(monkeypatch, clock=lambda: now[0], growth=growth)
    plan = autobatch(fun, budget=Budget(tuning_s=60)).plan(rows())
    found = outcomes(plan)
    assert found["vmap"].status == "measured"
    assert {each.status for name, each in found.items() if name != "vmap"} == {"out-of-time"}
    assert str(plan.strategy) == "vmap"


@pytest.mark.usefixtures("exhaustive")
def test_more_time_resumes_what_was_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    first = autobatch(fun, budget=Budget(tuning_s=0)).plan(rows())
    assert outcomes(first)["map"].status == "out-of-time"
    wider = autobatch(fun, budget=Budget(tuning_s=30)).plan(rows())
    assert {each.status for each in wider.outcomes} == {"measured"}


def test_growth_beyond_the_limit_stops_larger_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    first_run = _measure.first_run

    def noting(trial: Trial, *rest: Any) -> Any:
        ran.append(str(trial.strategy))
        return first_run(trial, *rest)

    monkeypatch.setattr(_measure, "first_run", noting)
    x = rows(100, 1000)  # sorting holds more than the bound of the whole batch allows
    budget = Budget(memory=int(1.2 * x.nbytes))
    plan = autobatch(lambda x: jnp.sort(x).sum(), budget=budget).plan(x)
    assert ran
    assert "vmap" not in ran
    assert outcomes(plan)["vmap"].status == "over-memory"
    assert "not run" in str(outcomes(plan)["vmap"].reason)


def test_a_tuning_keeps_to_its_own_limit_between_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []
    reliefs: list[int | None] = []

    def relief(_: Any, limit_bytes: int | None) -> Callable[[], None]:
        limits.append(limit_bytes)
        return lambda: reliefs.append(limit_bytes)

    monkeypatch.setattr(_memory, "Relief", relief)
    autobatch(fun, budget=Budget(memory=10**9)).plan(rows())
    assert limits == [10**9]
    assert reliefs
    assert set(reliefs) == {10**9}


def told(x: Any) -> Any:
    return jax.pure_callback(lambda x: x, x, x, vmap_method="sequential").sum()


@pytest.mark.parametrize(("fun", "more"), [(fun, 1), (told, 0)])
@pytest.mark.usefixtures("exhaustive")
def test_the_first_candidate_is_looked_at_twice_if_that_runs_no_callback(
    fun: Callable[..., Any], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []

    def growth(run: Callable[[], Any], _: Any) -> tuple[Any, int]:
        looks.append(None)
        return run(), 12 * 1024**2

    use(monkeypatch, growth=growth, planned=lambda _: 0)
    statuses = [each.status for each in autobatch(fun).plan(rows()).outcomes]
    assert statuses.count("measured") > 2
    assert len(looks) == statuses.count("measured") + more


@pytest.mark.parametrize("growth", [9_000, 900_000])  # less than a mebibyte says nothing
def test_what_small_chunks_needed_corrects_a_bound_that_is_too_high(
    growth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fused(x: Any) -> Any:  # twenty values alive in the jaxpr, none in the fused program
        parts = [jnp.sin(x + i) for i in range(20)]
        return sum(parts[1:], parts[0]).sum()

    x = rows(128, 1024)
    use(monkeypatch, growth=lambda run, _: (run(), growth), planned=lambda _: 9_000)
    plan = autobatch(fused, budget=Budget(memory=2 * x.nbytes)).plan(x)
    assert outcomes(plan)["vmap"].status == "measured"
    assert (outcomes(plan)["vmap"].predicted_bytes or 0) > 2 * x.nbytes


@pytest.mark.usefixtures("exhaustive")
def test_figures_of_a_device_that_has_none_stay_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    use(
        monkeypatch,
        growth=lambda run, _: (run(), None),
        planned=lambda _: None,
        device_memory=lambda _: DeviceMemory(free_bytes=None, total_bytes=None),
    )
    plan = autobatch(fun).plan(rows())
    assert {each.peak_bytes for each in plan.outcomes} == {None}
    assert {each.peak_source for each in plan.outcomes} == {None}
    assert "-" in autobatch(fun).explain(rows())


@pytest.mark.usefixtures("exhaustive")
def test_control_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_measure, "compile_", failing(KeyboardInterrupt(), MAP))
        with pytest.raises(KeyboardInterrupt):
            autobatch(fun)(rows())
    ((record, _),) = _recall._KNOWN.values()
    found = {str(each.strategy): each for each in record.outcomes}
    for strategy in ("vmap", "chunked:4", "chunked:2"):
        assert found[strategy].status == "measured"
        assert found[strategy].run_s is not None
    assert (found["map"].status, found["map"].reason) == ("out-of-time", "interrupted")
    assert found["unrolled"].status in ("out-of-time", "not-worth")
    resumed = outcomes(autobatch(fun).plan(rows()))
    assert {each.status for each in resumed.values()} == {"measured"}
    for strategy in ("chunked:4", "chunked:2"):
        assert resumed[strategy].run_s is not None


@pytest.mark.usefixtures("exhaustive")
def test_a_pure_callback_is_called_few_times() -> None:
    calls: list[int] = []

    def count(x: Any) -> Any:
        calls.append(1)
        return x

    def called(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(count, shape, x, vmap_method="expand_dims")

    batched, x = autobatch(called), rows(2, 1)
    batched.plan(x)
    candidates = sum(each.status == "measured" for each in batched.plan(x).outcomes)
    runs = 2 + _measure.ROUNDS_LEAST
    assert len(calls) <= (candidates + 1) * runs * len(x)
    calls.clear()
    jax.make_jaxpr(lambda x: autobatch(called, store=False)(x + 1))(x)
    assert calls == []


@pytest.mark.parametrize("mode", ["require", "cached", "force", "first-call"])
def test_tune_measures_in_every_mode(mode: Any) -> None:
    assert autobatch(fun, tune=mode).tune(rows()).source == "tuned"


def test_a_call_inside_a_trace_does_not_use_up_a_forced_tuning() -> None:
    autobatch(fun)(rows())
    _recall._KNOWN.clear()
    forced = autobatch(fun, tune="force")
    jax.make_jaxpr(lambda x: forced(x))(rows())
    assert forced.plan(rows()).source == "tuned"


def test_donating_functions_are_tuned_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = [VMAP, MAP]
    monkeypatch.setattr(_planner, "decide", lambda *_: Decision(strategy=choice[0]))
    batched = autobatch(jnp.sin, donate_argnums=0)
    batched.plan(jnp.asarray(rows()))
    choice.pop(0)
    assert str(batched.tune(jnp.asarray(rows())).strategy) == "map"
    assert "while" in batched.lower(jnp.asarray(rows())).as_text()


def test_every_tuning_says_one_line_and_a_long_one_warns_before(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "autobatch"):
        autobatch(fun, name="short")(rows())
    assert [each.levelname for each in caplog.records] == ["INFO"]
    assert "tuned `short` (8 rows" in caplog.text
    caplog.clear()
    monkeypatch.setattr(_tuner, "LONG_S", 0.0)
    with caplog.at_level(logging.INFO, "autobatch"):
        autobatch(fun, name="long")(rows())
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]
    assert "tuning `long` (8 rows) may take" in caplog.text


def test_arguments_are_not_touched() -> None:
    x = jnp.asarray(rows())
    before = np.array(x)
    autobatch(fun)(x)
    np.testing.assert_array_equal(x, before)
    assert not x.is_deleted()


@pytest.mark.usefixtures("exhaustive")
def test_tunings_of_one_process_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    inside, most = [0], [0]
    first_run = _measure.first_run

    def watching(*args: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        outputs = first_run(*args)
        inside[0] -= 1
        return outputs

    monkeypatch.setattr(_measure, "first_run", watching)
    threads = [
        threading.Thread(target=autobatch(lambda x, i=i: fun(x) + i), args=(rows(),))
        for i in range(3)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most[0] == 1


def test_the_results_of_the_first_and_second_call_are_equal() -> None:
    batched = autobatch(lambda x: jax.nn.softmax(x) @ x)
    first, second = batched(rows()), batched(rows())
    np.testing.assert_array_equal(first, second)


# Noise


@pytest.mark.usefixtures("exhaustive")
def test_among_equal_candidates_the_default_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    # So that no round is cut short, and all runs are alike.
    use(monkeypatch, clock=lambda: 0.0, load=lambda: None)

    def compile_(trial: Trial, instruments: Instruments) -> None:
        trial.compile_s = 0.1

    def first_run(trial: Trial, *rest: Any) -> Any:
        trial.first_run_s = 1e-3
        return np.zeros(8, np.float32)

    monkeypatch.setattr(_measure, "compile_", compile_)
    monkeypatch.setattr(_measure, "first_run", first_run)
    monkeypatch.setattr(_measure, "_sample", lambda *_: 1e-3 * np.exp(abs(rng.gauss(0, 0.1))))
    budget = Budget(expected_calls=10**6)
    plans = [autobatch(fun, store=False, budget=budget).tune(rows()) for _ in range(100)]
    assert {len(each.outcomes) for each in plans} == {5}
    assert [str(each.strategy) for each in plans] == ["vmap"] * 100


def test_a_cached_compile_is_marked_and_not_taken_for_a_cheap_one(tmp_path: Path) -> None:
    program = """
        import json
        import jax, numpy as np
        from autobatch import autobatch
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        batched = autobatch(lambda x: jax.numpy.linalg.qr(x)[0], store=False)
        (first, *_) = batched.plan(np.eye(4, dtype=np.float32)[None].repeat(3, 0)).outcomes
        text = batched.explain(np.eye(4, dtype=np.float32)[None].repeat(3, 0))
        print(json.dumps([first.compile_s, first.compile_is_cached, text]))
    """
    environment = {
        **os.environ,
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
    }

    def run() -> tuple[float, bool, str]:
        command = [sys.executable, "-c", textwrap.dedent(program)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    cold_s, cold_is_cached, cold_text = run()
    warm_s, warm_is_cached, warm_text = run()
    assert (cold_is_cached, warm_is_cached) == (False, True)
    assert warm_s > 0.3 * cold_s
    assert "compilation cache" not in cold_text
    assert "c out of JAX's compilation cache" in warm_text


# Out of memory at a call


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes candidates need memory as they work on rows at once, and `vmap` the plan."""
    first_run = _measure.first_run

    def measured(trial: Trial, *rest: Any) -> Any:
        outputs = first_run(trial, *rest)
        trial.planned_bytes, trial.growth_bytes = 0, 10**7 * rows_at_once(trial.strategy, 8)
        return outputs

    monkeypatch.setattr(_measure, "first_run", measured)
    monkeypatch.setattr(_measure, "_sample", lambda trial, *_: 1.0 / trial.growth_bytes)


def run_out(batched: Any) -> None:
    """Makes the next call run out of memory, as a jit object would."""

    def serve(*_: Any, **__: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")

    batched._dispatcher.serve = serve


@pytest.mark.usefixtures("exhaustive", "growing")
def test_a_call_out_of_memory_goes_on_with_the_next_smaller_plan() -> None:
    batched, x = autobatch(fun, budget=Budget(expected_calls=10**9)), rows()
    expected = np.asarray(batched(x))
    assert str(batched.plan(x).strategy) == "vmap"
    run_out(batched)
    with pytest.warns(AutobatchWarning, match="autobatch: .*ran out of memory mapped with vmap"):
        np.testing.assert_allclose(batched(x), expected, rtol=1e-5)
    assert str(batched.plan(x).strategy) == "chunked:4"
    assert outcomes(batched.plan(x))["vmap"].status == "out-of-memory"
    assert "ran out of memory when it was called" in batched.explain(x)
    np.testing.assert_allclose(batched(x), expected, rtol=1e-5)
    # The process remembers it for every object, and does not store it.
    assert str(autobatch(fun, budget=Budget(expected_calls=10**9)).plan(x).strategy) == "chunked:4"
    _recall._KNOWN.clear()
    assert str(autobatch(fun, budget=Budget(expected_calls=10**9)).plan(x).strategy) == "vmap"


@pytest.mark.usefixtures("exhaustive", "growing")
def test_with_nothing_smaller_the_error_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    batched, x = autobatch(fun), rows()
    monkeypatch.setattr(_planner, "decide", lambda *_: Decision(strategy=MAP))
    batched(x)
    for serves in (batched, autobatch(fun, strategy="vmap"), autobatch(fun, tune="off")):
        serves(x)
        run_out(serves)
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            serves(x)


def test_other_errors_of_a_call_are_the_users() -> None:
    batched, x = autobatch(fun), rows()
    batched(x)

    def serve(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a device was lost")

    batched._dispatcher.serve = serve
    with pytest.raises(RuntimeError, match="a device was lost"):
        batched(x)


# Accelerators


class FakeGpu:
    """A device with an allocator that states 10 MB, 2 MB of them in use; the CPU does its work."""

    platform, device_kind, id, process_index = "gpu", "Fake 1000", 0, 0

    def memory_stats(self) -> dict[str, int]:
        return {
            "bytes_limit": 10_000_000,
            "bytes_in_use": 2_000_000,
            "peak_bytes_in_use": 9_000_000,
        }


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeGpu()
    for module in (_dispatch, _api):
        monkeypatch.setattr(module, "device_of", lambda _: device)
    monkeypatch.setattr(jax, "device_count", lambda _: 1)


@pytest.mark.usefixtures("exhaustive", "fake_gpu")
def test_a_device_with_an_allocator_is_tuned_on_its_own_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []
    first_run = _measure.first_run

    def noting(trial: Trial, *rest: Any) -> Any:
        ran.append(str(trial.strategy))
        return first_run(trial, *rest)

    monkeypatch.setattr(_measure, "first_run", noting)
    batched = autobatch(lambda x: jnp.sort(jnp.outer(x, x).ravel())[::2].sum())
    x = rows(64, 256)  # whose products are 16 MiB together
    plan = batched.plan(x)
    found = outcomes(plan)
    assert found["vmap"].status == "over-memory"
    assert "vmap" not in ran
    limit = 0.9 * (8_000_000 + x.nbytes)
    assert f"of {format_bytes(int(limit))}" in str(found["vmap"].reason)
    measured = [each for each in plan.outcomes if each.status == "measured"]
    assert measured
    assert {each.peak_source for each in measured} == {"xla"}  # the peak did not rise
    assert all((each.peak_bytes or 0) <= limit for each in measured)
    assert "gpu Fake 1000" in batched.explain(x)
    ((record, _),) = _recall._KNOWN.values()
    assert record.load is None  # what keeps the host's cores busy does not slow a GPU


@pytest.mark.usefixtures("exhaustive", "fake_gpu")
def test_on_a_device_its_plan_corrects_a_bound_that_is_too_high(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fused(x: Any) -> Any:  # twenty values alive in the jaxpr, none in the fused program
        parts = [jnp.sin(x + i) for i in range(20)]
        return sum(parts[1:], parts[0]).sum()

    use(monkeypatch, planned=lambda _: 9_000)
    plan = autobatch(fused).plan(rows(128, 1024))
    vmap = outcomes(plan)["vmap"]
    assert vmap.status == "measured"
    assert (vmap.predicted_bytes or 0) > 10_000_000
