"""The command prints what is stored, and a user's error is one line and an exit code."""

from __future__ import annotations

import errno
import json
import os
import runpy
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from records import make_limits, make_outcome, make_record

import autobatch
from autobatch import _store
from autobatch._cli import _cache, _cache_files, _cache_removal, main
from autobatch._digest import digest
from autobatch._exchange import from_document, to_document
from autobatch._record import SCHEMA, Record, to_json
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


def test_records_of_derivatives_read_well(run: Run, store: Store) -> None:
    for key, name, derivative in ((KEYS[0], "loss", "none"), (KEYS[1], "grad of loss", [0, 2])):
        parts = {"jax": "0.12.0", "jaxlib": "0.12.0", "derivative": derivative}
        best = make_outcome("chunked:50+remat", run_s=1e-6)
        store.put(make_record(key, name=name, parts=parts, outcomes=(make_outcome("vmap"), best)))
    rows = run("cache", "list").stdout.splitlines()
    assert [" ".join(row.split()[:6]) for row in rows if "grad" in row] == [
        "abd2abd2 grad of loss chunked:50+remat 200"
    ]
    title, *_ = run("cache", "show", "abd").stdout.splitlines()
    assert title.startswith("grad of loss   200 rows")
    (line,) = run("cache", "diff", "abc", "abd").stdout.splitlines()[1:]
    assert " ".join(line.split()) == 'derivative "none" [0, 2]'


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


# diff


def test_diff_shows_the_parts_that_differ(run: Run, store: Store) -> None:
    same = {"batch_size": 200, "x64": True}
    store.put(make_record(KEYS[0], parts={**same, "jax": "0.12.0", "prng": None}))
    store.put(make_record(KEYS[1], parts={**same, "jax": "0.12.1", "cores": 2}))
    result = run("cache", "diff", "abc", "abd")
    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["part", "abc1abc1", "abd2abd2"],
        ["cores", "-", "2"],
        ["jax", '"0.12.0"', '"0.12.1"'],
        ["prng", "null", "-"],
    ]
    assert json.loads(run("cache", "diff", "abc", "abd", "--json").stdout) == {
        "keys": KEYS[:2],
        "parts": [
            {"part": "cores", "other": 2},
            {"part": "jax", "one": "0.12.0", "other": "0.12.1"},
            {"part": "prng", "one": None},
        ],
    }


def test_diff_cuts_long_parts_to_where_they_differ(run: Run, store: Store) -> None:
    arguments = [f"float32[{number}]" for number in range(100)]
    for key, last in zip(KEYS, ("int8[7]", "int8[8]"), strict=False):
        parts = {"arguments": [*arguments, last, *arguments]}
        store.put(make_record(key, parts=parts))
    (_, line) = run("cache", "diff", "abc", "abd").stdout.splitlines()
    assert len(line) < 160
    assert line.count("...") == 4
    assert "int8[7]" in line
    assert "int8[8]" in line
    (part,) = json.loads(run("cache", "diff", "abc", "abd", "--json").stdout)["parts"]
    assert part["one"] == [*arguments, "int8[7]", *arguments]


@pytest.mark.parametrize("other", ["abc1", KEYS[1]])
def test_diff_of_equal_keys_says_so(run: Run, other: str) -> None:
    result = run("cache", "diff", "abc", other)
    assert (result.exit_code, result.stdout) == (0, "no part of the keys differs\n")
    assert json.loads(run("cache", "diff", "abc", other, "--json").stdout)["parts"] == []


def test_diff_steers_no_terminal(run: Run, store: Store) -> None:
    store.put(make_record(KEYS[0], parts={"a\x1b[2J": "[red]\x9b2J", "b": "\ud800"}))
    result = run("cache", "diff", "abc", "abd")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "\x9b" not in result.stdout
    assert "[red]?2J" in result.stdout


# remove, prune


def test_remove_takes_prefixes(run: Run, store: Store) -> None:
    result = run("cache", "remove", "abc", KEYS[2], "abc1")
    assert result.exit_code == 0
    assert result.stdout == f"removed 2 records from {store.path}\n"
    assert [each.key for each in store.records()] == [KEYS[1]]
    assert json.loads(run("cache", "remove", "a", "--json").stdout) == {"removed": 1}


