"""The store keeps records, and whatever is wrong with it is a miss and one warning."""

from __future__ import annotations

import os
import pickle
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diskcache
import pytest
from records import KEY, make_record

from autobatch import AutobatchWarning, _database, _folder, _store
from autobatch._record import SCHEMA, Record, to_json
from autobatch._store import Merged, Store, default_folder, open_store

NAME = f"record/{SCHEMA}/{KEY}"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = open_store(tmp_path / "records")
    assert found is not None
    return found


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with one record."""
    store.put(make_record())
    return store


def database(store: Store) -> Path:
    return store.path / "cache.db"


@contextmanager
def connection(store: Store) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(database(store), isolation_level=None)) as opened:
        yield opened


def plant(store: Store, **columns: Any) -> None:
    """Writes a row as anybody with the folder in hand could."""
    row = {"key": NAME, "raw": 1, "mode": 1, "filename": None, "value": None, **columns}
    with connection(store) as opened:
        opened.execute(
            "INSERT OR REPLACE INTO Cache(key, raw, mode, filename, value, size)"
            " VALUES (:key, :raw, :mode, :filename, :value, 0)",
            row,
        )


def kept_rows(store: Store) -> set[Any]:
    with connection(store) as opened:
        return {key for (key,) in opened.execute("SELECT key FROM Cache")}


def faults(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Returns what `act` returns and the warnings it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = act()
    assert all(each.category is AutobatchWarning for each in caught)
    return result, [str(each.message) for each in caught]


def assert_passed_over(store: Store, cause: str) -> None:
    """Everything is a miss, and the cause is told once, with the folder and a remedy."""
    results, texts = faults(
        lambda: (
            store.get(KEY),
            store.put(make_record()),
            store.records(),
            store.merge([make_record()], lambda new, old: True),
            store.remove([KEY]),
            store.prune(lambda record: True, other_schemas=True),
            store.clear(),
            store.get(KEY),
            store.change_lease(KEY, lambda _: "lease", create=True),
        )
    )
    assert results == (None, None, [], Merged(), 0, 0, 0, None, False)
    (text,) = texts
    assert text.startswith(f"autobatch: the store {store.path} was passed over: it {cause}")
    assert text.endswith(".")
    problem = store.problem()
    assert problem is not None
    assert problem.startswith(cause)


# Keeping


def test_record_comes_back_equal(filled: Store) -> None:
    assert filled.get(KEY) == make_record()
    assert filled.records() == [make_record()]
    assert filled.get("another") is None
    assert filled.problem() is None


def test_put_replaces(filled: Store) -> None:
    filled.put(make_record(name="newer"))
    assert [each.name for each in filled.records()] == ["newer"]


def test_newest_comes_first(store: Store) -> None:
    for day in (2, 3, 1):
        store.put(make_record(key=f"key{day}", created=f"2026-07-0{day}T00:00:00+00:00"))
    assert [each.key for each in store.records()] == ["key3", "key2", "key1"]


def test_remove_and_clear_count_what_was_there(store: Store) -> None:
    for key in "abcd":
        store.put(make_record(key=key))
    assert store.remove(["a", "b", "nothing"]) == 2
    assert store.clear() == 2
    assert store.clear() == 0
    assert store.records() == []


def test_merge_asks_where_a_key_is_taken(store: Store) -> None:
    for key in "ab":
        store.put(make_record(key=key, name="old"))
    asked: list[tuple[str, str]] = []

    def wins(new: Record, old: Record) -> bool:
        asked.append((new.name, old.name))
        return new.key == "a"

    assert store.merge([make_record(key=each, name=f"new {each}") for each in "abc"], wins) == (
        Merged(added=1, replaced=1, kept=1)
    )
    assert asked == [("new a", "old"), ("new b", "old")]
    names = {each.key: each.name for each in store.records()}
    assert names == {"a": "new a", "b": "old", "c": "new c"}


def test_merge_takes_one_record_after_the_other(store: Store) -> None:
    twice = [make_record(name="first"), make_record(name="second")]
    assert store.merge(twice, lambda new, old: True) == Merged(added=1, replaced=1)
    assert [each.name for each in store.records()] == ["second"]


def test_merge_is_whole_or_not_at_all(filled: Store) -> None:
    bad = make_record(key="bad", tuned_in_s=float("nan"))
    merged, texts = faults(
        lambda: filled.merge([make_record(key="good"), bad], lambda new, old: True)
    )
    assert merged == Merged()
    assert len(texts) == 1
    assert filled.records() == [make_record()]


def test_prune_removes_what_is_stale(store: Store) -> None:
    for key in "abc":
        store.put(make_record(key=key))
    assert store.prune(lambda record: record.key != "b", other_schemas=False) == 2
    assert [each.key for each in store.records()] == ["b"]


def test_prune_leaves_what_is_no_record(filled: Store) -> None:
    theirs = [f"record/{SCHEMA + 1}/{KEY}", f"record/{SCHEMA}0/{KEY}"]
    for key in [*theirs, "other"]:
        plant(filled, key=key, value="{}")
    damaged = f"record/{SCHEMA}/damaged"
    plant(filled, key=damaged, value="damaged")
    assert filled.prune(lambda record: False, other_schemas=False) == 0
    assert filled.prune(lambda record: False, other_schemas=True) == 2
    assert filled.prune(lambda record: True, other_schemas=True) == 1
    assert kept_rows(filled) == {damaged, "other"}


def test_leases_are_no_records(filled: Store) -> None:
    theirs = f"lease/{SCHEMA + 1}/{KEY}"
    plant(filled, key=theirs, value="{}")
    for key in (KEY, "another"):
        assert filled.change_lease(key, lambda text: "lease" if text is None else "wrong")
    assert filled.records() == [make_record()]
    assert filled.get("another") is None
    assert filled.remove(["another"]) == 0
    assert filled.prune(lambda record: False, other_schemas=False) == 0
    assert theirs in kept_rows(filled)
    assert filled.prune(lambda record: False, other_schemas=True) == 0
    assert kept_rows(filled) == {NAME, f"lease/{SCHEMA}/{KEY}", f"lease/{SCHEMA}/another"}
    assert filled.clear() == 1
    assert kept_rows(filled) == set()


def test_lease_is_changed_in_one_step(filled: Store) -> None:
    seen: list[str | None] = []

    def changed(text: str | None) -> str | None:
        seen.append(text)
        return {None: "first", "first": "second"}.get(text)

    for _ in range(4):
        assert filled.change_lease(KEY, changed)
    assert seen == [None, "first", "second", None]


def test_lease_makes_a_store_only_where_it_may(store: Store) -> None:
    assert not store.change_lease(KEY, lambda _: "lease")
    assert not store.path.exists()
    assert store.change_lease(KEY, lambda _: "lease", create=True)
    assert store.records() == []


def test_lease_that_cannot_be_read_is_as_good_as_none(filled: Store) -> None:
    for columns in ({"mode": 4, "value": b"pickle"}, {"mode": 2, "filename": "lease.val"}):
        plant(filled, key=f"lease/{SCHEMA}/{KEY}", **columns)
        assert filled.change_lease(KEY, lambda text: repr(text))
        assert filled.change_lease(KEY, lambda text: None if text == "None" else "wrong")
        assert kept_rows(filled) == {NAME}


def test_nothing_is_evicted(store: Store) -> None:
    padding = {"padding": "x" * 200_000}  # 60 MB in all, after which diskcache's own limits bite
    keys = [f"{number:03}" for number in range(300)]
    for key in keys:
        store.put(make_record(key=key, parts=padding))
    assert sorted(each.key for each in store.records()) == keys


def test_another_process_reads_it(filled: Store) -> None:
    code = (
        "import sys; from autobatch._store import open_store;"
        "print(open_store(sys.argv[1]).get(sys.argv[2]).name); print('jax' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(filled.path), KEY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["vector_dot", "False"]


def test_child_of_a_fork_uses_the_store(filled: Store) -> None:
    # In a process of its own, since this one has jax's threads.
    code = """
