"""The database behind the store: diskcache, in which nothing but text is kept.

Here are its fixed settings, the bounds on what it waits for, and what is wrong with it in words.
What is kept in it is in `_store`.
"""

from __future__ import annotations

import errno
import os
import shlex
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import diskcache
from diskcache.core import METADATA, MODE_RAW

from autobatch._folder import ELSEWHERE, Fault, foreign

LOCK_TIMEOUT_S = 1
"""Most seconds that a statement waits for a lock; an operation waits at most twice."""

FILE = diskcache.core.DBNAME
"""What the database is called in its folder."""

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


class TextDisk(diskcache.Disk):
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


class Cache(diskcache.Cache):
    """A diskcache whose settings are fixed and whose waits are bounded."""

    def __init__(self, folder: Path) -> None:
        if os.path.expandvars(folder) != str(folder):  # diskcache would use another folder
            raise Fault("has a variable in its path", ELSEWHERE)
        try:
            super().__init__(str(folder), LOCK_TIMEOUT_S, TextDisk, **_SETTINGS)
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


def vet_schema(database: Path) -> None:
    """Checks that the database is not another program's, before anything is written to it.

    Raises:
        Fault: it is.
        OSError, sqlite3.Error: it cannot be looked at.
    """
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


def diagnosis(error: Exception, folder: Path) -> Fault:
    """Returns what is wrong with the store in `folder`, where something in it raised `error`."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, diskcache.Timeout) and isinstance(error.__context__, Exception):
        error = error.__context__  # raised for every failure to begin a transaction
    detail = str(error) or type(error).__name__
    said = error.strerror or "" if isinstance(error, OSError) else detail  # without the path
    if "locked" in said:
        return Fault("is locked by another process", "Try again, or end that process.", detail)
    if "full" in said or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return Fault("has no room", "Free space on its disk.", detail)
    if isinstance(error, sqlite3.OperationalError | OSError):
        return Fault("cannot be used", f"Make it readable and writable. {ELSEWHERE}", detail)
    if isinstance(error, sqlite3.DatabaseError):
        remove = f"Delete it: `rm {shlex.quote(str(folder / FILE))}`."
        return Fault("is damaged", remove, detail)
    clear = f"`autobatch cache clear --store {shlex.quote(str(folder))}` removes it."
    return Fault("holds, or was given, what is no record", clear, detail)
