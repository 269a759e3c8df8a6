"""Many processes on one store: one of them tunes, the others use its record."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from records import make_record

from autobatch import (
    AutobatchWarning,
    Budget,
    _device_lock,
    _lease,
    _measure,
    _planner,
    _tuner,
    autobatch,
)
from autobatch._device_lock import DeviceLock
from autobatch._digest import digest
from autobatch._instruments import Instruments
from autobatch._key import device_parts
from autobatch._lease import Holder, this_process, to_text
from autobatch._planner import Planner
from autobatch._record import Outcome, Record
from autobatch._store import Store, open_store

# What each child does before it is told to go on, and how it does it.
CHILD = """
import json, os, sys, time, warnings
import jax, jax.numpy as jnp, numpy as np
from autobatch import _measure, _tuner, autobatch

warnings.simplefilter("error", UserWarning)
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def say(word):
    os.write(file, f"{os.getpid()} {word}\\n".encode())

def told(function, before, after):
    def telling(*args, **options):
        say(before)
        try:
            return function(*args, **options)
        finally:
            say(after)
    return telling

def fun(x):
    return jnp.tanh(x @ x).sum()

x = np.linspace(0, 1, 6 * 9 * 9, dtype=np.float32).reshape(6, 9, 9)

def wait():
    print("ready", flush=True)
    sys.stdin.readline()
"""


def fun(x: Any) -> Any:
    return jnp.tanh(x @ x).sum()


def rows() -> np.ndarray[Any, Any]:
    return np.linspace(0, 1, 6 * 9 * 9, dtype=np.float32).reshape(6, 9, 9)


def expected() -> np.ndarray[Any, Any]:
    return np.asarray(jax.jit(jax.vmap(fun))(rows()))


@contextmanager
def children(code: str, notes: Path, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts processes that wait until they are sent a line."""
    with ExitStack() as stack:
        command = [sys.executable, "-c", CHILD + textwrap.dedent(code), str(notes)]
        yield [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(count)
        ]


