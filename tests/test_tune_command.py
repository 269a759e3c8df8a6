"""`autobatch tune`, with real children: what they keep, and what becomes of those that die."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result

import autobatch as package
from autobatch import autobatch
from autobatch._cli import main
from autobatch._record import Record
from autobatch._store import open_store
from autobatch._strategies import Strategy

ROOT = Path(package.__file__).parent.parent

TARGET = '''
import os, signal, sys, time

import jax
import jax.numpy as jnp
import numpy as np

from autobatch import Budget, autobatch

print("the module is imported")


def plain(matrix, x):
    return jnp.tanh(matrix @ x).sum()


own = autobatch(plain, (None, 0), name="own", budget=Budget(expected_calls=7))
forced = autobatch(jnp.sin, strategy="map")
unkept = autobatch(jnp.sin, store=False)


class Model:
    scale = 2.0

    @autobatch(in_axes=(None, 0))
    def scaled(self, x):
        return self.scale * x

    @autobatch(in_axes=(None, None, 0))
    def weighted(self, weight, x):
        return self.scale * jnp.sin(weight * x)


model = Model()


def branching(x):
    return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)


def mixed(key, half, brain, is_on, count):
    values = [each.astype(jnp.float32) for each in (half, brain, count)]
    return jnp.where(is_on, jax.random.normal(key), sum(values))


def raising(x):
    raise ZeroDivisionError("not\\nthis way")


def wide(x):
    return x + np.float64(1)


def endless(x):
    """Ends row by row; the loop must not be entered with a negative number."""
    def settle(x):
        return jax.lax.while_loop(lambda y: y != 0, lambda y: y - 1, x)

    return jax.lax.cond(x >= 0, settle, lambda x: x, x)


def seen(value):
    """What the test asks for happens where all 8 rows are seen at once; else nothing."""
    what = os.environ.get("WHAT_HAPPENS")
    if what == "sleep among few" and value.shape[:1] != (8,):
        print("asleep", file=sys.stderr, flush=True)
        time.sleep(1e6)
    if value.shape[:1] == (8,):
        if what == "sleep among few":
            time.sleep(0.05)
        if what == "sleep":
            time.sleep(1e6)
        if what in ("SIGSEGV", "SIGKILL"):
            os.kill(os.getpid(), getattr(signal, what))
    return np.asarray(value)


def callback(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(seen, shape, x, vmap_method="expand_dims")


def slope(x):
    """Is seen where it is differentiated too, and has a derivative."""
    return jnp.sin(x) * callback(jax.lax.stop_gradient(x))


def looping(x):
    return jax.lax.while_loop(lambda y: y.sum() > 1, lambda y: y / 2, x)


def closing(weights):
    return lambda x: jnp.tanh(weights @ x).sum()


closed = closing(jnp.eye(4))
'''

PLAIN = ("target:plain", "--in-axes", "(None, 0)", "--arg", "f32[4,4]")
OWN = ("target:own", "--arg", "f32[4,4]", "--arg", "f32[8,4]")
GRADIENT = ("--for-gradient",)
COMMAND = """import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
sys.argv[0] = 'autobatch'
from autobatch._cli import main
main()"""

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module of functions to tune, which is the current one."""
    place = tmp_path / "work"
    place.mkdir()
    (place / "target.py").write_text(TARGET)
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the package is not installed
    return place