@pytest.mark.parametrize("bad", ["ab", "e", ""])
def test_one_bad_prefix_removes_nothing(run: Run, store: Store, bad: str) -> None:
    result = run("cache", "remove", "ffff", bad)
    assert result.exit_code == 1
    assert f"begin {bad!r}" in result.stderr or f"begins {bad!r}" in result.stderr
    assert len(store.records()) == 3


@pytest.fixture
def aged(store: Store) -> Store:
    """A store of three records: a day, a month and, it seems, no time old."""
    for key, days in zip(KEYS, (1, 30), strict=False):
        created = datetime.now(UTC) - timedelta(days=days)
        store.put(make_record(key, created=created.isoformat(timespec="seconds")))
    store.put(make_record(KEYS[2], created="at some time"))
    return store


@pytest.mark.parametrize(
    ("age", "left"),
    [
        ("12h", [2]),
        ("36h", [0, 2]),
        ("29d", [0, 2]),
        ("31d", [0, 1, 2]),
        ("4w", [0, 2]),
        ("0h", [2]),
        ("999999w", [0, 1, 2]),
    ],
)
def test_prune_by_age(run: Run, aged: Store, age: str, left: list[int]) -> None:
    result = run("cache", "prune", "--older-than", age)
    assert result.exit_code == 0
    assert {each.key for each in aged.records()} == {KEYS[each] for each in left}
    count = 3 - len(left)
    records = "1 record" if count == 1 else f"{count} records"
    assert result.stdout == f"removed {records} from {aged.path}\n"


@pytest.mark.parametrize("age", ["", "d", "30", "30 d", "-1d", "1.5d", "3m", "9999999d", "1d1"])
def test_what_is_no_age_is_wrong_usage(run: Run, aged: Store, age: str) -> None:
    result = run("cache", "prune", "--older-than", age)
    assert result.exit_code == 2
    assert "is no age such as 12h, 30d or 8w" in result.stderr
    assert len(aged.records()) == 3


def test_prune_needs_a_reason(run: Run, store: Store) -> None:
    result = run("cache", "prune")
    assert result.exit_code == 2
    assert "Give --older-than, --other-versions or both." in result.stderr
    assert len(store.records()) == 3


def test_prune_by_version(run: Run, aged: Store) -> None:
    current = {name: version(name) for name in ("jax", "jaxlib")}
    aged.put(replace(aged.records()[0], parts=current))
    (first, *_) = aged.records()
    for number, parts in enumerate([{**current, "jaxlib": "0"}, {"jax": current["jax"]}]):
        aged.put(make_record(f"{number}", parts=parts))
    plant_other_schema(aged)
    result = run("cache", "prune", "--other-versions", "--json")
    assert json.loads(result.stdout) == {"removed": 5}
    assert aged.records() == [first]
    assert not other_schema_is_there(aged)


def test_prune_by_both_takes_either(run: Run, aged: Store) -> None:
    current = {name: version(name) for name in ("jax", "jaxlib")}
    for record in aged.records():
        aged.put(replace(record, parts=current))
    plant_other_schema(aged)
    run("cache", "prune", "--older-than", "2d")
    assert other_schema_is_there(aged)
    run("cache", "prune", "--older-than", "12h", "--other-versions")
    assert [each.key for each in aged.records()] == [KEYS[2]]
    assert not other_schema_is_there(aged)