def go(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Lets them all go on at once, and returns what each has printed in the end."""
    for each in processes:
        assert each.stdout is not None
        line = each.stdout.readline()
        assert line == "ready\n", each.communicate()[1]
    for each in processes:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    found: list[dict[str, Any]] = []
    for each in processes:
        output, errors = each.communicate()
        assert each.returncode == 0, errors
        found.append(json.loads(output))
    return found


def store_in(folder: Path) -> Store:
    store = open_store(folder)
    assert store is not None
    return store


@pytest.fixture
def store(store_folder: Path) -> Store:
    return store_in(store_folder)


@pytest.fixture
def key() -> str:
    """The key of the workload that is tuned here."""
    return autobatch(fun, tune="cached").plan(rows()).key


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """What another machine found out about the workload."""
    autobatch(fun, store=tmp_path / "other")(rows())
    (found,) = store_in(tmp_path / "other").records()
    return found


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the tunings of this process from now on."""
    keys: list[str] = []
    tune = _tuner.tune

    def noting(job: Any, *rest: Any, **options: Any) -> Any:
        keys.append(job.key)
        return tune(job, *rest, **options)

    monkeypatch.setattr(_tuner, "tune", noting)
    return keys


class Pauses(list[float]):
    """The waits so far; they only move the clock, and call what a test wants to happen."""

    def __init__(self) -> None:
        self.then: Callable[[int], None] = lambda count: None

    def sleep(self, seconds: float) -> None:
        self.append(seconds)
        self.then(len(self))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    waits = Pauses()
    clock = SimpleNamespace(time=time.time, monotonic=lambda: sum(waits), sleep=waits.sleep)
    monkeypatch.setattr(_lease, "time", clock)
    return waits


def plant(store: Store, key: str, holder: Holder | None) -> None:
    text = None if holder is None else to_text(holder)
    assert store.change_lease(key, lambda _: text, create=True)


def elsewhere() -> Holder:
    """Returns a holder on another machine whose lease has just been renewed."""
    return replace(this_process(), host="elsewhere", boot="another")


# Together


def test_eight_cold_processes_tune_once(store: Store, tmp_path: Path) -> None:
    code = """
    _tuner.tune = told(_tuner.tune, "tunes", "tuned")
    batched = autobatch(fun)
    wait()
    found = np.asarray(batched(x)).tolist()
    print(json.dumps({"found": found, "source": batched.plan(x).source}))
    """
    notes = tmp_path / "notes"
    with children(code, notes, 8) as processes:
        results = go(processes)
    for each in results:
        np.testing.assert_allclose(each["found"], expected(), rtol=1e-5)
    tuned = [line for line in notes.read_text().splitlines() if line.endswith("tunes")]
    assert 1 <= len(tuned) <= 2
    sources = sorted(each["source"] for each in results)
    assert sources == ["record"] * (8 - len(tuned)) + ["tuned"] * len(tuned)
    assert len(store.records()) == 1


def test_runs_of_two_processes_never_overlap(store: Store, tmp_path: Path) -> None:
    code = """
    for name in ("first_run", "glance", "time_rounds"):
        setattr(_measure, name, told(getattr(_measure, name), "begins", "ends"))
    # Another program in each process.
    batched = autobatch(lambda x: fun(x) + os.getpid(), name=str(os.getpid()))
    x = np.ones((64, 200, 200), np.float32)
    wait()
    batched(x)
    print("{}")
    """
    notes = tmp_path / "notes"
    with children(code, notes, 2) as processes:
        go(processes)
        pids = {str(each.pid) for each in processes}
    lines = [each.split() for each in notes.read_text().splitlines()]
    assert {pid for pid, _ in lines} == pids
    begun = lines[::2]
    ended = lines[1::2]
    assert {word for _, word in begun} == {"begins"}
    assert ended == [[pid, "ends"] for pid, _ in begun]
    assert len(store.records()) == 2


def test_after_one_was_killed_the_next_tunes(
    store: Store, tmp_path: Path, pauses: Pauses, tunings: list[str]
) -> None:
    code = """
    def stuck(*_, **__):
        print("running", flush=True)
        time.sleep(600)

    _measure.first_run = stuck
    autobatch(fun)(x)
    """
    with children(code, tmp_path / "notes", 1) as (process,):
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        assert store.records() == []
        process.kill()
        process.wait()
        batched = autobatch(fun)
        np.testing.assert_allclose(batched(rows()), expected(), rtol=1e-5)
    assert pauses == []
    assert tunings == [batched.plan(rows()).key]
    assert len(store.records()) == 1


# Another holds the lease


def test_record_of_another_machine_is_waited_for(
    store: Store, key: str, record: Record, pauses: Pauses, tunings: list[str]
) -> None:
    plant(store, key, elsewhere())
    pauses.then = lambda count: store.put(record) if count == 3 else None
    batched = autobatch(fun)
    np.testing.assert_allclose(batched(rows()), expected(), rtol=1e-5)
    assert batched.plan(rows()).source == "record"
    assert len(pauses) == 3
    assert tunings == []


def test_record_that_came_just_before_the_tuning_is_used(
    store: Store,
    record: Record,
    tunings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned = Planner.tuned

    def late(*args: Any) -> Any:
        store.put(record)
        return tuned(*args)

    monkeypatch.setattr(Planner, "tuned", late)
    assert autobatch(fun).plan(rows()).source == "record"
    assert tunings == []


def test_record_is_waited_for_inside_a_trace(
    store: Store, key: str, record: Record, pauses: Pauses, tunings: list[str]
) -> None:
    plant(store, key, elsewhere())
    pauses.then = lambda count: store.put(record) if count == 3 else None
    np.testing.assert_allclose(jax.jit(autobatch(fun))(rows()), expected(), rtol=1e-5)
    assert len(pauses) == 3
    assert tunings == []


def test_record_that_was_cut_short_is_not_enough(
    store: Store, key: str, record: Record, pauses: Pauses, tunings: list[str]
) -> None:
    plant(store, key, elsewhere())
    interrupted = tuple(
        Outcome(strategy=each.strategy, status="out-of-time", reason="interrupted")
        for each in record.outcomes
    )
    cut_short = replace(
        record, searched=replace(record.searched, tuning_s=0.0), outcomes=interrupted
    )

    def then(count: int) -> None:
        if count == 3:
            store.put(cut_short)
        if count == 5:
            plant(store, key, None)

    pauses.then = then
    assert autobatch(fun).plan(rows()).source == "tuned"
    assert len(pauses) == 5
    assert tunings == [key]


def test_lease_that_is_let_go_without_a_record_is_taken(
    store: Store, key: str, pauses: Pauses, tunings: list[str]
) -> None:
    plant(store, key, elsewhere())
    pauses.then = lambda count: plant(store, key, None) if count == 2 else None
    assert autobatch(fun).plan(rows()).source == "tuned"
    assert len(pauses) == 2
    assert tunings == [key]


def test_when_the_time_is_up_an_estimate_serves(
    store: Store,
    key: str,
    record: Record,
    pauses: Pauses,
    tunings: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pauses.then = lambda _: plant(store, key, elsewhere())
    pauses.then(0)
    batched = autobatch(fun, budget=Budget(tuning_s=60))
    with caplog.at_level(logging.INFO, "autobatch"):
        np.testing.assert_allclose(batched(rows()), expected(), rtol=1e-5)
    assert sum(pauses) == pytest.approx(60)
    assert tunings == []
    assert "`fun` goes on with an estimate: another process is still tuning it" in caplog.text
    waits = len(pauses)
    batched(rows())  # a later call waits for nothing
    assert len(pauses) == waits
    store.put(record)  # and the estimate is not for good
    assert autobatch(fun).plan(rows()).source == "record"
    assert batched.plan(rows()).source == "record"


def test_without_time_nobody_waits(
    store: Store, key: str, pauses: Pauses, tunings: list[str]
) -> None:
    plant(store, key, elsewhere())
    plan = autobatch(fun, budget=Budget(tuning_s=0)).plan(rows())
    assert plan.source == "estimate"
    assert {each.reason for each in plan.outcomes} == {
        "not measured: another process is still tuning it"
    }
    assert pauses == []
    assert tunings == []


@pytest.mark.parametrize("how", ["force", "tune"])
def test_who_asks_for_a_tuning_waits_a_second_at_most(
    how: str, store: Store, key: str, pauses: Pauses, tunings: list[str]
) -> None:
    plant(store, key, elsewhere())
    batched = autobatch(fun, tune="force" if how == "force" else "first-call")
    plan = (batched.plan if how == "force" else batched.tune)(rows())
    assert plan.source == "tuned"
    assert sum(pauses) == pytest.approx(_lease.PATIENCE_S) == 1.0
    assert tunings == [key]


# This process holds it


@pytest.mark.parametrize("how", ["first-call", "force", "tune", "trace"])
def test_a_tuning_holds_the_lease(
    how: str, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[str | None] = []
    first_run = _measure.first_run

    def looking(*args: Any) -> Any:
        store.change_lease(key, lambda text: (held.append(text), text)[1])
        return first_run(*args)

    monkeypatch.setattr(_measure, "first_run", looking)
    batched = autobatch(fun, tune="force" if how == "force" else None)
    if how == "trace":
        jax.jit(batched)(rows())
    else:
        (batched.tune if how == "tune" else batched.plan)(rows())
    assert held != []
    assert None not in held
    assert lease_of(store, key) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_tuning_that_fails_lets_go(
    error: type[BaseException], store: Store, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(_tuner, "tune", fail)
    with pytest.raises(error):
        autobatch(fun)(rows())
    assert lease_of(store, key) is None


def lease_of(store: Store, key: str) -> str | None:
    found: list[str | None] = []
    assert store.change_lease(key, lambda text: (found.append(text), text)[1])
    return found[0]


def test_threads_tune_once(tunings: list[str]) -> None:
    results: list[Any] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        batched = autobatch(fun)
        barrier.wait()
        results.append(np.asarray(batched(rows())))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(tunings) == 1
    for each in results:
        np.testing.assert_allclose(each, expected(), rtol=1e-5)
    assert len(results) == 4


# The device


def device_file(store: Store) -> Path:
    device = jax.devices()[0]
    return store.path / f"device-{digest(device_parts(device))[:16]}.lock"


def test_the_device_is_held_while_candidates_run_and_not_while_they_compile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[bool]] = {}

    def looking(name: str) -> None:
        function = getattr(_measure, name)

        def look(*args: Any, **options: Any) -> Any:
            with DeviceLock(device_file(store)).held(0.0) as is_free:
                seen.setdefault(name, set()).add(is_free)
            return function(*args, **options)

        monkeypatch.setattr(_measure, name, look)

    for name in ("trace", "compile_", "first_run", "glance", "time_rounds"):
        looking(name)
    autobatch(fun, budget=Budget(expected_calls=10**6))(rows())
    assert seen == {
        "trace": {True},
        "compile_": {True},
        "first_run": {False},
        "glance": {False},
        "time_rounds": {False},
    }


def test_device_is_waited_for_as_long_as_a_tuning_may_take(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=lambda _: waits.append(1.0))
    store.put(make_record())  # so that there is a folder
    with DeviceLock(device_file(store)).held(0.0) as is_held:
        assert is_held
        monkeypatch.setattr(_device_lock, "time", clock)
        monkeypatch.setattr(_planner, "INSTRUMENTS", Instruments(clock=lambda: sum(waits)))
        plan = autobatch(fun, budget=Budget(tuning_s=30)).plan(rows())
    assert plan.source == "tuned"
    assert {str(each.strategy) for each in plan.outcomes if each.status == "measured"} == {"vmap"}
    assert sum(waits) == 30


# Nothing to hold it in


def test_without_a_store_there_is_no_lease(store_folder: Path, tunings: list[str]) -> None:
    assert autobatch(fun, store=False).plan(rows()).source == "tuned"
    assert len(tunings) == 1
    assert not store_folder.exists()


def test_store_that_cannot_be_used_is_told_once(
    store_folder: Path, pauses: Pauses, tunings: list[str]
) -> None:
    store_folder.mkdir(mode=0o777)
    store_folder.chmod(0o777)
    with pytest.warns(AutobatchWarning, match="can be written by other users") as caught:
        assert autobatch(fun).plan(rows()).source == "tuned"
    assert len(caught) == 1
    assert len(tunings) == 1
    assert pauses == []
    assert list(store_folder.iterdir()) == []