@pytest.fixture
def target(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module as a later program has it."""
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("target")
    del sys.modules["target"]


@pytest.fixture
def run() -> Run:
    """Runs the command; anything but an exit is a failure."""

    def act(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["tune", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert result.exit_code == code, result.output
        return result

    return act


def tuned(result: Result) -> list[dict[str, Any]]:
    return json.loads(result.stdout)


def outcomes(data: dict[str, Any]) -> dict[str, tuple[str, str | None]]:
    return {each["strategy"]: (each["status"], each["reason"]) for each in data["outcomes"]}


def stored(folder: Path) -> list[Record]:
    store = open_store(folder)
    assert store is not None
    return store.records()


def eye(rows: int, width: int = 4) -> np.ndarray[Any, Any]:
    return np.eye(rows, width, dtype=np.float32)


def interrupted(command: list[str]) -> tuple[int, list[str], str]:
    """Returns the exit code of a command interrupted in a long run, and its lines before, after.

    It must have printed no result.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        before = []
        for line in process.stderr:
            before.append(line)
            if line == "asleep\n":
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    assert output == ""
    return process.returncode, before, errors


# The record serves


def test_the_record_of_an_autobatch_object_serves_it(
    run: Run, target: Any, count_compiles: Callable[[], int], store_folder: Path
) -> None:
    result = run("target:own", "--arg", "f32[4,4]", "--arg", "f32[8,4]")
    assert result.stdout.startswith("own   8 rows")
    assert "total at 7 calls" in result.stdout
    (record,) = stored(store_folder)
    assert record.data == "real"
    before = count_compiles()
    found = target.own(eye(4), eye(8))
    assert count_compiles() - before == 1
    np.testing.assert_allclose(found, np.tanh(eye(8)).sum(1), rtol=1e-5)
    plan = target.own.plan(eye(4), eye(8))
    assert (plan.source, plan.key) == ("record", record.key)


def test_the_record_of_a_plain_function_serves_it(run: Run, target: Any) -> None:
    result = run(*PLAIN, "--arg", "f32[8,4]", "--json")
    (data,) = tuned(result)
    assert (data["name"], data["source"], data["batch_size"]) == ("plain", "tuned", 8)
    plan = autobatch(target.plain, in_axes=(None, 0)).plan(eye(4), eye(8))
    assert (plan.source, plan.key) == ("record", data["key"])
    assert str(plan.strategy) == data["strategy"]


def test_a_method_is_tuned_on_its_object(run: Run, target: Any) -> None:
    (data,) = tuned(run("target:model.scaled", "--arg", "f32[8]", "--json"))
    assert target.model.scaled.plan(np.ones(8, np.float32)).key == data["key"]


@pytest.mark.parametrize("place", ["option", "environment"])
def test_where_records_are_kept(
    run: Run, place: str, tmp_path: Path, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "elsewhere"
    if place == "option":
        run("target:unkept", "--arg", "f32[8]", "--store", str(where))
    else:
        monkeypatch.setenv("AUTOBATCH_CACHE_DIR", str(where))
        run("target:own", "--arg", "f32[4,4]", "--arg", "f32[8,4]")
    assert len(stored(where)) == 1
    assert stored(store_folder) == []


def test_a_function_that_keeps_nothing_says_so(run: Run, store_folder: Path) -> None:
    result = run("target:unkept", "--arg", "f32[8]")
    assert "`sin`: store=False keeps no record; give --store" in result.stderr
    assert stored(store_folder) == []


# Arguments


def test_one_tuning_for_each_size_in_one_child(run: Run, store_folder: Path) -> None:
    sizes = [2, 3, 5, 7, 11]  # more than a process would tune by itself
    listed = ",".join(map(str, sizes))
    result = run(*PLAIN, "--arg", "f32[N,4]", "--sizes", listed, "--json")
    assert [(each["batch_size"], each["source"]) for each in tuned(result)] == [
        (each, "tuned") for each in sizes
    ]
    assert sorted(each.batch_size for each in stored(store_folder)) == sizes
    text = run(*PLAIN, "--arg", "f32[N,4]", "--sizes", "2, 3")
    assert [line.split()[:3] for line in text.stdout.splitlines() if "plain" in line] == [
        ["plain", "2", "rows"],
        ["plain", "3", "rows"],
    ]


def test_every_kind_of_argument(run: Run, target: Any) -> None:
    shapes = ("key[4]", "f16[4]", "bf16[4]", "bool[4]", "i32[]")
    arguments = [each for shape in shapes for each in ("--arg", shape)]
    (data,) = tuned(run("target:mixed", "--in-axes", "(0, 0, 0, 0, None)", *arguments, "--json"))
    half, brain = jnp.ones(4, jnp.float16), jnp.ones(4, jnp.bfloat16)
    keys = jax.random.split(jax.random.key(1), 4)
    mixed = autobatch(target.mixed, in_axes=(0, 0, 0, 0, None))
    plan = mixed.plan(keys, half, brain, np.ones(4, bool), np.int32(3))
    assert plan.key == data["key"]


@pytest.mark.parametrize("names", [("arg1", "arg0"), ("second", "first")])
def test_arguments_of_a_file(run: Run, folder: Path, names: tuple[str, str]) -> None:
    arrays = {"arg1": eye(8), "arg0": eye(4), "second": eye(4), "first": eye(8)}
    np.savez(folder / "inputs.npz", **{each: arrays[each] for each in names})
    (data,) = tuned(
        run("target:plain", "--in-axes", "(None, 0)", "--inputs", "inputs.npz", "--json")
    )
    assert data["parts"]["arguments"] == ["float32[4, 4]", "float32[8, 4]"]


def test_made_up_values_are_warned_of_where_they_matter(run: Run, folder: Path) -> None:
    np.savez(folder / "inputs.npz", eye(8, 3))
    assert "depends on values" in run("target:branching", "--arg", "f32[8,3]").stderr
    assert "depends on values" not in run("target:branching", "--inputs", "inputs.npz").stderr


def test_64_bits_are_refused_unless_switched_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("target:wide", "--arg", "f64[8]", code=1)
    assert result.stderr == "Error: float64 is switched off in JAX; set JAX_ENABLE_X64=1\n"
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    (data,) = tuned(run("target:wide", "--arg", "f64[8]", "--json"))
    assert data["parts"]["arguments"] == ["float64[8]"]


# A record that is there


def test_a_record_is_shown_and_not_made_again(run: Run) -> None:
    arguments = (*PLAIN, "--arg", "f32[8,4]")
    assert "tuned in" in run(*arguments).stdout
    again = run(*arguments)
    assert "from the record of" in again.stdout
    assert again.stderr == ""
    assert "tuned in" in run(*arguments, "--force").stdout


def test_the_budget_is_that_of_the_options(run: Run) -> None:
    budget = ("--expected-calls", "3", "--compile-s", "50", "--tuning-s", "40", "--memory", "1GiB")
    arguments = ("target:own", "--arg", "f32[4,4]", "--arg", "f32[8,4]", "--json")
    (data,) = tuned(run(*arguments, *budget))
    assert data["searched"] == {
        "memory_bytes": 1024**3,
        "memory_is_explicit": True,
        "compile_s": 50.0,
        "tuning_s": 40.0,
        "expected_calls": 3,
    }


@pytest.mark.parametrize("mode", ["off", "require", "cached"])
def test_the_command_tunes_in_every_mode(
    run: Run, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOBATCH_TUNE", mode)
    (data,) = tuned(run(*PLAIN, "--arg", "f32[8,4]", "--json"))
    assert data["source"] == "tuned"


def test_where_there_is_nothing_to_choose_the_table_says_why(run: Run, store_folder: Path) -> None:
    assert "forced with strategy=" in run("target:forced", "--arg", "f32[8]").stdout
    assert "cannot be divided" in run(*PLAIN, "--arg", "f32[1,4]").stdout
    assert stored(store_folder) == []


# The derivative


def test_the_record_of_a_derivative_serves_gradients(
    run: Run, target: Any, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(*OWN, "--for-gradient")
    assert result.stdout.startswith("grad of own   8 rows")
    assert result.stderr.startswith("tuning grad of target:own\n")
    (record,) = stored(store_folder)
    assert (record.name, record.data) == ("grad of own", "real")
    plan = target.own.for_gradient.plan(eye(4), eye(8))
    assert (plan.source, plan.key) == ("record", record.key)
    monkeypatch.setenv("AUTOBATCH_TUNE", "require")
    found = jax.grad(lambda matrix: target.own(matrix, eye(8)).sum())(eye(4))
    expected = jax.grad(lambda matrix: np.float32(1) * jnp.tanh(eye(8) @ matrix.T).sum())(eye(4))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("argnums", "numbers"), [(None, 0), ("0", 0), ("1", 1), ("-1", -1), ("0, 1", (0, 1))]
)
def test_what_is_differentiated(
    run: Run, target: Any, argnums: str | None, numbers: int | tuple[int, ...]
) -> None:
    given = () if argnums is None else ("--argnums", argnums)
    (data,) = tuned(run(*OWN, "--for-gradient", *given, "--json"))
    assert (data["name"], data["source"]) == ("grad of own", "tuned")
    plan = target.own.for_gradient(argnums=numbers).plan(eye(4), eye(8))
    assert (plan.source, plan.key) == ("record", data["key"])
    assert str(plan.strategy) == data["strategy"]


def test_closed_over_arrays_are_differentiated_too(
    run: Run, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("target:closed", "--arg", "f32[8,4]", "--json")
    run(*arguments)  # that the arrays are differentiated does not show in the arguments
    (data,) = tuned(run(*arguments, *GRADIENT, "--argnums", "()"))
    plan = autobatch(target.closed).for_gradient(argnums=()).plan(eye(8))
    assert (plan.source, plan.key) == ("record", data["key"])
    monkeypatch.setenv("AUTOBATCH_TUNE", "require")
    jax.grad(lambda weights: autobatch(target.closing(weights))(eye(8)).sum())(eye(4))


def test_of_a_method_the_arguments_after_its_object_are_counted(run: Run, target: Any) -> None:
    arguments = ("target:model.weighted", "--arg", "f32[]", "--arg", "f32[8]", "--for-gradient")
    for argnums in (0, 1):
        (data,) = tuned(run(*arguments, "--argnums", str(argnums), "--json"))
        gradient = target.model.weighted.for_gradient(argnums=argnums)
        plan = gradient.plan(np.float32(1), np.ones(8, np.float32))
        assert (plan.source, plan.key) == ("record", data["key"])


def test_a_derivative_is_tuned_for_each_size(run: Run, store_folder: Path) -> None:
    result = run(*PLAIN, "--arg", "f32[N,4]", "--sizes", "2,3", "--for-gradient")
    assert [line.split()[:5] for line in result.stdout.splitlines() if "plain" in line] == [
        ["grad", "of", "plain", "2", "rows"],
        ["grad", "of", "plain", "3", "rows"],
    ]
    assert "tuning grad of target:plain, N = 3" in result.stderr
    assert sorted(each.batch_size for each in stored(store_folder)) == [2, 3]


def test_a_record_of_a_derivative_is_not_made_again(run: Run) -> None:
    assert "tuned in" in run(*OWN, "--for-gradient").stdout
    again = run(*OWN, "--for-gradient")
    assert "from the record of" in again.stdout
    assert again.stderr == ""
    assert "tuned in" in run(*OWN, "--for-gradient", "--force").stdout


def test_a_function_and_its_derivative_have_records_of_their_own(
    run: Run, store_folder: Path
) -> None:
    (call,), (derivative,) = (tuned(run(*OWN, *each, "--json")) for each in ((), GRADIENT))
    assert {each["source"] for each in (call, derivative)} == {"tuned"}
    assert {each.key for each in stored(store_folder)} == {call["key"], derivative["key"]}


@pytest.mark.parametrize(
    ("what", "status", "reason"),
    [
        ("SIGSEGV", "failed", "crashed: SIGSEGV"),
        ("sleep", "failed", "did not end within 2.0 s"),
    ],
)
def test_a_derivative_that_ends_the_child_is_an_outcome(
    run: Run,
    what: str,
    status: str,
    reason: str,
    target: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WHAT_HAPPENS", what)
    arguments = ("target:slope", "--arg", "f32[8,3]", "--run-s", "2")
    (data,) = tuned(run(*arguments, *GRADIENT, "--json"))
    found = outcomes(data)
    assert found["vmap"] == (status, reason)
    assert found["unrolled"][0] == "ineligible"
    assert {each for each, _ in found.values()} & {"measured"}
    plan = autobatch(target.slope).for_gradient.plan(eye(8, 3))
    assert (plan.source, plan.key) == ("record", data["key"])
    assert plan.strategy != Strategy.parse("vmap")


def test_control_c_keeps_what_was_measured_of_a_derivative(
    store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHAT_HAPPENS", "sleep among few")
    command = [sys.executable, "-c", COMMAND, "tune", "target:slope", "--arg", "f32[8,3]"]
    code, _, errors = interrupted([*command, *GRADIENT])
    assert code == 130
    assert f"interrupted: what was measured is kept in {store_folder}\n" in errors
    (record,) = stored(store_folder)
    assert record.name == "grad of slope"
    assert {each.status for each in record.outcomes} >= {"measured", "out-of-time"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["target:looping", "--arg", "f32[8,3]"], "ValueError: Reverse-mode differentiation"),
        (["target:plain", "--arg", "i32[8,3]", "--arg", "i32[8,3]"], "TypeError: what is differ"),
        ([*OWN, "--argnums", "2"], "ValueError: argnums has 2, and the call has 2 arguments"),
    ],
)
def test_what_has_no_derivative_is_refused(run: Run, arguments: list[str], message: str) -> None:
    result = run(*arguments, *GRADIENT, code=1)
    assert result.stderr.startswith(f"Error: `{arguments[0]}`: {message}")
    assert result.stderr.count("\n") == 1


def test_what_nothing_depends_on_is_not_tuned(run: Run, store_folder: Path) -> None:
    result = run("target:callback", "--arg", "f32[8,3]", *GRADIENT, "--argnums", "()")
    assert result.stdout.startswith("grad of callback   8 rows")
    assert "it does not depend on what is differentiated" in result.stdout
    assert stored(store_folder) == []


# Candidates that end the child


CALLBACK = ("target:callback", "--arg", "f32[8,3]")


@pytest.mark.parametrize(
    ("what", "status", "reason"),
    [
        ("SIGSEGV", "failed", "crashed: SIGSEGV"),
        ("SIGKILL", "out-of-memory", "killed, probably out of memory"),
        ("sleep", "failed", "did not end within 2.0 s"),
    ],
)
def test_a_candidate_that_ends_the_child_is_an_outcome(
    run: Run,
    what: str,
    status: str,
    reason: str,
    store_folder: Path,
    target: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WHAT_HAPPENS", what)
    result = run(*CALLBACK, "--run-s", "2", "--json")
    (data,) = tuned(result)
    found = outcomes(data)
    assert found["vmap"] == (status, reason)
    assert {each for each, _ in found.values()} & {"measured"}
    assert {name.partition(":")[0] for name in found} == {"vmap", "chunked", "map", "unrolled"}
    (record,) = stored(store_folder)
    assert {str(each.strategy): each.status for each in record.outcomes}["vmap"] == status
    plan = autobatch(target.callback).plan(eye(8, 3))
    assert (plan.source, str(plan.strategy)) == ("record", data["strategy"])
    assert plan.strategy != Strategy.parse("vmap")


def test_progress_is_told_line_by_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHAT_HAPPENS", "SIGSEGV")
    heading, first, *others = run(*CALLBACK).stderr.splitlines()
    assert heading == "tuning target:callback"
    assert first == "   vmap: crashed: SIGSEGV"
    assert any("a call, compiled in" in each for each in others)


def test_what_may_never_end_is_tried_and_ended(run: Run, target: Any) -> None:
    x = np.arange(-1, 7, dtype=np.float32)
    plan = autobatch(target.endless).plan(x)  # here it is not
    assert {each.status for each in plan.outcomes if str(each.strategy) == "vmap"} == {"ineligible"}
    np.savez("inputs.npz", x)
    (data,) = tuned(run("target:endless", "--inputs", "inputs.npz", "--run-s", "1.5", "--json"))
    assert data["key"] == plan.key
    found = outcomes(data)
    assert found["vmap"] == ("failed", "did not end within 1.5 s")
    assert found["map"][0] == "measured"
    assert data["strategy"] in ("map", "unrolled")


def test_a_child_that_dies_before_anything_is_tried(run: Run, folder: Path) -> None:
    (folder / "dying.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    result = run("dying:fun", "--arg", "f32[8]", code=1)
    assert result.stderr == (
        "Error: `dying:fun` ended the process before it was tuned: crashed: SIGSEGV\n"
    )


def test_where_nothing_can_be_measured_nothing_is_kept(
    run: Run, store_folder: Path, folder: Path
) -> None:
    (folder / "hopeless.py").write_text(
        "import jax, os\n"
        "def fun(x):\n"
        "    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)\n"
        "    return jax.pure_callback(lambda x: os._exit(3), shape, x, vmap_method='expand_dims')\n"
    )
    result = run("hopeless:fun", "--arg", "f32[2]", code=1)
    assert "ended the process with exit code 3" in result.stdout
    assert result.stderr.endswith("Error: no candidate could be measured, so nothing is kept\n")
    assert stored(store_folder) == []


def test_control_c_keeps_what_was_measured(
    run: Run, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHAT_HAPPENS", "sleep among few")
    command = [sys.executable, "-c", COMMAND, "tune", *CALLBACK]
    code, before, errors = interrupted(command)
    assert code == 130
    assert f"interrupted: what was measured is kept in {store_folder}\n" in errors
    assert "Traceback" not in errors
    assert any(line.startswith("   vmap: ") and "a call" in line for line in before)
    (record,) = stored(store_folder)
    found = {str(each.strategy): each for each in record.outcomes}
    assert found["vmap"].status == "measured"
    assert {each.status for each in found.values()} >= {"measured", "out-of-time"}
    assert "interrupted" in {each.reason for each in found.values()}
    monkeypatch.delenv("WHAT_HAPPENS")
    (data,) = tuned(run(*CALLBACK, "--expected-calls", "1000000", "--json"))
    assert sum(status == "measured" for status, _ in outcomes(data).values()) > 1


# Faults of the user's


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing:fun", "`nothing:fun`: ModuleNotFoundError: No module named 'nothing'"),
        ("target:fun", "`target:fun`: AttributeError: module 'target' has no attribute 'fun'"),
        ("target:Budget", "`target:Budget`: "),
        ("target:np", "`target:np` is no function: <module 'numpy'"),
        ("target:raising", "`target:raising`: ZeroDivisionError: not this way (target.py, line "),
        ("target:plain", "`target:plain`: TypeError: plain() missing 1 required positional"),
        ("broken:fun", "`broken:fun`: SyntaxError: "),
        ("ending:fun", "`ending:fun`: SystemExit: 3 (ending.py, line 1)"),
    ],
)
def test_faults_are_one_line(run: Run, folder: Path, name: str, message: str) -> None:
    (folder / "broken.py").write_text("def fun(:\n")
    (folder / "ending.py").write_text("raise SystemExit(3)")
    result = run(name, "--arg", "f32[8]", "--json", code=1)
    assert result.stderr.startswith(f"Error: {message}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_axes_of_an_autobatch_object_are_its_own(run: Run) -> None:
    result = run("target:own", "--arg", "f32[4,4]", "--in-axes", "0", code=1)
    assert result.stderr == (
        "Error: `target:own` has axes of its own; leave out --in-axes, --out-axes\n"
    )


def test_what_fits_no_limit_is_refused(run: Run) -> None:
    result = run(*PLAIN, "--arg", "f32[64,4]", "--memory", "200", code=1)
    assert "Error: none of" in result.stderr
    assert "fits memory=200 B" in result.stderr


@pytest.mark.parametrize("content", [b"", b"PK no zip"])
def test_files_without_arrays_are_refused(run: Run, folder: Path, content: bytes) -> None:
    (folder / "inputs.npz").write_bytes(content)
    result = run("target:plain", "--inputs", "inputs.npz", code=1)
    assert "inputs.npz holds no arrays that can be used: " in result.stderr
    assert result.stderr.count("\n") == 1


def test_pickles_are_refused(run: Run, folder: Path) -> None:
    np.savez(folder / "inputs.npz", np.array([print], object), allow_pickle=True)
    result = run("target:plain", "--inputs", "inputs.npz", code=1)
    assert "allow_pickle=False" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["target", "--arg", "f32[8]"], "is no MODULE:FUN"),
        (["target:", "--arg", "f32[8]"], "is no MODULE:FUN"),
        ([*PLAIN, "--argnums", "0"], "--argnums needs --for-gradient"),
        ([*PLAIN, "--for-gradient", "--argnums", ""], "is no list of arguments such as 0 or 0,2"),
        ([*PLAIN, "--for-gradient", "--argnums", "x"], "is no list of arguments"),
        (["target:plain"], "either with --arg or with --inputs"),
        ([*PLAIN, "--inputs", "target.py"], "either with --arg or with --inputs"),
        ([*PLAIN, "--inputs", "nothing.npz"], "does not exist"),
        ([*PLAIN, "--arg", "f32[N]"], "needs --sizes"),
        ([*PLAIN, "--sizes", "8"], "needs --sizes"),
        (["target:plain", "--arg", "f32"], "is no dtype with a shape such as f32[200,1000]"),
        (["target:plain", "--arg", "f32[-1]"], "is no dtype with a shape"),
        (["target:plain", "--arg", "f32[2,]"], "is no dtype with a shape"),
        (["target:plain", "--arg", "f33[2]"], "'f33' is none of f16, bf16, f32"),
        ([*PLAIN, "--arg", "f32[N]", "--sizes", "8,x"], "is no list of sizes"),
        ([*PLAIN, "--in-axes", "None, zero"], "is no Python literal"),
        ([*PLAIN, "--memory", "much"], "memory must be"),
        ([*PLAIN, "--expected-calls", "0"], "Budget.expected_calls must be"),
        ([*PLAIN, "--run-s", "0"], "--run-s"),
        ([*PLAIN, "--store", ""], "must be the path of a folder"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], message: str) -> None:
    result = run(*arguments, code=2)
    assert result.stderr.startswith("Usage: ")
    assert message in result.stderr


def test_the_command_itself_loads_no_jax() -> None:
    code = (
        "import sys; from autobatch._cli import main; main(standalone_mode=False);"
        "print(sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "tune", *PLAIN, "--arg", "f32[8,4]", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[0]["source"] == "tuned"
    assert done.stderr.splitlines() == ["the module is imported", "[]"]


def test_the_child_ends_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHAT_HAPPENS", "sleep among few")
    command = [sys.executable, "-c", COMMAND, "tune", *CALLBACK]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line == "asleep\n":
                break
        process.kill()
        assert process.stderr.read() == ""  # ends when nobody has it open any more
