"""The records on disk: one folder, through diskcache, text only.

Here are the disk that holds nothing but text, and the rule that a store never breaks a program:
whatever goes wrong is a miss and one warning. Whether a folder may be used is in `_folder`, what a
record is in `_record`; when one is read or written is up to the callers.
"""

from __future__ import annotations

import errno
import os
import shlex
import sqlite3
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import diskcache
import platformdirs
from diskcache.core import METADATA, MODE_RAW

from autobatch._errors import AutobatchWarning
from autobatch._folder import ELSEWHERE, Fault, foreign, make_folder, vet_files, vet_folder
from autobatch._record import SCHEMA, Record, from_json, to_json

LOCK_TIMEOUT_S = 1
"""Most seconds that a statement waits for a lock; an operation waits at most twice."""

_T = TypeVar("_T")

# The schema is part of the name, so that other versions of autobatch keep their records.
_ANY_SCHEMA = "record/"
_PREFIX = f"{_ANY_SCHEMA}{SCHEMA}/"

_DATABASE = diskcache.core.DBNAME
_SETTINGS: dict[str, int | str] = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",
    "size_limit": 2**62,
    "cull_limit": 0,
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 2**11,
    "sqlite_journal_mode": "delete",  # home folders lie on network file systems, where WAL fails
    "sqlite_mmap_size": 0,  # reading past a truncated file is an error, not a signal
    # Opening makes 25 small commits. Without waiting for the disk that takes 2 ms instead of 150,
    # and what a power cut may destroy can be measured again.
    "sqlite_synchronous": 0,
    "disk_min_file_size": 0,
    "disk_pickle_protocol": 0,
}
_ENTRIES = {
    ("table", "Settings"),
    ("table", "Cache"),
    ("index", "sqlite_autoindex_Settings_1"),
    ("index", "Cache_key_raw"),
    ("index", "Cache_expire_time"),
    *(("trigger", f"Settings_count_{event}") for event in ("insert", "delete")),
    *(("trigger", f"Settings_size_{event}") for event in ("insert", "update", "delete")),
}