import os, sys
from autobatch._store import open_store
store = open_store(sys.argv[1])
assert store.get(sys.argv[2]) is not None
child = os.fork()
if child == 0:
    os._exit(0 if store.get(sys.argv[2]) is not None and store.clear() == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), store.records())
"""
    command = [sys.executable, "-W", "error", "-c", code, str(filled.path), KEY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "[]"]


def test_threads_share_a_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_database, "LOCK_TIMEOUT_S", 60)  # a busy machine is no fault
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(10):
                key = f"{number}-{step}"
                store.put(make_record(key=key))
                assert store.get(key) is not None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.records()) == 40


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads Linux's /proc")
def test_no_connection_outlives_an_operation(filled: Store) -> None:
    filled.get(KEY)
    opened = Path("/proc/self/fd").iterdir()
    targets = [str(each.readlink()) for each in opened if os.path.lexists(each)]
    assert [each for each in targets if str(filled.path) in each] == []


# Which folder


def test_one_store_per_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert open_store(tmp_path / "real") is open_store(str(tmp_path / "link"))
    assert open_store(tmp_path / "real") is not open_store(tmp_path / "other")


def test_false_is_no_store() -> None:
    assert open_store(False) is None


@pytest.mark.parametrize("misuse", [True, 3, "", b"folder", "a\0b", object()])
def test_misuse_is_a_value_error(misuse: Any) -> None:
    with pytest.raises(ValueError, match="store must be the path of a folder"):
        open_store(misuse)


def test_default_folder_is_read_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        monkeypatch.setenv("AUTOBATCH_CACHE_DIR", str(tmp_path / name))
        assert default_folder() == tmp_path / name
        store = open_store(None)
        assert store is not None
        assert store.path == tmp_path / name
    monkeypatch.delenv("AUTOBATCH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder().is_relative_to(tmp_path)
    assert default_folder().name == "autobatch"


def test_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "parent" / "records")
    assert store is not None
    store.put(make_record())
    for folder in (store.path, store.path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_reading_makes_no_folder(store: Store) -> None:
    assert store.get(KEY) is None
    assert store.records() == []
    assert store.clear() == 0
    assert not store.path.exists()
    store.path.mkdir()
    assert store.get(KEY) is None
    assert list(store.path.iterdir()) == []


def test_removed_folder_is_made_again(filled: Store) -> None:
    database(filled).unlink()
    filled.path.rmdir()
    assert filled.get(KEY) is None
    filled.put(make_record())
    assert filled.get(KEY) == make_record()


def test_path_may_hold_what_a_shell_expands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELSEWHERE", str(tmp_path / "elsewhere"))
    store = open_store(tmp_path / "$ELSEWHERE")
    assert store is not None
    assert_passed_over(store, "has a variable in its path")
    spaced = open_store(tmp_path / "a b?mode=memory#%20'c")
    assert spaced is not None
    spaced.put(make_record())
    assert Store(spaced.path).get(KEY) == make_record()
    assert database(spaced).exists()


# Faults


def test_path_that_is_a_file(store: Store) -> None:
    store.path.write_text("mine")
    assert_passed_over(store, "is not a folder")
    assert store.path.read_text() == "mine"


def test_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    store = Store(tmp_path / "file" / "records")
    assert_passed_over(store, "cannot be used (")


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_folder_that_others_may_write(filled: Store, mode: int) -> None:
    filled.path.chmod(mode)
    assert_passed_over(filled, "can be written by other users. Run `chmod go-w")
    filled.path.chmod(0o755)
    assert filled.get(KEY) == make_record()


def test_folder_of_another_user(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    another = filled.path.stat().st_uid + 1
    monkeypatch.setattr(_folder.os, "geteuid", lambda: another)
    assert_passed_over(filled, "belongs to another user")


@pytest.mark.parametrize("kept", [100, 5000])
def test_truncated_database(filled: Store, kept: int) -> None:
    with database(filled).open("r+b") as file:
        file.truncate(kept)
    assert_passed_over(filled, "is damaged")


def test_truncated_database_while_in_use(store: Store) -> None:
    for number in range(50):
        store.put(make_record(key=str(number)))
    os.truncate(database(store), database(store).stat().st_size // 2)
    result, texts = faults(store.records)
    assert result == []
    assert len(texts) == 1


def test_garbage_database(store: Store) -> None:
    store.path.mkdir(mode=0o700)
    database(store).write_bytes(b"garbage" * 1000)
    assert_passed_over(store, "is damaged (file is not a database). Delete it: `rm ")


def test_emptied_database_is_a_new_one(filled: Store) -> None:
    os.truncate(database(filled), 0)
    fresh = Store(filled.path)
    fresh.put(make_record())
    assert fresh.get(KEY) == make_record()


def test_database_emptied_while_in_use(filled: Store) -> None:
    os.truncate(database(filled), 0)
    assert faults(lambda: filled.get(KEY))[0] is None
    filled.put(make_record())
    assert filled.get(KEY) == make_record()


def test_database_is_not_mapped_into_memory(filled: Store) -> None:
    cache = _database.Cache(filled.path)
    assert cache._sql("PRAGMA mmap_size").fetchone() in (None, (0,))
    cache.close()


def test_locked_database(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_database, "LOCK_TIMEOUT_S", 0.01)
    fresh = Store(filled.path)
    with connection(filled) as opened:
        opened.execute("BEGIN EXCLUSIVE")
        assert_passed_over(fresh, "is locked by another process")
    assert filled.get(KEY) == make_record()


def test_database_locked_later(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # The object is open already: these are other statements of diskcache's.
    monkeypatch.setattr(_database, "LOCK_TIMEOUT_S", 0.01)
    filled._cache = _database.Cache(filled.path)
    filled._cache.close()
    with connection(filled) as opened:
        opened.execute("BEGIN IMMEDIATE")  # readers go on, writers wait
        assert filled.get(KEY) == make_record()
        _, texts = faults(lambda: filled.put(make_record(name="newer")))
        assert len(texts) == 1
        assert "is locked by another process" in texts[0]
    filled.put(make_record(name="newer"))
    assert [each.name for each in filled.records()] == ["newer"]


def test_commit_that_fails_leaves_no_lock(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_database, "LOCK_TIMEOUT_S", 0.01)
    filled._cache = _database.Cache(filled.path)
    filled._cache.close()
    with connection(filled) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM Cache").fetchone()  # a commit has to wait for readers
        _, texts = faults(lambda: filled.put(make_record(name="newer")))
        assert len(texts) == 1
    assert filled.get(KEY) == make_record()
    filled.put(make_record(name="newest"))
    assert [each.name for each in filled.records()] == ["newest"]


def test_database_locked_while_it_is_opened(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # diskcache's own loops would wait for a minute here.
    def wait(_: float) -> None:
        raise AssertionError("diskcache waits by itself")

    monkeypatch.setattr(_database, "LOCK_TIMEOUT_S", 0.01)
    monkeypatch.setattr(_store, "vet_schema", lambda _: None)
    monkeypatch.setattr(diskcache.core, "time", SimpleNamespace(time=time.time, sleep=wait))
    with connection(filled) as opened:
        opened.execute("BEGIN EXCLUSIVE")
        assert_passed_over(Store(filled.path), "is locked by another process")


def test_waits_are_short() -> None:
    assert 2 * _database.LOCK_TIMEOUT_S <= 2


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (sqlite3.OperationalError("attempt to write a readonly database"), "cannot be used"),
        (sqlite3.OperationalError("unable to open database file"), "cannot be used"),
        (sqlite3.OperationalError("database or disk is full"), "has no room"),
        (sqlite3.DatabaseError("database disk image is malformed"), "is damaged"),
        (PermissionError(13, "Permission denied"), "cannot be used"),
        (OSError(28, "No space left on device"), "has no room"),
        (OSError(30, "Read-only file system"), "cannot be used"),
        (RecursionError("too deep"), "holds, or was given, what is no record"),
    ],
)
def test_errors_below_diskcache(
    filled: Store, monkeypatch: pytest.MonkeyPatch, error: Exception, cause: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(diskcache.core.sqlite3, "connect", fail)
    assert_passed_over(filled, cause)


def test_store_that_cannot_be_written(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # diskcache reports every failure to begin a transaction as a timeout.
    bounded = _database.Cache._sql.fget  # pyright: ignore[reportFunctionMemberAccess]

    def refuse(cache: Any) -> Any:
        def execute(statement: str, *arguments: Any) -> Any:
            if statement.startswith("BEGIN"):
                raise sqlite3.OperationalError("attempt to write a readonly database")
            return bounded(cache)(statement, *arguments)

        return execute

    monkeypatch.setattr(_database.Cache, "_sql", property(refuse))
    assert filled.get(KEY) == make_record()
    _, texts = faults(lambda: filled.put(make_record(name="newer")))
    (text,) = texts
    assert "cannot be used (attempt to write a readonly database). Make it readable" in text
    assert filled.get(KEY) == make_record()


def test_each_cause_is_told_once(filled: Store) -> None:
    filled.path.chmod(0o777)
    assert len(faults(lambda: filled.get(KEY))[1]) == 1
    assert len(faults(lambda: Store(filled.path).get(KEY))[1]) == 0
    filled.path.chmod(0o700)
    plant(filled, value="no record")
    assert len(faults(lambda: filled.get(KEY))[1]) == 1


def test_interrupt_is_not_a_fault(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_store, "from_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        filled.get(KEY)


# What others put there


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "executed"


def use_everything(store: Store) -> None:
    for fresh in (store, Store(store.path)):
        faults(lambda: fresh.get(KEY))  # noqa: B023
        faults(fresh.records)
        faults(lambda: fresh.merge([make_record()], lambda new, old: False))  # noqa: B023
        faults(lambda: fresh.prune(lambda record: False, other_schemas=True))  # noqa: B023
        faults(lambda: fresh.put(make_record()))  # noqa: B023
        faults(lambda: fresh.remove([KEY]))  # noqa: B023
        faults(lambda: fresh.change_lease(KEY, lambda text: text))  # noqa: B023
        faults(fresh.clear)
        faults(fresh.problem)


def test_payload_works(marker: Path) -> None:
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists()


@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4, 5, None, "4"])
@pytest.mark.parametrize("raw", [0, 1])
@pytest.mark.parametrize("place", ["value", "file"])
def test_planted_value_is_not_executed(
    filled: Store, marker: Path, mode: Any, raw: int, place: str
) -> None:
    payload = pickle.dumps(Payload(marker))
    (filled.path / "payload.val").write_bytes(payload)
    if place == "value":
        plant(filled, raw=raw, mode=mode, value=payload)
    else:
        plant(filled, raw=raw, mode=mode, filename="payload.val")
    use_everything(filled)
    assert not marker.exists()
    assert (filled.path / "payload.val").exists()


@pytest.mark.parametrize("raw", [0, 1, 2, None])
def test_planted_key_is_not_executed(filled: Store, marker: Path, raw: Any) -> None:
    plant(filled, key=pickle.dumps(Payload(marker)), raw=raw, value="{}")
    assert filled.records() == [make_record()]
    use_everything(filled)
    assert not marker.exists()


@pytest.mark.parametrize("mode", [1, 2, 3, 4])
@pytest.mark.parametrize("outside", ["../victim", "{folder}/victim"])
def test_planted_file_name_leads_nowhere(
    filled: Store, tmp_path: Path, mode: int, outside: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text(to_json(make_record(name="from the file")))
    plant(filled, mode=mode, filename=outside.format(folder=tmp_path))
    assert faults(lambda: filled.get(KEY))[0] is None
    assert faults(filled.records)[0] == []
    filled.put(make_record())  # diskcache removes the file of the value it replaces
    plant(filled, mode=mode, filename=outside.format(folder=tmp_path))
    assert filled.clear() == 1
    assert victim.exists()


def test_planted_value_is_replaced(filled: Store) -> None:
    plant(filled, mode=4, value=pickle.dumps("anything"))
    result, texts = faults(lambda: filled.get(KEY))
    assert result is None
    assert len(texts) == 1
    assert faults(lambda: filled.merge([make_record()], lambda new, old: False)) == (
        Merged(added=1),
        [],
    )
    assert filled.get(KEY) == make_record()
    plant(filled, mode=4, value=pickle.dumps("anything"))
    filled.put(make_record())
    assert filled.get(KEY) == make_record()


def test_lock_of_diskcache_is_no_record(filled: Store) -> None:
    with closing(diskcache.Cache(filled.path)) as stock:
        diskcache.Lock(stock, "lock").acquire()
        stock.set(("a", "tuple"), {"any": "thing"})
    assert filled.records() == [make_record()]
    assert filled.clear() == 1
    with closing(diskcache.Cache(filled.path)) as stock:
        assert len(stock) == 2


@pytest.mark.parametrize(
    "value",
    ["", "no json", "[]", "{}", '{"schema": 0}', "[" * 100_000, to_json(make_record(key="other"))],
)
def test_damaged_record_does_not_hide_others(filled: Store, value: str) -> None:
    filled.put(make_record(key="good"))
    plant(filled, value=value)
    assert faults(lambda: filled.get(KEY))[0] is None
    assert [each.key for each in faults(filled.records)[0]] == ["good"]
    assert filled.clear() == 2


def test_other_schemas_are_left_alone(filled: Store) -> None:
    theirs = f"record/{SCHEMA + 1}/{KEY}"
    plant(filled, key=theirs, value='{"schema": 99}')
    filled.put(make_record(name="newer"))
    assert [each.name for each in filled.records()] == ["newer"]
    assert filled.clear() == 1
    assert kept_rows(filled) == {theirs}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eviction_policy", "least-recently-used"),
        ("size_limit", 1),
        ("statistics", 1),
        ("_directory", "/nowhere"),
        ("get", "not callable"),
        ("disk__directory", "/nowhere"),
        ("disk_compress_level", 1),
        ("sqlite_mmap_size", 2**40),
        ("sqlite_busy_timeout", 10**9),
        ("sqlite_hard_heap_limit", 1),
        ("sqlite_mmap_size = 1; --", 0),
        (b"bytes", 0),
    ],
)
def test_planted_setting(filled: Store, key: Any, value: Any) -> None:
    with connection(filled) as opened:
        opened.execute("INSERT OR REPLACE INTO Settings VALUES (?, ?)", (key, value))
    fresh = Store(filled.path)
    assert_passed_over(fresh, "holds a database that is not autobatch's (setting")


@pytest.mark.parametrize("key", ["sqlite_mmap_size", "sqlite_hard_heap_limit"])
def test_setting_planted_while_in_use_reaches_no_pragma(filled: Store, key: str) -> None:
    with connection(filled) as opened:
        opened.execute("INSERT OR REPLACE INTO Settings VALUES (?, ?)", (key, 2**40))
    assert_passed_over(filled, "holds a database that is not autobatch's (setting")


def test_database_of_another_program_is_not_touched(store: Store) -> None:
    store.path.mkdir(mode=0o700)
    with connection(store) as opened:
        opened.execute("CREATE TABLE theirs (a)")
    before = database(store).read_bytes()
    assert_passed_over(store, "holds a database that is not autobatch's (")
    assert database(store).read_bytes() == before


def test_cache_of_another_program_is_not_touched(store: Store) -> None:
    store.path.mkdir(mode=0o700)
    with closing(diskcache.Cache(store.path)) as stock:
        stock.set("their", "value")
    before = database(store).read_bytes()
    assert_passed_over(store, "holds a database that is not autobatch's (")
    assert database(store).read_bytes() == before


def test_view_in_place_of_a_table(filled: Store) -> None:
    with connection(filled) as opened:
        opened.execute("ALTER TABLE Cache RENAME TO Other")
        opened.execute("CREATE VIEW Cache AS SELECT * FROM Other")
    assert_passed_over(Store(filled.path), "holds a database that is not autobatch's (")


def test_store_of_an_unfinished_opening_is_finished(store: Store) -> None:
    store.path.mkdir(mode=0o700)
    with connection(store) as opened:
        opened.execute("CREATE TABLE Settings (key TEXT NOT NULL UNIQUE, value)")
        opened.execute("INSERT INTO Settings VALUES ('cull_limit', 0)")
    store.put(make_record())
    assert store.get(KEY) == make_record()


def test_database_that_is_a_link(store: Store, tmp_path: Path) -> None:
    store.path.mkdir(mode=0o700)
    database(store).symlink_to(tmp_path / "theirs.db")
    assert_passed_over(store, "holds a database that is not autobatch's (cache.db is not a plain")
    assert not (tmp_path / "theirs.db").exists()


def test_journal_that_names_a_file_to_delete(filled: Store, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    plant_journal(filled, victim)
    assert_passed_over(filled, "holds a database that is not autobatch's (its journal names")
    assert victim.exists()
    with connection(filled) as opened:  # what SQLite itself would have done
        opened.execute("SELECT * FROM Cache").fetchall()
    assert not victim.exists()


def test_interrupted_transaction_is_rolled_back(filled: Store) -> None:
    plant_journal(filled, None)
    assert filled.get(KEY) == make_record()
    assert filled.records() == [make_record()]


def plant_journal(store: Store, victim: Path | None) -> None:
    """Leaves the journal of a transaction cut short, which may name a file as SQLite's own do."""
    journal = Path(f"{database(store)}-journal")
    with connection(store) as opened:
        page = opened.execute("PRAGMA page_size").fetchone()[0]
        opened.execute("PRAGMA cache_size = 1")  # so that it writes before the end
        opened.execute("BEGIN IMMEDIATE")
        for number in range(200):
            row = (str(number), "x" * page)
            opened.execute("INSERT INTO Cache(key, raw, mode, value) VALUES (?, 1, 1, ?)", row)
        cut_short = database(store).read_bytes(), journal.read_bytes()
        opened.execute("ROLLBACK")
    database(store).write_bytes(cut_short[0])
    tail = b""
    if victim is not None:
        name = os.fsencode(victim)
        numbers = [0x40000000 // page + 1, len(name), sum(name)]
        first, *others = (each.to_bytes(4) for each in numbers)
        tail = first + name + b"".join(others) + bytes.fromhex("d9d505f920a163d7")
    journal.write_bytes(cut_short[1] + tail)


def test_the_path_of_a_store_is_no_diagnosis() -> None:
    folder = Path("/data/locked/full")
    denied = PermissionError(13, "Permission denied", str(folder / "cache.db"))
    assert _database.diagnosis(denied, folder).what == "cannot be used"
    locked = sqlite3.OperationalError("database is locked")
    assert _database.diagnosis(locked, folder).what == "is locked by another process"
