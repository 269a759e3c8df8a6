"""What is remembered of earlier tunings: in this process, and in the store.

What is measured anew, and what is chosen from a record, is in `_planner`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autobatch._choose import Source, is_measured
from autobatch._digest import differing
from autobatch._nearest import family, nearest
from autobatch._record import Record

if TYPE_CHECKING:
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
        if record is not None:
            _KNOWN[folder, key] = (record, "record")
        return record, "record"

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
            is_stored: whether the store is read too, and not only what this process knows.
        """
        folder, store = self._opened()
        known = [record for (where, _), (record, _) in _KNOWN.items() if where == folder]
        if is_stored and store is not None:
            known += store.records()
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
        records = [] if store is None else store.records()
        where = "no store" if store is None else f"the store {store.path}"
        message = f"tune='require', and {where} has no record of `{name}`"
        found = min((differing(parts, each.parts) for each in records), key=len, default=None)
        if found is not None:
            message += f"; the nearest one differs in {', '.join(found)}"
        return f"{message}. Call it once with tune='first-call', or call its `.tune(...)`."

    def _opened(self) -> tuple[str | None, Store | None]:
        from autobatch._store import open_store

        store = open_store(self.store)
        return (None if store is None else str(store.path)), store