class _TextDisk(diskcache.Disk):
    """Keys and values are text inside the database. No row can have a file or a pickle read."""

    def put(self, key: Any) -> tuple[Any, Literal[True]]:
        if type(key) is not str:
            raise TypeError(f"keys are text; got {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: Any) -> str | None:
        return key if raw == 1 and type(key) is str else None

    def store(self, value: Any, read: bool, key: Any = diskcache.UNKNOWN) -> tuple[Any, ...]:
        if read or type(value) is not str:
            raise TypeError(f"values are text; got {type(value).__name__}")
        return 0, MODE_RAW, None, value

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> str:
        if read or mode != MODE_RAW or filename is not None or type(value) is not str:
            raise ValueError(f"an entry of mode {mode!r:.80} that is not plain text")
        return value

    def filename(self, key: Any = diskcache.UNKNOWN, value: Any = diskcache.UNKNOWN) -> Any:
        raise TypeError("values are never kept in files of their own")

    def remove(self, file_path: Any) -> None:
        pass  # only a planted row names a file


class _Cache(diskcache.Cache):
    """A diskcache whose settings are fixed and whose waits are bounded."""

    def __init__(self, folder: Path) -> None:
        if os.path.expandvars(folder) != str(folder):  # diskcache would use another folder
            raise Fault("has a variable in its path", ELSEWHERE)
        try:
            super().__init__(str(folder), LOCK_TIMEOUT_S, _TextDisk, **_SETTINGS)
        except BaseException:
            self.close()
            raise

    def reset(self, key: str, value: Any = diskcache.ENOVAL, update: bool = True) -> Any:
        # Called with what stands in the database, on opening and for every connection. It would
        # become an attribute of this object or the text of a PRAGMA.
        if key not in METADATA and value not in (diskcache.ENOVAL, _SETTINGS.get(key)):
            raise foreign(f"setting {key!r:.80}")
        return super().reset(key, value, update)  # pyright: ignore[reportArgumentType]

    @property
    def _sql(self) -> Callable[..., sqlite3.Cursor]:
        # Private to diskcache, but all its statements go through here. It repeats those that find
        # the database locked for 60 s, and knows them by the text of the error.
        execute = super()._sql

        def bounded(*arguments: Any) -> sqlite3.Cursor:
            give_up = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    return execute(*arguments)
                except sqlite3.OperationalError as error:
                    if str(error) != "database is locked":
                        raise
                    if time.monotonic() >= give_up:
                        raise sqlite3.OperationalError("the database stays locked") from None
                time.sleep(0.001)

        return bounded


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What became of records that were merged into a store.

    Attributes:
        added: how many had no counterpart there.
        replaced: how many took the place of theirs.
        kept: how many did not.
    """

    added: int = 0
    replaced: int = 0
    kept: int = 0


class Store:
    """One folder of records, for any thread, and for the child of a fork too.

    No operation raises: a fault is a miss, and warned about once per process and cause.

    Attributes:
        path: the folder, resolved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cache: _Cache | None = None

    def get(self, key: str) -> Record | None:
        """Returns the record of `key`, or None."""
        return self._attempt(lambda cache: _read(cache, _PREFIX + key), None)

    def put(self, record: Record) -> None:
        """Keeps `record` in place of what its key had; makes the folder if there is none."""
        name = _PREFIX + record.key
        self._attempt(lambda cache: cache.set(name, to_json(record)), False, create=True)

    def records(self) -> list[Record]:
        """Returns every record of this schema, the newest first."""

        def read_all(cache: _Cache) -> list[Record]:
            found: list[Record] = []
            for name in _names(cache, _PREFIX):
                try:
                    record = _read(cache, name)
                except ValueError as error:
                    self._warn(error)  # the others are still good
                else:
                    found += [] if record is None else [record]
            return sorted(found, key=lambda each: (each.created, each.key), reverse=True)

        return self._attempt(read_all, [])

    def merge(self, records: Iterable[Record], wins: Callable[[Record, Record], bool]) -> Merged:
        """Puts in `records`, all of them or, at a fault, none.

        Args:
            records: what is put in, one after the other.
            wins: whether the first of two records takes the place of the second, which its key
                has already. One that cannot be read is as good as none.
        """

        def put(cache: _Cache, record: Record) -> str:
            known = _readable(cache, _PREFIX + record.key)
            if known is not None and not wins(record, known):
                return "kept"
            cache.set(_PREFIX + record.key, to_json(record))
            return "added" if known is None else "replaced"

        def put_all(cache: _Cache) -> Merged:
            with cache.transact():
                return Merged(**Counter(put(cache, each) for each in records))

        return self._attempt(put_all, Merged(), create=True)

    def remove(self, keys: Iterable[str]) -> int:
        """Removes the records of `keys` and returns how many there were."""
        names = [_PREFIX + key for key in keys]
        return self._attempt(lambda cache: _delete(cache, names), 0)

    def prune(self, stale: Callable[[Record], bool], *, other_schemas: bool) -> int:
        """Removes the records that are stale and returns how many there were.

        Args:
            stale: whether a record goes. One that cannot be read stays.
            other_schemas: whether all records of other schemas go too, unread.
        """

        def sweep(cache: _Cache) -> int:
            with cache.transact():
                names = set(_names(cache, _ANY_SCHEMA))
                ours = {name: _readable(cache, name) for name in _names(cache, _PREFIX)}
                gone = [name for name, record in ours.items() if record and stale(record)]
                return _delete(cache, [*gone, *(names - set(ours) if other_schemas else ())])

        return self._attempt(sweep, 0)

    def clear(self) -> int:
        """Removes every record of this schema, readable or not, and returns how many."""
        return self._attempt(lambda cache: _delete(cache, _names(cache, _PREFIX)), 0)

    def problem(self) -> str | None:
        """Returns why no record can be kept here, found by trying to write, or None."""

        def write(cache: _Cache) -> None:
            name = f"probe/{os.getpid()}"
            cache.set(name, "")
            cache.delete(name)

        try:
            self._use(write, None, create=True)
        except Exception as error:
            return str(_diagnosis(error, self.path))
        return None

    def _attempt(self, work: Callable[[_Cache], _T], miss: _T, *, create: bool = False) -> _T:
        try:
            return self._use(work, miss, create=create)
        except Exception as error:  # whatever it is, the user's program goes on
            self._warn(error)
            return miss

    def _use(self, work: Callable[[_Cache], _T], absent: _T, *, create: bool) -> _T:
        """Returns `work(cache)`; `absent` where there is no store and none is to be made."""
        database = self.path / _DATABASE
        if create:
            make_folder(self.path)
        elif not os.path.lexists(self.path):
            return absent
        vet_folder(self.path)
        vet_files(database)
        cache = self._cache
        if not database.exists():
            if not create:
                return absent
            cache = None  # it was there and is gone
        try:
            if cache is None:
                _vet_schema(database)
                cache = self._cache = _Cache(self.path)
            return work(cache)
        except Exception:
            self._cache = None  # the file may be another by now: look at it afresh
            raise
        finally:
            # No connection is left open: it would not survive a fork, and where a commit failed
            # it would hold the lock.
            if cache is not None:
                cache.close()

    def _warn(self, error: Exception) -> None:
        fault = _diagnosis(error, self.path)
        if (self.path, fault.what) not in _WARNED:
            _WARNED.add((self.path, fault.what))
            text = f"autobatch: the store {self.path} was passed over: it {fault}"
            warnings.warn(text, AutobatchWarning, stacklevel=2)


_WARNED: set[tuple[Path, str]] = set()
_STORES: dict[Path, Store] = {}


def open_store(store: str | os.PathLike[str] | bool | None) -> Store | None:
    """Returns the store that the option `store` means; the same object for the same folder.

    Nothing is read or made yet.

    Args:
        store: a folder, None for the default folder, False for no store.

    Raises:
        ValueError: `store` is none of these.
    """
    if store is False:
        return None
    path = default_folder() if store is None else _resolved(store, "store")
    return _STORES.setdefault(path, Store(path))  # atomic; a lock would not survive a fork


def default_folder() -> Path:
    """Returns `$AUTOBATCH_CACHE_DIR`, else autobatch's folder among the user's caches.

    Raises:
        ValueError: the variable names no folder.
    """
    named = os.environ.get("AUTOBATCH_CACHE_DIR")
    if named:
        return _resolved(named, "AUTOBATCH_CACHE_DIR")
    return _resolved(platformdirs.user_cache_path("autobatch"), "the user's cache folder")


def _resolved(folder: object, name: str) -> Path:
    try:
        if isinstance(folder, str | os.PathLike) and (text := os.fspath(folder)):
            return Path(text).expanduser().resolve()
    except (OSError, RuntimeError, TypeError, ValueError):
        pass  # a loop of links, an unknown ~user, bytes, a NUL
    raise ValueError(
        f"{name} must be the path of a folder, or `store` False for none or None for the "
        f"default; got {folder!r}"
    )


def _names(cache: _Cache, prefix: str) -> list[str]:
    return [name for name in cache if isinstance(name, str) and name.startswith(prefix)]


def _read(cache: _Cache, name: str) -> Record | None:
    text: Any = cache.get(name)
    if text is None:
        return None
    record = from_json(text)
    if _PREFIX + record.key != name:
        raise ValueError(f"the record of {record.key!r:.80} under another key")
    return record


def _readable(cache: _Cache, name: str) -> Record | None:
    try:
        return _read(cache, name)
    except ValueError:
        return None


def _delete(cache: _Cache, names: list[str]) -> int:
    with cache.transact():
        return sum(cache.delete(name) for name in names)


def _vet_schema(database: Path) -> None:
    """Raises `Fault` if the database is another program's, before anything is written to it."""
    if not database.exists():
        return
    address = f"{database.as_uri()}?mode=rw"
    with closing(sqlite3.connect(address, uri=True, timeout=LOCK_TIMEOUT_S)) as connection:
        entries = set(connection.execute("SELECT type, name FROM sqlite_master"))
        if unknown := entries - _ENTRIES:
            raise foreign(f"{min(map(str, unknown))} in its schema")
        if ("table", "Settings") not in entries:
            return
        settings = connection.execute("SELECT key, value FROM Settings").fetchall()
    # Some may be missing: another process may be opening the store for the first time.
    for key, value in settings:
        if key not in METADATA and (key not in _SETTINGS or value != _SETTINGS[key]):
            raise foreign(f"setting {key!r:.80}")


def _diagnosis(error: Exception, folder: Path) -> Fault:
    if isinstance(error, Fault):
        return error
    if isinstance(error, diskcache.Timeout) and isinstance(error.__context__, Exception):
        error = error.__context__  # raised for every failure to begin a transaction
    detail = str(error) or type(error).__name__
    if "locked" in detail:
        return Fault("is locked by another process", "Try again, or end that process.", detail)
    if "full" in detail or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return Fault("has no room", "Free space on its disk.", detail)
    if isinstance(error, sqlite3.OperationalError | OSError):
        return Fault("cannot be used", f"Make it readable and writable. {ELSEWHERE}", detail)
    if isinstance(error, sqlite3.DatabaseError):
        remove = f"Delete it: `rm {shlex.quote(str(folder / _DATABASE))}`."
        return Fault("is damaged", remove, detail)
    clear = f"`autobatch cache clear --store {shlex.quote(str(folder))}` removes it."
    return Fault("holds, or was given, what is no record", clear, detail)