def test_prune_where_no_version_is_known(
    run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(_cache_removal, "version", unknown)
    result = run("cache", "prune", "--other-versions")
    assert result.exit_code == 1
    assert result.stderr == "Error: jax is not installed: nothing to compare with\n"
    assert len(store.records()) == 3


OTHER_SCHEMA = f"record/{SCHEMA + 1}/{KEYS[0]}"


def plant_other_schema(store: Store) -> None:
    store._use(lambda cache: cache.set(OTHER_SCHEMA, "{}"), None, create=True)


def other_schema_is_there(store: Store) -> bool:
    return store._use(lambda cache: OTHER_SCHEMA in cache, False, create=False)


# export, import


def keyed(**overrides: Any) -> Record:
    """Returns a record under the key that its parts have."""
    record = make_record(**overrides)
    return replace(record, key=digest(record.parts))


CARRIED = [keyed(parts={"batch_size": each}, name=f"carried{each}") for each in (1, 2, 3)]


@pytest.fixture
def carried(store: Store) -> Store:
    """A store of three records that can be exported."""
    store.clear()
    for record in CARRIED:
        store.put(record)
    return store


def test_export_and_import(run: Run, carried: Store, tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    result = run("cache", "export", str(file))
    assert (result.exit_code, result.stdout) == (0, f"exported 3 records to {file}\n")
    carried.clear()
    result = run("cache", "import", str(file))
    assert (result.exit_code, result.stdout) == (
        0,
        f"3 added, 0 replaced, 0 kept in {carried.path}\n",
    )
    assert sorted(carried.records(), key=key_of) == sorted(CARRIED, key=key_of)


def key_of(record: Record) -> str:
    return record.key


def test_import_merges(run: Run, carried: Store, tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    newer = replace(CARRIED[1], name="newer", created="2027-01-01T00:00:00+00:00")
    file.write_text(to_document([CARRIED[0], newer, CARRIED[2]]))
    carried.remove([CARRIED[0].key])
    counts = json.loads(run("cache", "import", str(file), "--json").stdout)
    assert counts == {"added": 1, "replaced": 1, "kept": 1}
    assert sorted(each.name for each in carried.records()) == ["carried1", "carried3", "newer"]


def test_export_of_some_to_standard_output(run: Run, carried: Store) -> None:
    keys = [CARRIED[2].key[:10], CARRIED[0].key, CARRIED[0].key[:10]]
    for as_json in ((), ("--json",)):
        result = run("cache", "export", "-", *keys, *as_json)
        records = from_document(result.stdout.encode())
        assert sorted(each.name for each in records) == ["carried1", "carried3"]
        assert result.stderr == ""


def test_import_from_standard_input(run: Run, carried: Store) -> None:
    document = run("cache", "export", "-").stdout
    carried.clear()
    result = run("cache", "import", "-", "--json", input=document)
    assert json.loads(result.stdout) == {"added": 3, "replaced": 0, "kept": 0}


def test_export_as_json(run: Run, carried: Store, tmp_path: Path) -> None:
    file = str(tmp_path / "records.json")
    data = json.loads(run("cache", "export", file, "--json").stdout)
    assert data == {"exported": 3, "path": file}


def test_export_names_a_record_that_none_would_take(run: Run, store: Store, tmp_path: Path) -> None:
    result = run("cache", "export", str(tmp_path / "file"))  # the keys of the store are made up
    assert result.exit_code == 1
    assert "nothing was exported: the key 'abc1" in result.stderr
    assert list(tmp_path.glob("file")) == []


@pytest.mark.parametrize("fault", ["cleared", "passed over", "bad prefix"])
def test_export_of_nothing_replaces_no_file(
    run: Run, carried: Store, tmp_path: Path, fault: str
) -> None:
    file = tmp_path / "earlier"
    file.write_text("earlier")
    if fault == "cleared":
        carried.clear()
    if fault == "passed over":
        carried.path.chmod(0o777)
    result = run("cache", "export", str(file), *(["zz"] if fault == "bad prefix" else []))
    assert result.exit_code == 1
    assert file.read_text() == "earlier"


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_export_is_as_private_as_the_umask_says(
    run: Run, carried: Store, tmp_path: Path, mask: int
) -> None:
    file = tmp_path / "records.json"
    before = os.umask(mask)
    try:
        run("cache", "export", str(file))
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask


def test_export_that_fails_leaves_what_was_there(
    run: Run, carried: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "folder" / "earlier"
    file.parent.mkdir()
    file.write_text("earlier")
    monkeypatch.setattr(_cache_files.os, "fsync", full)
    result = run("cache", "export", str(file))
    assert result.exit_code == 1
    assert result.stderr == f"Error: {file} cannot be written: [Errno 28] No space left on device\n"
    assert [each.name for each in file.parent.iterdir()] == ["earlier"]
    assert file.read_text() == "earlier"


def test_export_through_a_link(run: Run, carried: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    run("cache", "export", str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert len(from_document((tmp_path / "real").read_bytes())) == 3


@pytest.mark.parametrize("place", ["folder", "pipe", "loop", "nowhere/file", "x" * 300])
def test_export_to_what_is_no_file(run: Run, carried: Store, tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(tmp_path.iterdir())
    result = run("cache", "export", str(tmp_path / place))
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("document", ["", "{}", to_document(CARRIED).replace("carried1", "\x1b")])
def test_refused_file_changes_nothing(
    run: Run, carried: Store, tmp_path: Path, document: str
) -> None:
    carried.clear()
    file = tmp_path / "records.json"
    file.write_text(document)
    result = run("cache", "import", str(file))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {file} was refused: ")
    assert result.stderr.count("\n") == 1
    assert carried.records() == []


def test_reason_of_a_refusal_steers_no_terminal(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    data = json.loads(to_document(CARRIED))
    data["records"][0]["parts"]["\x1b[2J"] = {}
    file.write_text(json.dumps(data))
    result = run("cache", "import", str(file))
    assert result.exit_code == 1
    assert "\x1b" not in result.stderr
    assert "part '" in result.stderr


def test_large_file_is_refused(
    run: Run, carried: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "records.json"
    with file.open("wb") as stream:
        stream.truncate(2000)
    for module in ("_exchange", "_cli._cache_files"):
        monkeypatch.setattr(f"autobatch.{module}.MOST_BYTES", 1999)
    result = run("cache", "import", str(file))
    assert result.exit_code == 1
    assert result.stderr == f"Error: {file} was refused: more than 2.0 KiB\n"


@pytest.mark.parametrize("place", ["nothing", "."])
def test_import_of_what_cannot_be_read(run: Run, tmp_path: Path, place: str) -> None:
    result = run("cache", "import", str(tmp_path / place))
    assert result.exit_code == 1
    assert "cannot be read" in result.stderr


@pytest.mark.parametrize("arguments", [("prune", "--other-versions"), ("import", "-")])
def test_change_that_fails_says_so(run: Run, carried: Store, arguments: tuple[str, ...]) -> None:
    carried.path.chmod(0o777)
    result = run("cache", *arguments, input=to_document(CARRIED))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "can be written by other users" in result.stderr
    assert result.stdout == ""


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
    monkeypatch.setattr(_cache_removal, "can_ask", lambda: True)
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


def test_doctor_looks_at_shipped_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(run("doctor", "--json").stdout)["shipped"] == []
    names = ["good.json", "bad.json", "missing.json", "folder", "one.json"]
    good, bad, missing, folder, one = (str(tmp_path / each) for each in names)
    Path(good).write_text(to_document(CARRIED))
    Path(bad).write_text("{}")
    Path(folder).mkdir()
    Path(one).write_text(to_document(CARRIED[:1]))
    paths = [good, "", bad, missing, folder, one]
    monkeypatch.setenv("AUTOBATCH_CACHE_PATH", os.pathsep.join(paths))
    faults = {
        bad: "not an export of autobatch's records",
        missing: "No such file or directory",
        folder: "Is a directory",
    }
    assert json.loads(run("doctor", "--json").stdout)["shipped"] == [
        {"path": good, "records": 3, "problem": None},
        *({"path": each, "records": None, "problem": faults[each]} for each in faults),
        {"path": one, "records": 1, "problem": None},
    ]
    result = run("doctor")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    start = lines.index(f"shipped       {good}")
    assert [line.strip() for line in lines[start + 1 :]] == [
        "3 records",
        bad,
        f"cannot be read: {faults[bad]}",
        missing,
        f"cannot be read: {faults[missing]}",
        folder,
        f"cannot be read: {faults[folder]}",
        one,
        "1 record",
    ]


def test_doctor_steers_no_terminal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "\x1b[2J"
    data = json.loads(to_document(CARRIED))
    data["records"][0]["parts"]["\x1b[2J"] = {}
    file.write_text(json.dumps(data))
    monkeypatch.setenv("AUTOBATCH_CACHE_PATH", str(file))
    result = run("doctor")
    assert "cannot be read: record 1: " in result.stdout
    assert "\x1b" not in result.stdout


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


@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize(
    "arguments",
    [("list",), ("show", "abc"), ("diff", "abc", "abd"), ("export", "-"), ("remove", "abc")],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("a file", "it is not a folder. Name another folder"),
        ("open to all", "it can be written by other users. Run `chmod"),
        ("damaged", "it is damaged (file is not a database). Delete it"),
        ("closed", "it cannot be used ([Errno 13] Permission denied"),
    ],
)
def test_a_store_that_cannot_be_read_is_an_error(
    run: Run,
    store: Store,
    arguments: tuple[str, ...],
    as_json: tuple[str, ...],
    fault: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    match fault:
        case "a file":
            shutil.rmtree(store.path)
            store.path.write_text("")
        case "open to all":
            store.path.chmod(0o777)
        case "damaged":
            (store.path / "cache.db").write_bytes(b"nothing" * 1000)
        case "closed":  # to the administrator no folder is
            monkeypatch.setattr(_store, "vet_folder", lambda path: refuse(path))
    result = run("cache", *arguments, *as_json)
    assert (result.exit_code, result.stdout) == (1, "")
    message = f"Error: autobatch: the store {store.path} was passed over: {reason}"
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def refuse(path: Path) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_a_record_that_cannot_be_read_hides_no_other(run: Run, store: Store) -> None:
    plant(store, "{}")
    result = run("cache", "list", "--json")
    assert result.exit_code == 0
    assert [each["key"] for each in json.loads(result.stdout)] == KEYS[:0:-1]
    assert result.stderr.startswith(f"autobatch: the store {store.path} was passed over")
    assert result.stderr.count("\n") == 1


def plant(store: Store, text: str) -> None:
    """Puts a text in the place of the first record."""
    name = f"record/{SCHEMA}/{KEYS[0]}"
    store._use(lambda cache: cache.set(name, text), None, create=False)


def test_warnings_steer_no_terminal(run: Run, store: Store) -> None:
    record = make_record(KEYS[0], parts={"a": []})
    plant(store, to_json(record).replace("[]", '{"\\u009b2J": 1}'))
    result = run("cache", "list")
    assert "part 'a' is" in result.stderr
    assert "\x9b" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["cache", "nothing"],
        ["cache", "show"],
        ["cache", "diff", "abc"],
        ["cache", "remove"],
        ["cache", "export"],
        ["cache", "import"],
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


def test_the_package_runs_the_command() -> None:
    command = [sys.executable, "-m", "autobatch", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"autobatch {autobatch.__version__}\n"


def commands(
    command: click.Command = main, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yields a command and all below it, each with its arguments."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, (*path, name))


COMMANDS = dict(commands())
LEAVES = [path for path, each in COMMANDS.items() if not isinstance(each, click.Group)]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_help(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*arguments, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")
    command = COMMANDS[arguments]
    assert command.help
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert [each.name for each in options if not each.help] == []


@pytest.mark.source
def test_reference_is_that_of_the_command() -> None:
    script = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "generate_cli.py"))
    assert script["PATH"].read_text() == script["reference"](), "run `make docs`"
    headings = [line for line in script["reference"]().splitlines() if line.startswith("## ")]
    assert headings == ["## " + " ".join(["autobatch", *path]) for path in COMMANDS]


@pytest.mark.parametrize("arguments", LEAVES, ids=" ".join)
def test_every_command_has_json(arguments: tuple[str, ...]) -> None:
    assert "--json" in CliRunner().invoke(main, [*arguments, "--help"]).stdout


READING = [
    ("list",),
    ("list", "--json"),
    ("show", "abc"),
    ("diff", "abc", "ffff"),
    ("path",),
    ("export", "-", CARRIED[0].key),
]
CHANGING = [
    ("remove", "abc"),
    ("prune", "--older-than", "1d", "--other-versions"),
    ("clear", "--yes"),
    ("import", "-"),
]


@pytest.mark.parametrize("arguments", [*READING, *CHANGING])
def test_cache_loads_no_jax(store: Store, arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from autobatch._cli import main; main(standalone_mode=False);"
        "print(sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    store.put(CARRIED[0])
    command = ["cache", *arguments, "--store", str(store.path)]
    done = run_outside(code, *command, input=to_document(CARRIED))
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == ["[]"]
    assert done.stdout != ""


@pytest.mark.parametrize("arguments", READING)
def test_closed_pipe_is_no_traceback(store: Store, arguments: tuple[str, ...]) -> None:
    store.put(CARRIED[0])
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
    (unrolled,) = [line for line in tuned[0]["table"].splitlines() if " unrolled " in line]
    assert "not tried" not in unrolled
