"""The command prints what is stored, and a user's error is one line and an exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from records import make_limits, make_outcome, make_record

import autobatch
from autobatch._cli import _cache, main
from autobatch._store import Store, open_store

KEYS = ["abc1" * 16, "abd2" * 16, "ffff" * 16]

Run = Callable[..., Result]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of three records; the last is the newest."""
    found = open_store(tmp_path / "records")
    assert found is not None
    for day, key in enumerate(KEYS, start=1):
        found.put(make_record(key, name=f"name{day}", created=f"2026-07-0{day}T00:00:00+00:00"))
    return found


@pytest.fixture
def run(store: Store) -> Run:
    """Runs the command on the store; anything but an exit is a failure."""

    def act(*arguments: str, **options: Any) -> Result:
        command = [*arguments, "--store", str(store.path)]
        result = CliRunner().invoke(main, command, **options)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return act


def run_outside(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs `code` in another process with `arguments` as those of the command."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


COMMAND = "import sys; sys.argv[0] = 'autobatch'; from autobatch._cli import main; main()"

# list


def test_list_as_json(run: Run) -> None:
    result = run("cache", "list", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert [each["key"] for each in data] == KEYS[::-1]
    assert data[-1] == {
        "key": KEYS[0],
        "name": "name1",
        "strategy": "vmap",
        "batch_size": 200,
        "device": "cpu AMD EPYC, 2 cores",
        "created": "2026-07-01T00:00:00+00:00",
        "versions": {"jax": "0.12.0", "jaxlib": "0.12.0"},
    }


def test_list_as_a_table(run: Run) -> None:
    result = run("cache", "list")
    assert result.exit_code == 0
    heading, *rows = result.stdout.splitlines()
    assert heading.split() == ["key", "name", "strategy", "rows", "device", "created"]
    assert [row.split()[:4] for row in rows] == [
        [key[:8], f"name{day}", "vmap", "200"]
        for day, key in zip((3, 2, 1), KEYS[::-1], strict=True)
    ]


def test_strategy_follows_the_limits_of_the_search(run: Run, store: Store) -> None:
    slow = make_outcome("vmap", run_s=1.0)
    store.put(make_record(KEYS[0], outcomes=(slow, make_outcome("map"))))
    nothing = make_record(KEYS[1], searched=make_limits(memory_bytes=1))
    store.put(nothing)
    data = {
        each["key"]: each["strategy"] for each in json.loads(run("cache", "list", "--json").stdout)
    }
    assert data == {KEYS[0]: "map", KEYS[1]: None, KEYS[2]: "vmap"}


def test_list_without_records(run: Run, store: Store) -> None:
    store.clear()
    assert run("cache", "list").stdout == f"no records in {store.path}\n"
    assert json.loads(run("cache", "list", "--json").stdout) == []


def test_table_holds_the_newest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache, "NEWEST", 2)
    lines = run("cache", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == [KEYS[2][:8], KEYS[1][:8]]
    assert lines[3:] == ["1 older one: --all shows it"]
    assert len(run("cache", "list", "--all").stdout.splitlines()) == 4
    assert len(json.loads(run("cache", "list", "--json").stdout)) == 3


def test_names_are_no_markup_and_steer_nothing(run: Run, store: Store) -> None:
    store.put(make_record(KEYS[2], name="[red]\x1b[2Jname[/red]"))
    assert "[red]?[2Jname[/red]" in run("cache", "list").stdout


# show


@pytest.mark.parametrize("length", [3, 8, 64])
def test_show_takes_a_prefix(run: Run, length: int) -> None:
    result = run("cache", "show", KEYS[0][:length])
    assert result.exit_code == 0
    title, *lines = result.stdout.splitlines()
    assert title.startswith("name1   200 rows")
    assert title.endswith("from the record of 2026-07-01T00:00:00+00:00   key abc1abc1")
    assert lines[1].startswith(" > vmap")


def test_show_as_json(run: Run) -> None:
    data = json.loads(run("cache", "show", KEYS[0], "--json").stdout)
    assert (data["key"], data["strategy"], data["versions"]["jax"]) == (KEYS[0], "vmap", "0.12.0")
    assert [each["strategy"] for each in data["outcomes"]] == [
        "vmap",
        "map",
        "chunked:50",
        "unrolled",
    ]
    assert data["searched"]["expected_calls"] == 1000


def test_show_where_nothing_fits(run: Run, store: Store) -> None:
    store.put(make_record(KEYS[0], searched=make_limits(memory_bytes=1)))
    result = run("cache", "show", KEYS[0])
    assert result.exit_code == 0
    assert "chosen although needs 793 KiB of 1 B" in result.stdout


@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("ab", "Error: 2 keys begin 'ab': abd2ab, abc1ab\n"),
        ("e", "has a key that begins 'e'\n"),
        ("", "has a key that begins ''\n"),
        ("%", "has a key that begins '%'\n"),
    ],
)
def test_prefix_of_no_one_record(
    run: Run, prefix: str, message: str, as_json: tuple[str, ...]
) -> None:
    result = run("cache", "show", prefix, *as_json)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.endswith(message)
    assert result.stderr.count("\n") == 1


# clear


def test_clear_needs_yes_where_nobody_can_be_asked(run: Run, store: Store) -> None:
    result = run("cache", "clear")
    assert result.exit_code == 1
    assert result.stderr == "Error: `autobatch cache clear` needs --yes: nobody can be asked\n"
    assert len(store.records()) == 3


