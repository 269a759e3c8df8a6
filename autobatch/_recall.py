"""What is remembered of earlier tunings: in this process, in the store, and in shipped files.

What is measured anew, and what is chosen from a record, is in `_planner`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autobatch._choose import Source, is_measured
from autobatch._digest import differing, digest
from autobatch._nearest import family, nearest
from autobatch._record import Record
from autobatch._shipped import shipped

if TYPE_CHECKING:
    from autobatch._lease import Lease
    from autobatch._store import Store

# Records of this process, by store folder and key, with how this process came to each.
_KNOWN: dict[tuple[str | None, str], tuple[Record, Source]] = {}


@dataclass(frozen=True, kw_only=True)
class Recall:
    """The records that one mapped function finds and keeps.

    Attributes:
        store: the user's `store=`.
    """

    store: str | os.PathLike[str] | bool | None

    def find(self, key: str) -> tuple[Record | None, Source]:
        """Returns the record of a key and how this process came to it, or None."""
        folder, store = self._opened()
        if (folder, key) in _KNOWN:
            return _KNOWN[folder, key]
        record = None if store is None else store.get(key)
        if record is None:
            record = shipped().get(key)
        if record is not None:
            _KNOWN[folder, key] = (record, "record")
        return record, "record"

    def news(self, key: str) -> Callable[[], bool]:
        """Returns what tells whether a key has another record than when it was last asked.

        It looks into the store each time. Before the first time there is none.
        """
        seen: Record | None = None

        def is_news() -> bool:
            nonlocal seen
            before, seen = seen, self._again(key)
            return seen is not before

        return is_news

    def resumable(self, key: str) -> Record | None:
        """Returns the record that a tuning on real arrays goes on from, or None."""
        record, _ = self.find(key)
        return None if record is None or record.data == "synthetic" else record

    def lease(self, key: str) -> Lease:
        """Returns the lease of a workload, to be taken by who tunes it."""
        from autobatch._lease import Lease

        return Lease(self._opened()[1], key)

    def alone(self, device: Mapping[str, Any]) -> Callable[[float], AbstractContextManager[Any]]:
        """Returns what keeps the runs of other processes off a device; see `Job.alone`.

        Args:
            device: the parts of the key that say which one.
        """
        _, store = self._opened()
        if store is None:
            return nullcontext
        from autobatch._device_lock import device_lock

        return device_lock(store.path / f"device-{digest(device)[:16]}.lock").held

    def keep(self, record: Record, source: Source) -> None:
        """Remembers a record, in the store too if anything was measured."""
        _, store = self._opened()
        self.replace(record, source)
        if store is not None and is_measured(record):
            store.put(record)

    def replace(self, record: Record, source: Source) -> None:
        """Remembers a record in this process alone."""
        folder, _ = self._opened()
        _KNOWN[folder, record.key] = (record, source)

    def nearest(
        self, parts: Mapping[str, Any], batch_size: int, *, is_stored: bool
    ) -> Record | None:
        """Returns the record of the same program whose batch size is nearest, or None.

        Args:
            parts: the key's parts of the call.
            batch_size: rows of the call.
            is_stored: whether the store and shipped files are read too, and not only what this
                process knows.
        """
        folder, store = self._opened()
        known = [record for (where, _), (record, _) in _KNOWN.items() if where == folder]
        if is_stored:
            known += shipped().values()
            known += [] if store is None else store.records()
        return nearest(known, parts, batch_size)

    def sizes_tuned(self, parts: Mapping[str, Any]) -> int:
        """Returns how many batch sizes of a workload this process has tuned."""
        folder, _ = self._opened()
        own = family(parts)
        return sum(
            where == folder and source == "tuned" and family(record.parts) == own
            for (where, _), (record, source) in _KNOWN.items()
        )

    def miss(self, name: str, parts: Mapping[str, Any]) -> str:
        """Returns what to say where a record is required and there is none.

        Args:
            name: what the function is called.
            parts: the key's parts of the call.
        """
        _, store = self._opened()
        records = [*shipped().values(), *([] if store is None else store.records())]
        where = "no store" if store is None else f"the store {store.path}"
        message = f"tune='require', and {where} has no record of `{name}`"
        found = min((differing(parts, each.parts) for each in records), key=len, default=None)
        if found is not None:
            message += f"; the nearest one differs in {', '.join(found)}"
        if parts["derivative"] == "none":
            ways = "Call it once with tune='first-call', call its `.tune(...)`, or run "
            return f"{message}. {ways}`autobatch tune MODULE:FUN`."
        ways = "Call `.for_gradient.tune(...)` of the function, or run "
        return f"{message}. {ways}`autobatch tune MODULE:FUN --for-gradient`."

    def _again(self, key: str) -> Record | None:
        """Returns the record of a key after another look into the store, or None.

        It is the same object as before unless it comes of another tuning: what this process has
        learnt of a record since stays.
        """
        folder, store = self._opened()
        found = None if store is None else store.get(key)
        known, _ = _KNOWN.get((folder, key), (None, "record"))
        if found is not None and (known is None or _tuning(found) != _tuning(known)):
            _KNOWN[folder, key] = (found, "record")
            return found
        return known

    def _opened(self) -> tuple[str | None, Store | None]:
        from autobatch._store import open_store

        store = open_store(self.store)
        return (None if store is None else str(store.path)), store


def _tuning(record: Record) -> tuple[str, float]:
    """Returns what tells one tuning of a workload from another."""
    return record.created, record.tuned_in_s
