"""The records on disk: one folder, text only, and the leases of those who are tuning.

A store never breaks a program: whatever goes wrong is a miss and one warning. The database itself
is in `_database`, whether a folder may be used in `_folder`, what a record is in `_record`, what a
lease is in `_lease`; when one is read or written is up to the callers.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from autobatch import _database
from autobatch._database import Cache, diagnosis, vet_schema
from autobatch._errors import AutobatchWarning, warn_once
from autobatch._folder import make_folder, vet_files, vet_folder
from autobatch._mounts import host_name, network_type
from autobatch._record import SCHEMA, Record, from_json, to_json

_T = TypeVar("_T")

# The schema is part of the name, so that other versions of autobatch keep their records.
_ANY_SCHEMA = "record/"
_PREFIX = f"{_ANY_SCHEMA}{SCHEMA}/"
_ANY_LEASE = "lease/"
_LEASE = f"{_ANY_LEASE}{SCHEMA}/"


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
        self._cache: Cache | None = None

    def get(self, key: str) -> Record | None:
        """Returns the record of `key`, or None."""
        return self._attempt(lambda cache: _read(cache, _PREFIX + key), None)

    def put(self, record: Record) -> None:
        """Keeps `record` in place of what its key had; makes the folder if there is none."""
        name = _PREFIX + record.key
        self._attempt(lambda cache: cache.set(name, to_json(record)), False, create=True)

    def records(self) -> list[Record]:
        """Returns every record of this schema, the newest first."""

        def read_all(cache: Cache) -> list[Record]:
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

        def put(cache: Cache, record: Record) -> str:
            known = _readable(cache, _PREFIX + record.key)
            if known is not None and not wins(record, known):
                return "kept"
            cache.set(_PREFIX + record.key, to_json(record))
            return "added" if known is None else "replaced"

        def put_all(cache: Cache) -> Merged:
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

        def sweep(cache: Cache) -> int:
            with cache.transact():
                names = set(_names(cache, _ANY_SCHEMA))
                ours = {name: _readable(cache, name) for name in _names(cache, _PREFIX)}
                gone = [name for name, record in ours.items() if record and stale(record)]
                if other_schemas:
                    leases = set(_names(cache, _ANY_LEASE)) - set(_names(cache, _LEASE))
                    _delete(cache, leases)  # these are not counted
                    gone += names - set(ours)
                return _delete(cache, gone)

        return self._attempt(sweep, 0)

    def clear(self) -> int:
        """Removes every record of this schema, readable or not, and returns how many.

        The leases go too: whoever holds one goes on without.
        """

        def sweep(cache: Cache) -> int:
            with cache.transact():
                _delete(cache, _names(cache, _LEASE))
                return _delete(cache, _names(cache, _PREFIX))

        return self._attempt(sweep, 0)

    def change_lease(
        self, key: str, changed: Callable[[str | None], str | None], *, create: bool = False
    ) -> bool:
        """Replaces the lease of `key` in one transaction; returns whether that worked.

        It warns of nothing: what is wrong with the store shows when a record is read or kept.

        Args:
            key: of the workload.
            changed: given the text of the lease, or None if there is none or it cannot be read;
                returns the text that takes its place, or None for no lease.
            create: whether a store is made if there is none.
        """
        name = _LEASE + key

        def change(cache: Cache) -> bool:
            with cache.transact():
                before = _text(cache, name)
                after = changed(before)
                if after is None:
                    cache.delete(name)
                elif after != before:
                    cache.set(name, after)
            return True

        with suppress(Exception):
            return self._use(change, False, create=create)
        return False

    def problem(self) -> str | None:
        """Returns why no record can be kept here, found by trying to write, or None."""

        def write(cache: Cache) -> None:
            name = f"probe/{os.getpid()}"
            cache.set(name, "")
            cache.delete(name)

        try:
            self._use(write, None, create=True)
        except Exception as error:
            return str(diagnosis(error, self.path))
        return None

    def _attempt(self, work: Callable[[Cache], _T], miss: _T, *, create: bool = False) -> _T:
        try:
            return self._use(work, miss, create=create)
        except Exception as error:  # whatever it is, the user's program goes on
            self._warn(error)
            return miss

    def _use(self, work: Callable[[Cache], _T], absent: _T, *, create: bool) -> _T:
        """Returns `work(cache)`; `absent` where there is no store and none is to be made."""
        database = self.path / _database.FILE
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
                vet_schema(database)
                cache = self._cache = Cache(self.path)
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
        fault = diagnosis(error, self.path)
        if (self.path, fault.what) not in _WARNED:
            _WARNED.add((self.path, fault.what))
            text = f"autobatch: the store {self.path} was passed over: it {fault}"
            warnings.warn(text, AutobatchWarning, stacklevel=2)


_WARNED: set[tuple[Path, str]] = set()
_STORES: dict[Path, Store] = {}


def open_store(store: str | os.PathLike[str] | bool | None) -> Store | None:
    """Returns the store that the option `store` means; the same object for the same folder.

    Nothing is read or made yet. On a network file system, where neither locks nor clocks can be
    relied on, every host has a folder of its own inside, which is said once.

    Args:
        store: a folder, None for the default folder, False for no store.

    Raises:
        ValueError: `store` is none of these.
    """
    if store is False:
        return None
    path = default_folder() if store is None else _resolved(store, "store")
    known = _STORES.get(path)
    # Atomic; a lock would not survive a fork.
    return known or _STORES.setdefault(path, Store(_of_this_host(path)))


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


def _of_this_host(folder: Path) -> Path:
    """Returns `folder`, or this host's own folder inside if it lies on the network."""
    kind, host = network_type(folder), host_name()
    if kind is None or folder.name == host:
        return folder
    warn_once(
        f"the store {folder} lies on a network file system ({kind}), where the locks of several "
        f"hosts cannot be relied on; this host keeps its records in {folder / host}. Carry them to "
        "others with `autobatch cache export`, or name a folder on a local disk."
    )
    return folder / host


def _names(cache: Cache, prefix: str) -> list[str]:
    return [name for name in cache if isinstance(name, str) and name.startswith(prefix)]


def _read(cache: Cache, name: str) -> Record | None:
    text: Any = cache.get(name)
    if text is None:
        return None
    record = from_json(text)
    if _PREFIX + record.key != name:
        raise ValueError(f"the record of {record.key!r:.80} under another key")
    return record


def _readable(cache: Cache, name: str) -> Record | None:
    try:
        return _read(cache, name)
    except ValueError:
        return None


def _text(cache: Cache, name: str) -> str | None:
    """Returns what stands under a name, or None if it cannot be read."""
    try:
        text: Any = cache.get(name)
    except Exception:  # planted, or damaged: the next one takes its place
        return None
    return text


def _delete(cache: Cache, names: Iterable[str]) -> int:
    with cache.transact():
        return sum(cache.delete(name) for name in names)