def test_clear_with_yes(run: Run, store: Store) -> None:
    result = run("cache", "clear", "--yes")
    assert result.exit_code == 0
    assert result.stdout == f"removed 3 records from {store.path}\n"
    assert store.records() == []
    assert json.loads(run("cache", "clear", "--yes", "--json").stdout) == {"removed": 0}


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 0), ("n", 1, 3), ("", 1, 3)])
def test_clear_asks_on_a_terminal(
    run: Run, store: Store, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, left: int
) -> None:
    monkeypatch.setattr(_cache, "can_ask", lambda: True)
    result = run("cache", "clear", input=f"{answer}\n")
    assert f"Remove every record in {store.path}?" in result.stderr
    assert result.exit_code == code
    assert len(store.records()) == left


def test_clear_that_fails_says_so(run: Run, store: Store) -> None:
    store.path.chmod(0o777)
    result = run("cache", "clear", "--yes")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "can be written by other users" in result.stderr
    store.path.chmod(0o700)
    assert len(store.records()) == 3


# path, doctor, the command itself


def test_path(run: Run, store: Store) -> None:
    assert run("cache", "path").stdout == f"{store.path}\n"
    assert json.loads(run("cache", "path", "--json").stdout) == {"path": str(store.path)}


def test_default_store_is_that_of_the_environment(store_folder: Path) -> None:
    result = CliRunner().invoke(main, ["cache", "path"])
    assert result.stdout == f"{store_folder}\n"
    assert not store_folder.exists()


def test_doctor_as_json(run: Run, store: Store) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["device"].startswith("cpu ")
    assert data["cores"] >= 1
    assert data["memory_limit_bytes"] > 0
    assert data["versions"]["autobatch"] == autobatch.__version__
    for name in ("jax", "jaxlib", "diskcache"):
        assert data["versions"][name] == version(name)
    assert data["store"] == {
        "path": str(store.path),
        "writable": True,
        "problem": None,
        "records": 3,
    }


def test_doctor_as_text(run: Run, store: Store) -> None:
    lines = run("doctor").stdout.splitlines()
    names = ["device", "cores", "versions", "memory", "store", "writable,"]
    assert [line.split()[0] for line in lines] == names
    assert lines[-2].split() == ["store", str(store.path)]
    assert lines[-1].strip() == "writable, 3 records"


def test_doctor_finds_a_store_that_cannot_be_used(run: Run, store: Store) -> None:
    store.path.chmod(0o777)
    data = json.loads(run("doctor", "--json").stdout)
    assert data["store"]["writable"] is False
    assert data["store"]["problem"].startswith("can be written by other users. Run `chmod")
    assert "can be written by other users" in run("doctor").stdout


def test_doctor_takes_the_limit_of_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOBATCH_MEMORY", "2GiB")
    assert json.loads(run("doctor", "--json").stdout)["memory_limit_bytes"] == 2 * 1024**3
    monkeypatch.setenv("AUTOBATCH_MEMORY", "much")
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: AUTOBATCH_MEMORY: memory must be")
    assert result.stderr.count("\n") == 1


def test_doctor_without_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "nowhere")
    done = run_outside(COMMAND, "doctor", "--json", "--store", str(tmp_path / "records"))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["device"] is None
    assert "nowhere" in data["problem"]


def test_faults_of_the_store_are_one_line(run: Run, store: Store) -> None:
    store.path.chmod(0o777)
    result = run("cache", "list", "--json")
    assert json.loads(result.stdout) == []
    assert result.stderr.startswith(f"autobatch: the store {store.path} was passed over")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["cache", "nothing"],
        ["cache", "show"],
        ["cache", "list", "--nothing"],
        ["cache", "list", "--store", ""],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: ")


def test_bad_environment_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBATCH_CACHE_DIR", "~nobody-of-this-name/records")
    result = CliRunner().invoke(main, ["cache", "list"])
    assert result.exit_code == 2
    assert "AUTOBATCH_CACHE_DIR must be the path of a folder" in result.stderr


def test_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).stdout == f"autobatch {autobatch.__version__}\n"


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        return [path]
    context = click.Context(command)
    names = command.list_commands(context)
    below = [(name, command.get_command(context, name)) for name in names]
    return [leaf for name, each in below if each for leaf in leaves(each, (*path, name))]


@pytest.mark.parametrize("arguments", [(), *leaves(main)], ids=" ".join)
def test_help(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*arguments, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")


@pytest.mark.parametrize("arguments", leaves(main), ids=" ".join)
def test_every_command_has_json(arguments: tuple[str, ...]) -> None:
    assert "--json" in CliRunner().invoke(main, [*arguments, "--help"]).stdout


@pytest.mark.parametrize("arguments", [("list",), ("list", "--json"), ("show", "abc"), ("path",)])
def test_cache_loads_no_jax(store: Store, arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from autobatch._cli import main; main(standalone_mode=False);"
        "print(sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = run_outside(code, "cache", *arguments, "--store", str(store.path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == ["[]"]
    assert done.stdout != ""


@pytest.mark.parametrize("arguments", [("list",), ("list", "--json"), ("show", "abc"), ("path",)])
def test_closed_pipe_is_no_traceback(store: Store, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", COMMAND, "cache", *arguments, "--store", str(store.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()  # before it can have written anything
        process.stdout = None
        _, errors = process.communicate()
    assert errors == ""
    assert process.returncode == 1


def test_the_demo_tunes_three_functions_and_recalls_them() -> None:
    done = run_outside("from autobatch._cli import main; main()", "demo", "--json")
    assert done.returncode == 0, done.stderr
    calls = json.loads(done.stdout)
    tuned, recalled = calls["tuned"], calls["recalled"]
    assert [each["source"] for each in tuned] == ["tuned"] * 3
    assert [each["source"] for each in recalled] == ["record"] * 3
    for key in ("key", "strategy"):
        assert [each[key] for each in tuned] == [each[key] for each in recalled]
    assert "unrolled" in tuned[0]["table"]
    assert "not tried" not in tuned[0]["table"]
